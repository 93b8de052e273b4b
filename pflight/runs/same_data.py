"""A checkpoint's record of the clients' data, so that a run is resumed with the same data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pflight.data.data_module import FederatedDataModule
from pflight.data.loaders import Split
from pflight.errors import ConfigurationError

_WORDS: dict[Split, str] = {"train": "training", "val": "validation", "test": "test"}
_NAMED = 5  # clients


def record_of(data: FederatedDataModule) -> dict[str, Any]:
    """Return a record that identifies these data, with about ten bytes for each client.

    Data that drift are those of round 0 afterwards.

    Raises:
        ConfigurationError: If the data's fingerprint is not a whole number for each client.
    """
    data.at_round(0)
    fingerprint = data.fingerprint().cpu()
    if fingerprint.shape != (data.num_clients,) or fingerprint.is_floating_point():
        raise ConfigurationError(
            f"{type(data).__name__}.fingerprint() must return a whole number for each of the "
            f"{data.num_clients} clients, got {fingerprint.dtype} of shape "
            f"{list(fingerprint.shape)}"
        )
    return {
        "num_samples": {split: _small(data.num_samples(split)) for split in _WORDS},
        "fingerprint": fingerprint,
        "new_clients": _small(data.new_clients),
    }


def difference(
    saved: Mapping[str, Any], here: Mapping[str, Any], numbered: Callable[[int], str] = str
) -> str | None:
    """Return how a checkpoint's data and this run's data differ; ``None`` if they don't.

    Args:
        saved: The :func:`record_of` the checkpoint's data.
        here: The :func:`record_of` this run's data, with as many clients.
        numbered: Returns a client's number for messages, with its name if it has one.
    """
    counts = [
        torch.stack([record["num_samples"][split].long() for split in _WORDS])
        for record in (saved, here)
    ]
    if len(others := (counts[0] != counts[1]).any(dim=0).nonzero().flatten()):
        client = int(others[0])
        split = int((counts[0] != counts[1])[:, client].nonzero()[0])
        before, now = (int(table[split, client]) for table in counts)
        more = f"; {len(others) - 1:,} other clients differ as well" if len(others) > 1 else ""
        word = list(_WORDS.values())[split]
        whose = f"client {numbered(client)} has {now} {word} samples"
        return f"{whose}, {before} in the checkpoint{more}"
    if len(others := (saved["fingerprint"] != here["fingerprint"]).nonzero().flatten()):
        return f"the labels or the selection of samples differ for {_named(others, numbered)}"
    if len(others := torch.from_numpy(np.setxor1d(saved["new_clients"], here["new_clients"]))):
        return f"only here or only in the checkpoint {_named(others, numbered)} never train"
    return None


def _small(numbers: Tensor) -> Tensor:
    """Return non-negative integers in the smallest possible type."""
    most = int(numbers.max()) if len(numbers) else 0
    kinds = (torch.uint8, torch.int16, torch.int32)
    kind = next((kind for kind in kinds if most <= torch.iinfo(kind).max), torch.long)
    return numbers.to("cpu", kind)


def _named(clients: Tensor, numbered: Callable[[int], str]) -> str:
    """Name the first of some clients."""
    names = ", ".join(map(numbered, clients[:_NAMED].tolist()))
    more = f" and {len(clients) - _NAMED:,} more" if len(clients) > _NAMED else ""
    return f"client{'s' if len(clients) > 1 else ''} {names}{more}"

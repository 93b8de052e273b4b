"""Frozen weights, which checkpoints name by their digests."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from .errors import ConfigurationError
from .state import StateLayout


def digests_of(layout: StateLayout) -> dict[str, str]:
    """Return the BLAKE2b-128 digest of each frozen entry, by name."""
    return {name: _digest(name, layout.template[name]) for name in layout.frozen}


def _digest(name: str, tensor: Tensor) -> str:
    form = f"{name} {tensor.dtype} {[*tensor.shape]}".encode()
    numbers = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    digest = hashlib.blake2b(form, digest_size=16)
    digest.update(numbers.numpy().tobytes())
    return digest.hexdigest()


def check_frozen(record: Mapping[str, Any], layout: StateLayout, in_file: Collection[str]) -> None:
    """Raise unless a module has the frozen weights that a checkpoint was trained on.

    Args:
        record: The checkpoint's record of its federation.
        layout: Of the module.
        in_file: Names in the checkpoint's ``state_dict``, which may hold the frozen weights.

    Raises:
        ConfigurationError: Naming an entry that differs.
    """
    saved = record.get("frozen", {})
    if not saved or all(f"server.0.{name}" in in_file for name in saved):
        return
    here = digests_of(layout)
    if others := [name for name in saved if saved[name] != here.get(name)]:
        more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
        raise ConfigurationError(
            f"this run was trained on other frozen weights: {others[0]} differs{more}; checkpoints "
            "don't hold them, unless save_frozen=True"
        )

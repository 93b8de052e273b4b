"""Checks that all ranks of a run train the same federation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from pflight.clients import Clients
from pflight.data.fingerprint import checksum_of
from pflight.errors import ConfigurationError
from pflight.options import described
from pflight.server_callback import ServerCallback

from .checks import settings_of
from .distributed import gather, is_distributed
from .same_data import record_of

_SAMPLES, _WEIGHTS = "the clients' samples", "the initial weights"


def check_ranks(clients: Clients, callback: ServerCallback, options: Mapping[str, Any]) -> None:
    """Raise unless all ranks have the same options, data and weights.

    Args:
        clients: The clients.
        callback: The server callback.
        options: The federation's options.

    Raises:
        ConfigurationError: On all ranks, naming the difference.
    """
    if not is_distributed():
        return
    ranks = gather(_known(clients, callback, options))
    names = {name for rank in ranks for name in rank}
    differing = sorted(name for name in names if len({rank.get(name) for rank in ranks}) > 1)
    if not differing:
        return
    values = (f"{rank.get(differing[0])} on rank {i}" for i, rank in enumerate(ranks))
    hint = ": call seed_everything() before the client module is made"
    raise ConfigurationError(
        f"the ranks differ in {', '.join(differing)} ({', '.join(values)}), and all have to "
        f"train one federation{hint if _WEIGHTS in differing else ''}"
    )


def _known(
    clients: Clients, callback: ServerCallback, options: Mapping[str, Any]
) -> dict[str, str]:
    """Return the values that must be the same on all ranks, by name."""
    data, template = clients.attached_data, clients.layout.template
    of_client = settings_of(clients.module).items()
    of_data = ((f"data.{name}", value) for name, value in vars(data).items())
    parts: dict[str, Any] = {
        **{f"model.{name}": value for name, value in options.items()},
        **{name: value for name, value in of_client if not isinstance(value, str)},
        **{name: value for name, value in of_data if isinstance(value, int | float)},
        "algorithm": type(callback).__name__,
        **{f"algorithm.{name}": value for name, value in callback._given.items()},
        "network": sorted(clients.layout.describe().items()),
        _SAMPLES: _checksum(tree_leaves(record_of(data))),
        _WEIGHTS: _checksum(template.values()),
    }
    return {name: described(part) for name, part in parts.items()}


def _checksum(tensors: Iterable[Tensor]) -> int:
    found = 0
    for tensor in tensors:
        found = checksum_of(tensor.detach().flatten(), found)
    return found

"""Passes over the samples of many clients at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.utils._pytree import tree_map

from pflight.engines.alone.visits import evaluation_visits, visits_to
from pflight.engines.client_setup import ClientSetup
from pflight.local_client import Pass

from .autocast import stacked_context
from .chunk import scalars_of
from .stack import Stack

_TOLERANCE = 1e-2  # relative to the largest value; stacked arithmetic rounds differently
_TRACE = 1e-6  # rounding error of numbers that cancel


class StackedPasses:
    """Runs a pass for clients with equally many samples, so that no batch is filled up.

    Args:
        setup: The client module, its client method, and its data.
        stacked: The client module for many clients.
    """

    def __init__(self, setup: ClientSetup, stacked: Stack) -> None:
        self.setup = setup
        self.stacked = stacked

    @torch.no_grad()
    def found(self, look: Pass, clients: Tensor, states: TensorDict) -> list[dict[str, Tensor]]:
        """Return the pass's results for the clients ``[C]``. The pass's errors are not caught.

        Args:
            look: The pass.
            clients: Ids ``[C]`` of clients with equally many samples.
            states: The clients' models ``[C]``.
        """
        setup, stacked = self.setup, self.stacked
        ids = clients.tolist()
        visits = visits_to(
            clients,
            setup,
            look.split,
            lambda client: evaluation_visits(setup, client, look.split, look.batch_size),
        )
        of_clients: list[list[Any]] = []
        for client in ids:
            ((visit, own),) = visits[client]
            of_clients.append(list(own))
        batches = [
            tree_map(lambda *x: torch.stack(x), *parts) for parts in zip(*of_clients, strict=True)
        ]
        stacked.take_frozen(states)
        frozen, buffers = {*setup.layout.frozen}, {*setup.layout.buffers}
        state = {n: states[n].to(setup.device) for n in setup.layout.names if n not in frozen}
        # A module may change its buffers in place, but the states belong to the caller.
        state |= {name: state[name].clone() for name in state.keys() & buffers}
        state |= {n: t.to(setup.device, setup.dtype) for n, t in scalars_of(setup, clients).items()}
        with stacked_context(setup):
            found = stacked.found(look, state, [*map(len, visit.parts)], batches)
        rows = [
            {name: value[row].clone() for name, value in found.items()} for row in range(len(ids))
        ]
        for given in rows:
            look.check(given)
        return rows


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return whether two results of a pass are equal up to rounding."""
    return one.keys() == other.keys() and all(_close(one[name], other[name]) for name in one)


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    largest = float(other.abs().nan_to_num(0, 0, 0).max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=0, atol=_TOLERANCE * largest + _TRACE, equal_nan=True)

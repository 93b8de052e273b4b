"""Evaluations and passes of many models at once, each on its own client's samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.utils._pytree import tree_map

from pflight.data.loaders import Visit
from pflight.engines.alone.engine import Samples
from pflight.engines.alone.visits import evaluation_visits, visits_to
from pflight.engines.client_setup import ClientSetup
from pflight.local_client import Pass

from .stack import Columns, Stack, stacked_context
from .steps import Workspace
from .training import scalars_of

_FILLED = 8  # so many samples may always fill up a client's batch
_TOLERANCE = 1e-2  # relative to the largest value; stacked arithmetic rounds differently
_TRACE = 1e-6  # rounding error of numbers that cancel


class StackedEvaluation:
    """Evaluates clients in chunks of about equal numbers of samples, and runs passes for them.

    Args:
        setup: The client module, its client method, and its data.
        stacked: The client module for many clients.
        chunk: Largest number of clients at once.
        workspace: The memory of the samples.
    """

    def __init__(
        self, setup: ClientSetup, stacked: Stack, chunk: int, workspace: Workspace
    ) -> None:
        self.setup = setup
        self.stacked = stacked
        self.chunk = chunk
        self.workspace = workspace

    def outputs(self, states: TensorDict, samples: Samples) -> dict[int, Tensor] | None:
        """Return the outputs of clients with different models, by row.

        Return ``None`` if one is NaN. A model's error is not caught.

        Args:
            states: The clients' models ``[C]``.
            samples: The clients' inputs and targets, by row.
        """
        task, rows = self.setup.task, list(samples)
        assert task is not None
        self.stacked.take_frozen(states)
        columns = {name: states[name] for name in self.stacked.live}
        if len(rows) < len(states):
            columns = {name: column[rows] for name, column in columns.items()}
        stacked = self._outputs(columns, [x for x, _ in samples.values()])
        outputs = torch.cat(stacked)
        task.check_outputs(outputs, torch.cat([y for _, y in samples.values()]))
        if outputs.isnan().any():  # perhaps also one by one
            return None
        return dict(zip(samples, stacked, strict=True))

    def _outputs(self, columns: Columns, inputs: list[Tensor]) -> list[Tensor]:
        counts = [len(x) for x in inputs]
        order = sorted(range(len(counts)), key=lambda row: counts[row], reverse=True)
        moved = order != sorted(order)
        outputs: dict[int, Tensor] = {}
        for first, last in self._at_once([counts[row] for row in order]):
            rows = order[first:last]
            taken = rows if moved else slice(first, last)
            state = {name: column[taken] for name, column in columns.items()}
            shape = len(rows), counts[rows[0]], *inputs[0].shape[1:]
            x = self.workspace.tensor("x", shape, inputs[0].dtype)
            for padded, row in zip(x, rows, strict=True):
                padded[: counts[row]] = inputs[row]
                padded[counts[row] :] = 0
            with stacked_context(self.setup):
                parts = x.split(self.setup.data.eval_batch_size or shape[1] or 1, dim=1)
                given = torch.cat([self.stacked.outputs(state, part) for part in parts], dim=1)
            outputs |= {row: given[i, : counts[row]] for i, row in enumerate(rows)}
        return [outputs[row] for row in range(len(order))]

    def _at_once(self, counts: list[int]) -> Iterator[tuple[int, int]]:
        """Divide descending numbers of samples into chunks. Filling up must not double a chunk."""
        first = 0
        for row in range(1, len(counts) + 1):
            full = row - first == self.chunk
            if row == len(counts) or full or counts[first] > 2 * counts[row] + _FILLED:
                yield first, row
                first = row

    @torch.no_grad()
    def found(self, look: Pass, clients: Tensor, states: TensorDict) -> list[dict[str, Tensor]]:
        """Return a pass's results for the clients ``[C]``. The pass's errors are not caught.

        With equally many samples, no batch has to be filled up.

        Args:
            look: The pass.
            clients: Ids ``[C]`` of clients with equally many samples.
            states: The clients' models ``[C]``.
        """
        setup, stacked = self.setup, self.stacked

        def plan(client: int) -> list[Visit]:
            return evaluation_visits(setup, client, look.split, look.batch_size)

        visits = visits_to(clients, setup, look.split, plan)
        of_clients: list[list[Any]] = []
        for client in clients.tolist():
            ((visit, own),) = visits(client)
            of_clients.append(list(own))
        batches = [
            tree_map(lambda *x: torch.stack(x), *parts) for parts in zip(*of_clients, strict=True)
        ]
        stacked.take_frozen(states)
        state = {name: states[name].to(setup.device) for name in setup.layout.moving}
        # A module may change its buffers in place, but the states belong to the caller.
        state |= {name: state[name].clone() for name in state.keys() & {*setup.layout.buffers}}
        state |= {n: t.to(setup.device, setup.dtype) for n, t in scalars_of(setup, clients).items()}
        with stacked_context(setup):
            found = stacked.found(look, state, [*map(len, visit.parts)], batches)
        rows = [
            {name: value[row].clone() for name, value in found.items()}
            for row in range(len(clients))
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

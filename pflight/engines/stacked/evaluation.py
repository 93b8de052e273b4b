"""The evaluation of many models at once, each on its own client's samples."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tensordict import TensorDict
from torch import Tensor

from pflight.engines.client_setup import ClientSetup
from pflight.engines.outputs import Samples

from .autocast import stacked_context
from .stack import Columns, Stack
from .workspace import Workspace

_FILLED = 8  # so many samples may always fill up a client's batch


class StackedEvaluation:
    """Evaluates clients in chunks of about equal numbers of samples.

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

"""Compares stacked clients with the same clients alone, in some rounds of the training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from pflight.errors import ConfigurationError
from pflight.method import Phase
from pflight.randomness import isolated

from .exact import takes_tf32
from .probe import Probe
from .reasons import reason_of
from .reference import alike
from .stack import Columns, Mode
from .steps import Group

_ODD, _ODD_IN_HALF = 5e-2, 0.3  # tolerated difference, relative to the largest gradient
_VANISHED = 1e-3  # smaller gradients are rounding, relative to the largest one at the start


_Before = tuple[dict[str, Tensor], list[Tensor]]
"""A client's state with its inputs, and its batch."""


class Witness(NamedTuple):
    """One client of a stack in one step: its inputs and its results."""

    mode: Mode
    phase: Phase | None
    state: dict[str, Tensor]
    """The client's state with its inputs."""
    leaves: list[Tensor]
    """The tensors of its batch."""
    gradients: dict[str, Tensor]
    loss: Tensor


class Audit:
    """Ends a run if clients get other results in a stack than alone.

    The audit is due in the 1st, 2nd, 4th, 8th round and so on, until a client has been compared.

    Args:
        probe: The probe that has tried the client.

    Attributes:
        due: Whether the audit is due.
    """

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.due = False
        self._round = -1  # the last round
        self._doubted = False  # whether the last client got other results alone

    def begin(self, round_index: int) -> None:
        """Make the audit due, if the round is one of its rounds."""
        if round_index > self._round:
            self._round = round_index
            self.due |= (round_index + 1).bit_count() == 1

    def select(self, group: Group, state: Mapping[str, Tensor]) -> dict[int, _Before]:
        """Return two clients of a group by row, before their gradients are computed.

        Args:
            group: The group with its batches.
            state: State and inputs of a chunk ``[C, ...]``.
        """
        found = {}
        for row in {0, len(group.leaves[0]) - 1}:
            count = group.size if isinstance(group.size, int) else int(group.size[row])
            own = {name: t[group.rows.start + row].clone() for name, t in state.items()}
            found[row] = own, [leaf[row, :count] for leaf in group.leaves]
        return found

    def check(self, selected: Mapping[int, _Before], gradients: Columns, losses: Tensor) -> None:
        """Raise if two clients in succession get other results alone than in a stack.

        A single client may be next to a kink, and rounding chooses its side. If a stack has only
        one client and it differs, the audit stays due.

        Args:
            selected: Clients of a group.
            gradients: The group's gradients ``[rows, ...]``.
            losses: The group's losses ``[rows]``.

        Raises:
            ConfigurationError: If both clients get other results.
        """
        stacked = self.probe.stacked
        for row, (state, leaves) in selected.items():
            got = {name: gradient[row] for name, gradient in gradients.items()}
            found = Witness(stacked.mode, stacked.training_phase, state, leaves, got, losses[row])
            why = "gets other results alone"
            try:
                if not self.contradicts(found):
                    self.due = self._doubted = False
                    return
            except Exception as error:
                why = f"fails alone: {reason_of(error)}"
            if self._doubted:
                name = type(self.probe.setup.client).__name__
                raise ConfigurationError(
                    f"round {self._round}: a {name} that trained together with others {why}, as "
                    "with numbers that it keeps outside of its tensors and that change from call "
                    "to call. Results so far are wrong: train with engine='sequential', or say "
                    f"vectorizable = False in {name}"
                )
            self._doubted = True

    def contradicts(self, found: Witness) -> bool:
        """Return whether a client gets other results alone than in a stack.

        Rounding errors of vanishing gradients are ignored: the tolerance is relative to the largest
        gradient of now and of the start.
        """
        setup = self.probe.setup
        with isolated(setup.device), torch.enable_grad():
            alone, loss = self.probe.reference.gradients(
                found.mode, found.state, found.leaves, found.phase, steps=True
            )
        known = {n: g for n, g in alone.items() if g is not None and n in found.gradients}
        numbers = [*known.values(), loss, found.loss, *(found.gradients[name] for name in known)]
        if not all(bool(number.isfinite().all()) for number in numbers):
            return False  # the client will fail by itself
        mixed = isinstance(setup.precision, MixedPrecision)
        tf32 = setup.dtype == torch.float32 and takes_tf32(setup.device)
        precise = setup.dtype.itemsize >= 4 and not mixed and not tf32
        stack = {name: found.gradients[name].unsqueeze(0) for name in known}
        tolerance = _ODD if precise else _ODD_IN_HALF
        return not alike(
            stack,
            found.loss[None],
            [(known, loss)],
            tolerance,
            _VANISHED * self.probe.largest_gradient,
        )

"""Compares clients of a stack with one alone while they train, now and then."""

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

_ODD, _ODD_IN_HALF = 5e-2, 0.3  # of the largest gradient, of a run that goes on
_VANISHED = 1e-3  # of the largest gradient at first, from which on gradients are rounding


_Before = tuple[dict[str, Tensor], list[Tensor]]
"""A client's state, with all that it is told, and its batch."""


class Witness(NamedTuple):
    """One client of a stack in one step: what it had, and what it got."""

    mode: Mode
    phase: Phase | None
    state: dict[str, Tensor]
    """With all that it was told."""
    leaves: list[Tensor]
    """Of its batch."""
    gradients: dict[str, Tensor]
    loss: Tensor


class Audit:
    """Ends a run in which stacked clients get something else than they get alone.

    It is due in rounds of powers of two, from the first on, until a client has been compared.

    Args:
        probe: Which has tried the client.

    Attributes:
        due: Whether it is.
    """

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.due = False
        self._round = -1  # the last one
        self._doubted = False  # whether the last client got something else alone

    def begin(self, round_index: int) -> None:
        """Make it due, if a round is one in which it is."""
        if round_index > self._round:
            self._round = round_index
            self.due |= (round_index + 1).bit_count() == 1

    def select(self, group: Group, state: Mapping[str, Tensor]) -> dict[int, _Before]:
        """Return two clients of a group, by row, as they are before their gradients are taken.

        Args:
            group: With its batches.
            state: Of a chunk ``[C, ...]``, with all that it is told.
        """
        found = {}
        for row in {0, len(group.leaves[0]) - 1}:
            count = group.size if isinstance(group.size, int) else int(group.size[row])
            own = {name: t[group.rows.start + row].clone() for name, t in state.items()}
            found[row] = own, [leaf[row, :count] for leaf in group.leaves]
        return found

    def check(self, selected: Mapping[int, _Before], gradients: Columns, losses: Tensor) -> None:
        """Raise if two clients in a row get something else alone than they got in a stack.

        A single one may be next to a kink, of which rounding chooses the side. After a stack of one
        that did, the audit stays due.

        Args:
            selected: Clients of a group.
            gradients: What the group got ``[rows, ...]``.
            losses: And its losses ``[rows]``.

        Raises:
            ConfigurationError: If they do.
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
        """Return whether a client alone gets something else than it got in a stack.

        What rounding leaves of a gradient that vanishes is not looked at: beside the largest one of
        now, that of the beginning counts.
        """
        setup = self.probe.setup
        with isolated(setup.device), torch.enable_grad():
            alone, loss = self.probe.reference.gradients(
                found.mode, found.state, found.leaves, found.phase, steps=True
            )
        known = {n: g for n, g in alone.items() if g is not None and n in found.gradients}
        numbers = [*known.values(), loss, found.loss, *(found.gradients[name] for name in known)]
        if not all(bool(number.isfinite().all()) for number in numbers):
            return False  # it will fail by itself
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

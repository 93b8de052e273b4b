"""Phases: local epochs with some parameters at rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L

from pflight.method import Phase
from pflight.states.state import StateLayout


@contextmanager
def resting(module: L.LightningModule, layout: StateLayout, phase: Phase | None) -> Iterator[None]:
    """Freeze the parameters that rest in a phase. Layers with only these are in evaluation mode."""
    if phase is None:
        yield
        return
    awake, parameters = {*phase.names}, dict(module.named_parameters())
    rest = [p for n, p in parameters.items() if n not in awake and p.requires_grad]
    layers = [
        module.get_submodule(layer)
        for layer, names in layout.layers.items()
        if awake.isdisjoint(names) and not any(name in layout.own for name in names)
    ]
    parts = [part for part in layers if part.training]
    for parameter in rest:
        parameter.requires_grad = False
    for part in parts:
        part.training = False
    try:
        yield
    finally:
        for parameter in rest:
            parameter.requires_grad = True
        for part in parts:
            part.training = True


@contextmanager
def paced(
    groups: Sequence[dict[str, Any]], phase: Phase | None, pace: Callable[[Any], None]
) -> Iterator[None]:
    """Set the learning rate of an optimizer's groups to the phase's, if it has one.

    Args:
        groups: The groups of the optimizer.
        phase: The phase.
        pace: Multiplies the learning rates of groups by the round's decay.
    """
    if phase is None or phase.lr is None:
        yield
        return
    own = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = phase.lr
    pace(groups)
    try:
        yield
    finally:
        for group, lr in zip(groups, own, strict=True):
            group["lr"] = lr


def phase_of(phases: Sequence[Phase] | None, epoch: int) -> Phase | None:
    """Return the phase of an epoch."""
    begun = [phase for phase in phases or () if phase.first <= epoch]
    return begun[-1] if begun else None

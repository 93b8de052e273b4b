"""What all engines use: threads, checks of results, and the phases of local training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from pflight.history import Logs
from pflight.local_client import Pass
from pflight.method import Phase
from pflight.states.state import StateLayout, entries, rows

_LARGEST = 1e19  # largest sum of an entry; its square still fits into 32 bits
ONE_THREAD = 20e6  # from so many operations of a batch's forward pass, threads pay


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute on ``count`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def means_of(noted: Mapping[str, Tensor]) -> Logs:
    """Return notes as logged values, without those of which no step counts.

    Args:
        noted: By tag, the sum over steps and the number of steps that count ``[2]``.
    """
    found = {name: value.tolist() for name, value in noted.items()}
    return {name: (total, int(count)) for name, (total, count) in found.items() if count}


def are_one(columns: Iterable[Tensor]) -> bool:
    """Return whether all rows of a stack are views of one state."""
    return all(len(column) == 1 or column.stride(0) == 0 for column in columns)


def finite_rows(*stacks: TensorDict) -> list[bool]:
    """Return for each row of some stacks whether its floating values are finite and can be summed.

    A single value of 3e38 would make the server's sums infinite.
    """
    leaves = (leaf for stack in stacks for _, leaf in entries(stack))
    sums = [_sums(leaf) for leaf in leaves if leaf.is_floating_point()]
    return torch.stack([leaf.abs() < _LARGEST for leaf in sums]).all(dim=0).tolist()


def is_finite(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether :func:`finite_rows` would accept these tensors as a row."""
    floats = (tensor for tensor in tensors.values() if tensor.is_floating_point())
    return all(bool((_sums(tensor.unsqueeze(0)).abs() < _LARGEST).all()) for tensor in floats)


def as_found(look: Pass, found: object) -> dict[str, Tensor]:
    """Return the result of a pass, if it is a mapping of tensors."""
    if isinstance(found, Mapping):
        odd = {name: value for name, value in found.items() if not isinstance(value, Tensor)}
        if not odd:
            return dict(found)
        found = next(iter(odd.values()))
    kind = type(found).__name__
    raise TypeError(f"{type(look).__name__} must return tensors by name, got {kind}")


def what_is_odd(state: TensorDict) -> str:
    """Return why :func:`finite_rows` refuses a state ``[1]``, with the entry's name; else empty."""
    for name, leaf in entries(state):
        if not leaf.is_floating_point():
            continue
        if not leaf.isfinite().all():
            return f"its result is NaN or infinite ({name})"
        if not (_sums(leaf).abs() < _LARGEST).all():
            return f"its result is too large to be added up ({name})"
    return ""


def _sums(leaf: Tensor) -> Tensor:
    precise = torch.promote_types(leaf.dtype, torch.float32)
    return rows(leaf).sum(dim=1, dtype=precise)  # faster than a norm


@contextmanager
def in_evaluation(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Put modules into evaluation mode, each without its submodules."""
    training = [part for part in parts if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


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
    for parameter in rest:
        parameter.requires_grad = False
    try:
        with in_evaluation(layers):
            yield
    finally:
        for parameter in rest:
            parameter.requires_grad = True


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

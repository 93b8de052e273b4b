"""Finds out whether a client can stand for many clients at once, by trying it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from pflight.models import Batch
from pflight.randomness import isolated
from pflight.state import StateLayout, state_tensors

from .joint import JointClient, Phase, Stack
from .stacked import misfit

_TOLERANCE = 1e-2  # of the largest gradient; stacked arithmetic rounds otherwise


def obstacle_to(
    joint: JointClient, layout: StateLayout, batch: Batch, anchored: bool, remembers: bool
) -> str | None:
    """Say what keeps a client from standing for many, or return ``None`` if nothing does.

    Two clients with unequal weights are stacked and asked for their gradients, what they change
    after training, what they keep, and their predictions. Gradients must be those of either client
    alone. Global generators and the module's attributes must be left alone, since one call stands
    for all clients.

    Args:
        joint: The client module.
        layout: Its state layout.
        batch: Some samples.
        anchored: Whether there is an anchor.
        remembers: Whether there is a memory.
    """
    joint.prepare(anchored, remembers)
    client = joint.client
    try:
        optimizer = joint.optimizer()
    except Exception as error:
        return f"its configure_optimizers() needs a client of its own: {_first_line(error)}"
    if reason := misfit(optimizer):
        return reason
    with isolated(client.device), torch.enable_grad():
        drawn, attributes = _generators(), _attributes(client)
        try:
            agrees = _agrees(joint, _two_states(joint, layout), layout, batch)
        except Exception as error:
            reason = _first_line(error)
            if "randomness" in reason:
                return "it draws random numbers while it trains, as dropout does"
            return f"many at once fail: {reason}"
        if drawn != _generators():
            return "it draws random numbers while it trains"
        if not _same(attributes, _attributes(client)):
            return "it sets attributes of itself while it trains"
    return None if agrees else "its gradients depend on who is trained beside it"


class Dependence(NamedTuple):
    """What the gradients of a client depend on."""

    untouched: frozenset[str]
    """Parameters without a gradient, which no optimizer may step."""
    unread: frozenset[str]
    """Tensors that are told to a client, and which its loss does not look at."""


def dependence_of(
    joint: JointClient, layout: StateLayout, batch: Batch, anchored: bool, remembers: bool
) -> Dependence:
    """Find out what the gradients of a client depend on; arguments as of :func:`obstacle_to`."""
    joint.prepare(anchored, remembers)
    state = {name: value[1].clone() for name, value in _two_states(joint, layout).items()}
    with torch.enable_grad(), _Reading() as reading:
        gradients = _gradients_alone(joint, state, layout, batch)
    told = state.keys() - layout.template.keys()
    return Dependence(
        frozenset(name for name, gradient in gradients.items() if gradient is None),
        frozenset(name for name in told if id(state[name]) not in reading.read),
    )


class _Reading(TorchFunctionMode):
    """Notes which tensors go into operations."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[int] = set()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.read.update(map(id, tree_leaves((args, kwargs))))
        return function(*args, **(kwargs or {}))


def phases_of(joint: JointClient, epochs: int) -> list[Phase]:
    """Return the phases into which a client's hooks of epochs divide its local training.

    A phase begins with an epoch in which other parameters rest than before, or other modules are
    in evaluation mode. Nothing else may change.

    Args:
        joint: The client module.
        epochs: Local epochs.

    Raises:
        RuntimeError: If anything else changes, or a parameter is trained in several phases, whose
            optimizers are not the same.
    """
    client = joint.client
    client.train()
    phases: list[Phase] = []
    before: tuple[list[str], ...] = ()
    trained: set[str] = set()
    attributes = _attributes(client)
    for epoch in range(epochs):
        with joint.phase(Phase(epoch, 1)):
            names = [name for name, p in client.named_parameters() if p.requires_grad]
            now = names, [name for name, module in client.named_modules() if module.training]
            if not _same(attributes, _attributes(client)):
                raise RuntimeError("it sets attributes of itself when an epoch starts")
        if now == before:
            phases[-1] = Phase(phases[-1].first, phases[-1].epochs + 1)
        elif again := trained.intersection(names):
            raise RuntimeError(f"it trains {min(again)} in several phases of epochs")
        else:
            phases.append(Phase(epoch, 1))
        trained.update(names)
        before = now
    return phases


def _agrees(joint: JointClient, states: Stack, layout: StateLayout, batch: Batch) -> bool:
    """Return whether stacked gradients are those of single clients; try everything else, too."""
    x, y = batch
    alone = [
        _gradients_alone(joint, {n: t[row].clone() for n, t in states.items()}, layout, batch)
        for row in (0, 1)
    ]
    others = dict(states)
    parameters = {name: others.pop(name) for name in layout.parameters}
    twice = [part.expand(2, *part.shape).clone() for part in (x, y)]
    stacked, _ = joint.gradients(parameters, others, *twice)
    with torch.no_grad():
        if joint.changes_afterwards and joint.client.anchor is not None:
            joint.after_training(states)
        if joint.client.memory is not None:
            joint.remember(states)
        joint.logits(states, twice[0])
    for row, gradients in enumerate(alone):
        known = {name: g for name, g in gradients.items() if g is not None}
        scale = max(float(g.abs().max()) for g in known.values())
        for name, gradient in known.items():
            difference = (stacked[name][row] - gradient).abs().max()
            if not difference <= _TOLERANCE * scale + 1e-6:
                return False
    return True


def _gradients_alone(
    joint: JointClient, state: Mapping[str, Tensor], layout: StateLayout, batch: Batch
) -> dict[str, Tensor | None]:
    leaves = {name: state[name].clone().requires_grad_() for name in layout.parameters}
    loss = joint.loss({**state, **leaves}, batch)
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return dict(zip(leaves, gradients, strict=True))


def _two_states(joint: JointClient, layout: StateLayout) -> Stack:
    """Return everything that a loss may look at: as given, and with halved parameters."""
    client = joint.client
    stack = {name: torch.stack([t, t]).detach() for name, t in state_tensors(client).items()}
    for name in layout.parameters:
        stack[name][1] /= 2
    for part in ("anchor", "memory"):
        held = getattr(client, part)
        if held is not None:
            for name, value in held.tensors().items():
                stack[f"{part}.{name}"] = torch.stack([value, value])
    for name in client.told:
        value = getattr(client, name)
        stack[name] = torch.tensor([0 if name == "seen" else 1, 1]).to(value)
    return stack


def _generators() -> tuple[Any, ...]:
    numpy: Any = np.random.get_state(legacy=False)
    drawn = numpy["state"]["pos"], numpy["state"]["key"].tobytes()
    return random.getstate(), drawn, torch.get_rng_state().tolist()


def _attributes(client: nn.Module) -> dict[tuple[str, str], Any]:
    return {
        (name, attribute): value
        for name, module in client.named_modules()
        for attribute, value in vars(module).items()
        if attribute != "training"
    }


def _same(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> bool:
    return before.keys() == after.keys() and all(
        after[key] is value for key, value in before.items()
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__

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

from pflight.models import Batch, ClientModule
from pflight.randomness import isolated
from pflight.state import StateLayout, state_tensors

from .joint import JointClient, Phase, Stack
from .stacked import misfit

_TOLERANCE = 1e-2  # of the largest gradient; stacked arithmetic rounds otherwise
_TRACE = 1e-4  # of the largest gradient, that samples without weight leave
_CLASSES = 32  # that are tried


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
        return f"its configure_optimizers() needs a client of its own: {reason_of(error)}"
    if reason := misfit(optimizer):
        return reason
    with isolated(client.device), torch.enable_grad():
        drawn, attributes = _generators(), _attributes(client)
        try:
            agrees = _agrees(joint, _two_states(joint, layout), layout, batch)
        except Exception as error:
            reason = reason_of(error)
            if "randomness" in reason:
                return "it draws random numbers while it trains, as dropout does"
            return f"many at once fail: {reason}"
        if drawn != _generators():
            return "it draws random numbers while it trains"
        if not _same(attributes, _attributes(client)):
            return "it sets attributes of itself while it trains"
        if name := _replaced_buffer(client, batch):
            return f"it replaces the buffer {name}, instead of changing it in place"
    if not agrees:
        return (
            "many at once get other gradients than one alone, as with operations that mix clients, "
            "or with numbers of the module's own that change from call to call"
        )
    return None


class Dependence(NamedTuple):
    """What the gradients of a client depend on."""

    untouched: frozenset[str]
    """Parameters without a gradient, which no optimizer may step."""
    unread: frozenset[str]
    """Tensors that are told to a client, and which its loss does not look at."""
    weighs_samples: bool
    """Whether samples whose weight is zero leave no trace, so that they may fill up a batch."""


def dependence_of(
    joint: JointClient,
    layout: StateLayout,
    batch: Batch,
    anchored: bool,
    remembers: bool,
    unequal: bool,
) -> Dependence:
    """Find out what the gradients of a client depend on.

    Args:
        joint: As in :func:`obstacle_to`, like the next four.
        layout: Its state layout.
        batch: Some samples.
        anchored: Whether there is an anchor.
        remembers: Whether there is a memory.
        unequal: Whether clients have unequal numbers of samples, so that batches are to be filled.
    """
    joint.prepare(anchored, remembers)
    state = {name: value[1].clone() for name, value in _two_states(joint, layout).items()}
    with torch.enable_grad(), _Reading() as reading:
        gradients, _ = _alone(joint, state, layout, batch)
    told = state.keys() - layout.template.keys()
    return Dependence(
        frozenset(name for name, gradient in gradients.items() if gradient is None),
        frozenset(name for name in told if id(state[name]) not in reading.read),
        unequal and _weighs_samples(joint, layout, batch),
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


def _replaced_buffer(client: ClientModule, batch: Batch) -> str | None:
    """Return the name of a buffer that a client's loss sets anew, which would be lost."""
    before = dict(client.named_buffers())
    client.loss(batch)
    after = dict(client.named_buffers())
    return next((name for name in before if after[name] is not before[name]), None)


@torch.no_grad()
def predicts_each_alone(joint: JointClient, layout: StateLayout, x: Tensor) -> bool:
    """Return whether predictions stay as they are beside the zeros that fill batches up."""
    states = _two_states(joint, layout)
    twice = x.expand(2, *x.shape)
    filled = torch.cat([twice, torch.zeros_like(twice)], dim=1)
    alone = joint.logits(states, twice)
    try:
        beside = joint.logits(states, filled)[:, : len(x)]
    except Exception:  # it takes no such batch
        return False
    return bool(((alone - beside).abs() <= _TRACE * (1 + alone.abs())).all())


def phases_of(joint: JointClient, epochs: int) -> list[Phase]:
    """Return the phases into which a client's hooks of epochs divide its local training.

    A phase begins with an epoch in which other parameters rest than before, or other modules are
    in evaluation mode. Nothing else may change.

    Args:
        joint: The client module.
        epochs: Local epochs.

    Raises:
        RuntimeError: If anything else changes, such as the weights, or a parameter is trained in
            several phases, whose optimizers are not the same.
    """
    client = joint.client
    client.train()
    phases: list[Phase] = []
    before: tuple[list[str], ...] = ()
    trained: set[str] = set()
    attributes = _attributes(client)
    tensors = state_tensors(client).values()
    versions = [tensor._version for tensor in tensors]
    for epoch in range(epochs):
        with joint.phase(Phase(epoch, 1)):
            names = [name for name, p in client.named_parameters() if p.requires_grad]
            now = names, [name for name, module in client.named_modules() if module.training]
            if not _same(attributes, _attributes(client), lengths=False):
                raise RuntimeError("it sets attributes of itself when an epoch starts")
        if now == before:
            phases[-1] = Phase(phases[-1].first, phases[-1].epochs + 1)
        elif again := trained.intersection(names):
            raise RuntimeError(f"it trains {min(again)} in several phases of epochs")
        else:
            phases.append(Phase(epoch, 1))
        trained.update(names)
        before = now
        if versions != [tensor._version for tensor in tensors]:
            raise RuntimeError("it changes its weights or buffers when an epoch starts or ends")
        if not _same(attributes, _attributes(client)):
            raise RuntimeError("it sets attributes of itself when an epoch ends")
    return phases


def _agrees(joint: JointClient, states: Stack, layout: StateLayout, batch: Batch) -> bool:
    """Return whether stacked gradients are those of single clients; try everything else, too."""
    x, y = batch
    alone = [
        _alone(joint, {n: t[row].clone() for n, t in states.items()}, layout, batch)
        for row in (0, 1)
    ]
    others = dict(states)
    parameters = {name: others.pop(name) for name in layout.parameters}
    twice = [part.expand(2, *part.shape).clone() for part in (x, y)]
    stacked = joint.gradients(parameters, others, *twice)
    with torch.no_grad():
        if joint.changes_afterwards and joint.client.anchor is not None:
            joint.after_training(states)
        if joint.client.memory is not None:
            joint.remember(states)
        joint.logits(states, twice[0])
    return _alike(stacked, alone, _TOLERANCE)


def _weighs_samples(joint: JointClient, layout: StateLayout, batch: Batch) -> bool:
    """Return whether samples without weight leave no trace in gradients, losses and buffers.

    Parameters and samples are drawn around the given ones, so that nothing vanishes by symmetry;
    what fills batches up is partly ten times as large, so that no maximum is found elsewhere.
    """
    client = joint.client
    if not _averages_samples(client):
        return False
    random = torch.Generator().manual_seed(0)

    def near(tensor: Tensor) -> Tensor:
        noise = 0.1 * torch.randn(tensor.shape, generator=random)
        return tensor + noise.to(tensor) if tensor.is_floating_point() else tensor

    count = 2 * min(client.num_classes, _CLASSES)
    labels = torch.linspace(0, client.num_classes - 1, count // 2).round().repeat(2)
    real_y = labels.to(batch[1])
    real_x = near(batch[0][torch.arange(count, device=real_y.device) % len(batch[0])])
    states = {
        name: near(value) if name in layout.parameters else value
        for name, value in _two_states(joint, layout).items()
    }
    parameters = {name: states[name] for name in layout.parameters}
    others = {name: value for name, value in states.items() if name not in parameters}
    counts = count // 2 + 1, count  # of the two clients' real samples
    try:
        with torch.enable_grad():
            own = [{name: value[row].clone() for name, value in states.items()} for row in (0, 1)]
            alone = [
                _alone(joint, state, layout, (real_x[:n], real_y[:n]))
                for state, n in zip(own, counts, strict=True)
            ]
        weights = torch.zeros(2, 2 * count, dtype=torch.double, device=real_x.device)
        for row, n in enumerate(counts):
            weights[row, :n] = 1 / n
        y = torch.cat([real_y, real_y.roll(1)]).expand(2, -1)
        for scale in (1, 10, -10) if real_x.is_floating_point() else (1,):
            x = torch.cat([real_x, real_x.flip(0) * scale]).expand(2, *[-1] * real_x.dim())
            after = {name: value.clone() for name, value in others.items()}
            stacked = joint.gradients(parameters, after, x, y, weights)
            if not _alike(stacked, alone, _TRACE):
                return False
            for name in layout.buffers:
                torch.testing.assert_close(after[name], torch.stack([s[name] for s in own]))
    except Exception:
        return False
    return True


def _averages_samples(client: ClientModule) -> bool:
    """Return whether all classes that define a loss of the client say so of it."""
    definers = [kind for kind in type(client).__mro__ if "loss" in vars(kind)]
    return all(vars(kind).get("averages_samples", False) for kind in definers)


def _alike(
    stacked: tuple[Stack, Tensor],
    alone: list[tuple[dict[str, Tensor | None], Tensor]],
    tolerance: float,
) -> bool:
    """Return whether the rows of stacked gradients and losses are those of single clients."""
    for row, (gradients, loss) in enumerate(alone):
        if not (stacked[1][row] - loss).abs() <= tolerance * max(1.0, float(loss.abs())):
            return False
        known = {name: g for name, g in gradients.items() if g is not None and g.numel()}
        scale = max(float(g.abs().max()) for g in known.values())
        for name, gradient in known.items():
            difference = (stacked[0][name][row] - gradient).abs().max()
            if not difference <= tolerance * scale + 1e-6:
                return False
    return True


def _alone(
    joint: JointClient, state: Mapping[str, Tensor], layout: StateLayout, batch: Batch
) -> tuple[dict[str, Tensor | None], Tensor]:
    """Return the gradients of a single client, and its loss."""
    leaves = {name: state[name].clone().requires_grad_() for name in layout.parameters}
    loss = joint.loss({**state, **leaves}, batch)
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return dict(zip(leaves, gradients, strict=True)), loss.detach()


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
    """Return all attributes of all modules, with the lengths of lists and the like."""
    return {
        (name, attribute): (value, len(value) if isinstance(value, list | dict | set) else 0)
        for name, module in client.named_modules()
        for attribute, value in vars(module).items()
        if attribute != "training"
    }


def _same(before: Mapping[Any, Any], after: Mapping[Any, Any], lengths: bool = True) -> bool:
    return before.keys() == after.keys() and all(
        after[key][0] is value and (after[key][1] == length or not lengths)
        for key, (value, length) in before.items()
    )


def reason_of(error: Exception) -> str:
    """Return an error's first sentence, for users who don't know how clients are stacked."""
    line = str(error).strip().split("\n")[0].split(". ")[0] or type(error).__name__
    if "meta tensors" in line:  # as which a client's scalars are handed to what all clients share
        return "it asks for the value of num_samples or another number that clients differ in"
    return line

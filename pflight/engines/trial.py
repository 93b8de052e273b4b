"""Finds out whether a client can stand for many clients at once, by trying it."""

from __future__ import annotations

import copy
import operator
import random
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pflight.models.client import Batch, ClientModule
from pflight.randomness import isolated
from pflight.state import StateLayout, state_tensors

from .joint import JointClient, Phase, Stack
from .local_trainer import FOREIGN, steps_others
from .sequential import definers_of_loss
from .stacked import misfit

_TOLERANCE = 1e-2  # of the largest gradient; stacked arithmetic rounds otherwise
_TRACE = 1e-4  # of the largest gradient, that samples without weight leave
_CLASSES = 32  # that are tried


def obstacle_to(
    joint: JointClient,
    layout: StateLayout,
    batches: Sequence[Batch],
    anchored: bool,
    remembers: bool,
) -> str | None:
    """Say what keeps a client from standing for many, or return ``None`` if nothing does.

    Two clients with unequal weights are stacked and asked for their gradients, what they change
    after training, what they keep, and their predictions. All of it must be as of either client
    alone. Global generators and the module's attributes must be left alone, since one call stands
    for all clients, and so does one optimizer.

    Args:
        joint: The client module.
        layout: Its state layout.
        batches: Some samples, in batches of all the sizes that occur.
        anchored: Whether there is an anchor.
        remembers: Whether there is a memory.
    """
    joint.prepare(anchored, remembers)
    client = joint.client
    attributes = _attributes(client)
    try:
        optimizer = joint.optimizer()
        again = _optimizer_of_other_weights(joint)
    except Exception as error:
        return f"its configure_optimizers() needs a client of its own: {reason_of(error)}"
    if reason := misfit(optimizer):
        return reason
    if steps_others(optimizer, set(map(id, client.parameters()))):
        return FOREIGN
    if not _same(attributes, _attributes(client)):
        return "its configure_optimizers() sets attributes of itself"
    if _options(optimizer) != _options(again):
        return "the options of its optimizer depend on its weights"
    with isolated(client.device), torch.enable_grad():
        drawn, single = _generators(), _Single(joint)
        try:
            alone = [_alone(joint, single, layout, batch) for batch in batches]
        except Exception as error:
            return _failed("a client alone fails", error)
        if name := single.changed_parameter(layout, batches[0]):
            return f"its loss changes the parameter {name} in place"
        try:
            agrees = [
                _agrees(joint, layout, batch, results)
                for batch, results in zip(batches, alone, strict=True)
            ]
        except Exception as error:
            return _failed("many at once fail", error)
        if drawn != _generators():
            return "it draws random numbers while it trains"
        if not _same(attributes, _attributes(client)):
            return "it sets attributes of itself while it trains"
        if name := single.replaced_buffer(batches[0]):
            return f"it replaces the buffer {name}, instead of changing it in place"
        if not all(agrees):
            return (
                "many at once get other results than one alone, as with operations that mix "
                "clients, or numbers of the module's own that change from call to call"
            )
        untouched = [_untouched(joint, single, layout, batch) for batch in batches]
    if odd := frozenset().union(*untouched) - untouched[0].intersection(*untouched):
        return f"whether {min(odd)} has a gradient depends on the size of the batch"
    return None


def _optimizer_of_other_weights(joint: JointClient) -> Optimizer:
    """Return the optimizer that a client has whose weights are half as large."""
    weights = list(joint.client.parameters())
    with torch.no_grad():
        given = [weight.clone() for weight in weights]
        try:
            for weight in weights:
                weight.copy_(weight / 2)
            return joint.optimizer()
        finally:
            for weight, value in zip(weights, given, strict=True):
                weight.copy_(value)


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


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
    batches: Sequence[Batch],
    anchored: bool,
    remembers: bool,
    unequal: bool,
) -> Dependence:
    """Find out what the gradients of a client depend on.

    Args:
        joint: As in :func:`obstacle_to`, like the next four.
        layout: Its state layout.
        batches: Some samples, in batches of all the sizes that occur.
        anchored: Whether there is an anchor.
        remembers: Whether there is a memory.
        unequal: Whether clients have unequal numbers of samples, so that batches are to be filled.
    """
    joint.prepare(anchored, remembers)
    state = {name: value[1].clone() for name, value in _two_states(joint, layout).items()}
    for name in layout.parameters:
        state[name].requires_grad_()
    read: set[int] = set()
    with torch.enable_grad(), _Operations(read), _Functions(read):
        for batch in batches:
            joint.loss(state, batch)
    told = state.keys() - layout.template.keys()
    return Dependence(
        _untouched(joint, _Single(joint), layout, batches[0]),
        frozenset(name for name in told if id(state[name]) not in read),
        unequal and _weighs_samples(joint, layout, max(batches, key=lambda batch: len(batch[1]))),
    )


def _untouched(
    joint: JointClient, single: _Single, layout: StateLayout, batch: Batch
) -> frozenset[str]:
    """Return the parameters that have no gradient."""
    state = {name: value[1] for name, value in _two_states(joint, layout).items()}
    with torch.enable_grad():
        gradients, _ = single.gradients(state, layout, batch)
    return frozenset(name for name, gradient in gradients.items() if gradient is None)


class _Reading:
    """Notes which tensors go into calls, by their ``id``."""

    def __init__(self, read: set[int]) -> None:
        super().__init__()
        self.read = read

    def call(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the arguments of a call, and make it."""
        self.read.update(map(id, tree_leaves((args, kwargs))))
        return function(*args, **(kwargs or {}))


class _Functions(_Reading, TorchFunctionMode):
    """Notes what goes into functions."""

    __torch_function__ = _Reading.call


class _Operations(_Reading, TorchDispatchMode):
    """Notes what goes into operations, those of scripted functions too."""

    __torch_dispatch__ = _Reading.call


class _Single:
    """A client by itself, as it trains in the sequential engine, which stacking is measured by.

    Args:
        joint: The client module, of which this is a copy.
    """

    def __init__(self, joint: JointClient) -> None:
        self.client = copy.deepcopy(joint.client)

    def gradients(
        self, state: Mapping[str, Tensor], layout: StateLayout, batch: Batch
    ) -> tuple[dict[str, Tensor | None], Tensor]:
        """Return the gradients of the parameters in a state, and the loss."""
        client = self.client
        with torch.no_grad():
            for name, tensor in state_tensors(client).items():
                tensor.copy_(state[name])
            for part in ("anchor", "memory"):
                held = getattr(client, part)
                for name, tensor in held.tensors().items() if held is not None else ():
                    tensor.copy_(state[f"{part}.{name}"])
        for name in client.told:
            setattr(client, name, state[name])
        loss = client.loss(batch)
        parameters = dict(client.named_parameters())
        leaves = [parameters[name] for name in layout.parameters]
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        return dict(zip(layout.parameters, gradients, strict=True)), loss.detach()

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of the state as it is."""
        return {name: tensor.clone() for name, tensor in state_tensors(self.client).items()}

    def changed_parameter(self, layout: StateLayout, batch: Batch) -> str | None:
        """Return the name of a parameter that the loss itself changes, such as a bounded one."""
        parameters = dict(self.client.named_parameters())
        for name in layout.parameters:
            parameters[name].data = 100 * parameters[name].data  # beyond bounds, if there are any
        before = {name: parameters[name].detach().clone() for name in layout.parameters}
        with suppress(Exception):  # which are of such weights
            self.client.loss(batch)
        return next((n for n, value in before.items() if not value.equal(parameters[n])), None)

    def replaced_buffer(self, batch: Batch) -> str | None:
        """Return the name of a buffer that the client sets anew, which would be lost."""
        client, before = self.client, dict(self.client.named_buffers())
        client.loss(batch)
        if client.anchor is not None:
            with torch.no_grad():
                client.after_training()
        after = dict(client.named_buffers())
        return next((name for name in before if after[name] is not before[name]), None)


@torch.no_grad()
def predicts_each_alone(joint: JointClient, layout: StateLayout, x: Tensor) -> bool:
    """Return whether predictions stay as they are beside the zeros that fill batches up."""
    states = _two_states(joint, layout)
    twice = x.expand(2, *x.shape)
    filled = torch.cat([twice, torch.zeros_like(twice)], dim=1)
    try:
        alone = joint.logits(states, twice.clone())
        beside = joint.logits(states, filled)[:, : len(x)]
    except KeyboardInterrupt:
        raise
    except BaseException:  # it can't be stacked, or takes no such batch
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
    given = {name for name, p in client.named_parameters() if p.requires_grad}
    tensors = [*client.parameters(), *client.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    for epoch in range(epochs):
        with joint.phase(Phase(epoch, 1)):
            names = [name for name, p in client.named_parameters() if p.requires_grad]
            now = names, [name for name, module in client.named_modules() if module.training]
            if not _same(attributes, _attributes(client)):
                raise RuntimeError("it sets attributes of itself when an epoch starts")
            if thawed := set(names) - given:
                raise RuntimeError(f"it thaws {min(thawed)} when an epoch starts")
        if now == before:
            phases[-1] = Phase(phases[-1].first, phases[-1].epochs + 1)
        elif again := trained.intersection(names):
            raise RuntimeError(f"it trains {min(again)} in several phases of epochs")
        else:
            phases.append(Phase(epoch, 1))
        trained.update(names)
        before = now
        if not all(map(torch.equal, values, tensors)):
            raise RuntimeError("it changes its weights or buffers when an epoch starts or ends")
        if not _same(attributes, _attributes(client)):
            raise RuntimeError("it sets attributes of itself when an epoch ends")
    return phases


class _Alone(NamedTuple):
    """What clients get by themselves."""

    gradients: list[tuple[dict[str, Tensor | None], Tensor]]
    """And their losses."""
    others: list[dict[str, Tensor]]
    """Their states afterwards, what they keep, and their predictions."""


def _alone(joint: JointClient, single: _Single, layout: StateLayout, batch: Batch) -> _Alone:
    """Return what two clients get, one after the other."""
    x, _ = batch
    states = _two_states(joint, layout)
    alone = _Alone([], [])
    for row in (0, 1):
        own = {name: tensor[row] for name, tensor in states.items()}
        alone.gradients.append(single.gradients(own, layout, batch))
        with torch.no_grad():
            if joint.changes_afterwards and single.client.anchor is not None:
                single.client.after_training()
            kept = single.client.remember() if single.client.memory is not None else {}
            single.client.eval()
            logits = single.client(x)
            single.client.train()
        kept = {f"kept {name}": value.clone() for name, value in kept.items()}
        alone.others.append({**single.tensors(), **kept, "its logits": logits})
    return alone


def _agrees(joint: JointClient, layout: StateLayout, batch: Batch, alone: _Alone) -> bool:
    """Return whether stacked clients get what single ones do."""
    states = _two_states(joint, layout)
    others = dict(states)
    parameters = {name: others.pop(name) for name in layout.parameters}
    twice = [part.expand(2, *part.shape).clone() for part in batch]
    stacked = joint.gradients(parameters, others, *twice)
    with torch.no_grad():
        if joint.changes_afterwards and joint.client.anchor is not None:
            joint.after_training(states)
        kept = joint.remember(states) if joint.client.memory is not None else {}
        kept = {f"kept {name}": value.clone() for name, value in kept.items()}
        results = {**states, **kept, "its logits": joint.logits(states, twice[0])}
    joint.client.train()
    return _alike(stacked, alone.gradients, _TOLERANCE) and all(
        _close(results[name][row], value)
        for row, results_alone in enumerate(alone.others)
        for name, value in results_alone.items()
    )


def _close(one: Tensor, other: Tensor) -> bool:
    if not other.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)


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
            single, alone = _Single(joint), []
            for state, n in zip(own, counts, strict=True):
                alone.append(single.gradients(state, layout, (real_x[:n], real_y[:n])))
                state |= single.tensors()
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
    return all(vars(kind).get("averages_samples", False) for kind in definers_of_loss(client))


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
    """Return all attributes of all modules, with what is in lists and the like."""
    return {
        (name, attribute): (value, _contents(value))
        for name, module in client.named_modules()
        for attribute, value in vars(module).items()
        if attribute != "training"
    }


def _contents(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return list(value) if isinstance(value, list | set) else []


def _same(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> bool:
    return before.keys() == after.keys() and all(
        after[key][0] is value
        and len(after[key][1]) == len(contents)
        and all(map(operator.is_, after[key][1], contents))
        for key, (value, contents) in before.items()
    )


def _failed(what: str, error: Exception) -> str:
    """Say why clients failed, and which unless the reason says so."""
    reason = reason_of(error)
    return reason if reason.startswith("it ") else f"{what}: {reason}"


def reason_of(error: BaseException) -> str:
    """Return an error's first sentence, for users who don't know how clients are stacked."""
    line = str(error).strip().split("\n")[0].split(". ")[0] or type(error).__name__
    if "meta tensors" in line:  # as which a client's scalars are handed to what all clients share
        return "it asks for the value of num_samples or another number that clients differ in"
    if "calling .item()" in line or "data-dependent" in line:
        return "it branches on values or takes a number out of a tensor, as F.one_hot does"
    if "data pointer" in line:
        return "it takes values out of a tensor, as numpy() does"
    if "dynamic shape" in line:
        return "it makes tensors whose shape depends on values, as masks do"
    if "randomness" in line:
        return "it draws random numbers while it trains, as dropout does"
    if "out= or view" in line:
        return "it writes the result of an operation into a tensor (out=), as spectral_norm does"
    if missing := re.search(r"(?:[Bb]atching rule|not yet support).* aten::(\w+)", line):
        recurrent = re.search(r"rnn|lstm|gru", missing[1])
        return f"vmap can't do {missing[1]}" + (", of recurrent layers" if recurrent else "")
    return line

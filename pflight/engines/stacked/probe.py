"""Tries whether one client module can compute many clients at once."""

from __future__ import annotations

import copy
import operator
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning import LightningModule
from torch import Tensor, nn

from pflight.engines.alone.client import SCALARS, LocalModels, training_step
from pflight.engines.alone.trainer import loss_of
from pflight.engines.alone.training import steps_only
from pflight.engines.client_setup import ClientSetup, are_finite
from pflight.method import ClientMethod
from pflight.randomness import isolated
from pflight.states.state import state_tensors
from pflight.states.updates import STOPS
from pflight.task import Task, trains_as_a_task

from .audit import Reference, alike, without_tf32
from .reasons import DRAWS, failure, reason_of
from .stack import ANCHOR, MEMORY, Columns, Mode, Stack
from .steps import misfit

_TRIAL = 8  # samples for trying a client
_SIZES, _LARGEST = 8, 64  # number of tried batch sizes, and the largest size
_FOREIGN = "its configure_optimizers() gives an optimizer of parameters that are not its own"
_TOLERANCE = 1e-2  # relative to the largest gradient; stacked arithmetic rounds differently
_TRACE = 1e-4  # trace of samples without weight, relative to the largest gradient
_CLASSES = 32  # classes that are tried


def trial_samples(setup: ClientSetup) -> list[Tensor]:
    """Return a few samples of the largest client; if they can't be used, the example."""
    data = setup.data
    clients = data.train_clients
    largest = clients[data.num_samples("train")[clients].argmax()]
    try:
        leaves = [leaf[:_TRIAL] for leaf in setup.samples(int(largest), "train")]
    except STOPS:
        raise
    except BaseException:  # training will report it
        leaves = setup.example
    if not are_finite(leaves):
        leaves = setup.example
    return [leaf[:_TRIAL].clone() for leaf in leaves]


def trial_batches(
    setup: ClientSetup, samples: list[Tensor], counts: list[int]
) -> list[list[Tensor]]:
    """Return batches of sizes in use, mostly small ones: there clients may differ.

    Args:
        setup: The client module, its client method, and its data.
        samples: The samples of the batches.
        counts: The clients' numbers of samples.
    """
    found = {min(size, _LARGEST) for count in counts for size in setup.batch_sizes(count)}
    sizes = sorted(found or {1})
    places = (torch.arange(size) % len(samples[0]) for size in {*sizes[:_SIZES], sizes[-1]})
    return [[leaf[place] for leaf in samples] for place in places]


@contextmanager
def left_alone(*modules: nn.Module) -> Iterator[list[str]]:
    """Yield a list. At the end it names all changes.

    Args:
        modules: Modules with attributes that must not change.
    """
    touched: list[str] = []
    generators, attributes = _generators(), list(map(_attributes, modules))
    yield touched
    if generators != _generators():
        touched.append(DRAWS)
    if not all(map(_same, attributes, map(_attributes, modules))):
        touched.append("it sets attributes of itself while it trains")


def _generators() -> tuple[Any, ...]:
    numpy: Any = np.random.get_state(legacy=False)
    drawn = numpy["state"]["pos"], numpy["state"]["key"].tobytes()
    return random.getstate(), drawn, torch.get_rng_state().tolist()


def _attributes(client: nn.Module) -> dict[tuple[Any, str], Any]:
    """Return the attributes of all modules and their classes, and the globals that these use.

    Each comes with its contents: a list or another object can change and stay the same object.
    """
    kinds = {kind for module in client.modules() for kind in type(module).__mro__}
    owners = [*client.named_modules(), *((kind, kind) for kind in kinds)]
    found = {
        (name, attribute): value
        for name, owner in owners
        for attribute, value in vars(owner).items()
        if attribute != "training"
    }
    for kind in kinds:
        if kind.__module__.split(".")[0] in ("torch", "lightning", "pflight", "builtins"):
            continue
        for method in vars(kind).values():
            if not isinstance(method, FunctionType):
                continue
            known = method.__globals__.keys() & method.__code__.co_names
            found |= {(method, name): method.__globals__[name] for name in known}
    return {place: (value, _contents(value)) for place, value in found.items()}


def _contents(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | set):
        return list(value)
    if isinstance(value, ModuleType | FunctionType | nn.Module) or not hasattr(value, "__dict__"):
        return []
    return [*vars(value).values()]


def _same(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> bool:
    return before.keys() == after.keys() and all(
        after[key][0] is value
        and len(after[key][1]) == len(contents)
        and all(map(operator.is_, after[key][1], contents))
        for key, (value, contents) in before.items()
    )


class Dependence(NamedTuple):
    """Properties of a client's gradients."""

    untouched: frozenset[str]
    """Parameters without a gradient. No optimizer may step them."""
    unread: frozenset[str]
    """Inputs of a client that its loss does not read."""
    weighs_samples: bool
    """Whether samples of zero weight leave no trace. Then they may fill up a batch."""


class Probe:
    """Compares a stack of two clients with unequal weights to each client alone.

    Args:
        stacked: The client module for many clients.
        models: The models of a client alone, for the comparison.
    """

    def __init__(self, stacked: Stack, models: LocalModels) -> None:
        self.stacked = stacked
        self.models = models
        self.setup = models.setup
        self.module = stacked.module
        self.reference = Reference(stacked, models)

    def declared_obstacle(self) -> str | None:
        """Return the property of a module that forbids stacking, in words, or ``None``."""
        module = self.module
        if not getattr(module, "vectorizable", True):
            return "it says that it is not vectorizable"
        kind, base = type(module), Task if isinstance(module, Task) else LightningModule
        own = [
            name
            for name in ("configure_gradient_clipping", "clip_gradients")
            if getattr(kind, name) is not getattr(base, name)
        ]
        if hooks := [*sorted(self.models.hooks), *own]:
            return f"it has {hooks[0]} of its own"
        return None if module.automatic_optimization else "it optimizes manually"

    def training_step(self, batches: Sequence[list[Tensor]]) -> str | None:
        """Find the names under which a module's own training step logs its loss.

        Args:
            batches: Some samples, in batches of all sizes in use.

        Returns:
            Other logged values, or the reason why the step can't be called; ``None`` otherwise.
        """
        if trains_as_a_task(self.module):
            return None
        for index, leaves in enumerate([*batches, *batches]):
            if reason := self._step(index, leaves):
                return reason
        return None

    def _step(self, index: int, leaves: list[Tensor]) -> str | None:
        module: Any = copy.deepcopy(self.module)
        logged: dict[str, Any] = {}

        def log(name: str, value: Any, *_: Any, **__: Any) -> None:
            logged[name] = value

        def log_dict(values: Mapping[str, Any], *_: Any, **__: Any) -> None:
            logged.update(values)

        module.log, module.log_dict = log, log_dict
        with isolated(self.setup.device), torch.no_grad(), left_alone() as touched:
            try:
                batch = self._batch(leaves)
                loss = loss_of(training_step(module, batch, index))
            except Exception as error:
                return failure("a client alone fails", error)
        if touched:
            return touched[0]
        if loss is None:
            return "its training_step returned no loss"
        for name, value in logged.items():
            if not isinstance(value, Tensor) or value.numel() != 1 or not _close(value, loss):
                return f"it logs {name!r} while it trains, beside its loss"
        self.stacked.log.names = tuple(logged)
        return None

    @without_tf32()
    def obstacle(self, mode: Mode, batches: Sequence[list[Tensor]]) -> str | None:
        """Return the reason why clients can't be stacked, or ``None``.

        A stack of two clients computes gradients, changes after training, memory, and predictions.
        All results must be the same as for each client alone. The module must not change global
        generators or its attributes, since all clients share one call. They also share one
        optimizer.

        Args:
            mode: The inputs of the training.
            batches: Some samples, in batches of all sizes in use.
        """
        stacked, module = self.stacked, self.module
        stacked.prepare(mode)
        try:
            optimizer, _ = stacked.optimizer(self.setup)
        except Exception as error:
            return f"its configure_optimizers() needs a client of its own: {reason_of(error)}"
        if reason := misfit(optimizer):
            return reason
        if not steps_only(optimizer, {id(parameter) for parameter in module.parameters()}):
            return _FOREIGN
        with isolated(self.setup.device), torch.enable_grad():
            with left_alone(module) as touched:
                try:
                    alone = [self._alone(mode, batch) for batch in batches]
                except Exception as error:
                    return failure("a client alone fails", error)
                if name := self._changed_parameter(mode, batches[0]):
                    return f"its loss changes the parameter {name} in place"
                try:
                    agrees = [
                        self._agrees(mode, batch, results)
                        for batch, results in zip(batches, alone, strict=True)
                    ]
                except Exception as error:
                    return failure("many at once fail", error)
            if touched:
                return touched[0]
            if name := self._replaced_buffer(mode, batches[0]):
                return f"it replaces the buffer {name}, instead of changing it in place"
            if not all(agrees):
                return (
                    "many at once get other results than one alone, as with operations that mix "
                    "clients, or numbers of the module's own that change from call to call"
                )
            untouched = [_untouched(results) for results in alone]
            newcomers = alone[0]  # clients without memory
            if mode.remembers:
                newcomers = self._alone(mode._replace(remembers=False), batches[0])
            given = [g for results in alone for g in results.gradients[0][0].values()]
            sizes = [float(g.abs().max()) for g in given if g is not None and g.numel()]
            self.reference.largest_gradient = max([self.reference.largest_gradient, *sizes])
        if odd := frozenset().union(*untouched) - untouched[0].intersection(*untouched):
            return f"whether {min(odd)} has a gradient depends on the size of the batch"
        if odd := _untouched(newcomers) ^ untouched[0]:
            return f"whether {min(odd)} has a gradient depends on earlier participations"
        return None

    @without_tf32()
    def dependence(self, mode: Mode, batches: Sequence[list[Tensor]], unequal: bool) -> Dependence:
        """Find the properties of a client's gradients.

        Args:
            mode: The inputs of the training.
            batches: Some samples, in batches of all sizes in use.
            unequal: Whether clients have unequal numbers of samples. Then batches are filled up.
        """
        self.stacked.prepare(mode)
        state = {name: value[1].clone() for name, value in self._two_states(mode).items()}
        noted = _Noting(state)
        with torch.enable_grad():
            for batch in batches:
                self.stacked.losses(noted, self._batch(batch))
        inputs = state.keys() - self.setup.layout.template.keys()
        largest = max(batches, key=lambda batch: len(batch[0]))
        return Dependence(
            _untouched(self._alone(mode, batches[0])),
            frozenset(inputs - noted.read),
            unequal and self._weighs_samples(mode, largest),
        )

    @without_tf32()
    @torch.no_grad()
    def predicts_each_alone(self, x: Tensor) -> bool:
        """Return whether zeros that fill up a batch leave the other predictions unchanged."""
        states = self._two_states(Mode(anchored=False, remembers=False))
        twice = x.expand(2, *x.shape)
        filled = torch.cat([twice, torch.zeros_like(twice)], dim=1)
        try:
            alone = self.stacked.outputs(states, twice.clone())
            beside = self.stacked.outputs(states, filled)[:, : len(x)]
        except KeyboardInterrupt:
            raise
        except BaseException:  # it can't be stacked, or refuses such a batch
            return False
        return bool(((alone - beside).abs() <= _TRACE * (1 + alone.abs())).all())

    # A client alone, as in the sequential engine

    def _alone(self, mode: Mode, leaves: list[Tensor]) -> _Alone:
        """Return the results of two clients, computed one after the other."""
        states = self._two_states(mode)
        alone = _Alone([], [])
        for row in (0, 1):
            own = {name: tensor[row] for name, tensor in states.items()}
            alone.gradients.append(self.reference.gradients(mode, own, leaves))
            client = self.models.client
            with torch.no_grad():
                if mode.anchored:
                    client.after_training()
                kept = client.remember() if mode.remembers else {}
                kept = {f"kept {name}": value.clone() for name, value in kept.items()}
                after = {n: t.clone() for n, t in self.models.state().items() if n in states}
                if self.setup.task is not None:
                    client.module.eval()
                    kept["its outputs"] = client.module(leaves[0].clone())
            alone.others.append({**after, **kept})
        return alone

    def _changed_parameter(self, mode: Mode, leaves: list[Tensor]) -> str | None:
        """Return the name of a parameter that the loss itself changes, for example by bounds."""
        state = {name: value[0].clone() for name, value in self._two_states(mode).items()}
        for name in self.stacked.parameters:
            state[name] *= 100  # beyond bounds, if there are any
        with suppress(Exception):  # such weights may cause errors
            self.reference.gradients(mode, state, leaves)
        weights = self.models.client.weights
        return next((n for n in self.stacked.parameters if not weights[n].equal(state[n])), None)

    def _replaced_buffer(self, mode: Mode, leaves: list[Tensor]) -> str | None:
        """Return the name of a buffer that the client replaces. The new one would be lost."""
        state = {name: value[0] for name, value in self._two_states(mode).items()}
        self.reference.enter(mode, state)
        module = self.models.client.module
        before = dict(module.named_buffers())
        self.models.client.task_loss(self._batch(leaves))
        after = dict(module.named_buffers())
        return next((name for name in before if after.get(name) is not before[name]), None)

    # The stack of two

    def _batch(self, leaves: Sequence[Tensor]) -> Any:
        """Return a batch of copies of the tensors, since a module may change its input."""
        return self.setup.batch([leaf.clone() for leaf in leaves])

    def _two_states(self, mode: Mode) -> Columns:
        """Return all inputs of a loss, for two clients: as given, and with halved parameters."""
        setup, stacked, device = self.setup, self.stacked, self.setup.device
        given = {name: setup.layout.template[name].to(device) for name in setup.layout.moving}
        given |= {n: t for n, t in state_tensors(self.module).items() if n in given}
        stack = {name: torch.stack([t, t]).detach() for name, t in given.items()}
        inputs: Columns = {}
        if mode.anchored:
            inputs |= {f"{ANCHOR}{name}": given[name] for name in stacked.live}
        if mode.remembers:
            inputs |= {f"{MEMORY}{n}": given[entry] for n, entry in stacked.memory.items()}
        for name in setup.layout.parameters:
            stack[name][1] /= 2
        stack |= {name: torch.stack([value, value]).detach() for name, value in inputs.items()}
        for name in SCALARS:
            values = [0 if name == "seen" else 1, 1]
            stack[name] = torch.tensor(values, dtype=setup.dtype, device=device)
        if setup.client_method.needs_classes:
            counts = torch.arange(1, 1 + setup.class_counts.shape[1], device=device)
            stack["class_counts"] = torch.stack([counts, counts.flip(0)]).to(setup.dtype)
        return stack

    def _agrees(self, mode: Mode, leaves: list[Tensor], alone: _Alone) -> bool:
        """Return whether stacked clients get the same results as single ones."""
        stacked, setup = self.stacked, self.setup
        states = self._two_states(mode)
        others = dict(states)
        parameters = {name: others.pop(name) for name in stacked.trained()}
        twice = [part.expand(2, *part.shape) for part in leaves]
        found = stacked.gradients(parameters, others, self._batch(twice))
        afresh = {n: t for n, t in self._two_states(mode).items() if n in others}
        repeated = stacked.gradients(parameters, afresh, self._batch(twice))
        by_row = [({n: g[row] for n, g in found[0].items()}, found[1][row]) for row in (0, 1)]
        if not alike(*repeated[:2], by_row, _TRACE):
            return False
        with torch.no_grad():
            if stacked.changes_afterwards and mode.anchored:
                stacked.after_training(states)
            kept = stacked.remember(states) if mode.remembers else {}
            results = {**states, **{f"kept {name}": value for name, value in kept.items()}}
            results = {name: value.clone() for name, value in results.items()}
            if setup.task is not None:
                results["its outputs"] = stacked.outputs(states, twice[0].clone())
        stacked.prepare(mode)
        return alike(*found[:2], alone.gradients, _TOLERANCE) and all(
            _close(results[name][row], value)
            for row, results_alone in enumerate(alone.others)
            for name, value in results_alone.items()
        )

    def _weighs_samples(self, mode: Mode, leaves: list[Tensor]) -> bool:
        """Return whether samples without weight leave no trace in gradients, losses and buffers.

        Parameters and samples are drawn around the given ones: then nothing vanishes by symmetry.
        Some filling samples are ten times as large: then they would change a maximum.
        """
        stacked, setup = self.stacked, self.setup
        if not (has_sample_losses(self.module) and _averages_samples(setup.client_method)):
            return False
        random = torch.Generator().manual_seed(0)

        def near(tensor: Tensor) -> Tensor:
            noise = 0.1 * torch.randn(tensor.shape, generator=random)
            return tensor + noise.to(tensor) if tensor.is_floating_point() else tensor

        count = 2 * min(getattr(self.module, "num_classes", _CLASSES), _CLASSES)
        place = torch.arange(count, device=setup.device) % len(leaves[0])
        real = [near(leaf[place]) for leaf in leaves]
        if classes := getattr(self.module, "num_classes", 0):
            labels = torch.linspace(0, classes - 1, count // 2).round().repeat(2)
            real[1] = labels.to(real[1]) if real[1].dim() == 1 else real[1]
        states = {
            name: near(value) if name in stacked.parameters else value
            for name, value in self._two_states(mode).items()
        }
        parameters = {name: states[name] for name in stacked.trained()}
        others = {name: value for name, value in states.items() if name not in parameters}
        counts = count // 2 + 1, count  # real samples of the two clients
        try:
            with torch.enable_grad():
                own = [
                    {name: value[row].clone() for name, value in states.items()} for row in (0, 1)
                ]
                alone = []
                for state, n in zip(own, counts, strict=True):
                    alone.append(self.reference.gradients(mode, state, [leaf[:n] for leaf in real]))
                    state |= {name: t.clone() for name, t in self.models.state().items()}
            weights = torch.zeros(2, 2 * count, dtype=torch.double, device=setup.device)
            for row, n in enumerate(counts):
                weights[row, :n] = 1 / n
            scales = (1, 10, -10) if real[0].is_floating_point() else (1,)
            for scale in scales:
                filled = [torch.cat([real[0], real[0].flip(0) * scale])]
                filled += [torch.cat([leaf, leaf.roll(1, 0)]) for leaf in real[1:]]
                batch = [leaf.expand(2, *leaf.shape) for leaf in filled]
                after = {name: value.clone() for name, value in others.items()}
                found = stacked.gradients(parameters, after, setup.batch(batch), weights)
                if not alike(*found[:2], alone, _TRACE):
                    return False
                for name in setup.layout.buffers:
                    torch.testing.assert_close(after[name], torch.stack([s[name] for s in own]))
        except Exception:
            return False
        return True


class _Alone(NamedTuple):
    """Results of clients alone."""

    gradients: list[tuple[dict[str, Tensor | None], Tensor]]
    """Each client's gradients and loss."""
    others: list[dict[str, Tensor]]
    """Each client's state afterwards, its memory, and its predictions."""


class _Noting(dict[str, Tensor]):
    """Tensors by name. It notes the names that are read."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.read.add(name)
        return super().__getitem__(name)


def _untouched(alone: _Alone) -> frozenset[str]:
    """Return the parameters without a gradient."""
    gradients, _ = alone.gradients[1]
    return frozenset(name for name, gradient in gradients.items() if gradient is None)


def _averages_samples(client_method: ClientMethod) -> bool:
    personal = client_method.personal
    return (
        client_method.averages_samples
        and all(term.averages_samples for term in client_method.terms)
        and (personal is None or personal.averages_samples)
    )


def has_sample_losses(module: nn.Module) -> bool:
    """Return whether a module's ``loss`` is the mean of its losses of single samples.

    A class that defines another ``loss`` has to define its samples' losses again. The mean is
    weighted if the module has a method ``sample_weights``.
    """
    kinds = type(module).__mro__
    defines = {
        name: next((place for place, kind in enumerate(kinds) if name in vars(kind)), len(kinds))
        for name in ("loss", "losses", "sample_losses")
    }
    return min(defines["losses"], defines["sample_losses"]) <= defines["loss"] < len(kinds)


def _close(one: Tensor, other: Tensor) -> bool:
    if not other.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)

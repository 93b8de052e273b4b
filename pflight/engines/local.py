"""One client in local training, alone: the copy of the module in which it trains, and its data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, FunctionType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.func import functional_call
from torchmetrics import Metric, MetricCollection

from pflight.data_module import FederatedDataModule
from pflight.half import Half, Phase
from pflight.loaders import Split, Visit
from pflight.state import StateLayout, other_places, rest_frozen, state_tensors
from pflight.task import Task, trains_as_a_task

from .module_trainer import ModuleTrainer, loss_of, muted

SCALARS = ("num_samples", "mean_samples", "seen", "num_steps")
"""Names of the scalars that a half finds at a client."""


class Frozen:
    """The tensors of a module that never train, as all clients have them.

    Args:
        module: The module.
        layout: Its state layout.
    """

    def __init__(self, module: nn.Module, layout: StateLayout) -> None:
        tensors = state_tensors(module)
        self._held = {name: tensors[name] for name in layout.frozen}
        self._values = {name: tensor.detach().clone() for name, tensor in self._held.items()}
        self._taken: dict[str, tuple[Tensor, int]] = {}  # held, so that nothing else lies there

    def take(self, state: Mapping[str, Tensor]) -> None:
        """Take the values of a state, unless they are where those of the last one were."""
        with torch.no_grad():
            for name, held in self._held.items():
                given = state[name]
                last, version = self._taken.get(name, (None, 0))
                if last is None or last.data_ptr() != given.data_ptr() or version != given._version:
                    self._taken[name] = given, given._version
                    self._values[name].copy_(given)
                    held.copy_(given)

    def mend(self, module: nn.Module) -> list[str]:
        """Put back what has changed in a copy of the module; return the names."""
        if not self._values:
            return []
        now = state_tensors(module)
        changed = [n for n, value in self._values.items() if not torch.equal(now[n], value)]
        with torch.no_grad():
            for name in changed:
                self._held[name].copy_(self._values[name])
        return changed


class Copies:
    """Copies of a module, one at a time, that share the tensors which each of them overwrites.

    A participation begins with a pristine copy, so that no list, counter or buffer of one client
    reaches the next; what is frozen is shared by all. A copy that is found as it was goes on.

    Args:
        template: The client module.
        layout: Its state layout.
        precision: The precision plugin of the federation's Trainer.
        device: Where the copies train.
        channels_last: Whether the channels of a pixel lie side by side.
    """

    def __init__(
        self,
        template: L.LightningModule,
        layout: StateLayout,
        precision: Precision,
        device: torch.device,
        channels_last: bool = False,
    ) -> None:
        self._pristine = ready(template)
        precision.convert_module(self._pristine).to(device)
        if channels_last:
            self._pristine.to(memory_format=torch.channels_last)
        tensors, frozen, own = state_tensors(self._pristine), {*layout.frozen}, {*layout.own}
        names = [name for name in layout.names if name not in own]
        self.live = {name: tensors[name] for name in names if name not in frozen}
        self.frozen = Frozen(self._pristine, layout)
        self._frozen = {name: tensors[name] for name in layout.frozen}
        self._shared = {id(t): t for t in [*tensors.values(), *self._pristine.parameters()]}
        self.parameters = [name for name in layout.parameters if name in self.live]
        self._required = [(p, p.requires_grad) for p in self._pristine.parameters()]
        self.trainer = ModuleTrainer(precision, device)
        self.fresh()

    def fresh(self) -> None:
        """Make a new copy."""
        self.module: L.LightningModule = copy.deepcopy(self._pristine, dict(self._shared))
        self.trainer.attach(self.module)
        self._attributes = [(vars(part), dict(vars(part))) for part in self.module.modules()]
        held = [register for part in self.module.modules() for register in vars(part).values()]
        self._registers = [register for register in held if isinstance(register, dict)]
        self._held = self._registered()
        self._kinds = list(map(_kind, self.live.values()))
        self._modes = [(part, part.training) for part in self.module.modules()]
        buffers = zip(self.module.buffers(), self._pristine.buffers(), strict=True)
        self._unsaved = [(own, given) for own, given in buffers if id(own) not in self._shared]
        self.plain = all(map(_is_plain, self.module.modules()))

    def load(self, start: Mapping[str, Tensor], prefix: str, reuse: bool) -> None:
        """Make ready for the next client.

        Args:
            start: The tensors that it starts from, by name.
            prefix: What their names begin with.
            reuse: Go on with the same copy, if nothing but tensors has changed in it.
        """
        if not (reuse and self._is_as_it_was()):
            self.fresh()
        for parameter, required in self._required:
            parameter.requires_grad = required
            parameter.grad = parameter._backward_hooks = None
            if parameter._post_accumulate_grad_hooks:
                parameter._post_accumulate_grad_hooks.clear()
        self.frozen.take(start)
        with torch.no_grad():
            columns = [start[f"{prefix}{name}"] for name in self.live]
            torch._foreach_copy_(list(self.live.values()), columns)

    def tensors(self) -> dict[str, Tensor]:
        """Return what stands in the copy now, by name.

        Raises:
            RuntimeError: If a tensor of the copy is gone, or of another form.
        """
        if self._is_as_it_was():
            return {**self.live, **self._frozen}
        held = state_tensors(self.module)
        for name, kind in zip(self.live, self._kinds, strict=True):
            if (now := held.get(name)) is None:
                raise RuntimeError(f"it replaced or deleted its {name}")
            if _kind(now) != kind:
                raise RuntimeError(f"it changed the shape, type or device of its {name}")
        return {name: held[name] for name in (*self.live, *self._frozen)}

    def _is_as_it_was(self) -> bool:
        """Return whether nothing but tensors has changed in the copy; set its modes back."""
        if not self.plain:
            return False
        for part, mode in self._modes:
            if part.training is not mode:
                part.training = mode
        try:
            same = all(now == before for now, before in self._attributes)
        except Exception:  # what has been put there can't be compared
            return False
        return (
            same
            and self._registered() == self._held
            and list(map(_kind, self.live.values())) == self._kinds
            and all(torch.equal(own, given) for own, given in self._unsaved)
        )

    def _registered(self) -> tuple[list[int], list[int]]:
        """Return how much the registers of the copy hold, and what, by its ``id``."""
        values = chain.from_iterable(map(dict.values, self._registers))
        return list(map(len, self._registers)), list(map(id, values))


def ready(template: L.LightningModule) -> L.LightningModule:
    """Return a copy of a client module in the modes in which it trains."""
    module = copy.deepcopy(template)
    return rest_frozen(module.train() if isinstance(module, Task) else module)


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device, bool]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.is_inference()


def _is_plain(part: nn.Module) -> bool:
    """Return whether a module's attributes can't change but by being set anew."""
    if isinstance(part, Metric | MetricCollection):  # they count their updates
        return True
    return all(n in _OF_A_MODULE or _is_constant(value) for n, value in vars(part).items())


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return isinstance(value, _CONSTANT)


_CONSTANT = (
    *(bool, int, float, str, bytes, type(None), type, torch.dtype, torch.device),
    *(FunctionType, BuiltinFunctionType, partial),
)
_OF_A_MODULE = {*vars(nn.Module()), *vars(L.LightningModule())} | {"_hparams", "_trainer"}


class AloneClient:
    """One client by itself, as a half sees it: a :class:`~pflight.half.LocalClient`.

    Args:
        copies: The module's copies.
        half: The half of this model.
        own: The half's own entries, without their prefix.
        scalars: ``num_samples`` and the others, by name.
        anchor: What the server sent.
        shared: For a personal copy, the client whose model it stands beside.

    Attributes:
        has_loss: Whether a training step has given a loss.
        skipped: Whether the last one returned none.
    """

    def __init__(
        self,
        copies: Copies,
        half: Half,
        own: Mapping[str, Tensor],
        scalars: Mapping[str, Tensor],
        anchor: Mapping[str, Tensor] | None,
        shared: AloneClient | None = None,
    ) -> None:
        self.copies = copies
        self.half = half
        self.module = copies.module
        self.trainer = copies.trainer
        self.own = own
        self.anchor = anchor
        self.shared = shared
        self.memory: Mapping[str, Tensor] | None = None
        self.num_samples, self.mean_samples, self.seen, self.num_steps = (
            scalars[name] for name in SCALARS
        )
        parameters = {*copies.parameters}
        self.weights = {name: copies.live[name] for name in copies.parameters}
        self.buffers = {name: t for name, t in copies.live.items() if name not in parameters}
        self.has_loss = self.skipped = False
        self._own_step: Callable[[], Tensor] | None = None
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []
        self.trainer.penalty = self._penalty

    # What a half asks for

    def task_loss(self, batch: Any) -> Tensor:
        """See :class:`~pflight.half.LocalClient`."""
        if self._own_step is None:
            return task_loss(self.module, batch)
        return self._own_step()

    def task_loss_at(
        self,
        weights: Mapping[str, Tensor],
        batch: Any,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """See :class:`~pflight.half.LocalClient`."""
        held = self.buffers if buffers is None else buffers
        return loss_at(self.module, {**weights, **held}, batch)

    def task_loss_and_logits(self, batch: Any) -> tuple[Tensor, Tensor]:
        """See :class:`~pflight.half.LocalClient`."""
        with noting_calls(self.module) as self._calls:
            loss = self.task_loss(batch)
        return loss, logits_of(self._calls)

    def logits_with(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """See :class:`~pflight.half.LocalClient`."""
        return call_again(self.module, tensors, self._calls)

    def mean(self, values: Tensor) -> Tensor:
        """See :class:`~pflight.half.LocalClient`."""
        return values.sum() / len(values)

    def state(self) -> dict[str, Tensor]:
        """See :class:`~pflight.half.LocalClient`."""
        held = self.copies.tensors()
        return {name: held[name] for name in self.copies.live}

    # What the engine asks for

    def __call__(self, x: Tensor) -> Tensor:
        """Return what the module gives."""
        return self.module(x)

    def eval(self) -> None:
        """Put the module into evaluation mode."""
        self.module.eval()

    def remember(self) -> Mapping[str, Tensor]:
        """Return what the half keeps of this client."""
        return self.half.remember(self)

    def after_training(self) -> None:
        """Let the half change its own entries."""
        self.half.after_training(self)

    def step(self, own_step: Callable[[], Any], batch: Any) -> Any:
        """Run a training step of the module, with what the half makes of its loss."""
        if not self.module.automatic_optimization:
            return own_step()
        if trains_as_a_task(self.module):
            self.has_loss = True
            loss = self.half.loss(self, batch)
            self.module.log("train/loss", loss.detach(), batch_size=len(batch[1]))
            return loss
        output: Any = None

        def run() -> Tensor:
            nonlocal output
            output = own_step()
            loss = loss_of(output)
            if loss is None:
                raise _StepSkippedError
            return loss

        self._own_step, self.skipped = run, False
        try:
            loss = self.half.loss(self, batch)
            self.has_loss = True
        except _StepSkippedError:
            self.skipped = True
            return output
        finally:
            self._own_step = None
        self.has_loss = True
        return {**output, "loss": loss} if isinstance(output, dict) else loss

    def loss(self, batch: Any, size: int) -> Tensor | None:
        """Return the loss of a training step, outside of training and without a word in logs."""

        def step(batch: Any) -> Tensor | None:
            with muted(self.module):
                own = self.module.training_step
                return loss_of(self.step(lambda: own(batch, 0), batch))

        return self.trainer.loss(batch, size, step)

    def _penalty(self) -> Tensor | None:
        return self.half.penalty(self)


class _StepSkippedError(Exception):
    """A training step returned no loss."""


def task_loss(module: L.LightningModule, batch: Any) -> Tensor:
    """Return a module's loss on a batch: that of its ``loss`` or else of its training step."""
    own = getattr(module, "loss", None)
    if callable(own) and not isinstance(own, nn.Module):
        return own(batch)
    with muted(module):
        loss = loss_of(module.training_step(batch, 0))
    if loss is None:
        raise RuntimeError("its training_step returned no loss")
    return loss


def loss_at(module: L.LightningModule, tensors: Mapping[str, Tensor], batch: Any) -> Tensor:
    """Return a module's loss on a batch with other tensors in place of its own."""
    places = other_places(module)
    tied = {alias: tensors[name] for alias, name in places.items() if name in tensors}
    named = {f"module.{name}": tensor for name, tensor in {**tensors, **tied}.items()}
    return functional_call(_Loss(module), named, (batch,), tie_weights=False)


class _Loss(nn.Module):
    """Gives the loss of a module as its forward pass, as ``functional_call`` needs it."""

    def __init__(self, module: L.LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Tensor:
        return task_loss(self.module, batch)


Calls = list[tuple[tuple[Any, ...], dict[str, Any], Any]]
"""Arguments and output of each call of a module."""


@contextmanager
def noting_calls(module: nn.Module) -> Iterator[Calls]:
    """Note what goes into a module's ``forward``, and what comes out."""
    calls: Calls = []

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.append((args, kwargs, output))

    hook = module.register_forward_hook(note, with_kwargs=True)
    try:
        yield calls
    finally:
        hook.remove()


def logits_of(calls: Calls) -> Tensor:
    """Return what the last call gave."""
    if not calls:
        raise RuntimeError("its loss never calls self(...), whose logits are asked for")
    return calls[-1][2]


@torch.no_grad()
def call_again(module: nn.Module, tensors: Mapping[str, Tensor], calls: Calls) -> Tensor:
    """Make the last call again, with other tensors and in evaluation mode."""
    args, kwargs, _ = calls[-1]
    training = [part for part in module.modules() if part.training]
    places = other_places(module)
    tied = {alias: tensors[name] for alias, name in places.items() if name in tensors}
    for part in training:
        part.training = False
    try:
        return functional_call(module, {**tensors, **tied}, args, kwargs, tie_weights=False)
    finally:
        for part in training:
            part.training = True


@contextmanager
def resting(module: L.LightningModule, layout: StateLayout, phase: Phase | None) -> Iterator[None]:
    """Let the parameters that don't train in a phase rest, and layers without any that do."""
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


def phase_of(phases: Sequence[Phase] | None, epoch: int) -> Phase | None:
    """Return the phase to which an epoch belongs."""
    begun = [phase for phase in phases or () if phase.first <= epoch]
    return begun[-1] if begun else None


class Stream:
    """The batches of some visits to clients, in their order; each is asked for once."""

    def __init__(self, data: FederatedDataModule, split: Split, visits: Sequence[Visit]) -> None:
        self._data = data
        self._split = split
        self._visits = list(visits)
        self._of: dict[int, list[int]] = {}
        for place, visit in enumerate(self._visits):
            self._of.setdefault(visit.client, []).append(place)
        self._iterator: Iterator[Any] | None = None
        self._next = 0, 0  # visit and part that the iterator yields next

    def visits(self, client: int) -> list[Visit]:
        """Return the visits to a client."""
        return [self._visits[place] for place in self._of.get(client, ())]

    def visits_of(self, client: int) -> Iterator[tuple[Visit, Iterator[Any]]]:
        """Yield the visits to a client, each with its batches."""
        for place in self._of.get(client, ()):
            yield self._visits[place], self._batches(place)

    def _batches(self, place: int) -> Iterator[Any]:
        for part in range(len(self._visits[place].parts)):
            if self._iterator is None or (place, part) != self._next:
                # The client before has failed, or has skipped the rest of its epoch.
                assert part == 0
                self._iterator = iter(self._data.batches(self._split, self._visits[place:]))
            try:
                batch = next(self._iterator)
            except BaseException:
                self._iterator = None
                raise
            last = part + 1 == len(self._visits[place].parts)
            self._next = (place + 1, 0) if last else (place, part + 1)
            yield batch

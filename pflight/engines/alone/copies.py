"""Copies of a client module. One client after the other trains in them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from pflight.engines.check import OF_A_MODULE
from pflight.states.state import StateLayout, rest_frozen, state_tensors
from pflight.task import Task

from .contents import CONSTANTS, contents
from .trainer import ModuleTrainer, nothing


@contextmanager
def muted(module: L.LightningModule) -> Iterator[None]:
    """Keep a copy from logging, and its metrics from counting."""
    metrics = [part for part in module.modules() if isinstance(part, Metric)]
    counted = [(metric, _states(metric), metric._update_count) for metric in metrics]
    for metric in metrics:  # not in place: the pass may be differentiated
        _set_states(metric, metric._copy_state_dict())
    own = vars(module)
    before = {name: own.get(name) for name in ("log", "log_dict")}  # it may be muted already
    own.update(dict.fromkeys(before, nothing))
    try:
        yield
    finally:
        for name, held in before.items():
            if held is None:
                del own[name]
            else:
                own[name] = held
        for metric, states, count in counted:
            _set_states(metric, states)
            metric._update_count, metric._computed = count, None


def _states(metric: Metric) -> dict[str, Any]:
    return {name: getattr(metric, name) for name in metric._defaults}


def _set_states(metric: Metric, states: Mapping[str, Any]) -> None:
    for name, value in states.items():
        setattr(metric, name, value)


class Frozen:
    """The tensors of a module that never train. All clients share them.

    Args:
        module: The module.
        layout: Its state layout.
    """

    def __init__(self, module: nn.Module, layout: StateLayout) -> None:
        tensors = state_tensors(module)
        self._held = {name: tensors[name] for name in layout.frozen}
        self._values = {name: tensor.detach().clone() for name, tensor in self._held.items()}
        self._taken: dict[str, tuple[Tensor, int]] = {}  # held, so that their memory is not reused

    def take(self, state: Mapping[str, Tensor]) -> None:
        """Take the values of a state, unless they are the same memory as the last ones."""
        with torch.no_grad():
            for name, held in self._held.items():
                given = state[name]
                last, version = self._taken.get(name, (None, 0))
                if last is None or last.data_ptr() != given.data_ptr() or version != given._version:
                    self._taken[name] = given, given._version
                    self._values[name].copy_(given)
                    held.copy_(given)

    def mend(self, module: nn.Module) -> list[str]:
        """Reset the changed frozen tensors in a copy of the module. Return their names."""
        if not self._values:
            return []
        now = state_tensors(module)
        changed = [n for n, value in self._values.items() if not _same(now[n], value)]
        with torch.no_grad():
            for name in changed:
                self._held[name].copy_(self._values[name])
        return changed


def _same(now: Tensor, before: Tensor) -> bool:
    return torch.equal(now, before) or torch.allclose(now, before, 0, 0, equal_nan=True)


class Copies:
    """Copies of a module, one at a time. They share their tensors; each client overwrites these.

    A participation begins with a pristine copy. So no list, counter or buffer of one client reaches
    the next. Frozen tensors are shared by all. A copy without other changes is used again.

    Args:
        template: The client module.
        layout: Its state layout.
        precision: The precision plugin of the federation's Trainer.
        device: Where the copies train.
        channels_last: Whether the copies use the memory format channels-last.
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
        for part in self._pristine.modules():
            if isinstance(part, Metric):  # it must not add up counts of different ranks' clients
                part.distributed_available_fn = _never
        if channels_last:
            self._pristine.to(memory_format=torch.channels_last)
        tensors, frozen, own = state_tensors(self._pristine), {*layout.frozen}, {*layout.own}
        names = [name for name in layout.names if name not in own]
        self.live = {name: tensors[name] for name in names if name not in frozen}
        self.frozen = Frozen(self._pristine, layout)
        self._frozen = {name: tensors[name] for name in layout.frozen}
        self._shared = {id(t): t for t in [*tensors.values(), *self._pristine.parameters()]}
        self.parameters = [name for name in layout.parameters if name in self.live]
        self.shared = layout.shared_parameters
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
        self._holders = [part for part in self.module.modules() if _objects(part)]
        try:
            self._contents = self._held_by_objects()
        except TypeError:
            self.plain = False
        else:
            self.plain = True

    def close(self) -> None:
        """Free the memory of all copies at once. They hold each other and are collected late."""
        for module in (self._pristine, self.module):
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.data = tensor.new_empty(0)

    def load(self, start: Mapping[str, Tensor], prefix: str, reuse: bool) -> None:
        """Prepare a copy for the next client.

        Args:
            start: The client's start tensors by name.
            prefix: Prefix of the tensors' names.
            reuse: Use the same copy again if only its tensors have changed.
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

    def set_round(self, round_index: int) -> None:
        """Set the copy's round. This does not count as a change."""
        _, as_it_was = self._attributes[0]
        self.module.round_index = as_it_was["round_index"] = round_index  # type: ignore[assignment]

    def tensors(self) -> dict[str, Tensor]:
        """Return the copy's tensors by name.

        Raises:
            RuntimeError: If a tensor of the copy is missing or has another form.
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
        """Return whether only tensors have changed in the copy. Reset its modes."""
        if not self.plain:
            return False
        for part, mode in self._modes:
            if part.training is not mode:
                vars(part)["training"] = mode  # faster than setting the attribute
        try:
            same = all(now == before for now, before in self._attributes)
            same = same and self._held_by_objects() == self._contents
        except Exception:  # a new value can't be compared
            return False
        return (
            same
            and self._registered() == self._held
            and list(map(_kind, self.live.values())) == self._kinds
            and all(torch.equal(own, given) for own, given in self._unsaved)
        )

    def _held_by_objects(self) -> list[Any]:
        """Return what attributes hold that can change without a new assignment."""
        return contents(chain.from_iterable(map(_objects, self._holders)))

    def _registered(self) -> tuple[list[int], list[int]]:
        """Return the sizes of the copy's registers, and the ``id`` of each entry."""
        values = chain.from_iterable(map(dict.values, self._registers))
        return list(map(len, self._registers)), list(map(id, values))


def _objects(part: nn.Module) -> list[Any]:
    """Return a module's own attributes that can change without a new assignment."""
    if isinstance(part, Metric | MetricCollection):  # they count their updates
        return []
    return [
        value
        for name, value in vars(part).items()
        if name not in OF_A_MODULE and not isinstance(value, CONSTANTS)
    ]


def _never() -> bool:
    return False


def ready(template: L.LightningModule) -> L.LightningModule:
    """Return a copy of a client module in its training modes."""
    module = copy.deepcopy(template)
    return rest_frozen(module.train() if isinstance(module, Task) else module)


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device, bool]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.is_inference()

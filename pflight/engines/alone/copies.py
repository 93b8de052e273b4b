"""Copies of a client module. One client after the other trains in them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from pflight.errors import ConfigurationError, described
from pflight.states.state import StateLayout, rest_frozen, state_tensors
from pflight.task import Task

from .trainer import ModuleTrainer


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
        self.plain = all(map(_is_plain, self.module.modules()))

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
        except Exception:  # a new value can't be compared
            return False
        return (
            same
            and self._registered() == self._held
            and list(map(_kind, self.live.values())) == self._kinds
            and all(torch.equal(own, given) for own, given in self._unsaved)
        )

    def _registered(self) -> tuple[list[int], list[int]]:
        """Return the sizes of the copy's registers, and the ``id`` of each entry."""
        values = chain.from_iterable(map(dict.values, self._registers))
        return list(map(len, self._registers)), list(map(id, values))


def set_up(module: L.LightningModule) -> L.LightningModule:
    """Return a copy of a client module after a Trainer's set-up calls.

    Raises:
        ConfigurationError: If it has an attribute that can't be copied.
    """
    module = _copied(module)
    module.prepare_data()
    module.setup(stage="fit")
    module.configure_model()
    if any(is_overridden(hook, module) for hook in ("prepare_data", "setup", "configure_model")):
        _copied(module)
    return module


def _copied(module: L.LightningModule) -> L.LightningModule:
    try:
        return copy.deepcopy(module)
    except Exception as error:  # an attribute may raise anything
        raise ConfigurationError(_why_not_copied(module, error)) from error


def _why_not_copied(module: L.LightningModule, error: Exception) -> str:
    """Return a message: the attribute of a module that can't be copied, and the remedy."""
    for prefix, part in module.named_modules():
        where = ".".join(filter(None, ["client", prefix]))
        for name, value in _attributes(part):
            try:
                copy.deepcopy(value)
            except Exception as own:
                name, value = _innermost(f"{where}.{name}", value)
                return (
                    f"{name}, of type {type(value).__name__}, can't be copied, and each client "
                    f"trains a copy of the module: {_remedy(part, value, own)}"
                )
    name = type(module).__name__
    return f"{name} can't be copied, and each client trains a copy of it: {described(error)}"


def _attributes(part: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module itself, its buffers, hyperparameters and hooks."""
    for name, value in vars(part).items():
        if name not in _OF_A_MODULE:
            yield name, value
        elif name == "_buffers" or (name.endswith("_hooks") and isinstance(value, Mapping)):
            hooks = "" if name == "_buffers" else f"{name}."
            yield from ((f"{hooks}{key}", one) for key, one in value.items())
        elif name == "_hparams":
            yield "hparams", value


def _innermost(name: str, value: Any, outside: tuple[int, ...] = ()) -> tuple[str, Any]:
    """Return the innermost value in an object that can't be copied, with its name."""
    if isinstance(value, Mapping):
        inner = ((f"{name}[{key!r}]", one) for key, one in value.items())
    elif isinstance(value, list | tuple):
        inner = ((f"{name}[{place}]", one) for place, one in enumerate(value))
    else:
        inner = ((f"{name}.{key}", one) for key, one in getattr(value, "__dict__", {}).items())
    if isinstance(value, ModuleType | type) or len(outside) > _DEEPEST:
        return name, value
    for inner_name, one in inner:
        try:
            copy.deepcopy(one)
        except Exception:
            if id(one) not in outside:
                return _innermost(inner_name, one, (*outside, id(value)))
    return name, value


def _remedy(part: nn.Module, value: Any, error: Exception) -> str:
    if any("WeightNorm" in type(hook).__name__ for hook in part._forward_pre_hooks.values()):
        return "use torch.nn.utils.parametrizations.weight_norm in place of the hook"
    if isinstance(value, Tensor):
        return "it is the result of a computation that is differentiated: detach() it"
    if isinstance(value, ModuleType):
        return "import it at the top of the file"
    return f"make it in the method that uses it ({described(error)})"


def ready(template: L.LightningModule) -> L.LightningModule:
    """Return a copy of a client module in its training modes."""
    module = copy.deepcopy(template)
    return rest_frozen(module.train() if isinstance(module, Task) else module)


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device, bool]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.is_inference()


def _is_plain(part: nn.Module) -> bool:
    """Return whether a module's attributes can change only by a new assignment."""
    if isinstance(part, Metric | MetricCollection):  # they count their updates
        return True
    return all(n in _OF_A_MODULE or _is_constant(value) for n, value in vars(part).items())


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return isinstance(value, _CONSTANT)


_DEEPEST = 20  # searched levels of attributes
_CONSTANT = (
    *(bool, int, float, str, bytes, type(None), type, torch.dtype, torch.device),
    *(FunctionType, BuiltinFunctionType, partial),
)
_OF_A_MODULE = {*vars(nn.Module()), *vars(L.LightningModule())} | {"_hparams", "_trainer"}

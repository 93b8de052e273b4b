"""States of models: the tensors of a client's model, and arithmetic on stacks of states.

A *state* maps names, as in ``client.state_dict()``, to tensors. A *stack* of ``C`` states is a
TensorDict of batch size ``[C]`` with the same names. The server's broadcasts, the clients' answers
and the clients' memory all have this form.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from tensordict.utils import expand_as_right
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

from pflight.errors import ConfigurationError
from pflight.runs.distributed import all_max, all_sum

from .head import EXTRA


class StateModule(nn.Module):
    """Holds a state under its own dotted names, as parameters or as buffers.

    Args:
        state: Names to tensors; every tensor is cloned.
        parameters: Names that become trainable parameters; all others become buffers.
        persistent: Whether the buffers appear in ``state_dict()``.

    Example:
        >>> held = StateModule({"network.weight": torch.ones(2)}, parameters=["network.weight"])
        >>> list(held.state_dict())
        ['network.weight']
    """

    def __init__(
        self,
        state: Mapping[str, Tensor],
        parameters: Collection[str] = (),
        persistent: bool = True,
    ) -> None:
        super().__init__()
        self._places: dict[str, tuple[nn.Module, str]] = {}
        for name, value in state.items():
            *path, leaf = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            value = value.detach().clone()
            if name in parameters:
                module.register_parameter(leaf, nn.Parameter(value))
            else:
                module.register_buffer(leaf, value, persistent=persistent)
            self._places[name] = (module, leaf)

    def tensors(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return the tensors by name, without copies: all in the given order, or only ``names``."""
        chosen = self._places if names is None else names
        return {name: getattr(*self._places[name]) for name in chosen}

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Replace the tensors by others in the same order, without a copy; buffers only."""
        for (module, leaf), tensor in zip(self._places.values(), tensors, strict=True):
            module._buffers[leaf] = tensor


@dataclass(frozen=True)
class StateLayout:
    """The tensors of one client's model: names, shapes and kinds.

    Attributes:
        template: Every tensor of the initial client module by name, in ``state_dict()`` order.
        parameters: Names of trainable parameters.
        averaged: Names of floating-point buffers, such as BatchNorm's running statistics.
        counters: Names of integer buffers, such as ``num_batches_tracked``.
        frozen: Names of tensors that never change and never travel: parameters that don't train,
            and the buffers of modules with only such parameters.
        aliases: Further names of tied tensors in ``state_dict()``, with the first name of each.
        own: Names of a client method's tensors besides the client module's ``state_dict()``.
        private: Names of entries that the server callback declares to stay with the client.
    """

    template: dict[str, Tensor]
    parameters: tuple[str, ...]
    averaged: tuple[str, ...]
    counters: tuple[str, ...]
    frozen: tuple[str, ...]
    aliases: dict[str, str]
    own: tuple[str, ...] = ()
    private: tuple[str, ...] = ()

    @classmethod
    def of(cls, client: nn.Module) -> StateLayout:
        """Read the layout of a client module.

        Raises:
            ConfigurationError: If it has no trainable parameter.
        """
        tensors = state_tensors(client)
        for name, tensor in tensors.items():
            if is_lazy(tensor):
                raise ConfigurationError(
                    f"{name!r} of the client is not initialised yet: run a lazy network on a "
                    "batch before you give it to a federation"
                )
        trained = {name: p.requires_grad for name, p in client.named_parameters()}
        resting = _resting_buffers(client) & {*tensors}
        buffers = [name for name in tensors if name not in trained and name not in resting]
        floating = [n for n in buffers if tensors[n].is_floating_point() or tensors[n].is_complex()]
        layout = cls(
            template={name: t.detach().clone() for name, t in tensors.items()},
            parameters=tuple(n for n in tensors if trained.get(n, False)),
            averaged=tuple(floating),
            counters=tuple(n for n in buffers if n not in floating),
            frozen=tuple(n for n in tensors if n in resting or not trained.get(n, True)),
            aliases=_aliases(client),
        )
        if not layout.parameters:
            raise ConfigurationError(f"{type(client).__name__} has no trainable parameter")
        return layout

    def with_entries(self, entries: Mapping[str, Tensor]) -> StateLayout:
        """Return this layout with further entries that clients keep."""
        floating = [n for n, t in entries.items() if t.is_floating_point() or t.is_complex()]
        return replace(
            self,
            template={**self.template, **{n: t.detach().clone() for n, t in entries.items()}},
            averaged=(*self.averaged, *floating),
            counters=(*self.counters, *(n for n in entries if n not in floating)),
            own=(*self.own, *entries),
        )

    def with_private(self, names: Collection[str]) -> StateLayout:
        """Return this layout with private entries. Frozen entries don't travel anyway."""
        chosen = {*names} - {*self.frozen}
        return replace(self, private=tuple(name for name in self.template if name in chosen))

    def with_copy(self, prefix: str) -> StateLayout:
        """Return this layout with a second copy of all tensors that can change.

        Args:
            prefix: Prefix of the copy's names.
        """
        held = {*self.frozen}
        copied = {f"{prefix}{name}": t for name, t in self.template.items() if name not in held}

        def both(names: tuple[str, ...]) -> tuple[str, ...]:
            return (*names, *(f"{prefix}{name}" for name in names))

        return replace(
            self,
            template={**self.template, **copied},
            parameters=both(self.parameters),
            averaged=both(self.averaged),
            counters=both(self.counters),
            own=(*self.own, *copied),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in ``state_dict()`` order."""
        return tuple(self.template)

    @property
    def moving(self) -> tuple[str, ...]:
        """Names of all tensors that are not frozen, in ``state_dict()`` order."""
        frozen = {*self.frozen}
        return tuple(name for name in self.template if name not in frozen)

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of all buffers."""
        held = {*self.averaged, *self.counters}
        return tuple(name for name in self.template if name in held)

    @property
    def shared_parameters(self) -> tuple[str, ...]:
        """Names of the client module's trainable parameters that are not private."""
        stay = {*self.private, *self.own}
        return tuple(name for name in self.parameters if name not in stay)

    @property
    def module_buffers(self) -> tuple[str, ...]:
        """Names of the client module's own buffers, without a client method's additions."""
        added = {*self.own, *self.extra}
        return tuple(name for name in self.buffers if name not in added)

    @property
    def extra(self) -> tuple[str, ...]:
        """Names of the extra module's tensors. A client method adds this module."""
        return tuple(name for name in self.template if name.startswith(f"{EXTRA}."))

    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        """Names by layer, in ``state_dict()`` order; each name is in exactly one layer.

        A layer is a module with tensors of its own, under its name in ``client.get_submodule``. So
        a weight and its bias are in one layer, and a BatchNorm is a layer with its buffers. A tied
        tensor is in the layer of its first name. The tensors of a parametrization, such as
        ``weight_norm``, are in the layer of the parametrized module.

        Example:
            >>> network = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, affine=False))
            >>> layers = StateLayout.of(network).layers
            >>> layers["0"]
            ('0.weight', '0.bias')
            >>> layers["1"]
            ('1.running_mean', '1.running_var', '1.num_batches_tracked')
        """
        layers: dict[str, tuple[str, ...]] = {}
        for name in self.template:
            *path, _ = name.split(".")
            layer = ".".join(takewhile(lambda part: part != "parametrizations", path))
            layers[layer] = (*layers.get(layer, ()), name)
        return layers

    @property
    def nbytes(self) -> int:
        """Size in bytes of a client's own copy: a state without its frozen entries."""
        return sum(self.template[name].nbytes for name in self.moving)

    def state_dict(self, state: Mapping[str, Tensor], extra: bool = False) -> dict[str, Tensor]:
        """Return a copy of one state with all names of ``client.state_dict()``, in its order.

        Args:
            state: The state.
            extra: Whether to include the tensors of the extra module.
        """
        own = {*self.own} if extra else {*self.own, *self.extra}
        copy = {name: state[name].detach().clone() for name in self.template if name not in own}
        copy.update((alias, copy[name]) for alias, name in self.aliases.items())
        return copy

    def describe(self) -> dict[str, str]:
        """Return shape and dtype by name, as primitives for a checkpoint."""
        return {
            name: f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"
            for name, t in self.template.items()
        }


def state_tensors(client: nn.Module) -> dict[str, Tensor]:
    """Return the live tensors of a client's model by name; tied ones once, under their first name.

    Only parameters and buffers are included, but no states of torchmetrics objects. The extra state
    of a module is neither.
    """
    tensors = _named_tensors(client)
    for alias in _aliases(client):
        del tensors[alias]
    for prefix, module in client.named_modules():
        if isinstance(module, Metric):
            for name in [name for name in tensors if name.startswith(f"{prefix}.")]:
                del tensors[name]
    return tensors


ModuleT = TypeVar("ModuleT", bound=nn.Module)
ValueT = TypeVar("ValueT")


def rest_frozen(module: ModuleT) -> ModuleT:
    """Put the frozen parts of a module, with no trainable parameter, into evaluation mode.

    Then dropout does not change a frozen backbone, and BatchNorm keeps its statistics.
    """
    for part in resting_parts(module):
        part.training = False
    return module


def with_state(module: ModuleT, state: Mapping[str, Tensor]) -> ModuleT:
    """Return a copy of a module with the tensors of a state, in the state's dtypes.

    Tensors outside of the module's ``state_dict()`` are as in the module.
    """
    module = copy.deepcopy(module)
    for name, tensor in state_tensors(module).items():
        tensor.data = tensor.data.to(state[name].dtype)  # float64 stays float64
    module.load_state_dict({**module.state_dict(), **state}, strict=False)
    return module


def resting_parts(module: nn.Module) -> list[nn.Module]:
    """Return the frozen parts of a module, with no trainable parameter, and their submodules."""
    found: list[nn.Module] = []
    for part in module.modules():
        trains = [parameter.requires_grad for parameter in part.parameters()]
        if trains and not any(trains):
            found += part.modules()
    return found


def _resting_buffers(client: nn.Module) -> set[str]:
    """Return the names of the buffers that rest.

    These are buffers of modules with parameters but no trainable one, and constants that are not
    finite, such as a causal mask.
    """
    buffers = client.named_buffers()
    resting = {n for n, t in buffers if t.is_floating_point() and not t.isfinite().all()}
    for prefix, module in client.named_modules():
        trains = [parameter.requires_grad for parameter in module.parameters(recurse=False)]
        if trains and not any(trains):
            start = f"{prefix}." if prefix else ""
            resting.update(f"{start}{name}" for name, _ in module.named_buffers(recurse=False))
    return resting


def _named_tensors(client: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers in ``state_dict()`` by all their names."""
    kinds = client.named_parameters, client.named_buffers
    held = {name for named in kinds for name, _ in named(remove_duplicate=False)}
    return {n: t for n, t in client.state_dict(keep_vars=True).items() if n in held}


def _aliases(client: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    names = {n: first.setdefault(id(t), n) for n, t in _named_tensors(client).items()}
    return {alias: name for alias, name in names.items() if alias != name}


def other_places(module: nn.Module) -> dict[str, str]:
    """Return the further places of tied tensors: one name for each place, and the first name.

    A module with two names counts as one place.
    """
    aliases = _aliases(module)
    names: dict[tuple[int, str], str] = {}
    for name in (*aliases.values(), *aliases):
        names.setdefault(_place(module, name), name)
    return {name: aliases[name] for name in names.values() if name in aliases}


def _place(module: nn.Module, name: str) -> tuple[int, str]:
    owner, _, attribute = name.rpartition(".")
    return id(module.get_submodule(owner)), attribute


def call_with(
    module: ModuleT,
    tensors: Mapping[str, Tensor],
    function: Callable[..., ValueT],
    *args: Any,
    places: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> ValueT:
    """Call a function of a module with other tensors instead of the module's own.

    PyTorch's ``functional_call`` also ties tensors. But it leaves some behind in a module with two
    names.

    Args:
        module: The module.
        tensors: Tensors by name; tied ones by their first name.
        function: A function of the module and the further arguments.
        *args: Further arguments of the function.
        places: The result of :func:`other_places`, if already known.
        **kwargs: Further arguments of the function.
    """
    places = other_places(module) if places is None else places
    tied = {alias: tensors[name] for alias, name in places.items() if name in tensors}
    named = {f"module.{name}": tensor for name, tensor in {**tensors, **tied}.items()}
    return functional_call(_Function(module, function), named, args, kwargs, tie_weights=False)


class _Function(nn.Module):
    """A module with a function as its forward pass, for ``functional_call``."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.module, *args, **kwargs)


def state_bytes(states: TensorDict) -> int:
    """Return the size in bytes of each state of a stack ``[C]``.

    Example:
        >>> state_bytes(TensorDict({"w": torch.zeros(3, 5)}, [3]))
        20
    """
    return sum(leaf[0].nbytes for _, leaf in entries(states)) if len(states) else 0


def squared_distance(states: TensorDict, center: Mapping[str, Tensor]) -> Tensor:
    """Return the squared L2 distance ``[C]`` of each state of a stack to one state.

    The sum runs over the names of ``center``. Differences are taken first, then squared. This keeps
    the precision for models that are close.
    """

    def squares(leaf: Tensor, value: Tensor) -> Tensor:  # in one pass over memory
        return rows(F.mse_loss(leaf, value.expand_as(leaf), reduction="none"))

    parts = [squares(states[name], value).sum(1) for name, value in center.items()]
    return torch.stack(parts).sum(0)


def largest_values(states: TensorDict, names: Iterable[str]) -> Tensor:
    """Return the largest absolute value ``[C]`` in the named entries of each state of a stack.

    Example:
        >>> states = TensorDict({"v": torch.zeros(2), "w": torch.tensor([3.0, -4.0])}, [2])
        >>> largest_values(states, ["v", "w"])
        tensor([3., 4.], dtype=torch.float64)
    """

    def largest(leaf: Tensor) -> Tensor:  # of all rows of an expanded view at once
        own = rows(leaf[:1] if leaf.stride(0) == 0 else leaf)
        if not own.shape[1]:
            return torch.zeros(len(leaf), dtype=torch.double, device=leaf.device)
        own = own.abs() if own.is_complex() else own
        # This takes a thirtieth of the time of the maximum norm.
        return torch.maximum(own.amax(dim=1), -own.amin(dim=1)).double().expand(len(leaf))

    return torch.stack([largest(states[name]) for name in names]).amax(dim=0)


def moved(before: TensorDict, after: TensorDict, names: Iterable[str]) -> Tensor:
    """Return a mask ``[C]`` of a stack's states: whether one of the named entries has changed.

    Example:
        >>> before = TensorDict({"w": torch.zeros(2, 3)}, [2])
        >>> after = TensorDict({"w": torch.tensor([[0, 0, 0], [0, 1, 0.0]])}, [2])
        >>> moved(before, after, ["w"])
        tensor([False,  True])
    """
    changes = [rows(before[name] != after[name]).any(dim=1) for name in names]
    return torch.stack(changes).any(dim=0)


def entries(states: TensorDict) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the names and tensors of a stack, which is a flat dict."""
    for name, leaf in states.items():
        assert isinstance(name, str)
        assert isinstance(leaf, Tensor)
        yield name, leaf


def rows(leaf: Tensor) -> Tensor:
    """Flatten one entry of a stack, ``[C, ...]``, to ``[C, size]``.

    Example:
        >>> rows(torch.zeros(3)).shape, rows(torch.zeros(3, 2, 4)).shape
        (torch.Size([3, 1]), torch.Size([3, 8]))
    """
    return leaf.flatten(1) if leaf.dim() > 1 else leaf.unsqueeze(1)


class WeightedMean:
    """Accumulates stacks of states into weighted means of ``groups`` groups.

    Floating-point tensors are averaged with the given weights. Integer tensors take their maximum:
    so ``num_batches_tracked`` stays an integer and does not depend on the order. It uses the
    memory of ``groups`` states, for any number of added states.

    Args:
        like: A state with the names, shapes, dtypes and device of the means.
        groups: Number of means.

    Attributes:
        weights: Sum of each group's weights ``[groups]``; over ranks after :meth:`all_reduce`.

    Example:
        >>> mean = WeightedMean({"w": torch.zeros(2)})
        >>> states = TensorDict({"w": torch.tensor([[1.0, 1.0], [4.0, 4.0]])}, [2])
        >>> mean.add(states, weights=torch.tensor([1.0, 2.0]))
        >>> mean.compute()["w"]
        tensor([[3., 3.]])
    """

    def __init__(self, like: Mapping[str, Tensor], groups: int = 1) -> None:
        device = next((value.device for value in like.values()), torch.device("cpu"))
        self.weights = torch.zeros(groups, dtype=torch.float64, device=device)
        self.sums: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}
        for name, value in like.items():
            shape = (groups, *value.shape)
            if value.is_floating_point() or value.is_complex():
                dtype = torch.promote_types(value.dtype, torch.float32)
                self.sums[name] = torch.zeros(shape, dtype=dtype, device=device)
            else:
                lowest = torch.iinfo(value.dtype).min if value.dtype != torch.bool else False
                self.maxima[name] = torch.full(shape, lowest, dtype=value.dtype, device=device)
        self._dtypes = {name: value.dtype for name, value in like.items()}

    def add(self, states: TensorDict, weights: Tensor, groups: Tensor | None = None) -> None:
        """Add ``C`` states with weights ``[C]`` to groups ``[C]``, by default to the first."""
        weights = weights.to(self.weights)
        if groups is None:
            groups = torch.zeros(len(weights), dtype=torch.long, device=weights.device)
        spread = torch.zeros(len(self.weights), len(weights)).to(weights)  # [groups, C]
        spread[groups, torch.arange(len(weights), device=weights.device)] = weights
        self.weights += spread.sum(1)
        for name, total in self.sums.items():
            leaf = rows(states[name]).to(total.dtype)
            rows(total).addmm_(spread.to(total.dtype), leaf)
        for name, maximum in self.maxima.items():
            for group, value in zip(groups.tolist(), states[name], strict=True):
                torch.maximum(maximum[group], value, out=maximum[group])

    def all_reduce(self) -> None:
        """Add up the sums of all ranks. Every rank has to call it."""
        for total in (self.weights, *self.sums.values()):
            all_sum(total)
        for maximum in self.maxima.values():
            all_max(maximum)

    def compute(self) -> TensorDict:
        """Return the means ``[groups]``. The mean of a group with zero weight is meaningless."""
        means = {}
        for name, total in self.sums.items():
            weights = expand_as_right(self.weights.to(total.dtype), total)
            means[name] = (total / weights).to(self._dtypes[name])
        return TensorDict({**means, **self.maxima}, batch_size=[len(self.weights)])


def stack_states(states: Iterable[Mapping[str, Tensor]]) -> TensorDict:
    """Stack single states into a TensorDict of batch size ``[C]``."""
    states = list(states)
    names = states[0].keys()
    return TensorDict(
        {name: torch.stack([state[name].detach() for state in states]) for name in names},
        batch_size=[len(states)],
    )


def expand_state(state: Mapping[str, Tensor], count: int) -> TensorDict:
    """Return ``count`` copies of one state as a stack of views. It uses no memory."""
    return TensorDict(
        {name: value.detach().expand(count, *value.shape) for name, value in state.items()},
        batch_size=[count],
    )

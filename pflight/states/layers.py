"""A selection of a client's layers, such as the private ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from pflight.errors import ConfigurationError
from pflight.messages import listed
from pflight.options import NonNegativeInt, checked

from .head import head_of
from .state import StateLayout, other_places


@checked
@dataclass(frozen=True)
class Layers:
    """Selects a client's layers by name, by position or by type. One match is enough.

    The layers are :attr:`~pflight.states.state.StateLayout.layers`: modules with tensors of their
    own, in the order of ``state_dict()``. A layer has its weight, bias and buffers.

    Args:
        names: Names of layers, such as ``"network.output"``. A module's name means all layers
            inside. ``*``, ``?`` and ``[...]`` match as in file names.
        first: Number of layers to take from the start. Layers without parameters, such as a loss
            with class weights, are not counted.
        last: Number of layers to take from the end, counted in the same way.
        types: Classes of modules, such as ``torch.nn.BatchNorm2d``, with subclasses. A network may
            have none of them.
        head: Whether to take the head, as :func:`~pflight.states.head.head_of` finds it.

    Raises:
        ConfigurationError: If ``first`` or ``last`` is negative.

    Example:
        >>> network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        >>> Layers(last=1).of(network)
        ('2',)
        >>> Layers("0", types=nn.BatchNorm1d).of(network)
        ('0', '1')
        >>> Layers(head=True).of(network)
        ('2',)
        >>> Layers().of(network)
        ()
    """

    names: str | Sequence[str] = ()
    first: NonNegativeInt = 0
    last: NonNegativeInt = 0
    types: type[nn.Module] | Sequence[type[nn.Module]] = ()
    head: bool = False

    def of(self, client: nn.Module) -> tuple[str, ...]:
        """Return the names of the selected layers of a client, in the client's order.

        Raises:
            ConfigurationError: If a name matches no layer, there are too few layers, there is no
                head, or the head shares a tensor with the body.
        """
        by_layer, parameters = StateLayout.of(client).layers, dict(client.named_parameters())
        layers = tuple(by_layer)
        counted = [n for n in layers if not parameters.keys().isdisjoint(by_layer[n])]
        if max(self.first, self.last) > len(counted):
            option = "first" if self.first > len(counted) else "last"
            count = getattr(self, option)
            raise ConfigurationError(
                f"Layers: {option}={count}, but there are only {_listed(counted)}"
            )
        chosen = {*counted[: self.first], *counted[len(counted) - self.last :]}
        for pattern in [self.names] if isinstance(self.names, str) else self.names:
            inside = f"{pattern}.*"
            found = {n for n in layers if fnmatchcase(n, pattern) or fnmatchcase(n, inside)}
            if not found:
                raise ConfigurationError(
                    f"Layers: {pattern!r} matches none of the {_listed(layers, pattern)}"
                )
            chosen |= found
        if self.head:
            name = own_head(client)
            chosen |= {n for n in layers if n == name or n.startswith(f"{name}.")}
        types = self.types if isinstance(self.types, type) else tuple(self.types)
        chosen |= {name for name in layers if isinstance(client.get_submodule(name), types)}
        return tuple(name for name in layers if name in chosen)


def own_head(module: nn.Module) -> str:
    """Return the name of the head. It must share no tensor with another layer.

    Raises:
        ConfigurationError: If the head shares a tensor with the body, or if there is no head.
    """
    name = head_of(module).name
    inside = f"{name}."
    for alias, first in other_places(module).items():
        if alias.startswith(inside) != first.startswith(inside):
            raise ConfigurationError(
                f"the head {name} of {type(module).__name__} can't be told from its body: {alias} "
                f"is {first}"
            )
    return name


def head_entries(module: nn.Module, layout: StateLayout) -> set[str]:
    """Return the names of the entries of the head, with buffers."""
    head = f"{head_of(module).name}."
    return {name for name in layout.names if name.startswith(head)}


def body_names(module: nn.Module) -> list[str]:
    """Return the names of the trainable parameters without the head's.

    Raises:
        ConfigurationError: As in :func:`own_head`.
    """
    head = f"{own_head(module)}."
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    return [name for name in trained if not name.startswith(head)]


def _listed(layers: Sequence[str], wanted: str = "") -> str:
    return f"{len(layers)} layers: {listed(layers, wanted)}"

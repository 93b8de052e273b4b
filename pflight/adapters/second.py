"""A second low-rank adapter beside each of a module's own, whose outputs are added."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflight.errors import ConfigurationError
from pflight.states.state import other_places, state_tensors

from .hooks import ChangedOutput
from .pairs import Pair, plain_pairs

Weights = Callable[[Tensor], tuple[Tensor | float, Tensor | float]]
"""Gets a layer's input; returns the weights of its own adapter and of the second one."""


class Router(nn.Module):
    r"""Weights of two adapters of a layer, :math:`\mathrm{softmax}(G x)`, for each of its inputs.

    G has a row for each adapter, and the form of the layer's factor A. So an image has weights at
    each place, and an embedding has weights for each id. G starts as linear layers do.

    Args:
        factor: The factor A: a layer, or a matrix ``[rank, V]`` of an embedding.
    """

    g: Any  # a layer, or a matrix

    def __init__(self, factor: Any) -> None:
        super().__init__()
        like = getattr(factor, "weight", factor)
        bound = like[0].numel() ** -0.5
        made = torch.empty(2, *like.shape[1:], dtype=torch.float32).uniform_(-bound, bound)
        weight = nn.Parameter(made.to(like))  # the same numbers in all types
        self.dim = 1 - like.dim()
        if isinstance(factor, nn.Module):
            self.g = copy.deepcopy(factor)
            self.g.weight = weight
        else:
            self.g = weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights of the layer's own adapter, the second row, and of the other one."""
        logits = self.g(x) if isinstance(self.g, nn.Module) else F.embedding(x, self.g.T)
        second, own = logits.softmax(self.dim).split(1, self.dim)
        return own, second


class SecondAdapter(nn.Module):
    r"""A second adapter of one layer, in the form of its own one, and at first a copy of it.

    The layer's output becomes :math:`W_0 x + s (u B A x + v B' A' x)`, with both adapters and their
    weights. Both see the same dropout. Hooks of the layer do so, and its names stay as they are.

    Args:
        module: The module with the layer; hooks are added to it.
        pair: The layer's own adapter.
        weigh: Gives u and v, which broadcast over the layer's output.
        trains: Whether the second adapter trains as its own one does. Otherwise its factors are
            buffers.

    Attributes:
        pair: The layer's own adapter.
        weigh: Gives u and v.
    """

    a: Any  # a layer, or a matrix
    b: Any

    def __init__(self, module: nn.Module, pair: Pair, weigh: Weights, trains: bool) -> None:
        super().__init__()
        layer: Any = module.get_submodule(pair.layer)
        self.pair = pair
        self.weigh = weigh
        if pair.adapter in layer.lora_A:
            own_a, own_b = layer.lora_A[pair.adapter], layer.lora_B[pair.adapter]
            self.a, self.b = (_copied(own, trains) for own in (own_a, own_b))
            ChangedOutput(layer, pair.adapter, self._add)
            return
        for name, factor in (
            ("a", layer.lora_embedding_A[pair.adapter]),
            ("b", layer.lora_embedding_B[pair.adapter]),
        ):
            _hold(self, name, factor, trains)
        layer.register_forward_hook(self._add_embedding)

    @property
    def constant_weights(self) -> tuple[Tensor | float, Tensor | float] | None:
        """The weights u and v; ``None`` if they depend on the input."""
        return None if isinstance(self.weigh, Router) else self.weigh(torch.empty(0))

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """The factors A and B, in the form of the layer's own ones."""
        a, b = (getattr(part, "weight", part) for part in (self.a, self.b))
        return a, b

    def _add(self, x: Tensor, dropped: Tensor, output: Tensor) -> Tensor:
        """Return ``u * output + v * B' A' x``, which the layer scales."""
        own, second = self.weigh(x)
        return own * output + second * self.b(self.a(dropped))

    def _add_embedding(self, layer: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Return the output of an embedding, whose factors are no modules with hooks."""
        (ids,) = args
        own, second = self.weigh(ids)
        at = layer.lora_embedding_A[self.pair.adapter], layer.lora_embedding_B[self.pair.adapter]
        change = (own - 1) * _embedded(ids, *at) + second * _embedded(ids, self.a, self.b)
        if (further := layer._get_embed_scale()) is not None:
            change = change * further.to(change.dtype)
        return output + (change * layer.scaling[self.pair.adapter]).to(output.dtype)


def second_adapters(
    module: nn.Module, owner: str, weigh: Weights | None, trains: bool
) -> nn.ModuleDict:
    """Return a second adapter for each low-rank pair of a module.

    Args:
        module: The module; hooks are added to it.
        owner: The method that needs them, for messages.
        weigh: As in :class:`SecondAdapter`; ``None`` for a :class:`Router` of each layer.
        trains: Likewise.

    Raises:
        ConfigurationError: If there is no pair, a layer adds something else than a plain LoRA, two
            layers share their factors, or adapters that don't train would have biases.
    """
    pairs = plain_pairs(module, owner)
    shared = {first: place for place, first in other_places(module).items()}
    for pair in pairs:
        if place := next((shared[name] for name in pair.names if name in shared), None):
            raise ConfigurationError(
                f"{owner} can't use the adapter of {pair.layer!r}: {place!r} is the same tensor"
            )
    found = nn.ModuleDict()
    for pair in pairs:
        layer: Any = module.get_submodule(pair.layer)
        embeds = pair.adapter not in layer.lora_A
        a = (layer.lora_embedding_A if embeds else layer.lora_A)[pair.adapter]
        made = SecondAdapter(module, pair, weigh or Router(a), trains)
        if not trains and getattr(made.b, "bias", None) is not None:
            raise ConfigurationError(f"{owner} can't use the adapter of {pair.layer!r}: lora_bias")
        name = f"{pair.layer}.{pair.adapter}".replace(".", "_")
        found[name if name not in found else f"{name}_{len(found)}"] = made
    return found


def second_names(module: nn.Module, within: nn.Module | None = None) -> dict[str, str]:
    """Return the names of the second adapters' factors, by those of the layers' own ones.

    Args:
        module: The module, whose names they are.
        within: A part of it with the second adapters, if layers have more than two adapters.
    """
    names = {id(tensor): name for name, tensor in state_tensors(module).items()}
    return {
        own: names[id(factor)]
        for part in (module if within is None else within).modules()
        if isinstance(part, SecondAdapter)
        for own, factor in zip(part.pair.names, part.factors, strict=True)
    }


def _embedded(ids: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.embedding(ids, a.T) @ b.T


def _copied(factor: nn.Module, trains: bool) -> nn.Module:
    """Return a copy of a factor's module, with buffers if it does not train.

    It has no hooks of adapters that stand beside the factor already.
    """
    made = copy.deepcopy(factor)
    for hooks in (made._forward_pre_hooks, made._forward_hooks):
        for key, hook in [*hooks.items()]:
            if isinstance(getattr(hook, "__self__", None), ChangedOutput):
                del hooks[key]
    for name, parameter in [*made.named_parameters(recurse=False)]:
        delattr(made, name)
        _hold(made, name, parameter, trains)
    return made


def _hold(module: nn.Module, name: str, value: Tensor, trains: bool) -> None:
    """Give a module a copy of a parameter. A frozen one stays a frozen parameter."""
    held = value.detach().clone()
    if trains or not value.requires_grad:
        module.register_parameter(name, nn.Parameter(held, requires_grad=value.requires_grad))
    else:
        module.register_buffer(name, held)

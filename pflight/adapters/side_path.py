"""The side path: a frozen low-rank addend of layers, beside their adapters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflight.errors import ConfigurationError
from pflight.randomness import Purpose, generator

from .low_rank import LowRank
from .pairs import Pair, adapted_layers, zero_first

Factors = tuple[Tensor, ...]
"""``L [d, R]`` and ``M [R, k]`` of the matrix ``L @ M``; or this matrix ``[d, k]`` alone, if it has
fewer numbers; or nothing, if it is 0."""


class Addend:
    """A forward hook that adds a side path to the output of a layer.

    The matrix is in the form of a pair's ``B @ A``. It is used as ``peft`` uses a pair. Copies of
    the layer share this object, so all clients of a process share one matrix.

    Args:
        pair: The pair.
        factors: The matrix.

    Attributes:
        pair: The pair.
        factors: The matrix.
        version: A number that changes with the matrix.
    """

    def __init__(self, pair: Pair, factors: Factors = ()) -> None:
        self.pair = pair
        self.factors = factors
        self.version = 0

    def __deepcopy__(self, memo: object) -> Addend:
        """Return the object itself."""
        return self

    def set(self, factors: Factors) -> None:
        """Replace the matrix."""
        self.factors = factors
        self.version += 1

    def __call__(self, layer: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Return the output of a layer with that of the side path."""
        if not self.factors:
            return output
        x, *_ = args
        factors = [factor.to(x.device) for factor in reversed(self.factors)]
        if self.pair.adapter in getattr(layer, "lora_embedding_A", ()):
            added = _embedded(layer, x, factors)
        else:
            added = _applied(layer, self.pair.adapter, x.to(factors[0].dtype), factors)
        return output + added.to(output.dtype)


def _embedded(layer: Any, x: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """Return the vectors of the indices ``x`` in a side path of an embedding."""
    added = F.embedding(x, factors[0].mT)
    for factor in factors[1:]:
        added = F.linear(added, factor)
    scale = getattr(layer.get_base_layer(), "embed_scale", None)
    return added if scale is None else added * scale


def _applied(layer: Any, adapter: str, x: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """Apply a side path as the two layers of an adapter, or as its first one if it is a matrix."""
    of_adapter = layer.lora_A[adapter], layer.lora_B[adapter]
    for part, factor in zip(of_adapter, factors, strict=False):
        if isinstance(part, nn.modules.conv._ConvNd):
            kernel = factor.reshape(len(factor), -1, *part.weight.shape[2:])
            x = part._conv_forward(x, kernel, None)
        else:
            x = F.linear(x, factor)
    return x


def add_hooks(module: nn.Module, pairs: Sequence[Pair]) -> None:
    """Add the hooks of an empty side path to the layers of some pairs.

    Raises:
        ConfigurationError: If the module has a side path.
    """
    if next(addends_of(module), None):
        raise ConfigurationError(
            f"{type(module).__name__} has a side path of another run: give the module that this "
            "run began with"
        )
    addends = {pair.names: Addend(pair) for pair in pairs}
    for layer, pair in adapted_layers(module):
        layer.register_forward_hook(addends[pair.names])


def addends_of(module: nn.Module) -> Iterator[Addend]:
    """Yield the addends of a module's layers; that of tied layers comes several times."""
    for part in module.modules():
        for hook in part._forward_hooks.values():
            if isinstance(hook, Addend):
                yield hook


def settled(module: nn.Module) -> Any:
    """Return a module, a copy of another one, with a side path that changes no more."""
    for part in module.modules():
        for key, hook in part._forward_hooks.items():
            if isinstance(hook, Addend):
                part._forward_hooks[key] = Addend(hook.pair, hook.factors)
    return module


@dataclass
class SidePath:
    """What a server has added to the frozen weights of layers: its state.

    Attributes:
        addends: The matrix of each pair.
        sizes: Bytes of each pair's term in each message ``[messages, pairs]``.
        known: How many of these messages each client has got ``[num_clients]``.
    """

    addends: list[Factors]
    sizes: Tensor
    known: Tensor

    @classmethod
    def of(cls, pairs: Sequence[Pair], num_clients: int) -> SidePath:
        """Return an empty side path of some pairs."""
        sizes = torch.zeros(0, len(pairs), dtype=torch.long)
        return cls([() for _ in pairs], sizes, torch.zeros(num_clients, dtype=torch.long))

    def show(self, module: nn.Module, pairs: Sequence[Pair]) -> None:
        """Let the hooks of a module and of its copies use it."""
        factors = {pair.names: own for pair, own in zip(pairs, self.addends, strict=True)}
        for addend in {id(one): one for one in addends_of(module)}.values():
            addend.set(factors.get(addend.pair.names, ()))

    def bytes_for(self, clients: Tensor) -> int:
        """Return the bytes by which the clients ``[C]`` get it.

        Of each pair, a client is sent the terms that it has missed, or the whole if it is smaller.
        """
        whole = torch.tensor([sum(t.nbytes for t in own) for own in self.addends])
        whole = whole.to(self.sizes)
        sums = torch.cat([torch.zeros_like(whole)[None], self.sizes.cumsum(0)])
        missed = sums[-1] - sums[self.known[clients.to(self.known.device)]]
        return int(torch.minimum(missed, whole).sum())

    def note(self, clients: Tensor) -> None:
        """Note that the clients ``[C]`` have got it."""
        self.known[clients.to(self.known.device)] = len(self.sizes)

    def add(
        self, pairs: Sequence[Pair], terms: Mapping[Pair, LowRank], like: Mapping[str, Tensor]
    ) -> None:
        """Add a term for each pair, and note the bytes of the message with the terms.

        Args:
            pairs: The pairs.
            terms: The terms by pair.
            like: Entries of a state. The side path has their data type, or at least 32 bits.

        Raises:
            ConfigurationError: If the result is not finite.
        """
        sizes = []
        for place, pair in enumerate(pairs):
            term = terms[pair]
            dtype = torch.promote_types(like[pair.a].dtype, torch.float32)
            numbers = min(_numbers(term), len(term.left) * term.right.shape[1])
            sizes.append(numbers * dtype.itemsize)
            self.addends[place] = own = _sum(self.addends[place], term, dtype)
            if not all(factor.isfinite().all() for factor in own):
                raise ConfigurationError(
                    f"the side path of {pair.layer!r} is not finite: lower the clients' step size"
                )
        self.sizes = torch.cat([self.sizes, torch.tensor([sizes]).to(self.sizes)])


def _numbers(x: LowRank) -> int:
    return x.width * (len(x.left) + x.right.shape[1])


def _sum(own: Factors, term: LowRank, dtype: torch.dtype) -> Factors:
    """Return a matrix plus a term, in the form with fewer numbers."""
    if not term.width:
        return own
    if len(own) == 1:
        return ((own[0] + term.left @ term.right).to(dtype),)
    total = term if not own else LowRank([(own[0].double(), own[1].double())]) + term
    total = total.compressed()
    if _numbers(total) > len(total.left) * total.right.shape[1]:
        return ((total.left @ total.right).to(dtype),)
    return total.left.to(dtype), total.right.to(dtype)


def restarted(
    pairs: Sequence[Pair], start: Mapping[str, Tensor], *keys: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield a new factor of each pair, by name: the one that is not 0 at the start.

    They are drawn as ``peft`` draws them.

    Args:
        pairs: The pairs.
        start: The model at the start.
        keys: Key the random numbers: the seed and the round.
    """
    draw = generator(Purpose.RESTART, *keys)
    for pair in pairs:
        _, name = zero_first(pair, start)
        new = torch.empty_like(start[name], device="cpu")
        if name == pair.a:
            nn.init.kaiming_uniform_(new, a=math.sqrt(5), generator=draw)
        else:
            nn.init.normal_(new, generator=draw)
        yield name, new

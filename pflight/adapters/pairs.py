"""The low-rank pairs of a module, as the package ``peft`` makes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pflight.errors import ConfigurationError
from pflight.states.state import state_tensors

from .low_rank import LowRank


@dataclass(frozen=True)
class Pair:
    """The two factors of one adapter in one layer, which adds ``scale * B @ A`` to its weight.

    Attributes:
        layer: Name of the layer in the module.
        adapter: Name of the adapter.
        a: Name of the entry A in a state: ``[rank, k]``; ``[rank, k, *kernel]`` in a convolution.
        b: Name of the entry B in a state: ``[d, rank]``, or ``[d, rank, 1, ...]``.
        rank: Number of rows of A and of columns of B.
        scale: Its scale, such as ``lora_alpha / r``.
        unlike: Why the layer adds something else than ``scale * B @ A``; else empty.
    """

    layer: str
    adapter: str
    a: str
    b: str
    rank: int
    scale: float
    unlike: str = ""

    @property
    def names(self) -> tuple[str, str]:
        """The names of both entries."""
        return self.a, self.b

    def product(self, state: Mapping[str, Tensor]) -> LowRank:
        """Return ``scale * B @ A`` of a state."""
        return LowRank([(self.scale * matrix(state[self.b]), matrix(state[self.a]))])


def matrix(factor: Tensor) -> Tensor:
    """Return a factor as a matrix, in double precision; kernels of convolutions are flattened."""
    return factor.detach().flatten(1).double()


def zero_first(pair: Pair, start: Mapping[str, Tensor]) -> tuple[str, str]:
    """Return the names of a pair, first that of the factor which is 0 at the start."""
    return pair.names if not start[pair.a].any() else pair.names[::-1]


def adapted_layers(module: nn.Module) -> Iterator[tuple[Any, Pair]]:
    """Yield each layer with its low-rank pairs; a tied pair comes with each of its layers.

    A layer with pairs has the attributes ``lora_A``, ``lora_B``, ``r`` and ``scaling`` of ``peft``.
    Entries are found by their tensors, whatever their names.

    Raises:
        ConfigurationError: If adapters are merged into the weights.
    """
    names = {id(tensor): name for name, tensor in state_tensors(module).items()}
    for layer, part in module.named_modules():
        if not all(hasattr(part, name) for name in ("lora_A", "lora_B", "scaling", "r")):
            continue
        if getattr(part, "merged_adapters", None):
            raise ConfigurationError(
                f"the adapters of {layer!r} are merged into its weights: call unmerge_adapter() of "
                "the PeftModel first"
            )
        for adapter, rank in part.r.items():
            a, b = _factors(part, adapter)
            if a is None or b is None or not {id(a), id(b)} <= names.keys():
                continue
            scale, unlike = float(part.scaling[adapter]), _unlike(part, adapter)
            yield part, Pair(layer, adapter, names[id(a)], names[id(b)], int(rank), scale, unlike)


def find_pairs(module: nn.Module) -> list[Pair]:
    """Return the low-rank pairs of a module whose factors are entries of its state.

    A tied pair is found once.

    Args:
        module: The module, such as a client module with a ``PeftModel``.

    Raises:
        ConfigurationError: If adapters are merged into the weights.
    """
    found: dict[tuple[str, str], Pair] = {}
    for _, pair in adapted_layers(module):
        before = found.setdefault(pair.names, pair)
        if before.scale != pair.scale:
            raise ConfigurationError(
                f"{before.layer!r} and {pair.layer!r} share their adapters, and scale them by "
                f"{before.scale:g} and {pair.scale:g}"
            )
    return [*found.values()]


def plain_pairs(module: nn.Module, owner: str) -> list[Pair]:
    """Return the pairs of a module in which each layer adds ``scale * B @ A``.

    Args:
        module: The module.
        owner: Who needs them, for messages.

    Raises:
        ConfigurationError: If there is none, or one is of another kind.
    """
    pairs = find_pairs(module)
    if not pairs:
        raise ConfigurationError(
            f"{owner} needs low-rank adapters, and {type(module).__name__} has none: make them "
            "with peft's get_peft_model()"
        )
    for pair in pairs:
        if pair.unlike:
            raise ConfigurationError(
                f"{owner} can't use the adapter of {pair.layer!r}: {pair.unlike}"
            )
    return pairs


def trained_pairs(module: nn.Module, owner: str) -> list[Pair]:
    """Return the :func:`plain_pairs` of a module that train.

    Args:
        module: The module.
        owner: Who needs them, for messages.

    Raises:
        ConfigurationError: If none trains, or only one factor of a pair.
    """
    tensors, found = state_tensors(module), []
    for pair in plain_pairs(module, owner):
        frozen = [name for name in pair.names if not tensors[name].requires_grad]
        if len(frozen) == 1:
            raise ConfigurationError(
                f"{owner} trains both factors of an adapter, and {frozen[0]!r} is frozen"
            )
        found += [] if frozen else [pair]
    if not found:
        raise ConfigurationError(f"{owner}: all adapters of {type(module).__name__} are frozen")
    return found


def factor_names(pairs: Iterable[Pair]) -> list[str]:
    """Return the names of the factors of all pairs."""
    return [name for pair in pairs for name in pair.names]


def scales_of(module: nn.Module) -> dict[str, float]:
    """Return the scale of each low-rank pair, by a name for messages."""
    return {f"the scale of {pair.a}": pair.scale for pair in find_pairs(module)}


def check_adapters(module: nn.Module) -> None:
    """Raise if a module has adapters that can't learn.

    Raises:
        ConfigurationError: If adapters are merged, or if a frozen factor of a pair is 0.
    """
    tensors = state_tensors(module)
    for pair in find_pairs(module):
        for one, other in (pair.names, pair.names[::-1]):
            still, learns = not tensors[one].requires_grad, tensors[other].requires_grad
            if still and learns and not tensors[one].any():
                raise ConfigurationError(
                    f"{one!r} is 0 and frozen, so {other!r} would never learn: peft starts an "
                    "embedding with A = 0 and all other layers with B = 0; freeze the other factor"
                )


def _factors(part: Any, adapter: str) -> tuple[Tensor | None, Tensor | None]:
    """Return A and B of an adapter in a layer; embeddings hold them as parameters."""
    for first, second in (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")):
        a, b = (getattr(part, name, {}) for name in (first, second))
        if adapter in a and adapter in b:
            return getattr(a[adapter], "weight", a[adapter]), getattr(
                b[adapter], "weight", b[adapter]
            )
    return None, None


def _unlike(part: Any, adapter: str) -> str:
    """Return why a layer adds something else than ``scale * B @ A``, or nothing."""
    kind = type(part).__name__
    if variant := getattr(part, "lora_variant", {}).get(adapter):
        return f"it is a {type(variant).__name__.removesuffix('Variant')}, not a plain LoRA"
    if adapter in getattr(part, "lora_E", {}):
        return "it is an AdaLoRA, not a plain LoRA"
    base = part.get_base_layer() if hasattr(part, "get_base_layer") else part
    if getattr(base, "groups", 1) > 1:
        return "its convolution has groups"
    if kind in ("MultiheadAttention", "ParamWrapper"):
        return f"peft's {kind} changes the frozen weights during a pass"
    return ""

"""The split of a network into features and head, the same for all methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from pflight.errors import ConfigurationError

EXTRA = "pflight_extra"
"""The submodule that a client method adds to a client module. Tensor names begin with it."""
_FOUND = "pflight_head"  # the attribute of a federation's copy of the client module

Outputs = Callable[[Tensor, Tensor], Tensor]
"""Gets features ``[n, d]`` and the head's outputs for them; returns the outputs to use instead."""


class Head(NamedTuple):
    """The module of a network that maps features to outputs."""

    name: str
    """The module's name, as in ``module.get_submodule``."""
    width: int
    """Number of a sample's features: the head's input, flattened from dimension 1."""
    outputs: int
    """Number of a sample's outputs, flattened in the same way."""


def head_of(module: nn.Module) -> Head:
    """Return the head of a client module.

    The attribute ``head`` of the client module, or of a module inside, names the head. By default
    the head is the last linear layer. A federation with data finds the last one by a forward pass.
    Otherwise the order of the layers decides.

    Raises:
        ConfigurationError: In one line, if there is no such layer.

    Example:
        >>> head_of(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
        Head(name='2', width=8, outputs=3)
    """
    if (found := vars(module).get(_FOUND)) is not None:
        return found
    name = named_head(module)
    layers = {n: part for n, part in module.named_modules() if isinstance(part, nn.Linear)}
    if name is None and not layers:
        raise ConfigurationError(
            f"{type(module).__name__} has no linear layer that could be its head: say which module "
            "maps features to outputs, as in head = 'classifier'"
        )
    name = [*layers][-1] if name is None else name
    part = layers.get(name)
    return Head(name, 0, 0) if part is None else Head(name, part.in_features, part.out_features)


def named_head(module: nn.Module) -> str | None:
    """Return the head's name from a module or a module inside; ``None`` if no module names it.

    Raises:
        ConfigurationError: If there is no module of that name.
    """
    parts = dict(module.named_modules())
    for place, part in parts.items():
        name = getattr(part, "head", None)
        if not isinstance(name, str):
            continue
        inside = (".".join(filter(None, [place, *more, name])) for more in ([], ["network"]))
        if (found := next((full for full in inside if full in parts), None)) is None:
            raise ConfigurationError(
                f"{type(part).__name__} names {name!r} as its head, but has no such module; it has "
                f"{', '.join(n for n, _ in part.named_modules() if n)}"
            )
        return found
    return None


def has_plain_head(module: nn.Module) -> bool:
    """Return whether the head is known without a forward pass."""
    parts = [*module.modules()]
    layers = [part for part in parts if isinstance(part, nn.Linear)]
    tied = any(isinstance(part, nn.Embedding) for part in parts)  # perhaps, by F.linear
    return (len(layers) < 2 and not tied) or named_head(module) is not None


def trace(module: nn.Module, run: Callable[[], Any]) -> Head | None:
    """Return the head, found by a forward pass: the named one, or the last linear layer.

    The head is an embedding, if the embedding's weight is used as the last linear layer.

    Args:
        module: The module.
        run: Runs a forward pass of the module.
    """
    named, found = named_head(module), list[Head]()

    def noting(name: str) -> Callable[..., None]:
        def note(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            found.append(Head(name, args[0].flatten(1).shape[1], output.flatten(1).shape[1]))

        return note

    hooks = [
        part.register_forward_hook(noting(name))
        for name, part in module.named_modules()
        if (isinstance(part, nn.Linear) if named is None else name == named)
    ]
    last = _LastWeight()
    try:
        with last:
            run()
    finally:
        for hook in hooks:
            hook.remove()
    owners = {
        part.weight.data_ptr(): (name, part)
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.Linear)  # of tied layers the last one counts
    }
    name, part = owners.get(last.weight or 0, ("", None))
    if named is None and isinstance(part, nn.Embedding):
        return Head(name, part.embedding_dim, part.num_embeddings)
    return found[-1] if found else None


class _LastWeight(TorchFunctionMode):
    """Notes the memory address of the last product's weight, also if it is transposed."""

    weight: int | None = None
    _PRODUCTS = (F.linear, torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in self._PRODUCTS and len(args) > 1 and isinstance(args[1], Tensor):
            self.weight = args[1].data_ptr()
        return func(*args, **(kwargs or {}))


def mark(module: nn.Module, head: Sequence[Any] | None) -> None:
    """Note the head in a federation's copy of a client module.

    Raises:
        ConfigurationError: If the head is an embedding, and so also the body's first layer.
    """
    found = None if head is None else Head(*head)
    if found is not None and isinstance(module.get_submodule(found.name), nn.Embedding):
        raise ConfigurationError(
            f"the head of {type(module).__name__} can't be told from its body: the output layer "
            f"has the weight of {found.name}; name another module, as in head = 'classifier', or "
            "give the layers by their names"
        )
    vars(module)[_FOUND] = found


def marked(module: nn.Module) -> list[Any] | None:
    """Return the head that :func:`mark` noted, for a checkpoint."""
    head = vars(module).get(_FOUND)
    return None if head is None else [*head]


@contextmanager
def watched(
    module: nn.Module, outputs: Outputs | None = None
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Note the features and the head's own outputs in every pass.

    Args:
        module: The client module.
        outputs: A function that replaces the head's outputs inside the context.
    """
    head, seen = module.get_submodule(head_of(module).name), list[tuple[Tensor, Tensor]]()

    def note(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        seen.append((args[0].flatten(1), output))

    def replace(*_: Any) -> Tensor:
        assert outputs is not None
        return outputs(*seen[-1])

    hooks = [head.register_forward_hook(note, prepend=True)]
    replaced = []
    if outputs is not None:
        hooks.append(head.register_forward_hook(replace))
        replaced = [one for one in head._forward_hooks.values() if isinstance(one, _Prediction)]
    for one in replaced:
        one.rests = True
    try:
        yield seen
    finally:
        for one in replaced:
            one.rests = False
        for hook in hooks:
            hook.remove()


def add_extra(module: nn.Module, extra: nn.Module) -> None:
    """Have a module predict by an extra module, which uses the features and the head.

    Args:
        module: A federation's copy of the client module. The extra module is added to it.
        extra: Called with features ``[n, d]`` and the head, a function of features; returns
            outputs instead of the head's.
    """
    head = module.get_submodule(head_of(module).name)
    weight = next((p for p in head.parameters() if p.is_floating_point()), None)
    module.add_module(EXTRA, extra if weight is None else extra.to(weight))
    head.register_forward_hook(_Prediction(extra))


class _Prediction:
    """A hook of the head that lets an extra module predict. It is copied with both modules."""

    def __init__(self, extra: nn.Module) -> None:
        self.extra = extra
        self.rests = False  # while other outputs replace it

    def __call__(self, head: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if self.rests:
            return output
        (x,) = args
        features = x.flatten(1)

        def classify(z: Tensor) -> Tensor:
            return output if z is features else head.forward(z.view(-1, *x.shape[1:]))

        return self.extra(features, classify)


def step_extra(module: nn.Module, optimizer: Optimizer, options: Mapping[str, Any]) -> None:
    """Have an optimizer step the parameters of the extra module, with their own options.

    Args:
        module: A client module, with or without an extra module.
        optimizer: The module's optimizer.
        options: The options. If the optimizer lacks an option, it must be 0 or ``False``.

    Raises:
        ConfigurationError: If the optimizer lacks an option with another value.
    """
    extra = getattr(module, EXTRA, None)
    if extra is None:
        return
    own = {id(parameter): parameter for parameter in extra.parameters() if parameter.requires_grad}
    groups = optimizer.param_groups
    stepped = {id(parameter) for group in groups for parameter in group["params"]}
    if not own or (own.keys() <= stepped and not options):
        return
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) not in own]
    known = {name: value for name, value in options.items() if name in optimizer.defaults}
    for name, value in options.items():
        if value and name not in known:
            raise ConfigurationError(
                f"{type(optimizer).__name__} has no {name}, which the algorithm sets to {value:g}"
            )
    optimizer.add_param_group({"params": [*own.values()], **known})

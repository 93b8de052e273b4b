"""Options that have to be numbers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import partial
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from .errors import ConfigurationError


def number(value: Any) -> float:
    """Return a finite number as it is, and NaN for all else, which no comparison lets pass.

    Example:
        >>> number(0.5) > 0, number(None) > 0, number(float("inf")) > 0
        (True, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        return math.nan
    return float(value)


def whole(value: Any) -> float:
    """Return a whole number as it is, and NaN for all else, which no comparison lets pass.

    Example:
        >>> whole(2) >= 1, whole(2.5) >= 1, whole(True) >= 1, whole(None) >= 1
        (True, False, False, False)
    """
    return number(value) if isinstance(value, Integral) else math.nan


def arguments(function: Callable[..., Any], *args: Any, **options: Any) -> dict[str, Any]:
    """Return the arguments of a method by name, defaults included; none if they don't fit it.

    Example:
        >>> class Server:
        ...     def __init__(self, lr=1.0, **more): ...
        >>> arguments(Server.__init__, None, decay="linear")
        {'lr': 1.0, 'decay': 'linear'}
    """
    signature = inspect.signature(function)
    try:
        bound = signature.bind(*args, **options)
    except TypeError:  # which the call itself will say, or a copy is being made
        return {}
    bound.apply_defaults()
    _, *named = bound.arguments.items()
    found: dict[str, Any] = {}
    for name, value in named:
        packed = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        found.update(value if packed else {name: value})
    return found


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of the options that are not the same in both.

    Example:
        >>> differing({"lr": 1, "shared": [1, 2]}, {"lr": 1.0, "shared": (1, 3)})
        ['shared']
    """
    names = [*one, *(name for name in other if name not in one)]
    return [n for n in names if n not in one or n not in other or not _same(one[n], other[n])]


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return not differing(one, other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if is_dataclass(one) and type(one) is type(other):
        return not differing(vars(one), vars(other))
    if isinstance(one, partial) and isinstance(other, partial):
        parts = [(p.func, p.args, p.keywords) for p in (one, other)]
        return _same(*parts)
    return bool(one == other)


def described(value: Any) -> str:
    """Return an option in words that are the same in every process.

    Example:
        >>> described([1, "a", math.sqrt, torch.zeros(2, 3)])
        "[1, 'a', sqrt, tensor(2, 3)]"
    """
    if isinstance(value, Tensor):
        return f"tensor{tuple(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {described(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(described, value)) + "]"
    if isinstance(value, partial):
        return f"partial({described(value.func)}, {described(value.args)})"
    if name := getattr(value, "__qualname__", None):
        return str(name)
    words = repr(value)
    return type(value).__qualname__ if " at 0x" in words else words


def check_at_least(least: float, kind: Callable[[Any], float], owner: str, **options: Any) -> None:
    """Raise unless all options of ``owner`` are numbers of a kind, and not below ``least``.

    Args:
        least: The smallest value that is allowed.
        kind: :func:`number` or :func:`whole`.
        owner: Whose options they are.
        **options: The options.

    Raises:
        ConfigurationError: Naming the option.
    """
    for name, value in options.items():
        if not kind(value) >= least:
            raise ConfigurationError(f"{owner}: {name} must be at least {least}, got {value}")

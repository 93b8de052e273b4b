"""Checks of options: constructors' arguments against their annotations and ranges."""

from __future__ import annotations

import functools
import inspect
import math
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from numbers import Integral, Real
from os import PathLike
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from .errors import ConfigurationError

_MOST = 2**32  # limit of whole numbers, so that their sums and products fit into 64 bits
_LARGEST = 2.0**128  # limit of numbers; it is infinite in 32 bits
_SCALARS = (bool, int, float, str)
_NAMED = {
    NoneType: "null",
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "text",
}
_RANGES = {  # ranges of optimizers' options
    "lr": "[0, inf)",
    "momentum": "[0, 1)",
    "dampening": "[0, 1]",
    "weight_decay": "[0, inf)",
    "betas": "[0, 1)",
    "eps": "(0, inf)",
}

C = TypeVar("C", bound=type)


class Interval(NamedTuple):
    """The range of a number, as metadata of its annotation.

    Example:
        >>> @checked
        ... class Server:
        ...     def __init__(self, decay: Annotated[float, Interval("(0, 1]")] = 1.0) -> None: ...
        >>> Server(decay=0)
        Traceback (most recent call last):
        ...
        pflight.errors.ConfigurationError: Server: decay must be in (0, 1], got 0
    """

    text: str
    """The interval in mathematical notation, such as ``"(0, 1]"`` or ``"[1, inf)"``."""

    def __repr__(self) -> str:
        return self.text


PositiveInt = Annotated[int, Interval("[1, inf)")]
NonNegativeInt = Annotated[int, Interval("[0, inf)")]
PositiveFloat = Annotated[float, Interval("(0, inf)")]
NonNegativeFloat = Annotated[float, Interval("[0, inf)")]
ClosedUnitInterval = Annotated[float, Interval("[0, 1]")]
OpenUnitInterval = Annotated[float, Interval("(0, 1)")]


def checked(kind: C) -> C:
    """Make a class check the arguments of its constructor against their annotations.

    Each argument is checked before the constructor runs. A ``float`` must be finite in 32 bits. An
    ``int`` must be a whole number below 2**32 and no ``bool``. A ``Literal`` must be one of its
    values. If the annotation has an :class:`Interval`, the number must lie in it.

    Raises:
        ConfigurationError: From the constructor, naming the class and the option.

    Example:
        >>> @checked
        ... class Server:
        ...     def __init__(self, lr: float = 1.0, decay: Literal["linear"] | None = None) -> None:
        ...         self.lr = lr
        >>> Server("fast")
        Traceback (most recent call last):
        ...
        pflight.errors.ConfigurationError: Server: lr must be a finite number, got 'fast'
    """
    init = kind.__init__  # type: ignore[misc]
    parameters = inspect.signature(init).parameters.values()
    places = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    named = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    any_number = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)

    @functools.wraps(init)
    def checks(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) >= len(places) and named and not any_number:
            name, first = type(self).__name__, places[1:]
            by_name = ", ".join([*first, *(f"{option}=..." for option in named[:2])])
            raise ConfigurationError(
                f"{name}: only {', '.join(first) or 'nothing'} can be given by position, since the "
                f"order of the others has changed. Give them by name: {name}({by_name})"
            )
        check_types(init, self, dict(zip(places, (self, *args), strict=False)) | kwargs)
        init(self, *args, **kwargs)

    kind.__init__ = checks  # type: ignore[misc]
    return kind


def check_types(function: Callable[..., Any], owner: object, given: Mapping[str, Any]) -> None:
    """Raise unless arguments match a function's annotations. Skip arguments without annotation.

    Raises:
        ConfigurationError: Naming the class of ``owner`` and the option.
    """
    hints = _hints(function)
    for name, value in given.items():
        if name not in hints:
            continue
        if not _fits(value, hints[name]):
            raise _misfit(owner, name, in_words(hints[name], value), value)
        for interval in intervals(hints[name]):
            check_range(owner, interval.text, **{name: value})


def check_range(owner: object, interval: str, **options: Any) -> None:
    """Raise unless options are numbers in an interval. Skip ``None``.

    Args:
        owner: The object that has the options; the message names its class.
        interval: The interval in mathematical notation, such as ``"(0, 1]"`` or ``"[1, inf)"``.
        **options: The options.

    Raises:
        ConfigurationError: Naming the option.

    Example:
        >>> check_range(object(), "[1, inf)", rounds=0)
        Traceback (most recent call last):
        ...
        pflight.errors.ConfigurationError: object: rounds must be at least 1, got 0
    """
    start, end = interval[1:-1].split(", ")
    low, high = float(start), float(end)
    for name, value in options.items():
        exact = number(value)
        above = exact >= low if interval[0] == "[" else exact > low
        below = exact <= high if interval[-1] == "]" else exact < high
        if value is not None and not (above and below):
            expected = f"in {interval}"
            if high == math.inf:
                expected = f"{'at least' if interval[0] == '[' else 'over'} {start}"
            raise _misfit(owner, name, expected, value)


def intervals(hint: Any) -> list[Interval]:
    """Return the intervals of an annotation.

    Example:
        >>> intervals(NonNegativeFloat | None)
        [[0, inf)]
    """
    if get_origin(hint) is Annotated:
        return [part for part in get_args(hint) if isinstance(part, Interval)]
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else ()
    return [interval for part in parts for interval in intervals(part)]


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise if torch accepts an optimizer's options, but training would diverge with them.

    Raises:
        ConfigurationError: Naming the option.
    """
    for group in optimizer.param_groups:
        for name, value in group.items():
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, Tensor) and part.numel() == 1:
                    part = part.item()
                if name != "params" and isinstance(part, float | int):
                    if not isinstance(part, bool) and math.isnan(number(part)):
                        raise _misfit(optimizer, name, in_words(float, part), part)
                    if name in _RANGES:
                        check_range(optimizer, _RANGES[name], **{name: part})


def why_not_built(kind: type[Optimizer], options: Mapping[str, Any]) -> str | None:
    """Return why an optimizer can't be built with these options, or ``None`` if it can.

    Example:
        >>> why_not_built(torch.optim.SGD, {"lr": None})
        "SGD: lr can't be null"
        >>> why_not_built(torch.optim.SGD, {"lr": -1.0})
        'Invalid learning rate: -1.0'
    """
    parameters = inspect.signature(kind).parameters
    try:
        check_optimizer(kind([torch.nn.Parameter(torch.zeros(2, 2))], **options))
    except Exception as error:  # an optimizer may raise anything
        for name, value in options.items():
            if value is None and name in parameters and parameters[name].default is not None:
                return f"{kind.__name__}: {name} can't be null"
        return " ".join(str(error).split())
    return None


def number(value: Any) -> float:
    """Return a number below 2**128 unchanged, otherwise NaN. NaN fails all comparisons.

    Example:
        >>> number(0.5) > 0, number(None) > 0, number(float("inf")) > 0
        (True, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        exact = float(value)
    except OverflowError:
        return math.nan
    return exact if abs(exact) < _LARGEST else math.nan


def whole(value: Any) -> float:
    """Return a whole number below 2**32 unchanged, otherwise NaN.

    Example:
        >>> whole(2) >= 1, whole(2.5) >= 1, whole(True) >= 1, whole(None) >= 1
        (True, False, False, False)
    """
    return number(value) if isinstance(value, Integral) and abs(int(value)) < _MOST else math.nan


def arguments(function: Callable[..., Any], *args: Any, **options: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, with defaults; nothing if they don't fit.

    Example:
        >>> class Server:
        ...     def __init__(self, lr=1.0, **more): ...
        >>> arguments(Server.__init__, None, decay="linear")
        {'lr': 1.0, 'decay': 'linear'}
    """
    signature = inspect.signature(function)
    try:
        bound = signature.bind(*args, **options)
    except TypeError:  # the call itself will raise, or this is a copy
        return {}
    bound.apply_defaults()
    _, *named = bound.arguments.items()
    found: dict[str, Any] = {}
    for name, value in named:
        packed = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        found.update(value if packed else {name: value})
    return found


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of the options that differ.

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
    """Return an option as text that is the same in every process.

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
        parts = value.func, value.args, value.keywords
        return f"partial({', '.join(map(described, parts))})"
    if name := getattr(value, "__qualname__", None):
        return str(name)
    words = repr(value)
    return type(value).__qualname__ if " at 0x" in words else words


def as_list(value: Any) -> list[Any]:
    """Return an option as a list. The option may be one value, several or none."""
    return value if isinstance(value, list) else [] if value is None else [value]


@functools.cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(function, include_extras=True)


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value matches an annotation. Containers are checked only if cheap."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind is Annotated:
        return _fits(value, parts[0])
    if kind in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if kind is Literal:
        return any(value == part and type(value) is type(part) for part in parts)
    if kind in (int, float):
        return not math.isnan(whole(value) if kind is int else number(value))
    if kind is bool:
        return isinstance(value, bool | np.bool_)
    if kind is str:
        return isinstance(value, str | PathLike)
    if isinstance(kind, type) and issubclass(kind, Sequence) and kind is not str:
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Collection):
            return False
        if isinstance(value, Tensor) and not value.dim():
            return False
        if kind is tuple and Ellipsis not in parts and len(value) != len(parts):
            return False
        scalars = [part for part in parts if part in _SCALARS]
        items = value.tolist() if isinstance(value, Tensor) else value
        return all(_fits(item, scalars[0]) for item in items) if scalars else True
    return isinstance(value, kind) if isinstance(kind, type) else True


def annotation(function: Any, name: str) -> Any:
    """Return the annotation of an option of a class or function, if it can be read.

    Example:
        >>> annotation(torch.optim.SGD, "nesterov")
        <class 'bool'>
    """
    for kind in [base.__init__ for base in getattr(function, "__mro__", ())] or [function]:
        try:
            hints = _hints(kind)
        except (NameError, TypeError):  # a name is imported for types alone
            continue
        if name in hints:
            return hints[name]
    return None


def in_words(hint: Any, value: Any) -> str:
    """Return an annotation in words, for a message about a wrong value."""
    *others, last = dict.fromkeys(_words(hint, value))
    return f"{', '.join(others)} or {last}" if others else last


def _words(hint: Any, value: Any) -> list[str]:
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind is Annotated:
        return _words(parts[0], value)
    if kind in (Union, UnionType):
        return [words for part in parts for words in _words(part, value)]
    if kind is Literal:
        return [repr(part) for part in parts]
    if kind is int and type(value) is not bool and isinstance(value, Integral):
        return ["below 2**32"]
    if kind is float and isinstance(value, Real) and _LARGEST <= abs(value) < math.inf:  # type: ignore[operator]
        return ["below 2**128"]
    if kind in _NAMED:
        return [_NAMED[kind]]
    if kind is Callable or not isinstance(kind, type):
        return ["a function"]
    if kind is Iterable or issubclass(kind, Sequence):
        return [f"a list of {parts[0].__name__}" if parts and parts[0] in _SCALARS else "a list"]
    return [f"a {kind.__name__}"]


def _misfit(owner: object, name: str, expected: str, value: Any) -> ConfigurationError:
    got = "null" if value is None else reprlib.repr(value)
    return ConfigurationError(f"{type(owner).__name__}: {name} must be {expected}, got {got}")

"""Whether the attributes of a module have changed, also inside of lists and of other objects."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

CONSTANTS = (
    *(bool, int, float, str, bytes, type(None), type, Enum, torch.dtype, torch.device),
    *(FunctionType, BuiltinFunctionType, partial),
)
_COPIED_BY = ("__reduce__", "__reduce_ex__", "__getstate__")


def contents(values: Iterable[Any]) -> list[Any]:
    """Return what values hold, by value. Two results are equal if nothing in them has changed.

    Args:
        values: Constants; lists, tuples, dicts and sets; and objects that have only attributes.
            All of them may hold each other.

    Raises:
        TypeError: If a value is of another kind, such as a tensor, a file or an iterator.
    """
    known: set[int] = set()  # each object is read once

    def of(value: Any) -> Any:
        if isinstance(value, CONSTANTS):
            return value
        if id(value) in known:
            return id(value)
        known.add(id(value))
        kind = type(value)
        if kind in (list, tuple):
            return kind, [*map(of, value)]
        if kind in (dict, OrderedDict):
            return kind, [(of(key), of(one)) for key, one in value.items()]
        if kind in (set, frozenset) and all(isinstance(one, CONSTANTS) for one in value):
            return kind, frozenset(value)
        if _has_only_attributes(value):
            return kind, id(value), of(vars(value))
        raise TypeError(f"what a {kind.__name__} holds is not known")

    return [*map(of, values)]


def _has_only_attributes(value: Any) -> bool:
    """Return whether all that an object holds is in its ``vars``."""
    kind = type(value)
    return (
        hasattr(value, "__dict__")
        and not hasattr(kind, "__deepcopy__")
        and all(getattr(kind, name) is getattr(object, name) for name in _COPIED_BY)
        and all(
            base is object or (base.__module__ != "builtins" and not vars(base).get("__slots__"))
            for base in kind.__mro__
        )
    )

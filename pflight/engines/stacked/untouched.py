"""Checks that a trial does not change a module and the global random generators."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from .reasons import DRAWS


@contextmanager
def left_alone(*modules: nn.Module) -> Iterator[list[str]]:
    """Yield a list. At the end it names all changes.

    Args:
        modules: Modules with attributes that must not change.
    """
    touched: list[str] = []
    generators, attributes = _generators(), list(map(_attributes, modules))
    yield touched
    if generators != _generators():
        touched.append(DRAWS)
    if not all(map(_same, attributes, map(_attributes, modules))):
        touched.append("it sets attributes of itself while it trains")


def _generators() -> tuple[Any, ...]:
    numpy: Any = np.random.get_state(legacy=False)
    drawn = numpy["state"]["pos"], numpy["state"]["key"].tobytes()
    return random.getstate(), drawn, torch.get_rng_state().tolist()


def _attributes(client: nn.Module) -> dict[tuple[Any, str], Any]:
    """Return the attributes of all modules and their classes, and the globals that these use.

    Each comes with its contents: a list or another object can change and stay the same object.
    """
    kinds = {kind for module in client.modules() for kind in type(module).__mro__}
    owners = [*client.named_modules(), *((kind, kind) for kind in kinds)]
    found = {
        (name, attribute): value
        for name, owner in owners
        for attribute, value in vars(owner).items()
        if attribute != "training"
    }
    for kind in kinds:
        if kind.__module__.split(".")[0] in ("torch", "lightning", "pflight", "builtins"):
            continue
        for method in vars(kind).values():
            if not isinstance(method, FunctionType):
                continue
            known = method.__globals__.keys() & method.__code__.co_names
            found |= {(method, name): method.__globals__[name] for name in known}
    return {place: (value, _contents(value)) for place, value in found.items()}


def _contents(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | set):
        return list(value)
    if isinstance(value, ModuleType | FunctionType | nn.Module) or not hasattr(value, "__dict__"):
        return []
    return [*vars(value).values()]


def _same(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> bool:
    return before.keys() == after.keys() and all(
        after[key][0] is value
        and len(after[key][1]) == len(contents)
        and all(map(operator.is_, after[key][1], contents))
        for key, (value, contents) in before.items()
    )

"""Parse names of methods with modifiers, such as ``fesem+private_head``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pflight.messages import closest, question

from .shipped import find_config


class Named(NamedTuple):
    """A named modifier with options."""

    kind: str
    """The path of its class."""
    summary: str
    options: Mapping[str, Any] = {}
    space: Mapping[str, Any] = {}
    """Values to search, by option."""


_PRIVATE = "pflight.modifiers.Private"
MODIFIERS = {
    "private_head": Named(_PRIVATE, "The head stays with each client.", {"layers": "head"}),
    "private_body": Named(_PRIVATE, "All but the head stays with each client.", {"layers": "body"}),
    "private_norms": Named(
        _PRIVATE,
        "Layers that normalise stay with each client.",
        {"layers": "norms"},
    ),
    "frozen_head": Named("pflight.modifiers.Frozen", "Nobody trains the head.", {"layers": "head"}),
    "proximal": Named(
        "pflight.modifiers.Proximal",
        "Clients are pulled towards the server's model.",
        space={"mu": {"low": 0.001, "high": 1.0, "log": True}},
    ),
    "elastic": Named(
        "pflight.modifiers.Elastic",
        "Clients are held to the model that they had before, and judged by it.",
        space={"alpha": {"low": 0.01, "high": 2.0, "log": True}},
    ),
    "clip": Named(
        "pflight.transforms.Clip",
        "Updates are clipped to a norm.",
        space={"norm": {"low": 0.1, "high": 10.0, "log": True}},
    ),
    "top_k": Named(
        "pflight.transforms.TopK",
        "Only the largest entries of updates travel.",
        space={"fraction": [0.01, 0.1]},
    ),
}
SAME = {
    "fedavg+private_head": "fedper",
    "fedavg+private_body": "lg_fedavg",
    "fedavg+proximal": "fedprox",
}
"""Combinations that equal shipped methods, with the same options."""


def parts_of(name: str) -> tuple[str, list[str]]:
    """Return the method and the sorted modifiers of a name such as ``"fesem+private_head"``.

    Example:
        >>> parts_of("fesem+proximal+private_head")
        ('fesem', ['private_head', 'proximal'])
        >>> parts_of("fedavg+private_head")
        ('fedper', [])
    """
    if find_config(name) is not None:  # a file with a plus in its name
        return name, []
    method, *modifiers = name.split("+")
    modifiers = sorted(modifiers)
    whole = "+".join([method, *modifiers])
    return (SAME[whole], []) if whole in SAME else (method, modifiers)


def no_modifier(name: str) -> str:
    """Return a message that a modifier does not exist, or an empty text if it does.

    A name with a dot is the path of a user's class.
    """
    if name in MODIFIERS or "." in name:
        return ""
    meant = question(closest(name, [*MODIFIERS]))
    return f"there is no modifier {name!r}{meant} (`pflight list modifiers` names all)"

"""The available choices. ``python benchmarks/ship.py`` has read them from the source files."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

from pflight.messages import closest, question

from .combined import MODIFIERS


class Entry(NamedTuple):
    """One choice.

    Args:
        name: The name of the choice.
        summary: A description in one sentence.
        class_path: The class, if there is one.
        config: The configuration, if there is one.
        needs: Of a method: what the client must have, such as ``"a head"``.
    """

    name: str
    summary: str
    class_path: str | None = None
    config: str | None = None
    needs: str = ""


def entries(section: str) -> list[Entry]:
    """Return the choices of a section of ``pflight list``.

    Data sets include the classes for the user's own data. Methods have the names of their
    configurations. All configurations have their paths without ``configs/`` and ``.yaml``.
    """
    if section == "modifiers":
        return [Entry(name, one.summary, one.kind) for name, one in MODIFIERS.items()]
    return [Entry(**one) for one in _catalogue()[section]]


def methods() -> list[Entry]:
    """Return the methods, by the names of their configurations."""
    return entries("methods")


def no_method(name: str) -> str:
    """Return a message that a method does not exist, with a similar name."""
    meant = question(closest(name, [entry.name for entry in methods()]))
    return (
        f"there is no method {name!r}{meant} (`pflight list methods` names all; the file of one of "
        "your own ends in .yaml)"
    )


def options(name: str) -> list[str]:
    """Return the options of Lightning's Trainer or of one of pflight's classes."""
    return _catalogue()["options"].get(name, "").split()


@functools.cache
def _catalogue() -> Any:
    return json.loads(Path(__file__).with_name("catalogue.json").read_text("utf-8"))

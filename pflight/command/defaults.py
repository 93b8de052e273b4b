"""Defaults of classes, which the ``config.yaml`` of a run has as if they were given."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import yaml  # type: ignore[import-untyped]

from pflight.runs.folder import HEADER

from .config_files import load

_PLAIN = (bool, int, float, str)
_REPLACES = re.compile(
    r"--(model|data|trainer\.callbacks|trainer\.logger)(?!=null)\b.*|--config.*|-c.*"
)


def without_defaults(args: Sequence[str]) -> list[str]:
    """Return arguments in which a first ``config.yaml`` of a run has what differs from defaults.

    A class that takes the place of another then begins with its own defaults. Seeds stay as they
    are; so do files after others, whose options they replace.

    Args:
        args: The arguments, with configurations that exist.
    """
    first = next((i for i, arg in enumerate(args) if _REPLACES.fullmatch(arg)), None)
    if first is None:
        return [*args]
    option, equals, path = args[first].partition("=")
    rest = args[first + 1 :]
    if not equals:
        path, *rest = rest or [""]
    changed = any(map(_REPLACES.fullmatch, rest))
    if option not in ("--config", "-c") or not changed or not _is_written(path):
        return [*args]
    config = _given(load(Path(path).read_text("utf-8-sig")))
    return [*args[:first], f"--config={yaml.safe_dump(config, sort_keys=False)}", *rest]


def _is_written(path: str) -> bool:
    """Return whether pflight has written a file, with all options of a run."""
    file = Path(path)
    return file.is_file() and file.read_text("utf-8-sig").startswith(HEADER)


def _given(value: Any) -> Any:
    """Return a part of a configuration without options that have the default of their class."""
    if isinstance(value, list):
        return [*map(_given, value)]
    if not isinstance(value, dict):
        return value
    left = {name: _given(part) for name, part in value.items()}
    if isinstance(options := left.get("init_args"), dict) and "class_path" in left:
        kind = named(str(left["class_path"]))
        left["init_args"] = {
            name: option
            for name, option in options.items()
            if name == "seed" or kind is None or not _is_default(option, default_of(kind, name))
        }
    return left


def _is_default(value: Any, default: Any) -> bool:
    """Return whether a value that was read from a file is a default."""
    if isinstance(default, list | tuple):
        pairs = zip(value, default, strict=False) if isinstance(value, list) else ()
        same = isinstance(value, list) and len(value) == len(default)
        return same and all(_is_default(*pair) for pair in pairs)
    if value is None or default is None:
        return value is default
    return isinstance(default, _PLAIN) and type(value) is type(default) and value == default


def named(path: str) -> Any:
    """Return what a path names, or ``None``."""
    try:
        return resolve_name(path)
    except (ImportError, AttributeError, ValueError):
        return None


def default_of(made_by: Any, name: str) -> Any:
    """Return the default of an option, which may be that of a base class."""
    kinds = made_by.__mro__ if isinstance(made_by, type) else []
    for function in [kind.__init__ for kind in kinds] or [made_by]:  # type: ignore[misc]
        try:
            found = inspect.signature(function).parameters.get(name)
        except (TypeError, ValueError):
            continue
        if found is not None:
            return found.default
    return inspect.Parameter.empty

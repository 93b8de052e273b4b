"""The classes in a configuration, and their defaults.

The ``config.yaml`` of a run has defaults as if they were given.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import yaml  # type: ignore[import-untyped]
from jsonargparse import Namespace

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


def specs(value: Any, prefix: str = "") -> Iterator[tuple[str, Namespace]]:
    """Yield the parts of a configuration that name a class, with the names of their options."""
    if isinstance(value, list):
        for item in value:
            yield from specs(item, prefix)
    elif isinstance(value, Namespace):
        if value.get("class_path"):
            yield prefix, value
        for name, part in vars(value).items():
            inner = name not in ("init_args", "dict_kwargs")
            yield from specs(part, ".".join(filter(None, (prefix, name))) if inner else prefix)


def spec(value: Any) -> Any:
    """Return a value in which all that names a class is a Namespace."""
    if not isinstance(value, dict | Namespace) or "class_path" not in value:
        return deepcopy(value)
    options: Any = value.get("init_args") or {}
    named = options if isinstance(options, dict) else vars(options)
    own = Namespace(**{name: spec(option) for name, option in named.items()})
    return Namespace(class_path=value["class_path"], init_args=own)


def drop_untold_defaults(config: Namespace) -> None:
    """Drop, in place, options that have a default that jsonargparse can't read from text.

    These are objects, such as a tensor or a module, and functions without an annotated result: of
    a default function jsonargparse keeps the name, which it then does not take for a function. The
    class fills its defaults in.
    """
    for _, spec in specs(config):
        made_by, options = named(spec.class_path), spec.get("init_args")
        for name, value in [*vars(options).items()] if options and made_by else []:
            default = default_of(made_by, name)
            only_a_name = isinstance(value, str) and callable(default) and named(value) is default
            if only_a_name or (value is default and not _readable(value)):
                del options[name]


def _readable(value: Any) -> bool:
    """Return whether a value can be written to a configuration, and read again."""
    if value is None or isinstance(value, bool | int | float | str):
        return True
    if isinstance(value, list | tuple):
        return all(map(_readable, value))
    if isinstance(value, dict):
        return all(map(_readable, value.values()))
    name = getattr(value, "__qualname__", None)
    return name is not None and named(f"{value.__module__}:{name}") is value

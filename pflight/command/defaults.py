"""The classes in a configuration, and their defaults.

The ``config.yaml`` of a run contains all defaults, as if they were given.
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
    r"--(model|data|trainer\.callbacks|trainer\.logger)(?!=null)\b.*|--config=.*"
)


def without_defaults(args: Sequence[str]) -> list[str]:
    """Remove the defaults from a first ``config.yaml`` of a run in the arguments.

    So a class that replaces another begins with its own defaults. Seeds stay unchanged. Later files
    stay unchanged, too, since they replace options of earlier files.

    Args:
        args: The arguments ``--option=value``. Their configurations exist.
    """
    first = next((i for i, arg in enumerate(args) if _REPLACES.fullmatch(arg)), None)
    if first is None:
        return [*args]
    option, _, path = args[first].partition("=")
    rest = args[first + 1 :]
    changed = any(map(_REPLACES.fullmatch, rest))
    if option != "--config" or not changed or not _is_written(path):
        return [*args]
    config = _given(load(Path(path).read_text("utf-8-sig")))
    return [*args[:first], f"--config={yaml.safe_dump(config, sort_keys=False)}", *rest]


def _is_written(path: str) -> bool:
    """Return whether pflight has written a file with all options of a run."""
    file = Path(path)
    return file.is_file() and file.read_text("utf-8-sig").startswith(HEADER)


def _given(value: Any) -> Any:
    """Return a part of a configuration without the defaults of its classes."""
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
    """Return whether a value from a file is the default."""
    if isinstance(default, list | tuple):
        pairs = zip(value, default, strict=False) if isinstance(value, list) else ()
        same = isinstance(value, list) and len(value) == len(default)
        return same and all(_is_default(*pair) for pair in pairs)
    if value is None or default is None:
        return value is default
    return isinstance(default, _PLAIN) and type(value) is type(default) and value == default


def named(path: str) -> Any:
    """Return the object of an import path, or ``None``."""
    try:
        return resolve_name(path)
    except (ImportError, AttributeError, ValueError):
        return None


def default_of(made_by: Any, name: str) -> Any:
    """Return the default of an option, also from a base class."""
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
    """Yield the parts of a configuration with a class, each with the name of its option."""
    if isinstance(value, list):
        for item in value:
            yield from specs(item, prefix)
    elif isinstance(value, dict):  # by names of the user, as modifiers
        for name, part in value.items():
            yield from specs(part, f"{prefix}.{name}")
    elif isinstance(value, Namespace):
        if value.get("class_path"):
            yield prefix, value
        for name, part in vars(value).items():
            inner = name not in ("init_args", "dict_kwargs")
            yield from specs(part, ".".join(filter(None, (prefix, name))) if inner else prefix)


def spec(value: Any) -> Any:
    """Return a value with each part that names a class as a Namespace."""
    if not isinstance(value, dict | Namespace) or "class_path" not in value:
        return deepcopy(value)
    options: Any = value.get("init_args") or {}
    named = options if isinstance(options, dict) else vars(options)
    own = Namespace(**{name: spec(option) for name, option in named.items()})
    return Namespace(class_path=value["class_path"], init_args=own)


def drop_untold_defaults(config: Namespace) -> None:
    """Drop options in place if their defaults can't be read from text.

    Such defaults are objects, such as tensors or modules, and functions without an annotated
    result. jsonargparse stores the name of a default function, but does not read it as a function.
    The class fills in these defaults.
    """
    for _, spec in specs(config):
        made_by, options = named(spec.class_path), spec.get("init_args")
        for name, value in [*vars(options).items()] if options and made_by else []:
            default = default_of(made_by, name)
            only_a_name = isinstance(value, str) and callable(default) and named(value) is default
            if only_a_name or (value is default and not _readable(value)):
                del options[name]


def _readable(value: Any) -> bool:
    """Return whether a value can be written to a configuration and read back."""
    if value is None or isinstance(value, bool | int | float | str):
        return True
    if isinstance(value, list | tuple):
        return all(map(_readable, value))
    if isinstance(value, dict):
        return all(map(_readable, value.values()))
    name = getattr(value, "__qualname__", None)
    return name is not None and named(f"{value.__module__}:{name}") is value

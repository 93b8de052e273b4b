"""The available choices, read from source files and configurations without imports."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import yaml  # type: ignore[import-untyped]

from pflight.messages import closest, question

from .combined import MODIFIERS
from .shipped import configs, summary

_METHODS = "configs/algorithm/"
_OF_OPTIONS = (
    ("lightning", "pytorch/trainer/trainer.py"),
    ("pflight", "*.py"),
    ("pflight", "data/*.py"),
    ("pflight.models", "**/*.py"),
    ("pflight.datamodules", "**/*.py"),
    ("pflight.callbacks", "**/*.py"),
)


class Entry(NamedTuple):
    """One choice.

    Args:
        name: The name of the choice.
        summary: A description in one sentence.
        class_path: The class, if there is one.
        config: The configuration, if there is one.
    """

    name: str
    summary: str
    class_path: str | None = None
    config: str | None = None


@functools.cache
def methods() -> list[Entry]:
    """Return the methods, by the names of their configurations."""
    return [
        Entry(file.stem, summary(file), _callback(file), path)
        for path, file in configs().items()
        if path.startswith(_METHODS)
    ]


def modifiers() -> list[Entry]:
    """Return the modifiers, by their names in ``pflight compare``."""
    return [Entry(name, one.summary, one.kind) for name, one in MODIFIERS.items()]


def no_method(name: str) -> str:
    """Return a message that a method does not exist, with a similar name."""
    meant = question(closest(name, [entry.name for entry in methods()]))
    return (
        f"there is no method {name!r}{meant} (`pflight list methods` names all; the file of one of "
        "your own ends in .yaml)"
    )


@functools.cache
def data() -> list[Entry]:
    """Return the data sets, and the classes for the user's own data.

    Wrappers of other data are left out, since algorithms use them.
    """
    found = _derived("pflight.datamodules", "FederatedDataModule")
    wrapped = _derived("pflight.datamodules", "WrappedData")
    shown = (one for one in found if not one.endswith("DataModule"))  # base classes
    return _entries("pflight.datamodules", (one for one in shown if one not in wrapped))


@functools.cache
def partitions() -> list[Entry]:
    """Return the partitions of a data set's samples among clients."""
    return _entries("pflight.datamodules", _derived("pflight.datamodules", "Partition"))


@functools.cache
def networks() -> list[Entry]:
    """Return the networks."""
    there = {*_exported("pflight.models")} & {*_sources("pflight.models", "networks/*.py")}
    return _entries("pflight.models", sorted(there))


@functools.cache
def shipped() -> list[Entry]:
    """Return the shipped configurations, by their paths without ``configs/`` and ``.yaml``."""
    return [
        Entry(path[len("configs/") : -len(".yaml")], summary(file), config=path)
        for path, file in configs().items()
    ]


def options(name: str) -> list[str]:
    """Return the options of one of pflight's classes, from its source."""
    node = _source(name)
    if node is None:
        return []
    found: list[str] = []
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            found = [one.arg for one in (*method.args.args[1:], *method.args.kwonlyargs)]
            if not method.args.kwarg:
                return found
    return [*dict.fromkeys([*found, *(one for base in _bases(node) for one in options(base))])]


@functools.cache
def _source(name: str) -> ast.ClassDef | None:
    """Return the source of a class with options of a run. Only its file is parsed."""
    for package, files in _OF_OPTIONS:
        for path in _folder(package).glob(files):
            text = path.read_bytes()
            for node in ast.parse(text).body if f"\nclass {name}".encode() in text else ():
                if isinstance(node, ast.ClassDef) and node.name == name:
                    return node
    return None


@functools.cache
def _sources(package: str, files: str = "**/*.py") -> dict[str, ast.ClassDef]:
    """Return the source of the classes that a package defines, without an import."""
    paths = _folder(package).glob(files)
    nodes = (node for path in paths for node in ast.parse(path.read_bytes()).body)
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def _exported(package: str) -> list[str]:
    """Return the names of the classes that a package imports, without old names."""
    tree = ast.parse((_folder(package) / "__init__.py").read_bytes())
    imports = (node for node in tree.body if isinstance(node, ast.ImportFrom))
    found = {name.name for node in imports for name in node.names}
    return sorted(found & {*_sources(package)})


def _derived(package: str, base: str) -> list[str]:
    return [one for one in _exported(package) if one != base and _is_a(package, one, base)]


def _is_a(package: str, name: str, base: str) -> bool:
    """Return whether a class of a package is another class or derives from it."""
    node = _sources(package).get(name)
    bases = _bases(node) if node is not None else []
    return name == base or any(_is_a(package, one, base) for one in bases)


def _bases(node: ast.ClassDef) -> list[str]:
    """Return the names of a class's base classes, without modules and type arguments."""
    return [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]


def _folder(package: str) -> Path:
    """Return the folder of a package. Only pflight is imported to find it."""
    spec = find_spec(package)
    return Path(str(spec and spec.origin)).parent


def _entries(package: str, names: Iterable[str]) -> list[Entry]:
    """Return entries with the short class paths that configurations use."""
    return [Entry(name, _line(_sources(package)[name]), f"{package}.{name}") for name in names]


def _line(node: ast.ClassDef) -> str:
    """Return the first line of a docstring, without markup."""
    line = (ast.get_docstring(node) or "").partition("\n")[0]
    return re.sub(r"(:\w+:)?`+~?([^`]*)`+", r"\2", line)


def _callback(config: Path) -> str:
    """Return the class of a configuration's method."""
    callbacks = yaml.load(config.read_text("utf-8"), yaml.CSafeLoader)["trainer"]["callbacks+"]
    return f"pflight.callbacks.{callbacks[-1]['class_path']}"

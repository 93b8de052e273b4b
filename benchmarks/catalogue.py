"""Read what ``pflight list`` and completion in a shell show, from source files and configurations.

``python benchmarks/ship.py`` writes it to ``pflight/command/catalogue.json``.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from pflight.command.shipped import summary

ROOT = Path(__file__).resolve().parents[1]
CATALOGUE = ROOT / "pflight" / "command" / "catalogue.json"
LIGHTNING = Path(str(find_spec("lightning").origin)).parent  # type: ignore[union-attr]
WITH_OPTIONS = (
    (LIGHTNING, "pytorch/trainer/trainer.py"),
    (ROOT, "pflight/*.py"),
    (ROOT, "pflight/data/*.py"),
    (ROOT, "models/**/*.py"),
    (ROOT, "datamodules/**/*.py"),
    (ROOT, "callbacks/**/*.py"),
)


def catalogue(needs: Mapping[str, str]) -> str:
    """Return the text of the file; ``needs`` has what a method asks of the client, by its name."""
    configs = [*_configs()]
    methods = [one for one in configs if one["name"].startswith("algorithm/")]

    def _needs(one: dict[str, str]) -> dict[str, str]:
        name = re.split(r":| \(", one["summary"])[0]
        return {"needs": needs[name]} if needs.get(name) else {}

    found = {
        "methods": [
            {**one, "name": Path(one["name"]).name, **_callback(one), **_needs(one)}
            for one in methods
        ],
        "data": _exported(
            "datamodules",
            lambda name: (
                _is_a(name, "FederatedDataModule")
                and not (name.endswith("DataModule") or _is_a(name, "WrappedData"))
            ),
        ),
        "partitions": _exported(
            "datamodules", lambda name: name != "Partition" and _is_a(name, "Partition")
        ),
        "networks": _exported("models", lambda name: not _is_a(name, "Task")),
        "configs": configs,
        "options": {
            name: " ".join(_options(name)) for name in sorted(_sources()) if name[0] != "_"
        },
    }
    found["options"] = {name: names for name, names in found["options"].items() if names}
    return json.dumps(found, indent=1) + "\n"


def _configs() -> Iterator[dict[str, str]]:
    """Yield the configurations, those at the top first."""
    folder = ROOT / "configs"
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*.yaml"))
    for name in sorted(names, key=lambda name: (name.count("/"), name)):
        yield {
            "name": name.removesuffix(".yaml"),
            "summary": summary(folder / name),
            "config": f"configs/{name}",
        }


def _callback(config: dict[str, str]) -> dict[str, str]:
    """Return the class of a configuration's method."""
    found = yaml.safe_load((ROOT / config["config"]).read_text("utf-8"))["trainer"]["callbacks+"]
    return {"class_path": f"pflight.callbacks.{found[-1]['class_path']}"}


@functools.cache
def _sources() -> dict[str, ast.ClassDef]:
    """Return the source of the classes with options of a run, without an import."""
    paths = (path for folder, files in WITH_OPTIONS for path in sorted(folder.glob(files)))
    nodes = (node for path in paths for node in ast.parse(path.read_bytes()).body)
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def _options(name: str) -> list[str]:
    """Return the options of a class, also from its base classes."""
    if name not in _sources():
        return []
    found: list[str] = []
    for method in _sources()[name].body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            found = [one.arg for one in (*method.args.args[1:], *method.args.kwonlyargs)]
            if not method.args.kwarg:
                return found
    return [*dict.fromkeys([*found, *(one for base in _bases(name) for one in _options(base))])]


def _exported(package: str, fits: Callable[[str], bool]) -> list[dict[str, Any]]:
    """Return the classes that a package imports and that fit, without old names."""
    tree = ast.parse((ROOT / package / "__init__.py").read_bytes())
    imports = (node for node in tree.body if isinstance(node, ast.ImportFrom))
    names = {name.name for node in imports for name in node.names} & {*_sources()}
    return [
        {"name": name, "summary": _line(name), "class_path": f"pflight.{package}.{name}"}
        for name in sorted(names)
        if fits(name)
    ]


def _is_a(name: str, base: str) -> bool:
    """Return whether a class is another class or derives from it."""
    return name == base or any(_is_a(one, base) for one in _bases(name))


def _bases(name: str) -> list[str]:
    """Return the names of a class's base classes, without modules and type arguments."""
    bases = _sources()[name].bases if name in _sources() else []
    return [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in bases]


def _line(name: str) -> str:
    """Return the first line of a docstring, without markup."""
    line = (ast.get_docstring(_sources()[name]) or "").partition("\n")[0]
    return re.sub(r"(:\w+:)?`+~?([^`]*)`+", r"\2", line)

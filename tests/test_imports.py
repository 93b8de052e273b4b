"""Imports inside the project go one way, and name the module that defines what they import."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "pflight": ROOT / "pflight",
    "pflight.models": ROOT / "models",
    "pflight.datamodules": ROOT / "datamodules",
    "pflight.callbacks": ROOT / "callbacks",
}
FACE = "pflight"  # whose lazy names keep `import pflight` fast

# What does not hold yet: remove an edge here when it is gone from the code, and add none.
KNOWN = (("pflight.__main__", "pflight.command.cli"),)

pytestmark = pytest.mark.fast


class Import(NamedTuple):
    """An import of one module of the project in another."""

    importer: str
    imported: str
    names: tuple[str, ...]
    inside: str  # the function that it stands in, if any


def modules() -> dict[str, Path]:
    """Return the project's modules by name; a package is its ``__init__``."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


MODULES = modules()
PACKAGES = {name for name, path in MODULES.items() if path.name == "__init__.py"}


def imports(module: str) -> Iterator[Import]:
    """Yield what a module imports from the project, also for types and inside of functions."""

    def walk(node: ast.AST, function: str) -> Iterator[Import]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            function = getattr(node, "name", "lambda")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from found(alias.name, (), function)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                parents = module.split(".")[: None if module in PACKAGES else -1]
                base = parents[: len(parents) - node.level + 1]
                source = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                submodule = f"{source}.{alias.name}"
                if submodule in MODULES:
                    yield from found(submodule, (), function)
                else:
                    yield from found(source, (alias.name,), function)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, function)

    def found(source: str, names: tuple[str, ...], function: str) -> Iterator[Import]:
        if source in MODULES:
            yield Import(module, source, names, function)

    yield from walk(ast.parse(MODULES[module].read_text()), "")


IMPORTS = [one for module in MODULES for one in imports(module)]
EDGES = {(one.importer, one.imported) for one in IMPORTS if one.importer != FACE}


def layer(module: str) -> int:
    """Return how far from the core a module is; imports never lead outwards."""
    outside = {"models": 1, "datamodules": 1, "callbacks": 2}
    outside |= dict.fromkeys(("experiments", "deploy", "command", "__main__"), 3)
    return outside.get(module.split(".")[1], 0)


def part(module: str) -> str:
    """Return the folder of a module; models and data modules don't know each other."""
    return module.split(".")[1] if layer(module) in (1, 2) else ""


def against_the_order(importer: str, imported: str) -> bool:
    """Return whether an import leads outwards, or from models to data modules or back."""
    sideways = layer(importer) == layer(imported) and part(importer) != part(imported)
    return layer(importer) < layer(imported) or sideways


def test_the_graph_is_that_of_the_project() -> None:
    assert ("pflight.federation", "pflight.clients") in EDGES
    assert (
        "pflight.callbacks.methods.num_clusters",
        "pflight.callbacks.methods.multi_center",
    ) in EDGES
    assert len(MODULES) > 100


def test_there_is_no_circle() -> None:
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for importer, imported in EDGES - {*KNOWN}:
        graph[importer].add(imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imports in a circle: {' <- '.join(error.args[1])}")


def test_imports_go_one_way() -> None:
    outwards = {edge for edge in EDGES if against_the_order(*edge)}
    assert sorted(outwards - {*KNOWN}) == []


def test_the_federation_is_a_short_file() -> None:
    assert len(MODULES["pflight.federation"].read_text().splitlines()) <= 400


def test_engines_are_built_one_upon_the_other() -> None:
    """Training one by one knows nothing of stacks, and stacks nothing of the choice."""
    rooms = ["pflight.engines.choice", "pflight.engines.stacked", "pflight.engines.alone"]

    def floor(module: str) -> int:
        found = (3 - place for place, room in enumerate(rooms) if module.startswith(room))
        return next(found, 0 if module.startswith("pflight.engines.") else -1)

    inside = [(floor(importer), floor(imported)) for importer, imported in EDGES]
    assert {(1, 0), (2, 1), (3, 2)} <= {*inside}
    assert [edge for edge in inside if edge[1] > edge[0] >= 0] == []


# What a stranger reads first. All else has its place in a room.
FIRST = {
    "federation", "server_callback", "fedavg", "method", "clients", "evaluation",
    "client_work", "errors", "history", "local_client", "messages", "modifiers", "optim", "options",
    "randomness", "task",
}  # fmt: skip
ROOMS = {
    "adapters",
    "states",
    "transforms",
    "data",
    "engines",
    "metrics",
    "runs",
    "command",
    "experiments",
}
ROOMS |= {"deploy"}


def test_what_stands_at_the_entrance() -> None:
    names = {path.stem for path in (ROOT / "pflight").glob("*.py")}
    assert names == {*FIRST, "__init__", "__main__"}
    folders = {
        path.name for path in (ROOT / "pflight").iterdir() if (path / "__init__.py").exists()
    }
    assert folders == ROOMS


PRIVATE = "pflight.deploy.flower"  # from which others take all that Flower does not document


def test_imports_name_the_module_that_defines() -> None:
    packages = [one for one in IMPORTS if one.imported in PACKAGES and one.importer != FACE]
    assert packages == []
    passed_on = [
        one
        for one in IMPORTS
        if one.imported not in (*PACKAGES, PRIVATE) and not {*one.names} <= defined(one.imported)
    ]
    assert passed_on == []


@functools.cache
def defined(module: str) -> set[str]:
    """Return the names that a module defines itself at its top level."""
    names = set()
    for node in ast.parse(MODULES[module].read_text()).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Assign(targets=targets):
                names |= {one.id for target in targets for one in ast.walk(target)
                          if isinstance(one, ast.Name)}  # fmt: skip
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return names


def test_no_function_imports_from_the_project() -> None:
    inside = {(one.importer, one.imported) for one in IMPORTS if one.inside}
    assert sorted(inside - {*KNOWN}) == []


def test_only_the_face_of_the_package_finds_names_lazily() -> None:
    lazy = [
        module
        for module, path in MODULES.items()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "__getattr__"
    ]
    assert lazy == [FACE]


@pytest.mark.parametrize("edge", KNOWN, ids=" to ".join)
def test_a_known_edge_is_still_there(edge: tuple[str, str]) -> None:
    assert edge in EDGES
    function = any((one.importer, one.imported) == edge and one.inside for one in IMPORTS)
    assert against_the_order(*edge) or function or _leads_back(*edge)


def _leads_back(importer: str, imported: str) -> bool:
    """Return whether an import is part of a circle."""
    reached, new = {imported}, {imported}
    while new:
        new = {end for start, end in EDGES if start in new} - reached
        reached |= new
    return importer in reached

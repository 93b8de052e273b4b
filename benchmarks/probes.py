"""Notes which statements each test enters, at next to no cost: a tracer would double the time.

Each statement inside a function sets one byte before it runs. The changed code is compiled once and
loaded in place of the usual one, also in the processes that tests start. No file changes.
"""

from __future__ import annotations

import ast
import atexit
import base64
import builtins
import json
import marshal
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

PROBED = "PFLIGHT_PROBED"  # the folder of the changed code and of the notes
_NAME = "__probes__"
_TEST = "PYTEST_CURRENT_TEST"  # pytest sets it, and processes that a test starts inherit it
_BODIES = ("body", "orelse", "finalbody")

Place = tuple[str, int, int]  # a file, and the first and last line of a statement in it


def load_instead(code: dict[str, CodeType]) -> None:
    """Let this process load the code wherever it imports one of the files, named by their paths."""
    usual = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, fullname: str) -> CodeType | None:
        changed = code.get(str(Path(loader.path).resolve()))
        return usual(loader, fullname) if changed is None else changed

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def _last_line(node: ast.stmt) -> int:
    """Return the last line of a statement, or of its head if it has a body."""
    inner = getattr(node, "body", None) or getattr(node, "cases", None)
    if not inner:
        return node.end_lineno or node.lineno
    first = inner[0]
    line: int = first.pattern.lineno if isinstance(first, ast.match_case) else first.lineno
    return max(node.lineno, line - 1)


def _probe(tree: ast.Module, file: str, places: list[Place]) -> None:
    """Set a byte before each statement inside a function, and list the statements' places."""

    def visit(node: ast.AST, inside: bool) -> None:
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            visit(child, inside)
        if not inside:
            return
        for name in _BODIES:
            body = getattr(node, name, None)
            if isinstance(body, list):
                setattr(node, name, [each for old in body for each in probed(old)])

    def probed(node: ast.stmt) -> Iterator[ast.stmt]:
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not text and not isinstance(node, ast.Global | ast.Nonlocal):
            (setting,) = ast.parse(f"{_NAME}[{len(places)}] = 1").body
            for each in ast.walk(setting):
                ast.copy_location(each, node)
            places.append((file, node.lineno, _last_line(node)))
            yield setting
        yield node

    visit(tree, False)


def prepare(folder: Path, root: Path, files: list[Path]) -> None:
    """Compile the files with probes, and write the code and the places into a folder."""
    for old in folder.glob("*"):
        old.unlink()
    places: list[Place] = []
    code = {}
    for path in files:
        tree = ast.parse(path.read_text())
        _probe(tree, str(path.relative_to(root)), places)
        code[str(path.resolve())] = compile(ast.fix_missing_locations(tree), str(path), "exec")
    (folder / "code").write_bytes(marshal.dumps(code))
    (folder / "places.json").write_text(json.dumps(places))


def _note(test: str) -> None:
    """Add what was entered since the last note to this process's notes."""
    seen: bytearray = getattr(builtins, _NAME)
    entered = base64.b64encode(zlib.compress(bytes(seen))).decode()
    seen[:] = bytes(len(seen))
    with (Path(os.environ[PROBED]) / f"{os.getpid()}.notes").open("a") as file:
        file.write(json.dumps([test, entered]) + "\n")


def probe_from_environment() -> None:
    """Probe this process, if it is started by tests that are mapped."""
    if not (folder := os.environ.get(PROBED)):
        return
    count = len(json.loads((Path(folder) / "places.json").read_text()))
    setattr(builtins, _NAME, bytearray(count))
    load_instead(marshal.loads((Path(folder) / "code").read_bytes()))
    if test := os.environ.get(_TEST):
        atexit.register(_note, test.rpartition(" ")[0])


def pytest_runtest_logstart(nodeid: str) -> None:
    """As a plugin: forget what collecting tests, or a report of the last test, entered."""
    if seen := getattr(builtins, _NAME, None):
        seen[:] = bytes(len(seen))


def pytest_runtest_logfinish(nodeid: str) -> None:
    """As a plugin, note what a test entered, with its fixtures."""
    if hasattr(builtins, _NAME) and any(getattr(builtins, _NAME)):
        _note(nodeid)


def entered(folder: Path) -> tuple[list[Place], dict[str, set[int]]]:
    """Return the places of all statements, and the numbers of those that each test enters."""
    places = [tuple(place) for place in json.loads((folder / "places.json").read_text())]
    by_test: dict[str, set[int]] = defaultdict(set)
    for path in folder.glob("*.notes"):
        for line in path.read_text().splitlines():
            test, text = json.loads(line)
            seen = zlib.decompress(base64.b64decode(text))
            by_test[test].update(number for number, byte in enumerate(seen) if byte)
    return places, by_test

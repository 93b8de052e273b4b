"""Plant defects in the code, and count those that the tests of ``./check`` find.

    python -m benchmarks.defects map          # which test enters which line; as long as ./check all
    python -m benchmarks.defects choose       # which of them ./check leaves out
    python -m benchmarks.defects plant        # 200 defects, each in a process of its own

A defect changes one place of the core, the methods or the client modules: a comparison, a sign, a
number, a condition or a statement. It is planted in memory, also in the processes that tests start,
and no file changes. The tests that enter its line then run, those of the fewest lines first, until
one fails: first the tests of ``./check``, then those that only ``./check all`` runs. For each part
``--seconds`` limits the time of its tests. The same ``--seed`` plants the same defects.

The last line says how many of the defects that any test finds the short check finds by itself.

``choose`` writes ``tests/left_out.txt``, beside the tests that are marked ``long``. It leaves out
tests whose every line at least ``--others`` further tests enter, the slowest first. Tests of less
than ``--least`` seconds stay, since most of them hold numbers that were worked out by hand. Shipped
methods keep all their properties.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.probes import PROBED, entered, load_instead, prepare, probe_from_environment

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("pflight", "models", "callbacks/methods")
WITHOUT = ("pflight/deploy", "pflight/experiments", "pflight/command")
MAP = ROOT / "build" / "defects"
LEFT_OUT = ROOT / "tests" / "left_out.txt"
SHARED = ("tests/test_algorithms.py", "tests/test_ranks.py")  # runs that several tests look at
PLANTED = "PFLIGHT_PLANTED"
PRELOADED = ["torch", "lightning.pytorch", "torchmetrics", "tensordict", "sklearn.datasets"]
_NO_SUCH_TEST, _NO_TEST = 4, 5  # of pytest.ExitCode; processes of tests shall not import pytest
IMPORTED = "ignore::pytest.PytestAssertRewriteWarning"  # of plugins that are imported already
FOUND, MISSED, NONE = "found", "missed", "no test"

_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Pow: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


class Defect(NamedTuple):
    """One change: the place is the number of the node in the walk of its file's tree."""

    file: str
    node: int
    line: int
    text: str


class _Planter:
    """Lists the places in a tree's functions for a defect, and plants one in it."""

    def __init__(self, planted: int | None = None) -> None:
        self.planted = planted
        self.found: list[tuple[int, Any]] = []
        self._count = 0  # of nodes
        self._inside = 0  # functions

    def visit(self, node: ast.AST) -> ast.AST:
        number, self._count = self._count, self._count + 1
        if self._is_left_out(node):
            return node
        function = isinstance(node, ast.FunctionDef)
        self._inside += function
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases", "msg", "exc"):
                continue
            if isinstance(value, list):
                value[:] = [self.visit(e) if isinstance(e, ast.AST) else e for e in value]
            elif isinstance(value, ast.AST):
                setattr(node, name, self.visit(value))
        self._inside -= function
        changed = _changed(node) if self._inside else None
        if changed is None:
            return node
        self.found.append((number, node))
        return changed if number == self.planted else node

    @staticmethod
    def _is_left_out(node: ast.AST) -> bool:
        """Leave out messages, type checking and texts: few tests ought to hold them."""
        match node:
            case ast.Raise() | ast.JoinedStr() | ast.Assert() | ast.Import() | ast.ImportFrom():
                return True
            case ast.Call(func=ast.Attribute(attr="warn" | "info" | "debug" | "warning")):
                return True
            case ast.Call(func=ast.Name(id="warn" | "cast")):
                return True
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                return True
            case ast.FunctionDef(name="__repr__" | "__str__"):
                return True
        return False


def _changed(node: ast.AST) -> ast.AST | None:
    """Return a changed copy of a node, or nothing where no defect fits."""
    new: Any = copy.copy(node)
    match node:
        case ast.Compare(ops=[op]) if type(op) in _SWAPPED:
            new.ops = [_SWAPPED[type(op)]()]
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op) if type(op) in _SWAPPED:
            new.op = _SWAPPED[type(op)]()
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            new = operand
        case ast.Constant(value=bool(value)):
            new.value = not value
        case ast.Constant(value=int(value) | float(value)):
            new.value = value + 1
        case ast.If(test=test):
            new.test = ast.UnaryOp(ast.Not(), test)
        case ast.Expr(value=ast.Call()):
            new = ast.Pass()
        case _:
            return None
    return ast.fix_missing_locations(ast.copy_location(new, node))


def defects_of(path: Path) -> list[Defect]:
    """Return all defects that can be planted in a file."""
    source = path.read_text()
    planter = _Planter()
    planter.visit(ast.parse(source))
    lines, name = source.splitlines(), str(path.relative_to(ROOT))
    return [
        Defect(
            name, number, node.lineno, f"{type(node).__name__}: {lines[node.lineno - 1].strip()}"
        )
        for number, node in planter.found
    ]


def planted(defect: Defect) -> ast.Module:
    """Return the tree of a file with a defect."""
    tree = ast.parse((ROOT / defect.file).read_text())
    _Planter(defect.node).visit(tree)
    return tree


def plant(defect: Defect) -> None:
    """Let this process see a defect wherever it imports the file."""
    path = str(ROOT / defect.file)
    load_instead({path: compile(planted(defect), path, "exec")})


def start_from_environment() -> None:
    """Change a process that a test starts: :func:`write_site` lets Python call this."""
    probe_from_environment()
    if text := os.environ.get(PLANTED):
        plant(Defect(*json.loads(text)))


def write_site(folder: Path) -> None:
    """Write a module that Python imports as it starts, if the folder is on its path."""
    (folder / "sitecustomize.py").write_text(
        f"import sys; sys.path.append({str(ROOT)!r})\n"
        "from benchmarks.defects import start_from_environment\n"
        "start_from_environment()\n"
    )


def run_map(options: argparse.Namespace) -> None:
    """Run tests, and keep which lines each of them enters and how long it takes."""
    MAP.mkdir(parents=True, exist_ok=True)
    prepare(MAP, ROOT, _files())
    write_site(MAP)
    environment = {PROBED: str(MAP), "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{MAP}:{ROOT}"}
    command = [sys.executable, "-m", "pytest", *f"-q -n {options.workers} --dist loadfile".split()]
    command += ["--no-loadscope-reorder", "-p", "benchmarks.probes"]
    command += ["-W", IMPORTED]
    command += [f"--junitxml={MAP / 'durations.xml'}", *options.tests]
    subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=False)


class Tests:
    """The tests that enter a line, by what :func:`run_map` kept."""

    def __init__(self) -> None:
        self.places, self.entered = entered(MAP)
        self.seconds = dict(_durations(MAP / "durations.xml"))
        self.short = set(collected("-m", "not long"))

    def entering(self) -> dict[tuple[str, int], set[str]]:
        """Return the tests that enter each line, by file and number."""
        entering: dict[tuple[str, int], set[str]] = defaultdict(set)
        for test, numbers in self.entered.items():
            for number in numbers:
                file, first, last = self.places[number]
                for line in range(first, last + 1):
                    entering[file, line].add(test)
        return entering

    def chosen(self, entering: set[str], short: bool, seconds: float) -> list[str]:
        """Return tests that enter a line, of one part: the narrowest first, for some seconds."""
        files = {test.partition("::")[0] for test in entering}
        # The tests of a file may share a run, whose lines then count for the first of them.
        mates = {test for test in self.entered if test.partition("::")[0] in files} - entering
        ordered = sorted(entering, key=lambda test: len(self.entered[test])) + sorted(mates)
        chosen, left = [], seconds
        for test in ordered:
            if (test in self.short) == short and left > 0:
                chosen.append(test)
                left -= self.seconds.get(test, 0.1)
        return chosen


def _durations(path: Path) -> Iterator[tuple[str, float]]:
    """Return the seconds of tests, by their names for pytest."""
    for case in ET.parse(path).iter("testcase"):
        parts = case.attrib["classname"].split(".")
        classes = [part for part in parts if part[:1].isupper()]
        file = "/".join(parts[: len(parts) - len(classes)]) + ".py"
        yield "::".join([file, *classes, case.attrib["name"]]), float(case.attrib["time"])


def collected(*options: str) -> list[str]:
    """Return the names of the tests that pytest collects."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if "::" in line]


def _run_tests(defect: Defect | None, tests: list[str], folder: str) -> None:
    """Run tests with a defect, if one is given, and end with pytest's status."""
    os.setsid()
    os.chdir(ROOT)
    os.environ |= {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    if defect is not None:
        os.environ[PLANTED] = json.dumps(defect)
        plant(defect)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-W", IMPORTED]
    os._exit(import_module("pytest").main([*options, *tests]))


def try_tests(defect: Defect | None, tests: list[str], seconds: float, folder: str) -> str:
    """Return whether tests find a defect; those that then never end do.

    Without a defect, tests that fail have found something as well.
    """
    if not tests:
        return NONE
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_run_tests, args=(defect, tests, folder))
    process.start()
    process.join(3 * seconds + 60)
    if process.is_alive():
        os.killpg(process.pid, 9)
        process.join()
        return FOUND
    if process.exitcode in (_NO_SUCH_TEST, _NO_TEST):
        if defect is None:
            raise RuntimeError(f"pytest does not find these tests; make the map again: {tests}")
        try_tests(None, tests, seconds, folder)  # the defect hides tests, if this finds them
    return FOUND if process.exitcode else MISSED


def run_choose(options: argparse.Namespace) -> None:
    """Write which tests the short check leaves out."""
    head = "# Left out by ./check. python -m benchmarks.defects choose writes this file.\n"
    LEFT_OUT.write_text(head)  # so that the choice is among all tests that are not marked
    tests = Tests()
    short = {test: tests.entered[test] for test in tests.short if test in tests.entered}
    others = Counter(place for places in short.values() for place in places)
    chosen = []
    for test in sorted(short, key=lambda test: tests.seconds.get(test, 0.0), reverse=True):
        kept = test.startswith(SHARED) or tests.seconds.get(test, 0.0) < options.least
        if not kept and all(others[place] > options.others for place in short[test]):
            others.subtract(short[test])
            chosen.append(test)
    LEFT_OUT.write_text(head + "".join(f"{test}\n" for test in sorted(chosen)))
    seconds = sum(tests.seconds[test] for test in chosen)
    print(f"{len(chosen)} of {len(tests.short)} tests, {seconds:.0f} s of them, are left out")


def _files() -> list[Path]:
    """Return the files in which defects are planted."""
    return [
        path
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not str(path.relative_to(ROOT)).startswith(WITHOUT)
    ]


def run_plant(options: argparse.Namespace) -> None:
    """Plant defects, and print what finds each of them."""
    tests = Tests()
    entering = tests.entering()
    every = {  # and the tests that enter them
        defect: entering[defect.file, defect.line]
        for path in _files()
        for defect in defects_of(path)
        if entering[defect.file, defect.line]
        and re.search(options.only, f"{defect.file}:{defect.line}")
    }
    defects = random.Random(options.seed).sample([*every], min(options.count, len(every)))
    controls = defects[:: max(len(defects) // 5, 1)]  # their tests first run without a defect
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    print(
        f"{len(defects)} of {len(every)} defects\n\n| defect | ./check | the rest |\n|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        write_site(Path(folder))

        def judge(defect: Defect) -> tuple[str, str]:
            parts = True, False
            short, rest = (tests.chosen(every[defect], part, options.seconds) for part in parts)
            if defect in controls and try_tests(None, short, options.seconds, folder) == FOUND:
                raise RuntimeError(f"these tests fail without a defect: {short}")
            by_short = try_tests(defect, short, options.seconds, folder)
            by_rest = "" if by_short == FOUND else try_tests(defect, rest, options.seconds, folder)
            print(f"| `{defect.file}:{defect.line}` `{defect.text}` | {by_short} | {by_rest} |")
            sys.stdout.flush()
            return by_short, by_rest

        with ThreadPoolExecutor(options.workers) as pool:
            results = list(pool.map(judge, defects))
    short = sum(by_short == FOUND for by_short, _ in results)
    whole = short + sum(by_rest == FOUND for _, by_rest in results)
    share = f" ({short / whole:.1%})" if whole else ""
    print(f"\nfound by any test: {whole} of {len(defects)}; by ./check: {short}{share}")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    kinds = parser.add_subparsers(required=True)
    mapping = kinds.add_parser("map", help="run tests, and keep which lines they enter")
    mapping.add_argument("tests", nargs="*", help="for pytest: all tests unless given")
    mapping.set_defaults(run=run_map)
    planting = kinds.add_parser("plant", help="plant defects, and run the tests that enter them")
    planting.add_argument("--count", type=int, default=200)
    planting.add_argument("--seed", type=int, default=0)
    planting.add_argument("--seconds", type=float, default=120, help="of tests, for each part")
    planting.add_argument("--only", default="", help="a pattern of `file:line`")
    planting.set_defaults(run=run_plant)
    choosing = kinds.add_parser("choose", help="write which tests ./check leaves out")
    choosing.add_argument("--others", type=int, default=3, help="tests that enter each line, too")
    choosing.add_argument("--least", type=float, default=0.5, help="seconds of a test to leave out")
    choosing.set_defaults(run=run_choose)
    for each in (mapping, planting):
        each.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()

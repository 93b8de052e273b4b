"""Seconds per round and memory of pflight, of raw loops and of other libraries, on the same work.

    python benchmarks/compare.py [--root FOLDER] [--repeats 3] [--out docs/speed.md]

Every library has a virtual environment of its own, made at the first run; together they take some
13 GB. A library that can't be installed or fails is a row that says why. Every row is run in fresh
processes, one after another, in turn with the other rows, and once more to measure its memory. Raw
loops and other libraries run on one thread as well as on as many as they choose, and the faster
counts. The seconds are those between the ends of two rounds, without evaluation and start-up.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from options import at_least, folder
from peers.environments import ENVIRONMENTS, InstallError, python_of, version_of
from peers.images import write_images
from peers.networks import accuracy
from peers.processes import RowError, Run, run_row
from peers.table import Result, save, write_table
from peers.workloads import EQUAL, WORKLOADS


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        run: ``module.function`` of the folder ``peers``.
        workloads: Those on which it makes a difference.
        environment: Name of the library's environment; "" is the current one.
    """

    run: str
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    environment: str = ""

    @property
    def raw(self) -> bool:
        """Whether it is a loop without a library."""
        return self.run.startswith("raw.")

    @property
    def chooses_threads(self) -> bool:
        """Whether it knows by itself how many threads are best; others are tried on one, too."""
        return self.run.startswith("pflight.") or self.run == "raw.two_processes"


ROWS = {
    "raw loop": Row("raw.loop"),
    "raw loop, channels last": Row("raw.channels_last", ("W1",)),
    "raw loop, `autograd.grad` and `foreach`": Row("raw.foreach"),
    "raw loop, both": Row("raw.channels_last_foreach", ("W1",)),
    "raw loop, 2 processes": Row("raw.two_processes"),
    "raw `vmap`": Row("raw.vectorized", EQUAL),
    "raw `vmap`, chunks of 10": Row("raw.chunks_of_10", ("W2", "W3")),
    "**pflight**": Row("pflight.auto"),
    "pflight, sequential": Row("pflight.sequential"),
    "pflight, vectorized": Row("pflight.vectorized"),
    "pflight, 2 ranks": Row("pflight.two_ranks"),
    "pfl": Row("pfl.run", environment="pfl"),
    "fluke": Row("fluke.run", environment="fluke"),
    "Flower and Ray": Row("flower.run", environment="flower"),
    "BlazeFL": Row("blazefl.run", environment="blazefl"),
    "FedJAX": Row("fedjax.run", environment="fedjax"),
}
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "pflight-benchmarks")


def pythons(names: set[str], folder: Path) -> dict[str, Path | InstallError]:
    """Return the interpreter of each environment, or why there is none."""
    found: dict[str, Path | InstallError] = {"": Path(sys.executable)}
    for name in sorted(names - {""}):
        print(f"environment {name}", file=sys.stderr, flush=True)
        try:
            found[name] = python_of(ENVIRONMENTS[name], folder)
        except InstallError as failure:
            found[name] = failure
    return found


def rounds_of(workload: str, options: argparse.Namespace) -> int:
    """Return how many rounds a run of a workload has."""
    return options.rounds or WORKLOADS[workload].rounds


def compare(options: argparse.Namespace, data: Path) -> Iterator[dict[str, dict[str, Result]]]:
    """Run everything; yield each workload's results by row, again and again as they come in."""
    chosen = {name: row for name, row in ROWS.items() if row.run in options.rows}
    results = {
        workload: {
            name: [Result()] if row.chooses_threads else [Result(), Result(one_thread=True)]
            for name, row in chosen.items()
            if workload in row.workloads
        }
        for workload in options.workloads
    }
    interpreters = pythons({row.environment for row in chosen.values()}, options.environments)
    x, y = np.load(data / "test_x.npy"), np.load(data / "test_y.npy")

    def run(workload: str, name: str, one_thread: bool, watch: bool = False) -> Run:
        row = ROWS[name]
        rounds = 2 if watch else rounds_of(workload, options)
        python = interpreters[row.environment]
        if isinstance(python, InstallError):
            raise RowError(str(python))
        return run_row(
            python,
            row.run,
            workload,
            data=data,
            rounds=rounds,
            timeout=options.timeout,
            one_thread=one_thread,
            watch=watch,
        )

    def fastest() -> dict[str, dict[str, Result]]:
        return {
            workload: {name: min(several, key=Result.order) for name, several in rows.items()}
            for workload, rows in results.items()
        }

    cells = [
        (workload, name, result)
        for workload, rows in results.items()
        for name, several in rows.items()
        for result in several
    ]
    for _ in range(options.repeats):
        for workload, name, result in cells:
            if result.failure:
                continue
            said = f"{workload} {name}" + ", one thread" * result.one_thread
            try:
                timed = run(workload, name, result.one_thread)
                result.runs.append(timed)
                result.accuracy.append(accuracy(WORKLOADS[workload], timed.weights, x, y))
                print(f"{said}: {timed.median:.4f} s", file=sys.stderr, flush=True)
            except RowError as failure:
                result.failure = str(failure)
                print(f"{said}: {failure}", file=sys.stderr, flush=True)
        yield fastest()
    for workload, rows in fastest().items() if options.memory else ():
        for name, result in rows.items():
            if not result.failure:
                with suppress(RowError):  # what was timed stays
                    result.peak = run(workload, name, result.one_thread, watch=True).peak
    yield fastest()


def page(options: argparse.Namespace, results: Mapping[str, Mapping[str, Result]]) -> list[str]:
    """Return the lines of all tables, and what they were measured on and with."""
    raw = {name for name, row in ROWS.items() if row.raw}
    used = {ROWS[name].environment for rows in results.values() for name in rows}
    versions = [
        version_of(ENVIRONMENTS[name], options.environments) for name in sorted(used - {""})
    ]
    images = "Fashion-MNIST" if options.root else "generated images"
    repeats = max(len(result.runs) for rows in results.values() for result in rows.values())
    lines = [
        f"{datetime.date.today()}, {os.cpu_count()} cores, {platform.machine()}, "
        f"Python {platform.python_version()}, PyTorch {version('torch')}, {images}; "
        f"repeats: {repeats}. {', '.join(versions)}",
    ]
    for name, rows in results.items():
        workload = WORKLOADS[name]
        rounds = rounds_of(name, options)
        layers = ", ".join("x".join(map(str, shape)) for shape in workload.layers)
        lines += [
            "",
            f"**{name}**: {workload.cohort} of {workload.clients} clients, {workload.samples} "
            f"images each{' in the mean, 20 to 200 % of it' * workload.ragged}, batches of "
            f"{workload.batch_size}, weights {layers}; {rounds} rounds",
            "",
            *write_table(workload, rounds, rows, raw),
        ]
    return lines


def main() -> None:
    """Run the rows that were asked for, and print or save the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    runs = [row.run for row in ROWS.values()]
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rows", nargs="+", choices=runs, default=runs, metavar="ROW")
    parser.add_argument("--repeats", type=at_least(1), default=3, help="processes per row")
    parser.add_argument("--rounds", type=at_least(2), help="rounds per process, two at least")
    parser.add_argument("--root", type=folder, help="folder of Fashion-MNIST's idx files")
    parser.add_argument("--out", type=Path, help="page to write, or to update between its marks")
    parser.add_argument("--environments", type=Path, default=CACHE, help="where they are kept")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one process")
    parser.add_argument("--no-memory", dest="memory", action="store_false")
    options = parser.parse_args()
    with TemporaryDirectory() as images:
        write_images(Path(images), options.root)
        for results in compare(options, Path(images)):
            lines = page(options, results)
            if options.out:
                save(options.out, lines)
    if not options.out:
        print("\n".join(lines))


if __name__ == "__main__":
    main()

"""Worker processes: what raises or is killed is a row, and nothing is done twice."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from pflight.experiments import jobs
from pflight.experiments.comparing import compare
from pflight.experiments.comparison import Described
from pflight.experiments.jobs import Jobs
from pflight.experiments.measuring import Task
from pflight.experiments.results import Results
from pflight.runs.folder import FAILURE, LOG, RESULTS

from .small import DATA, comparison, data_config, finish, method_config

HERS = "tests.experiments.hers"
STATUS = {signal.SIGTERM: 143, signal.SIGINT: 130}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results, str]:
    """A comparison in two jobs, in which one method raises, and processes of two are killed."""
    folder = tmp_path_factory.mktemp("jobs")
    methods = ["fedavg"]
    for name, options in {"once": "times: 1", "always": "times: 9"}.items():
        where = f"init_args: {{{options}, where: {folder}/{name}}}"
        methods.append(
            method_config(folder, name, f"{{class_path: {HERS}.Killed, {where}}}", f"{name}: so.")
        )
    methods.append(method_config(folder, "raising", f"{{class_path: {HERS}.Raising}}"))
    console = Console(record=True, width=200, file=StringIO())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_JOB_ID", "7")  # as in a job with four tasks
        patch.setenv("SLURM_NTASKS", "4")
        patch.setenv("SLURM_PROCID", "1")
        patch.delenv("OMP_NUM_THREADS")
        config = data_config(folder)
        results = compare(config, methods, seeds=1, jobs=2, out=folder / "out", console=console)
    return folder, results, console.export_text()


class TestRows:
    @pytest.mark.long
    def test_a_method_that_raises_says_why(self, done):
        folder, results, said = done
        (row,) = [row for row in results.findings.rows if row.method == "raising"]
        assert row.failures[0].reason == "ValueError: no luck today"
        assert "raising (seed 0): failed: ValueError: no luck today" in said
        log = Path(row.failures[0].log)
        assert log.is_relative_to(folder / "out")
        assert "Traceback" in log.read_text()

    @pytest.mark.long
    def test_a_process_that_is_killed_each_time_says_so(self, done):
        folder, results, said = done
        (row,) = [row for row in results.findings.rows if row.method == "always"]
        assert row.failures[0].reason == "its process was killed by SIGKILL, 2 times"
        assert "always (seed 0): failed: its process was killed by SIGKILL" in said
        assert (folder / "always").read_text() == "xx"

    def test_a_process_that_is_killed_once_goes_on_from_its_last_round(self, done, tmp_path):
        folder, results, _ = done
        (row,) = [row for row in results.findings.rows if row.method == "once"]
        assert (folder / "once").read_text() == "x"
        (plain,) = [row for row in results.findings.rows if row.method == "FedAvg"]
        one, two = row.runs[0], plain.runs[0]
        assert (one.last, one.chosen, one.curve) == (two.last, two.chosen, two.curve)
        (log,) = (folder / "out").glob("once-*/seed-0/log.txt")
        assert "continuing with round 1" in log.read_text()

    def test_the_rest_goes_on_and_the_lines_count(self, done):
        _, results, said = done
        assert {row.method for row in results.findings.finished} == {"FedAvg", "once"}
        numbers = [line.split()[1] for line in said.splitlines() if "(seed 0)" in line]
        assert [number for number in numbers if "/" in number] == ["1/4", "2/4", "3/4", "4/4"]
        assert re.search(r" s, about \d+:\d\d:\d\d left$", said, re.MULTILINE)
        assert "ValueError: no luck today" in results.to_markdown()

    def test_runs_say_on_how_many_threads_beside_what(self, done):
        _, results, _ = done
        for run in results.findings.runs:
            assert run.beside == 2
            assert run.threads == max(1, (os.cpu_count() or 1) // 2)

    def test_tables_and_figures_are_saved(self, done):
        folder, results, _ = done
        out = folder / "out"
        assert (out / "table.md").read_text() == results.to_markdown()
        assert (out / "curves.png").stat().st_size > 1000
        assert not [*out.glob("**/*.partial")]

    def test_runs_are_equal_to_those_in_one_process(self, done, tmp_path):
        _, results, _ = done
        (task,) = finish(comparison(tmp_path, ["fedavg"]))
        (plain,) = [row for row in results.findings.rows if row.method == "FedAvg"]
        here = json.loads(Path(task.folder, RESULTS).read_text())
        assert plain.runs[0].key == here["key"]
        assert plain.runs[0].fingerprints == here["fingerprints"]
        assert plain.runs[0].curve.values["val/macro_acc"] == pytest.approx(
            here["curve"]["values"]["val/macro_acc"]
        )


@pytest.mark.parametrize(
    ("given", "threads"), [({}, ("2", "2")), ({"OMP_NUM_THREADS": "1"}, ("1", "1"))]
)
def test_a_worker_has_as_many_threads_as_it_is_told(given, threads, monkeypatch):
    names = "OMP_NUM_THREADS", "MKL_NUM_THREADS"
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(jobs.subprocess, "Popen", lambda *_, **options: options["env"])
    environment: Any = jobs.Worker(2).process
    assert tuple(environment[name] for name in names) == threads


class Refused:
    """A comparison of one run in a folder that can't be made."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def due(self) -> list[Task]:
        return [] if Path(self.task.folder, FAILURE).exists() else [self.task]


class Heard:
    """Keeps what is told about the progress."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda task, *told: self.said.append((name, *told))


@pytest.mark.long
def test_a_failure_that_cannot_be_written_down_ends_as_well(tmp_path):
    (tmp_path / "file").write_text("")
    task = Task("k", "A", {}, 0, ["--data=Digits"], str(tmp_path / "file" / "run"))
    heard = Heard()
    Jobs(Refused(task), 1, heard).work()
    assert [said[0] for said in heard.said] == ["begun", "ended"]
    assert "can't be written" in heard.said[1][1]


def command(folder: Path, *args: str) -> list[str]:
    front = [sys.executable, "-m", "pflight", "compare", "--methods", "fedavg", "local"]
    return [*front, f"--config={folder}/data.yaml", "--out", str(folder / "out"), *args]


def started(args: list[str]) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(args, start_new_session=True, **pipes)  # type: ignore[call-overload]


def is_worker(pid: int) -> bool:
    """Return whether a process makes runs, and is not one that a library has started."""
    try:
        return b"pflight.experiments.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def processes_of(group: int) -> list[int]:
    """Return the processes of a session that run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(session) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.fixture
def long(tmp_path: Path) -> Iterator[Path]:
    """A folder with a comparison of many rounds; whatever was started there ends."""
    data_config(tmp_path, DATA.replace("max_epochs: 3", "max_epochs: 20"))
    return tmp_path


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def rounds_in(out: Path) -> int:
    return len([*out.glob("fedavg-*/seed-0/checkpoints/last.ckpt")])


linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


@linux
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.long
def test_a_signal_ends_it_after_the_round_and_leaves_no_process(signum, long):
    process = started(command(long, "--seeds=1"))
    early = signum == signal.SIGINT  # while the worker imports its libraries
    wait_for(
        lambda: (
            any(map(is_worker, processes_of(process.pid))) if early else rounds_in(long / "out")
        ),
        process,
    )
    os.killpg(process.pid, signum) if early else process.send_signal(signum)  # as a terminal does
    out, err = process.communicate(timeout=120)
    assert process.returncode == STATUS[signum]
    assert err == ""
    assert out.splitlines()[-1].startswith("pflight: stopping after the current rounds: the")
    assert not processes_of(process.pid)
    assert not [*(long / "out").glob("*/seed-0/results.json")]


@pytest.mark.long
@linux
def test_a_killed_comparison_gives_what_an_uninterrupted_one_gives(long, tmp_path_factory):
    """All is killed in the middle of a round; then this process and another go on together."""
    process = started(command(long, "--seeds=1"))
    wait_for(lambda: rounds_in(long / "out"), process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    other = started(command(long, "--seeds=1"))
    again(long)
    said = other.communicate(timeout=280)
    assert other.returncode == 0, said
    straight = tmp_path_factory.mktemp("straight")
    text = (long / "data.yaml").read_text()
    made = finish(comparison(straight, ["fedavg", "local"], text=text))
    for task in made:
        there = long / "out" / Path(task.folder).relative_to(straight / "out")
        assert_same(there, Path(task.folder))
        log = (there / LOG).read_text()
        begun = log.count("to continue: starting a new one"), log.count("continuing with round")
        assert begun in ((1, 0), (1, 1), (2, 0))  # once before the kill, once after it at most
    rows = Described.read(long / "out" / "comparison.json").rows
    assert [row.method for row in rows] == ["FedAvg", "Local"]
    before = {path: path.stat().st_mtime_ns for path in (long / "out").glob("*/seed-*/*.json")}
    assert len(before) == 2
    again(long)
    assert {path: path.stat().st_mtime_ns for path in before} == before


def again(folder: Path) -> None:
    methods = ["fedavg", "local"]
    console = Console(quiet=True)
    compare(folder / "data.yaml", methods, seeds=1, out=folder / "out", console=console)


def assert_same(one: Path, other: Path) -> None:
    """Compare what runs reached, but for times, and their weights bit for bit."""
    apart = {"seconds", "beside", "threads", "checksum"}
    left, right = (
        {k: v for k, v in json.loads((root / RESULTS).read_text()).items() if k not in apart}
        for root in (one, other)
    )
    assert left == right
    for name in ("last", "best"):
        states = [
            torch.load(root / "checkpoints" / f"{name}.ckpt", weights_only=True)["state_dict"]
            for root in (one, other)
        ]
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][entry], states[1][entry]) for entry in states[0])

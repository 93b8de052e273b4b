"""The rows of the benchmark against other libraries do the same work, and its table adds up."""

from __future__ import annotations

import argparse
import ast
import gzip
import importlib
import json
import math
import os
import re
import struct
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from benchmarks import defects, probes
from benchmarks.peers import images, pflight, raw
from benchmarks.peers.environments import (
    ENVIRONMENTS,
    REQUIREMENTS,
    Environment,
    InstallError,
    python_of,
)
from benchmarks.peers.networks import accuracy, load_weights, make_network
from benchmarks.peers.processes import RowError, Run, marked, run_row
from benchmarks.peers.table import Result, distance, save, write_table
from benchmarks.peers.workloads import WORKLOADS, Record, Task, Weights, Workload
from benchmarks.size import code_lines, files_of_a_round
from pflight.datamodules import TensorClients
from pflight.models import McMahanCNN

CNN = Workload(5, 4, 10, 4, layers=((2, 1, 5, 5), (3, 2, 5, 5), (8, 147), (10, 8)), lr=0.1)
LOGISTIC = Workload(clients=4, cohort=4, samples=10, batch_size=4, layers=((10, 784),), lr=0.1)
RAGGED = replace(LOGISTIC, ragged=True)
ROOT = Path(__file__).parents[1]


def random_task(workload: Workload) -> Task:
    random = np.random.default_rng(3)
    sizes = workload.sizes
    x = [random.standard_normal((count, 1, 28, 28), dtype=np.float32) for count in sizes]
    return Task(workload, x, [random.integers(10, size=count) for count in sizes])


def trained(row: Any, task: Task, rounds: int = 2) -> tuple[list[torch.Tensor], Record]:
    record = Record()
    weights = row(task, rounds, record)
    return [torch.from_numpy(weight) for weight in weights], record


def assert_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("compare")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("gpu")


# Workloads


@pytest.mark.parametrize(("name", "steps"), [("W1", 19), ("W2", 6), ("W3", 10)])
def test_steps(name: str, steps: int) -> None:
    assert WORKLOADS[name].steps == steps


def test_cnn_is_mcmahans() -> None:
    weights = WORKLOADS["W1"].initial_weights()
    network, theirs = make_network(WORKLOADS["W1"]), McMahanCNN()
    load_weights(theirs, weights)
    x = torch.randn(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    assert_close(network(x), theirs(x))
    assert sum(weight.size for weight in weights) == 1_663_370


def test_draw() -> None:
    clients, order = WORKLOADS["W2"].draw(4)
    assert len(set(clients.tolist())) == 100
    assert len(order) == 100
    assert all((np.sort(part) == np.arange(60)).all() for part in order)
    assert not (order[0] == order[1]).all()
    again, _ = WORKLOADS["W2"].draw(4)
    other, _ = WORKLOADS["W2"].draw(5)
    assert (clients == again).all()
    assert not (clients == other).all()


@pytest.mark.parametrize(("name", "mean", "largest"), [("W2", 60, 120), ("W3", 100, 200)])
def test_ragged_clients(name: str, mean: int, largest: int) -> None:
    workload = WORKLOADS[f"{name}-ragged"]
    sizes = workload.sizes
    assert sizes.mean() == pytest.approx(mean, rel=0.01)
    assert (sizes.min(), sizes.max()) == (mean // 5, largest)
    assert sizes.sum() <= 60_000
    clients, order = workload.draw(2)
    assert [len(part) for part in order] == sizes[clients].tolist()
    assert workload.steps == np.ceil(sizes / 10).mean()


# Rows


@pytest.mark.parametrize(
    "row",
    [
        raw.foreach,
        raw.channels_last,
        raw.channels_last_foreach,
        raw.vectorized,
        partial(raw.vectorized, chunk=3),
    ],
)
@pytest.mark.parametrize("workload", [CNN, LOGISTIC], ids=["cnn", "logistic"])
def test_raw_rows_agree(row: Any, workload: Workload) -> None:
    task = random_task(workload)
    expected, loop = trained(raw.loop, task)
    weights, record = trained(row, task)
    assert_equal(weights, expected)
    assert record.samples == loop.samples == 2 * 4 * 10
    assert record.steps == loop.steps == 2 * 4 * 3
    assert len(record.ends) == 2


def test_loop_by_hand() -> None:
    """One client, one sample, zero weights: the gradient of the bias is 1/10 less the label."""
    workload = Workload(clients=1, cohort=1, samples=1, batch_size=1, layers=((10, 784),), lr=0.5)
    network = make_network(workload)
    x = np.zeros((1, 1, 1, 28, 28), dtype=np.float32)
    (_, bias), _ = trained(raw.loop, Task(workload, x, np.array([[2]])), rounds=1)
    start = list(network.parameters())[1].detach()
    expected = start - 0.5 * (start.softmax(0) - torch.eye(10)[2])
    assert_close(bias, expected)


class SameOrder(TensorClients):
    """Gives the samples in the order of the raw loops."""

    def order(self, client: int, round: int, epoch: int) -> torch.Tensor:
        workload = LOGISTIC if self.num_samples("train").unique().numel() == 1 else RAGGED
        clients, order = workload.draw(round)
        return torch.from_numpy(order[clients.tolist().index(client)])


@pytest.mark.parametrize("workload", [LOGISTIC, RAGGED], ids=["equal", "ragged"])
def test_pflight_does_what_the_loop_does(workload: Workload) -> None:
    task = random_task(workload)
    expected, loop = trained(raw.loop, task)
    weights, record = trained(partial(pflight.sequential, data_module=SameOrder), task)
    assert_equal(weights, expected)
    assert (record.samples, record.steps) == (loop.samples, loop.steps)
    assert len(record.ends) == 2


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images for W3."""
    folder = tmp_path_factory.mktemp("images")
    task = random_task(WORKLOADS["W3"])
    np.save(folder / "train_x.npy", np.concatenate(task.x))
    np.save(folder / "train_y.npy", np.concatenate(task.y))
    return folder


@pytest.mark.long
def test_processes(data: Path) -> None:
    run = run_row(Path(sys.executable), "raw.two_processes", "W3", data=data, rounds=2, watch=True)
    expected, _ = trained(raw.loop, Task.load("W3", data))
    assert_equal([torch.from_numpy(weight) for weight in run.weights], expected)
    assert (run.samples, run.steps) == (2 * 100 * 100, 2 * 100 * 10)
    assert len(run.seconds) == 1
    if sys.platform == "linux":
        assert run.peak is not None
        assert 2**26 < run.peak < 2**32


def test_a_row_that_fails_says_why(data: Path) -> None:
    with pytest.raises(RowError, match=r"^AttributeError: .* has no attribute 'lost'$"):
        run_row(Path(sys.executable), "workloads.lost", "W3", data=data, rounds=2)
    with pytest.raises(RowError, match="took more than 0 s"):
        run_row(Path(sys.executable), "raw.loop", "W3", data=data, rounds=2, timeout=0.01)


def test_nobody_has_an_unknown_mark() -> None:
    assert marked("nobody's") == []


# The table


def shifted(workload: Workload, shift: float) -> Weights:
    weights = workload.initial_weights()
    return [weights[0], weights[1] + np.float32(shift)]


def result(
    seconds: list[float], shift: float = 0.5, samples: int = 80, right: float = 0.7
) -> Result:
    runs = [Run([9.0, value, 0.0], samples, 24, shifted(LOGISTIC, shift)) for value in seconds]
    return Result(runs, [right] * len(runs), peak=3 * 2**20)


def test_table() -> None:
    results = {
        "raw loop": result([0.3, 0.2, 0.4]),
        "raw vmap": result([0.1, 0.1, 0.1]),
        "pflight": replace(result([0.15]), one_thread=True),
        "broken": Result(failure="needs | Python 3.14"),
        "lazy": result([0.05], shift=0.25, samples=40, right=0.6),
    }
    assert write_table(LOGISTIC, 2, results, {"raw loop", "raw vmap", "broken"})[2:] == [
        "| raw loop | 0.3000 | 0.2000 to 0.4000 | 3.00 | default | 3 | 0.700 | yes |",
        "| raw vmap | 0.1000 | 0.1000 to 0.1000 | 1.00 | default | 3 | 0.700 | yes |",
        "| pflight | 0.1500 | 0.1500 to 0.1500 | 1.50 | 1 | 3 | 0.700 | yes |",
        "| broken | needs / Python 3.14 | | | | | | |",
        "| lazy | 0.0500 | 0.0500 to 0.0500 | 0.50 | default | 3 | 0.600 | 0.5 times the samples, "
        "another accuracy, not 0.700, 0.50 times as far from the start |",
    ]


CLOCK = """
import os, sys
import numpy as np
row, one_thread = sys.argv[1], os.environ.get("OMP_NUM_THREADS") == "1"
if row == "raw.vectorized" and not one_thread:
    sys.exit("Error: not on several")
seconds = {"raw.loop": 0.25, "raw.foreach": 1.0}.get(row, 2.0) if one_thread else 0.5
weights = np.zeros((10, 784)), np.zeros(10)
np.savez(sys.argv[-1], *weights, ends=[0, seconds], samples=12000, steps=1200)
"""


@pytest.mark.long
def test_the_better_of_one_thread_and_the_default_counts(
    compare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers" / "__main__.py").write_text(CLOCK)
    monkeypatch.setattr(sys.modules["peers.processes"], "BENCHMARKS", tmp_path)
    np.save(tmp_path / "test_x.npy", np.zeros((2, 1, 28, 28), np.float32))
    np.save(tmp_path / "test_y.npy", np.zeros(2, np.int64))
    rows = ["raw.loop", "raw.foreach", "raw.vectorized", "raw.two_processes"]
    options = argparse.Namespace(
        rows=rows,
        workloads=["W2"],
        repeats=1,
        rounds=2,
        timeout=60,
        environments=tmp_path,
        memory=False,
    )
    *_, results = compare.compare(options, tmp_path)
    found = {compare.ROWS[name].run: result for name, result in results["W2"].items()}
    assert [(found[row].one_thread, found[row].seconds) for row in rows] == [
        (True, 0.25),
        (False, 0.5),
        (True, 2.0),
        (False, 0.5),
    ]


def test_distance() -> None:
    run = Run([1.0], 80, 24, shifted(LOGISTIC, 0.5))
    assert distance(LOGISTIC, run) == pytest.approx(math.sqrt(10 * 0.25), rel=1e-6)


def test_accuracy() -> None:
    weights = [np.zeros((10, 784), dtype=np.float32), np.eye(10, dtype=np.float32)[3]]
    x = np.ones((1500, 1, 28, 28), dtype=np.float32)
    y = np.where(np.arange(1500) < 300, 3, 4)
    assert accuracy(LOGISTIC, weights, x, y) == pytest.approx(0.2)


def test_save(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    save(page, ["one"])
    assert page.read_text() == "one\n"
    page.write_text("Above\n<!-- table -->\nold\n<!-- end of table -->\nbelow\n")
    for _ in range(2):
        save(page, ["new", "lines"])
    expected = "Above\n<!-- table -->\n\nnew\nlines\n\n<!-- end of table -->\nbelow\n"
    assert page.read_text() == expected


# Images and environments


def test_images_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "TRAIN", 500)
    monkeypatch.setattr(images, "TEST", 20)
    images.write_images(tmp_path, None)
    x, y = np.load(tmp_path / "train_x.npy"), np.load(tmp_path / "train_y.npy")
    assert (x.shape, x.dtype, y.shape) == ((500, 1, 28, 28), np.float32, (500,))
    assert np.load(tmp_path / "test_x.npy").shape == (20, 1, 28, 28)
    means = np.stack([x[y == label].mean(0) for label in range(10)])
    assert means[0].std() > 0.1  # a pattern of its own, not noise about 0


def test_images_are_read(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for prefix, count in (("train", 3), ("t10k", 2)):
        pixels = np.full((count, 28, 28), 255, dtype=np.uint8)
        header = struct.pack(">HBB3I", 0, 8, 3, *pixels.shape)
        packed = gzip.compress(header + pixels.tobytes())
        (root / f"{prefix}-images-idx3-ubyte.gz").write_bytes(packed)
        labels = struct.pack(">HBBI", 0, 8, 1, count) + bytes(range(count))
        (root / f"{prefix}-labels-idx1-ubyte").write_bytes(labels)
    images.write_images(tmp_path, root)
    x, y = np.load(tmp_path / "train_x.npy"), np.load(tmp_path / "train_y.npy")
    assert x == pytest.approx(np.full((3, 1, 28, 28), (1 - 0.2860) / 0.3530))
    assert sorted(y.tolist()) == [0, 1, 2]


def test_every_row_exists(compare: Any) -> None:
    for row in compare.ROWS.values():
        module, _, function = row.run.partition(".")
        if row.environment:
            assert f"def {function}(" in (REQUIREMENTS.parent / f"{module}.py").read_text()
            assert row.environment in ENVIRONMENTS
        else:
            assert callable(getattr({"raw": raw, "pflight": pflight}[module], function))
        assert set(row.workloads) <= set(WORKLOADS)


@pytest.mark.parametrize("name", ["torch", *ENVIRONMENTS])
def test_requirements_are_pinned(name: str) -> None:
    lines = (REQUIREMENTS / f"{name}.txt").read_text().splitlines()
    assert lines
    assert all("==" in line for line in lines)


def test_missing_python(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match=r"^needs Python 3\.0 or 3\.1$"):
        python_of(Environment("pfl", "pfl", pythons=("3.0", "3.1")), tmp_path)


# On a GPU, or without one


@pytest.mark.long
def test_all_rows_run_without_a_gpu(gpu: Any) -> None:
    device = torch.device("cpu")
    header, _, *lines = gpu.table(random_task(LOGISTIC), 2, device)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[0] for row in cells] == list(gpu.rows_on(device))
    assert all(len(row) == header.count("|") - 1 for row in cells)
    for _, seconds, ratio, mebibytes, busy, slowest in cells:
        assert float(ratio) == pytest.approx(float(seconds) / float(cells[0][1]), rel=0.3)
        assert mebibytes == busy == ""  # which are of a GPU
        assert re.fullmatch(r"(`\S.*?` \d+%(, )?)+", slowest)
        shares = [int(share) for share in re.findall(r"` (\d+)%", slowest)]
        assert shares == sorted(shares, reverse=True)
        assert 0 < sum(shares) <= 101  # each is rounded


def test_rounds_of_a_device_are_counted(gpu: Any) -> None:
    ends: list[int] = []
    record = gpu.DeviceRecord(at_end=ends.append)
    _, plain = trained(raw.loop, random_task(LOGISTIC))
    raw.loop(random_task(LOGISTIC), 2, record)
    assert ends == [1, 2]
    assert (record.samples, record.steps) == (plain.samples, plain.steps)


def test_cohort_in_a_workloads_name(gpu: Any, data: Path) -> None:
    assert gpu.task_of("W3", data).workload.cohort == 100
    assert gpu.task_of("W3x7", data).workload.cohort == 7


def test_lines_are_those_with_code() -> None:
    code = ["x = (  # what", "    1,", ")", "", "# why", "def f():"]
    source = ['"""About it,', "", 'at length."""', "", *code, '    """Do."""']
    assert code_lines("\n".join(source)) == 4


@pytest.mark.long
def test_a_round_enters_the_federation() -> None:
    entered = files_of_a_round()
    assert {"federation.py", "fedavg.py", "clients.py"} < entered
    assert len(entered) < 60


def test_each_defect_of_a_file_is_another_one() -> None:
    path = ROOT / "pflight" / "randomness.py"
    found = defects.defects_of(path)
    planted = {ast.unparse(defects.planted(defect)) for defect in found}
    assert len(planted) == len(found) > 20
    assert ast.unparse(ast.parse(path.read_text())) not in planted


def test_probes_note_the_statements_that_a_test_enters(tmp_path: Path) -> None:
    notes, module = tmp_path / "notes", tmp_path / "probed.py"
    notes.mkdir()
    module.write_text(
        "def sign(x):\n    if x < 0:\n        return -1\n    try:\n        x / x\n"
        "    except ZeroDivisionError:\n        return 0\n    return (\n        1\n    )\n"
    )
    probes.prepare(notes, tmp_path, [module])
    defects.write_site(notes)
    for x in (-2, 0, 5):
        subprocess.run(
            [sys.executable, "-c", f"import probed; probed.sign({x})"],
            env=os.environ
            | {"PYTHONPATH": f"{notes}:{tmp_path}", probes.PROBED: str(notes)}
            | {"PYTEST_CURRENT_TEST": f"tests/test_sign.py::test_it[{x}] (call)"},
            check=True,
        )
    places, entered = probes.entered(notes)
    lines = {
        test: {
            line for number in numbers for line in range(places[number][1], places[number][2] + 1)
        }
        for test, numbers in entered.items()
    }
    assert lines == {
        "tests/test_sign.py::test_it[-2]": {2, 3},
        "tests/test_sign.py::test_it[0]": {2, 4, 5, 7},
        "tests/test_sign.py::test_it[5]": {2, 4, 5, 8, 9, 10},
    }


def test_processes_that_a_test_starts_see_the_defect(tmp_path: Path) -> None:
    defects.write_site(tmp_path)
    defect = defects.defects_of(ROOT / "pflight" / "messages.py")[0]
    code = "import dis, pflight.messages as m; dis.dis(m.__loader__.get_code(m.__name__))"
    usual, again, changed = (
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": str(tmp_path)} | planted,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for planted in ({}, {}, {defects.PLANTED: json.dumps(defect)})
    )
    # Addresses in memory differ from process to process.
    usual, again, changed = (re.sub("0x[0-9a-f]+", "", text) for text in (usual, again, changed))
    assert usual == again != changed

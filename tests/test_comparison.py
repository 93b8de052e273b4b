"""The comparison of all methods: runs, what is not run again, and the page that is written."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

ROOT = Path(__file__).parents[1]
MEASURES = ["macro_acc", "micro_acc", "macro_f1", "micro_f1", "worst_decile_acc", "new/macro_acc"]


@pytest.fixture
def methods(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("methods")


def compare(folder: Path, *arguments: str) -> list[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "methods.py"), *arguments]
    command += ["--tasks", "digits", "--partitions", "classes4", "dirichlet", "--seeds", "1"]
    command += ["--rounds", "1", "--out", "results.jsonl", "--page", "page.md"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_command(tmp_path: Path) -> None:
    said = compare(tmp_path, "--methods", "local", "fedavg")
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    names = ["FedAvg", "FedAvg + fine-tuning", "Local"]
    assert [line["method"] for line in lines] == names * 2
    assert len(said) == 6
    fedavg, tuned, local = lines[:3]
    assert fedavg["megabytes"] == pytest.approx(2 * 4810 * 4 / 1e6)
    assert local["megabytes"] == pytest.approx(4810 * 4 / 1e6)  # of its only round
    for line in lines:
        assert (line["failed"], line["last"]["round"]) == (0, 1)
        assert line["last"] == line["chosen"]
        assert len(line["last"]["clients"]) == 20
        assert line["last"]["test/macro_acc"] == pytest.approx(np.mean(line["last"]["clients"]))
    assert tuned["last"]["clients"] != fedavg["last"]["clients"]

    page = (tmp_path / "page.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|", page, re.MULTILINE))
    for line in lines[:3]:
        assert rows[line["method"]] == f"{100 * line['last']['test/macro_acc']:.1f}"
    tables = (tmp_path / "page-tables.md").read_text()
    assert tables.count("\n## ") == 3  # and one at the start
    (row,) = re.findall(r"^\| FedAvg \| (.+) \|$", tables.split("\n## ")[0], re.MULTILINE)
    values = [100 * fedavg["last"][f"test/{measure}"] for measure in MEASURES]
    pairs = zip(fedavg["last"]["clients"], local["last"]["clients"], strict=True)
    values.append(100 * np.mean([own < alone for own, alone in pairs]))
    assert row.split(" | ") == [f"{value:.1f}" for value in values]
    picture = imread(tmp_path / "images" / "comparison-digits.png")
    assert min(picture.shape[:2]) > 200
    assert picture[..., :3].std() > 0.05  # not blank
    assert (picture[0, :, :3] == 1).all()  # and nothing cut off at the edges
    assert (picture[:, -1, :3] == 1).all()

    # What is there is not run again, and other settings are another run.
    before = (tmp_path / "results.jsonl").read_text()
    compare(tmp_path, "--methods", "local", "fedavg")
    assert (tmp_path / "results.jsonl").read_text() == before
    compare(tmp_path, "--methods", "local", "--set", "model.local_epochs=1")
    after = (tmp_path / "results.jsonl").read_text()
    assert after.startswith(before)
    assert [json.loads(line)["set"] for line in after.splitlines()[6:]] == [
        ["model.local_epochs=1"]
    ] * 2


def result(method: str, seed: int, clients: list[float], last: float) -> dict[str, Any]:
    values = {f"test/{measure}": float(np.mean(clients)) for measure in MEASURES}
    chosen = {"clients": clients, **values}
    end = {**chosen, "test/macro_acc": last}
    line = {"method": method, "partition": "classes4", "seed": seed, "last": end, "chosen": chosen}
    return {**line, "megabytes": 0.5 + seed, "seconds": 0.25}


def test_tables(methods: Any) -> None:
    comparison = methods.Comparison(
        [
            result("FedAvg", 0, [0.5, 0.5, 0.8], 0.7),
            result("Local", 0, [0.7, 0.7, 0.7], 0.6),
            result("FedAvg", 1, [0.7, 0.6, 0.5], 0.5),
            result("Local", 1, [0.7, 0.8, 0.9], 0.9),
        ]
    )
    assert comparison.summary()[2:] == [
        "| Local | 75.0 ± 7.1 | 75.0 ± 21.2 | 75.0 ± 7.1 | 75.0 ± 7.1 | 75.0 ± 7.1 | 75.0 ± 7.1 "
        "| 0.0 ± 0.0 | 1.000 | 0.250 |",
        "| FedAvg | 60.0 ± 0.0 | 60.0 ± 14.1 | 60.0 ± 0.0 | 60.0 ± 0.0 | 60.0 ± 0.0 | 60.0 ± 0.0 "
        "| 66.7 ± 0.0 | 1.000 | 0.250 |",
    ]
    assert comparison.sentences("Local")[-1] == "- 4 classes each, 1 of 1: FedAvg."
    assert comparison.sentences("FedAvg")[-1] == "- 4 classes each, 0 of 1: none."


def test_every_configuration_has_a_title(methods: Any) -> None:
    found = methods.methods_of(None)
    titles = [method.title for method in found]
    assert len(set(titles)) == len(titles)
    assert max(map(len, titles)) < 30
    assert {"Local", "FedAvg + fine-tuning", "Reptile + fine-tuning", "pFedLA"} <= set(titles)
    configs = {path.stem for path in (ROOT / "configs" / "algorithm").glob("*.yaml")}
    assert {method.config.stem for method in found} == configs - methods.LEFT_OUT
    assert configs >= methods.LEFT_OUT
    every = methods.methods_of(configs - {"fedavg_ft"})
    assert len({method.title for method in every}) == len(every) == len(configs)

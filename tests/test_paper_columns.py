"""Every column of the papers' tables, and every method in them, on small data of the same form."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from pflight import datamodules
from pflight.datamodules import PartitionedDataModule, Samples

ROOT = Path(__file__).parents[1]
EXPERIMENTS = yaml.safe_load((ROOT / "benchmarks/papers.yaml").read_text("utf-8"))
COLUMNS = [f"{name}-{column}" for name, spec in EXPERIMENTS.items() for column in spec["published"]]
ONCE = ["--rounds", "1", "--set", "data.batch_size=64"]
LEAF = {"femnist": 62, "celeba": 2}
PEOPLE = 5


@pytest.fixture
def papers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("papers")


def command(papers: Any, monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["papers.py", *map(str, arguments)])
    papers.main()


def small(data: PartitionedDataModule) -> Samples:
    """Return random samples with the shape and the classes of the real ones."""
    count = data.num_classes * 24
    labels = torch.arange(count) % data.num_classes
    gray = type(data).__name__ in ("FashionMNIST", "EMNIST", "LeafFEMNIST")
    features = torch.rand(count, *((1, 28, 28) if gray else (3, 32, 32)))
    has_test = data.official_test
    return Samples(features, labels, test=np.arange(count) >= count // 2 if has_test else None)


def write_leaf(root: Path, num_labels: int) -> None:
    """Write some people's samples as LEAF's scripts do, in training and test files.

    Args:
        root: Of the data set.
        num_labels: 62 for FEMNIST, and 2 for CelebA, of which the pictures lie beside.
    """
    random = np.random.default_rng(0)
    pictures = root / "data" / "raw" / "img_align_celeba"
    if num_labels == 2:
        pictures.mkdir(parents=True)
        for number in range(6):
            image = Image.fromarray(random.integers(0, 256, (84, 84, 3), dtype=np.uint8))
            image.save(pictures / f"{number}.jpg")
    for split, count in ("train", 8), ("test", 4):
        people = {}
        for person in range(PEOPLE):
            if num_labels == 2:
                x: list[Any] = [f"{random.integers(6)}.jpg" for _ in range(count)]
            else:
                x = random.random((count, 784)).round(2).tolist()
            people[f"f{person:04}"] = {
                "x": x,
                "y": random.integers(num_labels, size=count).tolist(),
            }
        content = {
            "users": list(people),
            "num_samples": [count] * len(people),
            "user_data": people,
        }
        file = root / "data" / split / f"all_data_niid_0_keep_0_{split}_8.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(content))


def some_methods(papers: Any, name: str) -> list[str]:
    """Return some runs of a column; each run of an experiment is one of some column's."""
    experiment, column = name.split("-")
    options, chosen = argparse.Namespace(out=Path(), rounds=1), {}
    for other in EXPERIMENTS[experiment]["published"]:
        runs = papers.runs_of(experiment, [other], None, [0], options)
        chosen[other] = [[run.method for run in runs], []]
    for method in EXPERIMENTS[experiment]["methods"]:
        theirs = [several for known, several in chosen.values() if method in known]
        if theirs:
            min(theirs, key=len).append(method)
    known, several = chosen[column]
    return several or known[:1]


def made(
    papers: Any, monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, *options: Any
) -> tuple[str, dict[str, list[str]]]:
    """Make some runs of a column, and return the head and the rows of its table."""
    experiment, column = name.split("-")
    monkeypatch.chdir(folder)
    methods = some_methods(papers, name)
    asked = ["--columns", column, "--methods", *methods, "--out", folder / "out"]
    command(papers, monkeypatch, "run", experiment, *asked, *ONCE, *options)
    page = folder / "page.md"
    page.write_text(f"<!-- {name.replace('-', '/')} -->\n<!-- end -->\n")
    command(papers, monkeypatch, "write", "--out", folder / "out", "--rounds", 1, "--page", page)
    head, _, *lines = page.read_text().split("-->\n")[1].split("<!--")[0].strip().splitlines()
    rows = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in lines}
    assert len(rows) >= len(methods)
    return head, rows


def test_every_method_runs_in_some_column(papers: Any) -> None:
    for experiment, spec in EXPERIMENTS.items():
        runs = {
            method
            for name in COLUMNS
            if name.startswith(experiment)
            for method in some_methods(papers, name)
        }
        titles = {
            method["title"]
            for name, method in spec["methods"].items()
            if method.get("run", name) in runs
        }
        for figures in spec["published"].values():
            assert {*figures} <= titles | {title.split(",")[0] for title in titles}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.short("femnist")
@pytest.mark.parametrize("column", LEAF)
def test_who_has_leafs_files_makes_the_table(
    papers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, column: str
) -> None:
    write_leaf(tmp_path / "data" / column, LEAF[column])
    sizes = ["data.cohort_size=5", *["model.client.network.hidden=8"] * (column == "femnist")]
    root = "--root", tmp_path / "data"
    head, rows = made(papers, monkeypatch, tmp_path, f"fesem-{column}", *sizes, *root)
    assert head.startswith(
        "| method | paper, micro acc. | paper, micro F1 | paper, macro acc. | paper, macro F1 |"
        " micro acc. |"
    )
    for title, cells in rows.items():
        assert cells[1:5] == papers.EXPERIMENTS["fesem"]["published"][column][title]
        assert all(0 <= float(cell) <= 100 for cell in cells[5:10])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.short("pfedla-noniid1_emnist_100")
@pytest.mark.parametrize("name", [name for name in COLUMNS if not name.startswith("fesem")])
def test_a_column_has_its_methods_and_figures(
    papers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    for kind in ("CIFAR10", "CIFAR100", "FashionMNIST", "EMNIST", "LeafFEMNIST"):
        monkeypatch.setattr(getattr(datamodules, kind), "load", small)
        monkeypatch.setattr(getattr(datamodules, kind), "prepare_data", lambda data: None)
    sizes = ["data.num_clients=4", "data.participation=0.5"]
    if name.startswith("pfedla"):
        sizes.append(f"data.partition.samples_per_client={160 if 'cifar100' in name else 20}")
    elif name == "fedec-femnist_150_3":
        sizes += ["data.partition.minimum=10", "data.partition.log_mean=0"]
    else:  # enough clients for a shard of each class
        sizes = ["data.num_clients=20", "data.participation=0.1"]
        sizes.append("model.client.network.channels=[4, 4]")
    _, rows = made(papers, monkeypatch, tmp_path, name, *sizes)
    experiment, column = name.split("-")
    printed = papers.EXPERIMENTS[experiment]["published"][column]
    for title, cells in rows.items():
        assert all(0 <= float(cell) <= 100 for cell in cells[2:5])
        figure = printed.get(title, printed.get(title.split(",")[0], ""))
        assert cells[1] == (f"{figure:.2f}" if isinstance(figure, float) else figure)

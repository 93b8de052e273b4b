"""The papers' settings: what each configuration says, deals, and does in one round.

Only reading the files is left out: labels have the numbers of the real data sets, and features are
random numbers of their shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch

from pflight import datamodules
from pflight.command.cli import FederationCLI
from pflight.datamodules import PartitionedDataModule, Samples
from pflight.federation import Federation

CONFIGS = Path(str(files("pflight.configs"))) / "paper"


@dataclass(frozen=True)
class Column:
    """What a paper says of one column of its table."""

    rounds: int
    epochs: int
    batch_size: int
    lr: float
    clients: int
    cohort: int
    parameters: int
    train_size: tuple[int, int]
    test_size: tuple[int, int]
    classes: tuple[int, int]
    momentum: float = 0.0


FEDEC = {"epochs": 10, "batch_size": 10, "lr": 0.01, "momentum": 0.5, "rounds": 100}
COLUMNS = {
    "fesem/femnist": Column(100, 5, 10, 0.003, 40, 20, 6_603_710, (8, 60), (2, 15), (1, 62)),
    "fesem/celeba": Column(100, 10, 10, 0.03, 40, 20, 31_202, (4, 60), (1, 15), (1, 2)),
    "fedec/cifar10_100_2": Column(
        clients=100, cohort=10, parameters=307_842, classes=(1, 2),
        train_size=(500, 500), test_size=(100, 100), **FEDEC,
    ),
    "fedec/cifar10_100_5": Column(
        clients=100, cohort=10, parameters=307_842, classes=(1, 5),
        train_size=(500, 500), test_size=(100, 100), **FEDEC,
    ),
    "fedec/cifar10_1000_2": Column(
        clients=1000, cohort=100, parameters=307_842, classes=(1, 2),
        train_size=(50, 50), test_size=(10, 10), **FEDEC,
    ),
    "fedec/cifar100_100_5": Column(
        clients=100, cohort=10, parameters=1_075_044, classes=(1, 5),
        train_size=(500, 500), test_size=(100, 100), **FEDEC,
    ),
    "fedec/cifar100_100_20": Column(
        clients=100, cohort=10, parameters=1_075_044, classes=(1, 20),
        train_size=(500, 500), test_size=(100, 100), **FEDEC,
    ),
    "fedec/femnist_150_3": Column(
        clients=150, cohort=15, parameters=535_818, classes=(3, 3),
        train_size=(90, 2000), test_size=(10, 200), **FEDEC,
    ),
}  # fmt: skip
for setup in (1, 2):
    for name, size, lr, parameters, most in (
        ("emnist", 700, 0.005, 85_822, 10),
        ("fmnist", 700, 0.005, 85_822, 10),
        ("cifar10", 600, 0.01, 121_278, 10),
        ("cifar100", 600, 0.01, 128_928, 100),
    ):
        k = 4 * most // 10 if most == 10 else 12
        train, test = size * 7 // 10, size * 3 // 10
        for clients, rounds, epochs in ((10, 600, 10), (100, 2500, 20)):
            COLUMNS[f"pfedla/noniid{setup}_{name}_{clients}"] = Column(
                rounds, epochs, 32, lr, clients, 10, parameters, (train, train), (test, test),
                (k, k) if setup == 1 else (most, most),
            )  # fmt: skip


def dealt(labels: torch.Tensor, shape: tuple[int, ...], test: int | None = None) -> Samples:
    """Return samples of random features, the last ``test`` of them a test set."""
    count, features = len(labels), torch.rand(50, *shape)
    is_test = None if test is None else np.arange(count) >= count - test
    return Samples(features, labels, test=is_test, rows=np.arange(count) % 50)


def generated(data: PartitionedDataModule) -> Samples:
    """Return a data set with the numbers of the real one; LEAF's with fewer people."""
    match type(data).__name__:
        case "CIFAR10" | "CIFAR100":
            return dealt(torch.arange(60_000) % data.num_classes, (3, 32, 32), test=10_000)
        case "FashionMNIST" | "EMNIST":
            return dealt(torch.arange(70_000) % 10, (1, 28, 28), test=10_000)
        case "LeafFEMNIST" if data.num_classes == 10:
            return dealt(torch.arange(40_000) % 10, (1, 28, 28))
        case "LeafFEMNIST" | "LeafCelebA":
            shape = (1, 28, 28) if data.num_classes == 62 else (3, 84, 84)
            random = np.random.default_rng(0)
            sizes = random.integers(10, 70, 40)
            labels = torch.from_numpy(random.integers(data.num_classes, size=sizes.sum()))
            return Samples(
                torch.rand(50, *shape), labels, np.arange(40).repeat(sizes),
                rows=np.arange(len(labels)) % 50,
            )  # fmt: skip
    raise AssertionError(f"no such data for {data}")


def within(values: torch.Tensor, bounds: tuple[int, int]) -> bool:
    return bool(values.min() >= bounds[0] and values.max() <= bounds[1])


def test_every_column_of_the_papers_tables_has_a_configuration() -> None:
    shipped = {str(path.relative_to(CONFIGS).with_suffix("")) for path in CONFIGS.rglob("*.yaml")}
    assert shipped == set(COLUMNS)


@pytest.mark.filterwarnings("ignore:.*could not find the monitored key")  # nothing to validate on
@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.long
def test_one_round(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("CIFAR10", "CIFAR100", "FashionMNIST", "EMNIST", "LeafFEMNIST", "LeafCelebA"):
        monkeypatch.setattr(getattr(datamodules, kind), "load", generated)
        monkeypatch.setattr(getattr(datamodules, kind), "prepare_data", lambda data: None)
    monkeypatch.chdir(tmp_path)
    quiet = ["--trainer.logger=false", "--trainer.enable_progress_bar=false"]
    short = ["--trainer.max_epochs=1", "--model.local_steps=1"]
    cli = FederationCLI(["fit", "--config", str(CONFIGS / f"{name}.yaml"), *quiet, *short])
    column, given = COLUMNS[name], cli.config["fit"]
    data, federation = cli.datamodule, cli.model
    assert isinstance(federation, Federation)

    assert given.trainer.default_root_dir == f"runs/paper/{name}"
    assert federation.clients.training.epochs == column.epochs
    assert sum(p.numel() for p in federation.client.network.parameters()) == column.parameters
    optimizer = given.model.init_args.client.init_args.optimizer.init_args
    assert (optimizer.lr, optimizer.momentum) == (column.lr, column.momentum)
    assert data.batch_size == column.batch_size

    assert data.num_clients == column.clients
    train, test = data.num_samples("train"), data.num_samples("test")
    assert within(train, column.train_size)
    assert within(test, column.test_size)
    assert data.num_samples("val").sum() == 0
    counts = data.class_counts("train")
    assert within((counts > 0).sum(dim=1), column.classes)
    if name.startswith("pfedla/noniid2"):
        dominant = 6 if data.num_classes == 100 else 2
        share = counts.sort(dim=1, descending=True).values[:, :dominant].sum(dim=1) / train
        assert share.tolist() == pytest.approx([0.4] * column.clients, abs=0.01)
        assert data.class_counts("test").gt(0).all() or data.num_classes == 100

    (entry,) = federation.history
    assert len(entry.clients) == column.cohort
    assert not entry.failed
    assert math.isfinite(entry.metrics["train/loss"])


@pytest.mark.parametrize("name", COLUMNS)
def test_as_many_rounds_as_the_paper_has(name: str) -> None:
    text = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")
    assert f"  max_epochs: {COLUMNS[name].rounds}\n" in text

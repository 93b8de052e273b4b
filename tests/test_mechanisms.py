"""What the papers say of how their methods work, and the script that measures it."""

from __future__ import annotations

import argparse
import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from pflight.datamodules import PartitionedDataModule, Samples
from pflight.models import MLP

ROOT = Path(__file__).parents[1]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.chdir(ROOT)
    return importlib.import_module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.short("EMNIST-2-*", "CIFAR-10-3-*")
@pytest.mark.parametrize(
    ("data", "retained", "printed"),
    [
        ("EMNIST", 0, 491.08),
        ("EMNIST", 1, 488.65),
        ("EMNIST", 2, 312.52),
        ("CIFAR-10", 0, 693.98),
        ("CIFAR-10", 1, 418.97),
        ("CIFAR-10", 2, 382.25),
        ("CIFAR-10", 3, 379.82),
    ],
)
def test_table_3_of_pfedla_is_the_traffic_of_75_rounds(
    script: Any, data: str, retained: int, printed: float
) -> None:
    mechanisms = script("mechanisms")
    image, layers, figures = mechanisms.TABLE_3[data]
    assert figures[retained] == printed
    parameters = [mechanisms.PARAMETERS[layer, image[1]] for layer in layers[:retained]]
    later, all_rounds = mechanisms.megabytes(image, parameters)
    assert later == pytest.approx(printed, abs=0.022)
    # Clients are sent the layers that they retain once.
    assert all_rounds - later == pytest.approx(10 * 4 * sum(parameters) / 2**20)


class Blobs(PartitionedDataModule):
    """Ten classes of points around corners of a cube."""

    def __init__(self, **options: Any) -> None:
        super().__init__(num_classes=10, val_fraction=0.0, test_fraction=0.3, **options)

    def load(self) -> Samples:
        random = torch.Generator().manual_seed(3)
        corners = torch.randn(10, 16, generator=random).sign()
        labels = torch.arange(2000) % 10
        noise = torch.randn(2000, 16, generator=random)
        return Samples(corners[labels] + 0.7 * noise, labels)


def test_figures_5_and_6_own_models_weigh_more_than_neighbours_and_these_more_than_strangers(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pfedla = script("pfedla")
    task = pfedla.Task(Blobs, lambda: MLP(16, [24, 24], 10), lr=0.1, samples=80)
    monkeypatch.setattr(pfedla, "task_of", lambda options: task)
    options = argparse.Namespace(
        steps=[0.5], retain=0, weights="softmax", rounds=15, seeds=1, cohort=None, neighbours=None
    )
    pfedla.print_chain(options)
    _, _, *lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == 3
    for line in lines:
        own, neighbours, strangers = (float(cell) for cell in line.split(" | ")[2:5])
        assert own > neighbours > strangers
    assert own > 0.25  # in the last layer
    assert neighbours > 1.5 * strangers


def test_how_far_predictions_move(script: Any) -> None:
    before = torch.tensor([[0.8, 0.2], [0.4, 0.6], [0.5, 0.5]]).log()
    now = torch.tensor([[0.6, 0.4], [0.7, 0.3], [0.5, 0.5]]).log()
    changed, divergence, accuracy = script("mechanisms").moved(before, now, torch.tensor([0, 1, 1]))
    by_hand = 0.8 * math.log(0.8 / 0.6) + 0.2 * math.log(0.2 / 0.4)
    by_hand += 0.4 * math.log(0.4 / 0.7) + 0.6 * math.log(0.6 / 0.3)
    assert changed == pytest.approx(100 / 3)
    assert divergence == pytest.approx(by_hand / 3, rel=1e-6)
    assert accuracy == pytest.approx(100 / 3)  # of two right ones one is left


def test_rounds_to_a_target_and_differences_in_pairs(script: Any) -> None:
    mechanisms = script("mechanisms")
    assert mechanisms.first_round([0.1, 0.5, 0.4, 0.6], 0.5) == 2
    never = mechanisms.first_round([0.1, 0.5], 0.6)
    assert math.isnan(never)
    assert mechanisms.shown([2.0, 4.0, never]) == "3.0 ± 1.4 (never at 1 of 3 seeds)"
    # By hand: 1, 2 and 3, of which the standard error is 0.57735, and t of two degrees 4.30265.
    assert mechanisms.difference([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]) == "2.0 (-0.5 to 4.5)"
    assert mechanisms.difference([2.0, 4.0, never], [1.0, 2.0, 3.0]) == "1.5 (-4.9 to 7.9)"
    assert mechanisms.difference([3.0, 3.0], [1.0, 1.0]) == "2.0 (2.0 to 2.0)"
    assert mechanisms.difference([3.0, never], [1.0, 1.0]) == "2.0"


def table_rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.long
def test_without_training_no_client_moves(
    script: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mechanisms, config = script("mechanisms"), "configs/comparison/digits.yaml"
    settings = ["trainer.max_epochs=3", "data.num_clients=4", "data.holdout_clients=0"]
    for lr, moves in ((0.0, False), (0.1, True)):
        asked = [*settings, f"model.client.optimizer.lr={lr}"]
        options = argparse.Namespace(
            config=config, set=asked, seeds=2, target=0.0, methods=["FedEC-wo", "FedEC(1)"]
        )
        mechanisms.print_movement(options)
        _, *rows = table_rows(capsys.readouterr().out)
        assert [row[0] for row in rows] == ["FedEC-wo", "FedEC(1)", "FedEC(1) − FedEC-wo"]
        for row in rows[:2]:
            assert (float(row[1].split(" ±")[0]) > 0) == moves
            assert row[4] == "1.0 ± 0.0"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.long
def test_centers_by_round(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = argparse.Namespace(
        config="configs/comparison/rotated_digits.yaml",
        set=["trainer.max_epochs=3", "trainer.callbacks.mu=0"],
        seeds=1,
        work=["model.local_epochs=5", "model.local_steps=1,model.client.optimizer.lr=0"],
        rounds=[1, 3, 9],
    )
    script("mechanisms").print_centers(options)
    _, five, still, _, *way = table_rows(capsys.readouterr().out)
    assert still[3] == "none"
    assert five[:3] == ["model.local_epochs=5", "3", "1 of 1"]
    assert still[2] == "0 of 1"
    assert [row[1] for row in way] == ["1", "3", "1", "3"]
    assert float(way[0][2]) > 0
    assert all(float(row[2]) < 1e-9 and row[3] == "0.0" for row in way[2:])  # up to rounding

"""The loggers of docs/loggers.md get the numbers of a run, without a network."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger

from pflight.command.cli import main
from pflight.history import load_history
from tests.event_files import read_events
from tests.pages import DIGITS, ROOT, files

NAMES = ("val/macro_acc", "communication/bytes_up")
CONFIGURATIONS = files(ROOT / "docs" / "loggers.md")

pytestmark = pytest.mark.filterwarnings("default")  # of packages that are no dependencies


class NotInstalled(CSVLogger):
    """Stands for a logger whose package is missing."""

    def __init__(self) -> None:
        raise ModuleNotFoundError("it is not installed")


@pytest.fixture
def logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[list[float]]]:
    """Train for two rounds with a configuration of the page; return the run's own numbers."""

    def train(name: str) -> list[list[float]]:
        Path(name).write_text(CONFIGURATIONS[name])
        options = ["--trainer.default_root_dir=run", "--trainer.enable_progress_bar=false"]
        main(["fit", "--config", DIGITS, "--config", name, "--trainer.max_epochs=2", *options])
        checkpoint = torch.load("run/checkpoints/last.ckpt", weights_only=True)
        history = load_history(checkpoint["pflight"]["history"])
        assert len(history) == 2
        accuracies = [one.metrics["val/macro_acc"] for one in history]
        return [accuracies, [one.bytes_up for one in history]]

    monkeypatch.chdir(tmp_path)
    return train


def of_a_csv_file(path: Path) -> list[list[float]]:
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return [[float(row[name]) for row in rows if row[name]] for name in NAMES]


def test_csv(logged: Callable[[str], Any]) -> None:
    values = logged("csv.yaml")
    assert of_a_csv_file(Path("runs/csv/csv/version_0/metrics.csv")) == values
    main(["test", "--config", "run/config.yaml"])
    assert of_a_csv_file(Path("runs/csv/csv/version_0/metrics.csv")) == values
    assert Path("runs/csv/csv/version_1/metrics.csv").is_file()


def test_two_loggers(logged: Callable[[str], Any]) -> None:
    values = logged("both.yaml")
    events = read_events("runs/both")
    assert [events.values[name] for name in NAMES] == [pytest.approx(one) for one in values]
    assert of_a_csv_file(Path("runs/both/csv/version_0/metrics.csv")) == values


def test_mlflow(logged: Callable[[str], Any]) -> None:
    mlflow = pytest.importorskip("mlflow")
    values = logged("mlflow.yaml")
    client = mlflow.MlflowClient("sqlite:///mlflow.db")
    experiment = client.get_experiment_by_name("digits")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("fesem", "FINISHED")
    assert run.data.params["local_epochs"] == "2"
    for name, expected in zip(NAMES, values, strict=True):
        points = client.get_metric_history(run.info.run_id, name)
        assert [(point.step, point.value) for point in points] == [*enumerate(expected)]


def test_weights_and_biases(logged: Callable[[str], Any]) -> None:
    wandb = pytest.importorskip("wandb")
    values = logged("wandb.yaml")
    try:
        assert wandb.run.name == "fesem"
        assert wandb.run.config["local_epochs"] == 2
        assert [wandb.run.summary[name] for name in NAMES] == [one[-1] for one in values]
    finally:
        wandb.finish()
    (folder,) = Path("runs/wandb/wandb").glob("offline-run-*")
    assert list(folder.glob("run-*.wandb"))


@pytest.mark.parametrize("name", ["csv.yaml", "both.yaml"])
def test_a_logger_that_can_not_be_made_is_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given = yaml.safe_load(CONFIGURATIONS[name])
    given["trainer"]["logger"][-1] = {"class_path": "tests.test_loggers.NotInstalled"}
    Path("own.yaml").write_text(yaml.safe_dump(given))
    with pytest.raises(SystemExit) as exit_:
        main(["fit", "--config", DIGITS, "--config", "own.yaml"])
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "pflight: error: tests.test_loggers.NotInstalled: it is not installed"

"""The table of a test with a row for each client."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from pflight import Federation
from pflight.callbacks import ClientTable, FedAvg, Local
from pflight.datamodules import TensorClients
from tests.runs import CLASSES, linear_client, quiet_trainer, samples, small_data

NAMES = ["=1+1", "a|b", "Charité", "x\ny", "東京", "\ud800"]

pytestmark = pytest.mark.filterwarnings("ignore:.isinstance:FutureWarning")  # Lightning's own


def run_test(folder: Path, data: Any, client: Any = None, **options: Any) -> Federation:
    """Train and test a federation, which writes its table to a folder."""
    federation = Federation(client or linear_client(), **options)
    trainer = quiet_trainer(1, Local(), ClientTable(), default_root_dir=folder)
    trainer.fit(federation, datamodule=data)
    trainer.test(federation, datamodule=data, verbose=False)
    return federation


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "clients.csv").open(encoding="utf-8", newline="") as file:
        return [*csv.DictReader(file)]


def test_a_row_for_each_client_has_what_client_metrics_has(tmp_path: Path) -> None:
    federation = run_test(tmp_path, small_data(client_names=NAMES), finetune_epochs=1)
    rows = rows_of(tmp_path)
    assert list(rows[0])[:6] == ["client", "name", "num_samples", "acc", "f1", "loss"]
    assert [row["client"] for row in rows] == [*"012345"]
    for model in ("", "server/", "finetuned/"):
        found = federation.client_metrics("test", model)
        for name, values in found.items():
            if not model or name != "num_samples":
                assert [float(row[model + name]) for row in rows] == values.tolist()


def test_names_can_be_any_text(tmp_path: Path) -> None:
    run_test(tmp_path, small_data(client_names=NAMES))
    names = [row["name"] for row in rows_of(tmp_path)]
    assert names == ["'=1+1", "a|b", "Charité", "x\ny", "東京", "\\ud800"]
    lines = (tmp_path / "clients.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2 + len(NAMES)
    assert lines[3].startswith("| 1 | a\\|b | 6 | ")
    assert lines[5].startswith("| 3 | x y | 6 | ")
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1


def test_without_names_the_column_is_empty(tmp_path: Path) -> None:
    run_test(tmp_path, small_data())
    assert {row["name"] for row in rows_of(tmp_path)} == {""}


def test_newcomers_are_told(tmp_path: Path) -> None:
    data = small_data(holdout_clients=0.34)
    run_test(tmp_path, data)
    newcomers = [i for i, row in enumerate(rows_of(tmp_path)) if row["newcomer"] == "yes"]
    assert newcomers == data.new_clients.tolist()


@pytest.mark.filterwarnings("ignore:round 0")
def test_a_client_without_a_metric_has_an_empty_cell(tmp_path: Path) -> None:
    train, nothing = [samples(5, 0), samples(5, 1)], (torch.empty(0, 4), torch.empty(0).long())
    data = TensorClients(train, test=[samples(4, 2), nothing], num_classes=CLASSES)
    run_test(tmp_path, data)
    first, second = rows_of(tmp_path)
    assert (first["num_samples"], second["num_samples"], second["acc"]) == ("4", "0", "")
    assert (tmp_path / "clients.md").read_text().splitlines()[3].startswith("| 1 |  | 0 |  |  |")


def test_metrics_of_a_module_of_ones_own(tmp_path: Path) -> None:
    class Own(type(linear_client())):  # type: ignore[misc]
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test/=x", float(len(batch[1])))

    run_test(tmp_path, small_data(), linear_client(Own))
    first = rows_of(tmp_path)[0]
    assert first["'=x"] == "6.0"


def test_a_table_that_can_not_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "clients.csv").mkdir()
    with pytest.warns(UserWarning, match="table of clients can't be written"):
        run_test(tmp_path, small_data())


def test_a_fast_dev_run_and_a_fit_write_none(tmp_path: Path) -> None:
    federation, data = Federation(linear_client()), small_data()
    options = {"default_root_dir": tmp_path}
    quiet_trainer(1, FedAvg(), ClientTable(), **options).fit(federation, datamodule=data)
    trainer = quiet_trainer(1, FedAvg(), ClientTable(), fast_dev_run=True, **options)
    trainer.test(federation, datamodule=data, verbose=False)
    assert not [*tmp_path.glob("clients.*")]

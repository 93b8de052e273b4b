"""The monitors under a stock Trainer: progress bar, table, predictions, TensorBoard."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pflight import ClientError, Federation
from pflight.callbacks import (
    FedAvg,
    FederationProgressBar,
    FedGH,
    FedPAC,
    FedProto,
    FeSEM,
    Local,
    PredictionWriter,
    ResultTable,
    TensorBoardReport,
)
from pflight.callbacks.monitors.tensorboard import _best
from pflight.datamodules import DatasetClients, FederatedDataModule, TensorClients
from pflight.errors import ConfigurationError
from pflight.history import Round
from pflight.models import Classifier, Regressor
from tests.event_files import read_events
from tests.runs import small_data

CLIENTS = 5


@pytest.fixture
def data() -> TensorClients:
    torch.manual_seed(0)
    samples = [(torch.randn(6, 4), torch.randint(3, (6,))) for _ in range(2 * CLIENTS)]
    return TensorClients(samples[:CLIENTS], test=samples[CLIENTS:], num_classes=3, cohort_size=3)


def federation(**options: int) -> Federation:
    torch.manual_seed(0)
    return Federation(Classifier(nn.Linear(4, 3), num_classes=3), **options)


def trainer(rounds: int, *callbacks: L.Callback, **options: object) -> L.Trainer:
    options = {"logger": False, "enable_checkpointing": False} | options
    return L.Trainer(
        max_epochs=rounds,
        callbacks=list(callbacks),
        accelerator="cpu",
        enable_model_summary=False,
        **options,
    )


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=120), file


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


class TestProgressBar:
    def test_draws_rounds_and_the_clients_inside_them(self, data, monkeypatch):
        monkeypatch.setattr("pflight.callbacks.monitors.progress._MIN_INTERVAL", -1)
        terminal, file = console(terminal=True)
        module = federation()
        trainer(3, FederationProgressBar(terminal)).fit(module, datamodule=data)
        drawn = plain(file.getvalue())
        for seen in ("0/3", "1/3", "2/3", "3/3"):
            assert re.search(rf"Round .* {seen} ", drawn)
        for client in (1, 2, 3):
            assert re.search(rf"clients .* {client}/3", drawn)
        assert module.clients.on_client_end is None

    def test_shows_micro_and_macro_accuracy(self, monkeypatch):
        monkeypatch.setattr("pflight.callbacks.monitors.progress._MIN_INTERVAL", -1)
        from pflight.datamodules import Digits

        terminal, file = console(terminal=True)
        module = Federation(Classifier(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), 10))
        run = trainer(1, FederationProgressBar(terminal), num_sanity_val_steps=0)
        run.fit(module, datamodule=Digits(num_clients=5))
        shown = plain(file.getvalue())
        micro, macro = (run.callback_metrics[f"val/{name}_acc"] for name in ("micro", "macro"))
        assert f"micro acc {micro:.3f}  macro acc {macro:.3f}" in shown
        assert "evaluate" in shown

    def test_does_not_draw_for_every_client(self, data, monkeypatch):
        monkeypatch.setattr("pflight.callbacks.monitors.progress._MIN_INTERVAL", 1000)
        terminal, _ = console(terminal=True)
        bar = FederationProgressBar(terminal)
        bar._open("Round", 1, inner=True)
        bar._start_inner("clients", 10_000)
        monkeypatch.setattr(bar._progress, "refresh", lambda: pytest.fail("drew for a client"))
        for client in range(10_000):
            bar._on_client_end(client)
        monkeypatch.undo()
        bar._close()

    def test_prints_few_plain_lines_without_a_terminal(self, data):
        output, file = console(terminal=False)
        trainer(40, FederationProgressBar(output)).fit(federation(), datamodule=data)
        lines = file.getvalue().splitlines()
        assert "\x1b" not in file.getvalue()
        assert "\r" not in file.getvalue()
        assert len(lines) == 11
        assert lines[0] == "rounds 0 to 39"
        assert lines[-1].startswith("40/40")

    def test_gives_the_terminal_back_after_an_error(self, data, monkeypatch):
        terminal, file = console(terminal=True)
        bar = FederationProgressBar(terminal)
        module = federation()

        def broken(*args: object) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(module.clients, "end_round", broken)
        with pytest.raises(RuntimeError, match="a bug"):
            trainer(2, bar).fit(module, datamodule=data)
        assert bar._progress is None
        assert module.clients.on_client_end is None
        assert file.getvalue().endswith("\x1b[?25h")  # the cursor is shown again

    def test_test_and_predict(self, data, monkeypatch):
        monkeypatch.setattr("pflight.callbacks.monitors.progress._MIN_INTERVAL", -1)
        terminal, file = console(terminal=True)
        module, run = federation(), trainer(1, FederationProgressBar(terminal))
        run.fit(module, datamodule=data)
        run.test(module, datamodule=data, verbose=False)
        run.predict(module, datamodule=data)
        assert {"Test", "Predict"} <= set(re.findall(r"\w+", plain(file.getvalue())))


class TestResultTable:
    def test_rows_are_the_models_that_were_judged(self, data):
        output, file = console(terminal=False)
        module, run = federation(finetune_epochs=1), trainer(2, Local(), ResultTable(output))
        run.fit(module, datamodule=data)
        file.truncate(0)
        metrics = run.test(module, datamodule=data, verbose=False)[0]
        text = file.getvalue()
        assert "Local on TensorClients, test" in text
        for label, prefix in (
            ("used by clients", ""),
            ("sent by server", "server/"),
            ("fine-tuned", "finetuned/"),
        ):
            row = next(line for line in text.splitlines() if label in line)
            names = ("micro_acc", "macro_acc", "micro_f1", "macro_f1", "worst_decile_acc")
            values = [metrics[f"test/{prefix}{name}"] for name in names]
            assert re.findall(r"\d\.\d{4}", row) == [f"{value:.4f}" for value in values]
        down = sum(entry.bytes_down for entry in module.history)
        assert f"2 rounds; {down} B down, 0 B up" in text

    @pytest.mark.short("FedPAC-*-0.4")
    @pytest.mark.parametrize("holdout", [0.0, 0.4])
    @pytest.mark.parametrize(
        ("method", "model"), [(FedProto, "prototype"), (FedPAC, "local"), (FedGH, "received")]
    )
    def test_further_models_have_a_row(self, method, model, holdout):
        output, file = console(terminal=False)
        module, run = federation(), trainer(1, method(), ResultTable(output))
        data = small_data(holdout_clients=holdout)
        run.fit(module, datamodule=data)
        file.truncate(0)
        metrics = run.test(module, datamodule=data, verbose=False)[0]
        rows = [line for line in file.getvalue().splitlines() if model in line]
        groups = ["", "new/"] if holdout else [""]
        shown = [f"{metrics[f'test/{group}{model}/macro_acc']:.4f}" for group in groups]
        assert [re.findall(r"\d\.\d{4}", row)[1] for row in rows] == shown

    def test_a_round_has_the_number_that_it_has_in_the_history(self):
        output, file = console(terminal=False)
        module, run = federation(), trainer(4, ResultTable(output))
        run.fit(module, datamodule=small_data())
        accuracies = [entry.metrics["val/macro_acc"] for entry in module.history]
        best = module.history[accuracies.index(max(accuracies))].index
        assert f"best in round {best} (macro acc" in " ".join(file.getvalue().split())

    def test_without_validation_data_it_still_tells_the_traffic(self, data):
        output, file = console(terminal=False)
        trainer(1, ResultTable(output)).fit(federation(), datamodule=data)
        assert file.getvalue().startswith("1 round;")


class Own(L.LightningModule):
    """A module that is no task and predicts by a function of its network's outputs."""

    def __init__(self, predict: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)
        self.predict = predict

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.predict(self.net(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def predictions(
    client: L.LightningModule, data: FederatedDataModule, folder: Path
) -> tuple[Federation, list[dict[str, str]]]:
    """Fit a federation in which every client has a model; return it, and what is written of it."""
    path = folder / "out.csv"
    module, run = Federation(client), trainer(1, Local(), PredictionWriter(str(path)))
    run.fit(module, datamodule=data)
    run.predict(module, datamodule=data)
    with path.open() as file:
        return module, [*csv.DictReader(file)]


class ReadOneByOne(TensorDataset):
    """Might do anything to its samples."""


class TestPredictionWriter:
    def test_writes_where_it_is_told(self, data, tmp_path):
        path = tmp_path / "deep" / "out.csv"
        module, run = federation(), trainer(1, PredictionWriter(str(path)))
        run.fit(module, datamodule=data)
        run.predict(module, datamodule=data)
        lines = path.read_text().splitlines()
        assert lines[0] == "client,index,label,prediction,probability"
        assert len(lines) == 1 + 6 * CLIENTS
        labels = [int(line.split(",")[2]) for line in lines[1:]]
        assert labels == torch.cat([data.samples(i, "test")[1] for i in range(CLIENTS)]).tolist()

    @pytest.mark.parametrize("shape", [(), (1,), (2,)])
    def test_targets_and_outputs_of_a_regressor(self, tmp_path, shape):
        torch.manual_seed(0)
        samples = [(torch.randn(5, 4), torch.randn(5, *shape)) for _ in range(CLIENTS)]
        data = TensorClients(samples, test=samples)
        client = Regressor(nn.Linear(4, 2 if shape == (2,) else 1))
        module, rows = predictions(client, data, tmp_path)
        ends = ["_0", "_1"] if shape == (2,) else [""]
        assert list(rows[0]) == ["client", "index", *(f"target{end}" for end in ends)] + [
            f"output{end}" for end in ends
        ]
        assert [(int(row["client"]), int(row["index"])) for row in rows] == [
            (client, index) for client in range(CLIENTS) for index in range(5)
        ]
        for name, expected in (
            ("target", torch.cat([y for _, y in samples])),
            ("output", torch.cat([module.client_module(i)(x) for i, (x, _) in enumerate(samples)])),
        ):
            written = torch.tensor([[float(row[name + end]) for end in ends] for row in rows])
            torch.testing.assert_close(written, expected.view(len(rows), -1))

    def test_what_an_own_predict_step_returns(self, data, tmp_path):
        module, rows = predictions(Own(lambda z: z.argmax(1)), data, tmp_path)
        assert list(rows[0]) == ["client", "index", "output"]
        expected = [module.client_module(i).net(data.samples(i, "test")[0]) for i in range(CLIENTS)]
        assert [int(row["output"]) for row in rows] == torch.cat(expected).argmax(1).tolist()

    @pytest.mark.short("nothing", "fewer rows")
    @pytest.mark.parametrize(
        "predict",
        [
            lambda z: None,
            lambda z: {"logits": z},
            lambda z: z.mean(),
            lambda z: z[1:],
            lambda z: z[:, : len(z)],
        ],
        ids=["nothing", "dict", "number", "fewer rows", "other rows"],
    )
    @pytest.mark.filterwarnings("ignore:predict returned None:UserWarning")
    def test_what_makes_no_table_is_an_error(self, tmp_path, predict):
        data = small_data(eval_batch_size=5)
        with pytest.raises(ConfigurationError, match="its predict_step must return a tensor with"):
            predictions(Own(predict), data, tmp_path)
        assert not [*tmp_path.iterdir()]

    @pytest.mark.filterwarnings("ignore:.*client . failed to predict:UserWarning")
    def test_if_no_client_predicts_an_earlier_file_stays(self, tmp_path):
        path = tmp_path / "out.csv"
        path.write_text("client,index\n")

        def fail(z: Tensor) -> Tensor:
            raise ValueError("not today")

        with pytest.raises(
            ClientError, match="no client could be asked for its predictions: all 6 failed"
        ):
            predictions(Own(fail), small_data(), tmp_path)
        assert path.read_text() == "client,index\n"
        assert [*tmp_path.iterdir()] == [path]

    def test_datasets_have_no_labels(self, tmp_path):
        torch.manual_seed(0)
        samples = [ReadOneByOne(torch.randn(5, 4), torch.arange(5) % 3) for _ in range(CLIENTS)]
        data = DatasetClients(samples, test=samples)
        module, rows = predictions(Classifier(nn.Linear(4, 3), num_classes=3), data, tmp_path)
        assert list(rows[0]) == ["client", "index", "prediction", "probability"]
        expected = [module.client_module(i)(own.tensors[0]) for i, own in enumerate(samples)]
        probability, predicted = torch.cat(expected).softmax(1).max(1)
        assert [int(row["prediction"]) for row in rows] == predicted.tolist()
        written = torch.tensor([float(row["probability"]) for row in rows])
        torch.testing.assert_close(written, probability)


class TestTensorBoard:
    def test_report_in_python(self, data, tmp_path):
        run = trainer(
            3,
            FeSEM(2),
            TensorBoardReport(),
            logger=TensorBoardLogger(tmp_path, name="", version=""),
        )
        module = federation()
        run.fit(module, datamodule=data)
        run.test(module, datamodule=data, verbose=False)
        events = read_events(tmp_path)
        assert events.images == {"data/partition": [0]}
        assert events.texts == {"data/summary": [0]}
        assert events.hparams["algorithm"] == "FeSEM"
        assert events.hparams["local_epochs"] == 1
        assert events.compared == {"train/loss"}
        written = yaml.safe_load((tmp_path / "hparams.yaml").read_text())
        assert (written["algorithm"], written["engine"]) == ("FeSEM", "auto")
        assert events.scalars["train/loss"] == [0, 1, 2]
        assert events.scalars["test/macro_acc"] == [2]
        assert "epoch" not in events.scalars

    def test_the_best_of_any_round_is_compared_too(self):
        losses = [None, 0.5, 0.3, 0.4]
        history = [
            Round(t, [0], metrics={} if loss is None else {"val/loss": loss, "val/macro_acc": loss})
            for t, loss in enumerate(losses)
        ]
        assert _best(history) == {"best/val/macro_acc": 0.5, "best/val/loss": 0.3}

    def test_what_the_user_logs_herself_stays(self, data, tmp_path):
        logger = TensorBoardLogger(tmp_path, name="", version="", default_hp_metric=False)
        logger.log_hyperparams({"seed": "mine", "site": 3})
        trainer(1, FedAvg(), logger=logger).fit(federation(), datamodule=data)
        written = yaml.safe_load((tmp_path / "hparams.yaml").read_text())
        assert (written["seed"], written["site"], written["algorithm"]) == ("mine", 3, "FedAvg")

    def test_other_loggers_are_left_alone(self, data, tmp_path):
        run = trainer(1, FedAvg(), TensorBoardReport(), logger=CSVLogger(tmp_path))
        run.fit(federation(), datamodule=data)
        assert not list(Path(tmp_path).rglob("events*"))

"""What watches a metric that no round will have is refused before the first round."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
)
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pflight import Federation
from pflight.callbacks import CFL, FeSEM
from pflight.datamodules import TensorClients
from pflight.errors import ConfigurationError
from pflight.models import Classifier
from tests.runs import CLASSES, linear_client, quiet_trainer, run, samples, small_data

Watcher = Callable[[str], Any]
WATCHERS: dict[str, Watcher] = {
    "EarlyStopping": EarlyStopping,
    "ModelCheckpoint": lambda monitor: ModelCheckpoint(monitor=monitor),
}


def plateau(monitor: str, **options: Any) -> Callable[[Any], ReduceLROnPlateau]:
    def build(optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
        scheduler = ReduceLROnPlateau(optimizer, **options)
        scheduler.monitor = monitor  # as that of Lightning's command line
        return scheduler

    return build


def unvalidated() -> TensorClients:
    train = [samples(8, seed) for seed in range(3)]
    return TensorClients(train, num_classes=CLASSES, batch_size=None)


def refused(message: str, federation: Federation, trainer: L.Trainer, data: TensorClients) -> None:
    with pytest.raises(ConfigurationError, match=message) as error:
        trainer.fit(federation, datamodule=data)
    assert "\n" not in str(error.value)
    assert not federation.history


class LogsAtTheEnd(L.Callback):
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.log("mine", 1.0)


class LogsInTraining(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("mine", 1.0)
        return super().training_step(batch, batch_idx)


@pytest.mark.short("*-EarlyStopping")
@pytest.mark.parametrize("watcher", WATCHERS)
@pytest.mark.parametrize(
    ("monitor", "hint"),
    [
        ("val/macro_ac", "did you mean val/macro_acc"),
        ("val_loss", "did you mean .*val/loss"),
        ("val/finetuned/macro_acc", "did you mean .*val/macro_acc"),
        ("test/macro_acc", "did you mean .*val/macro_acc"),
        ("nothing", "there are train/loss, .*val/macro_acc"),
    ],
)
def test_an_unknown_metric(watcher: str, monitor: str, hint: str) -> None:
    trainer = quiet_trainer(2, WATCHERS[watcher](monitor))
    message = f"{watcher} watches '{monitor}', but no round will have it: {hint}"
    refused(message, Federation(linear_client()), trainer, small_data())


@pytest.mark.parametrize("watcher", WATCHERS)
def test_no_validation(watcher: str) -> None:
    federation, callback = Federation(linear_client()), WATCHERS[watcher]("val/macro_acc")
    refused(
        "no client has validation samples", federation, quiet_trainer(1, callback), unvalidated()
    )
    trainer = quiet_trainer(1, callback, limit_val_batches=0)
    refused("limit_val_batches=0", Federation(linear_client()), trainer, small_data())


@pytest.mark.parametrize("kind", [Classifier, LogsInTraining])
def test_no_validation_is_known_of_a_client_that_logs(kind: type[Classifier]) -> None:
    trainer = quiet_trainer(1, EarlyStopping("val/loss"))
    refused("no client has", Federation(linear_client(kind)), trainer, unvalidated())


def test_every_metric_of_a_round_is_known(tmp_path: Path) -> None:
    federation = run(linear_client(), small_data(), finetune_epochs=1)
    logged = {*federation.trainer.callback_metrics}
    assert {"train/loss", "val/finetuned/pooled_acc", "communication/total_bytes_up"} <= logged
    assert {*federation.history[0].metrics} <= logged
    stops = [EarlyStopping(monitor) for monitor in sorted(logged)]
    savers = [ModelCheckpoint(tmp_path, monitor, monitor=monitor) for monitor in ("epoch", "step")]
    run(linear_client(), small_data(), None, 1, *stops, *savers, finetune_epochs=1)
    assert {path.stem for path in tmp_path.glob("*.ckpt")} == {"epoch", "step"}


def test_clusters_have_metrics_of_their_own() -> None:
    for callback in (FeSEM(2), CFL(eps1=1.0, eps2=0.0)):
        monitor = f"{callback.tag}/size_0"
        federation = run(linear_client(), small_data(), callback, 2, EarlyStopping(monitor))
        assert len(federation.history) == 2


@pytest.mark.parametrize(
    ("kind", "callbacks"),
    [
        (LogsInTraining, []),
        (Classifier, [LogsAtTheEnd()]),
        (
            Classifier,
            [LambdaCallback(on_train_epoch_end=lambda _, module: module.log("mine", 1.0))],
        ),
    ],
)
def test_what_others_log_may_be_watched(kind: type[Classifier], callbacks: list[Any]) -> None:
    stop = EarlyStopping("mine", patience=1)
    assert len(run(linear_client(kind), small_data(), None, 5, *callbacks, stop).history) == 2


def test_a_learning_rate_may_be_watched(tmp_path: Path) -> None:
    watch = [LearningRateMonitor(), EarlyStopping("lr-SGD", patience=1)]
    trainer = {"logger": True, "default_root_dir": tmp_path}
    assert len(run(linear_client(), small_data(), None, 5, *watch, trainer=trainer).history) == 2


def test_what_may_be_missing_and_what_is_tried() -> None:
    lenient = EarlyStopping("nothing", strict=False)
    assert len(run(linear_client(), small_data(), None, 2, lenient).history) == 2
    strict, trainer = EarlyStopping("nothing"), {"fast_dev_run": True}
    assert len(run(linear_client(), small_data(), None, 1, strict, trainer=trainer).history) == 1


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_the_servers_plateau() -> None:
    def federation(monitor: str, kind: type[Classifier] = Classifier) -> Federation:
        return Federation(linear_client(kind), server_scheduler=plateau(monitor))

    message = "the server's ReduceLROnPlateau watches 'val/los', .*did you mean val/loss"
    refused(message, federation("val/los"), quiet_trainer(), small_data())
    refused("no client has", federation("val/macro_acc"), quiet_trainer(), unvalidated())
    unlogged = federation("unlogged", LogsInTraining)
    with pytest.warns(UserWarning, match="no round had 'unlogged'"):
        quiet_trainer().fit(unlogged, datamodule=small_data())
    logged = federation("mine", LogsInTraining)
    quiet_trainer().fit(logged, datamodule=small_data())

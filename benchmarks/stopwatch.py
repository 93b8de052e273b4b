"""Times what a Trainer does."""

from __future__ import annotations

import time

import lightning as L


class Stopwatch(L.Callback):
    """Times every round, from the start of its epoch to its end, and every validation."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.validations: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.round_started = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seconds.append(time.perf_counter() - self.round_started)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.validation_started = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.validations.append(time.perf_counter() - self.validation_started)

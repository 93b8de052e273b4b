"""Times what a Trainer and a device do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch


def wait(device: torch.device) -> None:
    """Wait until a device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def timing(owner: Any, method: str, note: Callable[[float], None]) -> Iterator[None]:
    """Note the seconds of each call of an object's method meanwhile."""
    own = getattr(owner, method)

    def timed(*arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        try:
            return own(*arguments, **options)
        finally:
            note(time.perf_counter() - started)

    setattr(owner, method, timed)
    try:
        yield
    finally:
        delattr(owner, method)


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

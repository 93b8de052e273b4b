"""A federation's output to its loggers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

_PER_ROUND: dict[str, Any] = {"on_step": False, "on_epoch": True, "batch_size": 1}
_SHOWN = ("val/micro_acc", "val/macro_acc", "test/micro_acc", "test/macro_acc")


def silence_hints() -> None:
    """Silence Lightning's hints that don't apply to a federation."""
    for hint in (
        "The number of training batches .* is smaller than the logging interval",
        "It is recommended to use .*sync_dist=True",
    ):
        warnings.filterwarnings("ignore", hint)


def log_hyperparameters(federation: L.LightningModule, **names: str) -> None:
    """Pass the hyper-parameters to the loggers.

    Args:
        federation: The federation.
        **names: Further hyper-parameters, besides the federation's options.
    """
    for logger in federation.loggers:
        if isinstance(logger, TensorBoardLogger):  # it would also log an empty hp_metric
            logger.hparams.update({**names, **federation.hparams, **logger.hparams})
        else:
            logger.log_hyperparams({**names, **federation.hparams})


def log_values(federation: L.LightningModule, values: Mapping[str, float], step: int) -> None:
    """Log values. They must be equal on all ranks.

    Args:
        federation: The federation.
        values: Values by tag.
        step: Index of the last round.
    """
    trainer = federation.trainer
    if trainer.sanity_checking:
        return
    fitting = trainer.state.fn == "fit"
    floats = {name: float(value) for name, value in values.items()}
    if fitting:  # immediately, so that no checkpoint is ahead of the log
        numbers = torch.tensor(list(floats.values()), device=federation.device).unbind()
        trainer.callback_metrics.update(zip(floats, numbers, strict=True))
        for logger in federation.loggers:
            logger.log_metrics(floats, step)
    else:  # Lightning uses a value of this name as the step
        floats["step"] = float(step)
    for name, value in floats.items():
        shown = name in _SHOWN
        if shown or not fitting:  # a call takes longer than the rest of a small round
            through = False if fitting else None  # the loggers in use
            federation.log(name, value, prog_bar=shown, logger=through, **_PER_ROUND)


def log_histograms(
    federation: L.LightningModule, histograms: Mapping[str, Tensor], step: int
) -> None:
    """Log distributions to TensorBoard, if it is in use."""
    for logger in federation.loggers:
        if isinstance(logger, TensorBoardLogger) and federation.trainer.is_global_zero:
            for name, values in histograms.items():
                logger.experiment.add_histogram(name, values, step)

"""The choice of the main metrics of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

_OF_CLASSES = {
    "micro_acc": "micro acc",
    "macro_acc": "macro acc",
    "micro_f1": "micro F1",
    "macro_f1": "macro F1",
    "worst_decile_acc": "worst decile",
}
_MOST = 4  # columns


def columns(metrics: Mapping[str, Any], stage: str) -> dict[str, str]:
    """Return the metrics for a table, with their headings.

    Args:
        metrics: Values by tag.
        stage: ``"val"`` or ``"test"``.

    Example:
        >>> columns({"val/macro_mae": 0.1, "val/micro_mae": 0.1, "val/server/macro_mae": 0}, "val")
        {'macro_mae': 'macro mae'}
    """
    if f"{stage}/macro_acc" in metrics and f"{stage}/macro_f1" in metrics:
        return _OF_CLASSES
    tags = (tag.removeprefix(f"{stage}/") for tag in metrics if tag.startswith(f"{stage}/macro_"))
    return {tag: tag.replace("_", " ", 1) for tag in list(tags)[:_MOST]}


def judged_by(trainer: L.Trainer) -> tuple[str, bool]:
    """Return the metric that compares rounds, and whether higher is better.

    It is the metric of the first ``ModelCheckpoint``, by default the macro accuracy.
    """
    for callback in getattr(trainer, "checkpoint_callbacks", ()):
        if isinstance(callback, ModelCheckpoint) and callback.monitor is not None:
            return callback.monitor, callback.mode == "max"
    return "val/macro_acc", True

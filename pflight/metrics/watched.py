"""Checks that the metrics watched by callbacks will exist."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

import lightning as L
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
)

from pflight.clients import Clients
from pflight.errors import ConfigurationError
from pflight.task import Task

from .means import MEANS

_MEANS = (
    "macro_acc",
    "micro_acc",
    "macro_f1",
    "micro_f1",
    "pooled_acc",
    "worst_decile_acc",
    "loss",
)
_OF_ROUNDS = ("train/loss", "clients/sampled", "clients/failed")
_TRAFFIC = tuple(
    f"communication/{total}bytes_{way}" for total in ("", "total_") for way in ("down", "up")
)
_OF_LIGHTNING = ("epoch", "step")  # ModelCheckpoint accepts them too


def check_monitors(federation: L.LightningModule, clients: Clients) -> None:
    """Raise if a callback of the Trainer watches a metric that no round will have.

    Only an ``EarlyStopping`` that is not ``strict`` may do so.
    """
    for callback in federation.trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, EarlyStopping | ModelCheckpoint):
            continue
        if callback.monitor is not None and getattr(callback, "strict", True):
            more = _OF_LIGHTNING if isinstance(callback, ModelCheckpoint) else ()
            name = type(callback).__name__
            check_monitor(federation, clients, name, callback.monitor, (*_TRAFFIC, *more))


def check_monitor(
    federation: L.LightningModule,
    clients: Clients,
    watcher: str,
    monitor: str,
    more: Sequence[str] = (),
) -> None:
    """Raise if no round will have a metric.

    The metrics of a user's own classes can't be known in advance. If the run has such a class, only
    validation metrics are checked, and only for the existence of a validation.

    Args:
        federation: The federation.
        clients: Its clients, with their data.
        watcher: The watcher of the metric, for the message.
        monitor: The tag of the metric.
        more: Further known tags, besides the tags of a round's entry in the history.

    Raises:
        ConfigurationError: Naming similar tags.
    """
    trainer = federation.trainer
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    models = ("", "server/", "finetuned/") if clients.training.finetune_epochs else ("", "server/")
    means = _means_of(clients.module)
    of_validation = [f"val/{model}{name}" for model in models for name in means]
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    if any(_may_log(part) for part in callbacks):
        return
    if monitor in of_validation:
        if trainer.limit_val_batches == 0:
            raise ConfigurationError(
                f"{watcher} watches {monitor!r}, but limit_val_batches=0 leaves out validation"
            )
        if not len(clients.attached_data.val_dataloader()):
            raise ConfigurationError(
                f"{watcher} watches {monitor!r}, but no client has validation samples"
            )
        return
    tags = tuple(f"{part.tag}/" for part in callbacks if hasattr(part, "tag"))
    known = [*_OF_ROUNDS, *of_validation, *more]
    if monitor in known or monitor.startswith(tags) or clients.on_updates:
        return
    if _may_log(federation) or _may_log(clients.module):
        return
    alike = get_close_matches(monitor, known, cutoff=0.5)
    hint = f"did you mean {' or '.join(alike)}" if alike else f"there are {', '.join(known[:10])}"
    raise ConfigurationError(f"{watcher} watches {monitor!r}, but no round will have it: {hint}")


def _means_of(module: L.LightningModule) -> list[str]:
    """Return the names of the clients' metrics, as means over clients."""
    if not (isinstance(module, Task) and module.higher_is_better):
        return list(_MEANS)
    return [f"{mean}{name}" for name in module.higher_is_better for mean in (*MEANS, "")]


def _may_log(part: object) -> bool:
    """Return whether an object may log metrics that are not known in advance."""
    ours = type(part).__module__.partition(".")[0] in ("pflight", "lightning", "pytorch_lightning")
    return not ours or isinstance(part, LambdaCallback | LearningRateMonitor)

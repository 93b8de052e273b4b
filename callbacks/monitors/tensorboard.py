"""TensorBoard's views of a federation in addition to scalars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger

from pflight.data.data_module import FederatedDataModule
from pflight.federation import Federation
from pflight.history import Round
from pflight.options import checked

from .hparams import Primitive, hparams_of_objects
from .quality import columns

_COMPARED = (
    "val/macro_acc",
    "val/micro_acc",
    "val/macro_f1",
    "val/worst_decile_acc",
    "val/server/macro_acc",
    "val/acc",
    "val/loss",
    "train/loss",
)
_BEST = "best/"
_HPARAMS = ".hparams"


@checked
class TensorBoardReport(L.Callback):
    """Adds config, partition, and hyper-parameters with results to TensorBoard.

    The HParams page compares runs by the final values of their metrics and, under ``best/``, by the
    best values of any round. Scalars are flushed before every checkpoint. So a killed and resumed
    run has each point once.

    Args:
        config: The resolved configuration as text; the command line fills it in.
        hparams: Hyper-parameters for the HParams page and ``hparams.yaml``; by default the
            federation's options and the class names of client module and data. The algorithm's
            name, ``federation.algorithm``, is added.
    """

    def __init__(
        self, config: str | None = None, hparams: Mapping[str, Primitive] | None = None
    ) -> None:
        self.config = config
        self.hparams = hparams

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Let the logger write the given hyper-parameters to ``hparams.yaml``."""
        logger = _tensorboard(trainer)
        if logger is not None and self.hparams is not None:
            logger.hparams.update(self.hparams)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the config and the partition, once per run."""
        logger = _tensorboard(trainer)
        if logger is None:
            return
        if trainer.current_epoch > 0:  # a resumed run has them already
            return
        writer = logger.experiment
        if self.config is not None:
            writer.add_text("config", _code(self.config), 0)
        data = getattr(trainer, "datamodule", None)
        if isinstance(data, FederatedDataModule) and data.knows_classes:
            from matplotlib import pyplot

            writer.add_text("data/summary", _code(data.summary()), 0)
            figure = data.partition_figure()
            writer.add_figure("data/partition", figure, 0, close=False)
            pyplot.close(figure)
        writer.flush()

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Flush all logs, so that no checkpoint is ahead of them."""
        logger = _tensorboard(trainer)
        if logger is not None:
            logger.experiment.flush()

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the hyper-parameters, and the metrics of the HParams page."""
        logger = _tensorboard(trainer)
        if logger is None:
            return
        from torch.utils.tensorboard import FileWriter
        from torch.utils.tensorboard.summary import hparams

        metrics: dict[str, Any] = dict(trainer.callback_metrics)
        if isinstance(pl_module, Federation):  # also if a finished run had nothing left to do
            metrics = {k: v for entry in pl_module.history for k, v in entry.metrics.items()}
        shown = [f"val/{metric}" for metric in columns(metrics, "val")]
        compared = {
            tag: float(metrics[tag])
            for tag in dict.fromkeys([*_COMPARED, *shown])
            if tag in metrics
        }
        if isinstance(pl_module, Federation):
            compared |= _best(pl_module.history)
        # A file of its own, which a resumed run replaces: TensorBoard shows the first record only.
        folder = Path(logger.log_dir)
        for earlier in folder.glob(f"events.out.tfevents.*{_HPARAMS}"):
            earlier.unlink()
        writer = FileWriter(str(folder), filename_suffix=_HPARAMS)
        given = self.hparams if self.hparams is not None else hparams_of_objects(trainer)
        if isinstance(pl_module, Federation):
            given = {"algorithm": pl_module.algorithm, **given}
        for summary in hparams(dict(given), compared):
            writer.add_summary(summary)
        writer.close()


def _best(history: Sequence[Round]) -> dict[str, float]:
    """Return the best value of each validation metric over rounds; the lowest for a loss."""
    values = {
        tag: [v for r in history if math.isfinite(v := r.metrics.get(tag, math.nan))]
        for tag in _COMPARED
        if tag.startswith("val/")
    }
    return {
        _BEST + tag: (min if tag.endswith("loss") else max)(found)
        for tag, found in values.items()
        if found
    }


def _tensorboard(trainer: L.Trainer) -> TensorBoardLogger | None:
    if not trainer.is_global_zero:
        return None
    found = (logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger))
    return next(found, None)


def _code(text: str) -> str:
    """Return text as a block of code in TensorBoard's Markdown."""
    return "\n".join(f"    {line}" for line in text.splitlines())

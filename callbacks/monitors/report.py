"""The output at the end of a run: a table of the results, and each client's predictions."""

from __future__ import annotations

import csv
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table

from pflight.distributed import gather_to_first
from pflight.errors import ConfigurationError
from pflight.federation import Federation
from pflight.files import replacing
from pflight.host import readable
from pflight.options import checked
from pflight.runs import PREDICTIONS
from pflight.updates import Evaluation

from .quality import columns, judged_by

_ROWS = {
    "": "used by the clients",
    "server/": "sent by the server",
    "finetuned/": "fine-tuned",
    "new/": "newcomers: used",
    "new/server/": "newcomers: sent",
    "new/finetuned/": "newcomers: fine-tuned",
}


@checked
class ResultTable(L.Callback):
    """Prints a small table when ``fit``, ``validate`` or ``test`` ends.

    It has a row for each model that was judged, with accuracies or a module's own metrics as means
    over clients. Below it are the number of rounds, the traffic, and the best round by the metric
    of the checkpoints.

    Args:
        console: Where to print; standard output by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the last evaluation of the run."""
        if isinstance(pl_module, Federation) and pl_module.history:
            evaluated = [r for r in pl_module.history if columns(r.metrics, "val")]
            metrics = evaluated[-1].metrics if evaluated else {}
            self._print(trainer, pl_module, "val", "validation", metrics)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the results, unless the validation is part of ``fit``."""
        if isinstance(pl_module, Federation) and trainer.state.fn != "fit":
            self._print(trainer, pl_module, "val", "validation", trainer.callback_metrics)

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the results of the test."""
        if isinstance(pl_module, Federation):
            self._print(trainer, pl_module, "test", "test", trainer.callback_metrics)

    def _print(
        self, trainer: L.Trainer, federation: Federation, stage: str, name: str, metrics: Any
    ) -> None:
        if not trainer.is_global_zero:
            return
        console = self._console or Console()
        data = getattr(trainer, "datamodule", None)
        title = f"{federation.algorithm} on {data}, {name}"
        caption, shown = _caption(trainer, federation, stage), columns(metrics, stage)
        table = Table(title=title, title_justify="left", caption=caption)
        table.caption_justify = "left"
        table.add_column("model")
        for column in shown.values():
            table.add_column(column, justify="right")
        for prefix, label in _ROWS.items():
            tags = [f"{stage}/{prefix}{metric}" for metric in shown]
            if tags and all(tag in metrics for tag in tags):
                table.add_row(label, *(f"{float(metrics[tag]):.4f}" for tag in tags))
        console.print(table if table.row_count else caption)


@checked
class PredictionWriter(L.Callback):
    """Writes each client's predictions on its test samples to one file when ``predict`` ends.

    The file is a table with the columns client, index (of the sample among the client's test
    samples), label, prediction, and the predicted class's probability.

    Args:
        path: The file; by default ``predictions.csv`` in ``trainer.default_root_dir``. An earlier
            one stays until the new one is complete.

    Raises:
        ConfigurationError: If no file can be written there, before anything is predicted.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self._outputs: list[Evaluation] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check that the file can be written at the end."""
        if stage != "predict" or not trainer.is_global_zero:
            return
        path = self._file(trainer)
        if path.is_dir():
            raise ConfigurationError(f"can't write the predictions to {path}: it is a folder")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=path.parent).close()
        except OSError as error:
            raise ConfigurationError(
                f"can't write the predictions to {path}: {error.strerror}"
            ) from error

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start without predictions."""
        self._outputs = []

    def on_predict_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep the outputs of a chunk of clients."""
        if isinstance(outputs, Evaluation):
            self._outputs.append(outputs)

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the predictions of all ranks' clients, in the order of their ids."""
        if not isinstance(pl_module, Federation):
            return
        ranks = gather_to_first(self._outputs)
        self._outputs = []
        if trainer.is_global_zero:
            path = self._file(trainer)
            with replacing(path) as partial:
                rows = _write(partial, [chunk for chunks in ranks for chunk in chunks])
            Console().print(f"{rows:,} predictions in {path}", highlight=False, soft_wrap=True)

    def _file(self, trainer: L.Trainer) -> Path:
        return Path(self.path or Path(trainer.default_root_dir, PREDICTIONS))


def _write(path: Path, chunks: list[Evaluation]) -> int:
    columns = [torch.cat(parts) for parts in zip(*chunks, strict=True)] if chunks else []
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["client", "index", "label", "prediction", "probability"])
        if not columns:
            return 0
        clients, logits, labels, _ = columns
        order = clients.argsort(stable=True)
        clients, logits, labels = clients[order], logits[order], labels[order]
        probability, predicted = logits.float().softmax(dim=1).max(dim=1)
        first = torch.searchsorted(clients, clients)
        index = torch.arange(len(clients)) - first
        fields = (clients, index, labels, predicted)
        values = zip(*(field.tolist() for field in fields), probability.tolist(), strict=True)
        writer.writerows((*row[:-1], f"{row[-1]:.6f}") for row in values)
    return len(clients)


def _caption(trainer: L.Trainer, federation: Federation, stage: str) -> str:
    history = federation.history
    parts = [f"{len(history)} round{'s' if len(history) != 1 else ''}"]
    if history:
        down, up = (sum(getattr(r, f"bytes_{way}") for r in history) for way in ("down", "up"))
        parts.append(f"{readable(down)} down, {readable(up)} up")
    if failed := sum(len(r.failed) for r in history):
        parts.append(f"{failed} of {sum(len(r.clients) for r in history)} trainings failed")
    monitor, higher = judged_by(trainer)
    judged = [r for r in history if monitor in r.metrics]
    if stage == "val" and judged:
        best = (max if higher else min)(judged, key=lambda r: r.metrics[monitor])
        name = monitor.removeprefix("val/").replace("_", " ", 1)
        parts.append(f"best in round {best.index} ({name} {best.metrics[monitor]:.4f})")
    return "; ".join(parts)

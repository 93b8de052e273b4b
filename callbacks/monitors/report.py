"""The output at the end of a run: a table of the results, and each client's predictions."""

from __future__ import annotations

import csv
import math
from itertools import product
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeGuard

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from pflight.errors import ClientError, ConfigurationError
from pflight.federation import Federation
from pflight.models.classifier import Classifier
from pflight.options import checked
from pflight.runs.distributed import gather_to_first
from pflight.runs.files import replacing
from pflight.runs.folder import PREDICTIONS
from pflight.runs.host import readable
from pflight.states.updates import Evaluation, Predictions
from pflight.task import Task

from .quality import columns, judged_by

_MODELS = {
    "": "used by clients",
    "server/": "sent by server",
    "finetuned/": "fine-tuned",
}
_GROUPS = {"": "", "new/": "newcomers: "}


@checked
class ResultTable(L.Callback):
    """Prints a small table when ``fit``, ``validate`` or ``test`` ends.

    It has a row for each judged model, with accuracies or a module's own metrics as means over
    clients. Below it are the number of rounds, the traffic, and the best round by the metric of the
    checkpoints.

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
        table = Table(title=Text(title), title_justify="left", caption=Text(caption))
        table.caption_justify = "left"
        table.add_column("model")
        for column in shown.values():
            table.add_column(Text(column), justify="right")
        further = federation.clients.outer_method.further_models
        models = {**_MODELS, **{model: model.removesuffix("/") for model in further}}
        for (group, whose), (model, label) in product(_GROUPS.items(), models.items()):
            tags = [f"{stage}/{group}{model}{metric}" for metric in shown]
            if tags and all(tag in metrics for tag in tags):
                table.add_row(Text(whose + label), *(f"{float(metrics[tag]):.4f}" for tag in tags))
        console.print(table if table.row_count else Text(caption))


@checked
class PredictionWriter(L.Callback):
    """Writes each client's predictions on its test samples to one file when ``predict`` ends.

    The file is a table with a row for each sample: client, index among the client's test samples,
    and

    - of a :class:`~pflight.models.Classifier`: label, prediction, and the predicted class's
      probability;
    - of another :class:`~pflight.task.Task`: target and output;
    - of any other module: the output of its ``predict_step``.

    Targets and outputs of several numbers have a column for each, such as ``output_0``. Labels and
    targets are left out if samples come from torch Datasets.

    Args:
        path: The file; by default ``predictions.csv`` in ``trainer.default_root_dir``. An earlier
            file stays until the new one is complete.

    Raises:
        ConfigurationError: If no file can be written there, before anything is predicted; or if a
            ``predict_step`` returns something other than tensors with a row for each sample.
        ClientError: If no client could predict; an earlier file stays.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self._chunks: list[dict[str, Tensor]] = []

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
        self._chunks = []

    def on_predict_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep the predictions of a chunk of clients."""
        if isinstance(pl_module, Federation) and outputs:
            self._chunks.append(self._columns(pl_module, outputs))

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the predictions of all ranks' clients, in the order of their ids."""
        if not isinstance(pl_module, Federation):
            return
        ranks = gather_to_first(self._chunks)
        self._chunks = []
        if trainer.is_global_zero:
            path = self._file(trainer)
            with replacing(path) as partial:
                rows = _write(partial, [chunk for chunks in ranks for chunk in chunks])
                if not rows:
                    raise ClientError("no client made predictions, as the warnings say")
            Console().print(
                f"{rows:,} predictions in {path}", markup=False, highlight=False, soft_wrap=True
            )

    def _file(self, trainer: L.Trainer) -> Path:
        return Path(self.path or Path(trainer.default_root_dir, PREDICTIONS))

    def _columns(
        self, federation: Federation, outputs: Evaluation | Predictions
    ) -> dict[str, Tensor]:
        """Return the columns of the file for the ``B`` samples of a chunk: tensors ``[B, ...]``."""
        client = federation.client
        if isinstance(outputs, Evaluation):
            target = "label" if _classifies(client) else "target"
            columns, values = {"client": outputs.clients, target: outputs.targets}, outputs.outputs
        else:
            owners, values = self._joined(federation, outputs)
            columns = {"client": owners}
        if not _classifies(client):
            return {**columns, "output": values}
        logits = values.float().reshape(len(values), client.num_classes)
        probability, predicted = logits.softmax(dim=1).max(dim=1)
        return {**columns, "prediction": predicted, "probability": probability}

    def _joined(self, federation: Federation, predictions: Predictions) -> tuple[Tensor, Tensor]:
        """Return each sample's client ``[B]``, and the result of ``predict_step`` ``[B, ...]``."""
        clients = torch.tensor([client for client, _ in predictions])
        counts = federation.clients.attached_data.num_samples("test")[clients]
        parts = [batch for _, batches in predictions for batch in batches]
        earlier = [chunk["output"] for chunk in self._chunks if "output" in chunk]
        shapes = {_shape_of_row(part) for part in [*earlier, *parts]}
        if (
            None in shapes
            or len(shapes) > 1
            or [sum(map(len, batches)) for _, batches in predictions] != counts.tolist()
        ):
            raise ConfigurationError(
                f"can't write the predictions of {type(federation.client).__name__}: its "
                "predict_step must return a tensor with a row for each sample of a batch, and all "
                "rows must have one shape"
            )
        return clients.repeat_interleave(counts), torch.cat(parts).cpu()


def _classifies(client: L.LightningModule) -> TypeGuard[Classifier]:
    return isinstance(client, Classifier) and type(client).predict_step is Task.predict_step


def _shape_of_row(outputs: Any) -> torch.Size | None:
    return outputs.shape[1:] if isinstance(outputs, Tensor) and outputs.dim() else None


def _write(path: Path, chunks: list[dict[str, Tensor]]) -> int:
    table = {name: torch.cat([c[name] for c in chunks]) for name in (chunks[0] if chunks else ())}
    clients, order = table.pop("client", torch.empty(0)).sort(stable=True)
    index = torch.arange(len(clients)) - torch.searchsorted(clients, clients)
    columns = {"client": clients, "index": index}
    for name, values in table.items():
        parts = values[order].unsqueeze(-1).flatten(1).T
        names = [name] if len(parts) == 1 else [f"{name}_{k}" for k in range(len(parts))]
        columns.update(zip(names, parts, strict=True))
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*map(_texts, columns.values()), strict=True))
    return len(clients)


def _texts(values: Tensor) -> list[str]:
    """Return each number as the shortest text that reads back as the same number."""
    known = values.float() if values.dtype == torch.bfloat16 else values  # NumPy lacks bfloat16
    return known.numpy().astype(str).tolist()


def _caption(trainer: L.Trainer, federation: Federation, stage: str) -> str:
    history = federation.history
    parts = [f"{len(history)} round{'s' if len(history) != 1 else ''}"]
    if history:
        down, up = (sum(getattr(r, f"bytes_{way}") for r in history) for way in ("down", "up"))
        parts.append(f"{readable(down)} down, {readable(up)} up")
    if failed := sum(len(r.failed) for r in history):
        parts.append(f"{failed} of {sum(len(r.clients) for r in history)} trainings failed")
    monitor, higher = judged_by(trainer)
    judged = [r for r in history if math.isfinite(r.metrics.get(monitor, math.nan))]
    if stage == "val" and judged:
        best = (max if higher else min)(judged, key=lambda r: r.metrics[monitor])
        name = monitor.removeprefix("val/").replace("_", " ", 1)
        parts.append(f"best in round {best.index} ({name} {best.metrics[monitor]:.4f})")
    return "; ".join(parts)

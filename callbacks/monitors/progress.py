"""A progress bar for rounds, and a second one for the clients of the current round."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from pflight.federation import Federation
from pflight.options import checked
from pflight.runs.distributed import owned

from .quality import columns

_SHOWN = {"val/micro_acc": "micro acc", "val/macro_acc": "macro acc", "val/acc": "acc"}
_MIN_INTERVAL = 0.1  # seconds between two drawings
_PLAIN_LINES = 10  # lines in all without a terminal


@checked
class FederationProgressBar(ProgressBar):
    """Shows rounds, the clients of the current round, and the micro and macro accuracy so far.

    The bar shows the number of the running round, counted from 0. If the output is not a terminal,
    it prints about ten plain lines instead.

    Args:
        console: Where to draw; standard output by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self._console = console
        self._enabled = True
        self._progress: Progress | None = None
        self._drawn = 0.0
        self._done = 0

    def enable(self) -> None:
        """Draw again after :meth:`disable`."""
        self._enabled = True

    def disable(self) -> None:
        """Draw nothing. Lightning calls it on all ranks but the first."""
        self._enabled = False

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar."""
        self.console.print(*args)

    @property
    def console(self) -> Console:
        """The console of the bar."""
        if self._console is None:
            self._console = Console()
        return self._console

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start drawing, and subscribe to the end of each client's training."""
        if not self._enabled:
            return
        if isinstance(pl_module, Federation):
            pl_module.clients.on_client_end = self._on_client_end
        rounds = trainer.max_epochs if trainer.max_epochs != -1 else None
        unit = "Round" if isinstance(pl_module, Federation) else "Epoch"
        self._open(unit, rounds, trainer.current_epoch, inner=True)
        last = "..." if rounds is None else rounds - 1
        self._plain(trainer, f"{unit.lower()}s {trainer.current_epoch} to {last}")

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start counting the clients of a cohort; with several ranks, of rank 0 only."""
        if isinstance(pl_module, Federation):
            self._start_inner("clients", len(owned(batch)))
        elif batch_idx == 0:
            self._start_inner("batches", int(trainer.num_training_batches))

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count a batch, if a module trains by itself."""
        if not isinstance(pl_module, Federation):
            self._on_client_end(batch_idx)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Advance by a round, and show the accuracies of the latest evaluation."""
        if self._progress is not None:
            self._progress.advance(self._progress.task_ids[0])
            self._progress.update(self._progress.task_ids[0], accuracy=_accuracy(trainer))
            self._draw()
        rounds = trainer.max_epochs
        every = max(1, rounds // _PLAIN_LINES) if rounds and rounds > 0 else _PLAIN_LINES
        done = trainer.current_epoch + 1
        if done % every == 0 or done == rounds:
            self._plain(trainer, f"{done}/{rounds} done  {_accuracy(trainer)}".rstrip())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave the bar of the rounds in place."""
        if isinstance(pl_module, Federation):
            pl_module.clients.on_client_end = None
        self._close()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Release the terminal."""
        if isinstance(pl_module, Federation):
            pl_module.clients.on_client_end = None
        self._close()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start counting an evaluation, inside a round or by itself."""
        total = int(sum(trainer.num_val_batches))
        if self._progress is None:
            self._open("Validate", total)
        else:
            self._start_inner("evaluate", total)

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Count a chunk of clients."""
        self._on_evaluated()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Close the bar, if the validation ran by itself."""
        if trainer.state.fn != "fit":
            self._close()

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start counting chunks of clients."""
        self._open("Test", int(sum(trainer.num_test_batches)))

    def on_test_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Count a chunk of clients."""
        self._on_evaluated()

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Close the bar."""
        self._close()

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start counting chunks of clients."""
        self._open("Predict", int(sum(trainer.num_predict_batches)))

    def on_predict_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Count a chunk of clients."""
        self._on_evaluated()

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Close the bar."""
        self._close()

    def _on_client_end(self, client: int) -> None:
        # Called for every client: it only counts, unless it is time to draw.
        self._done += 1
        if self._progress is not None and time.monotonic() - self._drawn > _MIN_INTERVAL:
            self._progress.update(self._progress.task_ids[-1], completed=self._done)
            self._draw()

    def _on_evaluated(self) -> None:
        if self._progress is not None:
            self._progress.advance(self._progress.task_ids[-1])
            self._draw()

    def _open(
        self, unit: str, total: int | None, completed: int = 0, *, inner: bool = False
    ) -> None:
        if not self._enabled or not self.console.is_terminal:
            return
        self._progress = Progress(
            TextColumn("{task.fields[unit]}"),
            BarColumn(),
            MofNCompleteColumn(),
            _OfOuter(TimeElapsedColumn()),
            _OfOuter(TimeRemainingColumn()),
            TextColumn("{task.fields[accuracy]}"),
            console=self.console,
            auto_refresh=False,
        )
        self._progress.add_task(
            "", total=total, completed=completed, unit=unit, outer=True, accuracy=""
        )
        if inner:
            self._progress.add_task("", total=1, unit="", outer=False, accuracy="")
        self._progress.start()

    def _close(self) -> None:
        if self._progress is None:
            return
        for task in self._progress.task_ids[1:]:
            self._progress.remove_task(task)
        self._progress.refresh()
        self._progress.stop()
        self._progress = None

    def _start_inner(self, unit: str, total: int) -> None:
        self._done = 0
        if self._progress is not None:
            inner = self._progress.task_ids[-1]
            self._progress.update(inner, total=total, completed=0, unit=unit)
            self._draw()

    def _draw(self) -> None:
        now = time.monotonic()
        if self._progress is not None and now - self._drawn > _MIN_INTERVAL:
            self._drawn = now
            self._progress.refresh()

    def _plain(self, trainer: L.Trainer, line: str) -> None:
        if self._enabled and self._progress is None:
            self.console.print(line, highlight=False, soft_wrap=True)


class _OfOuter(ProgressColumn):
    """A column that is empty in the row of the clients."""

    def __init__(self, column: ProgressColumn) -> None:
        super().__init__()
        self._column = column

    def render(self, task: Any) -> Any:
        return self._column(task) if task.fields["outer"] else ""


def _accuracy(trainer: L.Trainer) -> str:
    metrics = trainer.callback_metrics
    shown = _SHOWN
    if not shown.keys() & metrics.keys():
        shown = {f"val/{tag}": name for tag, name in columns(metrics, "val").items()}
    return "  ".join(f"{name} {metrics[tag]:.3f}" for tag, name in shown.items() if tag in metrics)

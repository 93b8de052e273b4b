"""The progress of a comparison: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .measuring import Task
from .rows import settings_text
from .tuning import FIRST_SEED

_PERIOD = 600.0  # seconds of work that estimate the time left


class RunsProgress:
    """Shows the number of finished runs, the current runs, and the time left.

    Args:
        count: Number of all runs.
        ended: Returns the number of ended runs, here or elsewhere.
        console: Where to print.
    """

    def __init__(self, count: int, ended: Callable[[], int], console: Console) -> None:
        self.console = console
        self.count = count
        self._ended = ended
        self._taken: set[str] = set()
        self._parts: dict[str, float] = {}  # the done share of each current run
        self._since: dict[str, float] = {}
        self._progress = Progress(
            TextColumn("{task.fields[done]}/{task.total:.0f} runs"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            TextColumn("{task.fields[now]}"),
            console=console,
            disable=not console.is_terminal,
            speed_estimate_period=_PERIOD,
        )
        self._done = ended()
        self._bar = self._progress.add_task(
            "", total=count, completed=self._done, done=self._done, now=""
        )

    def __enter__(self) -> RunsProgress:
        """Begin to draw."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the bar as it is."""
        self._progress.stop()

    def begun(self, task: Task) -> None:
        """A run has begun, or goes on."""
        self._parts[task.folder] = 0.0
        self._since[task.folder] = time.monotonic()
        self._done = self._ended()
        self._draw(task)

    def advanced(self, task: Task, rounds: int, of: int) -> None:
        """A run has finished a round."""
        self._parts[task.folder] = rounds / of if of > 0 else 0.0
        self._draw(task, f", round {rounds} of {of}")

    def ended(self, task: Task, failure: str | None) -> None:
        """A run has ended, or failed."""
        self._parts.pop(task.folder, None)
        seconds = time.monotonic() - self._since.get(task.folder, time.monotonic())
        said = f"failed: {failure}" if failure else f"{seconds:.0f} s"
        self._done = self._ended()
        self._draw(task)
        left = self._progress.tasks[0].time_remaining
        if left and self._progress.disable:  # where no bar says so
            said += f", about {timedelta(seconds=round(left))} left"
        self.say(f"{self._done}/{self.count} {_name(task)}: {said}")

    def taken(self, task: Task, by: str) -> None:
        """Another process makes a run."""
        if task.folder not in self._taken:
            self._taken.add(task.folder)
            self.say(f"{_name(task)}: {by}")

    def stopping(self, signum: int) -> None:
        """A signal has arrived. The current rounds are the last."""
        more = "; a second Ctrl-C stops at once" if signum == signal.SIGINT else ""
        self.say(f"stopping after the current rounds: the same command continues{more}")

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self.console.print(f"pflight: {line}", markup=False, highlight=False, soft_wrap=True)

    def _draw(self, task: Task, more: str = "") -> None:
        shown = self._done + sum(self._parts.values())
        now = f"{_name(task)}{more}"
        self._progress.update(self._bar, completed=shown, done=self._done, now=now)


def _name(task: Task) -> str:
    told = filter(None, [task.method, settings_text(task.settings)])
    trial = "trial, " if task.seed >= FIRST_SEED else ""
    return f"{', '.join(told)} ({trial}seed {task.seed})"

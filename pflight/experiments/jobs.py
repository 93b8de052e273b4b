"""Worker processes that make the runs of a comparison side by side."""

from __future__ import annotations

import errno
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from types import FrameType
from typing import Any

from .comparison import Comparison
from .measuring import Task, note_failure
from .progress import RunsProgress

_LOOK = 1.0  # seconds between two looks at other processes' results
_AGAIN = 5.0  # seconds before a run of another process is asked for again
_DEATHS = 2  # deaths of processes, after which their run counts as failed


class Worker:
    """A process that makes runs, one at a time.

    Args:
        threads: Number of threads, unless ``OMP_NUM_THREADS`` is set.
    """

    def __init__(self, threads: int) -> None:
        # Each run has its own process, also if a scheduler started this one.
        own = {name: v for name, v in os.environ.items() if not name.startswith("SLURM_")}
        own["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        own.setdefault("OMP_NUM_THREADS", str(threads))
        own.setdefault("MKL_NUM_THREADS", own["OMP_NUM_THREADS"])
        with _ctrl_c_blocked():  # for the process too, which ends with its input
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pflight.experiments.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,  # a selector would miss data that are read ahead
                env=own,
            )
        self.task: Task | None = None
        self._read = b""

    def start(self, task: Task) -> None:
        """Let it make a run."""
        assert self.process.stdin is not None
        self.task = task
        with suppress(BrokenPipeError):  # it has died; its output tells why
            self.process.stdin.write(f"{json.dumps(asdict(task))}\n".encode())

    def answers(self) -> list[dict[str, Any]] | None:
        """Return the arrived answers; ``None`` if the process has ended."""
        assert self.process.stdout is not None
        read = os.read(self.process.stdout.fileno(), 1 << 16)
        *lines, self._read = (self._read + read).split(b"\n")
        return [json.loads(line) for line in lines] if read else None

    def end(self) -> None:
        """Let it end after its current round."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def wait(self) -> int:
        """Wait until it has ended, and return its status."""
        self.process.wait()
        with self.process:  # closes the pipes
            return self.process.returncode


class Jobs:
    """Makes the runs of a comparison in several processes.

    Args:
        comparison: The comparison, which knows the runs that are due.
        count: Number of processes.
        watcher: Shows the progress of the runs.
    """

    def __init__(self, comparison: Comparison, count: int, watcher: RunsProgress) -> None:
        self.comparison = comparison
        self.count = count
        self.watcher = watcher
        self._threads = max(1, (os.cpu_count() or 1) // count)
        self._workers: list[Worker] = []
        self._events = selectors.DefaultSelector()
        self._elsewhere: dict[str, float] = {}  # when a folder was last found taken
        self._failed: set[str] = set()  # folders of failed runs; some can't hold a note
        self._deaths: dict[str, int] = {}
        self._signum = 0
        self._full: OSError | None = None

    def work(self) -> None:
        """Make all runs, and wait for runs of other processes.

        A signal ends it after the current rounds, with ``SystemExit``; a second Ctrl-C at once.

        Raises:
            OSError: If the disk is full. The other runs have then ended after their current rounds.
        """
        with self._signals_noted():
            try:
                while not (self._signum or self._full) and (due := self._due()):
                    self._assign(due)
                    self._listen()
                if self._signum:
                    self.watcher.stopping(self._signum)
            finally:
                self._end()
        if self._signum:
            raise SystemExit(128 + self._signum)
        if self._full:
            raise self._full

    @contextmanager
    def _signals_noted(self) -> Iterator[None]:
        """Note signals inside; only the main thread can."""
        before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(signum) != signal.SIG_IGN:
                    before[signum] = signal.signal(signum, self._note)
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self._signum and signum == signal.SIGINT:
            for worker in self._workers:
                worker.process.kill()
            os._exit(128 + signum)
        self._signum = self._signum or int(signum)

    def _due(self) -> list[Task]:
        return [task for task in self.comparison.due() if task.folder not in self._failed]

    def _assign(self, due: Sequence[Task]) -> None:
        now = time.monotonic()
        busy = self._busy()
        for task in due:
            if len(busy) == self.count:
                return
            if task.folder in busy or now - self._elsewhere.get(task.folder, -_AGAIN) < _AGAIN:
                continue
            idle = next((worker for worker in self._workers if worker.task is None), None)
            worker = idle or self._hire()
            worker.start(task)
            busy.add(task.folder)
            self.watcher.begun(task)

    def _hire(self) -> Worker:
        worker = Worker(self._threads)
        self._workers.append(worker)
        assert worker.process.stdout is not None
        self._events.register(worker.process.stdout, selectors.EVENT_READ, worker)
        return worker

    def _listen(self) -> None:
        """Listen to the workers until one has ended its run, or for a while."""
        busy, end = self._busy(), time.monotonic() + _LOOK
        while self._busy() == busy and not self._signum and (left := end - time.monotonic()) > 0:
            for key, _ in self._events.select(left):
                self._hear(key.data)

    def _busy(self) -> set[str]:
        """Return the folders of the current runs of this process."""
        return {worker.task.folder for worker in self._workers if worker.task}

    def _hear(self, worker: Worker) -> None:
        answers = worker.answers()
        if answers is None:
            self._bury(worker)
        for answer in answers or ():
            task = worker.task
            assert task is not None
            if "round" in answer:
                self.watcher.advanced(task, *answer["round"])
                continue
            worker.task = None
            if "taken" in answer:
                self._elsewhere[task.folder] = time.monotonic()
                self.watcher.taken(task, answer["taken"])
            elif "full" in answer:
                self._full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), answer["full"])
            else:
                self._ended(task, answer.get("failed"))

    def _bury(self, worker: Worker) -> None:
        """Remove a dead process. Its run is started again once."""
        assert worker.process.stdout is not None
        self._events.unregister(worker.process.stdout)
        self._workers.remove(worker)
        code, task = worker.wait(), worker.task
        if task is None:
            return
        self._deaths[task.folder] = self._deaths.get(task.folder, 0) + 1
        if self._deaths[task.folder] >= _DEATHS:
            why = (
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            )
            reason = f"its process {why}, {_DEATHS} times"
            note_failure(task, reason)
            self._ended(task, reason)

    def _ended(self, task: Task, failure: str | None) -> None:
        if failure is not None:
            self._failed.add(task.folder)
        self.watcher.ended(task, failure)

    def _end(self) -> None:
        for worker in self._workers:
            worker.end()
        for worker in self._workers:
            worker.wait()
        self._events.close()


@contextmanager
def _ctrl_c_blocked() -> Iterator[None]:
    """Let Ctrl-C wait inside."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

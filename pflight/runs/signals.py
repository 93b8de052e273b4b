"""Handling of SIGTERM and Ctrl-C: a run ends between two rounds, on all ranks together."""

from __future__ import annotations

import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from types import FrameType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from pflight.errors import Stopped

from .distributed import all_max, lost_rank
from .files import causes

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LAUNCHER = "PFLIGHT_LAUNCHER"  # set in processes that end with this one
_END = 0  # the byte that ends the thread; other bytes are numbers of signals
_SAME = 0.2  # within these seconds the same signal may come twice: from the terminal and a parent
_LOOK = 1.0  # seconds between two checks of the other ranks
_GRACE = 5.0  # seconds for a rank to end by itself after another rank


class StopBetweenRounds(L.Callback):
    """After SIGTERM or Ctrl-C, ends a fit after the current round, and other work at once.

    It is both a callback of the Trainer and a context manager in the main thread around the
    Trainer's work. Inside, signals are recorded. Before each round the ranks check whether one of
    them got a signal. If so, all ranks stop; the previous round has been saved. Outside rounds, as
    in the set-up or a test, a signal stops the process at once. So does a second Ctrl-C anywhere.
    The context then ends with ``SystemExit``, status 143 for SIGTERM and 130 for Ctrl-C, and a line
    on standard error.

    Lightning's processes for the other ranks end with this one. If one of them dies, this one ends
    too. Ignored signals and all other signals are not touched.

    Args:
        advice: Returns how to continue the run, for the line on standard error.

    Attributes:
        at_once: The signals that stop the process at once if they come second.

    Example:
        >>> import lightning as L, pflight, torch
        >>> samples = torch.randn(8, 4), torch.randint(2, (8,))
        >>> data = pflight.datamodules.TensorClients([samples] * 3, num_classes=2)
        >>> client = pflight.models.Classifier(torch.nn.Linear(4, 2), num_classes=2)
        >>> with StopBetweenRounds() as stop:
        ...     trainer = L.Trainer(max_epochs=2, callbacks=[stop], accelerator="cpu", logger=False,
        ...         enable_checkpointing=False, enable_progress_bar=False,
        ...         enable_model_summary=False)
        ...     trainer.fit(pflight.Federation(client), datamodule=data)
    """

    at_once: frozenset[int] = frozenset({signal.SIGINT})

    def __init__(self, advice: Callable[[], str] = str) -> None:
        self.advice = advice
        self.signum = 0
        self.saved_apart = False  # set by SaveWhenStopped: it then decides alone
        self._inside = False
        self._in_rounds = False
        self._agreed = False
        self._trainer: L.Trainer | None = None
        self._ranks: list[Popen[bytes]] = []
        self._parent = 0
        self._before: dict[int, Any] = {}
        self._wakeup = -1
        self._ear: tuple[int, int] | None = None
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)

    def __reduce__(self) -> tuple[Any, ...]:  # the rest is useless in another process
        return type(self), (), {"saved_apart": self.saved_apart}

    def __enter__(self) -> StopBetweenRounds:
        """Begin to record signals. Only the main thread can do this.

        Raises:
            SystemExit: A signal came meanwhile.
        """
        if threading.current_thread() is threading.main_thread():
            for signum in _SIGNALS:
                if signal.getsignal(signum) not in (signal.SIG_IGN, None):
                    self._before[signum] = signal.signal(signum, self._note)
            # The main thread may be waiting for another rank. This pipe wakes another thread.
            self._ear = os.pipe()
            os.set_blocking(self._ear[1], False)
            self._wakeup = signal.set_wakeup_fd(self._ear[1], warn_on_full_buffer=False)
            _open.append(self)
            if os.environ.get("LOCAL_RANK", "0") != "0":
                self._parent = int(os.environ.get(_LAUNCHER, 0))
            os.environ[_LAUNCHER] = str(os.getpid())
            self._thread.start()
        try:
            self._inside = True
            if self.signum:
                raise Stopped
        except Stopped as stopped:
            self.__exit__(Stopped, stopped, None)  # Python does not, if this method raises
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Restore the signal handlers, and end the process if a signal came."""
        self._inside = False
        if self._ear is not None:
            _open.remove(self)
            os.environ.pop(_LAUNCHER, None)
            self.restore_handlers()
            os.write(self._ear[1], bytes([_END]))
            self._thread.join()
            for end in self._ear:
                os.close(end)
        ending = error is not None or self.signum
        dead = self._end_ranks(_GRACE if self._agreed else _LOOK) if ending else {}
        if any(isinstance(cause, KeyboardInterrupt) for cause in causes(error)):
            self.signum = self.signum or signal.SIGINT  # raised without a signal
        if lost_rank(error) or (self.signum and not isinstance(error, Exception)):
            raise SystemExit(self._print_reason(dead)) from None

    def restore_handlers(self) -> None:
        """Restore the signal handlers."""
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._wakeup)

    def watch(self, trainer: L.Trainer) -> None:
        """Watch a Trainer's ranks, also during their set-up."""
        self._trainer = trainer
        if signal.SIGTERM in self._before:
            # Lightning's own handler would broadcast at any point of a rank's work.
            connector = trainer._signal_connector
            connector._sigterm_notifier_fn = lambda *_: None  # type: ignore[method-assign]

    # For Lightning

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Watch the Trainer's ranks."""
        self.watch(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let signals wait for the end of a round from now on."""
        self._in_rounds = True

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop if a signal came to any rank.

        Raises:
            Stopped: On all ranks together.
        """
        if self._agreed or (not self.saved_apart and self.is_over()):
            raise Stopped

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """End all ranks in the same way if a signal came in the last round."""
        self.is_over()
        self._in_rounds = False

    def is_over(self) -> bool:
        """Return whether a signal came to any rank. All ranks have to call it."""
        signum = int(all_max(torch.tensor(self.signum)))
        if signum:  # don't overwrite a signal that comes meanwhile
            self.signum, self._agreed = signum, True
        return self._agreed

    # Signals and the other ranks

    def _note(self, signum: int, frame: FrameType | None) -> None:
        first, self.signum = not self.signum, self.signum or signum
        if first and self._inside and not self._in_rounds:
            self._end_ranks(0)
            raise Stopped

    def _listen(self) -> None:
        """Receive signals and watch the ranks in a thread, even while the main thread waits."""
        assert self._ear is not None
        heard, last, since = 0, 0.0, math.inf
        while True:
            ready, _, _ = select.select([self._ear[0]], [], [], _LOOK)
            now = time.monotonic()
            for signum in os.read(self._ear[0], 64) if ready else b"":
                if signum == _END:
                    return
                if signum not in _SIGNALS:
                    continue
                if not heard and self._in_rounds:
                    name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
                    more = f"; a second {name} stops at once" if signum in self.at_once else ""
                    _write(1, f"pflight: stopping after this round{more}")
                elif heard and signum in self.at_once and now - last > _SAME:
                    self._end_now(heard)
                heard, last = heard or signum, now
            if self._parent not in (0, os.getppid()):
                os._exit(1)
            ending = self._dead() or (heard and not self._in_rounds)
            since = min(since, now) if ending and not self._agreed else math.inf
            if now - since > _GRACE:
                self._end_now(heard)

    def _dead(self) -> dict[int, int]:
        """Return the exit status of each failed rank among Lightning's processes."""
        launcher = self._trainer.strategy.launcher if self._trainer else None
        if isinstance(launcher, _SubprocessScriptLauncher):
            with suppress(IndexError):  # otherwise Lightning would kill this process
                while True:
                    self._ranks.append(launcher.procs.pop(0))
        return {rank: code for rank, p in enumerate(self._ranks, 1) if (code := p.poll())}

    def _end_ranks(self, patience: float) -> dict[int, int]:
        """End all ranks. Return the exit status of the ranks that failed by themselves."""
        self._dead()
        with suppress(TimeoutExpired):
            for process in self._ranks:
                process.wait(patience)
        dead = self._dead()
        for process in self._ranks:
            process.kill()
        return dead

    def _end_now(self, signum: int) -> None:
        self.signum = self.signum or signum
        os._exit(self._print_reason(self._end_ranks(0)))

    def _print_reason(self, dead: dict[int, int]) -> int:
        """Print why the process ends, and return its exit status."""
        for code in dead.values():
            if -code in _SIGNALS or code - 128 in _SIGNALS:
                self.signum = self.signum or abs(code) % 128
        if self.signum:
            why = f"stopped by {signal.Signals(self.signum).name}"
        else:
            lost = [f"rank {rank} ended with status {code}" for rank, code in dead.items()]
            why = f"error: {', '.join(lost) or 'another rank ended'}"
        _write(2, f"pflight: {why} {self.advice()}".rstrip())
        return 128 + self.signum if self.signum else 1


class SaveWhenStopped(Checkpoint):
    """Saves the last round of a stopped run, if callbacks don't save every round.

    Args:
        stop: Stops the run.
        path: The checkpoint to write.
    """

    def __init__(self, stop: StopBetweenRounds, path: Path) -> None:
        self._stop = stop
        self._path = path
        stop.saved_apart = True

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save if this is the last round."""
        if self._stop.is_over():
            trainer.save_checkpoint(self._path)


_open: list[StopBetweenRounds] = []


def _restore_in_child() -> None:
    for stop in _open:
        stop.restore_handlers()


os.register_at_fork(after_in_child=_restore_in_child)  # such as a worker of a DataLoader


@rank_zero_only
def _write(descriptor: int, line: str) -> None:
    with suppress(OSError):
        os.write(descriptor, f"{line}\n".encode())

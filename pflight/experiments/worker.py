"""A process that makes one run after the other, so that libraries are imported once.

It reads a task, a line of JSON, from standard input. It answers with lines of JSON on standard
output: ``{"round": [3, 40]}`` after a round, and at the end ``{"done": null}`` or
``{"failed": "why"}``. The end is ``{"full": "which file"}`` if the disk is full, and
``{"taken": "by whom"}`` if another process makes that run. The process ends with its input, after
its current round.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pflight.command.process import configuration_error, quieten
from pflight.errors import TakenError, described
from pflight.runs.files import full_disk, full_disk_left_to_the_main_thread
from pflight.runs.folder import FAILURE, LOG, RESULTS, RunFolder
from pflight.runs.signals import StopBetweenRounds

from .measuring import Clock, MeasuredRun, Task, ended_in, measured, note_failure
from .outcome import Outcome

Say = Callable[[dict[str, Any]], None]


def main() -> None:
    """Make runs until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the reader of answers must not see the output of libraries
    quieten()

    def say(answer: dict[str, Any]) -> None:
        with suppress(OSError):  # nobody listens any more
            answers.write(f"{json.dumps(answer)}\n")

    with full_disk_left_to_the_main_thread():
        for task in _tasks():
            say(make(task, say))


def make(task: Task, say: Say) -> dict[str, Any]:
    """Make a run, and return the answer."""
    folder = RunFolder(task.folder)
    try:
        with folder.claimed("compare"):
            if isinstance(ended_in(folder.path, task.key), Outcome):
                return {"done": None}
            (folder.path / FAILURE).unlink(missing_ok=True)
            with _logged(folder.path / LOG):
                try:
                    _run(task, say)
                except TakenError:
                    raise
                except Exception as error:
                    if full_disk(error):
                        raise
                    traceback.print_exc()
                    reason = _reason(error)
                    note_failure(task, reason)
                    return {"failed": reason}
    except TakenError as error:
        return {"taken": str(error)}
    except Exception as error:
        if full := full_disk(error):
            return {"full": full.filename or task.folder}
        return {"failed": _reason(error)}
    return {"done": None}


def _run(task: Task, say: Say) -> None:
    clock = Clock(lambda done, rounds: say({"round": [done, rounds]}))
    with StopBetweenRounds() as stop:
        run = MeasuredRun(task, stop, clock)
        outcome = measured(run, task)
    outcome.write(Path(task.folder, RESULTS))


def _reason(error: BaseException) -> str:
    """Return why a run failed, in one line; an error that a user can mend says enough itself."""
    own = configuration_error(error)
    return described(error) if own is None else " ".join(str(own).split())


@contextmanager
def _logged(path: Path) -> Iterator[None]:
    """Append all that is printed, also by libraries and other processes, to a file."""
    kept = os.dup(1), os.dup(2)
    with path.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for descriptor, before in zip((1, 2), kept, strict=True):
            os.dup2(before, descriptor)
            os.close(before)


def _tasks() -> Iterator[Task]:
    """Yield tasks as they come; when there can be no more, end the run that goes on."""
    tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
    busy, over = threading.Event(), threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            tasks.put(Task(**json.loads(line)))
        over.set()
        tasks.put(None)
        if busy.is_set():
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=listen, daemon=True).start()
    while (task := tasks.get()) is not None:
        busy.set()
        if over.is_set():  # also if the task came together with the end
            return
        yield task
        busy.clear()


if __name__ == "__main__":
    main()

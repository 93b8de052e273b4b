"""The entry point of the command ``pflight`` and of ``python -m pflight``."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections.abc import Sequence
from pkgutil import resolve_name
from types import FrameType

from .command.commands import COMMANDS, RUNS, parser
from .command.completion import complete
from .messages import write_plainly
from .runs.allocator import keep_freed_memory

_SLOW = ("compare", "report", "export", "prepare")  # commands, besides runs, that import PyTorch
_ONLY_SHOWN = ("-h", "--help", "--print_config")  # with these options nothing runs
_BEFORE_A_RUN = ("-c", "--config", "--print_config")  # may come before the command


def main(args: Sequence[str] | None = None) -> None:
    """Run a command. Import Lightning only if the command needs it.

    Args:
        args: Arguments that replace the process's arguments.
    """
    for signum in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, _end)
    if "_ARGCOMPLETE" in os.environ:
        complete()
    write_plainly()
    if args is None:
        _look_in_the_current_folder()
    args = sys.argv[1:] if args is None else [*args]
    first = args[0].partition("=")[0] if args else ""
    front, _ = parser()
    if first in RUNS or first in _BEFORE_A_RUN:
        if not any(arg.startswith(_ONLY_SHOWN) for arg in args):
            _begin(next((arg for arg in args if arg in RUNS), first))
        _run(args)
        return
    options = front.parse_args(args)
    if options.command in _SLOW:
        _begin(options.command)
    if options.command is None:
        front.error(f"no command is given: choose {', '.join([*RUNS, *COMMANDS])}")
    resolve_name(options.function)(options)


def _look_in_the_current_folder() -> None:
    """Let Python find modules in the current folder, as ``python -m pflight`` does.

    Python's options ``-P`` and ``-I`` and its variable ``PYTHONSAFEPATH`` prevent this.
    """
    if not sys.flags.safe_path and sys.path[:1] not in ([""], [os.getcwd()]):
        sys.path.insert(0, os.getcwd())


def _run(args: Sequence[str]) -> None:
    """Import the modules of a run, and run it.

    The process belongs to the run. The run keeps freed memory in the process, for training. The
    garbage collector is off during the imports, which saves a fifth of their time. It never scans
    the imported objects afterwards.
    """
    keep_freed_memory()
    gc.disable()
    from .command.cli import main as run

    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)
    run(args)


def _begin(command: str) -> None:
    """Print a first line. The imports that follow take seconds."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"pflight: starting {command}", flush=True)


def _end(signum: int, frame: FrameType | None) -> None:
    """End the process at once: there is nothing to save, before or after the run."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        os.write(2, f"pflight: stopped by {signal.Signals(signum).name}\n".encode())
    os._exit(128 + signum)


if __name__ == "__main__":
    main()

"""The entry point of the command ``pflight`` and of ``python -m pflight``."""

from __future__ import annotations

import atexit
import gc
import os
import signal
from types import FrameType

from .allocator import keep_freed_memory


def main() -> None:
    """Import what the command line needs, and run it.

    The process is the command's own, so that its memory can be set up for training: the allocator
    keeps freed memory, and the garbage collector is off during the imports, which saves a fifth of
    their time, and never scans the imported objects afterwards.
    """
    for signum in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, _end)
    keep_freed_memory()
    gc.disable()
    from .cli import main as run

    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)
    run()


def _end(signum: int, frame: FrameType | None) -> None:
    """End the process at once, since there is nothing to save yet or any more."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        os.write(2, f"pflight: stopped by {signal.Signals(signum).name}\n".encode())
    os._exit(128 + signum)


if __name__ == "__main__":
    main()

"""The command ``pflight``, which ``python -m pflight`` is too."""

from __future__ import annotations

import atexit
import gc
import os
import signal
from types import FrameType

from .allocator import keep_freed_memory


def main() -> None:
    """Import all that the command line needs, and run it.

    The process is the command's own, so its memory is set up for training: what is freed stays with
    it, and what is imported is never looked through for garbage, which would take a fifth of the
    time of its import.
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
    """End at once: nothing has begun, or all is done."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        os.write(2, f"pflight: stopped by {signal.Signals(signum).name}\n".encode())
    os._exit(128 + signum)


if __name__ == "__main__":
    main()

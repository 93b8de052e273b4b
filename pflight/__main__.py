"""The command ``pflight``, which ``python -m pflight`` is too."""

from __future__ import annotations

import atexit
import gc


def main() -> None:
    """Import all that the command line needs, and run it.

    Until the end of the process none of what is imported is looked through for garbage, which would
    take a fifth of the time of its import.
    """
    gc.disable()
    from .cli import main as run

    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)
    run()


if __name__ == "__main__":
    main()

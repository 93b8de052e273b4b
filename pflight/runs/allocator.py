"""An allocator setting that keeps freed memory in the process, for the next step."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt, as malloc.h numbers them
_KEPT = 128 * 2**20  # free bytes that are kept at the end of the heap
_LARGEST = 32 * 2**20  # largest block from the heap in bytes; glibc allows no more


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory, so that a step does not wait for new pages from the system.

    The command ``pflight`` calls this at its start. A Python program may call it before training.
    The gradients of clients that train together take megabytes for one step. By default glibc gives
    them back to the operating system if they lie at the end of the heap. A round of small clients
    then spends more time on getting pages again than on arithmetic. Nothing changes without glibc,
    or if the environment has options for its allocator.

    Returns:
        Whether the setting was changed.

    References:
        ``man 3 mallopt``.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, or Windows
        return False
    options = (_MMAP_THRESHOLD, _LARGEST), (_TRIM_THRESHOLD, _KEPT)
    return all(mallopt(option, value) for option, value in options)


def give_freed_memory_back() -> None:
    """Let glibc give free memory back to the system now, after large blocks were freed."""
    with suppress(AttributeError, OSError, TypeError):  # another C library, or Windows
        ctypes.CDLL(None).malloc_trim(0)

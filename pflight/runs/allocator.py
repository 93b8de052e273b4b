"""An allocator setting that keeps freed memory in the process, for the next step."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt, as malloc.h numbers them
_KEPT = 128 * 2**20  # bytes at the end of the heap that are kept when they are free
_LARGEST = 32 * 2**20  # bytes of a block that comes from the heap; glibc takes no more


def keep_freed_memory() -> bool:
    """Let glibc keep what is freed, so that a step does not wait for the system's fresh pages.

    The command ``pflight`` calls this when it starts; a Python program may, before it trains. The
    gradients of clients that train together are megabytes that live for a step. By default glibc
    gives them back to the operating system whenever they lie at the end of the heap, and a round of
    small clients spends more on getting them again, page by page, than on arithmetic. Nothing is
    changed where there is no glibc, or where the environment has options for its allocator.

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
    """Let glibc give free memory back to the system now, after large blocks were freed at odds."""
    with suppress(AttributeError, OSError, TypeError):  # another C library, or Windows
        ctypes.CDLL(None).malloc_trim(0)

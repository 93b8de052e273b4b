"""Files that are whole or not there, and the error that a full disk is."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, a user's share of it, a file


def partial_of(path: Path) -> Path:
    """Return where a file is written before it takes its place."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path beside a file, for what takes the file's place at the end.

    A kill leaves the old file or the new one, an error the old file alone.
    """
    partial = partial_of(path)
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those that it stems from, each once: they may form a cycle."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def full_disk(error: BaseException) -> OSError | None:
    """Return the error of a disk, quota or file that is full, if an exception stems from one."""
    found = (cause for cause in causes(error) if isinstance(cause, OSError))
    return next((cause for cause in found if cause.errno in _FULL), None)

"""Atomic writing of files, and the recognition of a full disk."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

PARTIAL = ".partial"
"""The suffix of files that are being written."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a full disk, quota or file


def partial_of(path: Path) -> Path:
    """Return the path of a file during writing, before it is renamed."""
    return path.with_name(f".{path.name}{PARTIAL}")


@contextmanager
def replacing(path: Path, shared: bool = False, durable: bool = False) -> Iterator[Path]:
    """Yield a path beside a file to write to. At the end the new file replaces the old one.

    A kill leaves the old file or the new one. An error leaves the old file.

    Args:
        path: The file.
        shared: Whether other processes may write it at the same time, also on other machines.
        durable: Whether to wait until the file has reached the disk.
    """
    partial = partial_of(path.with_name(f"{path.name}.{uuid4().hex}") if shared else path)
    try:
        yield partial
        if durable:
            sync(partial)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the list of files in a folder, has reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its causes, each once, even in a cycle."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def full_disk(error: BaseException) -> OSError | None:
    """Return the OSError of a full disk, quota or file that caused an exception, if any."""
    found = (cause for cause in causes(error) if isinstance(cause, OSError))
    return next((cause for cause in found if cause.errno in _FULL), None)


@contextmanager
def full_disk_left_to_the_main_thread() -> Iterator[None]:
    """Don't print a full disk in TensorBoard's writer thread. The main thread raises it too."""
    report = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is None or full_disk(args.exc_value) is None:
            report(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = report

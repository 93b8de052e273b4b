"""Locks of files. They end with their process, even on a file system without locks."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from filelock import BaseFileLock

_LOOK = 0.1  # seconds between two looks at a lock of another process


def hold(path: Path) -> BaseFileLock:
    """Lock a file, for as long as the returned lock is referenced and not released.

    The lock ends with the process, even after a kill. If the file system has no locks, a file that
    names the holder's process is the lock. It is taken over if the holder ran on this machine and
    has ended.

    Args:
        path: The file, in a folder that exists. A hard link to another folder's lock is removed.

    Raises:
        BlockingIOError: If another process has the lock; :func:`holder` says which.
        OSError: If the file can't be written.
    """
    from filelock import Timeout

    with suppress(OSError):
        if path.stat().st_nlink > 1:  # in a copied folder: the original's lock
            path.unlink()
    before = holder(path)
    try:
        lock = _locked(path)
    except Timeout as error:
        raise BlockingIOError(f"{path} is locked by {holder(path) or before}") from error
    if lock.lock_file == str(path) and not _is_record(path):
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        with suppress(OSError):
            path.write_text(f"process {os.getpid()} on {socket.gethostname()} since {since}")
    return lock


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold a lock inside the context. Wait until no other process has it.

    Args:
        path: As in :func:`hold`.

    Raises:
        OSError: If the file can't be written.
    """
    while True:
        try:
            lock = hold(path)
            break
        except BlockingIOError as error:
            if _marker(path).exists() or _is_record(path):  # unknown whether the holder has ended
                warnings.warn(f"waiting, since {error}", stacklevel=3)
            time.sleep(_LOOK)
    try:
        yield
    finally:
        lock.release()


def release(lock: BaseFileLock) -> None:
    """Release a lock, and remove its file."""
    Path(lock.lock_file).unlink(missing_ok=True)
    lock.release()


def holder(path: Path) -> str:
    """Return in words which process holds, or held, a lock; empty if the file does not name it.

    Args:
        path: As in :func:`hold`.
    """
    for file in (_marker(path), path):
        text = _text(file)
        if _is_record(file):
            process, host, *_ = text.split()
            return f"process {process} on {host} (if it has ended, delete {file})"
        if text:
            return text
    return ""


def _locked(path: Path) -> BaseFileLock:
    from filelock import FileLock, SoftFileLock, Timeout

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flock not supported")
        lock: BaseFileLock = FileLock(path, thread_local=False)
        try:
            lock.acquire(blocking=False)
        except (Timeout, PermissionError):
            raise
        except (OSError, NotImplementedError):
            with suppress(OSError):
                if not path.stat().st_size:  # left by the attempt
                    path.unlink()
            lock = SoftFileLock(_marker(path), thread_local=False)
            lock.acquire(blocking=False)
    return lock


def _marker(path: Path) -> Path:
    """Return the file that is the lock on a file system without locks."""
    return path.with_name(f"{path.name}.marker")


def _is_record(path: Path) -> bool:
    """Return whether a file has filelock's record of its holder: a process, and a host."""
    return _text(path).partition(" ")[0].isdigit()


def _text(path: Path) -> str:
    """Return the readable text of a file as one line."""
    try:
        return " ".join(path.read_text(errors="replace").split())
    except OSError:
        return ""

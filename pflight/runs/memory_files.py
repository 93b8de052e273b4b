"""Files of client states, and lists of the rows in each checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from pflight.errors import ConfigurationError

from .files import replacing
from .locks import hold

if TYPE_CHECKING:
    from filelock import BaseFileLock

Layout = tuple[tuple[str, str, tuple[int, ...]], ...]
"""Name, dtype and shape of every tensor of a state, by name."""

MEMORY = "memory"  # the folder
_ROWS = ".rows"  # the suffix of a file of states
TABLES = "tables"  # the folder in it with lists of each checkpoint's rows
_NEXT = ".next"  # suffix while the checkpoint is being written
_WRITTEN = ".json"  # suffix once it is written
_ALIGNMENT = 16  # alignment: bytes of the largest number
_HEADER = 16  # bytes: the client and the checksum


@dataclass(frozen=True)
class RowFile:
    """A file of states of one layout. Each row has a header with its client and its checksum.

    The file is written by system calls and read through a memory map. A full disk is an error in a
    system call, but would crash a process that writes to a map.

    Attributes:
        path: The file.
        layout: Names, dtypes and shapes of the tensors of a state.
    """

    path: Path
    layout: Layout = field(compare=False)

    @cached_property
    def columns(self) -> dict[str, tuple[slice, torch.dtype, tuple[int, ...]]]:
        """The offset in bytes, dtype and shape of each tensor in a row."""
        columns, start = {}, _HEADER
        for name, dtype_name, shape in self.layout:
            dtype = getattr(torch, dtype_name)
            stop = start + dtype.itemsize * int(np.prod(shape))
            columns[name] = slice(start, stop), dtype, shape
            start = _aligned(stop)
        return columns

    @cached_property
    def row_bytes(self) -> int:
        """Size of a row in bytes."""
        return _aligned(max((place.stop for place, _, _ in self.columns.values()), default=_HEADER))

    @property
    def length(self) -> int:
        """Number of complete rows."""
        return self.path.stat().st_size // self.row_bytes if self.path.exists() else 0

    def write(
        self, indices: Iterator[int], clients: Sequence[int], states: Mapping[str, Tensor]
    ) -> Iterator[Row]:
        """Write the states ``[C]`` of clients to rows. Create or extend the file as needed.

        Each index is taken from the iterator just before its row is written.

        Raises:
            OSError: If the disk is full or not writable.
        """
        sources = self._places(states)
        data = np.zeros(self.row_bytes, np.uint8)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            for position, client in enumerate(clients):
                for source, place in sources:
                    data[place] = source[position]
                row = Row(self, next(indices), client, _checksum(data))
                data[:_HEADER].view(np.int64)[:] = client, row.checksum
                rest, offset = data.data, row.index * self.row_bytes
                while rest:  # a system call may write only a part
                    written = os.pwrite(descriptor, rest, offset)
                    rest, offset = rest[written:], offset + written
                yield row
        finally:
            os.close(descriptor)

    def read(self, wanted: Sequence[Row]) -> State:
        """Return copies of the states of rows ``[C]`` of this file.

        Raises:
            ConfigurationError: If a row is missing, damaged or overwritten.
        """
        first, last = min(row.index for row in wanted), max(row.index for row in wanted)
        table = last - first + 1, self.row_bytes
        length = 0
        try:
            length = self.length
            mapped = np.memmap(self.path, np.uint8, "r", first * self.row_bytes, table)
        except (FileNotFoundError, IsADirectoryError, ValueError) as error:
            behind = (row for row in wanted if row.index >= length)
            raise next(behind, wanted[0]).lost() from error
        except OSError as error:
            raise _unreadable(self.path, error) from error
        states = {
            name: torch.empty((len(wanted), *shape), dtype=dtype)
            for name, (_, dtype, shape) in self.columns.items()
        }
        copies = self._places(states)
        for position, row in enumerate(wanted):
            data = mapped[row.index - first]
            for copy, place in copies:
                copy[position] = data[place]
            if _checksum(data) != row.checksum:
                raise row.lost()
        return states

    def _places(self, states: Mapping[str, Tensor]) -> list[tuple[NDArray[np.uint8], slice]]:
        """Return the bytes ``[C, n]`` of each tensor of a stack, and their slice of a row.

        The bytes share memory with the stack if it is contiguous.
        """
        places = []
        for name, (place, _, _) in self.columns.items():
            data = states[name].contiguous().flatten()
            if len(data) == 1:  # its stride may be anything
                data = data.as_strided((1,), (1,))
            data = data.view(torch.uint8)
            width = place.stop - place.start
            places.append((data.view(len(states[name]), width).numpy(), place))
        return places

    def headers(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return client and checksum ``[n, 2]`` of rows ``[n]``; zeros for rows past the end.

        Raises:
            ConfigurationError: If the file can't be read.
        """
        headers = np.zeros((len(indices), 2), np.int64)
        try:
            length = self.length
            there = indices < length
            if there.any():
                rows = np.memmap(self.path, np.uint8, "r", shape=(length, self.row_bytes))
                headers[there] = np.ascontiguousarray(rows[indices[there], :_HEADER]).view(np.int64)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        return headers


@dataclass(frozen=True, slots=True)
class Row:
    """One client's state in a file."""

    file: RowFile
    index: int
    client: int
    checksum: int

    def tensors(self) -> State:
        """Return a copy of the state's tensors by name.

        Raises:
            ConfigurationError: If the file is missing, damaged or overwritten.
        """
        return {name: value[0] for name, value in self.file.read([self]).items()}

    def lost(self) -> ConfigurationError:
        """Return the error for a state that is no longer in its file."""
        return ConfigurationError(
            f"client {self.client}'s memory is not in {self.file.path} any more: it was "
            "overwritten or damaged"
        )


State = dict[str, Tensor]
"""Tensors by name: one client's state, or a stack of them."""
Entry = Row | State
"""One client's state, on disk or in RAM."""
Slots = dict[str, dict[int, Entry]]
"""Slot to client to state."""


class Space:
    """Tracks which rows of a file are free.

    Args:
        length: Number of rows in the file.
        named: Rows that must not be overwritten.
    """

    def __init__(self, length: int, named: set[int]) -> None:
        self._length = length
        self._named = named
        self._free = sorted(set(range(length)) - named, reverse=True)

    def take(self) -> int:
        """Return a free row, or a new one at the end."""
        if self._free:
            return self._free.pop()
        self._length += 1
        return self._length - 1

    def free(self, index: int) -> None:
        """Give back a row, unless it must not be overwritten."""
        if index not in self._named:
            self._free.append(index)


def tensors(entry: Entry) -> State:
    """Return the tensors of a state by name. A state in RAM is not copied."""
    return entry.tensors() if isinstance(entry, Row) else entry


def _unreadable(path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(f"can't read the client memory in {path}: {error.strerror}")


# Checkpoints and their rows


@contextmanager
def named_by(checkpoint: Path, memory: dict[str, Any]) -> Iterator[None]:
    """Protect the rows of a checkpoint, while it is written and afterwards.

    Inside the context, the rows of the replaced checkpoint are protected too.

    Args:
        checkpoint: The path of the checkpoint.
        memory: The result of :meth:`ClientMemory.save`. The path is added to it.

    Raises:
        ConfigurationError: If the list of rows can't be written.
    """
    if not memory.get("files"):
        yield
        return
    folder = Path(memory["folder"])
    memory["beside"] = os.path.relpath(folder, checkpoint.resolve().parent)
    shown = _seen_from(folder, checkpoint)
    tables = folder / TABLES
    stem = hashlib.sha256(shown.encode()).hexdigest()[:16]
    before = set(tables.glob(f"*{stem}-*"))  # also of a write that was killed
    path = tables / f"{stem}-{secrets.token_hex(4)}{_NEXT}"
    try:
        tables.mkdir(exist_ok=True)
        content = json.dumps({"checkpoint": shown, "rows": named_rows(memory)}).encode()
        with replacing(path, durable=True) as partial:
            partial.write_bytes(content + b"\n" + xxhash.xxh3_64_hexdigest(content).encode())
    except OSError as error:
        raise ConfigurationError(
            f"can't write the client memory in {folder}: {error.strerror}"
        ) from error
    yield
    path.rename(path.with_suffix(_WRITTEN))
    gone = {path for path, table in _tables(folder) if not _is_kept(folder, table)}
    for path in before | {path for path in gone if path.suffix != _NEXT}:
        path.unlink(missing_ok=True)


def locate(memory: dict[str, Any], checkpoint: Path) -> None:
    """Find the folder of a checkpoint's client memory. It may have moved along with the file.

    Args:
        memory: The result of :meth:`ClientMemory.save`. Its ``folder`` is set.
        checkpoint: The file of the checkpoint.

    Raises:
        ConfigurationError: If there is no such folder.
    """
    if not memory.get("files"):
        return
    beside = checkpoint.resolve().parent / memory["beside"]
    for folder in (beside.resolve(), Path(memory["folder"])):
        try:
            found = all((folder / name).exists() for name, _ in memory["files"])
        except OSError as error:
            raise _unreadable(folder, error) from error
        if found:
            memory["folder"] = str(folder)
            return
    raise ConfigurationError(
        f"the checkpoint {checkpoint} needs the memory of its clients (client_memory='disk'), "
        f"which is not in {beside.resolve()} any more"
    )


def is_needed(folder: Path) -> bool:
    """Return whether a checkpoint refers to a row in a folder of client memory."""
    return any(True for _ in kept_tables(folder))


def clear(folder: Path) -> None:
    """Remove all client memory from a folder. Then remove the folder if it is empty."""
    for own in {path.parent for path in folder.glob(f"*/*{_ROWS}")} | {folder / TABLES}:
        shutil.rmtree(own, ignore_errors=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def named_rows(memory: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the rows of a checkpoint by file."""
    names = [name for name, _ in memory.get("files", ())]
    rows: dict[str, list[int]] = {name: [] for name in names}
    for held in memory["rows"].values() if names else ():
        for _, file, index, _ in held.tolist():
            rows[names[file]].append(index)
    return rows


def rows_of(memory: Mapping[str, Any], clients: Collection[int] | None) -> Slots:
    """Return the rows of a checkpoint, and check that they still exist."""
    folder = Path(memory["folder"])
    files = [
        RowFile(folder / name, tuple((n, dtype, tuple(shape)) for n, dtype, shape in layout))
        for name, layout in memory["files"]
    ]
    slots: Slots = {slot: {} for slot in memory["rows"]}
    for slot, held in memory["rows"].items():
        for position, file in enumerate(files):
            table = held[held[:, 1] == position].cpu().numpy()
            if clients is not None:
                table = table[np.isin(table[:, 0], list(clients))]
            fits = (file.headers(table[:, 2]) == table[:, [0, 3]]).all(1)
            for (client, _, index, checksum), fit in zip(table.tolist(), fits, strict=True):
                row = Row(file, index, client, checksum)
                if not fit:
                    raise row.lost()
                slots[slot][client] = row
    return slots


def table_of(slots: Slots, folder: Path) -> dict[str, Any]:
    """Return a table of the rows in a folder, as tensors and primitives."""
    files: dict[RowFile, int] = {}
    rows = {
        slot: torch.tensor(
            [
                [row.client, files.setdefault(row.file, len(files)), row.index, row.checksum]
                for row in held.values()
                if isinstance(row, Row)
            ]
        ).view(-1, 4)
        for slot, held in slots.items()
    }
    described = [
        [str(file.path.relative_to(folder)), [[n, d, list(s)] for n, d, s in file.layout]]
        for file in files
    ]
    return {"folder": str(folder), "files": described, "rows": rows}


def kept_tables(folder: Path) -> Iterator[dict[str, list[int]]]:
    """Yield the rows of each checkpoint that still exists, by file.

    Raises:
        ConfigurationError: If a table is damaged.
    """
    for _, table in _tables(folder):
        if _is_kept(folder, table):
            yield table["rows"]


def _tables(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in (folder / TABLES).glob("*"):
        if path.suffix in (_NEXT, _WRITTEN):
            with suppress(FileNotFoundError):  # it was just removed
                yield path, _read_table(path)


@lru_cache(maxsize=32)
def _read_table(path: Path) -> dict[str, Any]:
    try:
        content, _, checksum = path.read_bytes().rpartition(b"\n")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unreadable(path, error) from error
    if checksum != xxhash.xxh3_64_hexdigest(content).encode():
        raise ConfigurationError(
            f"{path} is damaged: it lists the client memory that a checkpoint needs. If you delete "
            "it, resume from that checkpoint before another run writes to this folder and may "
            "overwrite its client memory"
        )
    return json.loads(content)


def _is_kept(folder: Path, table: Mapping[str, Any]) -> bool:
    return (folder.parent / table["checkpoint"]).is_file()


def _seen_from(folder: Path, checkpoint: Path) -> str:
    """Return the path of a checkpoint relative to the run folder. Both may move together."""
    path, run = checkpoint.resolve(), folder.parent
    return str(path.relative_to(run) if path.is_relative_to(run) else path)


def sweep(folder: Path, ours: Collection[Path]) -> None:
    """Remove folders without a running writer and without a checkpoint that needs them."""
    needed = {(folder / name).parent for rows in kept_tables(folder) for name in rows}
    for own in {path.parent for path in folder.glob(f"*/*{_ROWS}")} - needed - {*ours}:
        if locked(own) is not None:
            shutil.rmtree(own)
    for path, table in _tables(folder):
        if not any((folder / name).exists() for name in table["rows"]):
            path.unlink(missing_ok=True)


def locked(folder: Path) -> BaseFileLock | None:
    """Lock a folder while the returned lock is referenced; return ``None`` if already locked."""
    try:
        lock = hold(folder / "lock")
    except BlockingIOError:
        return None
    return lock if folder.exists() else None


def has_links(folder: Path) -> bool:
    """Return whether files of states in a folder have a second hard link, as after a copy."""
    return any(path.stat().st_nlink > 1 for path in folder.glob(f"*{_ROWS}"))


def file_name(slot: str, layout: Layout) -> str:
    """Return the file name for a slot's states of one layout."""
    return f"{slot}-{zlib.crc32(repr(layout).encode()):08x}{_ROWS}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name. It is the same in torch and NumPy."""
    return str(dtype).removeprefix("torch.")


def _checksum(row: NDArray[np.uint8]) -> int:
    """Return the XXH3 checksum of a row."""
    return int.from_bytes(xxhash.xxh3_64_digest(row[_HEADER:].data), signed=True)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT

"""Client memory: each client's states between its participations, in RAM or on disk."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict
from torch import Tensor

from pflight.errors import ConfigurationError
from pflight.states.state import entries

from .distributed import gather, gather_to_first
from .files import sync
from .memory_files import (
    MEMORY,
    Entry,
    Row,
    RowFile,
    Slots,
    Space,
    State,
    dtype_name,
    file_name,
    has_links,
    kept_tables,
    locked,
    named_rows,
    rows_of,
    sweep,
    table_of,
    tensors,
)

if TYPE_CHECKING:
    from filelock import BaseFileLock


class ClientMemory:
    """Named slots with one state per client, in RAM on the rank that owns the client.

    A client's slot is created at its first write. Before that, reading it gives the default. Values
    are copied in and out, and are kept on the CPU.

    Example:
        >>> memory = ClientMemory()
        >>> memory.write("private", torch.tensor([4]), TensorDict({"w": torch.ones(1, 2)}, [1]))
        >>> default = TensorDict({"w": torch.zeros(2, 2)}, [2])
        >>> memory.read("private", torch.tensor([4, 5]), default)["w"]
        tensor([[1., 1.],
                [0., 0.]])
    """

    def __init__(self) -> None:
        self._slots: Slots = {}
        self._unsaved: dict[str, set[int]] = {}  # clients with tensors in no saved state

    def open(self, run_folder: str) -> None:
        """Set the run folder. Memory in RAM does not use it."""

    def write(self, slot: str, clients: Tensor, states: TensorDict) -> None:
        """Keep the states of a stack ``[C]`` for the clients ``[C]``. Replace earlier states."""
        kept, unsaved = self._slots.setdefault(slot, {}), self._unsaved.setdefault(slot, set())
        columns = {name: leaf.detach().cpu() for name, leaf in entries(states)}
        for position, client in enumerate(clients.tolist()):
            own = {name: column[position] for name, column in columns.items()}
            held = kept.get(client)
            if client in unsaved and isinstance(held, dict) and _fits(own, held):
                for name, value in own.items():
                    held[name].copy_(value)  # in place: freeing tensors one by one leaves gaps
            else:
                kept[client] = {name: value.clone() for name, value in own.items()}
                unsaved.add(client)

    def read(self, slot: str, clients: Tensor, default: TensorDict) -> TensorDict:
        """Return the clients' states ``[C]``; a client without one gets its row of ``default``."""
        kept = self._slots.get(slot, {})
        there = [kept[id_] for id_ in clients.tolist() if id_ in kept]
        if not there:
            return default
        defaults = dict(entries(default))
        states = self._stacked(there, defaults)
        columns = {name: states[name].to(leaf.device) for name, leaf in defaults.items()}
        if len(there) < len(clients):
            seen = self.seen(slot, clients)
            order = torch.cat([seen.nonzero(), (~seen).nonzero()]).flatten().argsort()
            for name, leaf in defaults.items():
                columns[name] = torch.cat([columns[name], leaf[~seen]])[order]
        return TensorDict(columns, batch_size=[len(clients)])

    def seen(self, slot: str, clients: Tensor) -> Tensor:
        """Return a mask ``[C]`` of the clients with a written slot."""
        kept = self._slots.get(slot, {})
        return torch.tensor([client in kept for client in clients.tolist()], dtype=torch.bool)

    def state_dict(self) -> Slots:
        """Return all slots, keyed by slot and client: plain dicts of tensors, or rows on disk."""
        self._unsaved.clear()
        return {slot: dict(clients) for slot, clients in self._slots.items()}

    def state_of_all_ranks(self, first_only: bool = False) -> Slots:
        """Return the slots of all ranks together. All ranks have to call it.

        Args:
            first_only: Whether only rank 0 gets all slots. The other ranks then get their own.
        """
        states = gather_to_first(self.state_dict()) if first_only else gather(self.state_dict())
        merged: Slots = {}
        for rank, state in enumerate(states):
            for slot, clients in state.items():
                kept = merged.setdefault(slot, {})
                for client, entry in clients.items():
                    if client not in kept or client % len(states) == rank:  # the owner's state wins
                        kept[client] = entry
        return merged

    def load_state_dict(self, state: Slots, clients: Collection[int] | None = None) -> None:
        """Replace all slots by ``state``, or by its part for ``clients`` if these are given."""
        self._unsaved.clear()
        self._slots = {
            slot: {
                int(client): self._taken_over(entry)
                for client, entry in held.items()
                if clients is None or int(client) in clients
            }
            for slot, held in state.items()
        }

    def save(self) -> dict[str, Any]:
        """Return the slots of all ranks on rank 0, for a checkpoint. All ranks have to call it."""
        return self.state_of_all_ranks(first_only=True)

    def load(self, saved: dict[str, Any], clients: Collection[int] | None = None) -> None:
        """Replace all slots by those of a checkpoint with either kind of memory.

        Args:
            saved: The result of :meth:`save`.
            clients: The clients to load; all by default.

        Raises:
            ConfigurationError: If a state on disk was overwritten or removed since.
        """
        state = rows_of(saved, clients) if "folder" in saved else saved
        self.load_state_dict(state, clients)

    def _stacked(self, kept: Sequence[Entry], names: Iterable[str]) -> State:
        """Return the named tensors of some states, copied and stacked."""
        states = [tensors(entry) for entry in kept]
        return {name: torch.stack([state[name] for state in states]) for name in names}

    def _taken_over(self, entry: Entry) -> Entry:
        if isinstance(entry, Row):
            return entry.tensors()
        return {name: value.cpu() for name, value in entry.items()}


def _fits(new: dict[str, Tensor], old: dict[str, Tensor]) -> bool:
    return new.keys() == old.keys() and all(
        (value.shape, value.dtype) == (old[name].shape, old[name].dtype)
        for name, value in new.items()
    )


class MappedMemory(ClientMemory):
    """A :class:`ClientMemory` on disk. RAM holds only a table of each client's row.

    States are rows of files. The files are mapped into memory for reading. Each process writes its
    own files and reads those of all processes. Rows of an existing checkpoint are never
    overwritten: a client that trains gets another row. So a killed run can be resumed from any of
    its checkpoints. The checkpoints hold the table.

    The folder ``tables`` beside the files lists the rows of each checkpoint. A row on no list is
    free: its checkpoint was removed, or the run was killed before it saved one. If a checkpoint was
    renamed or copied by hand, it has no list until a run is resumed from it.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> memory = MappedMemory()
        >>> one = TensorDict({"w": torch.ones(1, 2)}, [1])
        >>> with TemporaryDirectory() as folder:
        ...     memory.open(folder)
        ...     memory.write("private", torch.tensor([4]), one)
        ...     memory.read("private", torch.tensor([4]), 0 * one)["w"]
        tensor([[1., 1.]])
    """

    def __init__(self) -> None:
        super().__init__()
        self._folder: Path | None = None
        self._own: Path | None = None  # the folder of this process's files
        self._lock: BaseFileLock | None = None  # the lock on that folder
        self._files: dict[Path, RowFile] = {}
        self._spaces: dict[RowFile, Space] = {}
        self._unsynced: set[RowFile] = set()
        self._loaded: dict[str, list[int]] = {}  # rows of all ranks in the loaded checkpoint

    def __getstate__(self) -> dict[str, Any]:  # a copy reads the same rows but writes new ones
        return {**vars(self), "_own": None, "_lock": None, "_spaces": {}}

    def open(self, run_folder: str) -> None:
        """Write to ``memory`` in this folder. The next save copies other rows to it.

        Raises:
            ConfigurationError: If the folder is not on a local file system.
        """
        if "://" in run_folder:
            raise ConfigurationError(
                f"client_memory='disk' needs a default_root_dir on a file system, got {run_folder}"
            )
        folder = Path(run_folder).resolve() / MEMORY
        if folder != self._folder:
            self._folder, self._own, self._lock = folder, None, None
            self._spaces.clear()

    def write(self, slot: str, clients: Tensor, states: TensorDict) -> None:
        """Write the states of a stack ``[C]`` to free rows for the clients ``[C]``.

        Raises:
            ConfigurationError: If the disk is full or not writable.
        """
        columns = {name: leaf.detach().cpu() for name, leaf in sorted(entries(states))}
        layout = tuple((n, dtype_name(c.dtype), tuple(c.shape[1:])) for n, c in columns.items())
        kept = self._slots.setdefault(slot, {})
        with self._disk_errors():
            path = self._own_folder() / file_name(slot, layout)
            file = self._files.setdefault(path, RowFile(path, layout))
            space = self._space(file)
            self._unsynced.add(file)
            indices = (space.take() for _ in clients)
            for row in file.write(indices, clients.tolist(), columns):
                before, kept[row.client] = kept.get(row.client), row
                if isinstance(before, Row) and before.file == file:
                    space.free(before.index)

    def _stacked(self, kept: Sequence[Entry], names: Iterable[str]) -> State:
        files: dict[RowFile, dict[int, Row]] = {}
        for position, entry in enumerate(kept):
            if isinstance(entry, Row):
                files.setdefault(entry.file, {})[position] = entry
        states = list(kept)
        for file, rows in files.items():
            columns = file.read(list(rows.values()))
            if len(rows) == len(kept):
                return {name: columns[name] for name in names}
            for row, position in enumerate(rows):
                states[position] = {name: column[row] for name, column in columns.items()}
        return super()._stacked(states, names)

    def load_state_dict(self, state: Slots, clients: Collection[int] | None = None) -> None:
        """Replace all slots by ``state``. The next save writes states in RAM to disk."""
        super().load_state_dict(state, clients)
        self._spaces.clear()

    def load(self, saved: dict[str, Any], clients: Collection[int] | None = None) -> None:
        """Replace all slots by those of a checkpoint with either kind of memory."""
        super().load(saved, clients)
        self._loaded = named_rows(saved)

    def save(self) -> dict[str, Any]:
        """Return the table of all ranks on rank 0. Its rows are on the disk."""
        assert self._folder is not None
        for slot, kept in self._slots.items():
            for client, entry in kept.items():
                if not (isinstance(entry, Row) and entry.file.path.is_relative_to(self._folder)):
                    state = TensorDict(tensors(entry), batch_size=[]).unsqueeze(0)
                    self.write(slot, torch.tensor([client]), state)
        with self._disk_errors():
            for path in {file.path for file in self._unsynced}:
                for written in (path, path.parent, path.parent.parent):
                    sync(written)
        self._unsynced.clear()
        self._spaces.clear()  # the new checkpoint decides which rows are free
        self._loaded.clear()
        return table_of(super().save(), self._folder)

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigurationError(
                f"can't write the client memory in {self._folder}: {error.strerror}"
            ) from error

    def _taken_over(self, entry: Entry) -> Entry:
        return entry if isinstance(entry, Row) else super()._taken_over(entry)

    def _rows(self) -> Iterator[Row]:
        for kept in self._slots.values():
            yield from (entry for entry in kept.values() if isinstance(entry, Row))

    def _space(self, file: RowFile) -> Space:
        """Return the free rows of one of this process's files."""
        if file not in self._spaces:
            assert self._folder is not None
            named = {row.index for row in self._rows() if row.file == file}
            name = str(file.path.relative_to(self._folder))
            for rows in (self._loaded, *kept_tables(self._folder)):
                named.update(rows.get(name, ()))
            self._spaces[file] = Space(file.length, named)
        return self._spaces[file]

    def _own_folder(self) -> Path:
        """Return the folder that only this process writes to.

        If possible, take over a folder with this memory's rows from a process that has ended. Files
        with a second hard link belong to a copy of the run, too. They are not written to.
        """
        if self._own is not None and has_links(self._own):
            self._own = self._lock = None
            self._spaces.clear()
        if self._own is None:
            assert self._folder is not None
            ours = {row.file.path.parent for row in self._rows()}
            left = [path for path in sorted(ours) if path.parent == self._folder]
            if not any(self._claim(path) for path in left if not has_links(path)):
                sweep(self._folder, ours)
                while not self._claim(self._folder / secrets.token_hex(8)):
                    pass
        assert self._own is not None
        return self._own

    def _claim(self, folder: Path) -> bool:
        folder.mkdir(parents=True, exist_ok=True)
        if (lock := locked(folder)) is not None:
            self._own, self._lock = folder, lock
        return lock is not None

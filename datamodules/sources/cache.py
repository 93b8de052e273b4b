"""A cache of samples that are parsed once, kept on disk and memory-mapped."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import stat
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import ceil, prod
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pflight.datamodules.partitions.dealing import Ints
from pflight.datamodules.partitions.samples import Samples
from pflight.errors import ConfigurationError
from pflight.runs.locks import held

_FORMAT = 2
_BLOCK = 1 << 18  # approximate bytes of features per checksum
_FEATURES, _CHECKSUMS = "x.npy", "checksums.json"
_COLUMNS = "y.npy", "groups.npy", "test.npy", "names.json"

_Read = TypeVar("_Read")


class SampleWriter:
    """Appends samples to a cache that is being built; ``build`` of :func:`cached_samples` gets it.

    Args:
        file: Where the features go, in numpy's format.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._labels: list[Ints] = []
        self._sizes: list[int] = []
        self._groups: list[str] = []
        self._test: list[bool] = []

    @property
    def num_samples(self) -> int:
        """Number of samples so far."""
        return sum(self._sizes)

    def add(self, x: NDArray[Any], y: Ints, group: str, test: bool = False) -> None:
        """Append samples of one group.

        Args:
            x: Features ``[n, ...]``, of one shape and type for all samples of the cache.
            y: Labels ``[n]``.
            group: Who made the samples; a group may come in several parts.
            test: Whether they belong to the data set's own test set.

        Raises:
            ValueError: The shapes or types don't fit.
        """
        if not self._labels:
            self._shape, self._dtype = x.shape[1:], x.dtype
            self._write_header(0)
            self._start = self._file.tell()
        if x.shape != (len(y), *self._shape) or x.dtype != self._dtype:
            raise ValueError(
                f"{len(y)} samples need x of shape {(len(y), *self._shape)} and type "
                f"{self._dtype}, got {x.shape} and {x.dtype}"
            )
        self._file.write(np.ascontiguousarray(x).data)
        self._labels.append(y.astype(np.int64))
        self._sizes.append(len(y))
        self._groups.append(group)
        self._test.append(test)

    def finish(self, cache: str) -> dict[str, bytes]:
        """Complete the file of features and return the content of the other files, by name.

        Args:
            cache: The name of the cache, which is written with the checksums.
        """
        self._file.seek(0)
        self._write_header(self.num_samples)
        features = self._features()
        names = sorted(set(self._groups))
        number = {name: position for position, name in enumerate(names)}
        groups = np.array([number[name] for name in self._groups])
        contents = {
            "y.npy": _npy(np.concatenate(self._labels)),
            "groups.npy": _npy(np.repeat(groups, self._sizes)),
            "test.npy": _npy(np.repeat(self._test, self._sizes)),
            "names.json": json.dumps(names).encode(),
        }
        columns = {column: [len(content), crc32(content)] for column, content in contents.items()}
        written = {"cache": cache, "columns": columns, "features": features}
        checksums = {"checksum": _checksum(written), "written": written}
        return contents | {_CHECKSUMS: json.dumps(checksums).encode()}

    def _features(self) -> dict[str, Any]:
        """Return the size of the file of features and the checksums of its header and blocks."""
        row = self._dtype.itemsize * prod(self._shape)
        rows = max(1, _BLOCK // max(1, row))
        self._file.seek(0)
        return {
            "header": [self._start, crc32(self._file.read(self._start))],
            "rows": rows,
            "blocks": [
                crc32(self._file.read(rows * row)) for _ in range(ceil(self.num_samples / rows))
            ],
            "size": self._file.tell(),
        }

    def _write_header(self, length: int) -> None:
        """Write numpy's header, with room for any ``length``."""
        descr = np.lib.format.dtype_to_descr(self._dtype)
        header = {"shape": (length, *self._shape), "fortran_order": False, "descr": descr}
        np.lib.format.write_array_header_1_0(self._file, header)


class CachedRows:
    """The features of a cache, mapped from its file; each block is verified when it is first read.

    If a block is damaged, the cache is built again.

    Args:
        cache: The cache.
    """

    def __init__(self, cache: _Cache) -> None:
        self._cache = cache
        self._map()

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Return the features ``[m, ...]`` of some rows ``[m]``.

        Raises:
            ConfigurationError: They are damaged, and the cache can't be built again.
        """
        try:
            return self._read(rows)
        except _DamagedError as damage:
            return self._cache.mended(partial(self._read_anew, rows), damage)

    def __getstate__(self) -> dict[str, Any]:
        return {"_cache": self._cache}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()

    def _map(self) -> None:
        path = self._cache.path / _FEATURES
        self._written = self._cache.checksums()["features"]
        length, checksum = self._written["header"]
        _check_size(path, self._written["size"])
        with path.open("rb") as file:
            _check(file.read(length), checksum, f"the header of {_FEATURES}")
        self._x = np.load(path, mmap_mode="c")
        self._unverified = set(range(len(self._written["blocks"])))

    def _read(self, rows: Tensor) -> Tensor:
        if self._x.base.size() < self._written["size"]:  # a missing page would crash the process
            raise _DamagedError(f"{_FEATURES} is cut off")
        if self._unverified:
            size = self._written["rows"]
            read = np.unique(rows.numpy() // size).tolist()
            for block in self._unverified.intersection(read):
                content, checksum = self._x[block * size :][:size], self._written["blocks"][block]
                _check(content.data, checksum, f"block {block} of {_FEATURES}")
                self._unverified.discard(block)
        return torch.from_numpy(self._x)[rows]

    def _read_anew(self, rows: Tensor) -> Tensor:
        """Read rows from the file that is there now."""
        written = self._written
        try:
            self._map()
        except Exception as error:
            raise _DamagedError(_reason(error)) from error
        if self._written != written:
            raise ConfigurationError("what was built is not what was opened; start again")
        return self._read(rows)


def cached_samples(
    folder: Path,
    name: str,
    sources: Sequence[Path],
    options: Mapping[str, Any],
    build: Callable[[SampleWriter], None],
    num_labels: int,
) -> Samples:
    """Open the cache of some files; if there is none, build it first.

    Features are read from a file, so only features in use take memory. The names are sorted.

    A cache is identified by the paths of its sources, relative to ``folder``, by their sizes and
    modification times, and by the options. If the sources change, the cache is replaced. Other
    options have another cache. A cache is written to a temporary folder, and renamed when it is
    complete. If several processes start at once, one builds and the others wait. All content has
    checksums. Checksums of features are verified when a block is first read, all others when the
    cache is opened. A damaged cache is built again, with a warning.

    Args:
        folder: The folder of all caches, which is created if it is missing.
        name: First part of the cache's name.
        sources: Files that the samples come from; a folder stands for the files in it.
        options: Further values that the samples depend on, as JSON.
        build: Adds all samples to a writer, the same ones each time.
        num_labels: Labels are ``0 .. num_labels - 1``.

    Returns:
        The samples in the order of their addition; ``test`` is ``None`` if none is a test sample.

    Raises:
        ConfigurationError: The cache can't be written, or is damaged and can't be built again.
            Other errors are those of ``build``.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> def build(writer):
        ...     writer.add(np.zeros((2, 1, 28, 28)), np.array([3, 1]), "zoe")
        >>> with TemporaryDirectory() as folder:
        ...     samples = cached_samples(Path(folder), "digits", [], {}, build, num_labels=10)
        >>> samples.y.tolist(), samples.names
        ([3, 1], ['zoe'])
    """
    cache = _Cache(folder, name, sources, options, build, num_labels)
    try:
        return cache.opened()
    except _DamagedError as damage:
        return cache.mended(cache.opened, damage)


class _DamagedError(Exception):
    """A cache is missing or damaged."""


class _Cache:
    """The place of a cache and how to build it; arguments as in :func:`cached_samples`."""

    def __init__(
        self,
        folder: Path,
        name: str,
        sources: Sequence[Path],
        options: Mapping[str, Any],
        build: Callable[[SampleWriter], None],
        num_labels: int,
    ) -> None:
        self._folder = folder
        self._name = name
        self._sources = sources
        self._options = options
        self._build = build
        self._num_labels = num_labels
        self.path = self._place()

    def opened(self) -> Samples:
        """Open the cache as it is.

        Raises:
            _DamagedError: It is damaged, or not there.
        """
        try:
            written = self.checksums()["columns"]
            contents = [_content(self.path / column, *written[column]) for column in _COLUMNS]
            y, groups, test = (np.load(io.BytesIO(content)) for content in contents[:3])
            names = json.loads(contents[3])
            x = CachedRows(self)
            complete = len(x) == len(y) == len(groups) == len(test)
            if not complete or not 0 <= groups.min() <= groups.max() < len(names):
                raise ValueError("its files don't fit one another")
            if not 0 <= y.min() <= y.max() < self._num_labels:
                raise ValueError(
                    f"labels {y.min()} to {y.max()}, expected 0 to {self._num_labels - 1}"
                )
            test = test if test.any() else None
            return Samples(x, torch.from_numpy(y), groups, test, None, names)
        except Exception as error:  # numpy's reader raises many kinds of errors on damaged files.
            raise _DamagedError(_reason(error)) from error

    def checksums(self) -> dict[str, Any]:
        """Return the sizes and checksums that were written with the cache."""
        path = self.path / _CHECKSUMS
        _check_size(path)
        checksums = json.loads(path.read_bytes())
        written: dict[str, Any] = checksums["written"]
        if checksums["checksum"] != _checksum(written):
            raise ValueError(f"{_CHECKSUMS} does not match its checksum")
        if written["cache"] != self.path.name:
            raise ValueError(f"it holds the files of {written['cache']}")
        return written

    def mended(self, read: Callable[[], _Read], damage: _DamagedError) -> _Read:
        """Read a damaged or missing part again, after this or another process has rebuilt it.

        Args:
            read: Reads it; raises a ``_DamagedError`` if it is still damaged.
            damage: The damage that was found.

        Returns:
            The result of ``read``.

        Raises:
            ConfigurationError: The cache can't be built.
        """
        was_there = os.path.lexists(self.path)
        trouble = f"{self.path} is damaged ({damage})"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with held(self._folder / f"{self._name}.lock"):
                with suppress(_DamagedError):
                    return read()
                if os.path.lexists(self.path):
                    warnings.warn(f"{trouble}; building it again", stacklevel=4)
                self._write()
                return read()
        except _DamagedError as error:
            raise ConfigurationError(
                f"{self.path} is damaged right after it was built ({error})"
            ) from error
        except ConfigurationError as error:
            if not was_there:
                raise
            raise ConfigurationError(f"{trouble} and can't be built again: {error}") from error
        except OSError as error:
            raise ConfigurationError(
                f"{f'{trouble}, and ' if was_there else ''}can't write the cache "
                f"{error.filename or self.path}: {error.strerror or error}; cache_dir sets another "
                "folder"
            ) from error

    def _write(self) -> None:
        """Build the cache in a temporary folder, and move it to its place."""
        if self._place() != self.path:
            raise ConfigurationError("its source files have changed; start again")
        for leftover in self._folder.glob(f"{self._name}-*.partial"):
            _remove(leftover)
        unfinished = self.path.with_name(f"{self.path.name}.partial")
        unfinished.mkdir()
        try:
            with (unfinished / _FEATURES).open("w+b") as file:
                writer = SampleWriter(file)
                self._build(writer)
                if not writer.num_samples:
                    raise ConfigurationError(
                        f"{self._name}: there are no samples in {self._sources[0].parent}"
                    )
                contents = writer.finish(self.path.name)
                _sync(file)
            for column, content in contents.items():
                with (unfinished / column).open("wb") as file:
                    file.write(content)
                    _sync(file)
            _remove(self.path)
            unfinished.rename(self.path)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        for outdated in self._folder.glob(f"{self.path.name.rpartition('-')[0]}-*"):
            if outdated != self.path:
                _remove(outdated)

    def _place(self) -> Path:
        """Return the path of the cache for the sources as they are now."""
        names = [os.path.relpath(path, self._folder) for path in self._sources]
        which = _digest([_FORMAT, names, dict(self._options)])
        version = _digest([facts for path in self._sources for facts in _facts(path)])
        return self._folder / f"{self._name}-{which}-{version}"


def _facts(path: Path) -> list[tuple[str, int, int]]:
    """Return name, size and modification time of a file, or of all files in a folder."""
    try:
        entries = list(os.scandir(path)) if path.is_dir() else [path]
        found = [(entry.name, entry.stat()) for entry in entries]
    except OSError as error:
        raise ConfigurationError(
            f"can't read {error.filename or path}: {error.strerror}"
        ) from error
    return sorted((name, status.st_size, status.st_mtime_ns) for name, status in found)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def _content(path: Path, size: int, checksum: int) -> bytes:
    """Return the content of a file after verifying its checksum."""
    _check_size(path, size)
    content = path.read_bytes()
    _check(content, checksum, path.name)
    return content


def _check_size(path: Path, size: int | None = None) -> None:
    """Raise unless this is a regular file of the size given; other kinds may have no end."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path.name} is not a file")
    if size not in (None, status.st_size):
        raise ValueError(f"{path.name} has {status.st_size} bytes, and had {size}")


def _check(content: bytes | memoryview, checksum: int, name: str) -> None:
    if crc32(content) != checksum:
        raise _DamagedError(f"{name} does not match its checksum")


def _checksum(written: dict[str, Any]) -> int:
    return crc32(json.dumps(written).encode())


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _remove(path: Path) -> None:
    """Remove a folder, or anything else in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(file: BinaryIO) -> None:
    """Wait until a file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def _npy(values: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values)
    return buffer.getvalue()

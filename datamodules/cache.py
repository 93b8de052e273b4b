"""Samples that are parsed once and kept on disk, memory-mapped."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from pflight.errors import ConfigurationError

from .dealing import Ints
from .samples import Samples

_FORMAT = 1


@dataclass(frozen=True)
class CachedSamples(Samples):
    """Samples whose features are mapped from a file; only those in use take memory.

    Attributes:
        names: The sorted names of the groups; a sample's group is a position in this list.
    """

    names: Sequence[str] = ()


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

    def finish(self) -> dict[str, bytes]:
        """Complete the features' file and return the content of the others, by name."""
        self._file.seek(0)
        self._write_header(self.num_samples)
        names = sorted(set(self._groups))
        number = {name: position for position, name in enumerate(names)}
        groups = np.array([number[name] for name in self._groups])
        return {
            "y.npy": _npy(np.concatenate(self._labels)),
            "groups.npy": _npy(np.repeat(groups, self._sizes)),
            "test.npy": _npy(np.repeat(self._test, self._sizes)),
            "names.json": json.dumps(names).encode(),
        }

    def _write_header(self, length: int) -> None:
        """Write numpy's header, in which there is room for any ``length``."""
        descr = np.lib.format.dtype_to_descr(self._dtype)
        header = {"shape": (length, *self._shape), "fortran_order": False, "descr": descr}
        np.lib.format.write_array_header_1_0(self._file, header)


def cached_samples(
    folder: Path,
    name: str,
    sources: Sequence[Path],
    options: Mapping[str, Any],
    build: Callable[[SampleWriter], None],
) -> CachedSamples:
    """Open the cache of some files; if there is none, build it first.

    A cache belongs to its sources' names, sizes and times of change, and to the options. When the
    sources change, it is replaced; other options have another cache. It is written beside its place
    and renamed when it is complete. Of several processes that start at once, one builds and the
    others wait. A damaged cache is built anew, with a warning.

    Args:
        folder: Where caches are kept; it is made if it is missing.
        name: What a cache's name starts with.
        sources: Files that the samples come from; a folder stands for the files in it.
        options: What else the samples depend on, in values that JSON has.
        build: Adds all samples to a writer.

    Returns:
        The samples in the order in which they were added; ``test`` is ``None`` if none of them is
        a test sample.

    Raises:
        ConfigurationError: The cache can't be written. Other errors are those of ``build``.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> def build(writer):
        ...     writer.add(np.zeros((2, 1, 28, 28)), np.array([3, 1]), "zoe")
        >>> with TemporaryDirectory() as folder:
        ...     samples = cached_samples(Path(folder), "digits", [], {}, build)
        >>> samples.y.tolist(), samples.names
        ([3, 1], ['zoe'])
    """
    from filelock import FileLock

    path, versions = _place(folder, name, sources, options)
    with suppress(_DamagedError):
        return _opened(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{name}.lock"):
            try:
                return _opened(path)
            except _DamagedError as damage:
                if path.exists():
                    warnings.warn(f"{path} is damaged ({damage}); it is built anew", stacklevel=2)
                    shutil.rmtree(path)
            _build(path, name, sources, build)
            for outdated in folder.glob(versions):
                if outdated != path:
                    shutil.rmtree(outdated)
            return _opened(path)
    except OSError as error:
        raise ConfigurationError(
            f"can't write the cache {error.filename or path}: {error.strerror or error}; cache_dir "
            "sets another folder"
        ) from error


class _DamagedError(Exception):
    """A cache is not there, or not complete."""


def _place(
    folder: Path, name: str, sources: Sequence[Path], options: Mapping[str, Any]
) -> tuple[Path, str]:
    """Return where a cache is, and the pattern of those of other versions of its sources."""
    names = [(path.parent.name, path.name) for path in sources]
    which = _digest([_FORMAT, names, dict(options)])
    version = _digest([facts for path in sources for facts in _facts(path)])
    return folder / f"{name}-{which}-{version}", f"{name}-{which}-*"


def _facts(path: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of change of a file, or of all files in a folder."""
    try:
        entries = list(os.scandir(path)) if path.is_dir() else [path]
        found = [(entry.name, entry.stat()) for entry in entries]
    except OSError as error:
        raise ConfigurationError(
            f"can't read {error.filename or path}: {error.strerror}"
        ) from error
    return sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def _opened(path: Path) -> CachedSamples:
    try:
        x = np.load(path / "x.npy", mmap_mode="c")
        y, groups, test = (np.load(path / f"{column}.npy") for column in ("y", "groups", "test"))
        names = json.loads((path / "names.json").read_bytes())
        complete = len(x) == len(y) == len(groups) == len(test)
        if not complete or not 0 <= groups.min() <= groups.max() < len(names):
            raise ValueError("its files don't fit one another")
        return CachedSamples(
            torch.from_numpy(x),
            torch.from_numpy(y),
            groups,
            test if test.any() else None,
            None,
            names,
        )
    except Exception as error:  # numpy's reader raises many kinds on damaged files.
        raise _DamagedError(" ".join(str(error).split())) from error


def _build(
    path: Path, name: str, sources: Sequence[Path], build: Callable[[SampleWriter], None]
) -> None:
    for leftover in path.parent.glob(f"{name}-*.partial"):
        shutil.rmtree(leftover)
    partial = path.with_name(f"{path.name}.partial")
    partial.mkdir()
    try:
        with (partial / "x.npy").open("wb") as file:
            writer = SampleWriter(file)
            build(writer)
            if not writer.num_samples:
                raise ConfigurationError(f"{name}: there are no samples in {sources[0].parent}")
            contents = writer.finish()
            _sync(file)
        for column, content in contents.items():
            with (partial / column).open("wb") as file:
                file.write(content)
                _sync(file)
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(file: BinaryIO) -> None:
    """Wait until a file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def _npy(values: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values)
    return buffer.getvalue()

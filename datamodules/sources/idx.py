"""The idx format of the MNIST family, plain or gzipped, and data sets that come in it."""

from __future__ import annotations

import gzip
import io
import math
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pflight.errors import ConfigurationError

from .images import ImageDataModule, LabelledImages
from .root import is_file

_UNSIGNED_BYTES = 8
_MOST_VALUES = 1 << 30  # EMNIST's largest file has 547 million


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an idx file of unsigned bytes.

    The format is two zero bytes, a type code (8), the number of dimensions, each dimension as a
    big-endian 32-bit integer, and the values in C order. No more is read than the header promises.

    Args:
        path: A plain file, or a gzipped one if its name ends in ``.gz``.

    Returns:
        The array that the header describes.

    Raises:
        ConfigurationError: The file is truncated, too long or not in this format.
    """
    if not is_file(path):
        raise ConfigurationError(f"{path} is not there")
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            shape = _shape(file, path)
            values = file.read(math.prod(shape) + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigurationError(f"{path} is damaged: {error}") from error
    if len(values) != math.prod(shape):
        found = "more" if len(values) > math.prod(shape) else len(values)
        raise ConfigurationError(
            f"{path} is damaged: its header promises {math.prod(shape)} values of shape "
            f"{list(shape)}, it has {found}"
        )
    return np.frombuffer(values, dtype=np.uint8).reshape(shape)


def _shape(file: io.BufferedIOBase, path: Path) -> tuple[int, ...]:
    """Read an idx file's header, and return the shape of the values that follow."""
    start = file.read(4)
    dimensions = start[3] if len(start) > 3 else 0
    sizes = file.read(4 * dimensions)
    if start[:3] != bytes([0, 0, _UNSIGNED_BYTES]) or not dimensions or len(sizes) < 4 * dimensions:
        raise ConfigurationError(f"{path} is not an idx file of unsigned bytes")
    shape = tuple(int(size) for size in np.frombuffer(sizes, dtype=">u4"))
    if math.prod(shape) > _MOST_VALUES:
        raise ConfigurationError(
            f"{path} is damaged: its header promises {math.prod(shape)} values of shape "
            f"{list(shape)}, more than any data set of this family has"
        )
    return shape


class IdxDataModule(ImageDataModule):
    """Gray images of 28 x 28 pixels in four idx files: images and labels, for training and testing.

    A data set of one's own also sets :attr:`prefixes` and defines :meth:`folders`. The arguments
    are those of :class:`ImageDataModule`.
    """

    shape = (1, 28, 28)

    prefixes: tuple[str, str]
    """The prefixes of the names of the training files and of the test files."""

    def folders(self) -> list[Path]:
        """Return the folders to look for the files in."""
        raise NotImplementedError(f"{type(self).__name__} must define folders()")

    def missing(self) -> str | None:
        """See :meth:`ImageDataModule.missing`."""
        names = [name for prefix in self.prefixes for name in _pair(prefix)]
        missing = [name for name in names if self._find(name) is None]
        if not missing:
            return None
        folders = " and ".join(str(folder) for folder in self.folders())
        return f"{self.title}'s {', '.join(missing)} (plain or .gz) not found in {folders}"

    def read(self) -> Iterator[LabelledImages]:
        """See :meth:`ImageDataModule.read`."""
        for prefix in self.prefixes:
            images, labels = (path for name in _pair(prefix) if (path := self._find(name)))
            yield LabelledImages(
                source=f"{images} with {labels.name}",
                pixels=read_idx(images)[:, np.newaxis],
                labels=read_idx(labels).astype(np.int64),
                test=prefix == self.prefixes[1],
            )

    def _find(self, name: str) -> Path | None:
        paths = [folder / file for folder in self.folders() for file in (name, f"{name}.gz")]
        return next((path for path in paths if is_file(path)), None)


def _pair(prefix: str) -> tuple[str, str]:
    return f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"

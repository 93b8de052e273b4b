"""The idx format of the MNIST family, plain or gzipped, and data sets that come in it."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pflight.errors import ConfigurationError

from .images import ImageDataModule, LabelledImages

_UNSIGNED_BYTES = 8


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an idx file of unsigned bytes.

    The format is two zero bytes, a type code (8), the number of dimensions, each dimension as a
    big-endian 32-bit integer, and the values in C order.

    Args:
        path: A plain file, or a gzipped one if its name ends in ``.gz``.

    Returns:
        The array that the header describes.

    Raises:
        ConfigurationError: The file is truncated or not in this format.
    """
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigurationError(f"{path} is damaged: {error}") from error
    dimensions = content[3] if len(content) > 3 else 0
    start = 4 + 4 * dimensions
    if content[:3] != bytes([0, 0, _UNSIGNED_BYTES]) or not dimensions or len(content) < start:
        raise ConfigurationError(f"{path} is not an idx file of unsigned bytes")
    shape = tuple(int(size) for size in np.frombuffer(content[4:start], dtype=">u4"))
    if len(content) != start + math.prod(shape):
        raise ConfigurationError(
            f"{path} is damaged: its header promises {math.prod(shape)} values of shape "
            f"{list(shape)}, it has {len(content) - start}"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


class IdxDataModule(ImageDataModule):
    """Gray images of 28 x 28 pixels in four idx files: images and labels, for training and testing.

    A data set of one's own also sets :attr:`prefixes` and defines :meth:`folders`. The arguments
    are those of :class:`ImageDataModule`.
    """

    shape = (1, 28, 28)

    prefixes: tuple[str, str]
    """What the names of the training files and of the test files start with."""

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
        return next((path for path in paths if path.is_file()), None)


def _pair(prefix: str) -> tuple[str, str]:
    return f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"

"""The idx format of the MNIST family, plain or gzipped."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pflight.errors import ConfigurationError

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

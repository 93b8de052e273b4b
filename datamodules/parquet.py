"""Parquet files with images, in the layout of Hugging Face's data sets."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pflight.errors import ConfigurationError

_ROWS_AT_ONCE = 1024
_SHARD = re.compile(r"(?P<name>.+)-\d{5}-of-(?P<count>\d{5})\.parquet")


def parquet_files(folder: Path, pattern: str = "**/*.parquet") -> list[Path]:
    """Return the parquet files of a folder, sorted.

    Args:
        folder: The folder; it need not exist.
        pattern: Which of its files; by default all, also those in folders inside it.

    Raises:
        ConfigurationError: Files are called ``...-of-00003.parquet``, and one of the three is
            missing.
    """
    files = sorted(path for path in folder.glob(pattern) if path.is_file())
    for path in files:
        if shard := _SHARD.fullmatch(path.name):
            for number in range(int(shard["count"])):
                other = path.with_name(f"{shard['name']}-{number:05}-of-{shard['count']}.parquet")
                if not other.is_file():
                    raise ConfigurationError(f"{other} is missing: {path.name} is there")
    return files


def parquet_columns(path: Path) -> list[str]:
    """Return the names of a parquet file's columns.

    Raises:
        ConfigurationError: The file is damaged, or pyarrow is not installed.
    """
    pyarrow, parquet = _pyarrow(path)
    try:
        return list(parquet.read_schema(path).names)
    except (OSError, pyarrow.ArrowException) as error:
        raise _damaged(path, error) from error


def read_parquet(path: Path, columns: Sequence[str]) -> Iterator[dict[str, list[Any]]]:
    """Read some columns of a parquet file, a batch of rows at a time.

    Args:
        path: The file.
        columns: Names of the columns to read.

    Yields:
        The values of each column, in the order of the rows. An image (a struct of ``bytes`` and
        ``path``) is its bytes.

    Raises:
        ConfigurationError: The file is damaged, lacks a column or a value, or pyarrow is not
            installed.
    """
    pyarrow, parquet = _pyarrow(path)
    present = parquet_columns(path)
    missing = [name for name in columns if name not in present]
    if missing:
        raise ConfigurationError(
            f"{path} has no column {', '.join(missing)}; its columns are {', '.join(present)}"
        )
    first_row = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=list(columns)):
                values = {name: _plain(batch.column(name).to_pylist()) for name in columns}
                for name in columns:
                    if None in values[name]:
                        row = first_row + values[name].index(None)
                        raise ConfigurationError(f"{path}: row {row} has no {name}")
                first_row += len(batch)
                yield values
    except (OSError, pyarrow.ArrowException) as error:
        raise _damaged(path, error) from error


def decode_image(content: bytes, name: str, mode: Literal["L", "RGB"]) -> NDArray[np.uint8]:
    """Decode a JPEG, a PNG, or another image that Pillow reads.

    Args:
        content: The image file's bytes.
        name: What to call the image in an error: its file, or a file and a row.
        mode: ``"L"`` for gray, ``"RGB"`` for colours; other images are converted.

    Returns:
        Pixels ``[H, W]`` or ``[H, W, 3]``.

    Raises:
        ConfigurationError: The image can't be decoded.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        return np.array(Image.open(io.BytesIO(content)).convert(mode))
    except UnidentifiedImageError as error:
        raise ConfigurationError(f"{name} is not an image that Pillow knows") from error
    except Exception as error:  # Pillow's decoders raise a dozen kinds on damaged files.
        raise ConfigurationError(f"{name} is a damaged image: {error}") from error


def _plain(values: list[Any]) -> list[Any]:
    """Replace images by their bytes."""
    return [value.get("bytes") if isinstance(value, dict) else value for value in values]


def _pyarrow(path: Path) -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigurationError(
            f'{path} is a parquet file, which needs pyarrow: pip install "pflight[hf]"'
        ) from error
    return pyarrow, parquet


def _damaged(path: Path, error: Exception) -> ConfigurationError:
    reason = " ".join(str(error).split())
    return ConfigurationError(f"{path} is damaged: {reason}")

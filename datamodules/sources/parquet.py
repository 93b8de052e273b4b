"""Parquet files with images, in the layout of Hugging Face's data sets."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from pflight.errors import ConfigurationError

from .root import is_file

_ROWS_AT_ONCE = 1024
_BYTES_AT_ONCE = 1 << 28
_MOST_PIXELS = 1 << 24
_SHARD = re.compile(r"(?P<name>.+)-\d{5}-of-(?P<count>\d{5})\.parquet")


def parquet_files(
    folder: Path, pattern: str = "**/*.parquet", unfinished: Path | None = None
) -> list[Path]:
    """Return the parquet files of a folder, sorted.

    Args:
        folder: The folder; it need not exist.
        pattern: Which of its files; by default all, also those in folders inside it.
        unfinished: A folder with files that don't count.

    Raises:
        ConfigurationError: Files are called ``...-of-00003.parquet``, and one of the three is
            missing, or is also in another folder or in a set of another number. Or other files
            share name and size, or something with such a name is not a file.
    """
    found = [path for path in sorted(folder.glob(pattern)) if unfinished not in path.parents]
    files = [
        path for path in found if (_SHARD.match(path.name) or not path.is_dir()) and is_file(path)
    ]
    named: dict[str, Path] = {}
    for path in files:
        name, parts = _parts(path)
        for part in parts:
            if not part.is_file():
                raise ConfigurationError(f"{part} is missing: {path.name} is there")
        if (first := named.setdefault(name, path)) not in parts:
            raise ConfigurationError(f"{first} and {path} are the same data twice; remove one")
    return files


def parquet_columns(path: Path) -> list[str]:
    """Return the names of a parquet file's columns.

    Raises:
        ConfigurationError: The file is damaged, or pyarrow is not installed.
    """
    parquet = _pyarrow(path)
    try:
        return list(parquet.read_schema(path).names)
    except Exception as error:  # the file's text may be damaged, too.
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
        ConfigurationError: The file is damaged, lacks a column or a value, has rows too large for
            images, or pyarrow is not installed.
    """
    parquet = _pyarrow(path)
    present = parquet_columns(path)
    missing = [name for name in columns if name not in present]
    if missing:
        raise ConfigurationError(
            f"{path} has no column {', '.join(missing)}; its columns are {', '.join(present)}"
        )
    first_row = 0
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            at_once = _rows_at_once(path, file.metadata)
            for batch in file.iter_batches(at_once, columns=list(columns)):
                values = {name: _plain(batch.column(name).to_pylist()) for name in columns}
                for name in columns:
                    if None in values[name]:
                        row = first_row + values[name].index(None)
                        raise ConfigurationError(f"{path}: row {row} has no {name}")
                    for row, value in enumerate(values[name], first_row):
                        if isinstance(value, float) and math.isnan(value):
                            raise ConfigurationError(f"{path}: {name} of row {row} is NaN")
                first_row += len(batch)
                yield values
    except ConfigurationError:
        raise
    except Exception as error:  # pyarrow's own, or those of damaged text.
        raise _damaged(path, error) from error


def read_table(
    path: Path, key: str, remedy: str = ""
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Read a small parquet file at once, and the facts that were written with it.

    Args:
        path: The file.
        key: The name of the facts among the file's metadata. They are a mapping, as JSON.
        remedy: The end of an error about damage or missing facts.

    Returns:
        The columns by name, ``[n]`` each, and the facts. Texts are objects, and a missing number is
        NaN.

    Raises:
        ConfigurationError: The file is damaged or too large, has no such facts, or pyarrow is not
            installed.
    """
    parquet = _pyarrow(path)
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            if _size(file.metadata) > _BYTES_AT_ONCE:
                raise ConfigurationError(f"{path} is too large: it takes more than 256 MiB")
            table = file.read()
        facts = json.loads((table.schema.metadata or {}).get(key.encode(), b"null"))
        columns = {name: table.column(name).to_numpy() for name in table.column_names}
    except ConfigurationError:
        raise
    except Exception as error:  # pyarrow's own, or those of damaged text.
        raise _damaged(path, error, remedy) from error
    if not isinstance(facts, dict):
        raise ConfigurationError(
            f"{path} has no facts about {key}: pflight has not written it{remedy}"
        )
    return columns, facts


def _groups(metadata: Any) -> list[Any]:
    """Return what a file says about its groups of rows."""
    return [metadata.row_group(number) for number in range(metadata.num_row_groups)]


def _size(metadata: Any) -> int:
    """Return the number of bytes of a file's columns, as the file says."""
    return sum(group.total_byte_size for group in _groups(metadata))


def _rows_at_once(path: Path, metadata: Any) -> int:
    """Return the number of rows to read at once, so that large rows don't fill the memory."""
    groups = _groups(metadata)
    row = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
    if row > _BYTES_AT_ONCE:
        raise ConfigurationError(f"{path} has rows of {row >> 20} MiB; they are no images")
    return min(_ROWS_AT_ONCE, _BYTES_AT_ONCE // max(row, 1))


def decode_image(
    content: bytes, name: str, mode: Literal["L", "RGB"], size: tuple[int, int] | None = None
) -> NDArray[np.uint8]:
    """Decode a JPEG, a PNG, or another image that Pillow reads.

    Args:
        content: The image file's bytes.
        name: What to call the image in an error: its file, or a file and a row.
        mode: ``"L"`` for gray, ``"RGB"`` for colours; other images are converted.
        size: Height and width that it must have; ``None`` allows up to 16 million pixels.

    Returns:
        Pixels ``[H, W]`` or ``[H, W, 3]``.

    Raises:
        ConfigurationError: The image is damaged, or has another size.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(content))
        if image.format == "PNG":
            _check_png(content)
        found = image.height, image.width
        if found == size or (size is None and math.prod(found) <= _MOST_PIXELS):
            return np.array(image.convert(mode))
    except UnidentifiedImageError as error:
        raise ConfigurationError(f"{name} is not an image that Pillow knows") from error
    except Exception as error:  # Pillow's decoders raise many kinds of errors on damaged files.
        raise ConfigurationError(f"{name} is a damaged image: {error}") from error
    expected = "at most 16 million" if size is None else f"{size[1]} x {size[0]}"
    raise ConfigurationError(
        f"{name} is an image of {found[1]} x {found[0]} pixels, expected {expected}"
    )


def _check_png(content: bytes) -> None:
    """Verify the checksums of a PNG. In decoding, Pillow skips them or doubles its time."""
    start, kind = 8, b""
    while kind != b"IEND":
        end = start + 8 + int.from_bytes(content[start : start + 4], "big")
        kind, checksum = content[start + 4 : start + 8], content[end : end + 4]
        if crc32(content[start + 4 : end]) != int.from_bytes(checksum, "big") or not checksum:
            raise ValueError("a checksum is wrong, or it is truncated")
        start = end + 4


def _parts(path: Path) -> tuple[str, list[Path]]:
    """Return a key of a file's data, and all files with these data."""
    if not (shard := _SHARD.fullmatch(path.name)):
        return f"{path.name} of {path.stat().st_size} bytes", [path]
    name, count = shard["name"], shard["count"]
    numbers = range(int(count))
    return name, [path.with_name(f"{name}-{number:05}-of-{count}.parquet") for number in numbers]


def _plain(values: list[Any]) -> list[Any]:
    """Replace images by their bytes."""
    return [value.get("bytes") if isinstance(value, dict) else value for value in values]


def _pyarrow(path: Path) -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigurationError(
            f'{path} is a parquet file; reading it needs pyarrow: pip install "pflight[hf]"'
        ) from error
    return parquet


def _damaged(path: Path, error: Exception, remedy: str = "") -> ConfigurationError:
    reason = " ".join(str(error).split())
    return ConfigurationError(f"{path} is damaged: {reason}{remedy}")

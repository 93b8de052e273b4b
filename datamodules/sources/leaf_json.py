"""Reading LEAF's JSON files, one user at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pflight.errors import ConfigurationError

from .root import is_file

_CHUNK = 8192  # bytes that are parsed at once


def people(path: Path) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Yield the name, ``x`` and ``y`` of one user of a JSON file after the other.

    Raises:
        ConfigurationError: The file is damaged, or its parts don't fit one another.
    """
    import ijson

    names = next(_parsed(path, ijson.items, "users"), None)
    counts = next(_parsed(path, ijson.items, "num_samples"), None)
    if not isinstance(names, list) or not {*map(type, names)} <= {str}:
        raise ConfigurationError(f'{path}: "users" must be a list of names')
    if (
        not isinstance(counts, list)
        or not {*map(type, counts)} <= {int}
        or len(counts) != len(names)
    ):
        raise ConfigurationError(
            f'{path}: "num_samples" must be a list of {len(names)} whole numbers, as "users" is'
        )
    expected = dict(zip(names, counts, strict=True))
    if len(expected) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigurationError(f'{path}: user {twice!r} is in "users" twice')
    for name, data in _parsed(path, ijson.kvitems, "user_data"):
        where = f"{path}: user {name!r}"
        if name not in expected:
            raise ConfigurationError(f'{where} is not in "users", or has data twice')
        count = expected.pop(name)
        x, y = (data.get(key) if isinstance(data, dict) else None for key in "xy")
        if not isinstance(x, list) or not isinstance(y, list):
            raise ConfigurationError(f'{where}: "x" and "y" must be lists')
        if not len(x) == len(y) == count:
            raise ConfigurationError(
                f'{where} has {len(x)} x and {len(y)} y, but {count} in "num_samples"'
            )
        if not x:
            raise ConfigurationError(f"{where} has no samples")
        yield name, x, y
    if expected:
        raise ConfigurationError(f'{path}: user {next(iter(expected))!r} has no "user_data"')


def _parsed(path: Path, parse: Callable[..., Iterator[Any]], prefix: str) -> Iterator[Any]:
    """Yield what a parser finds in a JSON file, without reading all of it at once."""
    import ijson

    if not is_file(path):
        raise ConfigurationError(f"{path} is not there")
    try:
        with path.open("rb") as file:
            yield from parse(_Shallow(file), prefix, use_float=True, buf_size=_CHUNK)
    except (OSError, ValueError, ijson.JSONError) as error:
        raise ConfigurationError(f"{path} is damaged or cut off: {one_line(error)}") from error


class _Shallow:
    """A JSON file that is read only while it is not nested deeply, which would fill the memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._depth = 0

    def read(self, size: int) -> bytes:
        """Return the next bytes.

        Raises:
            ValueError: More brackets are open than any of LEAF's files has.
        """
        chunk = self._file.read(size)
        self._depth += sum(map(chunk.count, (b"[", b"{"))) - sum(map(chunk.count, (b"]", b"}")))
        if self._depth > 1000:
            raise ValueError("its brackets are nested too deeply")
        return chunk


def one_line(error: Exception) -> str:
    """Return the first line of an error's message, which the JSON parser may give as bytes."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    message = error.args[0] if error.args else ""
    text = message.decode(errors="replace") if isinstance(message, bytes) else str(error)
    return text.split("\n", 1)[0]

"""Reading LEAF's JSON files, one user at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pflight.errors import ConfigurationError

from .root import is_file

_CHUNK = 8192  # bytes that are parsed at once
_NO_NUMBER = re.compile(rb"[^-]?(-?(?:NaN|Infinity))", re.DOTALL)  # after the byte before it


def people(path: Path) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Yield the name, ``x`` and ``y`` of one user of a JSON file after the other.

    A user without samples has two empty lists. LEAF's files from before March 2020 have data of
    such users without listing them in ``users``.

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
    listed = {*names}
    for name, data in _parsed(path, ijson.kvitems, "user_data"):
        where = f"{path}: user {name!r}"
        if name not in listed and data == {"x": [], "y": []}:
            yield name, [], []
            continue
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
        yield name, x, y
    for name, count in expected.items():
        if count:
            raise ConfigurationError(f'{path}: user {name!r} has no "user_data"')
        yield name, [], []


def _parsed(path: Path, parse: Callable[..., Iterator[Any]], prefix: str) -> Iterator[Any]:
    """Yield a parser's events for a JSON file, without reading all of it at once."""
    import ijson

    if not is_file(path):
        raise ConfigurationError(f"{path} is not there")
    try:
        with path.open("rb") as file:
            shallow = _Shallow(file)
            yield from parse(shallow, prefix, use_float=True, buf_size=_CHUNK)
    except (OSError, ValueError, ijson.JSONError) as error:
        found = _no_number(path, shallow.start) if isinstance(error, ijson.JSONError) else None
        if found is not None:
            raise ConfigurationError(f"{path}: {found}, but must be a finite number") from error
        raise ConfigurationError(f"{path} is damaged or cut off: {one_line(error)}") from error


def _no_number(path: Path, start: int) -> str | None:
    """Name the value that is NaN or infinite. Python writes these; the parser does not know them.

    Args:
        path: A file that can't be parsed.
        start: Start of the chunk with the error.
    """
    import ijson

    place: list[str | int] = []
    with path.open("rb") as file:
        try:
            for event, value in ijson.basic_parse(_Slow(file, start), buf_size=_CHUNK):
                _move(place, event, value)
        except ijson.JSONError:
            file.seek(max(0, file.tell() - 2))
            if word := _NO_NUMBER.match(file.read(10)):
                return f"{_described(place)} is {word[1].decode()}"
    return None


def _move(place: list[str | int], event: str, value: Any) -> None:
    """Change the keys and positions that lead to the next value, after an event of the parser."""
    if event == "map_key":
        place[-1] = value
    elif event.startswith("start"):
        place.append(0 if event == "start_array" else "")
    else:
        if event.startswith("end"):
            place.pop()
        if place and isinstance(place[-1], int):
            place[-1] += 1


def _described(place: list[str | int]) -> str:
    """Return the user and the position of a value, such as ``user 'f0001': "x"[1][5]``."""
    user = ""
    if place[:1] == ["user_data"] and len(place) > 2:
        user, place = f"user {place[1]!r}: ", place[2:]
    steps = [f"[{step}]" if isinstance(step, int) else f".{json.dumps(step)}" for step in place]
    return user + ("".join(steps).lstrip(".") or "the file")


class _Slow:
    """A file that is read byte by byte after ``start``, so that an error has an exact place."""

    def __init__(self, file: BinaryIO, start: int) -> None:
        self._file = file
        self._start = start

    def read(self, size: int) -> bytes:
        """Return the next bytes."""
        return self._file.read(min(size, max(1, self._start - self._file.tell())))


class _Shallow:
    """A JSON file that is read only while nesting is shallow. Deep nesting fills the memory."""

    start = 0
    """Start of the last chunk."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._depth = 0

    def read(self, size: int) -> bytes:
        """Return the next bytes.

        Raises:
            ValueError: More brackets are open than any of LEAF's files has.
        """
        self.start = self._file.tell()
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

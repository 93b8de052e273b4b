"""The results of one run of a comparison, and their files.

Neither torch nor Lightning is imported here, so that a table is printed at once.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sized
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

import xxhash

from pflight.runs.files import replacing

VERSION = 1
Mode = Literal["max", "min"]
_CHECKSUM = ', "checksum": "'


class ResultError(ValueError):
    """Results that can't be read or compared; the message names the file or the run."""


def signed(text: str) -> str:
    """Return an object of JSON with a checksum of its text as the last entry."""
    checksum = xxhash.xxh3_64_hexdigest(text.encode())
    return f'{text[:-1]}{_CHECKSUM}{checksum}"}}\n'


class Record:
    """A frozen dataclass that is kept as a file of JSON, with null for NaN and infinity.

    The file ends with a checksum of its text, so that a damaged digit is noticed.
    """

    title: ClassVar[str] = "record"
    remedy: ClassVar[str] = "without it, the run is made again"

    def write(self, path: Path, shared: bool = False) -> None:
        """Write the file whole or not at all, as :func:`~pflight.runs.files.replacing` does."""
        text = json.dumps(_finite(asdict(self)), allow_nan=False)  # type: ignore[call-overload]
        with replacing(path, shared) as partial, partial.open("w", encoding="utf-8") as file:
            file.write(signed(text))
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file that :meth:`write` wrote.

        Raises:
            ResultError: If there is no such file, or if it is damaged or of another version.
        """
        try:
            text = path.read_bytes().decode()
            found = json.loads(text)
            content, separator, _ = text.rpartition(_CHECKSUM)
            if not separator:
                raise ValueError("it has no checksum")
            if text != signed(f"{content}}}"):
                raise ValueError("its checksum does not match its content")
        except OSError as error:
            raise ResultError(f"can't read {path}: {error.strerror}") from error
        except ValueError as error:
            raise ResultError(f"{path} is damaged: {error}; {cls.remedy}") from error
        try:
            if isinstance(found, dict) and found.get("version", VERSION) != VERSION:
                raise ResultError(f"version {found['version']!r} is not the known {VERSION}")
            record: Self = _understood(cls, found, cls.title)
        except ResultError as error:
            raise ResultError(
                f"{path} is damaged or of another version: {error}; {cls.remedy}"
            ) from error
        return record


@dataclass(frozen=True)
class Moment:
    """The results on test samples at one moment of a run.

    Attributes:
        round: Number of rounds trained until then.
        validation: The value that chooses rounds, on validation samples.
        values: Reported values by tag, such as ``test/new/macro_acc``.
        per_client: Each metric's value at each client, in the order of the run's ``clients``.
    """

    round: int
    validation: float | None
    values: dict[str, float | None]
    per_client: dict[str, list[float | None]]


@dataclass(frozen=True)
class Curve:
    """Validation in the course of a run.

    Attributes:
        round: Numbers of rounds that were trained before each evaluation, ascending.
        bytes: Bytes sent and received until then.
        values: Metrics by tag, such as ``val/macro_acc``, with a value for each evaluation.
    """

    round: list[int]
    bytes: list[int]
    values: dict[str, list[float | None]]

    def __post_init__(self) -> None:
        columns: dict[str, Sized] = {"bytes": self.bytes, **self.values}
        for name, column in columns.items():
            if len(column) != len(self.round):
                raise ResultError(
                    f"the curve has {len(self.round)} rounds, but {len(column)} values of {name}"
                )


@dataclass(frozen=True)
class Tuned:
    """How a run's settings were chosen.

    Attributes:
        trials: Number of settings that were tried.
        sampler: The source of proposals.
        seeds: Seeds of the trials.
        chosen: The settings that were best on validation samples.
        validation: The value of these settings there.
        space: The ranges of the choice.
    """

    trials: int
    sampler: str
    seeds: list[int]
    chosen: dict[str, Any]
    validation: float | None
    space: dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One of the runs of a comparison.

    Attributes:
        key: Identifies the configuration without seed and folder; the runs of a row share it.
        method: The method's name.
        settings: Options of rows that differ from their method's configuration, also tuned ones.
        seed: The seed.
    """

    key: str
    method: str
    settings: dict[str, Any]
    seed: int


@dataclass(frozen=True)
class Waiting(Run):
    """A run that is planned or running."""


@dataclass(frozen=True)
class Failure(Run, Record):
    """A run that failed: ``failure.json`` in its folder.

    Attributes:
        reason: Why, in one line.
        log: File with the run's output.
    """

    title: ClassVar[str] = "failure"

    reason: str
    log: str


@dataclass(frozen=True)
class Outcome(Run, Record):
    """The results of one run: ``results.json`` in its folder.

    Attributes:
        tuned: How settings were tuned, if they were.
        metric: The metric that chooses rounds, such as ``acc``.
        mode: Whether high or low values of it are better.
        directions: The same for all metrics, ``None`` where it isn't known.
        clients: Ids of the clients that may train, ascending.
        newcomers: Ids of the clients that are kept out of training.
        samples: ``test``: the number of test samples of each of ``clients``.
        last: After the last round.
        chosen: At the round that was best on validation samples, if it was kept.
        curve: Validation in the course of the run.
        bytes_down: Bytes sent to clients in all rounds.
        bytes_up: Bytes received from clients in all rounds.
        participations: Number of participations of clients in rounds.
        failed: Number of participations that failed.
        seconds: Median time of a training round, without evaluation.
        threads: Number of threads.
        beside: Number of jobs on the machine at the same time, with this one.
        device: The device.
        host: The machine.
        fingerprints: Short hashes of ``data``, ``weights``, ``cohorts`` and ``batches``.
        version: Version of this format.
        monitor: Tag of the value that chooses rounds. In files without it, ``val/macro_acc``.
    """

    title: ClassVar[str] = "run"

    tuned: Tuned | None
    metric: str
    mode: Mode
    directions: dict[str, Mode | None]
    clients: list[int]
    newcomers: list[int]
    samples: dict[str, list[int]]
    last: Moment
    chosen: Moment | None
    curve: Curve
    bytes_down: int
    bytes_up: int
    participations: int
    failed: int
    seconds: float | None
    threads: int
    beside: int
    device: str
    host: str
    fingerprints: dict[str, str]
    version: int = VERSION
    monitor: str | None = None

    def __post_init__(self) -> None:
        if any(first >= second for first, second in pairwise(self.clients)):
            raise ResultError("clients are not ascending")
        if "test" not in self.samples:
            raise ResultError("samples has no test")
        columns: dict[str, Sized] = {"samples.test": self.samples["test"]}
        for name, moment in {"last": self.last, "chosen": self.chosen}.items():
            found = moment.per_client if moment else {}
            columns |= {f"{name}.per_client.{metric}": found[metric] for metric in found}
        for name, column in columns.items():
            if len(column) != len(self.clients):
                raise ResultError(f"{name} has {len(column)} values of {len(self.clients)} clients")

    @property
    def bytes(self) -> int:
        """Bytes that the run sent and received."""
        return self.bytes_down + self.bytes_up

    @property
    def bytes_of_participation(self) -> float:
        """Bytes that a client sends and receives when it takes part in a round."""
        return self.bytes / self.participations if self.participations else math.nan


def _finite(value: Any) -> Any:
    """Return a value of JSON with ``None`` in place of numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _understood(kind: Any, value: Any, where: str) -> Any:
    """Return a value of JSON as an object of a type.

    Raises:
        ResultError: If it is of another type; the message names the place.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, UnionType):
        kind, _ = parts  # the other is None
        return None if value is None else _understood(kind, value, where)
    if origin is Literal:
        if value not in parts:
            raise ResultError(f"{where} is {value!r}, not {' or '.join(map(repr, parts))}")
        return value
    if is_dataclass(kind):
        _check(dict, value, where)
        kinds = get_type_hints(kind)
        names = {field.name: field.default for field in fields(kind)}
        if missing := [n for n, default in names.items() if n not in value and default is MISSING]:
            raise ResultError(f"{where} has no {', '.join(missing)}")
        return kind(  # type: ignore[operator]
            **{
                name: _understood(kinds[name], value[name], f"{where}.{name}")
                for name in names
                if name in value
            }
        )
    if origin is dict:
        _check(dict, value, where)
        return {key: _understood(parts[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is list:
        _check(list, value, where)
        if not {*map(type, value)} <= _types(parts[0]):  # one look at a list that may be long
            return [_understood(parts[0], item, f"an element of {where}") for item in value]
        return value
    _check(kind, value, where)
    return value


def _check(kind: type, value: Any, where: str) -> None:
    if type(value) not in _types(kind):
        raise ResultError(f"{where} is {value!r:.60}, not {_NAMES[kind]}")


@cache
def _types(kind: Any) -> frozenset[type]:
    """Return the types that a value of JSON may have: an integer is a number too."""
    kinds = {*(get_args(kind) or (kind,))}
    return frozenset(kinds | {int} if float in kinds else kinds)


_NAMES = {int: "an integer", float: "a number", str: "a text", dict: "an object", list: "a list"}

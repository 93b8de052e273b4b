"""The history of a run: one entry per communication round."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from .errors import ClientError
from .runs.distributed import gather

Logs = dict[str, tuple[Any, int]]
"""Logged values of clients: name to (sum over samples, number of samples)."""


@dataclass
class Round:
    """One communication round.

    Attributes:
        index: The round's number, counted from 0, as in messages and as the loggers' step.
        clients: Ids of the clients that were sent a model, ascending.
        failed: Ids of the clients among them that dropped out, raised an error or returned NaN.
        bytes_down: Bytes sent to clients.
        bytes_up: Bytes received from clients.
        metrics: Logged values of this round, including the evaluation after it.
    """

    index: int
    clients: list[int]
    failed: list[int] = field(default_factory=list)
    bytes_down: int = 0
    bytes_up: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    def combine_ranks(self, logs: Logs) -> None:
        """Combine this round over all ranks, and add the clients' logged values to the metrics."""
        mine = {
            "clients": self.clients,
            "failed": self.failed,
            "bytes_down": self.bytes_down,
            "bytes_up": self.bytes_up,
            "logs": {name: (float(total), samples) for name, (total, samples) in logs.items()},
        }
        ranks = gather(mine)
        self.clients = sorted({client for rank in ranks for client in rank["clients"]})
        self.failed = sorted({client for rank in ranks for client in rank["failed"]})
        self.bytes_down = sum(rank["bytes_down"] for rank in ranks)
        self.bytes_up = sum(rank["bytes_up"] for rank in ranks)
        combined = merge_logs(rank["logs"] for rank in ranks)
        self.metrics |= {name: total / samples for name, (total, samples) in combined.items()}
        self.metrics["clients/sampled"] = len(self.clients)
        self.metrics["clients/failed"] = len(self.failed)


class Judge(Protocol):
    """An evaluation of all clients."""

    def end(self) -> None:
        """Raise if clients failed and no client could be judged."""


def check_trained(rounds: Sequence[Round], judge: Judge | None = None) -> None:
    """Raise if clients took part, but in no round could a client be trained or judged.

    Args:
        rounds: The rounds.
        judge: The last evaluation on validation samples, if there was one.

    Raises:
        ClientError: If so.
    """
    asked = failed = 0
    for entry in rounds:
        asked, failed = asked + len(entry.clients), failed + len(entry.failed)
    if asked and asked == failed:
        raise ClientError(f"all {asked:,} trainings of clients failed, as the warnings say")
    values = (v for entry in rounds for n, v in entry.metrics.items() if n.startswith("val/"))
    if judge is not None and not any(map(math.isfinite, values)):
        judge.end()


def add_logs(into: Logs, logs: Logs) -> None:
    """Add values, as sums over samples by name, to the values ``into``."""
    for name, (total, samples) in logs.items():
        if name in into:
            total, samples = into[name][0] + total, into[name][1] + samples
        into[name] = (total, samples)


def merge_logs(parts: Iterable[Logs]) -> Logs:
    """Add up the values of several parts, as sums over samples by name."""
    merged: Logs = {}
    for logs in parts:
        add_logs(merged, logs)
    return merged


class Traffic:
    """Counts the bytes sent and received in all rounds so far.

    Args:
        history: The rounds.
    """

    def __init__(self, history: Iterable[Round] = ()) -> None:
        self.down = self.up = 0
        for entry in history:
            self.count(entry)

    def count(self, entry: Round) -> dict[str, int]:
        """Count one more round. Return the bytes of the round and of all rounds, by tag."""
        self.down += entry.bytes_down
        self.up += entry.bytes_up
        return {
            "communication/bytes_down": entry.bytes_down,
            "communication/bytes_up": entry.bytes_up,
            "communication/total_bytes_down": self.down,
            "communication/total_bytes_up": self.up,
        }


class Journal:
    """The history as compressed text. New rounds are appended to it.

    So a checkpoint late in a run costs hardly more than an early one. A round is appended once the
    next one exists. The metrics of the last round may still change: it is written each time.

    A round is a line of JSON: its index, the ids of its clients and of its failed clients (as
    differences), bytes down and up, the number of a line of names, and the values of its metrics.
    The names of metrics are on lines of their own, numbered from 0.
    """

    def __init__(self) -> None:
        self._stream = zlib.compressobj()
        self._text = bytearray()
        self._names: dict[tuple[str, ...], int] = {}
        self._added = 0
        self._last: Round | None = None

    def dump(self, history: Sequence[Round]) -> Tensor:
        """Return the rounds as bytes for :func:`load_history`.

        Args:
            history: All rounds. Rounds of an earlier dump, except its last, must not have changed.
        """
        if self._added and history[self._added - 1 : self._added] != [self._last]:
            vars(self).update(vars(Journal()))
        for entry in history[self._added : -1]:
            self._text += self._stream.compress(_lines(entry, self._names))
            self._added, self._last = self._added + 1, entry
        end = self._stream.copy()
        last = b"".join(end.compress(_lines(entry, {**self._names})) for entry in history[-1:])
        return torch.frombuffer(self._text + last + end.flush(), dtype=torch.uint8)

    def __reduce__(self) -> tuple[type[Journal], tuple[()]]:
        return Journal, ()  # a copy starts empty: a compression stream can't be pickled


def load_history(dumped: Tensor) -> list[Round]:
    """Return the rounds that :meth:`Journal.dump` dumped."""
    history: list[Round] = []
    names: list[list[str]] = []
    for line in zlib.decompress(dumped.cpu().numpy().tobytes()).splitlines():
        match json.loads(line):
            case [int(index), clients, failed, down, up, number, *values]:
                ids = [*accumulate(clients)], [*accumulate(failed)]
                metrics = dict(zip(names[number], values, strict=True))
                history.append(Round(index, *ids, down, up, metrics))
            case found:
                names.append(found)
    return history


def _lines(entry: Round, names: dict[tuple[str, ...], int]) -> bytes:
    """Return a round as text, after a line with the names of its metrics if they are new."""
    own = tuple(entry.metrics)
    number = names.get(own, len(names))
    ids = [[b - a for a, b in pairwise([0, *ids])] for ids in (entry.clients, entry.failed)]
    traffic, values = (entry.bytes_down, entry.bytes_up), entry.metrics.values()
    text = f"{_encode((entry.index, *ids, *traffic, number, *values))}\n"
    if own not in names:
        names[own] = number
        text = f"{_encode(own)}\n{text}"
    return text.encode()


def _number(value: Any) -> Any:
    """Return the number in a tensor or array with a single element."""
    return value.item()


_encode = json.JSONEncoder(default=_number, separators=(",", ":")).encode

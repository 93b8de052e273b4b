"""The record of a run: one entry per communication round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .distributed import gather

Logs = dict[str, tuple[Any, int]]
"""What clients logged: name to (sum over samples, number of samples)."""

_NUMBERS = ("index", "bytes_down", "bytes_up")
_LISTS = ("clients", "failed")


@dataclass
class Round:
    """One communication round.

    Attributes:
        index: The round's number, from 0, in all messages too; the loggers' step.
        clients: Ids of the clients that were sent a model, ascending.
        failed: Those of them that did not answer: dropped out, raised, or returned NaN.
        bytes_down: Bytes sent to clients.
        bytes_up: Bytes received from clients.
        metrics: What was logged for this round, the evaluation that followed it included.
    """

    index: int
    clients: list[int]
    failed: list[int] = field(default_factory=list)
    bytes_down: int = 0
    bytes_up: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    def combine_ranks(self, logs: Logs) -> None:
        """Combine this round over all ranks, and add what the clients logged to the metrics."""
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


def add_logs(into: Logs, logs: Logs) -> None:
    """Add sums over samples, by name, to those so far."""
    for name, (total, samples) in logs.items():
        if name in into:
            total, samples = into[name][0] + total, into[name][1] + samples
        into[name] = (total, samples)


def merge_logs(parts: Iterable[Logs]) -> Logs:
    """Add up sums over samples, by name."""
    merged: Logs = {}
    for logs in parts:
        add_logs(merged, logs)
    return merged


def traffic(history: list[Round]) -> dict[str, int]:
    """Return the bytes of the last round and of all rounds, by tag."""
    last = history[-1]
    return {
        "communication/bytes_down": last.bytes_down,
        "communication/bytes_up": last.bytes_up,
        "communication/total_bytes_down": sum(entry.bytes_down for entry in history),
        "communication/total_bytes_up": sum(entry.bytes_up for entry in history),
    }


def dump_history(history: list[Round]) -> dict[str, Any]:
    """Return the rounds as a few long tensors, which a checkpoint holds and saves fast."""
    metrics: dict[str, tuple[list[int], list[float]]] = {}
    for place, entry in enumerate(history):
        for name, value in entry.metrics.items():
            places, values = metrics.setdefault(name, ([], []))
            places.append(place)
            values.append(value)
    return {
        **{name: torch.tensor([getattr(entry, name) for entry in history]) for name in _NUMBERS},
        **{
            name: {
                "counts": torch.tensor([len(getattr(entry, name)) for entry in history]),
                "ids": torch.tensor([i for entry in history for i in getattr(entry, name)]).long(),
            }
            for name in _LISTS
        },
        "metrics": {
            name: {
                "rounds": torch.tensor(places),
                "values": torch.tensor(values, dtype=torch.double),
            }
            for name, (places, values) in metrics.items()
        },
    }


def load_history(dumped: Mapping[str, Any]) -> list[Round]:
    """Return the rounds that :func:`dump_history` dumped."""
    columns = {name: dumped[name].tolist() for name in _NUMBERS}
    for name in _LISTS:
        parts = dumped[name]["ids"].split(dumped[name]["counts"].tolist())
        columns[name] = [part.tolist() for part in parts]
    history = [
        Round(**dict(zip(columns, entry, strict=True)))
        for entry in zip(*columns.values(), strict=True)
    ]
    for name, column in dumped["metrics"].items():
        for place, value in zip(column["rounds"].tolist(), column["values"].tolist(), strict=True):
            history[place].metrics[name] = value
    return history

"""The record of a run: one entry per communication round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Round:
    """One communication round.

    Attributes:
        index: The round's number, from 0; the logger's step.
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


def dump_history(history: Iterable[Round]) -> list[dict[str, Any]]:
    """Return the rounds as tensors and primitives that a checkpoint can hold."""
    return [
        {
            "index": entry.index,
            "clients": torch.tensor(entry.clients, dtype=torch.long),
            "failed": torch.tensor(entry.failed, dtype=torch.long),
            "bytes_down": entry.bytes_down,
            "bytes_up": entry.bytes_up,
            "metrics": dict(entry.metrics),
        }
        for entry in history
    ]


def load_history(entries: Iterable[Mapping[str, Any]]) -> list[Round]:
    """Return the rounds that :func:`dump_history` dumped."""
    return [
        Round(**{**entry, "clients": entry["clients"].tolist(), "failed": entry["failed"].tolist()})
        for entry in entries
    ]

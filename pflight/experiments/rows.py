"""The rows of a comparison: the runs of one configuration, with all seeds."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from pflight.messages import one_line

from .outcome import Failure, Moment, Outcome, ResultError, Run, Tuned
from .statistics import Floats, floats, macro, median, micro, worst_decile

When = Literal["chosen", "last"]
MOMENTS: tuple[When, ...] = ("chosen", "last")
Mean = Literal["macro", "micro", "worst_decile", "newcomers"]
TAGS: dict[Mean, str] = {
    "macro": "test/macro_{}",
    "micro": "test/micro_{}",
    "worst_decile": "test/worst_decile_{}",
    "newcomers": "test/new/macro_{}",
}
"""The tag of each reported mean of a metric."""


@dataclass
class Row:
    """The runs of a method with some settings.

    Attributes:
        key: Identifies the configuration.
        method: The method's name.
        settings: Its options, as in :class:`~pflight.experiments.outcome.Outcome`.
        label: The method with the settings that differ from other rows.
        runs: The finished runs by seed, ascending.
        failures: The runs that failed, by seed.
        waiting: Seeds of the runs that are planned or running.
    """

    key: str
    method: str
    settings: dict[str, Any]
    label: str = ""
    runs: dict[int, Outcome] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)

    @property
    def tuned(self) -> Tuned | None:
        """How settings were tuned, if they were."""
        return next((run.tuned for run in self.runs.values()), None)

    @property
    def plain_settings(self) -> dict[str, Any]:
        """The settings that were not chosen by tuning."""
        chosen = self.tuned.chosen if self.tuned else {}
        return {name: value for name, value in self.settings.items() if name not in chosen}

    @property
    def seconds(self) -> float:
        """The median over seeds of the time of a round; NaN if it isn't known."""
        return median([run.seconds for run in self.runs.values() if run.seconds is not None])

    def means(self, mean: Mean, metric: str, when: When) -> list[float]:
        """Return a mean over clients at each seed; NaN if a run has none."""
        return [mean_of(run, mean, metric, when) for run in self.runs.values()]


def moment(run: Outcome, when: When) -> Moment | None:
    """Return a run's results at a moment, if they were kept."""
    return run.chosen if when == "chosen" else run.last


def by_client(run: Outcome, metric: str, when: When) -> Floats:
    """Return a metric's values of a run's clients; NaN for a client without test samples."""
    at = moment(run, when)
    values = at.per_client.get(metric) if at else None
    if values is None:
        return np.full(len(run.clients), math.nan)
    return np.where(np.array(run.samples["test"]) > 0, floats(values), math.nan)


def mean_of(run: Outcome, mean: Mean, metric: str, when: When) -> float:
    """Return a mean over a run's clients; that over newcomers is plain."""
    at = moment(run, when)
    if mean == "newcomers":
        return float(floats(at.values.get(TAGS[mean].format(metric)) if at else None))
    values = by_client(run, metric, when)
    if mean == "macro":
        return macro(values)
    if mean == "micro":
        return micro(values, run.samples["test"])
    mode = run.mode if metric == run.metric else run.directions.get(metric)
    return worst_decile(values, mode) if mode else math.nan


def paired(row: Row, other: Row, metric: str, when: When) -> dict[int, Floats]:
    """Return a row's differences from another, by seed, for the clients with both values.

    Seeds with different data in the two rows are left out, as are seeds without a pair of clients.
    """
    found = {}
    for seed in row.runs.keys() & other.runs.keys():
        one, two = row.runs[seed], other.runs[seed]
        data = {run.fingerprints.get("data") for run in (one, two)}
        if len(data) > 1 and None not in data:
            continue
        _, mine, its = np.intersect1d(
            one.clients, two.clients, assume_unique=True, return_indices=True
        )
        pairs = by_client(one, metric, when)[mine] - by_client(two, metric, when)[its]
        if np.isfinite(pairs).any():
            found[seed] = pairs[np.isfinite(pairs)]
    return dict(sorted(found.items()))


def common_clients(rows: Sequence[Row], metric: str, when: When) -> dict[int, list[int]]:
    """Return by seed the ids of the clients with a value in all rows.

    A row without any value at a seed is passed over. If rows have no client in common, all clients
    are returned.
    """
    having: dict[int, list[set[int]]] = {}
    for row in rows:
        for seed, run in row.runs.items():
            known = np.isfinite(by_client(run, metric, when))
            clients = {client for client, has in zip(run.clients, known, strict=True) if has}
            having.setdefault(seed, []).extend([clients] if clients else [])
    return {
        seed: sorted(set.intersection(*sets) or set.union(*sets)) if sets else []
        for seed, sets in having.items()
    }


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """Sort runs into rows; a run that has finished neither fails nor waits.

    Raises:
        ResultError: If a configuration has two runs with one seed.
    """
    rows: dict[str, Row] = {}
    for run in sorted(runs, key=lambda run: not isinstance(run, Outcome)):  # they name their row
        row = rows.setdefault(run.key, Row(run.key, run.method, run.settings))
        if isinstance(run, Outcome):
            if run.seed in row.runs:
                raise ResultError(
                    f"{run.method} has two runs of one configuration with seed {run.seed}: "
                    "leave one of them out"
                )
            row.runs[run.seed] = run
        elif isinstance(run, Failure):
            row.failures[run.seed] = run
        else:
            row.waiting.add(run.seed)
    for row in rows.values():
        row.runs = dict(sorted(row.runs.items()))
        row.failures = {s: row.failures[s] for s in sorted(row.failures.keys() - row.runs.keys())}
        row.waiting -= row.runs.keys() | row.failures.keys()
    _name([*rows.values()])
    return sorted(rows.values(), key=lambda row: row.label)


def _name(rows: Sequence[Row]) -> None:
    """Give rows different labels, with as few settings as possible."""
    texts = (
        lambda row: _with(row.method, row.plain_settings),
        lambda row: _with(row.method, row.settings),
        lambda row: f"{_with(row.method, row.settings)} ({row.key[:8]})",
        lambda row: f"{_with(row.method, row.settings)} ({row.key})",
    )
    left = rows
    for text in texts:
        for row in left:
            row.label = one_line(text(row))
        counts = Counter(row.label for row in rows)
        left = [row for row in rows if counts[row.label] > 1]


def settings_text(settings: dict[str, Any]) -> str:
    """Return options as ``name=value``; of a name, the last part if no other option has the same.

    Example:
        >>> settings_text({"model.local_epochs": 5, "data.partition": "IID"})
        'local_epochs=5, partition=IID'
    """
    ends = Counter(name.rpartition(".")[2] for name in settings)
    shown = {
        end if ends[end := name.rpartition(".")[2]] == 1 else name: value
        for name, value in settings.items()
    }
    return ", ".join(f"{name}={_value(value)}" for name, value in shown.items())


def _with(method: str, settings: dict[str, Any]) -> str:
    return ", ".join(filter(None, (method, settings_text(settings))))


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)

"""The numbers of a comparison's runs."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from .outcome import Mode, Outcome, ResultError, Run
from .rows import Row, When, by_client, common_clients, paired, rows_of
from .statistics import (
    DRAWS,
    Difference,
    Floats,
    differences,
    holm,
    macro,
    mean_and_deviation,
    reaching,
    share_below,
)
from .units import Unit, unit_of

LOCAL = "Local"


class Findings:
    """The rows of a comparison in their order, and their differences.

    Args:
        runs: The runs: finished, failed, planned or running.
        baseline: A row, by its label or its method; differences from it are computed, too.
        target: A value of the metric that chooses rounds, in its own unit.
        draws: Number of draws of the bootstrap.

    Attributes:
        rows: The rows, best first by the clients that all rows have; those without a finished run
            are last.
        finished: The rows with a finished run.
        seeds: All seeds, ascending.
        metric: The metric that chose rounds; empty if no run has finished.
        mode: Whether high or low values of it are better.
        when: The moment that is compared: ``chosen`` if all runs kept it, else ``last``.
        best: The row with the best mean among those with most seeds, if a mean is known.
        baseline: The row that was named, if any.
        target: As given.
        draws: As given.
        common: By seed, the ids of the clients with a value in all rows.

    Raises:
        ResultError: If runs are judged by different metrics, if a configuration has two runs with
            one seed, or if there is no such baseline.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        baseline: str | None = None,
        target: float | None = None,
        draws: int = DRAWS,
    ) -> None:
        outcomes = [run for run in runs if isinstance(run, Outcome)]
        self.metric, self.mode = _metric_of(outcomes)
        self.when: When = "chosen" if all(run.chosen for run in outcomes) else "last"
        self.target = target
        self.draws = draws
        rows = rows_of(runs)
        self.common = common_clients(rows, self.metric, self.when)
        self.rows = sorted(rows, key=self._rank)
        self.seeds = sorted({run.seed for run in runs})
        self.finished = [row for row in self.rows if row.runs]
        known = [row for row in self.finished if not math.isnan(self._mean(row))]
        most = max((len(row.runs) for row in known), default=0)
        self.best = next((row for row in known if len(row.runs) == most), None)
        self.baseline = _named(baseline, self.rows) if baseline else None

    def _rank(self, row: Row) -> tuple[bool, bool, float]:
        """Return the sort key of a row."""
        mean = self._mean(row)
        unknown = math.isnan(mean)
        return not row.runs, unknown, 0 if unknown else -mean if self.mode == "max" else mean

    def _mean(self, row: Row) -> float:
        """Return a row's mean over the clients that all rows have, and then over seeds."""
        means = [
            macro(by_client(run, self.metric, self.when)[np.isin(run.clients, self.common[seed])])
            for seed, run in row.runs.items()
        ]
        return mean_and_deviation(means)[0]

    @property
    def runs(self) -> list[Outcome]:
        """The finished runs of all rows."""
        return [run for row in self.finished for run in row.runs.values()]

    @cached_property
    def metrics(self) -> list[str]:
        """The metrics of all runs, first the one that chose rounds."""
        names = dict.fromkeys(name for run in self.runs for name in run.last.per_client)
        return [*dict.fromkeys([self.metric, *names])] if self.runs else []

    @cached_property
    def units(self) -> dict[str, Unit]:
        """The unit of each metric."""
        return {
            metric: unit_of(
                metric, np.concatenate([by_client(run, metric, self.when) for run in self.runs])
            )
            for metric in self.metrics
        }

    @property
    def references(self) -> list[Row]:
        """The references of differences: the best row and the baseline."""
        named = [self.best, self.baseline]
        return [row for row in self.finished if row in named]

    @cached_property
    def differences(self) -> dict[tuple[str, str], Difference]:
        """Differences of rows from each reference, by the keys of the row and the reference."""
        pairs: dict[tuple[str, str], list[Floats]] = {}
        for reference in self.references:
            for row in self.finished:
                columns = paired(row, reference, self.metric, self.when)
                if row is not reference and columns:
                    pairs[row.key, reference.key] = [*columns.values()]
        return dict(zip(pairs, differences([*pairs.values()], self.draws), strict=True))

    def corrected(self, reference: Row) -> dict[str, float]:
        """Return the p-values of all rows against a reference after Holm's correction, by key."""
        found = {one: d.p for (one, other), d in self.differences.items() if other == reference.key}
        return dict(zip(found, holm([*found.values()]), strict=True))

    def is_bold(self, row: Row) -> bool:
        """Return whether a row is the best, or its interval doesn't place it behind the best."""
        if self.best is None or row is self.best:
            return row is self.best
        found = self.differences.get((row.key, self.best.key))
        if found is None:
            return False
        behind = found.high < 0 if self.mode == "max" else found.low > 0
        return not behind  # without an interval, no row is behind

    def below_local(self, row: Row) -> dict[int, float]:
        """Return by seed the share of clients that are worse than alone; empty if unknown."""
        local = self._local_of(row)
        columns = paired(row, local, self.metric, self.when) if local else {}
        return {seed: share_below(column, self.mode) for seed, column in columns.items()}

    def _local_of(self, row: Row) -> Row | None:
        """Return the row of Local with a row's settings that weren't tuned, or the only one."""
        if row.method == LOCAL:
            return row
        rows = [other for other in self.finished if other.method == LOCAL]
        alike = [other for other in rows if other.plain_settings == row.plain_settings]
        candidates = alike or rows
        return candidates[0] if len(candidates) == 1 else None

    def to_target(self, row: Row) -> dict[int, tuple[float, float]]:
        """Return by seed the rounds and bytes until the target; infinite if it isn't reached."""
        if self.target is None:
            return {}
        tag, target = f"val/macro_{self.metric}", self.target
        runs = row.runs.items()
        return {seed: reaching(run.curve, tag, target, self.mode) for seed, run in runs}


def _metric_of(outcomes: Sequence[Outcome]) -> tuple[str, Mode]:
    """Return the metric that chose the rounds of all runs, and its direction."""
    found = {(run.metric, run.mode): run.method for run in outcomes}
    if len(found) > 1:
        listed = ", ".join(f"{metric} ({mode}) {whose}" for (metric, mode), whose in found.items())
        raise ResultError(f"runs that are judged by different metrics can't be compared: {listed}")
    return next(iter(found), ("", "max"))


def _named(name: str, rows: Sequence[Row]) -> Row:
    """Return the row with a label, or else the only one of a method."""
    for names in ([row.label for row in rows], [row.method for row in rows]):
        found = [row for row, own in zip(rows, names, strict=True) if own.lower() == name.lower()]
        if len(found) == 1:
            return found[0]
    labels = [row.label for row in found or rows]
    close = labels if found else difflib.get_close_matches(name, labels, n=1)
    meant = f": did you mean {' or '.join(map(repr, close))}?" if close else f" in {labels}"
    raise ResultError(f"there is no row {name!r} to compare with{meant}")

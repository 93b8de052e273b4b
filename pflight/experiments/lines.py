"""All numbers of a comparison as lines of CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from pflight.messages import cell

from .findings import Findings
from .outcome import Outcome
from .rows import MOMENTS, TAGS, Row, When, mean_of, moment
from .statistics import mean_and_deviation, median

_FIELDS = "method", "settings", "key", "seed", "moment", "quantity", "statistic", "against", "value"
_COSTS = (
    *("bytes_down", "bytes_up", "participations", "failed", "seconds", "threads", "beside"),
    *("bytes", "bytes_of_participation"),
)
_Line = tuple[int | str, str, str, str, str, Any]


def to_csv(findings: Findings) -> str:
    """Return a table with a line for each number, in the metrics' own units.

    The first columns are the row's method, settings (as JSON) and key. The seed is empty if a
    number is of several seeds. The moment is ``chosen`` or ``last`` if it matters. The quantity is
    a tag such as ``test/macro_acc``. The statistic is ``value`` at one seed. Over seeds it is
    ``mean``, ``std`` with ddof 1, ``median``, or one of a difference. ``against`` is the key of the
    difference's reference row. The value is empty if there is none.
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(_FIELDS)
    for row in findings.rows:
        own = row.method, json.dumps(row.settings), row.key
        for lines in (_of_seeds, _over_seeds, _of_differences):
            found = ((*own, *line[:-1], _plain(line[-1])) for line in lines(findings, row))
            writer.writerows([map(cell, line) for line in found])
    return file.getvalue()


def _of_seeds(findings: Findings, row: Row) -> Iterator[_Line]:
    reached, below = findings.to_target(row), findings.below_local(row)
    for seed, run in row.runs.items():
        for when in MOMENTS:
            for name, value in _values(findings, run, when).items():
                yield seed, when, name, "value", "", value
        for name in _COSTS:
            yield seed, "", name, "value", "", getattr(run, name)
        if seed in reached:
            yield seed, "", "rounds_to_target", "value", "", reached[seed][0]
            yield seed, "", "bytes_to_target", "value", "", reached[seed][1]
        if seed in below:
            yield seed, findings.when, "below_local", "value", "", below[seed]
    for seed, failure in row.failures.items():
        yield seed, "", "run", "failed", "", failure.reason
    for seed in sorted(row.waiting):
        yield seed, "", "run", "waiting", "", ""


def _over_seeds(findings: Findings, row: Row) -> Iterator[_Line]:
    runs = row.runs.values()
    if not runs:
        return
    for when in MOMENTS:
        by_seed = [_values(findings, run, when) for run in runs]
        for name in dict.fromkeys(name for values in by_seed for name in values):
            yield from _mean_lines(when, name, [at.get(name, math.nan) for at in by_seed])
    yield from _mean_lines(findings.when, "below_local", [*findings.below_local(row).values()])
    for name in ("bytes", "bytes_of_participation"):
        mean, _ = mean_and_deviation([getattr(run, name) for run in runs])
        yield "", "", name, "mean", "", mean
    yield "", "", "seconds", "median", "", row.seconds
    if reached := findings.to_target(row):
        rounds, sizes = zip(*reached.values(), strict=True)
        yield "", "", "rounds_to_target", "median", "", median(rounds)
        yield "", "", "bytes_to_target", "median", "", median(sizes)


def _mean_lines(when: When, name: str, values: list[float]) -> Iterator[_Line]:
    for statistic, value in zip(("mean", "std"), mean_and_deviation(values), strict=True):
        yield "", when, name, statistic, "", value


def _of_differences(findings: Findings, row: Row) -> Iterator[_Line]:
    tag = TAGS["macro"].format(findings.metric)
    for reference in findings.references:
        if found := findings.differences.get((row.key, reference.key)):
            p = findings.corrected(reference)[row.key]
            for statistic, value in {**asdict(found), "p_holm": p}.items():
                yield "", findings.when, tag, f"difference {statistic}", reference.key, value


def _values(findings: Findings, run: Outcome, when: When) -> dict[str, float]:
    """Return a run's numbers at a moment: the reported ones, and the means over clients."""
    if (at := moment(run, when)) is None:
        return {}
    reported = {"round": at.round, "validation": at.validation, **at.values}
    means = {
        tag.format(metric): mean_of(run, mean, metric, when)
        for metric in findings.metrics
        for mean, tag in TAGS.items()
    }
    return {
        name: math.nan if value is None else value for name, value in {**reported, **means}.items()
    }


def _plain(value: Any) -> Any:
    return "" if isinstance(value, float) and not math.isfinite(value) else value

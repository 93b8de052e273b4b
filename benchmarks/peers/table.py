"""The benchmark's table in Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .processes import Run
from .workloads import Workload

START, END = "<!-- table -->", "<!-- end of table -->"
COHORT_NOISE = 0.05  # in the samples of clients of unequal size
ACCURACY_NOISE = 0.03  # between rows that draw other clients and batches
DISTANCE_NOISE = 0.1  # of the median distance


@dataclass
class Result:
    """All runs of a row on one workload, or why there are none.

    Attributes:
        runs: The timed runs.
        accuracy: Share of right labels on test images, of each run's model.
        peak: Bytes at most, from a run that was watched.
        failure: Why the row failed.
        one_thread: Whether it computed on one thread, and not on as many as it chooses.
    """

    runs: list[Run] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    peak: int | None = None
    failure: str = ""
    one_thread: bool = False

    @property
    def seconds(self) -> float:
        """Seconds a round: the median of the processes' medians."""
        return statistics.median(run.median for run in self.runs)

    def order(self) -> float:
        """Return what a row's results are ordered by, the best one first and failed ones last."""
        return math.inf if self.failure else self.seconds


def write_table(
    workload: Workload, rounds: int, results: Mapping[str, Result], raw: set[str]
) -> list[str]:
    """Return the lines of a workload's table.

    Args:
        workload: What was trained.
        rounds: Rounds of a run.
        results: Result of each row, in the order of the table.
        raw: The rows without a library; ratios are to the fastest of them.
    """
    done = {name: result for name, result in results.items() if not result.failure}
    best = min((done[name].seconds for name in raw if name in done), default=math.nan)
    reference = _Reference.of(workload, list(done.values()))
    lines = [
        "| | s a round | min to max | ratio | threads | MiB | accuracy | same work |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        if result.failure:
            lines.append(f"| {name} | {result.failure.replace('|', '/')} | | | | | | |")
            continue
        medians = [run.median for run in result.runs]
        threads = "1" if result.one_thread else "default"
        peak = "" if result.peak is None else f"{result.peak / 2**20:.0f}"
        lines.append(
            f"| {name} | {result.seconds:.4f} | {min(medians):.4f} to {max(medians):.4f} "
            f"| {result.seconds / best:.2f} | {threads} | {peak} "
            f"| {statistics.mean(result.accuracy):.3f} "
            f"| {reference.differences(result, rounds) or 'yes'} |"
        )
    return lines


@dataclass(frozen=True)
class _Reference:
    """What the rows have in common."""

    workload: Workload
    accuracy: float
    distance: float

    @classmethod
    def of(cls, workload: Workload, results: list[Result]) -> _Reference:
        if not results:
            return cls(workload, math.nan, math.nan)
        return cls(
            workload,
            statistics.median(statistics.mean(result.accuracy) for result in results),
            statistics.median(distance(workload, run) for r in results for run in r.runs),
        )

    def differences(self, result: Result, rounds: int) -> str:
        """Say in how far a row did something else."""
        workload, found = self.workload, []
        updates = workload.cohort * rounds
        for unit, counted, expected in (
            ("samples", result.runs[0].samples, workload.sizes.mean() * updates),
            ("steps", result.runs[0].steps, workload.steps * updates),
        ):
            if abs(counted / expected - 1) > COHORT_NOISE * workload.ragged:
                found.append(f"{counted / expected:.3g} times the {unit}")
        accuracy = statistics.mean(result.accuracy)
        if abs(accuracy - self.accuracy) > ACCURACY_NOISE:
            found.append(f"another accuracy, not {self.accuracy:.3f}")
        ratio = distance(workload, result.runs[0]) / self.distance
        if abs(ratio - 1) > DISTANCE_NOISE:
            found.append(f"{ratio:.2f} times as far from the start")
        return ", ".join(found)


def distance(workload: Workload, run: Run) -> float:
    """Return the Euclidean distance of a run's weights from the first ones.

    It grows with the number of steps, their size and the share of the clients' updates that the
    server takes over, so that it shows work that was left out.
    """
    pairs = zip(run.weights, workload.initial_weights(), strict=True)
    return math.sqrt(sum(float(((end - start) ** 2).sum()) for end, start in pairs))


def save(path: Path, lines: list[str]) -> None:
    """Write a page, or what lies between the two marks of a page that has them."""
    text = "\n".join(lines) + "\n"
    if path.is_file() and START in (page := path.read_text(encoding="utf-8")):
        before, _, rest = page.partition(START)
        text = f"{before}{START}\n\n{text}\n{END}{rest.partition(END)[2]}"
    path.write_text(text, encoding="utf-8")

"""The notes under the tables: their basis and their limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from .findings import LOCAL, Findings
from .rows import Row, by_client
from .statistics import FEWEST, LEVEL, SEED, resamples, smallest_sign_test

_KINDS = {
    "data": "clients' data",
    "weights": "initial weights",
    "cohorts": "cohorts",
    "batches": "batches",
}


def footer(findings: Findings) -> list[str]:
    """Return the notes under the tables of a comparison."""
    parts = (_state, _seeds, _rounds, _measures, _comparison, _limits, _fairness, _tuning, _costs)
    return [
        note for part in parts if findings.finished or part is _state for note in part(findings)
    ]


def _state(findings: Findings) -> Iterator[str]:
    waiting = sum(len(row.waiting) for row in findings.rows)
    failed = sum(len(row.failures) for row in findings.rows)
    if waiting or failed:
        finished = len(findings.runs)
        runs = "run" if finished == 1 else "runs"
        yield f"{finished} {runs} finished, {waiting} waiting or running, {failed} failed."


def _seeds(findings: Findings) -> Iterator[str]:
    seeds, most = findings.seeds, max(len(row.runs) for row in findings.finished)
    if most == 1:
        yield (
            "Each row has a single seed. The variation from seed to seed is unknown, and no "
            "deviation is given."
        )
    else:
        yield f"Mean ± standard deviation (ddof 1) over {len(seeds)} seeds: {_listed(seeds)}."
    if any(len(row.runs) < len(seeds) for row in findings.finished):
        yield (
            "Rows without all seeds have means over the seeds that they have. Two rows are "
            "compared at the seeds that both have."
        )


def _rounds(findings: Findings) -> Iterator[str]:
    trained = {
        row.label: sorted({run.last.round for run in row.runs.values()})
        for row in findings.finished
    }
    if len({rounds for each in trained.values() for rounds in each}) > 1:
        listed = ", ".join(f"{label} {_listed(rounds)}" for label, rounds in trained.items())
        yield f"Not all runs have trained for as many rounds: {listed}."


def _measures(findings: Findings) -> Iterator[str]:
    best = "highest" if findings.mode == "max" else "lowest"
    if findings.when == "chosen":
        tags = {run.monitor or f"val/macro_{run.metric}" for run in findings.runs}
        yield (
            "Values are on test samples. Each run is tested at its round with the "
            f"{best} {' or '.join(sorted(tags))} on validation samples, and in some columns after "
            "the last round. No round is chosen on test samples."
        )
    else:
        yield (
            "Values are on test samples, after the last round. Not every run has kept the round "
            "that was best on validation samples."
        )
    yield (
        "Macro is the plain mean over clients. Micro is the mean weighted by their test samples. "
        "Worst decile is the mean of the worst tenth of the clients, rounded up. Newcomers have a "
        "macro mean of their own, and are in no other column. Clients without test samples or "
        "without a value are left out."
    )
    lacking = {row.label: _without_value(findings, row) for row in findings.finished}
    if any(lacking.values()):
        listed = ", ".join(f"{label} {number:,}" for label, number in lacking.items() if number)
        yield (
            f"Clients with test samples but without a value of {findings.metric}, at all seeds "
            f"together: {listed}. Rows are ranked by the clients with a value in all rows."
        )
    if any(row.method == LOCAL for row in findings.finished):
        yield (
            f"Below {LOCAL}: the share of clients with a worse {findings.metric} than when they "
            "train alone, at the same seed."
        )


def _comparison(findings: Findings) -> Iterator[str]:
    if not findings.differences:
        return
    best = findings.best
    assert best is not None
    complete = " among the rows with most seeds" if _uneven(findings) else ""
    yield (
        f"Bold (in plain text: *): {best.label}, the best{complete}, and all rows that the "
        f"{100 * LEVEL:.0f} % interval of the difference does not place behind it."
    )
    tests = Counter(other for _, other in findings.differences)
    yield (
        "A difference is of the same client at the same seed. Its mean is over clients and then "
        "over seeds. Intervals are percentiles of a hierarchical bootstrap, which draws seeds and "
        f"then clients within each ({findings.draws:,} draws, seed {SEED}). p is two-sided, from "
        "the same draws, and at least the smallest p of a sign test over the pairs. It has Holm's "
        f"correction for {_listed(sorted({*tests.values()}))} comparisons."
    )
    if any(found.clients < FEWEST for found in findings.differences.values()):
        yield f"With fewer than {FEWEST} pairs of a client and a seed, there is no interval."
    corrected = findings.corrected(best)
    spared = [
        row.label
        for row in findings.finished
        if not findings.is_bold(row) and corrected.get(row.key, 0) >= 1 - LEVEL
    ]
    if spared:
        yield (
            f"Not bold, but not separated from {best.label} either after Holm's correction: "
            f"{', '.join(spared)}."
        )
    unpaired = [
        row.label
        for row in findings.finished
        if row is not best and (row.key, best.key) not in findings.differences
    ]
    if unpaired:
        yield (
            f"Not compared with {best.label}: {', '.join(unpaired)}. There is no seed at which "
            "both have values for the same clients' data."
        )


def _limits(findings: Findings) -> Iterator[str]:
    """Name the limits of so few seeds."""
    seeds = max((found.seeds for found in findings.differences.values()), default=0)
    if seeds == 1:
        yield (
            "One seed can't show a difference between methods that other seeds would confirm. The "
            "intervals are of the clients of this one partition, and of this one training run."
        )
    elif seeds and smallest_sign_test(seeds) > 1 - LEVEL:
        yield (
            f"{seeds} seeds can't show that a method is better at other seeds. If it is better at "
            f"all {seeds}, a two-sided sign test over seeds still gives p = "
            f"{smallest_sign_test(seeds):g}. There are only {resamples(seeds)} different ways to "
            "resample the seeds. So no interval goes beyond the range that the clients of a single "
            f"seed give. A sign test needs at least {_needed()} seeds for p below {1 - LEVEL:.2f}."
        )
    data = {run.fingerprints.get("data") for run in findings.runs}
    if seeds > 1 and len(data) == 1 and None not in data:
        yield (
            "As far as the data's hash tells, all seeds have the same clients with the same data. "
            "The intervals are then about other training runs with these clients, not about other "
            "clients."
        )


def _needed() -> int:
    return next(seeds for seeds in range(1, 99) if smallest_sign_test(seeds) < 1 - LEVEL)


def _fairness(findings: Findings) -> Iterator[str]:
    """Say whether all rows had the same data, weights, cohorts and batches at each seed."""
    others: dict[str, dict[str, list[int]]] = {}  # seeds by row and kind
    unknown: set[str] = set()
    shown = []
    for seed in findings.seeds:
        rows = [row for row in findings.finished if seed in row.runs]
        usual = {}
        for kind in _KINDS:
            hashes = {row.label: row.runs[seed].fingerprints.get(kind) for row in rows}
            known = Counter(value for value in hashes.values() if value is not None)
            if known:
                usual[kind] = known.most_common(1)[0][0]
            for label, value in hashes.items():
                if value is None:
                    unknown.add(label)
                elif value != usual[kind]:
                    others.setdefault(label, {}).setdefault(kind, []).append(seed)
        if usual:
            listed = ", ".join(f"{kind} {value}" for kind, value in usual.items())
            shown.append(f"seed {seed}: {listed}")
    if not shown:
        yield "Whether the methods had the same data, weights, cohorts and batches is unknown."
    elif others:
        listed = "; ".join(f"{label} has {_others(found)}" for label, found in others.items())
        yield f"Not all rows had the same start: {listed}. Most rows: {'; '.join(shown)}."
    else:
        whose = f" ({', '.join(sorted(unknown))}: not known)" if unknown else ""
        yield (
            "At each seed, all rows had the same clients' data, initial weights, cohorts and "
            f"batches{whose}: {'; '.join(shown)}."
        )


def _others(seeds: Mapping[str, list[int]]) -> str:
    """Return the kinds of things that a row had otherwise than most rows, with the seeds."""
    return ", ".join(f"other {_KINDS[k]} at {_named('seed', s)}" for k, s in seeds.items())


def _tuning(findings: Findings) -> Iterator[str]:
    tuned = [row for row in findings.finished if row.tuned]
    if not tuned:
        return
    yield "Settings were tuned on validation samples. The last column has their value there."
    rest = [row.label for row in findings.finished if not row.tuned]
    if rest:
        yield f"Not tuned: {', '.join(rest)}."
    trials = {row.tuned.trials for row in tuned if row.tuned}
    if len(trials) > 1:
        yield f"The methods were not tuned equally: from {min(trials)} to {max(trials)} trials."
    both = {seed for row in tuned if row.tuned for seed in row.tuned.seeds} & {*findings.seeds}
    if both:
        yield f"Tuned on {_named('seed', sorted(both))}, which the tables report too."


def _costs(findings: Findings) -> Iterator[str]:
    runs = findings.runs
    hosts, devices = (
        sorted({*names}) for names in zip(*((r.host, r.device) for r in runs), strict=True)
    )
    yield (
        "A participation counts the bytes that one client receives and sends in one round. The "
        "time of a round, without evaluation, is the median over rounds and seeds. Further columns "
        "have the threads of each run, and the jobs on the machine at once. The runs were on "
        f"{', '.join(devices)} of {', '.join(hosts)}."
    )
    if findings.target is not None:
        tag = f"val/macro_{findings.metric}"
        way = "at least" if findings.mode == "max" else "at most"
        yield (
            f"Target: {tag} of {way} {findings.target:g}, at the rounds that were evaluated. "
            "Rounds and bytes until then are medians over seeds. A dash means that half of the "
            "seeds or more never reach it."
        )
    failed = [
        f"{row.label} {sum(run.failed for run in row.runs.values()):,} of "
        f"{sum(run.participations for run in row.runs.values()):,}"
        for row in findings.finished
        if any(run.failed for run in row.runs.values())
    ]
    if failed:
        yield f"Participations that failed: {', '.join(failed)}."


def _without_value(findings: Findings, row: Row) -> int:
    """Return the number of clients with test samples and without a value, over all seeds."""
    runs = row.runs.values()
    known = [np.isfinite(by_client(run, findings.metric, findings.when)).sum() for run in runs]
    return int(sum((np.array(run.samples["test"]) > 0).sum() for run in runs) - sum(known))


def _uneven(findings: Findings) -> bool:
    return len({len(row.runs) for row in findings.finished}) > 1


def _named(what: str, numbers: list[int]) -> str:
    return f"{what}{'' if len(numbers) == 1 else 's'} {_listed(numbers)}"


def _listed(items: Iterable[object]) -> str:
    *first, last = map(str, items)
    return f"{', '.join(first)} and {last}" if first else last

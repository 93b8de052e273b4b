"""The tables of a comparison, against loops over the clients' values."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pflight.experiments.figures import Figures
from pflight.experiments.footer import footer
from pflight.experiments.outcome import Curve, Failure, Outcome, ResultError, Tuned, Waiting
from pflight.experiments.results import Results
from pflight.experiments.tables import DASH, Bold, Table

from .made import comparison, moment, outcome

LEVELS = {"FedAvg": 0.7, "FeSEM": 0.8, "Local": 0.75, "Ditto": 0.795}


def column(table: Table, heading: str) -> dict[str, str]:
    """Return a column of a table, by the rows' labels."""
    place = [*table.columns].index(heading)
    return {row[0]: row[place] for row in table.rows}


def named(results: Results, start: str) -> Table:
    """Return the table whose title starts with a text."""
    (table,) = [table for table in results.tables() if table.title.startswith(start)]
    return table


def cell(values: Sequence[float], factor: float = 100, decimals: int = 1) -> str:
    mean = factor * statistics.mean(values)
    if len(values) == 1:
        return f"{mean:.{decimals}f}"
    return f"{mean:.{decimals}f} ± {factor * statistics.stdev(values):.{decimals}f}"


def notes(results: Results) -> str:
    return "\n".join(footer(results.findings))


def test_the_tables_are_those_of_loops() -> None:
    runs = comparison(LEVELS)
    results = Results(runs)
    expected: dict[tuple[str, str, str, str], list[float]] = {}
    for run in runs:
        for when in ("chosen", "last"):
            for metric, values in getattr(run, when).per_client.items():
                known = [(v, n) for v, n in zip(values, run.samples["test"], strict=True) if n]
                total = sum(n for _, n in known)
                for mean, value in (
                    ("macro", sum(v for v, _ in known) / len(known)),
                    ("micro", sum(v * n for v, n in known) / total),
                    ("worst decile", min(v for v, _ in known)),  # of eight clients
                ):
                    expected.setdefault((run.method, metric, mean, when), []).append(value)
    main = results.table()
    means = {m: statistics.mean(expected[m, "acc", "macro", "chosen"]) for m in LEVELS}
    assert [row[0] for row in main.rows] == sorted(LEVELS, key=lambda m: -means[m])
    for method in LEVELS:
        for heading, mean, when in (
            ("macro acc, %", "macro", "chosen"),
            ("last round", "macro", "last"),
            ("micro acc, %", "micro", "chosen"),
            ("worst decile, %", "worst decile", "chosen"),
        ):
            found = column(main, heading)[method]
            assert found == cell(expected[method, "acc", mean, when])
        for metric in ("acc", "f1"):
            whole = named(results, f"Test {metric}")
            for mean in ("macro", "micro"):
                values = expected[method, metric, mean, "chosen"]
                assert column(whole, mean)[method] == cell(values)
                values = expected[method, metric, mean, "last"]
                assert column(whole, f"{mean}, last round")[method] == cell(values)
    assert "worst decile" not in named(results, "Test f1").columns  # of unknown direction


def test_the_share_below_local_pairs_clients() -> None:
    runs = comparison(LEVELS)
    local = {run.seed: run for run in runs if run.method == "Local"}
    found = column(Results(runs).table(), "below Local, %")
    for method in LEVELS:
        shares = []
        for run in (run for run in runs if run.method == method):
            its, mine = (r.chosen.per_client["acc"] for r in (local[run.seed], run) if r.chosen)
            worse = [mine[client] < its[client] for client in range(len(mine))]
            shares.append(sum(worse) / len(worse))
        assert found[method] == cell(shares)
    assert found["Local"] == "0.0 ± 0.0"
    without = Results([run for run in runs if run.method != "Local"])
    assert {*column(without.table(), "below Local, %").values()} == {DASH}


def test_lower_may_be_better() -> None:
    values = {"A": [2.0, 3.0, 4.0], "B": [1.0, 2.0, 9.0], "Local": [2.0, 2.5, 4.5]}
    runs = [
        outcome(method, seed, {"mae": column}, mode="min")
        for method, column in values.items()
        for seed in range(2)
    ]
    results = Results(runs, target=0.6)
    main = results.table()
    assert column(main, "macro mae") == {
        "A": "3.00 ± 0.00",
        "Local": "3.00 ± 0.00",
        "B": "4.00 ± 0.00",
    }
    assert column(main, "worst decile")["B"] == "9.00 ± 0.00"
    below = column(main, "below Local, %")
    assert (below["A"], below["B"]) == ("33.3 ± 0.0", "33.3 ± 0.0")
    assert "last round" not in main.columns
    assert "after the last round" in notes(results)
    assert column(named(results, "Difference"), "better at")["B"] == "0 of 2"
    assert column(named(results, "Costs"), "rounds to target")["A"] == "5"


def test_what_is_bold_is_not_separated_from_the_best() -> None:
    results = Results(comparison(LEVELS))
    findings = results.findings
    assert findings.best is not None
    assert findings.best.label == "FeSEM"
    bold = {row[0] for row in results.table().rows if isinstance(row[2], Bold)}
    table = named(results, "Difference from FeSEM, the best, in macro acc, % points")
    intervals = column(table, "95 % interval")
    separated = {label for label, ends in intervals.items() if float(ends.split(" to ")[1]) < 0}
    assert separated >= {"FedAvg", "Local"}
    assert bold == {*LEVELS} - separated == {"FeSEM", "Ditto"}


def test_holm_counts_the_methods_that_are_compared() -> None:
    results = Results(comparison(LEVELS), baseline="fedavg")
    for start in ("Difference from FeSEM, the best", "Difference from FedAvg, the baseline"):
        table = named(results, start)
        raw = {label: float(p) for label, p in column(table, "p").items()}
        corrected = column(table, "p, Holm")
        reached = 0.0
        for step, label in enumerate(sorted(raw, key=raw.__getitem__)):
            reached = max(reached, min(1.0, (3 - step) * raw[label]))
            assert float(corrected[label]) == pytest.approx(reached, abs=3e-4)
    assert "Holm's correction for 3 comparisons" in notes(results)


def test_what_only_the_correction_spares_is_named() -> None:
    levels = {f"M{number}": 0.7 - number / 100 for number in range(12)}
    results = Results(comparison({**levels, "worst": 0.3}, noise=0.1))
    table = named(results, "Difference")
    best = table.title.split()[2].removesuffix(",")
    bold = {row[0] for row in results.table().rows if isinstance(row[2], Bold)}
    p = {label: float(value) for label, value in column(table, "p, Holm").items()}
    spared = [label for label in p if label not in bold and p[label] >= 0.05]
    assert spared
    assert "worst" not in {*spared, *bold}
    said = f"Not bold, but not separated from {best} either after Holm's correction: "
    assert f"{said}{', '.join(spared)}." in notes(results)


def test_clients_without_a_value_are_left_out_of_both_methods() -> None:
    whole = [0.5, 0.6, 0.7, 0.8]
    one = outcome("A", 0, {"acc": [0.9, None, math.nan, 0.1]}, samples={"test": [5, 5, 5, 0]})
    two = outcome("B", 0, {"acc": whole}, samples={"test": [5, 5, 5, 0]})
    results = Results([one, two])
    assert column(results.table(), "macro acc, %") == {"A": "90.0", "B": "60.0"}
    table = named(results, "Difference from A")
    assert column(table, "difference") == {"B": "-40.00"}
    assert column(table, "pairs") == {"B": "1"}
    assert "without a value of acc, at all seeds together: A 2." in notes(results)


def test_rows_are_ranked_by_the_clients_that_all_have() -> None:
    flattered = outcome("A", 0, {"acc": [None, 0.8, 0.8]})  # has no value of the hard client
    better = outcome("B", 0, {"acc": [0.1, 0.9, 0.9]})
    nothing = outcome("C", 0, {"acc": [None] * 3})
    results = Results([flattered, better, nothing])
    assert [row.method for row in results.findings.rows] == ["B", "A", "C"]
    assert "ranked by the clients with a value in all rows" in notes(results)
    assert column(results.table(), "macro acc, %") == {"A": "80.0", "B": "63.3", "C": DASH}


def test_few_pairs_have_no_interval_in_the_table() -> None:
    runs = [outcome(method, 0, {"acc": [value]}) for method, value in (("A", 0.9), ("B", 0.5))]
    results = Results(runs)
    table = named(results, "Difference from A, the best")
    assert column(table, "95 % interval") == {"B": DASH}
    assert column(table, "p") == {"B": "1.0000"}
    assert "fewer than 6 pairs" in notes(results)
    assert all(results.findings.is_bold(row) for row in results.findings.finished)


def test_a_row_without_values_is_last_and_not_the_best() -> None:
    runs = [outcome(method, 0, {"acc": [value]}) for method, value in (("A", None), ("B", 0.5))]
    results = Results(runs)
    assert column(results.table(), "macro acc, %") == {"B": "50.0", "A": DASH}
    assert "Not compared with B" in notes(Results([*runs, outcome("C", 0, {"acc": [0.4]})]))
    assert not any(isinstance(row[2], Bold) for row in Results(runs[:1]).table().rows)


def test_clients_are_paired_by_their_ids() -> None:
    one = outcome("A", 0, {"acc": [0.1, 0.2, 0.3]}, clients=[1, 5, 9])
    two = outcome("B", 0, {"acc": [0.2, 0.4]}, clients=[5, 9])
    table = named(Results([one, two]), "Difference from B")
    assert column(table, "difference") == {"A": "-5.00"}
    assert column(table, "pairs") == {"A": "2"}


def test_methods_are_compared_at_the_seeds_that_both_have() -> None:
    runs = [run for run in comparison(LEVELS) if (run.method, run.seed) != ("FeSEM", 1)]
    waiting = [Waiting("key of FeSEM", "FeSEM", {}, 1)]
    results = Results([*runs, *waiting])
    main = results.table()
    assert column(main, "seeds") == {**dict.fromkeys(LEVELS, "3 of 3"), "FeSEM": "2 of 3"}
    assert main.rows[0][0] == "FeSEM"
    assert results.findings.best is not None
    assert results.findings.best.label == "Ditto"  # of those with all seeds
    table = named(results, "Difference from Ditto")
    assert column(table, "better at")["FeSEM"].endswith(" of 2")
    assert column(table, "better at")["Local"] == "0 of 3"
    mine, its = (
        [run.chosen.per_client["acc"] for run in runs if run.method == name and run.seed != 1]
        for name in ("FeSEM", "Ditto")
        if all(run.chosen for run in runs)
    )
    pairs = [statistics.mean(a) - statistics.mean(b) for a, b in zip(mine, its, strict=True)]
    assert column(table, "difference")["FeSEM"] == f"{100 * statistics.mean(pairs):.2f}"
    assert "11 runs finished, 1 waiting or running, 0 failed." in notes(results)


def test_a_run_that_failed_is_a_row_that_says_why() -> None:
    reason = "the network has no head"
    failures = [Failure("key of FedRep", "FedRep", {}, seed, reason, "log") for seed in range(3)]
    failures.append(Failure("key of Ditto", "Ditto", {}, 0, "was killed, then ran", "log"))
    results = Results([*comparison(LEVELS), *failures])
    last = results.table().rows[-1]
    assert [*last[:3]] == ["FedRep", "0 of 3, 3 failed", DASH]
    failed = named(results, "Runs that failed")
    assert [[*row[:3]] for row in failed.rows] == [["FedRep", str(s), reason] for s in range(3)]
    assert reason in results.to_csv()


def test_a_table_is_printed_before_any_run_has_finished() -> None:
    results = Results([Waiting("k", "FedAvg", {"model.local_epochs": 5}, 0)])
    assert column(results.table(), "seeds") == {"FedAvg, local_epochs=5": "0 of 1"}
    for text in (str(results), results.to_markdown(), results.to_latex(), results.to_html()):
        assert "epochs=5" in text
    assert "waiting" in results.to_csv()
    assert Results([]).table().rows == []


def test_one_seed_has_no_deviation() -> None:
    results = Results(comparison(LEVELS, seeds=1))
    assert "±" not in "".join(
        cell for table in results.tables() for row in table.rows for cell in row
    )
    assert "The variation from seed to seed is unknown" in notes(results)
    assert "One seed can't show" in notes(results)


@pytest.mark.parametrize("seeds", [2, 3, 5, 6])
def test_few_seeds_say_what_they_can_not_show(seeds: int) -> None:
    said = notes(Results(comparison(LEVELS, seeds=seeds), draws=100))
    smallest = 2 / 2**seeds
    assert (f"a two-sided sign test over seeds still gives p = {smallest:g}" in said) == (seeds < 6)
    assert ("only 10 different ways to resample the seeds" in said) == (seeds == 3)
    assert "Mean ± standard deviation (ddof 1)" in said


def test_equal_starts_are_shown_by_their_hashes() -> None:
    said = notes(Results(comparison(LEVELS)))
    assert "At each seed, all rows had the same clients' data" in said
    assert "seed 2: data data-2, weights weights-2, cohorts cohorts-2, batches batches-2" in said


def test_other_starts_are_named() -> None:
    runs = comparison(LEVELS)
    for place, run in enumerate(runs):
        if run.method == "Ditto" and run.seed != 1:
            runs[place] = replace(run, fingerprints={**run.fingerprints, "batches": "other"})
    said = notes(Results(runs))
    assert "Not all rows had the same start: Ditto has other batches at seeds 0 and 2." in said
    assert "batches batches-0" in said
    unknown = [replace(run, fingerprints={}) for run in runs]
    assert "is unknown" in notes(Results(unknown))


def test_clients_with_other_data_are_not_paired() -> None:
    runs = comparison(LEVELS)
    for place, run in enumerate(runs):
        if run.method == "Local" or (run.method == "FedAvg" and run.seed == 0):
            runs[place] = replace(run, fingerprints={**run.fingerprints, "data": "other"})
    results = Results(runs)
    table = named(results, "Difference from FeSEM")
    assert column(table, "pairs") == {"Ditto": "24", "FedAvg": "16", "Local": DASH}
    assert "Not compared with FeSEM" in notes(results)
    assert column(results.table(), "below Local, %")["FeSEM"] == DASH


def test_the_same_clients_at_all_seeds_are_said() -> None:
    runs = [replace(run, fingerprints={"data": "one"}) for run in comparison(LEVELS)]
    assert "not about other clients" in notes(Results(runs))
    assert "not about other clients" not in notes(Results(comparison(LEVELS)))


def test_rounds_and_bytes_to_a_target_are_medians() -> None:
    reached = {"A": [10, 5, 15], "B": [None, 5, 10], "C": [None, None, 5], "D": [None] * 3}
    runs = []
    for method, seeds in reached.items():
        for seed, when in enumerate(seeds):
            rounds = [5, 10, 15]
            values = [0.9 if trained == when else 0.1 for trained in rounds]
            sizes = [1000 * trained + seed for trained in rounds]
            curve = Curve(rounds, sizes, {"val/macro_acc": values})
            runs.append(outcome(method, seed, {"acc": [0.5, 0.7]}, curve=curve))
    results = Results(runs, target=0.8)
    costs = named(results, "Costs")
    assert column(costs, "rounds to target") == {"A": "10", "B": "10", "C": DASH, "D": DASH}
    assert column(costs, "until then, kB") == {"A": "10.0", "B": "10.0", "C": DASH, "D": DASH}
    assert "val/macro_acc of at least 0.8" in notes(results)
    never = Results(runs, target=2.0)
    assert {*column(named(never, "Costs"), "rounds to target").values()} == {DASH}
    assert never.to_markdown()


def test_costs() -> None:
    runs = [
        outcome("A", seed, {"acc": [0.5]}, seconds=time, bytes_down=size, beside=jobs, failed=seed)
        for seed, (time, size, jobs) in enumerate([(0.3, 3000, 1), (0.1, 5000, 2), (0.2, 7000, 2)])
    ]
    results = Results(runs)
    costs = named(results, "Costs")
    assert column(costs, "a participation, B")["A"] == "150"  # (5000 + 1000) / 40
    assert column(costs, "in all, kB")["A"] == "6.0"
    assert column(costs, "a round, s")["A"] == "0.200"
    assert column(costs, "threads")["A"] == "1"
    assert column(costs, "jobs")["A"] == "1 to 2"
    assert "Participations that failed: A 3 of 120." in notes(results)


def test_newcomers_are_reported() -> None:
    values = {"acc": [0.5]}
    runs = [
        outcome("A", seed, values, last=moment(9, values, {"test/new/macro_acc": found}))
        for seed, found in enumerate([0.6, 0.7])
    ]
    assert column(Results(runs).table(), "newcomers, %")["A"] == cell([0.6, 0.7])
    assert "newcomers, %" not in Results(comparison(LEVELS)).table().columns


def test_tuning_is_reported() -> None:
    runs = []
    for run in comparison({"FedAvg": 0.7, "FeSEM": 0.8, "Ditto": 0.6}):
        if run.method != "Ditto":
            trials = 20 if run.method == "FeSEM" else 10
            chosen = {"trainer.callbacks.num_clusters": 4, "model.lr": 0.05}
            tuned = Tuned(trials, "tpe", [2, 100], chosen, 0.812, {})
            run = replace(run, tuned=tuned, settings={**chosen, "model.local_epochs": 5})
        runs.append(run)
    results = Results(runs)
    table = named(results, "Tuning")
    assert [*table.rows[0]] == [
        "FeSEM, local_epochs=5",
        "num_clusters=4, lr=0.05",
        "20, tpe",
        "2, 100",
        "81.2",
    ]
    said = notes(results)
    assert "Not tuned: Ditto." in said
    assert "The methods were not tuned equally: from 10 to 20 trials." in said
    assert "Tuned on seed 2, which the tables report too." in said


def test_rows_have_different_labels() -> None:
    def row(key: str, settings: dict[str, Any], chosen: dict[str, Any] | None = None) -> Outcome:
        tuned = Tuned(1, "tpe", [9], chosen, None, {}) if chosen else None
        values = {"acc": [0.5]}
        return outcome(
            "A", 0, values, key=key, settings={**settings, **(chosen or {})}, tuned=tuned
        )

    rows = [
        row("1" * 12, {"a.x": 1}),
        row("2" * 12, {"a.x": 1, "b.x": None}),
        row("3" * 12, {}, {"a.x": 1}),
        row("4" * 12, {}, {"a.x": 2}),
        row("5" * 12, {"y": "s"}, {"a.x": 2}),
        row("6" * 8 + "1111", {"z": [1]}),
        row("6" * 8 + "2222", {"z": [1]}),
    ]
    assert {r.key[0] + r.key[-1]: r.label for r in Results(rows).findings.rows} == {
        "11": "A, x=1 (11111111)",
        "22": "A, a.x=1, b.x=null",
        "33": "A, x=1 (33333333)",
        "44": "A, x=2",
        "55": "A, y=s",
        "61": "A, z=[1] (666666661111)",
        "62": "A, z=[1] (666666662222)",
    }


def test_local_is_that_of_the_same_settings() -> None:
    def row(method: str, epochs: int, value: float) -> Outcome:
        settings, key = {"model.local_epochs": epochs}, f"{method}{epochs}"
        return outcome(method, 0, {"acc": [value]}, key=key, settings=settings)

    runs = [row("Local", 1, 0.4), row("Local", 5, 0.8), row("A", 1, 0.5), row("A", 5, 0.5)]
    assert column(Results(runs).table(), "below Local, %") == {
        "Local, local_epochs=1": "0.0",
        "Local, local_epochs=5": "0.0",
        "A, local_epochs=1": "0.0",
        "A, local_epochs=5": "100.0",
    }
    runs.append(row("A", 9, 0.5))  # with neither
    assert column(Results(runs).table(), "below Local, %")["A, local_epochs=9"] == DASH
    assert column(Results(runs[1:]).table(), "below Local, %")["A, local_epochs=9"] == "100.0"


def test_what_can_not_be_compared_is_an_error() -> None:
    runs = comparison(LEVELS)
    other = outcome("Other", 0, {"mae": [0.1]}, mode="min")
    with pytest.raises(ResultError, match=r"acc \(max\) .*, mae \(min\) Other"):
        Results([*runs, other])
    with pytest.raises(ResultError, match=r"FedAvg has two runs .* with seed 0"):
        Results([*runs, runs[0]])
    with pytest.raises(ResultError, match=r"no row 'FedAvk' .* did you mean 'FedAvg'"):
        Results(runs, baseline="FedAvk")
    with pytest.raises(ResultError, match="no row 'x' to compare with in"):
        Results(runs, baseline="x")
    several = [replace(run, key=f"{e}", settings={"e": e}) for run in runs[:1] for e in (1, 2)]
    with pytest.raises(ResultError, match="did you mean 'FedAvg, e=1' or 'FedAvg, e=2'"):
        Results(several, baseline="FedAvg")
    assert Results(several, baseline="FedAvg, e=2").findings.baseline is not None


def test_a_baseline_that_has_not_finished_is_no_error() -> None:
    runs = [*comparison(LEVELS), Waiting("k", "FedProx", {}, 0)]
    results = Results(runs, baseline="FedProx")
    assert [row.label for row in results.findings.references] == ["FeSEM"]


def test_the_order_of_the_runs_does_not_matter() -> None:
    runs = comparison(LEVELS)
    first = Results(runs, target=0.6, baseline="Local")
    shuffled = random.Random(1).sample(runs, len(runs))
    again = Results(shuffled, target=0.6, baseline="Local")
    assert again.to_markdown() == first.to_markdown()
    assert again.to_csv() == first.to_csv()


def test_the_csv_has_all_numbers() -> None:
    runs = comparison(LEVELS)
    failures = [Failure("k", "FedRep", {"a": [1]}, 0, "no, head", "log")]
    results = Results([*runs, *failures], target=0.6)
    lines = [*csv.DictReader(io.StringIO(results.to_csv()))]
    keys = "method", "seed", "moment", "quantity", "statistic", "against"
    found = {tuple(line[key] for key in keys): line["value"] for line in lines}
    assert len(found) == len(lines)
    for run in runs:
        assert run.chosen is not None
        values = run.chosen.per_client["f1"]
        value = found[run.method, str(run.seed), "chosen", "test/macro_f1", "value", ""]
        assert float(value) == pytest.approx(sum(values) / len(values))  # type: ignore[arg-type]
        assert found[run.method, str(run.seed), "", "bytes", "value", ""] == "4000"
        assert found[run.method, str(run.seed), "", "rounds_to_target", "value", ""] == "10"
    by_seed = [
        float(found["Ditto", str(seed), "last", "test/micro_acc", "value", ""]) for seed in range(3)
    ]
    mean, deviation = (
        float(found["Ditto", "", "last", "test/micro_acc", statistic, ""])
        for statistic in ("mean", "std")
    )
    assert mean == pytest.approx(statistics.mean(by_seed))
    assert deviation == pytest.approx(statistics.stdev(by_seed))
    difference = results.findings.differences["key of Local", "key of FeSEM"]
    key = "Local", "", "chosen", "test/macro_acc", "difference low", "key of FeSEM"
    assert float(found[key]) == difference.low
    assert found["FedRep", "0", "", "run", "failed", ""] == "no, head"
    assert {json.loads(line["settings"]).get("a", [None])[0] for line in lines} == {1, None}


class Balanced(HTMLParser):
    """Collects the text of a page, and checks that its elements are closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.images = 0
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.images += tag == "img"
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "b"):
            self.cells.append(data)


HOSTILE = r"""[A] 100% & #1 $x$ {y} ~z ^w_v \emph <b> | "q" 'r' * `c`"""


def test_hostile_names_are_escaped() -> None:
    runs = comparison({HOSTILE: 0.8, "*B": 0.5})
    failures = [Failure("k", "C", {}, 0, f"no {HOSTILE}", "a_b.log")]
    results = Results([*runs, *failures])
    page = Balanced(results.to_html())
    assert page.open == []
    assert HOSTILE in page.cells
    assert page.images == 3

    for line in results.to_markdown().splitlines():
        if line.startswith("| \\[A\\]"):
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            label = re.sub(r"\\([\\|*`<\[\]])", r"\1", cells[0]).strip()
            assert label == HOSTILE
    main = results.to_markdown().split("##")[1].strip().splitlines()[2:]
    assert len({len(re.split(r"(?<!\\)\|", line)) for line in main}) == 1

    latex = results.to_latex()
    body = latex.split("\n", 1)[1]
    assert not re.search(r"(?<!\\)[#%~^]", body)
    assert body.count(r"\begin{tabular}") == body.count(r"\bottomrule") == len(results.tables())
    unescaped = re.sub(r"\\[{}]", "", body)
    depth = [0]
    for character in unescaped:
        depth.append(depth[-1] + (character == "{") - (character == "}"))
    assert min(depth) == 0 == depth[-1]
    rows = [line for line in body.splitlines() if line.endswith(r"\\")]
    starts = [line.strip()[:1] for line in rows]
    assert "[" not in starts
    assert "*" not in starts
    counts = [len(re.findall(r"(?<!\\)&", line)) for line in rows]
    columns = [len(table.columns) - 1 for table in results.tables() for _ in [0, *table.rows]]
    assert counts == columns


def test_bold_is_seen_in_each_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    results = Results(comparison({"FedAvg": 0.5, "FeSEM": 0.8}))
    cell = next(row[2] for row in results.table().rows if row[0] == "FeSEM")
    assert f"* {cell}" in str(results)
    assert f"| **{cell}** |" in results.to_markdown()
    assert f"<b>{cell}</b>" in results.to_html()
    mean, deviation = cell.split(" ± ")
    assert rf"\textbf{{{mean} $\pm$ {deviation}}}" in results.to_latex()
    assert f"<b>{cell}</b>" in results._repr_html_()


def test_tables_are_saved_before_figures_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def undrawn(_: Figures) -> None:
        raise ValueError("no fonts")

    monkeypatch.setattr(Figures, "pngs", undrawn)
    with pytest.raises(ValueError, match="no fonts"):
        Results(comparison(LEVELS)).save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"table.md", "table.tex", "table.csv"}


def test_unequal_numbers_of_rounds_are_said() -> None:
    runs = comparison({"A": 0.5, "B": 0.6})
    said = "Not all runs have trained for as many rounds: "
    assert said not in notes(Results(runs))
    whole = [run if run.method == "A" else _cut_off(run, 12) for run in runs]
    assert f"{said}B 12, A 20." in notes(Results(whole))
    assert f"{said}B 20, A 12 and 20." in notes(Results([_cut_off(runs[0], 12), *runs[1:]]))


def _cut_off(run: Outcome, rounds: int) -> Outcome:
    return replace(run, last=replace(run.last, round=rounds))


def test_save_writes_all_forms(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "tables"
    Results(comparison(LEVELS, seeds=1)).save(folder)
    results = Results(comparison(LEVELS))
    written = results.save(folder)
    names = {"table.md", "table.tex", "table.csv", "table.html"}
    assert {path.name for path in written} == names | {"curves.png", "traffic.png", "boxes.png"}
    assert {path.name for path in folder.iterdir()} == {path.name for path in written}
    assert (folder / "table.md").read_text(encoding="utf-8") == results.to_markdown()
    assert (folder / "table.html").read_text(encoding="utf-8").count("data:image/png") == 3
    assert (folder / "boxes.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("width", [60, 80])
def test_tables_fit_a_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    long = "A method, some_option=4, another_option=a_value"
    levels = {long: 0.8, "FedAvg": 0.7, "Local": 0.75}
    runs = comparison(levels, seeds=5)
    failed = Failure("k", "IFCA", {}, 0, "the network has no head " * 9, "log.txt")
    results = Results([*runs, failed], baseline="FedAvg", target=0.6)
    lines = str(results).splitlines()
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "Results, continued" in text
    numbers = {cell for row in results.table().rows for cell in row[1:]}
    assert all(number in text for number in numbers)  # none is broken


@pytest.mark.long
def test_a_terminal_without_unicode_and_with_control_characters() -> None:
    code = (
        "from pflight.messages import one_line, write_plainly\n"
        "from pflight.experiments.results import Results\n"
        "from tests.experiments.made import comparison\n"
        "write_plainly()\n"
        "print(Results(comparison({'FedAvg': 0.7, 'é\\x1b[31m': 0.8})))\n"
    )
    environment = {
        **os.environ,
        "PYTHONIOENCODING": "ascii",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=True
    )
    said = done.stdout.decode("ascii")
    assert "+/-" in said
    assert "\x1b" not in said


def test_formulas_are_quoted_in_csv() -> None:
    runs = comparison({"=HYPERLINK(1)": 0.7, "+1": 0.8})
    lines = [*csv.DictReader(io.StringIO(Results(runs).to_csv()))]
    assert {line["method"] for line in lines} == {"'=HYPERLINK(1)", "'+1"}
    assert any(float(line["value"]) < 0 for line in lines if line["value"])

"""The papers' experiments: what is run, what is made of it, and that a run goes on."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SMALL = [
    "data.num_clients=4",
    "data.cohort_size=2",
    "data.partition.samples_per_client=20",
    "data.val_fraction=0",
    "data.test_fraction=0.5",
    "model.local_epochs=3",
]
TOY = {
    "tested": 2,
    "rounds": 3,
    "measures": ["trained", "own", "adapted", "micro_f1"],
    "differences": [["fedec_1.5", "fedec_wo"]],
    "columns": {"digits": {"title": "Digits", "config": "data/digits", "set": SMALL}},
    "claims": {
        "measures": ["own", "adapted"],
        "heads": ["Digits", "elsewhere"],
        "rows": [
            {"title": "FedEC − FedAvg", "pairs": [["digits", "fedec_1.5", "really"], None]},
        ],
    },
    "methods": {
        "fedavg": {"title": "FedAvg", "run": "fedec_wo", "model": "server"},
        "really": {"title": "FedAvg, itself", "config": "algorithm/fedavg"},
        "fedec_wo": {"title": "FedEC-wo", "config": "algorithm/fedec_wo"},
        "fedec_1.5": {
            "title": "FedEC, 1.5",
            "config": "algorithm/fedec",
            "set": ["trainer.callbacks.alpha=1.5"],
        },
    },
    "published": {"digits": {"FedAvg": 42.654, "FedEC": 92.35}},
}


@pytest.fixture
def papers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    module = importlib.import_module("papers")
    monkeypatch.setitem(module.EXPERIMENTS, "toy", TOY)
    return module


@pytest.fixture
def claims(papers: Any) -> Any:
    return importlib.import_module("claims")


def options(folder: Path, **others: Any) -> argparse.Namespace:
    asked = {"experiment": "toy", "columns": None, "methods": None, "seeds": [0]}
    return argparse.Namespace(
        **{**asked, "out": folder, "root": None, "rounds": None, "set": [], **others}
    )


def read(folder: Path, method: str) -> list[dict[str, Any]]:
    files = sorted((folder / f"toy/digits/{method}/0/tests").iterdir())
    return [{**json.loads(file.read_text()), "seconds": None} for file in files]


def test_every_experiment_is_of_configurations_that_exist(papers: Any, claims: Any) -> None:
    for name, spec in papers.EXPERIMENTS.items():
        assert {*spec["measures"]} <= {*papers.MEASURES}
        for part in (*spec["columns"].values(), *spec["methods"].values()):
            if "config" in part:
                assert (papers.CONFIGS / f"{part['config']}.yaml").is_file(), part
            else:
                assert part["run"] in spec["methods"]
        assert {*spec.get("published", {})} <= {*spec["columns"]}, name
        titles = {method["title"] for method in spec["methods"].values()}
        titles |= {title.split(",")[0] for title in titles}
        for figures in spec.get("published", {}).values():
            assert {*figures} <= titles
        for column, *pair in claims.pairs(spec):
            assert column in spec["columns"]
            assert {*pair} <= {*spec["methods"]}
        assert {*spec.get("claims", {}).get("measures", [])} <= {*spec["measures"]}
        for one, other in spec.get("differences", []):
            assert all("config" in spec["methods"][method] for method in (one, other))
        for column in spec["columns"].values():
            assert {*papers.flat(column.get("without", []))} <= {*spec["methods"]}
            assert {*column.get("of", {})} <= {*spec["methods"]}
            assert "published" not in column or column["published"] in spec["published"]


@pytest.mark.parametrize(
    ("experiment", "lines", "cells"),
    [("fedec", 13, 13 * 6), ("pfedla", 12, 10 * 8 + 9 * 8 + 3), ("fesem", 14, 14 * 2 * 4)],
)
def test_every_column_line_and_figure_of_the_papers_is_there(
    papers: Any, experiment: str, lines: int, cells: int
) -> None:
    spec = papers.EXPERIMENTS[experiment]
    configs = papers.CONFIGS / "paper" / experiment
    shipped = {f"paper/{experiment}/{path.stem}" for path in configs.glob("*.yaml")}
    printed = {
        spec["columns"][column]["config"]: figures for column, figures in spec["published"].items()
    }
    assert printed.keys() == shipped
    assert len({title for figures in printed.values() for title in figures}) == lines
    several = [
        len(figure) if isinstance(figure, list) else 1
        for figures in printed.values()
        for figure in figures.values()
    ]
    assert sum(several) == cells
    # Each has a run in its column unless it is asked not to be made.
    for column, figures in spec["published"].items():
        without = papers.left_out(spec, column)
        made = {method["title"] for name, method in spec["methods"].items() if name not in without}
        assert {*figures} <= made | {title.split(",")[0] for title in made}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.long
def test_runs_go_on_and_become_a_table(papers: Any, tmp_path: Path) -> None:
    once, again, page = tmp_path / "once", tmp_path / "again", tmp_path / "page.md"
    papers.make(options(once))
    papers.make(options(again, methods=["fedec_1.5"], rounds=2))
    papers.make(options(again, methods=["fedec_1.5"]))
    (again / "toy/digits/fedec_1.5/0/tests/3.json").unlink()  # as if killed before the test
    papers.make(options(again, methods=["fedec_1.5"]))
    tests = {name: read(once, name) for name in ("really", "fedec_wo", "fedec_1.5")}
    assert [test["round"] for test in tests["fedec_1.5"]] == [2, 3]
    _, earlier, last = read(again, "fedec_1.5")
    assert last == tests["fedec_1.5"][-1]
    del earlier["adapted"]  # it was the last of its command
    assert earlier == tests["fedec_1.5"][0]
    assert not [*tmp_path.rglob("tests/*.ckpt")]
    # The server of FedEC-wo is FedAvg's, where clients are equally large.
    for one, other in zip(tests["really"], tests["fedec_wo"], strict=True):
        assert one["server"] == other["server"] == one["own"]
        assert other["own"] != other["server"]

    page.write_text(
        "# Toy\n\n<!-- toy/digits -->\nold\n<!-- end -->\n\n"
        "<!-- toy/digits: fedec_1.5 - fedec_wo -->\n<!-- end -->\n\n"
        "<!-- toy: claims -->\n<!-- end -->\n\nEnd.\n"
    )
    papers.write(options(once, page=[page]))
    head, _, *lines = page.read_text().split("-->\n")[1].strip().splitlines()[:6]
    assert head.split(" | ")[:6] == [
        "| method", "paper", "trained in the round", "all clients", "adapted", "micro F1",
    ]  # fmt: skip
    names = {"FedAvg": "42.65", "FedAvg, itself": "42.65", "FedEC-wo": "", "FedEC, 1.5": "92.35"}
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    assert {row[0]: row[1] for row in rows} == names
    assert rows[0][2:6] == rows[1][2:6]
    two, three = tests["fedec_1.5"]
    own = [statistics_of(test["own"]["acc"], range(4)) for test in (two, three)]
    took_part = [statistics_of(test["own"]["acc"], test["clients"]) for test in (two, three)]
    assert rows[3][2:5] == [
        f"{50 * sum(took_part):.2f}",
        f"{50 * sum(own):.2f}",
        f"{100 * statistics_of(three['adapted']['acc'], range(4)):.2f}",
    ]
    assert page.read_text().startswith("# Toy\n\n<!-- toy/digits -->\n")
    assert page.read_text().endswith("<!-- end -->\n\nEnd.\n")

    shown = page.read_text().split("fedec_wo -->\n")[1].split("<!-- end -->")[0].strip()
    _, _, difference = shown.splitlines()
    pairs = zip(tests["fedec_1.5"], tests["fedec_wo"], strict=True)
    own = [
        [100 * (a - b) for a, b in zip(one["own"]["acc"], other["own"]["acc"], strict=True)]
        for one, other in pairs
    ]
    shown = difference.strip("| ").split(" | ")
    assert float(shown[2]) == pytest.approx(math.fsum(map(math.fsum, own)) / 8, abs=0.005)

    claim = page.read_text().split("claims -->\n")[1].split("<!-- end -->")[0].strip()
    head, _, line = claim.splitlines()
    assert head == "| difference | paper | Digits | elsewhere |"
    own = [50 * sum(test[i]["own"]["acc"]) / 4 for test in tests.values() for i in (0, 1)]
    mean = sum(own[4:]) - sum(own[:2])  # of FedEC and of FedAvg itself, which is the first
    assert line.startswith(f"| FedEC − FedAvg | 49.7 | {mean:.1f} (")
    assert re.search(r" \(1\): (less|no|open|yes|more)", line)
    assert line.endswith("|  |")

    new = tmp_path / "new.md"  # nothing has been run for it
    new.write_text("<!-- toy/digits: fedec_1.5 - fedec_wo -->\n<!-- end -->\n")
    papers.write(options(tmp_path / "nothing", page=[new]))
    assert "| seed | trained in the round |" in new.read_text()
    assert "mean" not in new.read_text()

    # Figures of runs whose folders are gone stay in the page.
    before = page.read_text()
    papers.write(options(tmp_path / "nothing", page=[page]))
    assert page.read_text() == before

    # A run that was stopped before its only tests has no time, and old figures lack what is new.
    for file in (once / "toy/digits/fedec_1.5/0/tests").iterdir():
        file.write_text(json.dumps({**json.loads(file.read_text()), "seconds": None}))
    kept = page.with_suffix(".csv")
    kept.write_text("".join(kept.read_text().splitlines(keepends=True)[:1]))
    papers.write(options(once, page=[page]))
    timed, untimed = page.read_text().splitlines()[8:10]
    assert re.search(r"\| 1 \| \d+\.\d \|$", timed)
    assert untimed.endswith("| 1 |  |")
    rows = kept.read_text().splitlines(keepends=True)
    kept.write_text("".join(row for row in rows if ",own," not in row))
    papers.write(options(tmp_path / "nothing", page=[page]))
    assert page.read_text().splitlines()[9].split("|")[4] == "  "

    # The time of a run on a GPU is that of its host.
    for file in (once / "toy/digits/really/0/tests").iterdir():
        assert json.loads(file.read_text())["device"] == "cpu"
        file.write_text(json.dumps({**json.loads(file.read_text()), "device": "cuda"}))
    kept.unlink()
    papers.write(options(once, page=[page]))
    assert page.read_text().splitlines()[7].endswith("| 1 (1 on a GPU) |  |")


PAGES = [ROOT / "docs/papers.md", ROOT / "docs/papers-appendix.md"]


@pytest.mark.short("papers.md")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tables_of_the_pages_are_those_of_the_figures(papers: Any, page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert papers.filled(text, papers.figures_in(PAGES[0].with_suffix(".csv"))) == text


def test_the_appendix_has_a_table_of_each_column_that_was_run(papers: Any) -> None:
    text = PAGES[1].read_text(encoding="utf-8")
    for experiment, column, *_ in papers.figures_in(PAGES[0].with_suffix(".csv")):
        assert f"<!-- {experiment}/{column} -->" in text
        assert f"<!-- {experiment}/{column}: details -->" in text


def test_details_have_each_seed(papers: Any, claims: Any) -> None:
    spec = papers.EXPERIMENTS["toy"] | {
        "details": [["fedec_1.5", "really"], ["really", "fedavg"], ["fedec_1.5", "fedec_wo"]]
    }
    of = {"fedec_1.5": (90.0, 92.0), "really": (50.0, 53.0), "fedavg": (50.0, 53.0)}
    figures = {
        ("toy", "digits", method, str(seed), "own"): value
        for method, values in of.items()
        for seed, value in enumerate(values)
    }
    titles = [papers.MEASURES[measure][0] for measure in spec["measures"]]
    shown = claims.details_table("toy", "digits", spec, figures, titles).splitlines()
    # By hand: 40 and 39, of which the standard error is 0.5, and t of one degree 12.7062.
    assert shown[2:] == [
        "| FedEC, 1.5 − FedAvg, itself | 49.7 |  | 39.5 (33.1 to 45.9; 40.0, 39.0) |  |  |",
        "| FedAvg, itself − FedAvg |  |  | 0.0 (0.0 to 0.0; 0.0, 0.0) |  |  |",
    ]


def statistics_of(values: list[float], clients: Any) -> float:
    return math.fsum(values[client] for client in clients) / len(clients)


def test_the_mean_over_seeds_is_below_their_differences(papers: Any) -> None:
    where = "pfedla", "noniid1_cifar10_10", "pfedla_0.5 - local"
    figures = {(*where, str(seed), "last"): value for seed, value in enumerate((1.0, 3.0))}
    *_, first, second, mean = papers.difference_table(*where, figures).splitlines()
    assert [first[:10], second[:10]] == ["| 0 | 1.00", "| 1 | 3.00"]
    assert mean.startswith("| mean | 2.00 ± 1.41 |")


@pytest.mark.parametrize(
    ("paper", "mean", "interval", "said"),
    [
        (2.0, 1.5, (0.5, 2.5), "yes"),
        (2.0, 0.9, (0.5, 1.3), "less"),
        (2.0, 4.5, (1.0, 8.0), "more"),
        (2.0, 1.5, (-0.5, 3.5), "open"),
        (2.0, 0.5, (-0.5, 1.5), "no"),
        (2.0, -1.5, (-2.5, -0.5), "no"),
        (-2.0, -1.5, (-2.5, -0.5), "yes"),
        (-2.0, -1.5, None, "yes"),
        (2.0, -1.5, None, "no"),
        (2.0, 0.0, None, "no"),
    ],
)
def test_verdicts(
    claims: Any, paper: float, mean: float, interval: tuple[float, float] | None, said: str
) -> None:
    assert claims.verdict(paper, claims.Difference(mean, interval, 1)) == said


def test_claims_are_compared_at_the_seeds_of_both(papers: Any, claims: Any) -> None:
    spec = papers.EXPERIMENTS["toy"]
    of = {"fedec_1.5": (90.0, 93.0, 95.0, 10.0), "really": (50.0, 52.0, 57.0)}
    figures = {
        ("toy", "digits", method, str(seed), "own"): value
        for method, values in of.items()
        for seed, value in enumerate(values)
    }
    pair = "digits", "fedec_1.5", "really"
    found = claims.difference_here(figures, "toy", pair, "own")
    # By hand: 40, 41 and 38, of which the standard error is 0.8819, and t of two degrees 4.3027.
    assert found.mean == pytest.approx(119 / 3)
    assert found.interval == pytest.approx((119 / 3 - 3.7946, 119 / 3 + 3.7946), abs=1e-3)
    assert found.seeds == 3
    assert claims.difference_here(figures, "toy", pair, "adapted") is None
    (line,) = claims.claims_table("toy", spec, figures, ["all clients", "adapted"]).splitlines()[2:]
    assert line == "| FedEC − FedAvg | 49.7 | 39.7 (35.9 to 43.5, 3): yes |  |"
    adapted = {(*where[:4], "adapted"): -value for where, value in figures.items()}
    shown = claims.claims_table("toy", spec, figures | adapted, ["all clients", "adapted"])
    assert shown.endswith("39.7 (35.9 to 43.5, 3): yes (adapted: no) |  |")


def test_micro_means_weigh_clients_by_samples(papers: Any) -> None:
    test = {"samples": [1, 3, 0], "own": {"f1": [0.5, 0.9, math.nan]}}
    assert papers.mean(papers.values_of(test, "own", "f1")) == pytest.approx(70)
    assert papers.mean(papers.values_of(test, "own", "f1", "micro")) == pytest.approx(80)
    assert papers.mean(papers.values_of(test, "own", "f1", ids=[1])) == pytest.approx(90)


def test_published_figures_are_of_a_method_with_its_bracket(papers: Any) -> None:
    figures = {
        ("pfedla", "noniid1_cifar10_10", f"heurpfedla_{retain}", "0", "own"): 60.0 + retain
        for retain in (1, 2)
    }
    one, two = papers.table("pfedla", "noniid1_cifar10_10", figures).splitlines()[2:]
    assert one.startswith("| HeurpFedLA(1), 0.5 | 60.02 ± 0.74 |  | 61.00 |")
    assert two.startswith("| HeurpFedLA(2), 0.5 | 59.90 |  | 62.00 |")


def test_unknown_names_are_an_error(papers: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"toy has no fedec: methods are .*'fedec_1.5'"):
        papers.make(options(tmp_path, methods=["fedec"]))
    with pytest.raises(SystemExit, match=r"toy has no cifar10: columns are .*'digits'"):
        papers.make(options(tmp_path, columns=["cifar10"]))


@pytest.mark.long
def test_wrong_data_are_one_line(tmp_path: Path) -> None:
    what = "run pfedla --columns noniid1_fmnist_10 --methods local --set data.download=false"
    command = [sys.executable, ROOT / "benchmarks" / "papers.py", *what.split()]
    folders = ["--root", tmp_path / "none", "--out", tmp_path]
    done = subprocess.run([*command, *folders], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert re.match(r"papers.py: error: .* not found in .*/none .*root does not exist", line)


def test_columns_leave_out_methods_that_are_the_same_there(papers: Any, tmp_path: Path) -> None:
    names = [run.method for run in papers.runs_of("pfedla", None, None, [0], options(tmp_path))]
    fmnist = [
        run.method
        for run in papers.runs_of("pfedla", ["noniid1_fmnist_10"], None, [0], options(tmp_path))
    ]
    assert "fedbn" in names
    assert "fedbn" not in fmnist


def test_methods_that_are_readings_of_another_run_make_that_one(
    papers: Any, tmp_path: Path
) -> None:
    runs = papers.runs_of("toy", None, ["fedavg", "fedec_wo"], [0], options(tmp_path))
    assert [run.method for run in runs] == ["fedec_wo"]

"""Comparisons: what their runs give, what is not done twice, and what is wrong."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pflight.__main__ import main
from pflight.errors import ConfigurationError
from pflight.experiments.comparing import compare, report
from pflight.experiments.comparison import Described
from pflight.experiments.jobs import Jobs
from pflight.experiments.outcome import Outcome, ResultError
from pflight.experiments.plan import values_of
from pflight.experiments.tuning import Tuning
from pflight.experiments.worker import make
from pflight.runs.folder import FAILURE, RESULTS, RunFolder
from tests.event_files import read_events

from .small import DATA, comparison, data_config, finish, method_config


def outcomes(made: Any) -> list[Outcome]:
    return [Outcome.read(Path(task.folder, RESULTS)) for task in made]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of a comparison; the best of its rounds is not the last."""
    folder = tmp_path_factory.mktemp("made")
    text = DATA.replace("lr: 0.1", "lr: 1.0").replace("max_epochs: 3", "max_epochs: 6")
    (task,) = finish(comparison(folder, ["fedprox"], text=text))
    (outcome,) = outcomes([task])
    return folder, task, outcome


class TestRun:
    @pytest.mark.long
    def test_gives_what_fit_and_test_log(self, made, tmp_path):
        folder, task, outcome = made
        config = [f"--config={folder}/data.yaml", "--config=configs/algorithm/fedprox.yaml"]
        config += [f"--trainer.default_root_dir={tmp_path}/run", "--seed_everything=0"]
        main(["fit", *config])
        fitted = read_events(tmp_path / "run").values
        assert outcome.chosen is not None
        assert outcome.chosen.round < outcome.last.round == 6
        for name, moment in {"last": outcome.last, "best": outcome.chosen}.items():
            main(["test", *config, f"--ckpt_path={name}"])
            tested = {
                tag: values[-1]
                for tag, values in read_events(tmp_path / "run").values.items()
                if tag.startswith("test/")
            }
            assert {*tested} <= {*moment.values}
            for tag, value in tested.items():
                assert moment.values[tag] == pytest.approx(value, abs=1e-6), tag
            validated = fitted["val/macro_acc"][moment.round - 1]
            assert moment.validation == pytest.approx(validated, abs=1e-6)
            accuracies = moment.per_client["acc"]
            assert sum(accuracies) / len(accuracies) == pytest.approx(
                moment.values["test/macro_acc"]
            )
        assert outcome.bytes_down == fitted["communication/total_bytes_down"][-1]
        assert outcome.bytes_up == fitted["communication/total_bytes_up"][-1]
        assert outcome.curve.round == [1, 2, 3, 4, 5, 6]
        assert outcome.curve.values["val/macro_acc"] == pytest.approx(fitted["val/macro_acc"])
        assert outcome.curve.bytes[-1] == outcome.bytes_down + outcome.bytes_up
        assert len(outcome.newcomers) == 1
        assert sorted(outcome.newcomers + outcome.clients) == [0, 1, 2, 3]
        assert_same_weights(Path(task.folder), tmp_path / "run")

    def test_its_table_of_clients_is_of_the_round_that_is_compared(self, made):
        _, task, outcome = made
        with Path(task.folder, "clients.csv").open() as file:
            rows = list(csv.DictReader(file))
        found = [float(rows[client]["acc"]) for client in outcome.clients]
        assert found == outcome.chosen.per_client["acc"]
        assert rows[outcome.newcomers[0]]["newcomer"] == "yes"

    @pytest.mark.long
    def test_continues_and_is_tested_by_the_ordinary_commands(self, made, capfd):
        _, task, outcome = made
        main(["test", f"--config={task.folder}/config.yaml"])
        assert f"{outcome.chosen.values['test/macro_acc']:.4f}" in capfd.readouterr().out


def assert_same_weights(one: Path, other: Path) -> None:
    for name in ("last", "best"):
        left, right = (
            torch.load(root / "checkpoints" / f"{name}.ckpt", weights_only=True)["state_dict"]
            for root in (one, other)
        )
        assert left.keys() == right.keys()
        assert all(torch.equal(left[entry], right[entry]) for entry in left)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    methods = ["fedavg", "local", "ditto", "fedrod"]  # which brings a layer of its own
    return outcomes(finish(comparison(tmp_path_factory.mktemp("plain"), methods, seeds=2)))


@pytest.mark.long
def test_another_metric_may_choose_rounds(tmp_path):
    found = comparison(tmp_path, ["fedavg"], text=f"{DATA}monitor: val/micro_acc\nmode: max\n")
    (run,) = outcomes(finish(found))
    assert run.monitor == "val/micro_acc"
    said = " ".join(found.results().to_markdown().split())
    assert "with the highest val/micro_acc on validation samples" in said


def test_a_comparison_in_which_no_run_has_finished_is_status_1(tmp_path, monkeypatch):
    monkeypatch.setattr(Jobs, "work", lambda _: None)
    options = ["--methods", "fedavg", "--seeds=1", f"--out={tmp_path}/out"]
    with pytest.raises(SystemExit) as exit_:
        main(["compare", f"--config={data_config(tmp_path)}", *options])
    assert exit_.value.code == 1
    assert (tmp_path / "out" / "table.md").is_file()


@pytest.mark.long
def test_without_test_samples_nothing_is_trained(tmp_path):
    text = DATA.replace("val_fraction: 0.2", "val_fraction: 0.2, test_fraction: 0")
    found = comparison(tmp_path, ["fedavg"], text=text)
    (task,) = finish(found)
    (row,) = found.results().findings.rows
    assert row.failures[0].reason == "no client has test samples, but methods are compared on them"
    assert not [*Path(task.folder).glob("checkpoints/*")]


class TestFairness:
    @pytest.mark.long
    def test_methods_see_the_same_at_a_seed_and_something_else_at_another(self, plain):
        by_seed = [
            {json.dumps(run.fingerprints) for run in plain if run.seed == seed} for seed in (0, 1)
        ]
        assert [len(found) for found in by_seed] == [1, 1]
        one, two = (json.loads(*found) for found in by_seed)
        assert all(one[kind] != two[kind] for kind in ("data", "weights", "batches"))

    @pytest.mark.parametrize(
        ("option", "kinds"),
        [
            ("data.partition={class_path: IID}", {"data", "batches"}),
            ("data.cohort_size=2", {"cohorts", "batches"}),
            ("data.batch_size=10", {"batches"}),
            ("model.client.network.hidden=[5]", {"weights"}),
            ("model.local_epochs=2", set()),
        ],
    )
    @pytest.mark.long
    def test_the_hashes_tell_what_differs(self, plain, option, kinds, tmp_path):
        (other,) = outcomes(finish(comparison(tmp_path, ["fedavg"], values_of([option]))))
        known = plain[0].fingerprints
        assert {kind for kind in known if known[kind] != other.fingerprints[kind]} == kinds

    @pytest.mark.long
    def test_a_run_without_a_round_has_hashes(self, tmp_path):
        text = DATA.replace("max_epochs: 3", "max_epochs: 0")
        (run,) = outcomes(finish(comparison(tmp_path, ["fedavg"], text=text)))
        assert run.last.round == 0
        assert {*run.fingerprints} == {"data", "weights", "cohorts", "batches"}


class TestAgain:
    @pytest.mark.long
    def test_nothing_is_done_twice_and_rows_and_seeds_can_be_added(self, tmp_path):
        first = finish(comparison(tmp_path, ["fedavg"]))
        before = _times(tmp_path / "out")
        more = finish(comparison(tmp_path, ["local", "fedavg"], seeds=2))
        assert [(task.method, task.seed) for task in more] == [
            ("Local", 0),
            ("Local", 1),
            ("FedAvg", 1),
        ]
        with_settings = comparison(tmp_path, ["fedavg"], {"model.local_epochs": [1, 2]})
        (task,) = finish(with_settings)  # one epoch is the default, and has been made
        assert task.settings == {"model.local_epochs": 2}
        found = with_settings.results().findings
        assert {row.label for row in found.rows} == {
            "FedAvg, local_epochs=1",
            "FedAvg, local_epochs=2",
        }
        after = _times(tmp_path / "out")
        assert {path: after[path] for path in before} == before
        assert Path(first[0].folder, RESULTS) in before

    @pytest.mark.long
    def test_a_damaged_result_is_made_again(self, tmp_path):
        (task,) = finish(comparison(tmp_path, ["fedavg"]))
        path = Path(task.folder, RESULTS)
        whole = _numbers(path)
        path.write_text(path.read_text()[:100])
        found = comparison(tmp_path, ["fedavg"])
        with pytest.warns(UserWarning, match=r"results.json is damaged.*counts as not ended"):
            assert len(found.due()) == 1
        with pytest.warns(UserWarning, match="damaged"):
            finish(found)
        assert _numbers(path) == whole

    @pytest.mark.long
    def test_a_result_of_other_options_is_not_that_of_the_run(self, tmp_path):
        (task,) = finish(comparison(tmp_path, ["fedavg"]))
        path = Path(task.folder, RESULTS)
        replace(Outcome.read(path), key="another").write(path)
        assert not comparison(tmp_path, ["fedavg"]).results().findings.finished
        assert finish(comparison(tmp_path, ["fedavg"])) == [task]
        assert Outcome.read(path).key == task.key

    def test_a_failure_is_tried_again(self, tmp_path):
        (task,) = comparison(tmp_path, ["fedavg"]).due()
        Path(task.folder).mkdir(parents=True)
        Path(task.folder, FAILURE).write_text("{}")
        found = comparison(tmp_path, ["fedavg"])
        found.forget_failures()
        finish(found)
        assert not Path(task.folder, FAILURE).exists()
        assert len(found.results().findings.finished) == 1

    def test_a_run_that_another_process_makes_is_left_to_it(self, tmp_path):
        (task,) = comparison(tmp_path, ["fedavg"]).due()
        for work in ("compare", "fit"):
            with RunFolder(task.folder).claimed(work):
                answer = make(task, lambda _: None)
            assert f"another {work} is running" in answer["taken"]
            assert not Path(task.folder, FAILURE).exists()


def _times(folder: Path) -> dict[Path, int]:
    kinds = ("*/seed-*/results.json", "*/seed-*/checkpoints/*.ckpt", "*/seed-*/log.txt")
    return {path: path.stat().st_mtime_ns for kind in kinds for path in folder.glob(kind)}


def _numbers(path: Path) -> dict[str, Any]:
    return {
        name: v
        for name, v in json.loads(path.read_text()).items()
        if name not in {"seconds", "checksum"}
    }


class TestFolder:
    def test_of_other_data(self, tmp_path):
        comparison(tmp_path)
        with pytest.raises(ConfigurationError, match=r"other data.*batch_size is 20 there and 10"):
            comparison(tmp_path, ["fedavg"], {"data.batch_size": [10]})

    def test_of_other_files(self, tmp_path):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("")
        with pytest.raises(ConfigurationError, match="holds other files, and no comparison"):
            comparison(tmp_path)

    def test_that_another_process_is_just_making(self, tmp_path):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / ".comparison.json.1.partial").write_text("{")
        assert len(comparison(tmp_path).due()) == 2

    def test_that_is_a_file(self, tmp_path):
        (tmp_path / "out").write_text("")
        with pytest.raises(ConfigurationError, match="is a file"):
            comparison(tmp_path)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "{",
            "[]",
            "null",
            "{}",
            '{"version": 1, "rows": []}',
            '{"version": 2}',
            '{"version": 1, "data": {}, "seeds": [0], "rows": [{"key": "a"}]}',
            '{"version": 1, "data": {}, "seeds": ["x"], "rows": []}',
        ],
    )
    def test_that_is_damaged(self, text, tmp_path):
        (tmp_path / "comparison.json").write_text(text)
        with pytest.raises(ResultError, match=r"comparison.json is damaged"):
            report(tmp_path)

    @pytest.mark.long
    def test_that_is_damaged_is_left_alone_until_its_file_is_deleted(self, tmp_path):
        finish(comparison(tmp_path, ["fedavg"]))
        path = tmp_path / "out" / "comparison.json"
        path.write_text("{")
        with pytest.raises(ResultError, match=r"is damaged.*delete it, and the command"):
            comparison(tmp_path, ["fedavg"])
        path.unlink()
        found = comparison(tmp_path, ["fedavg"])
        assert not found.due()
        assert report(found.folder).findings.finished

    @pytest.mark.long
    def test_is_described_for_others(self, tmp_path):
        found = comparison(tmp_path, ["fedavg", "fedprox"], {"trainer.callbacks.mu": [1, 2]})
        described = Described.read(found.folder / "comparison.json")
        assert [row.settings for row in described.rows] == [
            {},
            {"trainer.callbacks.mu": 1},
            {"trainer.callbacks.mu": 2},
        ]
        assert [row.label for row in report(found.folder).findings.rows] == [
            "FedAvg",
            "FedProx, mu=1",
            "FedProx, mu=2",
        ]


@pytest.mark.short("options0-*", "options3-*", "options4-*", "options5-*")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": 0}, "--seeds must be from 1 to 1000, got 0"),
        ({"jobs": 0}, "--jobs must be at least 1, got 0"),
        ({"baseline": "fedprox"}, "there is no row 'fedprox' to compare with"),
        ({"methods": ["fedavgs"]}, "did you mean fedavg"),
        ({"settings": {"data.batch_size": [1, 2]}}, "give one value"),
        ({"tuning": Tuning(2), "settings": {}}, None),
    ],
)
def test_wrong_options_start_nothing(options, message, tmp_path):
    if message is None:
        text = DATA + "search_space: {model.local_epoch: [1, 2]}\n"
        message = "model.local_epoch"
    else:
        text = DATA
    given = {"methods": ["fedavg"], "out": tmp_path / "out", **options}
    with pytest.raises((ConfigurationError, ResultError), match=message):
        compare(data_config(tmp_path, text), **given)
    assert not list(tmp_path.glob("out/*/**"))


REGRESSION = """
data: {class_path: tests.experiments.hers.Hospitals, init_args: {table: hospitals.csv}}
model: {client: {class_path: tests.experiments.hers.Line}}
trainer: {max_epochs: 3, accelerator: cpu}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(24, 2, generator=random)
    rows = [f"{i % 3},{a:.4f},{b:.4f},{(a - b) * (i % 3):.4f}" for i, (a, b) in enumerate(x)]
    (tmp_path / "hospitals.csv").write_text("\n".join(rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


class TestOwnModule:
    @pytest.mark.long
    def test_lower_may_be_better(self, own):
        text = f"monitor: val/macro_mae\nmode: min\n{REGRESSION}"
        found = comparison(own, ["fedavg", "local"], seeds=2, text=text)
        runs = outcomes(finish(found))
        for run in runs:
            assert (run.metric, run.mode) == ("mae", "min")
            curve = run.curve.values["val/macro_mae"]
            assert run.chosen.validation == pytest.approx(min(curve))
            assert curve[run.chosen.round - 1] == min(curve)
        results = found.results()
        best, worst = results.findings.rows
        means = [sum(row.means("macro", "mae", "chosen")) for row in (best, worst)]
        assert means[0] < means[1]
        assert "lowest val/macro_mae" in " ".join(results.to_markdown().split())

    @pytest.mark.long
    def test_tuning_takes_the_lowest(self, own):
        text = f"monitor: val/macro_mae\nmode: min\n{REGRESSION}"
        text += "search_space: {model.client.lr: [0.001, 0.1]}\n"
        found = comparison(
            own, [method_config(own, "mine", "{class_path: FedAvg}")], tuning=Tuning(4), text=text
        )
        finish(found)
        (row,) = found.results().findings.rows
        assert row.settings == {"model.client.lr": 0.1}
        assert row.tuned.validation > 0

    @pytest.mark.filterwarnings("ignore:.*a line is not crooked:UserWarning")
    def test_that_never_trains_is_a_row_without_values(self, own):
        text = f"monitor: val/macro_mae\nmode: min\n{REGRESSION}".replace(
            "hers.Line", "hers.Crooked"
        )
        found = comparison(own, ["fedavg"], text=text)
        finish(found)
        (row,) = found.results().findings.rows
        assert not row.runs
        assert re.match(r"ClientError: all \d+ trainings of clients failed", row.failures[0].reason)

    def test_without_a_direction_is_a_row_that_says_what_to_do(self, own):
        found = comparison(own, ["fedavg"], text=REGRESSION)
        finish(found)
        (row,) = found.results().findings.rows
        assert row.failures[0].reason == (
            "no metric says which method is best: name one, as in --monitor val/macro_loss "
            "--mode min; the clients log mae"
        )
        assert "--monitor val/macro_loss" in " ".join(found.results().to_markdown().split())

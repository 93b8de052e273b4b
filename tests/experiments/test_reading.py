"""Reports of run folders that no comparison has made, and of comparisons while they run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pflight.__main__ import main
from pflight.errors import ConfigurationError
from pflight.experiments import measuring
from pflight.experiments.comparing import report
from pflight.experiments.outcome import Outcome, ResultError
from pflight.runs.folder import RESULTS
from tests.event_files import read_events

from .small import DATA, comparison, data_config, finish


def fit(config: str, method: str, root: Path, *args: str) -> None:
    main(
        [
            "fit",
            f"--config={config}",
            f"--config=configs/algorithm/{method}.yaml",
            f"--trainer.default_root_dir={root}",
            *args,
        ]
    )


def begun(folder: Path, seed: int) -> Path:
    """Return the folder of a run of FedAvg that was killed after the first of three rounds."""
    root = folder / "begun"
    options = f"--seed_everything={seed}", "--trainer.max_epochs=1"
    fit(data_config(folder), "fedavg", root, *options)
    config = root / "config.yaml"
    config.write_text(config.read_text().replace("max_epochs: 1\n", "max_epochs: 3\n"))
    return root


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of ``pflight fit``: two of FedAvg at two seeds, and others of FedProx."""
    root = tmp_path_factory.mktemp("plain")
    config = data_config(root)
    for seed in (0, 1):
        fit(config, "fedavg", root / f"fedavg-{seed}", f"--seed_everything={seed}")
    for mu in (0.5, 1):
        fit(config, "fedprox", root / f"fedprox-{mu}", f"--trainer.callbacks.mu={mu}")
    return root


@pytest.fixture
def runs(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of these folders, somewhere else."""
    root = tmp_path / "moved"
    shutil.copytree(plain, root)
    hidden = plain.with_name("hidden")
    plain.rename(hidden)
    yield root
    hidden.rename(plain)


@pytest.mark.long
def test_runs_of_wrapped_data_at_several_seeds_are_a_row(tmp_path):
    folders = [tmp_path / "0", tmp_path / "1"]
    for seed, folder in enumerate(folders):
        options = f"--seed_everything={seed}", "--trainer.max_epochs=1", "--data.data.num_clients=4"
        fit("configs/data/rotated_digits.yaml", "fedavg", folder, *options)
    (row,) = report(folders).findings.rows
    assert [*row.runs] == [0, 1]


def gone_on(folder: Path, option: str) -> Any:
    """Report a run, go on with it with another option, and return its row in the next report."""
    report(folder)
    where = f"--config={folder}/config.yaml", f"--trainer.default_root_dir={folder}"
    main(["fit", *where, option, "--ckpt_path=last"])
    (row,) = report(folder).findings.rows
    return row


class TestRuns:
    @pytest.mark.long
    def test_are_rows_with_the_options_by_which_they_differ(self, runs, capfd):
        folders = [runs / name for name in ("fedavg-0", "fedavg-1", "fedprox-0.5", "fedprox-1")]
        results = report(folders)
        assert capfd.readouterr().out == ""
        assert {row.label: [*row.runs] for row in results.findings.rows} == {
            "FedAvg": [0, 1],
            "FedProx, mu=0.5": [0],
            "FedProx, mu=1": [0],
        }
        assert "all rows had the same clients' data" in results.to_markdown()
        assert not any(row.failures for row in results.findings.rows)

    def test_give_what_they_logged_and_keep_it(self, runs):
        (row,) = report(runs / "fedavg-0").findings.rows
        (run,) = row.runs.values()
        fitted = read_events(runs / "fedavg-0").values
        assert run.curve.values["val/macro_acc"] == pytest.approx(fitted["val/macro_acc"])
        assert run.last.round == 3
        assert run.last.validation == pytest.approx(fitted["val/macro_acc"][-1])
        main(
            [
                "test",
                f"--config={runs}/fedavg-0/config.yaml",
                "--ckpt_path=last",
                f"--trainer.default_root_dir={runs}/fedavg-0",
            ]
        )
        tested = read_events(runs / "fedavg-0").values["test/macro_acc"][-1]
        assert run.last.values["test/macro_acc"] == pytest.approx(tested)
        path = runs / "fedavg-0" / RESULTS
        before = path.stat().st_mtime_ns
        assert report(runs / "fedavg-0").findings.rows[0].runs[0] == run
        assert path.stat().st_mtime_ns == before

    @pytest.mark.long
    def test_that_went_on_are_tested_again(self, runs):
        row = gone_on(runs / "fedavg-0", "--trainer.max_epochs=4")
        assert row.runs[0].last.round == 4
        assert len(row.runs[0].curve.round) == 4

    @pytest.mark.long
    def test_whose_options_have_changed_are_tested_again(self, runs):
        row = gone_on(runs / "fedavg-0", "--model.finetune_epochs=1")
        assert "test/finetuned/macro_acc" in row.runs[0].last.values

    @pytest.mark.long
    def test_that_have_rounds_to_make_wait(self, runs, tmp_path):
        folder = begun(tmp_path, 1)
        with pytest.warns(UserWarning, match="counts as running: 2 of its rounds are missing"):
            (row,) = report([runs / "fedavg-0", folder]).findings.rows
        assert ([*row.runs], row.waiting) == ([0], {1})
        assert not (folder / RESULTS).exists()

    @pytest.mark.long
    def test_that_were_stopped_early_are_over(self, tmp_path):
        root = tmp_path / "run"
        stop = {"": "EarlyStopping", "monitor": "communication/total_bytes_down", "patience": 1}
        options = [f"--trainer.callbacks{f'.{n}' if n else '+'}={v}" for n, v in stop.items()]
        fit(data_config(tmp_path), "fedavg", root, *options)
        (row,) = report(root).findings.rows
        assert row.runs[0].last.round == 2

    @pytest.mark.long
    def test_that_go_on_while_they_are_tested(self, runs, tmp_path, monkeypatch):
        folder, further = runs / "fedavg-0", tmp_path / "further"
        fit(data_config(tmp_path), "fedavg", further, "--trainer.max_epochs=4")

        def tested(*args: object) -> object:
            found = once(*args)
            shutil.copy(further / "checkpoints/last.ckpt", folder / "checkpoints/best.ckpt")
            return found

        once = measuring._tested
        monkeypatch.setattr(measuring, "_tested", tested)
        (row,) = report(folder).findings.rows
        run = row.runs[0]
        assert (run.last.round, len(run.curve.round), run.chosen.round) == (3, 3, 4)
        curve = read_events(further).values["val/macro_acc"]
        assert run.chosen.validation == pytest.approx(curve[3])

    @pytest.mark.long
    def test_without_test_samples_say_so(self, tmp_path):
        text = DATA.replace("val_fraction: 0.2", "val_fraction: 0.2, test_fraction: 0")
        fit(data_config(tmp_path, text), "fedavg", tmp_path / "run")
        (row,) = report(tmp_path / "run").findings.rows
        assert "no client has test samples" in row.failures[0].reason

    def test_without_checkpoints_are_rows_that_say_so(self, runs):
        shutil.rmtree(runs / "fedavg-0" / "checkpoints")
        found = report([runs / "fedavg-0", runs / "fedprox-1"]).findings
        (failed,) = [row for row in found.rows if row.failures]
        assert "there is no 'last' checkpoint" in failed.failures[0].reason
        assert len(found.finished) == 1

    def test_in_folders_that_are_read_only(self, runs, monkeypatch):
        def refused(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

        if os.geteuid():
            (runs / "fedavg-0").chmod(0o555)
        else:  # whom modes don't stop
            monkeypatch.setattr(Outcome, "write", refused)
        assert report(runs / "fedavg-0").findings.finished
        assert not (runs / "fedavg-0" / RESULTS).exists()

    def test_twice(self, runs):
        with pytest.raises(ResultError, match="has two runs of one configuration with seed 0"):
            report([runs / "fedavg-0", runs / "fedavg-0"])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The dirpath has changed", "ignore:there is no last.ckpt")
def test_a_run_with_its_own_checkpoints(tmp_path):
    text = DATA.replace(
        "trainer: {",
        "trainer: {callbacks: [{class_path: lightning.pytorch.callbacks.ModelCheckpoint, "
        "init_args: {monitor: val/macro_f1, mode: max, save_top_k: -1}}], ",
    )
    fit(data_config(tmp_path, text), "fedavg", tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    (row,) = report(tmp_path / "moved").findings.rows
    assert not row.failures
    assert row.runs[0].metric == "f1"
    assert row.runs[0].last.round == 3
    curve = row.runs[0].curve.values["val/macro_f1"]
    assert row.runs[0].chosen.validation == pytest.approx(max(curve))


def test_centralized_training_is_a_row_that_says_that_it_is_no_federation(tmp_path):
    root = tmp_path / "run"
    options = ["--trainer.max_epochs=1", "--trainer.accelerator=cpu"]
    main(
        ["fit", "--config=configs/centralized.yaml", f"--trainer.default_root_dir={root}", *options]
    )
    (row,) = report(root).findings.rows
    assert row.failures[0].reason.endswith(
        "only federations are compared: the model must be a Federation"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has neither a config.yaml of a run nor a comparison.json"),
        ("jobs: 3\n", "is not of a run"),
        ("model: {}\ndata: null\ntrainer: {}\n", "is not of a run"),
        ("a: [", "is not YAML"),
        ("", "is empty"),
    ],
)
def test_other_folders(text, message, tmp_path):
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        report(tmp_path)


class TestComparison:
    @pytest.mark.long
    def test_while_it_runs(self, tmp_path):
        found = comparison(tmp_path, ["fedavg", "local"], seeds=2)
        out = tmp_path / "out"
        assert {row.label: row.waiting for row in report(out).findings.rows} == {
            "FedAvg": {0, 1},
            "Local": {0, 1},
        }
        made = iter(finish_one_by_one(found))
        next(made)
        rows = {row.label: row for row in report(out).findings.rows}
        assert ([*rows["FedAvg"].runs], rows["FedAvg"].waiting) == ([0], {1})
        assert "1 of 2" in report(out).to_markdown()
        list(made)
        assert report(out).to_csv() == found.results().to_csv()

    @pytest.mark.long
    def test_while_settings_are_chosen(self, tmp_path):
        from pflight.experiments.tuning import Tuning

        found = comparison(tmp_path, ["local"], tuning=Tuning(2))
        made = iter(finish_one_by_one(found))
        for _ in range(3):
            (row,) = report(tmp_path / "out").findings.rows
            assert not row.runs
            next(made)
        found.due()
        (row,) = report(tmp_path / "out").findings.rows
        assert row.tuned.chosen == row.settings

    @pytest.mark.long
    def test_with_a_run_of_its_own(self, tmp_path, plain):
        finish(comparison(tmp_path, ["local"]))
        rows = report([tmp_path / "out", plain / "fedavg-0"]).findings.rows
        assert {row.method for row in rows} == {"Local", "FedAvg"}

    @pytest.mark.long
    def test_goes_on_with_a_run_that_was_reported_by_itself(self, tmp_path):
        found = comparison(tmp_path, ["fedavg"])
        (task,) = found.due()
        Path(task.folder).parent.mkdir()
        begun(tmp_path, 0).rename(task.folder)
        with pytest.warns(UserWarning, match="counts as running"):
            (row,) = report(task.folder).findings.rows
        assert row.waiting == {0}
        assert finish(found) == [task]
        (row,) = report(tmp_path / "out").findings.rows
        assert row.runs[0].last.round == 3

    @pytest.mark.long
    def test_keeps_its_results_if_a_run_of_it_is_reported_by_itself(self, tmp_path):
        (task,) = finish(comparison(tmp_path, ["fedavg"]))
        config = f"--config={task.folder}/config.yaml"
        main(["fit", config, "--ckpt_path=last", "--trainer.max_epochs=4"])
        (row,) = report(task.folder).findings.rows
        assert row.runs[0].last.round == 4
        (row,) = report(tmp_path / "out").findings.rows
        assert row.runs[0].last.round == 3

    @pytest.mark.long
    def test_with_a_baseline_by_its_name_as_an_option(self, tmp_path):
        finish(comparison(tmp_path, ["fedavg_ft", "local"]))
        baseline = report(tmp_path / "out", baseline="fedavg_ft").findings.baseline
        assert baseline.label == "FedAvg + fine-tuning"

    def test_in_the_home_folder(self, tmp_path, monkeypatch):
        comparison(tmp_path, ["fedavg"])
        monkeypatch.setenv("HOME", str(tmp_path))
        report("~/out").save(Path("~/tables"))
        assert (tmp_path / "tables" / "table.md").is_file()

    @pytest.mark.long
    def test_beside_one_with_a_setting_that_all_of_it_has(self, tmp_path):
        made = {"a": [0.05], "b": [0.1], "c": [0.1]}
        for name, rates in made.items():
            (tmp_path / name).mkdir()
            finish(comparison(tmp_path / name, ["fedavg"], {"model.client.optimizer.lr": rates}))
        outs = [tmp_path / name / "out" for name in made]
        rows = report(outs[:2]).findings.rows
        assert {row.label for row in rows} == {"FedAvg, lr=0.05", "FedAvg, lr=0.1"}
        assert [row.label for row in report(outs[0]).findings.rows] == ["FedAvg"]
        with pytest.raises(ResultError, match="two runs of one configuration"):
            report(outs)

    @pytest.mark.long
    def test_a_trial_is_tested_if_it_is_asked_for_itself(self, tmp_path):
        from pflight.experiments.tuning import Tuning

        made = finish(comparison(tmp_path, ["local"], tuning=Tuning(1)))
        (row,) = report(made[0].folder).findings.rows
        assert row.runs[1000].last.per_client["acc"]


def finish_one_by_one(found) -> Iterator[None]:
    from pflight.experiments.worker import make

    while due := found.due():
        make(due[0], lambda _: None)
        yield

"""Settings are chosen by equally many trials, on validation samples of seeds of their own."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pflight.errors import ConfigurationError
from pflight.experiments.outcome import Failure, Outcome
from pflight.experiments.tuning import FIRST_SEED, Study, Tuning

from .small import DATA, comparison, finish, method_config

LR, KIND, STEPS = "model.client.optimizer.lr", "trainer.callbacks.kind", "model.local_epochs"
SPACE: dict[str, Any] = {
    LR: {"low": 0.01, "high": 1.0, "log": True},
    KIND: ["samples", "uniform", [1, 2]],
    STEPS: {"low": 1, "high": 20},
}
BEFORE = {LR: 0.1, KIND: "uniform", STEPS: 5}


def study(trials: int = 16, sampler: Any = "tpe", name: str = "fedavg") -> Study:
    return Study(Tuning(trials, sampler=sampler), SPACE, BEFORE, name)


def worth(settings: dict[str, Any]) -> float:
    return -(math.log(settings[LR]) ** 2) - abs(settings[STEPS] - 7)


def play(study: Study, worth: Callable[[dict[str, Any]], float] = worth) -> list[dict[str, Any]]:
    """Tell a study what all its trials give, and return their settings."""
    tried = []
    while not study.done:
        tried.append(study.pending()[0])
        study.tell(worth(tried[-1]))
    return tried


SAMPLERS = pytest.mark.parametrize("sampler", ["tpe", "random"])


class TestStudy:
    @SAMPLERS
    def test_begins_with_the_settings_of_the_configuration(self, sampler):
        assert study(sampler=sampler).pending()[0] == BEFORE

    @SAMPLERS
    @pytest.mark.parametrize("change", [{LR: 5.0}, {KIND: None}, {LR: 0.031622, STEPS: 21}])
    def test_begins_with_them_although_no_range_has_them(self, sampler, change):
        before = {**BEFORE, **change}
        tried = Study(Tuning(14, sampler=sampler), SPACE, before, "fedavg")
        every = play(tried, lambda settings: 0.0 if settings == before else worth(settings))
        assert every[0] == before
        assert before not in every[1:]
        assert tried.best == (before, 0.0)

    def test_takes_equal_numbers_as_listed_values(self):
        first = Study(Tuning(3), {"mu": [1, 0]}, {"mu": 0.0}, "fedprox").pending()[0]
        assert first == {"mu": 0}

    @SAMPLERS
    @pytest.mark.parametrize("told", [0, 3, 10, 13, 16])
    def test_goes_on_in_another_process_as_in_one(self, sampler, told):
        straight = play(study(sampler=sampler))
        assert len(straight) == 16
        other = study(sampler=sampler)
        for settings in straight[:told]:
            assert other.pending()[0] == settings
            other.tell(worth(settings))
        assert play(other) == straight[told:]

    @SAMPLERS
    def test_finds_the_best(self, sampler):
        tried = study(sampler=sampler)
        every = play(tried)
        assert tried.best is not None
        assert tried.best == (max(every, key=worth), max(map(worth, every)))

    def test_trials_that_learn_wait_for_earlier_ones_and_random_ones_do_not(self):
        assert len(study(16, "random").pending()) == 16
        learning = study(16, "tpe")
        assert len(learning.pending()) == 10
        learning.tell(0.0)
        assert len(learning.pending()) == 9

    def test_of_another_method_draws_otherwise(self):
        assert play(study())[1:] != play(study(name="fedprox"))[1:]

    def test_few_trials_cover_a_range_and_give_all_methods_the_same(self):
        rate = {"lr": {"low": 0.01, "high": 1.0, "log": True}}
        one = Study(Tuning(10), {**rate, "mu": [0, 1, 2]}, {"lr": 0.1}, "a").pending()
        two = Study(Tuning(10), {**rate, "k": {"low": 2, "high": 8, "step": 2}}, {"lr": 0.1}, "b")
        assert [t["lr"] for t in one] == [t["lr"] for t in two.pending()]
        places = sorted((math.log10(t["lr"]) + 2) / 2 for t in one)
        assert places[0] < 0.13
        assert places[-1] > 0.87
        assert max(b - a for a, b in pairwise(places)) < 0.13
        assert {t["mu"] for t in one[1:]} == {0, 1, 2}
        assert {t["k"] for t in two.pending()[1:]} == {2, 4, 6, 8}

    def test_trials_that_fail_are_not_chosen(self):
        tried = study()
        every = play(tried, lambda settings: math.nan if settings == BEFORE else worth(settings))
        assert tried.best is not None
        assert tried.best[0] == max(every[1:], key=worth)

    def test_all_trials_may_fail(self):
        tried = study()
        assert len(play(tried, lambda _: math.nan)) == 16
        assert tried.best is None

    def test_numbers_are_whole_where_the_option_is(self):
        whole = Study(Tuning(20), {"k": {"low": 1, "high": 50, "log": True}}, {"k": 3}, "a")
        assert all(isinstance(settings["k"], int) for settings in play(whole, lambda _: 0.0))
        part = Study(Tuning(20), {"mu": {"low": 0, "high": 1}}, {"mu": 0.5}, "a")
        assert len({settings["mu"] for settings in play(part, lambda _: 0.0)}) > 2

    @pytest.mark.parametrize(
        "told",
        [
            {"low": 1},
            {"low": 2, "high": 1},
            {"low": 1, "high": 2, "logarithmic": True},
            {"low": 0, "high": 1, "log": True},
            [],
            "1",
            1,
        ],
    )
    def test_of_a_range_that_is_none(self, told):
        with pytest.raises(ConfigurationError, match="search_space: lr must be a list of values"):
            Study(Tuning(3), {"lr": told}, {"lr": 0.1}, "fedavg")


@pytest.mark.parametrize(
    ("told", "tuning"),
    [
        (["trials=20"], Tuning(20)),
        (["trials=2", "seeds=3", "sampler=random"], Tuning(2, 3, "random")),
    ],
)
def test_what_tune_takes(told, tuning):
    assert Tuning.of(told) == tuning


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ([], "needs the number of trials"),
        (["seeds=2"], "needs the number of trials"),
        (["20"], "takes trials=N"),
        (["trials=0"], "trials must be at least 1"),
        (["trials=-1"], "takes trials=N"),
        (["trials=2", "seeds=0"], "seeds must be at least 1"),
        (["trials=2", "sampler=grid"], "sampler must be tpe or random, got 'grid'"),
        (["trials=2", "budget=3"], "got 'budget=3'"),
    ],
)
def test_what_tune_does_not_take(told, message):
    with pytest.raises(ConfigurationError, match=message):
        Tuning.of(told)


OF_SECRETS = """
data: {class_path: tests.experiments.hers.Secret}
model: {client: {class_path: tests.experiments.hers.Line}}
trainer: {max_epochs: 2, accelerator: cpu}
monitor: val/macro_mae
mode: min
search_space: {model.client.lr: {low: 0.01, high: 0.1}}
"""


class TestTrials:
    def test_never_ask_for_test_samples_nor_for_reported_seeds(self, tmp_path):
        own = method_config(tmp_path, "mine", "{class_path: FedAvg}")
        found = comparison(tmp_path, [own], tuning=Tuning(2, 2), text=OF_SECRETS)
        made = finish(found)
        assert [task.tests for task in made] == [False] * 4 + [True]
        assert [task.seed for task in made] == [FIRST_SEED, FIRST_SEED + 1] * 2 + [0]
        for task in made[:4]:
            outcome = Outcome.read(Path(task.folder, "results.json"))
            assert outcome.last.per_client == outcome.last.values == {}
            assert outcome.last.validation is not None
        failure = Failure.read(Path(made[4].folder, "failure.json"))
        assert "somebody looks at test samples" in failure.reason

    @pytest.mark.long
    def test_choose_what_was_best_on_validation_samples(self, tmp_path):
        found = comparison(tmp_path, ["local"], tuning=Tuning(3), seeds=2)
        assert found.count == 5
        made = finish(found)
        assert found.ended == 5
        of_trials = [Outcome.read(Path(task.folder, "results.json")) for task in made[:3]]
        best = max(of_trials, key=lambda run: (run.chosen or run.last).validation or 0)
        assert of_trials[0].settings[LR] == 0.1
        (row,) = found.results().findings.rows
        assert row.settings == row.tuned.chosen == best.settings
        assert row.tuned.validation == (best.chosen or best.last).validation
        assert row.tuned.trials == 3
        assert [*row.runs] == [0, 1]
        for task in made[3:]:
            config = Path(task.folder, "config.yaml").read_text()
            assert f"lr: {best.settings[LR]}" in config

    @pytest.mark.long
    def test_that_exist_are_not_made_again(self, tmp_path):
        first = finish(comparison(tmp_path, ["local"], tuning=Tuning(1)))
        more = finish(comparison(tmp_path, ["local"], tuning=Tuning(2)))
        folders = {task.folder for task in first}
        assert len([task for task in more if task.folder not in folders]) in (1, 2)
        assert not [task for task in more if task.folder in folders]
        (row,) = comparison_results(tmp_path, Tuning(2)).findings.rows
        assert row.tuned.trials == 2

    @pytest.mark.long
    def test_without_validation_samples_are_a_row_that_says_so(self, tmp_path):
        text = DATA.replace("val_fraction: 0.2, ", "val_fraction: 0, ")
        found = comparison(tmp_path, ["local"], tuning=Tuning(2), text=text)
        finish(found)
        (row,) = found.results().findings.rows
        assert "all 2 trials failed: " in row.failures[0].reason
        assert "validation" in row.failures[0].reason

    @pytest.mark.long
    def test_that_fail_leave_the_others(self, tmp_path):
        text = DATA + "search_space: {model.local_epochs: [0, 1]}\n"
        found = comparison(tmp_path, ["local"], tuning=Tuning(4), text=text)
        finish(found)
        (row,) = found.results().findings.rows
        assert row.settings["model.local_epochs"] == 1

    @pytest.mark.short("{low: *")
    @pytest.mark.parametrize("told", ["[one, 2]", "{low: 0.5, high: 2}"])
    def test_of_values_that_the_option_cannot_have_are_not_begun(self, told, tmp_path):
        text = DATA + f"search_space: {{model.local_epochs: {told}}}\n"
        with pytest.raises(ConfigurationError, match="local_epochs: expected a whole"):
            comparison(tmp_path, ["local"], tuning=Tuning(4), text=text)

    def test_take_the_ranges_of_the_configuration_first(self, tmp_path):
        text = DATA + f"search_space: {{{LR}: [0.7]}}\n"
        found = comparison(tmp_path, ["fedavg"], tuning=Tuning(3), text=text)
        (choice,) = found.rows
        assert choice.space[LR] == [0.7]
        assert found.left_out == []

    def test_leave_out_what_her_module_does_not_have(self, tmp_path):
        found = comparison(tmp_path, ["fedavg"], tuning=Tuning(2), text=OF_SECRETS)
        assert found.left_out == [LR]
        (choice,) = found.rows
        assert [*choice.space] == ["model.client.lr", "trainer.callbacks.weighting"]
        assert comparison(tmp_path, ["fedavg"], text=OF_SECRETS).left_out == []

    def test_of_misspelt_options_are_not_begun(self, tmp_path):
        text = DATA + "search_space: {model.local_epoch: [1, 2]}\n"
        said = "there is no option model.local_epoch: did you mean model.local_epochs"
        with pytest.raises(ConfigurationError, match=rf"data\.yaml: search_space: {said}\?"):
            comparison(tmp_path, ["local"], text=text)
        own = Path(method_config(tmp_path, "mine", "{class_path: FedProx, init_args: {mu: 0.1}}"))
        method = own.read_text()
        own.write_text(method + "search_space: {trainer.callbacks.mus: [1, 2]}\n")
        said = "no option trainer.callbacks.mus: did you mean trainer.callbacks.mu"
        with pytest.raises(ConfigurationError, match=rf"mine\.yaml: search_space: .*{said}\?"):
            comparison(tmp_path, [str(own)], tuning=Tuning(2))
        own.write_text(method + "search_space: {model.xyzzy: [1, 2]}\n")  # of another module
        assert comparison(tmp_path, [str(own)], tuning=Tuning(2)).left_out == ["model.xyzzy"]

    def test_of_an_option_that_is_set_by_its_class_are_not_made(self, tmp_path):
        mu = "trainer.callbacks.FedProx.mu"
        found = comparison(tmp_path, ["fedprox"], {mu: [0.3]}, tuning=Tuning(2))
        for task in found.due():
            assert "trainer.callbacks.mu" not in task.settings
            assert f"--{mu}=0.3" in task.arguments

    def test_of_options_that_are_set_are_not_made(self, tmp_path):
        found = comparison(tmp_path, ["fedavg"], {LR: [0.3]}, tuning=Tuning(2))
        for task in found.due():
            assert LR not in task.settings
            assert f"--{LR}=0.3" in task.arguments


def comparison_results(folder: Path, tuning: Tuning) -> Any:
    found = comparison(folder, ["local"], tuning=tuning)
    assert not found.due()
    return found.results()

"""Methods with modifiers on the command line, in comparisons and in resumed runs."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
import yaml

from pflight.__main__ import main as run
from pflight.command import catalogue
from pflight.command.cli import main
from pflight.command.combined import MODIFIERS, parts_of
from pflight.errors import ConfigurationError
from pflight.experiments.plan import Plan, flat, methods_of
from pflight.modifiers import Modifier, Proximal
from pflight.server_callback import KNOWN
from tests.experiments.small import data_config

ADDED = "--trainer.callbacks.modifiers"
COMBINED = {
    "fesem": ["private=Private", "private.layers=head"],
    "ifca": ["proximal=Proximal", "proximal.mu=0.2"],
    "scaffold": ["private=Private", "private.layers=network.hidden.0.bias"],
    "feddyn": ["top_k=TopK", "top_k.fraction=0.1"],
    "fedavg": ["elastic=Elastic", "elastic.alpha=0.5"],
    "pfedla": ["private=Private", "private.layers=network.output"],
}


class Steep(Proximal):
    """A modifier of the user's own."""


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def fit(method: str, *args: str, rounds: int, root: str) -> dict[str, Any]:
    """Run a method on a small federation, and return its last checkpoint."""
    small = ["--data.num_clients=5", "--model.client.network.hidden=[8]"]
    configs = ["--config=configs/data/digits.yaml", f"--config=configs/algorithm/{method}.yaml"]
    shared = [f"--trainer.default_root_dir={root}", f"--trainer.max_epochs={rounds}"]
    main(["fit", *configs, *small, *shared, "--trainer.accelerator=cpu", *args])
    return torch.load(Path(root, "checkpoints", "last.ckpt"), weights_only=True)


def error(capsys: pytest.CaptureFixture[str], *args: Any, **options: Any) -> str:
    """Return the one line that a run ends with."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        fit(*args, **options)
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("pflight: error: ")


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


@pytest.mark.short("fesem")
@pytest.mark.parametrize("method", COMBINED)
def test_runs_from_the_command_line_and_resumes_exactly(method: str) -> None:
    given = [f"{ADDED}.{option}" for option in COMBINED[method]]
    fit(method, *given, rounds=1, root="run")
    resumed = fit(method, *given, "--ckpt_path=last", rounds=3, root="run")
    straight = fit(method, *given, rounds=3, root="straight")
    assert same(resumed["state_dict"], straight["state_dict"])
    assert same(resumed["pflight"]["memory"], straight["pflight"]["memory"])
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    (modifier,) = next(iter(config["trainer"]["callbacks"]))["init_args"]["modifiers"]
    assert modifier == COMBINED[method][0].partition("=")[0]


def test_a_resume_with_other_modifiers_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    private = [f"{ADDED}.{option}" for option in COMBINED["fesem"]]
    fit("fesem", *private, rounds=1, root="run")
    said = error(capsys, "fesem", "--ckpt_path=last", rounds=2, root="run")
    assert "made with modifiers Private(layers='head', keep=True), and here they are none" in said
    other = [*private[:1], f"{ADDED}.private.layers=body"]
    said = error(capsys, "fesem", *other, "--ckpt_path=last", rounds=2, root="run")
    assert "Private(layers='head', keep=True), and here they are Private(layers='body'" in said


def test_an_option_of_a_modifier_is_addressed_by_its_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    two = [f"{ADDED}.proximal=Proximal", f"{ADDED}.private=Private"]
    fit(
        "fesem",
        *two,
        f"{ADDED}.proximal.mu=0.7",
        "--trainer.callbacks.num_clusters=2",
        rounds=1,
        root="run",
    )
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    options = next(iter(config["trainer"]["callbacks"]))["init_args"]
    assert options["num_clusters"] == 2
    assert options["modifiers"]["proximal"]["init_args"]["mu"] == 0.7
    said = error(capsys, "fesem", *two, f"{ADDED}.proximal.nu=0.7", rounds=1, root="bad")
    assert "nu" in said
    said = error(capsys, "fesem", f"{ADDED}.clip.norm=0.7", rounds=1, root="bad")
    assert said.startswith("trainer.callbacks.modifiers.clip has no class: give --trainer")
    said = error(capsys, "fesem", f"{ADDED}.proximal=Private", rounds=1, root="bad")
    assert "the modifier Private is called private, not proximal" in said


class TestNames:
    @pytest.fixture(scope="class")
    @classmethod
    def plan(cls, tmp_path_factory: pytest.TempPathFactory) -> Plan:
        return Plan([data_config(tmp_path_factory.mktemp("plan"))])

    def test_order_does_not_matter(self, plan: Plan) -> None:
        methods = methods_of(["fesem+proximal+private_head", "fesem+private_head+proximal"])
        (row,) = plan.rows(methods, {})
        assert row.method.name == "fesem+private_head+proximal"
        assert row.method.title == "FeSEM + private head + proximal"
        options = dict(flat(row.config))
        assert options["trainer.callbacks.modifiers.private.layers"] == "head"

    def test_a_combination_that_is_a_method_is_its_row(self, plan: Plan) -> None:
        rows = plan.rows(methods_of(["fedavg+private_head", "fedper", "fedavg+proximal"]), {})
        assert [row.method.name for row in rows] == ["fedper", "fedprox"]

    def test_options_are_set_and_searched_by_name(self, plan: Plan) -> None:
        mu = "trainer.callbacks.modifiers.proximal.mu"
        rows = plan.rows(methods_of(["ifca+proximal", "fedavg"]), {mu: [0.1, 1]})
        assert [dict(row.settings) for row in rows] == [{mu: 0.1}, {mu: 1}, {}]
        assert mu in rows[0].method.space

    def test_one_of_the_users_own(self, plan: Plan) -> None:
        (row,) = plan.rows(methods_of([f"fedavg+{__name__}.Steep"]), {})
        assert dict(flat(row.config))["trainer.callbacks.modifiers.steep.mu"] == 0.1

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("fesem+privat_head", "there is no modifier 'privat_head': did you mean private_head?"),
            ("fesme+private_head", "there is no method 'fesme': did you mean fesem?"),
            ("fesem+own.Thing", "there is no modifier class 'own.Thing' that can be imported"),
            (
                "fesem+private_head+private_norms",
                "fesem+private_head+private_norms: a method takes",
            ),
            ("fesem+clip+clip", "fesem+clip+clip: a method takes one Clip"),
        ],
    )
    def test_a_misspelt_name(self, name: str, said: str) -> None:
        with pytest.raises(ConfigurationError) as error:
            methods_of([name])
        assert str(error.value).startswith(said)

    def test_the_command_says_so_at_once(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            run(["compare", "--config", "configs/data/digits.yaml", "--methods", "fesem+heat"])
        assert "there is no modifier 'heat'" in capsys.readouterr().err

    @pytest.mark.parametrize("name", MODIFIERS)
    def test_those_that_are_listed_can_be_made(self, name: str) -> None:
        named = MODIFIERS[name]
        kind = resolve_name(named.kind)
        modifier = kind(**named.options)
        assert isinstance(modifier, Modifier)
        assert f"pflight.{kind.__module__.split('.')[1]}.{kind.__name__}" in {
            entry.class_path for entry in catalogue.entries("modifiers")
        }
        assert {*named.space} <= {*vars(modifier)}

    def test_known_combinations_have_the_titles_of_their_methods(self) -> None:
        assert parts_of("fedavg+private_body") == ("lg_fedavg", [])
        assert KNOWN["FedAvg + private body"] == "LG-FedAvg"

"""What is wrong on the command line or in a config file is one line, and exit status 2."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger

from pflight.command.cli import main
from tests.pages import DIGITS

HUGE = 10**30


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Return the one line that a fit of the quickstart with further arguments ends with."""
    with pytest.raises(SystemExit) as exit_:
        main(["fit", "--config", DIGITS, "--trainer.max_epochs=1", *args])
    error = capsys.readouterr().err
    assert exit_.value.code == 2, error
    assert error.startswith("pflight: error: ")
    assert error.count("\n") == 1
    assert len(error) < 300
    assert not list(Path().glob("runs/*/checkpoints/*")), "it was trained"
    return error.removeprefix("pflight: error: ").strip()


def nested(option: str, value: Any) -> dict[str, Any]:
    """Return a configuration in which one option is set."""
    *parents, name = option.split(".")
    config = {name: value}
    for parent in reversed(parents):
        config = {parent: config}
    return config


def written(value: Any) -> str:
    """Return a value as one types it."""
    return "null" if value is None else str(value)


CASES: list[tuple[str, Any, str]] = [
    # of another type
    (
        "seed_everything",
        "abc",
        "seed_everything: expected true or false or a whole number, got abc",
    ),
    ("data.batch_size", "ten", "data.batch_size: expected a whole number or null, got ten"),
    ("model.local_epochs", "much", "model.local_epochs: expected a whole number, got much"),
    (
        "model.client.optimizer.lr",
        "abc",
        "model.client.optimizer.lr: expected a finite number or a Tensor, got abc",
    ),
    (
        "model.client.network.hidden",
        "ten",
        "model.client.network.hidden: expected a list of int, got ten",
    ),
    (
        "model.engine",
        "warp",
        "model.engine: expected 'auto', 'sequential' or 'vectorized', got warp",
    ),
    ("trainer.logger", "abc", "trainer.logger: expected a Logger, a list, true or false or null"),
    ("data.dropout", None, "Digits: dropout must be a finite number, got null"),
    ("data.partition", None, "Digits: partition must be a Partition, got null"),
    ("model.client.optimizer", None, "Classifier: optimizer must be a function, got null"),
    ("model.local_epochs", None, "Federation: local_epochs must be a whole number, got null"),
    ("data", None, "data"),
    # out of range
    ("seed_everything", -3, "seed_everything must be from 0 to 2**32 - 1, got -3"),
    ("seed_everything", HUGE, f"seed_everything must be from 0 to 2**32 - 1, got {HUGE}"),
    ("data.seed", HUGE, f"Digits: seed must be below 2**32, got {HUGE}"),
    ("model.local_epochs", HUGE, f"Federation: local_epochs must be below 2**32, got {HUGE}"),
    ("data.partition.samples_per_client", HUGE, "ClassesPerClient: samples_per_client must be bel"),
    ("data.num_clients", 10**9, "1797 samples are too few for 1000000000 clients"),
    ("data.availability", 1e-300, "Digits: availability must be in [1e-09, 1], got 1e-300"),
    (
        "model.client.optimizer.momentum",
        1.5,
        "be built: SGD: momentum must be in [0, 1), got 1.5",
    ),
    (
        "model.client.optimizer.dampening",
        -0.5,
        "SGD: dampening must be in [0, 1], got -0.5",
    ),
    ("model.client.optimizer.lr", -1, "the client's optimizer can't be built: Invalid learning r"),
    ("model.client.network.hidden", [-1], "MLP: hidden must be at least 1, got -1"),
    ("trainer.check_val_every_n_epoch", 0, "check_val_every_n_epoch must be a whole number of at"),
    ("trainer.val_check_interval", 3, "val_check_interval=3 would validate within a round"),
    ("trainer.log_every_n_steps", -1, "log_every_n_steps must be at least 0, got -1"),
    # what Lightning says
    (
        "trainer.strategy",
        "fsdp",
        "one device or with strategy ddp, not with strategy fsdp",
    ),
    ("trainer.strategy", "nonsense", "one device or with strategy ddp, not with strategy nonsense"),
    ("trainer.accelerator", "abacus", "trainer: You selected an invalid accelerator name"),
    ("trainer.devices", "many", "trainer: TypeError: `devices` selected with `CPUAccelerator`"),
    ("trainer.num_nodes", 0, "trainer: `num_nodes` must be a positive integer, but got 0."),
    # options that there are not
    (
        "trainer.max_epoch",
        3,
        "option trainer.max_epoch: did you mean trainer.max_epochs?",
    ),
    ("data.num_client", 3, "there is no option data.num_client: did you mean data.num_clients?"),
    (
        "data.samples_per_client",
        3,
        "no option data.samples_per_client: did you mean data.partition.samples_per_client?",
    ),
    ("max_epochs", 3, "there is no option max_epochs: did you mean trainer.max_epochs?"),
    ("model.lr", 3, "there is no option model.lr: did you mean model.client.optimizer.lr?"),
    ("model.hidden", [3], "option model.hidden: did you mean model.client.network.hidden?"),
    (
        "model.num_class",
        3,
        "did you mean model.client.num_classes or model.client.network.num_classes?",
    ),
    ("trainer.num_cluster", 3, "did you mean trainer.callbacks.num_clusters?"),
    ("trainer.seed", 3, "no option trainer.seed: did you mean model.seed or data.seed?"),
    ("model.client.optimizer.lrr", 3, "lrr: did you mean model.client.optimizer.lr?"),
    ("model.xyzzy", 3, "there is no option model.xyzzy"),
    (
        "data.dict_kwargs",
        {"a": 1},
        "data.dict_kwargs: pflight.datamodules.sources.digits.",
    ),
    # classes that there are not
    ("data", "Digit", "data: Digit is not a class that this option takes: did you mean Digits?"),
    (
        "model.client",
        "ProximalClien",
        "ProximalClien is not a class that this option takes: did you mean ProximalClient?",
    ),
    (
        "model.client",
        "FedAvg",
        "model.client: FedAvg is not a class that this option takes",
    ),
    (
        "model.client.optimizer",
        "torch.optim.SGG",
        "torch.optim.SGG is not a class that this option takes: did you mean torch.optim.SGD?",
    ),
    (
        "model.client.optimizer",
        "SDG",
        "SDG is not a class that this option takes: did you mean SGD?",
    ),
    (
        "data.partition",
        "Diriclet",
        "Diriclet is not a class that this option takes: did you mean Dirichlet?",
    ),
    ("data", "nowhere.Data", "data: No module named 'nowhere'"),
]


@pytest.mark.short(
    "data.batch_size-ten-*",
    "model.engine-warp-*",
    "data.dropout-None-*",
    "data.partition-Diriclet-*",
)
@pytest.mark.parametrize(("option", "value", "message"), CASES)
def test_one_line(
    option: str, value: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, f"--{option}={written(value)}")
    assert message in said
    Path("own.yaml").write_text(yaml.safe_dump(nested(option, value)))
    in_file = refused(capsys, "--config", "own.yaml")
    assert message in in_file
    if said.startswith("there is no option") and "dict_kwargs" not in option:
        assert in_file == f"own.yaml: {said}"


@pytest.mark.short("fit: *", "trainer: {callbacks+: *FeSEMM*", "a: *")
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("trainer: null", "trainer: expected a mapping, got None"),
        ("trainer: [1]", "the config file own.yaml has no mapping of options under trainer"),
        ("fit: {trainer: {max_epochs: 3}}", "option fit.trainer.max_epochs: did you mean trainer."),
        (
            "model: {client: {init_args: {optimizer: {init_args: {lr: .nan}}}}}",
            "SGD: lr must be a",
        ),
        (
            "data: {init_args: {participation: .inf}}",
            "participation must be a finite number",
        ),
        (
            "trainer: {callbacks+: [{class_path: FeSEM, init_args: {num_cluster: 3}}]}",
            "option trainer.callbacks.num_cluster: did you mean trainer.callbacks.num_clusters?",
        ),
        (
            "trainer: {callbacks+: [{class_path: FeSEMM}]}",
            "trainer.callbacks: FeSEMM is not a class that this option takes: did you mean FeSEM?",
        ),
        ("a: [", "the config file own.yaml is not YAML"),
    ],
)
def test_one_line_on_a_file(config: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("own.yaml").write_text(config)
    assert message in refused(capsys, "--config", "own.yaml")


def test_help_for_no_class(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["fit", "--data.help", "Digit"])
    assert exit_.value.code == 2
    said = "data: Digit is not a class that this option takes: did you mean Digits?"
    assert capsys.readouterr().err == f"pflight: error: {said}\n"


def test_several_mistakes_hide_no_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    mistakes = ["--data.num_client=3", "--model.mu=3", "--trainer.max_epoch=3", "--help"]
    assert "did you mean data.num_clients?" in refused(capsys, *mistakes)
    needed = ["--data=LeafFEMNIST", "--data.rooot=data", "--data.partition.nonsense=3"]
    assert "did you mean data.root?" in refused(capsys, *needed)


@pytest.mark.short("args0-*", "args1-*")
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--data.partition.alpha=1", "--data.partition=Dirichlet"],
            "data.partition.alpha has to follow the class that has it: give --data.partition first",
        ),
        (["--data.num_clients"], "data.num_clients: a value is missing"),
        (["--data.num_clients", "--data.seed=1"], "data.num_clients: a value is missing"),
        (["--data.dict_kwargs.a=1"], "data.dict_kwargs: "),
    ],
)
def test_one_line_on_arguments(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *args)


TWO = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/macro_acc"]


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    """Return the configuration of a fit of the quickstart."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        main(["fit", "--config", DIGITS, *args, "--print_config"])
    shown = capsys.readouterr()
    assert not exit_.value.code, shown.err
    return yaml.safe_load(shown.out)


@pytest.mark.short("--config=later.yaml*", "*init_args.num_clusters=3")
@pytest.mark.parametrize(
    "args",
    [
        [*TWO, "--trainer.callbacks.FeSEM.num_clusters=3"],
        [*TWO, "--trainer.callbacks.FeSEM.num_clusters", "3"],
        ["--trainer.callbacks.FeSEM.num_clusters=3", *TWO],
        ["--config=later.yaml", "--trainer.callbacks.FeSEM.num_clusters=3"],
        ["--trainer.callbacks.FeSEM.num_clusters=3", "--trainer.callbacks.EarlyStopping.mode=max"],
        ["--trainer.callbacks.FeSEM.init_args.num_clusters=3"],
    ],
    ids=" ".join,
)
def test_options_by_class(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    stopping = {"class_path": "EarlyStopping", "init_args": {"monitor": "val/macro_acc"}}
    fesem = {"class_path": "FeSEM", "init_args": {"num_clusters": 2}}
    Path("later.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": [fesem, stopping]}}))
    with_both = args if TWO[0] in args or "--config=later.yaml" in args else [*TWO, *args]
    config = printed(capsys, *with_both)
    fesem, stopping = config["trainer"]["callbacks"]
    assert fesem["class_path"].endswith("FeSEM")
    assert fesem["init_args"]["num_clusters"] == 3
    assert stopping["init_args"]["monitor"] == "val/macro_acc"
    if "--config=later.yaml" not in args:
        by_place = ["--trainer.callbacks.num_clusters=3", *TWO]
        by_place += ["--trainer.callbacks.mode=max"] if "mode" in args[-1] else []
        assert config == printed(capsys, *by_place)


@pytest.mark.short("args0-*", "args5-*")
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--trainer.callbacks.FeSM.num_clusters=3"],
            "FeSM.num_clusters: trainer.callbacks has no FeSM: did you mean FeSEM?",
        ),
        (
            ["--trainer.callbacks.Ditto.lam=3"],
            "trainer.callbacks.Ditto.lam: trainer.callbacks has no Ditto, but FeSEM, EarlyStopping",
        ),
        (
            ["--trainer.callbacks.FeSEM.num_cluster=3"],
            "there is no option trainer.callbacks.FeSEM.num_cluster: did you mean "
            "trainer.callbacks.FeSEM.num_clusters?",
        ),
        (
            ["--trainer.callbacks.FeSEM.num_clusters=many"],
            "trainer.callbacks.FeSEM.num_clusters: expected a whole number or 'auto', got many",
        ),
        (
            ["--trainer.callbacks.FeSEM.num_clusters"],
            "trainer.callbacks.FeSEM.num_clusters: a value is missing",
        ),
        (
            ["--trainer.callbacks+=FeSEM", "--trainer.callbacks.FeSEM.num_clusters=3"],
            "trainer.callbacks has 2 objects of class FeSEM: give each its options in a file",
        ),
        (["--trainer.logger.CSVLogger.save_dir=x"], "trainer.logger has no CSVLogger"),
    ],
)
def test_options_by_class_that_are_wrong(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *TWO, *args)


@pytest.mark.long
def test_options_of_a_logger_by_class(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"--trainer.logger.{kind}Logger.save_dir={kind}" for kind in ("CSV", "TensorBoard")]
    alone = ["--trainer.logger=CSVLogger", "--trainer.logger.CSVLogger.save_dir=here"]
    assert printed(capsys, *alone)["trainer"]["logger"]["init_args"]["save_dir"] == "here"
    file = {
        "trainer": {
            "logger": [
                {"class_path": f"{kind}Logger", "init_args": {"save_dir": "x"}}
                for kind in ("CSV", "TensorBoard")
            ]
        }
    }
    Path("loggers.yaml").write_text(yaml.safe_dump(file))
    logged = printed(capsys, "--config=loggers.yaml", *names)["trainer"]["logger"]
    assert [one["init_args"]["save_dir"] for one in logged] == ["CSV", "TensorBoard"]


def test_what_is_not_alike_is_not_proposed(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "--data.root=x") == "there is no option data.root"
    said = refused(capsys, "--data.augmentation=Foo")
    assert said == "data.augmentation: Foo is not a class that this option takes"


class Refuses(L.LightningDataModule):
    """Somebody's own data, which explain what they can't be."""

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        if size < 1:
            raise ValueError(f"size is {size},\nwhich is too small")


class OddError(Exception):
    """An exception of somebody's own."""


def fails(with_: str) -> None:
    """Fail as classes do whose authors did not think of it."""
    errors: dict[str, Callable[[], object]] = {
        "key": lambda: {}["cards"],
        "index": lambda: [][3],
        "stop": lambda: next(iter(())),
        "file": lambda: open("nowhere/cards.csv"),  # noqa: SIM115
        "import": lambda: import_module("nowhere"),
        "type": lambda: len(3),  # type: ignore[arg-type]
        "attribute": lambda: None.cards,  # type: ignore[attr-defined]
        "zero": lambda: 1 // 0,
    }
    if with_ == "assert":
        raise AssertionError
    if with_ == "value":
        raise ValueError
    if with_ == "own":
        raise OddError("odd")
    errors[with_]()


class FailingData(L.LightningDataModule):
    def __init__(self, with_: str) -> None:
        super().__init__()
        fails(with_)


class FailingModule(L.LightningModule):
    def __init__(self, with_: str) -> None:
        super().__init__()
        fails(with_)


class FailingCallback(L.Callback):
    def __init__(self, with_: str) -> None:
        fails(with_)


class FailingLogger(CSVLogger):
    def __init__(self, with_: str) -> None:
        fails(with_)


@pytest.fixture
def own_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """This file as the module ``own_parts``."""
    monkeypatch.setitem(sys.modules, "own_parts", sys.modules[__name__])
    for kind in (Refuses, FailingData, FailingModule, FailingCallback, FailingLogger):
        monkeypatch.setattr(kind, "__module__", "own_parts")


@pytest.mark.usefixtures("own_parts")
def test_own_classes(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "--data=own_parts.Refuses", "--data.init_args.size=0")
    assert said == "own_parts.Refuses: size is 0, which is too small"
    said = refused(capsys, "--data=own_parts.Refuses", "--data.sise=0")
    assert said == "there is no option data.sise: did you mean data.size?"


FAILURES = [
    ("key", "KeyError: 'cards' (test_parser.py, line "),
    ("index", "IndexError: list index out of range (test_parser.py, line "),
    ("stop", "StopIteration (test_parser.py, line "),
    ("assert", "AssertionError (test_parser.py, line "),
    ("value", "ValueError (test_parser.py, line "),
    ("type", "TypeError: object of type 'int' has no len() (test_parser.py, line "),
    ("attribute", "AttributeError: 'NoneType' object has no attribute 'cards' (test_parser.py, "),
    ("zero", "ZeroDivisionError: integer division or modulo by zero (test_parser.py, line "),
    ("own", "OddError: odd (test_parser.py, line "),
    ("file", "[Errno 2] No such file or directory: 'nowhere/cards.csv'"),
    ("import", "No module named 'nowhere'"),
]


@pytest.mark.short("key-*", "import-*")
@pytest.mark.parametrize(("with_", "cause"), FAILURES)
@pytest.mark.usefixtures("own_parts")
def test_own_classes_that_fail(with_: str, cause: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "--data=own_parts.FailingData", f"--data.with_={with_}")
    assert said.startswith(f"own_parts.FailingData: {cause}")


@pytest.mark.short("key-*-model-FailingModule", "stop-*-FailingCallback")
@pytest.mark.parametrize(
    ("option", "kind"),
    [
        ("model", "FailingModule"),
        ("model.client", "FailingModule"),
        ("trainer.callbacks", "FailingCallback"),
        ("trainer.logger", "FailingLogger"),
    ],
)
@pytest.mark.parametrize(("with_", "cause"), [FAILURES[0], FAILURES[2]])
@pytest.mark.usefixtures("own_parts")
def test_the_class_that_fails_is_named(
    option: str, kind: str, with_: str, cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, f"--{option}=own_parts.{kind}", f"--{option}.with_={with_}")
    assert said.startswith(f"own_parts.{kind}: {cause}")


FUNCTIONS = """
import torch

def adam(parameters):
    return torch.optim.Adam(parameters)

def declared(parameters) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters)
"""


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["=own_functions.adamm"],
            ": own_functions.adamm is not a class that this option takes: did you mean own_funct",
        ),
        (["=own_functions.adam"], ": own_functions.adam can't be used: is it a function that decl"),
        (
            ["=own_functions.nothing.adam"],
            ": own_functions.nothing.adam is not a class that this option takes",
        ),
        (["=own_functions.declared", ".lr=0.1"], ".lr"),
        (["=broken_functions.adam"], ": No module named 'nowhere'"),
    ],
)
def test_functions(
    args: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("own_functions.py").write_text(FUNCTIONS)
    Path("broken_functions.py").write_text("import nowhere")
    monkeypatch.syspath_prepend(Path.cwd())
    sys.modules.pop("own_functions", None)
    said = refused(capsys, *(f"--model.client.optimizer{arg}" for arg in args))
    assert f"model.client.optimizer{message}" in said


def test_a_mistake_in_the_file_of_an_option_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    client = {"class_path": "Classifier", "init_args": {"num_clases": 3}}
    Path("client.yaml").write_text(yaml.safe_dump(client))
    said = refused(capsys, "--model.client=client.yaml")
    assert said.startswith("client.yaml: there is no option model.client.num_clases: did you mean ")


def test_ranges_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["fit", "--trainer.callbacks.help", "Ditto"])
    assert not exit_.value.code
    assert "In [0, inf)." in " ".join(capsys.readouterr().out.split())

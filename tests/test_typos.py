"""Typos are found without the run's parser, in its words, and nothing right is refused."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pflight.command.cli import main
from pflight.command.shipped import configs
from pflight.command.typos import Options, complaint
from tests.pages import DIGITS

QUICKSTART = f"--config={DIGITS}"
OWN = """
import lightning as L

from pflight.datamodules import Digits


class OwnDigits(Digits):
    def __init__(self, size: int = 1, **kwargs):
        super().__init__(**kwargs)


class OwnCallback(L.Callback):
    def __init__(self, mine: int = 1):
        pass
"""


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_parts.py").write_text(OWN)
    (tmp_path / "own.yaml").write_text("data: {class_path: own_parts.OwnDigits}\n")
    (tmp_path / "trainer.yaml").write_text("callbacks: [{class_path: own_parts.OwnCallback}]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_parts", None)


def parsed(capsys: pytest.CaptureFixture[str], command: str, *args: str) -> str | None:
    """Return what the parser of the run refuses, if it does."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        main([command, *args])
    error = capsys.readouterr().err
    return error.removeprefix("pflight: error: ").strip() if exit_.value.code else None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--trainer.max_epoch=3"], "trainer.max_epoch: did you mean trainer.max_epochs?"),
        (["--trainr.max_epochs", "3"], "trainr.max_epochs: did you mean trainer.max_epochs?"),
        (["--max_epochs=3"], "max_epochs: did you mean trainer.max_epochs?"),
        (["--confg=configs/quickstart.yaml"], "confg: did you mean config?"),
        (["--seed_everythin", "3"], "seed_everythin: did you mean seed_everything?"),
        (["--ckpt_pat=last"], "ckpt_pat: did you mean ckpt_path?"),
        (["--model.local_epoch=3"], "model.local_epoch: did you mean model.local_epochs?"),
        (["--model.lr=3"], "model.lr: did you mean model.client.optimizer.lr?"),
        (["--model.client.optimizer.lrr=3"], "lrr: did you mean model.client.optimizer.lr?"),
        (["--model.client.num_clases=3"], "did you mean model.client.num_classes or model"),
        (["--data.num_client", "3"], "data.num_client: did you mean data.num_clients?"),
        (["--data.init_args.num_client", "3"], "num_client: did you mean data.num_clients?"),
        (["--data.samples_per_client=3"], "did you mean data.partition.samples_per_client?"),
        (["--trainer.callbacks.num_cluster=3"], "did you mean trainer.callbacks.num_clusters?"),
        (["--trainer.seed=3"], "trainer.seed: did you mean model.seed or data.seed?"),
        (["--model.xyzzy=3"], "there is no option model.xyzzy"),
        (["--data=Omniglot", "--data.rooot=x"], "data.rooot: did you mean data.root?"),
        (["--data", "Digit"], "data: unknown class Digit: did you mean Digits?"),
        (["--data.partition=Diriclet"], "data.partition: unknown class Diriclet: did you mean Di"),
        (["--model.client=ProximalClien"], "ProximalClien: did you mean ProximalClient?"),
        (["--trainer.callbacks+=EarlyStoping"], "EarlyStoping: did you mean EarlyStopping?"),
        (["--trainer.callbacks=FeSEMM"], "trainer.callbacks: unknown class FeSEMM: did you mean "),
        (["--config", "configs/algorithm/fesm.yaml"], "did you mean configs/algorithm/fesem.yaml?"),
        (["--config=fesem"], "there is no config file 'fesem': did you mean configs/algorithm/fes"),
        (["--config=onw.yaml"], "there is no config file 'onw.yaml': did you mean own.yaml?"),
        (["--config=xyzzy.yaml"], "no config file 'xyzzy.yaml', and pflight ships none like it"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_both_say_the_same(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = complaint("fit", [QUICKSTART, *args])
    assert said is not None
    assert message in said
    assert parsed(capsys, "fit", QUICKSTART, *args) == said


RIGHT = [
    ["--trainer.callbacks+=DeviceStatsMonitor", "--data=HeldOut", "--data.data=Digits"],
    [],
    ["--trainer.max_epochs", "3", "--seed_everything=3", "--monitor=val/macro_acc", "--mode=max"],
    ["--data=own_parts.OwnDigits", "--data.size=3", "--data.num_clients=5"],
    ["--data.class_path=own_parts.OwnDigits", "--data.init_args.size=3"],
    ["--config=own.yaml", "--data.size=4"],
    ["--trainer.callbacks+=own_parts.OwnCallback", "--trainer.callbacks.mine=3"],
    ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.EarlyStopping.monitor=val/loss"],
    ["--trainer.callbacks.FeSEM.num_clusters=3", "--trainer.callbacks+=own_parts.OwnCallback"],
    ["--trainer.callbacks+", "EarlyStopping", "--trainer.callbacks.monitor=val/loss"],
    ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=x"],
    ["--trainer.logger=TensorBoardLogger", "--trainer.logger.save_dir=x"],
    ["--trainer=trainer.yaml", "--trainer.callbacks.mine=3"],
    ["--model.client=ProximalClient", "--model.client.mu=0.3"],
    ['--model.client={"class_path": "ProximalClient", "init_args": {"mu": 0.2}}'],
    ["--model.client.optimizer=torch.optim.Adam", "--model.client.optimizer.betas=[0.9,0.9]"],
    ["--model.server_optimizer=SGD", "--model.server_optimizer.lr=1.0"],
    ["--model.client.init_args.network.init_args.hidden=[8]", "--model.client.network.hidden+=9"],
    ["-c", "configs/data/rotated_digits.yaml", "--data.data.num_clients=8"],
    ["--trainer.default_root_dir", "-1", "--ckpt_path=null", "--trainer.limit_val_batches", "-1"],
    ["--trainer.default_root_dir", "--max_epoch=a folder"],
    ["--config=configs/centralized.yaml", "--model.optimizer.lr=0.2"],
    ["--config=configs/algorithm/fedcluster.yaml", "--trainer.callbacks.eps1=0.3"],
]


@pytest.mark.parametrize("args", RIGHT, ids=" ".join)
def test_what_is_right_is_left_alone(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint("fit", [QUICKSTART, *args]) is None
    assert parsed(capsys, "fit", QUICKSTART, *args, "--print_config") is None


@pytest.mark.parametrize(
    "args",
    [
        ["--help", "--trainr=3"],
        ["--trainer.max_epoch=3", "-h"],
        ["--data.help=Digits", "--data.num_client=3"],
        ["--trainer.callbacks.help", "FeSEM", "--trainr=3"],
    ],
    ids=" ".join,
)
def test_help_comes_first(args: list[str]) -> None:
    assert complaint("fit", args) is None


def keys(value: Any, prefix: str = "") -> Iterator[str]:
    """Yield the names of all options in a configuration as it is written."""
    if isinstance(value, list):
        for part in value:
            yield from keys(part, prefix)
    elif isinstance(value, dict):
        for name, part in value.items():
            inner = name in ("init_args", "class_path")
            full = prefix if inner else f"{prefix}.{name.rstrip('+')}".removeprefix(".")
            yield from [] if inner else [full]
            yield from keys(part, full)


@pytest.mark.parametrize("config", configs())
def test_all_options_of_a_shipped_config_are_known(config: str) -> None:
    options = Options("fit", ["--config", config])
    written = [*keys(yaml.safe_load(configs()[config].read_text()))]
    assert not [*filter(options.lack, written)]
    assert any(options.lack(f"{name}y") for name in written)


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_all_options_of_a_run_are_known(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, QUICKSTART, "--print_config"])
    printed = [*keys(yaml.safe_load(capsys.readouterr().out))]
    assert len(printed) > 80
    assert {*printed} == {*Options(command, [QUICKSTART]).names()}


@pytest.mark.parametrize(
    "config",
    [
        "data: &own {class_path: own_parts.OwnDigits}\nmodel: *own\n",
        "data: {<<: {class_path: own_parts.OwnDigits}}\n",
        "trainer: " + "[" * 100_000,
        "trainer: {",
        "- trainer\n",
        "trainer: trainer.yaml\n",
        "",
    ],
    ids=["alias", "merge", "deep", "broken", "list", "file", "empty"],
)
def test_an_unusual_file_is_left_to_the_parser(config: str) -> None:
    Path("unusual.yaml").write_text(config)
    assert complaint("fit", ["--config=unusual.yaml", "--data.size=3", "--trainr=3"]) is None


def test_a_pipe_is_left_to_the_parser() -> None:
    os.mkfifo("pipe.yaml")
    assert complaint("fit", ["--config=pipe.yaml", "--trainr=3"]) is None


PIECES = [
    *RIGHT[1:],
    ["--data=Digits"],
    ["--data.partition=Dirichlet", "--data.partition.alpha=0.3"],
    ["--data.partition.k=2"],
    ["--data.size=3"],
    ["--model=Classifier"],
    ["--model.client.mu=0.3"],
    ["--trainer.callbacks.num_clusters=3"],
    ["--trainer.callbacks.num_cluster=3"],
    ["--trainer.callbacks=null"],
    ["--trainer.logger.save_dirr=x"],
    ["--model.epochs=3"],
    ["--epochs=3"],
]


@pytest.mark.parametrize("seed", range(8))
def test_no_mixture_that_the_parser_takes_is_refused(
    seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = random.Random(seed).sample(PIECES, 4)
    args = [QUICKSTART, *(part for piece in chosen for part in piece)]
    said = complaint("fit", args)
    assert said is None or parsed(capsys, "fit", *args) is not None

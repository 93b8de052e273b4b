"""A module and data of one's own file, from the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pflight.command.cli import main

HOSPITALS = """
import lightning as L
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pflight.datamodules import DatasetClients


class Line(L.LightningModule):
    def __init__(self, lr: float = 0.1):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.lr = nn.Linear(2, 1), lr

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val/mse", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Hospitals(DatasetClients):
    def __init__(self, num_clients: int = 3, batch_size: int = 4):
        random = torch.Generator().manual_seed(0)
        x = torch.randn(num_clients, 8, 2, generator=random)
        samples = [TensorDataset(one, one[:, :1] - one[:, 1:]) for one in x]
        super().__init__(samples, val=samples, test=samples, batch_size=batch_size)
"""


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hospitals.py").write_text(HOSPITALS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "hospitals", raising=False)


def fit(*args: str, rounds: int = 4) -> None:
    parts = "--model.client=hospitals.Line", "--data=hospitals.Hospitals"
    run = f"--trainer.max_epochs={rounds}", "--trainer.default_root_dir=run"
    main(["fit", *parts, "--trainer.callbacks=Ditto", *run, *args])


def kept() -> set[str]:
    return {path.name for path in Path("run", "checkpoints").glob("*.ckpt")}


def test_the_best_is_kept_by_the_value_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    # With so large a step the loss grows from round to round.
    fit("--model.client.lr=2.0", "--monitor=val/macro_mse", "--mode=min")
    assert kept() == {"best.ckpt", "last.ckpt"}
    assert "no best.ckpt" not in capsys.readouterr().out
    epochs = [torch.load(f"run/checkpoints/{name}.ckpt")["epoch"] for name in ("best", "last")]
    assert epochs == [0, 3]
    main(["validate", "--config=run/config.yaml"])
    assert "uses run/checkpoints/best.ckpt" in capsys.readouterr().out


def test_without_one_no_best_is_kept_which_a_line_says(capsys: pytest.CaptureFixture[str]) -> None:
    fit(rounds=1)
    assert kept() == {"last.ckpt"}
    assert "no best.ckpt is kept: choose a metric that Line" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--monitor=val/macro_mse"], "give --monitor and --mode together"),
        (["--mode=min"], "give --monitor and --mode together"),
        (["--monitor=val/macro_mae", "--mode=min"], "could not find the monitored key"),
        (
            [
                *("--monitor=val/macro_mse", "--mode=min"),
                *("--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.monitor=val/mse"),
            ],
            "set that callback's monitor instead",
        ),
    ],
)
def test_what_can_choose_no_best_is_named(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        fit(*options)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


OWN = """
from typing import Callable, Iterable, Optional
import lightning as L
import torch
from hospitals import Hospitals, Line

def adam(parameters):  # no annotation says what it returns
    return torch.optim.Adam(parameters, lr=1e-3)

class Net(Line):
    def __init__(
        self,
        width: int = 4,
        optimizer: Callable[[Iterable], torch.optim.Optimizer] = adam,
        gradient_clip_val: Optional[float] = 5.0,
        offset: torch.Tensor = torch.ones(2),
    ):
        super().__init__()
        self.got = width, optimizer.__name__, gradient_clip_val, offset.sum().item()
        self.register_buffer("offset", offset)

    def on_train_start(self):
        print("GOT", *self.got)

class Wide(Net):
    def __init__(self, width: int = 8, **options):
        super().__init__(width, **options)

class Patient(L.Callback):
    def __init__(self, mu: float = 7.0):
        print("MU", mu)
"""


@pytest.mark.short("options0-*", "options4-*")
@pytest.mark.parametrize(
    ("options", "got"),
    [
        (["--model.client=own.Net"], "GOT 4 adam 5.0 2.0"),
        (["--model.client=own.Net", "--model.client=own.Wide"], "GOT 8 adam 5.0 2.0"),
        (["--model.client=own.Net", "--model.client.width=3"], "GOT 3 adam 5.0 2.0"),
        (["--config=net.yaml"], "GOT 6 adam 5.0 2.0"),
        # What a user gave to the class before is kept where the new class has such an option.
        (["--config=net.yaml", "--model.client=own.Wide"], "GOT 6 adam 5.0 2.0"),
    ],
)
def test_a_class_has_its_own_defaults(
    options: list[str], got: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    sys.modules.pop("own", None)
    client = "{class_path: own.Net, init_args: {width: 6}}"
    (tmp_path / "net.yaml").write_text(f"model: {{client: {client}}}")
    run = ["--data=hospitals.Hospitals", "--trainer.max_epochs=1", "--trainer.accelerator=cpu"]
    main(["fit", *options, *run, "--trainer.default_root_dir=run", "--model.engine=sequential"])
    assert got in capsys.readouterr().out
    again = ["--config=run/config.yaml", "--ckpt_path=last", "--trainer.max_epochs=2"]
    main(["fit", *again])
    assert got in capsys.readouterr().out


def test_a_list_of_callbacks_replaces_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    sys.modules.pop("own", None)
    first = "{class_path: FedProx, init_args: {mu: 0.5}}"
    (tmp_path / "first.yaml").write_text(f"trainer: {{callbacks: [{first}]}}")
    (tmp_path / "second.yaml").write_text("trainer: {callbacks: [{class_path: own.Patient}]}")
    fit("--config=first.yaml", "--config=second.yaml", rounds=1)
    assert "MU 7.0" in capsys.readouterr().out


@pytest.mark.long
def test_modules_in_the_current_folder_are_found(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("pflight"))]
    parts = ["--model.client=hospitals.Line", "--data=hospitals.Hospitals", "--print_config"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*command, "fit", *parts], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert "class_path: hospitals.Line" in done.stdout, done.stderr

"""The page on security keeps its word: what runs code and what doesn't, and who may read a run."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from pflight.command.cli import main
from pflight.errors import ConfigurationError
from pflight.runs.checkpoint import read_checkpoint
from tests.pages import DIGITS


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.folder),)


def test_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    content = {"state_dict": {}, "pytorch-lightning_version": "2.6", "epoch": Trap(tmp_path / "it")}
    torch.save(content, tmp_path / "trap.ckpt")
    with pytest.raises(ConfigurationError, match=r"trap\.ckpt can't be read"):
        read_checkpoint(tmp_path / "trap.ckpt")
    assert not (tmp_path / "it").exists()
    torch.load(tmp_path / "trap.ckpt", weights_only=False)
    assert (tmp_path / "it").exists()


def test_yaml_itself_runs_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "trap.yaml"
    config.write_text(f"data: !!python/object/apply:os.mkdir ['{tmp_path / 'it'}']")
    with pytest.raises(SystemExit) as exit_:
        main(["fit", "--config", str(config)])
    assert exit_.value.code == 2
    assert "could not determine a constructor" in capsys.readouterr().err
    assert not (tmp_path / "it").exists()


@pytest.mark.parametrize("source", ["config", "ckpt_path"])
def test_nothing_is_read_from_an_address(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", DIGITS, f"--{source}", "http://localhost:9/it"]
    with pytest.raises(SystemExit) as exit_:
        main(["fit", *arguments])
    assert exit_.value.code == 2
    assert "there is no c" in capsys.readouterr().err


@pytest.mark.long
def test_a_run_has_the_rights_that_the_umask_leaves(tmp_path: Path) -> None:
    configs = ["--config=configs/data/digits.yaml", "--config=configs/algorithm/local.yaml"]
    options = [f"--trainer.default_root_dir={tmp_path / 'run'}", "--model.client_memory=disk"]
    before = os.umask(0o027)
    try:
        main(["fit", *configs, *options, "--trainer.max_epochs=1"])
        main(["predict", *configs, *options, "--ckpt_path=last"])
    finally:
        os.umask(before)
    paths = [tmp_path / "run", *tmp_path.glob("run/**/*")]
    assert {path.suffix for path in paths} >= {".ckpt", ".csv", ".json", ".rows", ".yaml"}
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o750 if path.is_dir() else 0o640), path

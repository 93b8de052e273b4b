"""The command line: what a user types, and what is in the run folder afterwards."""

from __future__ import annotations

import csv
import errno
import gc
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.resources import files
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pflight import Federation
from pflight.__main__ import main as command
from pflight.callbacks import FeSEM
from pflight.command import catalogue
from pflight.command.cli import FederationCLI, main
from pflight.errors import ConfigurationError
from pflight.history import load_history
from pflight.models import MLP, ProximalClient
from pflight.runs.callbacks import dumped
from pflight.runs.checkpoint import AtomicCheckpointIO
from pflight.runs.folder import RunFolder
from tests.event_files import read_events
from tests.pages import DIGITS

FOR_ADAPTERS = {one.name for one in catalogue.methods() if one.needs == "adapters"}
ALGORITHMS = {one.name: str(one.class_path).rpartition(".")[2] for one in catalogue.methods()}
NETWORKS = {
    "celeba": "CelebACNN",
    "cifar10": "PFedHNCNN",
    "cifar100": "PFedHNCNN",
    "clustered": "LogisticRegression",
    "digits": "MLP",
    "emnist": "McMahanCNN",
    "fashion_mnist": "McMahanCNN",
    "femnist": "FEMNISTCNN",
    "omniglot": "McMahanCNN",
    "rotated_digits": "MLP",
    "synthetic": "LogisticRegression",
}


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in an empty folder, where only the shipped configs can be found, on one thread."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pflight(command: str, *args: str, rounds: int = 2, root: str = "run") -> None:
    """Run a command on a small federation in this process."""
    small = ["--data.num_clients=6", "--model.client.network.hidden=[8]"]
    shared = [f"--trainer.default_root_dir={root}", f"--trainer.max_epochs={rounds}"]
    main([command, "--config", DIGITS, *small, *shared, *args])


def printed_config(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Return what ``--print_config`` prints."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        main(["fit", *args, "--print_config"])
    assert not exit_.value.code
    return capsys.readouterr().out


def composed(*names: str) -> list[str]:
    return [part for name in names for part in ("--config", f"configs/{name}.yaml")]


def class_name(spec: dict) -> str:
    return spec["class_path"].rpartition(".")[2]


def error(capsys: pytest.CaptureFixture[str], *args: str, **options: Any) -> str:
    """Return the one line, with status 2, that a command ends with."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        pflight(*args, **options)
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("pflight: error: ")


def contents(root: str) -> dict[Path, tuple[int, int]]:
    """Return inode and time of change of all that lies in a folder."""
    stats = {path: path.stat() for path in Path(root).rglob("*")}
    return {path: (stat.st_ino, stat.st_mtime_ns) for path, stat in stats.items()}


@pytest.fixture
def read_only() -> Iterator[str]:
    """A run folder that nobody may write to."""
    pflight("fit", rounds=1, root="archive")
    Path("archive").chmod(0o500)
    mounted = os.geteuid() == 0  # who may write anywhere
    if mounted:
        bind = "mount --bind archive archive && mount -o remount,ro,bind archive"
        if subprocess.run(bind, shell=True, capture_output=True).returncode:
            pytest.skip("root needs the right to mount")
    yield "archive"
    if mounted:
        subprocess.run(["umount", "archive"], check=True)
    Path("archive").chmod(0o700)


def weights(root: str) -> dict[str, torch.Tensor]:
    path = Path(root, "checkpoints", "last.ckpt")
    return torch.load(path, weights_only=True)["state_dict"]


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


class TestRunFolder:
    def test_fit_fills_it(self, capsys):
        pflight("fit")
        out = capsys.readouterr().out
        assert "used by clients" in out
        assert "macro acc" in out
        assert "\x1b" not in out, "control characters where there is no terminal"
        assert {path.name for path in Path("run", "checkpoints").glob("*.ckpt")} == {
            "last.ckpt",
            "best.ckpt",
        }
        config = yaml.safe_load(Path("run/config.yaml").read_text())
        assert config["ckpt_path"] is None
        events = read_events("run")
        assert {"val/macro_acc", "val/micro_acc", "train/loss"} <= events.scalars.keys()
        assert all(steps == [0, 1] for steps in events.scalars.values()), events.scalars
        assert "hp_metric" not in events.scalars
        assert "epoch" not in events.scalars
        assert events.images == {"data/partition": [0]}
        assert events.texts == {"config": [0], "data/summary": [0]}
        assert events.histograms == {"fesem/assignments": [0, 1]}
        assert events.hparams["algorithm"] == "FeSEM"
        assert events.hparams["algorithm/num_clusters"] == 4
        assert events.hparams["client/optimizer/lr"] == pytest.approx(0.1)
        assert events.hparams["data/partition"] == "ClassesPerClient"
        assert events.hparams["rounds"] == 2
        assert {"val/macro_acc", "best/val/macro_acc"} <= events.compared

    @pytest.mark.long
    def test_last_checkpoint_of_every_round_however_rare_validation_is(self):
        pflight("fit", "--trainer.check_val_every_n_epoch=3", rounds=4)
        last = torch.load("run/checkpoints/last.ckpt", weights_only=True)
        best = torch.load("run/checkpoints/best.ckpt", weights_only=True)
        assert len(load_history(last["pflight"]["history"])) == 4
        assert len(load_history(best["pflight"]["history"])) == 3

    @pytest.mark.long
    def test_a_fresh_fit_moves_the_earlier_run_aside(self, capsys):
        pflight("fit", rounds=1)
        first = weights("run")
        Path("run", "notes.txt").write_text("mine")
        pflight("fit", "--model.seed=1", rounds=1)
        pflight("fit", "--model.seed=2", rounds=1)
        assert "moved the earlier run in run to run.1" in capsys.readouterr().out
        assert same(weights("run.1"), first)
        assert not same(weights("run.2"), first)
        for root in ("run", "run.1", "run.2"):
            assert read_events(root).scalars["train/loss"] == [0]
            assert Path(root, "config.yaml").is_file()
        assert Path("run", "notes.txt").read_text() == "mine"

    @pytest.mark.long
    def test_all_that_the_run_wrote_moves(self):
        for do in ("fit", "predict"):
            pflight(do, "--config", "configs/trainer/pictures.yaml", rounds=1)
        before = {path.relative_to("run") for path in Path("run").rglob("*")}
        assert Path("pictures/convergence-0000.png") in before
        pflight("fit", rounds=1)
        assert {path.relative_to("run.1") for path in Path("run.1").rglob("*")} == before
        assert not Path("run/pictures").exists()
        assert not Path("run/predictions.csv").exists()

    @pytest.mark.long
    def test_pictures_alone_are_a_run(self):
        alone = ["--trainer.logger=false", "--trainer.enable_checkpointing=false"]
        for _ in range(2):
            pflight("fit", "--config", "configs/trainer/pictures.yaml", *alone, rounds=1)
        assert Path("run.1/pictures/convergence-0000.png").is_file()

    @pytest.mark.long
    def test_bad_input_leaves_the_earlier_run_where_it_was(self, capsys):
        pflight("fit", rounds=3, root="other")
        pflight("fit", rounds=1)
        before, config = contents("run"), Path("run/config.yaml").read_text()
        said = error(capsys, "fit", "--ckpt_path=other/checkpoints/last.ckpt", rounds=1)
        assert said.startswith("You restored a checkpoint with current_epoch=")
        assert contents("run").keys() == before.keys()
        assert Path("run/config.yaml").read_text() == config
        assert same(weights("run"), torch.load("run/checkpoints/best.ckpt")["state_dict"])
        assert not Path("run.1").exists()

    @pytest.mark.long
    def test_nothing_moves_before_all_is_checked(self, capsys):
        pflight("fit", rounds=1)
        before = contents("run")
        with pytest.raises(SystemExit):
            pflight("fit", "--model.client.network.in_features=63")
        assert "moved" not in capsys.readouterr().out
        assert contents("run") == before

    @pytest.mark.parametrize("kind", [ConfigurationError, RuntimeError])
    @pytest.mark.short("RuntimeError")
    def test_an_error_in_the_first_round_puts_the_earlier_run_back(self, kind, monkeypatch, capsys):
        pflight("fit", rounds=1)
        before, config = weights("run"), Path("run/config.yaml").read_text()

        def broken(*args: object) -> None:
            raise kind("no")

        monkeypatch.setattr(Federation, "training_step", broken)
        with pytest.raises((SystemExit, RuntimeError)):
            pflight("fit", "--model.seed=1", rounds=1)
        said = capsys.readouterr().out
        assert "moved the earlier run in run to run.1" in said
        assert said.endswith("moved the earlier run back to run\n")
        assert same(weights("run"), before)
        assert Path("run/config.yaml").read_text() == config
        assert read_events("run").scalars["train/loss"] == [0]
        assert not Path("run.1").exists()

    @pytest.mark.long
    def test_the_config_of_a_run_that_moved_is_still_one(self):
        root = (
            "a: # folder, the name of which is so long that YAML folds it at one of its spaces - é"
        )
        pflight("fit", rounds=1, root=root)
        pflight("fit", rounds=1, root=root)
        main(
            [
                "fit",
                "--config",
                f"{root}.1/config.yaml",
                "--ckpt_path=last",
                "--trainer.max_epochs=2",
            ]
        )
        assert read_events(f"{root}.1").scalars["train/loss"] == [0, 1]

    @pytest.mark.long
    def test_home_is_where_the_trainer_thinks(self, monkeypatch, capsys):
        monkeypatch.setenv("HOME", str(Path("home").resolve()))
        pflight("fit", rounds=1, root="~/run")
        pflight("fit", "--ckpt_path=last", rounds=2, root="~/run")
        assert "continuing with round 1 from" in capsys.readouterr().out
        assert read_events("home/run").scalars["train/loss"] == [0, 1]
        assert not Path("~").exists()

    @pytest.mark.long
    def test_where_an_earlier_run_can_not_go(self, capsys):
        pflight("fit", rounds=1)
        before = contents("run")
        target = Path("run").resolve()
        Path("run").rename("x" * 254)
        Path("run").symlink_to("x" * 254)  # a name that has no room for .1
        assert "can't be moved to" in error(capsys, "fit", rounds=1)
        Path("run").unlink()
        Path("x" * 254).rename(target)
        assert contents("run").keys() == before.keys()

    @pytest.mark.long
    def test_own_logger_and_checkpoints_are_respected(self):
        Path("own.yaml").write_text(
            yaml.safe_dump(
                {
                    "trainer": {
                        "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "csv"}},
                        "callbacks+": [
                            {
                                "class_path": "ModelCheckpoint",
                                "init_args": {"dirpath": "mine", "filename": "it"},
                            }
                        ],
                    }
                }
            )
        )
        pflight("fit", "--config", "own.yaml", rounds=1)
        assert Path("mine/it.ckpt").is_file()
        assert list(Path("csv").rglob("metrics.csv"))
        assert not Path("run/checkpoints").exists()
        assert not list(Path("run").glob("events*"))

    @pytest.mark.long
    def test_fast_dev_run_touches_nothing(self):
        pflight("fit", rounds=1)
        before = sorted(Path().rglob("*"))
        pflight("fit", "--trainer.fast_dev_run=1")
        assert sorted(Path().rglob("*")) == before


class TestTwoInOneFolder:
    @pytest.mark.long
    def test_the_second_fit_touches_nothing(self, capsys):
        pflight("fit", rounds=1)
        with RunFolder("run").claimed("fit"):
            before = contents("run")
            for resume in ([], ["--ckpt_path=last"]):
                said = error(capsys, "fit", *resume, rounds=2)
                assert said.startswith(
                    f"another fit is running in run, in process {os.getpid()} on "
                )
                assert said.endswith("or give another --trainer.default_root_dir")
            assert contents("run") == before
        pflight("fit", "--ckpt_path=last", rounds=2)
        assert not list(Path("run").glob(".*"))

    @pytest.mark.long
    def test_others_may_read_and_one_may_test(self, capsys):
        pflight("fit", rounds=1)
        with RunFolder("run").claimed("fit"):
            for command in ("test", "validate", "predict"):
                pflight(command)
        with RunFolder("run").claimed("test"):
            before = contents("run")
            assert error(capsys, "test").startswith("another test is running in run, in process")
            assert contents("run") == before
            pflight("fit", "--ckpt_path=last", rounds=2)

    @pytest.mark.long
    def test_a_lock_that_is_left_does_not_matter(self):
        Path("run").mkdir()
        Path("run/.fit.lock").write_text("process 1 on another since long ago")
        pflight("fit", "--ckpt_path=last", rounds=1)
        assert not Path("run/.fit.lock").exists()

    def test_nothing_is_left_of_a_claim(self):
        with RunFolder("some/where/run").claimed("fit"):
            assert Path("some/where/run").is_dir()
        assert not Path("some").exists()

    @pytest.mark.long
    @pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
    def test_a_file_system_without_locks(self, number, monkeypatch, capsys):
        def flock(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr("fcntl.flock", flock)
        Path("run").mkdir()
        killed = (
            "import errno, fcntl, os, pathlib\n"
            "from pflight.runs.locks import hold\n"
            f"def flock(*_): raise OSError({number}, 'none')\n"
            "fcntl.flock = flock\n"
            "lock = hold(pathlib.Path('run/.fit.lock'))\n"
            "os.kill(os.getpid(), 9)\n"
        )
        assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == -9
        assert [*Path("run").iterdir()]
        pflight("fit", rounds=1)  # the holder has ended
        assert read_events("run").scalars["train/loss"] == [0]
        assert not [*Path("run").glob(".*")]
        with RunFolder("run").claimed("fit"):
            message = error(capsys, "fit")
            assert f"in process {os.getpid()} on {socket.gethostname()}" in message
            (marker,) = Path("run").glob(".*")
            assert f"delete {marker}" in message
            marker.write_text(f"1\nanother-{socket.gethostname()}\n0\n")
            assert f"in process 1 on another-{socket.gethostname()}" in error(capsys, "fit")

    @pytest.mark.long
    def test_the_lock_of_another_folder_does_not_count(self):
        Path("run").mkdir()
        with RunFolder("other").claimed("fit"):
            os.link("other/.fit.lock", "run/.fit.lock")
            pflight("fit", rounds=1)


class TestResume:
    @pytest.mark.long
    def test_last_continues_the_run_and_repeats_no_point(self, capsys):
        pflight("fit", rounds=4, root="straight")
        pflight("fit", rounds=2)
        pflight("fit", "--ckpt_path=last", rounds=3)
        pflight("fit", "--ckpt_path=last", rounds=4)
        assert "continuing with round 3 from run/checkpoints/last.ckpt" in capsys.readouterr().out
        assert same(weights("run"), weights("straight"))
        events = read_events("run")
        assert all(steps == [0, 1, 2, 3] for steps in events.scalars.values()), events.scalars
        assert events.histograms == {"fesem/assignments": [0, 1, 2, 3]}
        assert events.images == {"data/partition": [0]}
        assert events.values["val/macro_acc"] == read_events("straight").values["val/macro_acc"]
        assert events.hparams["rounds"] == 4
        assert len(RunFolder("run").events(".hparams")) == 1

    @pytest.mark.long
    def test_an_earlier_checkpoint_of_the_run_drops_what_came_later(self):
        pflight("fit", "--trainer.check_val_every_n_epoch=2", rounds=3)
        pflight("fit", "--trainer.check_val_every_n_epoch=2", "--ckpt_path=best", rounds=4)
        events = read_events("run")
        assert events.scalars["train/loss"] == [0, 1, 2, 3]
        assert events.scalars["val/macro_acc"] == [1, 3]
        assert not Path("run.1").exists()

    def test_last_starts_an_empty_folder_and_says_so(self, capsys):
        folder = Path("run")
        (folder / "checkpoints").mkdir(parents=True)
        RunFolder(folder).save_config("{}")
        pflight("fit", "--ckpt_path=last", rounds=1)
        assert "no run in run to continue: starting a new one" in capsys.readouterr().out
        assert not Path("run.1").exists()

    def test_last_in_a_folder_of_other_things_is_an_error(self, capsys):
        Path("run").mkdir()
        Path("run", "notes.txt").write_text("somebody's")
        with pytest.raises(SystemExit) as exit_:
            pflight("fit", "--ckpt_path=last")
        assert exit_.value.code == 2
        assert "run holds other files, but not this one" in capsys.readouterr().err
        assert [path.name for path in Path("run").iterdir()] == ["notes.txt"]

    @pytest.mark.long
    def test_last_without_a_checkpoint_is_an_error(self, capsys):
        pflight("fit", "--trainer.enable_checkpointing=false", rounds=2)
        with pytest.raises(SystemExit) as exit_:
            pflight("fit", "--ckpt_path=last", rounds=3)
        assert exit_.value.code == 2
        assert "there is no 'last' checkpoint" in capsys.readouterr().err
        assert read_events("run").scalars["train/loss"] == [0, 1]

    @pytest.mark.long
    def test_fewer_rounds_than_there_were_are_an_error(self, capsys):
        pflight("fit", rounds=3)
        with pytest.raises(SystemExit) as exit_:
            pflight("fit", "--ckpt_path=last", rounds=1)
        assert exit_.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("pflight: error: You restored a checkpoint with current_epoch=")

    @pytest.mark.long
    def test_a_run_that_ended_before_its_first_last_checkpoint_goes_on_from_its_best(
        self, monkeypatch, capsys
    ):
        save = AtomicCheckpointIO.save_checkpoint

        def ends(io: AtomicCheckpointIO, checkpoint: dict, path: Any, **options: Any) -> None:
            if Path(path).name == "last.ckpt":
                raise RuntimeError("killed")
            save(io, checkpoint, path, **options)

        with monkeypatch.context() as patch:
            patch.setattr(AtomicCheckpointIO, "save_checkpoint", ends)
            with pytest.raises(RuntimeError, match="killed"):
                pflight("fit", rounds=3)
        with pytest.warns(UserWarning, match=r"^there is no last.ckpt: using best.ckpt, the new"):
            pflight("fit", "--ckpt_path=last", rounds=3)
        assert "continuing with round 1 from run/checkpoints/best.ckpt" in capsys.readouterr().out
        pflight("fit", rounds=3, root="straight")
        assert same(weights("run"), weights("straight"))
        assert read_events("run").values == read_events("straight").values

    @pytest.mark.long
    def test_a_damaged_last_checkpoint_is_named_and_the_newest_whole_one_taken(self, capsys):
        pflight("fit", "--trainer.check_val_every_n_epoch=2", rounds=3)
        folder = Path("run", "checkpoints")
        last, best = folder / "last.ckpt", folder / "best.ckpt"
        trained = weights("run")
        last.write_bytes(last.read_bytes()[:-1000])
        options = ["--ckpt_path=last", "--trainer.check_val_every_n_epoch=2"]
        for subcommand in ("test", "fit"):
            with pytest.warns(UserWarning, match=r"^last.ckpt is damaged: using best.ckpt, the"):
                pflight(subcommand, *options, rounds=3)
        assert same(weights("run"), trained)
        best.write_bytes(b"PK")
        with pytest.warns(UserWarning, match=r"^best.ckpt is damaged: using last.ckpt, the"):
            pflight("validate", *options)
        capsys.readouterr()
        for path in folder.iterdir():
            path.write_bytes(path.read_bytes()[:100])
        with pytest.raises(SystemExit) as exit_:
            pflight("fit", *options)
        assert exit_.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert (
            "no undamaged checkpoint in run/checkpoints: best.ckpt is damaged, last.ckpt is" in line
        )

    @pytest.mark.long
    def test_a_resume_that_fails_drops_no_points(self, capsys):
        pflight("fit", "--trainer.check_val_every_n_epoch=2", rounds=3)
        before = contents("run")
        misfit = error(capsys, "fit", "--ckpt_path=best", "--model.client.network.hidden=[9]")
        assert "does not fit" in misfit
        assert contents("run") == before
        assert read_events("run").scalars["train/loss"] == [0, 1, 2]

    @pytest.mark.long
    def test_a_client_that_is_to_stop_the_run_is_one_line(self, capsys):
        with pytest.raises(SystemExit) as exit_:
            pflight("fit", "--model.on_client_error=raise", "--model.client.optimizer.lr=1e38")
        assert exit_.value.code == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert re.search(
            r"client \d+ failed: its result is NaN or infinite \(\S+\); the run ended", line
        )

    @pytest.mark.filterwarnings("ignore:round .* client:UserWarning")
    @pytest.mark.long
    def test_a_run_in_which_all_clients_fail_says_so_at_its_end(self, capsys):
        with pytest.raises(SystemExit) as exit_:
            pflight("fit", "--model.client.optimizer.lr=1e38", rounds=2)
        assert exit_.value.code == 1
        line = capsys.readouterr().err.splitlines()[-1]
        assert re.search(r"all \d+ trainings of clients failed, as the warnings say", line)
        assert line.endswith("after 2 rounds, the last of the run")

    @pytest.mark.long
    def test_the_config_is_left_alone_unless_options_change(self):
        pflight("fit", rounds=2)
        config = Path("run/config.yaml")
        stat, text = config.stat(), config.read_text()
        main(["fit", "--config=run/config.yaml", "--ckpt_path=last"])
        assert (config.stat().st_ino, config.stat().st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns)
        main(["fit", "--config=run/config.yaml", "--ckpt_path=last", "--trainer.max_epochs=3"])
        assert config.read_text() == text.replace("max_epochs: 2", "max_epochs: 3")

    def test_a_config_is_written_whole_or_not_at_all(self):
        folder = RunFolder("run")
        folder.path.mkdir()
        folder.save_config("trainer: {}\n")
        before, limits = contents("run"), resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                folder.save_config("trainer: {}\n" * 100)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert contents("run") == before

    @pytest.mark.short("resume0")
    @pytest.mark.parametrize("resume", [[], ["--ckpt_path=last"]])
    def test_a_config_of_the_users_is_not_overwritten(self, resume, capsys):
        if resume:
            pflight("fit", rounds=1)
        Path("run").mkdir(exist_ok=True)
        Path("run/config.yaml").write_text("# mine\ntrainer:\n  max_epochs: 2\n")
        before = contents("run")
        said = error(capsys, "fit", "--config=run/config.yaml", *resume)
        assert said.startswith(
            "a run in run would overwrite run/config.yaml, which pflight did not"
        )
        assert contents("run") == before
        Path("run/config.yaml").unlink()
        Path("run/config.yaml").mkdir()
        said = error(capsys, "fit", *resume)
        assert said.startswith("run/config.yaml is a folder, but the run needs a file of")

    @pytest.mark.long
    def test_a_keyboard_interrupt_says_how_to_go_on(self, monkeypatch, capfd):
        step = Federation.training_step

        def interrupted(federation: Federation, *args: Any) -> None:
            if len(federation.history) == 2:
                raise KeyboardInterrupt  # as a client's code may
            step(federation, *args)

        monkeypatch.setattr(Federation, "training_step", interrupted)
        with pytest.raises(SystemExit) as exit_:
            pflight("fit", rounds=4)
        assert exit_.value.code == 130
        said = (
            "pflight: stopped by SIGINT after 2 rounds: --ckpt_path last continues the run in run"
        )
        assert capfd.readouterr().err.splitlines()[-1] == said
        monkeypatch.setattr(Federation, "training_step", step)
        pflight("fit", "--ckpt_path=last", rounds=4)
        assert read_events("run").scalars["train/loss"] == [0, 1, 2, 3]

    @pytest.mark.filterwarnings("ignore:last.ckpt is older")  # killed between the two
    @pytest.mark.long
    def test_a_killed_run_has_each_point_once(self):
        command = [sys.executable, "-m", "pflight", "fit", "--config", DIGITS]
        command += ["--trainer.max_epochs=300", "--data.num_clients=6"]
        command += ["--trainer.default_root_dir=run"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        last = Path("run", "checkpoints", "last.ckpt")
        while process.poll() is None and not last.is_file():
            time.sleep(0.01)
        with (
            pytest.raises(ConfigurationError, match=f"run, in process {process.pid} on .* since"),
            RunFolder("run").claimed("fit"),
        ):
            pytest.fail("it is the other's")
        time.sleep(0.3)
        process.send_signal(signal.SIGKILL)
        process.wait()
        done = len(load_history(torch.load(last, weights_only=True)["pflight"]["history"]))
        rounds = ["--trainer.max_epochs", str(done + 3), "--ckpt_path", "last"]
        main([*command[3:], *rounds])
        events = read_events("run")
        expected = list(range(done + 3))
        assert all(steps == expected for steps in events.scalars.values()), events.scalars
        assert events.histograms["fesem/assignments"] == expected


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
def test_what_is_done_otherwise_than_asked_for_is_a_warning() -> None:
    option = "--model.client.optimizer=torch.optim.Adagrad"
    with pytest.warns(UserWarning, match=r"but clients train one by one: .*Adagrad"):
        pflight("fit", "--model.engine=vectorized", option, rounds=1)


class TestEvaluation:
    @pytest.fixture(autouse=True)
    def _fitted(self, _in_folder: None, capsys: pytest.CaptureFixture[str]) -> None:
        pflight("fit", rounds=2)
        capsys.readouterr()

    @pytest.mark.long
    def test_test_replaces_lightnings_table_and_an_earlier_test(self, capsys):
        for _ in range(2):
            pflight("test", "--ckpt_path=last")
        out = capsys.readouterr().out
        assert "FeSEM on Digits, test" in out
        assert "Test metric" not in out
        events = read_events("run")
        assert events.scalars["test/macro_acc"] == [1]
        assert events.scalars["train/loss"] == [0, 1]
        assert yaml.safe_load(Path("run/config.yaml").read_text())["trainer"]["max_epochs"] == 2

    @pytest.mark.parametrize("command", ["validate", "test", "predict"])
    @pytest.mark.long
    def test_the_best_is_taken_unless_another_is_named(self, command, capsys):
        pflight(command)
        said = capsys.readouterr().out
        assert f"{command} uses run/checkpoints/best.ckpt, the best of the run" in said
        Path("run/checkpoints/best.ckpt").unlink()
        said = error(capsys, command)
        assert "there is no 'best' checkpoint" in said
        assert said.endswith("run holds last.ckpt, but not this one; name another with --ckpt_path")

    @pytest.mark.long
    def test_a_run_without_a_validation_is_told(self, capsys):
        rare = "--trainer.check_val_every_n_epoch=3"
        pflight("fit", rare, root="short")
        said = error(capsys, "test", rare, root="short")
        assert said.endswith("; no validation has run; name another with --ckpt_path")

    @pytest.mark.long
    def test_a_test_that_fails_leaves_the_earlier_one(self, capsys):
        pflight("test")
        before = contents("run")
        error(capsys, "test", "--data.num_clients=7")
        assert contents("run") == before
        assert read_events("run").scalars["test/macro_acc"] == [1]

    @pytest.mark.long
    def test_predictions_stay_until_there_are_others(self, monkeypatch):
        pflight("predict")
        before = contents("run")

        def broken(*args: object) -> None:
            raise RuntimeError("no")

        monkeypatch.setattr("pflight.callbacks.monitors.report.csv.writer", broken)
        with pytest.raises(RuntimeError, match="no"):
            pflight("predict", "--data.num_clients=6")
        assert {path: now for path, now in contents("run").items() if path.is_file()} == {
            path: then for path, then in before.items() if path.is_file()
        }

    @pytest.mark.long
    def test_predictions_that_can_not_be_written(self, capsys, monkeypatch):
        Path("run/predictions.csv").mkdir()
        monkeypatch.setattr(Federation, "predict_step", lambda *_: pytest.fail("too late"))
        assert error(capsys, "predict").endswith("run/predictions.csv: it is a folder")

    @pytest.mark.long
    def test_each_client_has_a_row_in_a_table(self, capsys):
        pflight("test", "--ckpt_path=last")
        assert "each client's metrics in run/clients.csv and clients.md" in capsys.readouterr().out
        with Path("run/clients.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [row["client"] for row in rows] == [*"012345"]
        assert all(0 <= float(row["server/acc"]) <= 1 for row in rows)
        assert Path("run/clients.md").read_text().count("\n") == 8
        pflight("fit", rounds=1)
        assert not Path("run/clients.csv").exists()
        assert Path("run.1/clients.csv").exists()
        Path("run/clients.md").mkdir()
        assert "clients.md is a folder" in error(capsys, "test")

    @pytest.mark.long
    def test_newcomers_have_a_row(self, capsys):
        held_out = "--data.holdout_clients=0.34"
        pflight("fit", held_out, rounds=1)
        losses = []
        for more in ((), ("--model.newcomer_epochs=9",)):
            pflight("test", held_out, "--ckpt_path=last", *more)
            assert "newcomers: used" in capsys.readouterr().out
            with Path("run/clients.csv").open() as file:
                losses.append({row["client"]: row for row in csv.DictReader(file)})
        for client, row in losses[0].items():
            after = float(losses[1][client]["loss"])
            assert (after < float(row["loss"])) == (row["newcomer"] == "yes")
            assert after == float(row["loss"]) or row["newcomer"]

    @pytest.mark.long
    def test_finetuned_models_have_a_row(self, capsys):
        pflight("validate", "--model.finetune_epochs=1", "--ckpt_path=last")
        assert "fine-tuned" in capsys.readouterr().out
        assert read_events("run").scalars["val/macro_acc"] == [0, 1]

    @pytest.mark.long
    def test_predictions_agree_with_the_model(self):
        pflight("predict", "--ckpt_path=last")
        with Path("run/predictions.csv").open() as file:
            rows = list(csv.DictReader(file))
        client = ProximalClient(MLP(64, [8], 10), num_classes=10)
        federation = Federation.load_from_checkpoint(
            "run/checkpoints/last.ckpt", client=client, callback=FeSEM(4)
        )
        assert federation.clients.training.epochs == 2
        from pflight.datamodules import Digits

        data = Digits(num_clients=6)
        data.setup()
        for i in range(6):
            x, y = data.samples(i, "test")
            probability, predicted = federation.client_module(i)(x).softmax(dim=1).max(dim=1)
            mine = [row for row in rows if row["client"] == str(i)]
            assert [int(row["index"]) for row in mine] == list(range(len(y)))
            assert [int(row["label"]) for row in mine] == y.tolist()
            assert [int(row["prediction"]) for row in mine] == predicted.tolist()
            shown = torch.tensor([float(row["probability"]) for row in mine])
            torch.testing.assert_close(shown, probability, atol=1e-5, rtol=0)

    @pytest.mark.long
    def test_the_saved_config_gives_the_same_run(self):
        main(["fit", "--config", "run/config.yaml", "--trainer.default_root_dir", "again"])
        assert same(weights("again"), weights("run"))


def test_one_seed_reaches_the_data_and_the_federation_unless_they_have_their_own():
    pflight("fit", "--seed_everything=3", "--model.seed=5", rounds=1)
    config = yaml.safe_load(Path("run", "config.yaml").read_text())
    assert config["data"]["init_args"]["seed"] == 3
    assert config["model"]["init_args"]["seed"] == 5


@pytest.mark.long
def test_a_seed_of_zero_is_kept():
    pflight("fit", "--seed_everything=3", "--data.seed=0", "--model.seed=0", rounds=1)
    config = yaml.safe_load(Path("run", "config.yaml").read_text())
    assert config["data"]["init_args"]["seed"] == config["model"]["init_args"]["seed"] == 0


@pytest.mark.long
def test_the_seed_reaches_wrapped_data():
    rotated = ["fit", *composed("data/rotated_digits"), "--trainer.max_epochs=1"]
    main([*rotated, "--seed_everything=3", "--data.data.num_clients=4"])
    data = yaml.safe_load(Path("runs/default/config.yaml").read_text())["data"]["init_args"]
    assert data["seed"] == data["data"]["init_args"]["seed"] == 3


@pytest.mark.short("0")
@pytest.mark.parametrize("seed", [0, 3])
def test_a_saved_config_keeps_its_seeds(seed, monkeypatch):
    monkeypatch.setattr(FederationCLI, "fit", lambda self, **_: None)
    cli = FederationCLI(["fit", *composed("data/digits"), f"--seed_everything={seed}"])
    parser = cli._parser(cli.subcommand)
    Path("saved.yaml").write_text(dumped(parser, cli.config[cli.subcommand]))
    again = ["fit", "--config", "saved.yaml", "--seed_everything=5"]
    cli = FederationCLI([*again, "--model.seed=null"])
    assert (cli.datamodule.seed, cli.model.clients.seed) == (seed, 5)


PARTS = ("data/digits", "algorithm/fesem", "trainer/tensorboard")


def assert_composed(config: dict, algorithm: str) -> None:
    """Check that a configuration has the algorithm, and the network and step of the digits."""
    (server,) = config["trainer"]["callbacks"]
    client = config["model"]["init_args"]["client"]
    assert (class_name(server), class_name(client)) == (ALGORITHMS[algorithm], "Classifier")
    assert client["init_args"]["network"]["init_args"]["in_features"] == 64
    assert client["init_args"]["optimizer"]["init_args"]["lr"] == 0.1


class TestConfigs:
    @pytest.mark.short("order0", "order5")
    @pytest.mark.parametrize("order", list(permutations(PARTS)))
    def test_data_algorithm_and_trainer_compose_in_any_order(self, order, capsys):
        assert_composed(yaml.safe_load(printed_config(capsys, *composed(*order))), "fesem")

    def test_callbacks_of_all_files_are_kept_and_the_last_has_the_options(self, capsys):
        Path("stop.yaml").write_text(
            "trainer:\n  callbacks+:\n  - class_path: EarlyStopping\n"
            "    init_args: {monitor: val/macro_acc, mode: max}\n"
        )
        named = ["--config", "stop.yaml", *composed("data/digits", "algorithm/fesem")]
        printed = printed_config(capsys, *named, "--trainer.callbacks.num_clusters=7")
        stop, fesem = yaml.safe_load(printed)["trainer"]["callbacks"]
        assert (class_name(stop), class_name(fesem)) == ("EarlyStopping", "FeSEM")
        assert fesem["init_args"]["num_clusters"] == 7

    @pytest.mark.long
    def test_a_run_that_moved_aside_goes_on_where_it_is_now(self):
        pflight("fit", rounds=2)
        pflight("fit", rounds=1)
        main(["fit", "--config=run.1/config.yaml", "--ckpt_path=last", "--trainer.max_epochs=3"])
        assert read_events("run.1").scalars["train/loss"] == [0, 1, 2]
        assert read_events("run").scalars["train/loss"] == [0]

    @pytest.mark.short("fedavg")
    @pytest.mark.parametrize(
        "algorithm",
        [
            pytest.param(name, marks=() if name in {"fedavg", "fesem"} else pytest.mark.long)
            for name in ALGORITHMS
            if name not in FOR_ADAPTERS  # tests/experiments/test_adapters.py runs them
        ],
    )
    def test_every_algorithm_runs(self, algorithm, capsys):
        """In either order of files, and results call it as its configuration's first line does."""
        small = ["--trainer.max_epochs=1", "--trainer.default_root_dir=run"]
        small += ["--trainer.accelerator=cpu", "--data.num_clients=6"]
        names = ("data/digits", f"algorithm/{algorithm}", "trainer/tensorboard")
        turned = printed_config(capsys, *composed(*reversed(names)))
        main(["fit", *composed(*names), *small])
        for config in (turned, Path("run/config.yaml").read_text()):
            assert_composed(yaml.safe_load(config), algorithm)
        events = read_events("run")
        assert events.scalars["val/macro_acc"] == [0]
        shipped = files("pflight.configs").joinpath(f"algorithm/{algorithm}.yaml").read_text()
        title = shipped.partition(":")[0].removeprefix("# ")
        assert events.hparams["algorithm"] == title
        assert f"{title} on Digits" in " ".join(capsys.readouterr().out.split())
        written = yaml.safe_load(Path("run/hparams.yaml").read_text())
        assert (written["algorithm"], written["local_epochs"]) == (
            title,
            events.hparams["federation/local_epochs"],
        )

    @pytest.mark.short("digits", "femnist")
    @pytest.mark.parametrize("data", NETWORKS)
    def test_data_bring_their_network(self, data, capsys):
        names = (f"data/{data}", "algorithm/fesem")
        config = yaml.safe_load(printed_config(capsys, *composed(*names)))
        network = config["model"]["init_args"]["client"]["init_args"]["network"]
        assert class_name(network) == NETWORKS[data]

    @pytest.mark.short("null")
    @pytest.mark.parametrize("none", ["null", "None"])
    def test_null_on_the_line_is_null_at_any_depth(self, none, capsys):
        options = {"data.cohort_size": 3, "model.client.gradient_clip_val": 2.0}
        options |= {"trainer.callbacks.constraint": "l2", "model.server_optimizer": "SGD"}
        given = [f"--{key}={value}" for key, value in options.items()]
        given += [part for key in options for part in (f"--{key}", none)]
        printed = printed_config(capsys, *composed("data/digits", "algorithm/fedec"), *given)
        config = yaml.safe_load(printed)
        federation = config["model"]["init_args"]
        client = federation["client"]["init_args"]
        assert config["data"]["init_args"]["cohort_size"] is None
        assert federation["server_optimizer"] is None
        assert client["gradient_clip_val"] is None
        (fedec,) = config["trainer"]["callbacks"]
        assert fedec["init_args"]["constraint"] is None

    def test_print_config_round_trips(self, capsys):
        first = printed_config(capsys, *composed("data/digits", "algorithm/fesem"))
        Path("printed.yaml").write_text(first)
        assert printed_config(capsys, "--config", "printed.yaml") == first

    @pytest.mark.long
    def test_centralized_training(self, capsys):
        config = ["--config", "configs/centralized.yaml", "--trainer.max_epochs=2"]
        main(["fit", *config])
        events = read_events("runs/centralized")
        scalars, values = events.scalars, events.values
        assert {"train/loss", "val/acc", "val/loss", "val/micro_f1", "val/macro_f1"} <= set(scalars)
        assert values["val/micro_acc"] == pytest.approx(values["val/acc"])  # of all samples
        main(["fit", *config, "--ckpt_path=last", "--trainer.max_epochs=3"])
        steps = read_events("runs/centralized").scalars["val/acc"]
        assert steps[:2] == scalars["val/acc"]
        assert len(set(steps)) == len(steps) == 3
        with pytest.raises(SystemExit) as exit_:
            main(["test", *config])
        assert exit_.value.code == 2
        assert "holds last.ckpt" in capsys.readouterr().err
        stop = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=nothing"]
        with pytest.raises(SystemExit) as exit_:
            main(["fit", *config, *stop])
        assert exit_.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "conditioned on metric `nothing` which is not available" in line

    @pytest.mark.long
    def test_two_algorithms_are_an_error(self, capsys):
        with pytest.raises(SystemExit) as exit_:
            main(["fit", *composed("data/digits", "algorithm/fesem", "algorithm/local")])
        assert exit_.value.code == 2
        assert "one server callback" in capsys.readouterr().err

    def test_all_shipped_configs_are_tried(self):
        folder = files("pflight.configs")
        assert {p.name for p in folder.iterdir() if p.name.endswith(".yaml")} == {
            "centralized.yaml",
            "pretrain_films.yaml",
            "pretrain_shakespeare.yaml",
            "quickstart.yaml",
        }
        # tests/datamodules/test_shakespeare.py and test_natural.py try the data of packages.
        tried = {f"{one}.yaml" for one in (*NETWORKS, "shakespeare")}
        assert {p.name for p in (folder / "data").iterdir()} == tried

    @pytest.mark.short("robust-*")
    @pytest.mark.parametrize(
        ("former", "kind"),
        [("fedcluster", "CFL"), ("hypocluster", "IFCA"), ("robust", "TrimmedKMeans")],
    )
    def test_configs_are_found_by_their_former_names(self, former, kind, capsys):
        with pytest.raises(SystemExit) as exit_:
            main(["fit", *composed("data/digits", f"algorithm/{former}"), "--print_config"])
        assert exit_.value.code == 0
        assert f"class_path: pflight.callbacks.{kind}\n" in capsys.readouterr().out


class TestBadInput:
    @pytest.mark.short(
        "--config=nowhere.yaml-*",
        "--model.client=Nobody-*",
        "--trainer.callbacks.mu=-1-*",
        "--data.participation=0-*",
        "--ckpt_path=nowhere.ckpt-*",
        "--ckpt_path=corrupt.ckpt-*",
    )
    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (["--config=nowhere.yaml"], "there is no config file 'nowhere.yaml'"),
            ([f"--config={'long' * 80}"], "there is no config file 'longlong"),
            (
                ["--model.client=Nobody"],
                "model.client: Nobody is not a class that this option takes",
            ),
            (["--data=Nothing"], "data: Nothing is not a class that this option takes"),
            (["--trainer.callbacks.mu=much"], "trainer.callbacks.mu: expected a finite number or"),
            (["--trainer.callbacks.mu=-1"], "FeSEM: mu must be at least 0"),
            (["--model.nothing=1"], "there is no option model.nothing"),
            (["--trainer.nothing=1"], "there is no option trainer.nothing"),
            (["--data.participation=0"], "participation"),
            (["--data.participation=1.5"], "participation"),
            (["--trainer.callbacks+=FedAvg"], "one server callback"),
            (["--trainer.gradient_clip_val=1"], "gradient_clip_val is an option of the client"),
            (["--model.client.network.in_features=63"], "network can't take"),
            (["--model.client.num_classes=9"], "num_classes"),
            (["--data.num_clients=3"], "num_clusters (4) exceeds"),
            (["--ckpt_path=nowhere.ckpt"], "there is no checkpoint nowhere.ckpt"),
            (["--ckpt_path=corrupt.ckpt"], "the checkpoint corrupt.ckpt can't be read"),
            (
                ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/macro_ac"],
                "EarlyStopping watches 'val/macro_ac', but no round will have it: did you mean ",
            ),
            (["--trainer=latin1.yaml"], "a file among the options is not text: 'utf-8' codec"),
            (["--trainer.default_root_dir=corrupt.ckpt"], "the run folder corrupt.ckpt is a file"),
            (["--trainer.default_root_dir=corrupt.ckpt/run"], "can't be written: Not a directory"),
            (["--trainer.default_root_dir=/sys/run"], "the run folder /sys/run can't be written"),
            ([f"--trainer.default_root_dir={'x' * 300}"], "can't be written: File name too long"),
            (
                ["--trainer.default_root_dir=s3://here/run"],
                "must be on a file system, not s3://here/run",
            ),
        ],
        ids=lambda value: value[0] if isinstance(value, list) else None,
    )
    def test_is_one_line(self, args, message, capsys):
        Path("corrupt.ckpt").write_text("no checkpoint")
        Path("latin1.yaml").write_bytes(b"logger: \xe9\n")
        with pytest.raises(SystemExit) as exit_:
            pflight("fit", *args)
        error = capsys.readouterr().err
        assert exit_.value.code == 2
        assert error.startswith("pflight: error: ")
        assert error.count("\n") == 1
        assert message in error
        assert {path.name for path in Path().iterdir()} == {"corrupt.ckpt", "latin1.yaml"}
        assert Path("corrupt.ckpt").read_text() == "no checkpoint"

    @pytest.mark.long
    def test_a_folder_that_is_read_only(self, read_only, capsys):
        for options in (["fit"], ["fit", "--ckpt_path=last"], ["test"]):
            said = error(capsys, *options, root=read_only)
            assert said.startswith(f"the run folder {read_only} can't be written: ")
        said = error(capsys, "predict", root=read_only)
        assert said.startswith(f"can't write the predictions to {read_only}/predictions.csv: ")
        with pytest.warns(UserWarning, match="the table of clients can't be written: .*Read-only"):
            pflight("test", "--trainer.logger=false", root=read_only)
        pflight("validate", root=read_only)

    @pytest.mark.short("trainer: {max_epochs: 1*", "-is empty", "trainer: 3*")
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                b"trainer:\n  default_root_dir: r\xe9sum\xe9\n",
                "not UTF-8 text: it has the byte 0xe9",
            ),
            ("trainer: {}\n".encode("utf-16"), "not UTF-8 text"),
            (b"trainer: \x00\n", "is not YAML: "),
            (b"trainer:\n\tmax_epochs: 1\n", "is not YAML: "),
            (b"", "is empty"),
            (b"# nothing\n", "is empty"),
            (b"- trainer\n", "has a sequence where a mapping of options is expected"),
            (b"trainer: 3\n", "has no mapping of options under trainer (line 1)"),
            (b"trainer: {max_epochs: 1\n", "is not YAML: "),
            (b"trainer:\n  max_epochs: 1\n  default_roo", "is not YAML: "),
            (b"trainer: {}\nmodel: {}\ntrainer: {}\n", "has the option trainer twice (line 3)"),
            (b"data: {init_args: {seed: 1, seed: 2}}\n", "has the option seed twice (line 1)"),
            (b"trainer: " + b"[" * 500, "is nested too deeply"),
            (b"trainer: " + b"[" * 100000, "is nested too deeply"),
            (None, "can't be read: Is a directory"),
        ],
        ids=lambda value: None if isinstance(value, bytes) else value,
    )
    def test_a_config_file(self, text, message, capsys):
        config = Path("run/config.yaml")
        config.parent.mkdir()
        if text is None:
            config.mkdir()
        else:
            config.write_bytes(text)
        before = contents("run")
        said = error(capsys, "fit", "--config=run/config.yaml", "--ckpt_path=last")
        assert said.startswith("the config file run/config.yaml ")
        assert message in said
        assert contents("run") == before

    @pytest.mark.short("test")
    @pytest.mark.parametrize("command", ["validate", "test", "predict"])
    def test_evaluation_without_a_run(self, command, capsys):
        with pytest.raises(SystemExit) as exit_:
            pflight(command, "--ckpt_path=last")
        assert exit_.value.code == 2
        assert "run is empty" in capsys.readouterr().err

    @pytest.mark.long
    def test_a_checkpoint_of_another_network(self, capsys):
        pflight("fit", rounds=1)
        with pytest.raises(SystemExit):
            pflight("test", "--model.client.network.hidden=[9]", "--ckpt_path=last")
        assert "the checkpoint does not fit" in capsys.readouterr().err

    def test_other_errors_keep_their_traceback(self, monkeypatch):
        def broken(*args: object) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(Federation, "training_step", broken)
        with pytest.raises(RuntimeError, match="a bug"):
            pflight("fit", rounds=1)

    @pytest.mark.long
    def test_as_a_process(self):
        command = [sys.executable, "-m", "pflight", "fit", "--config", DIGITS]
        done = subprocess.run(
            [*command, "--data.num_clients=0"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert done.stderr == "pflight: error: Digits: num_clients must be at least 1, got 0\n"
        assert done.stdout == "pflight: starting fit\n"

    def test_garbage_is_collected_once_all_is_imported(self, monkeypatch):
        collects: list[bool] = []
        monkeypatch.setattr(
            "pflight.command.cli.main", lambda args: collects.append(gc.isenabled())
        )
        handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
        try:
            command(["fit"])
        finally:
            gc.unfreeze()
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
        assert collects == [True]

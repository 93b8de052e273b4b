"""SIGTERM and Ctrl-C end a run between two rounds, and nothing is lost."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from pflight import Federation
from pflight.callbacks import FedAvg
from pflight.clients import Clients
from pflight.command.cli import main
from pflight.models import MLP
from pflight.runs.checkpoint import AtomicCheckpointIO
from pflight.runs.signals import SaveWhenStopped, StopBetweenRounds
from tests.event_files import read_events
from tests.pages import DIGITS
from tests.runs import linear_client, quiet_trainer, small_data

STATUS = {signal.SIGTERM: 143, signal.SIGINT: 130}
QUICKSTART = [f"--config={DIGITS}", "--data.num_clients=6", "--model.local_epochs=1"]
TWO_RANKS = ["--trainer.strategy=ddp", "--trainer.devices=2"]


class RaisesSignal(L.Callback):
    """Raises a signal on one rank when its second round begins, and again if that is to be long."""

    def __init__(self, signum: int, rank: int = 0, again: float | None = None) -> None:
        self.signum = signum
        self.rank = rank
        self.again = again

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if (trainer.current_epoch, trainer.global_rank) == (1, self.rank):
            os.kill(os.getpid(), self.signum)
            if self.again is not None:
                threading.Thread(target=self._repeat, daemon=True).start()
                threading.Event().wait()  # as in a collective call

    def _repeat(self) -> None:
        while self.again is not None:
            time.sleep(self.again)
            os.kill(os.getpid(), self.signum)


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def pflight(command: str, *args: str, rounds: int = 5, root: str = "run") -> None:
    options = [f"--trainer.default_root_dir={root}", f"--trainer.max_epochs={rounds}"]
    main([command, *QUICKSTART, *options, *args])


def stopped(command: str, *args: str, **options: Any) -> Any:
    """Return the exit status of a command that ends early, once handlers are as they were."""
    handlers = [signal.getsignal(signum) for signum in STATUS]
    with pytest.raises(SystemExit) as exit_:
        pflight(command, *args, **options)
    assert [signal.getsignal(signum) for signum in STATUS] == handlers
    assert signal.set_wakeup_fd(-1) == -1
    return exit_.value.code


def raising(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, signum: int, call: int = 1
) -> None:
    """Raise a signal in the given call of a method."""
    original: Callable[..., Any] = getattr(owner, method)
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            signal.raise_signal(signum)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, method, wrapped)


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """Return what is on standard error besides the choice of the engine."""
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "engine, " not in line]
    return line


def last(root: str = "run") -> dict[str, Any]:
    return torch.load(f"{root}/checkpoints/last.ckpt", weights_only=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one round, with predictions."""
    root = tmp_path_factory.mktemp("trained")
    for command in ("fit", "predict"):
        pflight(command, "--ckpt_path=last", rounds=1, root=str(root))
    return root


class TestFit:
    @pytest.mark.short("15-sequential")
    @pytest.mark.parametrize(
        ("signum", "engine"),
        [(signal.SIGTERM, "sequential"), (signal.SIGINT, "vectorized")],
    )
    def test_the_round_is_finished_and_saved_and_the_run_goes_on_from_there(
        self, signum, engine, monkeypatch, capfd
    ):
        with monkeypatch.context() as patch:
            raising(patch, Clients, "train", signum, call=3)
            assert stopped("fit", f"--model.engine={engine}") == STATUS[signum]
        name = signal.Signals(signum).name
        assert error_line(capfd) == (
            f"pflight: stopped by {name} after 3 rounds: --ckpt_path last continues the run in run"
        )
        assert last()["global_step"] == 3
        pflight("fit", f"--model.engine={engine}", "--ckpt_path=last")
        pflight("fit", f"--model.engine={engine}", root="straight")
        for one, other in zip(
            last()["state_dict"].values(), last("straight")["state_dict"].values(), strict=True
        ):
            assert torch.equal(one, other)
        assert read_events("run").scalars["train/loss"] == [0, 1, 2, 3, 4]
        assert read_events("run").values == read_events("straight").values

    @pytest.mark.short("Federation-*")
    @pytest.mark.parametrize(
        ("owner", "method"),
        [(Federation, "validation_step"), (AtomicCheckpointIO, "save_checkpoint")],
    )
    def test_what_follows_the_round_is_part_of_it(self, owner, method, monkeypatch):
        raising(monkeypatch, owner, method, signal.SIGTERM)
        assert stopped("fit") == 143
        assert last()["global_step"] == 1
        assert Path("run/checkpoints/best.ckpt").is_file()

    @pytest.mark.long
    def test_where_not_each_round_is_saved_the_last_one_is(self, monkeypatch):
        saves = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.dirpath=mine"]
        saves += ["--trainer.callbacks.every_n_epochs=3"]
        with monkeypatch.context() as patch:
            raising(patch, Federation, "training_step", signal.SIGTERM, call=2)
            assert stopped("fit", *saves) == 143
        assert last()["global_step"] == 2
        pflight("fit", *saves, "--ckpt_path=last")
        pflight("fit", *saves, root="straight")
        assert read_events("run").values == read_events("straight").values

    @pytest.mark.long
    def test_min_epochs_do_not_hold_it_up(self, monkeypatch):
        raising(monkeypatch, Federation, "training_step", signal.SIGTERM, call=2)
        assert stopped("fit", "--trainer.min_epochs=4") == 143
        assert last()["global_step"] == 2

    @pytest.mark.long
    def test_in_the_last_round_the_run_is_complete(self, monkeypatch, capfd):
        raising(monkeypatch, Federation, "training_step", signal.SIGTERM, call=2)
        assert stopped("fit", rounds=2) == 143
        captured = capfd.readouterr()
        assert "used by clients" in captured.out
        assert "stopped by SIGTERM after 2 rounds, the last of the run" in captured.err

    @pytest.mark.long
    def test_the_set_up_ends_at_once_and_an_earlier_run_stays(self, trained, monkeypatch, capfd):
        shutil.copytree(trained, "run")
        before = last()["state_dict"]
        capfd.readouterr()
        raising(monkeypatch, Federation, "configure_optimizers", signal.SIGTERM)
        assert stopped("fit", "--model.seed=1") == 143
        assert "start it again with the same command" in error_line(capfd)
        assert not Path("run.1").exists()
        assert all(torch.equal(last()["state_dict"][name], before[name]) for name in before)

    @pytest.mark.long
    def test_a_signal_that_was_ignored_stays_so(self, monkeypatch):
        raising(monkeypatch, Federation, "training_step", signal.SIGINT)
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            pflight("fit", rounds=2)
        finally:
            signal.signal(signal.SIGINT, handler)
        assert last()["global_step"] == 2

    def test_an_error_is_not_hidden_by_a_signal(self, monkeypatch):
        def broken(*_: object) -> None:
            signal.raise_signal(signal.SIGTERM)
            raise RuntimeError("a bug")

        monkeypatch.setattr(Federation, "training_step", broken)
        with pytest.raises(RuntimeError, match="a bug"):
            pflight("fit")

    def test_a_module_that_is_no_federation_stops_after_its_epoch(self, monkeypatch, capfd):
        from pflight.models import Classifier

        raising(monkeypatch, Classifier, "training_step", signal.SIGTERM)
        config = ["--config=configs/centralized.yaml", "--trainer.default_root_dir=run"]
        with pytest.raises(SystemExit) as exit_:
            main(["fit", *config])
        assert exit_.value.code == 143
        assert last()["epoch"] == 0
        assert "after 1 epoch: --ckpt_path last continues" in capfd.readouterr().err


class TestEvaluation:
    @pytest.mark.short("predict-*")
    @pytest.mark.parametrize(
        ("command", "method", "signum"),
        [
            ("validate", "validation_step", signal.SIGTERM),
            ("test", "test_step", signal.SIGINT),
            ("predict", "predict_step", signal.SIGTERM),
        ],
    )
    def test_it_ends_at_once(self, command, method, signum, trained, monkeypatch, capfd):
        shutil.copytree(trained, "run")
        before = Path("run/predictions.csv").read_bytes()
        capfd.readouterr()
        raising(monkeypatch, Federation, method, signum)
        assert stopped(command, "--ckpt_path=last") == STATUS[signum]
        name = signal.Signals(signum).name
        assert error_line(capfd) == f"pflight: stopped by {name}"
        assert Path("run/predictions.csv").read_bytes() == before
        assert not list(Path("run").rglob("*partial*"))


def test_a_stock_trainer_inside_of_the_context():
    federation, stop = Federation(linear_client()), StopBetweenRounds()
    trainer = quiet_trainer(5, FedAvg(), RaisesSignal(signal.SIGTERM, rank=0), stop)
    with pytest.raises(SystemExit) as exit_, stop:
        trainer.fit(federation, datamodule=small_data())
    assert exit_.value.code == 143
    assert len(federation.history) == 2


@pytest.mark.parametrize("begins", [True, False])
def test_a_signal_while_it_begins_or_ends(begins: bool, monkeypatch, capfd):
    """An exception there would leave the handlers, and end in a traceback."""
    stop, before = StopBetweenRounds(), signal.getsignal(signal.SIGTERM)
    place, method = (stop._thread, "start") if begins else (stop, "restore_handlers")
    kept = getattr(place, method)
    monkeypatch.setattr(place, method, lambda: (signal.raise_signal(signal.SIGTERM), kept()))
    with pytest.raises(SystemExit) as exit_, stop:
        pass
    assert exit_.value.code == 143
    assert capfd.readouterr().err == "pflight: stopped by SIGTERM\n"
    assert signal.getsignal(signal.SIGTERM) == before
    assert not stop._thread.is_alive()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda stop: pickle.loads(pickle.dumps(stop))])
def test_a_copy_watches_a_run_of_its_own(copied: Callable[..., Any]):
    stop = StopBetweenRounds(lambda: "go on")
    saves = SaveWhenStopped(stop, Path("stopped.ckpt"))
    stop.signum = signal.SIGTERM
    other = copied(saves)._stop
    assert other.saved_apart
    assert vars(other).keys() == vars(stop).keys()
    federation = Federation(linear_client())
    with other:
        quiet_trainer(2, FedAvg(), other).fit(federation, datamodule=small_data())
    assert len(federation.history) == 2


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_signals_of_a_forked_process_are_its_own():
    before = signal.getsignal(signal.SIGTERM)
    with StopBetweenRounds() as stop:
        stop.on_train_start(None, None)
        if (child := os.fork()) == 0:
            kept = signal.getsignal(signal.SIGTERM) == before and signal.set_wakeup_fd(-1) == -1
            os._exit(0 if kept else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert not stop.signum


class TestProcesses:
    def fit(self, signum: int, *args: str, **raised: Any) -> tuple[int, str, list[str]]:
        """Return the exit status, standard output and the lines of errors once all ranks ended."""
        command = [sys.executable, "-m", "pflight", "fit", *QUICKSTART]
        callback = f"--trainer.callbacks+={RaisesSignal.__module__}.{RaisesSignal.__name__}"
        options = {"signum": int(signum), **raised}
        command += [callback, *(f"--trainer.callbacks.{k}={v}" for k, v in options.items())]
        process = subprocess.Popen(
            [*command, "--trainer.default_root_dir=run", "--trainer.max_epochs=1000", *args],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
            start_new_session=True,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:  # all ranks write to the pipes, which end with the last one
            output, errors = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return process.returncode, output, errors.splitlines()

    @pytest.mark.long
    def test_a_second_ctrl_c_ends_at_once(self):
        status, output, errors = self.fit(signal.SIGINT, again=0.5)
        assert status == 130, errors
        assert "stopping after this round; a second Ctrl-C stops at once" in output
        said = "pflight: stopped by SIGINT after 1 round: --ckpt_path last continues the run in run"
        assert errors[-1] == said

    @pytest.mark.long
    def test_two_ranks_stop_together_when_one_gets_the_signal(self):
        status, _, errors = self.fit(signal.SIGTERM, *TWO_RANKS, rank=1)
        assert status == 143, errors
        said = (
            "pflight: stopped by SIGTERM after 2 rounds: --ckpt_path last continues the run in run"
        )
        assert errors[-1] == said
        assert last()["global_step"] == 2

    @pytest.mark.long
    def test_a_rank_that_is_killed_ends_the_others(self):
        status, _, errors = self.fit(signal.SIGKILL, *TWO_RANKS, rank=1)
        assert status == 1, errors
        assert errors[-1].startswith("pflight: error: rank 1 ended with status -9")
        assert last()["global_step"] == 1


class TestSlurm:
    """Its environment has Lightning save and requeue the job when the end of its time is near."""

    @pytest.fixture(autouse=True)
    def _job(self, monkeypatch: pytest.MonkeyPatch) -> None:
        job = {"NTASKS": 1, "JOB_ID": 7, "JOB_NAME": "federation", "PROCID": 0, "LOCALID": 0}
        for name, value in (job | {"NODEID": 0, "NNODES": 1}).items():
            monkeypatch.setenv(f"SLURM_{name}", str(value))
        scontrol = Path("bin", "scontrol")
        scontrol.parent.mkdir()
        scontrol.write_text('#!/bin/sh\necho "$@" > requeued\n')
        scontrol.chmod(0o755)
        monkeypatch.setenv("PATH", f"{scontrol.parent.resolve()}:{os.environ['PATH']}")

    @pytest.mark.parametrize("memory", [[], ["--model.client_memory=disk"]], ids=["ram", "disk"])
    @pytest.mark.long
    def test_the_job_is_requeued_and_goes_on(self, memory, monkeypatch):
        handler = signal.getsignal(signal.SIGUSR1)
        with monkeypatch.context() as patch:
            raising(patch, Federation, "on_train_epoch_end", signal.SIGUSR1, call=2)
            raising(patch, Clients, "train", signal.SIGTERM, call=4)
            assert stopped("fit", *memory) == 143
        assert signal.getsignal(signal.SIGUSR1) == handler
        assert Path("requeued").read_text() == "requeue 7\n"
        assert Path("run/hpc_ckpt_1.ckpt").is_file()
        assert last()["global_step"] == 4
        pflight("fit", *memory)  # as SLURM starts it again
        pflight("fit", root="straight")
        assert read_events("run").values == read_events("straight").values
        assert not Path("run.1").exists()


def test_a_signal_while_a_client_is_judged_is_not_its_failure(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    raising(monkeypatch, MLP, "forward", signal.SIGTERM)
    assert stopped("test", "--model.engine=sequential", root=str(trained)) == 143
    assert "client" not in error_line(capfd)


def test_a_signal_while_stacking_is_tried_is_no_obstacle(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    raising(monkeypatch, MLP, "forward", signal.SIGTERM)
    assert stopped("fit", "--model.engine=vectorized") == 143
    assert "stacked" not in error_line(capfd)

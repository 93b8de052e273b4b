"""What a checkpoint holds is enough to go on as if nothing had happened."""

import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from pflight import Federation
from pflight.callbacks import FedAvg, FedSGD, FeSEM, Local
from pflight.engines import VectorizedEngine, choice
from pflight.errors import ConfigurationError
from pflight.models import ProximalClient
from pflight.runs.checkpoint import AtomicCheckpointIO, read_checkpoint
from tests import training_script
from tests.runs import (
    assert_same,
    batchnorm_client,
    dropout_client,
    linear_client,
    quiet_trainer,
    run,
    small_data,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:Be aware that when using `ckpt_path`, callbacks used to create:UserWarning"
)

ALGORITHMS: dict[str, Any] = {
    "FedAvg": (FedAvg, dropout_client, {}),
    "FedSGD": (FedSGD, dropout_client, {}),
    "Local": (Local, dropout_client, {}),
    "FeSEM": (lambda: FeSEM(2, init_clients=4), lambda: dropout_client(ProximalClient), {}),
    "local buffers": (lambda: FedAvg(buffers="local"), batchnorm_client, {}),
    "server Adam": (
        FedAvg,
        dropout_client,
        {"server_optimizer": lambda p: torch.optim.Adam(p, lr=0.01)},
    ),
    "server scheduler": (
        FedAvg,
        dropout_client,
        {"server_scheduler": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5)},
    ),
    "float64": (FedAvg, dropout_client, {"trainer": {"precision": "64-true"}}),
}


def data(**options: Any) -> Any:
    return small_data(cohort_size=3, dropout=0.2, **options)


def saving(folder: Path, **options: Any) -> ModelCheckpoint:
    options = {"filename": "{epoch}", "save_top_k": -1, **options}
    return ModelCheckpoint(folder, **options)


def assert_equal_runs(one: Federation, other: Federation) -> None:
    for left, right in zip(one.server_states(), other.server_states(), strict=True):
        assert_same(left, right)
    for i in range(one.num_clients):
        assert_same(one.client_state(i), other.client_state(i))
    assert [entry.clients for entry in one.history] == [entry.clients for entry in other.history]
    for left, right in zip(one.history, other.history, strict=True):
        assert left.failed == right.failed
        assert (left.bytes_down, left.bytes_up) == (right.bytes_down, right.bytes_up)
        assert left.metrics == pytest.approx(right.metrics, nan_ok=True, rel=0, abs=0)


@pytest.mark.short(
    "True-FedAvg", "True-local buffers", "True-server scheduler", "False-FeSEM", "False-float64"
)
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("on_train_epoch_end", [True, False])
def test_resumed_is_uninterrupted(name: str, on_train_epoch_end: bool, tmp_path: Path) -> None:
    callback, client, options = ALGORITHMS[name]
    options = {"local_epochs": 2, "finetune_epochs": 1, **options}
    saver = saving(tmp_path, save_on_train_epoch_end=on_train_epoch_end)
    whole = run(client(), data(), callback(), 6, saver, **options)
    for epoch in (0, 3):
        path = tmp_path / f"epoch={epoch}.ckpt"
        resumed = run(client(), data(), callback(), 6, ckpt_path=path, **options)
        assert resumed.trainer.global_step == 6
        if name == "FeSEM":
            assert torch.equal(resumed.callback.assignments, whole.callback.assignments)
        if not on_train_epoch_end:
            assert_equal_runs(resumed, whole)
        else:  # the evaluation that followed the saved round is not in the checkpoint
            for left, right in zip(resumed.server_states(), whole.server_states(), strict=True):
                assert_same(left, right)
            for i in range(6):
                assert_same(resumed.client_state(i), whole.client_state(i))


def test_auto_goes_on_as_the_run_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The rule of another release, or of another device, may choose otherwise."""

    def fit(rounds: int, **options: Any) -> Federation:
        return run(linear_client(), data(), FedAvg(), rounds, **options)

    whole = fit(6)
    saved = fit(3)
    path = tmp_path / "saved.ckpt"
    saved.trainer.save_checkpoint(path)
    assert isinstance(saved.clients.attached_engine, VectorizedEngine)
    monkeypatch.setitem(choice._LIMITS, "cpu", choice._LIMITS["cpu"]._replace(busy=0))
    assert not isinstance(fit(1).clients.attached_engine, VectorizedEngine)
    with caplog.at_level("INFO"):
        resumed = fit(6, ckpt_path=path)
    assert isinstance(resumed.clients.attached_engine, VectorizedEngine)
    assert resumed.clients.attached_engine.chunk == saved.clients.attached_engine.chunk
    assert any(text.endswith("clients at once: as in the checkpoint") for text in caplog.messages)
    assert_equal_runs(resumed, whole)
    asked = fit(6, ckpt_path=path, engine="sequential")
    assert not isinstance(asked.clients.attached_engine, VectorizedEngine)


def test_a_finished_run_is_extended(tmp_path: Path) -> None:
    run(dropout_client(), data(), FedAvg(), 3, saving(tmp_path))
    longer = run(dropout_client(), data(), FedAvg(), 5, ckpt_path=tmp_path / "epoch=2.ckpt")
    whole = run(dropout_client(), data(), FedAvg(), 5)
    assert_equal_runs(longer, whole)


def test_client_memory_is_as_it_was_when_the_checkpoint_was_made(tmp_path: Path) -> None:
    run(dropout_client(), data(), Local(), 4, saving(tmp_path))
    early = run(dropout_client(), data(), Local(), 2)
    loaded = Federation.load_from_checkpoint(
        tmp_path / "epoch=1.ckpt", client=dropout_client(), callback=Local()
    )
    for i in range(6):
        assert_same(loaded.client_state(i), early.client_state(i))


class TestLoadFromCheckpoint:
    @pytest.mark.parametrize("name", ["FedAvg", "FedSGD", "Local", "FeSEM", "local buffers"])
    def test_it_is_ready_for_use_without_data(self, name: str, tmp_path: Path) -> None:
        callback, client, _ = ALGORITHMS[name]
        trained = run(client(), data(), callback(), 3, local_epochs=2)
        # FeSEM's clients that have not trained find their centers when they are judged.
        trained.trainer.validate(trained, datamodule=data(), verbose=False)
        trained.trainer.save_checkpoint(tmp_path / "run.ckpt")
        loaded = Federation.load_from_checkpoint(
            tmp_path / "run.ckpt", client=client(), callback=callback()
        )
        assert loaded.clients.training.epochs == 2
        assert len(loaded.history) == 3
        for left, right in zip(loaded.server_states(), trained.server_states(), strict=True):
            assert_same(left, right)
        for i in range(6):
            assert_same(dict(loaded.client_module(i).state_dict()), trained.client_state(i))

    def test_it_is_tested_as_the_original(self, tmp_path: Path) -> None:
        trained = run(linear_client(), data(), FeSEM(2), 3)
        trained.trainer.save_checkpoint(tmp_path / "run.ckpt")
        (expected,) = trained.trainer.test(trained, datamodule=data(), verbose=False)
        callback = FeSEM(2)
        loaded = Federation.load_from_checkpoint(
            str(tmp_path / "run.ckpt"), client=linear_client(), callback=callback
        )
        trainer = quiet_trainer(1, callback)
        assert trainer.test(loaded, datamodule=data(), verbose=False) == [expected]

    def test_options_may_be_changed(self, tmp_path: Path) -> None:
        trained = run(linear_client(), data(), FedAvg(), 1, seed=5)
        trained.trainer.save_checkpoint(tmp_path / "run.ckpt")
        loaded = Federation.load_from_checkpoint(
            tmp_path / "run.ckpt", client=linear_client(), finetune_epochs=2
        )
        assert (loaded.clients.training.finetune_epochs, loaded.clients.seed) == (2, 5)

    def test_another_callback_is_refused(self, tmp_path: Path) -> None:
        trained = run(linear_client(), data(), Local(), 1)
        trained.trainer.save_checkpoint(tmp_path / "run.ckpt")
        with pytest.raises(ConfigurationError, match=r"Local.*FedAvg"):
            Federation.load_from_checkpoint(tmp_path / "run.ckpt", client=linear_client())

    def test_the_missing_argument_is_named(self, tmp_path: Path) -> None:
        run(linear_client(), data(), FeSEM(2), 1).trainer.save_checkpoint(tmp_path / "run.ckpt")
        with pytest.raises(ConfigurationError, match="needs client=, a client module") as error:
            Federation.load_from_checkpoint(tmp_path / "run.ckpt", callback=FeSEM(2))
        one_line(error)
        with pytest.raises(ConfigurationError, match=r"callback=FeSEM\(num_clusters=2, ") as error:
            Federation.load_from_checkpoint(tmp_path / "run.ckpt", client=linear_client())
        one_line(error)


def test_testing_a_checkpoint_by_path(tmp_path: Path) -> None:
    trained = run(linear_client(), data(), FedAvg(), 3)
    trained.trainer.save_checkpoint(tmp_path / "run.ckpt")
    (expected,) = trained.trainer.test(trained, datamodule=data(), verbose=False)
    fresh = Federation(linear_client())
    values = quiet_trainer().test(
        fresh, datamodule=data(), ckpt_path=tmp_path / "run.ckpt", verbose=False
    )
    assert values == [expected]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_holds_tensors_and_primitives_only(name: str, tmp_path: Path) -> None:
    callback, client, options = ALGORITHMS[name]
    run(client(), data(), callback(), 2, saving(tmp_path), **options)
    checkpoint = torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 2
    assert read_checkpoint(tmp_path / "epoch=1.ckpt")["epoch"] == 1


# A checkpoint that does not fit


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    trained = run(linear_client(), data(), FedAvg(), 1)
    trained.trainer.save_checkpoint(tmp_path / "run.ckpt")
    return tmp_path / "run.ckpt"


def one_line(error: pytest.ExceptionInfo[ConfigurationError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def test_another_architecture(saved: Path) -> None:
    with pytest.raises(ConfigurationError, match=r": network\.\S+ is") as error:
        run(dropout_client(), data(), FedAvg(), 2, ckpt_path=saved)
    one_line(error)


def test_another_shape(saved: Path) -> None:
    client = linear_client()
    client.network = torch.nn.Linear(4, 3, bias=False)
    with pytest.raises(ConfigurationError, match=r"network\.bias") as error:
        run(client, data(), FedAvg(), 2, ckpt_path=saved)
    one_line(error)


def test_another_number_of_clients(saved: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"clients is 6 in the checkpoint and 5") as error:
        run(linear_client(), small_data(counts=[4] * 5), FedAvg(), 2, ckpt_path=saved)
    one_line(error)


@pytest.mark.parametrize("callback", [Local, FedSGD, lambda: FeSEM(2)])
def test_another_callback(saved: Path, callback: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"callback is FedAvg in the checkpoint") as error:
        run(linear_client(), data(), callback(), 2, ckpt_path=saved)
    one_line(error)


def test_another_number_of_clusters(tmp_path: Path) -> None:
    trained = run(linear_client(), data(), FeSEM(2), 1)
    trained.trainer.save_checkpoint(tmp_path / "run.ckpt")
    with pytest.raises(ConfigurationError, match=r"2.* 3") as error:
        run(linear_client(), data(), FeSEM(3), 2, ckpt_path=tmp_path / "run.ckpt")
    one_line(error)


@pytest.mark.parametrize("share", [0, 0.5, 0.99])
def test_a_corrupt_file(saved: Path, share: float) -> None:
    whole = saved.read_bytes()
    saved.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ConfigurationError, match=r"run\.ckpt") as error:
        run(linear_client(), data(), FedAvg(), 2, ckpt_path=saved)
    one_line(error)
    with pytest.raises(ConfigurationError, match=r"run\.ckpt") as error:
        Federation.load_from_checkpoint(saved, client=linear_client())
    one_line(error)


@pytest.mark.parametrize("share", [0.02, 0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 0.98])
def test_a_flipped_byte_is_noticed(saved: Path, share: float) -> None:
    raw = bytearray(saved.read_bytes())
    with zipfile.ZipFile(saved) as archive:  # a byte of an entry, not of the padding between two
        sizes = [(entry, entry.file_size) for entry in archive.infolist() if entry.file_size]
        entry, size = sizes[int(share * len(sizes))]
        name_and_extra = raw[entry.header_offset + 26 : entry.header_offset + 30]
        lengths = int.from_bytes(name_and_extra[:2], "little") + int.from_bytes(
            name_and_extra[2:], "little"
        )
        raw[entry.header_offset + 30 + lengths + int(share * size)] ^= 0x55
    saved.write_bytes(raw)
    with pytest.raises(ConfigurationError, match="can't be read"):
        read_checkpoint(saved)


def test_a_file_without_lightnings_version(tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "weights.pt")
    with pytest.raises(ConfigurationError, match="not a Lightning checkpoint"):
        read_checkpoint(tmp_path / "weights.pt")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no checkpoint .*gone\.ckpt"):
        run(linear_client(), data(), FedAvg(), 2, ckpt_path=tmp_path / "gone.ckpt")
    with pytest.raises(ConfigurationError, match=r"no checkpoint .*gone\.ckpt"):
        Federation.load_from_checkpoint(tmp_path / "gone.ckpt", client=linear_client())


def test_a_checkpoint_of_something_else(tmp_path: Path) -> None:
    module = linear_client()
    trainer = quiet_trainer(1, limit_val_batches=0)
    trainer.fit(module, datamodule=data().client(0))
    trainer.save_checkpoint(tmp_path / "client.ckpt")
    with pytest.raises(ConfigurationError, match="federation"):
        Federation.load_from_checkpoint(tmp_path / "client.ckpt", client=linear_client())
    with pytest.raises(ConfigurationError, match="federation"):
        run(linear_client(), data(), FedAvg(), 2, ckpt_path=tmp_path / "client.ckpt")
    torch.save({"weights": torch.ones(2)}, tmp_path / "other.ckpt")
    with pytest.raises(ConfigurationError, match="no state_dict"):
        Federation.load_from_checkpoint(tmp_path / "other.ckpt", client=linear_client())


# A crash while a checkpoint is written


class CrashError(Exception):
    """Stands for the end of the process."""


class TestAtomicWriting:
    def write(self, path: Path, value: float) -> None:
        checkpoint = {
            "state_dict": {"w": torch.tensor(value)},
            "pytorch-lightning_version": L.__version__,
        }
        AtomicCheckpointIO().save_checkpoint(checkpoint, path)

    def read(self, path: Path) -> float:
        return read_checkpoint(path)["state_dict"]["w"].item()

    @pytest.mark.parametrize("where", ["half of the file", "fsync", "replace"])
    def test_the_previous_file_stays_readable(
        self, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "last.ckpt"
        self.write(path, 1.0)

        def crash(*_: Any, **__: Any) -> None:
            raise CrashError

        def client_method(checkpoint: Any, file: Any, **_: Any) -> None:
            file.write(b"PK\x03\x04half")
            raise CrashError

        with monkeypatch.context() as patch:
            if where == "replace":
                patch.setattr(os, "replace", crash)
            elif where == "fsync":
                patch.setattr(os, "fsync", crash)
            else:
                patch.setattr(torch, "save", client_method)
            with pytest.raises(CrashError):
                self.write(path, 2.0)
        assert self.read(path) == 1.0
        self.write(path, 3.0)
        assert self.read(path) == 3.0
        assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]

    def test_a_run_uses_it(self, tmp_path: Path) -> None:
        federation = run(linear_client(), data(), FedAvg(), 1, saving(tmp_path))
        assert isinstance(federation.trainer.strategy.checkpoint_io, AtomicCheckpointIO)

    def test_a_crash_in_the_middle_of_a_run_loses_one_round_at_most(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        replace, count = os.replace, 0

        def crash(source: Any, target: Any) -> None:
            nonlocal count
            count += 1
            if count == 3:
                raise CrashError
            replace(source, target)

        saver = saving(tmp_path, filename="last", save_top_k=1, enable_version_counter=False)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", crash)
            with pytest.raises(CrashError):
                run(dropout_client(), data(), Local(), 6, saver)
        resumed = run(dropout_client(), data(), Local(), 6, ckpt_path=tmp_path / "last.ckpt")
        assert_equal_runs(resumed, run(dropout_client(), data(), Local(), 6))


# A killed process


@pytest.mark.parametrize("algorithm", ["local", "fesem"])
@pytest.mark.long
def test_a_killed_run_resumes_to_the_same_weights(algorithm: str, tmp_path: Path) -> None:
    """The script prints a line per trained client: the parent kills after a random one."""
    rounds, chance = 12, random.Random(2)
    command = [sys.executable, "-m", "tests.training_script", algorithm, str(rounds), str(tmp_path)]
    kills = 0
    while kills < 2:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            lines = chance.randrange(5, 20)
            for _, _line in zip(range(lines), process.stdout, strict=False):
                pass
            process.kill()
        assert process.returncode == -9
        assert not (tmp_path / "result.pt").exists()
        kills += 1
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=120)
    result = torch.load(tmp_path / "result.pt", weights_only=True)
    assert 0 < result["resumed_from"] < rounds
    never_killed = training_script.fit(algorithm, rounds)
    expected = training_script.summary(never_killed)
    assert_same(result["weights"], expected["weights"])
    assert result["clients"] == expected["clients"]


def test_a_checkpoint_can_be_saved_in_an_interrupted_round(tmp_path: Path) -> None:
    class Interrupt(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.current_epoch == 3:
                raise CrashError

        def on_exception(self, trainer: L.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "interrupted.ckpt")

    with pytest.raises(CrashError):
        run(dropout_client(), data(), Local(), 5, Interrupt())
    resumed = run(dropout_client(), data(), Local(), 5, ckpt_path=tmp_path / "interrupted.ckpt")
    assert_equal_runs(resumed, run(dropout_client(), data(), Local(), 5))


def test_a_federation_trained_in_float64_is_loaded_as_one(tmp_path: Path) -> None:
    trainer = {"precision": "64-true"}
    saves = ModelCheckpoint(tmp_path, filename="last")
    trained = run(linear_client(), small_data(), FedAvg(), 2, saves, trainer=trainer)
    path = tmp_path / "last.ckpt"
    loaded = Federation.load_from_checkpoint(path, client=linear_client(), callback=FedAvg())
    assert_same(loaded.server_states()[0], trained.server_states()[0])
    assert loaded.client_state(1)["network.weight"].dtype == torch.float64
    assert loaded.client_module(1).network.weight.dtype == torch.float64

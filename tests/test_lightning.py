"""The stock Trainer's options mean for a federation what a Lightning user expects."""

import copy
import csv
import io
import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, StepLR

from pflight import Federation
from pflight.callbacks import FedAvg, FedSGD, FeSEM, Local
from pflight.datamodules import TensorClients
from pflight.errors import ConfigurationError
from pflight.models import Classifier, ProximalClient
from tests.algorithm_tester import ALGORITHMS, of_each_kind
from tests.event_files import read_events
from tests.runs import (
    CLASSES,
    FEATURES,
    assert_same,
    batchnorm_client,
    dropout_client,
    flat,
    linear_client,
    quiet_trainer,
    run,
    samples,
    sgd,
    small_data,
)

CALLBACKS = [FedAvg, FedSGD, Local, lambda: FeSEM(2)]


@pytest.mark.parametrize("callback", CALLBACKS)
def test_global_step_counts_rounds(callback: Any) -> None:
    federation = run(linear_client(), small_data(cohort_size=3), callback(), rounds=5)
    assert federation.trainer.global_step == federation.global_step == 5
    assert federation.trainer.current_epoch == 5
    assert [entry.index for entry in federation.history] == [0, 1, 2, 3, 4]


def test_max_steps_is_a_number_of_rounds_too() -> None:
    federation = run(linear_client(), small_data(), rounds=-1, trainer={"max_steps": 3})
    assert len(federation.history) == 3


def test_model_checkpoint_keeps_the_best_round(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path, "{epoch}", monitor="val/macro_acc", mode="max")
    federation = run(linear_client(optimizer=sgd(2.0)), small_data(), FedAvg(), 6, best)
    scores = [entry.metrics["val/macro_acc"] for entry in federation.history]
    assert best.best_model_score.item() == pytest.approx(max(scores))
    assert Path(best.best_model_path).name == f"epoch={scores.index(max(scores))}.ckpt"


def test_early_stopping() -> None:
    stop = EarlyStopping("val/macro_acc", mode="max", patience=2)
    federation = run(linear_client(optimizer=sgd(1e-9)), small_data(), FedAvg(), 50, stop)
    assert len(federation.history) == 3


def test_early_stopping_on_the_training_loss() -> None:
    stop = EarlyStopping("train/loss", patience=1, min_delta=100.0, check_on_train_epoch_end=True)
    federation = run(linear_client(), small_data(), FedAvg(), 50, stop)
    assert len(federation.history) == 2


def test_max_time() -> None:
    federation = run(
        linear_client(), small_data(), FedAvg(), 50, trainer={"max_time": timedelta(0)}
    )
    assert len(federation.history) < 50
    assert any(isinstance(callback, Timer) for callback in federation.trainer.callbacks)


def test_fast_dev_run() -> None:
    federation = run(linear_client(), small_data(), FedAvg(), 50, trainer={"fast_dev_run": True})
    assert len(federation.history) == 1
    assert "val/macro_acc" in federation.history[0].metrics


def test_the_sanity_check_is_no_round() -> None:
    sane = run(dropout_client(), small_data(), FedAvg(), 2, trainer={"num_sanity_val_steps": 2})
    plain = run(dropout_client(), small_data(), FedAvg(), 2)
    assert_same(sane.server_states()[0], plain.server_states()[0])
    assert [entry.metrics for entry in sane.history] == [entry.metrics for entry in plain.history]


class TestLimits:
    def test_train_batches(self) -> None:
        one = run(linear_client(), small_data(), rounds=3, trainer={"limit_train_batches": 1})
        plain = run(linear_client(), small_data(), rounds=3)
        assert_same(one.server_states()[0], plain.server_states()[0])
        none = run(linear_client(), small_data(), rounds=3, trainer={"limit_train_batches": 0})
        assert none.history == []

    def test_validation_batches_are_chunks_of_clients(self) -> None:
        data = small_data(eval_chunk=2)
        federation = run(linear_client(), data, trainer={"limit_val_batches": 2})
        judged = federation.client_metrics("val")["num_samples"]
        assert judged.tolist() == [4, 4, 4, 4, 0, 0]
        none = run(linear_client(), data, trainer={"limit_val_batches": 0})
        assert not any(name.startswith("val/") for name in none.history[0].metrics)

    def test_test_batches(self) -> None:
        data = small_data(eval_chunk=2)
        federation = run(linear_client(), data)
        quiet_trainer(limit_test_batches=1).test(federation, datamodule=data, verbose=False)
        assert federation.client_metrics("test")["num_samples"].tolist() == [6, 6, 0, 0, 0, 0]

    @pytest.mark.parametrize(
        "name",
        ["limit_train_batches", "limit_val_batches", "limit_test_batches", "overfit_batches"],
    )
    def test_a_fraction_is_refused_and_the_cohort_size_named(self, name: str) -> None:
        with pytest.raises(ConfigurationError, match=r"\w+_batches=0.5 .*cohort_size"):
            run(linear_client(), small_data(), trainer={name: 0.5})

    def test_validation_every_second_round(self) -> None:
        federation = run(
            linear_client(), small_data(), rounds=4, trainer={"check_val_every_n_epoch": 2}
        )
        validated = ["val/macro_acc" in entry.metrics for entry in federation.history]
        assert validated == [False, True, False, True]


class OwnClient(L.LightningModule):
    """Trains by hooks of its own, if at all."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(FEATURES, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class ClippingClient(OwnClient):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, 1e-6, "norm")


@pytest.mark.parametrize(
    ("client", "option", "value", "names"),
    [
        (linear_client, "gradient_clip_val", 1.0, r"give it to Classifier \(--model\.client\.gr"),
        (OwnClient, "gradient_clip_val", 1.0, r"let OwnClient define configure_gradient_clipping"),
        (linear_client, "accumulate_grad_batches", 2, "set the data's batch_size, or let Classif"),
        (OwnClient, "accumulate_grad_batches", 2, r"let OwnClient set automatic_optimization = F"),
    ],
)
def test_what_belongs_to_the_client_is_refused(
    client: Callable[[], L.LightningModule], option: str, value: Any, names: str
) -> None:
    with pytest.raises(ConfigurationError, match=names):
        run(client(), small_data(), trainer={option: value})


def test_an_own_module_can_clip_its_gradients() -> None:
    start = Federation(ClippingClient()).client.network.weight.detach().clone()
    changes = []
    for kind in (OwnClient, ClippingClient):
        client = kind()
        client.load_state_dict({"network.weight": start, "network.bias": torch.zeros(CLASSES)})
        state = run(client, small_data(cohort_size=1)).server_states()[0]
        changes.append((state["network.weight"] - start).norm())
    assert changes[0] > 1e-3
    assert changes[1] < 1e-4


def test_detect_anomaly_stops_at_a_nan() -> None:
    class Broken(Classifier):
        def loss(self, batch):
            return torch.sqrt(self.network.weight.sum() * 0 - 1)

    with pytest.raises(RuntimeError, match=r"round 0: client 0"):
        run(linear_client(Broken), small_data(), trainer={"detect_anomaly": True})


@pytest.mark.parametrize(
    "options",
    [
        {"barebones": True},
        {"profiler": "simple"},
        {"inference_mode": False},
        {"deterministic": True},
        {"use_distributed_sampler": False},
        {"reload_dataloaders_every_n_epochs": 1},
        {"enable_progress_bar": True},
        {"enable_model_summary": True},
        {"min_epochs": 2},
        {"val_check_interval": 1},
        {"overfit_batches": 1},
        {"log_every_n_steps": 1},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.filterwarnings("ignore:You (requested to overfit|are trying to `self.log):UserWarning")
def test_other_options_of_the_trainer_change_no_numbers(options: dict[str, Any]) -> None:
    plain = run(dropout_client(), small_data(cohort_size=3), FedAvg(), 3)
    other = Federation(dropout_client())
    if "barebones" in options:
        trainer = L.Trainer(max_epochs=3, accelerator="cpu", callbacks=[FedAvg()], **options)
    else:
        trainer = quiet_trainer(3, FedAvg(), **options)
    trainer.fit(other, datamodule=small_data(cohort_size=3))
    assert_same(other.server_states()[0], plain.server_states()[0])
    assert [e.clients for e in other.history] == [e.clients for e in plain.history]


class TestPrecision:
    def test_64_true_trains_and_judges_in_float64(self) -> None:
        federation = run(
            batchnorm_client(), small_data(), FedAvg(), 2, trainer={"precision": "64-true"}
        )
        state = federation.server_states()[0]
        assert state["network.0.weight"].dtype == torch.float64
        assert state["network.1.num_batches_tracked"].dtype == torch.int64
        assert torch.isfinite(torch.tensor(federation.history[-1].metrics["val/loss"]))

    @pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is depr:FutureWarning")
    def test_16_mixed_is_bf16_mixed_on_the_cpu_as_lightning_says(self) -> None:
        def state(precision: str) -> dict[str, torch.Tensor]:
            federation = run(linear_client(), small_data(), trainer={"precision": precision})
            return federation.server_states()[0]

        with pytest.warns(UserWarning, match="Using `precision='bf16-mixed'` instead"):
            client_method = state("16-mixed")
        assert_same(client_method, state("bf16-mixed"))

    def test_16_mixed_is_an_error_where_gradients_are_scaled(self) -> None:
        plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
        with pytest.raises(ConfigurationError, match=r"scales gradients.*use bf16-mixed"):
            run(linear_client(), small_data(), trainer={"plugins": [plugin]})

    def test_bf16_mixed_keeps_float32_weights_and_is_near(self) -> None:
        mixed = run(linear_client(), small_data(), FedAvg(), 3, trainer={"precision": "bf16-mixed"})
        full = run(linear_client(), small_data(), FedAvg(), 3)
        state = mixed.server_states()[0]
        assert {value.dtype for value in state.values()} == {torch.float32}
        torch.testing.assert_close(state, full.server_states()[0], rtol=0, atol=0.02)
        assert flat(state) != pytest.approx(flat(full.server_states()[0]), abs=1e-7)

    @pytest.mark.short("bf16-true-*")
    @pytest.mark.parametrize("name", of_each_kind(ALGORITHMS))
    @pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
    def test_every_method_runs_in_half_precision(self, name: str, precision: str) -> None:
        algorithm = ALGORITHMS[name]
        client, data = batchnorm_client(algorithm.client), small_data(cohort_size=4)
        federation = run(client, data, algorithm.callback(), 2, trainer={"precision": precision})
        states = federation.server_states() or [federation.client_state(1)]
        weights = [value for name, value in states[0].items() if name.endswith("weight")]
        assert weights
        for weight in weights:
            assert weight.dtype.itemsize == 2
            assert weight.isfinite().all()

    @pytest.mark.short("FedAvg", "<lambda>")
    @pytest.mark.parametrize("callback", CALLBACKS)
    def test_every_algorithm_runs_in_64_bits(self, callback: Any) -> None:
        federation = run(
            linear_client(), small_data(), callback(), 2, trainer={"precision": "64-true"}
        )
        quiet_trainer(precision="64-true").test(federation, datamodule=small_data(), verbose=False)
        assert federation.client_state(1)["network.weight"].dtype == torch.float64


class TestServerSchedulers:
    def test_a_scheduler_steps_once_a_round(self, tmp_path: Path) -> None:
        monitor = LearningRateMonitor()
        federation = run(
            linear_client(),
            small_data(),
            FedAvg(),
            5,
            monitor,
            trainer={"logger": CSVLogger(tmp_path), "log_every_n_steps": 1},
            server_scheduler=lambda optimizer: StepLR(optimizer, 2, gamma=0.1),
        )
        rates = [
            float(row["lr-SGD"]) for row in rows(federation.trainer.logger) if row.get("lr-SGD")
        ]
        assert rates == pytest.approx([1, 1, 0.1, 0.1, 0.01])

    def test_its_rate_scales_the_servers_step(self) -> None:
        data = small_data()
        scheduled = run(
            linear_client(),
            data,
            rounds=2,
            server_scheduler=lambda optimizer: ExponentialLR(optimizer, 1e-12),
        )
        once = run(linear_client(), data, rounds=1)
        assert flat(scheduled.server_states()[0]) == pytest.approx(
            flat(once.server_states()[0]), abs=1e-7
        )

    def test_reduce_on_plateau_watches_the_macro_accuracy(self) -> None:
        federation = run(
            linear_client(optimizer=sgd(1e-9)),
            small_data(),
            rounds=6,
            server_scheduler=lambda optimizer: ReduceLROnPlateau(optimizer, "max", 0.1, patience=1),
        )
        (optimizer,) = federation.trainer.optimizers
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)

    def test_reduce_on_plateau_steps_only_after_an_evaluation(self) -> None:
        federation = run(
            linear_client(optimizer=sgd(1e-9)),
            small_data(),
            rounds=6,
            trainer={"check_val_every_n_epoch": 3},
            server_scheduler=lambda optimizer: ReduceLROnPlateau(optimizer, "max", 0.1, patience=1),
        )
        (optimizer,) = federation.trainer.optimizers
        assert optimizer.param_groups[0]["lr"] == 1.0


def rows(logger: CSVLogger) -> list[dict[str, str]]:
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


class TestLoggers:
    rounds = 4

    def fit_and_test(self, logger: Any, **options: Any) -> Federation:
        data = small_data(holdout_clients=0.2)
        federation = Federation(linear_client(), finetune_epochs=1)
        trainer = quiet_trainer(self.rounds, FeSEM(2), logger=logger, **options)
        trainer.fit(federation, datamodule=data)
        trainer.test(federation, datamodule=data, verbose=False)
        return federation

    def test_csv_has_one_value_per_round_and_column(self, tmp_path: Path) -> None:
        federation = self.fit_and_test(CSVLogger(tmp_path))
        table = rows(federation.trainer.logger)
        for name in ("train/loss", "val/macro_acc", "clients/sampled", "fesem/size_1"):
            points = [(int(row["step"]), float(row[name])) for row in table if row.get(name)]
            assert [step for step, _ in points] == list(range(self.rounds)), name
            assert [value for _, value in points] == pytest.approx(
                [entry.metrics[name] for entry in federation.history], rel=1e-5
            )

    def test_tensorboard_has_one_point_per_round_and_tag(self, tmp_path: Path) -> None:
        logger = TensorBoardLogger(tmp_path, name="", version="run", default_hp_metric=False)
        self.fit_and_test(logger)
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
        events = EventAccumulator(str(tmp_path / "run"), size_guidance={"scalars": 0})
        events.Reload()
        tags = events.Tags()["scalars"]
        assert {"train/loss", "val/macro_acc", "val/server/macro_acc", "clients/failed"} <= {*tags}
        assert {"test/macro_acc", "test/new/macro_acc", "test/finetuned/micro_f1"} <= {*tags}
        for tag in tags:
            steps = [event.step for event in events.Scalars(tag)]
            if tag.startswith("test/"):
                assert len(steps) == 1, tag
            else:
                assert steps == list(range(self.rounds)), tag

    def test_logging_rarely_loses_no_round(self, tmp_path: Path) -> None:
        federation = self.fit_and_test(CSVLogger(tmp_path), log_every_n_steps=50)
        logged = [row for row in rows(federation.trainer.logger) if row.get("train/loss")]
        assert len(logged) == self.rounds

    def test_hyperparameters_are_logged(self, tmp_path: Path) -> None:
        federation = self.fit_and_test(CSVLogger(tmp_path))
        assert federation.hparams["finetune_epochs"] == 1
        assert "client" not in federation.hparams
        written = (Path(federation.trainer.logger.log_dir) / "hparams.yaml").read_text()
        assert "finetune_epochs: 1" in written

    def test_trainer_metrics_are_those_of_the_last_round(self) -> None:
        federation = run(linear_client(), small_data(), rounds=2)
        for name, value in federation.history[-1].metrics.items():
            assert federation.trainer.callback_metrics[name].item() == pytest.approx(value)


class TestSeveralRuns:
    def test_fit_then_test_keeps_what_was_trained(self) -> None:
        data = small_data()
        federation = run(linear_client(), data, FedAvg(), rounds=3)
        before = federation.server_states()[0]
        (values,) = federation.trainer.test(federation, datamodule=data, verbose=False)
        assert_same(federation.server_states()[0], before)
        x, y = data.dataset(torch.arange(6), "test").__getitems__(range(36))
        right = federation.client_module(0)(x).argmax(1) == y
        assert values["test/pooled_acc"] == pytest.approx(right.float().mean().item())
        again = quiet_trainer(1, FedAvg()).test(federation, datamodule=data, verbose=False)
        assert again == [values]

    @pytest.mark.short("FedAvg", "<lambda>")
    @pytest.mark.parametrize("callback", CALLBACKS)
    def test_a_second_fit_on_the_same_trainer_continues(self, callback: Any) -> None:
        data = small_data(cohort_size=3)
        federation = run(dropout_client(), data, callback(), rounds=2)
        federation.trainer.fit_loop.max_epochs = 5
        federation.trainer.fit(federation, datamodule=data)
        whole = run(dropout_client(), data, callback(), rounds=5)
        assert [e.clients for e in federation.history] == [e.clients for e in whole.history]
        for i in range(6):
            assert_same(federation.client_state(i), whole.client_state(i))

    def test_testing_before_training_judges_the_initial_model(self) -> None:
        data = small_data()
        client = linear_client()
        federation = Federation(client)
        quiet_trainer().test(federation, datamodule=data, verbose=False)
        assert_same(federation.server_states()[0], dict(client.state_dict()))

    def test_validate_and_predict(self) -> None:
        data = small_data(eval_chunk=4)
        federation = run(linear_client(), data, rounds=2)
        (values,) = quiet_trainer().validate(federation, datamodule=data, verbose=False)
        expected = federation.history[-1].metrics
        assert values["val/macro_f1"] == pytest.approx(expected["val/macro_f1"])
        chunks = quiet_trainer().predict(federation, datamodule=data)
        assert [len(set(chunk.clients.tolist())) for chunk in chunks] == [4, 2]
        x, y = data.samples(5, "test")
        last = chunks[1].clients == 5
        torch.testing.assert_close(chunks[1].logits[last], federation.client_module(5)(x))
        assert torch.equal(chunks[1].targets[last], y)

    def test_a_new_trainer_trains_on_from_what_was_trained(self) -> None:
        data = small_data()
        federation = run(linear_client(), data, rounds=2)
        first = flat(federation.server_states()[0])
        quiet_trainer(1, FedAvg()).fit(federation, datamodule=data)
        assert len(federation.history) == 3
        assert flat(federation.server_states()[0]) != pytest.approx(first)


class TestEvaluation:
    def test_metrics_follow_from_the_models(self) -> None:
        data = small_data(holdout_clients=0.34)
        federation = run(linear_client(ProximalClient), data, FeSEM(2), rounds=3)
        federation.trainer.test(federation, datamodule=data, verbose=False)
        logged = federation.trainer.callback_metrics
        accuracies = {}
        for i in range(6):
            x, y = data.samples(i, "test")
            accuracies[i] = (federation.client_module(i)(x).argmax(1) == y).double().mean().item()
        new = data.new_clients.tolist()
        old = [i for i in range(6) if i not in new]
        assert len(new) == 2
        assert logged["test/macro_acc"] == pytest.approx(sum(accuracies[i] for i in old) / 4)
        assert logged["test/new/macro_acc"] == pytest.approx(sum(accuracies[i] for i in new) / 2)
        each = federation.client_metrics("test")["acc"].tolist()
        assert each == pytest.approx(list(accuracies.values()))
        assert federation.history[-1].clients == old

    def test_newcomers_never_train_and_are_not_validated(self) -> None:
        data = small_data(holdout_clients=0.34, cohort_size=2)
        federation = run(linear_client(), data, rounds=6)
        new = set(data.new_clients.tolist())
        assert not any(new & set(entry.clients) for entry in federation.history)
        counts = federation.client_metrics("val")["num_samples"]
        assert {i for i in range(6) if counts[i] == 0} == new

    def test_the_servers_model_is_judged_beside_the_clients(self) -> None:
        data = small_data()
        federation = run(linear_client(), data, Local(), rounds=8)
        metrics = federation.history[-1].metrics
        initial = linear_client()
        right = 0.0
        for i in range(6):
            x, y = data.samples(i, "val")
            right += (initial(x).argmax(1) == y).double().mean().item()
        assert metrics["val/server/macro_acc"] == pytest.approx(right / 6)
        assert not any("finetuned" in name for name in metrics)

    def test_finetuning_is_local_training_from_what_is_sent_and_is_discarded(self) -> None:
        data = small_data(batch_size=None)
        tuned = run(linear_client(), data, rounds=2, finetune_epochs=3)
        plain = run(linear_client(), data, rounds=2)
        assert_same(tuned.server_states()[0], plain.server_states()[0])
        for i in range(6):
            alone = linear_client()
            alone.load_state_dict(tuned.server_states()[0])
            quiet_trainer(3, limit_val_batches=0).fit(alone, datamodule=data.client(i))
            torch.testing.assert_close(
                tuned.client_state(i), dict(alone.state_dict()), rtol=0, atol=1e-6
            )
        metrics = tuned.history[-1].metrics
        assert metrics["val/finetuned/macro_acc"] == metrics["val/macro_acc"]
        assert metrics["val/server/macro_acc"] == plain.history[-1].metrics["val/macro_acc"]

    def test_finetuned_metrics_are_those_of_the_finetuned_models(self) -> None:
        data = small_data()
        federation = run(dropout_client(), data, rounds=2, finetune_epochs=2)
        federation.trainer.test(federation, datamodule=data, verbose=False)
        acc = federation.client_metrics("test", "finetuned/")["acc"]
        for i in range(6):
            x, y = data.samples(i, "test")
            module = federation.client_module(i)
            assert (module(x).argmax(1) == y).double().mean() == acc[i]

    def test_clients_without_test_data_are_left_out(self) -> None:
        train = [samples(6, client) for client in range(6)]
        test = [samples(0 if client == 2 else 4, 50 + client) for client in range(6)]
        data = TensorClients(train, test=test, num_classes=CLASSES)
        federation = run(linear_client(), data)
        federation.trainer.test(federation, datamodule=data, verbose=False)
        each = federation.client_metrics("test")["acc"]
        assert each[2].isnan()
        known = each[~each.isnan()]
        assert federation.trainer.callback_metrics["test/macro_acc"] == pytest.approx(
            known.mean().item()
        )


class TestClientModules:
    """What a federation hands out is an ordinary LightningModule."""

    @pytest.fixture
    def federation(self) -> Federation:
        return run(batchnorm_client(), small_data(), FeSEM(2), rounds=2)

    def test_it_predicts(self, federation: Federation) -> None:
        module = federation.client_module(2)
        assert isinstance(module, Classifier)
        batches = quiet_trainer().predict(module, datamodule=small_data().client(2))
        x, _ = small_data().samples(2, "test")
        torch.testing.assert_close(torch.cat(batches), module.eval()(x))

    def test_it_has_the_clients_weights_and_is_nobody_elses(self, federation: Federation) -> None:
        module = federation.client_module(2)
        assert_same(dict(module.state_dict()), federation.client_state(2))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        assert flat(federation.client_state(2)).any()

    def test_it_trains_on_under_a_stock_trainer(self, federation: Federation) -> None:
        module = federation.client_module(2).train()
        before = flat(module.state_dict())
        trainer = quiet_trainer(2)
        trainer.fit(module, datamodule=small_data().client(2))
        assert flat(module.state_dict()) != pytest.approx(before)
        assert 0 <= trainer.callback_metrics["val/acc"] <= 1
        trainer.test(module, datamodule=small_data().client(2), verbose=False)

    def test_it_saves_and_loads(self, federation: Federation, tmp_path: Path) -> None:
        module = federation.client_module(2).train()
        trainer = quiet_trainer(1)
        trainer.fit(module, datamodule=small_data().client(2))
        trainer.save_checkpoint(tmp_path / "client.ckpt")
        saved = torch.load(tmp_path / "client.ckpt", weights_only=True)["state_dict"]
        other = batchnorm_client(seed=1)
        other.load_state_dict(saved)
        assert_same(dict(other.state_dict()), dict(module.state_dict()))

    def test_it_is_ready_to_predict(self, federation: Federation) -> None:
        modules = federation.client_module(2).modules()
        assert not any(module.training for module in modules)
        assert federation.client.training

    def test_it_exports(self, federation: Federation) -> None:
        module = federation.client_module(2)
        x = torch.randn(5, FEATURES)
        program = torch.export.export(module, (x,))
        torch.testing.assert_close(program.module()(x), module(x))

    def test_it_is_copied_and_pickled(self, federation: Federation) -> None:
        module = federation.client_module(2)
        module.optimizer = torch.optim.SGD  # the test's partial is picklable, lambdas never are
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert_same(dict(other.state_dict()), dict(module.state_dict()))
        buffer = io.BytesIO()
        torch.save(module, buffer)
        buffer.seek(0)
        again = torch.load(buffer, weights_only=False)
        assert_same(dict(again.state_dict()), dict(module.state_dict()))

    @pytest.mark.parametrize("kind", [Classifier, ProximalClient])
    def test_a_client_trains_centrally(self, kind: type[Classifier]) -> None:
        client = linear_client(kind)
        before = flat(client.state_dict())
        trainer = quiet_trainer(2)
        trainer.fit(client, datamodule=small_data().centralized())
        assert flat(client.state_dict()) != pytest.approx(before)
        trainer.test(client, datamodule=small_data().centralized(), verbose=False)
        assert "test/acc" in trainer.callback_metrics

    def test_a_federation_leaves_the_users_trainer_alone(self, federation: Federation) -> None:
        assert federation.trainer.callbacks
        assert isinstance(federation, L.LightningModule)
        copied = copy.deepcopy(federation.client)
        assert copied._trainer is None


def test_a_stock_trainers_sanity_check_changes_nothing() -> None:
    checked = run(linear_client(), small_data(), FeSEM(2), 2, trainer={"num_sanity_val_steps": 2})
    plain = run(linear_client(), small_data(), FeSEM(2), 2)
    assert [entry.metrics for entry in checked.history] == [e.metrics for e in plain.history]
    for one, other in zip(checked.server_states(), plain.server_states(), strict=True):
        assert_same(one, other)


def test_names_of_checkpoints_count_rounds_and_tensorboard_has_no_empty_metric(tmp_path) -> None:
    saves = ModelCheckpoint(tmp_path / "saved", monitor="val/macro_acc", mode="max", save_top_k=-1)
    options = {"logger": TensorBoardLogger(tmp_path), "check_val_every_n_epoch": 2}
    run(linear_client(), small_data(), None, 4, saves, trainer=options)
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        "epoch=1-step=2.ckpt",
        "epoch=3-step=4.ckpt",
    ]
    scalars = read_events(next(tmp_path.rglob("version_0"))).scalars
    assert "hp_metric" not in scalars
    assert scalars["val/macro_acc"] == [1, 3]

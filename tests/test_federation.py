"""Failing clients, traffic, and what a federation reports."""

import copy
import csv
import gc
import os
import pickle
import sqlite3
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from tensordict import TensorDict
from torch import Tensor

import pflight
from pflight import Federation
from pflight.callbacks import L2GD, FedAvg, FedSGD, FeSEM, Local, ServerCallback
from pflight.datamodules import TensorClients
from pflight.errors import ClientError, ConfigurationError
from pflight.models import Classifier
from pflight.states.updates import ClientFailure, ClientUpdates
from tests.runs import (
    FEATURES,
    assert_same,
    batchnorm_client,
    dropout_client,
    flat,
    linear_client,
    owner,
    quiet_trainer,
    run,
    small_data,
)

pytestmark = pytest.mark.filterwarnings(  # pytest.warns hands it on as if it were ours
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"
)

SIZE = 4 * (FEATURES * 3 + 3)  # bytes of the linear client


def broken(client: int, how: str, data: TensorClients) -> type[Classifier]:
    """Return a client module that fails for one client, known by its samples."""
    of_client = owner(data, client)

    class Broken(Classifier):
        fails_late = False

        def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            loss = super().loss(batch)
            if of_client(batch[0]):
                self.fails_late = how in ("late", "huge")
                if how == "raises":
                    raise RuntimeError("out of battery")
                return loss * {"nan": torch.nan, "inf": torch.inf}.get(how, 1)
            return loss

        def on_train_end(self) -> None:
            if self.fails_late:
                if how == "huge":
                    next(self.parameters()).data.view(-1)[0] = 3e38
                    return
                raise ValueError("too late")

    return Broken


class _Helper:
    """A helper that locks, as a cache does."""

    def __init__(self) -> None:
        self.lock, self.owner = threading.Lock(), self

    def __call__(self, *_: Any) -> None:
        """Be a hook."""


HOW = {
    "raises": "RuntimeError: out of battery",
    "late": "ValueError: too late",
    "nan": "its result is NaN or infinite",
    "inf": "its result is NaN or infinite",
    "huge": r"its result is too large to be added up \(network",
}


class TestFailingClients:
    @pytest.mark.short("samples-*", "uniform-late")
    @pytest.mark.parametrize("how", HOW)
    @pytest.mark.parametrize("weighting", ["samples", "uniform"])
    def test_it_is_named_and_the_others_are_aggregated(self, how: str, weighting: str) -> None:
        counts = [5, 12, 7]
        data = small_data(counts)
        client = linear_client(broken(1, how, data))
        with pytest.warns(UserWarning, match=rf"round 0: client 1 failed: {HOW[how]}"):
            federation = run(client, data, FedAvg(weighting))
        (entry,) = federation.history
        assert (entry.clients, entry.failed) == ([0, 1, 2], [1])
        assert entry.metrics["clients/failed"] == 1
        assert entry.metrics["clients/sampled"] == 3
        assert (entry.bytes_down, entry.bytes_up) == (3 * SIZE, 2 * SIZE)
        others = [run(linear_client(), small_data(counts), Local()).client_state(i) for i in (0, 2)]
        weights = [5 / 12, 7 / 12] if weighting == "samples" else [0.5, 0.5]
        mean = weights[0] * flat(others[0]) + weights[1] * flat(others[1])
        assert flat(federation.server_states()[0]) == pytest.approx(mean, rel=1e-6, abs=1e-7)

    def test_it_fails_in_every_round_in_which_it_takes_part(self) -> None:
        data = small_data(cohort_size=3)
        client = linear_client(broken(3, "raises", data))
        with pytest.warns(UserWarning, match="client 3 failed") as warned:
            federation = run(client, data, FedAvg(), rounds=6)
        rounds = [entry.index for entry in federation.history if 3 in entry.clients]
        assert 0 < len(rounds) < 6
        assert [entry.index for entry in federation.history if entry.failed == [3]] == rounds
        named = [str(w.message) for w in warned if "client 3 failed" in str(w.message)]
        assert [int(text.split(":")[0].removeprefix("round ")) for text in named] == rounds

    def test_a_model_that_is_not_finite_is_never_taken(self, tmp_path: Path) -> None:
        class Overflowing(FedAvg):
            def aggregate(self, mean: TensorDict) -> TensorDict:
                return mean if self.clients.rounds != 1 else mean.apply(lambda x: x * 1e38 * 1e38)

        path = {"default_root_dir": tmp_path}
        with pytest.warns(UserWarning, match=r"round 1: .*weight.* would not be finite"):
            three = run(linear_client(), small_data(), Overflowing(), rounds=3, trainer=path)
        one = run(linear_client(), small_data(), Overflowing(), rounds=1)
        with pytest.warns(UserWarning, match="would not be finite"):
            two = run(linear_client(), small_data(), Overflowing(), rounds=2)
        assert_same(one.server_states()[0], two.server_states()[0])
        assert (flat(two.server_states()[0]) != flat(three.server_states()[0])).any()

    def test_a_server_that_diverges_ends_the_run(self) -> None:
        class Diverging(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                for group in self.param_groups:
                    group["params"][0].data *= torch.inf

        step, said = partial(Diverging, lr=1.0), "after round 0, the server's model is not finite"
        with pytest.raises(ConfigurationError, match=said):
            run(linear_client(), small_data(), FedAvg(), rounds=3, server_optimizer=step)

    @pytest.mark.filterwarnings("ignore")
    def test_if_all_fail_it_is_an_error_at_the_end(self) -> None:
        class Untrained(Classifier):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                raise ValueError("my bug")

        class Broken(Untrained):
            def validation_step(self, batch: Any, batch_idx: int) -> Any:
                raise ValueError("my bug")

            test_step = validation_step

            def predict_step(self, batch: Any, batch_idx: int) -> Any:
                raise ValueError("my bug")

        with pytest.raises(ClientError, match="all 12 trainings of clients failed"):
            run(linear_client(Untrained), small_data(), FedAvg(), rounds=2)
        with pytest.raises(ClientError, match="judged on its val samples: all 6 failed"):
            run(linear_client(Broken), small_data(), FedAvg(), rounds=2)
        trainer = quiet_trainer(0, FedAvg())
        federation = Federation(linear_client(Broken))
        for call, said in (
            (trainer.validate, "judged on its val samples: all 6 failed, first client 0: .*my bug"),
            (trainer.test, "judged on its test samples: all 6 failed"),
            (trainer.predict, "asked for its predictions: all 6 failed"),
        ):
            with pytest.raises(ClientError, match=f"no client could be {said}"):
                call(federation, datamodule=small_data())

    @pytest.mark.filterwarnings("ignore")
    def test_a_failed_client_keeps_no_copy_of_the_module(self) -> None:
        """Without a garbage collection, which may be late."""
        sizes: list[int] = []

        def tensors(*_: Any) -> None:
            found = (obj for obj in gc.get_objects() if isinstance(obj, Tensor))
            sizes.append(sum(t.numel() for t in found if t.shape == (3, 4001)))

        class Wide(Classifier):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                raise ValueError(f"{batch_idx}")

        wide = Wide(torch.nn.Linear(4001, 3), num_classes=3)
        x, y = torch.zeros(2, 4001), torch.zeros(2).long()
        after = LambdaCallback(on_train_epoch_end=tensors)
        gc.disable()
        try:
            with pytest.raises(ClientError):
                run(wide, TensorClients([(x, y)] * 2, num_classes=3), FedAvg(), 5, after)
        finally:
            gc.enable()
        assert len({*sizes[1:]}) == 1

    def test_a_buffer_that_is_not_finite_is_a_constant(self) -> None:
        class Masked(Classifier):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))

        federation = run(linear_client(Masked), small_data(), FedAvg(), rounds=2)
        assert [entry.failed for entry in federation.history] == [[], []]
        assert federation.history[0].bytes_up == 6 * SIZE
        assert_same(
            {"mask": federation.client_module(0).mask},
            {"mask": torch.full((2, 2), -torch.inf).triu(1)},
        )

    @pytest.mark.parametrize(
        ("attribute", "make", "message"),
        [
            ("lock", threading.Lock, r"client\.lock, of type lock, .*in the method that uses it"),
            ("log", lambda: {"a": [sqlite3.connect("")]}, r"client\.log\['a'\]\[0\], of type"),
            ("rows", lambda: (row for row in "ab"), r"client\.rows, of type generator"),
            ("helper", _Helper, r"client\.helper\.lock, of type lock"),
            ("scale", lambda: torch.ones(1, requires_grad=True) * 2, r"client\.scale.*detach\(\)"),
            ("tool", lambda: os, r"client\.tool, of type module, .*import it"),
        ],
    )
    @pytest.mark.parametrize("when", ["__init__", "setup"])
    @pytest.mark.filterwarnings("ignore::ResourceWarning")
    def test_what_can_not_be_copied_is_named(
        self, attribute: str, make: Callable[[], Any], message: str, when: str
    ) -> None:
        class Holds(Classifier):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                if when == "__init__":
                    setattr(self, attribute, make())

            def setup(self, stage: str) -> None:
                if when == "setup":
                    setattr(self, attribute, make())

        with pytest.raises(ConfigurationError, match=message):
            Federation(linear_client(Holds))

    def test_what_can_not_be_copied_is_named_in_parts_of_a_module(self) -> None:
        client = linear_client()
        client.register_buffer("scale", torch.ones(1, requires_grad=True) * 2)
        with pytest.raises(ConfigurationError, match=r"client\.scale.*detach\(\)"):
            Federation(client)
        client = linear_client()
        client.network.register_forward_hook(_Helper())
        with pytest.raises(ConfigurationError, match=r"client\.network\._forward_hooks\.\d+\.lock"):
            Federation(client)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            network = torch.nn.utils.weight_norm(torch.nn.Linear(4, 3))
        with pytest.raises(ConfigurationError, match=r"client\.network.*parametrizations"):
            Federation(Classifier(network, num_classes=3))

    def test_it_may_stop_the_run(self) -> None:
        data = small_data()
        client = linear_client(broken(2, "raises", data))
        with pytest.raises(
            RuntimeError, match=r"round 0: client 2 failed.*out of battery"
        ) as error:
            run(client, data, FedAvg(), on_client_error="raise")
        assert isinstance(error.value.__cause__, RuntimeError)

    def test_a_nan_may_stop_the_run(self) -> None:
        data = small_data()
        with pytest.raises(RuntimeError, match=r"round 0: client 2 failed.*NaN"):
            run(linear_client(broken(2, "nan", data)), data, FedAvg(), on_client_error="raise")

    @pytest.mark.parametrize(
        "callback", [FedAvg, FedSGD, Local, lambda: FeSEM(1), lambda: FeSEM(2)]
    )
    @pytest.mark.filterwarnings("ignore:.*round .*failed:UserWarning")
    def test_if_all_fail_the_server_stays_and_the_round_counts(self, callback: Any) -> None:
        class Hopeless(Classifier):
            def training_step(self, batch, batch_idx):
                raise RuntimeError("no")

        client = linear_client(Hopeless)
        federation = Federation(client)
        with pytest.raises(ClientError, match="all 18 trainings of clients failed"):
            quiet_trainer(3, callback()).fit(federation, datamodule=small_data())
        for state in federation.server_states():
            assert_same(state, dict(client.state_dict()))
        assert federation.trainer.global_step == 3
        assert [entry.failed for entry in federation.history] == [list(range(6))] * 3
        assert all(entry.bytes_up == 0 for entry in federation.history)
        assert_same(federation.client_state(0), dict(client.state_dict()))

    @pytest.mark.filterwarnings("ignore:.*round .*failed:UserWarning")
    def test_if_all_fail_once_there_are_clusters_nothing_is_matched(self) -> None:
        class FailsLater(Classifier):
            calls = 0

            def on_train_start(self):
                type(self).calls += 1
                assert type(self).calls <= 6

        callback = FeSEM(2, matching="bbp_map")
        federation = run(dropout_client(FailsLater), small_data(), callback, rounds=2)
        assert [len(entry.failed) for entry in federation.history] == [0, 6]
        assert callback.assignments.min() >= 0

    @pytest.mark.filterwarnings("ignore:.*round .*failed:UserWarning")
    def test_if_all_fail_a_servers_momentum_does_not_move_it_either(self) -> None:
        class FailsLater(Classifier):
            calls = 0

            def on_train_start(self):
                type(self).calls += 1
                assert type(self).calls <= 6

        def momentum(parameters):
            return torch.optim.SGD(parameters, lr=1.0, momentum=0.9)

        once = run(linear_client(), small_data(), FedAvg(), 1, server_optimizer=momentum)
        twice = run(linear_client(FailsLater), small_data(), FedAvg(), 2, server_optimizer=momentum)
        assert_same(once.server_states()[0], twice.server_states()[0])

    @pytest.mark.filterwarnings("ignore:.*round .*failed:UserWarning")
    def test_a_failure_does_not_touch_the_clients_that_follow(self) -> None:
        """Half-trained weights, optimizers or hooks of the failed client must not leak."""
        data = small_data(counts=[5, 12, 7])
        failing = run(dropout_client(broken(0, "late", data)), data, Local())
        healthy = run(dropout_client(), data, Local())
        for i in (1, 2):
            assert_same(failing.client_state(i), healthy.client_state(i))
        assert_same(failing.client_state(0), dict(dropout_client().state_dict()))

    @pytest.mark.filterwarnings("ignore:.*round .*failed:UserWarning")
    def test_a_failed_client_keeps_what_it_had(self) -> None:
        class SecondTime(Classifier):
            calls = 0

            def on_train_start(self):
                type(self).calls += 1
                assert type(self).calls <= 6

        first = run(linear_client(), small_data(), Local(), rounds=1, engine="sequential")
        both = run(linear_client(SecondTime), small_data(), Local(), rounds=2)
        for i in range(6):
            assert_same(both.client_state(i), first.client_state(i))

    @pytest.mark.filterwarnings("ignore:.*round .*failed:UserWarning")
    def test_fesem_leaves_it_out_of_clusters(self) -> None:
        data = small_data()
        callback = FeSEM(2)
        federation = run(linear_client(broken(4, "nan", data)), data, callback, rounds=3)
        assert callback.assignments[4] == -1
        assert sum(callback.assignments >= 0) == 5
        assert all(torch.isfinite(v).all() for s in federation.server_states() for v in s.values())

    @pytest.mark.parametrize("how", ["raises", "nan"])
    def test_fedsgd_leaves_it_out(self, how: str) -> None:
        data = small_data()
        with pytest.warns(UserWarning, match="round 0: client 2 failed"):
            federation = run(linear_client(broken(2, how, data)), data, FedSGD())
        assert federation.history[0].failed == [2]
        assert torch.isfinite(torch.from_numpy(flat(federation.server_states()[0]))).all()

    def test_a_mistake_of_the_user_is_no_failure_of_a_client(self) -> None:
        class NoOptimizer(Classifier):
            def configure_optimizers(self):
                return None

        with pytest.raises(ConfigurationError, match="configure_optimizers"):
            run(linear_client(NoOptimizer), small_data(), FedAvg())

    def test_ctrl_c_stops_the_run(self) -> None:
        class Interrupted(Classifier):
            def training_step(self, batch, batch_idx):
                raise KeyboardInterrupt

        with pytest.raises((KeyboardInterrupt, SystemExit)):
            run(linear_client(Interrupted), small_data(), FedAvg())


class TestClientsThatNeverAnswer:
    def test_they_count_as_failed_and_as_traffic_down(self) -> None:
        data = small_data(dropout=0.5)
        federation = run(linear_client(), data, FedAvg(), rounds=6)
        assert any(entry.failed for entry in federation.history)
        for entry in federation.history:
            assert entry.clients == list(range(6))
            assert len(entry.failed) < 6
            assert entry.bytes_down == 6 * SIZE
            assert entry.bytes_up == (6 - len(entry.failed)) * SIZE
            assert entry.metrics["clients/failed"] == len(entry.failed)

    def test_the_others_are_aggregated(self) -> None:
        data = small_data(dropout=0.5)
        federation = run(linear_client(), data, FedAvg("uniform"))
        (entry,) = federation.history
        local = run(linear_client(), small_data(), Local())
        answered = [i for i in entry.clients if i not in entry.failed]
        mean = sum(flat(local.client_state(i)) for i in answered) / len(answered)
        assert flat(federation.server_states()[0]) == pytest.approx(mean, rel=1e-6, abs=1e-7)

    def test_a_client_of_local_training_learns_nothing_then(self) -> None:
        data = small_data(dropout=0.5)
        federation = run(linear_client(), data, Local())
        for i in federation.history[0].failed:
            assert_same(federation.client_state(i), dict(linear_client().state_dict()))

    def test_the_initialisation_of_fesem_goes_on_without_them(self) -> None:
        data = small_data(dropout=0.3, seed=1)
        callback = FeSEM(2)
        federation = run(linear_client(), data, callback)
        failed = federation.history[0].failed
        assert failed
        assert (callback.assignments == -1).nonzero().flatten().tolist() == failed

    def test_a_round_of_ones_own_leaves_out_its_own_and_not_those_of_the_round_before(self) -> None:
        class AllAtOnce(FedAvg):
            def round(self, cohort: Tensor) -> None:
                self.on_round_start()
                for updates in list(self.clients.train(cohort, self.broadcast)):
                    self.receive(updates)
                self.set_pseudo_gradients()

        own, usual = (
            run(linear_client(), small_data(dropout=0.5), callback, rounds=3)
            for callback in (AllAtOnce(), FedAvg())
        )
        failed = [entry.failed for entry in own.history]
        assert failed == [entry.failed for entry in usual.history]
        assert len(set(map(tuple, failed))) == 3
        assert_same(own.server_states()[0], usual.server_states()[0])

    def test_it_does_not_depend_on_who_else_is_asked(self) -> None:
        class OneByOne(FedAvg):
            def round(self, cohort: Tensor) -> None:
                self.on_round_start()
                for client in cohort.split(1):
                    for updates in self.clients.train(client, self.broadcast):
                        self.receive(updates)
                self.set_pseudo_gradients()

        data = small_data(cohort_size=4, dropout=0.5)
        own, usual = (run(linear_client(), data, c, rounds=4) for c in (OneByOne(), FedAvg()))
        failed = [entry.failed for entry in own.history]
        assert failed == [entry.failed for entry in usual.history]
        assert any(failed)

    def test_all_are_there_between_the_rounds(self) -> None:
        federation = run(linear_client(), small_data(dropout=0.5), FedAvg())
        assert federation.history[0].failed
        assert federation.clients.current.answers(torch.arange(6)).all()

    def test_nor_does_a_client_answer_that_was_left_out_before_it_trained(self) -> None:
        class WithoutOne(FedAvg):
            def round(self, cohort: Tensor) -> None:
                self.clients.leave_out([ClientFailure(1, "no")], "to tell its loss")
                super().round(cohort)

            def receive(self, updates: ClientUpdates) -> None:
                assert 1 not in updates.clients
                super().receive(updates)

        with pytest.warns(UserWarning, match="round 0: client 1 failed to tell its loss: no"):
            federation = run(linear_client(), small_data(), WithoutOne())
        assert federation.history[0].failed == [1]


class TestFittedAgain:
    def test_a_callback_knows_the_federation_that_it_was_used_for_last(self) -> None:
        first, last = (
            run(linear_client(), small_data(), callback := FedAvg(), seed=0),
            run(linear_client(), small_data(), callback, seed=1),
        )
        assert last.server_states()
        for ask in (
            first.server_states,
            lambda: first.client_state(0),
            lambda: quiet_trainer(1, callback).fit(first, datamodule=small_data()),
            lambda: quiet_trainer(1, FedAvg()).fit(first, datamodule=small_data()),
        ):
            with pytest.raises(ConfigurationError, match="used for another federation since"):
                ask()

    @pytest.mark.parametrize("callback", [FedAvg, lambda: FeSEM(2), L2GD])
    def test_another_trainer_goes_on_with_the_next_round(self, callback: Any) -> None:
        data = small_data(cohort_size=3, dropout=0.2)
        whole = run(dropout_client(), data, callback(), rounds=4)
        federation = run(dropout_client(), data, server := callback(), rounds=2)
        quiet_trainer(2, server).fit(federation, datamodule=data)
        assert [entry.index for entry in federation.history] == [0, 1, 2, 3]
        assert federation.history == whole.history
        for left, right in zip(federation.server_states(), whole.server_states(), strict=True):
            assert_same(left, right)
        for i in range(6):
            assert_same(federation.client_state(i), whole.client_state(i))

    def test_the_log_goes_on_as_well(self, tmp_path: Path) -> None:
        logger = CSVLogger(tmp_path)
        federation = run(linear_client(), small_data(), FedAvg(), trainer={"logger": logger})
        quiet_trainer(1, federation.callback, logger=logger).fit(
            federation, datamodule=small_data()
        )
        with Path(logger.log_dir, "metrics.csv").open() as file:
            steps = {row["step"] for row in csv.DictReader(file)}
        assert steps == {"0", "1"}

    def test_from_a_checkpoint_it_goes_on_where_that_was_saved(self, tmp_path: Path) -> None:
        data, path = small_data(cohort_size=3), tmp_path / "two.ckpt"
        federation = run(linear_client(), data, FedAvg(), rounds=2)
        quiet_trainer(1, federation.callback).fit(federation, datamodule=data)
        federation.trainer.save_checkpoint(path)
        whole = run(linear_client(), data, FedAvg(), rounds=4)
        again = run(linear_client(), data, FedAvg(), rounds=2, ckpt_path=path)
        assert again.history == whole.history


class TestCommunication:
    def test_fedavg(self) -> None:
        federation = run(linear_client(), small_data(cohort_size=2), FedAvg(), rounds=3)
        for entry in federation.history:
            assert (entry.bytes_down, entry.bytes_up) == (2 * SIZE, 2 * SIZE)
        metrics = federation.trainer.callback_metrics
        assert metrics["communication/bytes_down"] == 2 * SIZE
        assert metrics["communication/total_bytes_up"] == 3 * 2 * SIZE
        assert metrics["communication/total_bytes_down"] == 3 * 2 * SIZE

    def test_fedsgd_sends_gradients_of_the_same_size(self) -> None:
        federation = run(linear_client(), small_data(cohort_size=2), FedSGD())
        assert federation.history[0].bytes_up == 2 * SIZE

    def test_fesem_sends_one_center_per_client(self) -> None:
        federation = run(linear_client(), small_data(cohort_size=2), FeSEM(3), rounds=2)
        assert [entry.bytes_down for entry in federation.history] == [6 * SIZE, 2 * SIZE]
        assert [entry.bytes_up for entry in federation.history] == [6 * SIZE, 2 * SIZE]

    def test_double_precision_counts_double(self) -> None:
        federation = run(linear_client(), small_data(), FedAvg(), trainer={"precision": "64-true"})
        assert federation.history[0].bytes_down == 6 * 2 * SIZE

    def test_reset_buffers_do_not_travel(self) -> None:
        federation = run(batchnorm_client(), small_data(), FedAvg(buffers="reset"))
        size = 4 * sum(p.numel() for p in batchnorm_client().parameters())
        assert federation.history[0].bytes_up == federation.history[0].bytes_down == 6 * size


class TestStepsOfOnesOwn:
    @pytest.mark.parametrize("engine", ["sequential", "vectorized"])
    def test_clients_are_judged_by_them(self, engine: str) -> None:
        class Shares(Classifier):
            def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
                self.log("val/share", self(batch[0]).softmax(1)[:, 0].mean())

        data = small_data()
        federation = run(linear_client(Shares), data, Local(), engine=engine)
        values = federation.client_metrics("val")
        assert values.keys() == {"share", "num_samples"}
        for i in range(6):
            model, x = federation.client_module(i), data.samples(i, "val")[0]
            expected = float(model(x).softmax(1)[:, 0].mean().detach())
            assert values["share"][i] == pytest.approx(expected, rel=1e-5)

    @pytest.mark.parametrize("engine", ["sequential", "vectorized"])
    def test_they_predict(self, engine: str) -> None:
        class Chooses(Classifier):
            def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int = 0) -> Tensor:
                return self(batch[0]).argmax(1)

        data = small_data()
        federation = run(linear_client(Chooses), data, Local(), engine=engine)
        (chunk,) = quiet_trainer().predict(federation, datamodule=data)
        assert [client for client, _ in chunk] == list(range(6))
        for i, batches in chunk:
            expected = federation.client_module(i)(data.samples(i, "test")[0]).argmax(1)
            assert torch.equal(torch.cat(batches), expected)


class TestWhatIsPublic:
    def test_the_signature_of_the_contract(self) -> None:
        data = TensorClients(
            [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(6)],
            num_classes=2,
            cohort_size=5,
            batch_size=None,
        )
        client = pflight.models.Classifier(
            torch.nn.Linear(4, 2), num_classes=2, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
        )
        federation = pflight.Federation(client, local_epochs=1)
        quiet_trainer(3, pflight.callbacks.FedAvg()).fit(federation, datamodule=data)
        assert federation.server_states()[0]["network.weight"].shape == (2, 4)
        assert [entry.index for entry in federation.history] == [0, 1, 2]
        assert all(len(entry.clients) == 5 for entry in federation.history)

    def test_states_are_copies(self) -> None:
        federation = run(linear_client(), small_data(), FedAvg())
        for state in (federation.server_states()[0], federation.client_state(0)):
            state["network.weight"].zero_()
            assert not state["network.weight"].requires_grad
        assert flat(federation.server_states()[0])[:12].any()

    def test_the_engine_is_chosen_by_name(self) -> None:
        one = run(linear_client(), small_data(), engine="sequential")
        other = run(linear_client(), small_data(), engine="auto")
        assert_same(one.server_states()[0], other.server_states()[0])

    def test_a_seed_gives_the_same_run_and_another_seed_another(self) -> None:
        runs = [run(dropout_client(), small_data(), rounds=2, seed=seed) for seed in (1, 1, 2)]
        states = [federation.server_states()[0] for federation in runs]
        assert_same(states[0], states[1])
        assert flat(states[0]) != pytest.approx(flat(states[2]))

    def test_a_server_callback_of_ones_own_takes_two_methods(self) -> None:
        class Last(ServerCallback):
            """Keeps the model of the last client."""

            def receive(self, updates):
                self.last = updates.states[-1]

            def set_pseudo_gradients(self):
                self.server.set_pseudo_gradient(0, self.last)

        federation = run(linear_client(), small_data(), Last())
        local = run(linear_client(), small_data(), Local())
        torch.testing.assert_close(federation.server_states()[0], local.client_state(5))

    def test_history_is_a_record_of_python_numbers(self) -> None:
        federation = run(linear_client(), small_data(), FeSEM(2), rounds=2)
        for entry in federation.history:
            assert all(type(value) in (int, float) for value in entry.metrics.values())
            assert all(type(client) is int for client in entry.clients)
        assert pickle.loads(pickle.dumps(federation.history)) == federation.history
        assert copy.deepcopy(federation.history) == federation.history

    def test_hundred_clients_of_one_sample(self) -> None:
        data = small_data(counts=[1] * 100, cohort_size=10)
        federation = run(linear_client(), data, FeSEM(3), rounds=2)
        assert len(federation.history[0].clients) == 100

    def test_many_rounds_reduce_the_loss(self) -> None:
        federation = run(linear_client(), small_data(), FedAvg(), rounds=30)
        losses = [entry.metrics["train/loss"] for entry in federation.history]
        assert losses[-1] < losses[0]

    def test_a_federation_that_never_ran_says_so(self) -> None:
        federation = Federation(linear_client())
        with pytest.raises(ConfigurationError, match="unknown client 0"):
            federation.client_state(0)
        with pytest.raises(ConfigurationError, match="evaluation"):
            federation.client_metrics("val")


def chunks(federation: Federation, whole: int | None, count: int) -> list[int]:
    """Return the sizes of the chunks in which some clients train."""
    sent = federation.server_callback.broadcast
    updates = federation.clients.train(torch.arange(count), sent, multiple_of=whole)
    return [len(chunk.clients) for chunk in updates]


@pytest.mark.parametrize("whole", [None, 16])
def test_a_rank_without_clients_has_no_chunks(whole: int | None) -> None:
    assert chunks(run(linear_client(), small_data()), whole, 0) == []


def test_chunks_are_even_or_of_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pflight.clients._CHUNK_BYTES", 0)  # only the engine asks for more
    data = small_data(counts=[2] * 50, cohort_size=None)
    federation = run(linear_client(), data, engine="vectorized", clients_at_once=40)
    assert [chunks(federation, whole, 50) for whole in (None, 16)] == [[25, 25], [32, 18]]

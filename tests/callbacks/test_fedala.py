"""FedALA (Zhang et al. 2023, algorithm 1)."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from pflight import Federation
from pflight.callbacks import FedALA, FedAvg
from pflight.datamodules import TensorClients
from pflight.errors import ConfigurationError
from pflight.local_client import LocalClient, LocalWork
from pflight.models import Classifier, ProximalClient
from pflight.models.client_methods import AdaptiveMixture
from pflight.models.client_methods.fedala import Mixing
from pflight.states.updates import ClientUpdates
from tests import reference
from tests.runs import (
    CLASSES,
    FEATURES,
    A,
    B,
    N,
    QuadraticClient,
    assert_same,
    batches_of,
    batchnorm_client,
    flat,
    linear_client,
    quadratic_client,
    run,
    sgd,
    small_data,
    watched,
    world_q,
)


def weights(federation: Federation, client: int) -> dict[str, Tensor]:
    """Return the weights that a client keeps."""
    kept = federation.clients.memory.state_dict()["fedala"][client]
    return {name: value for name, value in kept.items() if name.startswith("weights.")}


def test_two_rounds_of_world_q_by_hand() -> None:
    callback = FedALA(start_epochs=1)
    one = run(quadratic_client(), world_q(), callback, 1)
    assert flat(one.server_states()[0]) == pytest.approx([0.25, 0.15], abs=1e-12)
    # Client 0 has trained to (0.1, -0.2). Its gradient at the server's model is (-0.75, 2.3):
    # weights 1 + 0.75 * 0.15, clipped to 1, and 1 - 2.3 * 0.35.
    two = run(quadratic_client(), world_q(), FedALA(start_epochs=1), 2)
    kept = two.clients.memory.state_dict()["fedala"][0]
    assert kept["weights.network.theta"].tolist() == pytest.approx([1, 0.195], abs=1e-12)
    mixture = 0.25, -0.2 + 0.195 * 0.35
    trained = mixture[0] + 0.075, mixture[1] - 0.2 * (mixture[1] + 1)
    assert kept["own.network.theta"].tolist() == pytest.approx(trained, abs=1e-12)
    assert kept["times"] == 2
    server = flat(two.server_states()[0])
    expected = trained[0] + (server[0] - trained[0]), trained[1] + 0.195 * (server[1] - trained[1])
    assert flat(two.client_state(0)) == pytest.approx(expected, abs=1e-12)


def fedala(rounds: int, lr: float, start_epochs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return server's model, own models and weights of world Q, by full batches."""
    a, b, count = np.array(A), np.array(B), np.array(N)
    theta, own, weight = np.zeros(2), np.zeros((3, 2)), np.ones((3, 2))
    for round_ in range(rounds):
        for i in range(3):
            start = theta
            if round_:
                for _ in range(start_epochs if round_ == 1 else 1):
                    start = own[i] + (theta - own[i]) * weight[i]
                    slope = a[i] * (start - b[i]) * (theta - own[i])
                    weight[i] = np.clip(weight[i] - lr * slope, 0, 1)
                start = own[i] + (theta - own[i]) * weight[i]
            own[i] = start - 0.1 * a[i] * (start - b[i])
        theta = (count[:, None] * own).sum(0) / count.sum()
    return theta, own, weight


@pytest.mark.parametrize(("lr", "start_epochs"), [(1.0, 10), (0.02, 3)])
def test_world_q_over_several_rounds(lr: float, start_epochs: int) -> None:
    callback = FedALA(lr=lr, share=1.0, start_epochs=start_epochs)
    federation = run(quadratic_client(), world_q(), callback, 5)
    theta, own, weight = fedala(5, lr, start_epochs)
    assert flat(federation.server_states()[0]) == pytest.approx(theta, abs=1e-12)
    assert (weight < 1).any()
    assert ((weight > 0) & (weight < 1)).any() == (lr < 1)
    for i in range(3):
        assert flat(weights(federation, i)) == pytest.approx(weight[i], abs=1e-12)
        mixture = own[i] + (theta - own[i]) * weight[i]
        assert flat(federation.client_state(i)) == pytest.approx(mixture, abs=1e-12)


def test_weights_are_learned_on_mini_batches_in_the_order_of_the_round() -> None:
    """Softmax regression in NumPy, second round, share of one half."""
    data = small_data([12], dtype=torch.float64)
    kept: list[np.ndarray] = []

    class Recording(AdaptiveMixture):
        def learn(self, work: LocalWork, clients: Tensor, sent: Any, before: Any) -> Any:
            # One client alone is the server: give it something to mix.
            names = self.mixed(work.layout)
            for name in names:
                before[f"own.{name}"] = before[f"own.{name}"] + before["times"][0]
            kept.append(flat({n: before[f"own.{n}"] for n in names}))
            return super().learn(work, clients, sent, before)

    client = linear_client(double=True)
    first = flat(run(client, data, FedALA(), 1).server_states()[0])
    callback = FedALA()
    callback.outer_method = Recording(lr=0.7, share=0.5, start_epochs=1)
    federation = run(client, data, callback, 2)
    world = reference.SoftmaxRegression([data.samples(0, "train")], CLASSES)
    weight = np.ones_like(first)
    for batch in batches_of(data, 1, 0, 1)[:2]:  # 2 of 3
        slope = world.gradient(kept[1] + (first - kept[1]) * weight, 0, batch)
        weight = np.clip(weight - 0.7 * slope * (first - kept[1]), 0, 1)
    assert flat(weights(federation, 0)) == pytest.approx(weight, rel=1e-12, abs=1e-14)
    assert (weight < 1).any()


class TestReductions:
    @pytest.mark.short("shared")
    @pytest.mark.parametrize("buffers", ["shared", "local"])
    def test_without_a_step_it_is_fedavg(self, buffers: Any) -> None:
        data = small_data(cohort_size=3)
        one, other = (
            run(batchnorm_client(), data, callback, 5, local_epochs=2)
            for callback in (FedALA(3, lr=0.0, buffers=buffers), FedAvg(buffers=buffers))
        )
        for i in range(6):
            assert_same(one.client_state(i), other.client_state(i))
        assert_same(one.server_states()[0], other.server_states()[0])
        assert one.history[-1].bytes_down == other.history[-1].bytes_down
        assert one.history[-1].bytes_up == other.history[-1].bytes_up

    def test_for_a_single_client_it_is_fedavg(self) -> None:
        """The server's model is the client's own, so that there is nothing to mix."""
        data = small_data([20], dtype=torch.float64)
        one, other = (run(linear_client(double=True), data, c, 4) for c in (FedALA(), FedAvg()))
        assert_same(one.client_state(0), other.client_state(0))


class TestLayers:
    def test_lower_layers_are_the_servers(self) -> None:
        federation = run(batchnorm_client(), small_data(), FedALA(layers=1), 4)
        server = federation.server_states()[0]
        for i in range(6):
            state = federation.client_state(i)
            for name, value in state.items():
                same = torch.equal(value, server[name])
                assert same == (name not in ("network.3.weight", "network.3.bias"))
            assert state["network.1.num_batches_tracked"].dtype == torch.int64
            names = ["weights.network.3.weight", "weights.network.3.bias"]
            assert list(weights(federation, i)) == names

    def test_more_layers_are_mixed(self) -> None:
        federation = run(batchnorm_client(), small_data(), FedALA(layers=3), 4)
        server, state = federation.server_states()[0], federation.client_state(0)
        assert not torch.equal(state["network.0.weight"], server["network.0.weight"])
        assert torch.equal(state["network.1.running_mean"], server["network.1.running_mean"])

    def test_more_than_there_are(self) -> None:
        with pytest.raises(ConfigurationError, match=r"layers=4 exceeds .* \(3\)"):
            run(batchnorm_client(), small_data(), FedALA(layers=4))


def test_weights_stay_in_the_unit_interval_and_lower_the_loss() -> None:
    data = small_data(batch_size=None, dtype=torch.float64)
    federation = run(linear_client(double=True), data, FedALA(start_epochs=30, share=1.0), 3)
    clients = torch.arange(6)
    callback = federation.callback
    mixed = federation.clients.losses(clients, callback.personalize(clients))
    server = federation.clients.losses(clients, callback.broadcast(clients))
    assert mixed.mean() < server.mean()
    for i in range(6):
        values = flat(weights(federation, i))
        assert values.min() >= 0
        assert values.max() <= 1
    assert any((flat(weights(federation, i)) < 1).any() for i in range(6))


def test_clients_are_judged_by_the_servers_model_until_they_come_back() -> None:
    data = small_data(cohort_size=2, holdout_clients=0.34)
    federation = run(linear_client(), data, FedALA(), 3)
    times = torch.zeros(6, dtype=torch.long)
    for entry in federation.history:
        times[entry.clients] += 1
    assert {0, 1, 2} <= {*times.tolist()}
    server = federation.server_states()[0]
    for i, count in enumerate(times.tolist()):
        state = federation.client_state(i)
        same = all(torch.equal(value, server[name]) for name, value in state.items())
        assert same == (count < 2)


def test_the_first_time_takes_more_batches_and_a_share_of_them() -> None:
    steps: list[tuple[int, int]] = []

    class Counting(QuadraticClient):
        def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            if self.training and not self.network.theta.is_leaf:  # while weights are learned
                steps.append((round_[0], len(batch[1])))
            return super().loss(batch)

    class Rounds(FedALA):
        def on_round_start(self) -> None:
            super().on_round_start()
            round_[0] += 1

    round_ = [0]
    x, y = world_q().samples(1, "train")
    train = [(x[:1].repeat(10, 1), y[:1].repeat(10))] * 2
    data = TensorClients(train, num_classes=2, batch_size=2)  # 5 batches
    client = Counting(quadratic_client().network, num_classes=2, optimizer=sgd(0.1))
    run(client, data, Rounds(share=0.5, start_epochs=3), 3)
    learned = [sum(1 for index, _ in steps if index == t) for t in (1, 2, 3)]
    assert learned == [0, 2 * 8, 2 * 2]  # 7.5 and 2.5 batches, of either client


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*round .*failed:UserWarning")
def test_a_client_that_fails_keeps_everything() -> None:
    def fail(c: LocalClient) -> None:
        if c.num_samples == 9 and broken:
            raise RuntimeError("out of battery")

    class Breaking(FedALA):
        def on_round_start(self) -> None:
            super().on_round_start()
            if self.clients.rounds == 2:
                broken.append(True)

    broken: list[bool] = []
    long = run(watched(linear_client(), fail), small_data(), Breaking(), 4)
    broken.clear()
    short = run(watched(linear_client(), fail), small_data(), Breaking(), 2)
    held, before = (f.clients.memory.state_dict()["fedala"][3] for f in (long, short))
    assert_same(held, before)
    assert not torch.equal(weights(long, 2)["weights.network.bias"], torch.ones(CLASSES))
    assert long.clients.memory.state_dict()["fedala"][2]["times"] == 4


def test_penalties_vanish_while_weights_are_learned() -> None:
    one, other = (
        run(linear_client(kind, **options), small_data(), FedALA(), 2)
        for kind, options in ((ProximalClient, {"mu": 0.0}), (Classifier, {}))
    )
    for i in range(6):
        assert_close(weights(one, i), weights(other, i), rtol=1e-5, atol=1e-6)
    pulled = run(linear_client(ProximalClient, mu=5.0), small_data(), FedALA(), 3)
    assert np.isfinite(flat(pulled.client_state(0))).all()


def is_of_client_4(module: Mixing, batch: tuple[Tensor, Tensor]) -> bool:
    return bool((small_data().samples(4, "train")[0] == batch[0][0]).all(dim=1).any())


@pytest.mark.filterwarnings("ignore:round 1. client 4 failed to learn its weights:UserWarning")
class TestAClientThatCannotLearnItsWeights:
    """Number 4 is as others in the first round, in which nobody learns any."""

    @pytest.mark.parametrize("engine", ["sequential", "vectorized"])
    def test_it_is_left_out(self, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
        step = Mixing.training_step

        def fail(module: Mixing, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            if is_of_client_4(module, batch):
                raise OSError("disk")
            return step(module, batch, batch_idx)

        received: list[list[int]] = []

        class Watched(FedALA):
            def receive(self, updates: ClientUpdates) -> None:
                received.append(updates.clients.tolist())
                super().receive(updates)

        monkeypatch.setattr(Mixing, "training_step", fail)
        federation = run(linear_client(), small_data(), Watched(), 2, engine=engine)
        assert [entry.failed for entry in federation.history] == [[], [4]]
        assert received == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 5]]
        assert np.isfinite(flat(federation.client_state(4))).all()
        assert np.isfinite(flat(federation.server_states()[0])).all()

    def test_it_has_no_more_time_than_for_its_training(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        step = Mixing.training_step

        def hang(module: Mixing, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            if is_of_client_4(module, batch):
                time.sleep(6)
            return step(module, batch, batch_idx)

        monkeypatch.setattr(Mixing, "training_step", hang)
        federation = run(linear_client(), small_data(), FedALA(), 2, client_timeout=2.0)
        assert [entry.failed for entry in federation.history] == [[], [4]]


def test_the_federations_own_client_is_untouched() -> None:
    client = linear_client()
    before = {name: value.clone() for name, value in client.state_dict().items()}
    run(client, small_data(), FedALA(), 3)
    assert_same(dict(client.state_dict()), before)
    assert all(p.requires_grad for p in client.parameters())
    assert sum(p.numel() for p in client.parameters()) == FEATURES * CLASSES + CLASSES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"start_epochs": 0}, "start_epochs must be at least 1, got 0"),
        ({"lr": -1.0}, r"lr must be at least 0, got -1\.0"),
        ({"lr": float("nan")}, "lr must be a finite number, got nan"),
        ({"share": 0.0}, r"share must be in \(0, 1\], got 0\.0"),
        ({"share": 1.1}, r"share must be in \(0, 1\], got 1\.1"),
        ({"weighting": "mine"}, "weighting must be"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        FedALA(**options)

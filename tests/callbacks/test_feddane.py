"""FedDANE (section 1.5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from pflight import Federation
from pflight.callbacks import FedDANE, FedProx, FedSGD
from pflight.datamodules import TensorClients
from pflight.engines import ClientUpdates
from pflight.errors import ConfigurationError
from pflight.local_client import LocalClient
from pflight.method import OWN
from pflight.models import Classifier, ProximalClient
from pflight.models.client_methods import Dane
from tests import reference
from tests.runs import (
    CLASSES,
    assert_same,
    batches_of,
    batchnorm_client,
    dropout_client,
    flat,
    linear_client,
    quadratic_client,
    run,
    samples,
    sgd,
    shared,
    small_data,
    world_q,
)


class Recorded(FedDANE):
    """Keeps what arrives, phase by phase: the sets of clients, and what they sent."""

    def setup_server(self) -> None:
        super().setup_server()
        self.sets: list[list[int]] = []
        self.arrived: list[TensorDict] = []

    def receive(self, updates: ClientUpdates) -> None:
        super().receive(updates)
        self.sets.append(updates.clients.tolist())
        self.arrived.append(updates.states)


def test_q4() -> None:
    federation = run(quadratic_client(), world_q(), Recorded(mu=1.0), local_steps=2)
    gradients, models = (states["network.theta"] for states in federation.callback.arrived)
    weights = torch.tensor([1, 3, 2]).double() / 6
    assert (weights @ gradients).tolist() == pytest.approx([-2.5, -1.5], abs=1e-12)
    for row, expected in enumerate([(0.45, 0.255), (0.425, 0.27), (0.45, 0.27)]):
        assert models[row].tolist() == pytest.approx(expected, abs=1e-12)
    assert shared(federation) == pytest.approx([0.4375, 0.2675], abs=1e-12)


def test_q4b_with_one_full_step_of_the_same_set_it_is_fedsgd() -> None:
    callback = FedDANE(same_set=True, mu=1.0)
    federation = run(quadratic_client(), world_q(), callback, local_steps=1)
    assert shared(federation) == pytest.approx([0.25, 0.15], abs=1e-12)
    data = small_data(batch_size=None, cohort_size=3, dtype=torch.float64)
    client = linear_client(double=True, optimizer=sgd(0.2))
    corrected = run(client, data, FedDANE(same_set=True, mu=3.0), rounds=4, local_steps=1)
    plain = run(linear_client(double=True), data, FedSGD(lr=0.2), rounds=4)
    assert shared(corrected) == pytest.approx(shared(plain), rel=1e-12, abs=1e-14)


def twins() -> TensorClients:
    """Return four clients with the same samples."""
    return TensorClients([samples(8, 1, torch.float64)] * 4, num_classes=CLASSES, batch_size=None)


@pytest.mark.parametrize("make", [twins, lambda: small_data([9], torch.float64, batch_size=None)])
def test_alike_clients_and_full_batches_are_fedprox(make: Any) -> None:
    corrected = run(linear_client(double=True), make(), FedDANE(mu=0.5), 3, local_steps=3)
    proximal = run(linear_client(double=True), make(), FedProx(mu=0.5), 3, local_steps=3)
    assert shared(corrected) == pytest.approx(shared(proximal), rel=1e-12, abs=1e-14)


def feddane(
    world: reference.World,
    theta: np.ndarray,
    sets: list[list[int]],
    batches: reference.Batches,
    lr: float,
    mu: float,
    weighting: str,
) -> np.ndarray:
    """Return the server's weights; the sets are those of a first and a second phase in turn."""

    def mean(values: list[np.ndarray], clients: list[int]) -> np.ndarray:
        weights = world.counts[clients] if weighting == "samples" else None
        return np.average(values, axis=0, weights=weights)

    for round_ in range(len(sets) // 2):
        first, second = sets[2 * round_ : 2 * round_ + 2]
        full = [world.gradient(theta, i, np.arange(n)) for i, n in enumerate(world.counts)]
        gradient = mean([full[i] for i in first], first)
        models = []
        for i in second:
            w = theta.copy()
            for batch in batches(round_, i):
                own = world.gradient(w, i, batch)
                w -= lr * (own + gradient - full[i] + mu * (w - theta))
            models.append(w)
        theta = mean(models, second)
    return theta


@pytest.mark.short("samples-False", "uniform-True")
@pytest.mark.parametrize("same_set", [False, True])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_several_rounds_with_partial_participation(same_set: bool, weighting: str) -> None:
    data = small_data(cohort_size=3, dtype=torch.float64)
    client, callback = linear_client(double=True), Recorded(same_set, weighting, mu=0.7)
    federation = run(client, data, callback, rounds=4, local_epochs=2)
    expected = feddane(
        reference.SoftmaxRegression([data.samples(i, "train") for i in range(6)], CLASSES),
        flat(linear_client(double=True).state_dict()),
        callback.sets,
        lambda t, i: batches_of(data, t, i, 2),
        lr=0.1,
        mu=0.7,
        weighting=weighting,
    )
    assert shared(federation) == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_the_second_set_is_drawn_anew_among_the_same_clients() -> None:
    data = small_data([4] * 12, cohort_size=3, holdout_clients=0.25)
    callback = Recorded()
    federation = run(linear_client(), data, callback, 8)
    first, second = callback.sets[::2], callback.sets[1::2]
    assert first == [data.cohorts.sample(round_).tolist() for round_ in range(8)]
    assert all(len(clients) == 3 for clients in second)
    assert sum(one != other for one, other in zip(first, second, strict=True)) > 4
    assert len({tuple(clients) for clients in second}) > 4
    assert {client for drawn in second for client in drawn} <= set(data.train_clients.tolist())
    for entry, one, other in zip(federation.history, first, second, strict=True):
        assert set(entry.clients) == {*one, *other}


def test_the_same_set_trains_again() -> None:
    callback = Recorded(same_set=True)
    run(linear_client(), small_data(cohort_size=3), callback, 4)
    assert callback.sets[::2] == callback.sets[1::2]


@pytest.mark.short("True")
@pytest.mark.parametrize("same_set", [False, True])
def test_the_model_travels_down_once_to_each_client(same_set: bool) -> None:
    data = small_data([4] * 12, cohort_size=3)
    callback = Recorded(same_set)
    federation = run(linear_client(), data, callback, 6)
    size = sum(4 * p.numel() for p in linear_client().parameters())
    newcomers = 0
    for entry, one, other in zip(
        federation.history, callback.sets[::2], callback.sets[1::2], strict=True
    ):
        new = len(set(other) - set(one))
        assert entry.bytes_down == (3 + new) * size + 3 * size
        assert entry.bytes_up == 6 * size
        newcomers += new
    assert (newcomers > 0) != same_set


def test_gradients_change_no_buffers() -> None:
    data = small_data([8, 12])  # two and three batches
    federation = run(batchnorm_client(), data, Recorded(same_set=True), local_steps=2)
    state, (entry,) = federation.server_states()[0], federation.history
    template = batchnorm_client().state_dict()
    model = sum(value.nbytes for value in template.values())
    gradient = sum(p.nbytes for p in batchnorm_client().parameters())
    assert entry.bytes_down == entry.bytes_up == 2 * (model + gradient)
    assert state["network.1.num_batches_tracked"] == 2
    once = run(batchnorm_client(), data, FedDANE(), local_steps=1).server_states()[0]
    plain = run(batchnorm_client(), data, FedProx(mu=0.1), local_steps=1).server_states()[0]
    for name in ("network.1.running_mean", "network.1.running_var"):
        torch.testing.assert_close(once[name], plain[name])


def test_nothing_of_the_correction_stays() -> None:
    federation = run(linear_client(), small_data(cohort_size=3), FedDANE(), 2)
    own = {n: v for n, v in federation.server.tensors(0).items() if n.startswith(OWN)}
    assert set(own) == {f"{OWN}correction.network.weight", f"{OWN}correction.network.bias"}
    assert not any(value.any() for value in own.values())
    assert_same(federation.client_state(0), federation.server_states()[0])


def test_in_finetuning_it_is_a_plain_client() -> None:
    callback = FedDANE(mu=1.0)
    federation = run(quadratic_client(), world_q(), callback, local_steps=2, finetune_epochs=1)
    tuned = federation.client_state(2)["network.theta"].tolist()
    assert tuned == pytest.approx([0.4375 - 0.1 * 2.4375, 0.2675 + 0.1 * 3.7325])


@pytest.mark.short("True")
@pytest.mark.parametrize("same_set", [False, True])
def test_a_resumed_run_is_an_uninterrupted_one(same_set: bool, tmp_path: Path) -> None:
    def fit(rounds: int, **options: Any) -> Federation:
        data = small_data(cohort_size=3, dropout=0.3)
        return run(dropout_client(), data, FedDANE(same_set), rounds, **options)

    fit(2).trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed, whole = fit(4, ckpt_path=tmp_path / "half.ckpt"), fit(4)
    assert_same(resumed.server_states()[0], whole.server_states()[0])
    assert [entry.clients for entry in resumed.history] == [e.clients for e in whole.history]


class FailsInFirstPhase(Dane):
    """A client whose gradient can't be taken, if it is the one with 9 samples."""

    def loss(self, c: LocalClient, batch: Any) -> Any:
        if c.num_samples == 9 and not any(value.any() for value in c.own.values()):
            raise RuntimeError("out of battery")
        return super().loss(c, batch)


def fails_in_first_phase(**options: Any) -> Recorded:
    callback = Recorded(**options)
    callback.client_method = FailsInFirstPhase()
    return callback


@pytest.mark.filterwarnings("ignore:.*round .*failed:UserWarning")
def test_a_client_without_a_gradient_does_not_train() -> None:
    callback = fails_in_first_phase(same_set=True)
    federation = run(linear_client(), small_data(), callback, 2)
    assert callback.sets == [[0, 1, 2, 4, 5]] * 4
    assert [set(entry.failed) for entry in federation.history] == [{3}, {3}]
    assert np.isfinite(shared(federation)).all()


@pytest.mark.filterwarnings("ignore:.*round .*failed:UserWarning")
def test_a_round_without_gradients_leaves_the_server_as_it_is() -> None:
    data = small_data([9, 9])
    federation = run(linear_client(), data, fails_in_first_phase(), 2, all_may_fail=True)
    assert federation.callback.sets == [[], []]
    assert_same(federation.server_states()[0], dict(linear_client().state_dict()))


def test_what_does_not_fit_is_refused_before_training() -> None:
    class Manual(Classifier):
        automatic_optimization = False

    with pytest.raises(
        ConfigurationError, match=r"FedDANE has the client method Dane\(.*ProximalClient names"
    ):
        run(linear_client(ProximalClient), small_data(), FedDANE())
    with pytest.raises(ConfigurationError, match="Manual with manual optimization"):
        run(linear_client(Manual), small_data(), FedDANE())
    with pytest.raises(ConfigurationError, match="FedDANE: weighting must be"):
        FedDANE(weighting="size")
    with pytest.raises(ConfigurationError, match="FedDANE: mu must be at least 0"):
        FedDANE(mu=-1.0)

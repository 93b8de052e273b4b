"""APPLE (section C.7)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pflight import Federation
from pflight.callbacks import APPLE, FedSGD, Local
from pflight.datamodules import TensorClients
from pflight.errors import ConfigurationError
from pflight.method import OWN
from pflight.models import Classifier
from tests.runs import (
    ENGINES,
    Normalised,
    assert_same,
    batchnorm_client,
    dropout_client,
    flat,
    judged,
    linear_client,
    parameters,
    quadratic_client,
    run,
    sgd,
    shared,
    small_data,
    statistics,
    world_q,
)

CORES = torch.tensor([[1.0, 0], [0, 1], [1, 1]], dtype=torch.double)


class Knowing(APPLE):
    """Starts with cores of its own."""

    def setup_server(self) -> None:
        super().setup_server()
        self.stored.tensors()["network.theta"].copy_(CORES)


def weights(federation: Federation, client: int) -> list[float]:
    return federation.callback.weights(torch.tensor([client]))[0].tolist()


def core(federation: Federation, client: int) -> np.ndarray:
    models = federation.callback.models_of(torch.tensor([client]))[0]
    return flat({name: models[name] for name in models.keys()})  # noqa: SIM118


STEPS = [  # core, weights and model after them
    ([1.008333, -0.061111], [0.216667, 0.133333, 0.016667], None),
    ([1.024905, -0.110371], [0.305184, -0.075685, -0.118366], [0.194419, -0.227734]),
]


@ENGINES
@pytest.mark.parametrize("steps", [1, 2])
def test_one_client(steps: int, engine: str) -> None:
    """With half of the penalty, as where it has faded to that."""
    federation = run(
        quadratic_client(),
        world_q(),
        Knowing(weights_lr=0.1, mu=0.5),
        local_steps=steps,
        engine=engine,
    )
    if steps == 2:
        assert federation.clients.attached_engine.obstacle is None if engine != "sequential" else 1
    c, p, w = STEPS[steps - 1]
    assert core(federation, 0) == pytest.approx(c, abs=1e-6)
    assert weights(federation, 0) == pytest.approx(p, abs=1e-6)
    if w is not None:
        assert judged(federation, 0) == pytest.approx(w, abs=1e-6)


def test_where_it_starts() -> None:
    federation = run(quadratic_client(), world_q(), Knowing(), 0)
    assert judged(federation, 0) == pytest.approx([0.5, 5 / 6], abs=1e-12)
    assert weights(federation, 1) == pytest.approx([1 / 6, 1 / 2, 1 / 3])


def test_the_schedules() -> None:
    assert APPLE(schedule="cosine", penalty_rounds=10).fade(3) == pytest.approx(0.793893, abs=1e-6)
    assert APPLE(penalty_rounds=10).fade(3) == pytest.approx(0.125893, abs=1e-6)
    for schedule in ("cosine", "exponential"):
        fades = [APPLE(schedule=schedule, penalty_rounds=10).fade(r) for r in (0, 10, 11)]
        assert fades == [1, 0, 0]


@pytest.mark.short("sequential")
@ENGINES
def test_three_rounds(engine: str) -> None:
    case = Normalised.make()
    callback = APPLE(weights_lr=0.05, mu=0.4, schedule="cosine", penalty_rounds=2)
    federation = case.run(callback, engine=engine)
    shares = case.world.counts / case.world.counts.sum()
    cores = np.tile(case.theta, (6, 1))
    p, norms, own = np.tile(shares, (6, 1)), {}, {}
    for round_, entry in enumerate(federation.history):
        trained = {}
        for i in entry.clients:
            bank, norm = cores.copy(), norms.get(i, case.statistics)
            for batch in case.batches(round_, i):
                w, weight = p[i] @ bank, p[i, i]
                norm = 0.9 * norm + 0.1 * case.world.statistics(w, i, batch)
                g = case.world.gradient(w, i, batch)
                p[i] = p[i] - 0.05 * (bank @ g + [0.4, 0.2, 0][round_] * (p[i] - shares))
                bank[i] = bank[i] - 0.1 * weight * g
            trained[i], norms[i], own[i] = bank[i], norm, p[i] @ bank
        for i, c in trained.items():
            cores[i] = c
    for i in range(6):
        assert core(federation, i) == pytest.approx(cores[i], rel=1e-9, abs=1e-11)
        assert weights(federation, i) == pytest.approx(p[i], rel=1e-9, abs=1e-11)
        state = federation.client_state(i)
        expected = own.get(i, shares @ cores)
        assert parameters(state) == pytest.approx(expected, rel=1e-9, abs=1e-11)
        assert statistics(state) == pytest.approx(norms.get(i, case.statistics), rel=1e-9)
    assert len(own) < 6 or any(len(set(entry.clients)) < 6 for entry in federation.history)


class Alone(APPLE):
    """Gives each client a weight of 1 for its own core."""

    def broadcast(self, clients):
        sent = super().broadcast(clients)
        sent[f"{OWN}shares"] = sent[f"{OWN}self"]
        return sent


def test_with_weights_of_ones_own_it_is_local() -> None:
    case = Normalised.make()
    options = {"client": batchnorm_client(optimizer=sgd(0.1, momentum=0.9))}
    one, other = (case.run(callback, **options) for callback in (Alone(weights_lr=0), Local()))
    for i in range(6):
        states = one.client_state(i), other.client_state(i)
        torch.testing.assert_close(*states, rtol=1e-9, atol=1e-11)


def test_with_equal_weights_and_one_step_it_is_fedsgd() -> None:
    data = world_q(counts=[2, 2, 2])
    callback = APPLE(weights_lr=0.0)
    run(quadratic_client(lr=0.3), data, callback, local_steps=1)
    ids = torch.arange(3)
    cores = callback.models_of(ids)["network.theta"]
    other = run(quadratic_client(), data, FedSGD(lr=0.1, weighting="uniform"))
    assert cores.mean(dim=0).tolist() == pytest.approx([1 / 6, 0.1], abs=1e-12)
    assert shared(other) == pytest.approx([1 / 6, 0.1], abs=1e-12)


def test_newcomers_mix_by_shares_and_are_in_no_mixture() -> None:
    data = small_data(holdout_clients=0.34, dtype=torch.float64)
    federation = run(batchnorm_client().double(), data, APPLE(weights_lr=0.1), 2)
    new = data.new_clients.tolist()
    for i in range(6):
        assert (np.array(weights(federation, i))[new] == 0).all()
    counts = data.num_samples("train").double().numpy()
    counts[new] = 0
    mixed = (counts / counts.sum()) @ np.array([core(federation, i) for i in range(6)])
    state = federation.client_state(new[0])
    assert parameters(state) == pytest.approx(mixed, rel=1e-9)


@pytest.mark.short("sequential")
@ENGINES
def test_only_so_many_clients_hold_all_cores_at_once(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, sizes = small_data(cohort_size=5, dtype=torch.float64), []

    class Counting(APPLE):
        def receive(self, updates):
            sizes.append(len(updates.clients))
            super().receive(updates)

    def fit() -> Federation:
        client = batchnorm_client().double()
        return run(client, data, Counting(weights_lr=0.1), 2, engine=engine)

    whole = fit()
    assert sizes == [5, 5]
    bank = 6 * 8 * sum(p.numel() for p in batchnorm_client().parameters())
    monkeypatch.setattr("pflight.callbacks.methods.apple._HELD", 2 * bank)
    sizes.clear()
    parts = fit()
    assert sorted(sizes) == [1, 1, 2, 2, 2, 2]
    for i in range(6):
        states = parts.client_state(i), whole.client_state(i)
        torch.testing.assert_close(*states, rtol=1e-9, atol=1e-11)


def test_what_travels() -> None:
    """The others' cores down, at first also the own one and the shares; the own one up."""
    data = small_data(cohort_size=3)
    federation = run(batchnorm_client(), data, APPLE(), 2)
    size = 4 * sum(p.numel() for p in batchnorm_client().parameters())
    first, second = federation.history
    assert first.bytes_down == 3 * (6 * size + 6 * 4)
    new = len({*second.clients} - {*first.clients})
    assert second.bytes_down == 3 * 5 * size + new * (size + 6 * 4)
    assert first.bytes_up == second.bytes_up == 3 * size


def test_a_resumed_run_knows_cores_and_weights(tmp_path: Path) -> None:
    def train(rounds: int, **options: Any) -> Federation:
        callback = APPLE(weights_lr=0.1, penalty_rounds=3)
        return run(dropout_client(), small_data(cohort_size=3), callback, rounds, **options)

    train(2).trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed, whole = train(4, ckpt_path=tmp_path / "half.ckpt"), train(4)
    for i in range(6):
        assert weights(resumed, i) == weights(whole, i)
        assert_same(resumed.client_state(i), whole.client_state(i))


def test_the_weights_move() -> None:
    federation = run(batchnorm_client(), small_data(cohort_size=3), APPLE(weights_lr=0.1), 2)
    (client, *_) = federation.history[0].clients
    shares = federation.callback.shares.tolist()
    assert np.abs(np.array(weights(federation, client)) - shares).max() > 1e-3


def test_bad_options_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="APPLE: weights_lr must be at least 0, got -1"):
        APPLE(weights_lr=-1)
    with pytest.raises(ConfigurationError, match="APPLE: schedule must be 'exponential' or 'cos"):
        APPLE(schedule="linear")


def test_another_number_of_clients_is_refused() -> None:
    callback = APPLE()
    federation = run(quadratic_client(), world_q(), callback, 1)
    data = TensorClients([world_q().samples(0, "train")] * 2, num_classes=2, batch_size=None)
    with pytest.raises(ConfigurationError, match="was set up for 3 clients, the data has 2"):
        federation.trainer.fit(federation, datamodule=data)


class EverySecond(Classifier):
    """A module that trains on every second batch."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        return None if batch_idx % 2 else self.loss(batch)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_module_of_ones_own_sees_the_index_of_a_batch_and_may_skip_it() -> None:
    data = small_data((14,), dtype=torch.float64)
    apple, alone = (
        run(linear_client(EverySecond, double=True), data, callback, 2)
        for callback in (APPLE(weights_lr=0.0), Local())
    )
    assert apple.history[-1].failed == []
    assert judged(apple, 0) == pytest.approx(judged(alone, 0), rel=1e-12)

"""APFL (section 4.2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from pflight import Federation
from pflight.callbacks import APFL, FedAvg, Local
from pflight.errors import ConfigurationError
from pflight.local_client import LocalWork
from pflight.method import PERSONAL
from pflight.models.client_methods import Personal
from pflight.states.state import entries
from tests import reference
from tests.runs import (
    CLASSES,
    ENGINES,
    batches_of,
    batchnorm_client,
    flat,
    judged,
    linear_client,
    quadratic_client,
    run,
    sgd,
    shared,
    small_data,
    world_q,
)


class OwnFromOne(Personal):
    def before_training(self, work: LocalWork, clients: Tensor, sent: TensorDict) -> TensorDict:
        ones = {f"{PERSONAL}{name}": torch.ones_like(value) for name, value in entries(sent)}
        return super().before_training(work, clients, sent.clone(recurse=False).update(ones))


class FromOne(APFL):
    """Lets the clients' own models start at 1 everywhere."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.client_method = OwnFromOne(self.client_method.personal)


def own(federation: Federation, client: int) -> dict[str, torch.Tensor]:
    """Return a client's own model, with the names of the network."""
    clients = torch.tensor([client])
    kept = federation.clients.start_states(clients, federation.callback.broadcast(clients))[0]
    return {n.removeprefix(PERSONAL): v for n, v in kept.items() if n.startswith(PERSONAL)}


@ENGINES
def test_p2(engine: str) -> None:
    data = world_q([0])
    callback = FromOne(alpha=0.25)
    federation = run(quadratic_client(), data, callback, 1, local_steps=2, engine=engine)
    assert shared(federation) == pytest.approx([0.19, -0.36], abs=1e-15)  # w has moved once a batch
    assert flat(own(federation, 0)) == pytest.approx([1.0355078125, 0.88328125], abs=1e-15)
    assert judged(federation, 0) == pytest.approx([0.401376953125, -0.0491796875], abs=1e-15)


@ENGINES
def test_p2b_alpha_adapts_on_the_first_batch_and_counts_from_the_second(engine: str) -> None:
    def fit(steps: int) -> tuple[Federation, APFL]:
        callback = FromOne(alpha=0.25, alpha_lr=0.1)
        client, data = quadratic_client(), world_q([0])
        return run(client, data, callback, 1, local_steps=steps, engine=engine), callback

    _, callback = fit(1)
    assert callback.mixing(torch.tensor([0])).tolist() == pytest.approx([0.075], abs=1e-15)
    federation, callback = fit(2)
    assert callback.mixing(torch.tensor([0])).tolist() == pytest.approx([0.075], abs=1e-15)
    v, w = np.array([1.01875, 0.9375]), np.array([0.1, -0.2])  # after the first batch, with 0.25
    v = v - 0.1 * 0.075 * np.array([1, 2]) * (0.075 * v + 0.925 * w - [1, -1])
    assert flat(own(federation, 0)) == pytest.approx(v, abs=1e-15)


def test_alpha_adapts_once_a_round_and_stays_between_0_and_1() -> None:
    callback = FromOne(alpha=0.25, alpha_lr=100.0)
    run(quadratic_client(), world_q([0]), callback, 1)
    assert callback.mixing(torch.tensor([0])).tolist() == [0.0]
    callback = FromOne(alpha=0.25, alpha_lr=100.0)
    run(quadratic_client(), world_q([1]), callback, 1)
    assert callback.mixing(torch.tensor([0])).tolist() == [1.0]  # away from b it would be 0


def apfl(
    world: reference.World,
    theta: np.ndarray,
    cohorts: list[list[int]],
    batches: reference.Batches,
    alpha: float,
    alpha_lr: float,
) -> tuple[np.ndarray, dict[int, np.ndarray], dict[int, float]]:
    """Return the shared weights, the clients' own ones and what they mix by, with steps of 0.1."""
    models: dict[int, np.ndarray] = {}
    alphas: dict[int, float] = {}
    for round_, cohort in enumerate(cohorts):
        sent = []
        for i in cohort:
            w, v, mixing = theta, models.get(i, theta), alphas.get(i, alpha)
            for step, batch in enumerate(batches(round_, i)):
                gradient = world.gradient(mixing * v + (1 - mixing) * w, i, batch)
                slope = gradient @ (v - w)
                w, v = w - 0.1 * world.gradient(w, i, batch), v - 0.1 * mixing * gradient
                if step == 0:
                    mixing = min(max(mixing - alpha_lr * slope, 0.0), 1.0)
            models[i], alphas[i] = v, mixing
            sent.append(w)
        theta = np.mean(sent, axis=0)
    return theta, models, alphas


@pytest.mark.short("*-sequential")
@ENGINES
@pytest.mark.parametrize("alpha_lr", [None, 2.0])
def test_several_rounds_with_partial_participation(alpha_lr: float | None, engine: str) -> None:
    data = small_data(cohort_size=3, dtype=torch.float64)
    client, callback = linear_client(double=True), APFL(alpha=0.75, alpha_lr=alpha_lr)
    federation = run(client, data, callback, rounds=6, local_epochs=2, engine=engine)
    theta, models, alphas = apfl(
        reference.SoftmaxRegression([data.samples(i, "train") for i in range(6)], CLASSES),
        flat(linear_client(double=True).state_dict()),
        [entry.clients for entry in federation.history],
        lambda t, i: batches_of(data, t, i, 2),
        0.75,
        alpha_lr or 0.0,
    )
    assert shared(federation) == pytest.approx(theta, rel=1e-12, abs=1e-14)
    for i in range(6):
        v, mixing = models.get(i, theta), alphas.get(i, 0.75)
        assert callback.mixing(torch.tensor([i])).item() == pytest.approx(mixing, abs=1e-12)
        expected = mixing * v + (1 - mixing) * theta
        assert judged(federation, i) == pytest.approx(expected, rel=1e-12, abs=1e-13)
    assert (set(alphas.values()) == {0.75}) == (alpha_lr is None)


@pytest.mark.short("*-sequential")
@ENGINES
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_the_shared_model_moves_once_a_step(alpha: float, engine: str) -> None:
    """As FedAvg's, whatever is mixed, also with what momentum remembers."""
    data, momentum = small_data(dtype=torch.float64), sgd(0.1, momentum=0.9)
    client = linear_client(double=True, optimizer=momentum)
    federation = run(client, data, APFL(alpha=alpha), 3, engine=engine)
    plain = run(linear_client(double=True, optimizer=momentum), data, FedAvg("uniform"), 3)
    assert shared(federation) == pytest.approx(shared(plain), rel=1e-12, abs=1e-14)


def test_alone_with_alpha_1_and_the_server_with_alpha_0() -> None:
    data = small_data(dtype=torch.float64)
    fedavg = run(linear_client(double=True), data, FedAvg("uniform"), 3)
    local = run(linear_client(double=True), data, Local(), 3)
    alone = run(linear_client(double=True), data, APFL(alpha=1.0), 3)
    follows = run(linear_client(double=True), data, APFL(alpha=0.0), 3)
    for i in range(6):
        assert judged(alone, i) == pytest.approx(judged(local, i), rel=1e-12, abs=1e-14)
        assert judged(follows, i) == pytest.approx(shared(fedavg), rel=1e-12, abs=1e-14)


def test_buffers_are_mixed_and_counters_are_the_clients_own() -> None:
    federation = run(batchnorm_client(), small_data(), APFL("samples", alpha=0.25), 2)
    server, state = federation.server_states()[0], federation.client_state(1)
    personal, mean = own(federation, 1), "network.1.running_mean"
    assert not torch.equal(personal[mean], server[mean])
    torch.testing.assert_close(state[mean], 0.25 * personal[mean] + 0.75 * server[mean])
    counter = "network.1.num_batches_tracked"
    assert state[counter] == personal[counter] == 6  # 12 samples, twice
    plain = run(batchnorm_client(), small_data(), FedAvg(), 2).server_states()[0]
    for name, value in plain.items():
        torch.testing.assert_close(server[name], value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 1.5}, r"alpha must be in \[0, 1\], got 1.5"),
        ({"alpha_lr": 0.0}, "alpha_lr must be over 0, got 0.0"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"APFL: {message}"):
        APFL(**options)

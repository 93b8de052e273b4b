"""APFL (section 4.2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pflight import Federation
from pflight.callbacks import APFL, FedAvg, Local
from pflight.errors import ConfigurationError
from pflight.models import APFLClient
from tests import reference
from tests.runs import (
    CLASSES,
    ENGINES,
    Point,
    QuadraticClient,
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


class APFLQuadratic(APFLClient, QuadraticClient):
    """A client of world Q with a mixture."""


def quadratic(own: float = 0.0, **options: Any) -> APFLClient:
    client = APFLQuadratic(Point(), num_classes=2, optimizer=sgd(0.1), **options)
    client.personal.tensors()["theta"].data.fill_(own)
    return client


def own(federation: Federation, client: int) -> np.ndarray:
    state = federation.client_state(client)
    return flat({name: value for name, value in state.items() if name.startswith("personal.")})


@ENGINES
def test_p2(engine: str) -> None:
    data = world_q([0])
    client = quadratic(own=1.0, alpha=0.25)
    federation = run(client, data, APFL(), 1, local_steps=2, engine=engine)
    assert shared(federation) == pytest.approx([0.19, -0.36], abs=1e-15)  # w has moved once a batch
    assert own(federation, 0) == pytest.approx([1.0355078125, 0.88328125], abs=1e-15)
    assert judged(federation, 0) == pytest.approx([0.401376953125, -0.0491796875], abs=1e-15)


@ENGINES
def test_p2b_alpha_adapts_on_the_first_batch_and_counts_from_the_second(engine: str) -> None:
    callback = APFL()
    client = quadratic(own=1.0, alpha=0.25, alpha_lr=0.1)
    run(client, world_q([0]), callback, 1, local_steps=1, engine=engine)
    assert callback.mixing(torch.tensor([0])).tolist() == pytest.approx([0.075], abs=1e-15)
    federation = run(client, world_q([0]), callback := APFL(), 1, local_steps=2, engine=engine)
    assert callback.mixing(torch.tensor([0])).tolist() == pytest.approx([0.075], abs=1e-15)
    v, w = np.array([1.01875, 0.9375]), np.array([0.1, -0.2])  # after the first batch, with 0.25
    v = v - 0.1 * 0.075 * np.array([1, 2]) * (0.075 * v + 0.925 * w - [1, -1])
    assert own(federation, 0) == pytest.approx(v, abs=1e-15)


def test_alpha_adapts_once_a_round_and_stays_between_0_and_1() -> None:
    callback = APFL()
    run(quadratic(own=1.0, alpha=0.25, alpha_lr=100.0), world_q([0]), callback, 1)
    assert callback.mixing(torch.tensor([0])).tolist() == [0.0]
    callback = APFL()
    run(quadratic(own=1.0, alpha=0.25, alpha_lr=100.0), world_q([1]), callback, 1)
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


@ENGINES
@pytest.mark.parametrize("alpha_lr", [None, 2.0])
def test_several_rounds_with_partial_participation(alpha_lr: float | None, engine: str) -> None:
    data, callback = small_data(cohort_size=3, dtype=torch.float64), APFL()
    client = linear_client(APFLClient, double=True, alpha=0.75, alpha_lr=alpha_lr)
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


@ENGINES
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_the_shared_model_moves_once_a_step(alpha: float, engine: str) -> None:
    """As FedAvg's, whatever is mixed, also with what momentum remembers."""
    data, momentum = small_data(dtype=torch.float64), sgd(0.1, momentum=0.9)
    client = linear_client(APFLClient, double=True, alpha=alpha, optimizer=momentum)
    federation = run(client, data, APFL(), 3, engine=engine)
    plain = run(linear_client(double=True, optimizer=momentum), data, FedAvg("uniform"), 3)
    assert shared(federation) == pytest.approx(shared(plain), rel=1e-12, abs=1e-14)


def test_alone_with_alpha_1_and_the_server_with_alpha_0() -> None:
    data = small_data(dtype=torch.float64)
    fedavg = run(linear_client(double=True), data, FedAvg("uniform"), 3)
    local = run(linear_client(double=True), data, Local(), 3)
    alone = run(linear_client(APFLClient, double=True, alpha=1.0), data, APFL(), 3)
    follows = run(linear_client(APFLClient, double=True, alpha=0.0), data, APFL(), 3)
    for i in range(6):
        assert judged(alone, i) == pytest.approx(judged(local, i), rel=1e-12, abs=1e-14)
        assert judged(follows, i) == pytest.approx(shared(fedavg), rel=1e-12, abs=1e-14)


def test_buffers_are_mixed_and_counters_are_the_clients_own() -> None:
    client = batchnorm_client(APFLClient, alpha=0.25)
    federation = run(client, small_data(), APFL("samples"), 2)
    server, state = federation.server_states()[0], federation.client_state(1)
    mean, own_mean = (f"{part}.1.running_mean" for part in ("network", "personal"))
    assert not torch.equal(state[own_mean], server[mean])
    torch.testing.assert_close(state[mean], 0.25 * state[own_mean] + 0.75 * server[mean])
    counter = "network.1.num_batches_tracked"
    assert state[counter] == state["personal.1.num_batches_tracked"] == 6  # 12 samples, twice
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
def test_options_out_of_range(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"APFLClient: {message}"):
        linear_client(APFLClient, **options)


def test_it_needs_no_client_of_its_own() -> None:
    one = run(quadratic_client(), world_q(), APFL(alpha=1.0), 2)
    alone = run(quadratic_client(), world_q(), Local(), 2)
    for i in range(3):
        assert judged(one, i) == pytest.approx(judged(alone, i))

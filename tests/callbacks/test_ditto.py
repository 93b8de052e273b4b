"""Ditto: a personal model that is pulled to what the server sent."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pflight.callbacks import Ditto, FedAvg, Local
from pflight.errors import ConfigurationError
from pflight.models import ProximalClient
from tests import reference
from tests.runs import (
    CLASSES,
    batches_of,
    flat,
    judged,
    linear_client,
    network,
    quadratic_client,
    run,
    shared,
    small_data,
    world_q,
)


def test_by_hand() -> None:
    """Client 0: a = (1, 2), b = (1, -1), lambda = 0.5, two steps from 0, then two from theta."""
    one = run(quadratic_client(), world_q([0]), Ditto(lam=0.5), 1, local_steps=2)
    # v = (0.1, -0.2); then v - 0.1 ((v - 1, 2 (v + 1)) + 0.5 v) = (0.185, -0.35)
    assert judged(one, 0) == pytest.approx([0.185, -0.35], abs=1e-15)
    # w = (0.1, -0.2), then w - 0.1 (w - 1, 2 (w + 1)) = (0.19, -0.36)
    assert shared(one) == pytest.approx([0.19, -0.36], abs=1e-15)
    two = run(quadratic_client(), world_q([0]), Ditto(lam=0.5), 2, local_steps=2)
    v, theta = np.array([0.185, -0.35]), np.array([0.19, -0.36])
    for _ in range(2):
        v = v - 0.1 * (np.array([1, 2]) * (v - [1, -1]) + 0.5 * (v - theta))
    assert judged(two, 0) == pytest.approx(v, abs=1e-15)


@pytest.mark.short("samples")
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_several_rounds_with_partial_participation(weighting: str) -> None:
    data = small_data(cohort_size=3, dtype=torch.float64)
    callback = Ditto(weighting, lam=0.4)
    federation = run(linear_client(double=True), data, callback, rounds=5, local_epochs=2)
    world = reference.SoftmaxRegression([data.samples(i, "train") for i in range(6)], CLASSES)
    cohorts = [entry.clients for entry in federation.history]
    theta = flat(linear_client(double=True).state_dict())
    models: dict[int, np.ndarray] = {}
    for round_, cohort in enumerate(cohorts):
        for i in cohort:
            v = models.get(i, theta)
            for batch in batches_of(data, round_, i, 2):
                v = v - 0.1 * (world.gradient(v, i, batch) + 0.4 * (v - theta))
            models[i] = v
        batches = [batches_of(data, round_, i, 2) for i in range(6)]
        theta = reference.fedavg(
            world, theta, [cohort], lambda _, i, held=batches: held[i], 0.1, weighting
        )
    assert shared(federation) == pytest.approx(theta, rel=1e-12, abs=1e-14)
    assert 0 < len(models) <= 6
    for i in range(6):
        expected = models.get(i, theta)
        assert judged(federation, i) == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_the_shared_model_is_that_of_fedavg_whatever_the_personal_ones() -> None:
    data = small_data(cohort_size=3, dtype=torch.float64)
    plain = run(linear_client(double=True), data, FedAvg(), 4)
    for lam in (0.0, 3.0):
        ditto = run(linear_client(double=True), data, Ditto(lam=lam), 4)
        assert shared(ditto) == pytest.approx(shared(plain), rel=1e-12, abs=1e-14)


def test_without_a_pull_personal_models_are_trained_alone() -> None:
    data = small_data(dtype=torch.float64)
    ditto = run(linear_client(double=True), data, Ditto(lam=0.0), 3)
    local = run(linear_client(double=True), data, Local(), 3)
    for i in range(6):
        expected = network(local.client_state(i))
        assert network(ditto.client_state(i)) == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_a_stronger_pull_keeps_them_closer() -> None:
    distances = []
    for lam in (0.0, 1.0, 5.0):
        federation = run(quadratic_client(), world_q(), Ditto(lam=lam), 4, local_steps=3)
        distances.append(np.linalg.norm(network(federation.client_state(2)) - shared(federation)))
    assert distances[0] > distances[1] > distances[2] > 0


def test_options_and_clients_that_do_not_fit() -> None:
    with pytest.raises(ConfigurationError, match="Ditto: lam must be at least 0, got -1"):
        Ditto(lam=-1)
    for callback in (
        Ditto(),
        Ditto(lam=0.1),
    ):  # neither is for the client's own client method to replace
        with pytest.raises(
            ConfigurationError, match=r"Ditto has the client method .*, but ProximalClient names"
        ):
            run(linear_client(ProximalClient), small_data(), callback)

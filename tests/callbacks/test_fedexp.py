"""FedExP (section C.4)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pflight.callbacks import FedAvg, FedExP
from pflight.errors import ConfigurationError
from tests.runs import (
    ENGINES,
    Normalised,
    assert_same,
    batchnorm_client,
    failing,
    judged,
    parameters,
    quadratic_client,
    run,
    shared,
    small_data,
    statistics,
    world_q,
)

E2 = {  # weighting -> steps of two rounds, the server's models after them, and what is judged
    "uniform": (
        [2.728246, 18.957643],
        [(0.809380, 0.536555), (2.648644, 1.755843)],
        [(0.809380, 0.536555), (1.729012, 1.146199)],
    ),
    "samples": (
        [1.540845, 3.082320],
        [(0.685676, 0.444277), (1.476103, 1.034026)],
        [(0.685676, 0.444277), (1.080890, 0.739152)],
    ),
}


@ENGINES
@pytest.mark.parametrize("weighting", E2)
def test_e2(weighting: str, engine: str) -> None:
    steps, models, means = E2[weighting]
    for rounds in (1, 2):
        callback = FedExP(weighting=weighting)
        federation = run(
            quadratic_client(), world_q(), callback, rounds, local_steps=2, engine=engine
        )
        assert shared(federation) == pytest.approx(models[rounds - 1], abs=1e-6)
        assert judged(federation, 1) == pytest.approx(means[rounds - 1], abs=1e-6)
        taken = [entry.metrics["server/step"] for entry in federation.history]
        assert taken == pytest.approx(steps[:rounds], abs=1e-6)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_three_rounds(weighting: str) -> None:
    case = Normalised.make(cohort_size=5)
    federation = case.run(FedExP(1e-4, 0.9, weighting))
    theta, norms, iterates = case.theta, case.statistics, []
    for round_, entry in enumerate(federation.history):
        counts = case.world.counts[entry.clients]
        p = counts / counts.sum() if weighting == "samples" else np.full(5, 1 / 5)
        ends = [case.train(round_, i, theta, norms) for i in entry.clients]
        moves = np.array([w - theta for w, _ in ends])
        mean = p @ moves
        step = max(1, p @ (moves**2).sum(1) / (2 * (mean @ mean + 1e-4 * 0.9**round_)))
        theta, norms = theta + step * mean, p @ np.array([s for _, s in ends])
        iterates.append(theta)
        assert entry.metrics["server/step"] == pytest.approx(step, rel=1e-9)
    assert federation.history[-1].metrics["server/step"] > 1
    state, own = federation.server_states()[0], federation.client_state(0)
    assert parameters(state) == pytest.approx(theta, rel=1e-9, abs=1e-11)
    assert parameters(own) == pytest.approx((iterates[-1] + iterates[-2]) / 2, rel=1e-9, abs=1e-11)
    for tensors in (state, own):
        assert statistics(tensors) == pytest.approx(norms, rel=1e-9, abs=1e-11)


@pytest.mark.short("uniform")
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_with_a_large_eps_the_server_is_fedavgs(weighting: str) -> None:
    data = small_data(cohort_size=3, dtype=torch.float64)
    one, other = (
        run(batchnorm_client().double(), data, callback, 3, local_epochs=2)
        for callback in (FedExP(1e6, weighting=weighting), FedAvg(weighting))
    )
    expected = other.server_states()[0]
    torch.testing.assert_close(one.server_states()[0], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("data", [small_data(cohort_size=1), small_data([7])])
def test_with_one_participant_it_takes_fedavgs_step(data) -> None:
    federation = run(batchnorm_client(), data, FedExP(1e-9), 4)
    assert {entry.metrics["server/step"] for entry in federation.history} == {1}


def test_with_identical_clients_it_takes_fedavgs_step() -> None:
    federation = run(quadratic_client(), world_q([1, 1], [3, 3]), FedExP(1e-9), 3)
    assert {entry.metrics["server/step"] for entry in federation.history} == {1}


@pytest.mark.filterwarnings("ignore:.*client 3 failed:UserWarning")
def test_a_round_without_answers_leaves_both_models() -> None:
    cohorts = [[0], [1], [3], [3]]
    data = small_data(cohort_size=1)
    data.cohorts.sample = lambda round_index: torch.tensor(cohorts[round_index])
    models = []
    for rounds in (2, 4):
        federation = run(batchnorm_client(failing()), data, FedExP(), rounds)
        models.append((federation.server_states()[0], federation.client_state(0)))
    assert [entry.failed for entry in federation.history] == [[], [], [3], [3]]
    for before, after in zip(*models, strict=True):
        assert_same(before, after)
    assert not torch.equal(*(state["network.0.weight"] for state in models[1]))


def test_fine_tuning_starts_from_the_mean() -> None:
    federation = run(quadratic_client(), world_q(), FedExP(), 2, local_steps=2, finetune_epochs=1)
    start = np.array([1.729012, 1.146199])
    expected = start - 0.1 * np.array([2, 1]) * (start - [3, 1])
    assert judged(federation, 1) == pytest.approx(expected, abs=1e-6)


def test_traffic_is_that_of_fedavg_and_both_models_are_judged() -> None:
    data = small_data(cohort_size=3)
    one, other = (run(batchnorm_client(), data, c, 3) for c in (FedExP(), FedAvg()))
    for left, right in zip(one.history, other.history, strict=True):
        assert (left.bytes_down, left.bytes_up) == (right.bytes_down, right.bytes_up)
    metrics = one.history[-1].metrics
    assert metrics["val/loss"] != metrics["val/server/loss"]


def test_bad_options_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="FedExP: eps must be over 0, got 0"):
        FedExP(eps=0)
    with pytest.raises(ConfigurationError, match=r"FedExP: eps_decay must be in \(0, 1\], got 2"):
        FedExP(eps_decay=2)

"""FedDyn (section C.2)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pflight import Federation
from pflight.callbacks import FedAvg, FedDyn, FedProx
from pflight.callbacks.methods.feddyn import Dynamic
from pflight.errors import ConfigurationError
from pflight.local_client import LocalClient
from tests import own_methods
from tests.callbacks.test_scaffold import drawn_first
from tests.runs import (
    ENGINES,
    Normalised,
    assert_same,
    batchnorm_client,
    dropout_client,
    failing_at_the_end,
    flat,
    linear_client,
    parameters,
    quadratic_client,
    run,
    shared,
    small_data,
    statistics,
    world_q,
)


def lead(federation: Federation) -> np.ndarray:
    return flat(federation.callback.lead.tensors())


def own(federation: Federation, client: int) -> np.ndarray:
    """Return a client's g."""
    callback, ids = federation.callback, torch.tensor([client])
    kept = federation.clients.start_states(ids, callback.broadcast(ids))
    return flat({name: kept[name][0] for name in callback.private})


@ENGINES
def test_d1(engine: str) -> None:
    options = {"local_steps": 2, "engine": engine}
    one = run(quadratic_client(), world_q(), FedDyn(a=0.5), 1, **options)
    assert shared(one) == pytest.approx([0.5766666667, 0.3833333333], abs=1e-9)
    assert lead(one) == pytest.approx([0.2883333333, 0.1916666667], abs=1e-9)
    assert own(one, 0) == pytest.approx([-0.0925, 0.175], abs=1e-12)
    assert one.callback.bytes_kept == 2 * 8  # g
    two = run(quadratic_client(), world_q(), FedDyn(a=0.5), 2, **options)
    assert shared(two) == pytest.approx([1.115025, 0.737708], abs=1e-6)
    assert lead(two) == pytest.approx([0.413346, 0.273021], abs=1e-6)


def test_d1b_the_server_moves_further_by_the_share_of_all_clients() -> None:
    federation = run(quadratic_client(), drawn_first([0, 1]), FedDyn(a=0.5), 1, local_steps=2)
    assert shared(federation) == pytest.approx([1.0291666667, -0.1375], abs=1e-9)


def test_d1c_with_a_larger_weight_for_clients_with_fewer_samples() -> None:
    callback = FedDyn(a=0.5, size=True)
    one = run(quadratic_client(), world_q(), callback, 1, local_steps=2)
    assert shared(one) == pytest.approx([0.58, 0.3911111111], abs=1e-9)
    callback = FedDyn(a=0.5, size=True)
    two = run(quadratic_client(), world_q(), callback, 2, local_steps=2)
    assert shared(two) == pytest.approx([1.131846, 0.777374], abs=1e-6)


@pytest.mark.parametrize(("size", "optimum"), [(False, [1.25, 0.75]), (True, [5 / 3, 9 / 7])])
def test_it_comes_to_rest_at_the_optimum(size: bool, optimum: list[float]) -> None:
    callback = FedDyn(a=0.5, size=size)
    without = {"limit_val_batches": 0}
    federation = run(quadratic_client(), world_q(), callback, 50, local_steps=12, trainer=without)
    assert shared(federation) == pytest.approx(optimum, abs=1e-4)


@pytest.mark.parametrize("size", [False, True])
def test_three_rounds(size: bool) -> None:
    case = Normalised.make()
    federation = case.run(FedDyn(0.3, size))
    theta, norms = case.theta, case.statistics
    counts, h, g = case.world.counts, 0.0, np.zeros((6, len(theta)))
    for round_, entry in enumerate(federation.history):
        moves, stats = [], []
        for i in entry.clients:
            a = 0.3 * counts.mean() / counts[i] if size else 0.3

            def more(w, i=i, a=a, start=theta):
                return a * (w - start) - g[i]

            w, s = case.train(round_, i, theta, norms, more)
            g[i] -= a * (w - theta)
            moves.append(w - theta)
            stats.append(s)
        h = h + np.sum(moves, axis=0) / 6
        theta, norms = theta + np.mean(moves, axis=0) + h, np.mean(stats, axis=0)
    state = federation.server_states()[0]
    assert parameters(state) == pytest.approx(theta, rel=1e-9, abs=1e-11)
    assert statistics(state) == pytest.approx(norms, rel=1e-9, abs=1e-11)
    assert lead(federation) == pytest.approx(h, rel=1e-9, abs=1e-11)
    for i in range(6):
        assert own(federation, i) == pytest.approx(g[i], rel=1e-9, abs=1e-11)


def test_judged_by_the_mean_of_all_clients_last_models() -> None:
    """Also of those that have not taken part, as in the initial model."""
    case = Normalised.make()
    callback = FedDyn(0.3, judged="mean")
    federation = case.run(callback)
    assert callback.bytes_kept == 2 * 8 * len(case.theta)  # g and the last model
    assert len({i for entry in federation.history for i in entry.clients}) < 6
    last, theta, norms = np.tile(case.theta, (6, 1)), case.theta, case.statistics
    h, g = 0.0, np.zeros((6, len(theta)))
    for round_, entry in enumerate(federation.history):
        ends = {}
        for i in entry.clients:

            def more(w, i=i, start=theta):
                return 0.3 * (w - start) - g[i]

            ends[i] = case.train(round_, i, theta, norms, more)
            g[i] -= 0.3 * (ends[i][0] - theta)
            last[i] = ends[i][0]
        h = h + np.sum([w - theta for w, _ in ends.values()], axis=0) / 6
        theta = np.mean([w for w, _ in ends.values()], axis=0) + h
        norms = np.mean([s for _, s in ends.values()], axis=0)
    for i in range(6):
        state = federation.client_state(i)
        assert parameters(state) == pytest.approx(last.mean(axis=0), rel=1e-9, abs=1e-11)
        assert statistics(state) == pytest.approx(norms, rel=1e-9, abs=1e-11)
    assert parameters(federation.server_states()[0]) == pytest.approx(theta, rel=1e-9, abs=1e-11)


@pytest.mark.filterwarnings("ignore:.*round .*failed:UserWarning")
@pytest.mark.parametrize("size", [False, True])
def test_the_servers_sum_is_minus_the_mean_of_the_clients(size: bool) -> None:
    """Also where clients fail, never answer, are held out or have no samples."""
    data = small_data(
        (5, 12, 7, 9, 3, 10, 0, 6), cohort_size=4, dropout=0.3, holdout_clients=0.25, seed=2
    )
    federation = run(dropout_client(failing_at_the_end()), data, FedDyn(0.3, size), 6)
    assert any(3 in entry.failed for entry in federation.history)
    able, counts = data.train_clients.tolist(), data.num_samples("train").double().numpy()
    weights = np.full(8, 0.3)
    if size:
        weights = 0.3 * counts[able].mean() / np.maximum(counts, 1)
    mean = np.mean([own(federation, i) / weights[i] for i in able], axis=0)
    assert lead(federation) == pytest.approx(-mean, abs=1e-6)
    assert np.abs(mean).max() > 0.01


def test_a_of_zero_is_uniform_fedavg() -> None:
    data = small_data(cohort_size=3)
    one = run(batchnorm_client(), data, FedDyn(a=0), 3).server_states()[0]
    assert_same(one, run(batchnorm_client(), data, FedAvg("uniform"), 3).server_states()[0])


class Forgetful(Dynamic):
    """A client that keeps nothing."""

    def after_training(self, c: LocalClient) -> None:
        pass


class Plain(FedDyn):
    """A server that adds nothing up."""

    def aggregate(self, mean):
        return mean


def test_without_what_it_keeps_it_is_fedprox() -> None:
    callback = Plain()
    callback.client_method = Forgetful(a=0.7)
    data = small_data(cohort_size=3)
    frozen = run(batchnorm_client(), data, callback, 3, local_epochs=2)
    proximal = FedProx(mu=0.7, weighting="uniform")
    other = run(batchnorm_client(), data, proximal, 3, local_epochs=2)
    torch.testing.assert_close(frozen.server_states()[0], other.server_states()[0])


def test_it_is_what_the_page_on_own_methods_builds() -> None:
    data = small_data(cohort_size=3, dtype=torch.float64)
    one, other = (
        run(linear_client(double=True), data, callback, 4, local_epochs=2)
        for callback in (FedDyn(a=0.2), own_methods.MyFedDyn(a=0.2))
    )
    assert shared(one) == pytest.approx(shared(other), rel=1e-12, abs=1e-14)


def test_a_resumed_run_knows_the_sum_and_all_clients(tmp_path: Path) -> None:
    def fit(rounds: int, **options) -> Federation:
        return run(dropout_client(), small_data(cohort_size=3), FedDyn(0.3), rounds, **options)

    fit(2).trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed, whole = fit(4, ckpt_path=tmp_path / "half.ckpt"), fit(4)
    assert (lead(resumed) == lead(whole)).all()
    for i in range(6):
        assert (own(resumed, i) == own(whole, i)).all()


def test_traffic_is_that_of_fedavg() -> None:
    data = small_data(cohort_size=3)
    one, other = (run(batchnorm_client(), data, c, 2) for c in (FedDyn(), FedAvg()))
    for left, right in zip(one.history, other.history, strict=True):
        assert (left.bytes_down, left.bytes_up) == (right.bytes_down, right.bytes_up)


def test_clients_are_judged_and_tuned_as_by_fedavg() -> None:
    callback = FedDyn(a=0.5)
    federation = run(quadratic_client(), world_q(), callback, 1, local_steps=2, finetune_epochs=1)
    theta = np.array([0.5766666667, 0.3833333333])
    tuned = federation.client_state(1)["network.theta"]
    assert tuned.tolist() == pytest.approx(theta - 0.1 * np.array([2, 1]) * (theta - [3, 1]))


def test_a_bad_weight_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="FedDyn: a must be at least 0, got -1"):
        FedDyn(a=-1)


@ENGINES
def test_the_mean_of_sizes_is_that_of_clients_that_can_train(engine: str) -> None:
    """One with a single sample can't in a network with BatchNorm, and does not count in N."""
    callback, data = FedDyn(0.3, size=True), small_data((1, 6, 10), dtype=torch.float64)
    federation = run(batchnorm_client().double(), data, callback, engine=engine)
    for client in (1, 2):
        state, trained = own(federation, client), federation.history
        assert trained[-1].clients == [0, 1, 2]
        a = 0.3 * 8 / (6, 10)[client - 1]
        moved = -state / a
        if client == 1:
            total = moved.copy()
        else:
            total += moved
    assert lead(federation) == pytest.approx(total / 2, rel=1e-9, abs=1e-12)

"""L2GD (section 4.3)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from pflight import Federation
from pflight.callbacks import L2GD, FedAvg, Local
from pflight.datamodules import TensorClients
from pflight.errors import ConfigurationError
from pflight.local_client import LocalWork
from pflight.models.client_methods import StepsToMean
from tests import reference
from tests.remote_clients import ask_remote_clients
from tests.runs import (
    CLASSES,
    ENGINES,
    assert_same,
    batches_of,
    batchnorm_client,
    flat,
    linear_client,
    quadratic_client,
    run,
    small_data,
    world_q,
)


class Tossed(L2GD):
    """Steps to the mean come as they are told, by round; then there are none."""

    def __init__(self, *steps: int, **options: float) -> None:
        super().__init__(**options)
        self.steps = steps

    def tosses(self, round_index: int) -> int:
        return self.steps[round_index] if round_index < len(self.steps) else 0


def model(federation: Federation, client: int) -> list[float]:
    return federation.client_state(client)["network.theta"].tolist()


P3 = {"alpha": 0.1, "lam": 0.5, "p": 0.5}


@ENGINES
def test_p3(engine: str) -> None:
    """The coin shows 0, 0, 1, 1, 0: two rounds, and one with two steps to the mean before."""
    data = world_q([0, 1], counts=[1, 1, 1])
    options = {"local_steps": 1, "engine": engine}
    two = run(quadratic_client(), data, Tossed(0, 0, 0, **P3), 2, **options)
    assert model(two, 0) == pytest.approx([0.19, -0.36], abs=1e-15)
    assert model(two, 1) == pytest.approx([1.08, 0.19], abs=1e-15)
    three = run(quadratic_client(), data, Tossed(0, 0, 2, 0, **P3), 3, **options)
    assert model(three, 0) == pytest.approx([0.31004875, -0.46655], abs=1e-15)
    assert model(three, 1) == pytest.approx([1.42929, 0.24686875], abs=1e-15)
    assert [entry.bytes_up for entry in three.history] == [0, 2 * 16, 0]
    assert [entry.bytes_down for entry in three.history] == [2 * 16, 0, 2 * 16]  # first, x^0


class Recording(StepsToMean):
    """Notes where clients start."""

    def before_training(self, work: LocalWork, clients: Tensor, sent: TensorDict) -> TensorDict:
        starts = super().before_training(work, clients, sent)
        self.starts = starts["network.theta"].clone()
        return starts


def test_p3_after_one_step_to_the_mean() -> None:
    callback = Tossed(0, 0, 1, 0, **P3)
    callback.outer_method = Recording()
    run(quadratic_client(), world_q([0, 1], counts=[1, 1, 1]), callback, 3, local_steps=1)
    expected = torch.tensor([[0.21225, -0.34625], [1.05775, 0.17625]], dtype=torch.float64)
    torch.testing.assert_close(callback.outer_method.starts, expected, rtol=0, atol=1e-15)


def test_several_rounds_with_partial_participation() -> None:
    data = small_data(cohort_size=3, seed=3, dtype=torch.float64)
    steps = (3, 0, 1, 4, 0, 2, 0, 5)
    client = linear_client(double=True)
    callback = Tossed(*steps, alpha=1.0, lam=1.2, p=0.5)
    federation = run(client, data, callback, rounds=7, local_epochs=2)
    world = reference.SoftmaxRegression([data.samples(i, "train") for i in range(6)], CLASSES)
    mean, models, known, c = flat(client.state_dict()), {}, {}, 1.2 / (6 * 0.5)
    for round_, entry in enumerate(federation.history):
        share = 1 - (1 - c) ** steps[round_] if round_ else 0
        newcomers = sum(i not in models for i in entry.clients)
        assert entry.bytes_down == 15 * 8 * (3 if share else newcomers)
        assert entry.bytes_up == 15 * 8 * (3 if steps[round_ + 1] else 0)
        for i in entry.clients:
            start = (1 - share) * models.get(i, mean) + share * mean
            batches = batches_of(data, round_, i, 2)
            models[i] = reference.local_training(world, start, i, batches, 0.1)
        if steps[round_ + 1]:
            known |= {i: models[i] for i in entry.clients}
            mean = np.mean([*known.values()], axis=0)
    assert 3 < len(known) < len(models)  # not all who have trained have sent their model
    assert flat(federation.server_states()[0]) == pytest.approx(mean, rel=1e-12, abs=1e-14)
    for i in range(6):
        expected = models.get(i, mean)
        assert flat(federation.client_state(i)) == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_newcomers_are_sent_the_mean_where_others_need_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fit() -> Federation:
        quiet = {"engine": "sequential", "trainer": {"limit_val_batches": 0}}
        return run(linear_client(), small_data(cohort_size=2), Tossed(0, 1, 0, 0), 3, **quiet)

    here = fit()
    first, second, last = here.history
    (new,) = {*last.clients} - {*first.clients, *second.clients}
    state = here.client_state(new)
    ask_remote_clients(monkeypatch)
    assert_same(fit().client_state(new), state)
    assert last.bytes_down == sum(4 * p.numel() for p in linear_client().parameters())


def test_without_a_distance_to_the_mean_clients_are_alone() -> None:
    data = small_data(cohort_size=3)
    federation = run(batchnorm_client(), data, L2GD(lam=0.0), 4)
    local = run(batchnorm_client(), data, Local(), 4)
    for i in range(6):
        assert_same(federation.client_state(i), local.client_state(i))
    for entry, expected in zip(federation.history, local.history, strict=True):
        assert (entry.bytes_down, entry.bytes_up) == (expected.bytes_down, expected.bytes_up)


def test_with_c_of_1_every_round_begins_at_the_mean() -> None:
    data = small_data(dtype=torch.float64)
    callback = Tossed(1, 1, 1, 1, 1, alpha=1.0, lam=3.0, p=0.5)  # c = 3 / (6 * 0.5)
    federation = run(linear_client(double=True), data, callback, 4)
    plain = run(linear_client(double=True), data, FedAvg("uniform"), 4)
    expected = flat(plain.server_states()[0])
    assert flat(federation.server_states()[0]) == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_equal_models_stay_equal_and_the_mean_counts_everybody_once() -> None:
    sample = world_q().samples(1, "train")
    twins = TensorClients([sample] * 3, num_classes=2, batch_size=None)
    federation = run(quadratic_client(), twins, Tossed(0, 2, 1, 3, 0, **P3), 4)
    alone = run(quadratic_client(), twins, Local(), 4)
    for i in range(3):
        assert model(federation, i) == pytest.approx(model(alone, i), abs=1e-15)
    federation = run(quadratic_client(), world_q(), Tossed(0, 1, 0, **P3), 1, local_steps=1)
    mean = federation.server_states()[0]["network.theta"].tolist()
    assert mean == pytest.approx([0.5 / 3, 0.3 / 3], abs=1e-15)  # of (.1, -.2), (.6, .1), (-.2, .4)


def test_buffers_stay_with_the_clients() -> None:
    start = batchnorm_client().state_dict()
    federation = run(batchnorm_client(), small_data(), Tossed(0, 2, 2, 2), 3)
    server, mean = federation.server_states()[0], "network.1.running_mean"
    assert torch.equal(server[mean], start[mean])
    assert not torch.equal(federation.client_state(0)[mean], federation.client_state(1)[mean])
    parameters = sum(4 * p.numel() for p in batchnorm_client().parameters())
    assert federation.history[0].bytes_down == 6 * parameters
    assert federation.history[1].bytes_down == federation.history[1].bytes_up == 6 * parameters


def test_the_coin_shows_1_with_probability_p() -> None:
    callback = L2GD(p=0.75)
    run(linear_client(), small_data(), callback, 1)
    counts = torch.tensor([callback.tosses(t) for t in range(2000)], dtype=torch.double)
    assert counts.mean().item() == pytest.approx(3.0, abs=0.3)  # p / (1 - p), five sigma
    assert (counts > 0).double().mean().item() == pytest.approx(0.75, abs=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 0.0}, "alpha must be over 0, got 0.0"),
        ({"lam": -1.0}, "lam must be at least 0, got -1.0"),
        ({"p": 1.0}, r"p must be in \(0, 1\), got 1.0"),
    ],
)
def test_options_out_of_range(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"L2GD: {message}"):
        L2GD(**options)


def test_a_step_beyond_the_mean_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"must not be over 1, got 1\.667 with alpha=10"):
        run(linear_client(), small_data(), L2GD(alpha=10, lam=0.5, p=0.5))

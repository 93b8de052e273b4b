"""FedAMP and HeurFedAMP (section 2b.3)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from pflight import Federation
from pflight.callbacks import FedAMP, FedAvg, FedProx, HeurFedAMP, Local
from pflight.errors import ConfigurationError
from tests.runs import (
    ENGINES,
    Normalised,
    assert_same,
    batchnorm_client,
    judged,
    parameters,
    quadratic_client,
    run,
    small_data,
    statistics,
    world_q,
)

THETA = "network.theta"
Q2 = torch.tensor([[0.19, -0.36], [1.08, 0.19], [-0.38, 0.76]], dtype=torch.double)
IDS = torch.arange(3)


def knowing(method: type[FedAMP], models: torch.Tensor = Q2, **options: Any) -> FedAMP:
    """Return a callback that has received models, which the clients remember as well."""

    class Knowing(method):
        def setup_server(self) -> None:
            super().setup_server()
            self.stored.tensors()[THETA].copy_(models)
            self.received[:] = True
            self.clients.memory.write("memory", IDS, TensorDict({THETA: models}, batch_size=[3]))

    return Knowing(**options)


def fit(callback: FedAMP, rounds: int = 1, **options: Any) -> Federation:
    return run(quadratic_client(), world_q(), callback, rounds, local_steps=2, **options)


def test_a1_mixtures() -> None:
    callback = knowing(FedAMP, sigma=1.0, alpha=0.5)
    fit(callback, 0)
    weights = callback.weights(IDS)
    assert weights[0].tolist() == pytest.approx([0.729604, 0.167337, 0.103060], abs=1e-6)
    assert weights[1, 2].item() == pytest.approx(0.042867, abs=1e-6)
    expected = [(0.280186, -0.152538), (0.868484, 0.122399), (-0.258670, 0.620139)]
    sent = callback.broadcast(IDS)[THETA]
    assert sent.tolist() == [pytest.approx(row, abs=1e-6) for row in expected]


@ENGINES
def test_a1_from_the_mixtures(engine: str) -> None:
    federation = fit(knowing(FedAMP, sigma=1.0, alpha=0.5), engine=engine)
    expected = [(0.402554, -0.423726), (1.550569, 0.271591), (-0.554696, 1.194715)]
    for i, own in enumerate(expected):
        assert judged(federation, i) == pytest.approx(own, abs=1e-6)


@ENGINES
def test_a1_from_the_own_models(engine: str) -> None:
    federation = fit(knowing(FedAMP, sigma=1.0, alpha=0.5, start="personal"), engine=engine)
    assert judged(federation, 0) == pytest.approx([0.358363, -0.498412], abs=1e-6)


def test_a1_others_that_weigh_over_one_are_scaled() -> None:
    callback = knowing(FedAMP, sigma=1.0, alpha=2.0)
    fit(callback, 0)
    others = callback.attention(IDS, ~torch.eye(3, dtype=torch.bool))
    assert others[0].sum().item() == pytest.approx(1.081586, abs=1e-6)
    weights = callback.weights(IDS)
    assert weights[0].tolist() == pytest.approx((others[0] / 1.081586).tolist(), abs=1e-6)
    assert weights.sum(dim=1).tolist() == pytest.approx([1, 1, 1])


def test_a2() -> None:
    federation = fit(knowing(HeurFedAMP, sigma=2.0, self_weight=0.4, alpha=0.5))
    assert judged(federation, 0) == pytest.approx([0.721230, -0.324506], abs=1e-6)
    callback = knowing(HeurFedAMP, sigma=2.0, self_weight=0.4, alpha=0.5)
    fit(callback, 0)
    weights = callback.weights(IDS)
    assert weights[0].tolist() == pytest.approx([0.4, 0.558995, 0.041005], abs=1e-6)
    assert weights[1, 0].item() == pytest.approx(0.459387, abs=1e-6)
    mixture = callback.broadcast(IDS)[THETA][0].tolist()
    assert mixture == pytest.approx([0.664133, -0.006627], abs=1e-6)


@pytest.mark.parametrize("heuristic", [False, True])
def test_three_rounds(heuristic: bool) -> None:
    """With weights of parameters alone, and buffers that are mixed by them."""
    case = Normalised.make()
    callback = HeurFedAMP(4.0, 0.3, 0.2, 0.5) if heuristic else FedAMP(0.2, 0.5, 1.5)
    federation = case.run(callback)
    models = {}  # of those that have been received
    for round_, entry in enumerate(federation.history):
        trained = {}
        for i in entry.clients:
            u, norms = case.theta, case.statistics
            if i in models:
                w = models[i][0]
                others = [j for j in models if j != i]
                if heuristic:
                    cos = [
                        w @ models[j][0] / np.sqrt((w @ w) * (models[j][0] ** 2).sum())
                        for j in others
                    ]
                    shares = 0.7 * np.exp(4 * np.array(cos)) / np.exp(4 * np.array(cos)).sum()
                else:
                    squares = np.array([((w - models[j][0]) ** 2).sum() for j in others])
                    shares = 0.5 / 1.5 * np.exp(-squares / 1.5)
                    shares /= max(1, shares.sum())
                xi = dict(zip(others, shares, strict=True)) | {i: 1 - shares.sum()}
            else:
                xi = {j: 1 / len(models) for j in models}
            if xi:
                u, norms = (sum(xi[j] * models[j][k] for j in xi) for k in (0, 1))
            trained[i] = case.train(round_, i, u, norms, lambda w, u=u: 0.4 * (w - u))
        models |= trained
    assert len(models) > 3
    for i, (theta, norms) in models.items():
        state = federation.client_state(i)
        assert parameters(state) == pytest.approx(theta, rel=1e-9, abs=1e-11)
        assert statistics(state) == pytest.approx(norms, rel=1e-9, abs=1e-11)


@pytest.mark.parametrize(
    ("lam", "other"), [(0.0, FedAvg("uniform")), (0.2, FedProx(0.5, weighting="uniform"))]
)
def test_without_angles_it_is_uniform_fedavg_or_fedprox(lam: float, other: FedAvg) -> None:
    case = Normalised.make(cohort_size=6)
    federation = case.run(HeurFedAMP(0.0, lam=lam, alpha=0.4))
    expected = case.run(other).server_states()[0]
    sent = dict(federation.callback.broadcast(torch.arange(1))[0].items())
    assert parameters(sent) == pytest.approx(parameters(expected), rel=1e-9, abs=1e-11)
    assert statistics(sent) == pytest.approx(statistics(expected), rel=1e-9, abs=1e-11)
    assert sent["network.1.num_batches_tracked"] == expected["network.1.num_batches_tracked"]


@pytest.mark.parametrize("callback", [HeurFedAMP(self_weight=1.0, lam=0.0), FedAMP(alpha=0)])
def test_where_nothing_is_mixed_it_is_local(callback: FedAMP) -> None:
    case = Normalised.make(cohort_size=6)
    federation, alone = case.run(callback), case.run(Local())
    for i in range(6):
        one, other = federation.client_state(i), alone.client_state(i)
        for part in (parameters, statistics):
            assert part(one) == pytest.approx(part(other), rel=1e-9, abs=1e-11)


@pytest.mark.parametrize("method", [FedAMP, HeurFedAMP])
def test_who_is_alone_is_sent_its_own_model(method: type[FedAMP]) -> None:
    federation = run(batchnorm_client(), small_data([8]), method(), 2)
    ids = torch.tensor([0])
    own, sent = federation.client_state(0), federation.callback.broadcast(ids)[0]
    assert_same({name: sent[name] for name in own}, own)


def test_models_without_length_have_no_angle() -> None:
    callback = knowing(HeurFedAMP, torch.zeros(3, 2, dtype=torch.double), self_weight=0.5)
    fit(callback, 0)
    assert callback.weights(IDS)[0].tolist() == pytest.approx([0.5, 0.25, 0.25])


def test_newcomers_are_sent_the_plain_mean() -> None:
    data = small_data(holdout_clients=0.34, cohort_size=2)
    federation = run(batchnorm_client(), data, FedAMP(), 1)
    callback, new = federation.callback, data.new_clients
    models = callback.models_of(callback.received.nonzero().flatten())
    assert len(models) == 2
    mean = {name: value.double().mean(0).float() for name, value in models.items()}
    state = federation.client_state(int(new[0]))
    assert parameters(state) == pytest.approx(parameters(mean), abs=1e-6)
    assert statistics(state) == pytest.approx(statistics(mean), abs=1e-6)


def test_the_pull_grows_as_alpha_falls_and_is_sent_then() -> None:
    callback = FedAMP(alpha=0.5, sigma=1.0, alpha_decay=0.5, decay_rounds=1)
    two = fit(callback, 2)
    assert callback.alpha_now == 0.125
    first, second = (entry.bytes_down for entry in two.history)
    assert second == first + 3 * 8  # a number in float64
    one = fit(FedAMP(alpha=0.5, sigma=1.0, alpha_decay=0.5, decay_rounds=1), 1)
    a, b = np.array([2, 1]), np.array([3, 1])
    u = one.callback.broadcast(IDS)[THETA][1].numpy()
    w = u.copy()
    for _ in range(2):
        w = w - 0.1 * (a * (w - b) + 4 * (w - u))
    assert judged(two, 1) == pytest.approx(w, abs=1e-12)


def test_the_pull_is_what_is_sent_also_where_buffers_stay() -> None:
    callback = FedAMP(alpha=0.5, sigma=1.0, alpha_decay=0.5, decay_rounds=1, buffers="local")
    one = run(quadratic_client(), world_q(), callback, 3, local_steps=2)
    callback = FedAMP(alpha=0.5, sigma=1.0, alpha_decay=0.5, decay_rounds=1)
    other = run(quadratic_client(), world_q(), callback, 3, local_steps=2)
    for i in range(3):
        assert (judged(one, i) == judged(other, i)).all()


def test_a_model_travels_each_way() -> None:
    data = small_data(cohort_size=3)
    one, other = (run(batchnorm_client(), data, c, 2) for c in (FedAMP(), FedAvg()))
    for left, right in zip(one.history, other.history, strict=True):
        assert (left.bytes_down, left.bytes_up) == (right.bytes_down, right.bytes_up)


def test_bad_options_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="FedAMP: sigma must be over 0, got 0"):
        FedAMP(sigma=0)
    with pytest.raises(ConfigurationError, match="HeurFedAMP: self_weight must be in"):
        HeurFedAMP(self_weight=2)
    with pytest.raises(ConfigurationError, match="FedAMP: start must be 'cloud' or 'personal'"):
        FedAMP(start="server")


def test_no_end_of_rounds_in_which_alpha_decays() -> None:
    callback = FedAMP(lam=0, alpha=1.0, alpha_decay=0.1, decay_rounds=1)
    federation = run(quadratic_client(), world_q(), callback, 2)
    model = federation.history[-1].bytes_down
    federation.history.extend(federation.history[-1:] * 400)
    assert 0 < callback.alpha_now < 1e-20
    sent = callback.broadcast(IDS)
    assert callback.bytes_down(IDS, sent) == model  # and there is no pull that would change

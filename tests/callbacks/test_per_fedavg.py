"""Per-FedAvg, first-order and with the Hessian (section 3.3)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pflight import Federation
from pflight.callbacks import FedAvg, PerFedAvg
from pflight.errors import ConfigurationError
from tests import reference
from tests.runs import (
    CLASSES,
    ENGINES,
    assert_same,
    batches_of,
    batchnorm_client,
    failing,
    flat,
    linear_client,
    quadratic_client,
    run,
    small_data,
    world_q,
)

ORDERS = pytest.mark.parametrize("hessian", [False, True])


def theta(federation: Federation) -> list[float]:
    return federation.server_states()[0]["network.theta"].tolist()


@ENGINES
def test_m2(engine: str) -> None:
    for hessian, expected in ((False, [0.45, -0.8]), (True, [0.405, -0.64])):
        client, callback = quadratic_client(lr=0.5), PerFedAvg(alpha=0.1, hessian=hessian)
        federation = run(client, world_q([0]), callback, 1, local_steps=1, engine=engine)
        assert theta(federation) == pytest.approx(expected, abs=1e-15)


@pytest.mark.short("sequential")
@ENGINES
def test_clients_are_judged_after_steps_of_alpha(engine: str) -> None:
    a, b = np.array([1, 2]), np.array([1, -1])
    for steps in (0, 1, 3):
        client, callback = quadratic_client(lr=0.5), PerFedAvg(steps, alpha=0.1)
        federation = run(client, world_q([0]), callback, 1, engine=engine)
        adapted = np.array(theta(federation))
        for _ in range(steps):
            adapted = adapted - 0.1 * a * (adapted - b)
        judged = federation.client_state(0)["network.theta"].tolist()
        assert judged == pytest.approx(adapted, abs=1e-15)


def test_fine_tuning_takes_steps_of_alpha_as_well() -> None:
    client, data = quadratic_client(lr=0.5), world_q([0])
    federation = run(client, data, PerFedAvg(steps=0, alpha=0.1), 1, finetune_epochs=2)
    once = run(client, data, PerFedAvg(steps=2, alpha=0.1), 1)
    expected = once.client_state(0)["network.theta"].tolist()
    assert federation.client_state(0)["network.theta"].tolist() == pytest.approx(expected)


def meta_gradient(
    world: reference.World, w: np.ndarray, client: int, batch: np.ndarray, hessian: bool
) -> np.ndarray:
    """Return the gradient of the loss after a step of 0.3; the Hessian by finite differences."""
    count = 3 if hessian else 2
    whole = len(batch) < 2 * count
    first, second, *rest = [batch] * count if whole else np.array_split(batch, count)
    gradient = world.gradient(w - 0.3 * world.gradient(w, client, first), client, second)
    if hessian:
        ahead, behind = (
            world.gradient(w + step * gradient, client, rest[0]) for step in (1e-5, -1e-5)
        )
        gradient = gradient - 0.3 * (ahead - behind) / 2e-5
    return gradient


@pytest.mark.short("*-sequential")
@ENGINES
@ORDERS
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_several_rounds_with_partial_participation(
    hessian: bool, weighting: str, engine: str
) -> None:
    data = small_data(cohort_size=3, dtype=torch.float64, batch_size=7)
    client = linear_client(double=True)
    callback = PerFedAvg(weighting=weighting, alpha=0.3, hessian=hessian)
    federation = run(client, data, callback, rounds=3, local_epochs=2, engine=engine)
    world = reference.SoftmaxRegression([data.samples(i, "train") for i in range(6)], CLASSES)
    w = flat(linear_client(double=True).state_dict())
    for round_, cohort in enumerate(entry.clients for entry in federation.history):
        models = []
        for i in cohort:
            model = w
            for batch in batches_of(data, round_, i, 2):
                model = model - 0.1 * meta_gradient(world, model, i, batch, hessian)
            models.append(model)
        weights = world.counts[cohort] if weighting == "samples" else None
        w = np.average(models, axis=0, weights=weights)
    tolerance = 1e-9 if hessian else 1e-13
    assert flat(federation.server_states()[0]) == pytest.approx(w, abs=tolerance)
    for i in range(6):
        batch = batches_of(data, 3, i, 1)[0]
        adapted = w - 0.3 * world.gradient(w, i, batch)
        assert flat(federation.client_state(i)) == pytest.approx(adapted, abs=tolerance)


@ORDERS
def test_without_adaptation_it_is_uniform_fedavg(hessian: bool) -> None:
    data = small_data(cohort_size=3, dtype=torch.float64)
    client = linear_client(double=True)
    federation = run(client, data, PerFedAvg(alpha=0.0, hessian=hessian), 3)
    plain = run(client, data, FedAvg("uniform"), 3)
    expected = flat(plain.server_states()[0])
    assert flat(federation.server_states()[0]) == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert flat(federation.client_state(0)) == pytest.approx(expected, rel=1e-12, abs=1e-14)


@ENGINES
@ORDERS
def test_only_the_pass_of_the_adaptation_updates_buffers(hessian: bool, engine: str) -> None:
    data = small_data(counts=[9], batch_size=None)
    client, callback = batchnorm_client(), PerFedAvg(alpha=0.1, hessian=hessian)
    federation = run(client, data, callback, 1, local_epochs=1, engine=engine)
    x, _ = data.samples(0, "train")
    order = data.order(0, 0, 0)[: 3 if hessian else 5]  # D, of thirds or halves
    features = client.network[0](x[order])
    state = federation.server_states()[0]
    assert state["network.1.num_batches_tracked"] == 1
    torch.testing.assert_close(state["network.1.running_mean"], 0.1 * features.mean(0).detach())


def test_a_client_without_samples_has_the_servers_model() -> None:
    data = small_data(counts=[6, 0, 8])
    federation = run(linear_client(), data, PerFedAvg(), 1)
    assert_same(federation.client_state(1), federation.server_states()[0])
    assert not torch.equal(
        federation.client_state(0)["network.weight"], federation.client_state(1)["network.weight"]
    )


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of Lightning, as it loads
def test_a_client_that_fails_to_adapt_is_judged_without() -> None:
    data, options = small_data(), {"trainer": {"limit_val_batches": 0}}
    with pytest.warns(UserWarning, match="round 0: client 3 failed: .*out of battery"):
        federation = run(linear_client(failing()), data, PerFedAvg(), **options)
    with pytest.warns(UserWarning, match="client 3 failed to adapt: .*out of battery"):
        state = federation.client_state(3)
    assert_same(state, federation.server_states()[0])


def test_what_does_not_fit() -> None:
    with pytest.raises(ConfigurationError, match="PerFedAvg: steps must be at least 0, got -1"):
        PerFedAvg(steps=-1)
    with pytest.raises(ConfigurationError, match="PerFedAvg: alpha must be at least 0, got -1"):
        PerFedAvg(alpha=-1)

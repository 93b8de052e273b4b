"""FedRep (section 5.3)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pflight import Federation
from pflight.callbacks import FedAvg, FedRep, SharedPart
from pflight.errors import ConfigurationError
from pflight.models import Classifier
from pflight.states.layers import Layers
from tests import reference
from tests.callbacks.test_shared_part import (
    ENGINES,
    product_client,
    product_world,
    regression_client,
    regression_world,
)
from tests.runs import (
    CLASSES,
    FEATURES,
    assert_same,
    batches_of,
    batchnorm_client,
    dropout_client,
    failing,
    flat,
    linear_client,
    network_client,
    run,
    sgd,
    small_data,
)


@ENGINES
def test_s2(engine: str) -> None:
    callback = FedRep(head_epochs=1)
    federation = run(product_client(), product_world(), callback, local_epochs=2, engine=engine)
    assert flat(federation.server_states()[0]) == pytest.approx([0.9775, 1], abs=1e-12)
    assert flat(federation.client_state(0)) == pytest.approx([0.9775, 1.1], abs=1e-12)
    assert flat(federation.client_state(1)) == pytest.approx([0.9775, 0.8], abs=1e-12)


@ENGINES
def test_zero_body_epochs_leave_the_body_at_its_start(engine: str) -> None:
    callback = FedRep(head_epochs=2)
    federation = run(product_client(), product_world(), callback, 2, local_epochs=2, engine=engine)
    assert flat(federation.server_states()[0]) == pytest.approx([1, 1], abs=0)
    expected = 2 - 0.9**4  # the distance to y = 2 shrinks four times
    assert flat(federation.client_state(0)) == pytest.approx([1, expected], abs=1e-12)


def fedrep(
    world: reference.World,
    theta: np.ndarray,
    cohorts: list[list[int]],
    batches: list[reference.Batches],
    lr: float,
    momentum: float,
    decay: float,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return what the server has, and the models that clients are judged by.

    ``batches`` are those of the head's epochs and those of the body's; the head is the bias.
    """
    head = np.arange(len(theta)) >= len(theta) - CLASSES
    own = {i: theta[head].copy() for i in range(len(world.counts))}

    def model(i: int) -> np.ndarray:
        composed = theta.copy()
        composed[head] = own[i]
        return composed

    for round_, cohort in enumerate(cohorts):
        models = []
        for i in cohort:
            trained = model(i)
            for part, steps in zip((head, ~head), batches, strict=True):
                velocity = np.zeros_like(theta)
                for batch in steps(round_, i):
                    gradient = world.gradient(trained, i, batch) + decay * trained
                    velocity = momentum * velocity + gradient
                    trained[part] -= lr * velocity[part]
            models.append(trained)
        initial = theta[head].copy()
        theta = np.average(models, axis=0, weights=world.counts[cohort])
        theta[head] = initial
        own.update((i, trained[head]) for i, trained in zip(cohort, models, strict=True))
    return theta, [model(i) for i in own]


@pytest.mark.short("*-sequential")
@ENGINES
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.5, 0.0), (0.9, 0.1)])
def test_several_rounds_with_partial_participation(
    engine: str, momentum: float, decay: float
) -> None:
    """Momentum and weight decay do not move what rests."""
    data = small_data(cohort_size=3, dtype=torch.float64)
    optimizer = sgd(0.1, momentum=momentum, weight_decay=decay)
    client = regression_client(optimizer=optimizer)
    federation = run(client, data, FedRep(head_epochs=2), rounds=5, local_epochs=5, engine=engine)

    def batches(epochs: slice) -> reference.Batches:
        def chosen(round_: int, client: int) -> list[np.ndarray]:
            steps = batches_of(data, round_, client, 5)
            epoch = len(steps) // 5
            return steps[epochs.start * epoch : epochs.stop * epoch]

        return chosen

    server, models = fedrep(
        regression_world(data),
        flat(client.state_dict()),
        [entry.clients for entry in federation.history],
        [batches(slice(0, 2)), batches(slice(2, 5))],
        0.1,
        momentum,
        decay,
    )
    assert flat(federation.server_states()[0]) == pytest.approx(server, rel=1e-12, abs=1e-14)
    for i, expected in enumerate(models):
        assert flat(federation.client_state(i)) == pytest.approx(expected, rel=1e-12, abs=1e-14)


@pytest.mark.short("Adam")
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_both_engines_agree(optimizer: Any) -> None:
    def fit(engine: str) -> Federation:
        layers = nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, CLASSES)
        client = network_client(
            nn.Sequential(*layers),
            optimizer=lambda p: optimizer(p, lr=0.01, weight_decay=0.1),
            gradient_clip_val=0.5,
        ).double()
        data = small_data((5, 12, 0, 9, 3, 10, 1), cohort_size=4, dtype=torch.float64)
        callback = FedRep(head=Layers(last=2), head_epochs=2)
        return run(client, data, callback, 4, local_epochs=3, finetune_epochs=1, engine=engine)

    one, many = fit("sequential"), fit("vectorized")
    assert many.clients.attached_engine.obstacle is None
    assert [r.failed for r in one.history] == [r.failed for r in many.history]
    for i in range(7):
        torch.testing.assert_close(one.client_state(i), many.client_state(i), rtol=0, atol=1e-10)


@ENGINES
def test_with_an_empty_head_it_is_fedavg(engine: str) -> None:
    data = small_data(cohort_size=3, dtype=torch.float64)
    callback = FedRep(head=Layers(), head_epochs=0)
    rep = run(linear_client(double=True), data, callback, 3, local_epochs=2, engine=engine)
    plain = run(linear_client(double=True), data, FedAvg(), 3, local_epochs=2, engine=engine)
    assert flat(rep.server_states()[0]) == pytest.approx(
        flat(plain.server_states()[0]), rel=1e-12, abs=1e-14
    )


@pytest.mark.short("head-sequential", "body-vectorized")
@ENGINES
@pytest.mark.parametrize("resting", ["head", "body"])
def test_batchnorm_that_rests_keeps_its_statistics(engine: str, resting: str) -> None:
    layers = Layers(first=2) if resting == "head" else Layers(last=1)
    epochs = 0 if resting == "head" else 3
    client, callback = batchnorm_client(), FedRep(head=layers, head_epochs=epochs)
    federation = run(client, small_data(), callback, 2, local_epochs=3, engine=engine)
    start, state = client.state_dict(), federation.client_state(1)
    for name in ("weight", "running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(state[f"network.1.{name}"], start[f"network.1.{name}"])
    assert not torch.equal(state["network.3.weight"], start["network.3.weight"])


@ENGINES
def test_batchnorm_sees_the_batches_of_its_own_epochs(engine: str) -> None:
    callback = FedRep(head_epochs=1)
    federation = run(batchnorm_client(), small_data(), callback, local_epochs=3, engine=engine)
    state = federation.client_state(1)
    assert state["network.1.num_batches_tracked"] == 2 * 3  # two epochs of three batches


def test_what_rests_is_in_evaluation_mode() -> None:
    """A body that rests gives what the server's body gives: head epochs don't depend on batches."""
    data = small_data([12], batch_size=None)
    client = batchnorm_client()
    federation = run(client, data, FedRep(head_epochs=2), local_epochs=2)
    body, head = client.network[:3].eval(), client.network[3]
    x, y = data.samples(0, "train")
    with torch.no_grad():
        features = body(x)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(head(features), y).backward()
        optimizer.step()
    state = federation.client_state(0)
    torch.testing.assert_close(state["network.3.weight"], head.weight.detach())


def test_the_head_is_private_and_the_body_travels() -> None:
    callback = FedRep(head_epochs=1)
    data = small_data(cohort_size=3)
    federation = run(batchnorm_client(), data, callback, 2, local_epochs=2)
    other = SharedPart(Layers(last=1))
    plain = run(batchnorm_client(), small_data(cohort_size=3), other, 2)
    assert callback.parts == other.parts
    assert [r.bytes_down for r in federation.history] == [r.bytes_down for r in plain.history]
    assert [r.bytes_up for r in federation.history] == [r.bytes_up for r in plain.history]


def test_newcomers_train_their_head_alone() -> None:
    data = small_data(holdout_clients=0.34)
    callback = FedRep(head_epochs=2)
    federation = run(batchnorm_client(), data, callback, 2, local_epochs=3, finetune_epochs=2)
    server = federation.server_states()[0]
    for i in data.new_clients.tolist():
        state = federation.client_state(i)
        for name, value in state.items():
            assert torch.equal(value, server[name]) != name.startswith("network.3"), name


@ENGINES
@pytest.mark.filterwarnings("ignore:engine='vectorized', but clients train one by one:UserWarning")
@pytest.mark.filterwarnings("ignore:.*round .*failed:UserWarning")
def test_nobody_else_rests_when_a_client_fails(engine: str) -> None:
    """Whether it fails in the epochs of the head or in those of the body."""

    def fit(kind: type[Classifier], counts: tuple[int, ...]) -> Federation:
        callback = FedRep(head_epochs=1)
        data = small_data(counts)
        return run(batchnorm_client(kind), data, callback, 2, local_epochs=2, engine=engine)

    broken = fit(failing(), (5, 12, 7, 9, 3, 10))
    without = fit(Classifier, (5, 12, 7, 0, 3, 10))
    assert [entry.failed for entry in broken.history] == [[3], [3]]
    for i in (0, 1, 2, 4, 5):
        torch.testing.assert_close(
            broken.client_state(i), without.client_state(i), rtol=0, atol=1e-6
        )


def test_a_resumed_run_has_all_heads(tmp_path: Path) -> None:
    def fit(rounds: int, **options: Any) -> Federation:
        data = small_data(cohort_size=3)
        callback = FedRep(head_epochs=1)
        return run(dropout_client(), data, callback, rounds, local_epochs=2, **options)

    fit(2).trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed, whole = fit(4, ckpt_path=tmp_path / "half.ckpt"), fit(4)
    for i in range(6):
        assert_same(resumed.client_state(i), whole.client_state(i))


def test_parameters_that_are_frozen_stay_so() -> None:
    client = dropout_client()
    client.network[0].bias.requires_grad_(False)
    federation = run(client, small_data(), FedRep(head_epochs=1), 2, local_epochs=2)
    start, state = client.state_dict(), federation.client_state(0)
    assert torch.equal(state["network.0.bias"], start["network.0.bias"])
    assert not torch.equal(state["network.0.weight"], start["network.0.weight"])


def test_what_does_not_fit_is_refused_before_training() -> None:
    def fit(callback: FedRep, **options: Any) -> Federation:
        return run(dropout_client(), small_data(), callback, **options)

    with pytest.raises(ConfigurationError, match="FedRep: head_epochs must be at least 0, got -1"):
        FedRep(head_epochs=-1)
    with pytest.raises(ConfigurationError, match="local_epochs=2 must be at least head_epochs=10"):
        fit(FedRep(head_epochs=10), local_epochs=2)
    with pytest.raises(ConfigurationError, match="give local_epochs instead of local_steps"):
        fit(FedRep(), local_epochs=20, local_steps=3)
    with pytest.raises(ConfigurationError, match="the head has no parameter that is trained"):
        fit(FedRep(head=Layers()), local_epochs=2)
    with pytest.raises(ConfigurationError, match="FedRep: nothing is sent"):
        fit(FedRep(head=Layers("network")), local_epochs=2)
    with pytest.raises(ConfigurationError, match="'output' matches none of the 2 layers"):
        fit(FedRep(head=Layers("output")), local_epochs=2)

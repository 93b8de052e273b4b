"""FedProx (section 1.2), by its callback and by a client that names the client method."""

from __future__ import annotations

import copy

import pytest
import torch

from pflight.callbacks import FedAvg, FedProx, ServerCallback
from pflight.errors import ConfigurationError
from pflight.models import ProximalClient
from tests import reference
from tests.runs import (
    CLASSES,
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


def test_q3() -> None:
    federation = run(quadratic_client(), world_q(), FedProx(1.0), local_steps=2)
    assert flat(federation.server_states()[0]) == pytest.approx([0.42, 0.2733333333], abs=1e-9)


@pytest.mark.parametrize(
    ("client", "expected"), [(0, [0.18, -0.34]), (1, [1.02, 0.18]), (2, [-0.36, 0.72])]
)
def test_q3_locals(client: int, expected: list[float]) -> None:
    federation = run(quadratic_client(), world_q([client]), FedProx(1.0), local_steps=2)
    assert flat(federation.server_states()[0]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.short("samples")
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_several_rounds_with_partial_participation(weighting: str) -> None:
    data = small_data(cohort_size=3, dtype=torch.float64)
    client, callback = linear_client(double=True), FedProx(0.7, weighting=weighting)
    federation = run(client, data, callback, rounds=4, local_epochs=2)
    world = reference.SoftmaxRegression([data.samples(i, "train") for i in range(6)], CLASSES)
    expected = reference.fedavg(
        world,
        flat(client.state_dict()),
        [entry.clients for entry in federation.history],
        lambda t, i: batches_of(data, t, i, 2),
        lr=0.1,
        weighting=weighting,
        mu=0.7,
    )
    assert flat(federation.server_states()[0]) == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_without_a_pull_it_is_fedavg() -> None:
    data = small_data(cohort_size=3)
    proximal = run(linear_client(), data, FedProx(mu=0.0), rounds=3, local_epochs=2)
    plain = run(linear_client(), data, FedAvg(), rounds=3, local_epochs=2)
    assert_same(proximal.server_states()[0], plain.server_states()[0])


@pytest.mark.parametrize("scaling", ["plain", "eq7"])
def test_with_one_local_step_it_is_fedavg_for_every_mu(scaling: str) -> None:
    data = small_data()
    proximal = run(linear_client(), data, FedProx(5.0, scaling), rounds=3, local_steps=1)
    plain = run(linear_client(), data, FedAvg(), rounds=3, local_steps=1)
    assert_same(proximal.server_states()[0], plain.server_states()[0])


def test_the_pull_counts_in_finetuning_for_nothing() -> None:
    """Fine-tuning minimises the task loss alone."""
    data = small_data()
    strong = run(linear_client(), data, FedProx(mu=5.0), local_steps=1, finetune_epochs=2)
    plain = run(linear_client(), data, local_steps=1, finetune_epochs=2)
    for i in range(6):
        assert_same(strong.client_state(i), plain.client_state(i))


@pytest.mark.short("callback0-plain", "callback1-eq7")
@pytest.mark.parametrize("scaling", ["plain", "eq7"])
@pytest.mark.parametrize("callback", [FedAvg(), FedProx()])
def test_a_client_that_names_the_half_is_the_same(scaling: str, callback: ServerCallback) -> None:
    client = batchnorm_client(ProximalClient, mu=0.7, scaling=scaling)
    named = run(client, small_data(cohort_size=3), copy.deepcopy(callback), rounds=3)
    brought = FedProx(mu=0.7, scaling=scaling)
    federation = run(batchnorm_client(), small_data(cohort_size=3), brought, rounds=3)
    assert_same(named.server_states()[0], federation.server_states()[0])
    assert named.algorithm == federation.algorithm == "FedProx"


@pytest.mark.parametrize("options", [{"mu": -0.1}, {"scaling": "eq8"}])
def test_bad_options(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="ProximalClient: "):
        linear_client(ProximalClient, **options)
    with pytest.raises(ConfigurationError, match="FedProx: "):
        FedProx(**options)

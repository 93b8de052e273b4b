import pytest
import torch

from pflight.callbacks import FedAvg
from pflight.errors import ConfigurationError
from pflight.models import ProximalClient
from tests import reference
from tests.runs import (
    CLASSES,
    assert_same,
    batches_of,
    flat,
    linear_client,
    quadratic_client,
    run,
    small_data,
    world_q,
)


def test_q3() -> None:
    federation = run(quadratic_client(mu=1.0), world_q(), FedAvg(), local_steps=2)
    assert flat(federation.server_states()[0]) == pytest.approx([0.42, 0.2733333333], abs=1e-9)


@pytest.mark.parametrize(
    ("client", "expected"), [(0, [0.18, -0.34]), (1, [1.02, 0.18]), (2, [-0.36, 0.72])]
)
def test_q3_locals(client: int, expected: list[float]) -> None:
    federation = run(quadratic_client(mu=1.0), world_q([client]), FedAvg(), local_steps=2)
    assert flat(federation.server_states()[0]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_several_rounds_with_partial_participation(weighting: str) -> None:
    data = small_data(cohort_size=3, dtype=torch.float64)
    client = linear_client(ProximalClient, double=True, mu=0.7)
    federation = run(client, data, FedAvg(weighting), rounds=4, local_epochs=2)
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
    proximal = run(linear_client(ProximalClient, mu=0.0), data, FedAvg(), rounds=3, local_epochs=2)
    plain = run(linear_client(), data, FedAvg(), rounds=3, local_epochs=2)
    assert_same(proximal.server_states()[0], plain.server_states()[0])


@pytest.mark.parametrize("scaling", ["plain", "eq7"])
def test_with_one_local_step_it_is_fedavg_for_every_mu(scaling: str) -> None:
    data = small_data()
    client = linear_client(ProximalClient, mu=5.0, scaling=scaling)
    proximal = run(client, data, FedAvg(), rounds=3, local_steps=1)
    plain = run(linear_client(), data, FedAvg(), rounds=3, local_steps=1)
    assert_same(proximal.server_states()[0], plain.server_states()[0])


def test_the_pull_counts_in_finetuning_for_nothing() -> None:
    """Fine-tuning minimises the task loss alone."""
    data = small_data()
    strong = run(linear_client(ProximalClient, mu=5.0), data, local_steps=1, finetune_epochs=2)
    plain = run(linear_client(), data, local_steps=1, finetune_epochs=2)
    for i in range(6):
        assert_same(strong.client_state(i), plain.client_state(i))


@pytest.mark.parametrize("options", [{"mu": -0.1}, {"scaling": "eq8"}])
def test_bad_options(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="ProximalClient: "):
        linear_client(ProximalClient, **options)

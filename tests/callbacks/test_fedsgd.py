from typing import Any

import pytest
import torch
from torch import Tensor

from pflight.callbacks import FedAvg, FedSGD
from pflight.errors import ConfigurationError
from pflight.models import Classifier
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
    sgd,
    small_data,
    world_q,
)


def test_q1() -> None:
    federation = run(quadratic_client(), world_q(), FedSGD(lr=0.1))
    assert flat(federation.server_states()[0]) == pytest.approx([0.25, 0.15], abs=1e-12)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_several_rounds_with_partial_participation(weighting: str) -> None:
    data = small_data(cohort_size=3, dtype=torch.float64)
    client = linear_client(double=True)
    federation = run(client, data, FedSGD(lr=0.3, weighting=weighting), rounds=4)
    world = reference.SoftmaxRegression(
        [data.samples(i, "train") for i in range(data.num_clients)], CLASSES
    )
    cohorts = [entry.clients for entry in federation.history]
    expected = reference.fedsgd(world, flat(client.state_dict()), cohorts, 0.3, weighting)
    assert flat(federation.server_states()[0]) == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_a_gradient_over_more_samples_than_fit_one_pass_is_still_their_mean() -> None:
    data = small_data(counts=[700, 1100], dtype=torch.float64)
    client = linear_client(double=True)
    federation = run(client, data, FedSGD(lr=0.3))
    world = reference.SoftmaxRegression([data.samples(i, "train") for i in range(2)], CLASSES)
    expected = reference.fedsgd(world, flat(client.state_dict()), [[0, 1]], 0.3)
    assert flat(federation.server_states()[0]) == pytest.approx(expected, rel=1e-12, abs=1e-14)


@pytest.mark.short("uniform")
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_it_is_fedavg_with_one_full_batch_step(weighting: str) -> None:
    data = small_data(batch_size=None, cohort_size=4, dtype=torch.float64)
    client = linear_client(double=True, optimizer=sgd(0.2))
    gradients = run(client, data, FedSGD(lr=0.2, weighting=weighting), rounds=3)
    models = run(client, data, FedAvg(weighting), rounds=3, local_steps=1)
    assert flat(gradients.server_states()[0]) == pytest.approx(
        flat(models.server_states()[0]), rel=1e-12, abs=1e-14
    )


@pytest.mark.parametrize("count", [1, 2, 9])
def test_the_stochastic_variant_takes_the_first_batches_of_the_epoch(count: int) -> None:
    data = small_data(counts=[10], dtype=torch.float64)  # batches of 4, 4 and 2
    client = linear_client(double=True)
    federation = run(client, data, FedSGD(lr=0.1, batches=count))
    world = reference.SoftmaxRegression([data.samples(0, "train")], CLASSES)
    chosen = torch.cat([torch.from_numpy(b) for b in batches_of(data, 0, 0, 1)[:count]]).numpy()
    start = flat(client.state_dict())
    assert flat(federation.server_states()[0]) == pytest.approx(
        start - 0.1 * world.gradient(start, 0, chosen), rel=1e-12, abs=1e-14
    )


def test_a_users_server_optimizer_takes_the_gradient() -> None:
    data = small_data(dtype=torch.float64)
    client = linear_client(double=True)
    federation = run(client, data, FedSGD(), server_optimizer=sgd(0.5, weight_decay=0.1))
    world = reference.SoftmaxRegression([data.samples(i, "train") for i in range(6)], CLASSES)
    start = flat(client.state_dict())
    (cohort,) = (entry.clients for entry in federation.history)
    expected = reference.fedsgd(world, start, [cohort], 0.5) - 0.5 * 0.1 * start
    assert flat(federation.server_states()[0]) == pytest.approx(expected, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("options", [{"lr": 0.0}, {"batches": 0}, {"weighting": "size"}])
def test_bad_options(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="FedSGD"):
        FedSGD(**options)


def test_batchnorm_takes_all_samples_in_one_pass_as_fedavgs_step_does() -> None:
    data = small_data(counts=[600, 9], batch_size=None)
    client = batchnorm_client(optimizer=sgd(0.2))
    gradients = run(client, data, FedSGD(lr=0.2), rounds=2)
    models = run(client, data, FedAvg(), rounds=2, local_steps=1)
    torch.testing.assert_close(
        gradients.server_states()[0], models.server_states()[0], rtol=1e-5, atol=1e-6
    )


def test_batchnorm_skips_a_client_with_one_sample_as_fedavg_does() -> None:
    data = small_data(counts=[1, 9], batch_size=None)
    client = batchnorm_client(optimizer=sgd(0.2))
    gradients = run(client, data, FedSGD(lr=0.2))
    models = run(client, data, FedAvg(), local_steps=1)
    torch.testing.assert_close(
        gradients.server_states()[0], models.server_states()[0], rtol=1e-5, atol=1e-6
    )


class ReturnsDict(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return {"loss": super().training_step(batch, batch_idx)}


def test_a_training_step_may_return_a_dict() -> None:
    wrapped, plain = (
        run(linear_client(kind), small_data(), FedSGD(lr=0.1), rounds=2, engine="sequential")
        for kind in (ReturnsDict, Classifier)
    )
    assert_same(wrapped.server_states()[0], plain.server_states()[0])


class Manual(Classifier):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False


def test_manual_optimization_is_refused_before_training() -> None:
    with pytest.raises(ConfigurationError, match="Manual with manual optimization"):
        run(linear_client(Manual), small_data(), FedSGD())

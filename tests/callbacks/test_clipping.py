"""Gradient clipping where a client trains several models, or takes steps of several kinds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pflight.callbacks import (
    APFL,
    Ditto,
    FedAvg,
    FedSGD,
    Local,
    PerFedAvg,
    PFedMe,
    ServerCallback,
)
from pflight.errors import ConfigurationError
from pflight.models import Classifier
from tests import reference
from tests.runs import (
    CLASSES,
    ENGINES,
    assert_same,
    batches_of,
    batchnorm_client,
    flat,
    judged,
    linear_client,
    network,
    run,
    sgd,
    shared,
    small_data,
)

LIMIT, LR = 0.2, 0.5
ALGORITHMS = pytest.mark.parametrize("algorithm", ["norm", "value"])
LAM = 0.4
PERSONAL: dict[str, Callable[..., ServerCallback]] = {
    "Ditto": partial(Ditto, lam=LAM),
    "APFL": partial(APFL, alpha=0.75),
    "APFL-adaptive": partial(APFL, alpha=0.75, alpha_lr=0.1),
}
ALONE = {  # where personal models are trained alone
    "Ditto": partial(Ditto, lam=0.0),
    "APFL": partial(APFL, alpha=1.0),
}


def client(
    kind: type[Classifier] = Classifier,
    algorithm: str = "norm",
    make: Callable[..., Classifier] = linear_client,
    **options: Any,
) -> Classifier:
    clipping = {"gradient_clip_val": LIMIT, "gradient_clip_algorithm": algorithm}
    return make(kind, optimizer=sgd(LR), **clipping, **options).double()


def data(**options: Any) -> Any:
    return small_data(dtype=torch.float64, cohort_size=4, **options)


def manual(kind: type[Classifier]) -> type[Classifier]:
    """Return a client of a kind that takes its steps, and clips, by itself."""

    class Manual(kind):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.automatic_optimization = False

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, self.gradient_clip_val, self.gradient_clip_algorithm)
            optimizer.step()

    return Manual


@pytest.mark.short(
    "Ditto-norm-vectorized", "APFL-value-sequential", "APFL-adaptive-norm-sequential"
)
@ENGINES
@ALGORITHMS
@pytest.mark.parametrize("method", PERSONAL)
def test_the_shared_model_is_fedavgs(method: str, algorithm: str, engine: str) -> None:
    callback = PERSONAL[method]("samples")
    one = run(client(algorithm=algorithm), data(), callback, 3, engine=engine)
    other = run(client(algorithm=algorithm), data(), FedAvg(), 3)
    assert shared(one) == pytest.approx(shared(other), rel=1e-10, abs=1e-12)
    free = run(linear_client(double=True, optimizer=sgd(LR)), data(), FedAvg(), 3)
    assert np.abs(shared(free) - shared(other)).max() > 0.05  # clipping is felt


@pytest.mark.short("Ditto-norm-sequential", "APFL-value-vectorized")
@ENGINES
@ALGORITHMS
@pytest.mark.parametrize("method", ALONE)
def test_personal_models_without_a_tie_are_those_of_local(
    method: str, algorithm: str, engine: str
) -> None:
    everybody = small_data(dtype=torch.float64)
    one = run(client(algorithm=algorithm), everybody, ALONE[method](), 3, engine=engine)
    other = run(client(algorithm=algorithm), everybody, Local(), 3)
    for i in range(6):
        assert judged(one, i) == pytest.approx(judged(other, i), rel=1e-10, abs=1e-12)


def test_manual_optimization_clips_alike() -> None:
    one = run(client(manual(Classifier)), data(), FedAvg(), 2)
    other = run(client(), data(), FedAvg(), 2, engine="sequential")
    for i in range(6):
        assert_same(one.client_state(i), other.client_state(i))
    assert_same(one.server_states()[0], other.server_states()[0])


@pytest.mark.parametrize("method", PERSONAL)
def test_a_personal_copy_has_no_manual_optimization(method: str) -> None:
    with pytest.raises(ConfigurationError, match="manual optimization"):
        run(client(manual(Classifier)), data(), PERSONAL[method]())


def clipped(gradient: np.ndarray) -> np.ndarray:
    return gradient * min(1.0, LIMIT / (np.linalg.norm(gradient) + 1e-6))


@ENGINES
@pytest.mark.parametrize("method", ["Ditto", "APFL"])
def test_it_is_what_a_plain_computation_gives(method: str, engine: str) -> None:
    federation = run(client(), data(), PERSONAL[method](), 3, engine=engine)
    world = reference.SoftmaxRegression([data().samples(i, "train") for i in range(6)], CLASSES)
    theta = flat(linear_client(double=True).state_dict())
    personal: dict[int, np.ndarray] = {}
    for round_, entry in enumerate(federation.history):
        models = []
        for i in entry.clients:
            w, v = theta.copy(), personal.get(i, theta).copy()
            for batch in batches_of(data(), round_, i, 1):
                if method == "Ditto":
                    slope = world.gradient(v, i, batch) + LAM * (v - theta)
                else:
                    slope = 0.75 * world.gradient(0.75 * v + 0.25 * w, i, batch)
                w = w - LR * clipped(world.gradient(w, i, batch))
                v = v - LR * clipped(slope)
            models.append(w)
            personal[i] = v
        weights = world.counts[entry.clients] if method == "Ditto" else None
        theta = np.average(models, axis=0, weights=weights)
    assert shared(federation) == pytest.approx(theta, rel=1e-10, abs=1e-12)
    for i, v in personal.items():
        own = v if method == "Ditto" else 0.75 * v + 0.25 * theta
        assert judged(federation, i) == pytest.approx(own, rel=1e-10, abs=1e-12)


@pytest.mark.short("sequential")
@ENGINES
def test_buffers_and_several_layers_change_nothing_of_it(engine: str) -> None:
    ditto = run(client(make=batchnorm_client), data(), Ditto(lam=2.0), 3, engine=engine)
    plain = run(client(make=batchnorm_client), data(), FedAvg(), 3, engine=engine)
    assert shared(ditto) == pytest.approx(shared(plain), rel=1e-9, abs=1e-11)


@pytest.mark.short("sequential")
@ENGINES
def test_one_step_of_pfedme_is_fedavgs_also_when_it_is_clipped(engine: str) -> None:
    callback = PFedMe(lam=4.0, personal_steps=1, personal_lr=0.25)
    one = run(client(), data(), callback, 3, local_steps=1, engine=engine)
    other = run(client(), data(), FedAvg(), 3, local_steps=1)
    assert shared(one) == pytest.approx(shared(other), rel=1e-10, abs=1e-12)


@ENGINES
@ALGORITHMS
def test_per_fedavgs_adaptation_is_never_clipped(algorithm: str, engine: str) -> None:
    """Neither in the loss that it trains on nor before a client is judged."""
    alpha, samples = 0.8, data(batch_size=None)
    made = client(algorithm=algorithm)
    federation = run(made, samples, PerFedAvg(alpha=alpha), 2, engine=engine)
    world = reference.SoftmaxRegression([samples.samples(i, "train") for i in range(6)], CLASSES)
    theta = shared(federation)
    for i in range(6):
        slope = world.gradient(theta, i, np.arange(world.counts[i]))
        assert np.linalg.norm(slope) > LIMIT
        assert judged(federation, i) == pytest.approx(theta - alpha * slope, rel=1e-10, abs=1e-12)


@pytest.mark.short("norm-sequential", "value-vectorized")
@ENGINES
@ALGORITHMS
def test_fedsgd_is_fedavg_with_one_full_batch_step(algorithm: str, engine: str) -> None:
    samples = data(batch_size=None)
    one = run(client(algorithm=algorithm), samples, FedSGD(lr=LR), 3, engine=engine)
    other = run(client(algorithm=algorithm), samples, FedAvg(), 3, local_steps=1)
    assert network(one.server_states()[0]) == pytest.approx(shared(other), rel=1e-10, abs=1e-12)


@ENGINES
@pytest.mark.filterwarnings("ignore:engine='vectorized', but clients train one by one:UserWarning")
def test_a_clients_own_clip_gradients_is_called(engine: str) -> None:
    class Halved(Classifier):
        def clip_gradients(self, optimizer: Any, *limits: Any) -> None:
            for parameter in self.parameters():
                parameter.grad.mul_(0.5)

    one = run(client(Halved), data(), FedAvg(), 2, engine=engine)
    other = run(linear_client(double=True, optimizer=sgd(LR / 2)), data(), FedAvg(), 2)
    assert shared(one) == pytest.approx(shared(other), rel=1e-10, abs=1e-12)

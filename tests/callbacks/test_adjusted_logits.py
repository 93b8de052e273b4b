"""FedRS and FedLC (section C.5)."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflight import Federation
from pflight.callbacks import FedAvg, FedLC, FedRS
from pflight.datamodules import TensorClients
from pflight.errors import ConfigurationError
from pflight.models import Classifier, Regressor
from tests import networks_reference as reference
from tests.runs import (
    CLASSES,
    ENGINES,
    FEATURES,
    assert_same,
    batchnorm_client,
    quiet_trainer,
    run,
    sgd,
    small_data,
)

A = (torch.tensor([[1.0, 0], [0, 1], [1, 1]], dtype=torch.double), torch.tensor([0, 0, 1]))
B = (torch.tensor([[1.0, -1], [2, 0]], dtype=torch.double), torch.tensor([2, 2]))
BODY, HEAD, BIAS = "network.0.weight", "network.1.weight", "network.1.bias"


def client_f(**options: Any) -> Classifier:
    """Return the client of world F."""
    network = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 3)).double()
    with torch.no_grad():
        network[0].weight.copy_(torch.eye(2))
        network[1].weight.copy_(torch.tensor([[1.0, 0], [0, 1], [-1, -1]]))
        network[1].bias.zero_()
    return Classifier(network, 3, **{"optimizer": sgd(0.1), **options})


def fit(
    callback: FedAvg, samples: tuple[Tensor, Tensor], engine: str, **options: Any
) -> tuple[float, dict[str, list[float]]]:
    """Return the loss of a step of a client of world F, and where it leads."""
    data = TensorClients([samples], val=[samples], num_classes=3, batch_size=None)
    federation = run(client_f(), data, callback, engine=engine, **options)
    state = federation.server_states()[0]
    loss = federation.history[0].metrics["train/loss"]
    return loss, {name: value.flatten().tolist() for name, value in state.items()}


def six(*values: float) -> Any:
    return pytest.approx(values, abs=6e-7)


@ENGINES
def test_f2_fedrs(engine: str) -> None:
    loss, state = fit(FedRS(), A, engine)
    assert loss == pytest.approx(0.895787, abs=6e-7)
    assert state[BODY] == six(1.000166, 0.013409, 0.013409, 1.000166)
    assert state[BIAS] == six(0.022398, -0.010936, -0.005731)
    loss, state = fit(FedRS(scaling="soft"), A, engine)
    assert loss == pytest.approx(0.892769, abs=6e-7)
    assert state[BIAS] == six(0.019349, -0.005166, -0.006231)
    loss, state = fit(FedRS(a=0.0), B, engine)
    assert loss == pytest.approx(1.928618, abs=6e-7)
    assert state[BIAS] == six(0, 0, 0.080164)


@ENGINES
def test_f2_fedlc(engine: str) -> None:
    loss, state = fit(FedLC(), A, engine)
    assert loss == pytest.approx(0.749418, abs=6e-7)
    assert state[HEAD] == six(0.989971, 0.005299, 0.010029, 0.994701, -1, -1)
    assert state[BIAS] == six(0.013260, -0.013260, 0)


@ENGINES
def test_f2_fedlc_of_a_single_class_learns_nothing(engine: str) -> None:
    loss, state = fit(FedLC(), B, engine)
    assert loss == 0
    start = client_f().state_dict()
    assert state == {name: value.flatten().tolist() for name, value in start.items()}


def calibrated(counts: np.ndarray, least: float) -> np.ndarray:
    return -0.7 * np.maximum(counts, least) ** -0.25


ADJUSTED = {  # by class counts: what logits are multiplied by, and what is added to them
    "hard": (FedRS(0.3), lambda n: (np.where(n > 0, 1, 0.3), 0 * n)),
    "soft": (FedRS(0.3, "soft"), lambda n: (0.3 + 0.7 * n / n.max(), 0 * n)),
    "masked": (FedLC(0.7), lambda n: (n > 0, np.where(n > 0, calibrated(n, 1), -np.inf))),
    "counted": (FedLC(0.7, "counted"), lambda n: (0 * n + 1, calibrated(n, 1e-8))),
}


@pytest.mark.short("*-sequential")
@ENGINES
@pytest.mark.parametrize("kind", ADJUSTED)
def test_several_rounds(kind: str, engine: str) -> None:
    """With unequal clients, some of which lack classes, and BatchNorm."""
    callback, adjusted = ADJUSTED[kind]
    data, client, epochs = reference.data(), reference.client(), 2
    federation = run(client, data, copy.deepcopy(callback), 3, engine=engine, local_epochs=epochs)
    counts = data.class_counts("train").double().numpy()
    assert (counts == 0).any()
    server = copy.deepcopy(client.network)
    for round_, cohort in enumerate(reference.cohorts(federation)):
        models = []
        for i in cohort:
            model = copy.deepcopy(server)

            def loss(network: nn.Sequential, x: Tensor, y: Tensor, i: int = i) -> Tensor:
                scale, shift = (torch.tensor(part) for part in adjusted(counts[i]))
                return F.cross_entropy(network(x) * scale + shift, y)

            order = reference.batches(data, round_, i, epochs)
            reference.train(model, data.samples(i, "train"), order, loss)
            models.append(model.state_dict())
        weights = data.num_samples("train")[cohort].double()
        weights /= weights.sum()
        mean = {
            name: sum(w * m[name] for w, m in zip(weights, models, strict=True))
            if models[0][name].is_floating_point()
            else torch.stack([m[name] for m in models]).amax(0)
            for name in models[0]
        }
        server.load_state_dict(mean)
    for name, value in federation.server_states()[0].items():
        expected = server.state_dict()[name.removeprefix("network.")]
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("callback", [FedRS(a=1.0), FedLC(0.0, "counted")])
def test_it_is_fedavg_where_nothing_is_adjusted(callback: FedAvg) -> None:
    data = small_data(cohort_size=3, dtype=torch.float64)
    one, other = (
        run(batchnorm_client().double(), data, c, 3).server_states()[0]
        for c in (callback, FedAvg())
    )
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("callback", [FedRS(a=0.1), FedRS(0.1, "soft"), FedLC(2.0)])
def test_it_is_fedavg_where_all_clients_have_all_classes_alike(callback: FedAvg) -> None:
    random = torch.Generator().manual_seed(1)
    pairs = [
        (torch.randn(count, FEATURES, generator=random), torch.arange(count) % CLASSES)
        for count in (6, 9, 12)
    ]
    data = TensorClients(pairs, num_classes=CLASSES, batch_size=4)
    one, other = (run(batchnorm_client(), data, c, 2).server_states()[0] for c in (callback, None))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_clients_are_judged_by_logits_as_they_are_and_tuned_by_adjusted_ones() -> None:
    data = TensorClients([A], val=[A], num_classes=3, batch_size=None)
    federation = run(client_f(), data, FedRS(a=0.0), 1, local_steps=1, finetune_epochs=1)
    module = client_f()
    for _ in range(2):
        module.zero_grad()
        z = module.network(A[0])
        F.cross_entropy(z * torch.tensor([1.0, 1, 0]), A[1]).backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= 0.1 * parameter.grad
    torch.testing.assert_close(federation.client_state(0), dict(module.state_dict()))
    expected = F.cross_entropy(module.network(A[0]), A[1]).item()
    assert federation.history[0].metrics["val/loss"] == pytest.approx(expected, rel=1e-9)


def test_traffic_is_that_of_fedavg() -> None:
    data = small_data(cohort_size=3)
    one, other = (run(batchnorm_client(), data, c, 2) for c in (FedLC(), FedAvg()))
    for left, right in zip(one.history, other.history, strict=True):
        assert (left.bytes_down, left.bytes_up) == (right.bytes_down, right.bytes_up)


def test_what_does_not_fit_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigurationError, match=r"FedRS: a must be in \[0, 1\], got 2"):
        FedRS(a=2)
    with pytest.raises(ConfigurationError, match="FedLC: tau must be at least 0, got -1"):
        FedLC(tau=-1)
    pairs = [(torch.randn(6, 2), torch.randn(6, 1))] * 2
    data = TensorClients(pairs, val=pairs, batch_size=3)
    module = Regressor(nn.Linear(2, 1), optimizer=sgd(0.1))
    with pytest.raises(ConfigurationError, match="needs classes, and Regressor has no num_classes"):
        run(module, data, FedRS())


class Own(L.LightningModule):
    """A user's own module."""

    num_classes = CLASSES

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.fc = nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.fc(self.body(x).relu()), y)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("callback", [FedRS(a=0.0), FedLC()])
def test_a_module_of_ones_own(callback: FedAvg) -> None:
    """In which a class that a client lacks is not learned."""
    x, y = torch.randn(8, FEATURES), torch.arange(8) % 2
    data = TensorClients([(x, y)], val=[(x, y)], num_classes=CLASSES, batch_size=4)
    federation = Federation(Own())
    quiet_trainer(2, callback).fit(federation, datamodule=data)
    state, start = federation.server_states()[0], Own().state_dict()
    assert_same({"w": state["fc.weight"][2]}, {"w": start["fc.weight"][2]})
    assert not torch.equal(state["fc.weight"], start["fc.weight"])


def test_fedrs_scales_in_the_precision_of_the_logits() -> None:
    logits, counts = torch.ones(1, 2, dtype=torch.double), torch.tensor([3.0, 0.0]).double()
    scaled = FedRS(a=0.9).client_method.adjusted(logits, counts)
    assert scaled.tolist() == [[1.0, 0.9]]

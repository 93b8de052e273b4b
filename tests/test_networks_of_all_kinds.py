"""Networks whose states are out of the ordinary."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from pflight.callbacks import FedAvg, FedSGD, FeSEM, Local
from pflight.datamodules import TensorClients
from pflight.models import Classifier
from tests.runs import (
    CLASSES,
    FEATURES,
    assert_same,
    flat,
    linear_client,
    network_client,
    quiet_trainer,
    run,
    sgd,
    small_data,
)


class Tied(nn.Module):
    """Uses one layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = self.first
        self.output = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.second(torch.tanh(self.first(x))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(1, 5, batch_first=True)
        self.output = nn.Linear(5, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.cells(x.unsqueeze(-1))[0][:, -1])


def weight_norm() -> nn.Module:
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, 5))
    return nn.Sequential(normed, nn.ReLU(), nn.Linear(5, CLASSES))


def spectral_norm() -> nn.Module:
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, 5))
    return nn.Sequential(normed, nn.ReLU(), nn.Linear(5, CLASSES))


def old_spectral_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        normed = nn.utils.spectral_norm(nn.Linear(FEATURES, 5))
    return nn.Sequential(normed, nn.ReLU(), nn.Linear(5, CLASSES))


NETWORKS = [
    Tied,
    Recurrent,
    weight_norm,
    spectral_norm,
    lambda: nn.Sequential(nn.Linear(FEATURES, 6), nn.GroupNorm(2, 6), nn.Linear(6, CLASSES)),
    lambda: nn.Sequential(nn.Linear(FEATURES, 6), nn.PReLU(), nn.Linear(6, CLASSES)),
    lambda: nn.Sequential(nn.BatchNorm1d(FEATURES, affine=False), nn.Linear(FEATURES, CLASSES)),
    lambda: nn.Sequential(
        nn.BatchNorm1d(FEATURES, track_running_stats=False), nn.Linear(FEATURES, CLASSES)
    ),
    lambda: nn.Sequential(nn.BatchNorm1d(FEATURES, momentum=None), nn.Linear(FEATURES, CLASSES)),
]


def client_of(make: Any, **options: Any) -> Classifier:
    torch.manual_seed(3)
    return network_client(make(), **options)


@pytest.mark.short(
    "FedAvg-*", "FedSGD-Tied", "Local-Recurrent", "<lambda>-spectral_norm", "<lambda>-weight_norm"
)
@pytest.mark.filterwarnings("ignore:spectral norm keeps:UserWarning")
@pytest.mark.parametrize("make", NETWORKS)
@pytest.mark.parametrize("callback", [FedAvg, FedSGD, Local, lambda: FeSEM(2)])
def test_every_algorithm_trains_them(make: Any, callback: Any) -> None:
    client = client_of(make)
    federation = run(client, small_data(), callback(), rounds=3)
    before = client.state_dict()
    (last,) = (name for name in list(before)[-2:] if name.endswith("weight"))
    for i in range(6):
        assert not torch.equal(federation.client_state(i)[last], before[last])
    assert all(entry.failed == [] for entry in federation.history)


@pytest.mark.filterwarnings("ignore:spectral norm keeps:UserWarning")
@pytest.mark.parametrize("make", NETWORKS)
def test_one_client_trains_as_alone(make: Any) -> None:
    data = small_data(counts=[12])
    federation = run(client_of(make), data, FedAvg())
    alone = client_of(make)
    quiet_trainer(1, limit_val_batches=0).fit(alone, datamodule=data.client(0))
    torch.testing.assert_close(
        federation.server_states()[0], dict(alone.state_dict()), rtol=0, atol=1e-5
    )


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.parametrize("make", [spectral_norm, old_spectral_norm])
def test_the_vectors_of_spectral_norm_are_not_averaged_in_silence(make: Any) -> None:
    with pytest.warns(UserWarning, match=r"vectors of length 1 in network.0.*_u, .*_v, and their"):
        run(client_of(make), small_data(), FedAvg())
    federation = run(client_of(make), small_data(), FedAvg(buffers="local"), rounds=2)
    for client in range(3):
        state = federation.client_state(client)
        vectors = [tensor for name, tensor in state.items() if name.endswith(("_u", "_v"))]
        torch.testing.assert_close([v.norm().item() for v in vectors], [1.0, 1.0])


@pytest.mark.short("0.5")
@pytest.mark.parametrize("lr", [0.1, 0.5])
def test_a_tied_layer_stays_tied_whatever_the_server_optimizer(lr: float) -> None:
    data = small_data(batch_size=None)
    gradients = run(client_of(Tied), data, FedSGD(lr=lr), rounds=3)
    models = run(client_of(Tied, optimizer=sgd(lr)), data, FedAvg(), rounds=3, local_steps=1)
    torch.testing.assert_close(
        gradients.server_states()[0], models.server_states()[0], rtol=1e-5, atol=1e-6
    )
    client_method = run(client_of(Tied), data, FedAvg(), rounds=3, server_optimizer=sgd(0.5))
    for federation in (gradients, models, client_method):
        state = federation.server_states()[0]
        assert_same({"w": state["network.first.weight"]}, {"w": state["network.second.weight"]})
        assert_same(federation.client_state(0), state)


def test_whole_numbers_as_inputs() -> None:
    torch.manual_seed(0)
    train = [(torch.randint(20, (9, 5)), torch.randint(CLASSES, (9,))) for _ in range(3)]
    data = TensorClients(train, test=train, val=train, num_classes=CLASSES, batch_size=4)
    bag = nn.Sequential(nn.EmbeddingBag(20, 6), nn.Linear(6, CLASSES))
    for trainer in ({}, {"precision": "64-true"}, {"precision": "bf16-mixed"}):
        federation = run(network_client(bag), data, FedAvg(), rounds=2, trainer=trainer)
        assert federation.history[-1].failed == []


def test_a_clients_own_metric_is_its_own() -> None:
    class Measuring(Classifier):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

        def training_step(self, batch, batch_idx):
            x, y = batch
            self.accuracy(self(x), y)
            self.log("train/acc", self.accuracy)
            return super().training_step(batch, batch_idx)

    data = small_data(batch_size=None)
    federation = run(linear_client(Measuring), data, FedAvg())
    x, y = data.dataset(torch.arange(6), "train").__getitems__(range(46))
    expected = (linear_client()(x).argmax(1) == y).double().mean().item()
    assert federation.history[0].metrics["train/acc"] == pytest.approx(expected)
    assert list(federation.server_states()[0]) == ["network.weight", "network.bias"]


def test_a_client_may_hold_more_than_its_network() -> None:
    class Extra(Classifier):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.scale = nn.Parameter(torch.ones(()))
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

        def loss(self, batch):
            self.steps += 1
            return super().loss((batch[0] * self.scale, batch[1]))

    federation = run(linear_client(Extra), small_data(), FedAvg(), rounds=2)
    state = federation.server_states()[0]
    assert state["scale"] != 1
    assert state["steps"] == 2 * 3  # the client with the most batches has 3
    assert flat(federation.client_state(0)) == pytest.approx(flat(state))

"""Convolutions train with the channels of a pixel side by side; what travels is as ever."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pflight import Federation
from pflight.callbacks import FedAvg, Reptile
from pflight.datamodules import TensorClients
from pflight.method import ClientMethod
from pflight.models import Classifier, ElasticClient
from tests.runs import quiet_trainer, run, sgd


class Flat(nn.Module):
    """Takes its input as one vector, by a view of memory in the usual order."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1)


def network(flatten: nn.Module, channels: int = 5) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(2, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        flatten,
        nn.Linear(channels * 9, 3),
    ).double()


def images(clients: int = 3) -> TensorClients:
    random = torch.Generator().manual_seed(0)

    def pairs(samples: int) -> list[tuple[Tensor, Tensor]]:
        return [
            (
                torch.randn(samples, 2, 6, 6, generator=random, dtype=torch.float64),
                torch.randint(3, (samples,), generator=random),
            )
            for _ in range(clients)
        ]

    return TensorClients(pairs(10), test=pairs(4), val=pairs(4), num_classes=3, batch_size=4)


def client(
    flatten: nn.Module, kind: type[Classifier] = Classifier, channels: int = 5
) -> Classifier:
    return kind(network(flatten, channels), 3, optimizer=sgd(0.1, momentum=0.9)).double()


def fitted(kind: type[Classifier], flatten: nn.Module) -> Federation:
    server = Reptile() if issubclass(kind, ElasticClient) else FedAvg()
    return run(client(flatten, kind), images(), server, rounds=3, engine="sequential")


def is_channels_last(federation: Federation) -> bool:
    return lies_channels_last(federation.clients.attached_engine.models.module.network[0].weight)


def lies_channels_last(weight: Tensor) -> bool:
    return weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()


@pytest.mark.parametrize("kind", [Classifier, ElasticClient])
def test_a_network_that_needs_the_usual_order_ends_the_same(kind: type[Classifier]) -> None:
    fast, usual = fitted(kind, nn.Flatten()), fitted(kind, Flat())
    assert is_channels_last(fast)
    assert not is_channels_last(usual)
    assert fast.history[-1].failed == usual.history[-1].failed == []
    ours, theirs = fast.server_states()[0], usual.server_states()[0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert all(value.is_contiguous() for value in ours.values())
    mine, other = (federation.client_metrics("val")["loss"] for federation in (fast, usual))
    torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("flatten", [nn.Flatten(), Flat()])
def test_other_weights_of_a_client_lie_as_its_own(flatten: nn.Module) -> None:
    federation = fitted(ElasticClient, flatten)
    last = federation.clients.attached_engine.models.client
    for weights in (last.weights, last.memory, last.received, last.anchor):
        assert lies_channels_last(weights["network.0.weight"]) == is_channels_last(federation)


def test_a_penalty_that_needs_the_usual_order_gets_it() -> None:
    class Ridge(Classifier):
        def loss(self, batch):
            weights = torch.cat([parameter.view(-1) for parameter in self.parameters()])
            return super().loss(batch) + weights.square().sum()

    federation = fitted(Ridge, nn.Flatten())
    assert not is_channels_last(federation)
    assert federation.history[-1].failed == []


def test_a_half_that_needs_what_was_sent_in_the_usual_order_gets_it() -> None:
    class Drift(ClientMethod):
        def penalty(self, c):
            sent = torch.cat([weight.view(-1) for weight in c.anchor.values()])
            return (torch.cat([w.flatten() for w in c.weights.values()]) - sent).square().sum()

    class Server(FedAvg):
        def __init__(self) -> None:
            super().__init__()
            self.client_method = Drift()

    federation = run(client(nn.Flatten()), images(), Server(), rounds=2, engine="sequential")
    assert not is_channels_last(federation)
    assert federation.history[-1].failed == []


def test_clients_with_hooks_and_networks_of_large_kernels_stay_as_they_are() -> None:
    class Hooked(Classifier):
        def on_after_backward(self):
            pass

    assert not is_channels_last(fitted(Hooked, nn.Flatten()))
    wide = nn.Sequential(nn.Conv2d(2, 1024, 32, padding=16), nn.Flatten(), nn.Linear(1024 * 49, 3))
    federation = Federation(Classifier(wide.double(), 3), engine="sequential")
    quiet_trainer(0, FedAvg()).fit(federation, datamodule=images(1))
    assert not is_channels_last(federation)


def test_the_trial_draws_no_random_numbers() -> None:
    torch.manual_seed(5)
    dropping = nn.Sequential(nn.Conv2d(2, 5, 3), nn.Dropout(), nn.Flatten(), nn.Linear(80, 3))
    module = Classifier(dropping.double(), 3)
    expected = torch.get_rng_state()
    quiet_trainer(0, FedAvg()).fit(Federation(module, engine="sequential"), datamodule=images())
    assert torch.equal(torch.get_rng_state(), expected)

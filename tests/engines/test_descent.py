"""Steps without the optimizer's bookkeeping are the optimizer's steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from pflight.callbacks import FedAvg
from pflight.engines.alone.training import Descent
from pflight.engines.base import paced
from pflight.method import Phase
from pflight.models import Classifier
from tests.runs import linear_client, run, sgd, small_data

pytestmark = pytest.mark.fast


class TwoHeads(nn.Module):
    """A network of which one head is used at a time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Linear(4, 5)
        self.heads = nn.ModuleList(nn.Linear(5, 1) for _ in range(2))

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](self.body(x).tanh())


OPTIONS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True},
    {"maximize": True, "weight_decay": 0.1},
    {"foreach": True, "momentum": 0.5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_steps_are_those_of_sgd(options: dict[str, Any]) -> None:
    networks = [TwoHeads().double() for _ in range(2)]
    optimizers = [
        SGD(
            [{"params": n.body.parameters(), "lr": 0.3}, {"params": n.heads.parameters()}],
            **options,
        )
        for n in networks
    ]
    assert Descent.suits(optimizers[0])
    descent = Descent(optimizers[0])
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for head in (0, 1, 1, 0):  # a head that is not used keeps its momentum and its weights
        descent.step(networks[0](x, head).square().mean())
        optimizers[1].zero_grad()
        networks[1](x, head).square().mean().backward()
        optimizers[1].step()
    states = [network.state_dict() for network in networks]
    torch.testing.assert_close(*states, rtol=0, atol=1e-12)


def test_one_step_by_hand() -> None:
    w = nn.Parameter(torch.tensor([2.0, -1.0], dtype=torch.float64))
    descent = Descent(SGD([w], lr=0.1, momentum=0.5))
    for _ in range(2):
        descent.step((w * torch.tensor([1.0, 3.0])).sum())
    # velocities (1, 3), then (1.5, 4.5)
    torch.testing.assert_close(w.detach(), torch.tensor([1.75, -1.75], dtype=torch.float64))
    assert w.grad is None


def parameters(trained: bool = True) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=trained)]


def hooked() -> SGD:
    optimizer = SGD(parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def scheduled() -> SGD:
    optimizer = SGD(parameters(), lr=0.1)
    StepLR(optimizer, 1)
    return optimizer


class OwnSGD(SGD):
    """A subclass may do anything in its step."""


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: Adam(parameters()),
        lambda: OwnSGD(parameters(), lr=0.1),
        lambda: [SGD(parameters(), lr=0.1)] * 2,
        lambda: SGD(parameters(trained=False), lr=0.1),
        lambda: SGD(parameters(), lr=0.1, differentiable=True),
        hooked,
        scheduled,
    ],
    ids=["Adam", "subclass", "two", "frozen", "differentiable", "hook", "scheduler"],
)
def test_other_optimizers_step_themselves(optimizer: Callable[[], Any]) -> None:
    assert not Descent.suits(optimizer())


class Hooked(Classifier):
    """Goes through all of Lightning's hooks, because one of them is its own."""

    def on_before_zero_grad(self, optimizer):
        pass


@pytest.mark.parametrize("options", [{}, {"local_epochs": 3}, {"local_steps": 4}], ids=str)
def test_a_client_with_hooks_and_one_without_end_the_same(options: dict[str, Any]) -> None:
    optimizer = sgd(0.1, momentum=0.9)
    data = small_data(dtype=torch.float64)
    plain, hooked = (
        run(
            linear_client(kind, double=True, optimizer=optimizer),
            data,
            FedAvg(),
            rounds=2,
            engine="sequential",
            **options,
        )
        for kind in (Classifier, Hooked)
    )
    torch.testing.assert_close(
        plain.server_states()[0], hooked.server_states()[0], rtol=0, atol=1e-12
    )
    losses = [federation.history[1].metrics["train/loss"] for federation in (plain, hooked)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_a_client_may_know_its_epoch_and_step() -> None:
    class Weighted(Classifier):
        def loss(self, batch):
            return super().loss(batch) * (1 + self.current_epoch) / (1 + self.global_step)

    class HookedWeighted(Hooked, Weighted):
        pass

    states = [
        run(
            linear_client(kind, double=True),
            small_data(dtype=torch.float64),
            FedAvg(),
            local_epochs=2,
            engine="sequential",
        ).server_states()[0]
        for kind in (Weighted, HookedWeighted)
    ]
    torch.testing.assert_close(*states, rtol=0, atol=1e-12)


def test_a_phases_learning_rate_ends_with_it_also_by_a_failure() -> None:
    groups = [{"lr": 0.1}, {"lr": 0.2}]
    with suppress(OSError), paced(groups, Phase(0, 1, ["weight"], lr=5.0), lambda _: None):
        assert [group["lr"] for group in groups] == [5.0, 5.0]
        raise OSError("disk")
    assert [group["lr"] for group in groups] == [0.1, 0.2]

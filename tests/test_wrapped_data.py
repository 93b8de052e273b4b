"""What a data module defines for itself is used by the data modules that wrap it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from pflight.callbacks import FedAvg, FedFomo
from pflight.data.cohort import CohortSampler
from pflight.data.loaders import Split
from pflight.datamodules import FederatedDataModule, HeldOut
from tests.runs import CLASSES, ENGINES, linear_client, run, samples, small_data

COUNTS = 10, 4, 7, 1
DERIVED = {
    *("fill", "id_offset", "check_client", "numbered", "setup", "summary", "partition_figure"),
    *("dataset", "client", "centralized"),
    *(f"{stage}_dataloader" for stage in ("train", "val", "test", "predict")),
}
"""What needs no delegating, since it follows from the rest."""


class Own(FederatedDataModule):
    """Data with an order, an augmentation, newcomers and cohorts of their own."""

    def __init__(self, *counts: int) -> None:
        super().__init__(num_classes=CLASSES, batch_size=4)
        self.num_clients, self.counts, self.called = len(counts), counts, []

    def samples(self, client: int, split: Split) -> tuple[Tensor, Tensor]:
        return samples(self.counts[client], client)

    def order(self, client: int, round: int, epoch: int = 0) -> Tensor:
        self.called.append("order")
        return torch.arange(self.counts[client]).flip(0)

    def augment(self, x: Tensor, client: int, round: int, epoch: int = 0) -> Tensor:
        self.called.append("augment")
        return x + client + 1

    @property
    def new_clients(self) -> Tensor:
        return torch.arange(self.num_clients)[2:3]

    @property
    def cohorts(self) -> CohortSampler:
        clients = self.train_clients[:2]
        return CohortSampler(clients, self.num_samples()[clients])


def test_nothing_that_data_can_define_is_forgotten() -> None:
    """A new method of data modules is delegated, or follows from others."""
    names = {name for name in vars(FederatedDataModule) if not name.startswith("_")}
    kinds = HeldOut.__mro__[: HeldOut.__mro__.index(FederatedDataModule)]
    assert names - DERIVED <= {name for kind in kinds for name in vars(kind)}


@ENGINES
def test_a_client_trains_by_the_order_and_augmentation_of_its_data(engine: str) -> None:
    calls = []
    for callback in (FedAvg(), FedFomo()):
        data = Own(8, 8, 8)
        run(linear_client(), data, callback, engine=engine)
        calls.append(sorted(data.called))
    assert calls[0] == calls[1] == ["augment", "augment", "order", "order"]


@pytest.mark.parametrize("make", [partial(Own, *COUNTS), partial(small_data, COUNTS, seed=3)])
def test_what_remains_is_in_the_order_of_the_data(make: Callable[[], FederatedDataModule]) -> None:
    whole = make()
    data = HeldOut(whole, 0.3)
    orders = data.orders(range(4), 1, 2)
    for client, order in enumerate(orders):
        assert torch.equal(order, data.order(client, 1, 2))
        x, _ = data.samples(client, "train")
        before = whole.samples(client, "train")[0][whole.order(client, 1, 2)]
        remains = (before[:, None] == x).all(dim=2).any(dim=1)
        assert torch.equal(x[order], before[remains])


def test_newcomers_and_cohorts_are_those_of_the_data() -> None:
    data = HeldOut(Own(*COUNTS), 0.2)
    assert data.new_clients.tolist() == [2]
    assert data.train_clients.tolist() == [0, 1, 3]
    assert data.cohorts.sample(0).tolist() == [0, 1]


@pytest.mark.parametrize("make", [lambda: Own(9).centralized(), lambda: Own(5, 9).client(1)])
def test_a_client_alone_sees_its_samples_in_the_order_of_the_data(make: Callable[[], Any]) -> None:
    local = make()
    seen = torch.cat([x for x, _ in local.train_dataloader()])
    client = local.data.num_clients - 1
    assert torch.equal(seen, local.data.samples(client, "train")[0].flip(0))

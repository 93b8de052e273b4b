from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pflight.datamodules import (
    Augmentation,
    Centralized,
    ClientData,
    FederatedDataModule,
    TensorClients,
)
from pflight.errors import ConfigurationError


def clients(*sizes: int, offset: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Make clients whose every sample has its own value."""
    values = torch.arange(offset, offset + sum(sizes)).float()
    return [(x[:, None], x.long() % 2) for x in values.split(sizes)]


def make(**options) -> TensorClients:
    train, test, val = clients(7, 5, 4), clients(2, 0, 3, offset=20), clients(1, 2, 0, offset=30)
    return TensorClients(train, test=test, val=val, num_classes=2, **options)


def values(loader) -> list[list[int]]:
    return [x.flatten().long().tolist() for x, _ in loader]


def test_loaders_yield_client_ids_that_lightning_will_not_shard():
    data = make(eval_chunk=1, cohort_size=2)
    loaders = [data.train_dataloader(), data.val_dataloader(), data.test_dataloader()]
    assert not any(isinstance(loader, DataLoader) for loader in loaders)
    assert len(loaders[0]) == 1
    assert [ids.tolist() for ids in loaders[1]] == [[0], [1]]
    assert [ids.tolist() for ids in loaders[2]] == [[0], [2]]
    assert len(loaders[2]) == 2
    assert [ids.tolist() for ids in make().predict_dataloader()] == [[0, 2]]


def test_newcomers_never_train_but_are_tested():
    data = TensorClients(
        clients(*[3] * 10), test=clients(*[1] * 10), val=clients(*[1] * 10), num_classes=2,
        holdout_clients=0.25, seed=4,
    )  # fmt: skip
    new = data.new_clients.tolist()
    assert len(new) == 3
    assert new == sorted(new)
    assert sorted(new + data.train_clients.tolist()) == list(range(10))
    assert data.cohorts.clients.tolist() == data.train_clients.tolist()
    assert torch.cat(list(data.val_dataloader())).tolist() == data.train_clients.tolist()
    assert torch.cat(list(data.test_dataloader())).tolist() == list(range(10))
    pooled = {value for batch in values(data.centralized().train_dataloader()) for value in batch}
    assert pooled == {3 * client + i for client in data.train_clients.tolist() for i in range(3)}


def test_participation_counts_only_clients_that_can_train():
    train = [*clients(*[3] * 8), *clients(0, 0)]
    data = TensorClients(train, num_classes=2, participation=0.5)
    assert data.cohorts.size == 4


def test_the_order_of_samples_depends_on_seed_round_client_and_epoch():
    data = TensorClients(clients(50, 50), num_classes=2)
    orders = {
        tuple(order.tolist())
        for order in (
            data.order(0, 0, 0),
            data.order(1, 0, 0),
            data.order(0, 1, 0),
            data.order(0, 0, 1),
            TensorClients(clients(50, 50), num_classes=2, seed=1).order(0, 0, 0),
        )
    }
    assert len(orders) == 5
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert torch.equal(data.order(1, 3, 2), data.order(1, 3, 2))


def test_a_client_alone_sees_the_batches_of_its_rounds():
    data = make(batch_size=3)
    alone = data.client(1)
    loader = alone.train_dataloader()
    assert isinstance(loader, DataLoader)
    for round in (0, 4):
        loader.sampler.set_epoch(round)
        x, _ = data.samples(1, "train")
        expected = x[data.order(1, round)].flatten().long().split(3)
        assert values(loader) == [batch.tolist() for batch in expected]
    assert values(alone.val_dataloader()) == [[31, 32]]
    assert alone.test_dataloader() == []
    assert values(make(batch_size=None).client(0).train_dataloader())[0] != list(range(7))
    assert len(values(make(batch_size=None).client(0).train_dataloader())) == 1


def test_centralized_is_the_union_in_a_new_order_each_epoch():
    loader = make(batch_size=4).centralized().train_dataloader()
    first = [value for batch in values(loader) for value in batch]
    loader.sampler.set_epoch(1)
    second = [value for batch in values(loader) for value in batch]
    assert first != second
    assert sorted(first) == sorted(second) == list(range(16))
    assert values(make().centralized().test_dataloader()) == [[20, 21, 22, 23, 24]]


def test_one_client_with_all_data_is_the_centralized_run():
    data = TensorClients(clients(20), num_classes=2, batch_size=6)
    for epoch in (0, 2):
        loaders = data.client(0).train_dataloader(), data.centralized().train_dataloader()
        for loader in loaders:
            loader.sampler.set_epoch(epoch)
        assert values(loaders[0]) == values(loaders[1])


@dataclass(frozen=True)
class AddNoise(Augmentation):
    """Adds each sample's random number to its feature."""

    num_draws: ClassVar[int] = 1

    def __call__(self, x: Tensor, noise: Tensor, fill: Tensor) -> Tensor:
        return x + noise + fill


def test_augmentation_depends_on_seed_round_client_and_epoch():
    x = torch.zeros(50, 1)
    data = TensorClients(clients(50, 50), num_classes=2, augmentation=AddNoise())
    other = TensorClients(clients(50, 50), num_classes=2, augmentation=AddNoise(), seed=1)
    changed = [
        data.augment(x, 0, 0, 0),
        data.augment(x, 1, 0, 0),
        data.augment(x, 0, 1, 0),
        data.augment(x, 0, 0, 1),
        other.augment(x, 0, 0, 0),
    ]
    assert len({tuple(features.flatten().tolist()) for features in changed}) == 5
    assert torch.equal(data.augment(x, 1, 3, 2), data.augment(x, 1, 3, 2))
    assert make().augment(x, 0, 0) is x


@pytest.mark.parametrize("batch_size", [3, None])
def test_loaders_augment_the_training_samples_alone(batch_size: int | None):
    data = make(batch_size=batch_size, augmentation=AddNoise())
    loader = data.client(1).train_dataloader()
    for round in (0, 4):
        loader.sampler.set_epoch(round)
        x, y = data.samples(1, "train")
        order = data.order(1, round)
        seen = [torch.cat(parts) for parts in zip(*loader, strict=True)]
        assert torch.equal(seen[0], data.augment(x, 1, round)[order])
        assert torch.equal(seen[1], y[order])
    dataset = data.centralized().train_dataloader().dataset
    assert dataset[3][0] == dataset.__getitems__([1, 3])[0][1]
    assert values(data.client(1).val_dataloader()) == [[31, 32]]


class Recorder(L.LightningModule):
    """Writes down the batches that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: dict[str, list] = {"train": [], "val": [], "test": []}
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx) -> None:
        self.seen["train"].append(batch)

    def validation_step(self, batch, batch_idx) -> None:
        self.seen["val"].append(batch)

    def test_step(self, batch, batch_idx) -> None:
        self.seen["test"].append(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(**options) -> L.Trainer:
    return L.Trainer(
        logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
        enable_model_summary=False, num_sanity_val_steps=0, **options,
    )  # fmt: skip


def test_an_epoch_under_lightning_is_a_round():
    data = make(cohort_size=2)
    module = Recorder()
    run = trainer(max_epochs=4)
    run.fit(module, datamodule=data)
    expected = [data.cohorts.sample(round).tolist() for round in range(4)]
    assert [ids.tolist() for ids in module.seen["train"]] == expected
    assert [ids.tolist() for ids in module.seen["val"]] == [[0, 1]] * 4
    run.test(module, datamodule=data)
    assert [ids.tolist() for ids in module.seen["test"]] == [[0, 2]]


def test_data_without_validation_samples_skip_validation():
    module = Recorder()
    trainer(max_epochs=2).fit(module, datamodule=TensorClients(clients(3, 3), num_classes=2))
    assert len(module.seen["train"]) == 2
    assert module.seen["val"] == []


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_a_stock_trainer_trains_one_client():
    data = make(batch_size=3)
    module = Recorder()
    trainer(max_epochs=2).fit(module, datamodule=data.client(0))
    seen = [x.flatten() for x, _ in module.seen["train"]]
    x, _ = data.samples(0, "train")
    orders = [x[data.order(0, round)].flatten() for round in (0, 1)]
    assert torch.equal(torch.cat(seen), torch.cat(orders))


class Squares(FederatedDataModule):
    """The least that a data set of one's own must say."""

    num_clients = 3

    def samples(self, client: int, split: str) -> tuple[Tensor, Tensor]:
        count = client + 1 if split == "train" else 1
        return torch.full((count, 2), float(client)), torch.zeros(count, dtype=torch.long)


def test_a_data_set_of_ones_own_needs_samples_only():
    data = Squares(num_classes=4, participation=0.5)
    data.setup()
    assert data.num_samples().tolist() == [1, 2, 3]
    assert data.num_samples("test").tolist() == [1, 1, 1]
    assert len(data.cohorts.sample(0)) == 2
    assert len(data.centralized().train_dataloader().dataset) == 6
    assert data.class_counts().tolist() == [[1, 0, 0, 0], [2, 0, 0, 0], [3, 0, 0, 0]]
    assert str(data) == "Squares"
    with pytest.raises(NotImplementedError, match="samples"):
        FederatedDataModule(num_classes=2).samples(0, "train")


def test_classes_that_are_not_known_are_not_counted():
    data = Squares(num_classes=None)
    with pytest.raises(ConfigurationError, match="Squares has no num_classes"):
        data.class_counts()
    assert data.class_counts(num_classes=2).tolist() == [[1, 0], [2, 0], [3, 0]]


def test_local_data_modules_prepare_and_set_up_the_federations_data():
    calls = []

    class Lazy(Squares):
        def prepare_data(self) -> None:
            calls.append("prepare")

        def setup(self, stage: str | None = None) -> None:
            calls.append(stage)
            super().setup(stage)

    for local in (ClientData(Lazy(num_classes=4), 2), Centralized(Lazy(num_classes=4))):
        local.prepare_data()
        local.setup("fit")
        assert local.num_classes == 4
    assert calls == ["prepare", "fit"] * 2
    with pytest.raises(ConfigurationError, match="unknown client 3"):
        ClientData(Squares(num_classes=4), 3).setup()


def test_a_batch_is_gathered_at_once():
    dataset = make().dataset(torch.tensor([0, 2]), "train")
    x, y = dataset.__getitems__([0, 7, 10])
    assert x.flatten().tolist() == [0.0, 12.0, 15.0]
    assert y.tolist() == [0, 0, 1]
    assert dataset[7][0].tolist() == [12.0]
    assert len(dataset) == 11


def test_without_classes_labels_are_the_last_tensor_of_the_samples() -> None:
    class Readings(FederatedDataModule):
        num_clients = 1

        def samples(self, client: int, split: str) -> Any:
            size = 4 if split == "train" else 0
            return {"x": torch.zeros(size, 3), "y": torch.ones(size), "z": torch.arange(size)}

    assert Readings(num_classes=None).labels(0, "train").tolist() == [0, 1, 2, 3]

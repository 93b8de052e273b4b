"""A node's client is the one that it would be in a simulation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from pflight.data.loaders import SPLITS
from pflight.datamodules import CropAndFlip, DatasetClients, TensorClients, Visit
from pflight.deploy.data import OwnData
from pflight.errors import ConfigurationError
from tests.runs import small_data

COUNTS = 5, 12, 7


def alone(client: int) -> OwnData:
    """Return the data of a node that has one client of the small data, and no other."""
    data = small_data(COUNTS, augmentation=CropAndFlip())
    pairs = {split: [data.samples(client, split)] for split in SPLITS}
    own = TensorClients(**pairs, num_classes=3, augmentation=CropAndFlip())
    return OwnData(own, 0, client, len(COUNTS))


@pytest.mark.parametrize("client", range(3))
def test_a_client_draws_the_numbers_of_its_id(client: int) -> None:
    everyone, node = small_data(COUNTS, augmentation=CropAndFlip()), alone(client)
    when = client, 2, 1
    assert torch.equal(node.order(*when), everyone.order(*when))
    assert torch.equal(node.orders([client], 2, 1)[0], everyone.order(*when))
    assert torch.equal(node.noise(4, *when), everyone.noise(4, *when))
    images = torch.rand(COUNTS[client], 1, 9, 9)
    assert torch.equal(node.augment(images, *when), everyone.augment(images, *when))


def test_what_its_data_define_is_used() -> None:
    class Own(TensorClients):
        def order(self, client: int, round: int, epoch: int = 0) -> Tensor:
            return torch.arange(9).flip(0)

        def augment(self, x: Tensor, client: int, round: int, epoch: int = 0) -> Tensor:
            return x + 1

    x = torch.arange(9.0)[:, None]
    data = OwnData(Own([(x, torch.zeros(9).long())], num_classes=2), 0, 2, 4)
    assert data.order(2, 0).tolist() == data.orders([2], 0)[0].tolist() == [*range(8, -1, -1)]
    assert torch.equal(data.augment(x, 2, 0), x + 1)


class Noisy(Dataset[Tensor]):
    """Samples with random transforms."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return index + torch.rand(1)


def test_random_transforms_are_those_of_its_id() -> None:
    visit = [Visit(2, 1, 0, torch.arange(6).split(3))]
    everyone = DatasetClients([Noisy()] * 4)
    node = OwnData(DatasetClients([Noisy()]), 0, 2, 4)
    for here, there in zip(
        node.batches("train", visit), everyone.batches("train", visit), strict=True
    ):
        assert torch.equal(here, there)


def test_other_clients_are_elsewhere() -> None:
    node = alone(1)
    assert node.num_samples().tolist() == [0, 12, 0]
    assert node.class_counts().sum(dim=1).tolist() == [0, 12, 0]
    assert node.train_clients.tolist() == [1]
    for ask in (node.samples, node.labels):
        with pytest.raises(ConfigurationError, match="client 2 are on another machine"):
            ask(2, "train")

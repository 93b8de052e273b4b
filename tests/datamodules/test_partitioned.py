"""One data set dealt to clients: pooled, with a test set of its own, and some of its samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pflight.datamodules import (
    IID,
    ByUser,
    ClassesPerClient,
    Digits,
    Dirichlet,
    KnownClusters,
    Partition,
    PartitionedDataModule,
    Samples,
)
from pflight.errors import ConfigurationError

CLASSES = 5


class Numbered(PartitionedDataModule):
    """Samples whose only feature is their number; every fifth is a test sample."""

    def __init__(self, partition: Partition | None = None, **options):
        super().__init__(num_classes=CLASSES, partition=partition or IID(), **options)

    def load(self) -> Samples:
        number = torch.arange(400)
        labels, makers = number // 7 % CLASSES, number.numpy() % 3
        return Samples(number[:, None].float(), labels, makers, test=number.numpy() % 5 == 0)


def ready(*args, **options) -> Numbered:
    data = Numbered(*args, **options)
    data.setup()
    return data


def numbers(data: Numbered, split: str) -> list[int]:
    every = [data.samples(client, split)[0].flatten() for client in range(data.num_clients)]
    return sorted(torch.cat(every).long().tolist())


@pytest.mark.parametrize("partition", [IID(), Dirichlet(1.0), ClassesPerClient(2), ByUser()])
def test_its_own_test_samples_stay_test_samples(partition: Partition) -> None:
    clients = None if partition == ByUser() else 5
    data = ready(partition, num_clients=clients, official_test=True, val_fraction=0.25)
    assert numbers(data, "test") == list(range(0, 400, 5))
    others = sorted(numbers(data, "train") + numbers(data, "val"))
    assert others == [number for number in range(400) if number % 5]
    assert data.num_samples("val").sum() == pytest.approx(80, abs=data.num_clients)


@pytest.mark.parametrize("partition", [IID(), Dirichlet(0.3), ClassesPerClient(2)])
def test_a_client_gets_its_share_of_the_test_set(partition: Partition) -> None:
    data = ready(partition, num_clients=4, official_test=True, val_fraction=0.0)
    train, test = data.class_counts("train").double(), data.class_counts("test").double()
    expected = train / train.sum(0) * test.sum(0)
    assert (test - expected).abs().max() < 1


def test_natural_clients_keep_their_own_test_samples() -> None:
    data = ready(ByUser(), official_test=True)
    for client in range(3):
        for split in ("train", "val", "test"):
            x, _ = data.samples(client, split)
            assert (x.flatten().long() % 3 == client).all()


def test_pooled_samples_are_split_anew() -> None:
    data = ready(num_clients=4, val_fraction=0.1, test_fraction=0.3)
    assert numbers(data, "test") != list(range(0, 400, 5))
    assert data.num_samples("test").tolist() == [30] * 4


def test_data_without_a_test_set_of_their_own_say_so() -> None:
    with pytest.raises(ConfigurationError, match=r"Digits has no test set of its own: official"):
        Digits(official_test=True).setup()


def test_chosen_samples_find_their_features_and_facts() -> None:
    samples = Numbered().load()
    even = samples.where(np.arange(400) % 2 == 0)
    chosen = even.where(even.y.numpy() == 1)
    rows = [number for number in range(0, 400, 2) if number // 7 % CLASSES == 1]
    assert chosen.x is samples.x
    assert chosen.x[chosen.rows_of(torch.arange(len(rows)))].flatten().tolist() == rows
    assert chosen.groups.tolist() == [row % 3 for row in rows]
    assert chosen.test.tolist() == [row % 5 == 0 for row in rows]


class Chosen(Numbered):
    """Only the samples of the classes 1 and 2."""

    def load(self) -> Samples:
        samples = super().load()
        return samples.where((samples.y.numpy() == 1) | (samples.y.numpy() == 2))


def test_clients_of_chosen_samples_get_the_right_features() -> None:
    data = Chosen(num_clients=3)
    data.setup()
    every = torch.arange(3)
    for split in ("train", "val", "test"):
        pooled = data.dataset(every, split)
        pairs = [pooled[i] for i in range(len(pooled))]
        pairs += [pair for i in range(3) for pair in zip(*data.samples(i, split), strict=True)]
        assert pairs
        assert all(x.long().item() // 7 % CLASSES == y for x, y in pairs)
        assert {int(y) for _, y in pairs} <= {1, 2}


class OneTested(Numbered):
    """The samples of the last of three makers are all test samples."""

    def load(self) -> Samples:
        samples = super().load()
        assert samples.groups is not None
        assert samples.test is not None
        return replace(samples, test=samples.test | (samples.groups == 2))


def test_a_client_of_official_test_samples_alone_is_a_newcomer() -> None:
    data = OneTested(ByUser(), official_test=True)
    data.setup()
    assert data.new_clients.tolist() == [2]
    assert data.train_clients.tolist() == [0, 1]
    pooled = OneTested(ByUser())
    pooled.setup()
    assert len(pooled.new_clients) == 0
    clusters = KnownClusters(data, num_clusters=2)
    clusters.setup()
    assert clusters.new_clients.tolist() == [2]

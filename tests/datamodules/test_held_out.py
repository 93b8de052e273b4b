from __future__ import annotations

import pytest
import torch

from pflight.command import catalogue
from pflight.datamodules import TensorClients
from pflight.datamodules.partitions.held_out import HeldOut
from pflight.errors import ConfigurationError


def numbered(*counts: int, **options: object) -> TensorClients:
    """Return clients whose samples are numbers, each another one."""
    train = [
        (torch.arange(count).view(-1, 1) + 100.0 * i, torch.arange(count) % 3)
        for i, count in enumerate(counts)
    ]
    return TensorClients(train, test=train, num_classes=3, **options)


def test_each_sample_is_held_out_or_trained_on() -> None:
    whole = numbered(10, 4, 2, 23)
    data = HeldOut(whole, share=0.2)
    for client, held in enumerate((2, 1, 1, 5)):
        (x, y), (held_x, held_y) = (data.samples(client, s) for s in ("train", "held_out"))
        assert len(held_x) == len(held_y) == held
        everything = torch.cat([x, held_x]).flatten().sort().values
        assert torch.equal(everything, whole.samples(client, "train")[0].flatten())
        assert torch.equal(y, x.flatten().long() % 100 % 3)
        assert torch.equal(data.labels(client, "train"), y)
        assert torch.equal(data.labels(client, "held_out"), held_y)
        assert data.num_samples("train")[client] == len(y)


@pytest.mark.parametrize("share", [0.001, 0.999])
def test_one_is_held_out_and_one_is_trained_on_at_least(share: float) -> None:
    data = HeldOut(numbered(4, 1, 0), share)
    sizes = [[len(data.labels(i, s)) for s in ("train", "held_out")] for i in range(3)]
    assert sizes == [[3, 1] if share < 0.5 else [1, 3], [1, 1], [0, 0]]
    assert data.train_clients.tolist() == [0, 1]


@pytest.mark.parametrize(("share", "count"), [(0.35, 90), (0.58, 25), (0.29, 50), (0.39, 150)])
def test_as_many_are_counted_as_are_held_out(share: float, count: int) -> None:
    data = HeldOut(numbered(count), share)
    for split in ("train", "held_out"):
        assert int(data.num_samples(split)) == len(data.labels(0, split))


def test_everything_else_is_as_it_was() -> None:
    whole = numbered(
        8, 5, 9, 4, 6, cohort_size=2, holdout_clients=0.2, dropout=0.5, batch_size=3, seed=4
    )
    data = HeldOut(whole, 0.2)
    assert data.num_clients == 5
    assert data.batch_size == 3
    assert torch.equal(data.new_clients, whole.new_clients)
    assert torch.equal(data.samples(2, "test")[0], whole.samples(2, "test")[0])
    assert torch.equal(data.labels(2, "test"), whole.labels(2, "test"))
    for t in range(4):
        cohort = whole.cohorts.sample(t)
        assert torch.equal(data.cohorts.sample(t), cohort)
        assert torch.equal(data.cohorts.answers(t, cohort), whole.cohorts.answers(t, cohort))


def test_the_draw_depends_on_the_seed_and_the_client() -> None:
    draws = [
        HeldOut(numbered(40, 40, seed=seed), 0.5).samples(client, "held_out")[0].flatten() % 100
        for seed, client in ((0, 0), (0, 0), (0, 1), (1, 0))
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], draws[3])


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, float("nan")])
def test_a_share_out_of_range(share: float) -> None:
    with pytest.raises(ConfigurationError, match=r"HeldOut: share must be "):
        HeldOut(numbered(4), share)


def test_what_needs_data_that_are_set_up_is_not_offered_by_name() -> None:
    names = [entry.name for entry in catalogue.entries("data")]
    assert "KnownClusters" in names
    assert "HeldOut" not in names

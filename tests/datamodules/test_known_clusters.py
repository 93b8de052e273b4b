"""Known clusters over other data: what differs between them, and what stays."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jsonargparse import ArgumentParser
from torch import Tensor

from pflight.callbacks import FedAvg
from pflight.data.loaders import SPLITS
from pflight.datamodules import IID, Centralized, Digits, FederatedDataModule, TensorClients
from pflight.datamodules.partitions.known_clusters import KnownClusters
from pflight.errors import ConfigurationError
from tests.runs import CLASSES, linear_client, run, small_data


def vectors(num_clients: int = 8, **options) -> TensorClients:
    return small_data([6] * num_clients, **options)


def images(height: int = 5, width: int = 5, num_clients: int = 8) -> TensorClients:
    """Return clients with the same two images each."""
    x = torch.arange(2.0 * 3 * height * width).view(2, 3, height, width)
    return TensorClients([(x, torch.tensor([0, 1]))] * num_clients, num_classes=2)


def grouped(data: FederatedDataModule, *arguments, **options) -> KnownClusters:
    groups = KnownClusters(data, *arguments, **options)
    groups.setup()
    return groups


def changes(groups: KnownClusters) -> list[tuple[Tensor, Tensor, int]]:
    """Return training features before and after, and the cluster, of each client."""
    return [
        (
            groups.data.samples(client, "train")[0],
            groups.samples(client, "train")[0],
            int(groups.clusters[client]),
        )
        for client in range(groups.num_clients)
    ]


@given(st.integers(1, 30), st.data(), st.integers(0, 2**31))
def test_clusters_have_equal_sizes_to_within_one(num_clients, data, seed):
    num_clusters = data.draw(st.integers(1, num_clients))
    pairs = [(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long))] * num_clients
    clients = TensorClients(pairs, num_classes=30)
    sizes = grouped(clients, num_clusters, seed=seed).clusters.bincount(minlength=num_clusters)
    assert len(sizes) == num_clusters
    assert sizes.max() - sizes.min() <= 1


def test_the_seed_decides_who_is_in_which_cluster():
    one, same, other = (grouped(vectors(30), 3, seed=seed).clusters for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("difference", ["labels", "rotation", "features"])
def test_cluster_0_keeps_the_data_as_they_are(difference):
    groups = grouped(vectors(), 2, difference)
    for client in range(8):
        for split in SPLITS:
            before, after = groups.data.samples(client, split), groups.samples(client, split)
            same = all(torch.equal(*pair) for pair in zip(before, after, strict=True))
            assert same == (groups.clusters[client] == 0)


class TestLabels:
    def test_no_two_clusters_agree_on_any_class(self):
        everything = torch.zeros(5, 2), torch.arange(5)
        groups = grouped(TensorClients([everything] * 10, num_classes=5), 5)
        names = {}
        for client, cluster in enumerate(groups.clusters.tolist()):
            names.setdefault(cluster, groups.labels(client, "train"))
            assert torch.equal(names[cluster], groups.labels(client, "train"))
        for one, other in combinations(names.values(), 2):
            assert (one != other).all()
            assert sorted(one.tolist()) == list(range(5))

    @pytest.mark.parametrize("split", SPLITS)
    def test_labels_are_those_of_the_samples_in_every_split(self, split):
        groups = grouped(vectors(), CLASSES)
        for client in range(8):
            x, y = groups.samples(client, split)
            assert torch.equal(groups.labels(client, split), y)
            assert torch.equal(x, groups.data.samples(client, split)[0])
            assert torch.equal(groups.class_counts(split)[client], y.bincount(minlength=CLASSES))


class TestRotation:
    def test_images_are_turned_by_quarters(self):
        for before, after, quarters in changes(grouped(images(), difference="rotation")):
            assert torch.equal(after, before.rot90(quarters, (2, 3)))
            assert after.rot90(-quarters, (2, 3)).equal(before)

    def test_vectors_keep_their_lengths_and_angles(self):
        groups = grouped(vectors(dtype=torch.float64), 4, "rotation")
        for before, after, cluster in changes(groups):
            torch.testing.assert_close(after @ after.T, before @ before.T)
            assert after.allclose(before) == (cluster == 0)

    def test_clients_of_a_cluster_have_the_same_rotation(self):
        unit = torch.eye(4), torch.zeros(4, dtype=torch.long)
        groups = grouped(TensorClients([unit] * 8, num_classes=2), 2, "rotation")
        one, other = (
            [after for _, after, cluster in changes(groups) if cluster == k] for k in (0, 1)
        )
        assert all(torch.equal(one[0], after) for after in one)
        assert all(torch.equal(other[0], after) for after in other)


class TestFeatures:
    @pytest.mark.parametrize("data", [vectors, images])
    def test_each_cluster_adds_its_own_offset(self, data):
        offsets: dict[int, Tensor] = {}
        for before, after, cluster in changes(grouped(data(), 4, "features")):
            offset = offsets.setdefault(cluster, (after - before)[0])
            torch.testing.assert_close(after - before, offset.expand_as(after))
        for one, other in combinations(offsets.values(), 2):
            assert not one.allclose(other, atol=0.1)

    def test_shift_is_the_standard_deviation_of_an_offset(self):
        data = images(height=20, width=20)
        for before, after, cluster in changes(grouped(data, 4, "features", shift=2.5)):
            expected = 2.5 if cluster else 0
            assert (after - before)[0].std().item() == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("difference", ["labels", "rotation", "features"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_types_and_shapes_stay(difference, dtype):
    groups = grouped(vectors(dtype=dtype), 2, difference)
    x, y = groups.samples(1, "val")
    assert (x.dtype, x.shape) == (dtype, groups.data.samples(1, "val")[0].shape)
    assert y.dtype == torch.int64


def test_the_wrapped_data_say_how_much_there_is():
    groups = grouped(small_data([5, 0, 12], num_classes=7, holdout_clients=0.34), 2)
    assert (groups.num_clients, groups.num_classes) == (3, 7)
    assert groups.num_samples("train").tolist() == [5, 0, 12]
    assert groups.num_samples("test").tolist() == [6, 6, 6]


def test_cohorts_and_batches_follow_its_own_options():
    data = small_data([4] * 10, cohort_size=3, batch_size=4)
    groups = grouped(data, 2, cohort_size=5, batch_size=2, holdout_clients=0.2)
    assert groups.cohorts.size == 5
    assert len(groups.new_clients) == 2
    batch, _ = next(iter(groups.client(0).train_dataloader()))
    assert len(batch) == 2


def test_fetching_and_filling_are_left_to_the_wrapped_data():
    class Fetched(TensorClients):
        fill = torch.tensor(-1.0)
        fetched = False

        def prepare_data(self) -> None:
            self.fetched = True

    data = Fetched([(torch.eye(3), torch.arange(3))], num_classes=3)
    groups = KnownClusters(data, 1)
    groups.prepare_data()
    assert data.fetched
    assert groups.fill == -1


def test_a_federation_trains_and_is_tested_on_it():
    groups = KnownClusters(vectors(), 2, cohort_size=4)
    federation = run(linear_client(), groups, FedAvg(), rounds=2)
    assert [len(entry.clients) for entry in federation.history] == [4, 4]


def test_one_model_can_see_all_of_it():
    data = Centralized(KnownClusters(vectors(), 3, "rotation"))
    data.setup()
    seen = torch.cat([x for x, _ in data.train_dataloader()])
    held = torch.cat([data.data.samples(client, "train")[0] for client in range(8)])
    assert seen.sort(dim=0).values.equal(held.sort(dim=0).values)


def test_reading_before_setup_says_so():
    with pytest.raises(ConfigurationError, match="setup"):
        KnownClusters(Digits()).samples(0, "train")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_clusters": 0}, "num_clusters must be at least 1, got 0"),
        ({"difference": "colours"}, "difference must be 'labels', .* or a function, got 'colo"),
        ({"shift": 0.0}, "shift must be over 0, got 0.0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigurationError, match=message):
        KnownClusters(vectors(), **options)


WORDS = TensorClients(
    [(torch.ones(2, 4, dtype=torch.long), torch.tensor([0, 1]))] * 4, num_classes=2
)
NUMBERS = TensorClients([(torch.ones(2, 4), torch.ones(2, 1))] * 4)


@pytest.mark.parametrize(
    ("data", "num_clusters", "difference", "message"),
    [
        (vectors(2), 3, "labels", "num_clusters is 3, but there are only 2 clients"),
        (vectors(), 4, "labels", "at most num_classes=3 clusters, got num_clusters=4"),
        (images(), 5, "rotation", "at most 4 clusters of images, got num_clusters=5"),
        (images(4, 5), 2, "rotation", r"features of TensorClients have the shape \[3, 4, 5\]"),
        (NUMBERS, 2, "labels", "needs known classes, but TensorClients has none"),
        (WORDS, 2, "features", "those of TensorClients are torch.int64"),
        (WORDS, 2, "rotation", "those of TensorClients are torch.int64"),
    ],
)
def test_data_that_do_not_allow_the_difference(data, num_clusters, difference, message):
    with pytest.raises(ConfigurationError, match=message):
        KnownClusters(data, num_clusters, difference).setup()


def test_words_can_have_other_labels():
    assert grouped(WORDS, 2).labels(0, "train").tolist() in ([0, 1], [1, 0])


def test_it_comes_from_a_config():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(FederatedDataModule, "data")
    wrapped = ["--data.data=Digits", "--data.data.partition=IID", "--data.data.num_clients=7"]
    config = parser.parse_args(
        ["--data=KnownClusters", *wrapped, "--data.difference=rotation", "--data.cohort_size=5"]
    )
    text = parser.dump(config)
    assert parser.dump(parser.parse_string(text)) == text
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    groups = instantiate(config).data
    groups.setup()
    assert (groups.num_clients, groups.cohorts.size, groups.difference) == (7, 5, "rotation")
    assert groups.data.partition == IID()

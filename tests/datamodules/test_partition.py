from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pflight.datamodules import Digits
from pflight.datamodules.partitions.dealing import largest_remainder, stratified_splits
from pflight.datamodules.partitions.partition import (
    IID,
    ByUser,
    ClassesPerClient,
    ClassShards,
    ConsecutiveClasses,
    Dirichlet,
    DominantClasses,
    Partition,
)
from pflight.errors import ConfigurationError

PARTITIONS = st.one_of(
    st.just(IID()),
    st.builds(
        Dirichlet,
        alpha=st.sampled_from([1e-3, 0.1, 0.5, 100.0]),
        min_samples=st.integers(1, 5),
        too_few=st.sampled_from(["error", "move"]),
        max_draws=st.integers(1, 3),
    ),
    st.builds(ClassesPerClient, st.integers(1, 4)),
    st.builds(ClassesPerClient, st.integers(1, 4), st.integers(4, 12)),
    st.builds(ClassShards, st.integers(1, 4), st.sampled_from([None, 1, 7, 500])),
    st.builds(
        ConsecutiveClasses, st.integers(1, 4), st.integers(4, 9), st.sampled_from([-9.0, 1.0, 1e4])
    ),
    st.builds(DominantClasses, st.integers(1, 4), st.sampled_from([0.3, 0.4, 0.8])),
    st.builds(DominantClasses, st.integers(1, 3), st.just(0.5), st.integers(3, 20)),
    st.just(ByUser()),
)
CLASSES = st.sampled_from([-3, 0, 1, 2, 5, 61, 10**12])
LABELS = hnp.arrays(
    np.int64, st.integers(0, 120), elements=st.one_of(st.integers(0, 3), CLASSES), fill=CLASSES
)


def table(labels, parts):
    """Count the samples of each class of the data that each part has, ``[parts, classes]``."""
    classes = np.unique(labels)
    return np.array([(labels[part][:, None] == classes).sum(axis=0) for part in parts])


@given(
    partition=PARTITIONS, labels=LABELS, num_clients=st.integers(1, 12), seed=st.integers(0, 9999)
)
@example(Dirichlet(1e-3, 1, "move", 1), np.arange(30) // 10, 12, 0)
@settings(max_examples=300, deadline=None)
def test_a_partition_is_valid_or_says_why_not(partition, labels, num_clients, seed):
    groups = np.arange(len(labels)) // 5
    try:
        parts = partition.split(labels, num_clients, seed, groups)
    except ConfigurationError:
        assert not must_succeed(partition, labels, num_clients, groups)
        return
    assert len(parts) == num_clients
    assert all(part.dtype == np.int64 for part in parts)
    assert all(len(part) > 0 and (np.diff(part) > 0).all() for part in parts)
    dealt = np.concatenate(parts)
    assert len(np.unique(dealt)) == len(dealt)
    assert dealt.min() >= 0
    assert dealt.max() < len(labels)
    again = partition.split(labels, num_clients, seed, groups)
    assert all(map(np.array_equal, parts, again))
    check(partition, labels, groups, parts)


def must_succeed(partition: Partition, labels, num_clients, groups) -> bool:
    """Tell whether the data are known to suffice."""
    if len(labels) < num_clients:
        return False
    supply = np.unique(labels, return_counts=True)[1]
    match partition:
        case IID():
            return True
        case Dirichlet(min_samples=least, too_few=too_few):
            return too_few == "move" and len(labels) >= least * num_clients
        case ClassesPerClient(k=k, samples_per_client=None) if k > len(supply):
            return False
        case ClassesPerClient(k=k, samples_per_client=None) | ClassShards(k=k):
            return bool(supply.min() >= -(-k * num_clients // len(supply)))
        case ConsecutiveClasses(k=k):
            return k <= len(supply) and bool(supply.min() >= k * num_clients)
        case ByUser():
            return num_clients <= len(np.unique(groups))
    return False


def check(partition: Partition, labels, groups, parts):
    """Check what each kind of partition promises."""
    counts = table(labels, parts)
    sizes, num_classes = counts.sum(axis=1), counts.shape[1]
    present = [np.sort(row[row > 0]) for row in counts]
    uses = (counts > 0).sum(axis=0)
    match partition:
        case IID():
            assert np.ptp(sizes) <= 1
            assert sizes.sum() == len(labels)
        case Dirichlet(min_samples=least):
            assert sizes.min() >= least
            assert sizes.sum() == len(labels)
        case ClassesPerClient(k=k, samples_per_client=size):
            assert all(len(row) == k for row in present)
            assert np.ptp(uses) <= 1
            if size is None:
                assert sizes.sum() == np.isin(labels, np.unique(labels)[uses > 0]).sum()
            else:
                assert (sizes == size).all()
                assert all(np.ptp(row) <= 1 for row in present)
        case ClassShards(k=k, max_samples=most):
            assert all(len(row) <= k for row in present)
            assert most is None or sizes.max() <= most
            if most is None and k * len(parts) >= num_classes:
                assert sizes.sum() == len(labels)
        case ConsecutiveClasses(k=k):
            for client, row in enumerate(counts):
                allowed = (client + np.arange(k)) % num_classes
                assert set(np.flatnonzero(row)) <= set(allowed)
        case DominantClasses(k=k, share=share, samples_per_client=size):
            assert np.ptp(sizes) == 0
            assert size in (None, sizes[0])
            assert counts.min() > 0
            ordered = np.sort(counts, axis=1)
            wanted = np.floor(share * sizes[0] + 0.5)
            assert (abs(ordered[:, -k:].sum(axis=1) - wanted) <= k).all()
            assert (np.ptp(ordered[:, -k:], axis=1) <= 1).all()
        case ByUser():
            assert all(len(np.unique(groups[part])) == 1 for part in parts)


@pytest.mark.long
@given(
    partition=PARTITIONS,
    labels=LABELS,
    num_clients=st.integers(1, 12),
    seed=st.integers(0, 9999),
    each=st.integers(2, 6),
)
@settings(max_examples=200, deadline=None)
def test_test_samples_are_dealt_as_training_samples(partition, labels, num_clients, seed, each):
    groups = np.arange(len(labels)) // 5
    test = np.arange(len(labels)) % each == 1
    train = np.flatnonzero(~test)
    try:
        known = partition.split(labels[train], num_clients, seed, groups[train])
    except ConfigurationError:
        assume(False)
    parts = partition.deal(labels, test, num_clients, seed, groups)
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
    again = partition.deal(labels, test, num_clients, seed, groups)
    assert all(map(np.array_equal, parts, again))
    if isinstance(partition, ByUser):
        assert all(len(np.unique(groups[part])) == 1 for part in parts)
        return
    assert all(np.array_equal(p[~test[p]], train[k]) for p, k in zip(parts, known, strict=True))
    dealt = np.concatenate([part[test[part]] for part in parts])
    assert len(np.unique(dealt)) == len(dealt)
    of_train, of_test = table(labels, [train, np.flatnonzero(test)])
    ideal = table(labels, [train[part] for part in known]) * of_test / np.maximum(of_train, 1)
    given = table(labels, [part[test[part]] for part in parts])
    assert (abs(given - ideal) < 1).all()
    assert (abs(given.sum(axis=0) - ideal.sum(axis=0)) <= 0.5 + 1e-6).all()


def test_people_keep_their_own_test_samples():
    groups, test = np.array([4, 9, 9, 4, 4, 9]), np.array([0, 0, 1, 1, 0, 0], bool)
    parts = ByUser().deal(np.zeros(6, int), test, None, 0, groups)
    assert [part.tolist() for part in parts] == [[0, 3, 4], [1, 2, 5]]


def test_test_samples_of_a_class_that_nobody_trains_on_stay_out():
    labels = np.array([0, 0, 0, 0, 7, 0, 0, 7])
    test = np.arange(8) >= 5
    parts = IID().deal(np.where(test, labels, 0), test, 2, seed=0)
    assert sorted(np.concatenate(parts)) == [0, 1, 2, 3, 4, 5, 6]
    parts = IID().deal(np.where(test, labels, 1), test, 2, seed=0)
    assert sorted(np.concatenate(parts)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "partition",
    [
        IID(),
        Dirichlet(0.5),
        ClassesPerClient(2),
        ClassShards(2),
        ConsecutiveClasses(2, 20, 2.0),
        DominantClasses(2),
    ],
)
def test_the_seed_changes_the_deal(partition):
    labels, test = np.arange(600) // 100, np.arange(600) % 4 == 0
    first, second = (partition.split(labels, 5, seed) for seed in (0, 1))
    assert not all(map(np.array_equal, first, second))
    first, second = (partition.deal(labels, test, 5, seed) for seed in (0, 1))
    assert not any(
        np.array_equal(a[test[a]], b[test[b]]) for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize(
    ("num_classes", "num_clients", "k", "train_shard", "test_shard"),
    [
        (10, 100, 2, 250, 50),
        (10, 100, 5, 100, 20),
        (10, 1000, 2, 25, 5),
        (100, 100, 5, 100, 20),
        (100, 100, 20, 25, 5),
    ],
)
def test_class_shards_are_those_of_fedec(num_classes, num_clients, k, train_shard, test_shard):
    labels = np.arange(60_000) % num_classes
    test = np.arange(60_000) >= 50_000
    parts = ClassShards(k).deal(labels, test, num_clients, seed=0)
    train = table(labels, [part[~test[part]] for part in parts])
    assert (train % train_shard == 0).all()
    assert (train.sum(axis=1) == k * train_shard).all()
    assert (train.sum(axis=0) == 50_000 // num_classes).all()
    distinct = (train > 0).sum(axis=1)
    assert 0.75 * k < distinct.mean() < k
    tests = table(labels, [part[test[part]] for part in parts])
    assert np.array_equal(tests, train // train_shard * test_shard)


def test_some_classes_have_one_shard_more_where_the_numbers_do_not_divide():
    labels = np.arange(360) % 6
    counts = table(labels, ClassShards(3).split(labels, 7, seed=0))
    assert (counts.sum(axis=0) == 60).all()
    shards = [20 if (column % 20 == 0).all() else 15 for column in counts.T]
    assert sorted(shards) == [15, 15, 15, 20, 20, 20]
    assert (counts % shards == 0).all()
    assert ((counts // shards).sum(axis=1) == 3).all()


def test_the_first_shards_take_what_is_left_over():
    labels = np.zeros(11, int)
    assert [len(part) for part in ClassShards(1).split(labels, 4, seed=0)] == [3, 3, 3, 2]


def test_max_samples_cuts_training_and_test_samples_alike():
    labels = np.arange(7200) % 10
    test = np.arange(7200) >= 6000
    parts = ClassShards(2, max_samples=500).deal(labels, test, 10, seed=0)
    train = table(labels, [part[~test[part]] for part in parts])
    assert set(train.ravel()) <= {0, 250, 500}
    assert (train.sum(axis=1) == 500).all()
    assert np.array_equal(table(labels, [part[test[part]] for part in parts]), train // 5)


def test_consecutive_classes_are_those_of_fedec():
    labels = np.arange(40_000) % 10
    parts = ConsecutiveClasses(3).split(labels, 150, seed=0)
    counts = table(labels, parts)
    for client, row in enumerate(counts):
        own = row[(client + np.arange(3)) % 10]
        assert own.sum() == len(parts[client])
        assert own[0] - own[-1] in (0, 1)
        assert (np.diff(own) <= 0).all()
    tail = counts.sum(axis=1) - 100
    assert tail.min() > 0
    assert np.log(tail).mean() == pytest.approx(4, abs=0.25)
    assert np.log(tail).std() == pytest.approx(1, abs=0.15)


def test_a_class_that_runs_out_is_shared_in_proportion():
    labels = np.repeat([3, 4, 6, 8], [1000, 1000, 20, 1000])
    parts = ConsecutiveClasses(2, minimum=100, log_mean=0.0, log_std=0.0).split(labels, 4, seed=0)
    assert table(labels, parts).tolist() == [
        [51, 50, 0, 0],
        [0, 51, 10, 0],
        [0, 0, 10, 50],
        [50, 0, 0, 51],
    ]


@pytest.mark.parametrize("num_clients", [10, 100])
@pytest.mark.parametrize(
    ("num_classes", "k", "size", "slots"),
    [(10, 4, 600, 40), (10, 4, 700, 40), (100, 12, 600, 12)],
)
def test_classes_per_client_are_those_of_pfedla(num_classes, k, size, slots, num_clients):
    labels = np.arange(100 * size) % num_classes
    parts = ClassesPerClient(k, samples_per_client=size).split(labels, num_clients, seed=0)
    counts = table(labels, parts)
    assert set(counts.ravel()) == {0, size // k}
    assert ((counts > 0).sum(axis=1) == k).all()
    used = (counts > 0).sum(axis=0)
    assert np.ptp(used) <= 1
    assert num_clients == 10 or (used == slots).all()
    train, _, test = stratified_splits(labels, parts, 0, 0.3, np.random.default_rng(0))
    assert {len(part) for part in train} == {7 * size // 10}
    assert abs(table(labels, train) - 0.7 * counts).max() < 1
    assert abs(table(labels, test) - 0.3 * counts).max() < 1


@pytest.mark.parametrize("num_clients", [10, 100])
@pytest.mark.parametrize(
    ("num_classes", "k", "size", "dominant", "others"),
    [(10, 2, 600, 120, {45}), (10, 2, 700, 140, {52, 53}), (100, 6, 600, 40, {3, 4})],
)
def test_dominant_classes_are_those_of_pfedla(num_classes, k, size, dominant, others, num_clients):
    labels = np.arange(100 * size) % num_classes
    partition = DominantClasses(k, 0.4, samples_per_client=size)
    parts = partition.split(labels, num_clients, seed=0)
    counts = table(labels, parts)
    assert set(counts.ravel()) == {dominant} | others
    assert (counts.sum(axis=1) == size).all()
    leads = counts == dominant
    assert (leads.sum(axis=1) == k).all()
    assert np.ptp(leads.sum(axis=0)) <= 1
    ideal = np.where(leads, dominant, (size - k * dominant) / (num_classes - k))
    assert abs(counts.sum(axis=0) - ideal.sum(axis=0)).max() < 1
    train = stratified_splits(labels, parts, 0, 0.3, np.random.default_rng(0))[0]
    assert {len(part) for part in train} == {7 * size // 10}
    assert abs(table(labels, train) - 0.7 * counts).max() < 1


def test_what_rounding_leaves_over_goes_where_the_classes_still_have_some():
    labels = np.repeat(np.arange(4), [3, 5, 5, 5])
    counts = table(labels, ClassesPerClient(4, samples_per_client=6).split(labels, 3, seed=0))
    assert counts.sum(axis=0).tolist() == [3, 5, 5, 5]
    assert (counts[:, 0] == 1).all()
    assert set(counts[:, 1:].ravel()) == {1, 2}


def test_dominant_classes_find_the_size_that_exhausts_the_data():
    labels = np.arange(7000) % 10
    parts = DominantClasses(2, 0.4).split(labels, 10, seed=0)
    assert {len(part) for part in parts} == {700}


@pytest.mark.parametrize(
    ("k", "share", "least"), [(2, 0.4, 13), (2, 0.6, 19), (2, 0.9, 76), (2, 0.95, 151)]
)
def test_dominant_classes_leave_each_other_class_a_sample(k, share, least):
    labels = np.arange(4000) % 10
    counts = table(labels, DominantClasses(k, share, least).split(labels, 5, seed=0))
    assert counts.min() == 1
    with pytest.raises(ConfigurationError, match=f"samples_per_client must be at least {least}"):
        DominantClasses(k, share, least - 1).split(labels, 5, seed=0)
    with pytest.raises(ConfigurationError, match=f"can't give 400 clients {least} samples each"):
        DominantClasses(k, share).split(labels, 400, seed=0)


def test_dirichlet_is_skewed_for_small_alpha_and_even_for_large():
    labels = np.arange(10_000) % 10
    largest = []
    for alpha in (0.1, 1000.0):
        parts = Dirichlet(alpha, min_samples=1).split(labels, 10, seed=0)
        shares = [np.bincount(labels[part], minlength=10).max() / len(part) for part in parts]
        largest.append(np.mean(shares))
    assert largest[0] > 0.35
    assert largest[1] < 0.12


def test_dirichlet_gives_nothing_more_to_clients_above_the_even_share():
    labels = np.arange(5000) % 10
    parts = Dirichlet(0.5).split(labels, 10, seed=3)
    assert max(map(len, parts)) < 2 * len(labels) / 10


@pytest.mark.parametrize("seed", range(5))
def test_dirichlet_gives_a_class_to_who_lacks_samples_if_its_draw_names_nobody_else(seed):
    labels = np.repeat([0, 1], 10)
    parts = Dirichlet(1e-4, min_samples=1).split(labels, 2, seed)
    assert sorted(tuple(labels[part]) for part in parts) == [(0,) * 10, (1,) * 10]


@pytest.mark.parametrize("alpha", [1e-3, 1e-4, 1e-30, 5e-324])
def test_dirichlet_gives_a_class_to_few_clients_where_alpha_is_tiny(alpha):
    labels = np.arange(10_000) % 10
    pairs = 0
    for seed in range(10):
        parts = Dirichlet(alpha, min_samples=1, too_few="move").split(labels, 10, seed)
        pairs += (table(labels, parts) > 1).sum()
    assert 100 <= pairs <= 130  # ten classes in ten deals


def test_dirichlet_reports_counts_or_moves_samples():
    labels = np.arange(100) % 2
    with pytest.raises(ConfigurationError, match=r"2 draws of 100 samples for 10 clients"):
        Dirichlet(0.01, min_samples=10, max_draws=2).split(labels, 10, seed=0)
    moved = Dirichlet(0.01, min_samples=10, too_few="move", max_draws=2).split(labels, 10, seed=0)
    assert [len(part) for part in moved] == [10] * 10
    with pytest.raises(ConfigurationError, match="100 samples are too few for 11 clients"):
        Dirichlet(0.5, too_few="move").split(labels, 11, seed=0)


def test_dirichlet_deals_as_many_samples_as_asked_for_on_average():
    labels = np.arange(1000) % 5
    parts = Dirichlet(0.5, samples_per_client=30).split(labels, 10, seed=1)
    dealt = np.concatenate(parts)
    assert len(dealt) == len(np.unique(dealt)) == 300
    assert len({len(part) for part in parts}) > 3
    assert dealt.min() < 100 < 900 < dealt.max()
    every = Dirichlet(0.5).split(labels, 10, seed=1)
    assert sum(map(len, every)) == 1000


def test_natural_draws_some_people_if_fewer_clients_are_asked_for():
    groups = np.repeat([30, 10, 20], 4)
    parts = ByUser().split(np.zeros(12, int), 2, 0, groups)
    assert [len(part) for part in parts] == [4, 4]
    with pytest.raises(ConfigurationError, match=r"num_clients is 4, but .* 3 people"):
        ByUser().split(np.zeros(12, int), 4, 0, groups)
    with pytest.raises(ConfigurationError, match="who made each sample"):
        ByUser().split(np.zeros(12, int), 2, 0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Dirichlet(0), "alpha"),
        (lambda: Dirichlet(min_samples=0), "min_samples"),
        (lambda: Dirichlet(too_few="ignore"), "too_few"),
        (lambda: Dirichlet(max_draws=0), "max_draws"),
        (lambda: Dirichlet(samples_per_client=9), "min_samples = 10, got 9"),
        (lambda: Dirichlet(samples_per_client=30).split(np.arange(80), 3, 0), "30 each"),
        (lambda: ClassesPerClient(0), "ClassesPerClient: k must be at least 1"),
        (lambda: ClassesPerClient(3, 2), "samples_per_client"),
        (lambda: DominantClasses(2, 1.0), r"share must be in \(0, 1\), got 1.0"),
        (lambda: ClassesPerClient(5).split(np.arange(8) % 4, 2, 0), "k is 5, .* 4 classes"),
        (lambda: ClassesPerClient(1).split(np.array([0, 0, 0, 1]), 4, 0), "class 1 into 2 pieces"),
        (lambda: ClassShards(0), "ClassShards: k must be at least 1"),
        (lambda: ClassShards(2, 0), "max_samples"),
        (lambda: ClassShards(3).split(np.arange(8) % 4, 5, 0), r"[34] pieces for 5 .* \(2\)"),
        (lambda: ConsecutiveClasses(0), "ConsecutiveClasses: k must be at least 1"),
        (lambda: ConsecutiveClasses(3, 2), "minimum"),
        (lambda: ConsecutiveClasses(log_std=-1.0), "log_std"),
        (lambda: ConsecutiveClasses(3).split(np.arange(9) % 2, 2, 0), "k is 3, .* 2 classes"),
        (lambda: ConsecutiveClasses(1).split(np.array([0, 1, 1]), 3, 0), "3 clients"),
        (lambda: DominantClasses(3, 0.4).split(np.arange(50) % 5, 2, 0), "would not dominate"),
        (lambda: DominantClasses(2, 0.4).split(np.arange(50) % 5, 2, 0), "would not dominate"),
        (lambda: DominantClasses(7, 0.7).split(np.arange(50) % 10, 2, 0), "would not dominate"),
        (lambda: ClassesPerClient(1, 9).split(np.arange(20) % 2, 4, 0), "20 in 2 classes"),
        (lambda: IID().split(np.zeros(3, int), 4, 0), "3 samples are too few for 4 clients"),
        (lambda: IID().split(np.zeros(3, int), None, 0), "num_clients"),
    ],
)
def test_impossible_partitions_state_the_counts(build, message):
    with pytest.raises(ConfigurationError, match=message):
        build()


def test_partitions_are_values():
    assert ClassesPerClient(2) == ClassesPerClient(2) != ClassesPerClient(3)
    assert str(Dirichlet(0.3)).startswith("Dirichlet(alpha=0.3")


@given(
    labels=LABELS,
    num_clients=st.integers(1, 4),
    val=st.sampled_from([0.0, 0.1, 0.25]),
    test=st.sampled_from([0.0, 0.2, 0.3, 0.7]),
    seed=st.integers(0, 99),
)
@settings(deadline=None)
def test_splits_are_stratified(labels, num_clients, val, test, seed):
    parts = np.array_split(np.arange(len(labels)), num_clients)
    splits = stratified_splits(labels, parts, val, test, np.random.default_rng(seed))
    for part, *three in zip(parts, *splits, strict=True):
        assert np.array_equal(np.sort(np.concatenate(three)), part)
        assert all((np.diff(positions) > 0).all() for positions in three)
        assert len(three[0]) > 0 or len(part) == 0
        assert abs(len(three[2]) - test * len(part)) <= 0.5 + 1e-9 or len(three[0]) == 1
    total = table(labels, parts)
    for split, share, error in zip(splits, (1 - val - test, val, test), (2, 2, 1), strict=True):
        assert (abs(table(labels, split) - share * total) < error).all()
    assert test > 0 or not any(map(len, splits[2]))
    assert val > 0 or not any(map(len, splits[1]))


def test_a_split_gives_the_floor_and_the_rest_to_the_largest_fractions():
    labels = np.repeat([0, 1, 2], [11, 12, 14])
    train, _, test = stratified_splits(labels, [np.arange(37)], 0, 0.3, np.random.default_rng(0))
    assert table(labels, train).tolist() == [[8, 8, 10]]  # of 7.7, 8.4 and 9.8
    assert table(labels, test).tolist() == [[3, 4, 4]]


def test_a_split_does_not_depend_on_the_other_clients():
    labels = np.arange(90) % 7
    own, one, two = np.arange(0, 90, 3), np.arange(1, 90, 3), np.arange(2, 30, 3)
    splits = [
        stratified_splits(labels, [own, other], 0.1, 0.2, np.random.default_rng(0))
        for other in (one, two)
    ]
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(*splits, strict=True))


@given(
    hnp.arrays(float, hnp.array_shapes(min_dims=2, max_dims=2), elements=st.floats(0, 1e6)),
    st.integers(0, 99),
)
def test_rounding_keeps_the_sum(ideal, seed):
    counts = largest_remainder(ideal, np.random.default_rng(seed))
    assert (abs(counts - ideal) < 1 + 1e-6).all()
    assert (abs(counts.sum(axis=1) - ideal.sum(axis=1)) <= 0.5 + 1e-6).all()


def test_rounding_breaks_ties_at_random():
    ideal = np.full((400, 4), 0.5)
    wins = largest_remainder(ideal, np.random.default_rng(0)).sum(axis=0)
    assert wins.sum() == 800
    assert wins.min() > 150


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (([0, 1, 2], [2, 3]), "gives sample 2 to client 0 and to client 1"),
        (([0, 1], [2, 99_999]), "gives client 1 sample 99999, of 1797 samples"),
        (([0, 1], [-1]), "gives client 1 sample -1"),
        (([0, 1, 1], [2]), "gives client 0 a sample twice"),
        (([0.5], [1]), "gives client 0 no list of positions"),
        (([0],), "gives 1 clients, not 2"),
    ],
)
def test_what_a_partition_of_ones_own_gives_is_checked(parts: Any, said: str) -> None:
    class Given(Partition):
        def split(self, labels: Any, num_clients: Any, seed: Any, groups: Any = None) -> Any:
            return [np.array(part) for part in parts]

    with pytest.raises(ConfigurationError, match=f"Given {said}"):
        Digits(partition=Given(), num_clients=2).setup()

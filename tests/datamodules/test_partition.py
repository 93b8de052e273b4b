from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pflight.datamodules import (
    IID,
    ClassesPerClient,
    Dirichlet,
    DominantClasses,
    Natural,
    Partition,
)
from pflight.datamodules.partition import stratified_split
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
    st.builds(DominantClasses, st.integers(1, 4), st.sampled_from([0.3, 0.4, 0.9, 1.0])),
    st.builds(DominantClasses, st.integers(1, 3), st.just(0.5), st.integers(3, 20)),
    st.just(Natural()),
)
LABELS = hnp.arrays(np.int64, st.integers(0, 120), elements=st.integers(0, 6))


@given(
    partition=PARTITIONS, labels=LABELS, num_clients=st.integers(1, 12), seed=st.integers(0, 9999)
)
@example(Dirichlet(1e-3, 1, "move", 1), np.arange(30) // 10, 12, 0)
@settings(max_examples=300, deadline=None)
def test_a_partition_is_valid_or_says_why_not(partition, labels, num_clients, seed):
    groups = np.arange(len(labels)) // 5
    try:
        parts = partition.split(labels, num_clients, seed, groups)
    except ConfigurationError as error:
        message = str(error)
        assert re.search(r"\d", message)
        return
    assert len(parts) == num_clients
    assert all(len(part) > 0 and (np.diff(part) > 0).all() for part in parts)
    dealt = np.concatenate(parts)
    assert len(np.unique(dealt)) == len(dealt)
    assert dealt.min() >= 0
    assert dealt.max() < len(labels)
    again = partition.split(labels, num_clients, seed, groups)
    assert all(map(np.array_equal, parts, again))
    check(partition, labels, groups, parts)


def check(partition: Partition, labels, groups, parts):
    """Check what each kind of partition promises."""
    sizes = np.array([len(part) for part in parts])
    kinds = [np.unique(labels[part], return_counts=True) for part in parts]
    match partition:
        case IID():
            assert np.ptp(sizes) <= 1
            assert sizes.sum() == len(labels)
        case Dirichlet(min_samples=least):
            assert sizes.min() >= least
            assert sizes.sum() == len(labels)
        case ClassesPerClient(k=k, samples_per_client=size):
            assert all(len(classes) == k for classes, _ in kinds)
            uses = np.unique(np.concatenate([classes for classes, _ in kinds]), return_counts=True)
            assert np.ptp(uses[1]) <= 1
            if size is None:
                assert sizes.sum() == np.isin(labels, uses[0]).sum()
            else:
                assert (sizes == size).all()
                assert all(np.ptp(counts) <= 1 for _, counts in kinds)
        case DominantClasses(k=k, share=share, samples_per_client=size):
            assert np.ptp(sizes) == 0
            assert size in (None, sizes[0])
            k_all = len(np.unique(labels))
            for _, counts in kinds:
                counts = np.sort(np.pad(counts, (k_all - len(counts), 0)))
                wanted = np.floor(share * sizes[0] + 0.5) if k < k_all else sizes[0]
                assert abs(counts[-k:].sum() - wanted) <= k
                assert np.ptp(counts[-k:]) <= 1 or k_all == k
        case Natural():
            assert all(len(np.unique(groups[part])) == 1 for part in parts)


@pytest.mark.parametrize(
    "partition", [IID(), Dirichlet(0.5), ClassesPerClient(2), DominantClasses(2)]
)
def test_the_seed_changes_the_deal(partition):
    labels = np.arange(600) % 6
    first, second = (partition.split(labels, 5, seed) for seed in (0, 1))
    assert not all(map(np.array_equal, first, second))


def test_dominant_classes_exhaust_the_pool_as_in_pfedla():
    labels = np.repeat(np.arange(10), 700)
    parts = DominantClasses(2, 0.4).split(labels, 10, seed=0)
    counts = np.array([np.bincount(labels[part], minlength=10) for part in parts])
    assert counts.sum() == 7000
    assert np.array_equal(
        np.sort(counts, axis=1), np.tile([52] * 4 + [53] * 4 + [140] * 2, (10, 1))
    )
    assert np.array_equal((counts == 140).sum(axis=0), np.full(10, 2))


def test_dominant_classes_spread_the_rest_by_largest_remainder():
    labels = np.repeat(np.arange(100), 600)
    parts = DominantClasses(6, 0.4, samples_per_client=600).split(labels, 100, seed=0)
    counts = np.array([np.bincount(labels[part], minlength=100) for part in parts])
    assert set(counts.ravel()) == {3, 4, 40}
    assert ((counts == 40).sum(axis=1) == 6).all()
    assert (counts.sum(axis=1) == 600).all()


def test_classes_per_client_balances_slots_and_amounts():
    labels = np.repeat(np.arange(10), 600)
    parts = ClassesPerClient(4, samples_per_client=60).split(labels, 100, seed=0)
    counts = np.array([np.bincount(labels[part], minlength=10) for part in parts])
    assert set(counts.ravel()) == {0, 15}
    assert ((counts > 0).sum(axis=0) == 40).all()


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


def test_dirichlet_reports_counts_or_moves_samples():
    labels = np.arange(100) % 2
    with pytest.raises(ConfigurationError, match=r"of 100 samples for 10 clients .* 2 draws"):
        Dirichlet(0.01, min_samples=10, max_draws=2).split(labels, 10, seed=0)
    moved = Dirichlet(0.01, min_samples=10, too_few="move", max_draws=2).split(labels, 10, seed=0)
    assert [len(part) for part in moved] == [10] * 10
    with pytest.raises(ConfigurationError, match="100 samples are too few for 11 clients"):
        Dirichlet(0.5, too_few="move").split(labels, 11, seed=0)


def test_natural_draws_some_people_if_fewer_clients_are_asked_for():
    groups = np.repeat([30, 10, 20], 4)
    parts = Natural().split(np.zeros(12, int), 2, 0, groups)
    assert [len(part) for part in parts] == [4, 4]
    with pytest.raises(ConfigurationError, match=r"num_clients is 4, but .* 3 people"):
        Natural().split(np.zeros(12, int), 4, 0, groups)
    with pytest.raises(ConfigurationError, match="who made each sample"):
        Natural().split(np.zeros(12, int), 2, 0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Dirichlet(0), "alpha"),
        (lambda: Dirichlet(min_samples=0), "min_samples"),
        (lambda: Dirichlet(too_few="ignore"), "too_few"),
        (lambda: Dirichlet(max_draws=0), "max_draws"),
        (lambda: ClassesPerClient(0), "classes per client"),
        (lambda: ClassesPerClient(3, 2), "samples_per_client"),
        (lambda: DominantClasses(2, 1.5), "share"),
        (lambda: ClassesPerClient(5).split(np.arange(8) % 4, 2, 0), "k is 5, .* 4 classes"),
        (lambda: ClassesPerClient(1).split(np.array([0, 0, 0, 1]), 4, 0), "class 1 to 2 of 4"),
        (lambda: DominantClasses(3, 0.4).split(np.arange(50) % 5, 2, 0), "would not dominate"),
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
    val=st.sampled_from([0.0, 0.1, 0.25]),
    test=st.sampled_from([0.0, 0.2, 0.3, 0.7]),
    seed=st.integers(0, 99),
)
def test_a_split_is_stratified(labels, val, test, seed):
    train, validation, testing = stratified_split(labels, val, test, np.random.default_rng(seed))
    together = np.sort(np.concatenate([train, validation, testing]))
    assert np.array_equal(together, np.arange(len(labels)))
    assert len(train) > 0 or len(labels) == 0
    total = np.bincount(labels, minlength=7)
    for part, share in ((testing, test), (validation, val), (train, 1 - val - test)):
        counts = np.bincount(labels[part], minlength=7)
        assert (np.abs(counts - share * total) < 2).all()
        if len(labels) > 4:
            assert abs(len(part) - share * len(labels)) <= 1
    assert test > 0 or len(testing) == 0
    assert val > 0 or len(validation) == 0


def test_a_split_is_exact_where_it_can_be():
    labels = np.repeat(np.arange(10), 150)
    train, _, test = stratified_split(labels, 0, 0.3, np.random.default_rng(0))
    assert (np.bincount(labels[train]) == 105).all()
    assert (np.bincount(labels[test]) == 45).all()

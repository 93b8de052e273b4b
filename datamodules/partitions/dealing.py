"""The arithmetic of dealing samples to clients: counts from shares, and positions from counts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import maximum_flow

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.floating[Any]]


def deal(kinds: Ints, counts: Ints, random: np.random.Generator) -> list[Ints]:
    """Deal shuffled samples by class.

    Args:
        kinds: The class of each sample as a row of ``counts``, ``[n]``.
        counts: Number of samples of each class for each client, ``[classes, clients]``.
        random: Generator that chooses these samples.

    Returns:
        For each client the sorted positions of its samples.
    """
    num_classes, num_clients = counts.shape
    left = np.bincount(kinds, minlength=num_classes) - counts.sum(axis=1)
    owners = np.tile(np.arange(num_clients + 1), num_classes)
    owner = np.empty(len(kinds), dtype=np.int64)
    by_class = np.lexsort((random.random(len(kinds)), kinds))
    owner[by_class] = np.repeat(owners, np.c_[counts, left].ravel())
    return by_owner(owner, num_clients)


def deal_alike(
    labels: Ints, test: Bools, parts: Sequence[Ints], random: np.random.Generator
) -> list[Ints]:
    """Deal each class's test samples in proportion to the training samples that clients hold.

    Args:
        labels: The class of each sample, ``[n]``.
        test: Mask of the samples to deal, ``[n]``.
        parts: Positions of each client's training samples.
        random: Generator that breaks ties and decides which samples go where.

    Returns:
        For each client the sorted positions of its test samples.
    """
    classes, kinds = np.unique(labels, return_inverse=True)
    held = _class_counts(kinds, parts, len(classes))
    known, supply = _class_counts(
        kinds, [np.flatnonzero(~test), np.flatnonzero(test)], len(classes)
    )
    counts = largest_remainder((held * (supply / np.maximum(known, 1))).T, random)
    positions = np.flatnonzero(test)
    return [positions[part] for part in deal(kinds[positions], counts, random)]


def stratified_splits(
    labels: Ints,
    parts: Sequence[Ints],
    val_fraction: float,
    test_fraction: float,
    random: np.random.Generator,
) -> tuple[list[Ints], list[Ints], list[Ints]]:
    """Split each client's samples into three parts with the same class proportions.

    The test part is taken first, then the validation part out of the rest. In each step, the part
    that stays gets the floor of its share of each class. The rest of the client's rounded total
    goes to the classes with the largest fractions, with ties broken at random. A client keeps at
    least one training sample.

    Args:
        labels: The class of each sample of the data set, ``[n]``.
        parts: Positions of each client's samples.
        val_fraction: Share of a client's samples for validation.
        test_fraction: Share of a client's samples for testing.
        random: Generator that decides which samples go where.

    Returns:
        For each client, the positions of its training, validation and test samples.

    Example:
        >>> labels = np.repeat([0, 1], [10, 20])
        >>> splits = stratified_splits(labels, [np.arange(30)], 0.1, 0.2, np.random.default_rng(0))
        >>> [np.bincount(labels[split[0]]).tolist() for split in splits]
        [[7, 14], [1, 2], [2, 4]]
    """
    classes, kinds = np.unique(labels, return_inverse=True)
    noise = random.random(len(labels))
    sizes = _class_counts(kinds, parts, len(classes))
    known = largest_remainder((1 - test_fraction) * sizes, random, least=1)
    train = largest_remainder((1 - val_fraction / (1 - test_fraction)) * known, random, least=1)

    positions = np.concatenate(parts)
    client = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    order = np.lexsort((noise[positions], kinds[positions], client))
    positions, client, kind = positions[order], client[order], kinds[positions[order]]
    rank = np.arange(len(order)) - np.repeat(sizes.cumsum() - sizes.ravel(), sizes.ravel())
    role = (rank >= train[client, kind]).astype(np.int64) + (rank >= known[client, kind])

    owner = np.full(len(labels), 3 * len(parts))
    owner[positions] = 3 * client + role
    splits = by_owner(owner, 3 * len(parts))
    return splits[::3], splits[1::3], splits[2::3]


def largest_remainder(ideal: Floats, random: np.random.Generator, least: int = 0) -> Ints:
    """Round each row to whole numbers that sum to the row's rounded sum.

    Every number gets its floor, and those with the largest fractions get one more; ties are broken
    at random.

    Args:
        ideal: Numbers of at least 0, ``[rows, columns]``.
        random: Generator that breaks ties.
        least: Minimum of each row's sum, even if it rounds to less.

    Returns:
        Whole numbers ``[rows, columns]``, each less than one from its ideal.

    Example:
        >>> largest_remainder(np.array([[2.5, 1.2, 0.3]]), np.random.default_rng(0))
        array([[3, 1, 0]])
    """
    ideal = np.round(ideal, 9)  # 0.7 * 10 and the like should be whole numbers
    counts = np.floor(ideal).astype(np.int64)
    totals = np.floor(np.round(ideal.sum(axis=1), 9) + 0.5).astype(np.int64)
    missing = np.maximum(totals, least) - counts.sum(axis=1)
    largest_first = np.lexsort((random.random(ideal.shape), counts - ideal))
    return counts + (np.argsort(largest_first) < missing[:, None])


def choose_classes(
    k: int, num_classes: int, num_clients: int, random: np.random.Generator
) -> Bools:
    """Choose ``k`` distinct classes for each client, the least used first, with random ties.

    Returns:
        A mask ``[classes, clients]`` with equal sums of rows, to within one.
    """
    chosen = np.zeros((num_classes, num_clients), dtype=bool)
    used = np.zeros(num_classes, dtype=np.int64)
    for client in range(num_clients):
        classes = np.lexsort((random.random(num_classes), used))[:k]
        chosen[classes, client] = True
        used[classes] += 1
    return chosen


def cut_evenly(slots: Ints | Bools, supply: Ints) -> Ints:
    """Cut each class into equal pieces; the first pieces get one more if samples are left over.

    Args:
        slots: Number of pieces of each class for each client, ``[classes, clients]``.
        supply: Number of samples of each class, ``[classes]``.

    Returns:
        Number of samples of each class for each client, ``[classes, clients]``.
    """
    piece, rest = np.divmod(supply, np.maximum(slots.sum(axis=1), 1))
    dealt = slots.cumsum(axis=1)
    return np.diff(dealt * piece[:, None] + np.minimum(dealt, rest[:, None]), prepend=0)


def equal_sizes(
    chosen: Bools, share: float, size: int, supply: Ints, random: np.random.Generator
) -> Ints | None:
    """Give each client ``size`` samples, ``share`` of them from its chosen classes.

    Amounts are equal among the chosen and among the other classes, to within one sample. The
    remainder of rounding is spread evenly over the classes or, if the supply does not allow that,
    over the classes that have samples left.

    Args:
        chosen: Mask of the chosen classes, equally many for each client, ``[classes, clients]``.
        share: Part of a client's samples that come from its chosen classes.
        size: Number of samples of each client.
        supply: Number of samples of each class, ``[classes]``.
        random: Generator that breaks ties.

    Returns:
        Counts ``[classes, clients]``, or ``None`` if the supply does not allow them.
    """
    num_classes = len(chosen)
    k = int(chosen[:, 0].sum())
    dominant = int(np.floor(share * size + 0.5)) if k < num_classes else size
    parts = np.array([k, max(num_classes - k, 1)])
    base, rest = np.divmod([dominant, size - dominant], parts)
    counts = np.where(chosen, base[0], base[1])
    spare = supply - counts.sum(axis=1)
    if (spare < 0).any():
        return None
    even = np.where(chosen, *(rest / parts)).sum(axis=1)
    for most in (largest_remainder(even[None], random)[0], spare):
        ones = _spread(chosen, rest, np.minimum(most, spare))
        if ones is not None:
            return counts + ones
    return None


def _spread(chosen: Bools, rest: Ints, most: Ints) -> Bools | None:
    """Place ones so that each client gets ``rest`` and each class at most ``most`` of them.

    A flow from the two parts of each client to the classes finds the places.

    Args:
        chosen: The chosen classes of each client, ``[classes, clients]``.
        rest: How many ones each client gets in its chosen and in its other classes, ``[2]``.
        most: How many ones each class can take, ``[classes]``.

    Returns:
        Where the ones are, ``[classes, clients]``, or ``None`` if there is no way.
    """
    num_classes, num_clients = chosen.shape
    classes, clients = np.indices(chosen.shape).reshape(2, -1)
    source, first_part, first_class = 0, 1, 1 + 2 * num_clients
    sink = first_class + num_classes
    every_part, every_class = np.arange(first_part, first_class), np.arange(first_class, sink)
    part_of = first_part + clients + num_clients * ~chosen.ravel()
    edges = (
        (np.full(2 * num_clients, source), every_part, np.repeat(rest, num_clients)),
        (part_of, first_class + classes, np.ones(chosen.size, int)),
        (every_class, np.full(num_classes, sink), most),
    )
    columns = (np.concatenate(ends) for ends in zip(*edges, strict=True))
    tails, heads, limits = (column.astype(np.int32) for column in columns)  # of all scipy versions
    graph = coo_array((limits, (tails, heads)), shape=(sink + 1, sink + 1))
    found = maximum_flow(graph.tocsr(), source, sink)
    if found.flow_value < rest.sum() * num_clients:
        return None
    flow = np.asarray(found.flow.tocsr()[part_of, first_class + classes])  # a matrix in scipy 1.13
    return (flow > 0).reshape(chosen.shape)


def by_owner(owner: Ints, num_clients: int) -> list[Ints]:
    """Return each client's positions; samples without a client have an owner past the last."""
    order = np.argsort(owner, kind="stable")
    ends = np.searchsorted(owner[order], np.arange(num_clients), side="right").tolist()
    return [order[first:last] for first, last in pairwise([0, *ends])]


def _class_counts(kinds: Ints, parts: Sequence[Ints], num_classes: int) -> Ints:
    """Count each client's samples of each class, ``[clients, classes]``."""
    client = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    cells = client * num_classes + kinds[np.concatenate(parts)]
    shape = len(parts), num_classes
    return np.bincount(cells, minlength=len(parts) * num_classes).reshape(shape)

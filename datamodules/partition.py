"""How the samples of one data set are dealt to clients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import maximum_flow

from pflight.errors import ConfigurationError
from pflight.randomness import Purpose, numpy_generator

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Partition(ABC):
    """A rule that deals the samples of a data set to clients, each sample at most once.

    Partitions are value objects: two with equal arguments are equal, and a config names one by
    ``class_path`` and ``init_args``.
    """

    @abstractmethod
    def split(
        self, labels: Ints, num_clients: int | None, seed: int, groups: Ints | None = None
    ) -> list[Ints]:
        """Deal samples to clients as a pure function of the arguments.

        Args:
            labels: The class of each sample, ``[n]``.
            num_clients: How many clients to make; ``None`` only where the data decide.
            seed: Seed of all draws.
            groups: Who made each sample, ``[n]``, where the data say so.

        Returns:
            For each client the sorted positions of its samples.

        Raises:
            ConfigurationError: The data can't be dealt so; the message states the counts.
        """


@dataclass(frozen=True)
class IID(Partition):
    """Equal shares of the shuffled samples; sizes differ by at most one.

    Example:
        >>> [len(part) for part in IID().split(np.zeros(10, int), 3, seed=0)]
        [4, 3, 3]
    """

    def split(
        self, labels: Ints, num_clients: int | None, seed: int, groups: Ints | None = None
    ) -> list[Ints]:
        """See :meth:`Partition.split`."""
        num_clients = _checked(num_clients, len(labels))
        order = numpy_generator(Purpose.PARTITION, seed).permutation(len(labels))
        return [np.sort(part) for part in np.array_split(order, num_clients)]


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Label skew: each class is cut at shares drawn from a symmetric Dirichlet distribution.

    A client that already holds its even part ``n / num_clients`` gets nothing of the classes that
    follow, as in FedMA (Wang et al., 2020). The whole deal is redrawn, at most ``max_draws`` times,
    until each client has ``min_samples``.

    Args:
        alpha: Concentration; small means few classes per client, large means IID.
        min_samples: Samples that each client must get.
        too_few: If no draw gives them: ``"error"``, or ``"move"`` random samples from the largest
            clients of the best draw to those that lack some.
        max_draws: How often to draw before that.

    Example:
        >>> parts = Dirichlet(0.5, min_samples=2).split(np.arange(60) % 3, 4, seed=0)
        >>> sum(len(part) for part in parts)
        60
    """

    alpha: float = 0.5
    min_samples: int = 10
    too_few: Literal["error", "move"] = "error"
    max_draws: int = 100

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise ConfigurationError(f"Dirichlet alpha must be over 0, got {self.alpha}")
        if self.min_samples < 1:
            raise ConfigurationError(
                f"Dirichlet min_samples must be at least 1, got {self.min_samples}"
            )
        if self.too_few not in ("error", "move"):
            raise ConfigurationError(
                f"Dirichlet too_few must be error or move, got {self.too_few!r}"
            )
        if self.max_draws < 1:
            raise ConfigurationError(f"Dirichlet max_draws must be at least 1: {self.max_draws}")

    def split(
        self, labels: Ints, num_clients: int | None, seed: int, groups: Ints | None = None
    ) -> list[Ints]:
        """See :meth:`Partition.split`."""
        num_clients = _checked(num_clients, len(labels), self.min_samples)
        random = numpy_generator(Purpose.PARTITION, seed)
        _, supply = np.unique(labels, return_counts=True)
        best = self._draw(supply, num_clients, random)
        for _ in range(self.max_draws - 1):
            if _smallest(best) >= self.min_samples:
                break
            best = max(best, self._draw(supply, num_clients, random), key=_smallest)
        if _smallest(best) < self.min_samples:
            if self.too_few == "error":
                raise ConfigurationError(
                    f"{self} left a client with {_smallest(best)} of {len(labels)} samples for "
                    f"{num_clients} clients in the best of {self.max_draws} draws; lower "
                    "min_samples, raise alpha or choose too_few='move'"
                )
            self._mend(best, random)
        return _deal(labels, best, random)

    def _draw(self, supply: Ints, num_clients: int, random: np.random.Generator) -> Ints:
        """Return how many samples of each class each client gets, ``[classes, clients]``."""
        counts = np.zeros((len(supply), num_clients), dtype=np.int64)
        held = np.zeros(num_clients, dtype=np.int64)
        for row, available in zip(counts, supply, strict=True):
            wants_more = held * num_clients < supply.sum()
            shares = random.dirichlet(np.full(num_clients, self.alpha)) * wants_more
            if not shares.sum() > 0:
                shares = wants_more.astype(float)
            cuts = np.floor(available * (shares / shares.sum()).cumsum() + 1e-9).astype(np.int64)
            cuts[np.flatnonzero(wants_more)[-1] :] = available
            row[:] = np.diff(cuts, prepend=0)
            held += row
        return counts

    def _mend(self, counts: Ints, random: np.random.Generator) -> None:
        """Move random samples, in place, from the largest clients to those with too few."""
        sizes = counts.sum(axis=0)
        for client in np.flatnonzero(sizes < self.min_samples):
            while sizes[client] < self.min_samples:
                giver = sizes.argmax()
                kind = random.choice(len(counts), p=counts[:, giver] / sizes[giver])
                counts[kind, [giver, client]] += [-1, 1]
                sizes[[giver, client]] += [-1, 1]


@dataclass(frozen=True)
class ClassesPerClient(Partition):
    """Each client has samples of ``k`` distinct classes.

    The numbers of clients that share a class differ by at most one. Each class is dealt equally to
    its clients, all of it unless ``samples_per_client`` says less; a class that no client drew
    (fewer than ``classes / k`` clients) stays out. With ``samples_per_client`` this is pFedLA's
    "non-IID.1" (Ma et al., 2022).

    Args:
        k: Classes per client.
        samples_per_client: Size of every client, in equal amounts of its classes; ``None`` deals
            all samples.

    Example:
        >>> labels = np.arange(100) % 10
        >>> parts = ClassesPerClient(2).split(labels, 10, seed=0)
        >>> [len(np.unique(labels[part])) for part in parts]
        [2, 2, 2, 2, 2, 2, 2, 2, 2, 2]
    """

    k: int = 2
    samples_per_client: int | None = None

    def __post_init__(self) -> None:
        _check_k_and_size(self.k, self.samples_per_client)

    def split(
        self, labels: Ints, num_clients: int | None, seed: int, groups: Ints | None = None
    ) -> list[Ints]:
        """See :meth:`Partition.split`."""
        num_clients = _checked(num_clients, len(labels))
        random = numpy_generator(Purpose.PARTITION, seed)
        classes, supply = np.unique(labels, return_counts=True)
        chosen = _choose_classes(self.k, len(classes), num_clients, random)
        if self.samples_per_client is None:
            slots = chosen.sum(axis=1)
            if (short := (supply < slots)).any():
                worst = short.argmax()
                raise ConfigurationError(
                    f"{self} gives class {classes[worst]} to {slots[worst]} of {num_clients} "
                    f"clients, but it has only {supply[worst]} samples"
                )
            share, rest = np.divmod(supply, np.maximum(slots, 1))
            counts = chosen * (share[:, None] + (chosen.cumsum(axis=1) <= rest[:, None]))
        else:
            found = _equal_sizes(chosen, 1.0, self.samples_per_client, supply)
            if found is None:
                raise _shortage(self, num_clients, self.samples_per_client, classes, supply)
            counts = found
        return _deal(labels, counts, random)


@dataclass(frozen=True)
class DominantClasses(Partition):
    """Each client has all classes, of which ``k`` dominant ones hold ``share`` of its samples.

    All clients have the same size. The numbers of clients in which a class dominates differ by at
    most one; amounts are equal within the dominant classes and within the others, to within one
    sample. This is pFedLA's "non-IID.2" (Ma et al., 2022).

    Args:
        k: Dominant classes per client.
        share: Their part of the client's samples.
        samples_per_client: Size of every client; ``None`` means the largest that the data allow.

    Example:
        >>> labels = np.arange(1000) % 10
        >>> parts = DominantClasses(2, share=0.4).split(labels, 10, seed=0)
        >>> sorted(np.bincount(labels[parts[0]]).tolist())
        [7, 7, 7, 7, 8, 8, 8, 8, 20, 20]
    """

    k: int = 2
    share: float = 0.4
    samples_per_client: int | None = None

    def __post_init__(self) -> None:
        _check_k_and_size(self.k, self.samples_per_client)
        if not 0 < self.share <= 1:
            raise ConfigurationError(f"DominantClasses share must be in (0, 1], got {self.share}")

    def split(
        self, labels: Ints, num_clients: int | None, seed: int, groups: Ints | None = None
    ) -> list[Ints]:
        """See :meth:`Partition.split`."""
        num_clients = _checked(num_clients, len(labels))
        random = numpy_generator(Purpose.PARTITION, seed)
        classes, supply = np.unique(labels, return_counts=True)
        chosen = _choose_classes(self.k, len(classes), num_clients, random)
        if self.share * len(classes) < self.k:
            raise ConfigurationError(
                f"{self}: {self.k} of {len(classes)} classes with {self.share:.0%} of the samples "
                "would not dominate"
            )
        if self.samples_per_client is not None:
            sizes = range(self.samples_per_client, self.samples_per_client - 1, -1)
        else:
            largest = self._largest_size(chosen, supply)
            sizes = range(largest, max(0, largest - 2 * len(classes)), -1)
        for size in sizes:
            counts = _equal_sizes(chosen, self.share, size, supply)
            if counts is not None:
                return _deal(labels, counts, random)
        raise _shortage(self, num_clients, self.samples_per_client or 1, classes, supply)

    def _largest_size(self, chosen: Bools, supply: Ints) -> int:
        """Return the size at which the first class is used up, if samples were divisible."""
        k, others = self.k, len(chosen) - self.k
        slots = chosen.sum(axis=1)
        share = self.share if others else 1.0
        demand = slots * share / k + (chosen.shape[1] - slots) * (1 - share) / max(others, 1)
        needed = demand > 0
        return int((supply[needed] / demand[needed]).min()) + 1


@dataclass(frozen=True)
class Natural(Partition):
    """One client for each person who made samples: a writer, a drawer, a user.

    With ``num_clients`` fewer than there are people, so many are drawn at random.

    Example:
        >>> Natural().split(np.zeros(4, int), None, seed=0, groups=np.array([7, 3, 7, 3]))
        [array([1, 3]), array([0, 2])]
    """

    def split(
        self, labels: Ints, num_clients: int | None, seed: int, groups: Ints | None = None
    ) -> list[Ints]:
        """See :meth:`Partition.split`."""
        if groups is None:
            raise ConfigurationError(
                "partition Natural() needs to know who made each sample, and these data don't say"
            )
        people, owner = np.unique(groups, return_inverse=True)
        num_clients = len(people) if num_clients is None else num_clients
        if not 1 <= num_clients <= len(people):
            raise ConfigurationError(
                f"num_clients is {num_clients}, but the data come from {len(people)} people"
            )
        parts = _by_owner(owner, len(people))
        random = numpy_generator(Purpose.PARTITION, seed)
        drawn = random.choice(len(people), num_clients, replace=False)
        return [parts[person] for person in np.sort(drawn)]


def stratified_split(
    labels: Ints, val_fraction: float, test_fraction: float, random: np.random.Generator
) -> tuple[Ints, Ints, Ints]:
    """Split one client's samples so that the three parts have the same class proportions.

    The test part is set aside first, validation then comes out of the training data. Of each class
    the kept part gets the floor of its share, and what is missing to the rounded total goes to the
    classes with the largest fractions, ties at random. A client keeps at least one training sample.

    Args:
        labels: The class of each sample, ``[n]``.
        val_fraction: Share of all samples for validation.
        test_fraction: Share of all samples for testing.
        random: Decides which samples go where.

    Returns:
        Sorted positions of the training, validation and test samples.

    Example:
        >>> labels = np.repeat([0, 1], [10, 20])
        >>> parts = stratified_split(labels, 0.1, 0.2, np.random.default_rng(0))
        >>> [np.bincount(labels[part]).tolist() for part in parts]
        [[7, 14], [1, 2], [2, 4]]
    """
    positions = np.arange(len(labels))
    kept, test = _stratified_pair(positions, labels, 1 - test_fraction, random)
    share = 1 - val_fraction / (1 - test_fraction)
    train, val = _stratified_pair(kept, labels[kept], share, random)
    return train, val, test


def _stratified_pair(
    positions: Ints, labels: Ints, share: float, random: np.random.Generator
) -> tuple[Ints, Ints]:
    """Split ``positions`` into ``share`` of each class and the rest."""
    if len(positions) == 0 or share >= 1:
        return positions, positions[:0]
    _, kinds, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    ideal = np.round(share * sizes, 9)
    quota = np.floor(ideal).astype(np.int64)
    missing = max(1, int(np.floor(share * len(labels) + 0.5))) - quota.sum()
    quota[np.lexsort((random.random(len(sizes)), quota - ideal))[:missing]] += 1
    by_class = np.lexsort((random.random(len(labels)), kinds))
    rank = np.arange(len(labels)) - np.repeat(sizes.cumsum() - sizes, sizes)
    first = np.empty(len(labels), dtype=bool)
    first[by_class] = rank < quota[kinds[by_class]]
    return positions[first], positions[~first]


def _checked(num_clients: int | None, num_samples: int, least: int = 1) -> int:
    """Return ``num_clients`` if each client can have ``least`` samples."""
    if num_clients is None or num_clients < 1:
        raise ConfigurationError(f"num_clients must be at least 1, got {num_clients}")
    if num_samples < num_clients * least:
        raise ConfigurationError(
            f"{num_samples} samples are too few for {num_clients} clients "
            f"with at least {least} each"
        )
    return num_clients


def _smallest(counts: Ints) -> int:
    """Return the sample count of the smallest client."""
    return int(counts.sum(axis=0).min())


def _check_k_and_size(k: int, samples_per_client: int | None) -> None:
    if k < 1:
        raise ConfigurationError(f"k, the classes per client, must be at least 1, got {k}")
    if samples_per_client is not None and samples_per_client < k:
        raise ConfigurationError(
            f"samples_per_client must be at least k = {k}, got {samples_per_client}"
        )


def _choose_classes(
    k: int, num_classes: int, num_clients: int, random: np.random.Generator
) -> Bools:
    """Choose ``k`` distinct classes for each client, those used least so far, ties at random.

    Returns:
        A mask ``[classes, clients]`` whose rows have equal sums to within one.
    """
    if k > num_classes:
        raise ConfigurationError(f"k is {k}, but the data have only {num_classes} classes")
    chosen = np.zeros((num_classes, num_clients), dtype=bool)
    used = np.zeros(num_classes, dtype=np.int64)
    for client in range(num_clients):
        classes = np.lexsort((random.random(num_classes), used))[:k]
        chosen[classes, client] = True
        used[classes] += 1
    return chosen


def _equal_sizes(chosen: Bools, share: float, size: int, supply: Ints) -> Ints | None:
    """Give each client ``size`` samples, ``share`` of them from its chosen classes.

    Amounts are equal within the chosen and within the other classes. The samples left by rounding
    go, at most one for a client and class, where the classes still have some: a flow from clients
    to classes decides.

    Returns:
        Counts ``[classes, clients]``, or ``None`` if the supply does not allow them.
    """
    num_classes, num_clients = chosen.shape
    k = int(chosen[:, 0].sum())
    dominant = int(np.floor(share * size + 0.5)) if k < num_classes else size
    base, extra = np.divmod([dominant, size - dominant], [k, max(num_classes - k, 1)])
    counts = np.where(chosen, base[0], base[1])
    spare = supply - counts.sum(axis=1)
    if (spare < 0).any():
        return None
    if not extra.any():
        return counts
    # Nodes: source, clients (chosen part), clients (other part), classes, sink.
    source, sink = 0, 2 * num_clients + num_classes + 1
    classes, clients = np.indices(chosen.shape).reshape(2, -1)
    part = 1 + clients + num_clients * ~chosen.ravel()
    tails = np.r_[
        np.zeros(2 * num_clients, int), part, 2 * num_clients + 1 + np.arange(num_classes)
    ]
    heads = np.r_[1 + np.arange(2 * num_clients), 2 * num_clients + 1 + classes]
    heads = np.r_[heads, np.full(num_classes, sink)]
    limits = np.r_[np.repeat(extra, num_clients), np.ones(chosen.size, int), spare]
    graph = coo_array((limits.astype(np.int32), (tails, heads)), shape=(sink + 1, sink + 1))
    flow = maximum_flow(graph.tocsr(), source, sink)
    if flow.flow_value < extra.sum() * num_clients:
        return None
    given = flow.flow.tocoo()
    out = (given.row > 0) & (given.row <= 2 * num_clients) & (given.data > 0)
    counts[given.col[out] - 2 * num_clients - 1, (given.row[out] - 1) % num_clients] += 1
    return counts


def _shortage(
    partition: Partition, num_clients: int, size: int, classes: Ints, supply: Ints
) -> ConfigurationError:
    rarest = supply.argmin()
    return ConfigurationError(
        f"{partition} can't give {num_clients} clients {size} samples each: there are "
        f"{supply.sum()} in {len(classes)} classes, of class {classes[rarest]} only "
        f"{supply[rarest]}"
    )


def _deal(labels: Ints, counts: Ints, random: np.random.Generator) -> list[Ints]:
    """Deal shuffled samples: ``counts[c, i]`` of the c-th class to client i."""
    num_clients = counts.shape[1]
    by_class = np.lexsort((random.random(len(labels)), labels))
    owner = np.full(len(labels), num_clients)
    start = 0
    for row, size in zip(counts, np.unique(labels, return_counts=True)[1], strict=True):
        owner[by_class[start : start + row.sum()]] = np.repeat(np.arange(num_clients), row)
        start += size
    return _by_owner(owner, num_clients)


def _by_owner(owner: Ints, num_clients: int) -> list[Ints]:
    """List each client's positions; samples of no client have an owner past the last."""
    order = np.argsort(owner, kind="stable")
    ends = np.searchsorted(owner[order], np.arange(num_clients), side="right")
    return np.split(order[: ends[-1]], ends[:-1])

"""Partitions of the samples of one data set among clients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pflight.errors import ConfigurationError
from pflight.options import (
    NonNegativeFloat,
    OpenUnitInterval,
    PositiveFloat,
    PositiveInt,
    check_range,
    checked,
)
from pflight.randomness import Purpose, numpy_generator

from .dealing import (
    Bools,
    Ints,
    by_owner,
    choose_classes,
    cut_evenly,
    deal,
    deal_alike,
    equal_sizes,
    largest_remainder,
)

Parts = list[Ints]
"""Each client's positions ``[n]``."""


class Partition(ABC):
    """Deals the samples of a data set to clients, each sample at most once.

    Partitions are value objects: two with equal arguments are equal. A config gives one by
    ``class_path`` and ``init_args``.
    """

    @property
    def title(self) -> str:
        """What errors call the partition."""
        return type(self).__name__

    @abstractmethod
    def split(
        self, labels: Ints, num_clients: int | None, seed: int, groups: Ints | None = None
    ) -> list[Ints]:
        """Deal samples to clients as a pure function of the arguments.

        Args:
            labels: The class of each sample, ``[n]``.
            num_clients: Number of clients; ``None`` only if the data determine it.
            seed: Seed of all draws.
            groups: The person who made each sample, ``[n]``, if the data say so.

        Returns:
            For each client the sorted positions of its samples.

        Raises:
            ConfigurationError: The data can't be dealt in this way; the message has the counts.
        """

    def deal(
        self,
        labels: Ints,
        test: Bools,
        num_clients: int | None,
        seed: int,
        groups: Ints | None = None,
    ) -> list[Ints]:
        """Deal the training samples by :meth:`split` and the test samples in the same proportions.

        A client that holds a tenth of the training samples of a class gets a tenth of that class's
        test samples, by largest remainders with ties broken at random. Test samples of a class that
        no client trains on are not used.

        Args:
            labels: The class of each sample, ``[n]``.
            test: Which samples belong to the data set's own test set, ``[n]``.
            num_clients: Number of clients; ``None`` only if the data determine it.
            seed: Seed of all draws.
            groups: The person who made each sample, ``[n]``, if the data say so.

        Returns:
            For each client the sorted positions of its samples of both kinds.

        Raises:
            ConfigurationError: The data can't be dealt in this way; the message has the counts.
        """
        train = np.flatnonzero(~test)
        made_by = None if groups is None else groups[train]
        given = self.split(labels[train], num_clients, seed, made_by)
        parts = [train[part] for part in self.disjoint(given, len(train), "training samples")]
        tests = deal_alike(labels, test, parts, numpy_generator(Purpose.PARTITION, seed, 4))
        return [np.sort(np.concatenate(both)) for both in zip(parts, tests, strict=True)]

    def own_splits(self) -> tuple[Parts, Parts, Parts] | None:
        """Return positions for training, validation and testing, if the partition says them.

        By default it does not, and the data module splits each client's samples.
        """
        return None

    def disjoint(
        self, parts: Sequence[Any], count: int | None = None, kind: str = "samples"
    ) -> Parts:
        """Check that each position is of one client alone, and return the positions.

        Args:
            parts: For each client its positions.
            count: Number of samples; ``None`` if it is not known.
            kind: What the samples are called.

        Raises:
            ConfigurationError: Naming a client and a position.
        """
        checked = []
        for client, given in enumerate(parts):
            part = np.asarray(given)
            if part.ndim != 1 or not (np.issubdtype(part.dtype, np.integer) or not part.size):
                raise ConfigurationError(
                    f"{self.title} gives client {client} no list of positions, but {part.dtype} of "
                    f"shape {part.shape}"
                )
            part = part.astype(np.int64)
            if len(odd := part[(part < 0) | (part >= (np.inf if count is None else count))]):
                of = "" if count is None else f", of {count} {kind}"
                raise ConfigurationError(f"{self.title} gives client {client} sample {odd[0]}{of}")
            checked.append(part)
        given = np.concatenate([np.empty(0, np.int64), *checked])
        whose = np.repeat(np.arange(len(checked)), [*map(len, checked)])
        order = np.argsort(given, kind="stable")
        for again in np.flatnonzero(np.diff(given[order]) == 0)[:1]:
            one, other = whose[order[again : again + 2]]
            if one == other:
                raise ConfigurationError(f"{self.title} gives client {one} a sample twice")
            raise ConfigurationError(
                f"{self.title} gives sample {given[order[again]]} to client {one} and to "
                f"client {other}: every sample goes to at most one client"
            )
        return checked


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


@checked
@dataclass(frozen=True)
class Dirichlet(Partition):
    """Label skew: each class is divided by shares from a symmetric Dirichlet distribution.

    A client that already holds an even share ``n / num_clients`` gets nothing of the following
    classes, as in FedMA (Wang et al., 2020). The whole partition is redrawn, at most ``max_draws``
    times, until each client has ``min_samples``.

    Args:
        alpha: Concentration: the smaller, the fewer classes per client; large values are IID.
        min_samples: Minimum number of samples of each client.
        too_few: If no draw reaches the minimum: ``"error"``, or ``"move"`` random samples from the
            largest clients of the best draw to those with too few.
        max_draws: Maximum number of draws.
        samples_per_client: Mean number of samples per client, drawn at random from the data set;
            ``None`` deals all samples.

    Example:
        >>> parts = Dirichlet(0.5, min_samples=2).split(np.arange(60) % 3, 4, seed=0)
        >>> sum(len(part) for part in parts)
        60
    """

    alpha: PositiveFloat = 0.5
    min_samples: PositiveInt = 10
    too_few: Literal["error", "move"] = "error"
    max_draws: PositiveInt = 100
    samples_per_client: int | None = None

    def __post_init__(self) -> None:
        if self.samples_per_client is not None and self.samples_per_client < self.min_samples:
            raise ConfigurationError(
                f"Dirichlet: samples_per_client must be at least min_samples = {self.min_samples}, "
                f"got {self.samples_per_client}"
            )

    def split(
        self, labels: Ints, num_clients: int | None, seed: int, groups: Ints | None = None
    ) -> list[Ints]:
        """See :meth:`Partition.split`."""
        size = self.samples_per_client
        num_clients = _checked(num_clients, len(labels), size or self.min_samples)
        random = numpy_generator(Purpose.PARTITION, seed)
        dealt = np.arange(len(labels))
        if size is not None:
            dealt = np.sort(random.choice(dealt, num_clients * size, replace=False))
        _, kinds, supply = np.unique(labels[dealt], return_inverse=True, return_counts=True)
        best = self._draw(supply, num_clients, random)
        for _ in range(self.max_draws - 1):
            if _smallest(best) >= self.min_samples:
                break
            best = max(best, self._draw(supply, num_clients, random), key=_smallest)
        if _smallest(best) < self.min_samples:
            if self.too_few == "error":
                raise ConfigurationError(
                    f"{self}: in the best of {self.max_draws} draws of {len(dealt)} samples for "
                    f"{num_clients} clients, a client has only {_smallest(best)}; lower "
                    "min_samples, raise alpha or choose too_few='move'"
                )
            self._mend(best, random)
        return [dealt[part] for part in deal(kinds, best, random)]

    def _draw(self, supply: Ints, num_clients: int, random: np.random.Generator) -> Ints:
        """Return the numbers of samples of each class for each client, ``[classes, clients]``."""
        counts = np.zeros((len(supply), num_clients), dtype=np.int64)
        held = np.zeros(num_clients, dtype=np.int64)
        for row, available in zip(counts, supply, strict=True):
            wants_more = held * num_clients < supply.sum()
            shares = random.dirichlet(np.full(num_clients, self.alpha)) * wants_more
            if not shares.sum() > 0:  # underflow; a part of such a draw is Dirichlet, too
                shares[wants_more] = random.dirichlet(np.full(wants_more.sum(), self.alpha))
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


@checked
@dataclass(frozen=True)
class ClassesPerClient(Partition):
    """Each client has samples of ``k`` distinct classes.

    The numbers of clients that share a class differ by at most one. Each class is dealt equally to
    its clients. A class that no client has, with fewer than ``classes / k`` clients, is not used.
    With ``samples_per_client`` this is pFedLA's "non-IID.1" (Ma et al., 2022).

    Args:
        k: Number of classes per client.
        samples_per_client: Number of samples of every client, in equal amounts of its classes;
            ``None`` deals all samples.

    Example:
        >>> labels = np.arange(100) % 10
        >>> parts = ClassesPerClient(2).split(labels, 10, seed=0)
        >>> [len(np.unique(labels[part])) for part in parts]
        [2, 2, 2, 2, 2, 2, 2, 2, 2, 2]
    """

    k: int = 2
    samples_per_client: int | None = None

    def __post_init__(self) -> None:
        _check_k_and_size(self, self.k, self.samples_per_client)

    def split(
        self, labels: Ints, num_clients: int | None, seed: int, groups: Ints | None = None
    ) -> list[Ints]:
        """See :meth:`Partition.split`."""
        num_clients = _checked(num_clients, len(labels))
        random = numpy_generator(Purpose.PARTITION, seed)
        classes, kinds, supply = np.unique(labels, return_inverse=True, return_counts=True)
        _check_has_classes(self.k, classes)
        chosen = choose_classes(self.k, len(classes), num_clients, random)
        if self.samples_per_client is None:
            _check_pieces(self, chosen, classes, supply)
            return deal(kinds, cut_evenly(chosen, supply), random)
        counts = equal_sizes(chosen, 1.0, self.samples_per_client, supply, random)
        if counts is None:
            raise _shortage(self, num_clients, self.samples_per_client, classes, supply)
        return deal(kinds, counts, random)


@checked
@dataclass(frozen=True)
class DominantClasses(Partition):
    """Each client has all classes; ``k`` dominant ones hold ``share`` of its samples.

    All clients have the same number of samples, with at least one of each class. Each class
    dominates in as many clients, to within one. Amounts are equal among the dominant classes and
    among the others, to within one sample. This is pFedLA's "non-IID.2" (Ma et al., 2022).

    Args:
        k: Number of dominant classes per client.
        share: Their share of the client's samples, more than if all classes had equal amounts.
        samples_per_client: Number of samples of every client; ``None`` means the largest number
            that the data allow.

    Example:
        >>> labels = np.arange(1000) % 10
        >>> parts = DominantClasses(2, share=0.4).split(labels, 10, seed=0)
        >>> sorted(np.bincount(labels[parts[0]]).tolist())
        [7, 7, 7, 7, 8, 8, 8, 8, 20, 20]
    """

    k: int = 2
    share: OpenUnitInterval = 0.4
    samples_per_client: int | None = None

    def __post_init__(self) -> None:
        _check_k_and_size(self, self.k, self.samples_per_client)

    def split(
        self, labels: Ints, num_clients: int | None, seed: int, groups: Ints | None = None
    ) -> list[Ints]:
        """See :meth:`Partition.split`."""
        num_clients = _checked(num_clients, len(labels))
        random = numpy_generator(Purpose.PARTITION, seed)
        classes, kinds, supply = np.unique(labels, return_inverse=True, return_counts=True)
        _check_has_classes(self.k, classes)
        chosen = choose_classes(self.k, len(classes), num_clients, random)
        if round(self.share * len(classes), 9) <= self.k:
            raise ConfigurationError(
                f"{self}: {self.k} of {len(classes)} classes with {self.share:.0%} of the samples "
                "would not dominate"
            )
        least = self._smallest_size(len(classes))
        largest = self.samples_per_client or self._largest_size(chosen, supply)
        if self.samples_per_client and self.samples_per_client < least:
            raise ConfigurationError(
                f"{self}: samples_per_client must be at least {least}, so that each client has "
                f"all {len(classes)} classes"
            )
        smallest = self.samples_per_client or max(least, largest - 2 * len(classes))
        for size in range(largest, smallest - 1, -1):
            counts = equal_sizes(chosen, self.share, size, supply, random)
            if counts is not None:
                return deal(kinds, counts, random)
        raise _shortage(self, num_clients, self.samples_per_client or least, classes, supply)

    def _smallest_size(self, num_classes: int) -> int:
        """Return the smallest size with a sample of each class that does not dominate."""
        others = num_classes - self.k
        return int(round((others - 0.5) / (1 - self.share), 9)) + 1

    def _largest_size(self, chosen: Bools, supply: Ints) -> int:
        """Return the size at which the first class is used up, if samples were divisible."""
        slots = chosen.sum(axis=1)
        dominant = slots * self.share / self.k
        others = (chosen.shape[1] - slots) * (1 - self.share) / (len(chosen) - self.k)
        return int((supply / (dominant + others)).min()) + 1


@checked
@dataclass(frozen=True)
class ClassShards(Partition):
    """Each class is cut into equal shards, and each client gets ``k`` shards at random.

    Each class has ``k * num_clients / classes`` shards; if that is not a whole number, some random
    classes have one more than the others. If a class does not divide evenly, its first shards have
    one sample more. A client may get two shards of one class. This is the partition of Collins et
    al. (2021), "Exploiting Shared Representations for Personalized Federated Learning", without its
    repetition of samples, and of FedEC (Lan et al.).

    Args:
        k: Number of shards per client.
        max_samples: Maximum number of samples of a client, in the same class proportions; ``None``
            keeps all. With :meth:`Partition.deal` it limits the training samples, and the client's
            share of the test set shrinks in proportion.

    Example:
        >>> labels = np.arange(6000) % 10
        >>> parts = ClassShards(2).split(labels, 100, seed=0)
        >>> sorted({len(part) for part in parts})
        [60]
    """

    k: PositiveInt = 2
    max_samples: PositiveInt | None = 500

    def split(
        self, labels: Ints, num_clients: int | None, seed: int, groups: Ints | None = None
    ) -> list[Ints]:
        """See :meth:`Partition.split`."""
        num_clients = _checked(num_clients, len(labels))
        random = numpy_generator(Purpose.PARTITION, seed)
        classes, kinds, supply = np.unique(labels, return_inverse=True, return_counts=True)
        each, rest = divmod(self.k * num_clients, len(classes))
        more = random.choice(len(classes), rest, replace=False)
        shards = random.permutation(np.r_[np.repeat(np.arange(len(classes)), each), more])
        slots = np.zeros((len(classes), num_clients), dtype=np.int64)
        np.add.at(slots, (shards, np.repeat(np.arange(num_clients), self.k)), 1)
        _check_pieces(self, slots, classes, supply)
        counts = cut_evenly(slots, supply)
        if self.max_samples is not None:
            kept = np.minimum(1, self.max_samples / counts.sum(axis=0))
            counts = largest_remainder((counts * kept).T, random).T
        return deal(kinds, counts, random)


@checked
@dataclass(frozen=True)
class ConsecutiveClasses(Partition):
    """Client ``u`` has the classes ``u, u + 1, ..., u + k - 1``, and sizes have a long tail.

    Classes are numbered from 0 in ascending order, and the last is followed by the first. A client
    demands ``minimum`` samples plus the floor of a log-normal number, spread over its classes
    equally to within one. Samples are dealt disjointly: if a class has fewer than its clients
    demand, all of them get the same share of their demand.

    With the defaults and 150 clients this is FedEC's partition of ten letters of FEMNIST (Lan et
    al.). The paper generates 200 clients and uses 150. The other 50 are left out here, since they
    would only take samples away. The sizes add up to about 28,000 samples. The paper states 34,674,
    which these sizes can't reach.

    Args:
        k: Number of classes per client.
        minimum: Minimum number of samples that a client demands.
        log_mean: Mean of the logarithm of the number of further samples.
        log_std: Standard deviation of that logarithm.

    Example:
        >>> labels = np.arange(8000) % 10
        >>> parts = ConsecutiveClasses(3).split(labels, 20, seed=0)
        >>> np.unique(labels[parts[9]]).tolist()
        [0, 1, 9]
    """

    k: PositiveInt = 3
    minimum: int = 100
    log_mean: float = 4.0
    log_std: NonNegativeFloat = 1.0

    def __post_init__(self) -> None:
        if self.minimum < self.k:
            raise ConfigurationError(
                f"ConsecutiveClasses: minimum must be at least k = {self.k}, got {self.minimum}"
            )

    def split(
        self, labels: Ints, num_clients: int | None, seed: int, groups: Ints | None = None
    ) -> list[Ints]:
        """See :meth:`Partition.split`."""
        num_clients = _checked(num_clients, len(labels))
        random = numpy_generator(Purpose.PARTITION, seed)
        classes, kinds, supply = np.unique(labels, return_inverse=True, return_counts=True)
        _check_has_classes(self.k, classes)
        tail = random.lognormal(self.log_mean, self.log_std, num_clients)
        sizes = self.minimum + np.minimum(tail, len(labels)).astype(np.int64)
        share, rest = np.divmod(sizes, self.k)
        clients = np.arange(num_clients)
        asked = np.zeros((len(classes), num_clients), dtype=np.int64)
        for place in range(self.k):
            asked[(clients + place) % len(classes), clients] = share + (place < rest)
        given = np.minimum(1, supply / np.maximum(asked.sum(axis=1), 1))
        counts = largest_remainder(asked * given[:, None], random)
        if _smallest(counts) == 0:
            raise _shortage(self, num_clients, int(sizes.min()), classes, supply)
        return deal(kinds, counts, random)


@dataclass(frozen=True)
class ByUser(Partition):
    """One client for each person who made samples: a writer, a drawer, a user.

    If ``num_clients`` is less than the number of people, a random selection of them is used.

    Example:
        >>> ByUser().split(np.zeros(4, int), None, seed=0, groups=np.array([7, 3, 7, 3]))
        [array([1, 3]), array([0, 2])]
    """

    def split(
        self, labels: Ints, num_clients: int | None, seed: int, groups: Ints | None = None
    ) -> list[Ints]:
        """See :meth:`Partition.split`."""
        if groups is None:
            raise ConfigurationError(
                "partition ByUser() needs data that say who made each sample; these don't"
            )
        people, owner = np.unique(groups, return_inverse=True)
        num_clients = len(people) if num_clients is None else num_clients
        if not 1 <= num_clients <= len(people):
            raise ConfigurationError(
                f"num_clients is {num_clients}, but the data come from {len(people)} people"
            )
        parts = by_owner(owner, len(people))
        random = numpy_generator(Purpose.PARTITION, seed)
        drawn = random.choice(len(people), num_clients, replace=False)
        return [parts[person] for person in np.sort(drawn)]

    def deal(
        self,
        labels: Ints,
        test: Bools,
        num_clients: int | None,
        seed: int,
        groups: Ints | None = None,
    ) -> list[Ints]:
        """Give everyone their own training and test samples."""
        return self.split(labels, num_clients, seed, groups)


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


def _check_has_classes(k: int, classes: Ints) -> None:
    if k > len(classes):
        raise ConfigurationError(f"k is {k}, but the data have only {len(classes)} classes")


def _check_pieces(partition: Partition, slots: Ints | Bools, classes: Ints, supply: Ints) -> None:
    """Check that each class has a sample for each of the pieces it is cut into."""
    pieces = slots.sum(axis=1)
    if (short := supply < pieces).any():
        worst = short.argmax()
        raise ConfigurationError(
            f"{partition} cuts class {classes[worst]} into {pieces[worst]} pieces for "
            f"{slots.shape[1]} clients, more than its samples ({supply[worst]})"
        )


def _smallest(counts: Ints) -> int:
    """Return the sample count of the smallest client."""
    return int(counts.sum(axis=0).min())


def _check_k_and_size(partition: Partition, k: int, samples_per_client: int | None) -> None:
    check_range(partition, "[1, inf)", k=k)
    if samples_per_client is not None and samples_per_client < k:
        raise ConfigurationError(
            f"{type(partition).__name__}: samples_per_client must be at least k = {k}, got "
            f"{samples_per_client}"
        )


def _shortage(
    partition: Partition, num_clients: int, size: int, classes: Ints, supply: Ints
) -> ConfigurationError:
    rarest = supply.argmin()
    return ConfigurationError(
        f"{partition} can't give {num_clients} clients {size} samples each: there are "
        f"{supply.sum()} in {len(classes)} classes, of class {classes[rarest]} only "
        f"{supply[rarest]}"
    )

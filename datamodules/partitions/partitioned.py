"""The base class of data sets that are dealt to clients by a partition."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from pflight.data.data_module import FederatedDataModule
from pflight.data.fingerprint import checksum_of
from pflight.data.loaders import SPLITS, IndexedSamples, Split
from pflight.errors import ConfigurationError
from pflight.options import Interval, PositiveInt, checked
from pflight.randomness import Purpose, numpy_generator

from .dealing import Ints, stratified_splits
from .partition import ByUser, Partition, Parts
from .samples import Samples


@checked
class PartitionedDataModule(FederatedDataModule):
    """One data set in memory, dealt to clients as lists of positions in it.

    A subclass for your own data set defines :meth:`load`, and :meth:`transform` if its features are
    kept in a compact form. Each client's samples are split into training, validation and test parts
    with the same label distribution.

    Args:
        partition: How samples are dealt to clients.
        num_clients: Number of clients; ``null`` if the partition finds them in the data.
        val_fraction: Share of each client's samples for validation; with ``official_test``, share
            of its training samples.
        test_fraction: Share of each client's samples for testing.
        official_test: Whether the data set's own test samples stay test samples; each client gets
            the same share of a class's test samples as of its training samples. A person who is a
            client and has test samples alone is a newcomer, in addition to ``holdout_clients``.
            Otherwise both are pooled.
        **kwargs: Further arguments of :class:`FederatedDataModule`.

    Raises:
        ConfigurationError: An option is out of its range.
    """

    def __init__(
        self,
        *,
        partition: Partition,
        num_clients: PositiveInt | None = None,
        val_fraction: Annotated[float, Interval("[0, 1)")] = 0.1,
        test_fraction: Annotated[float, Interval("[0, 1)")] = 0.2,
        official_test: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if val_fraction + test_fraction >= 1:
            raise ConfigurationError(
                f"{type(self).__name__}: val_fraction {val_fraction} and test_fraction "
                f"{test_fraction} leave no training data"
            )
        if num_clients is not None:
            self.num_clients = num_clients
        self.partition = partition
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.official_test = official_test
        self._samples: Samples | None = None
        self._indices: dict[Split, list[Tensor]] = {}

    def load(self) -> Samples:
        """Read the whole data set."""
        raise NotImplementedError(f"{type(self).__name__} must define load()")

    def transform(self, x: Tensor) -> Tensor:
        """Turn gathered features into a network's inputs; by default, return them unchanged."""
        return x

    def fitted(self, samples: Samples) -> Samples:
        """Return the samples after they are dealt; by default unchanged.

        A subclass may scale features here by those of its training samples. :meth:`labels` and
        ``train_clients`` are known by then.
        """
        return samples

    def setup(self, stage: str | None = None) -> None:
        """Load and deal the data; calling it again changes nothing."""
        if self._samples is None:
            try:
                samples = self.load()
            except MemoryError as error:
                raise ConfigurationError(
                    f"the data set does not fit into memory: {error}"
                ) from error
            self._indices = {
                split: [torch.from_numpy(part) for part in parts]
                for split, parts in zip(SPLITS, self._deal(samples), strict=True)
            }
            self._samples, self.num_clients = samples, len(self._indices["train"])
            self._samples = self.fitted(samples)
            if samples.names and isinstance(self.partition, ByUser):
                self.client_names = self._names_of(samples)
        super().setup(stage)

    def _names_of(self, samples: Samples) -> list[str]:
        """Return the names of the clients' people. Each has a sample."""
        assert samples.groups is not None
        parts = zip(*self._indices.values(), strict=True)
        return [samples.names[samples.groups[torch.cat(own)[0]]] for own in parts]

    def _deal(self, samples: Samples) -> tuple[list[Ints], list[Ints], list[Ints]]:
        """Return each client's positions for training, for validation and for testing."""
        labels, test = samples.y.numpy(), samples.test
        arguments = getattr(self, "num_clients", None), self.seed, samples.groups
        random = numpy_generator(Purpose.PARTITION, self.seed, 1)
        if own := self.partition.own_splits():
            return self._deal_as_given(labels, own, random)
        if not self.official_test:
            parts = self._checked(self.partition.split(labels, *arguments), len(labels))
            return stratified_splits(labels, parts, self.val_fraction, self.test_fraction, random)
        if test is None:
            raise ConfigurationError(
                f"{type(self).__name__} has no test set of its own: official_test must be false"
            )
        parts = self._checked(self.partition.deal(labels, test, *arguments), len(labels))
        known = [part[~test[part]] for part in parts]
        train, val, _ = stratified_splits(labels, known, self.val_fraction, 0.0, random)
        return train, val, [part[test[part]] for part in parts]

    def _deal_as_given(
        self, labels: Ints, own: tuple[Parts, Parts, Parts], random: np.random.Generator
    ) -> tuple[Parts, Parts, Parts]:
        """Return the partition's own splits; training samples validate if no others do."""
        if self.official_test:
            raise ConfigurationError(
                f"{self.partition} has test samples of its own: official_test must be false"
            )
        self._checked([np.concatenate(parts) for parts in zip(*own, strict=True)], len(labels))
        train, val, test = own
        if not any(map(len, val)):
            train, val, _ = stratified_splits(labels, train, self.val_fraction, 0.0, random)
        return train, val, test

    def _checked(self, parts: Sequence[Any], count: int) -> list[Ints]:
        """Return a partition's result after checking it.

        Raises:
            ConfigurationError: Naming a client and a position.
        """
        wanted = getattr(self, "num_clients", None)
        if wanted is not None and len(parts) != wanted:
            raise ConfigurationError(
                f"{self.partition.title} gives {len(parts)} clients, not {wanted}: "
                f"set num_clients to {len(parts)}"
            )
        return self.partition.disjoint(parts, count)

    @cached_property
    def new_clients(self) -> Tensor:
        """Sorted ids of the newcomers: drawn ones, and clients with given test samples alone."""
        drawn = super().new_clients
        if not self.official_test and self.partition.own_splits() is None:
            return drawn
        tested_alone = (self.num_samples("train") == 0) & (self.num_samples("test") > 0)
        return torch.cat([drawn, tested_alone.nonzero().flatten()]).unique()

    def samples(self, client: int, split: Split) -> tuple[Tensor, Tensor]:
        """See :meth:`FederatedDataModule.samples`."""
        held = self._held()
        self.check_client(client)
        indices = self._indices[split][client]
        return self.transform(held.x[held.rows_of(indices)]), held.y[indices]

    def labels(self, client: int, split: Split) -> Tensor:
        """See :meth:`FederatedDataModule.labels`."""
        held = self._held()
        self.check_client(client)
        return held.y[self._indices[split][client]]

    def fingerprint(self) -> Tensor:
        """Return checksums of each client's labels and of their positions in the data set."""
        checksums = super().fingerprint().tolist()
        for parts in self._indices.values():
            checksums = [*map(checksum_of, parts, checksums)]
        return torch.tensor(checksums)

    def dataset(self, clients: Tensor, split: Split) -> IndexedSamples:
        """See :meth:`FederatedDataModule.dataset`; nothing is copied."""
        held = self._held()
        indices = torch.cat([self._indices[split][client] for client in clients.tolist()])
        return IndexedSamples(held.x, held.y[indices], held.rows_of(indices), self.transform)

    def _held(self) -> Samples:
        if self._samples is None:
            raise ConfigurationError(f"call {type(self).__name__}.setup() before reading its data")
        return self._samples

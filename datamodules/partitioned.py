"""Data sets that are held once and dealt to clients by a partition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pflight.errors import ConfigurationError
from pflight.randomness import Purpose, numpy_generator

from .federated import SPLITS, FederatedDataModule, Split
from .loaders import IndexedSamples
from .partition import Ints, Partition, stratified_split


class PartitionedDataModule(FederatedDataModule):
    """One data set in memory, dealt to clients as lists of positions in it.

    A data set of one's own defines :meth:`load`, and :meth:`transform` if its features are kept in
    a compact form. Each client's samples are split into training, validation and test parts with
    the same label distribution.

    Args:
        partition: How samples are dealt to clients.
        num_clients: Number of clients; ``null`` where the partition finds them in the data.
        val_fraction: Share of each client's samples for validation.
        test_fraction: Share of each client's samples for testing.
        **kwargs: Further arguments of :class:`FederatedDataModule`.

    Raises:
        ConfigurationError: An option is out of its range.
    """

    def __init__(
        self,
        *,
        partition: Partition,
        num_clients: int | None = None,
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        for name, share in {"val_fraction": val_fraction, "test_fraction": test_fraction}.items():
            if not 0 <= share < 1:
                raise ConfigurationError(f"{name} must be in [0, 1), got {share}")
        if val_fraction + test_fraction >= 1:
            raise ConfigurationError(
                f"val_fraction {val_fraction} and test_fraction {test_fraction} leave no training "
                "data"
            )
        if num_clients is not None:
            if num_clients < 1:
                raise ConfigurationError(f"num_clients must be at least 1, got {num_clients}")
            self.num_clients = num_clients
        self.partition = partition
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self._x: Tensor | None = None
        self._y: Tensor | None = None
        self._indices: dict[Split, list[Tensor]] = {}

    def load(self) -> tuple[Tensor, Tensor, Ints | None]:
        """Read the whole data set.

        Returns:
            Features ``[n, ...]``, labels ``[n]``, and who made each sample ``[n]`` if known.
        """
        raise NotImplementedError(f"{type(self).__name__} must define load()")

    def transform(self, x: Tensor) -> Tensor:
        """Turn gathered features into what a network gets; by default, leave them as they are."""
        return x

    def setup(self, stage: str | None = None) -> None:
        """Load and deal the data; doing it again changes nothing."""
        if self._x is None:
            x, y, groups = self.load()
            labels = y.numpy()
            num_clients = getattr(self, "num_clients", None)
            parts = self.partition.split(labels, num_clients, self.seed, groups)
            splits = [self._split(client, part, labels) for client, part in enumerate(parts)]
            columns = zip(SPLITS, zip(*splits, strict=True), strict=True)
            self._indices = {split: list(indices) for split, indices in columns}
            self._x, self._y, self.num_clients = x, y, len(parts)
        super().setup(stage)

    def _split(self, client: int, part: Ints, labels: Ints) -> list[Tensor]:
        random = numpy_generator(Purpose.PARTITION, self.seed, 1, client)
        splits = stratified_split(labels[part], self.val_fraction, self.test_fraction, random)
        return [torch.from_numpy(part[positions]) for positions in splits]

    def samples(self, client: int, split: Split) -> tuple[Tensor, Tensor]:
        """See :meth:`FederatedDataModule.samples`."""
        x, y = self._held()
        self.check_client(client)
        indices = self._indices[split][client]
        return self.transform(x[indices]), y[indices]

    def labels(self, client: int, split: Split) -> Tensor:
        """See :meth:`FederatedDataModule.labels`."""
        _, y = self._held()
        self.check_client(client)
        return y[self._indices[split][client]]

    def dataset(self, clients: Tensor, split: Split) -> IndexedSamples:
        """See :meth:`FederatedDataModule.dataset`; nothing is copied."""
        x, y = self._held()
        indices = torch.cat([self._indices[split][client] for client in clients.tolist()])
        return IndexedSamples(x, y, indices, self.transform)

    def _held(self) -> tuple[Tensor, Tensor]:
        if self._x is None or self._y is None:
            raise ConfigurationError(f"call {type(self).__name__}.setup() before reading its data")
        return self._x, self._y

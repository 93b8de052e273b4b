"""Data modules with some clients, or some samples, of another data module."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .data_module import FederatedDataModule
from .fingerprint import joined
from .loaders import Split, Visit

EVERYBODY: dict[str, Any] = {
    "cohort_size": None,
    "participation": None,
    "availability": 1.0,
    "dropout": 0.0,
}
"""Options with which all clients take part in every round."""
OPTIONS = tuple(inspect.signature(FederatedDataModule).parameters)
"""The options of any federated data, such as ``cohort_size``."""


class WrappedData(FederatedDataModule):
    """Other data. A subclass takes some of its clients or samples.

    If the wrapped data define methods of their own, such as an ``order`` or ``augment``, these are
    used. Set the wrapped data up before wrapping; the wrapper does not.

    Args:
        data: The wrapped data.
        **changed: Options that differ from ``data``'s.
    """

    cut: Collection[Split] = ()
    """Splits that are taken from the training samples of the wrapped data, by :meth:`rows`."""

    def __init__(self, data: FederatedDataModule, **changed: Any) -> None:
        given: dict[str, Any] = {name: getattr(data, name, None) for name in OPTIONS}
        super().__init__(**given | changed)
        self.data = data
        self.num_clients = data.num_clients
        self.fill = data.fill

    def origin(self, client: int) -> int:
        """Return the id that a client has in the wrapped data."""
        return client

    def taken(self, values: Tensor) -> Tensor:
        """Return these clients' rows ``[num_clients, ...]``, given all wrapped clients' rows."""
        return values

    def rows(self, client: int, split: Split) -> Tensor:
        """Return a :attr:`cut` split's positions among the training samples, ``[n]``, ascending."""
        raise NotImplementedError(f"{type(self).__name__} must define rows(client, split)")

    @property
    def clusters(self) -> Tensor | None:  # type: ignore[override]
        """The true cluster of each client, ``[num_clients]``, if the wrapped data know it."""
        return None if self.data.clusters is None else self.taken(self.data.clusters)

    @property
    def client_names(self) -> Sequence[str]:  # type: ignore[override]
        """The clients' names, if the wrapped data know them."""
        names = self.data.client_names
        return [names[self.origin(i)] for i in range(self.num_clients)] if len(names) else ()

    def at_round(self, round: int) -> None:
        """See :meth:`FederatedDataModule.at_round`."""
        self.data.at_round(round)

    @property
    def drifts(self) -> bool:
        """Whether the wrapped data depend on the round."""
        return self.data.drifts

    @property
    def holds_tensors(self) -> bool:
        """Whether the wrapped data are tensors."""
        return self.data.holds_tensors

    @property
    def knows_classes(self) -> bool:
        """Whether the wrapped samples have classes that can be counted."""
        return self.data.knows_classes

    def samples(self, client: int, split: Split) -> Any:
        """See :meth:`FederatedDataModule.samples`."""
        samples = self.data.samples(self.origin(client), self._source(split))
        if split not in self.cut:
            return samples
        rows = self.rows(client, split)
        return tree_map(lambda leaf: leaf[rows], samples)

    def labels(self, client: int, split: Split) -> Tensor:
        """See :meth:`FederatedDataModule.labels`."""
        labels = self.data.labels(self.origin(client), self._source(split))
        return labels[self.rows(client, split)] if split in self.cut else labels

    def num_samples(self, split: Split = "train") -> Tensor:
        """Return each client's number of samples, ``[num_clients]``."""
        return self.taken(self.data.num_samples(split))

    def class_counts(self, split: Split = "train", num_classes: int | None = None) -> Tensor:
        """See :meth:`FederatedDataModule.class_counts`."""
        if split in self.cut:
            return super().class_counts(split, num_classes)
        return self.taken(self.data.class_counts(split, num_classes))

    def fingerprint(self) -> Tensor:
        """Return the wrapped data's fingerprints, with checksums of the labels if some are cut."""
        whole = self.taken(self.data.fingerprint())
        return joined(whole, super().fingerprint()) if self.cut and self.holds_tensors else whole

    def order(self, client: int, round: int, epoch: int = 0) -> Tensor:
        """Return the order of the wrapped data, only for the taken samples, ``[n]``."""
        return self._within(client, self.data.order(self.origin(client), round, epoch))

    def orders(self, clients: Sequence[int], round: int, epoch: int = 0) -> Sequence[Tensor]:
        """See :meth:`FederatedDataModule.orders`."""
        orders = self.data.orders([*map(self.origin, clients)], round, epoch)
        return [*map(self._within, clients, orders)]

    def noise(self, count: int, client: int, round: int, epoch: int = 0) -> Tensor:
        """See :meth:`FederatedDataModule.noise`."""
        return self.data.noise(count, self.origin(client), round, epoch)

    def augment(self, x: Tensor, client: int, round: int, epoch: int = 0) -> Tensor:
        """See :meth:`FederatedDataModule.augment`."""
        return self.data.augment(x, self.origin(client), round, epoch)

    def batches(self, split: Split, visits: Sequence[Visit]) -> Iterator[Any]:
        """See :meth:`FederatedDataModule.batches`."""
        moved = []
        for client, round, epoch, parts in visits:
            if split in self.cut:
                rows = self.rows(client, split)
                parts = [rows[part] for part in parts]
            moved.append(Visit(self.origin(client), round, epoch, parts))
        return self.data.batches(self._source(split), moved)

    def _source(self, split: Split) -> Split:
        return "train" if split in self.cut else split

    def _within(self, client: int, order: Tensor) -> Tensor:
        """Return an order of all training samples as an order of the taken ones."""
        if "train" not in self.cut:
            return order
        rows = self.rows(client, "train")
        order = order.to(rows)
        return torch.searchsorted(rows, order[torch.isin(order, rows)])

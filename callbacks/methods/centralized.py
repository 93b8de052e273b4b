"""Centralized training: one model on the pooled samples of all clients, as a yardstick."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.utils._pytree import tree_map

from pflight.data.data_module import FederatedDataModule
from pflight.data.loaders import Split, Visit
from pflight.data.wrapped import EVERYBODY, WrappedData
from pflight.errors import ConfigurationError
from pflight.fedavg import FedAvg
from pflight.states.updates import ClientUpdates

from .registry import Method


class PooledData(WrappedData):
    """Other data, whose training samples all belong to the first client that can train.

    Newcomers' samples stay out. Validation and test samples stay with their clients.

    Args:
        data: The wrapped data. It must define ``samples``.

    Raises:
        ConfigurationError: If the data give samples only in batches, or hold them elsewhere.
    """

    def __init__(self, data: FederatedDataModule) -> None:
        if not data.holds_tensors:
            raise ConfigurationError(
                f"Centralized can't pool the samples of {data}: it must define "
                "samples(client, split)"
            )
        self.owners = data.train_clients.tolist()
        self._pool = self._read(data)
        super().__init__(data, **EVERYBODY)

    def _read(self, data: FederatedDataModule) -> Any:
        """Return all training samples together. Where they are on other machines, this raises."""
        parts = [data.samples(owner, "train") for owner in self.owners or [0]]
        return tree_map(lambda *leaves: torch.cat(leaves), *parts)

    def at_round(self, round: int) -> None:
        """Pool the samples that the owners have in a round."""
        super().at_round(round)
        if self.drifts:
            self._pool = self._read(self.data)

    def _pooled(self, values: Tensor) -> Tensor:
        """Return clients' rows ``[num_clients, ...]`` with their sum in the first owner's row."""
        pooled = torch.zeros_like(values)
        if self.owners:
            pooled[self.owners[0]] = values[self.owners].sum(0)
        return pooled

    def num_samples(self, split: Split = "train") -> Tensor:
        """Return each client's number of samples, ``[num_clients]``."""
        counts = self.data.num_samples(split)
        return self._pooled(counts) if split == "train" else counts

    def class_counts(self, split: Split = "train", num_classes: int | None = None) -> Tensor:
        """See :meth:`FederatedDataModule.class_counts`."""
        counts = self.data.class_counts(split, num_classes)
        return self._pooled(counts) if split == "train" else counts

    def samples(self, client: int, split: Split) -> Any:
        """Return the samples of a client. Training samples are all or none."""
        if split != "train":
            return self.data.samples(client, split)
        return self._pool if client in self.owners[:1] else tree_map(_nothing, self._pool)

    def labels(self, client: int, split: Split) -> Tensor:
        """See :meth:`FederatedDataModule.labels`."""
        if split != "train":
            return self.data.labels(client, split)
        return FederatedDataModule.labels(self, client, split)

    def order(self, client: int, round: int, epoch: int = 0) -> Tensor:
        """Return a random order of the pooled samples, ``[n]``."""
        return FederatedDataModule.order(self, client, round, epoch)

    def orders(self, clients: Sequence[int], round: int, epoch: int = 0) -> Sequence[Tensor]:
        """See :meth:`FederatedDataModule.orders`."""
        return [self.order(client, round, epoch) for client in clients]

    def augment(self, x: Tensor, client: int, round: int, epoch: int = 0) -> Tensor:
        """Return the pooled features, each part as its owner sees it in this epoch."""
        sizes = self.data.num_samples("train")[self.owners].tolist()
        parts = zip(self.owners, x.split(sizes), strict=True)
        return torch.cat([self.data.augment(part, owner, round, epoch) for owner, part in parts])

    def batches(self, split: Split, visits: Sequence[Visit]) -> Iterator[Any]:
        """See :meth:`FederatedDataModule.batches`."""
        if split == "train":
            return FederatedDataModule.batches(self, split, visits)
        return self.data.batches(split, visits)


def _nothing(leaf: Tensor) -> Tensor:
    return leaf[:0]


class Centralized(FedAvg):
    """One model, trained on the samples of all clients together and judged by each client's own.

    It shows what pooling the data would give, and is no federated method. In each round the model
    passes ``local_epochs`` times over the samples of all clients that may train, in batches of
    ``batch_size``. With full participation that is each client's training in a round. Newcomers'
    samples stay out. No traffic is counted.

    Raises:
        ConfigurationError: If the data give samples only in batches, with ``finetune_epochs``, or
            in a deployment, where samples can't be pooled.
    """

    aggregates = False

    def __init__(self) -> None:
        super().__init__("samples", "shared")

    def local_data(self, data: FederatedDataModule) -> FederatedDataModule:
        """Return the data with pooled training samples."""
        return PooledData(data)

    def round(self, cohort: Tensor) -> None:
        """Train the model on the pooled samples, whoever is in the cohort."""
        super().round(self.clients.trainable.to(cohort.device))

    def setup_server(self) -> None:
        """Make the model."""
        for name in ("finetune_epochs", "newcomer_epochs"):
            if getattr(self.clients.training, name):
                raise ConfigurationError(
                    f"Centralized: clients have no training samples of their own, so {name} must "
                    "be 0"
                )
        super().setup_server()

    def bytes_down(self, clients: Tensor, sent: TensorDict) -> int:
        """Return 0, since there is no federation."""
        return 0

    def bytes_up(self, updates: ClientUpdates) -> int:
        """Return 0, since there is no federation."""
        return 0


METHODS = (
    Method("Centralized", Centralized, "Centralized()", "one model of pooled samples", tested={}),
)

"""Clients whose samples are tensors in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pflight.errors import ConfigurationError
from pflight.options import checked

from .federated import SPLITS, FederatedDataModule, Split

Pairs = Sequence[tuple[Tensor, Tensor]]


@checked
class TensorClients(FederatedDataModule):
    """Clients given as pairs of tensors, which are kept as they are and never copied.

    A client may be without samples in any split; without training samples it never trains. Data
    types are kept, so float64 features stay float64; labels are cast to int64.

    Args:
        train: For each client its training features ``[n, ...]`` and labels ``[n]``.
        test: The same for testing, in the same order of clients; ``None`` means no test data.
        val: The same for validation.
        num_classes: Number of classes; labels are ``0 .. num_classes - 1``.
        cohort_size: Clients that train in a round; with neither this nor ``participation``, all.
        batch_size: Samples of a local training batch; ``None`` means all of the client's.
        seed: Seed of the cohorts, the newcomers and the order of the samples.
        **kwargs: Further arguments of :class:`FederatedDataModule`.

    Raises:
        ConfigurationError: Data or options that can't be used; the message names the client.

    Example:
        >>> pair = torch.zeros(5, 4), torch.tensor([0, 1, 1, 0, 1])
        >>> data = TensorClients([pair, pair, pair], num_classes=2, cohort_size=2)
        >>> data.num_clients, data.cohorts.size, data.num_samples().tolist()
        (3, 2, [5, 5, 5])
    """

    def __init__(
        self,
        train: Pairs,
        test: Pairs | None = None,
        val: Pairs | None = None,
        *,
        num_classes: int,
        cohort_size: int | None = None,
        batch_size: int | None = 32,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_classes=num_classes,
            cohort_size=cohort_size,
            batch_size=batch_size,
            seed=seed,
            **kwargs,
        )
        self.num_clients = len(train)
        if self.num_clients == 0:
            raise ConfigurationError(
                f"{type(self).__name__}: train is empty: a federation needs at least one client"
            )
        nothing = torch.empty(0), torch.empty(0, dtype=torch.long)
        self._pairs: dict[Split, Pairs] = {}
        for split, pairs in zip(SPLITS, (train, val, test), strict=True):
            pairs = [nothing] * self.num_clients if pairs is None else pairs
            if len(pairs) != self.num_clients:
                raise ConfigurationError(
                    f"{type(self).__name__}: {split} has {len(pairs)} clients, but train has "
                    f"{self.num_clients}"
                )
            self._pairs[split] = [
                _checked_pair(pair, f"client {client}, {split}", num_classes)
                for client, pair in enumerate(pairs)
            ]
        self._check_shapes()
        self.setup()

    def samples(self, client: int, split: Split) -> tuple[Tensor, Tensor]:
        """See :meth:`FederatedDataModule.samples`."""
        self.check_client(client)
        return self._pairs[split][client]

    def _check_shapes(self) -> None:
        """Require one feature shape and data type; clients without samples take them over."""
        first: Tensor | None = None
        origin = ""
        for split, pairs in self._pairs.items():
            for client, (x, _) in enumerate(pairs):
                if len(x) == 0:
                    continue
                if first is None:
                    first, origin = x, f"client {client}, {split}"
                elif x.shape[1:] != first.shape[1:] or x.dtype != first.dtype:
                    raise ConfigurationError(
                        f"client {client}, {split}: features are {x.dtype} of shape "
                        f"{list(x.shape[1:])}, but those of {origin} are {first.dtype} of shape "
                        f"{list(first.shape[1:])}"
                    )
        if first is None:
            raise ConfigurationError("train is empty: no client has a sample")
        nothing = first[:0], torch.empty(0, dtype=torch.long, device=first.device)
        for split, pairs in self._pairs.items():
            self._pairs[split] = [pair if len(pair[0]) else nothing for pair in pairs]


def _checked_pair(
    pair: tuple[Tensor, Tensor], name: str, num_classes: int
) -> tuple[Tensor, Tensor]:
    """Return features and int64 labels, or say what is wrong with them."""
    if not (isinstance(pair, tuple | list) and len(pair) == 2):
        raise ConfigurationError(f"{name}: expected a pair of features and labels")
    x, y = pair
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        raise ConfigurationError(
            f"{name}: features and labels must be tensors, got {type(x).__name__} and "
            f"{type(y).__name__}"
        )
    if y.ndim != 1 or x.ndim == 0 or len(x) != len(y):
        raise ConfigurationError(
            f"{name}: features of shape {list(x.shape)} and labels of shape {list(y.shape)}; "
            "expected [n, ...] and [n]"
        )
    if not torch.isfinite(x).all():
        raise ConfigurationError(f"{name}: features contain NaN or infinite values")
    if y.is_complex() or not (y == (labels := y.long())).all():
        raise ConfigurationError(f"{name}: labels must be whole numbers, got {y.dtype}")
    if len(labels) == 0:
        return x, labels
    smallest, largest = (int(bound) for bound in labels.aminmax())
    if smallest < 0 or largest >= num_classes:
        raise ConfigurationError(
            f"{name}: labels go from {smallest} to {largest}, but num_classes is {num_classes}"
        )
    return x, labels

"""The handwritten digits that come with scikit-learn."""

from __future__ import annotations

from typing import Any

import torch

from pflight.datamodules.partitions.partition import ClassesPerClient, Partition
from pflight.datamodules.partitions.partitioned import PartitionedDataModule
from pflight.datamodules.partitions.samples import Samples
from pflight.options import checked


@checked
class Digits(PartitionedDataModule):
    """1,797 handwritten digits of 8 x 8 pixels from scikit-learn; needs no download.

    Features are float32 ``[n, 1, 8, 8]`` in [0, 1], labels ``0 .. 9``.

    Args:
        partition: How samples are dealt to clients.
        num_clients: Number of clients.
        val_fraction: Share of each client's samples for validation.
        test_fraction: Share of each client's samples for testing.
        **kwargs: Further arguments of :class:`FederatedDataModule`.

    Example:
        >>> data = Digits(num_clients=10)
        >>> data.setup()
        >>> x, y = data.samples(0, "train")
        >>> x.shape[1:], len(y.unique())
        (torch.Size([1, 8, 8]), 2)
    """

    def __init__(
        self,
        partition: Partition = ClassesPerClient(2),  # noqa: B008 (a frozen value object)
        num_clients: int = 20,
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_classes=10,
            partition=partition,
            num_clients=num_clients,
            val_fraction=val_fraction,
            test_fraction=test_fraction,
            **kwargs,
        )

    def load(self) -> Samples:
        """See :meth:`PartitionedDataModule.load`."""
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        x = torch.from_numpy(images).float().div_(16).view(-1, 1, 8, 8)
        return Samples(x, torch.from_numpy(labels).long())

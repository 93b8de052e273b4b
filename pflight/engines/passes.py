"""The passes of pflight's own methods."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pflight.data.loaders import Split
from pflight.local_client import Batches, LocalClient, Measure, Pass

from .base import is_finite


class Sums(Pass):
    """Adds up the results of a function for the batches of a client's training samples.

    Args:
        measure: Gets a client and a batch; returns the sums over the samples of the batch.
        like: Zeros of the sums' shapes and types, by name.
        batch_size: Size of the batches, if it matters.
    """

    stacks = False  # a method's numbers must not depend on the engine's chunks

    def __init__(
        self, measure: Measure, like: Mapping[str, Tensor], batch_size: int | None = None
    ) -> None:
        self.measure = measure
        self.like = like
        self.batch_size = batch_size

    def __call__(self, c: LocalClient, batches: Batches) -> dict[str, Tensor]:
        """See :class:`~pflight.local_client.Pass`."""
        device = next(iter(c.weights.values())).device
        totals = {name: torch.zeros_like(t, device=device) for name, t in self.like.items()}
        for batch in batches:
            for name, value in self.measure(c, batch).items():
                totals[name] += value
        return totals

    def check(self, found: Mapping[str, Tensor]) -> None:
        """Raise if a sum is not finite."""
        if not is_finite(found):
            raise RuntimeError("what it finds out of its samples is NaN or infinite")


class Rows(Pass):
    """Collects the results of a function for each sample of a client.

    Args:
        measure: Gets a client and a batch; returns tensors ``[n, ...]`` of the batch's samples.
        split: The split of the samples.
    """

    stacks = False

    def __init__(self, measure: Measure, split: Split = "train") -> None:
        self.measure = measure
        self.split = split

    def __call__(self, c: LocalClient, batches: Batches) -> dict[str, Tensor]:
        """See :class:`~pflight.local_client.Pass`."""
        parts = [self.measure(c, batch) for batch in batches]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


class Loss(Pass):
    """The mean loss of the client module over a client's samples, as ``loss``.

    A server chooses models by this loss. It is always computed alone. In a stack, its last bits
    depend on the clients in the same call.

    Args:
        split: The split of the samples.
    """

    stacks = False

    def __init__(self, split: Split) -> None:
        self.split = split

    def __call__(self, c: LocalClient, batches: Batches) -> dict[str, Tensor]:
        """See :class:`~pflight.local_client.Pass`."""
        device = next(iter(c.weights.values())).device
        total = torch.zeros((), dtype=torch.double, device=device)
        for size, batch in zip(batches.sizes, batches, strict=True):
            total = total + c.task_loss(batch).double() * size
        return {"loss": total / sum(batches.sizes)}

"""The base class of client methods that adjust training logits by class counts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pflight.local_client import LocalClient
from pflight.method import ClientMethod


class AdjustedLogits(ClientMethod):
    """Trains a client on its task's loss of adjusted logits, also in fine-tuning.

    Predictions use the unadjusted logits. A subclass defines the adjustment.
    """

    needs_head = True
    needs_classes = True

    def adjusted(self, logits: Tensor, counts: Tensor) -> Tensor:
        """Return the logits ``[n, K]`` to train on, by the client's class counts ``[K]``."""
        raise NotImplementedError(f"{type(self).__name__} does not define adjusted()")

    def loss(self, c: LocalClient, batch: Any) -> Tensor:
        """Return the task's loss of the adjusted logits."""
        counts = c.class_counts
        return c.task_loss_and_features(batch, lambda _, logits: self.adjusted(logits, counts))[0]

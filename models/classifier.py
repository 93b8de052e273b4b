"""Classification: a network that returns logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch.nn.functional as F
from lightning import LightningModule
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_accuracy

from pflight.errors import ConfigurationError
from pflight.metrics.collection import ClientMetrics, F1Average
from pflight.options import PositiveInt, checked
from pflight.task import Batch, OptimizerOf, Task, plain_sgd


def as_classifier(module: LightningModule, what: str) -> Classifier:
    """Return a client module as a :class:`Classifier`, which some methods need.

    Args:
        module: The client module.
        what: The method that needs logits and classes, for the message.

    Raises:
        ConfigurationError: If it is not a Classifier.
    """
    if not isinstance(module, Classifier):
        raise ConfigurationError(
            f"{what} needs logits and classes: use a Classifier as the client, not "
            f"{type(module).__name__}"
        )
    return module


@checked
class Classifier(Task):
    """A network that classifies, trained on cross-entropy.

    In a federation, clients are judged by accuracy, F1 and loss (see
    :class:`~pflight.metrics.collection.ClientMetrics`). It also trains by itself under a plain
    Trainer.

    Args:
        network: Maps a batch of inputs ``[batch, ...]`` to logits ``[batch, num_classes]``.
        num_classes: Number of classes.
        optimizer: Builds the optimizer from the trainable parameters, anew at every participation.
        gradient_clip_val: As in :class:`~pflight.task.Task`.
        gradient_clip_algorithm: ``"norm"`` or ``"value"``.


    Example:
        >>> import torch
        >>> client = Classifier(torch.nn.Linear(4, 2), num_classes=2)
        >>> client.loss((torch.zeros(3, 4), torch.tensor([0, 1, 1]))).shape
        torch.Size([])
    """

    judged_by = ("acc", "max")

    def __init__(
        self,
        network: nn.Module,
        num_classes: PositiveInt,
        optimizer: OptimizerOf = plain_sgd,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] = "norm",
    ) -> None:
        super().__init__(network, optimizer, gradient_clip_val, gradient_clip_algorithm)
        self.num_classes = num_classes

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each sample's cross-entropy ``[n]``."""
        return F.cross_entropy(outputs, targets, reduction="none")

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean loss of a batch: cross-entropy, unless :meth:`losses` is overridden."""
        if type(self).losses is not Classifier.losses:
            return super().loss(batch)
        x, y = batch
        return F.cross_entropy(self(x), y)

    def measure(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        """Return the accuracy."""
        accuracy = multiclass_accuracy(outputs, targets, self.num_classes, average="micro")
        return {"acc": accuracy}

    def check_targets(self, targets: Tensor) -> None:
        """Raise unless labels ``[n]`` are classes in range; probabilities are allowed too."""
        if targets.dim() != 1 or targets.is_floating_point() or not len(targets):
            return
        smallest, largest = (int(bound) for bound in targets.aminmax())
        if smallest < 0 or largest >= self.num_classes:
            raise ValueError(
                f"its labels go from {smallest} to {largest}, but num_classes is {self.num_classes}"
            )

    def check_outputs(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise unless outputs are logits ``[n, num_classes]``, and targets classes ``[n]``."""
        if targets.dim() != 1 or targets.is_floating_point() or targets.is_complex():
            dtype = str(targets.dtype).removeprefix("torch.")
            raise ValueError(
                f"its labels must be classes [n], not {dtype} of shape {list(targets.shape)}"
            )
        self.check_targets(targets)
        if outputs.shape != (len(targets), self.num_classes):
            raise ValueError(
                f"its model returns outputs of shape {list(outputs.shape)} for {len(targets)} "
                f"samples of {self.num_classes} classes"
            )

    def client_metrics(self, num_clients: int, f1_average: F1Average) -> ClientMetrics:
        """Return the accuracy and F1 metrics of all clients."""
        return ClientMetrics(num_clients, self.num_classes, f1_average=f1_average)

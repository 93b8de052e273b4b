"""Regression: a network that returns numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError, MeanSquaredError, Metric, MetricCollection, R2Score

from pflight.metrics.pooling import value_of
from pflight.options import checked
from pflight.task import Batch, OptimizerOf, Task, plain_sgd


@checked
class Regressor(Task):
    """A network for regression, trained on the mean squared error.

    In a federation, clients are judged by their mean absolute error ``mae``, root mean squared
    error ``rmse`` and coefficient of determination ``r2``, as in torchmetrics, and by the loss. It
    also trains by itself under a plain Trainer.

    Args:
        network: Maps inputs ``[batch, ...]`` to outputs of the targets' shape, ``[batch]`` or
            ``[batch, k]``; for targets ``[batch]`` also ``[batch, 1]``.
        optimizer: Builds the optimizer from the trainable parameters, anew at every participation.
        gradient_clip_val: As in :class:`~pflight.task.Task`.
        gradient_clip_algorithm: ``"norm"`` or ``"value"``.

    Raises:
        ConfigurationError: If an option is out of range.

    Example:
        >>> import torch
        >>> client = Regressor(torch.nn.Linear(4, 1))
        >>> client.loss((torch.zeros(3, 4), torch.zeros(3))).shape
        torch.Size([])
    """

    judged_by = ("mae", "min")
    higher_is_better: Mapping[str, bool] = {"mae": False, "rmse": False, "r2": True, "loss": False}

    def __init__(
        self,
        network: nn.Module,
        optimizer: OptimizerOf = plain_sgd,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] = "norm",
    ) -> None:
        super().__init__(network, optimizer, gradient_clip_val, gradient_clip_algorithm)
        metrics: dict[str, Metric | MetricCollection] = {
            "mae": MeanAbsoluteError(),
            "rmse": MeanSquaredError(squared=False),
            "r2": R2Score(),
        }
        self.metrics = MetricCollection(metrics)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each sample's squared error ``[n]``, the mean over its numbers."""
        errors = F.mse_loss(outputs.view_as(targets), targets, reduction="none")
        return errors.flatten(1).mean(1) if errors.dim() > 1 else errors

    def measure(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        """Return ``mae``, ``rmse`` and ``r2``.

        ``r2`` is NaN for a single sample, and for targets that are equal.
        """
        self.metrics.reset()
        self.metrics.update(outputs.view_as(targets), targets)
        return {name: value_of(metric) for name, metric in self.metrics.items()}

    def check_targets(self, targets: Tensor) -> None:
        """Raise unless targets are floating-point numbers."""
        if not targets.is_floating_point():
            dtype = str(targets.dtype).removeprefix("torch.")
            raise ValueError(f"its targets must be floating-point numbers, not {dtype}")

    def check_outputs(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise unless outputs have the shape of the targets ``[n, ...]``."""
        self.check_targets(targets)
        same = outputs.shape == targets.shape
        if not same and outputs.shape != (*targets.shape, 1):
            raise ValueError(
                f"its model returns outputs of shape {list(outputs.shape)} for targets of shape "
                f"{list(targets.shape)}"
            )

    def log_quality(self, batch: Batch, stage: str) -> None:
        """Log the loss, and the errors over all batches, when the module is judged by itself."""
        x, y = batch
        outputs = self(x)
        self.metrics.update(outputs.view_as(y), y)
        self.log(f"{stage}/loss", self.losses(outputs, y).mean(), batch_size=len(y))
        objects = {f"{stage}/{name}": metric for name, metric in self.metrics.items()}
        self.log_dict(objects, prog_bar=True, batch_size=len(y))

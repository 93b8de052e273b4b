"""The base class of ready-made tasks, a network with a loss and metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeGuard

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import MetricCollection

from .metrics.collection import ClientMetrics, F1Average
from .options import PositiveFloat, checked

Batch = tuple[Tensor, Tensor]
OptimizerOf = Callable[[Iterable[nn.Parameter]], Optimizer]


def plain_sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return SGD with step 0.01, the default optimizer of tasks."""
    return torch.optim.SGD(parameters, lr=0.01)


@checked
class Task(L.LightningModule):
    """A network with a loss and metrics, as a LightningModule that also trains by itself.

    A federation trains a task without Lightning's work around a step. It evaluates many clients at
    once by their outputs. A subclass defines :meth:`losses` and :meth:`measure`, and can check
    their arguments. If a subclass defines steps of its own, a federation uses these to train and
    judge, as for any LightningModule.

    Args:
        network: Maps inputs ``[batch, ...]`` to outputs ``[batch, ...]``.
        optimizer: Builds a new optimizer from the trainable parameters at every participation.
        gradient_clip_val: Clip a client's gradients at this value; ``None`` for no clipping. (The
            Trainer's option of the same name would apply to the server.)
        gradient_clip_algorithm: ``"norm"`` or ``"value"``.


    Attributes:
        judged_by: The metric that chooses the best round, and ``"max"`` or ``"min"`` for its best
            value; ``None`` for no choice.
        higher_is_better: For each metric of :meth:`measure`, whether higher values are better.
        metrics: A torchmetrics collection, if a subclass has one. :meth:`measure` fills it with the
            samples of one client. The ``pooled`` values over clients come from its states.
        round_index: Index of the current round of training, or of the last one. It is 0 if the task
            trains by itself.
    """

    judged_by: tuple[str, Literal["min", "max"]] | None = None
    higher_is_better: Mapping[str, bool] = {}
    metrics: MetricCollection
    round_index: int = 0

    def __init__(
        self,
        network: nn.Module,
        optimizer: OptimizerOf = plain_sgd,
        gradient_clip_val: PositiveFloat | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] = "norm",
    ) -> None:
        super().__init__()
        self.network = network
        self.optimizer = optimizer
        self.gradient_clip_val = gradient_clip_val
        self.gradient_clip_algorithm = gradient_clip_algorithm

    def forward(self, x: Tensor) -> Tensor:
        """Return the network's outputs ``[batch, ...]`` for a batch of inputs."""
        return self.network(x)

    # Meaning of the outputs

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each sample's loss ``[n]``, for outputs ``[n, ...]`` and targets ``[n, ...]``."""
        raise NotImplementedError(f"{type(self).__name__} does not define losses()")

    def measure(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        """Return a client's metrics by name, besides its mean loss: scalars, which may be NaN."""
        raise NotImplementedError(f"{type(self).__name__} does not define measure()")

    def check_targets(self, targets: Tensor) -> None:
        """Raise unless :meth:`losses` can take these targets ``[n, ...]``.

        Raises:
            ValueError: With a message that begins with "its targets".
        """

    def check_outputs(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise unless :meth:`measure` can take these outputs and targets.

        Raises:
            ValueError: With a message that begins with "its model" or "its targets".
        """

    def client_metrics(self, num_clients: int, f1_average: F1Average) -> ClientMetrics | None:
        """Return metrics of all clients at once that replace :meth:`measure`, or ``None``."""
        return None

    # Training and evaluation steps

    def sample_losses(self, batch: Batch) -> Tensor:
        """Return the losses ``[n]`` of a batch's samples. Their mean is :meth:`loss`."""
        x, y = batch
        return self.losses(self(x), y)

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch: the mean of its samples' losses."""
        return self.sample_losses(batch).mean()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of a batch and log it as ``train/loss``."""
        loss = self.loss(batch)
        self.log("train/loss", loss.detach(), batch_size=len(batch[1]))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log loss and metrics of a batch, if the module is validated by itself."""
        self.log_quality(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log loss and metrics of a batch, if the module is tested by itself."""
        self.log_quality(batch, "test")

    def log_quality(self, batch: Batch, stage: str) -> None:
        """Log the mean loss of a batch and the metrics of :meth:`measure`.

        Args:
            batch: Inputs and targets.
            stage: ``"val"`` or ``"test"``, the prefix of the names.
        """
        x, y = batch
        outputs = self(x)
        values = {"loss": self.losses(outputs, y).mean(), **self.measure(outputs, y)}
        named = {f"{stage}/{name}": value for name, value in values.items()}
        self.log_dict(named, prog_bar=True, batch_size=len(y))

    def predict_step(self, batch: Batch | Tensor, batch_idx: int = 0) -> Tensor:
        """Return the outputs ``[batch, ...]`` of a batch, with or without targets."""
        return self(batch if isinstance(batch, Tensor) else batch[0])

    def configure_optimizers(self) -> Optimizer:
        """Build the optimizer over the trainable parameters."""
        return self.optimizer([p for p in self.parameters() if p.requires_grad])

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip at the task's own value, or at the Trainer's if the task trains by itself."""
        if self.gradient_clip_val is None:
            super().configure_gradient_clipping(
                optimizer, gradient_clip_val, gradient_clip_algorithm
            )
        else:
            self.clip_gradients(optimizer, self.gradient_clip_val, self.gradient_clip_algorithm)


def trains_as_a_task(module: Any) -> TypeGuard[Task]:
    """Return whether a module is a task with :class:`Task`'s own training step."""
    return isinstance(module, Task) and type(module).training_step is Task.training_step

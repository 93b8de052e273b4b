"""Language models: a network that predicts the next token of a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.text import Perplexity

from pflight.metrics.pooling import value_of
from pflight.options import checked
from pflight.task import Batch, OptimizerOf, Task, plain_sgd

NO_TARGET = -100
"""The target of padding, as in PyTorch's ``cross_entropy`` and in transformers."""


@checked
class LanguageModel(Task):
    """A network that predicts tokens, trained on the mean cross-entropy of a batch's tokens.

    Targets are tokens ``[n, length]``; those that are -100 are padding and do not count. Every
    other token of a batch has the same weight in its loss, as in transformers.

    In a federation, clients are judged by their perplexity, by the share of tokens that get the
    highest logit (``acc``), and by ``loss``, the mean over sequences of their mean cross-entropy.
    It also trains by itself under a plain Trainer.

    Args:
        network: Maps tokens ``[n, length]`` to logits ``[n, length, vocabulary]``.
        optimizer: Builds the optimizer from the trainable parameters, anew at every participation.
        gradient_clip_val: As in :class:`~pflight.task.Task`.
        gradient_clip_algorithm: ``"norm"`` or ``"value"``.

    Raises:
        ConfigurationError: If an option is out of range.

    Example:
        >>> import torch
        >>> client = LanguageModel(torch.nn.Embedding(5, 5))
        >>> ids = torch.tensor([[1, 2, 3], [4, 0, 0]])
        >>> targets = torch.tensor([[2, 3, 4], [1, -100, -100]])
        >>> client.loss((ids, targets)).shape, client.sample_losses((ids, targets)).shape
        (torch.Size([]), torch.Size([2]))
    """

    judged_by = ("perplexity", "min")
    higher_is_better: Mapping[str, bool] = {"perplexity": False, "acc": True, "loss": False}

    def __init__(
        self,
        network: nn.Module,
        optimizer: OptimizerOf = plain_sgd,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] = "norm",
    ) -> None:
        super().__init__(network, optimizer, gradient_clip_val, gradient_clip_algorithm)
        metrics: dict[str, Metric | MetricCollection] = {
            "perplexity": Perplexity(ignore_index=NO_TARGET),
            "acc": MeanMetric(),
        }
        self.metrics = MetricCollection(metrics)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each sequence's mean cross-entropy ``[n]``; 0 if all of it is padding."""
        of_tokens = F.cross_entropy(
            outputs.transpose(1, 2), targets, ignore_index=NO_TARGET, reduction="none"
        )
        return of_tokens.sum(1) / (targets != NO_TARGET).sum(1).clamp(min=1)

    def sample_weights(self, batch: Batch) -> Tensor:
        """Return the weight of each sequence in :meth:`loss`, its number of tokens ``[n]``."""
        return (batch[1] != NO_TARGET).sum(1)

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of a batch's tokens."""
        x, y = batch
        return F.cross_entropy(self(x).flatten(0, 1), y.flatten(), ignore_index=NO_TARGET)

    def measure(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        """Return the perplexity and the accuracy."""
        self.metrics.reset()
        self._update(outputs, targets)
        return {name: value_of(metric) for name, metric in self.metrics.items()}

    def check_targets(self, targets: Tensor) -> None:
        """Raise unless targets are tokens ``[n, length]``."""
        if targets.dim() != 2 or targets.is_floating_point():
            dtype = str(targets.dtype).removeprefix("torch.")
            raise ValueError(
                f"its targets must be tokens [n, length], not {dtype} of shape "
                f"{list(targets.shape)}"
            )

    def check_outputs(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise unless outputs are logits ``[n, length, vocabulary]`` and targets are tokens."""
        self.check_targets(targets)
        if outputs.dim() != 3 or outputs.shape[:2] != targets.shape:
            raise ValueError(
                f"its model returns outputs of shape {list(outputs.shape)} for targets of shape "
                f"{list(targets.shape)}"
            )
        least = int(targets[targets != NO_TARGET].min()) if (targets != NO_TARGET).any() else 0
        if least < 0 or int(targets.max()) >= outputs.shape[2]:
            odd = least if least < 0 else int(targets.max())
            raise ValueError(
                f"its targets have the token {odd}, but its model has logits for "
                f"{outputs.shape[2]} tokens"
            )

    def log_quality(self, batch: Batch, stage: str) -> None:
        """Log the loss, and the metrics of all batches, when the module is judged by itself."""
        x, y = batch
        outputs = self(x)
        self._update(outputs, y)
        self.log(f"{stage}/loss", self.losses(outputs, y).mean(), batch_size=len(y))
        objects = {f"{stage}/{name}": metric for name, metric in self.metrics.items()}
        self.log_dict(objects, prog_bar=True, batch_size=len(y))

    def _update(self, outputs: Tensor, targets: Tensor) -> None:
        real = targets != NO_TARGET
        self.metrics["perplexity"].update(outputs, targets)
        self.metrics["acc"].update((outputs.argmax(2) == targets)[real])

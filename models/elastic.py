"""The elastic client of FedEC."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflight.options import check_range, checked
from pflight.state import call_with

from .client import Batch, ClientModule


@checked
class ElasticClient(ClientModule):
    r"""A client that is held to the model it had after its last participation.

    A client that has taken part before minimises

    .. math:: \mathrm{CE}(y, p) + \alpha\,\mathrm{KL}(\hat p \,\|\, p)

    (FedEC, Lan et al. 2023, eq. 6), with :math:`p` the predictions of its model and
    :math:`\hat p` those of its historical model, frozen and in evaluation mode; both terms are
    means over the batch. With ``constraint="l2"`` the second term is
    :math:`\frac{\alpha}{2}\|\theta - \hat\theta\|^2` over parameters (FedEC-l2), with ``None``
    there is none (FedEC-wo). The first participation, fine-tuning and centralized training are
    without it. After local training the model, buffers included, becomes the historical one, by
    which the client is also judged. It never travels.

    Args:
        *args: As in :class:`ClientModule`.
        alpha: Weight of the constraint; 0 gives plain training.
        constraint: ``"kl"``, ``"l2"`` or ``None``.
        **kwargs: As in :class:`ClientModule`.

    Raises:
        ConfigurationError: If an option is out of range.

    Example:
        >>> client = ElasticClient(torch.nn.Linear(4, 2), num_classes=2, alpha=0.5)
        >>> client.penalty(torch.zeros(3, 4), torch.zeros(3, 2))
        tensor(0.)

    References:
        Lan et al., Elastically-Constrained Meta-Learner for Federated Learning, 2023,
        https://arxiv.org/abs/2306.16703.
    """

    averages_samples: ClassVar[bool] = True
    keeps_memory: ClassVar[bool] = True
    judged_by_memory: ClassVar[bool] = True

    def __init__(
        self,
        *args: Any,
        alpha: float = 1.0,
        constraint: Literal["kl", "l2"] | None = "kl",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        check_range(self, "[0, inf)", alpha=alpha)
        self.alpha = alpha
        self.constraint = constraint

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean cross-entropy plus the constraint."""
        x, y = batch
        logits = self(x)
        return F.cross_entropy(logits, y) + self.penalty(x, logits)

    def penalty(self, x: Tensor, logits: Tensor) -> Tensor:
        """Return the weighted constraint on a batch, a scalar; 0 where there is no history.

        Args:
            x: Inputs ``[batch, ...]``.
            logits: What this client's model gives for them ``[batch, num_classes]``.
        """
        if self.memory is None or self.constraint is None or not self.alpha:
            return torch.zeros((), device=logits.device)
        if self.constraint == "l2":
            return self.alpha / 2 * self.seen * self.squared_distance(self.memory)
        with torch.no_grad(), _evaluating(self):
            before = call_with(self, self.memory.tensors(), x)
        divergence = F.kl_div(
            logits.log_softmax(dim=1),
            before.log_softmax(dim=1),
            log_target=True,
            reduction="batchmean",
        )
        return self.alpha * self.seen * divergence


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Put those submodules that are training into evaluation mode, and back."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True

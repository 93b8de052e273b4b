"""The client of Ditto."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from pflight.options import check_range, checked

from .client import Batch
from .personal import PersonalClient


@checked
class DittoClient(PersonalClient):
    r"""A client whose personal model is pulled towards what the server sent.

    The shared model :math:`w` is trained as in FedAvg, and on the same batches the personal one,
    :math:`v_i`, on

    .. math:: f_i(v_i) + \frac{\lambda}{2} \|v_i - \theta\|^2

    (Li et al. 2021, objective (Ditto), algorithm 1), with :math:`\theta` what the server sent. Both
    are stepped by one optimizer, and the loss is the sum of both; gradients are clipped by the norm
    of each. The norm is over parameters; each model has buffers of its own. Without an anchor, as
    in fine-tuning and centralized training, this is a plain client.

    Args:
        *args: As in :class:`ClientModule`.
        lam: Weight :math:`\lambda` of the pull; with 0 the personal model is trained alone.
        **kwargs: As in :class:`ClientModule`.

    Raises:
        ConfigurationError: If an option is out of range.

    Example:
        >>> client = DittoClient(torch.nn.Linear(4, 2), num_classes=2, lam=0.1)
        >>> [name for name, _ in client.named_parameters()]
        ['network.weight', 'network.bias', 'personal.weight', 'personal.bias']

    References:
        Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021,
        https://arxiv.org/abs/2012.04221.
    """

    averages_samples: ClassVar[bool] = True

    def __init__(self, *args: Any, lam: float = 0.1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_range(self, "[0, inf)", lam=lam)
        self.lam = lam

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of the shared model plus that of the personal one with its pull."""
        if self.anchor is None:
            return super().loss(batch)
        own, sent = self.personal_weights(), self.anchor.tensors()
        distance = torch.zeros((), device=self.device)
        for name, value in own.items():
            distance = distance + (value - sent[f"network.{name}"]).square().sum()
        personal = self.loss_at(own, batch, self.personal_statistics())
        return super().loss(batch) + personal + self.lam / 2 * distance

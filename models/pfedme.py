"""The client of pFedMe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.func import grad_and_value

from pflight.options import check_range, checked
from pflight.state import StateModule

from .client import Batch
from .personal import RelocatedClient


@checked
class PFedMeClient(RelocatedClient):
    r"""A client that descends the Moreau envelope of its loss.

    The envelope is (T. Dinh et al. 2020)

    .. math:: F_i(w) = \min_\theta f_i(\theta) + \frac{\lambda}{2} \|\theta - w\|^2, \qquad
        \nabla F_i(w) = \lambda\,(w - \theta_i(w)).

    On each batch its minimiser, the personal model :math:`\theta_i`, is approached by K steps

    .. math:: \theta \leftarrow \theta - \eta_p
        (\nabla f_i(\theta) + \lambda\,(\theta - w) + \mu\,\theta),

    which start at :math:`w` in a round and go on from batch to batch. Then the optimizer takes a
    step with the gradient :math:`\lambda\,(w - \theta)` (algorithm 1), with SGD
    :math:`w \leftarrow w - \eta\lambda\,(w - \theta)`; of all steps it is this one whose gradient
    ``gradient_clip_val`` clips. The client sends :math:`w`, keeps
    :math:`\theta_i`, and is judged by that. Buffers are those of the inner passes and go with both.
    Without an anchor, as in fine-tuning and centralized training, this is a plain client.

    Args:
        *args: As in :class:`ClientModule`.
        lam: Weight :math:`\lambda` that holds the personal model to the shared one.
        personal_lr: Inner step :math:`\eta_p`.
        personal_steps: Inner steps K on a batch.
        mu: Weight decay :math:`\mu` of the inner steps, which the paper has not.
        **kwargs: As in :class:`ClientModule`.

    Raises:
        ConfigurationError: If an option is out of range.

    Example:
        >>> client = PFedMeClient(torch.nn.Linear(4, 2), num_classes=2, lam=15.0)
        >>> list(client.remember())
        ['network.weight', 'network.bias']

    References:
        T. Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020,
        https://arxiv.org/abs/2006.08848.
    """

    averages_samples: ClassVar[bool] = True
    keeps_memory: ClassVar[bool] = True
    judged_by_memory: ClassVar[bool] = True

    def __init__(
        self,
        *args: Any,
        lam: float = 15.0,
        personal_lr: float = 0.09,
        personal_steps: int = 5,
        mu: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        check_range(self, "(0, inf)", lam=lam, personal_lr=personal_lr)
        check_range(self, "[1, inf)", personal_steps=personal_steps)
        check_range(self, "[0, inf)", mu=mu)
        self.lam = lam
        self.personal_lr = personal_lr
        self.personal_steps = personal_steps
        self.mu = mu
        self.personal = StateModule(self.weights())

    def loss(self, batch: Batch) -> Tensor:
        r"""Return the envelope, with the task's loss where the last inner step began."""
        if self.anchor is None:
            return super().loss(batch)
        with torch.no_grad():
            loss, theta = self._descend(batch)
            for name, value in self.personal.tensors().items():
                value.copy_(theta[name])
        for name, w in self.weights().items():
            loss = loss + self.lam / 2 * (w - theta[name]).square().sum()
        return loss

    def remember(self) -> Mapping[str, Tensor]:
        """Return the personal model, with a copy of the buffers."""
        held = {**self.personal.tensors(), **self.statistics()}
        return {f"network.{name}": tensor for name, tensor in held.items()}

    def _descend(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss before the last inner step, and the personal model after it."""
        theta, loss = self.personal.tensors(), torch.zeros(())
        for _ in range(self.personal_steps):
            gradients, loss = grad_and_value(self.loss_at)(theta, batch, self.statistics())
            for name, w in self.weights().items():
                pull = self.lam * (theta[name] - w) + self.mu * theta[name]
                gradients[name] = gradients[name] + pull
            theta = {n: value - self.personal_lr * gradients[n] for n, value in theta.items()}
        return loss, theta

"""The client half of pFedMe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value

from pflight.half import Half, LocalClient
from pflight.options import check_range, checked


@checked
class MoreauEnvelope(Half):
    r"""Has a client descend the Moreau envelope of its loss.

    The envelope is (T. Dinh et al. 2020)

    .. math:: F_i(w) = \min_\theta f_i(\theta) + \frac{\lambda}{2} \|\theta - w\|^2, \qquad
        \nabla F_i(w) = \lambda\,(w - \theta_i(w)).

    On each batch its minimiser, the personal model :math:`\theta_i`, is approached by K steps

    .. math:: \theta \leftarrow \theta - \eta_p
        (\nabla f_i(\theta) + \lambda\,(\theta - w) + \mu\,\theta),

    which start at :math:`w` in a round and go on from batch to batch. Then the optimizer takes a
    step with the gradient :math:`\lambda\,(w - \theta)` (algorithm 1), with SGD
    :math:`w \leftarrow w - \eta\lambda\,(w - \theta)`; of all steps it is this one whose gradient
    is clipped. The client sends :math:`w`, keeps :math:`\theta_i`, and is judged by that. Buffers
    are those of the inner passes and go with both. Fine-tuning is plain.

    Args:
        lam: Weight :math:`\lambda` that holds the personal model to the shared one.
        personal_lr: Inner step :math:`\eta_p`.
        personal_steps: Inner steps K on a batch.
        mu: Weight decay :math:`\mu` of the inner steps, which the paper has not.

    Raises:
        ConfigurationError: If an option is out of range.

    References:
        T. Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020,
        https://arxiv.org/abs/2006.08848.
    """

    keeps_memory = True
    judged_by_memory = True

    def __init__(
        self,
        lam: float = 15.0,
        personal_lr: float = 0.09,
        personal_steps: int = 5,
        mu: float = 0.0,
    ) -> None:
        check_range(self, "(0, inf)", lam=lam, personal_lr=personal_lr)
        check_range(self, "[1, inf)", personal_steps=personal_steps)
        check_range(self, "[0, inf)", mu=mu)
        self.lam = lam
        self.personal_lr = personal_lr
        self.personal_steps = personal_steps
        self.mu = mu

    def state(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        r"""Return :math:`\theta_i`, which the server half has start at what is sent."""
        return {f"theta.{name}": weight.detach().clone() for name, weight in weights.items()}

    def loss(self, c: LocalClient, batch: Any) -> Tensor:
        r"""Return the envelope, with the task's loss where the last inner step began."""
        if c.anchor is None:
            return c.task_loss(batch)
        with torch.no_grad():
            loss, theta = self._descend(c, batch)
            for name, value in theta.items():
                c.own[f"theta.{name}"].copy_(value)
        for name, w in c.weights.items():
            loss = loss + self.lam / 2 * (w - theta[name]).square().sum()
        return loss

    def remember(self, c: LocalClient) -> Mapping[str, Tensor]:
        """Return the personal model, with a copy of the buffers."""
        theta = {name: c.own[f"theta.{name}"] for name in c.weights}
        return {name: theta.get(name, tensor) for name, tensor in c.state().items()}

    def _descend(self, c: LocalClient, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss before the last inner step, and the personal model after it."""
        theta = {name: c.own[f"theta.{name}"] for name in c.weights}
        loss = torch.zeros(())
        for _ in range(self.personal_steps):
            gradients, loss = grad_and_value(c.task_loss_at)(theta, batch, c.buffers)
            for name, w in c.weights.items():
                pull = self.lam * (theta[name] - w) + self.mu * theta[name]
                gradients[name] = gradients[name] + pull
            theta = {n: value - self.personal_lr * gradients[n] for n, value in theta.items()}
        return loss, theta

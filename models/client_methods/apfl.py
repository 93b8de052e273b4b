"""The client method of APFL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.utils import expand_as_right
from torch import Tensor
from torch.func import grad_and_value

from pflight.local_client import LocalClient
from pflight.method import OWN, ClientMethod
from pflight.options import ClosedUnitInterval, PositiveFloat, checked


@checked
class Mixed(ClientMethod):
    r"""Trains a personal model: a mixture of the client's own model and the shared one.

    With :math:`\bar v = \alpha v + (1 - \alpha) w` the personal copy is stepped on every batch,

    .. math:: v \leftarrow v - \eta \alpha \nabla f_i(\bar v)

    (Deng et al. 2020, algorithm 1), with :math:`w` held fixed. On the first batch of a round an
    adaptive :math:`\alpha` takes the step

    .. math:: \alpha \leftarrow \operatorname{clip}
        (\alpha - \eta_\alpha \langle \nabla f_i(\bar v), v - w \rangle, 0, 1),

    which counts from the second batch on. A pass of the mixture updates the copy's buffers.

    Args:
        alpha: Share :math:`\alpha` of the client's own model, or its first value if it adapts: 1
            trains alone, 0 follows the server.
        alpha_lr: Step :math:`\eta_\alpha`, in the paper :math:`\eta`; ``None`` leaves
            :math:`\alpha` fixed.


    References:
        Deng et al., Adaptive Personalized Federated Learning, 2020,
        https://arxiv.org/abs/2003.13461.
    """

    def __init__(
        self, alpha: ClosedUnitInterval = 0.5, alpha_lr: PositiveFloat | None = None
    ) -> None:
        self.alpha = alpha
        self.alpha_lr = alpha_lr

    def state(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        r"""Return :math:`\alpha`, and whether it still has to adapt in this round."""
        like = next(iter(weights.values()))
        return {"alpha": like.new_tensor(self.alpha), "alpha_due": like.new_tensor(1.0)}

    def loss(self, c: LocalClient, batch: Any) -> Tensor:
        """Return the loss of the mixture. It depends on the client's own model alone."""
        assert c.shared is not None
        shared = {name: w.detach() for name, w in c.shared.weights.items()}
        alpha = c.own["alpha"].clone()
        mixed = {name: alpha * v + (1 - alpha) * shared[name] for name, v in c.weights.items()}
        if self.alpha_lr is None:
            return c.task_loss_at(mixed, batch)
        fixed = {name: value.detach() for name, value in mixed.items()}
        with torch.no_grad():
            gradients, loss = grad_and_value(c.task_loss_at)(fixed, batch, c.buffers)
            moved = {n: c.weights[n] - shared[n] for n in c.anchor or ()}
            slope = inner_product(moved, gradients)
            stepped = (alpha - self.alpha_lr * slope).clamp(0, 1)
            c.own["alpha"].copy_(torch.where(c.own["alpha_due"] > 0, stepped, alpha))
            c.own["alpha_due"].zero_()
        return loss + inner_product(gradients, {n: mixed[n] - fixed[n] for n in mixed})

    def after_training(self, c: LocalClient) -> None:
        r"""Have :math:`\alpha` adapt again in the next round."""
        c.own["alpha_due"].fill_(1)

    def personal_value(self, states: TensorDict, shared: str, personal: str) -> Tensor:
        """Return an entry of the mixtures ``[C, ...]``; counters come from the own models."""
        own = states[personal]
        if not own.is_floating_point():
            return own
        alpha = expand_as_right(states[f"{OWN}alpha"].to(own.dtype), own)
        return alpha * own + (1 - alpha) * states[shared]


def inner_product(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Tensor:
    """Return the scalar product of two vectors that are given by name."""
    return torch.stack([(value * right[name]).sum() for name, value in left.items()]).sum()

"""The client method of Per-FedAvg."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.func import grad
from torch.optim import SGD, Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from pflight.local_client import LocalClient, LocalWork
from pflight.method import ClientMethod, Model
from pflight.options import NonNegativeFloat, NonNegativeInt, checked


@checked
class Adapted(ClientMethod):
    r"""Trains a client for its model's quality after one step of adaptation.

    On parts D, D' and D'' of each batch, a step descends :math:`f_i(\theta')` (Fallah et al. 2020,
    algorithm 1), where

    .. math:: \theta' = \theta - \alpha \nabla f_i(\theta; D), \qquad
        g = \nabla f_i(\theta'; D') \;\text{(FO)}, \qquad
        g - \alpha \nabla^2 f_i(\theta; D'')\, g \;\text{(Hessian)},

    The optimizer takes a step with this gradient; its step size is the paper's :math:`\beta`. The
    product with the Hessian is exact, by differentiating twice. The parts are halves of the batch
    for the first-order method, and thirds with the Hessian. If a part would be a single sample,
    each part is the whole batch. Buffers are updated by the pass over D alone.

    A client is judged by the server's model after steps of size :math:`\alpha` on batches of its
    training samples. So a federation needs the client's data. Without samples, the client is judged
    by the server's model as it is. This adaptation, like fine-tuning, is by SGD without clipping.

    Args:
        alpha: Step :math:`\alpha` of the adaptation; 0 gives plain training on whole batches.
        hessian: Whether to differentiate through the adaptation.
        steps: Steps of adaptation before a client is judged; with 0 it is judged by the server's
            model, or as ``finetune_epochs`` of the federation says, also with :math:`\alpha`.


    References:
        Fallah et al., Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
        Meta-Learning Approach, NeurIPS 2020, https://arxiv.org/abs/2002.07948.
    """

    averages_samples = False

    one_pass = False

    def __init__(
        self, alpha: NonNegativeFloat = 0.01, hessian: bool = False, steps: NonNegativeInt = 1
    ) -> None:
        self.alpha = alpha
        self.hessian = hessian
        self.steps = steps

    def loss(self, c: LocalClient, batch: Any) -> Tensor:
        """Return the loss of the adapted model."""
        if c.anchor is None or not self.alpha:
            return c.task_loss(batch)
        adapt, judge, *curve = parts(batch, 3 if self.hessian else 2)
        fixed = {name: w.detach() for name, w in c.weights.items()}
        with torch.no_grad():
            steps = grad(c.task_loss_at)(fixed, adapt, c.buffers)
        if self.hessian:  # of value 0, with the derivative of a gradient over D''
            (curve_part,) = curve
            bent = grad(c.task_loss_at)(dict(c.weights), curve_part, _copies(c))
            steps = {n: step + bent[n] - bent[n].detach() for n, step in steps.items()}
        adapted = {n: w - self.alpha * steps[n] for n, w in c.weights.items()}
        return c.task_loss_at(adapted, judge, _copies(c))

    def optimizer(self, parameters: Sequence[nn.Parameter], anchored: bool) -> Optimizer | None:
        r"""Return SGD with :math:`\alpha` if a federation adapts the client."""
        return None if anchored else SGD(parameters, lr=self.alpha)

    def models(self) -> dict[str, Model]:
        """Judge clients by the server's model after their adaptation."""
        return {"": self._adapted}

    def _adapted(
        self, work: LocalWork, clients: Tensor, sent: TensorDict, states: TensorDict
    ) -> TensorDict:
        if not self.steps:
            return states
        return work.finetune(clients, states, steps=self.steps, doing="to adapt")


def parts(batch: Any, count: int) -> list[Any]:
    """Split a batch, any nesting of tensors ``[B, ...]``, into parts: D, D' and so on.

    Anything else, such as ``None``, is in all parts.

    Example:
        >>> [len(y) for _, y in parts((torch.zeros(8, 4), torch.zeros(8)), 3)]
        [3, 3, 2]
        >>> parts({"ids": torch.arange(4), "mask": None}, 2)
        [{'ids': tensor([0, 1]), 'mask': None}, {'ids': tensor([2, 3]), 'mask': None}]
    """
    leaves, form = tree_flatten(batch)
    if next(len(leaf) for leaf in leaves if isinstance(leaf, Tensor)) < 2 * count:
        return [batch] * count
    pieces = (
        leaf.tensor_split(count) if isinstance(leaf, Tensor) else [leaf] * count for leaf in leaves
    )
    split = zip(*pieces, strict=True)
    return [tree_unflatten(part, form) for part in split]


def _copies(c: LocalClient) -> dict[str, Tensor]:
    """Return copies of the buffers, for passes that leave them as they are."""
    return {name: value.clone() for name, value in c.buffers.items()}

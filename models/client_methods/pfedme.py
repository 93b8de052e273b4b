"""The client method of pFedMe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.func import grad_and_value

from pflight.local_client import LocalClient, LocalWork
from pflight.method import OWN, ClientMethod, Model
from pflight.options import NonNegativeFloat, PositiveFloat, PositiveInt, checked
from pflight.states.state import StateLayout

_THETA = f"{OWN}theta."


@checked
class MoreauEnvelope(ClientMethod):
    r"""Has a client descend the Moreau envelope of its loss.

    The envelope is (T. Dinh et al. 2020)

    .. math:: F_i(w) = \min_\theta f_i(\theta) + \frac{\lambda}{2} \|\theta - w\|^2, \qquad
        \nabla F_i(w) = \lambda\,(w - \theta_i(w)).

    On each batch K steps approach the minimiser, the personal model :math:`\theta_i`:

    .. math:: \theta \leftarrow \theta - \eta_p
        (\nabla f_i(\theta) + \lambda\,(\theta - w) + \mu\,\theta),

    The steps start at :math:`w` in a round, and continue from batch to batch. Then the optimizer
    takes a step with the gradient :math:`\lambda\,(w - \theta)` (algorithm 1), with SGD
    :math:`w \leftarrow w - \eta\lambda\,(w - \theta)`. Only the gradient of this step is clipped.
    The client sends :math:`w`, keeps :math:`\theta_i`, and is judged by :math:`\theta_i`. Buffers
    come from the inner passes, and belong to both models. A client that has never taken part trains
    aside, as in a round, and is judged by the resulting personal model. So a federation needs the
    client's data. Fine-tuning is plain.

    Args:
        lam: Weight :math:`\lambda` that holds the personal model to the shared one.
        personal_lr: Inner step :math:`\eta_p`.
        personal_steps: Inner steps K on a batch.
        mu: Weight decay :math:`\mu` of the inner steps; the paper has none.
        train_newcomers: Whether clients that have never taken part train before they are judged;
            if not, they are judged by the server's model.


    References:
        T. Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020,
        https://arxiv.org/abs/2006.08848.
    """

    keeps_memory = True
    one_pass = False
    own_of = "all"
    temporary = ("theta.",)

    def __init__(
        self,
        lam: PositiveFloat = 15.0,
        personal_lr: PositiveFloat = 0.09,
        personal_steps: PositiveInt = 5,
        mu: NonNegativeFloat = 0.0,
        train_newcomers: bool = True,
    ) -> None:
        self.lam = lam
        self.personal_lr = personal_lr
        self.personal_steps = personal_steps
        self.mu = mu
        self.train_newcomers = train_newcomers

    def state(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        r"""Return :math:`\theta_i`."""
        return {f"theta.{name}": weight.detach().clone() for name, weight in weights.items()}

    def before_training(self, work: LocalWork, clients: Tensor, sent: TensorDict) -> TensorDict:
        r"""Have :math:`\theta_i` start at the sent model, too."""
        states = super().before_training(work, clients, sent)
        return states.update({own: states[name] for name, own in _personal(work.layout)})

    def models(self) -> dict[str, Model]:
        """Judge clients by their personal models."""
        return {"": self._personal_models}

    def _personal_models(
        self, work: LocalWork, clients: Tensor, sent: TensorDict, states: TensorDict
    ) -> TensorDict:
        """Return the personal models ``[C]``; newcomers train theirs aside."""
        kept = work.remembered(clients, states)
        states.update(kept.states)
        new = ~kept.seen.to(clients.device)
        if not self.train_newcomers or not new.any():
            return states
        tried = work.train_aside(clients[new], sent[new])
        found = {name: tried.states[own] for name, own in _personal(work.layout)}
        states = states.clone()
        states[torch.isin(clients, tried.clients)] = tried.states.update(found)
        return states

    def loss(self, c: LocalClient, batch: Any) -> Tensor:
        r"""Return the envelope, with the task's loss at the start of the last inner step."""
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


def _personal(layout: StateLayout) -> list[tuple[str, str]]:
    """Return the parameters' names, each with its name in the personal model."""
    return [(name.removeprefix(_THETA), name) for name in layout.own if name.startswith(_THETA)]

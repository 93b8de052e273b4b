"""The client method of FedEC."""

from __future__ import annotations

from typing import Any, Literal

from lightning import LightningModule
from tensordict import TensorDict
from torch import Tensor

from pflight.engines.passes import Loss
from pflight.local_client import LocalClient, LocalWork
from pflight.method import ClientMethod
from pflight.modifiers import CONSTRAINT, check_classes, to_history, to_predictions
from pflight.options import NonNegativeFloat, checked
from pflight.states.updates import Kept


@checked
class Elastic(ClientMethod):
    r"""Holds a client to the model that it had after its last participation.

    A client that has taken part before minimises, beside its own loss,

    .. math:: \alpha\,\mathrm{KL}(\hat p \,\|\, p)

    (FedEC, Lan et al. 2023, eq. 6), a mean over the batch. Here :math:`p` are the predictions of
    its model, and :math:`\hat p` those of its historical model. The historical model is frozen and
    in evaluation mode. With ``constraint="l2"`` the term is
    :math:`\frac{\alpha}{2}\|\theta - \hat\theta\|^2` over parameters (FedEC-l2), with ``None``
    there is none (FedEC-wo). The first participation and fine-tuning are without it. After local
    training, the model and its buffers become the historical model. The client is judged by the
    historical model, which never travels.

    Args:
        alpha: Weight of the constraint; 0 gives plain training.
        constraint: ``"kl"``, ``"l2"`` or ``None``. ``"kl"`` needs a module with a ``forward`` that
            gives logits.
        forget: Whether a client trains without the constraint if its historical model has a higher
            loss on its training samples than the model from which it starts. So a client whose data
            have changed has no wrong teacher. It compares them before it trains. Not in the paper.

    References:
        Lan et al., Elastically-Constrained Meta-Learner for Federated Learning, 2023,
        https://arxiv.org/abs/2306.16703.
    """

    keeps_memory = True
    judged_by_memory = True
    notes = (CONSTRAINT,)

    def __init__(
        self,
        alpha: NonNegativeFloat = 1.0,
        constraint: Literal["kl", "l2"] | None = "kl",
        forget: bool = False,
    ) -> None:
        self.alpha = alpha
        self.constraint = constraint
        self.forget = forget

    def check(self, module: LightningModule) -> None:
        """Raise if the divergence is chosen for a module without classes."""
        check_classes(self.constraint, module)

    def penalty(self, c: LocalClient) -> Tensor | None:
        """Return the l2 constraint; none without a history."""
        if self.constraint != "l2" or c.memory is None or not self.alpha:
            return None
        return to_history(c, c.memory, self.alpha)

    def loss(self, c: LocalClient, batch: Any) -> Tensor:
        """Return the client's own loss plus the constraint."""
        if self.constraint != "kl" or c.memory is None or not self.alpha:
            return super().loss(c, batch)
        loss, logits = c.task_loss_and_logits(batch)
        return loss + to_predictions(c, logits, c.memory, self.alpha)

    def recall(self, work: LocalWork, clients: Tensor, starts: TensorDict, kept: Kept) -> Kept:
        """Return the historical models ``[C]``; with ``forget``, those that fit a client's data."""
        asked = kept.seen.nonzero().flatten()
        if not self.forget or not len(asked):
            return kept
        chosen = asked.to(clients.device)
        own, sent = clients[chosen], starts[chosen]
        history = sent.copy().update(work.remembered(own, sent).states)
        before, now = (work.run(Loss("train"), own, states) for states in (history, sent))
        seen = kept.seen.clone()
        for row, old, new in zip(asked.tolist(), before, now, strict=True):
            if old and new and old["loss"] > new["loss"]:
                seen[row] = False
        return kept._replace(seen=seen)

    @property
    def only_adds(self) -> bool:
        """Whether it adds only a penalty, as it does without the divergence."""
        return self.constraint != "kl"

"""MOON: FedAvg, with features pulled to the server's and away from the client's old ones."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pflight.fedavg import FedAvg
from pflight.local_client import LocalClient
from pflight.method import ClientMethod
from pflight.options import NonNegativeFloat, PositiveFloat, checked

from .registry import Method

_SMALLEST = 1e-8  # product of norms


@checked
class Contrastive(ClientMethod):
    r"""Contrasts a client's features with the features of two frozen models.

    Beside its own loss, a client minimises the mean over the batch of

    .. math:: \mu \log\!\left(1 + e^{(\cos(z, z_p) - \cos(z, z_g)) / \tau}\right)
        = -\mu \log \frac{e^{\cos(z, z_g)/\tau}}{e^{\cos(z, z_g)/\tau} + e^{\cos(z, z_p)/\tau}}

    (MOON, Li et al. 2021, eq. 3 and 4). :math:`z` are the features of its model, :math:`z_g` of the
    received model, and :math:`z_p` of its own model after its last participation. The latter two
    are in evaluation mode and without gradients. In a first participation :math:`z_p = z_g`, and
    the term has no gradient. Fine-tuning is plain. The client keeps its trained model with buffers.

    Args:
        mu: Weight of the contrast; 0 gives plain training.
        tau: Temperature.


    References:
        Li et al., Model-Contrastive Federated Learning, CVPR 2021,
        https://arxiv.org/abs/2103.16257.
    """

    keeps_memory = True
    needs_head = True

    def __init__(self, mu: NonNegativeFloat = 1.0, tau: PositiveFloat = 0.5) -> None:
        self.mu = mu
        self.tau = tau

    def loss(self, c: LocalClient, batch: Any) -> Tensor:
        """Return the client's own loss plus the contrast."""
        if c.received is None or not self.mu:
            return c.task_loss(batch)
        loss, z, _ = c.task_loss_and_features(batch)
        sent, _ = c.features_with(c.received)
        past = sent if c.memory is None else c.features_with(c.memory)[0]
        contrast = F.softplus((_cosine(z, past) - _cosine(z, sent)) / self.tau)
        return loss + self.mu * c.mean(contrast)


def _cosine(one: Tensor, other: Tensor) -> Tensor:
    """Return the cosine similarity ``[n]`` of rows. Zero rows give 0 without a gradient."""
    norms = torch.linalg.vector_norm(one, dim=1) * torch.linalg.vector_norm(other, dim=1)
    cosines = (one * other).sum(1) / norms.clamp(min=_SMALLEST)
    return torch.where(norms > 0, cosines, 0)


@checked
class MOON(FedAvg):
    r"""Model-contrastive federated learning (Li et al. 2021, algorithm 1).

    The server is FedAvg's. As in :class:`Contrastive`, a client's features are pulled to the
    features of the server's model, and away from the features of its own previous model. Clients
    are judged by the server's model.

    Args:
        mu: Weight of the contrast; with 0 this is FedAvg. By default 1, or the value of the client
            module's own client method.
        tau: Temperature of the contrast, by default 0.5.
        weighting: As in :class:`FedAvg`.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.

    Raises:
        ConfigurationError: If an option is out of range, or the clients' network has no head.

    Example:
        >>> MOON(mu=5).client_method
        Contrastive(mu=5, tau=0.5)

    References:
        Li et al., Model-Contrastive Federated Learning, CVPR 2021,
        https://arxiv.org/abs/2103.16257.
    """

    def __init__(
        self,
        mu: float | None = None,
        tau: float | None = None,
        weighting: Literal["samples", "uniform"] = "samples",
        buffers: Literal["shared", "local", "reset"] = "shared",
    ) -> None:
        super().__init__(weighting, buffers)
        self.use_client_method(Contrastive, mu=mu, tau=tau)


METHODS = (Method("MOON", MOON, "MOON(mu=1.0, tau=0.5)", "the server's model", needs="a head"),)

"""GPFL: a valve turns each client's features into global and personal ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from lightning import LightningModule
from tensordict import TensorDict
from torch import Tensor, nn

from pflight.fedavg import FedAvg
from pflight.local_client import LocalClient, LocalWork
from pflight.method import ClientMethod, Model
from pflight.options import NonNegativeFloat, checked
from pflight.states.head import EXTRA, Head
from pflight.states.layers import head_entries
from pflight.states.state import StateLayout

from .registry import Method

_EMBEDDING = f"{EXTRA}.embedding"
_GENERAL, _PERSONAL, _SHARES = (f"{EXTRA}.{name}" for name in ("general", "personal", "shares"))
_SMALLEST = 1e-8  # length of a row


class ConditionalValve(nn.Module):
    r"""Passes features :math:`h` on to the head, depending on a condition :math:`c`.

    .. math:: T_c(h) = \mathrm{ReLU}((\gamma(c) + 1) \odot h + \beta(c)),

    where :math:`\gamma` and :math:`\beta` are each a linear layer, ReLU and LayerNorm. The module
    also holds embeddings of the classes, the two conditions, and the client's class shares.

    Args:
        classes: Number of classes.
        width: Number of features.
    """

    general: Tensor
    personal: Tensor

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(classes, width))
        self.gamma, self.beta = (
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width)) for _ in range(2)
        )
        self.register_buffer("general", torch.zeros(width))
        self.register_buffer("personal", torch.zeros(width))
        self.register_buffer("shares", torch.zeros(classes))

    def forward(self, h: Tensor, head: Callable[[Tensor], Tensor], general: bool = False) -> Tensor:
        """Return the head's output for the personal features, or the general ones."""
        condition = self.general if general else self.personal
        return head(((self.gamma(condition) + 1) * h + self.beta(condition)).relu())


@checked
class Valved(ClientMethod):
    r"""Trains a client on its personal features, with general ones pulled to class embeddings.

    With the embeddings :math:`\hat Q` that it receives and its class shares :math:`p_{ic}`, the
    conditions of a client are :math:`g = \frac{1}{C} \sum_c \hat Q_c` and
    :math:`p_i = \sum_c p_{ic} \hat Q_c`. It minimises (GPFL, Zhang et al. 2023, eq. 3 to 8)

    .. math:: \mathrm{CE}(\mathrm{head}(T_{p_i}(h)), y) + \mathrm{CE}(\cos(T_g(h), Q), y)
        + \frac{\lambda}{B} \sum_b \|T_g(h_b) - \hat Q_{y_b}\|

    over its body, its head, the embeddings :math:`Q` and the valve of :class:`ConditionalValve`.
    Embeddings and valve have the weight decay :math:`\mu` in place of the optimizer's own. The
    logits of the second term are the cosines with all rows. Fine-tuning uses the first term only.

    Args:
        lam: Weight :math:`\lambda` of the distance.
        mu: Weight decay :math:`\mu` of embeddings and valve.


    References:
        Zhang et al., GPFL: Simultaneously Learning Global and Personalized Feature Information for
        Personalized Federated Learning, ICCV 2023, https://arxiv.org/abs/2308.10279.
    """

    needs_head = True
    needs_classes = True
    temporary = ("general", "personal")

    def __init__(self, lam: NonNegativeFloat = 0.01, mu: NonNegativeFloat = 0.1) -> None:
        self.lam = lam
        self.mu = mu

    @property
    def extra_options(self) -> Mapping[str, Any]:  # type: ignore[override]
        """The weight decay."""
        return {"weight_decay": self.mu}

    def extra(self, module: LightningModule, head: Head) -> nn.Module:
        """Return the valve."""
        return ConditionalValve(int(module.num_classes), head.width)  # type: ignore[arg-type]

    def loss(self, c: LocalClient, batch: Any) -> Tensor:
        """Return the sum of the three terms."""
        if c.received is None:
            return c.task_loss(batch)
        loss, h, _ = c.task_loss_and_features(batch)
        general = c.predict(h, lambda z: z, general=True)
        rows = c.classes(batch)
        angles = unit(general) @ unit(c.extra["embedding"]).T
        targets = rows @ c.received[_EMBEDDING]
        angle = -(angles.log_softmax(1) * rows).sum(1)
        return loss + c.mean(angle + self.lam * torch.linalg.vector_norm(general - targets, dim=1))

    def before_training(self, work: LocalWork, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Write the conditions into the states."""
        states = super().before_training(work, clients, sent)
        return self._with_conditions(work, clients, sent, states)

    def models(self) -> dict[str, Model]:
        """Judge clients with their conditions."""
        return {"": self._with_conditions, "server/": self._with_conditions}

    def _with_conditions(
        self, work: LocalWork, clients: Tensor, sent: TensorDict, states: TensorDict
    ) -> TensorDict:
        embedding, shares = states[_EMBEDDING], states[_SHARES]
        if work.has_samples:
            counts = work.class_counts_of(clients).to(shares)
            shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
        personal = torch.einsum("ck,ckd->cd", shares, embedding)
        conditions = {_GENERAL: embedding.mean(1), _PERSONAL: personal, _SHARES: shares}
        return states.update(conditions)


def unit(rows: Tensor) -> Tensor:
    """Return rows of length 1; a row of zeros stays zero."""
    return rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp(min=_SMALLEST)


@checked
class GPFL(FedAvg):
    r"""Global and personalized feature information (Zhang et al. 2023, algorithm 1).

    The server takes the mean of bodies, embeddings and valves, as FedAvg does. Heads and class
    shares stay with the clients. Clients train as in :class:`Valved`. A client is judged by the
    server's model with its own head, on its personal features. A newcomer has the initial head.

    Args:
        lam: Weight of the distance to the embeddings; by default 0.01, or the value of the client
            module's own client method.
        mu: Weight decay of embeddings and valve, by default 0.1.
        weighting: As in :class:`FedAvg`.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.

    Raises:
        ConfigurationError: If an option is out of range, or the clients' module has no classes or
            no head.

    Example:
        >>> GPFL(lam=0.1).client_method
        Valved(lam=0.1, mu=0.1)

    References:
        Zhang et al., GPFL: Simultaneously Learning Global and Personalized Feature Information for
        Personalized Federated Learning, ICCV 2023, https://arxiv.org/abs/2308.10279.
    """

    owns_head = True

    def __init__(
        self,
        lam: float | None = None,
        mu: float | None = None,
        weighting: Literal["samples", "uniform"] = "samples",
        buffers: Literal["shared", "local", "reset"] = "shared",
    ) -> None:
        super().__init__(weighting, buffers)
        self.use_client_method(Valved, lam=lam, mu=mu)

    def private_names(self, module: LightningModule, layout: StateLayout) -> set[str]:
        """Return the names of the private entries, including head and class shares."""
        return super().private_names(module, layout) | {_SHARES} | head_entries(module, layout)


METHODS = (
    Method("GPFL", GPFL, "GPFL(lam, mu)", "shared body, own head", needs="a head and classes"),
)

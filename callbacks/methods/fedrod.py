"""FedRoD: a generic head on a balanced loss, and a personal head beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from lightning import LightningModule
from tensordict import TensorDict
from torch import Tensor, nn

from pflight.fedavg import FedAvg
from pflight.local_client import LocalClient, LocalWork
from pflight.method import ClientMethod, Model, Phase
from pflight.options import NonNegativeFloat, PositiveInt, checked
from pflight.states.head import EXTRA, Head
from pflight.states.state import StateLayout

from .registry import Method

_ABSENT = -1e4  # replaces ln 0, and removes a class from the softmax
_SHARES = f"{EXTRA}.shares"


class PersonalHead(nn.Module):
    r"""Adds :math:`\Phi_i z`, at first 0, to the head's output for features :math:`z`.

    Args:
        width: Number of features.
        classes: Number of classes.
        bias: Whether there is a bias, as in the head.
    """

    def __init__(self, width: int, classes: int, bias: bool) -> None:
        super().__init__()
        self.phi = nn.Linear(width, classes, bias=bias)
        for parameter in self.phi.parameters():
            nn.init.zeros_(parameter)

    def forward(self, z: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the sum of both heads."""
        return head(z) + self.phi(z)


class HyperHead(nn.Module):
    r"""A personal head :math:`\Phi_i = H(p_i; \nu)` from a network of the client's class shares.

    If all shares are 0, it is 0.

    Args:
        width: Number of features.
        classes: Number of classes.
        bias: Whether there is a bias, as in the head.
        hidden: Width of the network's hidden layer.
    """

    shares: Tensor

    def __init__(self, width: int, classes: int, bias: bool, hidden: int) -> None:
        super().__init__()
        size = classes * (width + bias)
        self.network = nn.Sequential(nn.Linear(classes, hidden), nn.ReLU(), nn.Linear(hidden, size))
        self.register_buffer("shares", torch.zeros(classes))

    def forward(self, z: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the sum of both heads."""
        made = self.network(self.shares) * (self.shares.sum() > 0)
        phi = made.view(len(self.shares), -1)
        bias = phi[:, -1] if phi.shape[1] > z.shape[1] else None
        return head(z) + nn.functional.linear(z, phi[:, : z.shape[1]], bias)


@checked
class TwoHeads(ClientMethod):
    r"""Trains a body with a generic head on a balanced loss, and a personal head on the plain one.

    With features :math:`z`, the generic head :math:`V` and :math:`\mathrm{sg}` for a stopped
    gradient, a client minimises (FedRoD, Chen and Chao 2022, eq. 5 to 7)

    .. math:: \mathrm{CE}(V z + \gamma \ln n_i,\, y)
        + \mathrm{CE}(\mathrm{sg}(V z) + \Phi_i\,\mathrm{sg}(z),\, y)

    with its numbers of samples by class :math:`n_i`. Classes without samples are left out of the
    first softmax. So the body and :math:`V` learn only from the balanced loss, and :math:`\Phi_i`
    only from the plain loss. Predictions use :math:`V + \Phi_i`. Fine-tuning trains only
    :math:`\Phi_i` if it is the client's own.

    Args:
        gamma: Exponent :math:`\gamma` of the class counts; 0 gives the plain loss.
        personal: ``"linear"``, the client's own head, or ``"hyper"``, a head that a common network
            makes from the client's class shares.
        hidden: Width of this network's hidden layer.


    References:
        Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image
        Classification, ICLR 2022, https://arxiv.org/abs/2107.00778.
    """

    needs_head = True
    needs_classes = True

    def __init__(
        self,
        gamma: NonNegativeFloat = 1.0,
        personal: Literal["linear", "hyper"] = "linear",
        hidden: PositiveInt = 16,
    ) -> None:
        self.gamma = gamma
        self.kind = personal
        self.hidden = hidden

    def extra(self, module: LightningModule, head: Head) -> nn.Module:
        """Return the personal head, or the network for personal heads."""
        bias = getattr(module.get_submodule(head.name), "bias", None) is not None
        if self.kind == "linear":
            return PersonalHead(head.width, head.outputs, bias)
        return HyperHead(head.width, head.outputs, bias, self.hidden)

    def loss(self, c: LocalClient, batch: Any) -> Tensor:
        """Return the sum of both losses, or in fine-tuning the prediction's loss."""
        if c.received is None:
            return c.task_loss(batch)
        counts = c.class_counts
        known = self.gamma * counts.clamp(min=1).log()
        offset = torch.where(counts > 0, known, _ABSENT if self.gamma else 0.0)
        balanced, z, generic = c.task_loss_and_features(batch, lambda _, logits: logits + offset)
        personal = c.predict(z.detach(), lambda _: generic.detach())
        return balanced + c.losses(personal, batch)

    def phases(self, module: LightningModule, epochs: int, anchored: bool) -> list[Phase] | None:
        """Fine-tune only the client's own head."""
        if anchored or self.kind == "hyper":
            return None
        own = [name for name, _ in module.named_parameters() if name.startswith(f"{EXTRA}.")]
        return [Phase(0, epochs, own)]

    def before_training(self, work: LocalWork, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Write the class shares into the states."""
        states = super().before_training(work, clients, sent)
        return self._with_shares(work, clients, sent, states)

    def models(self) -> dict[str, Model]:
        """Judge clients with their class shares."""
        return {"": self._with_shares}

    def _with_shares(
        self, work: LocalWork, clients: Tensor, sent: TensorDict, states: TensorDict
    ) -> TensorDict:
        if self.kind == "hyper" and work.has_samples:
            counts = work.class_counts_of(clients)
            shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
            states[_SHARES] = shares.to(states[_SHARES])
        return states


@checked
class FedRoD(FedAvg):
    r"""Federated robust decoupling (Chen and Chao 2022, algorithm 1).

    The server takes the mean of bodies and generic heads, as FedAvg does. Clients train as in
    :class:`TwoHeads`. With ``personal="linear"`` each client has its own personal head, which never
    travels. With ``"hyper"`` a network makes the personal heads. It is averaged like the rest, and
    the class shares stay with the clients. A client is judged by the server's model with its
    personal head. The tags ``server/`` report the generic model. A newcomer's personal head is 0,
    or made by the network from its class shares.

    Args:
        gamma: Exponent of the class counts in the balanced loss; by default 1, or the value of the
            client module's own client method.
        personal: ``"linear"`` or ``"hyper"``.
        hidden: Width of the hidden layer with ``"hyper"``, by default 16.
        weighting: As in :class:`FedAvg`.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.

    Raises:
        ConfigurationError: If an option is out of range, or the clients' module has no classes or
            no head.

    Example:
        >>> FedRoD(personal="hyper").client_method.kind
        'hyper'

    References:
        Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image
        Classification, ICLR 2022, https://arxiv.org/abs/2107.00778.
    """

    owns_head = True

    def __init__(
        self,
        gamma: float | None = None,
        personal: Literal["linear", "hyper"] | None = None,
        hidden: int | None = None,
        weighting: Literal["samples", "uniform"] = "samples",
        buffers: Literal["shared", "local", "reset"] = "shared",
    ) -> None:
        super().__init__(weighting, buffers)
        self.use_client_method(TwoHeads, gamma=gamma, personal=personal, hidden=hidden)

    @property
    def algorithm_name(self) -> str:
        """FedRoD, and whether a network makes the personal heads."""
        client_method = self.clients.client_method
        assert isinstance(client_method, TwoHeads)
        return "FedRoD" + " (hyper)" * (client_method.kind == "hyper")

    def private_names(self, module: LightningModule, layout: StateLayout) -> set[str]:
        """Return the names of the private entries, including personal head or class shares."""
        own = {_SHARES} if _SHARES in layout.extra else {*layout.extra}
        return super().private_names(module, layout) | own


METHODS = (
    Method(
        "FedRoD",
        FedRoD,
        "FedRoD(gamma, personal)",
        "shared body, two heads",
        needs="a head and classes",
        tested={"": {}, "hyper": {"personal": "hyper", "buffers": "local"}},
    ),
)

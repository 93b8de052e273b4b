"""FedCP: a common and a personal head share each sample's features."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

import torch
from lightning import LightningModule
from tensordict import TensorDict
from torch import Tensor, nn

from pflight.errors import ConfigurationError
from pflight.fedavg import FedAvg
from pflight.local_client import LocalClient, LocalWork
from pflight.method import ClientMethod, Model, Phase
from pflight.options import NonNegativeFloat, checked
from pflight.states.head import EXTRA, Head
from pflight.states.layers import body_names
from pflight.states.state import StateLayout

from .registry import Method

_CONTEXT = f"{EXTRA}.context"
_SCALES = 10.0, 15.0, 20.0, 50.0  # of the kernels


class ConditionalPolicy(nn.Module):
    r"""Divides features :math:`h` between a personal head :math:`H_i` and a common head :math:`H`.

    With the client's context :math:`v`,

    .. math:: a = \mathrm{ReLU}(\mathrm{LN}(P (h \odot v / \|v\|) + q)) \in \mathbb R^{2d}, \qquad
        s_k = \frac{e^{a_k}}{e^{a_k} + e^{a_{d+k}}},

    and the outputs are :math:`H_i(s \odot h) + H((1 - s) \odot h)`.

    Args:
        head: A copy of the head, as the personal one.
        width: Number of features.
    """

    context: Tensor

    def __init__(self, head: nn.Linear, width: int) -> None:
        super().__init__()
        self.head = head
        self.policy = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(2 * width)
        self.register_buffer("context", head.weight.detach().sum(0))

    def forward(self, h: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the sum of both heads."""
        size = torch.linalg.vector_norm(self.context).clamp(min=torch.finfo(h.dtype).tiny)
        actions = self.norm(self.policy(h * self.context / size)).relu()
        own, shared = actions.chunk(2, dim=1)
        share = (own - shared).sigmoid()
        return self.head(share * h) + head((1 - share) * h)


@checked
class Policed(ClientMethod):
    r"""Trains body, personal head and policy, with a fixed common head.

    The policy is a :class:`ConditionalPolicy`. Its context :math:`v` is the sum of the rows of the
    personal head's weight before training. The loss gets the term
    :math:`\lambda\,\mathrm{MMD}(f_i(x), f(x))` between the batch's features and the features of the
    received body, in evaluation mode and without gradients, with

    .. math:: \mathrm{MMD}(X, Y) = \frac{1}{B^2} \sum_{b b'}
        k(X_b, X_{b'}) + k(Y_b, Y_{b'}) - 2 k(X_b, Y_{b'}), \qquad
        k(u, w) = \sum_{t \in \{10, 15, 20, 50\}} e^{-\|u - w\|^2 / 2t}

    (FedCP, Zhang et al. 2023, eq. 5 to 9).

    Args:
        lam: Weight :math:`\lambda` of the discrepancy.
        upload_head: The head that a client sends: ``"half"``, the mean of its own and the received
            head, or ``"personal"``, its own.


    References:
        Zhang et al., FedCP: Separating Feature Information for Personalized Federated Learning via
        Conditional Policy, KDD 2023, https://arxiv.org/abs/2307.01217.
    """

    needs_head = True
    temporary = ("context",)

    def __init__(
        self, lam: NonNegativeFloat = 5.0, upload_head: Literal["half", "personal"] = "half"
    ) -> None:
        self.lam = lam
        self.upload_head = upload_head

    def extra(self, module: LightningModule, head: Head) -> nn.Module:
        """Return the policy with a personal head."""
        part = module.get_submodule(head.name)
        if not isinstance(part, nn.Linear):
            raise ConfigurationError(
                f"FedCP adds up the rows of the head's weight: {head.name} of "
                f"{type(module).__name__} has to be a linear layer, not {type(part).__name__}"
            )
        return ConditionalPolicy(copy.deepcopy(part), head.width)

    def phases(self, module: LightningModule, epochs: int, anchored: bool) -> list[Phase]:
        """Train all parameters except those of the common head."""
        return [Phase(0, epochs, body_names(module))]

    def loss(self, c: LocalClient, batch: Any) -> Tensor:
        """Return the client's own loss plus, except in fine-tuning, the discrepancy."""
        if c.received is None or not self.lam:
            return c.task_loss(batch)
        loss, own, _ = c.task_loss_and_features(batch)
        sent, _ = c.features_with(c.received)
        kernels = _kernel(own, own) + _kernel(sent, sent) - 2 * _kernel(own, sent)
        return loss + self.lam * c.mean(c.batch_mean(kernels))

    def start_states(self, work: LocalWork, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Start missing personal heads as the received head."""
        own = {own: sent[shared] for shared, own in heads(work).items()}
        both = TensorDict({**sent, **own}, batch_size=sent.batch_size)
        return super().start_states(work, clients, both)

    def before_training(self, work: LocalWork, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Write the contexts into the states."""
        states = super().before_training(work, clients, sent)
        return self._in_context(work, clients, sent, states)

    def models(self) -> dict[str, Model]:
        """Judge clients with their contexts."""
        return {"": self._in_context}

    def finish(
        self, work: LocalWork, clients: Tensor, starts: TensorDict, trained: TensorDict
    ) -> TensorDict:
        """Replace the common head by the head to send."""
        own = {shared: trained[own] for shared, own in heads(work).items()}
        if self.upload_head == "half":
            own = {name: (value + trained[name]) / 2 for name, value in own.items()}
        return trained.update(own)

    def _in_context(
        self, work: LocalWork, clients: Tensor, sent: TensorDict, states: TensorDict
    ) -> TensorDict:
        return states.update({_CONTEXT: states[f"{EXTRA}.head.weight"].sum(1)})


def heads(work: LocalWork) -> dict[str, str]:
    """Return the entries' names in the common head, each with its name in the personal head."""
    shared, own = f"{work.head.name}.", f"{EXTRA}.head."
    names = [n.removeprefix(own) for n in work.layout.extra if n.startswith(own)]
    return {f"{shared}{name}": f"{own}{name}" for name in names}


def _kernel(one: Tensor, other: Tensor) -> Tensor:
    """Return the kernels ``[n, n]`` of rows."""
    squares = one.square().sum(1, keepdim=True) + other.square().sum(1) - 2 * one @ other.T
    return torch.stack([(squares.clamp(min=0) / (-2 * scale)).exp() for scale in _SCALES]).sum(0)


@checked
class FedCP(FedAvg):
    r"""Federated learning with a conditional policy (Zhang et al. 2023, algorithm 1).

    The server takes the mean of the sent bodies, policies and heads, as FedAvg does. Clients train
    as in :class:`Policed`. A client is judged by the server's body, policy and head with its
    personal head. The whole personal head travels only with ``upload_head="personal"``. A
    newcomer's personal head is the server's, so its policy has no effect.

    Args:
        lam: Weight of the discrepancy of features; by default 5, or the value of the client
            module's own client method.
        upload_head: ``"half"``, the default, or ``"personal"``, as in :class:`Policed`.
        weighting: As in :class:`FedAvg`.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.

    Raises:
        ConfigurationError: If an option is out of range, or the head is not a linear layer.

    Example:
        >>> FedCP(lam=1.0).client_method
        Policed(lam=1.0, upload_head='half')

    References:
        Zhang et al., FedCP: Separating Feature Information for Personalized Federated Learning via
        Conditional Policy, KDD 2023, https://arxiv.org/abs/2307.01217.
    """

    aggregates = False

    owns_head = True

    def __init__(
        self,
        lam: float | None = None,
        upload_head: Literal["half", "personal"] | None = None,
        weighting: Literal["samples", "uniform"] = "samples",
        buffers: Literal["shared", "local", "reset"] = "shared",
    ) -> None:
        super().__init__(weighting, buffers)
        self.use_client_method(Policed, lam=lam, upload_head=upload_head)

    def private_names(self, module: LightningModule, layout: StateLayout) -> set[str]:
        """Return the names of the private entries, including the personal head."""
        own = {name for name in layout.extra if name.startswith(f"{EXTRA}.head.")}
        return super().private_names(module, layout) | own

    def aggregate(self, mean: TensorDict) -> TensorDict:
        """Return the mean, with a newcomer's personal head."""
        for shared, own in heads(self.clients).items():
            mean[own] = mean[shared]
        mean[_CONTEXT] = mean[f"{EXTRA}.head.weight"].sum(0)
        return mean


METHODS = (
    Method("FedCP", FedCP, "FedCP(lam)", "shared body, two heads and a policy", needs="a head"),
)

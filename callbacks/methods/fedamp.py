"""FedAMP: every client is sent a mixture of all models. Models like its own weigh most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from tensordict.utils import expand_as_right
from torch import Tensor

from pflight.local_client import LocalClient, LocalWork
from pflight.method import OWN, ClientMethod, client_method_for
from pflight.modifiers import squared_distance
from pflight.options import (
    ClosedUnitInterval,
    Interval,
    NonNegativeFloat,
    PositiveInt,
    check_range,
    checked,
)
from pflight.states.state import entries, rows

from .hypernetworks import weighted_sums
from .registry import Method
from .stored import StoredModels

_PULL, _CLOUD = f"{OWN}pull", f"{OWN}cloud."
_SMALLEST = 1e-30  # limit of alpha after endless rounds


@checked
class Attracted(ClientMethod):
    r"""FedAMP's client, pulled to the received mixture :math:`u_i`.

    It minimises :math:`f_i(w) + \frac{p}{2} \|w - u_i\|^2` (Huang et al. 2021), with the pull
    :math:`p = \lambda / \alpha_k`. The server sends p once it has changed.

    Args:
        pull: The pull p at first.
        start: The start of training: the mixture, ``"cloud"``, or the client's own last model and
            buffers, ``"personal"``.

    Raises:
        ConfigurationError: If the pull is out of range.
    """

    temporary = ("pull", "cloud.")

    def __init__(
        self, pull: NonNegativeFloat = 1e-4, start: Literal["cloud", "personal"] = "cloud"
    ) -> None:
        self.pull = pull
        self.start = start

    @property
    def keeps_memory(self) -> bool:  # type: ignore[override]
        """Whether it keeps its own model."""
        return self.start == "personal"

    def state(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the pull and, if training does not start from the mixture, room for it."""
        pull = {"pull": next(iter(weights.values())).new_tensor(self.pull)}
        if self.start == "cloud":
            return pull
        return pull | {f"cloud.{name}": torch.zeros_like(w) for name, w in weights.items()}

    def before_training(self, work: LocalWork, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Start from the received mixture, or from the own model with the mixture beside it."""
        states = super().before_training(work, clients, sent)
        if self.start == "personal":
            own = work.remembered(clients, states).states
            clouds = [name for name in work.layout.own if name.startswith(_CLOUD)]
            states = states.clone(recurse=False)
            states.update({name: states[name.removeprefix(_CLOUD)] for name in clouds})
            states.update(own)
        return states

    def penalty(self, c: LocalClient) -> Tensor | None:
        """Return the pull to the mixture, or ``None`` in fine-tuning."""
        if c.anchor is None:
            return None
        cloud = c.anchor
        if self.start == "personal":
            cloud = {name: c.own[f"cloud.{name}"] for name in c.anchor}
        return c.own["pull"] / 2 * squared_distance(c.weights, cloud)


@checked
class FedAMP(StoredModels):
    r"""Federated attentive message passing (Huang et al. 2021, algorithm 1).

    The server stores the last model :math:`w_j` of each client, and sends client i a mixture. As in
    :class:`Attracted`, this mixture pulls the client:

    .. math:: u_i = \sum_j \xi_{ij} w_j, \qquad
        \xi_{ij} = \frac{\alpha_k}{\sigma} e^{-\|w_i - w_j\|^2 / \sigma} \;(j \ne i), \qquad
        \xi_{ii} = 1 - \sum_{j \ne i} \xi_{ij},

    over all received models. If the others' weights add up to over 1, they are scaled to 1. This
    can't happen if :math:`\alpha_k \le \sigma / (N - 1)`. Distances are over parameters.
    Floating-point buffers are mixed like parameters, integer buffers take the maximum. A client
    without a received model is sent the plain mean of all received ones, or the initial model.

    A client is judged by its own last trained model. The tags ``server/`` report the mixture. All
    mixtures of a round use the same models.

    Args:
        lam: Weight :math:`\lambda`; the pull is :math:`\lambda / \alpha_k`.
        alpha: :math:`\alpha_k` at first. With 0 nothing is mixed and there is no pull: clients
            train alone.
        sigma: :math:`\sigma`, the squared distance at which a model counts for little.
        alpha_decay: Factor of :math:`\alpha_k` every ``decay_rounds`` rounds.
        decay_rounds: See ``alpha_decay``.
        start: The start of training, as in :class:`Attracted`. The pull is weak unless
            :math:`\alpha_k` is small, so clients hardly collaborate with ``"personal"``.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.


    References:
        Huang et al., Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI 2021,
        https://arxiv.org/abs/2007.03797.
    """

    _sigmas = "(0, inf)"

    def __init__(
        self,
        lam: NonNegativeFloat = 1.0,
        alpha: NonNegativeFloat = 1e4,
        sigma: float = 25.0,
        alpha_decay: Annotated[float, Interval("(0, 1]")] = 0.1,
        decay_rounds: PositiveInt = 30,
        start: Literal["cloud", "personal"] = "cloud",
        buffers: Literal["shared", "local", "reset"] = "shared",
    ) -> None:
        super().__init__(buffers)
        check_range(self, self._sigmas, sigma=sigma)
        self.lam = lam
        self.alpha = alpha
        self.sigma = sigma
        self.alpha_decay = alpha_decay
        self.decay_rounds = decay_rounds
        self.client_method = client_method_for(
            self, Attracted, pull=lam / alpha if alpha else 0.0, start=start
        )

    @property
    def alpha_now(self) -> float:
        r""":math:`\alpha_k` of the current or next round."""
        alpha = self.alpha * self.alpha_decay ** (self.clients.rounds // self.decay_rounds)
        return max(alpha, min(self.alpha, _SMALLEST))

    def broadcast(self, clients: Tensor) -> TensorDict:
        """Return the clients' mixtures, with the pull if it has changed."""
        weights, known = self.weights(clients), self.received.nonzero().flatten()
        sent = {}
        for name, leaf in self.stored.tensors().items():
            if leaf.is_floating_point():
                sent[name] = weighted_sums(leaf, clients, weights.to(leaf))
            else:
                most = leaf[known.to(leaf.device) if len(known) else slice(None)].amax(dim=0)
                sent[name] = most.expand(len(clients), *most.shape)
        if self.lam and self.alpha_now != self.alpha:
            pull = self.clients.layout.template[_PULL].new_tensor(self.lam / self.alpha_now)
            sent[_PULL] = pull.to(clients.device).expand(len(clients))
        return TensorDict(sent, batch_size=[len(clients)])

    def weights(self, clients: Tensor) -> Tensor:
        r"""Return :math:`\xi_{ij}` of the clients for all models ``[C, N]``."""
        received = self.received.to(clients.device)
        own = F.one_hot(clients, len(received)).double()
        if not received.any():
            return own
        others = received.expand(len(clients), -1) & (own == 0)
        shares = self.attention(clients, others)
        shares = shares / shares.sum(dim=1, keepdim=True).clamp(min=1)
        mixed = shares + own * (1 - shares.sum(dim=1, keepdim=True))
        plain = received.double() / received.sum()
        return torch.where(received[clients].unsqueeze(1), mixed, plain)

    def attention(self, clients: Tensor, others: Tensor) -> Tensor:
        r"""Return the unscaled :math:`\xi_{ij}`, without :math:`\xi_{ii}` ``[C, N]``.

        Args:
            clients: Ids ``[C]``.
            others: Which models count ``[C, N]``.
        """
        squares = self.squared_distances(clients)
        return self.alpha_now / self.sigma * torch.exp(-squares / self.sigma) * others

    def squared_distances(self, clients: Tensor) -> Tensor:
        """Return squared distances of the clients' models to all models ``[C, N]``."""
        squares = []
        for name in self.shared_parameters:
            leaf = rows(self.stored.tensors()[name])
            leaf = leaf.to(torch.promote_types(leaf.dtype, torch.float32))  # half has no cdist
            # From differences, pair by pair: independent of the other clients in the call.
            mode = "donot_use_mm_for_euclid_dist"
            distances = torch.cdist(leaf[clients], leaf, compute_mode=mode)
            squares.append(distances.double().square())
        return torch.stack(squares).sum(dim=0)

    def personalize(self, clients: Tensor) -> TensorDict:
        """Return each client's last trained model, or the mixture that it would be sent."""
        sent, known = self.broadcast(clients), self.received[clients.cpu()].to(clients.device)
        for name, own in entries(self.models_of(clients)):
            keep = expand_as_right(known, own)
            sent[name] = torch.where(keep, own, sent[name])
        return self.clients.judged(clients, sent)

    def set_pseudo_gradients(self) -> None:
        """Store the models of the clients that answered."""
        self.store_models()


@checked
class HeurFedAMP(FedAMP):
    r"""FedAMP with weights by the angle between models (Huang et al. 2021).

    A client's own model has a fixed weight, and the others share the rest:

    .. math:: \xi_{ij} = (1 - \xi_{ii})
        \frac{e^{\sigma \cos(w_i, w_j)}}{\sum_{h \ne i} e^{\sigma \cos(w_i, w_h)}} \;(j \ne i).

    With :math:`\sigma = 0`, :math:`\xi_{ii} = 1 / N` and ``lam=0`` it is FedAvg with uniform
    weights if everybody takes part.

    Args:
        sigma: :math:`\sigma`, the larger the more the nearest models weigh.
        self_weight: :math:`\xi_{ii}`; by default 1 / N, with N the clients that may train.
        lam: As in :class:`FedAMP`, like all that follow.
        alpha: Only the pull depends on it here; 0 is for none.
        alpha_decay: As in :class:`FedAMP`.
        decay_rounds: As in :class:`FedAMP`.
        start: As in :class:`FedAMP`.
        buffers: As in :class:`FedAMP`.


    References:
        Huang et al., Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI 2021,
        https://arxiv.org/abs/2007.03797.
    """

    _sigmas = "[0, inf)"

    def __init__(
        self,
        sigma: float = 10.0,
        self_weight: ClosedUnitInterval | None = None,
        lam: float = 1.0,
        alpha: float = 1e4,
        alpha_decay: float = 0.1,
        decay_rounds: int = 30,
        start: Literal["cloud", "personal"] = "cloud",
        buffers: Literal["shared", "local", "reset"] = "shared",
    ) -> None:
        super().__init__(lam, alpha, sigma, alpha_decay, decay_rounds, start, buffers)
        self.self_weight = self_weight

    def attention(self, clients: Tensor, others: Tensor) -> Tensor:
        """Return the others' shares of the weight beside the own model's ``[C, N]``."""
        own = 1 / len(self.clients.trainable) if self.self_weight is None else self.self_weight
        leaves = [rows(self.stored.tensors()[n]).double() for n in self.shared_parameters]
        norms = torch.stack([leaf.square().sum(dim=1) for leaf in leaves]).sum(dim=0)
        products = (norms[clients].unsqueeze(1) + norms - self.squared_distances(clients)) / 2
        lengths = norms[clients].unsqueeze(1).sqrt() * norms.sqrt()
        logits = (self.sigma * products / lengths.clamp(min=1e-8)).masked_fill(~others, -torch.inf)
        return (1 - own) * logits.softmax(dim=1).nan_to_num(0)  # nothing if there are no others


METHODS = (
    Method(
        "FedAMP",
        FedAMP,
        "FedAMP(lam, alpha, sigma)",
        "its own model",
        manual=True,
        tested={
            "": {"alpha": 1.0, "alpha_decay": 0.5, "decay_rounds": 2},
            "personal": {"alpha": 2.0, "start": "personal"},
        },
    ),
    Method("HeurFedAMP", HeurFedAMP, "HeurFedAMP(sigma)", "its own model", manual=True),
)

"""HetLoRA: low-rank adapters of a rank for each client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import lightning as L
import torch
from tensordict import TensorDict
from torch import Tensor

from pflight.adapters.pairs import Pair, factor_names, trained_pairs
from pflight.errors import ConfigurationError
from pflight.fedavg import FedAvg
from pflight.local_client import LocalClient
from pflight.method import ClientMethod
from pflight.options import NonNegativeFloat, OpenUnitInterval, PositiveInt, checked, whole
from pflight.runs.distributed import all_sum, share_owned
from pflight.states.state import StateLayout, WeightedMean, state_tensors
from pflight.states.updates import ClientUpdates

from .registry import Method


class ShrinkingTails(ClientMethod):
    r"""Adds the penalty of :class:`HetLoRA` on the last rows and columns of the adapters.

    The rank of a client is the number of its last row or column that the server sent and that is
    not 0. Fine-tuning has no penalty.

    Args:
        weight: :math:`\lambda`.
        gamma: :math:`\gamma`.
    """

    def __init__(self, weight: float, gamma: float) -> None:
        self.weight, self.gamma = weight, gamma

    def penalty(self, c: LocalClient) -> Tensor | None:
        """Return the penalty; a norm of 0 has gradient 0."""
        if c.anchor is None:
            return None
        pairs, last = trained_pairs(c.module, "HetLoRA"), []
        for pair in pairs:
            alive = c.anchor[pair.a].flatten(1).any(1) | c.anchor[pair.b].flatten(1).any(0)
            last.append((alive * torch.arange(1, pair.rank + 1, device=alive.device)).amax())
        return self.weight * _tail(c.weights, pairs, torch.stack(last).amax(), self.gamma)


@checked
class HetLoRA(FedAvg):
    r"""HetLoRA (Cho et al. 2024): adapters of a rank for each client.

    The server's adapters have the rank r of the client module. Client i has rank
    :math:`r_i \le r`. It is sent the first :math:`r_i` columns of B and rows of A. What it sends is
    padded by zeros:

    .. math:: A = \sum_{i \in S} p_i \bar A_i, \quad B = \sum_{i \in S} p_i \bar B_i, \quad
        p_i \propto \|B_i A_i\|_F.

    Here the norm is over all layers together. Rows and columns that nobody in the round has stay
    as they are. The scale of all clients is that of the client module.

    In simulations clients train at rank r. Their further rows and columns are 0. So these have zero
    gradients and stay 0, with any optimizer.

    With ``aggregate="product"`` it is FlexLoRA (Bai et al. 2024): the server splits the mean of the
    clients' products, and each client is sent the :math:`r_i` largest directions.

    With ``prune`` ranks fall. Clients add the penalty

    .. math:: \lambda \sum_l \|B_l[:, q:]\|_F \, \|A_l[q:, :]\|_F, \quad
        q = \lfloor \gamma r_i \rfloor,

    over all layers l. If the sum after training is below that of the model that the client was
    sent, then its rank becomes :math:`\max(q, r_\min)` from this upload on; it never grows. The
    paper's exact trigger could not be checked. Its sum over layers is our reading. The server
    decides by what it receives, after transforms such as compression.

    Args:
        ranks: The rank of each client by its id, as in ``{0: 2, 3: 4}``. Others have the rank of
            the client module. ``"samples"`` makes ranks proportional to the clients' numbers of
            samples: :math:`r_\max n_i / \max_j n_j`, rounded, and at least ``r_min``.
        weighting: ``"norm"`` as above; ``"samples"`` or ``"uniform"`` as in :class:`FedAvg`. If all
            products are 0, ``"norm"`` weighs by samples.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.
        r_min: With ``"samples"`` or ``prune``, the smallest rank; by default 1.
        r_max: With ``"samples"``, the largest rank; by default that of the client module.
        prune: :math:`\lambda`, the weight of the penalty. With 0 there is no pruning.
        gamma: :math:`\gamma`, the part of its rank that a client keeps if it is pruned.

    Attributes:
        client_ranks: The rank of each client now ``[num_clients]``.

    Raises:
        ConfigurationError: If a rank is not from 1 to that of the client module, a client is
            unknown, or the module has no plain low-rank adapters, frozen factors, or adapters with
            a bias.

    Example:
        >>> HetLoRA({0: 2, 3: 4}, weighting="samples").ranks
        {0: 2, 3: 4}

    References:
        Cho et al., Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models,
        EMNLP 2024, https://arxiv.org/abs/2401.06432; Bai et al., Federated Fine-tuning of Large
        Language Models under Heterogeneous Tasks and Client Resources, NeurIPS 2024,
        https://arxiv.org/abs/2402.11505.
    """

    client_ranks: Tensor

    def __init__(
        self,
        ranks: dict[int, int] | Literal["samples"] = "samples",
        weighting: Literal["norm", "samples", "uniform"] = "norm",
        buffers: Literal["shared", "local", "reset"] = "shared",
        *,
        r_min: PositiveInt | None = None,
        r_max: PositiveInt | None = None,
        prune: NonNegativeFloat = 0.0,
        gamma: OpenUnitInterval = 0.99,
    ) -> None:
        super().__init__("uniform" if weighting == "uniform" else "samples", buffers)
        self.by_norm = weighting == "norm"
        self.ranks = ranks
        self.r_min, self.r_max = r_min or 1, r_max
        self.prune, self.gamma = prune, gamma
        if prune:
            self.use_client_method(ShrinkingTails, weight=prune, gamma=gamma)
        if ranks != "samples":
            if r_max or (r_min and not prune):
                raise ConfigurationError(
                    'HetLoRA: r_min and r_max are for ranks="samples", and r_min for prune'
                )
            for client, rank in ranks.items():
                if not (whole(client) >= 0 and whole(rank) >= 1):
                    raise ConfigurationError(
                        "HetLoRA: ranks must give clients, by their numbers, whole numbers from 1, "
                        f"got {rank!r} for client {client!r}"
                    )

    def owned_names(self, module: L.LightningModule, layout: StateLayout) -> set[str]:
        """Return the names of the factors."""
        factors = factor_names(trained_pairs(module, "HetLoRA"))
        return super().owned_names(module, layout) | {*factors}

    def setup_server(self) -> None:
        """Make the server's model, and determine the ranks."""
        super().setup_server()
        module, bounds = self.clients.module, getattr(self.clients, "bounds", None)
        self.adapters = trained_pairs(module, "HetLoRA")
        for pair in self.adapters:
            if f"{pair.b.rpartition('.')[0]}.bias" in state_tensors(module):
                raise ConfigurationError(
                    f"HetLoRA can't use the adapter of {pair.layer!r}: it has a bias, which has no "
                    "rank; make adapters with lora_bias=False"
                )
        if self.aggregation not in ("factors", "product"):
            raise ConfigurationError(
                f"HetLoRA: aggregate={self.aggregation!r} has no ranks of clients: take 'factors' "
                "or 'product'"
            )
        if self.by_norm and getattr(bounds, "max_share", None) is not None:
            raise ConfigurationError(
                "HetLoRA: --max-share bounds weights by samples: take weighting='samples'"
            )
        self.add_state("client_ranks", self._chosen_ranks(), on_cpu=True)

    def on_state_loaded(self) -> None:
        """Check that the clients have the ranks of the checkpoint, or had more before pruning."""
        if self.ranks == "samples" and self.clients.data is None:
            return
        now = self._chosen_ranks()
        wrong = now < self.client_ranks if self.prune else now != self.client_ranks
        if others := wrong.nonzero().flatten().tolist():
            client = others[0]
            raise ConfigurationError(
                f"HetLoRA: client {self.clients.numbered(client)} has rank {int(now[client])} here "
                f"and rank {int(self.client_ranks[client])} in the checkpoint"
            )

    def _chosen_ranks(self) -> Tensor:
        """Return the rank of each client ``[num_clients]``."""
        count, most = self.clients.num_clients, max(pair.rank for pair in self.adapters)
        found = torch.full((count,), most)
        if self.ranks == "samples":
            largest = most if self.r_max is None else self.r_max
            if not self.r_min <= largest <= most:
                raise ConfigurationError(
                    f"HetLoRA: r_min={self.r_min} and r_max={largest} must be in this order, and "
                    f"at most the rank {most} of the server's adapters"
                )
            if self.clients.data is None:
                return found
            sizes = self.clients.num_samples
            rounded = (2 * largest * sizes + sizes.max()) // (2 * sizes.max()).clamp(min=1)
            return rounded.clamp(self.r_min, largest).cpu()
        for client, rank in self.ranks.items():
            self.clients.check(client, "HetLoRA: ranks")
            if rank > most:
                raise ConfigurationError(
                    f"HetLoRA: client {self.clients.numbered(client)} has rank {rank}, but the "
                    f"server's adapters have rank {most}"
                )
            found[client] = rank
        return found

    def broadcast(self, clients: Tensor) -> TensorDict:
        """Return the server's model with the ranks of the clients ``[C]``."""
        return self._of_ranks(clients, super().broadcast(clients))

    def on_round_start(self) -> None:
        """Start new means."""
        super().on_round_start()
        self.mean_by_norm = self.new_mean() if self.by_norm else None

    def receive(self, updates: ClientUpdates) -> None:
        """Prune the ranks of a chunk's clients, and add their models to the means."""
        self.client_ranks[updates.clients.cpu()] = self._pruned(updates)
        updates = replace(updates, states=self._of_ranks(updates.clients, updates.states))
        super().receive(updates)
        if self.mean_by_norm is not None:
            self.mean_by_norm.add(updates.states, _norms(updates.states, self.adapters))

    def set_pseudo_gradients(self) -> None:
        """Set the server's pseudo-gradient by the mean with the chosen weights."""
        if self.prune:
            share_owned(self.client_ranks, torch.arange(len(self.client_ranks)))
        by_norm: WeightedMean | None = self.mean_by_norm
        if by_norm is not None and all_sum(by_norm.weights.clone())[0] > 0:
            self.mean = by_norm
        super().set_pseudo_gradients()

    def aggregate(self, mean: TensorDict) -> TensorDict:
        """Return the mean. Rows and columns that no client had are those of the server."""
        server = self.server.tensors(0)
        for pair in self.adapters:
            a, b = mean[pair.a], mean[pair.b].transpose(0, 1)
            nobody = ~(a.flatten(1).any(dim=1) | b.flatten(1).any(dim=1))
            a[nobody] = server[pair.a][nobody]
            b[nobody] = server[pair.b].transpose(0, 1)[nobody]
        return mean

    def bytes_down(self, clients: Tensor, sent: TensorDict) -> int:
        """Return the bytes sent to the clients ``[C]``, without zeros of padding."""
        return super().bytes_down(clients, sent) - self._padding(self.client_ranks[clients.cpu()])

    def bytes_up(self, updates: ClientUpdates) -> int:
        """Return the bytes that clients sent, without zeros of padding; none is in sparse ones."""
        padding = 0 if updates.bytes_saved else self._padding(self._pruned(updates))
        return super().bytes_up(updates) - padding

    def _pruned(self, updates: ClientUpdates) -> Tensor:
        """Return the ranks ``[C]`` of clients after their training."""
        ranks = self.client_ranks[updates.clients.cpu()]
        if not self.prune:
            return ranks
        before = self._of_ranks(updates.clients, super().broadcast(updates.clients))
        names = factor_names(self.adapters)
        smaller = []
        for rank, *states in zip(ranks, before, updates.states, strict=True):
            old, new = (
                _tail({n: state[n].double() for n in names}, self.adapters, rank, self.gamma)
                for state in states
            )
            smaller.append(bool(new < old))
        q = _kept(ranks, self.gamma).long().clamp(min=self.r_min)
        return torch.where(torch.tensor(smaller, dtype=torch.bool), q.minimum(ranks), ranks)

    def _padding(self, ranks: Tensor) -> int:
        """Return the bytes of the zeros beyond ranks ``[C]``."""
        template = self.clients.layout.template
        factors = {name: pair.rank for pair in self.adapters for name in pair.names}
        return sum(
            template[name].nbytes // rank * int((rank - ranks).clamp(min=0).sum())
            for name, rank in factors.items()
        )

    def _of_ranks(self, clients: Tensor, states: TensorDict) -> TensorDict:
        """Return states ``[C]`` with zeros beyond the ranks of the clients ``[C]``."""
        factors: dict[str, Tensor] = {}
        ranks = self.client_ranks[clients.cpu()]
        for pair in self.adapters:
            if (ranks >= pair.rank).all():
                continue
            for name, dim in ((pair.a, 1), (pair.b, 2)):
                value = states[name]
                shape = [-1 if i in (0, dim) else 1 for i in range(value.dim())]
                shape[0] = len(ranks)
                kept = torch.arange(pair.rank) < ranks.unsqueeze(1)
                factors[name] = torch.where(kept.to(value.device).view(shape), value, 0)
        return TensorDict({**states, **factors}, batch_size=states.batch_size)


def _kept(rank: Tensor, gamma: float) -> Tensor:
    """Return q, the rank that pruning leaves, for the rank of a client or of many."""
    return torch.floor(gamma * rank.float())


def _tail(state: Mapping[str, Tensor], pairs: Sequence[Pair], rank: Tensor, gamma: float) -> Tensor:
    """Return the sum over pairs of the norms' products of the rows and columns from q on."""
    norm, products = torch.linalg.vector_norm, []
    for pair in pairs:
        a, b = (state[name].flatten(1) for name in pair.names)  # [r, k], [d, r]
        tail = torch.arange(pair.rank, device=a.device) >= _kept(rank, gamma).to(a.device)
        rows, columns = torch.where(tail[:, None], a, 0), torch.where(tail, b, 0)
        products.append(norm(rows) * norm(columns))
    return torch.stack(products).sum()


def _norms(states: TensorDict, pairs: list[Pair]) -> Tensor:
    """Return the Frobenius norms ``[C]`` of the products B A, over all pairs together."""
    squares = torch.zeros(len(states), dtype=torch.double)
    for pair in pairs:
        a, b = (states[name].flatten(2).double() for name in pair.names)  # [C, r, k], [C, d, r]
        squares = squares.to(a) + ((b.mT @ b) * (a @ a.mT)).sum(dim=(1, 2))
    return squares.clamp(min=0).sqrt()


METHODS = (
    Method(
        "HetLoRA",
        HetLoRA,
        "HetLoRA(ranks, weighting)",
        "the server's adapters at its own rank",
        needs="adapters",
        manual=True,
        tested={
            "": {"ranks": {0: 1}},
            "samples": {"ranks": "samples", "weighting": "samples"},
            "product": {"ranks": {0: 1}, "aggregate": "product"},
            "prune": {"ranks": {0: 1}, "prune": 0.5, "gamma": 0.5},
        },
    ),
)

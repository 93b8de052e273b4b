"""FedLEASE: clusters of clients share LoRA experts, and each client mixes the experts of all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from lightning import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from tensordict import TensorDict
from torch import Tensor, nn

from pflight.adapters.experts import Experts
from pflight.adapters.pairs import Pair, factor_names, plain_pairs
from pflight.errors import ConfigurationError
from pflight.method import ClientMethod
from pflight.options import Interval, NonNegativeInt, PositiveInt, checked
from pflight.runs.distributed import all_max
from pflight.states.head import EXTRA
from pflight.states.state import StateLayout, expand_state, state_bytes
from pflight.states.updates import ClientUpdates

from .clustering import gather_states, in_order
from .joining import Joining
from .registry import Method

_COUNT, _OWN, _BANK = (f"{EXTRA}.{name}" for name in ("count", "own", "bank."))
_ROUTER = f"{EXTRA}.router."


@checked
class Routed(ClientMethod):
    """FedLEASE's client: it trains its own expert and the router that mixes all experts.

    Its layers are those of :class:`~pflight.adapters.experts.Experts`. The client module's adapter
    is the client's own expert.

    Args:
        experts: Largest number of experts. With less than 2 there is no router.

    References:
        Wang et al., Adaptive LoRA Experts Allocation and Selection for Federated Fine-Tuning,
        NeurIPS 2025, https://arxiv.org/abs/2509.15087.
    """

    temporary = ("count", "own", "bank.")

    def __init__(self, experts: NonNegativeInt = 0) -> None:
        self.experts = experts

    def beside(self, module: LightningModule) -> nn.Module | None:
        """Return the experts of all clusters and the routers."""
        return Experts(module, self.experts, "FedLEASE") if self.experts > 1 else None


@checked
class FedLEASE(Joining):
    r"""Adaptive LoRA experts allocation and selection (FedLEASE, Wang et al. 2025).

    It has two stages:

    1. In the first round all clients, not only the cohort, train their adapters from the common
       initial model. The server clusters them by the factors B. The distance of two clients is
       1 minus the cosine of their factors B, as in
       :class:`~pflight.adapters.AdapterDistance`, averaged over layers. Nearest groups are merged,
       by average linkage. The number M of clusters has the largest mean silhouette among 2 to
       ``max_experts``, and less than the number of clients. The smaller one wins a tie. A cluster's
       first expert is the mean of its members' adapters.
    2. From then on each client is sent all M experts. It trains its cluster's own expert, and a
       router for each layer, as :class:`Routed` does. All that it trains becomes the mean of the
       cluster's members that answered. A cluster without such members stays unchanged.

    A client that missed the first round goes through stage 1 when it first answers. A held-out
    client does so when it is judged. Each goes to the cluster with the smallest mean distance to
    the members of stage 1. A client without training samples is judged by the model of the cluster
    with the most training samples.

    With one expert this is FedAvg over adapters with uniform weights, after the first round.

    Args:
        num_experts: M, or ``"auto"`` to choose it by silhouettes.
        max_experts: Largest M for ``"auto"``.
        warmup_epochs: Local epochs of stage 1; by default as in any other round.
        router: Whether clients mix all experts. Otherwise each uses its cluster's expert alone.
        weighting: Weights of clients in the mean of their cluster, ``"uniform"`` or ``"samples"``.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.

    Attributes:
        assignments: LongTensor ``[num_clients]``, each client's cluster; -1 if it has none yet.

    Raises:
        ConfigurationError: If an option is out of range, there are too few clients, or the client
            module has adapters that are not plain LoRA of linear layers.

    Example:
        >>> FedLEASE(max_experts=4).num_experts
        'auto'

    References:
        Wang et al., Adaptive LoRA Experts Allocation and Selection for Federated Fine-Tuning,
        NeurIPS 2025, https://arxiv.org/abs/2509.15087.
    """

    algorithm_name = "FedLEASE"
    tag = "fedlease"

    _members: list[Tensor]
    _changed: Tensor
    _received: Tensor

    def __init__(
        self,
        num_experts: int | Literal["auto"] = "auto",
        max_experts: Annotated[int, Interval("[2, inf)")] = 8,
        warmup_epochs: PositiveInt | None = None,
        router: bool = True,
        weighting: Literal["uniform", "samples"] = "uniform",
        buffers: Literal["shared", "local", "reset"] = "shared",
    ) -> None:
        if isinstance(num_experts, int) and num_experts < 1:
            raise ConfigurationError(f"FedLEASE: num_experts must be at least 1, got {num_experts}")
        fixed = num_experts if isinstance(num_experts, int) else 1
        super().__init__(fixed, buffers=buffers, weighting=weighting)
        self.num_experts = num_experts
        self.max_experts = max_experts
        self.warmup_epochs = warmup_epochs
        self.router = router
        self.client_method = Routed()

    def on_num_clients(self, num_clients: int) -> None:
        """Have clients make room for as many experts as there may be."""
        most = min(self.max_experts, num_clients - 1)
        room = self.num_experts if isinstance(self.num_experts, int) else most
        self.client_method = Routed(max(room, 0) if self.router else 0)

    def owned_names(self, module: LightningModule, layout: StateLayout) -> set[str]:
        """Return the names of the adapters and routers, which all clients have to share."""
        pairs = plain_pairs(module, "FedLEASE")
        return {*factor_names(pairs), *_routers(layout.names)} | super().owned_names(module, layout)

    def setup_server(self) -> None:
        """Make the models, equal until stage 2."""
        able, given = len(self.clients.trainable), self.num_experts
        if able < self._fewest:
            raise ConfigurationError(
                f"FedLEASE with num_experts={given} needs at least {self._fewest} clients that can "
                f"train, and there are {able}"
            )
        self.adapters = plain_pairs(self.clients.module, "FedLEASE")
        for pair in self.adapters:
            if pair.b not in self.sent_names:
                raise ConfigurationError(
                    f"FedLEASE compares clients by their factors B, and {pair.b!r} does not train"
                )
        self.add_state("num_clusters", given if isinstance(given, int) else 1)
        super().setup_server()
        self.add_state("_start", {})  # the common initial model
        self.add_state("_members", [])  # mean directions of B in stage 1, by adapter
        self.add_state("_changed", torch.empty(0, dtype=torch.long), on_cpu=True)
        self.add_state("_received", torch.full_like(self.assignments, -1), on_cpu=True)

    @property
    def _fewest(self) -> int:
        """The number of clients without which there is no choice of clusters."""
        return self.num_experts if isinstance(self.num_experts, int) else 3

    @property
    def _room(self) -> int:
        """Number of experts that the clients' layers have room for; 0 without a router."""
        client_method = self.clients.client_method
        assert isinstance(client_method, Routed)
        return client_method.experts if client_method.experts > 1 else 0

    def on_state_loaded(self) -> None:
        """Make as many models as there are experts."""
        self.resize(self.num_clusters)

    # Stage 1

    def round(self, cohort: Tensor) -> None:
        """Run one round. The first is stage 1, with all clients."""
        before = self.assignments.clone()
        if not self._members:
            self._find_experts()
        else:
            self.join_or_train(cohort)
        self.log_clusters(before)

    def _find_experts(self) -> None:
        """Train all clients once from the common initial model, and cluster their adapters."""
        names = [name for name in self.sent_names if name not in {*_routers(self.sent_names)}]
        start = self.server.tensors(0, names)
        self._start = {name: value.detach().clone() for name, value in start.items()}
        updates = self.train_from_start(self.clients.trainable, names)
        clients, states = gather_states(updates, self.clients.device)
        if len(clients) < self._fewest:
            rank_zero_warn(
                f"round {self.clients.rounds}: FedLEASE found no experts, since only "
                f"{len(clients)} clients answered; the next round tries again"
            )
            return
        rows = _directions(states, self.adapters)
        clusters = self._clusters(_distances(rows, rows).cpu())
        count = int(clusters.max()) + 1
        by_cluster = F.one_hot(clusters).T.to(rows[0])
        by_cluster /= by_cluster.sum(1, keepdim=True)
        self._members = [by_cluster @ row for row in rows]
        self._changed = torch.full((count,), self.clients.rounds)
        while len(self.server) < count:
            self.server.copy(0)  # which the server optimizer steps from now on
        self.add_centers(count)
        self.on_round_start()
        routers = self.server.tensors(0, _routers(self.sent_names))
        for update in updates:
            whole = update.states.clone(recurse=False)
            whole.update(expand_state(routers, len(whole)))
            members = torch.searchsorted(clients, update.clients.cpu())
            self.assign(replace(update, states=whole), clusters[members])
        for k, mean in self.means().items():
            self.server.replace(k, mean)

    def _clusters(self, distances: Tensor) -> Tensor:
        """Return the cluster of each client ``[N]`` by the distances ``[N, N]``, numbered as found.

        Log the mean silhouette.
        """
        from sklearn.cluster import AgglomerativeClustering
        from sklearn.metrics import silhouette_score

        table = ((distances + distances.T) / 2).clamp(min=0).fill_diagonal_(0).numpy()
        most, given = min(self.max_experts, len(table) - 1), self.num_experts
        best, found = float("-inf"), torch.zeros(len(table), dtype=torch.long)
        for count in [given] if isinstance(given, int) else range(2, most + 1):
            score, labels = 0.0, found.numpy()
            if count > 1:
                tree = AgglomerativeClustering(count, metric="precomputed", linkage="average")
                labels = tree.fit_predict(table)
            if 1 < count < len(table):
                score = round(float(silhouette_score(table, labels, metric="precomputed")), 12)
            if score > best:
                best, found = score, in_order(labels)
        self.clients.log({"fedlease/silhouette": best})
        return found

    def nearest(self, states: TensorDict) -> Tensor:
        """Return the cluster with the smallest mean distance to each of the states ``[C]``."""
        rows = _directions(states, self.adapters)
        members = [row.to(rows[0].device) for row in self._members]
        return _distances(rows, members).argmin(dim=1).cpu()

    # Stage 2

    def centers_of(self, clients: Tensor) -> Tensor:
        """Return each client's cluster. Newcomers with samples go through stage 1."""
        if not self._members:
            return torch.zeros(len(clients), dtype=torch.long)
        return super().centers_of(clients)

    def broadcast(self, clients: Tensor) -> TensorDict:
        """Return each client's own expert, the router and all experts."""
        return self._with_experts(super().broadcast(clients))

    def broadcast_groups(self, clients: Tensor) -> Iterator[tuple[Tensor, TensorDict]]:
        """Split the clients ``[C]`` by their clusters."""
        for group, sent in super().broadcast_groups(clients):
            yield group, self._with_experts(sent)

    def _sent_as(self, center: int) -> dict[str, Tensor]:
        """Return a cluster's model, and its number."""
        sent = self.server.tensors(center, self.sent_names)
        if self._members and self._room:
            sent[_OWN] = torch.tensor(center, device=self.clients.device)
        return sent

    def _with_experts(self, sent: TensorDict) -> TensorDict:
        """Add all experts to what clients are sent ``[C]``, as views, once there are some."""
        if not self._members or not self._room:
            return sent
        count, models = self.num_clusters, [self.server.tensors(k) for k in range(len(self.server))]
        for index, pair in enumerate(self.adapters):
            for letter, name in (("a", pair.a), ("b", pair.b)):
                experts = torch.stack([model[name].detach() for model in models[:count]])
                missing = experts.new_zeros(self._room - count, *experts.shape[1:])
                experts = torch.cat([experts, missing])
                sent[f"{_BANK}{letter}{index}"] = experts.expand(len(sent), *experts.shape)
        sent[_COUNT] = torch.full((len(sent),), count, device=self.clients.device)
        return sent

    def receive(self, updates: ClientUpdates) -> None:
        """Add a chunk's models to the means of their clusters."""
        self.assign(updates, self.assignments[updates.clients.cpu()])

    def set_pseudo_gradients(self) -> None:
        """Move each cluster's model to the mean of its members that answered."""
        means, index = self.means(), self.clients.rounds
        self._changed[[*means]] = index
        self._received[all_max(self._assigned) >= 0] = index
        for k, mean in means.items():
            self.server.set_pseudo_gradient(k, mean)

    def bytes_down(self, clients: Tensor, sent: TensorDict) -> int:
        """Return the bytes of the experts that are new to each client, and of the rest.

        An expert is new if it has changed since the client last answered.
        """
        if _COUNT not in sent:
            return super().bytes_down(clients, sent)
        travels = {*self.sent_names}
        expert = self._size(name for name in factor_names(self.adapters) if name in travels)
        rest = self._size(travels) - expert - self._unused
        new = int((self._changed >= self._received[clients.cpu()].unsqueeze(1)).sum())
        return new * expert + len(clients) * rest

    def bytes_up(self, updates: ClientUpdates) -> int:
        """Return the bytes that clients sent, without the routers' rows that have no expert."""
        routed = any(name in updates.states for name in _routers(self.sent_names))
        size = state_bytes(updates.states) - routed * self._unused
        return len(updates.clients) * size

    def _size(self, names: Iterable[str]) -> int:
        template = self.clients.layout.template
        return sum(template[name].nbytes for name in names)

    @property
    def _unused(self) -> int:
        """Bytes of the rows of one client's routers that have no expert."""
        if not self._room:
            return 0
        rows = 2 * self._room - 1
        return self._size(_routers(self.sent_names)) // rows * (rows - 2 * self.num_clusters + 1)


def _routers(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(_ROUTER)]


def _directions(states: Mapping[str, Tensor] | TensorDict, pairs: Iterable[Pair]) -> list[Tensor]:
    """Return the direction of each client's B, by adapter ``[C, d * rank + 1]``.

    A row is B with length 1, followed by a 1. If B is 0, the row is 0. See :func:`_distances`.
    """
    found = []
    for pair in pairs:
        b = states[pair.b].detach().flatten(1).double()
        lengths = b.norm(dim=1, keepdim=True)
        found.append(torch.where(lengths > 0, torch.cat([b, lengths], dim=1) / lengths, 0.0))
    return found


def _distances(one: Iterable[Tensor], other: Iterable[Tensor]) -> Tensor:
    """Return the distances ``[C, C']`` of directions: 1 minus the cosine, a mean over adapters.

    The distance to a B of zeros is 0. The distance to a mean of directions is the mean distance.
    """
    parts = [
        x[:, -1:] @ y[:, -1:].T - x[:, :-1] @ y[:, :-1].T for x, y in zip(one, other, strict=True)
    ]
    return torch.stack(parts).mean(dim=0)


METHODS = (
    Method(
        "FedLEASE",
        FedLEASE,
        "FedLEASE(max_experts)",
        "its cluster's expert and router, with all experts",
        needs="adapters",
        manual=True,
        tested={
            "": {"num_experts": 2},
            "no-router": {"num_experts": 2, "router": False, "warmup_epochs": 2},
        },
    ),
)

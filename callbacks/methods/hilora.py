"""HiLoRA: adapters of all clients, of a cluster and of a client, trained one after the other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import lightning as L
import torch
import torch.nn.functional as F
from lightning import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from tensordict import TensorDict
from torch import Tensor, nn

from pflight.adapters.distances import subspace_distances, subspaces
from pflight.adapters.pairs import factor_names, trained_pairs, zero_first
from pflight.adapters.product_mean import ProductMean
from pflight.adapters.second import second_adapters, second_names
from pflight.errors import ConfigurationError
from pflight.local_client import LocalClient, LocalWork
from pflight.method import ClientMethod, Model
from pflight.options import (
    ClosedUnitInterval,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    checked,
)
from pflight.randomness import Purpose, derive_seed
from pflight.runs.distributed import all_max
from pflight.states.head import EXTRA
from pflight.states.state import StateLayout, entries
from pflight.states.updates import ClientUpdates

from .clustering import gather_states, spectral
from .joining import Joining
from .registry import Method

ROOT, CLUSTER, LEAF = range(3)
"""The stages."""
_TIERS = ("root", "cluster")
_STAGE, _LEAF = f"{EXTRA}.stage", "leaf"


class Tiers(nn.Module):
    """The finished adapters of a module's layers, beside its own one: root and cluster.

    Each layer adds the outputs of all three. A tier adds nothing until its stage is over.

    Args:
        module: The client module, whose layers get hooks.

    Attributes:
        stage: The stage, a scalar.
    """

    stage: Tensor

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.root, self.cluster = (
            second_adapters(module, "HiLoRA", _both, trains=False) for _ in _TIERS
        )
        self.register_buffer("stage", torch.tensor(ROOT))
        layers: Any = (*self.root.values(), *self.cluster.values())
        for layer in layers:
            layer.factors[1].detach().zero_()


def _both(x: Tensor) -> tuple[float, float]:
    return 1.0, 1.0


@checked
class Tiered(ClientMethod):
    r"""HiLoRA's client: it trains the adapter of one tier beside those of the finished tiers.

    The client module's adapter is that of the tier that trains. In the cluster and leaf stages its
    columns are drawn away from those of the finished tiers: the loss has the terms

    .. math:: \gamma_c \|B_r^\top B_c\|_F^2, \qquad
        \gamma_c \|B_r^\top B_l\|_F^2 + \gamma_l \|B_c^\top B_l\|_F^2,

    summed over layers. From the leaf stage on, a client keeps all that it trains. Fine-tuning has
    no such terms.

    Args:
        gamma_c: :math:`\gamma_c`.
        gamma_l: :math:`\gamma_l`.

    References:
        Peng et al., HiLoRA: Hierarchical Low-Rank Adaptation for Personalized Federated Learning,
        2026, https://arxiv.org/abs/2603.02785.
    """

    temporary = ("stage", *(f"{tier}." for tier in _TIERS))

    def __init__(self, gamma_c: NonNegativeFloat = 0.1, gamma_l: NonNegativeFloat = 0.1) -> None:
        self.gamma_c = gamma_c
        self.gamma_l = gamma_l

    def beside(self, module: LightningModule) -> nn.Module:
        """Return the finished tiers."""
        return Tiers(module)

    def penalty(self, c: LocalClient) -> Tensor | None:
        """Return both terms, which are 0 for a tier that is not finished."""
        if c.anchor is None:
            return None
        parts = []
        for tier, gamma in zip(_TIERS, (self.gamma_c, self.gamma_l), strict=True):
            layers: Any = c.module.get_submodule(f"{EXTRA}.{tier}").named_children()
            for key, layer in layers:
                if layer.pair.b in c.weights:
                    end = "b.weight" if isinstance(layer.b, nn.Module) else "b"
                    finished = c.extra[f"{tier}.{key}.{end}"].flatten(1)
                    overlap = finished.mT @ c.weights[layer.pair.b].flatten(1)
                    parts.append(gamma * overlap.square().sum())
        return torch.stack(parts).sum()

    def start_states(self, work: LocalWork, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Return the states ``[C]``, in which tiers that are not sent are 0."""
        states = super().start_states(work, clients, sent)
        missing = [name for name in work.layout.extra if name not in sent]
        return states.update({name: torch.zeros_like(states[name]) for name in missing})

    def before_training(self, work: LocalWork, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Start from the own leaf, if there is one."""
        states = super().before_training(work, clients, sent)
        return self._own(work, clients, sent, states)

    def models(self) -> dict[str, Model]:
        """Judge clients by all three tiers."""
        return {"": self._own}

    def _own(
        self, work: LocalWork, clients: Tensor, sent: TensorDict, states: TensorDict
    ) -> TensorDict:
        names = [name for name, _ in entries(sent) if not name.startswith(EXTRA)]
        return states.update(work.read(_LEAF, clients, states.select(*names)))

    def keep(
        self, work: LocalWork, clients: Tensor, starts: TensorDict, trained: TensorDict
    ) -> None:
        """Keep the trained leaf."""
        if len(clients) and starts[_STAGE][0] == LEAF:
            layout = work.layout
            others = {*layout.frozen, *layout.private, *layout.own, *layout.extra}
            names = [name for name in layout.names if name not in others]
            work.write(_LEAF, clients, trained.select(*names))


@checked
class HiLoRA(Joining):
    r"""Hierarchical low-rank adaptation (HiLoRA, Peng et al. 2026): root, cluster and leaf.

    Each layer of client i adds the outputs of three adapters,

    .. math:: D_i = s (B_r A_r + B_c A_c + B_l A_l),

    of all clients (root), of its cluster and of the client alone (leaf). They are trained in this
    order. The adapters of earlier stages are frozen:

    1. In the root stage all clients train one adapter. The server takes the mean of their products
       as with ``aggregate="product"`` and ``split="left"``.
    2. In the cluster stage the members of each cluster do so for an adapter of the cluster.
    3. In the leaf stage each client trains an adapter of its own, and nothing travels.

    Clients train as in :class:`Tiered`. Each stage begins with the factors of the client module,
    with B = 0. All else that trains, such as a head, goes with the adapter that trains.

    A stage ends before a round if it has had its number of rounds, or if the last round has changed
    its products by at most ``tau``:

    .. math:: \|D_t - D_{t-1}\|_F \le \tau \|D_{t-1}\|_F

    over all layers, and over all clusters with members in that round.

    The clusters are those of the root stage. Each time that a client answers, the server notes
    :math:`\bar B_i \leftarrow \lambda \bar B_i + (1 - \lambda) B_i / \|B_i\|_F`. The distance of
    two clients is that of the column spaces of these, as ``"subspace"`` in
    :class:`~pflight.adapters.AdapterDistance`. Spectral clustering of Gaussian similarities finds
    the clusters, with the median distance as their width.

    A client that has not answered in the root stage trains once from the root adapter when it first
    answers, and joins the cluster with the smallest mean distance to its members. A held-out client
    does so when it is judged. It has no leaf then; fine-tuning trains one.

    Args:
        num_clusters: Number of clusters, or ``"auto"`` for the largest gap of the eigenvalues.
        min_clusters: Smallest number of clusters for ``"auto"``.
        max_clusters: Largest number of clusters for ``"auto"``.
        root_rounds: The root stage has at most so many rounds.
        cluster_rounds: The cluster stage has at most so many rounds.
        tau: A smaller relative change ends a stage; 0 leaves this to the numbers of rounds.
        ema: :math:`\lambda`, the share of earlier participations.
        weighting: Weights of clients in the mean of their cluster, ``"samples"`` or ``"uniform"``.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.
        gamma_c: :math:`\gamma_c`; by default 0.1, or the value of the client's own client method.
        gamma_l: :math:`\gamma_l`, likewise.

    Attributes:
        assignments: LongTensor ``[num_clients]``, each client's cluster; -1 if it has none yet.
        stage: 0 for root, 1 for cluster, 2 for leaf.

    Raises:
        ConfigurationError: If an option is out of range, there are too few clients, or the client
            module has no plain LoRA.

    Example:
        >>> HiLoRA(num_clusters=2, root_rounds=5).tau
        0.01

    References:
        Peng et al., HiLoRA: Hierarchical Low-Rank Adaptation for Personalized Federated Learning,
        2026, https://arxiv.org/abs/2603.02785.
    """

    algorithm_name = "HiLoRA"
    tag = "hilora"
    aggregates = False
    refuses: ClassVar[Mapping[str, str]] = {
        "term": "its clients start from adapters of their own in the leaf stage"
    }

    numbers: tuple[int, int]
    """The smallest and the largest number of clusters."""
    stage: int
    rounds_of: list[int]
    """The number of rounds that each stage has had."""
    _last: list[dict[str, Tensor]]
    _directions: dict[str, Tensor]
    _members: Tensor
    _reached: Tensor
    """The last stage in which each client has answered, -1 for none."""
    _found: Tensor

    def __init__(
        self,
        num_clusters: int | Literal["auto"] = "auto",
        min_clusters: PositiveInt = 1,
        max_clusters: PositiveInt = 10,
        root_rounds: NonNegativeInt = 20,
        cluster_rounds: NonNegativeInt = 20,
        tau: NonNegativeFloat = 0.01,
        ema: ClosedUnitInterval = 0.9,
        weighting: Literal["samples", "uniform"] = "samples",
        buffers: Literal["shared", "local", "reset"] = "shared",
        *,
        gamma_c: float | None = None,
        gamma_l: float | None = None,
    ) -> None:
        if isinstance(num_clusters, int) and num_clusters < 1:
            raise ConfigurationError(f"HiLoRA: num_clusters must be at least 1, got {num_clusters}")
        if min_clusters > max_clusters:
            raise ConfigurationError(
                f"HiLoRA: min_clusters={min_clusters} exceeds max_clusters={max_clusters}"
            )
        if root_rounds == 0 and num_clusters != 1:
            raise ConfigurationError(
                "HiLoRA finds clusters in the root stage: with root_rounds=0 take num_clusters=1"
            )
        given = (num_clusters, num_clusters) if isinstance(num_clusters, int) else None
        self.numbers = given or (min_clusters, max_clusters)
        super().__init__(self.numbers[0], buffers=buffers, weighting=weighting)
        self.most_rounds = (root_rounds, cluster_rounds, math.inf)
        self.tau = tau
        self.ema = ema
        self.use_client_method(Tiered, gamma_c=gamma_c, gamma_l=gamma_l)

    def owned_names(self, module: LightningModule, layout: StateLayout) -> set[str]:
        """Return the names of the factors."""
        factors = factor_names(trained_pairs(module, "HiLoRA"))
        return super().owned_names(module, layout) | {*factors}

    def setup_server(self) -> None:
        """Make the server's model, which is that of all clients in the root stage."""
        self.add_state("num_clusters", self.numbers[0])
        super().setup_server()
        self.add_centers(1)
        module, template = self.clients.module, self.clients.layout.template
        self.adapters = trained_pairs(module, "HiLoRA")
        factors = {*factor_names(self.adapters)}
        found = [second_names(module, module.get_submodule(f"{EXTRA}.{tier}")) for tier in _TIERS]
        self.tiers = [{own: one[own] for own in one if own in factors} for one in found]
        count = self.clients.num_clients
        noted = {pair.b: template[pair.b] for pair in self.adapters}
        if self.numbers == (1, 1):
            noted = {}
        size = count * sum(value.nbytes for value in noted.values())
        self.clients.check_memory("HiLoRA", {"factors B": size})
        directions = {name: b.new_zeros(count, *b.shape) for name, b in noted.items()}
        self.add_state("_directions", directions, on_cpu=True)  # until there are clusters
        self.add_state("_members", torch.empty(0, dtype=torch.long), on_cpu=True)
        self.add_state("stage", ROOT)
        self.add_state("rounds_of", [0, 0, 0])
        self.add_state("_start", {})
        self.add_state("_last", [])  # factors before the last round, by cluster
        self.add_state("_reached", torch.full((count,), -1), on_cpu=True)
        self.add_state("_found", torch.full((count,), -1), on_cpu=True)

    def on_state_loaded(self) -> None:
        """Make as many models as there are clusters."""
        self.resize(self.num_clusters)

    # Stages

    def round(self, cohort: Tensor) -> None:
        """Run one round, of the next stage if the last one is over."""
        while self.stage < LEAF and self._is_over() and self._end_stage():
            pass
        self.clients.log({"hilora/stage": float(self.stage)})
        before = self.assignments.clone()
        if self.num_clusters == 1:
            self.train_members(cohort)
        else:
            self.join_or_train(cohort)
        self.log_clusters(before)

    def _is_over(self) -> bool:
        """Return whether the stage ends before this round."""
        change = self._change()
        if math.isfinite(change):
            self.clients.log({"hilora/change": change})
        return self.rounds_of[self.stage] >= self.most_rounds[self.stage] or change <= self.tau

    def _change(self) -> float:
        """Return the relative change of the products in the last round; infinite if unknown."""
        moved = size = 0.0
        for before, now in zip(self._last, self._factors(), strict=False):
            if any(not torch.equal(before[name], now[name]) for name in before):
                for pair in self.adapters:
                    old = pair.product(before)
                    moved += float((pair.product(now) - old).norm()) ** 2
                    size += float(old.norm()) ** 2
        return math.sqrt(moved / size) if size else math.inf

    def _factors(self) -> Iterable[dict[str, Tensor]]:
        """Yield the factors of each server model."""
        names = factor_names(self.adapters)
        for index in range(len(self.server)):
            yield self.server.tensors(index, names)

    def _end_stage(self) -> bool:
        """Begin the next stage, unless clusters can't be found yet."""
        if self.stage == ROOT and not self._find_clusters():
            return False
        template, optimizer = self.clients.layout.template, self.server.optimizer
        for index in range(len(self.server)):
            tensors = self.server.tensors(index)
            tensors[_STAGE].fill_(self.stage + 1)
            if self.rounds_of[self.stage] == 0:
                continue
            for pair in self.adapters:
                for name in pair.names:
                    tensors[self.tiers[self.stage][name]].copy_(tensors[name])
                    tensors[name].copy_(template[name])
                tensors[zero_first(pair, template)[0]].zero_()
        if optimizer is not None:
            optimizer.state.clear()  # its momentum is that of the finished tier
        self.stage, self._last = self.stage + 1, []
        return True

    def _find_clusters(self) -> bool:
        """Cluster the clients of the root stage, and give each cluster a model."""
        if self.numbers == (1, 1):
            return True
        seen = (self.assignments >= 0).nonzero().flatten()
        if len(seen) < self.numbers[0]:
            rank_zero_info(
                f"round {self.clients.rounds}: the root stage of HiLoRA goes on, since only "
                f"{len(seen)} clients have answered"
            )
            return False
        bases = {name: subspaces(noted[seen]) for name, noted in self._directions.items()}
        table = torch.stack([subspace_distances(u, u) for u in bases.values()]).mean(dim=0)
        seed = derive_seed(Purpose.SERVER, self.clients.seed)
        clusters = spectral((table + table.T) / 2, *self.numbers, seed)
        sent = self.server.tensors(0, self.sent_names)
        self._start = {name: value.detach().clone() for name, value in sent.items()}
        count = int(clusters.max()) + 1
        self._directions, self._members = bases if count > 1 else {}, clusters
        while len(self.server) < count:
            self.server.copy(0)  # which the server optimizer steps from now on
        self.add_centers(count)
        assigned = torch.full_like(self.assignments, -1)
        assigned[seen] = clusters
        self.update_assignments(assigned)
        return True

    def nearest(self, states: TensorDict) -> Tensor:
        """Return the cluster with the smallest mean distance to each of the states ``[C]``."""
        parts = [
            subspace_distances(subspaces(states[name].cpu()), members)
            for name, members in self._directions.items()
        ]
        by_cluster = F.one_hot(self._members, self.num_clusters).double()
        mean = torch.stack(parts).mean(dim=0) @ (by_cluster / by_cluster.sum(dim=0))
        return mean.argmin(dim=1)

    # Rounds

    def train_members(self, clients: Tensor) -> None:
        """Run a round with these clients. In the leaf stage they send nothing."""
        self.on_round_start()
        returns = () if self.stage == LEAF else None
        for updates in self.clients.train(clients, self.broadcast, returns=returns):
            self.receive(updates)
        self.set_pseudo_gradients()

    def on_round_start(self) -> None:
        """Start a mean for each cluster."""
        super().on_round_start()
        self._noted: list[ClientUpdates] = []
        if self.stage < LEAF:
            self._last = [
                {name: value.detach().clone() for name, value in own.items()}
                for own in self._factors()
            ]

    def new_mean(self, groups: int = 1) -> ProductMean:
        """Return empty means of products, whose factors B are orthonormal."""
        sent = [self.server.tensors(k, self.sent_names) for k in range(groups)]
        return ProductMean(sent, self.adapters, split="left")

    def centers_of(self, clients: Tensor) -> Tensor:
        """Return each client's cluster, the first one while there is no other.

        Without data, newcomers have the cluster that they found when they were last judged.
        """
        if self.num_clusters == 1:
            return torch.zeros(len(clients), dtype=torch.long)
        if self.clients.data is None:
            known = torch.where(self.assignments < 0, self._found, self.assignments)[clients.cpu()]
            return torch.where(known < 0, self.weights.argmax(), known)
        return super().centers_of(clients)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep which clusters newcomers found, on all ranks, for when there is no data."""
        self._found = all_max(self.looked)

    on_test_epoch_end = on_validation_epoch_end

    def _finished(self, stage: int) -> list[str]:
        """Return the names of what clients are sent in a stage beside the model."""
        names = [name for tier in self.tiers[:stage] for name in tier.values()]
        return [_STAGE, *names] if stage > ROOT else []

    def _sent_as(self, center: int) -> dict[str, Tensor]:
        """Return a cluster's model with its finished tiers."""
        return self.server.tensors(center, [*self.sent_names, *self._finished(self.stage)])

    def receive(self, updates: ClientUpdates) -> None:
        """Add a chunk's models to the means of their clusters, and note the factors B."""
        clusters, clients = self.centers_of(updates.clients), updates.clients.cpu()
        if self.stage == LEAF:
            self._assigned[clients] = clusters
            return
        self.assign(updates, clusters)
        if self.stage == ROOT:
            self._noted.append(replace(updates, states=updates.states.select(*self.compared)))

    def set_pseudo_gradients(self) -> None:
        """Move each cluster's model to the mean of its members that answered."""
        answered = all_max(self._assigned) >= 0
        self._reached[answered] = self.stage
        self.rounds_of[self.stage] += 1
        if self.stage == LEAF:
            return
        if self.stage == ROOT and self._directions and answered.any():
            self._note_directions()
        super().set_pseudo_gradients()

    def _note_directions(self) -> None:
        """Add the factors B of this round to those of earlier participations."""
        clients, states = gather_states(self._noted, torch.device("cpu"))
        self._noted = []
        for name, noted in self._directions.items():
            before, b = noted[clients].flatten(1), states[name].flatten(1)
            new = F.normalize(b.to(noted), dim=1)
            first = ~before.any(dim=1, keepdim=True)
            mean = torch.where(first, new, self.ema * before + (1 - self.ema) * new)
            noted[clients] = mean.view(-1, *noted.shape[1:])

    def join(self, clients: Tensor) -> None:
        """Assign clients to clusters. They now have the root adapter."""
        super().join(clients)
        joined = self.assignments[clients.cpu()] >= 0
        self._reached[clients.cpu()[joined]] = CLUSTER

    def bytes_down(self, clients: Tensor, sent: TensorDict) -> int:
        """Return the bytes of what the clients ``[C]`` lack.

        Each finished adapter travels once to a client. The start of a stage is known.
        """
        factors = {*factor_names(self.adapters)}
        template = self.clients.layout.template
        adapter = sum(template[name].nbytes for name in factors)
        rest = sum(template[name].nbytes for name in self.sent_names if name not in factors)
        stage = int(sent[_STAGE][0]) if _STAGE in sent else ROOT
        reached = self._reached[clients.cpu()]
        root, cluster = (adapter * (count > 0) for count in self.rounds_of[:LEAF])
        new_root, new_leaf = int((reached < CLUSTER).sum()), int((reached < LEAF).sum())
        if stage == ROOT:
            return len(clients) * (adapter + rest)
        if stage == CLUSTER:
            return new_root * root + len(clients) * (cluster + rest)
        return new_root * root + new_leaf * (cluster + rest * bool(root or cluster))


METHODS = (
    Method(
        "HiLoRA",
        HiLoRA,
        "HiLoRA(num_clusters, root_rounds)",
        "adapters of all, of its cluster and its own",
        needs="adapters",
        manual=True,
        tested={
            "": {"num_clusters": 2, "root_rounds": 1, "cluster_rounds": 1},
            "clusters": {
                "min_clusters": 2,
                "root_rounds": 1,
                "tau": 0.0,
                "gamma_c": 1.0,
                "weighting": "uniform",
            },
            "leaf": {"num_clusters": 1, "root_rounds": 0, "cluster_rounds": 0},
        },
    ),
)

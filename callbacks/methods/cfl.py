"""CFL: a cluster of clients is split in two if their updates disagree."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pflight.options import NonNegativeFloat, NonNegativeInt, PositiveInt, checked
from pflight.randomness import Purpose, derive_seed
from pflight.runs.distributed import all_max, gather, owned
from pflight.states.state import expand_state, stack_states
from pflight.states.updates import ClientUpdates

from .clustering import Linkage, bipartition
from .gradients import check_losses
from .multi_center import MultiCenter
from .registry import Method


class Split(NamedTuple):
    """A node of the cluster tree: a cluster that was split into two."""

    round: int
    """Index of the round."""
    cluster: int
    """Index of the cluster; the first half keeps it."""
    new: int
    """Index of the second half."""
    state: dict[str, Tensor]
    """The cluster's model before the split, as sent to its clients, by name."""
    directions: Tensor
    """For each half, the mean of its members' updates scaled to length 1, ``[2, d]``."""


@checked
class CFL(MultiCenter):
    r"""Clustered federated learning (Sattler et al. 2021); CFL, FedCluster.

    All clients begin in one cluster. A round is FedAvg inside each cluster :math:`c`, with the
    updates :math:`\Delta_i = \theta_i - \theta_c` of the clients that answered. A cluster is split
    in two when its mean update is small although its clients' updates are not:

    .. math:: \| \sum_{i \in c} w_i \Delta_i \| < \varepsilon_1
        \quad\text{and}\quad \max_{i \in c} \|\Delta_i\| > \varepsilon_2

    with :math:`w_i` as in the mean. The two halves :math:`c_1, c_2` minimise the largest cosine of
    two updates between them,
    :math:`\min_{c_1, c_2} \max_{i \in c_1, j \in c_2} \cos(\Delta_i, \Delta_j)`. Single linkage
    finds them. Each half then takes the mean of its own members' updates. Norms and cosines are
    over parameters, not buffers.

    A cluster is tested when every member has sent an update since the last test. Missing updates
    don't count as zero. With partial participation the server therefore keeps an update of each
    client. A client that never answers prevents the split of its cluster.

    A client that was held out, or joins later, descends the tree of splits. At each split it trains
    from the model before the split. It goes to the half with the larger cosine between its own
    update and the mean update.

    Args:
        eps1: :math:`\varepsilon_1`; 0 never splits. This is FedAvg.
        eps2: :math:`\varepsilon_2`.
        gamma: Split only if :math:`\sqrt{(1 - \max\cos) / 2}` between the halves exceeds this; 0
            always splits.
        linkage: How the halves are found: ``"single"``, ``"complete"`` or ``"average"`` linkage of
            cosines, or ``"spectral"`` clustering.
        min_size: A cluster is split only if it has more members than this.
        warmup: Number of first rounds without tests. Their updates don't count.
        weighting: Weights of clients in the mean update, ``"uniform"`` or ``"samples"``.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.
        reassign: Whether the clients of a round choose their cluster anew, by the lowest loss of
            all clusters' models on their training samples. They are then sent all these models. It
            is for clients that move to another group. Not in the paper.

    Attributes:
        assignments: LongTensor ``[num_clients]``, each client's cluster; -1 for those that don't
            train.
        splits: The tree of splits, in the order of time.


    Example:
        >>> CFL(eps1=0.4, eps2=1.6).linkage
        'single'

    References:
        Sattler, Müller and Samek, Clustered Federated Learning: Model-Agnostic Distributed
        Multitask Optimization under Privacy Constraints, IEEE TNNLS 2021,
        https://arxiv.org/abs/1910.01991.
    """

    algorithm_name = "CFL"
    tag = "cfl"

    splits: list[Split]
    _changes: dict[int, Tensor]

    def __init__(
        self,
        eps1: NonNegativeFloat = 0.4,
        eps2: NonNegativeFloat = 1.6,
        gamma: NonNegativeFloat = 0.0,
        linkage: Linkage = "single",
        min_size: PositiveInt = 2,
        warmup: NonNegativeInt = 20,
        weighting: Literal["uniform", "samples"] = "uniform",
        buffers: Literal["shared", "local", "reset"] = "shared",
        *,
        reassign: bool = False,
    ) -> None:
        super().__init__(1, buffers=buffers, weighting=weighting)
        self.eps1, self.eps2, self.gamma = eps1, eps2, gamma
        self.linkage, self.min_size, self.warmup = linkage, min_size, warmup
        self.reassign = reassign

    def setup_server(self) -> None:
        """Make one model, for all clients that can train."""
        self.add_state("num_clusters", 1)
        super().setup_server()
        if self.reassign:
            check_losses(self.clients.module, "CFL with reassign=True")
        self.add_state("splits", [], kind=Split)
        self.add_state("_changes", {}, on_cpu=True)  # updates since the last test, by client
        self.assignments[self.clients.trainable] = 0

    def round(self, cohort: Tensor) -> None:
        """Run one round; clients that joined since the last one descend the tree first."""
        before, clients = self.assignments.clone(), cohort.cpu()
        able = torch.isin(clients, self.clients.trainable)
        late = clients[able & (self.assignments[clients] < 0)]
        if len(late):
            self.assignments[late] = self.descend_tree(late.to(cohort.device))
        if self.reassign and self.splits:
            self._choose_anew(cohort)
        super().round(cohort)
        if self.reassign:
            self.log_clusters(before)

    def _choose_anew(self, cohort: Tensor) -> None:
        """Put the clients of a round into the clusters whose models have the lowest loss."""
        mine, chosen = owned(cohort), torch.full_like(self.assignments, -1)
        if len(mine):
            for k in range(1, self.num_clusters):  # besides the one from which each will train
                sent = self.server.expand(k, self.sent_names, len(mine))
                self.clients.count_aside(mine, sent)
            chosen[mine.cpu()] = self.lowest_loss(mine)
        chosen = all_max(chosen)
        moved = (chosen >= 0) & (chosen != self.assignments)
        self.assignments[moved] = chosen[moved]
        for client in moved.nonzero().flatten().tolist():
            self._changes.pop(client, None)  # of another cluster's model

    def on_round_start(self) -> None:
        """Start a round without updates."""
        self._updates: list[ClientUpdates] = []
        self._arrived: dict[int, Tensor] = {}

    def centers_of(self, clients: Tensor) -> Tensor:
        """Return each client's cluster; newcomers descend the tree."""
        if not self.splits:
            return super().centers_of(clients)
        return self.found_by(clients, self.descend_tree)

    def receive(self, updates: ClientUpdates) -> None:
        """Keep a chunk's models and, after the warm-up, their changes."""
        self._updates.append(updates)
        if self.clients.rounds < self.warmup:
            return
        clients = updates.clients.cpu()
        clusters = self.assignments[clients]
        for k in clusters.unique().tolist():
            if (self.assignments == k).sum() > self.min_size:
                ours = clusters == k
                start = stack_states([self.server.tensors(k)])
                changes = self.vectors(updates.states[ours]) - self.vectors(start)
                kept = (change.clone() for change in changes.cpu())
                self._arrived.update(zip(clients[ours].tolist(), kept, strict=True))

    def set_pseudo_gradients(self) -> None:
        """Split clusters, then move each model to the mean of its members that answered."""
        for arrived in gather(self._arrived):
            self._changes |= arrived
        for cluster in range(self.num_clusters):
            self._test(cluster)
        super().on_round_start()
        for updates in self._updates:
            self.assign(updates, self.assignments[updates.clients.cpu()])
        self._updates.clear()
        super().set_pseudo_gradients()

    def descend_tree(self, clients: Tensor) -> Tensor:
        """Return the cluster of each newcomer ``[C]``, -1 if it has no training samples.

        A newcomer that fails to train goes to the first half.
        """
        clusters = torch.where(self.clients.num_samples[clients.cpu()] > 0, 0, -1)
        for split in self.splits:
            here = (clusters == split.cluster).nonzero().flatten()
            if not len(here):
                continue
            asked = clients[here.to(clients.device)]
            sent = expand_state(split.state, len(asked))
            tried = self.clients.train_aside(asked, sent, split.round)
            changes = F.normalize(self.vectors(tried.states) - self.vectors(sent[:1]))
            cosines = changes @ F.normalize(split.directions).to(changes).T
            follows = torch.isin(asked, tried.clients[cosines[:, 1] > cosines[:, 0]])
            clusters[here[follows.cpu()]] = split.new
        return clusters

    def _test(self, cluster: int) -> None:
        """Split a cluster if all its members have sent updates and these disagree."""
        members = (self.assignments == cluster).nonzero().flatten()
        if len(members) <= self.min_size or not self._changes.keys() >= set(members.tolist()):
            return
        changes = torch.stack([self._changes.pop(client) for client in members.tolist()])
        weights = self.client_weights(members).to(changes)
        mean = (weights / weights.sum() @ changes).norm().item()
        largest = changes.norm(dim=1).max().item()
        norms = {f"cfl/mean_norm_{cluster}": mean, f"cfl/max_norm_{cluster}": largest}
        self.clients.log(norms)
        if not (mean < self.eps1 and largest > self.eps2):
            return
        units = F.normalize(changes)
        cosines = (units @ units.T).clamp(-1, 1)
        seed = derive_seed(Purpose.SERVER, self.clients.seed)
        second = bipartition(cosines, self.linkage, seed)
        across = cosines[~second][:, second].max().item()
        if self.gamma and ((1 - across) / 2) ** 0.5 <= self.gamma:
            return
        directions = torch.stack([units[~second].mean(0), units[second].mean(0)])
        self._split(cluster, members[second], directions)

    def _split(self, cluster: int, leaving: Tensor, directions: Tensor) -> None:
        """Move the second half of a cluster to a new one, with a copy of the model."""
        new = self.num_clusters
        state = self.server.tensors(cluster, self.sent_names)
        state = {name: value.detach().clone() for name, value in state.items()}
        self.splits.append(Split(self.clients.rounds, cluster, new, state, directions))
        self.server.copy(cluster)
        self.assignments[leaving] = new
        self.num_clusters += 1

    def on_state_loaded(self) -> None:
        """Make as many models as there were clusters."""
        self.resize(self.num_clusters)


METHODS = (
    Method(
        "CFL",
        CFL,
        "CFL(eps1, eps2)",
        "its cluster's model",
        manual=True,
        tested={
            "": {},
            "splitting": {"eps1": 1e3, "eps2": 0, "min_size": 1, "warmup": 0},
            "reassign": {"eps1": 1e3, "eps2": 0, "min_size": 1, "warmup": 0, "reassign": True},
        },
    ),
)

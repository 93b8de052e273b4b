"""TrimmedKMeans: clusters by trimmed k-means, with trimmed means inside them."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from pflight.options import Interval, PositiveInt, checked
from pflight.randomness import Purpose, derive_seed
from pflight.server_callback import ServerCallback
from pflight.states.state import entries, expand_state
from pflight.states.updates import ClientUpdates

from .clustering import TrimmedMean, gather_states, nearest, trimmed_kmeans
from .multi_center import MultiCenter
from .registry import Method


@checked
class TrimmedKMeans(MultiCenter):
    r"""Federated learning with trimmed k-means, robust to outliers (Ghosh et al. 2019).

    It has three stages:

    1. In the first round all clients, not only the cohort, train for ``init_epochs`` epochs from
       the common initial model, and send their models once.
    2. The server clusters these models by
       :func:`~pflight.callbacks.methods.clustering.trimmed_kmeans`: Lloyd's algorithm with the
       trimmed mean or the median of a cluster's members as its center. Assignments are final.
    3. From then on clients train from their cluster's model. It becomes the trimmed mean or the
       median of its members that answered, coordinate by coordinate. The model of a cluster without
       such members stays unchanged. Floating-point buffers are averaged in the same way, integer
       buffers take their maximum.

    A client that missed the first round goes through stage 1 when it first answers. A held-out
    client does so when it is judged. Both are assigned to the nearest center of stage 2.

    With ``beta = cluster_beta = 0`` and one cluster this is FedAvg with uniform weights.

    Args:
        num_clusters: K.
        beta: Share that stage 3 leaves out at either end of a coordinate: ``floor(beta * m)`` of m
            values, but always less than half of them.
        cluster_beta: The same for stage 2.
        trim: ``"coordinate"``, or ``"radius"`` to leave out the ``floor(beta * m)`` models farthest
            from the median of all.
        estimate: ``"mean"`` or ``"median"`` of the rest.
        init_epochs: Local epochs of stage 1.
        num_restarts: Number of random starts of k-means.
        num_iterations: Maximum number of steps of k-means.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.

    Attributes:
        assignments: LongTensor ``[num_clients]``, each client's cluster; -1 if it has none yet.

    Raises:
        ConfigurationError: If an option is out of range, or there are more clusters than clients.

    Example:
        >>> TrimmedKMeans(num_clusters=2, estimate="median").beta
        0.2

    References:
        Ghosh, Hong, Yin and Ramchandran, Robust Federated Learning in a Heterogeneous Environment,
        2019, https://arxiv.org/abs/1906.06629.
    """

    algorithm_name = "TrimmedKMeans"
    tag = "trimmed_kmeans"
    aggregates = False

    _start: dict[str, Tensor]
    _centers: Tensor | None

    def __init__(
        self,
        num_clusters: PositiveInt = 3,
        beta: Annotated[float, Interval("[0, 0.5)")] = 0.2,
        cluster_beta: Annotated[float, Interval("[0, 0.5)")] = 0.05,
        trim: Literal["coordinate", "radius"] = "coordinate",
        estimate: Literal["mean", "median"] = "mean",
        init_epochs: PositiveInt = 10,
        num_restarts: PositiveInt = 20,
        num_iterations: PositiveInt = 8,
        buffers: Literal["shared", "local", "reset"] = "shared",
    ) -> None:
        super().__init__(num_clusters, buffers=buffers)
        self.beta = beta
        self.init_epochs = init_epochs
        self.num_restarts = num_restarts
        self.num_iterations = num_iterations
        self._cluster_mean = TrimmedMean(cluster_beta, trim, estimate)
        self._round_mean = TrimmedMean(beta, trim, estimate)

    def setup_server(self) -> None:
        """Make K models, equal until stage 2."""
        super().setup_server()
        self.add_state("_start", {})  # the common initial model
        self.add_state("_centers", None)  # centers of stage 2 [K, d]

    def round(self, cohort: Tensor) -> None:
        """Run one round. The first runs stages 1 and 2, with all clients."""
        before = self.assignments.clone()
        if self._centers is None:
            self._cluster()
        else:
            new = (self.assignments[cohort.cpu()] < 0).to(cohort.device)
            if new.any():
                clients, states = self._train_from_start(cohort[new])
                self._place(clients, self._nearest(states))
            if not new.all():
                ServerCallback.round(self, cohort[~new])
        self.log_clusters(before)

    def on_round_start(self) -> None:
        """Start a round without updates."""
        self._updates: list[ClientUpdates] = []

    def receive(self, updates: ClientUpdates) -> None:
        """Keep a chunk's models."""
        self._updates.append(updates)

    def set_pseudo_gradients(self) -> None:
        """Move each cluster's model to the trimmed mean of its members that answered."""
        clients, states = gather_states(self._updates, self.clients.device)
        self._updates.clear()
        for k, mean in self._means(self._round_mean, states, self.assignments[clients]).items():
            self.server.set_pseudo_gradient(k, mean)

    def centers_of(self, clients: Tensor) -> Tensor:
        """Return each client's cluster. Newcomers with samples find the nearest center."""
        if self._centers is None:
            return super().centers_of(clients)
        return self.found_by(clients, self._nearest_to)

    def _nearest_to(self, clients: Tensor) -> Tensor:
        """Return the center nearest to what each client ``[C]`` trains in stage 1, else -1."""
        sent = expand_state(self._start, len(clients))
        tried = self.clients.train_aside(clients, sent, round_index=0, epochs=self.init_epochs)
        clusters = torch.full((len(clients),), -1)
        if len(tried.clients):
            clusters[torch.isin(clients, tried.clients).cpu()] = self._nearest(tried.states)
        return clusters

    def _cluster(self) -> None:
        """Train all clients once from the common initial model, and cluster their models."""
        count = self.num_clusters
        start = self.server.tensors(0, self.sent_names)
        self._start = {name: value.detach().clone() for name, value in start.items()}
        clients, states = self._train_from_start(self.clients.trainable)
        if len(clients) < count:
            return  # too few answered: the next round tries again
        clusters, self._centers = trimmed_kmeans(
            self.vectors(states),
            count,
            self._cluster_mean,
            restarts=self.num_restarts,
            iterations=self.num_iterations,
            seed=derive_seed(Purpose.SERVER, self.clients.seed),
        )
        self._place(clients, clusters.cpu())
        means = self._means(self._cluster_mean, states, clusters.cpu())
        for k in range(count):
            # With fewer distinct models than clusters, an empty one repeats another's center.
            self.server.replace(k, means.get(k, means[min(means)]))

    def _train_from_start(self, clients: Tensor) -> tuple[Tensor, TensorDict]:
        """Return the clients that answered, on any rank, and their models of stage 1."""

        def send(asked: Tensor) -> TensorDict:
            return expand_state(self._start, len(asked))

        updates = list(self.clients.train(clients, send, epochs=self.init_epochs))
        return gather_states(updates, self.clients.device)

    def _place(self, clients: Tensor, clusters: Tensor) -> None:
        """Assign clients ``[M]`` to clusters ``[M]``, permanently."""
        assigned = torch.full_like(self.assignments, -1)
        assigned[clients] = clusters
        self.update_assignments(assigned)

    def _nearest(self, states: TensorDict) -> Tensor:
        """Return, for each model of stage 1 ``[M]``, the nearest center of stage 2."""
        assert self._centers is not None
        points = self.vectors(states)
        return nearest(points, self._centers.to(points)).cpu()

    def _means(
        self, mean: TrimmedMean, states: TensorDict, clusters: Tensor
    ) -> dict[int, dict[str, Tensor]]:
        """Return the trimmed mean of each cluster's states among the states ``[M]``."""
        means = {}
        for k in clusters.unique().tolist():
            members = states[clusters == k]
            if mean.trim == "radius":
                members = members[mean.near(self.vectors(members))]
            means[k] = {
                name: mean(leaf) if leaf.is_floating_point() else leaf.amax(dim=0)
                for name, leaf in entries(members)
            }
        return means


METHODS = (
    Method(
        "TrimmedKMeans",
        TrimmedKMeans,
        "TrimmedKMeans(num_clusters)",
        "its cluster's model",
        manual=True,
        tested={
            "": {"num_clusters": 2, "init_epochs": 2},
            "median": {
                "num_clusters": 2,
                "beta": 0.4,
                "init_epochs": 1,
                "trim": "radius",
                "estimate": "median",
                "buffers": "reset",
            },
        },
    ),
)

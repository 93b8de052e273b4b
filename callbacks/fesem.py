"""FeSEM: several server models, clients clustered by the distance of their weights."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from pflight.distributed import all_max, all_sum
from pflight.engines import ClientUpdates
from pflight.errors import ConfigurationError
from pflight.randomness import Purpose, derive_seed, generator
from pflight.state import WeightedMean, rows, squared_distance, stack_states

from .server import ServerCallback

if TYPE_CHECKING:
    from pflight.federation import Federation


class FeSEM(ServerCallback):
    r"""Multi-center federated learning by stochastic EM (Long et al. 2022, algorithm 1).

    The server keeps K models, the centers. Each client starts from the center it is assigned to;
    with the proximal client of ``scaling="eq7"`` it also stays near it (eq. 7). As an update
    :math:`W_i` arrives, the E-step assigns the client to the nearest center as sent,
    :math:`r_i = \arg\min_k \|W_i - C_k\|^2` over parameters (eq. 8); after the last one, the M-step
    sets each center to the plain mean of the members that answered (eq. 9). Centers without such
    members stay as they are. Updates stream: memory grows with K, not with the number of clients.

    The first round is the initialisation: up to ``init_clients`` clients train once from the common
    start, and k-means on their models, with ``num_restarts`` restarts of which the lowest inertia
    wins, gives the first centers; the sample's updates are kept until then. A client that has not
    trained yet is sent the mean of the centers, weighted by the samples of their members.

    Args:
        num_clusters: K, the number of server models.
        num_restarts: Random starts of k-means.
        init_clients: Clients of the seeded sample that trains in the first round; all if fewer.
        matching: How neurons are aligned before averaging; ``None`` averages them as they stand.
        centers: K states, as from ``federation.server_states()``, that replace the initialisation.
        buffers: As in :class:`ServerCallback`.

    Attributes:
        assignments: LongTensor ``[num_clients]``, each client's center; -1 if not yet seen.

    Raises:
        ConfigurationError: On more clusters than clients, or options out of range.
    """

    def __init__(
        self,
        num_clusters: int,
        num_restarts: int = 20,
        init_clients: int = 100,
        matching: None = None,
        centers: Sequence[Mapping[str, Any]] | None = None,
        buffers: Literal["shared", "local", "reset"] = "shared",
    ) -> None:
        super().__init__(buffers)
        for name, value in (("num_clusters", num_clusters), ("num_restarts", num_restarts)):
            if value < 1:
                raise ConfigurationError(f"FeSEM: {name} must be at least 1, got {value}")
        if init_clients < num_clusters:
            raise ConfigurationError(
                f"FeSEM: init_clients ({init_clients}) must not be below "
                f"num_clusters ({num_clusters})"
            )
        if matching is not None:
            raise ConfigurationError(f"FeSEM: unknown matching {matching!r}; choose null")
        if centers is not None and len(centers) != num_clusters:
            raise ConfigurationError(
                f"FeSEM: {len(centers)} centers were given for num_clusters={num_clusters}"
            )
        self.num_clusters = num_clusters
        self.num_restarts = num_restarts
        self.init_clients = init_clients
        self.centers = centers
        self.assignments = torch.empty(0, dtype=torch.long)
        self.initialized = centers is not None

    def setup_server(self, federation: Federation) -> None:
        """Make K models, equal until the first round unless ``centers`` were given."""
        super().setup_server(federation)
        if self.num_clusters > len(federation.trainable_clients):
            raise ConfigurationError(
                f"FeSEM: num_clusters ({self.num_clusters}) exceeds the number of clients that can "
                f"train ({len(federation.trainable_clients)})"
            )
        federation.server.add(self.num_clusters - 1)
        for index, center in enumerate(self.centers or ()):
            federation.server.replace(index, center)
        self.assignments = torch.full((federation.num_clients,), -1)
        self.weights = torch.zeros(self.num_clusters, dtype=torch.double)

    def round(self, cohort: Tensor) -> None:
        """Run one round; the first is the initialisation, with clients of its own."""
        if self.initialized:
            super().round(cohort)
        else:
            self._initialize()
        counts = torch.bincount(
            self.assignments[self.assignments >= 0], minlength=self.num_clusters
        )
        self.federation.log_round({f"fesem/size_{k}": float(n) for k, n in enumerate(counts)})
        self.federation.log_histogram("fesem/assignments", self.assignments)

    def begin(self) -> None:
        """Start empty means, one per center."""
        self.mean = WeightedMean(
            self.federation.server.tensors(0, self.sent_names), self.num_clusters
        )
        self._assigned = torch.full_like(self.assignments, -1)

    def broadcast(self, clients: Tensor) -> TensorDict:
        """Return each client's center, or the weighted mean of all centers if it has none yet."""
        federation = self.federation
        if self.num_clusters == 1 or not self.initialized:
            return federation.server.expand(0, self.sent_names, len(clients))
        centers = stack_states(
            federation.server.tensors(k, self.sent_names) for k in range(self.num_clusters)
        )
        index = self.assignments[clients.cpu()].to(centers[self.sent_names[0]].device)
        if (index >= 0).all():
            return centers[index]
        mean = WeightedMean(federation.server.tensors(0, self.sent_names))
        known = self.weights.sum() > 0
        mean.add(centers, self.weights if known else torch.ones_like(self.weights))
        return TensorDict.cat([centers, mean.compute()])[index]  # -1 is the last row, the mean

    def receive(self, updates: ClientUpdates) -> None:
        """E-step: assign each client to the nearest center as sent, and add it to its mean."""
        parameters = [n for n in self.federation.layout.parameters if n in self.sent_names]
        distances = [
            squared_distance(updates.states, self.federation.server.tensors(k, parameters))
            for k in range(self.num_clusters)
        ]
        nearest = torch.stack(distances, dim=1).argmin(dim=1)
        self._assign(updates, nearest)

    def step(self) -> None:
        """M-step: pull each center to the mean of its members that answered."""
        means = self._reduce()
        for k in self.mean.weights.nonzero().flatten().tolist():
            self.federation.server.pull(k, means[k])

    def _assign(self, updates: ClientUpdates, clusters: Tensor) -> None:
        self.mean.add(updates.states, torch.ones(len(clusters)), clusters)
        self._assigned[updates.clients.cpu()] = clusters.cpu()

    def _reduce(self) -> TensorDict:
        """Add up means and assignments over ranks; return the means."""
        self.mean.all_reduce()
        assigned = all_max(self._assigned)
        self.assignments = torch.where(assigned >= 0, assigned, self.assignments)
        known = self.assignments >= 0
        samples = self.federation.num_samples[known].double()
        self.weights = torch.zeros_like(self.weights).index_add_(
            0, self.assignments[known], samples
        )
        return self.mean.compute()

    def _initialize(self) -> None:
        """Train a sample of clients once and cluster their models by k-means."""
        federation = self.federation
        sample = federation.trainable_clients
        if len(sample) > self.init_clients:
            shuffle = generator(Purpose.SAMPLE, federation.seed)
            chosen = torch.randperm(len(sample), generator=shuffle)[: self.init_clients]
            sample = sample[chosen].sort().values
        updates = [
            federation.train_clients(clients, self.broadcast(clients))
            for clients in federation.chunks(sample)
        ]
        clusters = self._cluster(sample, updates)
        if clusters is None:
            return  # too few answered: the next round tries again
        self.begin()
        for update in updates:
            self._assign(update, clusters[torch.searchsorted(sample, update.clients.cpu())])
        means = self._reduce()
        filled = self.mean.weights > 0
        for k in range(self.num_clusters):
            # With fewer distinct models than clusters, an empty one repeats another's center.
            federation.server.replace(k, means[k if filled[k] else int(filled.long().argmax())])
        self.initialized = True

    def _cluster(self, sample: Tensor, updates: list[ClientUpdates]) -> Tensor | None:
        """Return the cluster of each client of the sample ``[M]``, -1 where it did not answer."""
        layout = self.federation.layout
        size = sum(layout.template[name].numel() for name in layout.parameters)
        points = torch.zeros(len(sample), size, dtype=torch.double)
        answered = torch.zeros(len(sample), dtype=torch.long)
        for update in updates:
            members = torch.searchsorted(sample, update.clients.cpu())
            leaves = [rows(update.states[name]) for name in layout.parameters]
            points[members] = torch.cat(leaves, dim=1).cpu().double()
            answered[members] = 1
        all_sum(points)
        present = all_sum(answered) > 0
        if present.sum() < self.num_clusters:
            return None
        clusters = torch.full((len(sample),), -1)
        clusters[present] = self._kmeans(points[present])
        return clusters

    def _kmeans(self, points: Tensor) -> Tensor:
        from sklearn.cluster import KMeans
        from sklearn.exceptions import ConvergenceWarning

        kmeans = KMeans(
            self.num_clusters,
            init="random",
            n_init=self.num_restarts,
            max_iter=300,
            tol=0.0,
            random_state=derive_seed(Purpose.SERVER, self.federation.seed) % 2**32,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # clients with equal models
            return torch.from_numpy(kmeans.fit_predict(points.numpy())).long()

    def state_dict(self) -> dict[str, Any]:
        """Return assignments and what belongs to them, for the checkpoint."""
        return {
            "assignments": self.assignments,
            "weights": self.weights,
            "initialized": self.initialized,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        self.assignments = state_dict["assignments"]
        self.weights = state_dict["weights"]
        self.initialized = state_dict["initialized"]

"""The base class of clustered methods: several server models, each for a cluster of clients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import lightning as L
import torch
from tensordict import TensorDict
from torch import Tensor

from pflight.errors import ConfigurationError
from pflight.models.classifier import as_classifier
from pflight.options import checked
from pflight.runs.distributed import all_max
from pflight.server_callback import ServerCallback
from pflight.states.state import WeightedMean, entries, expand_state, stack_states
from pflight.states.updates import ClientUpdates

from .chains import Chain, matched_chain
from .clustering import parameter_vectors
from .matching import BBPMAP, MatchedMean, State, align


@checked
class MultiCenter(ServerCallback):
    """The server callback of clustered methods: each client is in one of K clusters.

    The server has a model for each cluster, its center. A subclass assigns clients in
    :meth:`receive`, with :meth:`assign`. A round then sets each center to the mean of the clients
    assigned to its cluster in this round. A center without such clients stays unchanged. A client
    without a cluster is sent the mean of the centers, weighted by the samples of their members,
    unless a subclass overrides :meth:`centers_of`.

    Args:
        num_clusters: K; 0 if a subclass calls :meth:`add_centers` before the first round.
        matching: Options of matched averaging; ``None`` averages without matching neurons.
        buffers: As in :class:`ServerCallback`.
        centers: K states, as from ``federation.server_states()``, to start from; by default all
            are the client module's own.
        weighting: Weights of clients in the mean of their cluster, ``"uniform"`` or ``"samples"``.

    Attributes:
        assignments: LongTensor ``[num_clients]``, each client's cluster; -1 if it has none yet.

    Raises:
        ConfigurationError: On an unknown option, more clusters than clients, or a number of centers
            other than K.
    """

    aggregates, has_one_model = True, False

    tag: ClassVar[str]
    """Prefix of the tags under which it logs."""

    assignments: Tensor
    weights: Tensor
    looked: Tensor
    """The clusters that clients without one found since the last round, ``[num_clients]``."""

    def __init__(
        self,
        num_clusters: int,
        matching: BBPMAP | None = None,
        buffers: Literal["shared", "local", "reset"] = "shared",
        centers: Sequence[Mapping[str, Any]] | None = None,
        weighting: Literal["uniform", "samples"] = "uniform",
    ) -> None:
        super().__init__(buffers)
        if centers is not None and len(centers) != num_clusters:
            raise ConfigurationError(
                f"{type(self).__name__}: {len(centers)} centers were given for "
                f"num_clusters={num_clusters}"
            )
        if matching is not None and matching.grow:
            raise ConfigurationError(
                f"{type(self).__name__}: matching with grow=True makes centers wider than the "
                "clients' network, which can't start from them"
            )
        self.num_clusters = num_clusters
        self.matching = matching
        self.centers = centers
        self.weighting = weighting
        self.chain: Chain | None = None

    def setup_server(self) -> None:
        """Make K models, equal at first unless ``centers`` were given."""
        super().setup_server()
        clients = len(self.clients.trainable)
        if self.num_clusters > clients:
            raise ConfigurationError(
                f"{type(self).__name__}: num_clusters ({self.num_clusters}) exceeds the number of "
                f"clients that can train ({clients})"
            )
        if self.matching is not None:
            what = f"{type(self).__name__}: matching, which weighs the last layer by classes,"
            self.chain = matched_chain(as_classifier(self.clients.module, what), self.sent_names)
            try:
                _ = None if self.clients.data is None else self.clients.class_counts
            except ConfigurationError as error:
                raise ConfigurationError(f"{what} can't count them: {error}") from error
        self.add_state("assignments", torch.full((self.clients.num_clients,), -1), on_cpu=True)
        self.add_state("weights", torch.empty(0), on_cpu=True)
        self._looked_in = -1
        self.add_centers(self.num_clusters)
        for index, center in enumerate(self.centers or ()):
            self.server.replace(index, center)

    def add_centers(self, count: int) -> None:
        """Copy the first model until there are ``count`` of them, without members."""
        self.resize(count)
        self.num_clusters = count
        self.weights = torch.zeros(count, dtype=torch.double)

    def resize(self, count: int) -> None:
        """Set the number of models, at least one. Further models are copies of the first."""
        server = self.server
        del server[max(count, 1) :]
        server.extend(copy.deepcopy(server[0]) for _ in range(count - len(server)))

    def round(self, cohort: Tensor) -> None:
        """Run one round. Log the sizes of the clusters, and how many clients changed theirs."""
        before = self.assignments.clone()
        super().round(cohort)
        self.log_clusters(before)

    def log_clusters(self, before: Tensor) -> None:
        """Log the clusters' sizes, the assignments, and their agreement with known clusters.

        Args:
            before: The assignments before the round ``[num_clients]``, to count who moved.
        """
        moved = (before >= 0) & (before != self.assignments)
        self.clients.log({f"{self.tag}/moved": float(moved.sum())})
        known = self.assignments >= 0
        found = self.assignments[known]
        sizes = found.bincount(minlength=self.num_clusters).tolist()
        self.clients.log({f"{self.tag}/size_{k}": float(n) for k, n in enumerate(sizes)})
        if (true := self.clients.attached_data.clusters) is not None:
            from sklearn.metrics import adjusted_rand_score

            agreement = adjusted_rand_score(true[known], found)
            self.clients.log({f"{self.tag}/rand_index": float(agreement)})
        self.clients.current.histograms[f"{self.tag}/assignments"] = self.assignments

    def on_round_start(self) -> None:
        """Start a mean for each center."""
        groups = self.num_clusters
        self.mean: WeightedMean | MatchedMean
        if self.chain is None or self.matching is None:
            self.mean = self.new_mean(groups)
        else:
            counts = self.clients.class_counts
            keys = self.clients.seed, self.clients.rounds
            self.mean = MatchedMean(self.chain, counts, groups, self.matching, keys)
        self._assigned = torch.full_like(self.assignments, -1)

    def centers_of(self, clients: Tensor) -> Tensor:
        """Return the cluster of the center to send to each client ``[C]``; -1 for the mean."""
        return self.assignments[clients.cpu()]

    def found_by(self, clients: Tensor, find: Callable[[Tensor], Tensor]) -> Tensor:
        """Return each client's cluster ``[C]``. Those without one look for it.

        A client looks once between two rounds, and once in each evaluation. Clients without
        training samples don't.

        Args:
            clients: Ids ``[C]``.
            find: Returns the clusters of some clients, -1 for those that find none.
        """
        if vars(self).get("_looked_in") != self.clients.rounds:  # not in a checkpoint
            self._forget_found()
        clusters = self.assignments[clients.cpu()]
        clusters = torch.where(clusters < 0, self.looked[clients.cpu()], clusters)
        if (clusters >= 0).all():
            return clusters
        new = (clusters < 0) & (self.clients.num_samples[clients.cpu()] > 0)
        if new.any():
            asked = clients[new.to(clients.device)]
            clusters[new] = self.looked[asked.cpu()] = find(asked)
        return clusters

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let clients without a cluster look for it again: the data may be others."""
        self._forget_found()

    def _forget_found(self) -> None:
        self._looked_in = self.clients.rounds
        with torch.inference_mode(False):  # it outlives an evaluation
            self.looked = torch.full_like(self.assignments, -1)

    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start

    def lowest_loss(self, clients: Tensor) -> Tensor:
        """Return the center with the lowest loss on the training samples of each client ``[C]``.

        It is -1 for a client that has no samples or fails. On ties the lowest index is taken.
        """
        server, names = self.server, self.sent_names
        models = [server.expand(k, names, len(clients)) for k in range(self.num_clusters)]
        losses = self.clients.losses_of(clients, models).cpu()
        lowest = losses.nan_to_num(torch.inf, torch.inf).argmin(dim=0)
        return torch.where(losses.isnan().all(dim=0), -1, lowest)

    def broadcast(self, clients: Tensor) -> TensorDict:
        """Return each client's center, or the weighted mean of all if it has no cluster yet."""
        index = self.centers_of(clients).tolist()
        models = {k: self._sent_as(k) for k in set(index)}
        if len(models) == 1:
            return expand_state(models[index[0]], len(clients))
        return stack_states(models[k] for k in index)

    def broadcast_groups(self, clients: Tensor) -> Iterator[tuple[Tensor, TensorDict]]:
        """Split the clients ``[C]`` by their sent centers."""
        index = self.centers_of(clients).to(clients.device)
        for k in index.unique().tolist():
            group = clients[index == k]
            yield group, expand_state(self._sent_as(k), len(group))

    def _sent_as(self, center: int) -> State:
        """Return a center, or the weighted mean of all for -1."""
        server = self.server
        if center >= 0 or self.num_clusters <= 1:
            return server.tensors(max(center, 0), self.sent_names)
        centers = stack_states(server.tensors(k, self.sent_names) for k in range(self.num_clusters))
        mean = self.new_mean()
        weights = self.weights if self.weights.any() else torch.ones_like(self.weights)
        mean.add(self.align(centers, centers[0]), weights)
        return dict(entries(mean.compute()[0]))

    def align(self, states: TensorDict, center: State) -> TensorDict:
        """Return the states ``[C]``; with matching, their neurons are permuted to fit a center."""
        if self.chain is None or not len(states):
            return states
        return stack_states(align(state, center, self.chain) for state in states)

    def assign(self, updates: ClientUpdates, clusters: Tensor) -> None:
        """Assign the clients of a chunk to clusters ``[C]``, and add their models to the means."""
        if isinstance(self.mean, MatchedMean):
            self.mean.add(updates.states, updates.clients, clusters)
        else:
            self.mean.add(updates.states, self.client_weights(updates.clients), clusters)
        self._assigned[updates.clients.cpu()] = clusters.cpu()

    def vectors(self, states: TensorDict) -> Tensor:
        """Return the parameters of a stack of states ``[C]`` as vectors ``[C, d]``."""
        return parameter_vectors(states, self.shared_parameters)

    def client_weights(self, clients: Tensor) -> Tensor:
        """Return the weight of each of the clients ``[C]`` in the mean of its cluster."""
        if self.weighting == "samples":
            return self.clients.weights_of(clients)
        return torch.ones(len(clients))

    def set_pseudo_gradients(self) -> None:
        """Step each center to the mean of its members that answered."""
        for k, mean in self.means().items():
            self.server.set_pseudo_gradient(k, mean)

    def means(self) -> dict[int, TensorDict]:
        """Combine all ranks, and return the mean of each cluster with members in this round."""
        self.mean.all_reduce()
        self.update_assignments(self._assigned)
        means = self.mean.compute()
        filled = self.mean.weights.nonzero().flatten().tolist()
        return {k: means[k].to(self.clients.device) for k in filled}

    def update_assignments(self, assigned: Tensor) -> None:
        """Store the clusters assigned by all ranks ``[num_clients]``; -1 for no change."""
        assigned = all_max(assigned)
        self.assignments = torch.where(assigned >= 0, assigned, self.assignments)
        known = self.assignments >= 0
        samples = self.clients.weights_of(known.nonzero().flatten()).double()
        weights = torch.zeros(self.num_clusters, dtype=torch.double)
        self.weights = weights.index_add_(0, self.assignments[known], samples)

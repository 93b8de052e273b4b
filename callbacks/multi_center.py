"""Several server models, each of them the mean of the clients that are assigned to it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from pflight.distributed import all_max
from pflight.engines import ClientUpdates
from pflight.errors import ConfigurationError
from pflight.matching import BBPMAP, Chain, MatchedMean, State, align, matched_chain
from pflight.state import WeightedMean, stack_states

from .server import ServerCallback

if TYPE_CHECKING:
    from pflight.federation import Federation


class MultiCenter(ServerCallback):
    """The server half of clustered methods: K models, the centers, and a center for each client.

    A subclass assigns clients, in :meth:`receive`, with :meth:`assign`. A round then sets each
    center to the mean of the clients that were assigned to it in this round; a center without any
    stays as it is. A client that has not been assigned yet is sent the mean of the centers,
    weighted by the samples of their members.

    Args:
        num_clusters: K; 0 if a subclass calls :meth:`add_centers` before the first round.
        matching: Options of matched averaging; ``None`` averages neurons as they stand.
        buffers: As in :class:`ServerCallback`.

    Attributes:
        assignments: LongTensor ``[num_clients]``, each client's center; -1 if not yet seen.
    """

    tag: ClassVar[str]
    """Prefix of what is logged."""

    def __init__(
        self,
        num_clusters: int,
        matching: BBPMAP | None = None,
        buffers: Literal["shared", "local", "reset"] = "shared",
    ) -> None:
        super().__init__(buffers)
        if matching is not None and matching.grow:
            raise ConfigurationError(
                f"{type(self).__name__}: matching with grow=True makes centers wider than the "
                "clients' network"
            )
        self.num_clusters = num_clusters
        self.matching = matching
        self.chain: Chain | None = None
        self.assignments = torch.empty(0, dtype=torch.long)

    def setup_server(self, federation: Federation) -> None:
        """Make K models, equal at first."""
        super().setup_server(federation)
        clients = len(federation.trainable_clients)
        if self.num_clusters > clients:
            raise ConfigurationError(
                f"{type(self).__name__}: num_clusters ({self.num_clusters}) exceeds the number of "
                f"clients that can train ({clients})"
            )
        if self.matching is not None:
            self.chain = matched_chain(federation.client, self.sent_names)
        self.assignments = torch.full((federation.num_clients,), -1)
        self.add_centers(self.num_clusters)

    def add_centers(self, count: int) -> None:
        """Copy the first model until there are ``count`` of them."""
        server = self.federation.server
        server.extend(copy.deepcopy(server[0]) for _ in range(count - 1))
        self.num_clusters = count
        self.weights = torch.zeros(count, dtype=torch.double)

    def round(self, cohort: Tensor) -> None:
        """Run one round and log the sizes of the clusters."""
        super().round(cohort)
        self.log_sizes()

    def log_sizes(self) -> None:
        """Log how many clients each center has, and the assignments."""
        known = self.assignments[self.assignments >= 0]
        sizes = known.bincount(minlength=self.num_clusters).tolist()
        self.federation.log_round({f"{self.tag}/size_{k}": float(n) for k, n in enumerate(sizes)})
        self.federation.log_histogram(f"{self.tag}/assignments", self.assignments)

    def begin(self) -> None:
        """Start empty means, one per center."""
        federation, groups = self.federation, self.num_clusters
        self.mean: WeightedMean | MatchedMean
        if self.chain is None or self.matching is None:
            self.mean = WeightedMean(federation.server.tensors(0, self.sent_names), groups)
        else:
            counts = federation.attached_data.class_counts("train")
            keys = federation.seed, len(federation.history)
            self.mean = MatchedMean(self.chain, counts, groups, self.matching, keys)
        self._assigned = torch.full_like(self.assignments, -1)

    def broadcast(self, clients: Tensor) -> TensorDict:
        """Return each client's center, or the weighted mean of all centers if it has none yet."""
        server = self.federation.server
        if self.num_clusters <= 1:
            return server.expand(0, self.sent_names, len(clients))
        centers = stack_states(server.tensors(k, self.sent_names) for k in range(self.num_clusters))
        index = self.assignments[clients.cpu()].to(centers[self.sent_names[0]].device)
        if (index >= 0).all():
            return centers[index]
        mean = WeightedMean(server.tensors(0, self.sent_names))
        weights = self.weights if self.weights.any() else torch.ones_like(self.weights)
        mean.add(self.align(centers, centers[0]), weights)
        return TensorDict.cat([centers, mean.compute()])[index]  # -1 is the last row, the mean

    def align(self, states: TensorDict, center: State) -> TensorDict:
        """Return the states ``[C]``, with matching permuted to lie nearest to a center."""
        if self.chain is None:
            return states
        return stack_states(align(state, center, self.chain) for state in states)

    def assign(self, updates: ClientUpdates, clusters: Tensor) -> None:
        """Assign the clients of a chunk to clusters ``[C]``, and add their models to the means."""
        if isinstance(self.mean, MatchedMean):
            self.mean.add(updates.states, updates.clients, clusters)
        else:
            self.mean.add(updates.states, torch.ones(len(clusters)), clusters)
        self._assigned[updates.clients.cpu()] = clusters.cpu()

    def step(self) -> None:
        """Pull each center to the mean of its members that answered."""
        for k, mean in self.means().items():
            self.federation.server.pull(k, mean)

    def means(self) -> dict[int, TensorDict]:
        """Combine all ranks; return the mean of each center that has members in this round."""
        self.mean.all_reduce()
        assigned = all_max(self._assigned)
        self.assignments = torch.where(assigned >= 0, assigned, self.assignments)
        known = self.assignments >= 0
        samples = self.federation.num_samples[known].double()
        self.weights = torch.zeros_like(self.weights).index_add_(
            0, self.assignments[known], samples
        )
        means = self.mean.compute()
        filled = self.mean.weights.nonzero().flatten().tolist()
        return {k: means[k].to(self.federation.device) for k in filled}

    def state_dict(self) -> dict[str, Any]:
        """Return assignments and what belongs to them, for the checkpoint."""
        return {"assignments": self.assignments, "weights": self.weights}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        vars(self).update(state_dict)

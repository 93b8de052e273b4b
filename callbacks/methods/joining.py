"""The base class of clusters that are found once, by adapters; later clients join the nearest."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tensordict import TensorDict
from torch import Tensor

from pflight.adapters.pairs import Pair
from pflight.server_callback import ServerCallback
from pflight.states.state import expand_state
from pflight.states.updates import ClientUpdates

from .multi_center import MultiCenter


class Joining(MultiCenter):
    """Clusters of clients by their factors B, which are found once.

    A client that was not there then trains once from a common start when it first answers, and
    joins a cluster. A held-out client does so when it is judged. A client without training samples
    is judged by the model of the cluster with the most training samples. A subclass finds the
    clusters, and defines :meth:`nearest`.

    Attributes:
        adapters: The low-rank pairs.
        warmup_epochs: Local epochs of a client that joins; by default as in any other round.
    """

    adapters: list[Pair]
    _start: dict[str, Tensor]
    """What a client is sent that joins."""
    warmup_epochs: int | None = None

    def nearest(self, states: TensorDict) -> Tensor:
        """Return the cluster ``[C]`` for the factors B that joining clients ``[C]`` have sent."""
        raise NotImplementedError(f"{type(self).__name__} does not define nearest()")

    def join_or_train(self, cohort: Tensor) -> None:
        """Have the clients without a cluster join one, and run a round with all others."""
        new = (self.assignments[cohort.cpu()] < 0).to(cohort.device)
        if new.any():
            self.join(cohort[new])
        if not new.all():
            self.train_members(cohort[~new])

    def train_members(self, clients: Tensor) -> None:
        """Run a round with clients that have clusters."""
        ServerCallback.round(self, clients)

    def train_from_start(self, clients: Tensor, returns: Iterable[str]) -> list[ClientUpdates]:
        """Have clients train from the common start, and return what this rank's clients send."""

        def send(asked: Tensor) -> TensorDict:
            return expand_state(self._start, len(asked))

        return list(self.clients.train(clients, send, epochs=self.warmup_epochs, returns=returns))

    def join(self, clients: Tensor) -> None:
        """Assign clients to clusters by what they train from the common start."""
        assigned = torch.full_like(self.assignments, -1)
        for updates in self.train_from_start(clients, self.compared):
            assigned[updates.clients.cpu()] = self.nearest(updates.states)
        self.update_assignments(assigned)

    @property
    def compared(self) -> list[str]:
        """Names of the factors B, by which a client finds its cluster."""
        return [pair.b for pair in self.adapters]

    def centers_of(self, clients: Tensor) -> Tensor:
        """Return each client's cluster. Newcomers with samples train once to find theirs."""
        found = self.found_by(clients, self._nearest_to)
        return torch.where(found < 0, self.weights.argmax(), found)

    def _nearest_to(self, clients: Tensor) -> Tensor:
        """Return the cluster of what each client ``[C]`` trains from the start, -1 if it fails."""
        sent = expand_state(self._start, len(clients))
        tried = self.clients.train_aside(
            clients, sent, round_index=0, epochs=self.warmup_epochs, returns=self.compared
        )
        clusters = torch.full((len(clients),), -1)
        if len(tried.clients):
            clusters[torch.isin(clients, tried.clients).cpu()] = self.nearest(tried.states)
        return clusters

"""FeSEM: several server models, clients clustered by the distance of their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from tensordict import TensorDict
from torch import Tensor

from pflight.cohort import sample_clients
from pflight.data_module import FederatedDataModule
from pflight.errors import ConfigurationError
from pflight.federation import Federation
from pflight.models.halves.proximal import Proximal
from pflight.options import check_range, checked
from pflight.randomness import Purpose, derive_seed
from pflight.server_callback import ServerCallback
from pflight.state import squared_distance
from pflight.updates import ClientUpdates

from .clustering import cluster_updates
from .matching import BBPMAP
from .num_clusters import (
    CANDIDATES,
    ClusterSelection,
    Criterion,
    Selectable,
    check_candidates,
    select_by_trials,
    select_for,
)

Distance = Callable[[TensorDict, Mapping[str, Tensor]], Tensor]
"""Distances ``[C]`` of a stack ``[C]`` of states to a center, over the names of the center."""


@checked
class FeSEM(Selectable):
    r"""Multi-center federated learning by stochastic EM (Long et al. 2022, algorithm 1).

    The server keeps K models, the centers. Each client starts from the center it is assigned to;
    with ``mu`` it also stays near it (eq. 7). As an update
    :math:`W_i` arrives, the E-step assigns the client to the nearest center as sent,
    :math:`r_i = \arg\min_k \|W_i - C_k\|^2` over parameters (eq. 8); after the last one, the M-step
    sets each center to the plain mean of the members that answered (eq. 9). Centers without such
    members stay as they are. Updates stream: memory grows with K, not with the number of clients.

    The first round is the initialisation: up to ``init_clients`` clients train once from the common
    start, and k-means on their models, with ``num_restarts`` restarts of which the lowest inertia
    wins, gives the first centers; the sample's updates are kept until then. A client that has not
    trained yet is sent the mean of the centers, weighted by the samples of their members.

    With ``matching`` this is FeSEM-MA: the M-step is
    :func:`~pflight.callbacks.methods.matching.matched_mean` of the members, and the E-step takes
    distances after permuting the neurons of :math:`W_i` to each center's. The last layer is
    averaged by the members' training samples of each class. The network must be a chain of layers,
    as :func:`~pflight.callbacks.methods.chains.find_chain` takes it, and all updates of a round are
    kept until its end.

    Args:
        num_clusters: K, the number of server models; ``"auto"`` chooses it with
            :func:`select_num_clusters` before the first round, on ``init_clients`` clients.
        num_restarts: Random starts of k-means.
        init_clients: Clients of the seeded sample that trains in the first round; all if fewer.
        matching: How neurons are aligned: ``None`` takes them as they stand, ``"bbp_map"`` matches
            them, and a :class:`~pflight.callbacks.methods.matching.BBPMAP` does so with other
            options; not with ``grow``, as clients can't start from centers that are wider than
            their network.
        centers: K states, as from ``federation.server_states()``, that replace the initialisation.
        buffers: As in :class:`ServerCallback`.
        distance: Of the E-step: ``"l2"`` for :math:`\|W_i - C_k\|^2`, or a function of a stack of
            states ``[C]`` and a center that returns ``[C]``. The initialisation is k-means anyway.
        candidates: Numbers of clusters that ``"auto"`` tries.
        criterion: How ``"auto"`` chooses, by ``"accuracy"`` or by ``"distance"``.
        mu: The paper's :math:`\lambda`, by which clients are held to their center (eq. 7); by
            default 0, or what a :class:`~pflight.models.ProximalClient` says.
        scaling: Of the penalty, as in :class:`~pflight.models.halves.Proximal`.

    Attributes:
        assignments: LongTensor ``[num_clients]``, each client's center; -1 if not yet seen.
        selection: With ``"auto"``, what ``num_clusters`` was chosen from, a
            :class:`ClusterSelection`; ``num_clusters`` is 0 before.

    Raises:
        ConfigurationError: On more clusters than clients, options out of range, or a network that
            can't be matched.

    References:
        Long et al., Multi-Center Federated Learning: Clients Clustering for Better Personalization,
        World Wide Web 2023, https://arxiv.org/abs/2108.08647.
    """

    tag = "fesem"

    def __init__(
        self,
        num_clusters: int | Literal["auto"],
        num_restarts: int = 20,
        init_clients: int = 100,
        matching: Literal["bbp_map"] | BBPMAP | None = None,
        centers: Sequence[Mapping[str, Any]] | None = None,
        buffers: Literal["shared", "local", "reset"] = "shared",
        distance: Literal["l2"] | Distance = "l2",
        candidates: Sequence[int] = CANDIDATES,
        criterion: Criterion = "accuracy",
        *,
        mu: float | None = None,
        scaling: Literal["plain", "eq7"] = "eq7",
    ) -> None:
        check_candidates(candidates, criterion)
        counts = {} if num_clusters == "auto" else {"num_clusters": num_clusters}
        check_range(
            self, "[1, inf)", num_restarts=num_restarts, init_clients=init_clients, **counts
        )
        most = max(candidates) if num_clusters == "auto" else num_clusters
        if init_clients < most:
            raise ConfigurationError(
                f"FeSEM: init_clients ({init_clients}) must not be below num_clusters ({most})"
            )
        if centers is not None and num_clusters == "auto":
            raise ConfigurationError(
                f"FeSEM: {len(centers)} centers were given for num_clusters=auto"
            )
        super().__init__(
            0 if num_clusters == "auto" else num_clusters,
            BBPMAP() if matching == "bbp_map" else matching,
            buffers,
            centers,
        )
        self.num_restarts = num_restarts
        self.init_clients = init_clients
        self.distance = squared_distance if distance == "l2" else distance
        self.candidates = candidates
        self.criterion = criterion
        self.initialized = centers is not None
        self.selection: ClusterSelection | None = None
        if mu is not None:
            self.bring(Proximal, mu=mu, scaling=scaling)

    @property
    def algorithm_name(self) -> str:
        """FeSEM, or FeSEM-MA with ``matching``, and whether the number of clusters is chosen."""
        chosen = " (K chosen)" * (self._given.get("num_clusters") == "auto")
        return ("FeSEM" if self.matching is None else "FeSEM-MA") + chosen

    def on_before_configure_optimizers(self, trainer: L.Trainer) -> None:
        """Choose the number of clusters, unless it is known; until then there is one model."""
        if not self.num_clusters:
            self.selection = select_for(trainer, self)
            self.add_centers(self.selection.num_clusters)

    def round(self, cohort: Tensor) -> None:
        """Run one round; the first is the initialisation, with clients of its own."""
        if self.initialized:
            super().round(cohort)
        else:
            self._initialize()
            self.log_sizes()

    def receive(self, updates: ClientUpdates) -> None:
        """E-step: assign each client to the nearest center as sent, and add it to its mean."""
        distances = [self.distances(updates.states, k) for k in range(self.num_clusters)]
        self.assign(updates, torch.stack(distances, dim=1).argmin(dim=1))

    def distances(self, states: TensorDict, center: int) -> Tensor:
        """Return the distances ``[C]`` of states ``[C]`` to a center."""
        parameters = [n for n in self.clients.layout.parameters if n in self.sent_names]
        target = self.server.tensors(center, parameters)
        return self.distance(self.align(states, target), target)

    def _initialize(self) -> None:
        """Train a sample of clients once and cluster their models by k-means."""
        index = self.clients.current.entry.index
        seed = self.clients.seed + index  # others, where too few have answered
        sample = sample_clients(self.clients.trainable, self.init_clients, seed)
        send = partial(ServerCallback.broadcast, self)
        updates = list(self.clients.train(sample, send))
        clusters = cluster_updates(
            sample,
            updates,
            self.clients.layout,
            num_clusters=self.num_clusters,
            restarts=self.num_restarts,
            seed=derive_seed(Purpose.SERVER, self.clients.seed),
        )
        if clusters is None:
            rank_zero_warn(
                f"round {index} failed to find {self.num_clusters} centers: too "
                f"few of {len(sample)} clients answered; the next round tries others"
            )
            return
        self.on_round_start()
        for update in updates:
            self.assign(update, clusters[torch.searchsorted(sample, update.clients.cpu())])
        means = self.means()
        for k in range(self.num_clusters):
            # With fewer distinct models than clusters, an empty one repeats another's center.
            self.server.replace(k, means.get(k, means[min(means)]))
        self.initialized = True

    def state_dict(self) -> dict[str, Any]:
        """Return assignments and what belongs to them, for the checkpoint."""
        return {
            **super().state_dict(),
            "initialized": self.initialized,
            "num_clusters": self.num_clusters,
            "selection": self.selection and asdict(self.selection),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        if not self.num_clusters:
            self.add_centers(state_dict["num_clusters"])
        selection = state_dict["selection"] and ClusterSelection(**state_dict["selection"])
        super().load_state_dict({**state_dict, "selection": selection})


def select_num_clusters(
    federation: Federation,
    data: FederatedDataModule,
    candidates: Sequence[int] = CANDIDATES,
    criterion: Criterion = "accuracy",
    *,
    callback: Selectable | None = None,
    rounds: int = 3,
    **trainer: Any,
) -> ClusterSelection:
    """Try numbers of clusters for :class:`FeSEM` in short runs on the same sample of clients.

    Each candidate trains a new federation, with the client module, options and seed of the one
    given, on up to ``callback.init_clients`` clients, all of which take part in every round. They
    are judged on their validation samples or, where the sample has none, on a seeded fifth of
    their training samples, which is held out. ``"distance"`` also tries one cluster fewer than the
    first candidate, for its drop. The federation, and all random numbers, are left as they were.

    Args:
        federation: Whose number of clusters it is; it need not have been set up.
        data: The clients.
        candidates: Numbers of clusters; those above the number of clients are left out.
        criterion: ``"accuracy"`` or ``"distance"``, as in :class:`ClusterSelection`.
        callback: Gives the options of the algorithm other than the number of clusters.
        rounds: Length of each run, the initialisation included.
        **trainer: Arguments of the Trainers that run them, such as ``accelerator``.

    Raises:
        ConfigurationError: If no candidate is left, or the clients have too few samples to hold
            any out.

    Example:
        >>> import pflight
        >>> data = pflight.datamodules.ClusteredSynthetic(num_clusters=2, num_clients=8)
        >>> client = pflight.models.ClientModule(torch.nn.Linear(4, 10), num_classes=10)
        >>> federation = pflight.Federation(client, local_epochs=2)
        >>> selection = select_num_clusters(federation, data, (1, 2), accelerator="cpu")
        >>> sorted(selection.accuracy)
        [1, 2]
    """
    callback = FeSEM(1) if callback is None else callback
    return select_by_trials(federation, data, candidates, criterion, callback, rounds, **trainer)

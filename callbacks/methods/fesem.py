"""FeSEM: several server models, with clients clustered by distances of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from tensordict import TensorDict
from torch import Tensor

from pflight.adapters.distances import AdapterDistance, DistanceName
from pflight.adapters.pairs import plain_pairs
from pflight.data.cohort import sample_clients
from pflight.data.data_module import FederatedDataModule
from pflight.errors import ConfigurationError, described
from pflight.federation import Federation
from pflight.models.client_methods.proximal import Proximal
from pflight.options import Interval, PositiveInt, check_range, checked
from pflight.randomness import Purpose, derive_seed
from pflight.runs.distributed import all_max, all_sum
from pflight.server_callback import ServerCallback
from pflight.states.state import expand_state, squared_distance
from pflight.states.updates import ClientUpdates

from .clustering import cluster_updates, linked
from .gradients import check_losses
from .matching import BBPMAP
from .num_clusters import (
    CANDIDATES,
    ClusteredMethod,
    ClusterSelection,
    Criterion,
    check_candidates,
    choose_for,
    select_by_trials,
)
from .registry import Method

__all__ = ["FeSEM", "select_num_clusters"]

Distance = Callable[[TensorDict, Mapping[str, Tensor]], Tensor]
"""A function of a stack of states ``[C]`` and a center that returns their distances ``[C]``."""


@checked
class FeSEM(ClusteredMethod):
    r"""Multi-center federated learning by stochastic EM (Long et al. 2022, algorithm 1).

    The server keeps K models, the centers. Each client starts from the center of its cluster. With
    ``mu`` a penalty keeps it near the center (eq. 7). When an update :math:`W_i` arrives, the
    E-step assigns the client to the nearest sent center, :math:`r_i = \arg\min_k \|W_i - C_k\|^2`
    over parameters (eq. 8). At the end of the round, the M-step sets each center to the plain mean
    of its members that answered (eq. 9). A center without such members stays unchanged. Updates are
    streamed: memory grows with K, not with the number of clients. TensorBoard shows the mean
    distance of the round's clients to their centers as ``fesem/objective`` (eq. 6), and how many
    clients changed their cluster as ``fesem/moved``.

    The first round is the initialisation. Up to ``init_clients`` clients train once from the common
    initial model. K-means on their models gives the first centers: the best of ``num_restarts``
    starts by inertia. Their updates are kept until then. A client that has not trained yet trains
    first from the mean of the centers, weighted by the samples of their members. To judge it
    earlier, ``newcomers`` finds its center.

    With ``matching`` this is FeSEM-MA: the M-step is
    :func:`~pflight.callbacks.methods.matching.matched_mean` of the members, and the E-step takes
    distances after matching the neurons of :math:`W_i` to each center's. The last layer is averaged
    with weights by the members' training samples of each class. The network must be a chain of
    layers (see :func:`~pflight.callbacks.methods.chains.find_chain`), and all updates of a round
    are kept until its end.

    Args:
        num_clusters: K, the number of server models; ``"auto"`` chooses it with
            :func:`select_num_clusters` before the first round, on ``init_clients`` clients. Clients
            then start in the clusters that it found. If it chose one model by ``"held_out"``, the
            run is that of FedAvg: there is no initialisation, and clients weigh by their samples.
        num_restarts: Random starts of k-means.
        init_clients: Number of randomly drawn clients that train in the first round; all if fewer.
        matching: How neurons are aligned. ``None`` does not align them. ``"bbp_map"`` matches them.
            A :class:`~pflight.callbacks.methods.matching.BBPMAP` matches them with other options.
            Its ``grow`` is not allowed, since centers can't be wider than the clients' networks.
        centers: K states, as from ``federation.server_states()``, that replace the initialisation.
        buffers: As in :class:`ServerCallback`.
        distance: Distance in the E-step: ``"l2"`` for :math:`\|W_i - C_k\|^2`, or a function of a
            stack of states ``[C]`` and a center that returns ``[C]``. For low-rank adapters it can
            be the name of an :class:`~pflight.adapters.AdapterDistance`: ``"product"``,
            ``"subspace"`` or ``"cosine_B"``. The initialisation then merges the nearest groups of
            clients, by average linkage. Otherwise it uses k-means.
        candidates: Numbers of clusters from which ``"auto"`` chooses, by default 1 to 10 for
            ``"held_out"``, and 2 to 6 for the others.
        criterion: How ``"auto"`` chooses, as in :class:`ClusterSelection`: by ``"held_out"``,
            ``"distance"`` or ``"accuracy"``. The default is ``"held_out"``, or ``"distance"`` if
            the client module optimizes by hand.
        newcomers: How a client that has not trained finds the center by which it is judged.
            ``"loss"`` takes the center with the lowest loss on its training samples. ``"distance"``
            trains once from the mean of the centers, and takes the nearest center. ``"mean"`` takes
            the mean of the centers, as do clients without training samples. The default is
            ``"loss"``, or ``"distance"`` if the client module optimizes by hand. Without data, as
            after loading a checkpoint, a client keeps the center that it found when it was last
            judged.
        mu: The paper's :math:`\lambda`, the weight of the penalty (eq. 7); by default 0, or the
            value of a :class:`~pflight.models.ProximalClient`.
        scaling: Scaling of the penalty, as in :class:`~pflight.models.client_methods.Proximal`.
        reassign: For clients that move to another group. If a client's distance to the nearest
            center is over ``reassign`` times that of its last participation, it loses its cluster,
            and its update does not count. Until and in its next participation, it finds its center
            as ``newcomers`` do. ``None`` keeps all clusters. Not in the paper.

    Attributes:
        assignments: LongTensor ``[num_clients]``, each client's cluster; -1 if it has none yet.
        selection: With ``"auto"``, the :class:`ClusterSelection` that gave ``num_clusters``. Until
            then ``num_clusters`` is 0.

    Raises:
        ConfigurationError: On more clusters than clients, options out of range, or a network that
            can't be matched.

    References:
        Long et al., Multi-Center Federated Learning: Clients Clustering for Better Personalization,
        World Wide Web 2023, https://arxiv.org/abs/2108.08647.
    """

    tag = "fesem"

    initialized: bool
    last_distances: Tensor
    selection: ClusterSelection | None

    def __init__(
        self,
        num_clusters: int | Literal["auto"],
        num_restarts: PositiveInt = 20,
        init_clients: PositiveInt = 100,
        matching: Literal["bbp_map"] | BBPMAP | None = None,
        centers: Sequence[Mapping[str, Any]] | None = None,
        buffers: Literal["shared", "local", "reset"] = "shared",
        distance: Literal["l2"] | DistanceName | Distance = "l2",
        candidates: Sequence[int] | None = None,
        criterion: Criterion | None = None,
        newcomers: Literal["loss", "distance", "mean"] | None = None,
        *,
        mu: float | None = None,
        scaling: Literal["plain", "eq7"] = "eq7",
        reassign: Annotated[float, Interval("(1, inf)")] | None = None,
    ) -> None:
        check_candidates(candidates, criterion)
        counts = {} if num_clusters == "auto" else {"num_clusters": num_clusters}
        check_range(self, "[1, inf)", **counts)
        allowed = CANDIDATES[criterion or "held_out"] if candidates is None else candidates
        most = max(allowed) if num_clusters == "auto" else num_clusters
        if init_clients < most:
            raise ConfigurationError(
                f"FeSEM: init_clients ({init_clients}) must be at least num_clusters ({most})"
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
        self.distance: Distance = squared_distance if isinstance(distance, str) else distance
        self.adapter_distance = None if distance == "l2" or callable(distance) else distance
        self.candidates = candidates
        self.criterion = criterion
        self.newcomers = newcomers
        self.reassign = reassign
        self.automatic = num_clusters == "auto"
        self.start: Mapping[int, int] = {}
        self.one_model = False
        if mu is not None:
            self.use_client_method(Proximal, mu=mu, scaling=scaling)

    @property
    def algorithm_name(self) -> str:
        """FeSEM, or FeSEM-MA with ``matching``, and whether the number of clusters is chosen."""
        chosen = " (K chosen)" * self.automatic
        return ("FeSEM" if self.matching is None else "FeSEM-MA") + chosen

    def setup_server(self) -> None:
        """Make the centers, or one model if their number is to be chosen."""
        self.add_state("num_clusters", 0 if self.automatic else self.num_clusters)
        super().setup_server()
        if self.adapter_distance is not None:
            self.distance = self._of_adapters(self.adapter_distance)
        with torch.no_grad():  # a distance of one's own may be wrong
            self.distances(self.server.expand(0, self.sent_names, 2), 0)
        self.add_state("one_model", self.one_model and not self.automatic)
        self.add_state("initialized", self.centers is not None or self.one_model)
        self.add_state("found", torch.full_like(self.assignments, -1), on_cpu=True)
        if self.reassign is not None:
            unknown = torch.full_like(self.assignments, -1, dtype=torch.double)
            self.add_state("last_distances", unknown, on_cpu=True)
        if self.newcomers == "loss":
            check_losses(self.clients.module, "FeSEM with newcomers='loss'")
        self.add_state("selection", None, kind=ClusterSelection)

    def on_before_configure_optimizers(self, trainer: L.Trainer) -> None:
        """Choose an unknown number of clusters, and make as many models."""
        if not self.num_clusters:
            self.selection = choose_for(trainer, self)
            chosen = self.selection.num_clusters
            self.add_centers(chosen)
            self.one_model = self.selection.criterion == "held_out" and chosen == 1
            self.initialized = self.one_model

    def round(self, cohort: Tensor) -> None:
        """Run one round. The first is the initialisation, with its own clients."""
        if self.initialized:
            super().round(cohort)
        else:
            before = self.assignments.clone()
            self._initialize()
            self.log_clusters(before)
        total, count = all_sum(self._distances).tolist()
        if count:
            self.clients.log({"fesem/objective": total / count})

    def centers_of(self, clients: Tensor) -> Tensor:
        """Return each client's center, -1 for the mean. Between rounds, newcomers find theirs."""
        if self.one_model:
            return torch.zeros(len(clients), dtype=torch.long)
        centers = super().centers_of(clients)
        if not self.initialized or self.newcomers == "mean":
            return centers
        if self.clients.current.goes_on:
            new = centers < 0
            if self.reassign is not None and new.any():
                centers[new] = self._find(clients[new.to(clients.device)])
            return centers
        if self.clients.data is None:
            return torch.where(centers < 0, self.found[clients.cpu()], centers)
        return self.found_by(clients, self._find)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep which centers newcomers found, on all ranks, for when there is no data."""
        self.found = all_max(self.looked)

    on_test_epoch_end = on_validation_epoch_end

    def _find(self, clients: Tensor) -> Tensor:
        """Return the center that each client ``[C]`` finds, -1 if none."""
        by_loss = self.newcomers is None and self.clients.module.automatic_optimization
        by_loss |= self.newcomers == "loss"
        return self._fitting(clients) if by_loss else self._nearest(clients)

    def _fitting(self, clients: Tensor) -> Tensor:
        """Return the center with the lowest training loss of each client ``[C]``, -1 if none."""
        for k in range(self.num_clusters):
            self.clients.count_aside(clients, self.server.expand(k, self.sent_names, len(clients)))
        return self.lowest_loss(clients)

    def _nearest(self, clients: Tensor) -> Tensor:
        """Return the center nearest to each client ``[C]`` that trained from the mean, else -1."""
        sent = expand_state(self._sent_as(-1), len(clients))
        tried = self.clients.train_aside(clients, sent)
        centers = torch.full((len(clients),), -1)
        if len(tried.clients):
            _, found = self._to_nearest(tried)
            centers[torch.isin(clients, tried.clients).cpu()] = found.cpu()
        return centers

    def on_round_start(self) -> None:
        """Start a mean for each center, and the sum of the distances."""
        super().on_round_start()
        self._distances = torch.zeros(2, dtype=torch.double)  # their sum, and how many
        self._measured = torch.full_like(self.assignments, -1, dtype=torch.double)

    def receive(self, updates: ClientUpdates) -> None:
        """E-step: assign each client to the nearest sent center, and add it to the mean."""
        smallest, clusters = self._to_nearest(updates)
        self._add_distances(smallest)
        if self.reassign is not None and not self.one_model:
            stays = ~self._left(updates.clients, smallest)
            updates, clusters = updates.where(stays), clusters[stays]
        self.assign(updates, clusters)

    def client_weights(self, clients: Tensor) -> Tensor:
        """Return the weights of clients ``[C]``: equal (eq. 9), or by samples for one model."""
        if self.one_model:
            return self.clients.weights_of(clients)
        return super().client_weights(clients)

    def _left(self, clients: Tensor, smallest: Tensor) -> Tensor:
        """Return a mask ``[C]`` of the clients that have left their cluster, by their distances."""
        ids, distances = clients.cpu(), smallest.double().cpu()
        last = self.last_distances[ids]
        left = (last >= 0) & (distances > (self.reassign or 1) * last)
        self._measured[ids] = torch.where(left, torch.inf, distances)
        return left.to(clients.device)

    def update_assignments(self, assigned: Tensor) -> None:
        """Store the clusters assigned by all ranks, and forget those of clients that left."""
        if self.reassign is not None:
            measured = all_max(self._measured)
            left, known = measured.isinf(), measured.isfinite() & (measured >= 0)
            self.last_distances[known] = measured[known]
            self.last_distances[left] = -1
            self.assignments[left] = -1
        super().update_assignments(assigned)

    def _add_distances(self, smallest: Tensor) -> None:
        """Add the clients' distances ``[C]`` to the objective."""
        self._distances += torch.tensor([float(smallest.double().sum()), len(smallest)])

    def _to_nearest(self, updates: ClientUpdates) -> tuple[Tensor, Tensor]:
        """Return the distance of each update to its nearest center ``[C]``, and which that is."""
        distances = [self.distances(updates.states, k) for k in range(self.num_clusters)]
        table = torch.stack(distances, dim=1)
        if table.isnan().any():
            raise ConfigurationError("FeSEM: distance gave NaN, by which no center is nearest")
        clusters = table.argmin(dim=1)  # the lowest index on ties
        return table[torch.arange(len(table)), clusters], clusters

    def distances(self, states: TensorDict, center: int) -> Tensor:
        """Return the distances ``[C]`` of states ``[C]`` to a center."""
        target = self.server.tensors(center, self.shared_parameters)
        try:
            found = self.distance(self.align(states, target), target)
        except Exception as error:
            if self.distance is squared_distance:
                raise
            raise ConfigurationError(f"FeSEM: distance failed: {described(error)}") from error
        if not isinstance(found, Tensor) or found.shape != states.batch_size:
            shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ConfigurationError(
                f"FeSEM: distance must return a number for each of {len(states)} clients, "
                f"got {shape}"
            )
        return found

    def _of_adapters(self, name: DistanceName) -> AdapterDistance:
        """Return a distance of adapters.

        Raises:
            ConfigurationError: If the module has none, or a factor does not travel.
        """
        owner = f"FeSEM with distance={name!r}"
        pairs, sent = plain_pairs(self.clients.module, owner), {*self.sent_names}
        for pair in pairs:
            needed = pair.names if name == "product" else (pair.b,)
            if missing := [entry for entry in needed if entry not in sent]:
                raise ConfigurationError(f"{owner}: {missing[0]!r} does not travel")
        return AdapterDistance(name, pairs)

    def _initialize(self) -> None:
        """Train a sample of clients once and cluster their models by k-means, if need be."""
        self._distances = torch.zeros(2, dtype=torch.double)
        index = self.clients.current.entry.index
        seed = self.clients.seed + index  # a new sample after a round with too few answers
        start = self.start if self.selection is None else self.selection.clusters
        sample = sample_clients(self.clients.trainable, self.init_clients, seed)
        sample = torch.tensor(sorted(start)) if start else sample
        send = partial(ServerCallback.broadcast, self)
        updates = list(self.clients.train(sample, send))
        clusters: Tensor | None
        if start:
            answers = all_sum(torch.tensor(sum(len(update.clients) for update in updates)))
            clusters = torch.tensor([start[i] for i in sample.tolist()]) if answers else None
        elif isinstance(self.distance, AdapterDistance):
            device = self.clients.device
            clusters = linked(sample, updates, self.distance, self.num_clusters, device)
        else:
            clusters = cluster_updates(
                sample,
                updates,
                self.server.tensors(0, self.shared_parameters),
                num_clusters=self.num_clusters,
                restarts=self.num_restarts,
                seed=derive_seed(Purpose.SERVER, self.clients.seed),
            )
        if clusters is None:
            rank_zero_warn(
                f"round {index}: FeSEM failed to find {self.num_clusters} centers, since too few "
                f"of {len(sample)} clients answered; the next round tries other clients"
            )
            return
        self.on_round_start()
        if start:  # also those that did not answer
            self._assigned[sample] = clusters
        for update in updates:
            self.assign(update, clusters[torch.searchsorted(sample, update.clients.cpu())])
        means = self.means()
        for k in range(self.num_clusters):
            # With fewer distinct models than clusters, an empty one repeats another's center.
            self.server.replace(k, means.get(k, means[min(means)]))
        self.initialized = True
        for update in updates:
            self._add_distances(self._to_nearest(update)[0])

    def on_state_loaded(self) -> None:
        """Make the chosen number of models."""
        if self.automatic:
            self.resize(self.num_clusters)


def select_num_clusters(
    federation: Federation,
    data: FederatedDataModule,
    candidates: Sequence[int] | None = None,
    criterion: Criterion | None = None,
    *,
    callback: ClusteredMethod | None = None,
    rounds: int | None = None,
    **trainer: Any,
) -> ClusterSelection:
    """Compare numbers of clusters for :class:`FeSEM` in short runs on the same sample of clients.

    For each number a new federation is trained, with the client module, options and seed of the
    given one. It has up to ``callback.init_clients`` clients. All of them take part in every round.
    They are judged on their validation samples. If none has any, a random fifth of the training
    samples is held out instead. The given federation and the global random generators are not
    changed. The traffic of all runs is logged.

    ``"held_out"`` first trains one model for all, as FedAvg does. The clients' models of its first
    round are clustered by Ward's method, and once more their directions from the mean. Each
    proposes the candidate, 2 or more, after which the height of the merges rises most. The one or
    two proposals are trained, too. :class:`ClusterSelection` says if they pay. ``"distance"`` and
    ``"accuracy"`` train each candidate. ``"distance"`` also tries one cluster fewer than the
    smallest candidate, to see how the distance falls.

    Args:
        federation: The federation to choose for; it need not have been set up.
        data: The data of its clients.
        candidates: Numbers of clusters; those above the number of clients are left out. The
            default is as in :class:`FeSEM`.
        criterion: As in :class:`FeSEM`.
        callback: Gives the other options of the algorithm.
        rounds: Number of rounds of each run, including the first; by default 10 for ``"held_out"``,
            else 3.
        **trainer: Arguments of the Trainers, such as ``accelerator``.

    Raises:
        ConfigurationError: If no candidate is left, or the clients have too few samples to hold
            some out. With ``"held_out"``, if the client module optimizes by hand.

    Example:
        >>> import pflight
        >>> data = pflight.datamodules.ClusteredSynthetic(num_clusters=2, num_clients=8)
        >>> client = pflight.models.Classifier(torch.nn.Linear(4, 10), num_classes=10)
        >>> federation = pflight.Federation(client, local_epochs=2)
        >>> selection = select_num_clusters(federation, data, (1, 2), accelerator="cpu")
        >>> sorted(selection.accuracy)
        [1, 2]
    """
    callback = FeSEM(1) if callback is None else callback
    return select_by_trials(federation, data, candidates, criterion, callback, rounds, **trainer)


METHODS = (
    Method(
        "FeSEM",
        FeSEM,
        "FeSEM(num_clusters, mu=0.1)",
        "its cluster's model",
        manual=True,
        tested={
            "": {"num_clusters": 2, "mu": 0.1},
            "auto": {
                "num_clusters": "auto",
                "candidates": (1, 2),
                "criterion": "held_out",
                "mu": 0.1,
            },
            "reassign": {"num_clusters": 2, "reassign": 1.01},
        },
    ),
    Method(
        "FeSEM-MA",
        FeSEM,
        'FeSEM(num_clusters, mu=0.1, matching="bbp_map")',
        "its cluster's model",
        manual=True,
        tested={"": {"num_clusters": 2, "matching": "bbp_map", "mu": 0.1}},
    ),
)

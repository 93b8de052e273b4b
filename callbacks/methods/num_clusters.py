"""Choose the number of clusters by short runs on a sample of the clients."""

from __future__ import annotations

import copy
import logging
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, get_args

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from tensordict import TensorDict
from torch import Tensor

from pflight.data.cohort import sample_clients
from pflight.data.data_module import FederatedDataModule
from pflight.data.loaders import SPLITS, Split
from pflight.data.wrapped import EVERYBODY, WrappedData
from pflight.errors import ConfigurationError
from pflight.federation import Federation
from pflight.models.classifier import as_classifier
from pflight.options import whole
from pflight.randomness import Purpose, generator, isolated
from pflight.runs.distributed import all_sum, gather, owned
from pflight.states.state import stack_states
from pflight.states.updates import ClientUpdates

from .clustering import proposed_clusters, sent_points
from .gradients import check_losses
from .multi_center import MultiCenter

__all__ = ["ClusterSelection"]

Criterion = Literal["held_out", "distance", "accuracy"]
_FEW = (2, 3, 4, 5, 6)
CANDIDATES: Mapping[str, Sequence[int]] = {
    "held_out": tuple(range(1, 11)),
    "distance": _FEW,
    "accuracy": _FEW,
}
"""The numbers of clusters to choose from by default, by criterion."""
ROUNDS: Mapping[str, int] = {"held_out": 10, "distance": 3, "accuracy": 3}
"""The rounds of a trial run by default, by criterion."""
LEVEL = 0.01
"""Clusters pay if the test of the held-out losses has a smaller p-value."""
MORE_LEVEL = 0.05
"""More clusters than the fewest proposed pay if their test against these has a smaller one."""

_log = logging.getLogger("lightning.pytorch.pflight")  # Lightning's handler shows it


@dataclass(frozen=True)
class ClusterSelection:
    """The results of trial runs with several numbers of clusters, and the best number.

    Attributes:
        criterion: ``"held_out"`` compares numbers by one-sided paired t-tests of the clients'
            losses. Among 2 or more clusters it takes the fewest, and more only if their losses are
            lower with p < 0.05. It takes 1 unless, compared to one model, the losses of that number
            are lower with p < 0.01, and its accuracy is not lower.
            ``"distance"`` takes the number with the largest relative fall of the distance from the
            next smaller number. ``"accuracy"`` takes the number with the highest accuracy.
            The smaller number wins a tie.
        accuracy: Macro accuracy on validation samples, by number of clusters. It is NaN if clients
            are not classifiers.
        distance: Mean distance of a client's trained model to its center, by number of clusters.
        losses: With ``"held_out"``, each client's mean loss on validation samples, by number of
            clusters. It is NaN for a client without such samples, or that failed.
        clusters: With ``"held_out"``, the cluster of each client that took part, by client, in
            which the clusters of the chosen number start. It is empty for one cluster.

    Example:
        >>> selection = ClusterSelection("distance", {1: 0.6, 2: 0.9, 3: 0.8}, {1: 8, 2: 2, 3: 1})
        >>> selection.num_clusters
        2
        >>> losses = {1: [1.9, 2.1, 2.0, 2.2], 2: [1.2, 1.1, 1.3, 1.3]}
        >>> ClusterSelection("held_out", {1: 0.6, 2: 0.9}, {1: 8, 2: 2}, losses).num_clusters
        2
    """

    criterion: Criterion
    accuracy: dict[int, float]
    distance: dict[int, float]
    losses: dict[int, list[float]] = field(default_factory=dict)
    clusters: dict[int, int] = field(default_factory=dict)

    @property
    def num_clusters(self) -> int:
        """The best number of clusters."""
        if self.criterion == "held_out":
            best, *others = sorted(self.losses.keys() - {1}) or [1]
            for more in others:
                if self.p_value(more, best) < MORE_LEVEL:
                    best = more
            return best if 1 not in self.losses or self.pays(best) else 1
        if self.criterion == "accuracy" or len(self.distance) == 1:
            return max(sorted(self.accuracy), key=self.accuracy.__getitem__)
        drops = {
            k: 1 - self.distance[k] / self.distance[fewer] if self.distance[fewer] else 0.0
            for fewer, k in pairwise(sorted(self.distance))
        }
        return max(drops, key=drops.__getitem__)

    def mean_loss(self, number: int) -> float:
        """Return the mean held-out loss over clients; infinity if no client has one."""
        return float(torch.tensor(self.losses[number]).nanmean().nan_to_num(torch.inf))

    def p_value(self, number: int, fewer: int = 1) -> float:
        """Return the p-value of the test that clients' losses are lower than with fewer clusters.

        It is NaN if fewer than two clients have losses, or none differs.
        """
        from scipy.stats import ttest_rel

        pairs = torch.tensor([self.losses[fewer], self.losses[number]], dtype=torch.double)
        pairs = pairs[:, pairs.isfinite().all(dim=0)]
        if pairs.shape[1] < 2:
            return float("nan")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # equal differences
            return float(ttest_rel(*pairs.numpy(), alternative="greater").pvalue)

    def pays(self, number: int) -> bool:
        """Return whether this number of clusters is better than one model."""
        worse = self.accuracy[number] < self.accuracy[1]
        return number > 1 and self.p_value(number) < LEVEL and not worse

    @property
    def table(self) -> str:
        """All results as a table in Markdown."""
        held_out = bool(self.losses)
        head = "| num_clusters | val/macro_acc | distance |" + " loss | p |" * held_out
        lines = [head, "|---|---|---|" + "---|---|" * held_out]
        for k, accuracy in self.accuracy.items():
            chosen = " (chosen)" * (k == self.num_clusters)
            line = f"| {k}{chosen} | {accuracy:.4f} | {self.distance[k]:.4g} |"
            if held_out:
                p = f"{self.p_value(k):.2g}" if k > 1 and 1 in self.losses else ""
                line += f" {self.mean_loss(k):.4f} | {p} |"
            lines.append(line)
        return "\n".join(lines)


class ClusteredMethod(MultiCenter):
    """A clustered method that can choose its number of clusters by trial runs.

    Attributes:
        init_clients: Maximum number of clients in a trial run.
        centers: K states to start from, or ``None``.
        automatic: Whether to choose the number of clusters.
        candidates: Numbers of clusters to choose from, or ``None`` for those of the criterion.
        criterion: How to choose, as in :class:`ClusterSelection`, or ``None`` for the default.
        start: Clusters to start from, by client; empty if it has to find them.
        one_model: Whether it does as FedAvg, with one model for all.
    """

    init_clients: int
    automatic: bool
    candidates: Sequence[int] | None
    criterion: Criterion | None
    start: Mapping[int, int]
    one_model: bool

    def distances(self, states: TensorDict, center: int) -> Tensor:
        """Return the distances ``[C]`` of states ``[C]`` to a center."""
        raise NotImplementedError(f"{type(self).__name__} does not define distances()")


def select_by_trials(
    federation: Federation,
    data: FederatedDataModule,
    candidates: Sequence[int] | None,
    criterion: Criterion | None,
    callback: ClusteredMethod,
    rounds: int | None = None,
    **trainer: Any,
) -> ClusterSelection:
    """Compare numbers of clusters, as :func:`~pflight.callbacks.select_num_clusters` does."""
    began = time.monotonic()
    if criterion is None:
        criterion = "held_out" if federation.client.automatic_optimization else "distance"
    candidates = CANDIDATES[criterion] if candidates is None else candidates
    rounds = ROUNDS[criterion] if rounds is None else rounds
    check_candidates(candidates, criterion)
    if criterion == "accuracy":
        as_classifier(federation.client, "FeSEM: criterion 'accuracy', unlike 'distance',")
    if criterion == "held_out":
        check_losses(federation.client, "FeSEM with criterion='held_out', unlike 'distance',")
    if not whole(rounds) >= 2:
        raise ConfigurationError(f"select_num_clusters: rounds must be at least 2, got {rounds}")
    data.prepare_data()
    data.setup("fit")
    sample = SampledClients(
        data, sample_clients(data.train_clients, callback.init_clients, federation.clients.seed)
    )
    numbers = sorted({k for k in candidates if k <= sample.num_clients})
    if not numbers:
        raise ConfigurationError(
            f"num_clusters can't be chosen from {list(candidates)}: only {sample.num_clients} "
            "clients can train"
        )
    if not sample.num_samples("val").any():
        raise ConfigurationError(
            "num_clusters can't be chosen: no client has validation samples, or five training "
            "samples of which to hold some out"
        )
    trials = _Trials(federation, sample, callback, criterion, rounds, trainer)
    if criterion == "held_out":
        selection = trials.by_held_out(numbers)
    else:
        if criterion == "distance" and numbers[0] > 1:
            numbers.insert(0, numbers[0] - 1)
        for k in numbers:
            trials.run(k)
        selection = trials.selection
    _say(
        f"chose num_clusters {selection.num_clusters} by {criterion}, in "
        f"{time.monotonic() - began:.0f} s; the trials sent {trials.down / 2**20:.2f} MiB to "
        f"clients and {trials.up / 2**20:.2f} MiB back"
    )
    return selection


def choose_for(trainer: L.Trainer, callback: ClusteredMethod) -> ClusterSelection:
    """Choose the number of clusters for the federation of a Trainer."""
    federation = trainer.lightning_module
    assert isinstance(federation, Federation)
    device = trainer.strategy.root_device
    selection = select_by_trials(
        federation,
        federation.clients.attached_data,
        callback.candidates,
        callback.criterion,
        callback=callback,
        accelerator=device.type,
        devices=1 if device.index is None else [device.index],
        precision=trainer.precision,
    )
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
            logger.experiment.add_text("fesem/num_clusters", selection.table, 0)
    return selection


def check_candidates(candidates: Sequence[int] | None, criterion: str | None) -> None:
    """Raise unless candidates and criterion are valid."""
    if candidates is not None and not (
        candidates and all(whole(count) >= 1 for count in candidates)
    ):
        raise ConfigurationError(
            f"FeSEM: candidates must be numbers of clusters, 1 or more, got {candidates!r}"
        )
    if criterion not in (None, *get_args(Criterion)):
        raise ConfigurationError(
            f"FeSEM: criterion must be 'held_out', 'distance' or 'accuracy', got {criterion!r}"
        )


class SampledClients(WrappedData):
    """Some of the clients of other data, renumbered. All take part in every round.

    If none of them has validation samples, each holds out a random fifth of its training samples.

    Args:
        data: The data of all clients.
        clients: Ids of the clients to take ``[M]``.
    """

    def __init__(self, data: FederatedDataModule, clients: Tensor) -> None:
        super().__init__(data, holdout_clients=0.0, **EVERYBODY)
        self.clients = clients
        self.num_clients = len(clients)
        if not data.num_samples("val")[clients].any():
            self.cut = SPLITS

    def at_round(self, round: int) -> None:
        """Keep the data of the round in which the trials began: a trial must not see later ones."""

    @property
    def drifts(self) -> bool:
        """Whether clients' data depend on the round: never in a trial."""
        return False

    def origin(self, client: int) -> int:
        """Return a client's id among all."""
        return int(self.clients[client])

    def taken(self, values: Tensor) -> Tensor:
        """Return the sampled clients' values ``[M, ...]``, from the values of all clients."""
        return values[self.clients]

    def num_samples(self, split: Split = "train") -> Tensor:
        """Return each client's number of samples, ``[num_clients]``."""
        if split not in self.cut:
            return super().num_samples(split)
        counts = super().num_samples("train")
        held_out = counts // 5
        return {"train": counts - held_out, "val": held_out}.get(split, torch.zeros_like(counts))

    def rows(self, client: int, split: Split) -> Tensor:
        """Return the positions of a split among a client's training samples, ``[n]``."""
        origin = self.origin(client)
        count = int(self.data.num_samples("train")[origin])
        order = torch.randperm(count, generator=generator(Purpose.SAMPLE, self.seed, origin))
        held_out, rest = order[: count // 5], order[count // 5 :]
        return {"train": rest, "val": held_out, "test": order[:0]}[split].sort().values


class _Trials:
    """Trial runs on the same clients from the same weights, and their results.

    Args:
        federation: Gives the client module, the options and the seed.
        data: The clients of the trials.
        callback: Gives the options of the method.
        criterion: As in :class:`ClusterSelection`.
        rounds: Rounds of each run.
        options: Arguments of the Trainers.
    """

    def __init__(
        self,
        federation: Federation,
        data: SampledClients,
        callback: ClusteredMethod,
        criterion: Criterion,
        rounds: int,
        options: dict[str, Any],
    ) -> None:
        self.federation = federation
        self.data = data
        self.callback = callback
        self.rounds = rounds
        self.options = options
        self.client = copy.deepcopy(federation.client)
        weights = gather(self.client.state_dict())[0]  # ranks may have different ones
        self.client.load_state_dict(weights)
        self.selection = ClusterSelection(criterion, {}, {})
        self.first: list[ClientUpdates] = []  # sent in the first round of the last run
        self.down = self.up = 0

    def by_held_out(self, numbers: Sequence[int]) -> ClusterSelection:
        """Try one model, and the numbers of clusters that its first updates propose."""
        self.run(1, one_model=True)
        clients = torch.arange(self.data.num_clients)
        answered, points = sent_points(clients, self.first, self.model)
        proposed = proposed_clusters(points, numbers)
        starts = {
            k: dict(zip(clients[answered].tolist(), clusters.tolist(), strict=True))
            for k, clusters in sorted(proposed.items())
        }
        several = [k for k in numbers if k > 1]
        if not starts and numbers[0] > 1:
            starts = {several[0]: {}}  # which k-means finds
        for k, start in starts.items():
            self.run(k, start)
        selection = self.selection
        if numbers[0] > 1:  # one model only gave the updates
            for table in (selection.accuracy, selection.distance, selection.losses):
                del table[1]
        start = starts.get(selection.num_clusters, {})
        named = {self.data.origin(client): cluster for client, cluster in start.items()}
        return replace(selection, clusters=named)

    def run(self, k: int, start: Mapping[int, int] | None = None, one_model: bool = False) -> None:
        """Add the results of a run with K clusters."""
        trial = copy.copy(self.callback)
        trial.num_clusters, trial.centers, trial.automatic = k, None, False
        trial.start, trial.one_model = start or {}, one_model
        chosen = self.selection
        with isolated(self.federation.device), _quiet():
            run = self._fit(trial)
            if chosen.criterion == "held_out":
                chosen.losses[k] = self._held_out_losses(run, trial)
        chosen.accuracy[k] = run.history[-1].metrics.get("val/macro_acc", float("nan"))
        self.down += run.clients.traffic.down
        self.up += run.clients.traffic.up
        self.model = run.server.tensors(0, trial.shared_parameters)
        loss = f", loss {chosen.mean_loss(k):.4f}" if chosen.losses else ""
        if k > 1 and 1 in chosen.losses:
            loss += f" (p {chosen.p_value(k):.2g} against one model)"
        _say(
            f"num_clusters {k}: val/macro_acc {chosen.accuracy[k]:.4f}, distance "
            f"{chosen.distance[k]:.4g}{loss}"
        )

    def _fit(self, callback: ClusteredMethod) -> Federation:
        """Train a new federation; add the clients' mean distance to their center."""
        given = self.federation
        trial = type(given)(
            self.client,
            local_epochs=given.clients.training.epochs,
            local_steps=given.clients.training.steps,
            finetune_epochs=given.clients.training.finetune_epochs,
            server_optimizer=given.server_optimizer,
            server_scheduler=given.server_scheduler,
            engine=given.hparams["engine"],
            on_client_error=given.clients.training.on_client_error,
            client_timeout=given.client_timeout,
            seed=given.clients.seed,
            f1_average=given.f1_average,
        )
        models: dict[int, TensorDict] = {}
        self.first = []

        def keep(updates: ClientUpdates) -> None:
            models.update(zip(updates.clients.tolist(), updates.states, strict=True))
            if trial.clients.current.entry.index == 0:
                self.first.append(updates)

        trial.clients.on_updates.append(keep)
        trainer = L.Trainer(
            max_epochs=self.rounds,
            check_val_every_n_epoch=self.rounds,
            callbacks=[callback],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            **self.options,
        )
        trainer.fit(trial, datamodule=self.data)
        total = torch.zeros(2, dtype=torch.double)
        with torch.no_grad():
            for member, model in models.items():
                center = int(callback.assignments[member])
                moved = stack_states([model.to(trial.device)])
                total[0] += callback.distances(moved, center).item()
                total[1] += 1
        total = all_sum(total)
        self.selection.distance[callback.num_clusters] = float(total[0] / total[1])
        return trial

    def _held_out_losses(self, run: Federation, callback: ClusteredMethod) -> list[float]:
        """Return each client's mean loss on its validation samples, NaN if it has none."""
        clients = torch.arange(self.data.num_clients)
        mine = owned(clients[self.data.num_samples("val") > 0])
        found = torch.full((len(clients),), torch.nan, dtype=torch.double)
        if len(mine):
            sent = callback.broadcast(mine)
            found[mine] = run.clients.losses(mine, sent, "val").cpu()
        table = torch.stack([found.nan_to_num(0.0), found.isfinite().double()])
        sums, counts = all_sum(table)
        return (sums / counts).tolist()  # 0 / 0 is NaN


@rank_zero_only
def _say(line: str) -> None:
    _log.info(line)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Lightning's announcements of the Trainers inside."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)

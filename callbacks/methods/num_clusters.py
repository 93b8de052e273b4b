"""Choose the number of clusters by short runs on a sample of the clients."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

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
from pflight.runs.distributed import all_sum, gather
from pflight.states.state import stack_states
from pflight.states.updates import ClientUpdates

from .multi_center import MultiCenter

__all__ = ["ClusterSelection"]

Criterion = Literal["accuracy", "distance"]
CANDIDATES = (2, 3, 4, 5, 6)

_log = logging.getLogger("lightning.pytorch.pflight")  # Lightning's handler shows it


@dataclass(frozen=True)
class ClusterSelection:
    """The results of trial runs with several numbers of clusters, and the best number.

    Attributes:
        criterion: ``"accuracy"`` takes the number with the highest accuracy. ``"distance"`` takes
            the number with the largest relative fall of the distance from the next smaller number.
            The smaller number wins a tie.
        accuracy: Macro accuracy on validation samples, by number of clusters.
        distance: Mean distance of a client's trained model to its center, by number of clusters.

    Example:
        >>> selection = ClusterSelection("distance", {1: 0.6, 2: 0.9, 3: 0.8}, {1: 8, 2: 2, 3: 1})
        >>> selection.num_clusters
        2
    """

    criterion: Criterion
    accuracy: dict[int, float]
    distance: dict[int, float]

    @property
    def num_clusters(self) -> int:
        """The best number of clusters."""
        if self.criterion == "accuracy" or len(self.distance) == 1:
            return max(sorted(self.accuracy), key=self.accuracy.__getitem__)
        drops = {
            k: 1 - self.distance[k] / self.distance[fewer] if self.distance[fewer] else 0.0
            for fewer, k in pairwise(sorted(self.distance))
        }
        return max(drops, key=drops.__getitem__)

    @property
    def table(self) -> str:
        """All results as a table in Markdown."""
        rows = [
            f"| {k}{' (chosen)' * (k == self.num_clusters)} | {accuracy:.4f} | "
            f"{self.distance[k]:.4g} |"
            for k, accuracy in self.accuracy.items()
        ]
        return "\n".join(["| num_clusters | val/macro_acc | distance |", "|---|---|---|", *rows])


class ClusteredMethod(MultiCenter):
    """A clustered method that can choose its number of clusters by trial runs.

    Attributes:
        init_clients: Maximum number of clients in a trial run.
        centers: K states to start from, or ``None``.
        automatic: Whether to choose the number of clusters.
        candidates: Numbers of clusters to choose from.
        criterion: How to choose, as in :class:`ClusterSelection`.
    """

    init_clients: int
    automatic: bool
    candidates: Sequence[int]
    criterion: Criterion

    def distances(self, states: TensorDict, center: int) -> Tensor:
        """Return the distances ``[C]`` of states ``[C]`` to a center."""
        raise NotImplementedError(f"{type(self).__name__} does not define distances()")


def select_by_trials(
    federation: Federation,
    data: FederatedDataModule,
    candidates: Sequence[int],
    criterion: Criterion,
    callback: ClusteredMethod,
    rounds: int = 3,
    **trainer: Any,
) -> ClusterSelection:
    """Compare numbers of clusters, as :func:`~pflight.callbacks.select_num_clusters` does."""
    check_candidates(candidates, criterion)
    if criterion == "accuracy":
        as_classifier(federation.client, "FeSEM: criterion 'accuracy', unlike 'distance',")
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
    if criterion == "distance" and numbers[0] > 1:
        numbers.insert(0, numbers[0] - 1)
    client = copy.deepcopy(federation.client)
    client.load_state_dict(gather(client.state_dict())[0])  # ranks may have different weights
    accuracy, distance = {}, {}
    for k in numbers:
        trial = copy.copy(callback)
        trial.num_clusters, trial.centers, trial.automatic = k, None, False
        with isolated(federation.device), _quiet():
            accuracy[k], distance[k] = _trial(federation, client, sample, trial, rounds, trainer)
        _say(f"num_clusters {k}: val/macro_acc {accuracy[k]:.4f}, distance {distance[k]:.4g}")
    selection = ClusterSelection(criterion, accuracy, distance)
    _say(f"chose num_clusters {selection.num_clusters} by {criterion}")
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


def check_candidates(candidates: Sequence[int], criterion: str) -> None:
    """Raise unless candidates and criterion are valid."""
    if not candidates or not all(whole(count) >= 1 for count in candidates):
        raise ConfigurationError(
            f"FeSEM: candidates must be numbers of clusters, 1 or more, got {candidates!r}"
        )
    if criterion not in ("accuracy", "distance"):
        raise ConfigurationError(
            f"FeSEM: criterion must be 'accuracy' or 'distance', got {criterion!r}"
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


def _trial(
    federation: Federation,
    client: L.LightningModule,
    data: SampledClients,
    callback: ClusteredMethod,
    rounds: int,
    options: dict[str, Any],
) -> tuple[float, float]:
    """Train a new federation; return its accuracy and clients' mean distance to their center."""
    trial = type(federation)(
        client,
        local_epochs=federation.clients.training.epochs,
        local_steps=federation.clients.training.steps,
        finetune_epochs=federation.clients.training.finetune_epochs,
        server_optimizer=federation.server_optimizer,
        server_scheduler=federation.server_scheduler,
        engine=federation.hparams["engine"],
        on_client_error=federation.clients.training.on_client_error,
        client_timeout=federation.client_timeout,
        seed=federation.clients.seed,
        f1_average=federation.f1_average,
    )
    models: dict[int, TensorDict] = {}

    def keep(updates: ClientUpdates) -> None:
        models.update(zip(updates.clients.tolist(), updates.states, strict=True))

    trial.clients.on_updates.append(keep)
    trainer = L.Trainer(
        max_epochs=rounds,
        check_val_every_n_epoch=rounds,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )
    trainer.fit(trial, datamodule=data)
    total = torch.zeros(2, dtype=torch.double)
    with torch.no_grad():
        for member, model in models.items():
            center = int(callback.assignments[member])
            total[0] += callback.distances(stack_states([model.to(trial.device)]), center).item()
            total[1] += 1
    total = all_sum(total)
    accuracy = trial.history[-1].metrics.get("val/macro_acc", float("nan"))
    return accuracy, float(total[0] / total[1])


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

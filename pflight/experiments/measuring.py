"""Measure a run: train it as ``pflight fit`` does, then test its clients."""

from __future__ import annotations

import hashlib
import socket
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from pflight.callbacks.monitors.client_table import ClientTable
from pflight.callbacks.monitors.report import ResultTable
from pflight.command.cli import FederationCLI
from pflight.data.loaders import Split
from pflight.errors import ConfigurationError
from pflight.federation import Federation
from pflight.history import Round, check_trained
from pflight.metrics.collection import Direction
from pflight.metrics.means import MEANS
from pflight.runs.checkpoint import rounds_so_far
from pflight.runs.folder import CONFIG, FAILURE, LOG, RESULTS
from pflight.runs.same_data import record_of
from pflight.runs.signals import StopBetweenRounds
from pflight.states.head import EXTRA
from pflight.states.state import StateLayout

from .outcome import Curve, Failure, Moment, Outcome, ResultError, Tuned

_APART = ("server/", "finetuned/", "new/")  # left out of curves
_NOBODY = {
    "test": "no client has test samples, but methods are compared on them",
    "val": "no client has validation samples, but settings are chosen on them",
}


@dataclass(frozen=True)
class Task:
    """A run, in the form for a worker.

    Attributes:
        key: As in :class:`~pflight.experiments.outcome.Outcome`.
        method: Its method's title.
        settings: Options that differ from its method's configuration.
        tuned: How these settings were chosen, if they were tuned.
        seed: Its seed.
        arguments: The arguments of ``pflight fit``.
        folder: Its run folder.
        tests: Whether clients are tested at the end.
        beside: Number of jobs on the machine, including this one.
    """

    key: str
    method: str
    settings: dict[str, Any]
    seed: int
    arguments: list[str]
    folder: str
    tests: bool = True
    beside: int = 1
    tuned: dict[str, Any] | None = None

    @property
    def split(self) -> Split:
        """The samples for judging clients at the end."""
        return "test" if self.tests else "val"


@dataclass
class Clock(L.Callback):
    """Measures the time of each round, and counts rounds.

    Attributes:
        on_round_end: Called with the number of rounds so far and of all.
        seconds: Seconds of each round that this process trained, without evaluation.
    """

    on_round_end: Callable[[int, int], None]
    seconds: list[float] = field(default_factory=list)
    _start: float = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        """Start."""
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Stop."""
        self.seconds.append(time.perf_counter() - self._start)
        self.on_round_end(trainer.current_epoch + 1, trainer.max_epochs or 0)


@dataclass
class SomebodyIsJudged(L.Callback):
    """Raises before the first round if no client has samples for evaluation.

    Attributes:
        split: The samples.
    """

    split: Split

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count the samples of the clients that may train.

        Raises:
            ConfigurationError: If there are none.
        """
        if isinstance(pl_module, Federation):
            clients = pl_module.clients
            if not clients.attached_data.num_samples(self.split)[clients.trainable].any():
                raise ConfigurationError(_NOBODY[self.split])


class MeasuredRun(FederationCLI):
    """A ``fit`` with a clock.

    Args:
        task: The run.
        stop: Ends the run when a signal arrives.
        clock: Its clock.
    """

    def __init__(self, task: Task, stop: StopBetweenRounds, clock: Clock) -> None:
        self.clock = clock
        self._split = task.split
        super().__init__(["fit", *task.arguments], stop)

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Make the Trainer, with the clock."""
        trainer = super().instantiate_trainer(**kwargs)
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks += [self.clock, SomebodyIsJudged(self._split)]
        return trainer


class ReadRun(FederationCLI):
    """A run folder that is only read.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        config = f"--config={folder / CONFIG}"
        here = f"--trainer.default_root_dir={folder}"  # it may have been moved
        super().__init__(["test", config, here, "--trainer.logger=false", "--ckpt_path=last"])

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Make the Trainer, without the tables of a single test."""
        trainer = super().instantiate_trainer(**kwargs)
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        tables = ResultTable, ClientTable
        callbacks[:] = [one for one in callbacks if not isinstance(one, tables)]
        return trainer

    def _run_subcommand(self, subcommand: str) -> None:
        pass


def measured(run: MeasuredRun | ReadRun, task: Task, last: str | None = None) -> Outcome:
    """Return a run's results, after its last round and at the best one.

    Args:
        run: The run.
        task: Its task.
        last: The checkpoint of the last round; by default the models are already in this state.

    Raises:
        ConfigurationError: If the run is no federation, no client has samples for evaluation, or no
            metric chooses the best round.
        ClientError: If no client could be trained in any round.
    """
    federation, data, trainer = run.model, run.datamodule, run.trainer
    if not isinstance(federation, Federation):
        raise ConfigurationError("only federations are compared: the model must be a Federation")
    split = task.split
    end = _tested(run, last) if task.tests else Moment(len(federation.history), None, {}, {})
    if split not in federation.evaluators:
        trainer.validate(federation, data, verbose=False)
    if split not in federation.evaluators:
        raise ConfigurationError(_NOBODY[split])
    check_trained(federation.history)
    directions = dict(federation.evaluators[split].directions)
    checkpoint = _monitored(run)
    metric, mode, monitor = _judged_by(checkpoint, directions)

    def validated(moment: Moment) -> Moment:  # before another checkpoint is loaded
        metrics = federation.history[moment.round - 1].metrics if moment.round else {}
        return replace(moment, validation=metrics.get(monitor))

    end, history = validated(end), list(federation.history)
    best = run.folder.checkpoints / "best.ckpt"
    if not best.is_file() and checkpoint is not None:
        best = Path(checkpoint.best_model_path)
        best = best if best.is_file() else run.folder.checkpoints / best.name  # it was moved
    rounds = rounds_so_far(best) if best.is_file() else None
    chosen = end
    if rounds not in (None, end.round):
        at_best = _tested(run, str(best)) if task.tests else Moment(rounds or 0, None, {}, {})
        chosen = validated(at_best)
    clients = federation.clients.trainable
    seconds = run.clock.seconds if isinstance(run, MeasuredRun) else []
    return Outcome(
        key=task.key,
        method=task.method or federation.algorithm,
        settings=task.settings,
        tuned=None if task.tuned is None else Tuned(**task.tuned),
        seed=task.seed,
        metric=metric,
        mode=mode,
        directions=directions,
        clients=clients.tolist(),
        newcomers=federation.clients.newcomers.tolist(),
        samples={"test": data.num_samples("test")[clients].tolist()},
        last=end,
        chosen=None if rounds is None else chosen,
        curve=_curve(history),
        bytes_down=sum(entry.bytes_down for entry in history),
        bytes_up=sum(entry.bytes_up for entry in history),
        participations=sum(len(entry.clients) for entry in history),
        failed=sum(len(entry.failed) for entry in history),
        seconds=statistics.median(seconds) if seconds else None,
        threads=torch.get_num_threads(),
        beside=task.beside,
        device=str(trainer.strategy.root_device),
        host=socket.gethostname(),
        fingerprints=fingerprints(run),
        monitor=monitor,
    )


def ended_in(folder: Path, key: str) -> Outcome | Failure | None:
    """Return the end of the run with a key; ``None`` if unfinished or if its file is damaged."""
    for kind, name in ((Outcome, RESULTS), (Failure, FAILURE)):
        if (folder / name).is_file():
            try:
                found = kind.read(folder / name)
            except ResultError as error:
                warnings.warn(f"{error}; the run counts as not ended", stacklevel=2)
                continue
            if found.key == key:
                return found
    return None


def note_failure(task: Task, reason: str) -> None:
    """Save a run's failure, if there is space."""
    folder = Path(task.folder)
    whose = task.key, task.method, task.settings, task.seed
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        Failure(*whose, reason=reason, log=str(folder / LOG)).write(folder / FAILURE)


def _tested(run: FederationCLI, checkpoint: str | None) -> Moment:
    """Test the clients in their current state or in the state of a checkpoint."""
    federation: Federation = run.model
    tested = run.trainer.test(federation, run.datamodule, ckpt_path=checkpoint, verbose=False)
    if not tested:
        raise ConfigurationError(_NOBODY["test"])
    (values,) = tested
    found = federation.client_metrics("test")
    clients = federation.clients.trainable
    return Moment(
        round=len(federation.history),
        validation=None,
        values={tag: value for tag, value in values.items() if tag.startswith("test/")},
        per_client={n: v[clients].tolist() for n, v in found.items() if n != "num_samples"},
    )


def _monitored(run: FederationCLI) -> ModelCheckpoint | None:
    """Return the callback that keeps the best round, if there is one."""
    found = run.trainer.checkpoint_callbacks
    return next((c for c in found if isinstance(c, ModelCheckpoint) and c.monitor), None)


def _judged_by(
    checkpoint: ModelCheckpoint | None, directions: Mapping[str, Direction | None]
) -> tuple[str, Direction, str]:
    """Return the metric that compares methods, its direction, and its tag in validation."""
    if checkpoint is not None:
        monitor = str(checkpoint.monitor)
        _, _, name = monitor.rpartition("/")
        for mean in MEANS:
            name = name.removeprefix(mean)
        return name, checkpoint.mode, monitor  # type: ignore[return-value]
    known = [(name, mode) for name, mode in directions.items() if mode is not None]
    if not known:
        raise ConfigurationError(
            "no metric says which method is best: name one, as in --monitor val/macro_loss "
            f"--mode min; the clients log {', '.join(directions)}"
        )
    name, mode = known[0]
    return name, mode, f"val/macro_{name}"


def _curve(history: Sequence[Round]) -> Curve:
    evaluated, total = list[tuple[int, int, dict[str, float]]](), 0
    for entry in history:
        total += entry.bytes_down + entry.bytes_up
        values = {
            tag: value
            for tag, value in entry.metrics.items()
            if tag.startswith("val/") and not tag.removeprefix("val/").startswith(_APART)
        }
        if values:
            evaluated.append((entry.index + 1, total, values))
    tags = dict.fromkeys(tag for *_, values in evaluated for tag in values)
    return Curve(
        round=[trained for trained, *_ in evaluated],
        bytes=[traffic for _, traffic, _ in evaluated],
        values={tag: [values.get(tag) for *_, values in evaluated] for tag in tags},
    )


def fingerprints(run: FederationCLI) -> dict[str, str]:
    """Return short hashes of all that methods must share at one seed.

    ``data`` are the samples of each client and split. ``weights`` are the client module's initial
    parameters, without a method's additions. ``cohorts`` are the clients of each round. ``batches``
    are the batch size, and the order of the samples of the first and the last cohort. A method that
    trains on other samples, such as Centralized, has cohorts or batches of its own.
    """
    federation, data, rounds = run.model, run.datamodule, max(run.trainer.max_epochs or 0, 0)
    record = record_of(data)
    named = {name for name, _ in federation.client.named_parameters()}  # also those that are frozen
    parameters = named & {*StateLayout.of(federation.client).names}
    state = federation.client.state_dict()
    own = (name for name in state if not name.startswith(f"{EXTRA}."))
    weights = [state[name] for name in own if name in parameters]
    used = federation.clients.attached_data
    cohorts = [used.cohorts.sample(index) for index in range(rounds)]
    orders = [
        used.order(client, index)
        for index in {0, rounds - 1}.intersection(range(rounds))
        for client in cohorts[index].tolist()
    ]
    return {
        "data": _digest([*record["num_samples"].values(), *list(record.values())[1:]]),
        "weights": _digest(weights),
        "cohorts": _digest(cohorts),
        "batches": _digest([torch.tensor(data.batch_size), *orders]),
    }


def _digest(tensors: Sequence[torch.Tensor]) -> str:
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(str((tensor.dtype, tuple(tensor.shape))).encode())
        hashed.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return hashed.hexdigest()[:8]

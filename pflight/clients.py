"""The clients of a federation, as its server half knows them: what they are asked, and send."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_only
from tensordict import TensorDict
from torch import Tensor

from .cohort import CohortSampler
from .data_module import FederatedDataModule
from .distributed import owned
from .engines.base import Engine, finite_rows
from .engines.choice import Choice, EngineName, build_engine
from .engines.sequential import SequentialEngine
from .errors import ConfigurationError
from .failures import Failures
from .half import Half, LocalClient, Measure, Participation, add_what_it_needs, layout_with
from .head import Head, has_plain_head, head_of, mark, trace
from .history import Logs, Round, Traffic, add_logs
from .host import check_fits, readable
from .loaders import Split
from .local.setting import Setting
from .memory import ClientMemory, MappedMemory
from .randomness import Purpose, generator
from .server import ServerModels
from .state import StateLayout, expand_state, largest_values, moved
from .updates import ClientFailure, ClientUpdates, Kept

_log = logging.getLogger("lightning.pytorch.pflight")
_CHUNK_BYTES = 16 * 2**20  # a chunk of updates takes about this much memory
_EXPLODED = 1e6  # times the largest value that a client started from, or 1
_PRIVATE = "private"  # the memory slot of entries that never travel
_MEMORY = "memory"  # and of what halves remember
STORED = "stored"  # and of what the server half stores by client


class ServerHalf(Protocol):
    """What the clients have to know of the server half of an algorithm."""

    @property
    def private(self) -> tuple[str, ...]:
        """Names of the entries of a state that stay with the client."""

    @property
    def sent_names(self) -> tuple[str, ...]:
        """Names of the entries of a state that travel."""

    def bytes_down(self, clients: Tensor, sent: TensorDict) -> int:
        """Return the bytes sent to the clients ``[C]``."""

    def bytes_up(self, updates: ClientUpdates) -> int:
        """Return the bytes that the clients of a chunk sent."""


@dataclass(frozen=True)
class LocalTraining:
    """How clients train and are judged.

    Attributes:
        epochs: Epochs of local training in a round.
        steps: Batches in place of epochs, or ``None``.
        finetune_epochs: Epochs of fine-tuning before a client is judged.
        on_client_error: What becomes of a client that fails.
        seed: Keys all randomness.
    """

    epochs: int = 1
    steps: int | None = None
    finetune_epochs: int = 0
    on_client_error: Literal["skip", "raise"] = "skip"
    seed: int = 0


@dataclass
class CurrentRound:
    """What is known of a round while it goes on.

    Attributes:
        entry: Its entry in the history.
        silent: The clients that never answer ``[S]``.
        logs: What the clients logged.
        histograms: Distributions for TensorBoard, by name.
    """

    entry: Round
    silent: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    logs: Logs = field(default_factory=dict)
    histograms: dict[str, Tensor] = field(default_factory=dict)


class Clients:
    """All clients of a federation, of which each rank simulates those that it owns.

    A server half asks them to train, for gradients or losses, and gets what they send, chunk by
    chunk; traffic, failures and logs are counted on the way. What they do by themselves, as a
    :class:`~pflight.half.LocalWork`, and what they keep is for their half alone.

    Args:
        module: The client module.
        layout: Its state layout, with all that the half adds.
        half: The client half.
        server: The server's models.
        memory: Where the clients keep things.
        training: How they train.

    Attributes:
        num_clients: Number of clients; 0 before there is data.
        data: Their samples, or ``None`` before a Trainer has run them.
        engine: What trains them, likewise.
        server_half: The server half of the algorithm.
        participation: What they do around their training, by default the half.
        history: An entry for every round so far.
        current: The round that goes on.
        traffic: The bytes of all rounds so far.
        on_updates: Functions that are called with each chunk of updates, full states, as it comes.
        on_client_end: Called with the id of each client that has trained.
        said_not_finite: Metrics, as ``val/mae``, of which a client's was said not to be finite.
    """

    def __init__(
        self,
        module: L.LightningModule,
        layout: StateLayout,
        half: Half,
        server: ServerModels,
        memory: ClientMemory,
        training: LocalTraining,
    ) -> None:
        self.module = module
        self.layout = layout
        self.half = half
        self.participation: Participation = half
        self.server = server
        self.memory = memory
        self.training = training
        self.num_clients = 0
        self.data: FederatedDataModule | None = None
        self.engine: Engine | None = None
        self.server_half: ServerHalf | None = None
        self.history: list[Round] = []
        self.current = CurrentRound(Round(0, []))
        self.traffic = Traffic()
        self.on_updates: list[Callable[[ClientUpdates], None]] = []
        self.on_client_end: Callable[[int], None] | None = None
        self._failures = self.failures_of(0, "it is left out")
        self.said_not_finite: set[str] = set()
        self._warned: set[str] = set()  # of clients that are not stacked
        self._learner: Engine | None = None  # of another module than the clients' own

    # Who they are

    @property
    def seed(self) -> int:
        """Keys all randomness of local training and of the server."""
        return self.training.seed

    @property
    def device(self) -> torch.device:
        """Where the clients train, and the server's models are."""
        return next(self.server.parameters()).device if len(self.server) else torch.device("cpu")

    @property
    def rounds(self) -> int:
        """How many rounds there have been."""
        return len(self.history)

    @property
    def last_round(self) -> int:
        """Index of the last round, 0 before the first."""
        return self.history[-1].index if self.history else 0

    @property
    def trainable(self) -> Tensor:
        """Ids of the clients that may train, ascending; all if there is no data.

        One whose only batch is left out, a single sample in a network with BatchNorm, can't.
        """
        if self.data is None:
            return torch.arange(self.num_clients)
        return self.data.train_clients if self.engine is None else self.engine.setting.trainable

    @property
    def newcomers(self) -> Tensor:
        """Ids of the clients that never train."""
        return self.attached_data.new_clients

    @property
    def cohorts(self) -> CohortSampler:
        """Who takes part in which round."""
        return self.attached_data.cohorts

    @property
    def cohort_size(self) -> int:
        """Clients in a round, at most; 0 if there is no data."""
        return 0 if self.data is None else self.cohorts.size

    @property
    def num_samples(self) -> Tensor:
        """Number of training samples of every client ``[num_clients]``."""
        return self.attached_data.num_samples("train")

    @property
    def class_counts(self) -> Tensor:
        """Training samples of every client by class ``[num_clients, num_classes]``."""
        classes = getattr(self.module, "num_classes", None)
        return self.attached_data.class_counts("train", classes)

    @property
    def attached_data(self) -> FederatedDataModule:
        """The clients' data; an error before a Trainer has run them."""
        if self.data is None:
            raise ConfigurationError("the federation has no data yet: run it with a Trainer")
        return self.data

    @property
    def attached_engine(self) -> Engine:
        """What trains the clients; an error before a Trainer has run them."""
        if self.engine is None:
            raise ConfigurationError("local training needs the data: run it with a Trainer")
        return self.engine

    def take(self, data: FederatedDataModule) -> None:
        """Take the clients' data, of as many clients as before.

        Raises:
            ConfigurationError: If they are others.
        """
        if self.server_half is not None and data.num_clients != self.num_clients:
            raise ConfigurationError(
                f"this federation was set up for {self.num_clients} clients, "
                f"the data has {data.num_clients}"
            )
        self.data, self.num_clients = data, data.num_clients

    def check(self, client: int) -> None:
        """Raise unless this is the id of a client.

        Raises:
            ConfigurationError: Saying which there are.
        """
        if not 0 <= client < self.num_clients:
            known = f"clients are 0 to {self.num_clients - 1}" if self.num_clients else "none yet"
            raise ConfigurationError(f"unknown client {client}: {known}")

    def prepare(
        self, needs_head: bool, trainer: L.Trainer | None, head: Sequence[Any] | None
    ) -> StateLayout:
        """Add to the client module what its half needs, and return the layout of both.

        Args:
            needs_head: Whether the server half needs to know the module's head.
            trainer: The Trainer that runs the federation, if it has one.
            head: What the checkpoint says of it that the federation is loaded from otherwise.

        Raises:
            ConfigurationError: If the half needs classes or a head that the module does not have.
        """
        adds = type(self.half).extra is not Half.extra
        if adds or ((needs_head or self.half.needs_head) and not has_plain_head(self.module)):
            mark(self.module, head if trainer is None else self._find_head(trainer.strategy))
        add_what_it_needs(self.half, self.module, self.seed)
        self.layout = layout_with(self.half, StateLayout.of(self.module))
        return self.layout

    def _find_head(self, strategy: Strategy) -> Head | None:
        """Return the head of the clients' network, as a pass of a client's samples shows it.

        It is that of the first client whose samples can be passed; any of them may fail.
        """
        found: list[Head | None] = []

        def look(c: LocalClient, batch: object) -> Mapping[str, Tensor]:
            if not found:
                found.append(trace(c.module, partial(c.task_loss, batch)))
            return {}

        layout, data = StateLayout.of(self.module), self.attached_data
        how = strategy.precision_plugin, strategy.root_device, self.training.seed
        engine = SequentialEngine(Setting(self.module, Half(), layout, data, *how))
        for client in data.train_clients.split(1):
            engine.sums(client, expand_state(layout.template, 1), look, {})
            if found:
                return found[0]
        return None

    def choose_engine(
        self,
        wanted: EngineName,
        clients_at_once: int | None,
        strategy: Strategy,
        timeout: float | None,
        reason: str | None = None,
    ) -> Choice:
        """Choose what trains the clients; return what it is, and why.

        Args:
            wanted: ``"sequential"``, ``"vectorized"`` or ``"auto"``.
            clients_at_once: Of the vectorized engine, or ``None``.
            strategy: Of the Trainer that runs the federation: where, and how precisely.
            timeout: Seconds that each client has, or ``None``.
            reason: Why, in place of the rule's reason.
        """
        whose = self.module, self.half, self.layout, self.attached_data
        how = strategy.precision_plugin, strategy.root_device, self.training.seed, timeout
        setting = Setting(*whose, *how)
        if self.half.needs_classes:
            _ = setting.class_counts  # which says before the start if there are none
        self.engine, choice = build_engine(wanted, clients_at_once, setting, self._warned)
        self._learner = None
        choice = replace(choice, reason=reason) if reason else choice
        rank_zero_only(_log.info)(str(choice))
        if idle := setting.idle_clients():
            rank_zero_only(_log.info)(idle)
        return choice

    def log(self, values: Mapping[str, float]) -> None:
        """Log scalars of the round that goes on, which its entry in :attr:`history` gets too."""
        self.current.entry.metrics.update(values)

    def check_memory(self, whose: str, parts: Mapping[str, int]) -> None:
        """Say what a server half is about to take of the memory for all clients.

        Args:
            whose: The server half.
            parts: Bytes by what takes them.

        Raises:
            ConfigurationError: If there is not so much left, with all numbers.
        """
        whose = f"{whose} with num_clients={self.num_clients}"
        device = self.device if self.engine is None else self.engine.device
        for place in {torch.device("cpu"), device}:  # where it is made, and where it is then
            check_fits(place, whose, parts, "take fewer clients, or a smaller network")
        words = ", ".join(f"{readable(size)} for {part}" for part, size in parts.items())
        rank_zero_only(_log.info)(f"{whose} takes {words}")

    # What they are asked for

    def train(
        self,
        clients: Tensor,
        send: Callable[[Tensor], TensorDict],
        *,
        epochs: int | None = None,
        returns: Iterable[str] | None = None,
        whole: int | None = None,
        at_once: int | None = None,
        aside: bool = False,
    ) -> Iterator[ClientUpdates]:
        """Have clients train locally; yield what they send, chunk by chunk of this rank's.

        They start where their :attr:`participation` says; private entries of the result are kept
        and don't appear in the updates. Traffic, failures and the clients' logs are recorded.

        Args:
            clients: All clients that take part ``[S]``; which of them never answer is drawn here.
            send: Gets ids ``[C]``; returns what these clients are sent ``[C]``.
            epochs: Local epochs, in place of the federation's own epochs or steps.
            returns: Names of the entries that they send back; by default all that travel.
            whole: Chunks are of a multiple of this many clients, if they hold more, and the last
                has the rest; by default they are of about the same size.
            at_once: Clients in a chunk, at most.
            aside: Whether the clients keep nothing of it.
        """
        work = partial(self._train, epochs=epochs)
        work = partial(work, aside=True) if aside else work
        for chunk in self._chunks(clients, whole, at_once):
            yield self._ask(chunk, send(chunk), work, returns)

    def gradients(
        self,
        clients: Tensor,
        send: Callable[[Tensor], TensorDict],
        *,
        batches: int | None = None,
        returns: Iterable[str] | None = None,
    ) -> Iterator[ClientUpdates]:
        """Have clients take their gradients at what they are sent; yield them chunk by chunk.

        Args:
            clients: All clients that take part ``[S]``.
            send: As in :meth:`train`.
            batches: Take them over so many mini-batches in place of all samples.
            returns: As in :meth:`train`.
        """
        work = partial(self._take_gradients, batches=batches)
        for chunk in self._chunks(clients):
            yield self._ask(chunk, send(chunk), work, returns)

    def losses(self, clients: Tensor, sent: TensorDict, split: Split = "train") -> Tensor:
        """Return the clients' mean losses ``[C]`` on a split at what they are sent ``[C]``.

        Losses are the client module's own, in evaluation mode; NaN for a client without samples or
        that fails, and is then left out of the round, and for all as long as there is no data.
        """
        if self.engine is None:
            return torch.full((len(clients),), torch.nan, dtype=torch.double)
        losses, failures = self.engine.losses(clients, self.start_states(clients, sent), split)
        self.leave_out(failures, "to tell its loss")
        return losses

    def train_aside(
        self,
        clients: Tensor,
        sent: TensorDict,
        round_index: int | None = None,
        epochs: int | None = None,
    ) -> ClientUpdates:
        """Train the clients ``[C]`` aside from any round: nothing is recorded or kept.

        So a newcomer finds out where it belongs.

        Args:
            clients: Ids ``[C]``.
            sent: What they are sent ``[C]``.
            round_index: Keys the order of batches and all other randomness; by default as if there
                were another round now.
            epochs: As in :meth:`train`.
        """
        starts = self.participation.before_training(self, clients, sent)
        updates = self.attached_engine.train(
            clients,
            starts,
            round_index=self.rounds if round_index is None else round_index,
            epochs=epochs or self.training.epochs,
            steps=None if epochs else self.training.steps,
        )
        self.note_failures(updates.failures, "to find its place")
        return self._finished(clients, starts, updates)

    def judged(self, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Return the full states ``[C]`` by which clients are judged that are sent this now."""
        return self.participation.judged(self, clients, sent)

    def as_sent(self, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Return the full states ``[C]`` of the models that clients are sent."""
        return self.participation.as_sent(self, clients, self.completed(clients, sent))

    def further(
        self, clients: Tensor, sent: TensorDict, used: TensorDict, model: str
    ) -> TensorDict:
        """Return one of the further models ``[C]`` by which clients are judged."""
        return self.participation.further(self, clients, sent, used, model)

    def has_memory(self, clients: Tensor) -> Tensor:
        """Return a mask ``[C]`` of the clients that keep private entries from an earlier round."""
        return self.memory.seen(_PRIVATE, clients)

    # What the server half stores by client, on the rank that has it

    def store(self, clients: Tensor, states: TensorDict) -> None:
        """Store something for each of the clients ``[C]``, which no client gets to see."""
        self.memory.write(STORED, clients, states)

    def stored(self, clients: Tensor, default: TensorDict) -> TensorDict:
        """Return what was stored for the clients ``[C]``, or a row of ``default``."""
        return self.memory.read(STORED, clients, default)

    def has_stored(self, clients: Tensor) -> Tensor:
        """Return a mask ``[C]`` of the clients for which something is stored."""
        return self.memory.seen(STORED, clients)

    # What they do by themselves, and keep

    def start_states(self, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Return full states ``[C]``: what was kept, over what is sent, over the initial model."""
        assert self.server_half is not None
        states = self.completed(clients, sent)
        if private := self.server_half.private:
            states.update(self.memory.read(_PRIVATE, clients, states.select(*private)))
        return states

    def completed(self, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Return full states ``[C]``: what is sent, over the initial model's other entries."""
        states = {**self.server.expand(0, self.layout.names, len(clients)), **sent}
        return TensorDict(states, batch_size=[len(clients)])

    def remembered(self, clients: Tensor, states: TensorDict) -> Kept:
        """Return what the clients' halves kept, by default entries of ``states`` ``[C]``."""
        names = self.half.remembered(self.layout)
        return Kept(
            self.memory.read(_MEMORY, clients, states.select(*names)),
            self.memory.seen(_MEMORY, clients),
        )

    def read(self, slot: str, clients: Tensor, default: TensorDict) -> TensorDict:
        """See :class:`~pflight.half.LocalWork`, as for all that follow."""
        return self.memory.read(slot, clients, default)

    def write(self, slot: str, clients: Tensor, states: TensorDict) -> None:
        """Write ``states`` ``[C]`` into a slot of the clients' memory."""
        self.memory.write(slot, clients, states)

    def own_gradients(self, clients: Tensor, states: TensorDict) -> TensorDict:
        """Return each client's gradient over all its samples, at its state ``[C]``."""
        index, parameters = self.current.entry.index, self.layout.parameters
        updates = self.attached_engine.gradients(clients, states, round_index=index)
        gradients = updates.states.select(*parameters)
        self.note_failures(updates.failures, "to take its gradient")
        if not updates.failures:
            return gradients
        nans = {name: torch.full_like(states[name], torch.nan) for name in parameters}
        everybody = TensorDict(nans, batch_size=[len(clients)])
        everybody[torch.isin(clients, updates.clients)] = gradients
        return everybody

    def finetune(
        self,
        clients: Tensor,
        states: TensorDict,
        *,
        epochs: int = 1,
        steps: int | None = None,
        doing: str = "to be fine-tuned",
    ) -> TensorDict:
        """Return copies of the states ``[C]`` trained on the task's loss alone.

        Without an anchor, penalties vanish. A client whose training fails keeps its state.
        """
        updates = self.attached_engine.train(
            clients,
            states,
            round_index=self.rounds,
            epochs=epochs,
            steps=steps,
            purpose=Purpose.FINETUNE,
        )
        self.note_failures(updates.failures, doing)
        return _laid_over(updates, clients, states)

    @property
    def head(self) -> Head:
        """The head of the clients' module."""
        return head_of(self.module)

    def random(self, client: int) -> torch.Generator:
        """Return what draws random numbers for a client, by seed and round."""
        return generator(Purpose.LOCAL_WORK, self.seed, self.rounds, client)

    @property
    def has_samples(self) -> bool:
        """Whether there are samples: not where a federation is loaded without its data."""
        return self.engine is not None

    @property
    def batch_size(self) -> int:
        """Samples in a batch of local training, at most."""
        return self.attached_data.batch_size or int(self.num_samples.max())

    def num_samples_of(self, clients: Tensor) -> Tensor:
        """Return the clients' numbers of training samples ``[C]``."""
        return self.num_samples[clients.cpu()].to(self.device)

    def class_counts_of(self, clients: Tensor) -> Tensor:
        """Return the clients' training samples by class ``[C, K]``."""
        counts = self.attached_engine.setting.class_counts
        return counts[clients.to(counts.device)]

    def sums(
        self,
        clients: Tensor,
        states: TensorDict,
        measure: Measure,
        like: Mapping[str, Tensor],
        batch_size: int | None = None,
    ) -> TensorDict:
        """Return sums over each client's training samples ``[C]``."""
        sums, failures = self.attached_engine.sums(clients, states, measure, like, batch_size)
        self.note_failures(failures, "to look through its samples")
        failed = torch.tensor([failure.client for failure in failures], dtype=torch.long)
        sums[torch.isin(clients.cpu(), failed).to(self.device)] = torch.nan
        return sums

    def rows(
        self, clients: Tensor, states: TensorDict, measure: Measure, split: Split = "train"
    ) -> list[dict[str, Tensor] | None]:
        """Return what each of a client's samples of a split gives, by client."""
        rows, failures = self.attached_engine.rows(clients, states, measure, split)
        self.note_failures(failures, "to look through its samples")
        failed = {failure.client for failure in failures}
        ids = clients.tolist()
        return [None if i in failed else own for i, own in zip(ids, rows, strict=True)]

    def num_batches(self, clients: Tensor) -> Tensor:
        """Return how many batches there are in a local epoch of the clients ``[C]``."""
        counts = self.num_samples[clients.cpu()].double()
        return (counts / (self.attached_data.batch_size or counts)).ceil()

    def learn(
        self,
        build: Callable[[L.LightningModule], L.LightningModule],
        clients: Tensor,
        starts: TensorDict,
        *,
        doing: str,
        epochs: int = 1,
        steps: int | None = None,
    ) -> TensorDict:
        """Return ``starts`` ``[C]`` as another module than the clients' own trains them."""
        if self._learner is None:
            setting, module = self.attached_engine.setting, build(self.module)
            how = setting.data, setting.precision, setting.device, setting.seed
            other = Setting(module, Half(), StateLayout.of(module), *how)
            other.mixes_samples = setting.mixes_samples  # as where the clients' own trains
            self._learner = SequentialEngine(other)
            self._learner.check_input()
        index, purpose = self.current.entry.index, Purpose.FINETUNE
        updates = self._learner.train(
            clients, starts, round_index=index, epochs=epochs, steps=steps, purpose=purpose
        )
        self.note_failures(updates.failures, doing)
        return _laid_over(updates, clients, starts)

    # Failures

    def failures_of(self, round_index: int, consequence: str, together: bool = True) -> Failures:
        """Return an empty set of clients that fail at something; see :class:`Failures`."""
        return Failures(round_index, consequence, self.training.on_client_error, together)

    @contextmanager
    def noting(self, failures: Failures) -> Iterator[None]:
        """Note the clients that fail meanwhile among these failures."""
        before, self._failures = self._failures, failures
        try:
            yield
        finally:
            self._failures = before

    def note_failures(self, failures: Iterable[ClientFailure], doing: str = "") -> None:
        """Leave clients out of what is going on and warn, or stop, as ``on_client_error`` says.

        Args:
            failures: Clients of this rank.
            doing: What they did when they failed, after "failed"; by default they trained.

        Raises:
            ClientError: To stop the run.
        """
        self._failures.note(failures, doing)

    def leave_out(self, failures: Sequence[ClientFailure], doing: str) -> None:
        """Note failures, as :meth:`note_failures` does, and leave these clients out of the round.

        Raises:
            ClientError: To stop the run.
        """
        self.note_failures(failures, doing)
        failed = torch.tensor([failure.client for failure in failures], dtype=torch.long)
        silent = self.current.silent
        self.current.silent = torch.cat([silent, failed.to(silent.device)])

    # A round

    def check_memory_of_rounds(self, size: int, rounds: int | None) -> None:
        """Raise if what the clients of all rounds are going to keep does not fit into RAM.

        Args:
            size: Bytes that a client keeps.
            rounds: Rounds that there will be; ``None`` or negative for no end.
        """
        asked = len(self.trainable)
        if rounds is not None and rounds >= 0:
            asked = min(asked, rounds * self.cohort_size)
        if not isinstance(self.memory, MappedMemory) and asked:
            check_fits(
                torch.device("cpu"),
                "client_memory='ram'",
                {f"{asked} clients that keep {readable(size)} each": asked * size},
                "use client_memory='disk', or fewer clients",
            )

    def begin_round(self, index: int, cohort: Tensor) -> None:
        """Forget the round before, and draw who of a cohort ``[S]`` never answers."""
        self.current = CurrentRound(Round(index, []))
        self.current.silent = self._draw_silent(cohort)

    def end_round(self, failed: Iterable[int]) -> dict[str, float]:
        """Combine the round over ranks, enter it into the history, and return what to log of it.

        Args:
            failed: The clients of this rank that failed.
        """
        entry = self.current.entry
        entry.failed += failed
        entry.combine_ranks(self.current.logs)
        self.history.append(entry)
        return entry.metrics | self.traffic.count(entry)

    def _draw_silent(self, clients: Tensor) -> Tensor:
        if not len(clients):
            return clients
        cohorts = self.attached_data.cohorts
        answers = cohorts.answers(self.current.entry.index, clients.cpu())
        return clients[~answers.to(clients.device)]

    def _chunks(
        self, clients: Tensor, whole: int | None = None, at_once: int | None = None
    ) -> Iterator[Tensor]:
        """Split the clients of a round, this rank's, into chunks whose models fit into memory."""
        self.current.silent = self._draw_silent(clients)
        size = max(self.attached_engine.chunk, _CHUNK_BYTES // max(1, self.layout.nbytes))
        size = size if at_once is None else min(size, at_once)
        mine = owned(clients)
        if not len(mine):
            return
        if whole is not None and size > whole:
            yield from mine.split(size - size % whole)
        else:
            yield from mine.tensor_split(-(-len(mine) // size))

    def _ask(
        self,
        clients: Tensor,
        sent: TensorDict,
        work: Callable[[Tensor, TensorDict], ClientUpdates],
        returns: Iterable[str] | None = None,
    ) -> ClientUpdates:
        """Have the clients of a chunk do something with what they are sent; count what travels."""
        current, half = self.current, self.server_half
        assert half is not None
        entry = current.entry
        entry.clients += clients.tolist()
        entry.bytes_down += half.bytes_down(clients, sent)
        silent = torch.isin(clients, current.silent)
        if silent.any():
            entry.failed += clients[silent].tolist()
            clients, sent = clients[~silent], sent[~silent]
        updates = work(clients, sent)
        self.note_failures(updates.failures)
        add_logs(current.logs, updates.logs)
        returned = half.sent_names if returns is None else returns
        updates = replace(updates, states=updates.states.select(*returned))
        entry.bytes_up += half.bytes_up(updates)
        return updates

    def _train(
        self, clients: Tensor, sent: TensorDict, epochs: int | None = None, aside: bool = False
    ) -> ClientUpdates:
        engine = self.attached_engine
        starts = self.participation.before_training(self, clients, sent)
        updates = engine.train(
            clients,
            starts,
            round_index=self.current.entry.index,
            epochs=epochs or self.training.epochs,
            steps=None if epochs else self.training.steps,
            kept=self.remembered(clients, starts) if self.half.keeps_memory else None,
            on_client_end=self.on_client_end,
        )
        idle = ~engine.setting.has_batches(updates.clients)
        if idle.any():  # who has learnt nothing has nothing to say, and weighs nothing
            before = starts[torch.isin(clients, updates.clients)]
            updates = updates.where(~idle | moved(before, updates.states, self.layout.parameters))
        updates = self._finished(clients, starts, updates)
        if aside:
            return updates
        for listener in self.on_updates:
            listener(updates)
        starts = self._keep(clients, starts, updates)
        if updates.kept is not None:
            self.memory.write(_MEMORY, updates.clients, updates.kept)
        self.participation.keep(self, updates.clients, starts, updates.states)
        return updates

    def _finished(
        self, clients: Tensor, starts: TensorDict, updates: ClientUpdates
    ) -> ClientUpdates:
        """Return what clients make of their training; those that get a NaN have failed."""
        if type(self.participation).finish is Participation.finish or not len(updates.clients):
            return updates
        if len(updates.clients) < len(clients):
            starts = starts[torch.isin(clients, updates.clients)]
        states = self.participation.finish(self, updates.clients, starts, updates.states)
        sound = torch.tensor(finite_rows(states), dtype=torch.bool)
        odd = updates.clients[~sound.to(updates.clients.device)].tolist()
        self.note_failures(ClientFailure(i, "what it sends is NaN or infinite") for i in odd)
        return replace(updates, states=states).where(sound)

    def _take_gradients(
        self, clients: Tensor, sent: TensorDict, batches: int | None = None
    ) -> ClientUpdates:
        engine, index = self.attached_engine, self.current.entry.index
        starts = self.start_states(clients, sent)
        updates = engine.gradients(clients, starts, round_index=index, batches=batches)
        updates = updates.where(engine.setting.has_batches(updates.clients))
        self._keep(clients, starts, updates)
        return updates

    def _keep(self, clients: Tensor, starts: TensorDict, updates: ClientUpdates) -> TensorDict:
        """Keep the private entries of those that answered; return where they started."""
        assert self.server_half is not None
        if len(updates.clients) < len(clients):
            starts = starts[torch.isin(clients, updates.clients)]
        self._warn_of_explosions(updates, starts)
        if private := self.server_half.private:
            self.memory.write(_PRIVATE, updates.clients, updates.states.select(*private))
        return starts

    def _warn_of_explosions(self, updates: ClientUpdates, starts: TensorDict) -> None:
        """Warn of clients whose parameters, or gradient, have grown out of all proportion."""
        names = self.layout.parameters
        growth = largest_values(updates.states, names) / largest_values(starts, names).clamp(min=1)
        for row in (growth > _EXPLODED).nonzero().flatten().tolist():
            warnings.warn(
                f"round {self.current.entry.index}: client {int(updates.clients[row])} exploded: "
                f"its largest value has grown {float(growth[row]):.1e} times; it is taken as it is",
                stacklevel=2,
            )


def _laid_over(updates: ClientUpdates, clients: Tensor, states: TensorDict) -> TensorDict:
    """Return the trained states ``[C]``, and those of ``states`` of clients that failed."""
    if not updates.failures:
        return updates.states
    trained = states.select(*updates.states.keys()).clone()
    trained[torch.isin(clients, updates.clients)] = updates.states
    return trained

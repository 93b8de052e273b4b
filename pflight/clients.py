"""The clients of a federation, as its server callback knows them: what they are asked, and send."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_only
from tensordict import TensorDict
from torch import Tensor

from .adapters.pairs import check_adapters
from .client_work import (
    MEMORY,
    PRIVATE,
    Aside,
    ClientWork,
    CurrentRound,
    ServerSide,
    TrainingOptions,
)
from .data.cohort import CohortSampler
from .data.data_module import FederatedDataModule
from .data.loaders import Split
from .engines.alone.engine import SequentialEngine
from .engines.choice import Choice, EngineName, build_engine
from .engines.client_setup import ClientSetup
from .engines.passes import Loss, Sums
from .errors import ConfigurationError
from .history import Round, Traffic, add_logs
from .local_client import LocalClient
from .messages import nothing_sent
from .method import ClientMethod, add_what_it_needs, layout_with
from .runs.checks import check_unchanged, settings_of
from .runs.distributed import owned
from .runs.failures import Failures
from .runs.host import check_fits, readable
from .runs.memory import ClientMemory, MappedMemory
from .states.head import Head, has_plain_head, mark, trace
from .states.made import called
from .states.server_models import BufferWatch, ServerModels
from .states.state import StateLayout, expand_state, largest_values, moved
from .states.updates import ClientFailure, ClientUpdates, Kept

_log = logging.getLogger("lightning.pytorch.pflight")
_CHUNK_BYTES = 16 * 2**20  # a chunk of updates takes about this much memory
_EXPLODED = 1e6  # times the largest value that a client started from, or 1
STORED = "stored"
"""The memory slot of what the server callback stores by client."""


class Clients(ClientWork):
    """All clients of a federation, as its server callback knows them.

    It asks them to train, for gradients or losses, and gets what they send, chunk by chunk;
    traffic, failures and logs are counted on the way. What they do by themselves, as a
    :class:`~pflight.local_client.LocalWork`, and what they keep is for their client method alone.

    Args:
        module: As all that follow, as in :class:`~pflight.client_work.ClientWork`.
        layout: Its state layout.
        client_method: The client method.
        server: The server's models.
        memory: Where the clients keep things.
        training: How they train.

    Attributes:
        traffic: The bytes of all rounds so far.
        on_updates: Functions that are called with each chunk of updates, full states, as it comes.
        on_client_end: Called with the id of each client that has trained.
        renewed: Clients that have lost what they were known by, and begin anew.
        warned_metrics: Metrics, as ``val/mae``, of which a client's was said not to be finite.
    """

    if_data_are_lost = ""

    def __init__(
        self,
        module: L.LightningModule,
        layout: StateLayout,
        client_method: ClientMethod,
        server: ServerModels,
        memory: ClientMemory,
        training: TrainingOptions,
    ) -> None:
        super().__init__(module, layout, client_method, server, memory, training)
        self.traffic = Traffic()
        self.on_updates: list[Callable[[ClientUpdates], None]] = []
        self.on_client_end: Callable[[int], None] | None = None
        self.warned_metrics: set[str] = set()
        self.renewed: set[int] = set()
        self._warned: set[str] = set()  # of clients that are not stacked
        self._as_copied: dict[str, Any] | None = None  # the module, when its copies were made

    # Who they are

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
        return self.data.train_clients if self.engine is None else self.engine.setup.trainable

    @property
    def newcomers(self) -> Tensor:
        """Ids of the clients that never train; without data, of those that have not trained."""
        if self.data is not None:
            return self.data.new_clients
        trained = {client for entry in self.history for client in entry.clients}
        new = [i for i in range(self.num_clients) if i not in trained]
        return torch.tensor(new, dtype=torch.long)

    @property
    def cohorts(self) -> CohortSampler:
        """Who takes part in which round."""
        return self.attached_data.cohorts

    @property
    def cohort_size(self) -> int:
        """Clients in a round, at most; 0 if there is no data."""
        return 0 if self.data is None else self.cohorts.size

    @property
    def class_counts(self) -> Tensor:
        """Training samples of every client by class ``[num_clients, num_classes]``."""
        classes = getattr(self.module, "num_classes", None)
        return self.attached_data.class_counts("train", classes)

    def set_data(self, data: FederatedDataModule) -> None:
        """Take the clients' data, of as many clients as before.

        Raises:
            ConfigurationError: If they are others.
        """
        if self.callback is not None and data.num_clients != self.num_clients:
            raise ConfigurationError(
                f"this federation was set up for {self.num_clients} clients, "
                f"the data has {data.num_clients}"
            )
        self.data, self.num_clients = data, data.num_clients
        self.at_round(0)  # engines are set up with these data, also in a resumed run

    def set_method(self, method: ClientMethod, outer: ClientMethod | None) -> None:
        """Set what trains the clients, and what they do around it; by default that is the same."""
        self.client_method, self.outer_method = method, outer or method

    def check(self, client: int, where: str = "") -> None:
        """Raise unless this is the id of a client.

        Args:
            client: The number.
            where: What names it, for the error.

        Raises:
            ConfigurationError: Saying which there are.
        """
        if not 0 <= client < self.num_clients:
            known = f"clients are 0 to {self.num_clients - 1}" if self.num_clients else "none yet"
            raise ConfigurationError(f"{where and f'{where}: '}unknown client {client}: {known}")

    def prepare(
        self, callback: ServerSide, trainer: L.Trainer | None, head: Sequence[Any] | None
    ) -> StateLayout:
        """Add to the client module what its client method needs, and return the layout of both.

        Args:
            callback: The server callback, which says what is private.
            trainer: The Trainer that runs the federation, if it has one.
            head: What the checkpoint says of it that the federation is loaded from otherwise.

        Raises:
            ConfigurationError: If the client method needs classes or a head that the module does
                not have, or nothing is shared of what is trained.
        """
        adds = type(self.client_method).extra is not ClientMethod.extra
        needs_head = callback.needs_head or self.client_method.needs_head
        if adds or (needs_head and not has_plain_head(self.module)):
            mark(self.module, head if trainer is None else self._find_head(trainer.strategy))
        callback.freeze(self.module)
        check_adapters(self.module)
        callback.add_side_path(self.module)
        add_what_it_needs(self.client_method, self.module, self.seed)
        layout = StateLayout.of(self.module)
        layout = layout.with_private(callback.staying_names(self.module, layout))
        if callback.sends_model and not layout.shared_parameters:
            raise ConfigurationError(nothing_sent(callback))
        layout = layout_with(self.client_method, layout)
        private = callback.staying_names(self.module, layout)
        if unknown := sorted(private - {*layout.names}):
            raise ConfigurationError(
                f"{type(callback).__name__}.private_names() has {unknown[0]!r}, which is no entry "
                f"of a client's state{called(unknown[0], layout)}"
            )
        self.layout = layout.with_private(private)
        self.buffers = BufferWatch(self.module, self.layout)
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
        engine = SequentialEngine(ClientSetup(self.module, ClientMethod(), layout, data, *how))
        for client in data.train_clients.split(1):
            engine.run(Sums(look, {}), client, expand_state(layout.template, 1), round_index=0)
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
        whose = self.module, self.client_method, self.layout, self.attached_data
        how = strategy.precision_plugin, strategy.root_device, self.training.seed, timeout
        setup = ClientSetup(*whose, *how, self.training.lr_decay)
        self._as_copied = settings_of(self.module)
        if self.client_method.needs_classes:
            _ = setup.class_counts  # which says before the start if there are none
        in_steps = self.training.steps is not None
        self.engine, choice = build_engine(wanted, clients_at_once, setup, self._warned, in_steps)
        self._learner = None
        choice = replace(choice, reason=reason) if reason else choice
        rank_zero_only(_log.info)(str(choice))
        if idle := setup.idle_clients():
            rank_zero_only(_log.info)(idle)
        return choice

    def log(self, values: Mapping[str, float]) -> None:
        """Log scalars of the round that goes on, which its entry in :attr:`history` gets too."""
        self.current.entry.metrics.update(values)

    def check_memory(self, whose: str, parts: Mapping[str, int]) -> None:
        """Say what a server callback is about to take of the memory for all clients.

        Args:
            whose: The server callback.
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
        multiple_of: int | None = None,
        max_chunk: int | None = None,
        keep: bool = True,
    ) -> Iterator[ClientUpdates]:
        """Have clients train locally; yield what they send, chunk by chunk of this rank's.

        They start where their :attr:`outer_method` says; private entries of the result are kept
        and don't appear in the updates. Traffic, failures and the clients' logs are recorded.

        Args:
            clients: All clients that take part ``[S]``; some never answer, as the round has it.
            send: Gets ids ``[C]``; returns what these clients are sent ``[C]``.
            epochs: Local epochs, in place of the federation's own epochs or steps.
            returns: Names of the entries that they send back; by default all that travel.
            multiple_of: Chunks are of a multiple of this many clients, if they hold more; the last
                has the rest. By default they are of about the same size.
            max_chunk: Clients in a chunk, at most.
            keep: Whether the clients keep what they have learnt.
        """
        work = partial(self.train_chunk, epochs=epochs)
        work = work if keep else partial(work, keep=False)
        for chunk in self._chunks(clients, multiple_of, max_chunk):
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
        work = partial(self.gradients_of_chunk, batches=batches)
        for chunk in self._chunks(clients):
            yield self._ask(chunk, send(chunk), work, returns)

    def losses(self, clients: Tensor, sent: TensorDict, split: Split = "train") -> Tensor:
        """Return the clients' mean losses ``[C]`` on a split at what they are sent ``[C]``.

        Losses are the client module's own, in evaluation mode; NaN for a client without samples or
        that fails, and is then left out of the round, and for all as long as there is no data.
        """
        if self.engine is None:
            return torch.full((len(clients),), torch.nan, dtype=torch.double)
        states = self.start_states(clients, sent)
        found, failures = self.engine.run(Loss(split), clients, states, round_index=self.rounds)
        self.leave_out(failures, "to tell its loss")
        told = [float(own["loss"]) if own else torch.nan for own in found]
        return torch.tensor(told, dtype=torch.double, device=self.engine.device)

    def losses_of(
        self, clients: Tensor, models: Sequence[TensorDict], split: Split = "train"
    ) -> Tensor:
        """Return the clients' :meth:`losses` ``[K, C]`` at each of several models ``[C]``."""
        return torch.stack([self.losses(clients, sent, split) for sent in models])

    def judged(self, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Return the full states ``[C]`` by which clients are judged that are sent this now."""
        states = self.outer_method.start_states(self, clients, sent)
        if self.outer_method.judging_memory is not None:
            states = self.historical(clients, states)
        return self.model("", clients, sent, states)

    def model(self, tag: str, clients: Tensor, sent: TensorDict, states: TensorDict) -> TensorDict:
        """Return one of the clients' models ``[C]``: full states.

        Args:
            tag: Which, as in :meth:`pflight.method.ClientMethod.models`.
            clients: Ids ``[C]``.
            sent: What the server sends them now ``[C]``.
            states: With what its rule begins ``[C]``; the model itself if there is no rule.

        Raises:
            ConfigurationError: If a rule changes tensors in place.
        """
        rule = self.outer_method.models().get(tag)
        if rule is None:
            return states
        make = partial(rule, self, clients, sent, states)
        return self.made(f"models(): the rule of {tag!r}", clients, make, states)

    def by_tuning(self, clients: Tensor) -> list[tuple[Tensor, int]]:
        """Group the clients ``[C]`` by how many epochs they are fine-tuned before they are judged.

        Newcomers are a group of their own, if the option ``newcomer_epochs`` says so.
        """
        epochs, own = self.training.finetune_epochs, self.training.newcomer_epochs
        if own is None or own == epochs:
            return [(clients, epochs)]
        new = torch.isin(clients, self.newcomers.to(clients))
        groups = (clients[~new], epochs), (clients[new], own)
        return [(group, count) for group, count in groups if len(group)] or [(clients, epochs)]

    def has_memory(self, clients: Tensor) -> Tensor:
        """Return a mask ``[C]`` of the clients that keep private entries from an earlier round."""
        return self.memory.seen(PRIVATE, clients)

    # What the server callback stores by client, on the rank that has it

    def store(self, clients: Tensor, states: TensorDict) -> None:
        """Store something for each of the clients ``[C]``, which no client gets to see."""
        self.memory.write(STORED, clients, states)

    def stored(self, clients: Tensor, default: TensorDict) -> TensorDict:
        """Return what was stored for the clients ``[C]``, or a row of ``default``."""
        return self.memory.read(STORED, clients, default)

    def has_stored(self, clients: Tensor) -> Tensor:
        """Return a mask ``[C]`` of the clients for which something is stored."""
        return self.memory.seen(STORED, clients)

    # A round

    def leave_out(self, failures: Sequence[ClientFailure], doing: str) -> None:
        """Note failures, as :meth:`note_failures` does, and leave these clients out of the round.

        Raises:
            ClientError: To stop the run.
        """
        self.note_failures(failures, doing)
        failed = torch.tensor([failure.client for failure in failures], dtype=torch.long)
        self.current.silent = torch.cat([self.current.silent, failed])

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

    def begin_round(self) -> Failures:
        """Forget the round before, draw who never answers in the next, and return its failures."""
        if self._as_copied is not None:
            check_unchanged(self.module, self._as_copied)
        self.at_round(self.rounds)
        index, everybody = self.rounds, self.cohorts.clients
        silent = everybody[~self.cohorts.answers(index, everybody)]
        self.current, self.aside = CurrentRound(Round(index, []), True, silent), Aside()
        return self.failures_of(index, "it is left out of this round")

    def end_round(self, failed: Iterable[int]) -> dict[str, float]:
        """Combine the round over ranks, enter it into the history, and return what to log of it.

        Args:
            failed: The clients of this rank that failed.
        """
        entry = self.current.entry
        self.current.silent = self.current.silent[:0]  # all may be asked between rounds
        entry.failed += failed
        entry.combine_ranks(self.current.logs)
        aside = self.aside.take()
        entry.bytes_down += aside.down
        entry.bytes_up += aside.up
        self.history.append(entry)
        return entry.metrics | self.traffic.count(entry)

    def _chunks(
        self, clients: Tensor, multiple_of: int | None = None, max_chunk: int | None = None
    ) -> Iterator[Tensor]:
        """Split the clients of a round, this rank's, into chunks whose models fit into memory."""
        size = max(self.attached_engine.chunk, _CHUNK_BYTES // max(1, self.layout.nbytes))
        size = size if max_chunk is None else min(size, max_chunk)
        mine = owned(clients)
        if not len(mine):
            return
        if multiple_of is not None and size > multiple_of:
            yield from mine.split(size - size % multiple_of)
            return
        parts = -(-len(mine) // size)
        if multiple_of is not None or max_chunk is not None:  # its caller steps in this order
            yield from mine.tensor_split(parts)
            return
        order = self.attached_data.num_samples("train")[mine.cpu()].argsort(stable=True)
        for part in mine[order.to(mine.device)].tensor_split(parts):
            yield part.sort().values  # clients of like sizes, since they end together

    def _ask(
        self,
        clients: Tensor,
        sent: TensorDict,
        work: Callable[[Tensor, TensorDict, tuple[str, ...]], ClientUpdates],
        returns: Iterable[str] | None = None,
    ) -> ClientUpdates:
        """Have the clients of a chunk do something with what they are sent; count what travels."""
        current, callback = self.current, self.callback
        assert callback is not None
        entry = current.entry
        entry.clients += clients.tolist()
        entry.bytes_down += callback.bytes_down(clients, sent)
        answers = current.answers(clients)
        if not answers.all():
            entry.failed += clients[~answers].tolist()
            clients, sent = clients[answers], sent[answers]
        returned = (*callback.sent_names,) if returns is None else (*returns,)
        updates = work(clients, sent, returned)
        self.note_failures(updates.failures)
        add_logs(current.logs, updates.logs)
        if leaking := {*self.layout.private} & {*sent.keys(), *returned}:
            raise ConfigurationError(
                f"{type(callback).__name__} sends what stays with the clients: "
                f"{', '.join(sorted(leaking))}"
            )
        updates = replace(updates, states=updates.states.select(*returned))
        self.buffers.look(clients, sent, updates, entry.index)
        entry.bytes_up += self.packed_bytes_up(updates)
        return updates

    def train_chunk(
        self,
        clients: Tensor,
        sent: TensorDict,
        returns: Collection[str],
        epochs: int | None = None,
        keep: bool = True,
    ) -> ClientUpdates:
        """Return what clients of a chunk ``[C]`` send after training, also at a node.

        Args:
            clients: Ids ``[C]``.
            sent: What they are sent ``[C]``.
            returns: Names of the entries that they send back.
            epochs: Number of local epochs; by default as the federation says.
            keep: Whether they keep private entries and memory.
        """
        engine = self.attached_engine
        starts = self.before_training(clients, sent)
        kept: Kept | None = None
        if self.client_method.remembers:
            kept = self.all_remembered(clients, starts)
            kept = self.client_method.recall(self, clients, starts, kept)
        updates = engine.train(
            clients,
            starts,
            round_index=self.current.entry.index,
            epochs=epochs or self.training.epochs,
            steps=None if epochs else self.training.steps,
            kept=kept,
            on_client_end=self.on_client_end,
        )
        idle = ~engine.setup.has_batches(updates.clients)
        if idle.any():  # who has learnt nothing has nothing to say, and weighs nothing
            before = starts[torch.isin(clients, updates.clients)]
            updates = updates.where(~idle | moved(before, updates.states, self.layout.parameters))
        updates = self.finished(clients, starts, updates)
        message = self.transformed(clients, sent, updates, returns, keep=keep)
        if not keep:
            return message
        if len(message.clients) < len(updates.clients):
            updates = updates.where(torch.isin(updates.clients, message.clients))
        ids = updates.clients
        if len(ids) < len(clients):
            starts = starts[torch.isin(clients, ids)]
        if message is not updates:
            mirrored = self.client_method.mirror(self, ids, updates.states, starts, message.states)
            updates = replace(updates, states=mirrored)
        for listener in self.on_updates:
            listener(updates)
        self._keep(starts, updates)
        if updates.kept is not None:
            self.memory.write(MEMORY, ids, updates.kept)
        self.outer_method.keep(self, ids, starts, updates.states)
        return message

    def gradients_of_chunk(
        self,
        clients: Tensor,
        sent: TensorDict,
        returns: Collection[str],
        batches: int | None = None,
    ) -> ClientUpdates:
        """Return the gradients that clients of a chunk ``[C]`` send, also at a node.

        Args:
            clients: Ids ``[C]``.
            sent: What they are sent ``[C]``.
            returns: Names of the entries that they send back.
            batches: Number of batches; by default all.
        """
        engine, index = self.attached_engine, self.current.entry.index
        starts = self.start_states(clients, sent)
        updates = engine.gradients(clients, starts, round_index=index, batches=batches)
        updates = updates.where(engine.setup.has_batches(updates.clients))
        if len(updates.clients) < len(clients):
            starts = starts[torch.isin(clients, updates.clients)]
        self._keep(starts, updates, but={*self.layout.parameters})
        return self.transformed(clients, sent, updates, returns, gradients=True)

    def _keep(self, starts: TensorDict, updates: ClientUpdates, but: Collection[str] = ()) -> None:
        """Keep the private entries of those that answered.

        Args:
            starts: Where they started ``[C]``.
            updates: What they have trained ``[C]``.
            but: Names of entries that stay as they were, since these are gradients.
        """
        assert self.callback is not None
        self._warn_of_explosions(updates, starts)
        if kept := self.callback.kept_names:
            own = {name: (starts if name in but else updates.states)[name] for name in kept}
            batch_size = updates.states.batch_size
            self.memory.write(PRIVATE, updates.clients, TensorDict(own, batch_size=batch_size))

    def _warn_of_explosions(self, updates: ClientUpdates, starts: TensorDict) -> None:
        """Warn of clients whose parameters, or gradient, have grown out of all proportion."""
        names = self.layout.parameters
        growth = largest_values(updates.states, names) / largest_values(starts, names).clamp(min=1)
        for row in (growth > _EXPLODED).nonzero().flatten().tolist():
            client = self.numbered(int(updates.clients[row]))
            warnings.warn(
                f"round {self.current.entry.index}: client {client} exploded: "
                f"its largest value has grown {float(growth[row]):.1e} times; it is taken as it is",
                stacklevel=2,
            )

"""What the clients of a federation are, keep and do by themselves, each with its own samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, Protocol

import lightning as L
import torch
from tensordict import TensorDict
from torch import Tensor

from .data.client_names import drawn
from .data.data_module import FederatedDataModule
from .data.loaders import SPLITS, Split
from .engines.alone.engine import Engine, SequentialEngine
from .engines.base import finite_rows, what_is_odd
from .engines.client_setup import ClientSetup
from .engines.passes import Rows, Sums
from .errors import ConfigurationError
from .history import Logs, Round
from .local_client import Measure, Pass
from .method import ClientMethod
from .randomness import Purpose, generator
from .runs.distributed import all_sum
from .runs.failures import Failures
from .runs.memory import ClientMemory
from .states.head import Head, head_of
from .states.made import made
from .states.server_models import ServerModels
from .states.state import StateLayout, entries, state_bytes
from .states.updates import ClientFailure, ClientUpdates, Kept
from .transforms.base import Transform
from .transforms.pipeline import Pipeline

PRIVATE = "private"
"""The memory slot of entries that never travel."""
MEMORY = "memory"
"""The memory slot of what client methods remember."""


class ServerSide(Protocol):
    """What the clients have to know of the server callback of an algorithm."""

    sends_model: bool
    sends_gradients: bool

    @property
    def transforms(self) -> Sequence[Transform]:
        """What changes updates before they travel."""

    @property
    def needs_head(self) -> bool:
        """Whether the head of the clients' network has to be known."""

    def freeze(self, module: L.LightningModule) -> None:
        """Freeze what modifiers name in a copy of the client module."""

    def add_side_path(self, module: L.LightningModule) -> None:
        """Add the hooks of a side path to a copy of the client module, if there is one."""

    def staying_names(self, module: L.LightningModule, layout: StateLayout) -> set[str]:
        """Return the names of the entries of a state that stay with the client."""

    @property
    def kept_names(self) -> tuple[str, ...]:
        """Names of the entries of a state that clients keep between rounds."""

    @property
    def sent_names(self) -> tuple[str, ...]:
        """Names of the entries of a state that travel."""

    def bytes_down(self, clients: Tensor, sent: TensorDict) -> int:
        """Return the bytes sent to the clients ``[C]``."""

    def bytes_up(self, updates: ClientUpdates) -> int:
        """Return the bytes that the clients of a chunk sent."""


@dataclass(frozen=True)
class TrainingOptions:
    """How clients train and are judged.

    Attributes:
        epochs: Epochs of local training in a round.
        steps: Batches in place of epochs, or ``None``.
        finetune_epochs: Epochs of fine-tuning before a client is judged.
        newcomer_epochs: The same for newcomers, or ``None`` if it is the same number.
        on_client_error: What becomes of a client that fails.
        seed: Keys all randomness.
        lr_decay: What the step sizes are multiplied by in each round after the first.
    """

    epochs: int = 1
    steps: int | None = None
    finetune_epochs: int = 0
    newcomer_epochs: int | None = None
    on_client_error: Literal["skip", "raise"] = "skip"
    seed: int = 0
    lr_decay: float = 1.0


@dataclass
class CurrentRound:
    """What is known of a round while it goes on.

    Attributes:
        entry: Its entry in the history.
        goes_on: Whether it has begun and not ended.
        silent: Ids of all clients that never answer in it, on the CPU.
        logs: What the clients logged.
        histograms: Distributions for TensorBoard, by name.
    """

    entry: Round
    goes_on: bool = False
    silent: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    logs: Logs = field(default_factory=dict)
    histograms: dict[str, Tensor] = field(default_factory=dict)

    def answers(self, clients: Tensor) -> Tensor:
        """Return a mask ``[C]`` of the clients that answer, as far as is known by now."""
        return ~torch.isin(clients.cpu(), self.silent).to(clients.device)


@dataclass
class Aside:
    """What clients exchange with the server beside a round, to find where they belong.

    Attributes:
        down: Bytes sent to clients.
        up: Bytes received from clients.
    """

    down: int = 0
    up: int = 0

    def take(self) -> Aside:
        """Return the sums over all ranks, and start again at 0. Every rank has to call it."""
        down, up = all_sum(torch.tensor([self.down, self.up])).tolist()
        self.down = self.up = 0
        return Aside(down, up)


class ClientWork:
    """All clients of a federation by themselves, of which each rank simulates those that it owns.

    What they have as a :class:`~pflight.local_client.LocalWork`, from an engine and a memory.

    Args:
        module: The client module.
        layout: Its state layout, with all that the client method adds.
        client_method: The client method.
        server: The server's models, of which clients know the first one's initial values.
        memory: Where the clients keep things.
        training: How they train.

    Attributes:
        num_clients: Number of clients; 0 before there is data.
        data: Their samples, or ``None`` before a Trainer has run them.
        data_round: The round to which these samples belong, if data drift.
        engine: What trains them, likewise.
        callback: The server callback of the algorithm.
        outer_method: The client method for what they do around their training, by default the
            same.
        history: An entry for every round so far.
        current: The round that goes on.
        aside: Traffic beside rounds, since the last round or evaluation ended.
    """

    def __init__(
        self,
        module: L.LightningModule,
        layout: StateLayout,
        client_method: ClientMethod,
        server: ServerModels,
        memory: ClientMemory,
        training: TrainingOptions,
    ) -> None:
        self.module = module
        self.layout = layout
        self.client_method = client_method
        self.outer_method: ClientMethod = client_method
        self.server = server
        self.memory = memory
        self.training = training
        self.num_clients = 0
        self.data: FederatedDataModule | None = None
        self.data_round = 0
        self.engine: Engine | None = None
        self.callback: ServerSide | None = None
        self.history: list[Round] = []
        self.current = CurrentRound(Round(0, []))
        self.aside = Aside()
        self._failures = self.failures_of(0, "it is left out")
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

    def numbered(self, client: int) -> str:
        """Return a client's number, for people, with its name if the data know it."""
        return str(client) if self.data is None else self.data.numbered(client)

    def label(self, client: int) -> str:
        """Return the :meth:`numbered` client for a picture."""
        return drawn(self.numbered(client))

    @property
    def head(self) -> Head:
        """The head of the clients' module."""
        return head_of(self.module)

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

    @property
    def has_samples(self) -> bool:
        """Whether there are samples: not where a federation is loaded without its data."""
        return self.engine is not None

    @property
    def batch_size(self) -> int:
        """Samples in a batch of local training, at most."""
        return self.attached_data.batch_size or int(self.num_samples.max())

    @property
    def num_samples(self) -> Tensor:
        """Number of training samples of every client ``[num_clients]``."""
        return self.attached_data.num_samples("train")

    @property
    def mean_samples(self) -> float:
        """Mean number of training samples of the clients that may train."""
        return self.attached_engine.setup.mean_samples

    def at_round(self, round: int) -> None:
        """Give the clients the data that they have in a round.

        Raises:
            ConfigurationError: If a client would have more or fewer samples than before.
        """
        data, self.data_round = self.attached_data, round
        if not data.drifts:
            return
        before = [data.num_samples(split).clone() for split in SPLITS]
        data.at_round(round)
        for split, counts in zip(SPLITS, before, strict=True):
            if len(changed := (data.num_samples(split) != counts).nonzero().flatten()):
                client = int(changed[0])
                raise ConfigurationError(
                    f"{type(data).__name__}.at_round({round}) changes the number of client "
                    f"{data.numbered(client)}'s {split} samples, which must stay the same: "
                    f"{counts[client]} became {data.num_samples(split)[client]}"
                )
        if self.engine is not None:
            vars(self.engine.setup).pop("class_counts", None)

    def num_samples_of(self, clients: Tensor) -> Tensor:
        """Return the clients' numbers of training samples ``[C]``."""
        return self.num_samples[clients.cpu()].to(self.device)

    def weights_of(self, clients: Tensor) -> Tensor:
        """Return what the clients ``[C]`` weigh in a mean by samples, on the CPU."""
        return self.num_samples[clients.cpu()]

    def class_counts_of(self, clients: Tensor) -> Tensor:
        """Return the clients' training samples by class ``[C, K]``."""
        counts = self.attached_engine.setup.class_counts
        return counts[clients.to(counts.device)]

    def num_batches(self, clients: Tensor) -> Tensor:
        """Return how many batches there are in a local epoch of the clients ``[C]``."""
        sizes = map(self.attached_engine.setup.batch_sizes, self.num_samples_of(clients).tolist())
        return torch.tensor([len(batches) for batches in sizes], dtype=torch.double)

    def random(self, client: int) -> torch.Generator:
        """Return what draws random numbers for a client, by seed and round."""
        return generator(Purpose.LOCAL_WORK, self.seed, self.rounds, client)

    # What they keep

    def start_states(self, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Return full states ``[C]``: what was kept, over what is sent, over the initial model."""
        assert self.callback is not None
        states = self.completed(clients, sent)
        if kept := self.callback.kept_names:
            states.update(self.memory.read(PRIVATE, clients, states.select(*kept)))
        return states

    def completed(self, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Return full states ``[C]``: what is sent, over the initial model's other entries."""
        states = {**self.server.expand(0, self.layout.names, len(clients)), **sent}
        return TensorDict(states, batch_size=[len(clients)])

    def remembered(self, clients: Tensor, states: TensorDict) -> Kept:
        """Return what the clients' methods kept, by default entries of ``states`` ``[C]``."""
        names = self.client_method.remembered(self.layout)
        return self._kept(clients, states, dict(zip(names, names, strict=True)))

    def all_remembered(self, clients: Tensor, states: TensorDict) -> Kept:
        """Return what the clients kept for their method and for terms of modifiers."""
        return self._kept(clients, states, self.client_method.all_remembered(self.layout))

    def _kept(self, clients: Tensor, states: TensorDict, names: Mapping[str, str]) -> Kept:
        """Return what the clients kept under some names, or these entries of ``states`` ``[C]``."""
        default = {name: states[entry] for name, entry in names.items()}
        return Kept(
            self.memory.read(MEMORY, clients, TensorDict(default, batch_size=states.batch_size)),
            self.memory.seen(MEMORY, clients),
        )

    def historical(self, clients: Tensor, states: TensorDict) -> TensorDict:
        """Return the states ``[C]``, with the model that each client remembers and is judged by."""
        names = self.client_method.all_remembered(self.layout)
        begin = self.outer_method.judging_memory or ""
        if begin:
            names = {name: entry for name, entry in names.items() if name.startswith(begin)}
        else:
            names = {name: entry for name, entry in names.items() if name == entry}
        kept = self._kept(clients, states, names).states
        own = {entry: kept[name] for name, entry in names.items()}
        return TensorDict({**states, **own}, batch_size=states.batch_size)

    def read(self, slot: str, clients: Tensor, default: TensorDict) -> TensorDict:
        """Return what was written into a slot of the clients' memory, by default ``default``."""
        return self.memory.read(slot, clients, default)

    def write(self, slot: str, clients: Tensor, states: TensorDict) -> None:
        """Write ``states`` ``[C]`` into a slot of the clients' memory."""
        self.memory.write(slot, clients, states)

    # What they do

    def train_aside(
        self,
        clients: Tensor,
        sent: TensorDict,
        round_index: int | None = None,
        epochs: int | None = None,
        returns: Collection[str] | None = None,
    ) -> ClientUpdates:
        """Train the clients ``[C]`` aside from any round: nothing is kept.

        So a newcomer finds out where it belongs. The traffic counts in :attr:`aside`.

        Args:
            clients: Ids ``[C]``.
            sent: What they are sent ``[C]``.
            round_index: Keys the order of batches and all other randomness; by default as if there
                were another round now.
            epochs: Local epochs, in place of the federation's own epochs or steps.
            returns: Names of the entries that they send back; by default all that travel.
        """
        starts = self.before_training(clients, sent)
        updates = self.attached_engine.train(
            clients,
            starts,
            round_index=self.rounds if round_index is None else round_index,
            epochs=epochs or self.training.epochs,
            steps=None if epochs else self.training.steps,
        )
        self.note_failures(updates.failures, "to find its place")
        updates = self.finished(clients, starts, updates)
        assert self.callback is not None
        names = self.callback.sent_names if returns is None else returns
        updates = self.transformed(clients, sent, updates, names, keep=False)
        busy = self.attached_engine.setup.has_batches(updates.clients)
        self.count_aside(clients, sent, updates if busy.all() else updates.where(busy), names)
        return updates

    def count_aside(
        self,
        clients: Tensor,
        sent: TensorDict,
        updates: ClientUpdates | None = None,
        returns: Collection[str] | None = None,
    ) -> None:
        """Count what the clients ``[C]`` are sent aside from a round, and what they send.

        Args:
            clients: Ids ``[C]``.
            sent: What they are sent ``[C]``.
            updates: What they send back, if they do.
            returns: As in :meth:`train_aside`.
        """
        assert self.callback is not None
        self.aside.down += len(clients) * state_bytes(sent)
        if updates is not None:
            returned = self.callback.sent_names if returns is None else returns
            names = [name for name in returned if name in updates.states]
            updates = replace(updates, states=updates.states.select(*names))
            self.aside.up += self.packed_bytes_up(updates)

    def packed_bytes_up(self, updates: ClientUpdates) -> int:
        """Return the bytes that clients sent, packed where a transform allows it."""
        assert self.callback is not None
        return self.callback.bytes_up(updates) - updates.bytes_saved * len(updates.clients)

    def pipeline(self, returns: Collection[str], gradients: bool = False) -> Pipeline:
        """Return the transforms of what clients send.

        Args:
            returns: Names of the entries.
            gradients: Whether these are gradients.
        """
        assert self.callback is not None
        none = gradients and not self.callback.sends_gradients
        transforms = () if none else self.callback.transforms
        return Pipeline(transforms, self.layout, returns, gradients)

    def transformed(
        self,
        clients: Tensor,
        sent: TensorDict,
        updates: ClientUpdates,
        returns: Collection[str],
        *,
        keep: bool = True,
        gradients: bool = False,
    ) -> ClientUpdates:
        """Return updates as they travel; what is left out of them is kept with the clients.

        Args:
            clients: Ids ``[C]``.
            sent: What they were sent ``[C]``.
            updates: Of those that have trained.
            returns: Names of the entries that they send back.
            keep: Whether to use and keep what is left out.
            gradients: Whether these are gradients.
        """
        pipeline = self.pipeline(returns, gradients)
        if not pipeline:
            return updates
        ids, memory = updates.clients, None
        if len(ids) < len(clients):
            sent = sent[torch.isin(clients, ids)]
        if keep and pipeline.remembers:
            empty = pipeline.empty_memory(len(ids), ids.device)
            memory = self.memory.read(pipeline.slot, ids, empty)
        first = self.rounds == 0
        updates, left = pipeline.run(sent, updates, memory, self._random_transform, first)
        sound = self._sound(updates)
        if keep and left is not None:
            self.memory.write(pipeline.slot, ids[sound], left[sound])
        return updates.where(sound)

    def _random_transform(self, client: int) -> torch.Generator:
        return generator(Purpose.TRANSFORM, self.seed, self.rounds, client)

    def own_gradients(self, clients: Tensor, states: TensorDict) -> TensorDict:
        """Return each client's gradient over all its samples, at its state ``[C]``."""
        index = self.current.entry.index
        updates = self.attached_engine.gradients(clients, states, round_index=index)
        self.note_failures(updates.failures, "to take its gradient")
        return _or_nan(updates, clients, states).select(*self.layout.parameters)

    def finetune(
        self,
        clients: Tensor,
        states: TensorDict,
        *,
        epochs: int = 1,
        steps: int | None = None,
        doing: str = "to be fine-tuned",
        or_nan: bool = False,
    ) -> TensorDict:
        """Return copies of the states ``[C]`` trained on the task's loss alone.

        Without an anchor, penalties vanish. A client whose training fails keeps its state, or gets
        NaN.
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
        lay = _or_nan if or_nan else _laid_over
        return lay(updates, clients, states)

    def run(
        self, look: Pass, clients: Tensor, states: TensorDict
    ) -> list[dict[str, Tensor] | None]:
        """Return what a pass finds out of each client's own samples, by client."""
        if look.split not in SPLITS or (look.batch_size is not None and look.batch_size < 1):
            raise ConfigurationError(
                f"{type(look).__name__}: split must be one of {', '.join(SPLITS)} and batch_size a "
                f"positive number or None, got {look.split!r} and {look.batch_size!r}"
            )
        found, failures = self.attached_engine.run(look, clients, states, round_index=self.rounds)
        self.note_failures(failures, "to look through its samples")
        failed = {failure.client for failure in failures}
        device = next(iter(states.values())).device  # after a fit on a GPU it is the CPU again
        here = [{name: value.to(device) for name, value in own.items()} for own in found]
        ids = clients.tolist()
        return [None if i in failed else own for i, own in zip(ids, here, strict=True)]

    def sums(
        self,
        clients: Tensor,
        states: TensorDict,
        measure: Measure,
        like: Mapping[str, Tensor],
        batch_size: int | None = None,
    ) -> TensorDict:
        """Return sums over each client's training samples ``[C]``."""
        columns = {
            name: zero.new_zeros(len(clients), *zero.shape).to(self.device)
            for name, zero in like.items()
        }
        found = self.run(Sums(measure, like, batch_size), clients, states)
        for row, own in enumerate(found):
            for name, column in columns.items():
                if own is None:
                    column[row] = torch.nan
                elif own:
                    column[row] = own[name]
        return TensorDict(columns, batch_size=[len(clients)])

    def rows(
        self, clients: Tensor, states: TensorDict, measure: Measure, split: Split = "train"
    ) -> list[dict[str, Tensor] | None]:
        """Return what each of a client's samples of a split gives, by client."""
        return self.run(Rows(measure, split), clients, states)

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
        """Return ``starts`` ``[C]`` as another module trains them; NaN for a client that fails."""
        if self._learner is None:
            setup, module = self.attached_engine.setup, build(self.module)
            how = setup.precision, setup.device, setup.seed, setup.client_timeout
            other = ClientSetup(module, ClientMethod(), StateLayout.of(module), setup.data, *how)
            other.mixes_samples = setup.mixes_samples  # as where the clients' own trains
            self._learner = SequentialEngine(other)
            self._learner.check_input()
        index, purpose = self.current.entry.index, Purpose.FINETUNE
        updates = self._learner.train(
            clients, starts, round_index=index, epochs=epochs, steps=steps, purpose=purpose
        )
        self.note_failures(updates.failures, doing)
        return _or_nan(updates, clients, starts)

    def before_training(self, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Return the states ``[C]`` from which clients train that are sent this."""
        make = partial(self.outer_method.before_training, self, clients, sent)
        return self.made("before_training()", clients, make, sent)

    def made(
        self, what: str, clients: Tensor, make: Callable[[], TensorDict], given: TensorDict
    ) -> TensorDict:
        """Return full states ``[C]`` that the client method makes of what it is given.

        Raises:
            ConfigurationError: As in :func:`~pflight.states.made.made`.
        """
        whose = f"{type(self.outer_method).__name__}.{what}"
        return made(whose, self.layout, clients, make, given, self.server.parameters())

    def finished(
        self, clients: Tensor, starts: TensorDict, updates: ClientUpdates
    ) -> ClientUpdates:
        """Return what clients make of their training; those that get a NaN have failed."""
        if type(self.outer_method).finish is ClientMethod.finish or not len(updates.clients):
            return updates
        if len(updates.clients) < len(clients):
            starts = starts[torch.isin(clients, updates.clients)]
        ids, trained = updates.clients, updates.states
        make = partial(self.outer_method.finish, self, ids, starts, trained)
        states = self.made("finish()", ids, make, starts)
        updates = replace(updates, states=states)
        return updates.where(self._sound(updates))

    def _sound(self, updates: ClientUpdates) -> Tensor:
        """Return a mask ``[C]`` of clients whose state is finite; the others have failed."""
        sound = torch.tensor(finite_rows(updates.states), dtype=torch.bool)
        odd = (~sound).nonzero().flatten().tolist()
        self.note_failures(
            ClientFailure(int(updates.clients[row]), what_is_odd(updates.states[row : row + 1]))
            for row in odd
        )
        return sound.to(updates.clients.device)

    # Failures

    def failures_of(self, round_index: int, consequence: str, together: bool = True) -> Failures:
        """Return an empty set of clients that fail at something; see :class:`Failures`."""
        how = self.training.on_client_error, together, self.numbered
        return Failures(round_index, consequence, *how)

    @contextmanager
    def noting(self, failures: Failures) -> Iterator[None]:
        """Note the clients that fail meanwhile among these failures. A round ends with it."""
        before, self._failures = self._failures, failures
        try:
            yield
        finally:
            self._failures = before
            self.current.goes_on = False

    def note_failures(self, failures: Iterable[ClientFailure], doing: str = "") -> None:
        """Leave clients out of what is going on and warn, or stop, as ``on_client_error`` says.

        Args:
            failures: Clients of this rank.
            doing: What they did when they failed, after "failed"; by default they trained.

        Raises:
            ClientError: To stop the run.
        """
        self._failures.note(failures, doing)

    def note_sound(self, count: int) -> None:
        """Note that so many clients of this rank did not fail in what is going on."""
        self._failures.sound += count


def _laid_over(updates: ClientUpdates, clients: Tensor, states: TensorDict) -> TensorDict:
    """Return the trained states ``[C]``, and those of ``states`` of clients that failed."""
    if not updates.failures:
        return updates.states
    trained = states.select(*updates.states.keys()).clone()
    trained[torch.isin(clients, updates.clients)] = updates.states
    return trained


def _or_nan(updates: ClientUpdates, clients: Tensor, states: TensorDict) -> TensorDict:
    """Return the updated states ``[C]``, and NaN in place of ``states`` of clients that failed."""
    if not updates.failures:
        return updates.states
    values = {name: value.clone() for name, value in entries(states)}
    for value in filter(Tensor.is_floating_point, values.values()):
        value.fill_(torch.nan)
    return _laid_over(updates, clients, TensorDict(values, batch_size=[len(clients)]))

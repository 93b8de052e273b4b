"""The federation: one communication round is one training step of a LightningModule."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from .checkpoint import AtomicCheckpointIO, read_checkpoint
from .checks import (
    check_data,
    check_given,
    check_memory,
    check_record,
    check_same_options,
    check_trainer,
    other_options,
)
from .data_module import FederatedDataModule
from .distributed import owned
from .engines.base import Engine, Setting
from .engines.choice import Choice, EngineName, build_engine
from .engines.updates import ClientFailure, ClientUpdates, Evaluation, Kept
from .errors import ConfigurationError
from .evaluation import ClientModels, Evaluator, Judged
from .failures import Failures
from .fedavg import FedAvg
from .half import Half, half_of, layout_with
from .history import Journal, Round, Traffic, add_logs, load_history
from .host import check_fits, readable
from .loaders import Split
from .memory import ClientMemory, MappedMemory
from .metrics import F1Average
from .monitors import check_monitor, check_monitors
from .options import check_optimizer, check_range, check_types, described
from .randomness import Purpose, derive_seed, isolated, seed_everything
from .same_data import difference, record_of
from .server import ServerModels
from .server_callback import ServerCallback
from .state import StateLayout, largest_values, moved, state_bytes, state_tensors

_log = logging.getLogger("lightning.pytorch.pflight")
_EXPLODED = 1e6  # times the largest value that a client started from, or 1
_CHUNK_BYTES = 16 * 2**20  # a chunk of updates takes about this much memory
_NAMED = 5  # clients in a message about many
_PRIVATE = "private"  # the memory slot of entries that never travel
_MEMORY = "memory"  # and of what client modules remember
_PER_ROUND: dict[str, Any] = {"on_step": False, "on_epoch": True, "batch_size": 1}
_SHOWN = ("val/micro_acc", "val/macro_acc", "test/micro_acc", "test/macro_acc")
_MEANINGLESS = (  # Lightning's hints that don't hold for a federation
    "The number of training batches .* is smaller than the logging interval",
    "It is recommended to use .*sync_dist=True",
)


class Federation(L.LightningModule):
    """Clients that train one model each, and the server between them, as a LightningModule.

    A cohort of clients is a batch, a communication round is a training step and one epoch, and the
    server's update is an optimizer step, so that the stock ``lightning.Trainer`` runs a federation:
    ``max_epochs`` is the number of rounds and ``global_step`` counts them. The algorithm is the
    client module together with a :class:`~pflight.callbacks.ServerCallback` among the Trainer's
    callbacks; without one it is FedAvg. The data comes from a
    :class:`~pflight.datamodules.FederatedDataModule`.

    Args:
        client: The client module. Copies of it are trained; it is never changed.
        local_epochs: Epochs of local training in a round.
        local_steps: Batches of local training in a round, in place of ``local_epochs``.
        finetune_epochs: If positive, clients are judged by a copy that was fine-tuned for this many
            epochs on their training data, with the task loss alone, and is then discarded.
        server_optimizer: Builds the server optimizer from the server's parameters; by default the
            callback's own, SGD with step 1 for FedAvg.
        server_scheduler: Builds a learning-rate scheduler of the server optimizer, stepped once a
            round; a ``ReduceLROnPlateau`` watches its ``monitor``, or else ``val/macro_acc``.
        engine: How local training runs: ``"sequential"``, one client after the other;
            ``"vectorized"``, many at once with stacked parameters; or ``"auto"``, by a fixed rule
            on network, batch and device.
        clients_at_once: Clients that the vectorized engine trains at once; by default as many as
            the processor's caches or the GPU's memory hold.
        on_client_error: ``"skip"`` leaves a client that raises or returns NaN out of its round, or
            of what is measured, and warns; ``"raise"`` stops the run.
        client_timeout: Seconds after which a client that trains, or is evaluated, is interrupted
            and has failed, as far as Python can interrupt it: not within a call into a library. It
            trains clients one by one, in the main thread of a POSIX system.
        client_memory: Where clients' private entries and other states that they keep are held:
            in ``"ram"``, if all of them fit, and whole in each checkpoint; or on ``"disk"``, in the
            folder ``memory`` of ``trainer.default_root_dir``, which the run's checkpoints need.
        allow_other_data: Whether a run may go on from a checkpoint that was made with other data of
            as many clients, which is an error otherwise.
        seed: Keys all randomness of local training and of the server.
        f1_average: The classes over which F1 is averaged inside a client: those in its labels or
            predictions (``"union"``), in its labels (``"true"``), ``"all"``, or class 1 alone
            (``"binary"``).

    Attributes:
        client_half: The client half of the algorithm, the server callback's or the client's own.
        history: A :class:`~pflight.history.Round` for every round so far.
        on_updates: Functions that are called with each chunk of a round's updates as it arrives,
            full states, on the rank that trained the clients; for monitors.

    Raises:
        ConfigurationError: Before training starts, when options, data, network or checkpoint do
            not fit together.
        ClientError: With ``on_client_error="raise"``, naming the client and the round.

    Example:
        >>> import lightning as L, pflight, torch
        >>> train = [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(3)]
        >>> data = pflight.datamodules.TensorClients(train, num_classes=2)
        >>> client = pflight.models.ClientModule(torch.nn.Linear(4, 2), num_classes=2)
        >>> federation = pflight.Federation(client)
        >>> trainer = L.Trainer(max_epochs=2, accelerator="cpu", logger=False,
        ...     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        >>> trainer.fit(federation, datamodule=data)
        >>> [round.clients for round in federation.history]
        [[0, 1, 2], [0, 1, 2]]
    """

    def __init__(
        self,
        client: L.LightningModule,
        *,
        local_epochs: int = 1,
        local_steps: int | None = None,
        finetune_epochs: int = 0,
        server_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
        server_scheduler: Callable[[Optimizer], LRScheduler | ReduceLROnPlateau] | None = None,
        engine: EngineName = "auto",
        clients_at_once: int | None = None,
        on_client_error: Literal["skip", "raise"] = "skip",
        client_timeout: float | None = None,
        client_memory: Literal["ram", "disk"] = "ram",
        allow_other_data: bool = False,
        seed: int = 0,
        f1_average: F1Average = "union",
    ) -> None:
        # Not by a decorator: save_hyperparameters() looks for a subclass's in the frame that calls.
        check_types(Federation.__init__, self, locals())
        super().__init__()
        counts = {"local_steps": local_steps, "clients_at_once": clients_at_once}
        check_range(self, "[1, inf)", local_epochs=local_epochs, **counts)
        check_range(self, "[0, inf)", finetune_epochs=finetune_epochs, seed=seed)
        check_range(self, "(0, inf)", client_timeout=client_timeout)
        self.save_hyperparameters(
            ignore=["client", "server_optimizer", "server_scheduler"],
            logger=False,  # they are handed to loggers in setup()
        )
        self.automatic_optimization = False
        self.local_epochs = local_epochs
        self.local_steps = local_steps
        self.finetune_epochs = finetune_epochs
        self.server_optimizer = server_optimizer
        self.server_scheduler = server_scheduler
        self.engine = engine
        self.clients_at_once = clients_at_once
        self.on_client_error = on_client_error
        self.allow_other_data = allow_other_data
        self.client_timeout = client_timeout
        self.seed = seed
        self.f1_average = f1_average
        # In a tuple, so that the template is no submodule: its parameters are not the server's.
        self._client = (copy.deepcopy(client),)
        self.client.configure_model()
        self.layout = StateLayout.of(self.client)
        self.server = ServerModels(self.layout)
        self.callback: ServerCallback | None = None
        self.memory = ClientMemory() if client_memory == "ram" else MappedMemory()
        self.history: list[Round] = []
        self.on_client_end: Callable[[int], None] | None = None
        self.on_updates: list[Callable[[ClientUpdates], None]] = []
        self.num_clients = 0
        self.client_half = half_of(client) or Half()
        self._engine: Engine | None = None
        self._choice: Choice | None = None
        self._warned: set[str] = set()
        self._data: FederatedDataModule | None = None
        self._data_record: dict[str, Any] | None = None
        self._evaluators: dict[str, Evaluator] = {}
        self._round = Round(0, [])
        self._journal, self._traffic = Journal(), Traffic()
        self._failures = self._predict_failures = self.failures_of(0, "it is left out")
        self._silent = torch.empty(0, dtype=torch.long)
        self._logs: dict[str, tuple[Tensor, int]] = {}

    # What a user asks for

    @property
    def client(self) -> L.LightningModule:
        """The client module as it was given."""
        return self._client[0]

    @property
    def algorithm(self) -> str:
        """What results call the algorithm, such as FedEC for ``Reptile`` with an ElasticClient."""
        callback = self.attached_callback
        tuned = self.finetune_epochs > 0 and not callback.personalizes
        return callback.algorithm_name + " + fine-tuning" * tuned

    def server_states(self) -> list[dict[str, Tensor]]:
        """Return the server's models, each as in ``client.state_dict()``."""
        states = self.callback.server_states() if self.callback else []
        return [self.layout.state_dict(state) for state in states]

    def client_state(self, client: int) -> dict[str, Tensor]:
        """Return the model that a client is judged by, as in ``client.state_dict()``.

        With ``finetune_epochs`` it is fine-tuned as in evaluation. This needs the client's data, so
        a Trainer must have run this federation.

        Raises:
            ConfigurationError: For an unknown client, or before the federation has been set up.
        """
        if not 0 <= client < self.num_clients:
            known = f"clients are 0 to {self.num_clients - 1}" if self.num_clients else "none yet"
            raise ConfigurationError(f"unknown client {client}: {known}")
        clients = torch.tensor([client], device=self.device)
        failures = Failures(
            len(self.history), "its model is taken as it is", self.on_client_error, together=False
        )
        with self._server_work(), self.noting(failures):
            return self.layout.state_dict(ClientModels.of(self, clients).used[0])

    def client_module(self, client: int) -> L.LightningModule:
        """Return a client's own LightningModule: a new copy of the client with its weights.

        It is in evaluation mode, as the client is judged: call its ``train()`` to train it on.
        """
        module, state = copy.deepcopy(self.client), self.client_state(client)
        for name, tensor in state_tensors(module).items():
            tensor.data = tensor.data.to(state[name].dtype)  # a model trained in float64 stays one
        module.load_state_dict({**module.state_dict(), **state})
        return module.eval()

    def client_metrics(self, split: str = "test", model: Judged = "") -> dict[str, Tensor]:
        """Return every client's values of the last evaluation; all ranks have to call it.

        Args:
            split: ``"val"`` or ``"test"``.
            model: ``""`` for the model that a client uses, ``"server/"``, or ``"finetuned/"``.

        Returns:
            ``acc``, ``f1``, ``loss`` and ``num_samples``, tensors ``[num_clients]``; values are NaN
            for clients without samples.
        """
        if split not in self._evaluators:
            raise ConfigurationError(f"there has been no evaluation of {split!r} samples yet")
        return self._evaluators[split].per_client(model)

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls,
        checkpoint_path: str | os.PathLike[str],
        map_location: Any = "cpu",
        *,
        client: L.LightningModule | None = None,
        callback: ServerCallback | None = None,
        **options: Any,
    ) -> Federation:
        """Return the federation of a checkpoint, ready for use without its data.

        Args:
            checkpoint_path: A checkpoint that a Trainer saved.
            map_location: As in ``torch.load``.
            client: A client module of the architecture that was trained; its weights don't matter.
            callback: The server callback that trained it, with its options; it may be left out if
                that was FedAvg.
            **options: Arguments of :class:`Federation` to change.

        Raises:
            ConfigurationError: If the file can't be read, or is of another network or callback, or
                if one of the two is missing.
        """
        checkpoint = read_checkpoint(checkpoint_path, map_location)
        check_given(checkpoint.get("pflight") or {}, client, callback)
        assert client is not None
        saved = checkpoint.get("hyper_parameters", {})
        names = cls(client).hparams.keys()
        federation = cls(client, **{**{k: saved[k] for k in names if k in saved}, **options})
        record = checkpoint.get("pflight") or {}
        federation.num_clients = int(record.get("num_clients", 0))
        callback = callback or FedAvg()
        federation._take_half(callback)
        federation._set_up(callback)
        federation.on_load_checkpoint(checkpoint)
        federation.load_state_dict(checkpoint["state_dict"], assign=True)  # keeps float64
        return federation

    # What a server callback builds on

    @property
    def trainable_clients(self) -> Tensor:
        """Ids of the clients that may train, ascending; all if there is no data.

        One whose only batch is left out, a single sample in a network with BatchNorm, can't.
        """
        if self._data is None:
            return torch.arange(self.num_clients)
        clients = self._data.train_clients
        able = clients if self._engine is None else clients[self._engine.has_batches(clients)]
        return able if len(able) else clients  # where nobody learns anything, nothing moves

    @property
    def cohort_size(self) -> int:
        """Clients in a round, at most; 0 if there is no data."""
        return 0 if self._data is None else self._data.cohorts.size

    def check_memory(self, callback: ServerCallback, parts: Mapping[str, int]) -> None:
        """Say what a server callback is about to take of the memory for all clients.

        Args:
            callback: The server callback.
            parts: Bytes by what takes them.

        Raises:
            ConfigurationError: If there is not so much left, with all numbers.
        """
        whose = f"{type(callback).__name__} with num_clients={self.num_clients}"
        device = self.device if self._engine is None else self._engine.device
        for place in {torch.device("cpu"), device}:  # where it is made, and where it is then
            check_fits(place, whose, parts, "take fewer clients, or a smaller network")
        words = ", ".join(f"{readable(size)} for {part}" for part, size in parts.items())
        rank_zero_only(_log.info)(f"{whose} takes {words}")

    @property
    def num_samples(self) -> Tensor:
        """Number of training samples of every client ``[num_clients]``."""
        return self.attached_data.num_samples("train")

    def chunks(self, clients: Tensor, whole: int | None = None) -> Iterator[Tensor]:
        """Split the clients of a round, this rank's, into chunks whose models fit into memory.

        Args:
            clients: All clients that take part ``[S]``; which of them never answer is drawn here.
            whole: Chunks are of a multiple of this many clients, if they hold more, and the last
                has the rest; by default they are of about the same size.
        """
        answers = self.attached_data.cohorts.answers(self._round.index, clients.cpu())
        self._silent = clients[~answers.to(clients.device)]
        size = max(self.attached_engine.chunk, _CHUNK_BYTES // max(1, self.layout.nbytes))
        mine = owned(clients)
        if not len(mine):
            return
        if whole is not None and size > whole:
            yield from mine.split(size - size % whole)
        else:
            yield from mine.tensor_split(-(-len(mine) // size))

    def train_clients(
        self,
        clients: Tensor,
        sent: TensorDict,
        epochs: int | None = None,
        returns: Iterable[str] | None = None,
    ) -> ClientUpdates:
        """Train the clients ``[C]`` locally from what they are sent ``[C]``; return what they send.

        What is sent is laid over what a client kept; private entries of the result are kept again
        and don't appear in the updates. Traffic, failures and the clients' logs are recorded.

        Args:
            clients: Ids ``[C]``.
            sent: What they are sent ``[C]``.
            epochs: Local epochs, in place of the federation's own epochs or steps.
            returns: Names of the entries that they send back; by default all that travel.
        """
        return self._ask(clients, sent, partial(self._train, epochs=epochs), returns)

    def try_training(
        self, clients: Tensor, sent: TensorDict, round_index: int, epochs: int | None = None
    ) -> ClientUpdates:
        """Train the clients ``[C]`` aside from any round: nothing is recorded or kept.

        So a newcomer finds out where it belongs.

        Args:
            clients: Ids ``[C]``.
            sent: What they start from ``[C]``, laid over what they kept.
            round_index: Keys the order of batches and all other randomness.
            epochs: As in :meth:`train_clients`.
        """
        updates = self.attached_engine.train(
            clients,
            self.lay_over(clients, sent),
            round_index=round_index,
            epochs=epochs or self.local_epochs,
            steps=None if epochs else self.local_steps,
        )
        self.note_failures(updates.failures, "to find its place")
        return updates

    def client_losses(self, clients: Tensor, sent: TensorDict, split: Split = "train") -> Tensor:
        """Return the clients' mean losses ``[C]`` on a split at what they are sent ``[C]``.

        Losses are the client module's own, in evaluation mode; NaN for a client without samples or
        that fails, and is then left out of the round, and for all as long as there is no data.
        """
        if self._engine is None:
            return torch.full((len(clients),), torch.nan, dtype=torch.double)
        losses, failures = self._engine.losses(clients, self.lay_over(clients, sent), split)
        self.note_failures(failures, "to tell its loss")
        failed = torch.tensor([failure.client for failure in failures], dtype=torch.long)
        self._silent = torch.cat([self._silent, failed.to(self._silent.device)])
        return losses

    def client_gradients(
        self,
        clients: Tensor,
        sent: TensorDict,
        batches: int | None = None,
        returns: Iterable[str] | None = None,
    ) -> ClientUpdates:
        """Return the clients' gradients at what they are sent, over all or some samples.

        Args:
            clients: Ids ``[C]``.
            sent: What they are sent ``[C]``.
            batches: Take them over so many mini-batches in place of all samples.
            returns: As in :meth:`train_clients`.
        """

        def gradients(ids: Tensor, states: TensorDict) -> ClientUpdates:
            updates = self.attached_engine.gradients(
                ids, states, round_index=self._round.index, batches=batches
            )
            return updates.where(self.attached_engine.has_batches(updates.clients))

        return self._ask(clients, sent, gradients, returns)

    def failures_of(self, round_index: int, consequence: str) -> Failures:
        """Return an empty set of clients that fail at something; see :class:`Failures`."""
        return Failures(round_index, consequence, self.on_client_error)

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

    def lay_over(self, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Return full states ``[C]``: what is sent, over what was kept, over the initial model."""
        private = self.attached_callback.private
        if not private:
            return self.complete(clients, sent)
        initial = self.server.expand(0, private, len(clients))
        kept = self.memory.read(_PRIVATE, clients, initial)
        return self.complete(clients, TensorDict({**kept, **sent}, batch_size=[len(clients)]))

    def complete(self, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Return full states ``[C]``: what is sent, over the initial model's other entries."""
        states = {**self.server.expand(0, self.layout.names, len(clients)), **sent}
        return TensorDict(states, batch_size=[len(clients)])

    def remembered(self, clients: Tensor, states: TensorDict) -> Kept:
        """Return what the clients' modules kept, by default entries of ``states`` ``[C]``."""
        names = self.client_half.remembered(self.layout)
        return Kept(
            self.memory.read(_MEMORY, clients, states.select(*names)),
            self.memory.seen(_MEMORY, clients),
        )

    def has_kept(self, clients: Tensor) -> Tensor:
        """Return a mask ``[C]`` of the clients that keep private entries from an earlier round."""
        return self.memory.seen(_PRIVATE, clients)

    @property
    def last_round(self) -> int:
        """Index of the last round, 0 before the first."""
        return self.history[-1].index if self.history else 0

    @property
    def server_lr(self) -> float:
        """The step size of the server optimizer in this round."""
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        return float(optimizer.param_groups[0]["lr"])

    def copy_server_model(self, index: int) -> None:
        """Add a copy of a server model in the course of a round.

        The server optimizer steps it from now on, with what it has gathered for the original.
        """
        model, optimizer = copy.deepcopy(self.server[index]), self.optimizers()
        assert not isinstance(optimizer, list)
        originals = list(self.server[index].parameters())
        optimizer.param_groups[0]["params"] += list(model.parameters())
        for original, parameter in zip(originals, model.parameters(), strict=True):
            optimizer.state[parameter] = copy.deepcopy(optimizer.state.get(original, {}))
        self.server.append(model)

    def log_round(self, values: Mapping[str, float]) -> None:
        """Log scalars of the current round and add them to its entry in :attr:`history`."""
        self._round.metrics.update(values)

    def log_histogram(self, name: str, values: Tensor) -> None:
        """Log a distribution of the current round to TensorBoard, where there is one."""
        for logger in self.loggers:
            if isinstance(logger, TensorBoardLogger) and self.trainer.is_global_zero:
                logger.experiment.add_histogram(name, values, self._round.index)

    # What Lightning calls

    def configure_callbacks(self) -> list[L.Callback]:
        """Check the Trainer's options and add FedAvg where there is no server callback."""
        check_trainer(self.trainer)
        given = _server_callbacks(self.trainer)
        if len(given) > 1:
            names = " and ".join(type(callback).__name__ for callback in given)
            raise ConfigurationError(f"one server callback runs a federation, got {names}")
        return [] if given else [self.callback or FedAvg()]

    def setup(self, stage: str) -> None:
        """Bring client, data and callback together; set the server up once."""
        data = check_data(getattr(self.trainer, "datamodule", None), self.client)
        (callback,) = _server_callbacks(self.trainer)
        data = callback.local_data(data)
        if self.callback is not None and data.num_clients != self.num_clients:
            raise ConfigurationError(
                f"this federation was set up for {self.num_clients} clients, "
                f"the data has {data.num_clients}"
            )
        for hint in _MEANINGLESS:
            warnings.filterwarnings("ignore", hint)
        self._data, self._data_record = data, None
        self.num_clients = data.num_clients
        if stage == "fit":
            check_monitors(self)
        self._take_half(callback)
        self._choose_engine(self.engine, self.clients_at_once)
        self._name_idle_clients()
        self._set_up(callback)
        strategy = self.trainer.strategy
        # Lightning does so as well, but after it has loaded a checkpoint into what is there now.
        strategy.precision_plugin.convert_module(self)
        if type(strategy.checkpoint_io) is TorchCheckpointIO:
            strategy.checkpoint_io = AtomicCheckpointIO()
        check_memory(self.memory, strategy.checkpoint_io)
        self.memory.open(self.trainer.default_root_dir)
        if stage == "fit":
            self._check_client_memory()
        self._tell_loggers()

    def configure_optimizers(self) -> Any:
        """Return the server optimizer, with its scheduler if there is one."""
        self.attached_callback.prepare()
        build = self.server_optimizer or self.attached_callback.configure_optimizer
        schedule = self.server_scheduler or self.attached_callback.configure_scheduler
        try:
            optimizer = build(list(self.parameters()))
            check_optimizer(optimizer)
            scheduler = schedule(optimizer)
        except (TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ConfigurationError(f"the server's optimizer can't be built: {reason}") from error
        if isinstance(scheduler, ReduceLROnPlateau):
            check_monitor(self, "the server's ReduceLROnPlateau", _monitor(scheduler))
        return optimizer if scheduler is None else ([optimizer], [scheduler])

    def training_step(self, cohort: Tensor, batch_idx: int) -> None:
        """Run one communication round with a cohort of client ids ``[S]``."""
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)  # as configure_optimizers returns it
        optimizer.zero_grad()
        self._round = Round(self.current_epoch, [])
        self._logs = {}
        self._silent = cohort[:0]
        failures = self.failures_of(self.current_epoch, "it is left out of this round")
        with self._server_work(), self.noting(failures):
            self.attached_callback.round(cohort)
        failures.settle()
        self._round.failed += failures.clients
        self._end_round()
        optimizer.step()
        scheduler = self.lr_schedulers()
        if isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step()

    def on_train_epoch_end(self) -> None:
        """Step the server's scheduler if it waits for a metric, which only now is known."""
        scheduler = self.lr_schedulers()
        if isinstance(scheduler, ReduceLROnPlateau):
            monitor = _monitor(scheduler)
            if monitor in self.history[-1].metrics:
                scheduler.step(self.history[-1].metrics[monitor])

    def on_train_end(self) -> None:
        """Warn if the server's scheduler has never seen its metric."""
        scheduler = self.lr_schedulers()
        if isinstance(scheduler, ReduceLROnPlateau) and self.history:
            monitor = _monitor(scheduler)
            if not any(monitor in entry.metrics for entry in self.history):
                rank_zero_warn(
                    f"no round had {monitor!r}, which the server's ReduceLROnPlateau watches: the "
                    "step size was never reduced"
                )

    def on_fit_end(self) -> None:
        """Give every rank the whole client memory, so that any of them can be asked."""
        self.memory.load_state_dict(self.memory.state_of_all_ranks())

    def on_validation_epoch_start(self) -> None:
        """Start to judge all clients on their validation samples."""
        self._evaluators["val"] = Evaluator(self, "val")

    def validation_step(self, clients: Tensor, batch_idx: int) -> None:
        """Judge a chunk of clients ``[C]`` on their validation samples."""
        with self._server_work():
            self._evaluators["val"].judge(clients)

    def on_validation_epoch_end(self) -> None:
        """Log the means over clients."""
        values = self._evaluators["val"].means()
        self._log(values)
        if self.trainer.state.fn == "fit" and not self.trainer.sanity_checking:
            self.history[-1].metrics.update(values)

    def on_test_epoch_start(self) -> None:
        """Start to judge all clients on their test samples."""
        self._evaluators["test"] = Evaluator(self, "test")

    def test_step(self, clients: Tensor, batch_idx: int) -> None:
        """Judge a chunk of clients ``[C]`` on their test samples."""
        with self._server_work():
            self._evaluators["test"].judge(clients)

    def on_test_epoch_end(self) -> None:
        """Log the means over clients, those that were held out of training apart."""
        self._log(self._evaluators["test"].means())

    def on_predict_epoch_start(self) -> None:
        """Start to predict."""
        self._predict_failures = self.failures_of(
            self.last_round, "it is left out of the predictions"
        )

    def predict_step(
        self, clients: Tensor, batch_idx: int
    ) -> Evaluation | list[tuple[int, list[Any]]]:
        """Return the outputs of a chunk of clients ``[C]`` on their test samples.

        Of a module that is no task these are pairs of a client's id and what its own
        ``predict_step`` gives for each batch.
        """
        clients = owned(clients)
        with self._server_work(), self.noting(self._predict_failures):
            states = ClientModels.of(self, clients).used
            predictions, failures = self.attached_engine.predict(clients, states, "test")
            self.note_failures(failures, "to predict")
        if isinstance(predictions, Evaluation):
            return Evaluation(*(values.cpu() for values in predictions))
        return predictions

    def on_predict_epoch_end(self) -> None:
        """Stop if a client failed and that is to stop the run."""
        self._predict_failures.settle()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what a resumed run needs, as tensors and primitives."""
        if self.callback is None:  # saved because the set-up failed
            return
        checkpoint["pflight"] = {
            **self._record(),
            "engine": self._engine_record(),
            "history": self._journal.dump(self.history),
            "memory": self.memory.save(),
            "data": self._record_of_data(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that a checkpoint fits, and take over history and this rank's client memory."""
        record = checkpoint.get("pflight", {})
        state = checkpoint.get("callbacks", {}).get(self.attached_callback.state_key)
        if state is not None:  # it may tell how many models there are
            self.attached_callback.load_state_dict(state)
        check_record(record, self._record())
        if self._data is not None and self.trainer.state.fn == "fit":
            self._check_same_data(record.get("data"))
        callback = self.attached_callback
        kind, options = type(callback).__name__, record.get("options", {})
        if others := other_options(kind, options, callback._given):
            rank_zero_only(_log.warning)(others)
        self._go_on_with_engine(record.get("engine"))
        self.history = load_history(record["history"])
        self._traffic = Traffic(self.history)
        self._round = self.history[-1] if self.history else self._round  # what messages name
        mine = owned(torch.arange(self.num_clients)).tolist()
        self.memory.load(record["memory"], clients=set(mine))

    # Setting up

    def _record(self) -> dict[str, Any]:
        """Return what a checkpoint must agree with."""
        return {
            "callback": type(self.attached_callback).__name__,
            "options": {n: described(v) for n, v in self.attached_callback._given.items()},
            "num_clients": self.num_clients,
            "server_models": len(self.server),
            "layout": self.layout.describe(),
        }

    def _record_of_data(self) -> dict[str, Any] | None:
        """Return what tells the clients' data from others, found out once."""
        if self._data_record is None and self._data is not None:
            self._data_record = record_of(self._data)
        return self._data_record

    def _check_same_data(self, saved: dict[str, Any] | None) -> None:
        """Raise if a run would go on with other data, unless it may."""
        here = self._record_of_data()
        differing = difference(saved, here) if saved and here else None
        if differing and not self.allow_other_data:
            raise ConfigurationError(
                f"the checkpoint was made with other data: {differing}; go on with the data that "
                "the run began with, or, if you mean to change them, with allow_other_data=True "
                "(--model.allow_other_data true)"
            )
        if differing and self.trainer.is_global_zero:
            _log.info(f"going on with other data than the checkpoint's: {differing}")

    def _choose_engine(
        self, wanted: EngineName, clients_at_once: int | None, reason: str | None = None
    ) -> None:
        strategy = self.trainer.strategy
        setting = Setting(
            self.client,
            self.client_half,
            self.layout,
            self.attached_data,
            strategy.precision_plugin,
            strategy.root_device,
            self.seed,
            self.client_timeout,
        )
        self._engine, choice = build_engine(wanted, clients_at_once, setting, self._warned)
        self._choice = replace(choice, reason=reason) if reason else choice
        if self.trainer.is_global_zero:
            _log.info(str(self._choice))

    def _check_client_memory(self) -> None:
        """Raise if what the clients of all rounds are going to keep does not fit into RAM."""
        rounds = self.trainer.max_epochs
        asked = len(self.trainable_clients)
        if rounds is not None and rounds >= 0:
            asked = min(asked, rounds * self.cohort_size)
        if not isinstance(self.memory, MappedMemory) and asked:
            size = self.attached_callback.bytes_kept
            check_fits(
                torch.device("cpu"),
                "client_memory='ram'",
                {f"{asked} clients that keep {readable(size)} each": asked * size},
                "use client_memory='disk', or fewer clients",
            )

    def _tell_loggers(self) -> None:
        """Hand the hyper-parameters to the loggers, which write them beside their logs."""
        names = {"algorithm": self.algorithm, "client": type(self.client).__name__}
        for logger in self.loggers:
            if isinstance(logger, TensorBoardLogger):  # would log an empty hp_metric as well
                logger.hparams.update({**names, **self.hparams, **logger.hparams})
            else:
                logger.log_hyperparams({**names, **self.hparams})

    def _name_idle_clients(self) -> None:
        """Say which clients can't train on all that they have."""
        clients = self.attached_data.train_clients
        idle = clients[~self.attached_engine.has_batches(clients)].tolist()
        if idle and self.trainer.is_global_zero:
            named = ", ".join(map(str, idle[:_NAMED])) + ", ..." * (len(idle) > _NAMED)
            _log.info(
                f"{len(idle)} of {len(clients)} clients have a single sample, on which BatchNorm "
                f"can't train, and carry no weight: {named}"
            )

    def _engine_record(self) -> dict[str, Any] | None:
        """Return what a checkpoint says of the engine, without which a run's last bits differ."""
        if self._choice is None:
            return None
        return {"name": self._choice.engine, "clients_at_once": self._choice.chunk}

    def _go_on_with_engine(self, record: dict[str, Any] | None) -> None:
        """Train with what was chosen when the run began, if the rule would now choose otherwise."""
        here = self._engine_record()
        by_rule = self.engine == "auto" and self.clients_at_once is self.client_timeout is None
        if by_rule and here is not None and record not in (None, here):
            at_once = record["clients_at_once"] if record["name"] == "vectorized" else None
            self._choose_engine(record["name"], at_once, "as in the checkpoint")

    @property
    def attached_callback(self) -> ServerCallback:
        """The server callback that set this federation up; an error before that."""
        if self.callback is None:
            raise ConfigurationError(
                "the federation has no server yet: run it with a Trainer, or load a checkpoint"
            )
        return self.callback

    @property
    def attached_data(self) -> FederatedDataModule:
        """The data of the Trainer that runs this federation; an error without one."""
        if self._data is None:
            raise ConfigurationError("the federation has no data yet: run it with a Trainer")
        return self._data

    @property
    def attached_engine(self) -> Engine:
        """What trains the clients; an error before a Trainer has run this federation."""
        if self._engine is None:
            raise ConfigurationError("local training needs the data: run it with a Trainer")
        return self._engine

    def _take_half(self, callback: ServerCallback) -> None:
        """Take the callback's client half, or the one that the client module names.

        Raises:
            ConfigurationError: If they are two, and it was not left to one to say.
        """
        brought, named = callback.half, half_of(self.client)
        half = brought if named is None else named
        replaces = type(brought) is Half or (
            brought.kinds == half.kinds and not callback.chooses_half
        )
        if named is not None and not replaces and brought != named:
            raise ConfigurationError(
                f"{type(callback).__name__} brings {brought}, and {type(self.client).__name__} "
                f"names {named}: leave it to one of them to say what clients minimise"
            )
        self.client_half = half
        if self.callback is None:
            self.layout = layout_with(half, self.layout)
            self.server = ServerModels(self.layout)

    def _set_up(self, callback: ServerCallback) -> None:
        if self.callback is None:
            callback.federation = self
            callback.setup_server(self)
        elif type(callback) is not type(self.callback):
            raise ConfigurationError(
                f"this federation was set up by {type(self.callback).__name__}, not by "
                f"{type(callback).__name__}: make a new Federation for another algorithm"
            )
        elif callback is not self.callback:
            check_same_options(type(callback).__name__, self.callback._given, callback._given)
            vars(callback).update(vars(self.callback))  # what was trained goes on
        self.callback = callback

    # A round

    @contextmanager
    def _server_work(self) -> Iterator[None]:
        """Outside autocast, inference mode and autograd, with random numbers of its own."""
        device = self.device
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast(device.type, enabled=False),
            isolated(device),
        ):
            seed_everything(derive_seed(Purpose.SERVER, self.seed, len(self.history)), device)
            yield

    def _train(
        self, clients: Tensor, starts: TensorDict, epochs: int | None = None
    ) -> ClientUpdates:
        updates = self.attached_engine.train(
            clients,
            starts,
            round_index=self._round.index,
            epochs=epochs or self.local_epochs,
            steps=None if epochs else self.local_steps,
            kept=self.remembered(clients, starts) if self.client_half.keeps_memory else None,
            on_client_end=self.on_client_end,
        )
        idle = ~self.attached_engine.has_batches(updates.clients)
        if idle.any():  # who has learnt nothing has nothing to say, and weighs nothing
            sent = starts[torch.isin(clients, updates.clients)]
            updates = updates.where(~idle | moved(sent, updates.states, self.layout.parameters))
        for listener in self.on_updates:
            listener(updates)
        return updates

    def _ask(
        self,
        clients: Tensor,
        sent: TensorDict,
        work: Callable[[Tensor, TensorDict], ClientUpdates],
        returns: Iterable[str] | None = None,
    ) -> ClientUpdates:
        current, callback = self._round, self.attached_callback
        current.clients += clients.tolist()
        current.bytes_down += callback.bytes_down(clients, sent)
        starts = self.lay_over(clients, sent)
        silent = torch.isin(clients, self._silent)
        if silent.any():
            current.failed += clients[silent].tolist()
            clients, starts = clients[~silent], starts[~silent]
        updates = work(clients, starts)
        self.note_failures(updates.failures)
        if len(updates.clients) < len(clients):
            starts = starts[torch.isin(clients, updates.clients)]
        self._warn_of_explosions(updates, starts)
        add_logs(self._logs, updates.logs)
        if updates.kept is not None:
            self.memory.write(_MEMORY, updates.clients, updates.kept)
        if callback.private:
            private = updates.states.select(*callback.private)
            self.memory.write(_PRIVATE, updates.clients, private)
        returned = callback.sent_names if returns is None else returns
        updates = replace(updates, states=updates.states.select(*returned))
        current.bytes_up += len(updates.clients) * state_bytes(updates.states)
        return updates

    def _warn_of_explosions(self, updates: ClientUpdates, starts: TensorDict) -> None:
        """Warn of clients whose parameters, or gradient, have grown out of all proportion."""
        names = self.layout.parameters
        growth = largest_values(updates.states, names) / largest_values(starts, names).clamp(min=1)
        for row in (growth > _EXPLODED).nonzero().flatten().tolist():
            warnings.warn(
                f"round {self._round.index}: client {int(updates.clients[row])} exploded: its "
                f"largest value has grown {float(growth[row]):.1e} times; it is taken as it is",
                stacklevel=2,
            )

    def _end_round(self) -> None:
        """Combine the round's record over ranks, and log it."""
        self._round.combine_ranks(self._logs)
        self.history.append(self._round)
        self._log(self._round.metrics | self._traffic.count(self._round))

    def _log(self, values: Mapping[str, float]) -> None:
        """Log values that are equal on all ranks, with the last round's index as the step."""
        if self.trainer.sanity_checking:
            return
        fitting = self.trainer.state.fn == "fit"
        floats = {name: float(value) for name, value in values.items()}
        step = self.last_round
        if fitting:  # at once, so that no checkpoint runs ahead of what was logged
            self.trainer.callback_metrics.update(self._as_tensors(floats))
            for logger in self.loggers:
                logger.log_metrics(floats, step)
        else:  # Lightning takes a value of this name for the step
            floats["step"] = float(step)
        for name, value in floats.items():
            shown = name in _SHOWN
            if shown or not fitting:  # a call takes longer than all else in a small round
                through = False if fitting else None  # the loggers that there are
                self.log(name, value, prog_bar=shown, logger=through, **_PER_ROUND)

    def _as_tensors(self, values: Mapping[str, float]) -> dict[str, Tensor]:
        tensors = torch.tensor(list(values.values()), device=self.device).unbind()
        return dict(zip(values, tensors, strict=True))


def _monitor(scheduler: ReduceLROnPlateau) -> str:
    return getattr(scheduler, "monitor", "val/macro_acc")


def _server_callbacks(trainer: L.Trainer) -> list[ServerCallback]:
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, ServerCallback)]

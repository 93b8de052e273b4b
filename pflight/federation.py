"""The federation: one communication round is one training step of a LightningModule."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import lightning as L
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from .adapters.side_path import settled
from .client_work import TrainingOptions
from .clients import Clients
from .engines.check import set_up
from .engines.choice import EngineName
from .errors import ConfigurationError
from .evaluation import Evaluator, WhichModel, model_of, predict
from .fedavg import FedAvg
from .history import Round, check_trained
from .method import ClientMethod, client_method_of
from .metrics.collection import F1Average
from .metrics.watched import check_monitor, check_monitors
from .options import check_range, check_types
from .runs.checkpoint import read_checkpoint
from .runs.checks import check_data, check_given, check_trainer, open_memory
from .runs.distributed import owned
from .runs.memory import ClientMemory, MappedMemory
from .runs.record import RunRecord
from .runs.round_log import log_histograms, log_hyperparameters, log_values, silence_hints
from .runs.same_ranks import check_ranks
from .server_callback import ServerCallback, attached, server_callback_of
from .states.server_models import ServerModels, WaitingSchedule, build_optimizer, server_work
from .states.state import StateLayout, with_state
from .states.updates import Evaluation, Predictions


class Federation(L.LightningModule):
    """A server and its clients as a LightningModule. Every client trains a model.

    The stock ``lightning.Trainer`` runs a federation. A cohort of clients is a batch. A
    communication round is a training step and one epoch. The server's update is an optimizer step.
    ``max_epochs`` is the number of rounds; another ``fit`` continues after them. The algorithm is a
    :class:`~pflight.callbacks.ServerCallback` among the Trainer's callbacks, by default FedAvg. The
    data comes from a :class:`~pflight.datamodules.FederatedDataModule`.

    Args:
        client: The client module. It never changes: copies of it are trained. A copy is set up
            once, by ``prepare_data()``, ``setup("fit")`` and ``configure_model()``.
        local_epochs: Epochs of local training in a round.
        local_steps: Batches of local training in a round, instead of ``local_epochs``.
        finetune_epochs: If positive, clients are judged by fine-tuned copies of their models. The
            copies train for so many epochs on the client's training data, with the task loss alone.
        newcomer_epochs: The same for newcomers, which never train otherwise. ``None``: as for all.
        server_optimizer: Builds the server optimizer; by default the callback's own.
        server_scheduler: Builds a scheduler of the server's step size, stepped once a round. A
            ``ReduceLROnPlateau`` watches its ``monitor``, by default ``val/macro_acc``.
        engine: ``"sequential"`` trains one client after the other, ``"vectorized"`` many at once.
            ``"auto"`` chooses by a rule on network, batch and device.
        clients_at_once: By default as many as fit into the CPU's caches or the GPU's memory.
        on_client_error: ``"skip"`` leaves a failed client out, with a warning; ``"raise"`` stops.
        client_timeout: Time limit of a client in seconds. A slower one is interrupted and fails; a
            call into a library ends first. Clients train one by one, in a POSIX main thread.
        client_memory: Storage of the states that clients keep between rounds. ``"ram"``: in memory,
            with a copy in each checkpoint. ``"disk"``: in the folder ``memory`` of
            ``trainer.default_root_dir``. The run's checkpoints then need this folder.
        allow_other_data: Whether a run may be resumed with other data of as many clients.
        seed: Seed of all randomness of local training and of the server.
        f1_average: As in :class:`~pflight.metrics.collection.ClientMetrics`.
        client_lr_decay: Factor of the clients' step sizes each round, except in fine-tuning.
        save_frozen: Whether checkpoints hold the frozen weights. Otherwise they hold only digests.

    Attributes:
        clients: The clients, which train for the server callback.
        server: The server's models. The server optimizer steps their parameters.

    Raises:
        ConfigurationError: Before training starts, if options, data, network or checkpoint do
            not fit together.
        ClientError: With ``on_client_error="raise"``, naming the client and the round.

    Example:
        >>> import lightning as L, pflight, torch
        >>> train = [(torch.randn(8, 4), torch.randint(2, (8,)))] * 3
        >>> data = pflight.datamodules.TensorClients(train, num_classes=2)
        >>> federation = pflight.Federation(pflight.models.Classifier(torch.nn.Linear(4, 2), 2))
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
        newcomer_epochs: int | None = None,
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
        client_lr_decay: float = 1.0,
        save_frozen: bool = False,
    ) -> None:
        # Not by @checked: save_hyperparameters() reads the arguments in the calling frame.
        check_types(Federation.__init__, self, locals())
        super().__init__()
        counts = {"local_steps": local_steps, "clients_at_once": clients_at_once}
        check_range(self, "[1, inf)", local_epochs=local_epochs, **counts)
        tuning = {"finetune_epochs": finetune_epochs, "newcomer_epochs": newcomer_epochs}
        check_range(self, "[0, inf)", **tuning, seed=seed)
        check_range(self, "(0, inf)", client_timeout=client_timeout)
        check_range(self, "(0, 1]", client_lr_decay=client_lr_decay)
        ignored = ["client", "server_optimizer", "server_scheduler"]
        self.save_hyperparameters(ignore=ignored, logger=False)  # setup() passes them to loggers
        self.automatic_optimization = False
        self.server_optimizer, self.server_scheduler = server_optimizer, server_scheduler
        self.engine, self.clients_at_once = engine, clients_at_once
        self.client_timeout, self.f1_average = client_timeout, f1_average
        self.evaluator: type[Evaluator] = Evaluator
        self._client = (set_up(client),)  # a tuple, since its parameters are not the server's
        self.layout = StateLayout.of(self.client)
        self.server = ServerModels(self.layout, server_optimizer, save_frozen)
        self.callback: ServerCallback | None = None
        method = client_method_of(client) or ClientMethod()
        memory = ClientMemory() if client_memory == "ram" else MappedMemory()
        how = local_epochs, local_steps, finetune_epochs, newcomer_epochs
        training = TrainingOptions(*how, on_client_error, seed, client_lr_decay)
        self.clients = Clients(self.client, self.layout, method, self.server, memory, training)
        self.record = RunRecord(self.clients, allow_other_data)
        self.evaluators: dict[str, Evaluator] = {}
        self._predict_failures = self.clients.failures_of(0, "it is left out")

    # For users

    @property
    def client(self) -> L.LightningModule:
        """A copy of the client module that was given."""
        return self._client[0]

    @property
    def history(self) -> list[Round]:
        """The record of every round so far."""
        return self.clients.history

    @property
    def num_clients(self) -> int:
        """Number of clients; 0 before the data are known."""
        return self.clients.num_clients

    @property
    def server_callback(self) -> ServerCallback:
        """The server callback that set this federation up. It is an error if there is none."""
        return attached(self.callback, self.clients)

    @property
    def algorithm(self) -> str:
        """The algorithm's name in results, such as FedEC for ``Reptile`` with an ElasticClient."""
        return self.server_callback.name_in_results

    def server_states(self) -> list[dict[str, Tensor]]:
        """Return the server's models, each in the form of ``client.state_dict()``."""
        states = self.server_callback.server_states() if self.callback else []
        return [self.layout.state_dict(state) for state in states]

    def client_state(self, client: int) -> dict[str, Tensor]:
        """Return a client's judged model in the form of ``client.state_dict()``.

        Raises:
            ConfigurationError: For an unknown client, or before the federation has been set up.
        """
        return self.layout.state_dict(self._own(client))

    def client_module(self, client: int) -> L.LightningModule:
        """Return a copy of a client's own LightningModule in evaluation mode."""
        state = self.layout.state_dict(self._own(client), extra=True)
        return settled(with_state(self.client, state).eval())

    def client_metrics(self, split: str = "test", model: WhichModel = "") -> dict[str, Tensor]:
        """Return every client's metrics in the last evaluation. All ranks have to call it.

        Args:
            split: ``"val"`` or ``"test"``.
            model: ``""`` for the client's own model, ``"server/"`` for the model that the server
                sends to the client, or ``"finetuned/"``.

        Returns:
            ``num_samples`` and each metric by name, ``[num_clients]``; NaN without samples.
        """
        if split not in self.evaluators:
            raise ConfigurationError(
                f"there has been no evaluation on {split!r} samples yet: run the Trainer's "
                f"{'test' if split == 'test' else 'validate'} first"
            )
        return self.evaluators[split].per_client(model)

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
        """Load a federation from a checkpoint. It can be used without its data.

        Args:
            checkpoint_path: A checkpoint that a Trainer saved.
            map_location: As in ``torch.load``.
            client: A client module with the trained network; its weights don't matter.
            callback: The server callback of the training, with its options; by default FedAvg.
            **options: Arguments of :class:`Federation` to change.

        Raises:
            ConfigurationError: If the file can't be read, or has another network or callback.
        """
        checkpoint = read_checkpoint(checkpoint_path, map_location)
        record, saved = (checkpoint.get(n) or {} for n in ("pflight", "hyper_parameters"))
        check_given(record, client, callback)
        assert client is not None
        names = cls(client).hparams.keys() & saved.keys()
        federation = cls(client, **{**{name: saved[name] for name in names}, **options})
        federation.clients.num_clients = int(record.get("num_clients", 0))
        federation._choose_method(callback := callback or FedAvg(), record.get("head"))
        federation._set_up(callback)
        federation.on_load_checkpoint(checkpoint)
        federation.load_state_dict(checkpoint["state_dict"], assign=True)  # keeps float64
        callback.move_state()
        return federation

    # For Lightning

    def configure_callbacks(self) -> list[L.Callback]:
        """Check the Trainer's options, and add FedAvg if there is no server callback."""
        check_trainer(self.trainer, self.client)
        server = [] if server_callback_of(self.trainer) else [self.callback or FedAvg()]
        return [*server, *WaitingSchedule.once(self.trainer)]

    def setup(self, stage: str) -> None:
        """Connect client, data and callback, and set the server up the first time."""
        silence_hints()
        trainer, clients = self.trainer, self.clients
        callback = server_callback_of(trainer)
        assert callback is not None
        data = check_data(getattr(trainer, "datamodule", None), self.client)
        clients.set_data(callback.local_data(data))
        self.record.forget_data()
        self._choose_method(callback)
        check_ranks(clients, callback, {**self.hparams, "max_epochs": trainer.max_epochs})
        how = trainer.strategy, self.client_timeout
        self.record.choice = clients.choose_engine(self.engine, self.clients_at_once, *how)
        self._set_up(callback)
        trainer.strategy.precision_plugin.convert_module(self)  # Lightning does after it has loaded
        open_memory(clients.memory, trainer)
        if stage == "fit":
            check_monitors(self, clients)
            clients.check_memory_of_rounds(callback.bytes_kept, trainer.max_epochs)
        log_hyperparameters(self, algorithm=self.algorithm, client=type(self.client).__name__)

    def configure_optimizers(self) -> Any:
        """Return the server optimizer, with its scheduler if there is one."""
        callback = self.server_callback
        callback.on_before_configure_optimizers(self.trainer)
        build = self.server_optimizer or callback.configure_optimizer
        schedule = self.server_scheduler or callback.configure_scheduler
        optimizer, scheduler, monitor = build_optimizer(self.parameters(), build, schedule)
        if monitor is not None:
            check_monitor(self, self.clients, "the server's ReduceLROnPlateau", monitor)
        self.server.optimizer = optimizer
        return optimizer if scheduler is None else ([optimizer], [scheduler])

    def on_train_epoch_start(self) -> None:
        """Set the loader to the cohort of the next round."""
        loader: Any = self.trainer.train_dataloader
        loader.round = self.clients.rounds

    on_train_start = on_train_epoch_start  # the only one if a round begins again after a failure

    def training_step(self, cohort: Tensor, batch_idx: int) -> None:
        """Run one communication round with a cohort of client ids ``[S]``."""
        optimizer: Any = self.optimizers()  # one, as configure_optimizers returns it
        optimizer.zero_grad()
        failures = self.clients.begin_round()
        with self._server_work(), self.clients.noting(failures):
            self.server_callback.round(cohort)
        failures.raise_together()
        self.server_callback.after_round(cohort)
        log_values(self, self.clients.end_round(failures.clients), self.clients.last_round)
        log_histograms(self, self.clients.current.histograms, self.clients.last_round)
        self.server.take_step(self, optimizer, self.clients.last_round)

    def on_fit_end(self) -> None:
        """Copy the memory of all ranks to every rank. Raise if no client was trained or judged."""
        self.clients.memory.load_state_dict(self.clients.memory.state_of_all_ranks())
        check_trained(self.history, self.evaluators.get("val"))

    def on_validation_epoch_start(self) -> None:
        """Start an evaluation of all clients on their validation samples."""
        whose = self.clients, self.server_callback
        self.evaluators["val"] = self.evaluator(*whose, "val", self.f1_average)

    def validation_step(self, clients: Tensor, batch_idx: int) -> None:
        """Evaluate a chunk of clients ``[C]`` on their validation samples."""
        with self._server_work():
            self.evaluators["val"].judge(clients)

    def on_validation_epoch_end(self) -> None:
        """Log the means over clients."""
        values = self.evaluators["val"].means(self.trainer.state.fn != "fit")
        log_values(self, values, self.clients.last_round)
        if self.trainer.state.fn == "fit" and not self.trainer.sanity_checking:
            self.history[-1].metrics.update(values)

    def on_test_epoch_start(self) -> None:
        """Start an evaluation of all clients on their test samples."""
        whose = self.clients, self.server_callback
        self.evaluators["test"] = self.evaluator(*whose, "test", self.f1_average)

    def test_step(self, clients: Tensor, batch_idx: int) -> None:
        """Evaluate a chunk of clients ``[C]`` on their test samples."""
        with self._server_work():
            self.evaluators["test"].judge(clients)

    def on_test_epoch_end(self) -> None:
        """Log the means over clients. Newcomers never trained: they are logged separately."""
        log_values(self, self.evaluators["test"].means(), self.clients.last_round)

    def on_predict_epoch_start(self) -> None:
        """Start a prediction: no client has failed so far."""
        index, consequence = self.clients.last_round, "it is left out of the predictions"
        self._predict_failures = self.clients.failures_of(index, consequence)

    def predict_step(self, clients: Tensor, batch_idx: int) -> Evaluation | Predictions:
        """Return the outputs of a chunk of clients ``[C]`` on their test samples.

        If the module is not a task, return pairs: a client's id, and the result of
        ``predict_step`` for each batch.
        """
        with self._server_work(), self.clients.noting(self._predict_failures):
            return predict(self.clients, self.server_callback, owned(clients))

    def on_predict_epoch_end(self) -> None:
        """Raise if all clients failed, or if one did and ``on_client_error`` is ``"raise"``."""
        self._predict_failures.end("asked for its predictions")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the record that a resumed run needs, as tensors and primitives."""
        if self.callback is not None:  # it is None if the set-up failed
            checkpoint["pflight"] = self.record.save(self.callback)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that a checkpoint fits. Load the history and this rank's client memory."""
        callback = self.server_callback
        state = checkpoint.get("callbacks", {}).get(callback.state_key)
        if state is not None:  # the state may give the number of models
            callback.load_state_dict(state)
        record, trained = checkpoint.get("pflight", {}), self.clients.data is not None
        self.record.check(checkpoint, callback, trained and self.trainer.state.fn == "fit")
        by_rule = self.engine == "auto" and self.clients_at_once is self.client_timeout is None
        if trained and by_rule:
            self.record.keep_engine(record, self.trainer.strategy)
        self.record.load(record)

    # Setting up

    def _choose_method(self, callback: ServerCallback, head: Sequence[Any] | None = None) -> None:
        """Use the client method of the callback, or of the client module."""
        callback.on_num_clients(self.clients.num_clients)
        self.clients.set_method(callback.combined_method(self.client), callback.outer_method)
        if self.callback is None:
            self.layout = self.clients.prepare(callback, self._trainer, head)
            self.server = self.clients.server = self.server.of(self.layout)

    def _set_up(self, callback: ServerCallback) -> None:
        callback.attach(self.clients, self.server, self.callback)
        for name, part in callback.modules.items():
            self.add_module(name, part)
        self.callback = callback

    def _own(self, client: int) -> dict[str, Tensor]:
        self.clients.check(client)
        return model_of(self.clients, client, self.server_callback, self.device)

    def _server_work(self) -> AbstractContextManager[None]:
        return server_work(self.device, self.clients.seed, self.clients.rounds)

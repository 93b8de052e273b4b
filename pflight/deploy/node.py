"""A node: it holds one client's data and memory, and answers the server's requests."""

from __future__ import annotations

import copy
import math
import secrets
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import lightning as L
import torch
from flwr.app import RecordDict
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tensordict import TensorDict
from torch import Tensor

from pflight.client_work import CurrentRound
from pflight.clients import Clients
from pflight.data.data_module import FederatedDataModule
from pflight.data.fingerprint import checksum_of
from pflight.data.loaders import SPLITS
from pflight.engines.alone.engine import SequentialEngine
from pflight.engines.client_setup import ClientSetup
from pflight.errors import ConfigurationError, described
from pflight.evaluation import Evaluator, WhichModel
from pflight.federation import Federation
from pflight.history import Round
from pflight.method import OWN, ClientMethod
from pflight.metrics.collection import ClientMetrics, ClientValues, LoggedMetrics
from pflight.server_callback import ServerCallback
from pflight.states.head import marked
from pflight.states.server_models import ServerModels, server_work
from pflight.states.state import StateLayout, expand_state
from pflight.states.updates import ClientFailure, ClientUpdates

from .agreement import agreement_on, check_agreement, digest_of
from .certificates import write_private
from .data import OwnData
from .memory import NodeMemory
from .messages import MessageError, group_of, nth, numbers_of, packed, quoted, words_of
from .request import JUDGED, SENT, Request, models_in

STATE, COUNTS = "state", "counts"
"""Groups of entries that a client returns."""
ANEW = "anew"
"""The name of the number that marks a client that begins anew."""
_SALT = "salt"


class HomeClients(Clients):
    """The clients of a federation at a node, which holds one of them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.failed: list[ClientFailure] = []
        self.rounds_so_far = 0

    @property
    def rounds(self) -> int:
        """The number of past rounds, as reported by the server."""
        return self.rounds_so_far

    def note_failures(self, failures: Iterable[ClientFailure], doing: str = "") -> None:
        """Note a failure, to report it to the server."""
        self.failed.extend(failures)
        for failure in self.failed:
            failure.forget_frames()


class Seat(ServerCallback):
    """Replaces the server callback at a node. It returns the states that the server sent.

    Args:
        callback: The server callback. Its client method and some of its rules are used.
    """

    def __init__(self, callback: ServerCallback) -> None:
        super().__init__(callback.buffers)
        self.callback = callback
        self.client_method, self.outer_method = callback.client_method, callback.outer_method
        self.chooses_client_method = callback.chooses_client_method
        self.sends_model, self.sends_gradients = callback.sends_model, callback.sends_gradients
        self.modifiers = callback.modifiers
        self.kept: tuple[str, ...] = ()
        self.names: tuple[str, ...] = ()
        self.judges_otherwise = callback.judges_otherwise
        self.sent = self.judged = TensorDict({}, batch_size=[1])
        self.models = [self.sent]  # losses are computed for these

    def local_data(self, data: FederatedDataModule) -> FederatedDataModule:
        """Return the data that the client uses."""
        return self.callback.local_data(data)

    def on_num_clients(self, num_clients: int) -> None:
        """Learn how many clients there are."""
        self.callback.on_num_clients(num_clients)
        self.client_method = self.callback.client_method

    @property
    def needs_head(self) -> bool:
        """Whether the method needs the head of the client's network."""
        return self.callback.needs_head

    def freeze(self, module: L.LightningModule) -> None:
        """Freeze what modifiers name in a copy of the client module."""
        self.callback.freeze(module)

    def staying_names(self, module: L.LightningModule, layout: StateLayout) -> set[str]:
        """Return the names of the entries that never travel."""
        return self.callback.staying_names(module, layout)

    @property
    def kept_names(self) -> tuple[str, ...]:
        """Names of the entries that the client keeps between rounds."""
        return self.kept

    def learn_rules(self, clients: Clients) -> None:
        """Derive which entries travel, as the server does."""
        server, everyone = copy.deepcopy(self.callback), copy.copy(clients)
        everyone.data = None  # it holds one client only
        server.attach(everyone, ServerModels(clients.layout), None)
        self.kept, self.names = server.kept_names, server.sent_names

    @property
    def sent_names(self) -> tuple[str, ...]:
        """Names of the entries that travel."""
        return self.names

    @property
    def shared_parameters(self) -> tuple[str, ...]:
        """Names of the trainable parameters that travel, as far as they are known."""
        known = self.clients.layout.shared_parameters
        return super().shared_parameters if self.names else known

    def broadcast(self, clients: Tensor) -> TensorDict:
        """Return the model that the server has sent."""
        return self.sent

    def personalize(self, clients: Tensor) -> TensorDict:
        """Return the client's model for evaluation, made from the sent one."""
        return self.clients.judged(clients, self.judged)


class Judge(Evaluator):
    """Judges the models of this node's client."""

    def answers(self, client: int) -> Mapping[WhichModel, dict[str, Tensor] | ClientValues]:
        """Return the counts or logs of each model."""
        found: dict[WhichModel, dict[str, Tensor] | ClientValues] = {}
        for model, metrics in self._metrics.items():
            if isinstance(metrics, ClientMetrics):
                found[model] = metrics.scores(client)
            else:
                assert isinstance(metrics, LoggedMetrics)
                found[model] = metrics.values
        return found


class Node:
    """Answers messages with one client's data and memory.

    The client trains with the sequential engine. Its private entries, memory and samples stay here.
    Answers hold the entries in :attr:`~pflight.server_callback.ServerCallback.sent_names` of the
    run's server callback, counts of right and wrong predictions or the logs of the client's module,
    and numbers of samples.

    Args:
        federation: The configured federation. No Trainer has run it yet.
        callback: The server callback of the federation.
        data: The node's data.
        folder: The folder of the client's memory.
        trainer: A Trainer with the client's device and precision. Its only callback is
            :attr:`seat`.
        own: The client's id in the data.
        config: As in :func:`~pflight.deploy.agreement.agreement_on`.
        anew: Whether the client begins anew if its memory is lost, until it has trained.

    Raises:
        ConfigurationError: If model, algorithm and data don't fit together.
    """

    def __init__(
        self,
        federation: Federation,
        callback: ServerCallback,
        data: FederatedDataModule,
        folder: Path,
        trainer: dict[str, Any] | None = None,
        own: int = 0,
        config: Mapping[str, str] | None = None,
        anew: bool = False,
    ) -> None:
        self.folder, self.own = folder, own
        self.anew, self._lost = anew, False
        try:
            data.prepare_data()
            data.setup("fit")
        except MisconfigurationException:
            raise
        except Exception as error:  # from the user's code
            whose = type(data).__name__
            raise ConfigurationError(f"{whose} can't be set up: {described(error)}") from error
        self.agreement = agreement_on(federation, callback, data, config)
        federation.engine, federation.clients_at_once = "sequential", None
        self._configured, self._samples = (federation, callback), data
        self._trainer = {
            **(trainer or {}),
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
        }
        self._become(0, 1)

    def _become(self, place: int, num_clients: int) -> None:
        """Set everything up as client ``place`` of ``num_clients``."""
        federation, callback = copy.deepcopy(self._configured)
        data, seat = OwnData(self._samples, self.own, place, num_clients), Seat(callback)
        like, memory = federation.clients, NodeMemory(self.folder, place)
        whose = like.module, like.layout, like.client_method, like.server
        clients = HomeClients(*whose, memory, like.training)
        federation.clients = federation.record.clients = clients
        runner = L.Trainer(
            max_epochs=0, callbacks=[seat], default_root_dir=self.folder, **self._trainer
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*max_epochs=0")
            runner.fit(federation, datamodule=data)  # sets everything up, without training
        clients.memory = self.memory = NodeMemory(self.folder, place)
        federation.to(clients.attached_engine.device)
        self.data, self.seat, self.clients, self.federation = data, seat, clients, federation

    def check_samples(self) -> None:
        """Train one epoch with the client module alone, evaluate, and discard the result.

        Raises:
            ConfigurationError: If a sample makes this fail.
        """
        engine, module = self.clients.attached_engine, self.clients.module
        assert isinstance(engine, SequentialEngine)
        setup, layout = engine.setup, StateLayout.of(module)
        how = setup.precision, setup.device, setup.seed
        trial = SequentialEngine(ClientSetup(module, ClientMethod(), layout, self.data, *how))
        state = expand_state(layout.template, 1).to(setup.device)
        failed = {"train": trial.train(self._client, state, round_index=0).failures}
        for split in ("val", "test"):
            failed[split] = trial.evaluate(self._client, state, split)[1]
        for split, failures in failed.items():
            if failures:
                raise ConfigurationError(
                    f"{type(self._samples).__name__}'s {split} samples of client {self.own} can't "
                    f"be used: {failures[0].reason}"
                )

    def answer(self, content: RecordDict) -> RecordDict:
        """Return the answer to a message, or the reason for a failure."""
        self.clients.failed.clear()
        self._lost = False
        asked = "a message"
        try:
            request = Request.of(content)
            asked = f"{request.work!r} in round {request.round}"
            answer = self._answer(request, content)
            self._tell(request, answer)
            if self._lost:
                answer.metric_records["numbers"][ANEW] = 1
        except (ConfigurationError, MessageError) as error:
            answer = packed(words={"failed": str(error)})
        except Exception as error:  # a message, module or data can cause any
            answer = packed(words={"failed": described(error)})
        if failed := words_of(answer, "failed"):
            print(f"pflight: no answer to {asked}: {failed}", flush=True)
        return answer

    def _tell(self, request: Request, answer: RecordDict) -> None:
        """Print a line about the finished work."""
        if request.work == "describe":
            count = self.data.num_clients
            print(f"pflight: connected, as client {self.data.place} of {count}", flush=True)
        elif request.work in ("train", "gradients") and numbers_of(answer).get("answered"):
            print(f"pflight: round {request.round}: trained", flush=True)

    def _answer(self, request: Request, content: RecordDict) -> RecordDict:
        works = {
            "describe": self._describe,
            "train": self._train,
            "gradients": self._train,
            "aside": self._train_aside,
            "losses": self._tell_loss,
            "evaluate": self._evaluate,
        }
        if request.work != "describe" and request.agreed != digest_of(self.agreement):
            raise MessageError("this node was started with another configuration than the run")
        if (request.client, request.clients) != (self.data.place, self.data.num_clients):
            self._become(request.client, request.clients)
        if not self.seat.names:
            self.seat.learn_rules(self.clients)
        if request.work != "describe":
            self._prepare(request, content)
        clients = self.clients
        with server_work(clients.device, clients.seed, clients.rounds):
            return works[request.work](request)

    def _describe(self, request: Request) -> RecordDict:
        """Check that both sides agree, and return the description of the client."""
        check_agreement(self.agreement, request.agreement, "the server")
        place = self.data.place
        self.clients.at_round(0)
        sizes = {f"samples.{s}": int(self.data.num_samples(s)[place]) for s in SPLITS}
        salted = torch.tensor([self._salt(), int(self.data.fingerprint()[place])])
        counted = self.clients.attached_engine.setup.task is not None
        head = marked(self.clients.module)
        name, *shape = head or ("", 0, 0)
        return packed(
            numbers={
                **sizes,
                "fingerprint": checksum_of(salted),
                "counted": int(counted),
                "head": shape,
                ANEW: int(self.anew),
            },
            words={} if head is None else {"head": name},
        )

    def _salt(self) -> int:
        """Return a secret number of this node, so that its labels can't be guessed."""
        path = self.folder / _SALT
        if not path.is_file():
            self.check_salt()
            self.folder.mkdir(parents=True, exist_ok=True)
            write_private(path, str(secrets.randbits(60)).encode())
        return int(path.read_text())

    def check_salt(self) -> None:
        """Raise if the folder has a client's memory without the matching secret.

        Raises:
            ConfigurationError: Unless the client begins anew.
        """
        path = self.folder / _SALT
        if not (self.anew or path.is_file()) and any(self.folder.glob("*/round-*.pt")):
            raise ConfigurationError(
                f"{path} is lost, by which the server knows this node's data: put it back from a "
                "backup, or start the node with --anew, as a client that has never trained"
            )

    def _prepare(self, request: Request, content: RecordDict) -> None:
        """Become the requested client in the current round."""
        clients, seat = self.clients, self.seat
        models = [self._received(content, group) for group in models_in(content)]
        if not models:
            raise MessageError(f"there is no {SENT} in it")
        sent = judged = models[0]
        if JUDGED in content:
            judged = self._received(content, JUDGED)
        if refused := [name for name in request.returns if name not in seat.names]:
            raise MessageError(f"{quoted(refused[0])} is not among what leaves this node")
        clients.current = CurrentRound(Round(request.round, []))
        clients.rounds_so_far = request.rounds
        clients.at_round(request.round)
        mean = request.mean_samples or math.nan  # sent only if the method needs it
        clients.attached_engine.setup.mean_samples = mean
        seat.models, seat.sent, seat.judged = models, sent, judged
        self.memory.enter(request.run, request.session)
        self._go_to(request)

    def _received(self, content: RecordDict, group: str) -> TensorDict:
        tensors = group_of(content, group, self.clients.layout.template, OWN)
        device = self.clients.device
        rows = {name: tensor.unsqueeze(0).to(device) for name, tensor in tensors.items()}
        return TensorDict(rows, batch_size=[1])

    @property
    def _remembers(self) -> bool:
        """Whether the client keeps anything between rounds."""
        outer = type(self.clients.outer_method)
        keeps = outer.keep is not ClientMethod.keep
        keeps |= any(one.error_feedback for one in self.seat.transforms)
        return self.clients.client_method.remembers or bool(self.seat.kept) or keeps

    @property
    def _client(self) -> Tensor:
        return torch.tensor([self.data.place], device=self.clients.device)

    def _train(self, request: Request) -> RecordDict:
        """Train or compute gradients, and save the client's memory."""
        clients, sent = self.clients, self.seat.sent
        self.memory.forget_changes()
        self._go_to(request)
        if request.work == "train":
            updates = clients.train_chunk(
                self._client, sent, request.returns, request.epochs or None
            )
        else:
            how = request.returns, request.batches or None
            updates = clients.gradients_of_chunk(self._client, sent, *how)
        if len(updates.clients):
            self.memory.keep(clients.current.entry.index)
            self.anew = False
        return self._returned(updates, request)

    def _go_to(self, request: Request) -> None:
        """Restore the memory after the requested round, or begin anew if allowed."""
        where = request.after, request.after_session, self._remembers
        if self.memory.go_to(*where, anew=self.anew):
            self._lost = True
            print(f"pflight: round {request.round}: the client begins anew", flush=True)

    def _train_aside(self, request: Request) -> RecordDict:
        how = self.seat.sent, request.as_round, request.epochs or None
        return self._returned(self.clients.train_aside(self._client, *how), request)

    def _returned(self, updates: ClientUpdates, request: Request) -> RecordDict:
        """Return the requested entries of an update, or the reason for a failure."""
        if failure := [*updates.failures, *self.clients.failed]:
            return packed(words={"failed": failure[0].reason})
        if not len(updates.clients):
            return packed(numbers={"answered": 0})
        logs = {
            f"logs.{name}": [float(total), float(count)]
            for name, (total, count) in updates.logs.items()
            if math.isfinite(total)
        }
        states = {name: updates.states[name][0] for name in request.returns}
        if updates.changes is not None:
            pipeline = self.clients.pipeline(request.returns, request.work == "gradients")
            states = pipeline.pack(states, updates.changes[0])
        return packed({STATE: states}, {"answered": 1, **logs})

    def _tell_loss(self, request: Request) -> RecordDict:
        losses = self.clients.losses_of(self._client, self.seat.models, request.split)[:, 0]
        if self.clients.failed:
            return packed(words={"failed": self.clients.failed[0].reason})
        told = {nth("loss", k): loss for k, loss in enumerate(losses.tolist())}
        return packed(numbers={name: loss for name, loss in told.items() if math.isfinite(loss)})

    def _evaluate(self, request: Request) -> RecordDict:
        """Judge the client's models on its samples. Outputs of samples stay here."""
        clients, split = self.clients, cast(Literal["val", "test"], request.split)
        judge = Judge(clients, self.seat, split, self.federation.f1_average)
        judge.judge(self._client)
        if clients.failed:
            return packed(words={"failed": clients.failed[0].reason})
        entries: dict[str, dict[str, Tensor]] = {}
        numbers: dict[str, float] = {}
        words: dict[str, str | list[str]] = {}
        for model, found in judge.answers(self.data.place).items():
            if isinstance(found, ClientValues):
                for name, values in found.values.items():
                    numbers |= {f"{model}value.{name}": value for value in values.values()}
                better = found.higher_is_better.items()
                words[f"{model}higher"] = [name for name, higher in better if higher]
                words[f"{model}lower"] = [name for name, higher in better if not higher]
            else:
                entries[f"{model}{COUNTS}"] = found
        return packed(entries, numbers, words)

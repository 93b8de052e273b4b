"""Clients on other machines, with the interface of simulated clients."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NoReturn, Protocol, cast

import torch
from flwr.app import RecordDict
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from tensordict import TensorDict
from torch import Tensor

from pflight.clients import Clients
from pflight.data.loaders import Split
from pflight.engines.alone.engine import SequentialEngine
from pflight.engines.choice import Choice, EngineName
from pflight.engines.client_setup import ClientSetup
from pflight.errors import ConfigurationError
from pflight.evaluation import Evaluator, WhichModel
from pflight.federation import Federation
from pflight.history import Logs, merge_logs
from pflight.local_client import Pass
from pflight.method import OWN
from pflight.metrics.collection import ClientMetrics, ClientScores, LoggedMetrics
from pflight.runs.record import RunRecord
from pflight.server_callback import ServerCallback
from pflight.states.head import EXTRA, Head
from pflight.states.state import entries
from pflight.states.updates import ClientFailure, ClientUpdates
from pflight.task import Task

from .agreement import digest_of
from .answers import (
    begins_anew,
    check_answered,
    counts_in,
    description_in,
    losses_in,
    odd_ones,
    update_in,
    values_in,
)
from .bounds import Bounds, check_update, norm_of, outliers
from .data import NodeData
from .memory import NEVER, new_id
from .messages import MessageError, nth, packed, shown
from .request import JUDGED, SENT, Work

Answer = tuple[dict[str, Tensor], Logs] | ClientFailure | None
"""A client's model entries and logs, or the reason for a failure, or nothing."""


@dataclass(frozen=True)
class Asked:
    """A request to one client."""

    client: int
    work: Work
    round: int
    content: RecordDict


class Post(Protocol):
    """Carries messages to nodes and their answers back, and knows which nodes are connected.

    Attributes:
        keys: The nodes' public keys, by client.
        patience: Seconds until nodes must have connected and described their data.
    """

    keys: dict[int, bytes]
    patience: float

    def online(self) -> Mapping[int, int]:
        """Return the ids of the nodes that are connected, by client."""

    def register(self, keys: Set[bytes]) -> None:
        """Let the nodes with these keys connect."""

    def send(self, messages: Iterable[Asked]) -> None:
        """Send messages. A client gets no second message before it has answered."""

    def receive(self, client: int) -> RecordDict | str:
        """Wait for a client's answer, and return it, or the reason for a failure."""


class RemoteClients(Clients):
    """The clients of a federation on their own machines, with the interface of simulated ones.

    All clients of a round work at the same time. Updates are processed in the order of client ids,
    so sums do not depend on the order of arrival. Meanwhile other answers wait at Flower.

    This replaces how clients are asked to work, such as :meth:`train`. Rounds, bytes and failures
    are counted by the base class. A node runs the same code as a simulated client, such as
    :meth:`~pflight.clients.Clients.train_chunk`.

    Args:
        post: Carries messages.
        like: The simulated clients to replace.

    Attributes:
        after: The last round with a used answer, by client ``[num_clients]``. Nodes continue from
            their memory after this round.
        sessions: The sessions of these rounds, by client.
        run_id: A unique id of the run. Nodes keep a separate memory for each run.
        session: A unique id of this start of the server, likewise.
        agreement: A digest of the options that all sides share.
        counted: Whether predictions are counted as right or wrong, by class; ``None`` if unknown.
        bounds: Bounds for the updates and weights of nodes.
        may_change: Whether a node's samples may differ from those that it declared on joining.
    """

    if_data_are_lost = "; if a node has lost its folder, start it with --anew"

    def __init__(self, post: Post, like: Clients) -> None:
        whose = like.module, like.layout, like.client_method, like.server
        super().__init__(*whose, like.memory, like.training)
        self.post = post
        self.after = torch.empty(0, dtype=torch.long)
        self.sessions: dict[int, str] = {}
        self.run_id, self.session, self.agreement = new_id(), new_id(), ""
        self.counted: bool | None = None
        self.bounds = Bounds()
        self.may_change = False
        self._head: Head | None = None
        self._judging = False

    # Who they are

    def on_num_clients(self, num_clients: int) -> None:
        """Set the maximum number of clients."""
        self.num_clients = num_clients
        self.after = torch.full((num_clients,), NEVER)

    def describe(
        self, clients: list[int], data: NodeData, agreement: Mapping[str, str]
    ) -> dict[int, str]:
        """Ask nodes for their numbers of samples and whether they agree on the run.

        Args:
            clients: The clients' ids.
            data: Stores the answers.
            agreement: Digests of the options that both sides must share.

        Returns:
            For each client that answered, why it can't take part, or an empty text if it can.
        """
        self.agreement = digest_of(agreement)
        words = {"names": [*agreement], "digests": [*agreement.values()]}
        self._send("describe", torch.tensor(clients, dtype=torch.long), {}, {}, words)
        said: dict[int, str] = {}
        for client in clients:
            answer = self.post.receive(client)
            if not isinstance(answer, str):
                try:
                    self._know(client, data, answer)
                    said[client] = ""
                except MessageError as error:
                    said[client] = str(error)
        return said

    def _know(self, client: int, data: NodeData, answer: RecordDict) -> None:
        check_answered(answer)
        said = description_in(answer, self.module, isinstance(self.module, Task))
        if self.counted not in (None, said.counted):
            raise MessageError(
                "its samples are read in another way than the others', one by one or as tensors, "
                "so that what it is judged by can't be added to theirs"
            )
        head = said.head if said.sizes["train"] else None  # else no sample has shown it
        if head is not None and self._head not in (None, head):
            raise MessageError(f"its network has the {head}, and another client's {self._head}")
        for split, size in said.sizes.items():
            if size > self.bounds.max_samples:
                raise MessageError(
                    f"it says that it has {size:,} samples for {split}, of at most "
                    f"{self.bounds.max_samples:,}: see --max-samples"
                )
        before = data.known.get(client, (said.sizes, 0))[0]
        if before != said.sizes and not self.may_change:
            now, then = (
                ", ".join(f"{n:,} {s}" for s, n in d.items()) for d in (said.sizes, before)
            )
            raise MessageError(
                f"it says that it has {now} samples, and joined with {then}: numbers of samples "
                "are fixed for a run, unless --model.allow_other_data true"
            )
        if said.anew:
            self.renew(client)
        self.counted, self._head = said.counted, head or self._head
        data.know(client, said.sizes, said.fingerprint)

    def renew(self, client: int) -> None:
        """Treat a client as one that has never trained, since its node has lost its memory."""
        if client not in self.renewed:
            print(f"pflight: client {client} begins anew: its node has lost its memory", flush=True)
        self.renewed |= {client}
        self.after[client] = NEVER
        self.sessions.pop(client, None)

    def _find_head(self, strategy: Strategy) -> Head | None:
        """Return the head of the clients' network, as found by a pass at a node."""
        return self._head

    def choose_engine(
        self,
        wanted: EngineName,
        clients_at_once: int | None,
        strategy: Strategy,
        timeout: float | None,
        reason: str | None = None,
    ) -> Choice:
        """Print that clients train at their nodes. The server's engine trains none."""
        whose = self.module, self.client_method, self.layout, self.attached_data
        how = strategy.precision_plugin, strategy.root_device, self.training.seed
        self.engine = SequentialEngine(ClientSetup(*whose, *how))
        self.engine.check_input()
        return Choice("sequential", 1, "each client trains on its own machine")

    # Requests

    def train(
        self,
        clients: Tensor,
        send: Any,
        *,
        epochs: int | None = None,
        keep: bool = True,
        **how: Any,
    ) -> Iterator[ClientUpdates]:
        """See :class:`~pflight.clients.Clients`."""
        numbers = {"epochs": epochs or 0}
        if keep:
            return self._work("train", clients, send, numbers, **how)
        numbers["as_round"] = self.current.entry.index
        return self._work("aside", clients, send, numbers, **how)

    def gradients(self, clients: Tensor, send: Any, **how: Any) -> Iterator[ClientUpdates]:
        """See :class:`~pflight.clients.Clients`."""
        numbers = {"batches": how.pop("batches", None) or 0}
        return self._work("gradients", clients, send, numbers, **how)

    def _work(
        self,
        work: Work,
        clients: Tensor,
        send: Any,
        numbers: dict[str, Any],
        returns: Iterable[str] | None = None,
        multiple_of: int | None = None,
        max_chunk: int | None = None,
    ) -> Iterator[ClientUpdates]:
        chunks = list(self._chunks(clients, multiple_of, max_chunk))
        groups = [chunks] if max_chunk is None else [[chunk] for chunk in chunks]
        names = self._returns(returns)
        for group in filter(None, groups):
            asked = torch.cat(group)
            sent = send(asked)
            awake = self.current.answers(asked)
            words = {"returns": names}
            self._send(work, asked[awake], {SENT: sent[awake]}, numbers, words)
            answers = self._answers(asked[awake], sent[awake], names, work)
            beside = [name for name in names if name in self._beside]
            weights = self.num_samples
            if beside or self.bounds.max_share is not None:  # compare all clients first
                compared = self._compared(dict(answers), sent, beside)
                weights, answers = self._capped(compared), iter(compared)
            update = partial(self._updates, work=work, answers=answers, weights=weights)
            for chunk in group:
                yield self._ask(chunk, sent[torch.isin(asked, chunk)], update, names)

    def _returns(self, returns: Iterable[str] | None) -> list[str]:
        assert self.callback is not None
        return list(self.callback.sent_names if returns is None else returns)

    def losses(self, clients: Tensor, sent: TensorDict, split: Split = "train") -> Tensor:
        """See :class:`~pflight.clients.Clients`."""
        return self.losses_of(clients, [sent], split)[0]

    def losses_of(
        self, clients: Tensor, models: Sequence[TensorDict], split: Split = "train"
    ) -> Tensor:
        """See :class:`~pflight.clients.Clients`. One message per client holds all models."""
        size = len(models), len(clients)
        losses = torch.full(size, torch.nan, dtype=torch.double, device=self.device)
        awake = self.current.answers(clients)
        groups = {nth(SENT, k): sent[awake] for k, sent in enumerate(models)}
        self._send("losses", clients[awake], groups, {}, {"split": split})
        counts, failures = self.attached_data.num_samples(split), []
        for row in awake.nonzero().flatten().tolist():
            client = int(clients[row])
            try:
                found = losses_in(self._received(client), len(models), int(counts[client]))
                losses[:, row] = torch.tensor(found, dtype=torch.double)
            except MessageError as error:
                failures.append(ClientFailure(client, str(error)))
        self.leave_out(failures, "to tell its loss")
        return losses

    def train_aside(
        self,
        clients: Tensor,
        sent: TensorDict,
        round_index: int | None = None,
        epochs: int | None = None,
        returns: Collection[str] | None = None,
    ) -> ClientUpdates:
        """See :class:`~pflight.clients.Clients`."""
        as_round = self.rounds if round_index is None else round_index
        numbers, names = {"as_round": as_round, "epochs": epochs or 0}, self._returns(returns)
        known = [name for name in self._returns(None) if name in sent]
        sent = sent.select(*known)
        self._send("aside", clients, {SENT: sent}, numbers, {"returns": names})
        answers = self._answers(clients, sent, names, "aside")
        updates = self._updates(clients, sent, names, "aside", answers, self.num_samples)
        self.note_failures(updates.failures, "to find its place")
        self.count_aside(clients, sent, updates, names)
        return updates

    def judged(self, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Return the sent entries over the initial model. Nodes make the clients' models from them.

        Raises:
            ConfigurationError: If this is called outside of an evaluation by nodes.
        """
        if not self._judging:
            raise ConfigurationError(
                f"the model of client {int(clients[0])} is on its own machine: ask its node"
            )
        return self.completed(clients, sent)

    def has_memory(self, clients: Tensor) -> Tensor:
        """Return a mask ``[C]`` of the clients that keep private entries from an earlier round."""
        assert self.callback is not None
        known = self.after[clients.cpu()] != NEVER
        return known & bool(self.callback.kept_names)

    def remembered(self, clients: Tensor, states: TensorDict) -> Any:
        """Raise, since the memory of clients stays with them."""
        raise ConfigurationError("what clients remember is on their own machines")

    def run(self, look: Pass, clients: Tensor, states: TensorDict) -> NoReturn:
        """Raise, since a server with arbitrary passes could request the samples."""
        raise ConfigurationError(
            f"{type(look).__name__}: the server can't look through samples on other machines; a "
            "client method can, in its before_training(), finish() or models()"
        )

    def evaluate(
        self, clients: Tensor, callback: ServerCallback, split: Split
    ) -> Iterator[tuple[int, RecordDict | ClientFailure]]:
        """Have clients judge their models on their own samples, and yield the metrics."""
        assert self.callback is not None
        names, sent = self._returns(None), callback.broadcast(clients)
        groups = {SENT: TensorDict({**self._made(sent), **sent}, batch_size=sent.batch_size)}
        if type(callback).personalize is not ServerCallback.personalize:
            self._judging = True
            try:
                groups[JUDGED] = callback.personalize(clients).select(*names)
            finally:
                self._judging = False
        self._send("evaluate", clients, groups, {}, {"split": split})
        for client in clients.tolist():
            try:
                yield client, self._received(client)
            except MessageError as error:
                yield client, ClientFailure(client, str(error))

    def _made(self, sent: TensorDict) -> dict[str, Tensor]:
        """Return the entries of the server's model ``[C]`` that it changed but does not send."""
        model, template = self.server.expand(0, self.layout.names, len(sent)), self.layout.template
        others = (name for name in self.layout.names if name not in sent)
        changed = (name for name in others if not torch.equal(model[name][0].cpu(), template[name]))
        return {name: model[name] for name in changed}

    # Messages

    def _send(
        self,
        work: Work,
        clients: Tensor,
        sent: Mapping[str, TensorDict],
        numbers: Mapping[str, Any],
        words: Mapping[str, Any],
    ) -> None:
        common = {
            "clients": self.num_clients,
            "round": self.current.entry.index,
            "rounds": self.rounds,
            "mean_samples": self._mean_samples,
            **numbers,
        }
        run = {"run": self.run_id, "session": self.session, "agreement": self.agreement}
        messages, pool = [], dict[bytes, bytes]()  # many clients may get equal models
        for row, client in enumerate(clients.tolist()):
            rows = {group: dict(entries(states[row])) for group, states in sent.items()}
            own = {**common, "client": client, "after": int(self.after[client])}
            session = self.sessions.get(client, self.session)
            said = {"do": work, **run, "after_session": session, **words}
            content = packed(rows, own, said, pool)
            messages.append(Asked(client, work, self.current.entry.index, content))
        self.post.send(messages)

    @property
    def _mean_samples(self) -> float:
        """The mean number of samples if training needs it, or else 0. It tells about others."""
        methods = self.client_method, self.client_method.personal
        parts: list[Any] = [*filter(None, methods), *self.client_method.terms]
        if self.data is None or not any(part.needs_mean_samples for part in parts):
            return 0.0
        return float(self.num_samples[self.trainable].double().mean())

    def _received(self, client: int) -> RecordDict:
        """Return a client's answer.

        Raises:
            MessageError: If there is no answer.
        """
        answer = self.post.receive(client)
        if isinstance(answer, str):
            raise MessageError(shown(answer))
        if begins_anew(answer):
            self.renew(client)
        check_answered(answer)
        return answer

    @property
    def _beside(self) -> frozenset[str]:
        """Names of the entries that clients send beside their model and don't train."""
        layout = self.layout
        return frozenset({*layout.own, *layout.extra} - {*layout.parameters})

    def _answers(
        self, clients: Tensor, sent: TensorDict, names: list[str], work: Work
    ) -> Iterator[tuple[int, Answer]]:
        """Wait for the answers of clients ``[C]``, and yield each checked answer."""
        template, setup = self.layout.template, self.attached_engine.setup
        idle, epochs = ~setup.has_batches(clients), self.training.epochs or 1
        steps = self.num_batches(clients) * epochs
        pipeline = self.pipeline(names, work == "gradients")
        for row, client in enumerate(clients.tolist()):
            like = {name: sent[name][row] if name in sent else template[name] for name in names}
            most = max(int(steps[row]), self.training.steps or 0)
            try:
                there = pipeline.packed_like(like) if pipeline.bytes_saved else like
                update = update_in(self._received(client), there, bool(idle[row]))
                if update is not None and there is not like:
                    update = pipeline.unpack(update[0], sent[row]), update[1]
                if update is not None:
                    self._check(update[0], like, int(self.num_samples[client]), most, work)
                yield client, update
            except (MessageError, ValueError) as error:
                yield client, ClientFailure(client, str(error))

    def _check(
        self,
        state: Mapping[str, Tensor],
        like: Mapping[str, Tensor],
        num_samples: int,
        num_steps: int,
        work: Work,
    ) -> None:
        """Raise if an update is impossible for a client with this number of samples."""
        beside = {name: value for name, value in state.items() if name in self._beside}
        model = {name: value for name, value in state.items() if name not in beside}
        check_update(model, like, work == "gradients")
        if beside and work == "train":
            wrong = self.client_method.check_sent(beside, num_samples, num_steps)
            if wrong:
                raise MessageError(wrong)

    def _compared(
        self, answers: dict[int, Answer], sent: TensorDict, beside: list[str]
    ) -> list[tuple[int, Answer]]:
        """Return the answers without outliers among the entries beside the models."""
        given = {i: a[0] for i, a in answers.items() if isinstance(a, tuple)}
        scaled = tuple(
            f"{where}{n}" for n in self.client_method.per_sample for where in (OWN, f"{EXTRA}.")
        )
        statistics = {
            i: {
                name: state[name] / max(int(self.num_samples[i]), 1)
                if name in scaled
                else state[name]
                for name in beside
                if state[name].is_floating_point()
            }
            for i, state in given.items()
        }
        known = [sent[name][:1] for name in self.layout.parameters if name in sent]
        odd = outliers(statistics, max(1.0, norm_of(known)) if known else 1.0)
        return [
            (i, ClientFailure(i, odd[i]) if i in odd else answer) for i, answer in answers.items()
        ]

    def _capped(self, answers: Iterable[tuple[int, Answer]]) -> Tensor:
        """Return weights of clients ``[num_clients]``, capped over the clients that answered."""
        answered = torch.tensor([i for i, a in answers if isinstance(a, tuple)], dtype=torch.long)
        weights = self.weights_of(answered)
        return self.num_samples.to(weights.dtype).index_copy(0, answered, weights)

    def weights_of(self, clients: Tensor) -> Tensor:
        """See :class:`~pflight.clients.Clients`. The share of each client is bounded."""
        return self.bounds.capped(super().weights_of(clients))

    def _updates(
        self,
        clients: Tensor,
        sent: TensorDict,
        names: Collection[str],
        work: Work,
        answers: Iterator[tuple[int, Answer]],
        weights: Tensor,
    ) -> ClientUpdates:
        """Return the updates of clients as they arrive, without unusable ones."""
        template, device = self.layout.template, self.device
        states: dict[int, dict[str, Tensor]] = {}
        failures: list[ClientFailure] = []
        logs: list[Logs] = []
        for client, answer in islice(answers, len(clients)):
            if isinstance(answer, ClientFailure):
                failures.append(answer)
            if not isinstance(answer, tuple):
                continue
            states[client], logged = answer
            logs.append(logged)
            if work != "aside":
                self.renewed -= {client}
                self.after[client] = self.current.entry.index
                self.sessions[client] = self.session
                if self.on_client_end is not None:
                    self.on_client_end(client)
        columns = {
            name: torch.stack([state[name] for state in states.values()]).to(device)
            if states
            else template[name].new_empty((0, *template[name].shape)).to(device)
            for name in names
        }
        answered = torch.tensor(list(states), dtype=torch.long)
        return ClientUpdates(
            answered.to(clients.device),
            TensorDict(columns, batch_size=[len(states)]),
            weights[answered],
            failures,
            merge_logs(logs),
            bytes_saved=self.pipeline(names, work == "gradients").bytes_saved,
        )


class RemoteEvaluator(Evaluator):
    """Judges clients at their nodes: nodes count, and the server adds up the counts."""

    def judge(self, ids: Tensor) -> None:
        """Evaluate the clients ``[C]``."""
        clients = cast(RemoteClients, self.clients)
        judged: dict[int, dict[WhichModel, Any]] = {}
        failures = []
        with clients.noting(self.failures):
            for client, answer in clients.evaluate(ids, self.callback, self.split):
                try:
                    if isinstance(answer, ClientFailure):
                        failures.append(answer)
                    else:
                        judged[client] = self._read(client, answer)
                except MessageError as error:
                    failures.append(ClientFailure(client, str(error)))
            odd = odd_ones(judged)
            failures += [ClientFailure(client, reason) for client, reason in odd.items()]
            clients.note_failures(failures, f"on its {self.split} samples")
        for client, found in judged.items():
            if client not in self.failures.clients:
                self._take(client, found)

    def _read(self, client: int, answer: RecordDict) -> dict[WhichModel, Any]:
        """Return the counts or logs of a client's models.

        Raises:
            MessageError: If the answer is invalid.
        """
        clients, like = self.clients, dict[WhichModel, dict[str, Tensor]]()
        for model, metrics in self._metrics.items():
            if isinstance(metrics, ClientMetrics):
                like[model] = metrics.scores(client)
        if like:
            samples = int(clients.attached_data.num_samples(self.split)[client])
            return counts_in(answer, like, samples)
        step = "test_step" if self.split == "test" else "validation_step"
        return values_in(answer, client, self._metrics, is_overridden(step, clients.module))

    def _take(self, client: int, judged: Mapping[WhichModel, Any]) -> None:
        """Add the results of a client's models."""
        for model, found in judged.items():
            metrics = self._metrics[model]
            if isinstance(metrics, LoggedMetrics):
                metrics.update(found)
            else:
                for name, counts in found.items():
                    getattr(metrics, name)[client] = counts

    def _new_metrics(self) -> ClientMetrics | LoggedMetrics:
        """Return empty metrics for the answers. The share of each client is bounded."""
        metrics, bounds = self._own_metrics(), cast(RemoteClients, self.clients).bounds
        metrics.weigh = None if bounds.max_share is None else bounds.capped
        return metrics

    def _own_metrics(self) -> ClientMetrics | LoggedMetrics:
        clients, module = cast(RemoteClients, self.clients), self.clients.module
        counting = None
        if clients.counted and isinstance(module, Task):
            counting = module.client_metrics(clients.num_clients, self.f1_average)
        if counting is None:
            return super()._new_metrics()
        scores = ClientScores(clients.num_clients).to(clients.device)
        scores.update(*[torch.empty(0, device=clients.device)] * 4)  # metrics need one update
        return scores


def ask_nodes(federation: Federation, post: Post, bounds: Bounds | None = None) -> RemoteClients:
    """Replace the simulated clients of a new federation by nodes."""
    clients = RemoteClients(post, federation.clients)
    clients.bounds = bounds or Bounds()
    clients.may_change = federation.record.allow_other_data
    federation.clients = clients
    federation.record = RunRecord(clients, federation.record.allow_other_data)
    federation.evaluator = RemoteEvaluator
    return clients

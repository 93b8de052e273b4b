"""One client after the other, by its own module's steps and hooks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim import Optimizer

from pflight.errors import ConfigurationError, said_by
from pflight.half import OWN, PERSONAL, Half, Phase
from pflight.history import Logs, add_logs, merge_logs
from pflight.loaders import Split, Visit
from pflight.metrics import ClientValues
from pflight.options import check_optimizer
from pflight.randomness import Purpose, derive_seed, isolated, seed_everything
from pflight.state import StateModule, entries
from pflight.task import Task, trains_as_a_task

from .base import GRADIENT_BATCH, ONE_THREAD, Setting, are_one, finite_rows, threads
from .descent import Descent, steps_only
from .local import SCALARS, AloneClient, Copies, Stream, phase_of, resting
from .module_trainer import STEP_HOOKS
from .operations import count_operations
from .outputs import Samples, evaluate_task
from .samples import check_order
from .time_limit import time_limit
from .updates import STOPS, ClientFailure, ClientUpdates, Evaluation, Kept

HOOKS = (
    *("on_fit_start", "on_train_start", "on_train_epoch_start"),
    *STEP_HOOKS,
    *("on_train_epoch_end", "on_train_end", "on_fit_end"),
)
"""What a module may do of its own around its training steps."""
_LARGE_KERNEL = 2**20  # weights of a convolution from which on channels-last is slower
_NO_LOSS = "its training_step returned no loss for any batch"
_IGNORED_HOOKS = ("configure_callbacks", "on_save_checkpoint", "on_load_checkpoint")


class SequentialEngine:
    """Trains and evaluates clients one by one, whatever LightningModule they are.

    Each participation begins with a pristine copy of the module and trains by its own
    ``training_step`` and hooks, with what the client half adds to its loss from outside. A half
    with a personal model has a second copy of its own, which sees the same batches. A task that
    has no hooks of its own and is stepped by SGD trains without what Lightning does around a step.
    Networks too small to gain from several threads train on one. See
    :class:`~pflight.engines.base.Engine` for what it is asked for.

    Args:
        setting: The client module, its half, and its data.
    """

    chunk = 1

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.device = setting.device
        self.half: Half = setting.half
        self.operations = math.inf  # of a sample's forward pass
        self._threads = torch.get_num_threads()
        self._channels_last = self._changes_input = False
        self._stream: Stream | None = None
        self._visits_to: Callable[[int], list[Visit]] = lambda client: []
        self._drifted: set[str] = set()
        self._phases: dict[tuple[int, bool], list[Phase] | None] = {}
        self._build()
        if setting.mixes_samples and setting.data.batch_size == 1:
            raise ConfigurationError("batch_size=1 can't train a network with BatchNorm")

    def has_batches(self, clients: Tensor) -> Tensor:
        """See :class:`~pflight.engines.base.Engine`."""
        return self.setting.has_batches(clients)

    # Before the start

    def check_input(self) -> None:
        """See :class:`~pflight.engines.base.Engine`."""
        module = self.setting.client
        self.half.check(module)
        if not module.automatic_optimization and not self.half.only_adds:
            raise ConfigurationError(
                f"{type(self.half).__name__} replaces the loss of its clients, which "
                f"{type(module).__name__} with manual optimization does not hand out"
            )
        if not is_overridden("training_step", module):
            raise ConfigurationError(
                f"{type(module).__name__} has no training_step: a client trains by its own"
            )
        for hook in _IGNORED_HOOKS:
            if is_overridden(hook, module):
                rank_zero_warn(
                    f"{type(module).__name__}.{hook} is ignored: the federation's Trainer has the "
                    "callbacks and writes the checkpoints"
                )
        if any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
            raise ConfigurationError(
                "SyncBatchNorm would mix clients of different ranks: use BatchNorm"
            )
        if isinstance(module, Task):
            self._check_task(module)
        if self._is_small():
            self._threads = 1
        if self._gains_from_channels_last():
            self._channels_last = True
            self._build()
            with isolated(self.device):
                self._channels_last = self._runs()
            self._build()

    def _check_task(self, module: Task) -> None:
        """Raise unless a task can take the data's samples, and its optimizer can be built."""
        setting = self.setting
        if setting.example:
            evaluated = any(setting.data.num_samples(split).any() for split in ("val", "test"))
            x, y = (leaf.clone() for leaf in setting.example)
            copy: Any = self._copies.module.eval()
            judged = evaluated and setting.task is not None
            asked = judged or setting.has_loss_of_its_kind
            try:
                with time_limit(setting.client_timeout), torch.no_grad(), setting.forward_context():
                    outputs = copy(x) if asked else None
                    self._changes_input = not torch.equal(x, setting.example[0])
                    if not asked and trains_as_a_task(module):
                        copy.loss((x, y))
            except STOPS:
                raise
            except BaseException as error:
                reason = said_by(error).split("\n")[0] or type(error).__name__
                raise ConfigurationError(
                    f"the network can't take the data's samples of shape {tuple(x.shape[1:])} "
                    f"({str(x.dtype).removeprefix('torch.')}): {reason}"
                ) from error
            if outputs is not None and not isinstance(outputs, Tensor):
                raise ConfigurationError(
                    f"the network gives {type(outputs).__name__}; it must give a tensor"
                )
            if outputs is not None:
                self._check_outputs(module, outputs, y)
            self.operations = count_operations(copy, x[:1]).total
        try:
            check_optimizer(Task.configure_optimizers(module))
        except (KeyboardInterrupt, SIGTERMException):
            raise
        except BaseException as error:
            reason = " ".join(said_by(error).split()) or type(error).__name__
            raise ConfigurationError(f"the client's optimizer can't be built: {reason}") from error

    def _check_outputs(self, task: Task, outputs: Tensor, targets: Tensor) -> None:
        try:
            task.check_outputs(outputs, targets)
        except ValueError as error:
            reason = str(error).replace("its model", "the network", 1)
            raise ConfigurationError(reason) from error

    def _is_small(self) -> bool:
        """Whether a step takes too little arithmetic to gain from several threads."""
        data, module = self.setting.data, self.setting.client
        size = min(data.batch_size or math.inf, int(data.num_samples("train").max()))
        if math.isfinite(self.operations):
            return self.operations * size < ONE_THREAD
        parts = list(module.modules())
        if any(isinstance(part, nn.modules.conv._ConvNd | nn.RNNBase) for part in parts):
            return False
        weights = sum(parameter.numel() for parameter in module.parameters())
        return 2 * weights * size < ONE_THREAD

    def _gains_from_channels_last(self) -> bool:
        """Whether convolutions and pooling run faster with the channels of a pixel side by side."""
        kernels = [
            part.weight.numel()
            for part in self.setting.client.modules()
            if isinstance(part, nn.Conv2d)
        ]
        return (
            self.device.type == "cpu"
            and self._plain
            and 0 < max(kernels, default=0) < _LARGE_KERNEL
        )

    def _runs(self) -> bool:
        """Try a step and an evaluation; a ``view`` in the client may need the usual layout."""
        setting = self.setting
        assert setting.form is not None
        start = {name: t.to(self.device) for name, t in setting.layout.template.items()}
        memory = None
        if self.half.keeps_memory:
            memory = {name: start[name] for name in self.half.remembered(setting.layout)}
        try:
            self.load(start, anchored=True, memory=memory)
            batch = setting.form.batch([leaf.clone() for leaf in setting.example])
            with setting.forward_context(), torch.enable_grad():
                for client in self.clients:
                    client.half.loss(client, batch).backward()
            with torch.no_grad():
                self.client.after_training()
                self.client.remember()
            self.client.module.eval()
            with setting.forward_context(), torch.no_grad():
                self.client.module(setting.example[0])
        except STOPS:
            raise
        except BaseException:
            return False
        return True

    # Training

    def train(
        self,
        clients: Tensor,
        starts: TensorDict,
        *,
        round_index: int,
        epochs: int = 1,
        steps: int | None = None,
        purpose: Purpose = Purpose.TRAIN,
        kept: Kept | None = None,
        on_client_end: Callable[[int], None] | None = None,
    ) -> ClientUpdates:
        """See :class:`~pflight.engines.base.Engine`."""

        def train_one(client: int) -> tuple[dict[str, Tensor], Logs]:
            logs, taken = self._train_one(client, round_index, epochs, steps)
            if purpose is Purpose.TRAIN:
                self.client.num_steps.fill_(taken)
                with torch.no_grad():
                    self.client.after_training()
            if on_client_end is not None:
                on_client_end(client)
            return self.state(), logs

        def visits(client: int) -> list[Visit]:
            return self._visits(client, round_index, epochs, steps)

        with self._visiting("train", clients, visits):
            return self._for_each_client(clients, starts, round_index, purpose, train_one, kept)

    def gradients(
        self, clients: Tensor, states: TensorDict, *, round_index: int, batches: int | None = None
    ) -> ClientUpdates:
        """See :class:`~pflight.engines.base.Engine`."""

        def gradient(client: int) -> tuple[dict[str, Tensor], Logs]:
            gradients, logs = self._gradient(client)
            return {**self.state(), **gradients}, logs

        def visits(client: int) -> list[Visit]:
            return [self._visit_for_gradients(client, round_index, batches)]

        with self._visiting("train", clients, visits):
            return self._for_each_client(clients, states, round_index, Purpose.TRAIN, gradient)

    def _for_each_client(
        self,
        clients: Tensor,
        starts: TensorDict,
        round_index: int,
        purpose: Purpose,
        work: Callable[[int], tuple[dict[str, Tensor], Logs]],
        kept: Kept | None = None,
    ) -> ClientUpdates:
        layout = self.setting.layout
        columns = {name: starts[name] for name in layout.names}
        results = _like({name: columns[name] for name in layout.moving})
        memories = dict(entries(kept.states)) if kept is not None else {}
        remembered = _like(memories)
        done: dict[int, Logs] = {}  # by row, of those that came to an end
        failures: list[ClientFailure] = []
        with threads(self._threads):
            for row, client in enumerate(clients.tolist()):
                seed = derive_seed(purpose, self.setting.seed, round_index, client)
                seed_everything(seed, self.device)
                with self._attempt(client, failures):
                    start = {name: column[row] for name, column in columns.items()}
                    memory = None
                    if kept is not None and kept.seen[row]:
                        memory = {name: value[row] for name, value in memories.items()}
                    self.load(start, purpose is Purpose.TRAIN, memory)
                    with torch.enable_grad():
                        tensors, logs = work(client)
                    own = self.client.remember() if kept is not None else {}
                    with torch.no_grad():
                        into = [result[row] for result in results.values()]
                        torch._foreach_copy_(into, [tensors[name] for name in results])
                        for name, value in remembered.items():
                            _copy_whole(name, own[name], value[row])
                    self._mend_frozen()
                    done[row] = logs
        late = {failure.client for failure in failures}  # one may have caught its time-out
        done = {row: logs for row, logs in done.items() if int(clients[row]) not in late}
        trained = TensorDict(results, batch_size=[len(clients)])
        keep = TensorDict(remembered, batch_size=[len(clients)])
        finite = finite_rows(trained)
        if remembered and type(self.half).remember is not Half.remember:
            finite = list(map(all, zip(finite, finite_rows(keep), strict=True)))
        for row in [row for row in done if not finite[row]]:
            failures.append(ClientFailure(int(clients[row]), "its result is NaN or infinite"))
            del done[row]
        ended = torch.tensor(list(done), dtype=torch.long, device=self.device)
        if len(ended) < len(clients):
            trained, keep = trained[ended], keep[ended]
        # What is frozen is as it was sent: one tensor for all clients.
        frozen = {name: columns[name][: len(ended)] for name in layout.frozen}
        states = {name: frozen[name] if name in frozen else trained[name] for name in columns}
        answered = clients[ended.to(clients.device)]
        return ClientUpdates(
            answered,
            TensorDict(states, batch_size=[len(ended)]),
            self.setting.data.num_samples("train")[answered.cpu()],
            failures,
            merge_logs(done.values()),
            keep if memories else None,
        )

    @contextmanager
    def _attempt(self, client: int, failures: list[ClientFailure]) -> Iterator[None]:
        """Note the failure of a client that raises or takes too long; the next gets a new copy."""
        try:
            with time_limit(self.setting.client_timeout):
                yield
        except STOPS:
            raise
        except BaseException as error:
            failures.append(ClientFailure.of(client, error))
            self._build()

    def _train_one(
        self, client_id: int, round_index: int, epochs: int, steps: int | None
    ) -> tuple[Logs, int]:
        """Train the client at hand; return what it logged, and its number of steps."""
        setting = self.setting
        count = int(setting.data.num_samples("train")[client_id])
        sizes = setting.batch_sizes(count)
        limits = None if steps is not None else epochs, len(sizes), steps
        self.client.num_samples.fill_(count)
        optimizers = [self._half_optimizer(client) for client in self.clients]
        if self._plain and (descents := self._descents(optimizers)):
            with ExitStack() as stack:
                tells = [
                    stack.enter_context(client.trainer.watching(*limits)) for client in self.clients
                ]
                return self._descend(client_id, descents, tells, epochs)
        for client, optimizer in zip(self.clients, optimizers, strict=True):
            client.trainer.attach(client.module)
            client.trainer.start(*limits, client.step, optimizer)
        for visit, batches in self._batches(client_id, "train"):
            phase = phase_of(self._phases_of(epochs), visit.epoch)
            with ExitStack() as stack:
                for client in self.clients:
                    stack.enter_context(resting(client.module, setting.layout, phase))
                    stack.enter_context(client.trainer.epoch())
                for index, (part, batch) in enumerate(zip(visit.parts, batches, strict=False)):
                    last = index + 1 == len(sizes)
                    goes_on = [
                        client.trainer.step(batch, len(part), last) for client in self.clients
                    ]
                    if not all(goes_on):
                        break
        for client in self.clients:
            client.trainer.end()
        steps = self.client.trainer.global_step
        if self.client.module.automatic_optimization and steps:
            self._check_gradients(self.client)
        return self._logs(), steps

    def _logs(self) -> Logs:
        """Return what a client logged, with what its personal model did."""
        logs = self.client.trainer.logs
        for name, (total, count) in self.clients[0].trainer.logs.items():
            if self.clients[0] is not self.client and name in logs:
                logs[name] = logs[name][0] + total, count
        return logs

    def _half_optimizer(self, client: AloneClient) -> Optimizer | None:
        parameters = [p for p in client.module.parameters() if p.requires_grad]
        return self.half.optimizer(parameters, client.anchor is not None)

    def _descents(self, optimizers: list[Optimizer | None]) -> list[Descent] | None:
        """Return what takes the clients' steps, if no more than SGD is needed."""
        found = []
        for client, chosen in zip(self.clients, optimizers, strict=True):
            optimizer: Any = client.module.configure_optimizers() if chosen is None else chosen
            own = {id(parameter) for parameter in client.module.parameters()}
            if not Descent.suits([optimizer]) or not steps_only(optimizer, own):
                return None
            found.append(Descent(optimizer))
        return found

    def _descend(
        self,
        client_id: int,
        descents: list[Descent],
        tells: list[Callable[[int, int, int], None]],
        epochs: int,
    ) -> tuple[Logs, int]:
        """Train a client that has no hooks of its own."""
        losses: Logs = {}
        models = list(zip(self.clients, descents, tells, strict=True))
        taken = 0
        for visit, batches in self._batches(client_id, "train"):
            phase = phase_of(self._phases_of(epochs), visit.epoch)
            with ExitStack() as stack:
                for client in self.clients if phase is not None else ():
                    stack.enter_context(resting(client.module, self.setting.layout, phase))
                for part, batch in zip(visit.parts, batches, strict=True):
                    total: Tensor | float = 0.0
                    for client, descent, tell in models:
                        tell(visit.epoch, taken, len(part))
                        with self.setting.forward_context():
                            loss = client.half.loss(client, batch)
                        descent.step(loss)
                        total = total + loss.detach()
                    add_logs(losses, {"train/loss": (total * len(part), len(part))})
                    taken += 1
        return {**self._logs(), **losses}, taken

    def _phases_of(self, epochs: int) -> list[Phase] | None:
        key = epochs, self.client.anchor is not None
        if key not in self._phases:
            self._phases[key] = self.half.phases(self.setting.client, *key)
        return self._phases[key]

    def _check_gradients(self, client: AloneClient) -> None:
        if not client.has_loss:
            raise RuntimeError(_NO_LOSS)
        if not client.skipped and all(w.grad is None for w in client.weights.values()):
            raise RuntimeError(
                "its loss depends on none of its weights: it replaced them, or a function that it "
                "keeps still holds the module that was given, where every client trains a copy"
            )

    def _gradient(self, client_id: int) -> tuple[dict[str, Tensor], Logs]:
        """Return the gradients of the client at hand over its samples, and the loss."""
        logs: Logs = {}
        client = self.client
        client.num_samples.fill_(int(self.setting.data.num_samples("train")[client_id]))
        for weight in client.weights.values():
            weight.grad = None
        for visit, batches in self._batches(client_id, "train"):
            count = sum(map(len, visit.parts))
            for part, batch in zip(visit.parts, batches, strict=True):
                if (loss := client.loss(batch, len(part))) is None:
                    continue
                (loss * (len(part) / count)).backward()
                add_logs(logs, {"train/loss": (loss.detach() * len(part), len(part))})
            if count and not logs:
                raise RuntimeError(_NO_LOSS)
        zero = torch.zeros((), device=self.device)
        gradients = {
            name: (zero if weight.grad is None else weight.grad).expand_as(weight)
            for name, weight in client.weights.items()
        }
        return gradients, logs

    # Batches

    def _visits(self, client: int, round_index: int, epochs: int, steps: int | None) -> list[Visit]:
        """Return the local epochs of a client, each with the samples of its batches."""
        data, visits = self.setting.data, []
        count = int(data.num_samples("train")[client])
        sizes = self.setting.batch_sizes(count)
        left = steps if steps is not None else epochs * len(sizes)
        for epoch in range(-(-left // len(sizes)) if sizes else 0):
            used = sizes[: min(left, len(sizes))]
            order = data.order(client, round_index, epoch)
            check_order(count, order)
            visits.append(Visit(client, round_index, epoch, order[: sum(used)].split(used)))
            left -= len(sizes)
        return visits

    def _visit_for_gradients(self, client: int, round_index: int, batches: int | None) -> Visit:
        """Return a visit to a client, with some of its batches or all samples as they lie."""
        data = self.setting.data
        sizes = self.setting.batch_sizes(int(data.num_samples("train")[client]))[:batches]
        order = torch.arange(sum(sizes))
        if batches is not None:
            order = data.order(client, round_index, 0)[: sum(sizes)]
        # A module that mixes the samples of a batch has to see them all at once.
        size = max(sum(sizes), 1) if self.setting.mixes_samples else GRADIENT_BATCH
        return Visit(client, round_index, 0, order.split(size) if sizes else ())

    @contextmanager
    def _visiting(
        self, split: Split, clients: Tensor, visits: Callable[[int], list[Visit]]
    ) -> Iterator[None]:
        """Make ready to visit the clients ``[C]``, whose batches may be read ahead."""
        outer = self._visits_to, self._stream
        self._visits_to, self._stream = visits, None
        if self.setting.form is None:
            planned = [visit for client in clients.tolist() for visit in visits(client)]
            self._stream = Stream(self.setting.data, split, planned)
        try:
            yield
        finally:
            self._visits_to, self._stream = outer

    def _batches(self, client: int, split: Split) -> Iterator[tuple[Visit, Iterator[Any]]]:
        """Yield the visits to a client, each with its batches."""
        if self._stream is not None:
            yield from self._stream.visits_of(client)
            return
        setting, visits = self.setting, self._visits_to(client)
        leaves = self._samples(client, split) if visits else []
        for visit in visits:
            seen = leaves
            if visit.round is not None:
                seen = setting.augmented(leaves, client, visit.round, visit.epoch)
            yield visit, self._cut(seen, visit)

    def _cut(self, leaves: list[Tensor], visit: Visit) -> Iterator[Any]:
        """Yield the batches of a visit, cut out of a client's samples."""
        form = self.setting.form
        assert form is not None
        if not visit.parts:
            return
        order, sizes = torch.cat(list(visit.parts)).to(self.device), list(map(len, visit.parts))
        for part in zip(*(leaf[order].split(sizes) for leaf in leaves), strict=True):
            yield form.batch(list(part))

    def _samples(self, client: int, split: Split) -> list[Tensor]:
        """Return a client's samples, whose targets are such as the loss takes."""
        leaves, task = self.setting.samples(client, split), self.setting.client
        if isinstance(task, Task) and self.setting.has_loss_of_its_kind:
            task.check_targets(leaves[1])
        return leaves

    # Evaluation

    def evaluate(
        self, clients: Tensor, states: TensorDict, split: Split
    ) -> tuple[Evaluation | ClientValues, list[ClientFailure]]:
        """See :class:`~pflight.engines.base.Engine`."""
        if self.setting.task is None:
            return self._evaluate_by_steps(clients, states, split)
        return evaluate_task(
            self.setting,
            clients,
            split,
            attempt=self._attempt,
            at_once=lambda samples: self.outputs_of_one(states, samples),
            alone=lambda row, x: self.outputs(_row(states, row), x),
            operations=self.operations,
        )

    def outputs(self, state: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return what a client's model gives for its inputs, in evaluation mode."""
        self.load(state, anchored=False)
        self.client.module.eval()
        with self.setting.forward_context():
            parts = x.split(self.setting.data.eval_batch_size or len(x) or 1)
            given = (part.clone() if self._changes_input else part for part in parts)
            return torch.cat([self.client.module(part) for part in given])

    def outputs_of_one(self, states: TensorDict, samples: Samples) -> dict[int, Tensor] | None:
        """Return the outputs of clients that have one and the same model, by row, or ``None``."""
        if not are_one(states[name] for name in self.setting.layout.names):
            return None
        task = self.setting.task
        assert task is not None
        counts = [len(y) for _, y in samples.values()]
        try:
            x, y = (torch.cat(leaves) for leaves in zip(*samples.values(), strict=True))
            outputs = self.outputs(_row(states, 0), x)
            task.check_outputs(outputs, y)
        except STOPS:
            raise
        except BaseException:  # whose it is will be seen one by one
            self._build()
            return None
        return dict(zip(samples, outputs.split(counts), strict=True))

    def _evaluate_by_steps(
        self, clients: Tensor, states: TensorDict, split: Split
    ) -> tuple[ClientValues, list[ClientFailure]]:
        module = self.setting.client
        values, step = ClientValues(), "test_step" if split == "test" else "validation_step"
        if not is_overridden(step, module):  # as Lightning does
            return values, []

        def judge(_: int, client: int, visit: Visit, batches: Iterator[Any]) -> None:
            logged, directions = self.client.trainer.evaluate(split, visit.parts, batches)
            self._copies.tensors()  # raises unless they are as they were, for the next client
            values.add(client, split, logged, directions)

        return values, self._visit_each(clients, states, split, judge)

    def predict(
        self, clients: Tensor, states: TensorDict, split: Split
    ) -> tuple[Evaluation | list[tuple[int, list[Any]]], list[ClientFailure]]:
        """See :class:`~pflight.engines.base.Engine`."""
        if self.setting.predicts_outputs:
            outputs, failures = self.evaluate(clients, states, split)
            assert isinstance(outputs, Evaluation)
            return outputs, failures
        predictions: list[tuple[int, list[Any]]] = []

        def predict(_: int, client: int, visit: Visit, batches: Iterator[Any]) -> None:
            predictions.append((client, self.client.trainer.predict(batches)))

        return predictions, self._visit_each(clients, states, split, predict)

    @torch.no_grad()
    def losses(
        self, clients: Tensor, states: TensorDict, split: Split
    ) -> tuple[Tensor, list[ClientFailure]]:
        """See :class:`~pflight.engines.base.Engine`."""
        means = torch.full((len(clients),), torch.nan, dtype=torch.double, device=self.device)

        def measure(row: int, client: int, visit: Visit, batches: Iterator[Any]) -> None:
            model = self.client
            model.module.eval()
            model.num_samples.fill_(int(self.setting.data.num_samples("train")[client]))
            total = torch.zeros((), dtype=torch.double, device=self.device)
            for part, batch in zip(visit.parts, batches, strict=True):
                loss = model.trainer.loss(batch, len(part), model.task_loss)
                total = total + loss.double() * len(part)
            means[row] = total / sum(map(len, visit.parts))

        with threads(self._threads):
            failures = self._visit_each(clients, states, split, measure)
        return means, failures

    def _visit_each(
        self,
        clients: Tensor,
        states: TensorDict,
        split: Split,
        work: Callable[[int, int, Visit, Iterator[Any]], None],
    ) -> list[ClientFailure]:
        """Do something with each client's model and samples, of which some have none.

        Args:
            clients: Ids ``[C]``.
            states: Their models ``[C]``.
            split: Of their samples.
            work: Gets the client's row, its id, what is visited, and the batches.
        """
        failures: list[ClientFailure] = []
        size = self.setting.data.eval_batch_size
        counts = self.setting.data.num_samples(split)

        def visits(client: int) -> list[Visit]:
            count = int(counts[client])
            parts = torch.arange(count).split(size or max(count, 1))
            return [Visit(client, None, 0, parts)] if count else []

        with self._visiting(split, clients, visits):
            for row, client in enumerate(clients.tolist()):
                if not counts[client]:
                    continue
                with self._attempt(client, failures):
                    self.load(_row(states, row), anchored=False)
                    for visit, batches in self._batches(client, split):
                        work(row, client, visit, batches)
        return failures

    # The copies in which clients train

    def load(
        self,
        start: Mapping[str, Tensor],
        anchored: bool,
        memory: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Make the copies as they are the next client.

        Args:
            start: The client's state.
            anchored: Whether it knows what it was sent, its start.
            memory: What it remembers.
        """
        self._copies.load(start, "", reuse=self._plain)
        for name, tensor in self._own.items():
            tensor.copy_(start[f"{OWN}{name}"])
        for name in ("seen", "num_steps"):
            self._scalars[name].zero_()
        self._scalars["mean_samples"].fill_(self.setting.mean_samples)
        anchor = {n: start[n] for n in self._copies.parameters} if anchored else None
        known = self._own, self._scalars, anchor
        self.client = AloneClient(self._copies, self.half, *known)
        self.clients = [self.client]
        if memory is not None:
            self.client.memory = memory
            self.client.seen.fill_(1)
        if self._personal_copies is not None and anchored:
            assert self.half.personal is not None
            self._personal_copies.load(start, PERSONAL, reuse=self._plain)
            personal = AloneClient(self._personal_copies, self.half.personal, *known, self.client)
            self.clients = [personal, self.client]  # it may look at the shared model before a step
        elif self._personal_copies is not None:
            self._personal_copies.load(start, PERSONAL, reuse=self._plain)

    def _build(self) -> None:
        setting = self.setting
        arguments = setting.client, setting.layout, setting.precision, self.device
        self._copies = Copies(*arguments, self._channels_last)
        self._personal_copies = None
        if self.half.personal is not None:
            self._personal_copies = Copies(*arguments, self._channels_last)
        own = [name for name in setting.layout.own if name.startswith(OWN)]
        held = StateModule({name.removeprefix(OWN): setting.layout.template[name] for name in own})
        setting.precision.convert_module(held).to(self.device)
        self._own = held.tensors()
        dtype = setting.dtype if setting.dtype.is_floating_point else torch.float32
        self._scalars = {name: torch.zeros((), dtype=dtype, device=self.device) for name in SCALARS}
        module = setting.client
        self.hooks = [hook for hook in HOOKS if is_overridden(hook, module)]
        self._plain = (
            trains_as_a_task(module)
            and setting.form is not None
            and not self.hooks
            and module.automatic_optimization
            and getattr(module, "gradient_clip_val", None) is None
            and type(module).configure_gradient_clipping is Task.configure_gradient_clipping
            and type(module).configure_optimizers is Task.configure_optimizers
        )

    def _mend_frozen(self) -> None:
        """Name what was frozen and has changed, once, and put it back."""
        for name in self._copies.frozen.mend(self._copies.module):
            if name not in self._drifted:
                self._drifted.add(name)
                rank_zero_warn(f"training changed the frozen {name!r}; it is reset each time")

    def state(self) -> dict[str, Tensor]:
        """Return the state of the client at hand."""
        held = {**self._copies.tensors(), **{f"{OWN}{n}": t for n, t in self._own.items()}}
        if self._personal_copies is not None:
            held |= {f"{PERSONAL}{n}": t for n, t in self._personal_copies.tensors().items()}
        return held


def _row(states: TensorDict, row: int) -> dict[str, Tensor]:
    return {name: value[row] for name, value in entries(states)}


def _like(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return empty tensors in which rows lie one after the other."""
    return {
        name: torch.empty_like(column, memory_format=torch.contiguous_format)
        for name, column in columns.items()
    }


def _copy_whole(name: str, value: Tensor, into: Tensor) -> None:
    """Copy a tensor into one of its shape."""
    if value.shape != into.shape:
        raise RuntimeError(
            f"its {name} is of shape {list(value.shape)}, where {list(into.shape)} is wanted"
        )
    into.copy_(value)

"""The sequential engine: one client after the other, by its module's own steps and hooks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from tensordict import TensorDict
from torch import Tensor, nn

from pflight.data.loaders import Split, Visit
from pflight.engines.base import (
    ONE_THREAD,
    are_one,
    as_found,
    finite_rows,
    threads,
    what_is_odd,
)
from pflight.engines.check import check_client
from pflight.engines.client_setup import ClientSetup
from pflight.engines.time_limit import time_limit
from pflight.history import Logs, merge_logs
from pflight.local_client import Pass
from pflight.metrics.collection import ClientValues
from pflight.randomness import Purpose, derive_seed, seed_everything, seed_own
from pflight.states.state import entries
from pflight.states.updates import (
    STOPS,
    ClientFailure,
    ClientUpdates,
    Evaluation,
    Kept,
    Predictions,
)
from pflight.task import Task

from .client import LocalModels
from .training import ClientTraining
from .visits import evaluation_visits, gradient_visits, training_visits, visits_to

Samples = dict[int, list[Tensor]]
"""Clients' inputs and targets, by row."""


class SequentialEngine:
    """Trains and evaluates clients one by one, for any LightningModule.

    Each participation begins with a pristine copy of the module. It trains by the module's own
    ``training_step`` and hooks; the client method adds to the loss from outside. A client method
    with a personal model has a second copy, which sees the same batches. A task without own hooks,
    with SGD, trains without Lightning's work around a step. Networks too small for several threads
    train on one.

    Args:
        setup: The client module, its client method, and its data.

    Attributes:
        setup: The client module, its client method, and its data.
        chunk: Largest number of clients that are trained at once.
        device: The device of the training.
    """

    chunk: int = 1

    def __init__(self, setup: ClientSetup) -> None:
        self.setup = setup
        self.device = setup.device
        self.models = LocalModels(setup)
        self.operations = math.inf  # operations of a sample's forward pass
        self._changes_input = False
        self._threads = torch.get_num_threads()
        self._training = ClientTraining(self.models)

    def check_input(self) -> None:
        """Raise unless module, client method and data fit together.

        Raises:
            ConfigurationError: Naming the part that does not fit.
        """
        self.operations, self._changes_input = check_client(self.setup, self.models.module)
        counts, size = self.setup.data.num_samples("train"), self.setup.data.batch_size
        if self._is_small(min(size or math.inf, int(counts.max()))):
            self._threads = 1
        self.models.try_channels_last()

    def _is_small(self, size: float) -> bool:
        """Return whether a batch of this size is too small to gain from several threads."""
        module = self.setup.client
        if math.isfinite(self.operations):
            return self.operations * size < ONE_THREAD
        parts = list(module.modules())
        if any(isinstance(part, nn.modules.conv._ConvNd | nn.RNNBase) for part in parts):
            return False
        weights = sum(parameter.numel() for parameter in module.parameters())
        return 2 * weights * size < ONE_THREAD

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
        """Train the clients ``[C]`` from their starts ``[C]``.

        Args:
            clients: Ids ``[C]``.
            starts: Each client's full start state ``[C]``. It is also the client's anchor.
            round_index: Keys the order of the batches and all other randomness.
            epochs: Local epochs, unless ``steps`` is given.
            steps: Batches to train on, over as many epochs as they take.
            purpose: ``FINETUNE`` trains without an anchor, so that penalties vanish.
            kept: Memory of the clients, if their client method keeps one.
            on_client_end: Called with the id of each client after its training.
        """
        self.setup.round_index = round_index

        def train_one(client: int) -> tuple[dict[str, Tensor], Logs]:
            count = int(self.setup.data.num_samples("train")[client])
            logs, taken = self._training.train(count, visits(client), epochs, steps)
            if purpose is Purpose.TRAIN:
                self.models.client.num_steps.fill_(taken)
                with torch.no_grad():
                    self.models.client.after_training()
            if on_client_end is not None:
                on_client_end(client)
            return self.models.state(), logs

        def plan(client: int) -> list[Visit]:
            return training_visits(self.setup, client, round_index, epochs, steps)

        visits = visits_to(clients, self.setup, "train", plan)
        return self._for_each_client(clients, starts, round_index, purpose, train_one, kept)

    def gradients(
        self, clients: Tensor, states: TensorDict, *, round_index: int, batches: int | None = None
    ) -> ClientUpdates:
        """Return each client's gradient of its loss at the states ``[C]``, in training mode.

        The gradient is over all of the client's training samples, or over the first ``batches``
        mini-batches of its epoch. The result has the buffers after the pass.
        """
        self.setup.round_index = round_index

        def gradient(client: int) -> tuple[dict[str, Tensor], Logs]:
            count = int(self.setup.data.num_samples("train")[client])
            gradients, logs = self._training.gradient(count, visits(client))
            return {**self.models.state(), **gradients}, logs

        def plan(client: int) -> list[Visit]:
            return gradient_visits(self.setup, client, round_index, batches)

        visits = visits_to(clients, self.setup, "train", plan)
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
        layout = self.setup.layout
        columns = {name: starts[name] for name in layout.names}
        results = _like({name: columns[name] for name in layout.moving})
        memories = dict(entries(kept.states)) if kept is not None else {}
        remembered = _like(memories)
        done: dict[int, Logs] = {}  # logs of the finished clients by row
        failures: list[ClientFailure] = []
        with threads(self._threads):
            for row, client in enumerate(clients.tolist()):
                seed = derive_seed(purpose, self.setup.seed, round_index, client)
                seed_everything(seed, self.device)
                with self.attempt(client, failures):
                    start = {name: column[row] for name, column in columns.items()}
                    memory = None
                    if kept is not None and kept.seen[row]:
                        memory = {name: value[row] for name, value in memories.items()}
                    self.models.load(start, purpose is Purpose.TRAIN, memory, client)
                    for model in self.models.clients if self.models.draws else ():
                        seed_own(model.module, seed)
                    with torch.enable_grad():
                        tensors, logs = work(client)
                    own = self.models.client.remember() if kept is not None else {}
                    with torch.no_grad():
                        into = [result[row] for result in results.values()]
                        torch._foreach_copy_(into, [tensors[name] for name in results])
                        for name, value in remembered.items():
                            _copy_whole(name, own[name], value[row])
                    self.models.mend_frozen()
                    done[row] = logs
        late = {failure.client for failure in failures}  # a client may have caught its time-out
        done = {row: logs for row, logs in done.items() if int(clients[row]) not in late}
        trained = TensorDict(results, batch_size=[len(clients)])
        keep = TensorDict(remembered, batch_size=[len(clients)])
        stacks = [trained] if self.setup.client_method.remembers_its_state else [trained, keep]
        finite = finite_rows(*stacks)
        for row in [row for row in done if not finite[row]]:
            parts = [trained[row : row + 1], *([keep[row : row + 1]] if remembered else [])]
            odd = next(filter(None, map(what_is_odd, parts)))
            failures.append(ClientFailure(int(clients[row]), odd))
            del done[row]
        ended = torch.tensor(list(done), dtype=torch.long, device=self.device)
        if len(ended) < len(clients):
            trained, keep = trained[ended], keep[ended]
        # Frozen entries are as the server sent them: one tensor for all clients.
        frozen = {name: columns[name][: len(ended)] for name in layout.frozen}
        states = {name: frozen[name] if name in frozen else trained[name] for name in columns}
        answered = clients[ended.to(clients.device)]
        return ClientUpdates(
            answered,
            TensorDict(states, batch_size=[len(ended)]),
            self.setup.data.num_samples("train")[answered.cpu()],
            failures,
            merge_logs(done.values()),
            keep if memories else None,
        )

    @contextmanager
    def attempt(self, client: int, failures: list[ClientFailure]) -> Iterator[None]:
        """Note the failure if a client raises or is too slow. The next client gets a new copy."""
        try:
            with time_limit(self.setup.client_timeout):
                yield
        except STOPS:
            raise
        except BaseException as error:
            failures.append(ClientFailure.of(client, error))
            self.models.renew()

    # Evaluation

    def evaluate(
        self, clients: Tensor, states: TensorDict, split: Split
    ) -> tuple[Evaluation | ClientValues, list[ClientFailure]]:
        """Run each client's model, a row of ``states`` ``[C]``, on its own samples of a split.

        Returns:
            The outputs of a task's clients, or the logged values of other modules; and the clients
            that failed.

        Raises:
            ConfigurationError: If a module logs nothing.
        """
        if self.setup.task is None:
            return self._evaluate_by_steps(clients, states, split)
        return self._evaluate_task(self.setup.task, clients, states, split)

    @torch.no_grad()
    def _evaluate_task(
        self, task: Task, clients: Tensor, states: TensorDict, split: Split
    ) -> tuple[Evaluation, list[ClientFailure]]:
        """Return the outputs of the clients ``[C]``, and the clients without outputs.

        A client fails if its samples can't be read, its targets are wrong, its model raises an
        error, or its losses are not finite.
        """
        setup, ids, failures = self.setup, clients.tolist(), list[ClientFailure]()
        count = int(setup.data.num_samples(split)[clients.cpu()].sum())
        few = self.operations * max(count, 1) < ONE_THREAD
        with threads(1 if few else torch.get_num_threads()):
            samples = self._samples(task, ids, split, failures)
            together = samples and setup.client_timeout is None
            outputs = self.outputs_at_once(states, samples) if together else None
            if outputs is None:
                outputs = {}
                for row, (x, y) in samples.items():
                    with self.attempt(ids[row], failures):
                        given = self._outputs(_row(states, row), x)
                        task.check_outputs(given, y)
                        outputs[row] = given
            evaluation = self._joined(task, clients, samples, outputs)
        finite = evaluation.losses.isfinite()
        if not finite.all():
            odd = evaluation.clients[~finite].unique()
            reason = "the outputs of its model, or their losses, are NaN or infinite"
            failures += [ClientFailure(client, reason) for client in odd.tolist()]
            sound = ~torch.isin(evaluation.clients, odd)
            evaluation = Evaluation(*(column[sound] for column in evaluation))
        return evaluation, failures

    def _samples(
        self, task: Task, ids: list[int], split: Split, failures: list[ClientFailure]
    ) -> Samples:
        """Return the samples of some clients by row, and note the clients that fail."""
        setup = self.setup
        if setup.client_timeout is None:
            try:
                samples = {row: setup.samples(client, split) for row, client in enumerate(ids)}
                if samples:
                    task.check_targets(torch.cat([y for _, y in samples.values()]))
                return samples
            except STOPS:
                raise
            except BaseException:  # the loop below finds the client
                pass
        samples = {}
        for row, client in enumerate(ids):
            with self.attempt(client, failures):
                x, y = setup.samples(client, split)
                task.check_targets(y)
                samples[row] = [x, y]
        return samples

    def _joined(
        self, task: Task, clients: Tensor, samples: Samples, outputs: dict[int, Tensor]
    ) -> Evaluation:
        """Return the outputs of all clients as one."""
        device = self.device
        counts = torch.tensor([len(part) for part in outputs.values()], dtype=torch.long)
        owners = clients.cpu()[list(outputs)].repeat_interleave(counts).to(device)
        if not outputs:
            nothing = torch.empty(0, device=device)
            return Evaluation(owners, nothing, self.setup.example[1][:0], nothing)
        given = torch.cat(list(outputs.values()))
        if given.dtype.itemsize < 4:  # bfloat16 loses too much of a loss
            given = given.float()
        targets = torch.cat([samples[row][1] for row in outputs])
        return Evaluation(owners, given, targets, task.losses(given, targets))

    def _outputs(self, state: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the outputs of a client's model for its inputs, in evaluation mode."""
        module = self.models.evaluated(state)
        with self.setup.forward_context():
            size = self.setup.data.eval_batch_size
            parts = [x] if size is None else x.split(size)
            given = (part.clone() if self._changes_input else part for part in parts)
            return torch.cat([module(part) for part in given])

    def outputs_at_once(self, states: TensorDict, samples: Samples) -> dict[int, Tensor] | None:
        """Return the outputs of clients by row, or ``None`` if models or samples forbid it.

        Clients with the same model share a pass.
        """
        if not are_one(states[name] for name in self.setup.layout.names):
            return None
        task = self.setup.task
        assert task is not None
        counts = [len(y) for _, y in samples.values()]
        try:
            x, y = (torch.cat(leaves) for leaves in zip(*samples.values(), strict=True))
            outputs = self._outputs(_row(states, 0), x)
            task.check_outputs(outputs, y)
        except STOPS:
            raise
        except BaseException:  # running them one by one finds the client
            self.models.renew()
            return None
        return dict(zip(samples, outputs.split(counts), strict=True))

    def _evaluate_by_steps(
        self, clients: Tensor, states: TensorDict, split: Split
    ) -> tuple[ClientValues, list[ClientFailure]]:
        module = self.setup.client
        values, step = ClientValues(), "test_step" if split == "test" else "validation_step"
        if not is_overridden(step, module):  # as in Lightning
            return values, []

        def judge(_: int, client: int, visit: Visit, batches: Iterator[Any]) -> None:
            logged = self.models.client.trainer.evaluate(split, visit.parts, batches)
            self.models.state()  # raises if the tensors have changed, for the next client
            values.add(client, split, *logged)

        return values, self._visit_each(clients, states, split, judge)

    def predict(
        self, clients: Tensor, states: TensorDict, split: Split
    ) -> tuple[Evaluation | Predictions, list[ClientFailure]]:
        """Return a task's outputs, or each client's results of an own ``predict_step`` by batch."""
        if self.setup.predicts_outputs:
            outputs, failures = self.evaluate(clients, states, split)
            assert isinstance(outputs, Evaluation)
            return outputs, failures
        predictions: Predictions = []

        def predict(_: int, client: int, visit: Visit, batches: Iterator[Any]) -> None:
            given = self.models.client.trainer.predict(visit.parts, batches)
            predictions.append((client, given))

        return predictions, self._visit_each(clients, states, split, predict)

    @torch.no_grad()
    def run(
        self, look: Pass, clients: Tensor, states: TensorDict, *, round_index: int
    ) -> tuple[list[dict[str, Tensor]], list[ClientFailure]]:
        """Return the results of a pass over each client's own samples, and the failed clients.

        Clients without samples and failed clients have an empty result.

        Args:
            look: The pass.
            clients: Ids ``[C]``.
            states: The clients' models ``[C]``.
            round_index: Keys the random numbers of each client.
        """
        found: list[dict[str, Tensor]] = [{} for _ in clients]
        counts = self.setup.data.num_samples("train")

        def find(row: int, client: int, visit: Visit, batches: Iterator[Any]) -> None:
            model = self.models.client
            seed = derive_seed(Purpose.PASS, self.setup.seed, round_index, client)
            seed_everything(seed, self.device)
            if self.models.draws:
                seed_own(model.module, seed)
            model.module.eval()
            model.num_samples.fill_(int(counts[client]))
            sizes = [*map(len, visit.parts)]
            own = as_found(look, model.trainer.look(sizes, batches, partial(look, model)))
            look.check(own)
            # The result may be a view of a tensor that the next client changes.
            found[row] = {name: value.clone() for name, value in own.items()}

        with threads(self._threads):
            failures = self._visit_each(clients, states, look.split, find, look.batch_size)
        return found, failures

    def _visit_each(
        self,
        clients: Tensor,
        states: TensorDict,
        split: Split,
        work: Callable[[int, int, Visit, Iterator[Any]], None],
        batch_size: int | None = None,
    ) -> list[ClientFailure]:
        """Call a function for each client with samples, with its model loaded.

        Args:
            clients: Ids ``[C]``.
            states: The clients' models ``[C]``.
            split: The split of the samples.
            work: Gets the client's row, its id, the visit, and the batches.
            batch_size: Size of the batches, instead of an evaluation's.
        """
        failures: list[ClientFailure] = []

        def plan(client: int) -> list[Visit]:
            return evaluation_visits(self.setup, client, split, batch_size)

        visits = visits_to(clients, self.setup, split, plan)
        counts = self.setup.data.num_samples(split)
        for row, client in enumerate(clients.tolist()):
            if not counts[client]:
                continue
            with self.attempt(client, failures):
                self.models.load(_row(states, row), anchored=False, client=client)
                for visit, batches in visits(client):
                    work(row, client, visit, batches)
        return failures


Engine = SequentialEngine
"""The class of all engines: the vectorized engine is one, too."""


def _row(states: TensorDict, row: int) -> dict[str, Tensor]:
    return {name: value[row] for name, value in entries(states)}


def _like(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return empty contiguous tensors of the same shapes."""
    return {
        name: torch.empty_like(column, memory_format=torch.contiguous_format)
        for name, column in columns.items()
    }


def _copy_whole(name: str, value: Tensor, into: Tensor) -> None:
    """Copy a tensor into another one of the same shape."""
    if value.shape != into.shape:
        raise RuntimeError(
            f"its {name} is of shape {list(value.shape)}, where {list(into.shape)} is wanted"
        )
    into.copy_(value)

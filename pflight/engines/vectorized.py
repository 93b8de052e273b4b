"""Many clients at once: their parameters are stacked, and one pass trains them all."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from tensordict import TensorDict
from torch import Tensor

from pflight.history import Logs, merge_logs
from pflight.loaders import Split
from pflight.models.client import Batch, ClientModule
from pflight.randomness import Purpose
from pflight.state import entries

from .joint import JointClient, Phase, Stack
from .mixed import StackedAutocast
from .samples import check_count
from .sequential import GRADIENT_BATCH, SequentialEngine, are_one, finite_rows
from .stacked import Batches, Group, Plan, StackedOptimizer, clip, rows_per_call
from .trial import Dependence, dependence_of, obstacle_to, phases_of, predicts_each_alone, reason_of
from .updates import STOPS, ClientFailure, ClientUpdates, Evaluation, Kept

_TRIAL = 8  # samples on which a client is tried
_SIZES, _LARGEST = 8, 64  # and the sizes of the batches that they make
_EPOCH_HOOKS = {"on_train_epoch_start", "on_train_epoch_end"}  # which may let parameters rest


@dataclass(frozen=True)
class _Task:
    """What clients are asked for.

    Attributes:
        round_index: Keys the order of batches.
        anchored: Whether penalties hold a client to what it starts from.
        plan: The batches of a client with so many samples.
        run: Does it for a chunk.
        one_by_one: Does it for some clients in the sequential engine.
        shuffled: Whether samples come in the order of the round, or as they lie.
        on_client_end: Called with the id of each client that is done.
    """

    round_index: int
    anchored: bool
    plan: Callable[[int], Plan]
    run: Callable[[_Chunk], None]
    one_by_one: Callable[[Tensor, TensorDict, Kept | None], ClientUpdates]
    shuffled: bool = True
    on_client_end: Callable[[int], None] | None = None


@dataclass(frozen=True)
class _Chunk:
    """Clients that are trained at once, those that train longest first.

    Attributes:
        clients: Their ids.
        plans: Their batches.
        starts: What they start from ``[C, ...]``.
        results: What they return ``[C, ...]``, to be filled in.
        told: Anchor, memory and scalars ``[C, ...]``, by name in the client.
        kept: What they keep ``[C, ...]``, to be filled in.
        losses: Sums over samples of their losses ``[C]``, to be added to.
    """

    clients: list[int]
    plans: list[Plan]
    starts: Stack
    results: Stack
    told: Stack
    kept: Stack
    losses: Tensor

    def __getitem__(self, rows: slice) -> _Chunk:
        def some(stack: Stack) -> Stack:
            return {name: tensor[rows] for name, tensor in stack.items()}

        return _Chunk(
            clients=self.clients[rows],
            plans=self.plans[rows],
            starts=some(self.starts),
            results=some(self.results),
            told=some(self.told),
            kept=some(self.kept),
            losses=self.losses[rows],
        )


class VectorizedEngine(SequentialEngine):
    """Trains and evaluates clients in chunks, whose parameters are stacked and stepped together.

    The losses of a chunk are one call of the client's ``loss`` under ``vmap``, and one optimizer
    steps the stacked parameters. Clients see the batches that they see in the sequential engine and
    get its results to float tolerance. Those with batches of one size share a call; a client that
    has come to its end drops out of the stack.

    What can't be run like this is run one by one, for the reason in :attr:`obstacle`. So is a
    client that raises or whose result is not finite, so that failures read the same.

    Args:
        *args: As in :class:`SequentialEngine`.
        chunk: Clients that are trained at once, at most.
        warned: What has been said of clients that are not stacked, and is not said again.

    Attributes:
        obstacle: Why clients are trained one by one, or ``None``; known after
            :meth:`check_input`.
        stacks_evaluation: Whether models of their own are evaluated at once; known then, too.
    """

    def __init__(self, *args: Any, chunk: int, warned: set[str] | None = None) -> None:
        super().__init__(*args)
        self.chunk = chunk
        self.obstacle: str | None = None
        self._joint = JointClient(self.copy_of_client(), self.layout)
        self._dependence: dict[bool, Dependence] = {}  # by whether there is an anchor
        self._known_phases: dict[tuple[int, int | None], list[Phase] | str] = {}
        self._reused: dict[str, Tensor] = {}
        self.stacks_evaluation = True
        self._causes: list[BaseException] = []  # why an evaluation fell back
        self._warned = set() if warned is None else warned
        self._some = self._some_samples()

    def check_input(self) -> None:
        """See :meth:`SequentialEngine.check_input`; find out whether clients can be stacked."""
        super().check_input()
        try:
            self.obstacle = self._find_obstacle()
        except STOPS:
            raise
        except BaseException as error:
            self.obstacle = f"trying it fails: {reason_of(error)}"
        self.stacks_evaluation = predicts_each_alone(self._joint, self.layout, self._some[0])

    def _find_obstacle(self) -> str | None:
        client = self._joint.client
        own = [
            name
            for name in ("training_step", "configure_gradient_clipping", "clip_gradients")
            if getattr(type(client), name) is not getattr(ClientModule, name)
        ]
        if hooks := [*sorted(self._hooks - _EPOCH_HOOKS), *own]:
            return f"it has {hooks[0]} of its own"
        if not client.automatic_optimization:
            return "it optimizes manually"
        counts = self.data.num_samples("train")[self.data.train_clients].unique().tolist()
        batches, unequal = self._some_batches(counts), len(counts) > 1
        for anchored in (True, False):
            mode = self._joint, self.layout, batches, anchored, anchored and client.keeps_memory
            if obstacle := obstacle_to(*mode):
                return obstacle
            self._dependence[anchored] = dependence_of(*mode, unequal)
        return None

    @property
    def fills_batches(self) -> bool:
        """Whether batches of unequal size are taken at once."""
        return all(dependence.weighs_samples for dependence in self._dependence.values())

    def rows_per_call(self) -> float:
        """Return how many of a chunk's clients have their batches taken at once, in the mean."""
        clients = self.data.train_clients[: min(self.chunk, self.data.cohorts.size)]
        counts = self.data.num_samples("train")[clients].sort(descending=True).values.tolist()
        sizes = [tuple(self._batch_sizes(count)) for count in counts]
        plans = [Plan(own, len(own)) for own in sizes]
        return rows_per_call(plans, self.fills_batches)

    def _some_samples(self) -> Batch:
        clients = self.data.train_clients
        largest = clients[self.data.num_samples("train")[clients].argmax()]
        try:
            x, y = self._samples(int(largest), "train")
        except STOPS:
            raise
        except BaseException:  # training will say why
            x, y = self._example
        return x[:_TRIAL].clone(), y[:_TRIAL].clone()

    def _some_batches(self, counts: list[int]) -> list[Batch]:
        """Return batches of sizes that occur, small ones above all, where clients may differ."""
        found = {min(size, _LARGEST) for count in counts for size in self._batch_sizes(count)}
        sizes = sorted(found or {1})
        x, y = self._some
        places = (torch.arange(size) % len(y) for size in {*sizes[:_SIZES], sizes[-1]})
        return [(x[place], y[place]) for place in places]

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
        """See :meth:`SequentialEngine.train`."""
        train_sequentially = super().train

        def one_by_one(clients: Tensor, starts: TensorDict, kept: Kept | None) -> ClientUpdates:
            return train_sequentially(
                clients,
                starts,
                round_index=round_index,
                epochs=epochs,
                steps=steps,
                purpose=purpose,
                kept=kept,
                on_client_end=on_client_end,
            )

        def plan(count: int) -> Plan:
            sizes = tuple(self._batch_sizes(count))
            whole = epochs * len(sizes) if steps is None else steps
            return Plan(sizes, whole if sizes else 0)

        phases = self._phases(epochs, steps)
        if isinstance(phases, str):
            return one_by_one(clients, starts, kept)

        def run(chunk: _Chunk) -> None:
            self._train_chunk(chunk, phases, task)

        anchored = purpose is Purpose.TRAIN
        task = _Task(round_index, anchored, plan, run, one_by_one, on_client_end=on_client_end)
        return self._in_chunks(clients, starts, kept, task)

    def gradients(
        self, clients: Tensor, states: TensorDict, *, round_index: int, batches: int | None = None
    ) -> ClientUpdates:
        """See :meth:`SequentialEngine.gradients`."""
        gradients_sequentially = super().gradients

        def one_by_one(clients: Tensor, states: TensorDict, kept: Kept | None) -> ClientUpdates:
            return gradients_sequentially(clients, states, round_index=round_index, batches=batches)

        def plan(count: int) -> Plan:
            whole = sum(self._batch_sizes(count)[:batches])
            part = max(whole, 1) if self._mixes_samples else GRADIENT_BATCH
            sizes = [part] * (whole // part) + [whole % part] * (whole % part > 0)
            return Plan(tuple(sizes), len(sizes))

        def run(chunk: _Chunk) -> None:
            self._add_gradients(chunk, self._batches(chunk, task))

        task = _Task(round_index, True, plan, run, one_by_one, shuffled=batches is not None)
        return self._in_chunks(clients, states, None, task)

    def _in_chunks(
        self, clients: Tensor, starts: TensorDict, kept: Kept | None, task: _Task
    ) -> ClientUpdates:
        """Do a task for the clients ``[C]``, longest first, and what fails once more one by one."""
        if self.obstacle or not len(clients):
            return task.one_by_one(clients, starts, kept)
        counts = self.data.num_samples("train")[clients.cpu()].tolist()
        plan_of = {count: task.plan(count) for count in set(counts)}
        plans = [plan_of[count] for count in counts]
        order = sorted(
            range(len(plans)), key=lambda row: (plans[row].steps, counts[row]), reverse=True
        )
        everyone = self._chunk_of_all(clients, starts, kept, plans, order, task)
        failed: dict[int, BaseException | None] = {}  # rows, as they are ordered here
        for part in torch.arange(len(plans)).tensor_split(-(-len(plans) // self.chunk)):
            first, last = int(part[0]), int(part[-1]) + 1
            chunk = everyone[first:last]
            cause = None
            try:
                task.run(chunk)
                finite = finite_rows(TensorDict(chunk.results, batch_size=[last - first]))
                if chunk.kept and not self._joint.remembers_its_state:
                    keep = finite_rows(TensorDict(chunk.kept, batch_size=[last - first]))
                    finite = list(map(all, zip(finite, keep, strict=True)))
            except STOPS:
                raise
            except BaseException as error:  # whose it is will be seen below
                cause, finite = error, [False] * (last - first)
            for row, client in enumerate(chunk.clients):
                if not finite[row]:
                    failed[first + row] = cause
                elif task.on_client_end is not None:
                    task.on_client_end(client)
        return self._updates(clients, starts, kept, everyone, order, failed, task)

    def _chunk_of_all(
        self,
        clients: Tensor,
        starts: TensorDict,
        kept: Kept | None,
        plans: list[Plan],
        order: list[int],
        task: _Task,
    ) -> _Chunk:
        """Stack up all clients ``[C]``, in a new order."""
        rows = None if order == list(range(len(order))) else torch.tensor(order)

        def moved(column: Tensor) -> Tensor:
            column = column.to(self.device)  # after a fit, Lightning has left it on the CPU
            if rows is None or column.stride(0) == 0:
                return column
            return column[rows.to(self.device)]

        columns = {name: moved(starts[name]) for name in self.layout.names}
        results = {
            name: torch.empty_like(column, memory_format=torch.contiguous_format)
            for name, column in columns.items()
            if name not in self.layout.frozen
        }
        told: Stack = {}
        if task.anchored:
            told |= {f"anchor.{name}": columns[name] for name in self.layout.parameters}
        memories: Stack = {}
        if kept is not None:
            memories = {name: moved(value) for name, value in entries(kept.states)}
            told |= {f"memory.{name}": value for name, value in memories.items()}
        scalars = {
            "num_samples": self.data.num_samples("train")[clients.cpu()],
            "seen": torch.zeros(len(order)) if kept is None else kept.seen,
            "num_steps": torch.tensor([plan.steps for plan in plans]),
        }
        told |= {
            name: moved(value).to(getattr(self._joint.client, name))
            for name, value in scalars.items()
        }
        return _Chunk(
            clients=[int(clients[row]) for row in order],
            plans=[plans[row] for row in order],
            starts=columns,
            results=results,
            told=told,
            kept={name: torch.empty_like(value) for name, value in memories.items()},
            losses=torch.zeros(len(order), dtype=torch.double, device=self.device),
        )

    def _updates(
        self,
        clients: Tensor,
        starts: TensorDict,
        kept: Kept | None,
        done: _Chunk,
        order: list[int],
        failed: dict[int, BaseException | None],
        task: _Task,
    ) -> ClientUpdates:
        """Put results into the clients' own order; do what failed once more, one by one."""
        good = [row for row in range(len(order)) if row not in failed]
        seen = sum(done.plans[row].num_seen for row in good)
        logs: list[Logs] = [{"train/loss": (done.losses[good].sum(), seen)}] if seen else []
        place = None if order == sorted(order) else torch.tensor(order).argsort()

        def in_order(stack: Stack) -> TensorDict:
            columns = {n: v if place is None else v[place.to(v.device)] for n, v in stack.items()}
            return TensorDict(columns, batch_size=[len(order)])

        states, keep = in_order(done.results), in_order(done.kept)
        for name in self.layout.frozen:
            states[name] = starts[name]
        failures, answered = [], torch.ones(len(order), dtype=torch.bool)
        if failed:
            rows = torch.tensor(sorted(order[row] for row in failed))
            again = task.one_by_one(
                clients[rows], starts[rows], kept and Kept(kept.states[rows], kept.seen[rows])
            )
            logs.append(again.logs)
            failures = again.failures
            causes = {int(clients[order[row]]): cause for row, cause in failed.items()}
            self._warn_of_fallbacks(causes, failures)
            answered[rows] = torch.isin(clients[rows], again.clients).cpu()
            rows = rows[answered[rows]]
            states[rows] = again.states
            if again.kept is not None:
                keep[rows] = again.kept
        if not answered.all():
            clients, states, keep = clients[answered], states[answered], keep[answered]
        return ClientUpdates(
            clients,
            states,
            self.data.num_samples("train")[clients.cpu()],
            failures,
            merge_logs(logs),
            keep if kept is not None else None,
        )

    def _phases(self, epochs: int, steps: int | None) -> list[Phase] | str | None:
        """Return the phases of local training; ``None`` if the client's epochs are all alike.

        Where so many epochs can't be stacked it is the reason, of which a warning is given once.
        """
        if self.obstacle or self._hooks.isdisjoint(_EPOCH_HOOKS):
            return None
        asked = epochs, steps
        if asked not in self._known_phases:
            try:
                if steps is not None:
                    raise RuntimeError("it has hooks of epochs, and trains for some steps")
                self._known_phases[asked] = phases_of(self._joint, epochs)
            except STOPS:
                raise
            except BaseException as error:
                name, reason = type(self.template).__name__, reason_of(error)
                self.warn_once(f"{name} can't be stacked, {reason}: clients train one by one")
                self._known_phases[asked] = reason
        return self._known_phases[asked]

    def _train_chunk(self, chunk: _Chunk, phases: list[Phase] | None, task: _Task) -> None:
        """Train the clients of a chunk, in place."""
        joint, anchored = self._joint, task.anchored
        results = list(chunk.results.values())
        torch._foreach_copy_(results, [chunk.starts[name] for name in chunk.results])
        joint.prepare(anchored, bool(chunk.kept))
        if phases is None:
            self._take_steps(chunk, self._batches(chunk, task), anchored)
        for phase in phases or ():
            with joint.phase(phase):
                self._take_steps(chunk, self._batches(chunk, task, phase), anchored)
        state = self._others(chunk, (), anchored) | chunk.told  # the number of steps, too
        if anchored and joint.changes_afterwards:
            joint.after_training(state)
        if chunk.kept:
            keep = state if joint.remembers_its_state else joint.remember(state)
            for name, value in chunk.kept.items():
                value.copy_(keep[name])

    def _take_steps(self, chunk: _Chunk, batches: Batches, anchored: bool) -> None:
        """Take the steps of some batches."""
        joint = self._joint
        single = joint.optimizer()
        stepped = {id(p) for group in single.param_groups for p in group["params"]}
        own = dict(joint.client.named_parameters())
        names = [
            name
            for name in self.layout.parameters
            if id(own[name]) in stepped
            and own[name].requires_grad
            and name not in self._dependence[anchored].untouched
        ]
        parameters = {name: chunk.results[name] for name in names}
        others = self._others(chunk, parameters, anchored)
        optimizer = StackedOptimizer(single, {own[name]: parameters[name] for name in names})
        limit, algorithm = joint.client.gradient_clip_val, joint.client.gradient_clip_algorithm
        groups = _places([own[name] for name in names], joint.client.clip_groups())
        for step in range(len(batches)):
            parts = [
                self._gradients(group, parameters, others, chunk.losses)
                for group in batches.groups(step)
            ]
            gradients = [
                torch.cat([part[name] for part in parts]) if len(parts) > 1 else parts[0][name]
                for name in names
            ]
            if limit is not None:
                for places in groups:
                    clipped = clip([gradients[place] for place in places], limit, algorithm)
                    for place, gradient in zip(places, clipped, strict=True):
                        gradients[place] = gradient
            optimizer.step(gradients)

    def _add_gradients(self, chunk: _Chunk, batches: Batches) -> None:
        """Sum up the gradients of the clients of a chunk, at what they start from."""
        self._joint.prepare(anchored=True, remembers=False)
        for name, result in chunk.results.items():
            if name in self.layout.parameters:
                result.zero_()
            else:
                result.copy_(chunk.starts[name])
        parameters = {name: chunk.starts[name] for name in self.layout.parameters}
        others = self._others(chunk, self.layout.parameters, anchored=True)
        counts = torch.tensor([plan.num_seen for plan in chunk.plans], device=self.device)
        for step in range(len(batches)):
            for group in batches.groups(step):
                gradients = self._gradients(group, parameters, others, chunk.losses)
                for name, gradient in gradients.items():
                    share = group.size / counts[group.rows].to(gradient)
                    share = share.view(-1, *[1] * (gradient.dim() - 1))
                    chunk.results[name][group.rows] += gradient * share

    def _others(self, chunk: _Chunk, parameters: Collection[str], anchored: bool) -> Stack:
        """Return everything that the loss looks at beside the parameters."""
        unread = self._dependence[anchored].unread
        state = {name: chunk.results.get(name, start) for name, start in chunk.starts.items()}
        still = {"num_steps": torch.zeros_like(chunk.told["num_steps"])}  # until they are done
        return {
            name: value
            for name, value in (state | chunk.told | still).items()
            if name not in parameters and name not in unread
        }

    def _gradients(self, group: Group, parameters: Stack, others: Stack, losses: Tensor) -> Stack:
        """Return the gradients of a group of rows, and add up its losses."""
        rows = group.rows
        with self._stacked_context():
            gradients, mean_losses = self._joint.gradients(
                {name: value[rows] for name, value in parameters.items()},
                {name: value[rows] for name, value in others.items()},
                group.x,
                group.y,
                group.weights,
            )
        losses[rows] += mean_losses * group.size
        return gradients

    def _batches(self, chunk: _Chunk, task: _Task, phase: Phase | None = None) -> Batches:
        """Prepare the batches of a chunk, or those of a phase, in memory that all chunks use."""
        plans, first = chunk.plans, 0
        counts = self.data.num_samples("train")[chunk.clients].tolist()
        if phase is not None:
            plans = [Plan(plan.sizes, phase.epochs * len(plan.sizes)) for plan in plans]
            first = phase.first
        several = any(plan.steps > len(plan.sizes) for plan in plans)
        cached: dict[int, Batch] = {}

        def load(rows: range, epoch: int, count: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
            clients = chunk.clients[rows.start : rows.stop]
            when = task.round_index, first + epoch
            orders: Sequence[Tensor] = [torch.arange(counts[rows.start])] * len(rows)
            if task.shuffled:
                orders = self.data.orders(clients, *when)
            for row, client, order in zip(rows, clients, orders, strict=True):
                x, y = cached[row] if row in cached else self._samples(client, "train")
                if several:
                    cached[row] = x, y
                check_count(counts[row], y, order)
                x = self.data.augment(x, client, *when)
                yield x, y, order[:count].to(self.device)
            self._check_classes(batches.labels[rows.start : rows.stop, :count].flatten())

        def reserve(count: int) -> Batch:
            (x, y), shape = self._some, (len(chunk.clients), count)
            features = self._reuse("x", (*shape, *x.shape[1:]), x.dtype)
            return features, self._reuse("y", (*shape, *y.shape[1:]), y.dtype)

        filled = self._dependence[task.anchored].weighs_samples
        batches = Batches(plans, reserve, load, filled)
        return batches

    def _stacked_context(self) -> AbstractContextManager[Any]:
        """Return what stacked passes run in."""
        if isinstance(self.precision, MixedPrecision):
            return StackedAutocast(torch.bfloat16)  # float16 is refused
        return self._forward_context()

    # Evaluation

    def evaluate(
        self, clients: Tensor, states: TensorDict, split: Split
    ) -> tuple[Evaluation, list[ClientFailure]]:
        """See :meth:`SequentialEngine.evaluate`."""
        self._causes.clear()
        evaluation, failures = super().evaluate(clients, states, split)
        if self._causes and not failures:  # else it is the fault of those
            name, reason = type(self.template).__name__, reason_of(self._causes[0])
            self.warn_once(f"{name} is evaluated one by one from here on: {reason}")
            self.stacks_evaluation = False
        return evaluation, failures

    def _logits_at_once(
        self, columns: list[Tensor], samples: dict[int, Batch]
    ) -> dict[int, Tensor] | None:
        if are_one(columns) or not samples or not self.stacks_evaluation:
            return super()._logits_at_once(columns, samples)
        if len(samples) < len(columns[0]):
            columns = [column[list(samples)] for column in columns]
        try:
            stacked = self._stacked_logits(columns, list(samples.values()))
            logits = torch.cat(stacked)
        except STOPS:
            raise
        except BaseException as error:
            self._causes.append(error)
            return None
        shape = sum(len(y) for _, y in samples.values()), self._joint.client.num_classes
        if logits.shape != shape or logits.isnan().any():  # as one by one, perhaps
            return None
        return dict(zip(samples, stacked, strict=True))

    def _stacked_logits(
        self, columns: list[Tensor], samples: list[tuple[Tensor, Tensor]]
    ) -> list[Tensor]:
        counts = [len(y) for _, y in samples]
        order = sorted(range(len(counts)), key=lambda row: counts[row], reverse=True)
        moved = order != sorted(order)
        logits: dict[int, Tensor] = {}
        for first, last in self._evaluated_at_once([counts[row] for row in order]):
            rows = order[first:last]
            taken = rows if moved else slice(first, last)
            state = {n: c[taken] for n, c in zip(self.layout.names, columns, strict=True)}
            shape = len(rows), counts[rows[0]], *samples[0][0].shape[1:]
            x = self._reuse("x", shape, samples[0][0].dtype)
            for padded, row in zip(x, rows, strict=True):
                padded[: counts[row]] = samples[row][0]
                padded[counts[row] :] = 0
            with self._stacked_context():
                parts = x.split(self.data.eval_batch_size or shape[1] or 1, dim=1)
                outputs = torch.cat([self._joint.logits(state, part) for part in parts], dim=1)
            logits |= {row: outputs[i, : counts[row]] for i, row in enumerate(rows)}
        return [logits[row] for row in range(len(order))]

    def _evaluated_at_once(self, counts: list[int]) -> Iterator[tuple[int, int]]:
        """Divide descending numbers of samples into chunks that filling up does not double."""
        first = 0
        for row in range(1, len(counts) + 1):
            full = row - first == self.chunk
            if row == len(counts) or full or counts[first] > 2 * counts[row] + _TRIAL:
                yield first, row
                first = row

    def _warn_of_fallbacks(
        self, causes: dict[int, BaseException | None], failures: list[ClientFailure]
    ) -> None:
        """Warn of clients that fail together, where none of them fails alone.

        Args:
            causes: Why, by client: what their chunk raised, or ``None`` for a result that is NaN.
            failures: Those that failed alone.
        """
        alone = {failure.client for failure in failures}
        for cause in set(causes.values()):
            clients = {client for client, why in causes.items() if why is cause}
            if cause is None:
                clients -= alone
            if not clients or clients & alone:
                continue
            reason = "a result that is NaN or infinite"
            if cause is not None:
                reason = f"{type(cause).__name__}: {reason_of(cause)}"
            self.warn_once(
                f"clients that can't be trained together, but one by one: {reason}; "
                "engine='sequential' does so from the start"
            )

    def warn_once(self, message: str) -> None:
        """Warn, unless it has been said."""
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=2)

    def _reuse(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory for a tensor, the same at every call, for it costs to get it anew."""
        size = math.prod(shape)
        held = self._reused.get(name)
        if held is None or held.numel() < size or held.dtype != dtype:
            held = self._reused[name] = torch.empty(size, dtype=dtype, device=self.device)
        return held[:size].view(shape)


def _places(tensors: Sequence[Tensor], groups: Iterable[Iterable[Tensor]]) -> list[list[int]]:
    """Return where in a sequence the tensors of each group are, without groups of none."""
    place = {id(tensor): position for position, tensor in enumerate(tensors)}
    found = ([place[id(t)] for t in group if id(t) in place] for group in groups)
    return [places for places in found if places]

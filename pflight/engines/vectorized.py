"""Many clients at once: their parameters are stacked, and one pass trains them all."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.rank_zero import rank_zero_debug
from tensordict import TensorDict
from torch import Tensor

from pflight.errors import ConfigurationError
from pflight.half import PERSONAL, Measure, Phase
from pflight.history import Logs, merge_logs
from pflight.loaders import Split
from pflight.local.copies import ready
from pflight.local.samples import are_finite, check_order
from pflight.local.setting import Setting
from pflight.local.visits import GRADIENT_BATCH
from pflight.metrics import ClientValues
from pflight.randomness import Purpose
from pflight.stacking.autocast import StackedAutocast
from pflight.stacking.client import ANCHOR, MEMORY, Mode, Stack, StackedClient
from pflight.stacking.probe import Dependence, Probe, Witness, reason_of
from pflight.stacking.steps import Batches, Group, Plan, StackedOptimizer, clip, rows_per_call
from pflight.state import entries
from pflight.task import Task
from pflight.updates import STOPS, ClientFailure, ClientUpdates, Evaluation, Kept, Predictions

from .base import are_one, finite_rows
from .outputs import Samples, evaluate_task
from .sequential import SequentialEngine

_TRIAL = 8  # samples on which a client is tried
_SIZES, _LARGEST = 8, 64  # and the sizes of the batches that they make


@dataclass(frozen=True)
class _Work:
    """What clients are asked for.

    Attributes:
        round_index: Keys the order of batches.
        mode: What clients train with.
        plan: The batches of a client with so many samples.
        run: Does it for a chunk.
        one_by_one: Does it for some clients in the sequential engine.
        shuffled: Whether samples come in the order of the round, or as they lie.
        steps: Whether clients take steps, or tell their gradients.
        on_client_end: Called with the id of each client that is done.
    """

    round_index: int
    mode: Mode
    plan: Callable[[int], Plan]
    run: Callable[[_Chunk], None]
    one_by_one: Callable[[Tensor, TensorDict, Kept | None], ClientUpdates]
    shuffled: bool = True
    steps: bool = True
    on_client_end: Callable[[int], None] | None = None


@dataclass(frozen=True)
class _Chunk:
    """Clients that are trained at once, those that train longest first.

    Attributes:
        clients: Their ids.
        plans: Their batches.
        starts: What they start from ``[C, ...]``.
        results: What they return ``[C, ...]``, to be filled in.
        told: Anchor, memory and scalars ``[C, ...]``, by name.
        kept: What they keep ``[C, ...]``, to be filled in.
        losses: Sums over samples of the losses ``[C]`` that they log, to be added to.
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


class VectorizedEngine:
    """Trains and evaluates clients in chunks, whose parameters are stacked and stepped together.

    The losses of a chunk are one call of the module's ``loss`` under ``vmap``, with what the half
    makes of it, and one optimizer steps the stacked parameters. Clients see the batches that they
    see in the sequential engine and get its results to float tolerance. Those with batches of one
    size share a call; a client that has come to its end drops out of the stack.

    What can't be run like this is run one by one, for the reason in :attr:`obstacle`. So is a
    client that raises or whose result is not finite, so that failures read the same. See
    :class:`~pflight.engines.base.Engine` for what it is asked for.

    Args:
        setting: The client module, its half, and its data.
        chunk: Clients that are trained at once, at most.
        warned: What has been said of clients that are not stacked, and is not said again.

    Attributes:
        alone: The engine that trains one by one.
        obstacle: Why clients are trained one by one, or ``None``; known after
            :meth:`check_input`.
        stacks_evaluation: Whether models of their own are evaluated at once; known then, too.
    """

    def __init__(self, setting: Setting, chunk: int, warned: set[str] | None = None) -> None:
        self.setting = setting
        self.chunk = chunk
        self.device = setting.device
        self.alone = SequentialEngine(setting)
        self.obstacle: str | None = None
        self.stacks_evaluation = setting.task is not None
        module = ready(setting.client)
        setting.precision.convert_module(module).to(setting.device)
        self._stacked = StackedClient(module, setting.half, setting.layout)
        self._probe = Probe(self._stacked, self.alone.models)
        self._audited, self._audits = -1, False  # the last such round, and whether one is due
        self._doubted = False  # whether the last client got something else alone
        self._dependence: dict[bool, Dependence] = {}  # by whether there is an anchor
        self._phases: dict[tuple[int, bool], list[Phase | None]] = {}
        self._reused: dict[str, Tensor] = {}
        self._causes: list[BaseException] = []  # why an evaluation fell back
        self._warned = set() if warned is None else warned
        self._some: list[Tensor] = []  # samples on which clients are tried
        self._logged: Collection[str] = ("train/loss",)  # what their loss is called

    # Before the start

    def check_input(self) -> None:
        """See :class:`~pflight.engines.base.Engine`; find out whether clients can be stacked."""
        self.alone.check_input()
        if self.setting.form is None:
            self.obstacle = "its samples are no tensors that lie in memory"
            self.stacks_evaluation = False
            return
        self._some = self._some_samples()
        try:
            self.obstacle = self._find_obstacle()
        except STOPS:
            raise
        except BaseException as error:
            self.obstacle = f"trying it fails: {reason_of(error)}"
        if self.stacks_evaluation:
            self.stacks_evaluation = self._probe.predicts_each_alone(self._some[0])

    def _find_obstacle(self) -> str | None:
        data, half, probe = self.setting.data, self.setting.half, self._probe
        counts = data.num_samples("train")[data.train_clients].unique().tolist()
        if obstacle := probe.declared_obstacle():
            return obstacle
        batches = self._some_batches(counts)
        obstacle, self._logged = probe.training_step(batches)
        if obstacle:
            return obstacle
        for anchored in (True, False):
            mode = Mode(anchored, anchored and half.keeps_memory)
            if obstacle := probe.obstacle(mode, batches):
                return obstacle
            self._dependence[anchored] = probe.dependence(mode, batches, unequal=len(counts) > 1)
        return None

    @property
    def fills_batches(self) -> bool:
        """Whether batches of unequal size are taken at once."""
        return all(dependence.weighs_samples for dependence in self._dependence.values())

    def rows_per_call(self) -> float:
        """Return how many of a chunk's clients have their batches taken at once, in the mean."""
        data = self.setting.data
        clients = data.train_clients[: min(self.chunk, data.cohorts.size)]
        counts = data.num_samples("train")[clients].sort(descending=True).values.tolist()
        sizes = [tuple(self.setting.batch_sizes(count)) for count in counts]
        plans = [Plan(own, len(own)) for own in sizes]
        return rows_per_call(plans, self.fills_batches)

    def _some_samples(self) -> list[Tensor]:
        data = self.setting.data
        clients = data.train_clients
        largest = clients[data.num_samples("train")[clients].argmax()]
        try:
            leaves = [leaf[:_TRIAL] for leaf in self.setting.samples(int(largest), "train")]
        except STOPS:
            raise
        except BaseException:  # training will say why
            leaves = self.setting.example
        if not are_finite(leaves):
            leaves = self.setting.example
        return [leaf[:_TRIAL].clone() for leaf in leaves]

    def _some_batches(self, counts: list[int]) -> list[list[Tensor]]:
        """Return batches of sizes that occur, small ones above all, where clients may differ."""
        found = {
            min(size, _LARGEST) for count in counts for size in self.setting.batch_sizes(count)
        }
        sizes = sorted(found or {1})
        places = (torch.arange(size) % len(self._some[0]) for size in {*sizes[:_SIZES], sizes[-1]})
        return [[leaf[place] for leaf in self._some] for place in places]

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

        def one_by_one(clients: Tensor, starts: TensorDict, kept: Kept | None) -> ClientUpdates:
            return self.alone.train(
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
            sizes = tuple(self.setting.batch_sizes(count))
            whole = epochs * len(sizes) if steps is None else steps
            return Plan(sizes, whole if sizes else 0)

        def run(chunk: _Chunk) -> None:
            self._train_chunk(chunk, phases, work)

        mode = Mode(purpose is Purpose.TRAIN, kept is not None)
        work = _Work(round_index, mode, plan, run, one_by_one, on_client_end=on_client_end)
        phases = self._phases_of(epochs, mode.anchored) if self.obstacle is None else [None]
        if phases != [None] and steps is not None:
            return one_by_one(clients, starts, kept)
        return self._in_chunks(clients, starts, kept, work)

    def gradients(
        self, clients: Tensor, states: TensorDict, *, round_index: int, batches: int | None = None
    ) -> ClientUpdates:
        """See :class:`~pflight.engines.base.Engine`."""

        def one_by_one(clients: Tensor, states: TensorDict, kept: Kept | None) -> ClientUpdates:
            return self.alone.gradients(clients, states, round_index=round_index, batches=batches)

        def plan(count: int) -> Plan:
            whole = sum(self.setting.batch_sizes(count)[:batches])
            part = max(whole, 1) if self.setting.mixes_samples else GRADIENT_BATCH
            sizes = [part] * (whole // part) + [whole % part] * (whole % part > 0)
            return Plan(tuple(sizes), len(sizes))

        def run(chunk: _Chunk) -> None:
            self._add_gradients(chunk, self._batches(chunk, work))

        mode, shuffled = Mode(anchored=True, remembers=False), batches is not None
        work = _Work(round_index, mode, plan, run, one_by_one, shuffled, steps=False)
        return self._in_chunks(clients, states, None, work)

    def losses(
        self, clients: Tensor, states: TensorDict, split: Split
    ) -> tuple[Tensor, list[ClientFailure]]:
        """See :class:`~pflight.engines.base.Engine`."""
        return self.alone.losses(clients, states, split)

    @torch.no_grad()
    def sums(
        self,
        clients: Tensor,
        states: TensorDict,
        measure: Measure,
        like: Mapping[str, Tensor],
        batch_size: int | None = None,
    ) -> tuple[TensorDict, list[ClientFailure]]:
        """See :class:`~pflight.engines.base.Engine`."""
        if self.obstacle is None and batch_size is None:
            try:
                totals = self._stacked_sums(clients, states, measure, like)
            except STOPS:
                raise
            except BaseException as error:  # whose it is will be seen one by one
                name, reason = type(self.setting.client).__name__, reason_of(error)
                rank_zero_debug(f"{name} looks through its samples one by one: {reason}")
            else:
                if all(finite_rows(totals)):
                    return totals, []
        return self.alone.sums(clients, states, measure, like, batch_size)

    def rows(
        self, clients: Tensor, states: TensorDict, measure: Measure, split: Split
    ) -> tuple[list[dict[str, Tensor]], list[ClientFailure]]:
        """See :class:`~pflight.engines.base.Engine`."""
        return self.alone.rows(clients, states, measure, split)

    def _stacked_sums(
        self, clients: Tensor, states: TensorDict, measure: Measure, like: Mapping[str, Tensor]
    ) -> TensorDict:
        setting, stacked = self.setting, self._stacked
        assert setting.form is not None
        counts = setting.data.num_samples("train")[clients.cpu()]
        columns = {name: states[name].to(self.device) for name in stacked.live}
        columns |= {name: states[name].to(self.device) for name in setting.layout.own}
        columns["num_samples"] = counts.to(self.device, setting.dtype)
        if setting.half.needs_classes:
            columns["class_counts"] = setting.class_counts[clients.to(self.device)]
        stacked.take_frozen(states)
        stacked.mode = Mode(anchored=False, remembers=False)
        totals = TensorDict(
            {name: zero.new_zeros(len(clients), *zero.shape) for name, zero in like.items()},
            batch_size=[len(clients)],
        ).to(self.device)
        order = [row for row in counts.argsort(descending=True).tolist() if counts[row]]
        for first, last in self._evaluated_at_once(counts[order].tolist()):
            rows = order[first:last]
            own = [setting.samples(int(clients[row]), "train") for row in rows]
            if isinstance(setting.client, Task) and setting.has_loss_of_its_kind:
                setting.client.check_targets(torch.cat([leaves[1] for leaves in own]))
            longest = int(counts[rows[0]])
            places = torch.arange(longest).expand(len(rows), -1)
            real = places < counts[rows].unsqueeze(1)
            places = torch.where(real, places, 0).to(self.device)
            stack = [
                torch.stack([leaf[place] for leaf, place in zip(leaves, places, strict=True)])
                for leaves in zip(*own, strict=True)
            ]
            part, size = torch.tensor(rows, device=self.device), setting.data.eval_batch_size
            state = {name: column[part] for name, column in columns.items()}
            cuts = [leaf.split(size or longest, 1) for leaf in (real.to(self.device), *stack)]
            for own_real, *leaves in zip(*cuts, strict=True):
                with self._stacked_context():
                    batch = setting.form.batch(leaves)
                    found = stacked.measured(state, batch, own_real, measure)
                for name, value in found.items():
                    totals[name].index_add_(0, part, value.to(totals[name]))
        return totals

    def _in_chunks(
        self, clients: Tensor, starts: TensorDict, kept: Kept | None, work: _Work
    ) -> ClientUpdates:
        """Do a work for the clients ``[C]``, longest first, and what fails once more one by one."""
        if self.obstacle or not len(clients):
            return work.one_by_one(clients, starts, kept)
        counts = self.setting.data.num_samples("train")[clients.cpu()].tolist()
        plan_of = {count: work.plan(count) for count in set(counts)}
        plans = [plan_of[count] for count in counts]
        order = sorted(
            range(len(plans)), key=lambda row: (plans[row].steps, counts[row]), reverse=True
        )
        everyone = self._chunk_of_all(clients, starts, kept, plans, order, work)
        if work.round_index > self._audited and (work.round_index + 1).bit_count() == 1:
            self._audited, self._audits = work.round_index, True
        self._stacked.take_frozen(everyone.starts)
        failed: dict[int, BaseException | None] = {}  # rows, as they are ordered here
        for part in torch.arange(len(plans)).tensor_split(-(-len(plans) // self.chunk)):
            first, last = int(part[0]), int(part[-1]) + 1
            chunk = everyone[first:last]
            cause = None
            try:
                work.run(chunk)
                finite = finite_rows(TensorDict(chunk.results, batch_size=[last - first]))
                if chunk.kept and not self._stacked.remembers_its_state:
                    keep = finite_rows(TensorDict(chunk.kept, batch_size=[last - first]))
                    finite = list(map(all, zip(finite, keep, strict=True)))
            except STOPS:
                raise
            except BaseException as error:  # whose it is will be seen below
                cause, finite = error, [False] * (last - first)
            for row, client in enumerate(chunk.clients):
                if not finite[row]:
                    failed[first + row] = cause
                elif work.on_client_end is not None:
                    work.on_client_end(client)
        return self._updates(clients, starts, kept, everyone, order, failed, work)

    def _chunk_of_all(
        self,
        clients: Tensor,
        starts: TensorDict,
        kept: Kept | None,
        plans: list[Plan],
        order: list[int],
        work: _Work,
    ) -> _Chunk:
        """Stack up all clients ``[C]``, in a new order."""
        layout, data = self.setting.layout, self.setting.data
        rows = None if order == list(range(len(order))) else torch.tensor(order)

        def moved(column: Tensor) -> Tensor:
            column = column.to(self.device)  # after a fit, Lightning has left it on the CPU
            if rows is None or column.stride(0) == 0:
                return column
            return column[rows.to(self.device)]

        columns = {name: moved(starts[name]) for name in layout.names}
        results = {
            name: torch.empty_like(column, memory_format=torch.contiguous_format)
            for name, column in columns.items()
            if name not in layout.frozen
        }
        told: Stack = {}
        if work.mode.anchored:
            told |= {f"{ANCHOR}{name}": columns[name] for name in self._stacked.live}
        memories: Stack = {}
        if kept is not None:
            memories = {name: moved(value) for name, value in entries(kept.states)}
            told |= {f"{MEMORY}{name}": value for name, value in memories.items()}
        scalars = {
            "num_samples": data.num_samples("train")[clients.cpu()],
            "mean_samples": torch.full(
                (len(order),), self.setting.mean_samples, dtype=torch.double
            ),
            "seen": torch.zeros(len(order)) if kept is None else kept.seen,
            "num_steps": torch.tensor([plan.steps for plan in plans]),
        }
        if self.setting.half.needs_classes:
            scalars["class_counts"] = self.setting.class_counts.cpu()[clients.cpu()]
        told |= {name: moved(value).to(self.setting.dtype) for name, value in scalars.items()}
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
        work: _Work,
    ) -> ClientUpdates:
        """Put results into the clients' own order; do what failed once more, one by one."""
        good = [row for row in range(len(order)) if row not in failed]
        seen = sum(done.plans[row].num_seen for row in good)
        total = done.losses[good].sum()
        names: Collection[str] = ("train/loss",)
        if work.steps:
            names = self._logged if self._stacked.logs_loss(work.mode) else ()
        logs: list[Logs] = [dict.fromkeys(names, (total, seen))] if seen else []
        place = None if order == sorted(order) else torch.tensor(order).argsort()

        def in_order(stack: Stack) -> TensorDict:
            columns = {n: v if place is None else v[place.to(v.device)] for n, v in stack.items()}
            return TensorDict(columns, batch_size=[len(order)])

        states, keep = in_order(done.results), in_order(done.kept)
        failures, answered = [], torch.ones(len(order), dtype=torch.bool)
        if failed:
            rows = torch.tensor(sorted(order[row] for row in failed))
            again = work.one_by_one(
                clients[rows], starts[rows], kept and Kept(kept.states[rows], kept.seen[rows])
            )
            logs.append(again.logs)
            failures = again.failures
            causes = {int(clients[order[row]]): cause for row, cause in failed.items()}
            self._warn_of_fallbacks(causes, failures)
            answered[rows] = torch.isin(clients[rows], again.clients).cpu()
            rows = rows[answered[rows]]
            states[rows] = again.states.select(*done.results)
            if again.kept is not None:
                keep[rows] = again.kept
        if not answered.all():
            clients, states, keep = clients[answered], states[answered], keep[answered]
        for name in self.setting.layout.frozen:  # one tensor for all clients
            states[name] = starts[name][: len(clients)]
        return ClientUpdates(
            clients,
            states,
            self.setting.data.num_samples("train")[clients.cpu()],
            failures,
            merge_logs(logs),
            keep if kept is not None else None,
        )

    def _phases_of(self, epochs: int, anchored: bool) -> list[Phase | None]:
        """Return the phases of local training; a single ``None`` if all epochs are alike."""
        key = epochs, anchored
        if key not in self._phases:
            phases = self.setting.half.phases(self.setting.client, epochs, anchored)
            self._phases[key] = [*phases] if phases else [None]
        return self._phases[key]

    def _train_chunk(self, chunk: _Chunk, phases: Sequence[Phase | None], work: _Work) -> None:
        """Train the clients of a chunk, in place."""
        stacked = self._stacked
        results = list(chunk.results.values())
        torch._foreach_copy_(results, [chunk.starts[name] for name in chunk.results])
        stacked.prepare(work.mode)
        for phase in phases:
            if phase is not None and not phase.names:
                continue
            with stacked.phase(phase):
                self._take_steps(chunk, self._batches(chunk, work, phase), phase)
        state = self._others(chunk, (), unread=()) | chunk.told  # the number of steps, too
        if work.mode.anchored and stacked.changes_afterwards:
            stacked.after_training(state)
        if chunk.kept:
            keep = state if stacked.remembers_its_state else stacked.remember(state)
            for name, value in chunk.kept.items():
                value.copy_(keep[name])

    def _take_steps(self, chunk: _Chunk, batches: Batches, phase: Phase | None = None) -> None:
        """Take the steps of some batches, those of a phase."""
        stacked = self._stacked
        dependence = self._dependence[stacked.mode.anchored]
        single, by_half = stacked.optimizer()
        if phase is not None and phase.lr is not None:
            for group in single.param_groups:
                group["lr"] = phase.lr
        stepped = {id(p) for group in single.param_groups for p in group["params"]}
        trained = {
            name: parameter
            for name, parameter in stacked.trained().items()
            if id(parameter) in stepped
            and parameter.requires_grad
            and name not in dependence.untouched
        }
        parameters = {name: chunk.results[name] for name in trained}
        others = self._others(chunk, parameters, dependence.unread)
        models = [
            names
            for names in (
                [name for name in trained if not name.startswith(PERSONAL)],
                [name for name in trained if name.startswith(PERSONAL)],
            )
            if names
        ]
        optimizers = [
            StackedOptimizer(single, {trained[name]: parameters[name] for name in names})
            for names in models
        ]
        limit = None if by_half else getattr(stacked.module, "gradient_clip_val", None)
        algorithm = getattr(stacked.module, "gradient_clip_algorithm", "norm")
        for step in range(len(batches)):
            last = step + 1 == len(batches)
            parts = [
                self._gradients(group, chunk, parameters, others, steps=True, last=last)
                for group in batches.groups(step)
            ]
            for names, optimizer in zip(models, optimizers, strict=True):
                gradients = [
                    torch.cat([part[name] for part in parts]) if len(parts) > 1 else parts[0][name]
                    for name in names
                ]
                if limit is not None:
                    gradients = clip(gradients, limit, algorithm)
                optimizer.step(gradients)

    def _add_gradients(self, chunk: _Chunk, batches: Batches) -> None:
        """Sum up the gradients of the clients of a chunk, at what they start from."""
        stacked = self._stacked
        stacked.prepare(Mode(anchored=True, remembers=False))
        names = stacked.parameters
        for name, result in chunk.results.items():
            if name in names:
                result.zero_()
            else:
                result.copy_(chunk.starts[name])
        parameters = {name: chunk.starts[name] for name in names}
        others = self._others(chunk, names, self._dependence[True].unread)
        counts = torch.tensor([plan.num_seen for plan in chunk.plans], device=self.device)
        for step in range(len(batches)):
            for group in batches.groups(step):
                gradients = self._gradients(group, chunk, parameters, others)
                for name, gradient in gradients.items():
                    share = group.size / counts[group.rows].to(gradient)
                    share = share.view(-1, *[1] * (gradient.dim() - 1))
                    chunk.results[name][group.rows] += gradient * share

    def _others(self, chunk: _Chunk, parameters: Collection[str], unread: Collection[str]) -> Stack:
        """Return everything that the loss looks at beside the parameters."""
        still = {"num_steps": torch.zeros_like(chunk.told["num_steps"])}  # until they are done
        return {
            name: value
            for name, value in (chunk.results | chunk.told | still).items()
            if name not in parameters and name not in unread
        }

    def _gradients(
        self,
        group: Group,
        chunk: _Chunk,
        parameters: Stack,
        others: Stack,
        steps: bool = False,
        last: bool = True,
    ) -> Stack:
        """Return the gradients of a group of rows, and add up the losses that are logged.

        Args:
            group: The rows, with their batches.
            chunk: Whose rows they are.
            parameters: Of the chunk, by which the loss is differentiated.
            others: Everything else that the loss looks at.
            steps: Whether they take a step, which logs its own loss.
            last: Whether it is their last.
        """
        rows = group.rows
        assert self.setting.form is not None
        audited = self._some_rows(group, chunk, parameters) if self._audits and last else {}
        with self._stacked_context():
            gradients, mean_losses, own = self._stacked.gradients(
                {name: value[rows] for name, value in parameters.items()},
                {name: value[rows] for name, value in others.items()},
                self.setting.form.batch(group.leaves),
                group.weights,
            )
        chunk.losses[rows] += (own if steps else mean_losses) * group.size
        self._audit(audited, gradients, mean_losses)
        return gradients

    # Stacked clients against one alone

    def _some_rows(
        self, group: Group, chunk: _Chunk, parameters: Stack
    ) -> dict[int, tuple[dict[str, Tensor], list[Tensor]]]:
        """Return the state and the batch of two clients of a group, by row, as they are now."""
        state = {**chunk.results, **self._others(chunk, (), ()), **parameters}
        found = {}
        for row in {0, len(group.leaves[0]) - 1}:
            count = group.size if isinstance(group.size, int) else int(group.size[row])
            own = {name: t[group.rows.start + row].clone() for name, t in state.items()}
            found[row] = own, [leaf[row, :count] for leaf in group.leaves]
        return found

    def _audit(
        self,
        audited: dict[int, tuple[dict[str, Tensor], list[Tensor]]],
        gradients: Stack,
        losses: Tensor,
    ) -> None:
        """Raise if two clients in a row get something else alone than they got in a stack.

        A single one may be next to a kink, of which rounding chooses the side. After a stack of one
        that did, the audit stays due.
        """
        stacked = self._stacked
        for row, (state, leaves) in audited.items():
            got = {name: gradient[row] for name, gradient in gradients.items()}
            found = Witness(stacked.mode, stacked.training_phase, state, leaves, got, losses[row])
            why = "gets other results alone"
            try:
                if not self._probe.contradicts(found):
                    self._audits = self._doubted = False
                    return
            except Exception as error:
                why = f"fails alone: {reason_of(error)}"
            if self._doubted:
                name = type(self.setting.client).__name__
                raise ConfigurationError(
                    f"round {self._audited}: a {name} that trained together with others {why}, as "
                    "with numbers that it keeps outside of its tensors and that change from call "
                    "to call. Results so far are wrong: train with engine='sequential', or say "
                    f"vectorizable = False in {name}"
                )
            self._doubted = True

    def _batches(self, chunk: _Chunk, work: _Work, phase: Phase | None = None) -> Batches:
        """Prepare the batches of a chunk, or those of a phase, in memory that all chunks use."""
        data, plans, first = self.setting.data, chunk.plans, 0
        counts = data.num_samples("train")[chunk.clients].tolist()
        if phase is not None:
            plans = [Plan(plan.sizes, phase.epochs * len(plan.sizes)) for plan in plans]
            first = phase.first
        several = any(plan.steps > len(plan.sizes) for plan in plans)
        cached: dict[int, list[Tensor]] = {}
        held: list[Tensor] = []

        def load(rows: range, epoch: int, count: int) -> Iterator[tuple[list[Tensor], Tensor]]:
            clients = chunk.clients[rows.start : rows.stop]
            when = work.round_index, first + epoch
            orders: Sequence[Tensor] = [torch.arange(counts[rows.start])] * len(rows)
            if work.shuffled:
                orders = data.orders(clients, *when)
            for row, client, order in zip(rows, clients, orders, strict=True):
                leaves = cached[row] if row in cached else self.setting.samples(client, "train")
                if several:
                    cached[row] = leaves
                check_order(counts[row], order)
                yield self.setting.augmented(leaves, client, *when), order[:count].to(self.device)
            if isinstance(task := self.setting.client, Task) and self.setting.has_loss_of_its_kind:
                labels = held[1][rows.start : rows.stop, :count]
                task.check_targets(labels.flatten(0, 1))

        def reserve(count: int) -> list[Tensor]:
            shape = len(chunk.clients), count
            for place, leaf in enumerate(self._some):
                held.append(self._reuse(f"{place}", (*shape, *leaf.shape[1:]), leaf.dtype))
            return held

        # Nothing that `load` holds may hold the batches: in a cycle, the chunk would stay in memory
        # until Python's garbage collector comes by.
        return Batches(plans, reserve, load, self._dependence[work.mode.anchored].weighs_samples)

    def _stacked_context(self) -> AbstractContextManager[Any]:
        """Return what stacked passes run in."""
        if isinstance(self.setting.precision, MixedPrecision):
            return StackedAutocast(torch.bfloat16)  # float16 is refused
        return self.setting.forward_context()

    # Evaluation

    def evaluate(
        self, clients: Tensor, states: TensorDict, split: Split
    ) -> tuple[Evaluation | ClientValues, list[ClientFailure]]:
        """See :class:`~pflight.engines.base.Engine`."""
        if self.setting.task is None:
            return self.alone.evaluate(clients, states, split)
        self._causes.clear()
        names = self.setting.layout.names

        def at_once(samples: Samples) -> dict[int, Tensor] | None:
            if not self.stacks_evaluation or are_one(states[name] for name in names):
                return self.alone.outputs_of_one(states, samples)
            return self._outputs_of_all(states, samples)

        evaluation, failures = evaluate_task(
            self.setting,
            clients,
            split,
            attempt=self.alone._attempt,
            at_once=at_once,
            alone=lambda row, x: self.alone.outputs({n: states[n][row] for n in names}, x),
            operations=self.alone.operations,
        )
        if self._causes and not failures:  # else it is the fault of those
            name, reason = type(self.setting.client).__name__, reason_of(self._causes[0])
            self.warn_once(f"{name} is evaluated one by one from here on: {reason}")
            self.stacks_evaluation = False
        return evaluation, failures

    def predict(
        self, clients: Tensor, states: TensorDict, split: Split
    ) -> tuple[Evaluation | Predictions, list[ClientFailure]]:
        """See :class:`~pflight.engines.base.Engine`."""
        if not self.setting.predicts_outputs:
            return self.alone.predict(clients, states, split)
        outputs, failures = self.evaluate(clients, states, split)
        assert isinstance(outputs, Evaluation)
        return outputs, failures

    def _outputs_of_all(self, states: TensorDict, samples: Samples) -> dict[int, Tensor] | None:
        """Return the outputs of clients that have models of their own, by row, or ``None``."""
        task, rows = self.setting.task, list(samples)
        assert task is not None
        self._stacked.take_frozen(states)
        columns = {name: states[name] for name in self._stacked.live}
        if len(rows) < len(states):
            columns = {name: column[rows] for name, column in columns.items()}
        try:
            stacked = self._stacked_outputs(columns, [x for x, _ in samples.values()])
            outputs = torch.cat(stacked)
            task.check_outputs(outputs, torch.cat([y for _, y in samples.values()]))
        except STOPS:
            raise
        except BaseException as error:
            self._causes.append(error)
            return None
        if outputs.isnan().any():  # as one by one, perhaps
            return None
        return dict(zip(samples, stacked, strict=True))

    def _stacked_outputs(self, columns: Stack, inputs: list[Tensor]) -> list[Tensor]:
        counts = [len(x) for x in inputs]
        order = sorted(range(len(counts)), key=lambda row: counts[row], reverse=True)
        moved = order != sorted(order)
        outputs: dict[int, Tensor] = {}
        for first, last in self._evaluated_at_once([counts[row] for row in order]):
            rows = order[first:last]
            taken = rows if moved else slice(first, last)
            state = {name: column[taken] for name, column in columns.items()}
            shape = len(rows), counts[rows[0]], *inputs[0].shape[1:]
            x = self._reuse("x", shape, inputs[0].dtype)
            for padded, row in zip(x, rows, strict=True):
                padded[: counts[row]] = inputs[row]
                padded[counts[row] :] = 0
            with self._stacked_context():
                parts = x.split(self.setting.data.eval_batch_size or shape[1] or 1, dim=1)
                given = torch.cat([self._stacked.outputs(state, part) for part in parts], dim=1)
            outputs |= {row: given[i, : counts[row]] for i, row in enumerate(rows)}
        return [outputs[row] for row in range(len(order))]

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

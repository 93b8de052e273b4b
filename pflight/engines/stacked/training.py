"""The local training of many clients at once: their stacks, their steps and their results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.utils import expand_as_right
from torch import Tensor

from pflight.engines.base import means_of
from pflight.engines.client_setup import ClientSetup
from pflight.history import Logs, merge_logs
from pflight.method import PERSONAL, Phase
from pflight.states.state import entries
from pflight.states.updates import ClientUpdates, Kept

from .audit import Audit
from .probe import Dependence
from .stack import ANCHOR, MEMORY, Columns, Mode, Stack, stacked_context
from .steps import Batches, Group, Plan, StackedOptimizer, Workspace, clip


@dataclass(frozen=True)
class Work:
    """The work of clients: a training, or a computation of gradients.

    Attributes:
        round_index: Keys the order of batches.
        mode: The inputs of the training.
        plan: Returns the batches of a client with a given number of samples.
        one_by_one: Does the work for some clients in the sequential engine.
        shuffled: Whether samples are in the order of the round. Otherwise they keep their own.
        steps: Whether clients take steps. Otherwise they return gradients.
        phases: The phases of the steps; a single ``None`` if all epochs are alike.
        on_client_end: Called with the id of each client at the end of its work.
    """

    round_index: int
    mode: Mode
    plan: Callable[[int], Plan]
    one_by_one: Callable[..., ClientUpdates]
    shuffled: bool = True
    steps: bool = True
    phases: Sequence[Phase | None] = (None,)
    on_client_end: Callable[[int], None] | None = None


@dataclass(frozen=True)
class Chunk:
    """Clients that are trained at once. The clients with the longest training are first.

    Attributes:
        clients: The clients' ids.
        plans: The clients' batches.
        starts: The start states ``[C, ...]``.
        results: The returned states ``[C, ...]``, to be filled in.
        inputs: Anchor, memory and scalars ``[C, ...]``, by name.
        kept: The new memory ``[C, ...]``, to be filled in.
        losses: Sums over samples of the logged losses ``[C]``; steps add to them.
        noted: Sums of the client method's notes, and of their steps ``[C, 2]``, by name; likewise.
    """

    clients: list[int]
    plans: list[Plan]
    starts: Columns
    results: Columns
    inputs: Columns
    kept: Columns
    losses: Tensor
    noted: Columns

    def __getitem__(self, rows: slice) -> Chunk:
        def some(part: Any) -> Any:
            return {n: t[rows] for n, t in part.items()} if isinstance(part, dict) else part[rows]

        return Chunk(**{name: some(part) for name, part in vars(self).items()})


def scalars_of(setup: ClientSetup, clients: Tensor) -> Columns:
    """Return the scalars of the clients ``[C]`` before their training."""
    ids = clients.cpu()
    scalars = {
        "num_samples": setup.data.num_samples("train")[ids],
        "mean_samples": torch.full((len(ids),), setup.mean_samples, dtype=torch.double),
        "seen": torch.zeros(len(ids)),
        "num_steps": torch.zeros(len(ids)),
    }
    if setup.client_method.needs_classes:
        scalars["class_counts"] = setup.class_counts.cpu()[ids]
    return scalars


class StackedCohort:
    """All clients of a work, stacked. The clients with the longest training are first.

    Args:
        setup: The client module, its client method, and its data.
        stacked: The client module for many clients.
        clients: The clients' ids ``[C]``.
        starts: The start states ``[C]``.
        kept: The clients' memory ``[C]``, if their client method keeps one.
        work: The work of the clients.

    Attributes:
        order: The original position of each row of the stack.
        everyone: The stack.
    """

    def __init__(
        self,
        setup: ClientSetup,
        stacked: Stack,
        clients: Tensor,
        starts: TensorDict,
        kept: Kept | None,
        work: Work,
    ) -> None:
        self.setup = setup
        self.stacked = stacked
        self.clients = clients
        self.starts = starts
        self.kept = kept
        counts = setup.data.num_samples("train")[clients.cpu()].tolist()
        plan_of = {count: work.plan(count) for count in set(counts)}
        plans = [plan_of[count] for count in counts]
        self.order = sorted(
            range(len(plans)), key=lambda row: (plans[row].steps, counts[row]), reverse=True
        )
        self.everyone = self._stack(plans, work.mode)

    def _stack(self, plans: list[Plan], mode: Mode) -> Chunk:
        """Stack all clients. The plans are in the clients' own order."""
        setup, order, starts, kept = self.setup, self.order, self.starts, self.kept
        layout = setup.layout
        rows = None if order == list(range(len(order))) else torch.tensor(order)

        def moved(column: Tensor) -> Tensor:
            column = column.to(setup.device)  # after a fit, Lightning leaves it on the CPU
            if rows is None or column.stride(0) == 0:
                return column
            return column[rows.to(setup.device)]

        columns = {name: moved(starts[name]) for name in layout.names}
        results = {
            name: torch.empty_like(column, memory_format=torch.contiguous_format)
            for name, column in columns.items()
            if name not in layout.frozen
        }
        inputs: Columns = {}
        if mode.anchored:
            inputs |= {f"{ANCHOR}{name}": columns[name] for name in self.stacked.live}
        memories: Columns = {}
        if kept is not None:
            memories = {name: moved(value) for name, value in entries(kept.states)}
            inputs |= {f"{MEMORY}{name}": value for name, value in memories.items()}
        scalars = scalars_of(setup, self.clients)
        if kept is not None:
            scalars["seen"] = kept.seen
        scalars["num_steps"] = torch.tensor([plan.steps for plan in plans])
        inputs |= {name: moved(value).to(setup.dtype) for name, value in scalars.items()}
        return Chunk(
            clients=[int(self.clients[row]) for row in order],
            plans=[plans[row] for row in order],
            starts=columns,
            results=results,
            inputs=inputs,
            kept={name: torch.empty_like(value) for name, value in memories.items()},
            losses=torch.zeros(len(order), dtype=torch.double, device=setup.device),
            noted={
                name: torch.zeros(len(order), 2, dtype=torch.double, device=setup.device)
                for name in setup.client_method.all_notes
            },
        )

    def chunks(self, size: int) -> Iterator[tuple[int, Chunk]]:
        """Divide the stack into chunks of at most ``size`` clients; each with its first row."""
        count = len(self.order)
        for part in torch.arange(count).tensor_split(-(-count // size)):
            first, last = int(part[0]), int(part[-1]) + 1
            yield first, self.everyone[first:last]

    def some(self, rows: Collection[int]) -> tuple[Tensor, TensorDict, Kept | None]:
        """Return clients, start states and memory of some rows, in the clients' own order."""
        places, kept = self._places(rows), self.kept
        return (
            self.clients[places],
            self.starts[places],
            kept and Kept(kept.states[places], kept.seen[places]),
        )

    def updates(
        self, names: Collection[str], failed: Collection[int], again: ClientUpdates | None
    ) -> ClientUpdates:
        """Put results into the clients' own order.

        Args:
            names: Logged names of the loss.
            failed: Rows without a result.
            again: The results of the failed rows in the sequential engine.
        """
        done, order, clients = self.everyone, self.order, self.clients
        good = [row for row in range(len(order)) if row not in failed]
        seen = sum(done.plans[row].num_seen for row in good)
        total = done.losses[good].sum()
        logs: list[Logs] = [dict.fromkeys(names, (total, seen))] if seen else []
        logs.append(means_of({name: value[good].sum(0) for name, value in done.noted.items()}))
        place = None if order == sorted(order) else torch.tensor(order).argsort()

        def in_order(stack: Columns) -> TensorDict:
            columns = {n: v if place is None else v[place.to(v.device)] for n, v in stack.items()}
            return TensorDict(columns, batch_size=[len(order)])

        states, keep = in_order(done.results), in_order(done.kept)
        answered = torch.ones(len(order), dtype=torch.bool)
        if again is not None:
            logs.append(again.logs)
            rows = self._places(failed)
            answered[rows] = torch.isin(clients[rows], again.clients).cpu()
            rows = rows[answered[rows]]
            states[rows] = again.states.select(*done.results)
            if again.kept is not None:
                keep[rows] = again.kept
        if not answered.all():
            clients, states, keep = clients[answered], states[answered], keep[answered]
        for name in self.setup.layout.frozen:  # one tensor for all clients
            states[name] = self.starts[name][: len(clients)]
        return ClientUpdates(
            clients,
            states,
            self.setup.data.num_samples("train")[clients.cpu()],
            [] if again is None else again.failures,
            merge_logs(logs),
            keep if self.kept is not None else None,
        )

    def _places(self, rows: Collection[int]) -> Tensor:
        """Return the original positions of some rows, ascending."""
        return torch.tensor(sorted(self.order[row] for row in rows))


class StackedTraining:
    """Trains the clients of a chunk together: one loss for all, and one optimizer.

    Args:
        setup: The client module, its client method, and its data.
        stacked: The client module for many clients.
        audit: Compares stacked clients with the same clients alone.
        workspace: The memory of the batches.

    Attributes:
        dependence: Properties of the gradients, with and without an anchor; to be set first.
        samples: Some samples in the common form; to be set first.
    """

    def __init__(
        self, setup: ClientSetup, stacked: Stack, audit: Audit, workspace: Workspace
    ) -> None:
        self.setup = setup
        self.stacked = stacked
        self.audit = audit
        self.workspace = workspace
        self.dependence: dict[bool, Dependence] = {}
        self.samples: list[Tensor] = []

    def run(self, chunk: Chunk, work: Work) -> None:
        """Do a work for the clients of a chunk, in place."""
        if work.steps:
            self._train(chunk, work)
        else:
            self._add_gradients(chunk, work)

    def _train(self, chunk: Chunk, work: Work) -> None:
        """Train the clients through the phases of local training."""
        stacked = self.stacked
        results = list(chunk.results.values())
        torch._foreach_copy_(results, [chunk.starts[name] for name in chunk.results])
        stacked.prepare(work.mode)
        for phase in work.phases:
            if phase is not None and not phase.names:
                continue
            with stacked.phase(phase):
                self._take_steps(chunk, self._batches(chunk, work, phase), phase)
        state = self._others(chunk, (), unread=()) | chunk.inputs  # with the number of steps
        if work.mode.anchored and stacked.changes_afterwards:
            stacked.after_training(state)
        if chunk.kept:
            keep = state if stacked.client_method.remembers_its_state else stacked.remember(state)
            for name, value in chunk.kept.items():
                value.copy_(keep[name])

    def _add_gradients(self, chunk: Chunk, work: Work) -> None:
        """Add up the gradients of a chunk's clients at their start states."""
        stacked = self.stacked
        stacked.prepare(Mode(anchored=True, remembers=False))
        names = stacked.parameters
        for name, result in chunk.results.items():
            if name in names:
                result.zero_()
            else:
                result.copy_(chunk.starts[name])
        parameters = {name: chunk.starts[name] for name in names}
        others = self._others(chunk, names, self.dependence[True].unread)
        batches = self._batches(chunk, work)
        counts = torch.tensor([plan.num_seen for plan in chunk.plans], device=self.setup.device)
        for step in range(len(batches)):
            for group in batches.groups(step):
                gradients = self._gradients(group, chunk, parameters, others)
                for name, gradient in gradients.items():
                    share = group.size / counts[group.rows].to(gradient)
                    chunk.results[name][group.rows] += gradient * expand_as_right(share, gradient)

    def _take_steps(self, chunk: Chunk, batches: Batches, phase: Phase | None = None) -> None:
        """Take the steps of a phase's batches."""
        stacked = self.stacked
        dependence = self.dependence[stacked.mode.anchored]
        single, by_method = stacked.optimizer(self.setup)
        if phase is not None and phase.lr is not None:
            for group in single.param_groups:
                group["lr"] = phase.lr
        self.setup.pace(single.param_groups, stacked.mode.anchored)
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
        limit = None if by_method else getattr(stacked.module, "gradient_clip_val", None)
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

    def _others(
        self, chunk: Chunk, parameters: Collection[str], unread: Collection[str]
    ) -> Columns:
        """Return all inputs of the loss besides the parameters."""
        still = {"num_steps": torch.zeros_like(chunk.inputs["num_steps"])}  # 0 until the end
        return {
            name: value
            for name, value in (chunk.results | chunk.inputs | still).items()
            if name not in parameters and name not in unread
        }

    def _gradients(
        self,
        group: Group,
        chunk: Chunk,
        parameters: Columns,
        others: Columns,
        steps: bool = False,
        last: bool = True,
    ) -> Columns:
        """Return the gradients of a group of rows, and add up the logged losses.

        Args:
            group: The rows, with their batches.
            chunk: The chunk of the rows.
            parameters: The chunk's parameters. The gradients are with respect to them.
            others: All other inputs of the loss.
            steps: Whether the rows take a step. A step logs its own loss.
            last: Whether this is the rows' last step.
        """
        rows = group.rows
        assert self.setup.form is not None
        selected = {}
        if last and self.audit.due:
            state = {**chunk.results, **self._others(chunk, (), ()), **parameters}
            selected = self.audit.select(group, state)
        with stacked_context(self.setup):
            gradients, mean_losses, own, noted = self.stacked.gradients(
                {name: value[rows] for name, value in parameters.items()},
                {name: value[rows] for name, value in others.items()},
                self.setup.form.batch(group.leaves),
                group.weights,
            )
        chunk.losses[rows] += (own if steps else mean_losses) * group.size
        for name, value in noted.items():
            chunk.noted[name][rows] += value
        self.audit.check(selected, gradients, mean_losses)
        return gradients

    def _batches(self, chunk: Chunk, work: Work, phase: Phase | None = None) -> Batches:
        """Prepare the batches of a chunk or of a phase, in memory that all chunks share."""
        plans, first = chunk.plans, 0
        if phase is not None:
            plans = [Plan(plan.sizes, phase.epochs * len(plan.sizes)) for plan in plans]
            first = phase.first
        return Batches(
            self.setup,
            chunk.clients,
            plans,
            self.samples,
            self.workspace,
            round_index=work.round_index,
            first_epoch=first,
            shuffled=work.shuffled,
            filled=self.dependence[work.mode.anchored].weighs_samples,
        )

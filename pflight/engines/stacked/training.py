"""The local training of many clients at once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from pflight.engines.client_setup import ClientSetup
from pflight.engines.samples import check_order
from pflight.method import PERSONAL, Phase
from pflight.task import Task

from .audit import Audit
from .autocast import stacked_context
from .chunk import Chunk, Work
from .probe import Dependence
from .stack import Columns, Mode, Stack
from .steps import Batches, Group, Plan, StackedOptimizer, clip
from .workspace import Workspace


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
        self._phases: dict[tuple[int, bool], list[Phase | None]] = {}

    def phases_of(self, epochs: int, anchored: bool) -> list[Phase | None]:
        """Return the phases of local training; a single ``None`` if all epochs are alike."""
        key = epochs, anchored
        if key not in self._phases:
            phases = self.setup.client_method.phases(self.setup.client, epochs, anchored)
            self._phases[key] = [*phases] if phases else [None]
        return self._phases[key]

    def train(self, chunk: Chunk, work: Work, phases: Sequence[Phase | None]) -> None:
        """Train the clients of a chunk, in place, through the phases of local training."""
        stacked = self.stacked
        results = list(chunk.results.values())
        torch._foreach_copy_(results, [chunk.starts[name] for name in chunk.results])
        stacked.prepare(work.mode)
        for phase in phases:
            if phase is not None and not phase.names:
                continue
            with stacked.phase(phase):
                self._take_steps(chunk, self._batches(chunk, work, phase), phase)
        state = self._others(chunk, (), unread=()) | chunk.inputs  # with the number of steps
        if work.mode.anchored and stacked.changes_afterwards:
            stacked.after_training(state)
        if chunk.kept:
            keep = state if stacked.remembers_its_state else stacked.remember(state)
            for name, value in chunk.kept.items():
                value.copy_(keep[name])

    def add_gradients(self, chunk: Chunk, work: Work) -> None:
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
                    share = share.view(-1, *[1] * (gradient.dim() - 1))
                    chunk.results[name][group.rows] += gradient * share

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
            gradients, mean_losses, own = self.stacked.gradients(
                {name: value[rows] for name, value in parameters.items()},
                {name: value[rows] for name, value in others.items()},
                self.setup.form.batch(group.leaves),
                group.weights,
            )
        chunk.losses[rows] += (own if steps else mean_losses) * group.size
        self.audit.check(selected, gradients, mean_losses)
        return gradients

    def _batches(self, chunk: Chunk, work: Work, phase: Phase | None = None) -> Batches:
        """Prepare the batches of a chunk or of a phase, in memory that all chunks share."""
        setup, data = self.setup, self.setup.data
        plans, first = chunk.plans, 0
        counts = data.num_samples("train")[chunk.clients].tolist()
        if phase is not None:
            plans = [Plan(plan.sizes, phase.epochs * len(plan.sizes)) for plan in plans]
            first = phase.first
        several = any(plan.steps > len(plan.sizes) for plan in plans)
        cached: dict[int, list[Tensor]] = {}
        held: list[Tensor] = []

        def load(
            rows: range, epoch: int, needed: list[int]
        ) -> Iterator[tuple[list[Tensor], Tensor]]:
            clients = chunk.clients[rows.start : rows.stop]
            when = work.round_index, first + epoch
            if work.shuffled:
                orders = data.orders(clients, *when)
            else:
                orders = [torch.arange(counts[row]) for row in rows]
            for row, client, order, count in zip(rows, clients, orders, needed, strict=True):
                leaves = cached[row] if row in cached else setup.samples(client, "train")
                if several:
                    cached[row] = leaves
                check_order(counts[row], order)
                yield setup.augmented(leaves, client, *when), order[:count].to(setup.device)
            if isinstance(task := setup.client, Task) and setup.has_loss_of_its_kind:
                labels = [held[1][row, :count] for row, count in zip(rows, needed, strict=True)]
                task.check_targets(torch.cat(labels))

        def reserve(count: int) -> list[Tensor]:
            shape = len(chunk.clients), count
            for place, leaf in enumerate(self.samples):
                whole = *shape, *leaf.shape[1:]
                held.append(self.workspace.tensor(f"{place}", whole, leaf.dtype))
            return held

        # `load` must not hold the batches, even indirectly. In a cycle, the chunk would stay in
        # memory until Python's garbage collector runs.
        return Batches(plans, reserve, load, self.dependence[work.mode.anchored].weighs_samples)

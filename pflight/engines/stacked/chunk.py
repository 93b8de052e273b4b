"""Stacks of clients, sorted by length of training. Results return in the clients' own order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from pflight.engines.client_setup import ClientSetup
from pflight.history import Logs, merge_logs
from pflight.states.state import entries
from pflight.states.updates import ClientUpdates, Kept

from .stack import ANCHOR, MEMORY, Columns, Mode, Stack
from .steps import Plan


@dataclass(frozen=True)
class Work:
    """The work of clients: a training, or a computation of gradients.

    Attributes:
        round_index: Keys the order of batches.
        mode: The inputs of the training.
        plan: Returns the batches of a client with a given number of samples.
        run: Does the work for a chunk.
        one_by_one: Does the work for some clients in the sequential engine.
        shuffled: Whether samples are in the order of the round. Otherwise they keep their own.
        steps: Whether clients take steps. Otherwise they return gradients.
        on_client_end: Called with the id of each client at the end of its work.
    """

    round_index: int
    mode: Mode
    plan: Callable[[int], Plan]
    run: Callable[[Chunk], None]
    one_by_one: Callable[[Tensor, TensorDict, Kept | None], ClientUpdates]
    shuffled: bool = True
    steps: bool = True
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
    """

    clients: list[int]
    plans: list[Plan]
    starts: Columns
    results: Columns
    inputs: Columns
    kept: Columns
    losses: Tensor

    def __getitem__(self, rows: slice) -> Chunk:
        def some(stack: Columns) -> Columns:
            return {name: tensor[rows] for name, tensor in stack.items()}

        return Chunk(
            clients=self.clients[rows],
            plans=self.plans[rows],
            starts=some(self.starts),
            results=some(self.results),
            inputs=some(self.inputs),
            kept=some(self.kept),
            losses=self.losses[rows],
        )


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

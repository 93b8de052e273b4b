"""Steps of many clients at once: stacked batches, stacked optimizers, clipping client by client."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from tensordict.utils import expand_as_right
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from pflight.engines.client_setup import ClientSetup, check_order
from pflight.states.state import rows
from pflight.task import Task

ELEMENTWISE = (SGD, Adam, AdamW, RMSprop)
"""Optimizers that treat every number by itself. So stacking clients changes nothing."""
_FUSED = (SGD, Adam, AdamW)
_CALL = 128  # so many samples take about as long as the call itself


class Plan(NamedTuple):
    """The batches of a client's local training."""

    sizes: tuple[int, ...]
    """Sizes of an epoch's batches."""
    steps: int
    """Batches in all, over as many epochs as they take."""

    def batch(self, step: int) -> tuple[int, int]:
        """Return the first position of a step's batch in its epoch, and the batch's size."""
        index = step % len(self.sizes)
        return sum(self.sizes[:index]), self.sizes[index]

    def begins(self, step: int) -> int | None:
        """Return the epoch that begins with this step, if any."""
        epoch, rest = divmod(step, len(self.sizes))
        return None if rest else epoch

    def samples(self, step: int) -> int:
        """Return how many samples an epoch needs, if it begins with this step."""
        return sum(self.sizes[: self.steps - step])

    @property
    def last_begin(self) -> int:
        """First position of the last needed batch in its epoch."""
        return sum(self.sizes[: min(self.steps, len(self.sizes)) - 1])

    @property
    def num_seen(self) -> int:
        """Number of the client's training samples, counted with repetitions."""
        epochs, rest = divmod(self.steps, len(self.sizes) or 1)
        return epochs * sum(self.sizes) + sum(self.sizes[:rest])


class Run(NamedTuple):
    """Neighbouring rows of a stack with the same plan: ``first`` to ``last``, exclusively."""

    first: int
    last: int
    plan: Plan


class Group(NamedTuple):
    """Neighbouring rows that share a call in a step."""

    rows: slice
    size: int | Tensor
    """Size of all rows' batches; or of each row's ``[rows]``, if batches are filled up."""
    leaves: list[Tensor]
    """The tensors of the batches ``[rows, batch, ...]``."""
    weights: Tensor | None = None
    """Weights of the samples ``[rows, batch]``; 0 for samples that only fill up a batch."""


def runs_of(plans: Sequence[Plan]) -> list[Run]:
    """Divide rows into runs of equal plans."""
    runs, first = [], 0
    for plan, equal in groupby(plans):
        last = first + len(list(equal))
        runs.append(Run(first, last, plan))
        first = last
    return runs


class Workspace:
    """Memory for tensors. It is the same at every call, since new memory takes time.

    Args:
        device: The device of the memory.

    Example:
        >>> workspace = Workspace(torch.device("cpu"))
        >>> large = workspace.tensor("x", (3, 4), torch.float32)
        >>> small = workspace.tensor("x", (2, 5), torch.float32)
        >>> small.data_ptr() == large.data_ptr()
        True
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.held: dict[str, Tensor] = {}

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the tensor of a name. Its values are undefined."""
        size = math.prod(shape)
        held = self.held.get(name)
        if held is None or held.numel() < size or held.dtype != dtype:
            held = self.held[name] = torch.empty(size, dtype=dtype, device=self.device)
        return held[:size].view(shape)


class Batches:
    """The batches of some clients, one client for each row, in memory that all chunks share.

    Args:
        setup: The client module, its client method, and its data.
        clients: The clients' ids by row.
        plans: The rows' plans, longest training first.
        samples: Some samples in the common form.
        workspace: The memory of the batches.
        round_index: Keys the order of the samples.
        first_epoch: Index of the first local epoch.
        shuffled: Whether samples are in the order of the round. Otherwise they keep their own.
        filled: Whether batches of different sizes may be filled up. Otherwise only batches of equal
            size share a call.
    """

    def __init__(
        self,
        setup: ClientSetup,
        clients: list[int],
        plans: Sequence[Plan],
        samples: list[Tensor],
        workspace: Workspace,
        round_index: int,
        first_epoch: int,
        shuffled: bool,
        filled: bool,
    ) -> None:
        self.setup = setup
        self.clients = clients
        self.round_index = round_index
        self.first_epoch = first_epoch
        self.shuffled = shuffled
        self.runs = runs_of(plans)
        self.filled = filled and len(self.runs) > 1
        self._counts = setup.data.num_samples("train")[clients].tolist()
        self._largest = max(max(run.plan.sizes, default=0) for run in self.runs)
        self._several = any(plan.steps > len(plan.sizes) for plan in plans)  # epochs
        self._cached: dict[int, list[Tensor]] = {}  # samples by row
        shape = len(clients), max(map(self._room, self.runs))
        self.held = [
            workspace.tensor(f"{place}", (*shape, *leaf.shape[1:]), leaf.dtype)
            for place, leaf in enumerate(samples)
        ]

    def __len__(self) -> int:
        return self.runs[0].plan.steps

    def groups(self, step: int) -> list[Group]:
        """Return the batches of a step, without finished rows."""
        places = _places(self.runs, step)
        for epoch, begun in groupby(places, key=lambda place: place.run.plan.begins(step)):
            if epoch is not None:
                self._start_epoch([place.run for place in begun], epoch, step)
        return [self._group(part) for part in _grouped(places, self.filled)]

    def _room(self, run: Run) -> int:
        """Return the number of samples that a row must have memory for."""
        plan = run.plan
        return plan.last_begin + self._largest if self.filled else plan.samples(0)

    def _start_epoch(self, runs: Sequence[Run], epoch: int, step: int) -> None:
        """Load the samples of an epoch of neighbouring runs."""
        setup, chosen = self.setup, range(runs[0].first, runs[-1].last)
        clients = self.clients[chosen.start : chosen.stop]
        when = self.round_index, self.first_epoch + epoch
        run_of = [run for run in runs for _ in range(run.first, run.last)]
        counts = [run.plan.samples(step) for run in run_of]
        if self.shuffled:
            orders = setup.data.orders(clients, *when)
        else:
            orders = [torch.arange(self._counts[row]) for row in chosen]
        each = zip(chosen, clients, run_of, counts, orders, strict=True)
        for row, client, run, count, order in each:
            leaves = self._cached[row] if row in self._cached else setup.samples(client, "train")
            if self._several:
                self._cached[row] = leaves
            check_order(self._counts[row], order)
            leaves, order = setup.augmented(leaves, client, *when), order[:count].to(setup.device)
            for part, held in zip(leaves, self.held, strict=True):
                if part.shape[1:] != held.shape[2:] or part.dtype != held.dtype:
                    raise ValueError(
                        f"samples are {part.dtype} of shape {list(part.shape[1:])}, where "
                        f"{held.dtype} of shape {list(held.shape[2:])} are stacked"
                    )
            if (room := self._room(run)) > count:  # a real sample, since a loss may fail on others
                order = torch.cat([order, order[:1].expand(room - count)])
            for part, held in zip(leaves, self.held, strict=True):
                torch.index_select(part, 0, order, out=held[row, : len(order)])
        if isinstance(task := setup.client, Task) and setup.has_loss_of_its_kind:
            labels = self.held[1]
            parts = [labels[r.first : r.last, : r.plan.samples(step)].flatten(0, 1) for r in runs]
            task.check_targets(parts[0] if len(parts) == 1 else torch.cat(parts))

    def _group(self, places: Sequence[_Place]) -> Group:
        rows = slice(places[0].run.first, places[-1].run.last)
        size = max(place.size for place in places)
        begins = {place.begin for place in places}
        if len(begins) == 1:
            chosen = rows, slice(begin := begins.pop(), begin + size)
            leaves = [held[chosen] for held in self.held]
        else:
            parts = [
                (slice(run.first, run.last), slice(begin, begin + size)) for run, begin, _ in places
            ]
            leaves = [torch.cat([held[part] for part in parts]) for held in self.held]
        if not self.filled:
            return Group(rows, size, leaves)
        own = [place.size for place in places for _ in range(place.run.first, place.run.last)]
        sizes = torch.tensor(own, device=leaves[0].device)
        real = torch.arange(size, device=sizes.device) < sizes.unsqueeze(1)
        # The same strides in every round, so that the operations are recorded once.
        leaves = [leaf.contiguous() for leaf in leaves]
        return Group(rows, sizes, leaves, real / sizes.unsqueeze(1).double())


def rows_per_call(plans: Sequence[Plan], filled: bool) -> float:
    """Return how many rows share a call, on average over all steps.

    Args:
        plans: The rows' plans, longest training first.
        filled: As in :class:`Batches`.

    Example:
        >>> rows_per_call([Plan((4, 4), 2), Plan((4, 2), 2), Plan((4,), 1)], filled=False)
        1.6666666666666667
    """
    runs, steps = runs_of(plans), range(plans[0].steps)
    calls = sum(len(_grouped(_places(runs, step), filled)) for step in steps)
    return sum(plan.steps for plan in plans) / max(calls, 1)


class _Place(NamedTuple):
    """The place of a step's batch in the rows of a run."""

    run: Run
    begin: int
    size: int


def _places(runs: Sequence[Run], step: int) -> list[_Place]:
    return [_Place(run, *run.plan.batch(step)) for run in runs if run.plan.steps > step]


def _grouped(places: Sequence[_Place], filled: bool) -> list[list[_Place]]:
    """Divide places into groups that share a call.

    Batches are filled up if the added samples cost less than another call.
    """
    if not filled:
        return [list(part) for _, part in groupby(places, key=lambda place: place.size)]
    parts: list[list[_Place]] = []
    rows = real = largest = 0  # numbers of the last part
    for place in places:
        count = place.run.last - place.run.first
        rows, real = rows + count, real + count * place.size
        largest = max(largest, place.size)
        if parts and rows * largest <= 1.5 * real + _CALL:
            parts[-1].append(place)
        else:
            parts.append([place])
            rows, real, largest = count, count * place.size, place.size
    return parts


def misfit(optimizer: Any) -> str | None:
    """Return why an optimizer can't step stacked parameters, or ``None`` if it can."""
    name = type(optimizer).__name__
    if type(optimizer) not in ELEMENTWISE:
        if not isinstance(optimizer, Optimizer):
            return "its configure_optimizers() gives more than one optimizer, or a schedule"
        known = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        return f"its configure_optimizers() gives {name}, and not one of {known}"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"its {name} has hooks"
    for group in optimizer.param_groups:
        if group["differentiable"] or group.get("capturable"):
            return f"its {name} is differentiable or capturable"
        if any(isinstance(value, Tensor) for value in group.values()):
            return f"the options of its {name} are tensors"
    return None


class StackedOptimizer:
    """An optimizer for stacked parameters, like a given one. Finished clients drop out at the end.

    Args:
        optimizer: The optimizer of a single client.
        stacked: For each parameter of the optimizer, its stack ``[C, ...]``. Parameters without a
            stack don't change.

    Example:
        >>> w, stack = torch.zeros(2), torch.zeros(3, 2)
        >>> optimizer = StackedOptimizer(SGD([w], lr=0.5), {w: stack})
        >>> optimizer.step([torch.ones(3, 2)])
        >>> optimizer.step([torch.ones(1, 2)])
        >>> stack[:, 0]
        tensor([-1.0000, -0.5000, -0.5000])
    """

    def __init__(self, optimizer: Optimizer, stacked: Mapping[Tensor, Tensor]) -> None:
        self.leaves = [leaf.detach() for leaf in stacked.values()]
        place = dict(zip(stacked, self.leaves, strict=True))
        groups = []
        for group in optimizer.param_groups:
            leaves = [place[parameter] for parameter in group["params"] if parameter in place]
            fused = {"fused": True} if _can_be_fused(optimizer, group) else {}
            options = {name: value for name, value in group.items() if name != "param_names"}
            groups.append({**options, **fused, "params": leaves})
        self.optimizer = type(optimizer)(groups)  # type: ignore[call-arg]

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Step the first ``len(gradients[0])`` clients. The others never change again."""
        count = len(gradients[0])
        for leaf, gradient in zip(self.leaves, gradients, strict=True):
            if len(leaf) > count:
                leaf.data = leaf.data[:count]
                state = self.optimizer.state[leaf]
                state.update((n, v[:count]) for n, v in state.items() if _per_client(v))
            leaf.grad = gradient.contiguous()  # like the leaf: a fused step ignores strides
        self.optimizer.step()
        for leaf in self.leaves:
            leaf.grad = None


def _per_client(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _can_be_fused(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    chosen = group["foreach"] is not None or group.get("fused") is not None
    return (
        type(optimizer) in _FUSED and not chosen and all(map(_takes_fused_steps, group["params"]))
    )


def _takes_fused_steps(parameter: Tensor) -> bool:
    if not parameter.is_floating_point():
        return False
    if parameter.device.type == "cpu":  # PyTorch 2.13 does not step half precision there
        return parameter.element_size() >= 4
    return parameter.device.type == "cuda"


def clip(gradients: Sequence[Tensor], limit: float, algorithm: str) -> list[Tensor]:
    """Clip stacked gradients ``[C, ...]``, each client by itself, and return them.

    Args:
        gradients: The gradients of a model's parameters. Some may share their memory.
        limit: The largest norm over these parameters, or the largest value.
        algorithm: ``"norm"`` or ``"value"``.

    Example:
        >>> gradients = [torch.tensor([[3.0], [0.3]]), torch.tensor([[4.0], [0.4]])]
        >>> clip(gradients, 1.0, "norm")[1]
        tensor([[0.8000],
                [0.4000]])
    """
    if algorithm == "value":
        return [gradient.clamp(-limit, limit) for gradient in gradients]
    norms = torch.stack([torch.linalg.vector_norm(rows(g), dim=1) for g in gradients])
    scale = (limit / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
    return [
        gradient * expand_as_right(scale.to(gradient.dtype), gradient) for gradient in gradients
    ]

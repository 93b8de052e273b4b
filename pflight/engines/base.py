"""The interface of an engine, and functions that all engines use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import lightning as L
import torch
from tensordict import TensorDict
from torch import Tensor

from pflight.data.loaders import Split
from pflight.method import Pass, Phase
from pflight.metrics.collection import ClientValues
from pflight.randomness import Purpose
from pflight.states.state import StateLayout, entries, rows
from pflight.states.updates import ClientFailure, ClientUpdates, Evaluation, Kept, Predictions

from .client_setup import ClientSetup

_LARGEST = 1e19  # largest sum of an entry; its square still fits into 32 bits
ONE_THREAD = 20e6  # from so many operations of a batch's forward pass, threads pay


class Engine(Protocol):
    """Trains and evaluates clients for server callbacks and the evaluation.

    Attributes:
        setup: The client module, its client method, and its data.
        chunk: Largest number of clients that are trained at once.
        device: The device of the training.
    """

    setup: ClientSetup
    chunk: int
    device: torch.device

    def check_input(self) -> None:
        """Raise unless module, client method and data fit together.

        Raises:
            ConfigurationError: Naming the part that does not fit.
        """

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

    def gradients(
        self, clients: Tensor, states: TensorDict, *, round_index: int, batches: int | None = None
    ) -> ClientUpdates:
        """Return each client's gradient of its loss at the states ``[C]``, in training mode.

        The gradient is over all of the client's training samples, or over the first ``batches``
        mini-batches of its epoch. The result has the buffers after the pass.
        """

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

    def predict(
        self, clients: Tensor, states: TensorDict, split: Split
    ) -> tuple[Evaluation | Predictions, list[ClientFailure]]:
        """Return a task's outputs, or each client's results of an own ``predict_step`` by batch."""

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


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute on ``count`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def are_one(columns: Iterable[Tensor]) -> bool:
    """Return whether all rows of a stack are views of one state."""
    return all(len(column) == 1 or column.stride(0) == 0 for column in columns)


def finite_rows(states: TensorDict) -> list[bool]:
    """Return for each state of a stack whether its floating values are finite and can be summed.

    A single value of 3e38 would make the server's sums infinite.
    """
    sums = [_sums(leaf) for _, leaf in entries(states) if leaf.is_floating_point()]
    return torch.stack([leaf.abs() < _LARGEST for leaf in sums]).all(dim=0).tolist()


def is_finite(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether :func:`finite_rows` would accept these tensors as a row."""
    floats = (tensor for tensor in tensors.values() if tensor.is_floating_point())
    return all(bool((_sums(tensor.unsqueeze(0)).abs() < _LARGEST).all()) for tensor in floats)


def what_is_odd(state: TensorDict) -> str:
    """Return why :func:`finite_rows` refuses a state ``[1]``, with the entry's name; else empty."""
    for name, leaf in entries(state):
        if not leaf.is_floating_point():
            continue
        if not leaf.isfinite().all():
            return f"its result is NaN or infinite ({name})"
        if not (_sums(leaf).abs() < _LARGEST).all():
            return f"its result is too large to be added up ({name})"
    return ""


def _sums(leaf: Tensor) -> Tensor:
    precise = torch.promote_types(leaf.dtype, torch.float32)
    return rows(leaf).sum(dim=1, dtype=precise)  # faster than a norm


@contextmanager
def resting(module: L.LightningModule, layout: StateLayout, phase: Phase | None) -> Iterator[None]:
    """Freeze the parameters that rest in a phase. Layers with only these are in evaluation mode."""
    if phase is None:
        yield
        return
    awake, parameters = {*phase.names}, dict(module.named_parameters())
    rest = [p for n, p in parameters.items() if n not in awake and p.requires_grad]
    layers = [
        module.get_submodule(layer)
        for layer, names in layout.layers.items()
        if awake.isdisjoint(names) and not any(name in layout.own for name in names)
    ]
    parts = [part for part in layers if part.training]
    for parameter in rest:
        parameter.requires_grad = False
    for part in parts:
        part.training = False
    try:
        yield
    finally:
        for parameter in rest:
            parameter.requires_grad = True
        for part in parts:
            part.training = True


@contextmanager
def paced(
    groups: Sequence[dict[str, Any]], phase: Phase | None, pace: Callable[[Any], None]
) -> Iterator[None]:
    """Set the learning rate of an optimizer's groups to the phase's, if it has one.

    Args:
        groups: The groups of the optimizer.
        phase: The phase.
        pace: Multiplies the learning rates of groups by the round's decay.
    """
    if phase is None or phase.lr is None:
        yield
        return
    own = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = phase.lr
    pace(groups)
    try:
        yield
    finally:
        for group, lr in zip(groups, own, strict=True):
            group["lr"] = lr


def phase_of(phases: Sequence[Phase] | None, epoch: int) -> Phase | None:
    """Return the phase of an epoch."""
    begun = [phase for phase in phases or () if phase.first <= epoch]
    return begun[-1] if begun else None

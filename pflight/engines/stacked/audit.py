"""Compares stacked clients with the same clients alone, before the start and in some rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.backends import cudnn

from pflight.engines.alone.client import SCALARS, AloneClient, LocalModels
from pflight.engines.base import resting
from pflight.errors import ConfigurationError
from pflight.method import PERSONAL
from pflight.randomness import isolated
from pflight.states.state import state_tensors

from .reasons import reason_of
from .stack import ANCHOR, MEMORY, Columns, Mode, Stack, no_logs
from .steps import Group

_ODD, _ODD_IN_HALF = 5e-2, 0.3  # tolerated difference, relative to the largest gradient
_VANISHED = 1e-3  # smaller gradients are rounding, relative to the largest one at the start
_Before = tuple[dict[str, Tensor], list[Tensor]]
"""A client's state with its inputs, and its batch."""


@contextmanager
def without_tf32() -> Iterator[None]:
    """Compute with all bits of float32. A GPU's convolutions use TF32 by default.

    TF32 has 10 bits. A stack and a client alone use different kernels, and so differ in the third
    digit. Settings of single operations (``torch.backends.cudnn.conv.fp32_precision`` and the like)
    are not changed.
    """
    with ExitStack() as at_end:
        with suppress(RuntimeError):  # single operations differ
            precision = torch.get_float32_matmul_precision()
            if precision != "highest":
                at_end.callback(torch.set_float32_matmul_precision, precision)
                torch.set_float32_matmul_precision("highest")
        with suppress(RuntimeError):
            if cudnn.allow_tf32:
                at_end.callback(setattr, cudnn, "allow_tf32", True)
                cudnn.allow_tf32 = False
        yield


def takes_tf32(device: torch.device) -> bool:
    """Return whether a device may compute float32 products in TF32, a GPU's default."""
    if device.type != "cuda":
        return False
    try:
        return cudnn.allow_tf32 or torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # single operations differ
        return True


class Reference:
    """A client alone.

    Args:
        stacked: The client module for many clients.
        models: The client's models.

    Attributes:
        largest_gradient: Largest gradient of the client at the given weights; to be set by a trial.
    """

    def __init__(self, stacked: Stack, models: LocalModels) -> None:
        self.stacked = stacked
        self.models = models
        self.setup = models.setup
        self.largest_gradient = 0.0

    def enter(self, mode: Mode, state: Mapping[str, Tensor]) -> list[AloneClient]:
        """Return the models of a client in a state, with the client's inputs."""
        layout, models = self.setup.layout, self.models
        frozen = state_tensors(self.stacked.module)
        start = {name: state.get(name, frozen.get(name)) for name in layout.names}
        models.load(start, mode.anchored)  # type: ignore[arg-type]
        client = models.client
        if mode.remembers:
            client.remembered = {name: state[f"{MEMORY}{name}"] for name in self.stacked.memory}
        for name in SCALARS:
            getattr(client, name).copy_(state[name])
        for model in models.clients:
            model.module.log = model.module.log_dict = no_logs  # type: ignore[method-assign]
            if mode.anchored:
                model.set_anchor({n: state[f"{ANCHOR}{n}"] for n in self.stacked.live})
            if "class_counts" in state:
                model.class_counts = state["class_counts"]
        return models.clients

    def gradients(
        self,
        mode: Mode,
        state: Mapping[str, Tensor],
        leaves: list[Tensor],
        steps: bool = False,
    ) -> tuple[dict[str, Tensor | None], Tensor]:
        """Return the gradients of the parameters in a state, and the loss.

        Args:
            mode: The inputs of the training.
            state: The client's state and inputs.
            leaves: The tensors of a batch.
            steps: Whether to use the loss of a training step.
        """
        batch = self.setup.batch([leaf.clone() for leaf in leaves])
        gradients: dict[str, Tensor | None] = {}
        total = torch.zeros((), device=self.setup.device)
        for model in self.enter(mode, state):
            prefix = PERSONAL if model.shared is not None else ""
            with resting(model.module, self.setup.layout, self.stacked.training_phase):
                own = (
                    model.loss(batch, len(leaves[0]))
                    if steps
                    else model.client_method.objective(model, batch)
                )
                if own is None:
                    raise RuntimeError("its training_step returned no loss")
                total = total + own.detach()
                weights = {name: w for name, w in model.weights.items() if w.requires_grad}
                parts = torch.autograd.grad(own, list(weights.values()), allow_unused=True)
            names = (f"{prefix}{name}" for name in weights)
            gradients.update(zip(names, parts, strict=True))
        return gradients, total


def alike(
    stacked: Columns,
    losses: Tensor,
    alone: Sequence[tuple[Mapping[str, Tensor | None], Tensor]],
    tolerance: float,
    smallest: float = 0.0,
) -> bool:
    """Return whether the rows of stacked gradients and losses equal those of single clients.

    Args:
        stacked: Stacked gradients ``[C, ...]``.
        losses: Stacked losses ``[C]``.
        alone: Gradients and loss of each client alone.
        tolerance: Tolerated difference, relative to a client's largest gradient.
        smallest: Lower bound of the largest gradient in this comparison.
    """
    for row, (gradients, loss) in enumerate(alone):
        if not (losses[row] - loss).abs() <= tolerance * max(1.0, float(loss.abs())):
            return False
        known = {name: g for name, g in gradients.items() if g is not None and g.numel()}
        scale = max([smallest, *(float(g.abs().max()) for g in known.values())])
        for name, gradient in known.items():
            difference = (stacked[name][row] - gradient).abs().max()
            if not difference <= tolerance * scale + 1e-6:
                return False
    return True


class Audit:
    """Ends a run if clients get other results in a stack than alone.

    The audit is due in the 1st, 2nd, 4th, 8th round and so on, until a client has been compared.

    Args:
        reference: The client alone.

    Attributes:
        due: Whether the audit is due.
    """

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self.due = False
        self._round = -1  # the last round
        self._doubted = False  # whether the last client got other results alone

    def begin(self, round_index: int) -> None:
        """Make the audit due, if the round is one of its rounds."""
        if round_index > self._round:
            self._round = round_index
            self.due |= (round_index + 1).bit_count() == 1

    def select(self, group: Group, state: Mapping[str, Tensor]) -> dict[int, _Before]:
        """Return two clients of a group by row, before their gradients are computed.

        Args:
            group: The group with its batches.
            state: State and inputs of a chunk ``[C, ...]``.
        """
        found = {}
        for row in {0, len(group.leaves[0]) - 1}:
            count = group.size if isinstance(group.size, int) else int(group.size[row])
            own = {name: t[group.rows.start + row].clone() for name, t in state.items()}
            found[row] = own, [leaf[row, :count] for leaf in group.leaves]
        return found

    def check(self, selected: Mapping[int, _Before], gradients: Columns, losses: Tensor) -> None:
        """Raise if two clients in succession get other results alone than in a stack.

        A single client may be next to a kink, and rounding chooses its side. If a stack has only
        one client and it differs, the audit stays due.

        Args:
            selected: Clients of a group.
            gradients: The group's gradients ``[rows, ...]``.
            losses: The group's losses ``[rows]``.

        Raises:
            ConfigurationError: If both clients get other results.
        """
        for row, inputs in selected.items():
            found = {name: gradient[row] for name, gradient in gradients.items()}
            why = "gets other results alone"
            try:
                if not self.contradicts(*inputs, found, losses[row]):
                    self.due = self._doubted = False
                    return
            except Exception as error:
                why = f"fails alone: {reason_of(error)}"
            if self._doubted:
                name = type(self.reference.setup.client).__name__
                raise ConfigurationError(
                    f"round {self._round}: a {name} that trained together with others {why}, as "
                    "with numbers that it keeps outside of its tensors and that change from call "
                    "to call. Results so far are wrong: train with engine='sequential', or say "
                    f"vectorizable = False in {name}"
                )
            self._doubted = True

    def contradicts(
        self, state: Mapping[str, Tensor], leaves: list[Tensor], found: Columns, loss: Tensor
    ) -> bool:
        """Return whether a client gets other results alone than in a stack.

        Rounding errors of vanishing gradients are ignored: the tolerance is relative to the largest
        gradient of now and of the start.

        Args:
            state: The client's state with its inputs.
            leaves: The tensors of its batch.
            found: Its gradients in a stack.
            loss: Its loss in a stack.
        """
        reference, setup = self.reference, self.reference.setup
        with isolated(setup.device), torch.enable_grad():
            mode = reference.stacked.mode
            gradients, own_loss = reference.gradients(mode, state, leaves, steps=True)
        known = {n: g for n, g in gradients.items() if g is not None and n in found}
        numbers = [*known.values(), own_loss, loss, *(found[name] for name in known)]
        if not all(bool(number.isfinite().all()) for number in numbers):
            return False  # the client will fail by itself
        mixed = isinstance(setup.precision, MixedPrecision)
        tf32 = setup.dtype == torch.float32 and takes_tf32(setup.device)
        precise = setup.dtype.itemsize >= 4 and not mixed and not tf32
        tolerance, smallest = _ODD if precise else _ODD_IN_HALF, reference.largest_gradient
        stack = {name: found[name].unsqueeze(0) for name in known}
        alone = [(known, own_loss)]
        return not alike(stack, loss[None], alone, tolerance, _VANISHED * smallest)

"""A client alone, as in the sequential engine. Stacks are compared with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pflight.engines.alone.client import AloneClient
from pflight.engines.alone.models import LocalModels
from pflight.engines.phases import resting
from pflight.method import PERSONAL, Phase
from pflight.states.state import state_tensors

from .stack import ANCHOR, MEMORY, Columns, Mode, Stack, no_logs


class Reference:
    """A client alone.

    Args:
        stacked: The client module for many clients.
        models: The client's models.
    """

    def __init__(self, stacked: Stack, models: LocalModels) -> None:
        self.stacked = stacked
        self.models = models
        self.setup = models.setup

    def enter(self, mode: Mode, state: Mapping[str, Tensor]) -> list[AloneClient]:
        """Return the models of a client in a state, with the client's inputs."""
        layout, models = self.setup.layout, self.models
        frozen = state_tensors(self.stacked.module)
        start = {name: state.get(name, frozen.get(name)) for name in layout.names}
        models.load(start, mode.anchored)  # type: ignore[arg-type]
        client = models.client
        if mode.remembers:
            client.remembered = {name: state[f"{MEMORY}{name}"] for name in self.stacked.memory}
        for name in ("num_samples", "mean_samples", "seen", "num_steps"):
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
        phase: Phase | None = None,
        steps: bool = False,
    ) -> tuple[dict[str, Tensor | None], Tensor]:
        """Return the gradients of the parameters in a state, and the loss.

        Args:
            mode: The inputs of the training.
            state: The client's state and inputs.
            leaves: The tensors of a batch.
            phase: The phase, with the parameters that train.
            steps: Whether to use the loss of a training step.
        """
        assert self.setup.form is not None
        batch = self.setup.form.batch([leaf.clone() for leaf in leaves])
        gradients: dict[str, Tensor | None] = {}
        total = torch.zeros((), device=self.setup.device)
        for model in self.enter(mode, state):
            prefix = PERSONAL if model.shared is not None else ""
            with resting(model.module, self.setup.layout, phase):
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

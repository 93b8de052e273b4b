"""Losses and gradients that an algorithm requests beside training."""

from __future__ import annotations

from lightning import LightningModule
from tensordict import TensorDict

from pflight.engines.stacked.steps import clip
from pflight.errors import ConfigurationError
from pflight.states.state import entries
from pflight.task import Task


def clipped(client: LightningModule, gradients: TensorDict) -> TensorDict:
    """Clip clients' gradients ``[C]`` as the client module clips them in its steps.

    Args:
        client: The client module, with its option ``gradient_clip_val``.
        gradients: Gradients by parameter name ``[C]``; other entries are not clipped.
    """
    limit = getattr(client, "gradient_clip_val", None)
    if limit is None or not isinstance(client, Task):
        return gradients
    result = dict(entries(gradients))
    names = [name for name, _ in client.named_parameters() if name in result]
    parts = [result[name] for name in names]
    result.update(zip(names, clip(parts, limit, client.gradient_clip_algorithm), strict=True))
    return TensorDict(result, batch_size=gradients.batch_size)


def check_losses(
    module: LightningModule, algorithm: str, asked: str = "the loss of its clients"
) -> None:
    """Raise if a client module uses manual optimization. Then it has no single loss."""
    if not module.automatic_optimization:
        raise ConfigurationError(
            f"{algorithm} asks for {asked}, which {type(module).__name__} with manual optimization "
            "does not hand out"
        )


def check_gradients(module: LightningModule, algorithm: str) -> None:
    """Raise if a client module uses manual optimization. Then it has no single gradient."""
    check_losses(module, algorithm, "the gradient of training_step's loss")

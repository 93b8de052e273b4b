"""Gradients of clients' losses."""

from __future__ import annotations

from lightning import LightningModule
from tensordict import TensorDict

from pflight.engines.stacked import clip
from pflight.errors import ConfigurationError
from pflight.state import entries
from pflight.task import Task


def clipped(client: LightningModule, gradients: TensorDict) -> TensorDict:
    """Return clients' gradients ``[C]`` clipped as the client module clips those of its steps.

    Args:
        client: The client module, with its option ``gradient_clip_val``.
        gradients: Gradients by parameter name ``[C]``; other entries stay as they are.
    """
    limit = getattr(client, "gradient_clip_val", None)
    if limit is None or not isinstance(client, Task):
        return gradients
    result = dict(entries(gradients))
    names = [name for name, _ in client.named_parameters() if name in result]
    parts = [result[name] for name in names]
    result.update(zip(names, clip(parts, limit, client.gradient_clip_algorithm), strict=True))
    return TensorDict(result, batch_size=gradients.batch_size)


def check_gradients(module: LightningModule, algorithm: str) -> None:
    """Raise unless the gradients of a client module are those of its loss."""
    if not module.automatic_optimization:
        raise ConfigurationError(
            f"{algorithm} asks for the gradient of training_step's loss, which "
            f"{type(module).__name__} with manual optimization does not give"
        )

"""Gradients that clients take for themselves before they train."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from lightning import LightningModule
from tensordict import TensorDict
from torch import Tensor

from pflight.engines.stacked import clip
from pflight.errors import ConfigurationError
from pflight.state import entries
from pflight.task import Task

if TYPE_CHECKING:
    from pflight.federation import Federation


def own_gradients(federation: Federation, clients: Tensor, sent: TensorDict) -> TensorDict:
    """Return the gradient of each client's loss over all its samples, at what it is sent.

    Nothing travels, and no buffer changes. A client whose pass fails is left out and gets NaN,
    with which its training fails as well.

    Args:
        federation: Whose clients they are.
        clients: Ids ``[C]``.
        sent: What they are sent ``[C]``.

    Returns:
        Gradients by parameter name ``[C]``.
    """
    updates = federation.attached_engine.gradients(
        clients, federation.complete(clients, sent), round_index=federation.current_epoch
    )
    gradients = updates.states.select(*federation.layout.parameters)
    federation.note_failures(updates.failures, "to take its gradient")
    if not updates.failures:
        return gradients
    nans = {name: torch.full_like(sent[name], torch.nan) for name in federation.layout.parameters}
    everybody = TensorDict(nans, batch_size=[len(clients)])
    everybody[torch.isin(clients, updates.clients)] = gradients
    return everybody


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


def check_gradients(federation: Federation, algorithm: str) -> None:
    """Raise unless the gradients of a client are those of its loss."""
    client = federation.client
    if not client.automatic_optimization:
        raise ConfigurationError(
            f"{algorithm} asks for the gradient of training_step's loss, which "
            f"{type(client).__name__} with manual optimization does not give"
        )

"""Gradients of clients' losses, taken before they train."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from lightning import LightningModule
from tensordict import TensorDict
from torch import Tensor

from pflight.clients import Clients
from pflight.errors import ConfigurationError
from pflight.stacking.steps import clip
from pflight.state import entries
from pflight.task import Task

if TYPE_CHECKING:
    pass


def own_gradients(clients: Clients, ids: Tensor, sent: TensorDict) -> TensorDict:
    """Return the gradient of each client's loss over all its samples, at the model it is sent.

    Nothing travels, and no buffer changes. A client that fails gets NaN, so that its training fails
    as well.

    Args:
        clients: The clients.
        ids: Ids of the clients ``[C]``.
        sent: The models that they are sent ``[C]``.

    Returns:
        Gradients by parameter name ``[C]``.
    """
    updates = clients.attached_engine.gradients(
        ids, clients.completed(ids, sent), round_index=clients.current.entry.index
    )
    parameters = clients.layout.parameters
    gradients = updates.states.select(*parameters)
    clients.note_failures(updates.failures, "to take its gradient")
    if not updates.failures:
        return gradients
    nans = {name: torch.full_like(sent[name], torch.nan) for name in parameters}
    everybody = TensorDict(nans, batch_size=[len(ids)])
    everybody[torch.isin(ids, updates.clients)] = gradients
    return everybody


def clipped(client: LightningModule, gradients: TensorDict) -> TensorDict:
    """Clip clients' gradients ``[C]`` as the client module clips those of its steps.

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


def check_gradients(module: LightningModule, algorithm: str) -> None:
    """Raise if a client module uses manual optimization, so that it has no single gradient."""
    if not module.automatic_optimization:
        raise ConfigurationError(
            f"{algorithm} asks for the gradient of training_step's loss, which "
            f"{type(module).__name__} with manual optimization does not give"
        )

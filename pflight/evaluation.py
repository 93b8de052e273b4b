"""Which models are judged, and the tags under which their quality is logged."""

from __future__ import annotations

import torch
from torch import Tensor

from .engines import Evaluation
from .metrics import ClientMetrics, F1Average

USED = ""
"""Tag prefix of the model that a client would use."""
SERVER = "server/"
"""Tag prefix of the model that the server would send it."""
FINETUNED = "finetuned/"
"""Tag prefix of that model after fine-tuning."""


class Evaluator:
    """Gathers the quality of several models of every client over one pass through the data.

    Args:
        models: The tag prefixes of the models that are judged.
        num_clients: Number of clients.
        num_classes: Number of classes.
        f1_average: As in :class:`~pflight.metrics.ClientMetrics`.
        device: Where the outputs come from.
    """

    def __init__(
        self,
        models: tuple[str, ...],
        num_clients: int,
        num_classes: int,
        f1_average: F1Average,
        device: torch.device,
    ) -> None:
        self._metrics = {
            model: ClientMetrics(num_clients, num_classes, f1_average=f1_average).to(device)
            for model in models
        }

    def add(self, model: str, outputs: Evaluation) -> None:
        """Count the outputs of one model of some clients."""
        self._metrics[model].update(
            outputs.clients, outputs.logits.argmax(dim=1), outputs.targets, outputs.losses
        )

    def means(self, prefix: str, clients: Tensor) -> dict[str, float]:
        """Return ``{prefix}/{model}{metric}`` over some clients ``[C]``, those of all ranks."""
        return {
            f"{prefix}/{model}{name}": value.item()
            for model, metrics in self._metrics.items()
            for name, value in metrics.compute(clients).items()
        }

    def per_client(self, model: str = USED) -> dict[str, Tensor]:
        """Return every client's ``acc``, ``f1``, ``loss`` and ``num_samples``, each ``[num_clients]``."""
        return {name: value.cpu() for name, value in self._metrics[model].per_client().items()}

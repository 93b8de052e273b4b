"""The proximal client of FedProx and FeSEM."""

from __future__ import annotations

from typing import Any, Literal

from pflight.method import half_for
from pflight.options import checked

from .classifier import Classifier
from .halves.proximal import Proximal


@checked
class ProximalClient(Classifier):
    """A classifier with a penalty on the distance of its parameters to what the server sent.

    It names :class:`~pflight.models.halves.Proximal` as its client half, for server callbacks
    without a half of their own. By itself it trains like a :class:`Classifier`.

    Args:
        *args: As in :class:`Classifier`.
        mu: Weight of the penalty; 0 gives plain training.
        scaling: ``"plain"`` or ``"eq7"``.
        **kwargs: As in :class:`Classifier`.

    Raises:
        ConfigurationError: If an option is out of range.

    Example:
        >>> import torch
        >>> ProximalClient(torch.nn.Linear(4, 2), num_classes=2, mu=0.1).client_half.mu
        0.1
    """

    def __init__(
        self,
        *args: Any,
        mu: float = 0.1,
        scaling: Literal["plain", "eq7"] = "plain",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.client_half = half_for(self, Proximal, mu=mu, scaling=scaling)

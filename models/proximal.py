"""The proximal client of FedProx and FeSEM."""

from __future__ import annotations

from typing import Any, Literal

from pflight.method import client_method_for
from pflight.options import checked

from .classifier import Classifier
from .client_methods.proximal import Proximal


@checked
class ProximalClient(Classifier):
    """A classifier with a penalty on the distance of its parameters to the server's.

    It names :class:`~pflight.models.client_methods.Proximal` as its client method, for server
    callbacks without a client method of their own. By itself it trains like a :class:`Classifier`.

    Args:
        *args: As in :class:`Classifier`.
        mu: Weight of the penalty; 0 gives plain training.
        scaling: ``"plain"`` or ``"eq7"``.
        **kwargs: As in :class:`Classifier`.

    Raises:
        ConfigurationError: If an option is out of range.

    Example:
        >>> import torch
        >>> ProximalClient(torch.nn.Linear(4, 2), num_classes=2, mu=0.1).client_method.mu
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
        self.client_method = client_method_for(self, Proximal, mu=mu, scaling=scaling)

"""The elastic client of FedEC."""

from __future__ import annotations

from typing import Any, Literal

from pflight.method import client_method_for
from pflight.options import checked

from .classifier import Classifier
from .client_methods.elastic import Elastic


@checked
class ElasticClient(Classifier):
    """A classifier that is constrained to stay near its model after its last participation.

    It names :class:`~pflight.models.client_methods.Elastic` as its client method, for server
    callbacks without a client method of their own. By itself it trains like a :class:`Classifier`.

    Args:
        *args: As in :class:`Classifier`.
        alpha: Weight of the constraint; 0 gives plain training.
        constraint: ``"kl"``, ``"l2"`` or ``None``.
        **kwargs: As in :class:`Classifier`.

    Raises:
        ConfigurationError: If an option is out of range.

    Example:
        >>> import torch
        >>> ElasticClient(torch.nn.Linear(4, 2), num_classes=2).client_method.constraint
        'kl'
    """

    def __init__(
        self,
        *args: Any,
        alpha: float = 1.0,
        constraint: Literal["kl", "l2"] | None = "kl",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.client_method = client_method_for(self, Elastic, alpha=alpha, constraint=constraint)

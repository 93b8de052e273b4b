"""Ditto: FedAvg beside personal models that are pulled to its model."""

from __future__ import annotations

from typing import ClassVar

from pflight.models import DittoClient
from pflight.models.personal import PersonalClient

from .personal import PersonalFedAvg


class Ditto(PersonalFedAvg):
    """Ditto (Li et al. 2021, algorithm 1): FedAvg whose clients keep personal models.

    The shared model is that of FedAvg, whatever the personal ones are; how these are trained is
    :class:`~pflight.models.DittoClient`'s. Traffic is FedAvg's. A client is judged by its personal
    model, which for a newcomer is the shared one.

    Args:
        weighting: As in :class:`FedAvg`.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`; a personal model's stay with it.

    Raises:
        ConfigurationError: If an option is out of range, or the client is of another kind.

    References:
        Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021,
        https://arxiv.org/abs/2012.04221.
    """

    client_kind: ClassVar[type[PersonalClient]] = DittoClient

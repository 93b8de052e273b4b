"""Ditto: FedAvg, and personal models pulled to its model."""

from __future__ import annotations

from typing import Literal

from pflight.models.client_methods.personal import Personal
from pflight.models.client_methods.proximal import Proximal
from pflight.options import NonNegativeFloat, checked

from .personal import PersonalFedAvg
from .registry import Method


@checked
class Ditto(PersonalFedAvg):
    r"""Ditto (Li et al. 2021, algorithm 1): FedAvg with personal models of its clients.

    The shared model is FedAvg's. Personal models don't influence it. On the same batches each
    client trains a copy of its module, :math:`v_i`, on

    .. math:: f_i(v_i) + \frac{\lambda}{2} \|v_i - \theta\|^2

    with the server's model :math:`\theta` (objective (Ditto)). Traffic is FedAvg's. A client is
    judged by its personal model. A newcomer's is the shared model.

    Args:
        lam: Weight :math:`\lambda` of the pull; with 0 the personal models are trained alone. By
            default 0.1, or the value of the client's own client method.
        weighting: As in :class:`FedAvg`.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`; personal models keep their own
            buffers.

    Raises:
        ConfigurationError: If an option is out of range, or the client names another client method.

    References:
        Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021,
        https://arxiv.org/abs/2012.04221.
    """

    def __init__(
        self,
        weighting: Literal["samples", "uniform"] = "samples",
        buffers: Literal["shared", "local", "reset"] = "shared",
        *,
        lam: NonNegativeFloat | None = None,
    ) -> None:
        super().__init__(weighting, buffers)
        self.client_method = Personal(self.use_client_method(Proximal, mu=lam))


METHODS = (Method("Ditto", Ditto, "Ditto(lam=0.1)", "its own model"),)

"""APFL: FedAvg, and personal models mixed with its model."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from pflight.method import OWN
from pflight.models.client_methods.apfl import Mixed
from pflight.models.client_methods.personal import Personal
from pflight.options import checked

from .personal import PersonalFedAvg
from .registry import Method


@checked
class APFL(PersonalFedAvg):
    r"""Adaptive personalized federated learning (Deng et al. 2020, algorithm 1).

    The shared model is FedAvg's. A client is judged by
    :math:`\alpha_i v_i + (1 - \alpha_i)\,\theta`, a mixture of its own model and the server's
    current one. Parameters and floating-point buffers are mixed alike. A client's own model and its
    :math:`\alpha_i` never travel. A newcomer's own model is the server's. Clients train as in
    :class:`~pflight.models.client_methods.Mixed`.

    Args:
        alpha: Share :math:`\alpha` of the client's own model, or its initial value; by default 0.5,
            or the value of the client's own client method.
        alpha_lr: Step of an adaptive :math:`\alpha`; ``None`` leaves it fixed.
        weighting: As in :class:`FedAvg`.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`; the own models keep their own
            buffers.

    Raises:
        ConfigurationError: If an option is out of range, or the client names another client method.

    References:
        Deng et al., Adaptive Personalized Federated Learning, 2020,
        https://arxiv.org/abs/2003.13461.
    """

    def __init__(
        self,
        weighting: Literal["uniform", "samples"] = "uniform",
        buffers: Literal["shared", "local", "reset"] = "shared",
        *,
        alpha: float | None = None,
        alpha_lr: float | None = None,
    ) -> None:
        super().__init__(weighting, buffers)
        self.client_method = Personal(self.use_client_method(Mixed, alpha=alpha, alpha_lr=alpha_lr))

    @property
    def algorithm_name(self) -> str:
        """APFL, and whether its mixing weights are trained."""
        mixture: Any = self.clients.client_method.personal
        return "APFL" + " (adaptive)" * (mixture.alpha_lr is not None)

    def mixing(self, clients: Tensor) -> Tensor:
        r"""Return :math:`\alpha_i` of the clients ``[C]``."""
        return self.personalize(clients)[f"{OWN}alpha"]


METHODS = (
    Method(
        "APFL",
        APFL,
        "APFL(alpha=0.5)",
        "a mixture of two models",
        tested={"": {}, "adaptive": {"alpha_lr": 0.1}},
    ),
)

"""FedProx: FedAvg with a penalty that pulls clients towards the server's model."""

from __future__ import annotations

from typing import Literal

from pflight.fedavg import FedAvg
from pflight.models.client_methods.proximal import Proximal
from pflight.options import checked

from .registry import Method


@checked
class FedProx(FedAvg):
    r"""FedProx (Li et al. 2020, algorithm 2): FedAvg with a proximal penalty of clients.

    Each client minimises :math:`f_i(w) + \frac{\mu}{2}\|w - \theta\|^2` (eq. 2), where
    :math:`\theta` is the model that the server sent. With ``mu=0`` it is FedAvg.

    Args:
        mu: Weight of the penalty; by default 0.1, or the value of the client module's own client
            method.
        scaling: ``"plain"``, the default, or ``"eq7"``, as in
            :class:`~pflight.models.client_methods.Proximal`.
        weighting: As in :class:`FedAvg`.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.

    Raises:
        ConfigurationError: If an option is out of range.

    Example:
        >>> FedProx(mu=0.01).client_method.mu
        0.01

    References:
        Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020,
        https://arxiv.org/abs/1812.06127.
    """

    algorithm_name = FedAvg.algorithm_name

    def __init__(
        self,
        mu: float | None = None,
        scaling: Literal["plain", "eq7"] | None = None,
        weighting: Literal["samples", "uniform"] = "samples",
        buffers: Literal["shared", "local", "reset"] = "shared",
    ) -> None:
        super().__init__(weighting, buffers)
        self.use_client_method(Proximal, mu=mu, scaling=scaling)


METHODS = (Method("FedProx", FedProx, "FedProx(mu)", "the server's model", manual=True),)

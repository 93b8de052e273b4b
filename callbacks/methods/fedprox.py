"""FedProx: FedAvg with clients that are pulled towards the server's model."""

from __future__ import annotations

from typing import Literal

from pflight.fedavg import FedAvg
from pflight.half import Half
from pflight.models.halves.proximal import Proximal
from pflight.options import checked


@checked
class FedProx(FedAvg):
    r"""FedProx (Li et al. 2020, algorithm 2): FedAvg of clients with a proximal penalty.

    Each client minimises :math:`f_i(w) + \frac{\mu}{2}\|w - \theta\|^2` (eq. 2) with
    :math:`\theta` what the server sent, whatever its module. With ``mu=0`` it is FedAvg.

    Args:
        mu: Weight of the penalty.
        scaling: As in :class:`~pflight.models.halves.Proximal`.
        weighting: As in :class:`FedAvg`.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.

    Raises:
        ConfigurationError: If an option is out of range.

    Example:
        >>> FedProx(mu=0.01).half.mu
        0.01

    References:
        Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020,
        https://arxiv.org/abs/1812.06127.
    """

    def __init__(
        self,
        mu: float = 0.1,
        scaling: Literal["plain", "eq7"] = "plain",
        weighting: Literal["samples", "uniform"] = "samples",
        buffers: Literal["shared", "local", "reset"] = "shared",
    ) -> None:
        super().__init__(weighting, buffers)
        self._half = self.make_half(Proximal, mu=mu, scaling=scaling)

    @property
    def half(self) -> Half:
        """The proximal penalty."""
        return self._half

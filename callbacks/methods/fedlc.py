"""FedLC: clients lower the logits of classes with few samples."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from pflight.fedavg import FedAvg
from pflight.options import NonNegativeFloat, checked

from .logits import AdjustedLogits
from .registry import Method

_ABSENT = -1e4  # removes a class from the softmax
_FEW = 1e-8  # counted samples of a class without samples


@checked
class CalibratedLogits(AdjustedLogits):
    r"""FedLC's client: it minimises :math:`\mathrm{CE}(z - \tau n_i^{-1/4}, y)` of its logits z.

    The fewer samples a class has, the larger a margin its logit :math:`z_c` needs (Zhang et al.
    2022). As in all code, the denominator includes the true class. Without it the loss has no lower
    bound.

    Args:
        tau: :math:`\tau`.
        absent: Treatment of classes without samples. ``"masked"`` removes them from the softmax.
            ``"counted"`` counts :math:`10^{-8}` samples, and shifts their logits by
            :math:`100\,\tau`.

    """

    def __init__(
        self, tau: NonNegativeFloat = 1.0, absent: Literal["masked", "counted"] = "masked"
    ) -> None:
        self.tau = tau
        self.absent = absent

    def adjusted(self, logits: Tensor, counts: Tensor) -> Tensor:
        """Return the logits ``[n, K]``, shifted by class."""
        shifted = logits - self.tau * counts.clamp(min=_FEW) ** -0.25
        return torch.where(counts > 0, shifted, _ABSENT) if self.absent == "masked" else shifted


@checked
class FedLC(FedAvg):
    r"""Federated learning via logits calibration (Zhang et al. 2022).

    The server is FedAvg's. Clients train as in :class:`CalibratedLogits`, and are judged by
    unshifted logits. A client with a single class learns nothing: it returns the received model,
    with the weight of its samples.

    Args:
        tau: :math:`\tau`; by default 1, or the value of the client's own client method. With 0 and
            ``absent="counted"`` this is FedAvg.
        absent: ``"masked"``, the default, or ``"counted"``, as in :class:`CalibratedLogits`.
        weighting: As in :class:`FedAvg`.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.

    Raises:
        ConfigurationError: If an option is out of range, or the client has no classes or no head.

    Example:
        >>> FedLC(tau=0.5).client_method.tau
        0.5

    References:
        Zhang et al., Federated Learning with Label Distribution Skew via Logits Calibration, ICML
        2022, https://arxiv.org/abs/2209.00189.
    """

    def __init__(
        self,
        tau: float | None = None,
        absent: Literal["masked", "counted"] | None = None,
        weighting: Literal["samples", "uniform"] = "samples",
        buffers: Literal["shared", "local", "reset"] = "shared",
    ) -> None:
        super().__init__(weighting, buffers)
        self.use_client_method(CalibratedLogits, tau=tau, absent=absent)


METHODS = (
    Method(
        "FedLC",
        FedLC,
        "FedLC(tau, absent)",
        "the server's model",
        needs="a head and classes",
        tested={"": {}, "counted": {"tau": 0.5, "absent": "counted"}},
    ),
)

"""FedRS: clients scale down the logits of their missing classes."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from pflight.fedavg import FedAvg
from pflight.options import ClosedUnitInterval, checked

from .logits import AdjustedLogits
from .registry import Method


@checked
class RestrictedSoftmax(AdjustedLogits):
    r"""FedRS' client: it minimises :math:`\mathrm{CE}(s_i \odot z, y)` of its logits :math:`z`.

    Without scaling, every step of a client lowers the logits of its missing classes, for all
    inputs. A smaller :math:`s_{ic}` reduces this (Li and Zhan 2021).

    Args:
        a: :math:`\alpha`, the scale of a class without samples. 1 gives plain training. With 0 its
            logit is the constant 0.
        scaling: ``"hard"`` for :math:`s_{ic} = 1` for classes with samples and a for others, as in
            the paper. ``"soft"`` for :math:`s_{ic} = a + (1 - a)\, n_{ic} / \max_k n_{ik}`, as in
            the authors' code.

    """

    def __init__(
        self, a: ClosedUnitInterval = 0.5, scaling: Literal["hard", "soft"] = "hard"
    ) -> None:
        self.a = a
        self.scaling = scaling

    def adjusted(self, logits: Tensor, counts: Tensor) -> Tensor:
        """Return the logits ``[n, K]``, scaled by class."""
        share = counts / counts.amax().clamp(min=1) if self.scaling == "soft" else counts > 0
        return logits * (self.a + (1 - self.a) * share.to(logits))


@checked
class FedRS(FedAvg):
    r"""Federated learning with a restricted softmax (Li and Zhan 2021).

    The server is FedAvg's. Clients train as in :class:`RestrictedSoftmax`, and are judged by
    unscaled logits.

    Args:
        a: :math:`\alpha`, the scale of the logits of missing classes; by default 0.5, or the value
            of the client's own client method. 1 is FedAvg.
        scaling: ``"hard"``, the default, or ``"soft"``, as in :class:`RestrictedSoftmax`.
        weighting: As in :class:`FedAvg`.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.

    Raises:
        ConfigurationError: If an option is out of range, or the client has no classes or no head.

    Example:
        >>> FedRS(a=0.1).client_method.a
        0.1

    References:
        Li and Zhan, FedRS: Federated Learning with Restricted Softmax for Label Distribution
        Non-IID Data, KDD 2021, https://doi.org/10.1145/3447548.3467254.
    """

    def __init__(
        self,
        a: float | None = None,
        scaling: Literal["hard", "soft"] | None = None,
        weighting: Literal["samples", "uniform"] = "samples",
        buffers: Literal["shared", "local", "reset"] = "shared",
    ) -> None:
        super().__init__(weighting, buffers)
        self.use_client_method(RestrictedSoftmax, a=a, scaling=scaling)


METHODS = (
    Method(
        "FedRS",
        FedRS,
        "FedRS(a, scaling)",
        "the server's model",
        needs="a head and classes",
        tested={"": {}, "soft": {"a": 0.1, "scaling": "soft"}},
    ),
)

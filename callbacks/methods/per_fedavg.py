"""Per-FedAvg: FedAvg of models that are good after one step of adaptation."""

from __future__ import annotations

from typing import Any, Literal

from pflight.fedavg import FedAvg
from pflight.models.client_methods.per_fedavg import Adapted
from pflight.options import checked

from .registry import Method


@checked
class PerFedAvg(FedAvg):
    r"""Personalized FedAvg (Fallah et al. 2020, algorithm 1): model-agnostic meta-learning.

    The server is FedAvg's. Clients train and are judged as in
    :class:`~pflight.models.client_methods.Adapted`.

    Args:
        alpha: Step :math:`\alpha`, as in :class:`~pflight.models.client_methods.Adapted`; by
            default 0.01, or the value of the client's own client method.
        hessian: Whether to differentiate through the adaptation; by default not.
        steps: Steps of adaptation before a client is judged; by default 1, or the value of the
            client's own client method.
        weighting: As in :class:`FedAvg`.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.

    Raises:
        ConfigurationError: If an option is out of range, or the client names another client method.

    References:
        Fallah et al., Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
        Meta-Learning Approach, NeurIPS 2020, https://arxiv.org/abs/2002.07948.
    """

    def __init__(
        self,
        steps: int | None = None,
        weighting: Literal["uniform", "samples"] = "uniform",
        buffers: Literal["shared", "local", "reset"] = "shared",
        *,
        alpha: float | None = None,
        hessian: bool | None = None,
    ) -> None:
        super().__init__(weighting, buffers)
        self.use_client_method(Adapted, alpha=alpha, hessian=hessian, steps=steps)

    @property
    def algorithm_name(self) -> str:
        """Per-FedAvg, with its treatment of second derivatives."""
        client_method: Any = self.clients.client_method
        return f"Per-FedAvg ({'HF' if client_method.hessian else 'FO'})"


METHODS = (
    Method(
        "Per-FedAvg",
        PerFedAvg,
        "PerFedAvg(steps, alpha=0.01)",
        "a copy after some steps",
        tested={"": {"steps": 0}},
    ),
)

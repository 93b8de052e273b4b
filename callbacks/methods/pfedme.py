"""pFedMe: personal models stay near local models, and the server averages the local models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pflight.fedavg import FedAvg
from pflight.models.client_methods.pfedme import MoreauEnvelope
from pflight.options import PositiveFloat, checked

from .registry import Method


@checked
class PFedMe(FedAvg):
    r"""Federated learning with Moreau envelopes (T. Dinh et al. 2020, algorithm 1).

    The server's model moves by

    .. math:: w \leftarrow (1 - \beta)\,w + \beta \sum_{i \in S} p_i w_i

    over the clients that answered. Buffers are averaged. Clients train and are judged as in
    :class:`~pflight.models.client_methods.MoreauEnvelope`. ``finetune_epochs`` tune the judged
    models.

    Args:
        beta: Step :math:`\beta` of the default server optimizer, SGD.
        weighting: As in :class:`FedAvg`; the paper has ``"uniform"``, its code ``"samples"``.
        train_newcomers: Whether newcomers train before they are judged, as in
            :class:`~pflight.models.client_methods.MoreauEnvelope`; by default true, or the value of
            the client's own client method.
        train_all: Whether clients outside the cohort train as well, as in the paper. They are sent
            the server's model and keep their personal one, but send nothing back.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.
        lam: As in :class:`~pflight.models.client_methods.MoreauEnvelope`, with the same default, or
            the value of the client's own client method. The same holds for the following options.
        personal_lr: Inner step.
        personal_steps: Inner steps on a batch.
        mu: Weight decay of the inner steps.

    Raises:
        ConfigurationError: If an option is out of range, or the client names another client method.

    References:
        T. Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020,
        https://arxiv.org/abs/2006.08848.
    """

    aggregates = False

    algorithm_name = "pFedMe"

    def __init__(
        self,
        beta: PositiveFloat = 1.0,
        weighting: Literal["samples", "uniform"] = "samples",
        train_newcomers: bool | None = None,
        train_all: bool = False,
        buffers: Literal["shared", "local", "reset"] = "shared",
        *,
        lam: float | None = None,
        personal_lr: float | None = None,
        personal_steps: int | None = None,
        mu: float | None = None,
    ) -> None:
        super().__init__(weighting, buffers)
        self.beta = beta
        self.train_all = train_all
        self.use_client_method(
            MoreauEnvelope,
            lam=lam,
            personal_lr=personal_lr,
            personal_steps=personal_steps,
            mu=mu,
            train_newcomers=train_newcomers,
        )

    def configure_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Return SGD with the outer step."""
        return torch.optim.SGD(parameters, lr=self.beta)

    def round(self, cohort: Tensor) -> None:
        """Run a round. All other clients may train for themselves."""
        if self.train_all:
            everybody = self.clients.trainable.to(cohort.device)
            others = everybody[~torch.isin(everybody, cohort)]
            for _ in self.clients.train(others, self.broadcast, returns=()):
                pass
        super().round(cohort)


METHODS = (
    Method(
        "pFedMe",
        PFedMe,
        "PFedMe(beta, lam=15.0)",
        "its own model",
        tested={"": {"train_newcomers": False}},
    ),
)

"""FedDANE: clients train on losses corrected by the mean gradient."""

from __future__ import annotations

import copy
from typing import Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from pflight.fedavg import FedAvg
from pflight.method import OWN
from pflight.models.client_methods.corrected import Dane
from pflight.options import checked
from pflight.randomness import Purpose, derive_seed
from pflight.states.state import WeightedMean, entries

from .gradients import check_gradients
from .registry import Method


@checked
class FedDANE(FedAvg):
    r"""Federated Newton-type method (Li et al. 2019, algorithm 2).

    A round has two phases. The clients of the cohort :math:`S` send their gradients at
    :math:`\theta` over all their samples, and the server takes the mean

    .. math:: g = \sum_{i \in S} w_i \nabla f_i(\theta).

    Then the server draws a second set :math:`S'` of the same size, and sends it :math:`g`. Each
    client corrects its loss by :math:`\langle g - \nabla f_i(\theta), w - \theta \rangle` and
    trains, as in :class:`~pflight.models.client_methods.Dane`. The server takes the mean of the
    models. Clients in both sets are sent :math:`\theta` once. Buffers change in the second phase
    only.

    Args:
        same_set: Let the clients of the first phase train in the second.
        weighting: Weights in both means, as in :class:`FedAvg`.
        mu: Weight of the proximal penalty; by default 0.1, or the value of the client's own client
            method.

    Raises:
        ConfigurationError: If the client names another client method or its optimization is manual.

    References:
        Li et al., FedDANE: A Federated Newton-Type Method, 2019, https://arxiv.org/abs/2001.01920.
    """

    aggregates = False

    def __init__(
        self,
        same_set: bool = False,
        weighting: Literal["samples", "uniform"] = "samples",
        mu: float | None = None,
    ) -> None:
        super().__init__(weighting)
        self.same_set = same_set
        self.use_client_method(Dane, mu=mu)

    def setup_server(self) -> None:
        """Make the server's model."""
        check_gradients(self.clients.module, "FedDANE")
        super().setup_server()

    def round(self, cohort: Tensor) -> None:
        """Collect gradients from the cohort, then models from the second set."""
        parameters = self.shared_parameters
        self.informed = cohort[:0]  # clients that have been sent the model
        self.mean = WeightedMean(self.server.tensors(0, parameters))
        for updates in self.clients.gradients(cohort, self.broadcast, returns=parameters):
            self.receive(updates)
        self.mean.all_reduce()
        if not self.mean.weights[0] > 0:
            return
        gradient = self.mean.compute()[0]
        self.informed = cohort
        self.on_round_start()

        def send(clients: Tensor) -> TensorDict:
            sent = self.broadcast(clients)
            for name, mean in entries(gradient):
                sent[f"{OWN}correction.{name}"] = mean.expand(len(clients), *mean.shape)
            return sent

        for updates in self.clients.train(self.second_set(cohort), send):
            self.receive(updates)
        self.set_pseudo_gradients()

    def second_set(self, cohort: Tensor) -> Tensor:
        """Return the clients of the second phase ``[S']``."""
        if self.same_set:
            return cohort
        cohorts = copy.copy(self.clients.cohorts)
        cohorts.seed = derive_seed(Purpose.COHORT, cohorts.seed)
        return cohorts.sample(self.clients.current.entry.index).to(cohort.device)

    def bytes_down(self, clients: Tensor, sent: TensorDict) -> int:
        """Return the bytes sent to the clients ``[C]``: the model if they lack it, and g."""
        model = sent.select(*self.sent_names)
        lacking = clients[~torch.isin(clients, self.informed)]
        gradient = sent.exclude(*self.sent_names)
        return super().bytes_down(lacking, model) + super().bytes_down(clients, gradient)


METHODS = (
    Method(
        "FedDANE",
        FedDANE,
        "FedDANE(same_set, mu=0.1)",
        "the server's model",
        tested={"": {"same_set": True}},
    ),
)

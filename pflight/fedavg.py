"""FedAvg: the server's model becomes the mean of the clients' models."""

from __future__ import annotations

from typing import Literal

import torch
from tensordict import TensorDict

from .optim import Yogi
from .options import checked
from .server_callback import ServerCallback
from .states.updates import ClientUpdates

_STEPPED = {torch.optim.Adam: "FedAdam", torch.optim.Adagrad: "FedAdagrad", Yogi: "FedYogi"}


@checked
class FedAvg(ServerCallback):
    r"""Federated averaging (McMahan et al. 2017, algorithm 1).

    The pseudo-gradient is :math:`\theta - \sum_{i \in S} w_i \theta_i`. The default server
    optimizer is SGD with step 1. It sets the server's model to the mean of the returned models.
    With a :class:`~pflight.models.ProximalClient` the algorithm is FedProx.

    Args:
        weighting: ``"samples"`` for :math:`w_i = n_i / \sum_{j \in S} n_j`, ``"uniform"`` for
            :math:`w_i = 1 / |S|`. ``S`` are the clients that answered in the round.
        buffers: As in :class:`ServerCallback`.

    With ``aggregate="product"`` the factors of low-rank adapters become those of the clients' mean
    product (FlexLoRA). Most methods with a mean of models have this option.

    Attributes:
        mean: The :class:`~pflight.states.state.WeightedMean` of the round's models so far.

    Example:
        >>> FedAvg(weighting="uniform").weighting
        'uniform'
    """

    aggregates = True

    def __init__(
        self,
        weighting: Literal["samples", "uniform"] = "samples",
        buffers: Literal["shared", "local", "reset"] = "shared",
    ) -> None:
        super().__init__(buffers)
        self.weighting = weighting

    @property
    def algorithm_name(self) -> str:
        """FedAvg, or its name with the client method and the server optimizer in use."""
        name = getattr(self.clients.client_method, "fedavg_name", None)
        names = [] if name is None else [name]
        if self.server.build_optimizer is not None:
            optimizer = self.server.build_optimizer(list(self.server.parameters()))
            names += [_STEPPED[type(optimizer)]] if type(optimizer) in _STEPPED else []
            sgd = type(optimizer) is torch.optim.SGD
            names += ["FedAvgM"] if sgd and optimizer.defaults["momentum"] else []
        return " + ".join(names) or "FedAvg"

    def on_round_start(self) -> None:
        """Start a new mean."""
        self.mean = self.new_mean()

    def receive(self, updates: ClientUpdates) -> None:
        """Add a chunk's models to the mean."""
        counts = updates.num_samples
        weights = counts if self.weighting == "samples" else counts.new_ones(len(counts))
        self.mean.add(updates.states, weights)

    def set_pseudo_gradients(self) -> None:
        """Set the server's pseudo-gradient by the result of :meth:`aggregate`."""
        self.mean.all_reduce()
        if self.mean.weights[0] > 0:
            self.server.set_pseudo_gradient(0, self.aggregate(self.mean.compute()[0]))

    def aggregate(self, mean: TensorDict) -> TensorDict:
        """Return the target of the server's step, by default the mean of the clients' models.

        Args:
            mean: Mean of the models of the clients that answered. The clients' weights add up to
                ``self.mean.weights[0]``.
        """
        return mean

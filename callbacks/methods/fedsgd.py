"""FedSGD: clients send gradients, and the server takes the step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from pflight.fedavg import FedAvg
from pflight.options import PositiveFloat, PositiveInt, checked

from .gradients import check_gradients, clipped
from .registry import Method


@checked
class FedSGD(FedAvg):
    r"""Federated SGD (McMahan et al. 2017): :math:`\theta \leftarrow \theta - \eta \sum_i w_i g_i`.

    :math:`g_i` is the gradient of client i's loss at the server's model, in training mode, clipped
    as in the client module. This equals FedAvg with one full-batch local step.

    Args:
        lr: Step size :math:`\eta` of the default server optimizer, SGD.
        weighting: As in :class:`FedAvg`.
        batches: Number of mini-batches for a gradient, by default all samples.
        buffers: As in :class:`ServerCallback`.
    """

    aggregates = False

    sends_gradients = True

    def __init__(
        self,
        lr: PositiveFloat = 0.01,
        weighting: Literal["samples", "uniform"] = "samples",
        batches: PositiveInt | None = None,
        buffers: Literal["shared", "local", "reset"] = "shared",
    ) -> None:
        super().__init__(weighting, buffers)
        self.lr = lr
        self.batches = batches

    def setup_server(self) -> None:
        """Make the server's model, and raise for clients with manual optimization."""
        super().setup_server()
        check_gradients(self.clients.module, "FedSGD")
        active = {one.name for one in self.active_modifiers}
        if "proximal" in active:
            rank_zero_warn("FedSGD + Proximal is FedSGD: where a gradient is taken, the pull is 0")
        if "private" in active:
            rank_zero_warn(
                "FedSGD + Private: clients take no step, so private layers stay as they are"
            )

    def configure_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Return SGD with this callback's step size."""
        return torch.optim.SGD(parameters, lr=self.lr)

    def round(self, cohort: Tensor) -> None:
        """Broadcast the model, collect gradients, and step."""
        self.on_round_start()
        for updates in self.clients.gradients(cohort, self.broadcast, batches=self.batches):
            gradients = clipped(self.clients.module, updates.states)
            self.receive(replace(updates, states=gradients))
        self.set_pseudo_gradients()

    def set_pseudo_gradients(self) -> None:
        """Set the server's gradient to the mean of the clients' gradients."""
        self.mean.all_reduce()
        if self.mean.weights[0] > 0:
            self.server.set_gradients(0, self.mean.compute()[0])


METHODS = (
    Method(
        "FedSGD",
        FedSGD,
        "FedSGD(lr)",
        "the server's model",
        tested={"": {}, "batches": {"batches": 1}},
    ),
)

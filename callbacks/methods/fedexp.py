"""FedExP: the more the clients' changes cancel out, the longer the server's step."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from pflight.fedavg import FedAvg
from pflight.options import Interval, PositiveFloat, checked
from pflight.runs.distributed import all_sum
from pflight.states.state import StateModule, expand_state, squared_distance
from pflight.states.updates import ClientUpdates

from .registry import Method


@checked
class FedExP(FedAvg):
    r"""FedAvg with an extrapolated server step (Jhunjhunwala et al. 2023, algorithm 1).

    The clients that answered have the changes :math:`D_i = \theta_i - \theta`, with the mean
    :math:`\bar D = \sum w_i D_i`. The server's model moves by

    .. math:: \theta \leftarrow \theta + \eta_g \bar D, \qquad \eta_g = \max\Big(1,
        \frac{\sum w_i \|D_i\|^2}{2\,(\|\bar D\|^2 + \epsilon)}\Big).

    The server's models oscillate. So clients are judged by the mean of the last two, after the
    first round by the only one. They are sent the last model. Norms, step and mean are over
    parameters. Buffers are averaged. Clients train as in FedAvg.

    Args:
        eps: :math:`\epsilon`, the only bound of the step.
        eps_decay: Factor of :math:`\epsilon` after each round. The authors multiply the clients'
            learning rate by 0.998 in each round, and :math:`\epsilon` by its square.
        weighting: ``"uniform"`` for :math:`w_i = 1 / |S|`, ``"samples"`` for
            :math:`w_i = n_i / \sum_{j \in S} n_j`, in all sums as in the authors' code.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.

    Attributes:
        previous: The parameters of the server's model before the last step.
        steps: The number of past steps.


    Example:
        >>> FedExP(eps=0.1).weighting
        'uniform'

    References:
        Jhunjhunwala et al., FedExP: Speeding Up Federated Averaging via Extrapolation, ICLR 2023,
        https://arxiv.org/abs/2301.09604.
    """

    aggregates = False

    previous: StateModule
    steps: int

    def __init__(
        self,
        eps: PositiveFloat = 1e-3,
        eps_decay: Annotated[float, Interval("(0, 1]")] = 1.0,
        weighting: Literal["samples", "uniform"] = "uniform",
        buffers: Literal["shared", "local", "reset"] = "shared",
    ) -> None:
        super().__init__(weighting, buffers)
        self.eps = eps
        self.eps_decay = eps_decay

    def setup_server(self) -> None:
        """Make the server's model, and room for the previous one."""
        super().setup_server()
        self.add_state("steps", 0)
        self.add_state("previous", StateModule(self.server.tensors(0, self.shared_parameters)))

    def on_round_start(self) -> None:
        """Start a new mean, also of the squared norms."""
        super().on_round_start()
        self._squares = self.mean.weights.new_zeros(())

    def receive(self, updates: ClientUpdates) -> None:
        """Add a chunk's models and the squared norms of their changes."""
        super().receive(updates)
        models = self.server.tensors(0, self.shared_parameters)
        squares = squared_distance(updates.states, models).to(self._squares)
        weights = updates.num_samples if self.weighting == "samples" else torch.ones(len(squares))
        self._squares += (squares * weights.to(squares)).sum()

    def aggregate(self, mean: TensorDict) -> TensorDict:
        """Return the mean, with the parameters after the longer step."""
        models = self.server.tensors(0, self.shared_parameters)
        spread = all_sum(self._squares) / self.mean.weights[0]
        changes = {name: mean[name] - theta for name, theta in models.items()}
        square = torch.stack([change.double().square().sum() for change in changes.values()]).sum()
        eps = self.eps * self.eps_decay**self.clients.rounds
        step = (spread / (2 * (square + eps))).clamp(min=1)
        self.clients.log({"server/step": float(step)})
        for name, theta in models.items():
            self.previous.tensors()[name].copy_(theta)
            mean[name] = theta + step.to(theta) * changes[name]
        self.steps += 1
        return mean

    def personalize(self, clients: Tensor) -> TensorDict:
        """Return the mean of the last two models. Fine-tuning starts from it, too."""
        sent = self.broadcast(clients)
        if self.steps > 1:
            previous = expand_state(self.previous.tensors(), len(clients))
            sent.update({name: (sent[name] + value) / 2 for name, value in previous.items()})
        return self.clients.judged(clients, sent)


METHODS = (
    Method(
        "FedExP", FedExP, "FedExP(eps)", "the mean of the server's last two models", manual=True
    ),
)

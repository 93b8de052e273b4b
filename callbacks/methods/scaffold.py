"""SCAFFOLD: control variates correct the drift of clients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim import Optimizer

from pflight.fedavg import FedAvg
from pflight.method import OWN
from pflight.models.client_methods.corrected import Controlled
from pflight.options import PositiveFloat, checked

from .gradients import check_gradients
from .registry import Method


@checked
class SCAFFOLD(FedAvg):
    r"""Stochastic controlled averaging (Karimireddy et al. 2020, algorithm 1).

    The server keeps its model :math:`x` and a control variate :math:`c`, sends both, and takes the
    steps (eq. 5)

    .. math:: x \leftarrow x + \frac{\eta_g}{|S|} \sum_{i \in S} (y_i - x), \qquad
        c \leftarrow c + \frac{1}{N} \sum_{i \in S} (c_i^+ - c_i)

    over the clients of the round that answered. :math:`N` is the number of all clients that may
    take part, so :math:`c` stays the mean of all :math:`c_i`. Clients train, with options I and II,
    as in :class:`~pflight.models.client_methods.Controlled`. Each way carries twice the model's
    size.

    Args:
        option: ``"I"`` or ``"II"``, as in :class:`~pflight.models.client_methods.Controlled`; by
            default ``"II"``, or the value of the client's own client method.
        lr: Step :math:`\eta_g` of the default server optimizer, SGD.

    Raises:
        ConfigurationError: If the step is out of range, or the client names another client method.

    References:
        Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML
        2020, https://arxiv.org/abs/1910.06378.
    """

    aggregates = False

    def __init__(self, lr: PositiveFloat = 1.0, option: Literal["I", "II"] | None = None) -> None:
        super().__init__("uniform")
        self.lr = lr
        self.use_client_method(Controlled, option=option)

    def setup_server(self) -> None:
        """Make the server's model and control variate, which starts at 0."""
        check_gradients(self.clients.module, "SCAFFOLD")
        super().setup_server()
        own = self.clients.layout.own
        self.controls = tuple(name for name in own if name.startswith(f"{OWN}control."))

    def configure_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Return SGD with this callback's step."""
        return torch.optim.SGD(parameters, lr=self.lr)

    def aggregate(self, mean: TensorDict) -> TensorDict:
        """Return the mean, with the moved control variate."""
        share = self.mean.weights[0] / len(self.clients.trainable)
        for name, control in self.server.tensors(0, self.controls).items():
            mean[name] = control + share * mean[name]
        return mean

    def client_controls(self, clients: Tensor) -> TensorDict:
        """Return :math:`c_i` of the clients, a stack ``[C]``; 0 for those that never answered."""
        sent = self.broadcast(clients)
        zeros = {name: torch.zeros_like(sent[name]) for name in self.controls}
        start = TensorDict(zeros, batch_size=sent.batch_size)
        return self.clients.remembered(clients, start).states


METHODS = (
    Method(
        "SCAFFOLD",
        SCAFFOLD,
        "SCAFFOLD(lr, option)",
        "the server's model",
        tested={"": {}, "I": {"option": "I"}},
    ),
)

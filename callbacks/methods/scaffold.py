"""SCAFFOLD: control variates correct the drift of clients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim import Optimizer

from pflight.fedavg import FedAvg
from pflight.half import OWN
from pflight.models.halves.corrected import Controlled
from pflight.options import check_range, checked
from pflight.state import entries

from .gradients import check_gradients, own_gradients

if TYPE_CHECKING:
    pass


@checked
class SCAFFOLD(FedAvg):
    r"""Stochastic controlled averaging (Karimireddy et al. 2020, algorithm 1).

    The server keeps its model :math:`x` and a control variate :math:`c`, sends both, and takes the
    steps (eq. 5)

    .. math:: x \leftarrow x + \frac{\eta_g}{|S|} \sum_{i \in S} (y_i - x), \qquad
        c \leftarrow c + \frac{1}{N} \sum_{i \in S} (c_i^+ - c_i)

    over the clients of the round that answered, :math:`N` being all clients that may take part, so
    that :math:`c` stays the mean of all :math:`c_i`. What a client does, and options I and II, are
    :class:`~pflight.models.halves.Controlled`'s. Twice the model travels each way.

    Args:
        option: ``"I"`` or ``"II"``, as in :class:`~pflight.models.halves.Controlled`; by default
            ``"II"``, or what the client's own half says.
        lr: Step :math:`\eta_g` of the default server optimizer, SGD.

    Raises:
        ConfigurationError: If the step is out of range, or the client names another half.

    References:
        Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML
        2020, https://arxiv.org/abs/1910.06378.
    """

    def __init__(self, lr: float = 1.0, option: Literal["I", "II"] | None = None) -> None:
        super().__init__("uniform")
        check_range(self, "(0, inf)", lr=lr)
        self.lr = lr
        self.bring(Controlled, option=option)

    def setup_server(self) -> None:
        """Make the server's model and control variate, which starts at 0."""
        check_gradients(self.clients.module, "SCAFFOLD")
        super().setup_server()
        names, own = self.clients.layout.names, OWN
        self.controls = tuple(name for name in names if name.startswith(f"{own}control."))
        self.gradients = tuple(name for name in names if name.startswith(f"{own}gradient."))

    def configure_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Return SGD with this callback's step."""
        return torch.optim.SGD(parameters, lr=self.lr)

    def round(self, cohort: Tensor) -> None:
        """Run a round; with option I clients take their gradients before they train."""
        self.on_round_start()
        for updates in self.clients.train(cohort, self.send):
            self.receive(updates)
        self.step()

    def send(self, clients: Tensor) -> TensorDict:
        """Return what each of the clients ``[C]`` is sent, with option I beside its gradient."""
        sent = self.broadcast(clients)
        if self.gradients:
            uncontrolled = sent.clone(recurse=False).update(self.no_control(sent))
            for name, own in entries(own_gradients(self.clients, clients, uncontrolled)):
                sent[f"{OWN}gradient.{name}"] = own
        return sent

    def aggregate(self, mean: TensorDict) -> TensorDict:
        """Return the mean, with the control variate as it has moved."""
        share = self.mean.weights[0] / len(self.clients.trainable)
        for name, control in self.server.tensors(0, self.controls).items():
            mean[name] = control + share * mean[name]
        return mean

    def client_controls(self, clients: Tensor) -> TensorDict:
        """Return :math:`c_i` of the clients, a stack ``[C]``; 0 for those that never answered."""
        start = self.no_control(self.broadcast(clients))
        return self.clients.remembered(clients, start).states

    def no_control(self, sent: TensorDict) -> TensorDict:
        """Return control variates of zeros for the clients ``[C]`` of a stack."""
        zeros = {name: torch.zeros_like(sent[name]) for name in self.controls}
        return TensorDict(zeros, batch_size=sent.batch_size)

    def bytes_down(self, clients: Tensor, sent: TensorDict) -> int:
        """Return the bytes sent to the clients ``[C]``; their own gradients don't travel."""
        return super().bytes_down(clients, sent.select(*self.sent_names))

    @property
    def sent_names(self) -> tuple[str, ...]:
        """Names of the entries of a state that travel."""
        return tuple(name for name in super().sent_names if name not in self.gradients)

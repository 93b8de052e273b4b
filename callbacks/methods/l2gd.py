"""L2GD: clients have their own models, and a coin decides when they move to the mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor

from pflight.errors import ConfigurationError
from pflight.fedavg import FedAvg
from pflight.models.client_methods.l2gd import SHARE, StepsToMean
from pflight.options import NonNegativeFloat, OpenUnitInterval, PositiveFloat, checked
from pflight.randomness import Purpose, generator
from pflight.runs.distributed import all_sum, owned
from pflight.states.updates import ClientUpdates

from .registry import Method


@checked
class L2GD(FedAvg):
    r"""Loopless local gradient descent (Hanzely and Richtárik 2020, algorithm 1).

    The objective is
    :math:`\frac{1}{N} \sum_i f_i(x_i) + \frac{\lambda}{2N} \sum_i \|x_i - \bar x\|^2`, where every
    client has its own model. In each iteration a coin selects a local step with probability
    :math:`1 - p`, or else the step

    .. math:: x_i \leftarrow (1 - c)\,x_i + c\,\bar x, \qquad c = \frac{\alpha\lambda}{N p}.

    Here a round is one local training, after all steps to the mean that come before it. These steps
    don't change the mean, so m of them are one step of :math:`1 - (1 - c)^m`. If the next round
    begins with such steps, clients send their models, and are then sent the mean. Nothing else
    travels after the initial model. The paper's local step is a single SGD step with ``lr``
    :math:`\alpha / (N (1 - p))` on all samples (``local_steps=1``).

    In the paper all clients take part. Here only clients that take part take steps, and
    :math:`\bar x` is the mean of the models that clients sent last. Buffers stay with the clients.
    Newcomers start at :math:`\bar x`.

    Args:
        alpha: The paper's step :math:`\alpha`.
        lam: Weight :math:`\lambda` of the distance to the mean; with 0 clients train alone.
        p: Probability of a step to the mean.

    Raises:
        ConfigurationError: If an option is out of range, or c is over 1.

    References:
        Hanzely and Richtárik, Federated Learning of a Mixture of Global and Local Models, 2020,
        https://arxiv.org/abs/2002.05516.
    """

    aggregates = False

    outer_method = StepsToMean()

    refuses: ClassVar[Mapping[str, str]] = {
        "private": "its clients keep and send all entries",
        "term": "its clients start from models of their own, and not from the server's",
        "transform": "its clients also send when they were sent nothing",
    }

    def __init__(
        self, alpha: PositiveFloat = 1.0, lam: NonNegativeFloat = 0.5, p: OpenUnitInterval = 0.9
    ) -> None:
        super().__init__("uniform", buffers="local")
        self.alpha = alpha
        self.lam = lam
        self.p = p

    def setup_server(self) -> None:
        """Keep the common initial model as the first mean."""
        super().setup_server()
        clients = len(self.clients.trainable)
        self.c = self.alpha * self.lam / (clients * self.p)
        if self.c > 1:
            raise ConfigurationError(
                f"L2GD: c = alpha lam / (N p) must not be over 1, got {self.c:.4g} with "
                f"alpha={self.alpha}, lam={self.lam}, N={clients}, p={self.p}"
            )

    @property
    def kept_names(self) -> tuple[str, ...]:
        """Names of the entries that clients keep between rounds: all, also those that travel."""
        return self.clients.layout.moving

    @property
    def bytes_kept(self) -> int:
        """Bytes kept for each client: its model, and its last sent model."""
        template = self.clients.layout.template
        return super().bytes_kept + sum(template[name].nbytes for name in self.sent_names)

    def tosses(self, round_index: int) -> int:
        """Return the number of steps to the mean before a round's local training."""
        random = generator(Purpose.SERVER, self.clients.seed, round_index)
        count = 0
        while torch.rand((), dtype=torch.float64, generator=random) < self.p:
            count += 1
        return count

    def share(self, round_index: int) -> float:
        """Return the share of the mean at the start of a round; 0 at first, without a mean."""
        return 1 - (1 - self.c) ** self.tosses(round_index) if round_index else 0.0

    def round(self, cohort: Tensor) -> None:
        """Run a round. Clients begin with their steps to the mean."""
        due = self.share(self.clients.rounds + 1)
        returns = self.sent_names if due else ()
        self.on_round_start()
        for updates in self.clients.train(cohort, self.send, returns=returns):
            if due:
                self.receive(updates)
        self.set_pseudo_gradients()

    def send(self, clients: Tensor) -> TensorDict:
        """Return the mean, if any client ``[C]`` needs it, and its share."""
        share = self.share(self.clients.rounds)
        if not share and self.clients.has_memory(clients).all():
            return TensorDict({}, batch_size=[len(clients)])
        sent = self.broadcast(clients)
        if share:
            sent[SHARE] = torch.full((len(clients),), share, dtype=torch.double)
        return sent

    def receive(self, updates: ClientUpdates) -> None:
        """Add the changes of a chunk's models from the last sent ones, or from the mean."""
        clients, states = updates.clients, updates.states
        before = self.clients.stored(clients, self.broadcast(clients))
        self.clients.store(clients, states)
        super().receive(replace(updates, states=states.sub(before)))

    def set_pseudo_gradients(self) -> None:
        """Move the mean to the mean of all clients' last models."""
        self.mean.all_reduce()
        known = self.clients.has_stored(owned(torch.arange(self.clients.num_clients)))
        count = all_sum(known.sum())
        if self.mean.weights[0] > 0:
            change, share = self.mean.compute()[0], self.mean.weights[0].cpu() / count
            means = self.server.tensors(0, self.sent_names).items()
            moved = {name: mean + share.to(mean) * change[name] for name, mean in means}
            self.server.set_pseudo_gradient(0, moved)

    def bytes_down(self, clients: Tensor, sent: TensorDict) -> int:
        """Return the bytes of the needed mean, and of a newcomer's first model."""
        layout = self.clients.layout
        asking = clients
        if not self.share(self.clients.rounds):
            asking = clients[~self.clients.has_memory(clients)]
        return len(asking) * sum(layout.template[name].nbytes for name in self.sent_names)

    @property
    def sent_names(self) -> tuple[str, ...]:
        """Names of the entries that travel: the parameters."""
        return self.clients.layout.shared_parameters


METHODS = (Method("L2GD", L2GD, "L2GD(lam, p)", "its own model", manual=True),)

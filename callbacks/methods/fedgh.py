"""FedGH: clients have their own bodies, and the server trains a head on mean features."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from lightning import LightningModule
from tensordict import TensorDict
from torch import Tensor, nn

from pflight.errors import ConfigurationError
from pflight.local_client import LocalWork
from pflight.method import Model
from pflight.options import NonNegativeFloat, PositiveInt, checked
from pflight.server_callback import ServerCallback
from pflight.states.head import Head
from pflight.states.state import call_with
from pflight.states.updates import ClientUpdates

from .clustering import gather_states
from .prototypes import COUNTS, MEANS, Prototypes, Prototypical, prototype_bytes
from .registry import Method


@checked
class Reporting(Prototypical):
    """Trains a client's own model from the received head, and reports its prototypes.

    It keeps its body, with buffers, from its last participation. Body and head train together, on
    the client's own loss. Then it computes the mean features of its classes over all its training
    samples, in evaluation mode. It keeps its model.
    """

    keeps_memory = True

    def __init__(self) -> None:
        super().__init__(lam=0.0)

    def extra(self, module: LightningModule, head: Head) -> nn.Module:
        """Return room for the prototypes."""
        return Prototypes(int(module.num_classes), head.width)  # type: ignore[arg-type]

    def before_training(self, work: LocalWork, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Return the clients' own models, with the received head."""
        states = super().before_training(work, clients, sent)
        return self._own(work, clients, sent, states).update(sent)

    def models(self) -> dict[str, Model]:
        """Judge clients by their own trained models, and by these with the received head."""
        return {"": self._own, "received/": self._received}

    def _own(
        self, work: LocalWork, clients: Tensor, sent: TensorDict, states: TensorDict
    ) -> TensorDict:
        return states.update(work.remembered(clients, states).states)

    def _received(
        self, work: LocalWork, clients: Tensor, sent: TensorDict, own: TensorDict
    ) -> TensorDict:
        return self.before_training(work, clients, sent)


@checked
class FedGH(ServerCallback):
    r"""Federated learning with a global header (Yi et al. 2023, algorithm 1).

    Every client has its own body, which never travels. It gets the head :math:`\varphi`, trains it
    together with its body, and sends the mean feature :math:`\bar z_{ik}` of each of its classes k.
    For each mean feature, by client and then by class, the server takes a step

    .. math:: \varphi \leftarrow \varphi
        - \eta_s \nabla_\varphi\, \mathrm{CE}(\varphi(\bar z_{ik}), k).

    A client is judged by its own trained model. The tags ``received/`` report its body with
    :math:`\varphi`. A newcomer has the initial body with :math:`\varphi`.

    Args:
        server_lr: Step :math:`\eta_s`; with 0 clients exchange nothing.
        server_batch: Pairs of a mean feature and its class in a step.
        server_epochs: Number of passes over the pairs.

    Raises:
        ConfigurationError: If an option is out of range, or the clients' module has no classes, or
            no head that takes vectors.

    Example:
        >>> FedGH(server_lr=0.1).server_batch
        1

    References:
        Yi et al., FedGH: Heterogeneous Federated Learning with Generalized Global Header, ACM MM
        2023, https://arxiv.org/abs/2303.13137.
    """

    client_method = Reporting()

    refuses: ClassVar[Mapping[str, str]] = {
        "private": "its clients keep their whole model, and get the server's head",
        "term": "its server sends a head alone, which clients train no further",
        "transform": "its clients send prototypes, and no model",
    }

    def __init__(
        self,
        server_lr: NonNegativeFloat = 0.01,
        server_batch: PositiveInt = 1,
        server_epochs: PositiveInt = 1,
    ) -> None:
        super().__init__()
        self.server_lr = server_lr
        self.server_batch = server_batch
        self.server_epochs = server_epochs

    @property
    def head_names(self) -> tuple[str, ...]:
        """Names of the head's entries that travel: its parameters."""
        head = f"{self.clients.head.name}."
        return tuple(name for name in self.clients.layout.parameters if name.startswith(head))

    @property
    def sent_names(self) -> tuple[str, ...]:
        """Names of the entries that travel: the head's and the prototypes'."""
        return (*self.head_names, MEANS, COUNTS)

    def setup_server(self) -> None:
        """Keep the initial model, and the head as a separate module, in evaluation mode.

        Raises:
            ConfigurationError: If the head takes anything other than vectors.
        """
        super().setup_server()
        head = self.clients.head
        self._head = copy.deepcopy(self.clients.module.get_submodule(head.name)).eval()
        zeros = self.server.tensors(0, (MEANS,))[MEANS].new_zeros(1, head.width)
        try:
            self._logits(self._head_tensors(), zeros)
        except RuntimeError as error:
            raise ConfigurationError(
                f"FedGH's server trains the head on mean features, vectors of {head.width} "
                f"numbers, which {head.name!r} does not take: name a head that does"
            ) from error

    def round(self, cohort: Tensor) -> None:
        """Run one round. Clients return their prototypes."""
        self._updates: list[ClientUpdates] = []
        for updates in self.clients.train(cohort, self.broadcast, returns=(MEANS, COUNTS)):
            self.receive(updates)
        self.set_pseudo_gradients()

    def broadcast(self, clients: Tensor) -> TensorDict:
        """Return the head."""
        return self.server.expand(0, self.head_names, len(clients))

    def receive(self, updates: ClientUpdates) -> None:
        """Keep the prototypes of a chunk of clients."""
        self._updates.append(updates)

    def set_pseudo_gradients(self) -> None:
        """Train the head on the prototypes, by client and class."""
        _, states = gather_states(self._updates, self.clients.device)
        self._updates.clear()
        place = states[COUNTS] > 0
        features, classes = states[MEANS][place], place.nonzero()[:, 1]
        head = self._head_tensors()
        for _ in range(self.server_epochs):
            for z, y in zip(
                features.split(self.server_batch), classes.split(self.server_batch), strict=True
            ):
                leaves = {name: head[name].requires_grad_() for name in self.head_names}
                with torch.enable_grad():
                    loss = F.cross_entropy(self._logits(head, z), y)
                slopes = torch.autograd.grad(loss, list(leaves.values()))
                head |= {
                    name: leaf.detach() - self.server_lr * slope
                    for (name, leaf), slope in zip(leaves.items(), slopes, strict=True)
                }
        if len(features):
            self.server.set_pseudo_gradient(0, {name: head[name] for name in self.head_names})

    def _head_tensors(self) -> dict[str, Tensor]:
        """Return the server's head, with buffers, by names in the client module."""
        prefix, tensors = f"{self.clients.head.name}.", self.server.tensors(0)
        return {n: t.detach().clone() for n, t in tensors.items() if n.startswith(prefix)}

    def _logits(self, head: Mapping[str, Tensor], z: Tensor) -> Tensor:
        prefix = f"{self.clients.head.name}."
        tensors = {name.removeprefix(prefix): tensor for name, tensor in head.items()}
        return call_with(self._head, tensors, lambda part, z: part.forward(z), z)

    def bytes_up(self, updates: ClientUpdates) -> int:
        """Return the bytes of the clients' prototypes, each with its class."""
        return prototype_bytes(updates)


METHODS = (Method("FedGH", FedGH, "FedGH(server_lr)", "its own model", needs="a head and classes"),)

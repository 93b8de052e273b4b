"""The base class of methods with a server that stores the last model of every client."""

from __future__ import annotations

from typing import Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from pflight.runs.distributed import all_max, share_owned
from pflight.server_callback import ServerCallback
from pflight.states.state import StateModule, entries, expand_state
from pflight.states.updates import ClientUpdates


class StoredModels(ServerCallback):
    """Stores a model for every client: at first the initial one, then its last returned one.

    No stored model changes before all clients of a round have trained. A subclass defines the model
    that a client is sent, and calls :meth:`store_models` in its step.

    Args:
        buffers: As in :class:`~pflight.callbacks.ServerCallback`; shared ones are stored as well.

    Attributes:
        stored: The travelling entries of all models ``[num_clients, ...]``, a submodule of the
            federation.
        received: BoolTensor ``[num_clients]``, false for clients that still have the initial model.
    """

    stored: StateModule
    received: Tensor

    def __init__(self, buffers: Literal["shared", "local", "reset"] = "local") -> None:
        super().__init__(buffers)

    def setup_server(self) -> None:
        """Store the initial model for every client, after a check that there is memory for it."""
        super().setup_server()
        count, template = self.clients.num_clients, self.clients.layout.template
        initial = {name: template[name] for name in self.stored_names}
        models = count * sum(value.nbytes for value in initial.values())
        parts = {"models": models, **self.more_memory()}
        self.clients.check_memory(type(self).__name__, parts)
        self.add_state("stored", StateModule(dict(entries(expand_state(initial, count)))))
        self.add_state("received", torch.zeros(count, dtype=torch.bool), on_cpu=True)

    @property
    def stored_names(self) -> tuple[str, ...]:
        """Names of the stored entries, by default all of the module that travel."""
        own = {*self.clients.layout.own}
        return tuple(name for name in self.sent_names if name not in own)

    def more_memory(self) -> dict[str, int]:
        """Return the bytes that the server needs besides the models, by part."""
        return {}

    def on_round_start(self) -> None:
        """Start a round without updates."""
        self._updates: list[ClientUpdates] = []

    def receive(self, updates: ClientUpdates) -> None:
        """Keep a chunk's models."""
        self._updates.append(updates)

    def store_models(self) -> Tensor:
        """Store the models of the clients that answered, on all ranks; return their ids ``[S]``."""
        answered = torch.zeros_like(self.received)
        for updates in self._updates:
            answered[updates.clients.cpu()] = True
        answered = all_max(answered.long()).bool()
        clients = answered.nonzero().flatten()
        for name, leaf in self.stored.tensors().items():
            for updates in self._updates:
                leaf.index_copy_(0, updates.clients, updates.states[name])
            share_owned(leaf, clients.to(leaf.device))
        self.received |= answered
        self._updates.clear()
        return clients

    def models_of(self, clients: Tensor) -> TensorDict:
        """Return the stored models of the clients ``[C]``."""
        models = {name: leaf[clients] for name, leaf in self.stored.tensors().items()}
        return TensorDict(models, batch_size=[len(clients)])

    def server_states(self) -> list[dict[str, Tensor]]:
        """Return the stored model of every client, with the initial buffers if none are stored."""
        initial, stored = self.server.tensors(0), self.stored.tensors()
        return [
            {**initial, **{name: leaf[client] for name, leaf in stored.items()}}
            for client in range(self.clients.num_clients)
        ]

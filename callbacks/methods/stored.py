"""The base class of methods whose server keeps the last model of every client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from pflight.server_callback import ServerCallback
from pflight.state import StateModule, entries, expand_state

if TYPE_CHECKING:
    pass


class StoredModels(ServerCallback):
    """Keeps the parameters of a model for every client, at first the initial ones.

    Buffers stay with the clients. A subclass defines what clients are sent, and what happens to
    their updates.

    Attributes:
        stored: The parameters of all models ``[num_clients, ...]``, a submodule of the federation.
    """

    stored: StateModule

    def __init__(self) -> None:
        super().__init__(buffers="local")

    def setup_server(self) -> None:
        """Store the initial model for every client, after a check that there is memory for it."""
        super().setup_server()
        initial = {
            name: self.clients.layout.template[name] for name in self.clients.layout.parameters
        }
        models = self.clients.num_clients * sum(value.nbytes for value in initial.values())
        parts = {"models": models, **self.more_memory()}
        self.clients.check_memory(type(self).__name__, parts)
        self.stored = StateModule(dict(entries(expand_state(initial, self.clients.num_clients))))
        self.modules["stored"] = self.stored

    def more_memory(self) -> dict[str, int]:
        """Return the bytes that the server needs besides the models, by part."""
        return {}

    def server_states(self) -> list[dict[str, Tensor]]:
        """Return the stored model of every client, with the initial buffers."""
        initial, stored = self.server.tensors(0), self.stored.tensors()
        return [
            {**initial, **{name: leaf[client] for name, leaf in stored.items()}}
            for client in range(self.clients.num_clients)
        ]

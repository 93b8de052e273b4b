"""Local training: no communication after the initial model."""

from __future__ import annotations

from tensordict import TensorDict
from torch import Tensor

from pflight.engines.updates import ClientUpdates
from pflight.server_callback import ServerCallback


class Local(ServerCallback):
    """Every client trains its own model; nothing is ever aggregated.

    All clients start from one common model, whose parameters are all that travels, once per client.
    A round is a round's worth of local training for the clients that were drawn, so that budgets
    match those of federated methods. Held-out clients are served the common initial model.
    """

    def setup_server(self) -> None:
        """Keep the common initial model; everything is private to the clients."""
        super().setup_server()
        self.private = self.clients.layout.moving

    def receive(self, updates: ClientUpdates) -> None:
        """Receive nothing: clients keep their models."""

    def step(self) -> None:
        """Leave the initial model as it is."""

    def bytes_down(self, clients: Tensor, sent: TensorDict) -> int:
        """Return the bytes of the initial parameters, for clients without a model of their own."""
        newcomers = int((~self.clients.has_memory(clients)).sum())
        layout = self.clients.layout
        return newcomers * sum(layout.template[name].nbytes for name in layout.parameters)

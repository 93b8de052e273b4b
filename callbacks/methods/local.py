"""Local training: no communication after the initial model."""

from __future__ import annotations

import lightning as L
from tensordict import TensorDict
from torch import Tensor

from pflight.server_callback import ServerCallback
from pflight.states.state import StateLayout
from pflight.states.updates import ClientUpdates

from .registry import Method


class Local(ServerCallback):
    """Every client trains its own model. Nothing is aggregated.

    All clients start from one common model. It is sent once to each client. Nothing else travels.
    In each round the cohort trains as in other methods, so that budgets are comparable. Held-out
    clients use the common initial model.
    """

    sends_model = False

    def private_names(self, module: L.LightningModule, layout: StateLayout) -> set[str]:
        """Return the names of all entries."""
        return {*layout.moving}

    def receive(self, updates: ClientUpdates) -> None:
        """Do nothing, since clients keep their models."""

    def set_pseudo_gradients(self) -> None:
        """Do nothing, since the initial model stays unchanged."""

    def bytes_down(self, clients: Tensor, sent: TensorDict) -> int:
        """Return the bytes of the initial parameters, for clients without their own model."""
        newcomers = int((~self.clients.has_memory(clients)).sum())
        layout = self.clients.layout
        return newcomers * sum(layout.template[name].nbytes for name in layout.parameters)


METHODS = (Method("Local", Local, "Local()", "its own model", manual=True),)

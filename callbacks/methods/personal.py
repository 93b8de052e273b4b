"""The server callback of methods whose clients keep what is added to the shared model."""

from __future__ import annotations

import lightning as L

from pflight.fedavg import FedAvg
from pflight.states.state import StateLayout


class PersonalFedAvg(FedAvg):
    """FedAvg of the clients' shared models; what their method adds to these stays with them.

    For example, :class:`~pflight.models.client_methods.Personal` adds a personal model. The client
    method defines its training and the judged model.

    Args:
        weighting: As in :class:`FedAvg`.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`, for the shared models.

    """

    def private_names(self, module: L.LightningModule, layout: StateLayout) -> set[str]:
        """Return the names of all that the client method adds."""
        return super().private_names(module, layout) | {*layout.own}

"""FedAvg for client methods that add private entries to the shared model."""

from __future__ import annotations

import lightning as L

from pflight.fedavg import FedAvg
from pflight.states.state import StateLayout


class PersonalFedAvg(FedAvg):
    """FedAvg of the clients' shared models. Entries added by the client method stay private.

    For example, :class:`~pflight.models.client_methods.Personal` adds a personal model. The client
    method defines its training and the judged model.

    Args:
        weighting: As in :class:`FedAvg`.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`, for the shared models.

    """

    def private_names(self, module: L.LightningModule, layout: StateLayout) -> set[str]:
        """Return the names of all entries added by the client method."""
        return super().private_names(module, layout) | {*layout.own}

"""The server half of methods whose clients keep what their half adds to the shared model."""

from __future__ import annotations

from pflight.fedavg import FedAvg


class PersonalFedAvg(FedAvg):
    """FedAvg of the clients' shared models; all other entries of their half stay with them.

    These may be a personal model, as of :class:`~pflight.models.halves.Personal`, which also says
    what a client does with it and which model it is judged by.

    Args:
        weighting: As in :class:`FedAvg`.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`, for the shared models.

    """

    def setup_server(self) -> None:
        """Make the server's model; the half's own entries are private."""
        super().setup_server()
        layout = self.clients.layout
        private = {*self.private, *layout.own}
        self.private = tuple(name for name in layout.names if name in private)

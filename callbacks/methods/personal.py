"""The server callback of methods whose clients keep what is added to the shared model."""

from __future__ import annotations

from pflight.fedavg import FedAvg


class PersonalFedAvg(FedAvg):
    """FedAvg of the clients' shared models; what their method adds to these stays with them.

    These may be a personal model, as of :class:`~pflight.models.client_methods.Personal`, which
    also says what a client does with it and which model it is judged by.

    Args:
        weighting: As in :class:`FedAvg`.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`, for the shared models.

    """

    def setup_server(self) -> None:
        """Make the server's model; the client method's own entries are private."""
        super().setup_server()
        layout = self.clients.layout
        private = {*self.private, *layout.own}
        self.private = tuple(name for name in layout.names if name in private)

"""The server half of methods whose clients train a personal model besides the shared one."""

from __future__ import annotations

from pflight.fedavg import FedAvg


class PersonalFedAvg(FedAvg):
    """FedAvg of the clients' shared models; their personal models stay with the clients.

    What a client does with its personal model, and which model it is judged by, is up to
    :class:`~pflight.models.halves.Personal`.

    Args:
        weighting: As in :class:`FedAvg`.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`, for the shared models.

    """

    def setup_server(self) -> None:
        """Make the server's model; the personal entries are private."""
        super().setup_server()
        layout = self.clients.layout
        private = {*self.private, *layout.own}
        self.private = tuple(name for name in layout.names if name in private)

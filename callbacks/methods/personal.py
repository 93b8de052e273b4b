"""The server half of methods whose clients train a personal model beside the shared one."""

from __future__ import annotations

from pflight.fedavg import FedAvg


class PersonalFedAvg(FedAvg):
    """FedAvg of the clients' networks; everything else that a client has stays with it.

    What a client does with its personal model, and by what it is judged, is
    :class:`~pflight.models.halves.Personal`'s.

    Args:
        weighting: As in :class:`FedAvg`.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`; a personal model's stay with it.

    """

    def setup_server(self) -> None:
        """Make the server's model; keep apart what stays with the clients."""
        super().setup_server()
        layout = self.clients.layout
        private = {*self.private, *layout.own}
        self.private = tuple(name for name in layout.names if name in private)

"""The server half of methods whose clients train a personal model besides the shared one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensordict import TensorDict
from torch import Tensor

from pflight.fedavg import FedAvg
from pflight.half import PERSONAL

if TYPE_CHECKING:
    pass


class PersonalFedAvg(FedAvg):
    """FedAvg of the clients' shared models; their personal models stay with the clients.

    A newcomer's personal model starts as the shared one. Clients are judged by the model that
    :meth:`personal_value` makes of the two, by default the personal one.

    Args:
        weighting: As in :class:`FedAvg`.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`, for the shared models.

    """

    def setup_server(self) -> None:
        """Make the server's model, and keep the personal entries private."""
        layout = self.clients.layout
        copied = [name for name in layout.own if name.startswith(PERSONAL)]
        self.pairs = [(name.removeprefix(PERSONAL), name) for name in copied]
        super().setup_server()
        private = {*self.private, *layout.own}
        self.private = tuple(name for name in layout.names if name in private)

    def aggregate(self, mean: TensorDict) -> TensorDict:
        """Return the mean; initial personal models are set to it as well."""
        for shared, personal in self.pairs:
            if shared in self.sent_names:
                mean[personal] = mean[shared]
        return mean

    def personalize(self, clients: Tensor) -> TensorDict:
        """Return the clients' states ``[C]``, in which the network is what they are judged by."""
        states = super().personalize(clients)
        judged = {shared: self.personal_value(states, shared, own) for shared, own in self.pairs}
        return states.update(judged)

    def personal_value(self, states: TensorDict, shared: str, personal: str) -> Tensor:
        """Return an entry ``[C, ...]`` of the networks that clients are judged by.

        Args:
            states: The clients' states ``[C]``.
            shared: The entry's name in the network.
            personal: Its name in the personal model.
        """
        return states[personal]

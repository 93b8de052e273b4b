"""L2GD's clients: they take steps to the mean before they train."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from pflight.local_client import LocalWork
from pflight.method import OWN, ClientMethod
from pflight.states.state import entries

SHARE = f"{OWN}share"
"""The server's entry for the share of the way to the sent mean ``[C]``."""


class StepsToMean(ClientMethod):
    """Starts clients from their own models, moved some way towards the sent mean.

    All go the same share of the distance (Hanzely and Richtárik 2020, algorithm 1). Without a
    share, they start from their own models as they are. A newcomer's own model is the mean. Clients
    are judged by their own models.
    """

    def before_training(self, work: LocalWork, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Return the clients' own models, moved to the mean."""
        starts = work.start_states(clients, sent)
        share = sent.get(SHARE, None)
        if share is not None and len(clients):
            for name, mean in entries(sent.exclude(SHARE)):
                starts[name] = torch.lerp(starts[name], mean, float(share[0]))
        return starts

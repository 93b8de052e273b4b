"""FedCAC: clients with the same critical parameters collaborate on them."""

from __future__ import annotations

import math
from typing import Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from pflight.method import ClientMethod
from pflight.options import ClosedUnitInterval, PositiveFloat, checked
from pflight.runs.distributed import share_owned
from pflight.states.state import StateModule, rows
from pflight.states.updates import ClientUpdates

from .registry import Method
from .stored import StoredModels

_ROUNDING = 1e-9  # 0.7 * 90 is 62.99999999999999
_NOISE = 32  # units of the precision; rounding reaches 6 of them


class Remembering(ClientMethod):
    """Keeps a client's last trained model. The client is judged by it."""

    keeps_memory = True
    judged_by_memory = True


@checked
class FedCAC(StoredModels):
    r"""Critical-parameter-aware collaboration (Wu et al. 2023, algorithm 1).

    A client that started from :math:`s_i` and returned :math:`\theta_i` has the sensitivities
    :math:`|(\theta_i - s_i) \odot \theta_i|` to its parameters. In each tensor, the share
    :math:`\tau` of parameters with the largest values is critical, if these are not 0. The mask
    :math:`M_i` marks them. Changes by rounding count as 0, such as those of a bias before
    BatchNorm. Clients of a round collaborate on the critical parts if their masks overlap enough:
    with

    .. math:: O_{ij} = 1 - \frac{\|M_i - M_j\|_1}{2 \|M_i\|_1}, \qquad
        O_{ij} \ge \bar O + \frac{t}{\beta} (O_{\max} - \bar O)

    in round t, counted from 1, over all pairs. :math:`K_i` is the plain mean of the models of
    client i and its collaborators. :math:`\Theta` is the mean of all models, weighted by samples.
    Next time client i is sent

    .. math:: s_i = M_i \odot K_i + (1 - M_i) \odot \Theta,

    and is judged by this model. With :math:`\tau = 0` this is FedAvg. After round :math:`\beta`
    clients collaborate only if all overlaps are equal. A client that was away is sent its last
    :math:`K_i` with the current :math:`\Theta`. A client that never returned a model is sent
    :math:`\Theta` alone. Buffers stay with the clients. Clients train as in FedAvg, and the server
    computes masks and mixtures.

    Args:
        tau: :math:`\tau`, the share of critical parameters.
        beta: :math:`\beta`, the number of rounds after which collaboration is rare.
        judged: ``"received"`` judges clients by the model that they would be sent, ``"local"`` by
            their last returned one.

    Attributes:
        stored: :math:`K_i` of all clients, without buffers ``[num_clients, ...]``.
        masks: :math:`M_i`, as 0 and 1 ``[num_clients, ...]``.


    References:
        Wu et al., Bold but Cautious: Unlocking the Potential of Personalized Federated Learning
        through Cautiously Aggressive Collaboration, ICCV 2023, https://arxiv.org/abs/2309.11103.
    """

    masks: StateModule

    def __init__(
        self,
        tau: ClosedUnitInterval = 0.5,
        beta: PositiveFloat = 100.0,
        judged: Literal["received", "local"] = "received",
    ) -> None:
        super().__init__()
        self.tau = tau
        self.beta = beta
        self.judged = judged
        if judged == "local":
            self.client_method = Remembering()

    def setup_server(self) -> None:
        """Make the server's model, room for all clients' models, and empty masks."""
        super().setup_server()
        stored = self.stored.tensors().items()
        masks = {n: torch.zeros_like(v, dtype=torch.uint8) for n, v in stored}
        self.add_state("masks", StateModule(masks))

    def more_memory(self) -> dict[str, int]:
        """Return the bytes of the masks."""
        layout = self.clients.layout
        parameters = sum(layout.template[name].numel() for name in layout.parameters)
        return {"masks": self.clients.num_clients * parameters}

    def round(self, cohort: Tensor) -> None:
        """Run one round. Masks are known once clients have answered."""
        self.on_round_start()
        for updates in self.clients.train(cohort, self.send):
            self.receive(updates)
        self.set_pseudo_gradients()

    def send(self, clients: Tensor) -> TensorDict:
        """Return the models to send to the clients ``[C]``, and keep them for the masks."""
        self._sent = clients, self.broadcast(clients)
        return self._sent[1]

    def broadcast(self, clients: Tensor) -> TensorDict:
        """Return the clients' own critical values, and the common values elsewhere."""
        masks, own = self.masks.tensors(), self.models_of(clients)
        common = self.server.tensors(0, masks)
        mixed = {n: torch.where(masks[n][clients] > 0, own[n], common[n]) for n in masks}
        return TensorDict(mixed, batch_size=[len(clients)])

    def receive(self, updates: ClientUpdates) -> None:
        """Keep a chunk's models and the masks of their critical parameters."""
        asked, sent = self._sent
        starts, trained = sent[torch.isin(asked, updates.clients)], updates.states
        changes = [rows((trained[n] - starts[n]).abs()).amax(1) for n in self.masks.tensors()]
        largest = torch.stack(changes).amax(0)
        for name, masks in self.masks.tensors().items():
            mask = self.critical(starts[name], trained[name], largest)
            masks[updates.clients] = mask.to(masks)
        super().receive(updates)

    def critical(self, starts: Tensor, trained: Tensor, largest: Tensor | float = 0.0) -> Tensor:
        """Return a mask of a tensor's critical values ``[C, ...]``; ties go to the first.

        Args:
            starts: The tensor as sent to the clients ``[C, ...]``.
            trained: The tensor as returned by the clients.
            largest: The largest change in each client's model ``[C]``. A change is rounding if it
                is tiny relative to this change or to the value.
        """
        values, changes = rows(trained.abs()), rows((trained - starts).abs())
        precision = torch.finfo(torch.promote_types(trained.dtype, torch.float)).eps
        noise = _NOISE * precision * values.T.clamp(min=largest).T
        sensitivity = values * changes * (changes > noise)
        order = sensitivity.argsort(dim=1, descending=True, stable=True)
        chosen = order[:, : math.floor(self.tau * sensitivity.shape[1] + _ROUNDING)]
        mask = torch.zeros_like(sensitivity, dtype=torch.bool).scatter_(1, chosen, True)
        return (mask & (sensitivity > 0)).view_as(trained)

    def set_pseudo_gradients(self) -> None:
        """Average the models of collaborators, and of all clients that answered."""
        clients = self.store_models().to(self.clients.device)
        if not len(clients):
            return
        for masks in self.masks.tensors().values():
            share_owned(masks, clients)
        groups = self.collaborators(clients).double()
        counts = self.clients.weights_of(clients).to(groups)
        means = {}
        for name, leaf in self.stored.tensors().items():
            trained = rows(leaf[clients]).to(torch.promote_types(leaf.dtype, torch.float))
            common = (counts / counts.sum()).to(trained) @ trained
            own = (groups / groups.sum(dim=1, keepdim=True)).to(trained) @ trained
            means[name] = common.view(leaf.shape[1:]).to(leaf)
            leaf.index_copy_(0, clients, own.view(-1, *leaf.shape[1:]).to(leaf))
        self.server.set_pseudo_gradient(0, means)

    def collaborators(self, clients: Tensor) -> Tensor:
        """Return a mask of the pairs of collaborators, each client with itself, too ``[S, S]``."""
        overlaps, alone = self.overlaps(clients), torch.eye(len(clients), device=clients.device) > 0
        pairs = overlaps[~alone]
        if not len(pairs):
            return alone
        share = (self.clients.rounds + 1) / self.beta
        threshold = pairs.mean() + share * (pairs.max() - pairs.mean())
        return alone | (overlaps >= threshold - 1e-6)

    def overlaps(self, clients: Tensor) -> Tensor:
        """Return the overlaps of clients' masks, O ``[S, S]``; 0 for an empty mask."""
        flags = (rows(masks[clients]).float() for masks in self.masks.tensors().values())
        common = torch.stack([(mask @ mask.T).double() for mask in flags]).sum(dim=0)
        sizes = common.diag().unsqueeze(1)
        apart = (sizes + sizes.T - 2 * common) / (2 * sizes.clamp(min=1))
        return torch.where(sizes > 0, 1 - apart, 0)

    def server_states(self) -> list[dict[str, Tensor]]:
        r"""Return :math:`\Theta`."""
        return [self.server.tensors(0)]


METHODS = (
    Method(
        "FedCAC",
        FedCAC,
        "FedCAC(tau, beta)",
        "its own mixture of models",
        manual=True,
        tested={"": {"tau": 0.15}, "local": {"tau": 0.15, "beta": 2.0, "judged": "local"}},
    ),
)

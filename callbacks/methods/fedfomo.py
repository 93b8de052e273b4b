"""FedFomo: each client mixes in other models that do better on its samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor

from pflight.datamodules.partitions.held_out import HeldOut
from pflight.options import (
    ClosedUnitInterval,
    NonNegativeFloat,
    NonNegativeInt,
    OpenUnitInterval,
    checked,
)
from pflight.randomness import Purpose, generator
from pflight.runs.distributed import share_owned
from pflight.states.state import entries, rows, state_bytes

from .gradients import check_losses
from .hypernetworks import weighted_sums
from .registry import Method
from .stored import StoredModels

if TYPE_CHECKING:
    from pflight.data.data_module import FederatedDataModule


@checked
class FedFomo(StoredModels):
    r"""Federated first-order model optimization (Zhang et al. 2021, section 3).

    The server stores the last model of each client that has answered. Client i, with model
    :math:`\theta_i`, is sent M models of others. It compares them by the loss :math:`L_i` on
    held-out training samples. The score of a model is its improvement of the loss per distance,

    .. math:: w_n = \max\Big(0, \frac{L_i(\theta_i) - L_i(\theta_n)}{\|\theta_n - \theta_i\|}\Big),
        \qquad \theta_i \leftarrow \theta_i + \sum_n \frac{w_n}{\sum_m w_m}(\theta_n - \theta_i).

    From there it trains on its other samples, and returns its model and the scores. If no model is
    better, it starts from its own. All mixtures of a round use the same stored models. Norms are
    over parameters. Losses are the client module's, in evaluation mode.

    The server adds the scores up, :math:`P_{in} \leftarrow P_{in} + w_n`, and next time sends
    client i the models with the largest :math:`P_{in}`; ties are broken at random. With probability
    :math:`\max(0, \varepsilon - \delta t)` in round t, each of the M is replaced by a random other
    model.

    A client is judged by its own last trained model, at first the common initial one. The tags
    ``server/`` report the mixture from which it would start now. Buffers stay with the clients. The
    server stores N models. A round's traffic grows with M.

    Args:
        num_models: M; fewer are sent if fewer have been received. 0 is Local, on fewer samples.
        held_out: Share of each client's training samples for comparing models. A client with a
            single sample also trains on it.
        epsilon: :math:`\varepsilon`, the probability of a random model.
        decay: :math:`\delta`, the decrease of that probability each round.

    Attributes:
        stored: The models of all clients, without buffers; every tensor is ``[num_clients, ...]``.
        affinity: :math:`P`, ``[num_clients, num_clients]``, a row for each receiving client.

    Raises:
        ConfigurationError: If an option is out of range, or clients optimize by hand.

    Example:
        >>> FedFomo(num_models=10).epsilon
        0.3

    References:
        Zhang et al., Personalized Federated Learning with First Order Model Optimization, ICLR
        2021, https://arxiv.org/abs/2012.08565.
    """

    affinity: Tensor

    def __init__(
        self,
        num_models: NonNegativeInt = 5,
        held_out: OpenUnitInterval = 0.2,
        epsilon: ClosedUnitInterval = 0.3,
        decay: NonNegativeFloat = 0.05,
    ) -> None:
        super().__init__()
        self.num_models = num_models
        self.held_out = held_out
        self.epsilon = epsilon
        self.decay = decay

    def local_data(self, data: FederatedDataModule) -> FederatedDataModule:
        """Return the data with held-out training samples."""
        return HeldOut(data, self.held_out)

    def setup_server(self) -> None:
        """Store the initial model for every client, and start without scores."""
        check_losses(self.clients.module, "FedFomo")
        super().setup_server()
        count = self.clients.num_clients
        self.add_state("affinity", torch.zeros(count, count, dtype=torch.double), on_cpu=True)

    def more_memory(self) -> dict[str, int]:
        """Return the bytes of the scores, in all and of one round."""
        return {"scores": 3 * self.clients.num_clients**2 * torch.double.itemsize}

    def round(self, cohort: Tensor) -> None:
        """Run one round. No stored model changes before all clients have trained."""
        self.on_round_start()
        for updates in self.clients.train(cohort, self.send):
            asked, scores = self._asked
            self._scores[updates.clients.cpu()] = scores[torch.isin(asked, updates.clients)].cpu()
            self.receive(updates)
        self.set_pseudo_gradients()

    def send(self, clients: Tensor) -> TensorDict:
        """Return the clients' initial mixtures ``[C]``, and keep their scores."""
        self._asked = clients, self.scores(clients)
        return self.mixtures(*self._asked)

    def on_round_start(self) -> None:
        """Start a round without updates and scores."""
        super().on_round_start()
        self._scores = torch.zeros_like(self.affinity)

    def broadcast(self, clients: Tensor) -> TensorDict:
        """Return the mixtures from which the clients would train now."""
        return self.mixtures(clients, self.scores(clients))

    def mixtures(self, clients: Tensor, scores: Tensor) -> TensorDict:
        """Return the clients' mixtures ``[C]`` by their scores ``[C, num_clients]``."""
        total = scores.sum(dim=1, keepdim=True)
        own = F.one_hot(clients, scores.shape[1]).to(scores)
        weights = torch.where(total > 0, scores / torch.where(total > 0, total, 1), own)
        mixtures = {
            name: weighted_sums(leaf, clients, weights.to(leaf))
            for name, leaf in self.stored.tensors().items()
        }
        return TensorDict(mixtures, batch_size=[len(clients)])

    def scores(self, clients: Tensor) -> Tensor:
        """Return each client's scores of its received models, else 0 ``[C, num_clients]``."""
        scores = torch.zeros(len(clients), len(self.received), device=clients.device).double()
        sent = self.choose(clients)
        if not sent.shape[1]:
            return scores
        own = self.models_of(clients)
        loss = self.clients.losses(clients, own, "held_out")
        for others in sent.unbind(dim=1):
            models = self.models_of(others)
            gain = loss - self.clients.losses(clients, models, "held_out")
            apart = [rows(models[name] - start).double() for name, start in entries(own)]
            distance = torch.linalg.vector_norm(torch.cat(apart, dim=1), dim=1)
            score = (gain / torch.where(distance > 0, distance, 1e-5)).clamp(min=0)
            scores.scatter_(1, others.unsqueeze(1), score.nan_to_num(0).unsqueeze(1))
        return scores

    def choose(self, clients: Tensor) -> Tensor:
        """Return the ids of the models for each client ``[C, M]``, its own if no others exist."""
        now = self.clients.rounds
        epsilon = max(0.0, self.epsilon - self.decay * now)
        known = self.received.nonzero().flatten()
        chosen = clients.unsqueeze(1).repeat(1, min(self.num_models, len(known)))
        for row, client in enumerate(clients.tolist()):
            random = generator(Purpose.SERVER, self.clients.seed, now, client)
            others = known[known != client]
            drawn, tied = (others[torch.randperm(len(others), generator=random)] for _ in range(2))
            best = tied[self.affinity[client, tied].argsort(descending=True, stable=True)]
            sent: list[int] = []
            chances = torch.rand(len(chosen[row]), generator=random, dtype=torch.double)
            for chance in chances[: len(others)].tolist():
                queue = drawn if chance < epsilon else best
                sent.append(next(other for other in queue.tolist() if other not in sent))
            chosen[row, : len(sent)] = torch.tensor(sent)
        return chosen

    def set_pseudo_gradients(self) -> None:
        """Store the models of the clients that answered, and add their scores up."""
        share_owned(self._scores, self.store_models())
        self.affinity += self._scores

    def personalize(self, clients: Tensor) -> TensorDict:
        """Return each client's last trained model."""
        return self.clients.judged(clients, self.models_of(clients))

    def bytes_down(self, clients: Tensor, sent: TensorDict) -> int:
        """Return the bytes of the sent models, and of the initial one until a client answers."""
        received = self.received[clients.cpu()].long()
        models = (self.received.sum() - received).clamp(max=self.num_models)
        return int((models + 1 - received).sum()) * state_bytes(sent)


METHODS = (Method("FedFomo", FedFomo, "FedFomo(num_models)", "its own mixture of models"),)

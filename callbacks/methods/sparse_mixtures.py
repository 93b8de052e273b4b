"""Mixtures of few models for each client, for pFedLA with many clients and small cohorts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn

from pflight.runs.distributed import all_sum, share_owned
from pflight.states.state import StateModule, rows

OWN, MEAN = 0, 1
"""Places of a client's own model and of the mean model among its sources."""

_COMPARED = 256  # clients that are compared with each other at once
_MEAN_SIMILARITY = 0.3  # the similarity at which a neighbour weighs as much as the mean model
_TEMPERATURE = 0.1
_FORGOTTEN = 0.1  # share of the learned logits that a participation forgets


class Observed(NamedTuple):
    """What the server sees of some clients in a round."""

    clients: Tensor
    """Ids ``[C]``."""
    sketches: Tensor
    """Sketches of their changes ``[C, layers, sketch_dim]``."""
    gradients: Tensor
    """Normalised gradients of their logits ``[C, layers, m + 2]``."""


class SparseMixtures(nn.Module):
    r"""The weights of each client's m + 2 sources, by layer, and the choice of these sources.

    The sources of client i are its own model, the mean model :math:`\mu`, and the models of its m
    most similar clients. Each model is stored as its deviation :math:`d_j` from the mean model of
    its last participation. So an old model follows the mean model. The mixture is

    .. math:: \bar\theta_i^l = \mu^l + \sum_s \alpha_i^{l,s} d_s^l, \qquad
        \alpha_i^l = \mathrm{softmax}(c_i^l / T + z_i^l),

    where the mean model has :math:`d = 0`. The similarities :math:`c_i^{l,s}` start the weights. A
    neighbour has the cosine of its sketch and the client's. The mean model has 0.3, and T is 0.1.
    The client's own model has the largest cosine of its neighbours, or 0. Models of others have not
    seen the client's samples. So this cosine shows how much of a deviation is more than noise.

    A sketch adds up a client's own changes, each without the mean change of its round:
    :math:`s_i \leftarrow \alpha_i^{own} s_i + R (\Delta\theta_i - \overline{\Delta\theta})`, where
    R multiplies by random signs and adds up every k-th value. The logits :math:`z_i` follow the
    paper's gradient (eq. 11), divided by its scale:

    .. math:: z_i^{l,s} \leftarrow 0.9 z_i^{l,s} + \kappa \alpha_i^{l,s} \frac{
        \langle \theta_s^l - \bar\theta_i^l, \Delta\theta_i^l \rangle}{\|\Delta\theta_i^l\|
        \sqrt{\sum_r \alpha_i^{l,r} \|\theta_r^l - \bar\theta_i^l\|^2}}

    A client that has not answered yet has all weight on the mean model.

    Args:
        stored: Tensors of all models ``[num_clients, ...]`` by name.
        layer_of: The index of each tensor's layer.
        neighbours: m, the number of similar clients.
        sketch_dim: k, the size of a layer's sketch.
        random: Draws the signs.

    Attributes:
        neighbours: Ids of similar clients ``[num_clients, m]``; -1 where there is none.
        similarity: Their cosines ``[num_clients, layers, m]``.
        learned: The logits :math:`z_i` ``[num_clients, layers, m + 2]``.
        sketches: ``[num_clients, layers, sketch_dim]``.
        known: Mask ``[num_clients]`` of the clients that have answered.
    """

    neighbours: Tensor
    similarity: Tensor
    learned: Tensor
    sketches: Tensor
    known: Tensor

    def __init__(
        self,
        stored: Mapping[str, Tensor],
        layer_of: Mapping[str, int],
        neighbours: int,
        sketch_dim: int,
        random: torch.Generator,
    ) -> None:
        super().__init__()
        self.layer_of = {**layer_of}
        example = next(iter(stored.values()))
        count, layers = len(example), max(layer_of.values()) + 1
        dtype = torch.promote_types(example.dtype, torch.float)
        self.register_buffer("neighbours", torch.full((count, neighbours), -1))
        self.register_buffer("similarity", torch.zeros(count, layers, neighbours, dtype=dtype))
        self.register_buffer("learned", torch.zeros(count, layers, neighbours + 2, dtype=dtype))
        self.register_buffer("sketches", torch.zeros(count, layers, sketch_dim, dtype=dtype))
        self.register_buffer("known", torch.zeros(count, dtype=torch.bool))
        signs = {
            name: 2 * torch.randint(2, leaf.shape[1:], generator=random, dtype=torch.int8) - 1
            for name, leaf in stored.items()
        }
        self.signs = StateModule(signs, persistent=False)

    def forward(self, clients: Tensor) -> Tensor:
        """Return weights ``[C, layers, m + 2]``: own model, mean model, neighbours; sum 1."""
        similarity = self.similarity[clients]
        absent = (self.neighbours[clients] < 0).unsqueeze(1)
        own = similarity.masked_fill(absent, 0).amax(dim=2, keepdim=True)
        mean = torch.full_like(own, _MEAN_SIMILARITY)
        logits = torch.cat([own, mean, similarity.masked_fill(absent, -torch.inf)], dim=2)
        weights = (logits / _TEMPERATURE + self.learned[clients]).softmax(dim=2)
        only_mean = torch.zeros_like(weights)
        only_mean[:, :, MEAN] = 1
        return torch.where(self.known[clients].view(-1, 1, 1), weights, only_mean)

    def spread(self, clients: Tensor) -> Tensor:
        """Return the weights of all stored models ``[C, layers, N]``, without the mean model."""
        weights, near = self(clients), self.neighbours[clients]
        spread = weights.new_zeros(*weights.shape[:2], len(self.known))
        ids = torch.cat([clients.unsqueeze(1), near.clamp(min=0)], dim=1)
        stored = torch.cat([weights[:, :, :MEAN], weights[:, :, MEAN + 1 :]], dim=2)
        return spread.scatter_add_(2, ids.unsqueeze(1).expand_as(stored), stored)

    def mixtures(
        self, clients: Tensor, mean: Mapping[str, Tensor], deviations: Mapping[str, Tensor]
    ) -> TensorDict:
        """Return the mixtures of the clients ``[C]``.

        Args:
            clients: Ids ``[C]``.
            mean: The mean model.
            deviations: The stored deviations ``[num_clients, ...]``.
        """
        weights, mixtures = self(clients), {}
        for name, leaf in deviations.items():
            total = torch.zeros_like(rows(leaf[clients]), dtype=weights.dtype)
            for place, source in self._sources(clients, leaf):
                total += weights[:, self.layer_of[name], place].unsqueeze(1) * source
            mixtures[name] = (mean[name] + total.view(-1, *leaf.shape[1:])).to(leaf)
        return TensorDict(mixtures, batch_size=[len(clients)])

    def observe(
        self,
        clients: Tensor,
        changes: TensorDict,
        sent: TensorDict,
        mean: Mapping[str, Tensor],
        deviations: Mapping[str, Tensor],
    ) -> Observed:
        """Return sketches of the clients' changes, and the gradients of their logits.

        Args:
            clients: Ids ``[C]``.
            changes: Their changes ``[C, ...]``.
            sent: The mixtures that they were sent ``[C, ...]``.
            mean: As in :meth:`mixtures`.
            deviations: As in :meth:`mixtures`.
        """
        weights = self(clients)
        products, distances = torch.zeros_like(weights), torch.zeros_like(weights)
        squares = weights.new_zeros(weights.shape[:2])
        sketches = torch.zeros_like(self.sketches[clients])
        for name, signs in self.signs.tensors().items():
            layer = self.layer_of[name]
            change = rows(changes[name]).to(weights)
            start = rows(sent[name] - mean[name]).to(weights)
            squares[:, layer] += change.square().sum(dim=1)
            signed = F.pad(change * signs.flatten(), (0, -change.shape[1] % sketches.shape[2]))
            sketches[:, layer] += signed.unflatten(1, (-1, sketches.shape[2])).sum(dim=1)
            for place, source in self._sources(clients, deviations[name]):
                apart = source - start
                products[:, layer, place] += (apart * change).sum(dim=1)
                distances[:, layer, place] += apart.square().sum(dim=1)
            products[:, layer, MEAN] -= (start * change).sum(dim=1)
            distances[:, layer, MEAN] += start.square().sum(dim=1)
        scale = (squares * (weights * distances).sum(dim=2)).sqrt().unsqueeze(2)
        return Observed(clients, sketches, weights * products / torch.where(scale > 0, scale, 1))

    def learn(
        self, clients: Tensor, seen: Sequence[Observed], lr: float, random: torch.Generator
    ) -> None:
        """Update sketches, logits and neighbours of the clients that answered.

        Args:
            clients: Ids of the clients that answered on all ranks ``[S]``.
            seen: What this rank observed, in parts.
            lr: The step of the logits.
            random: Divides a large cohort into parts that are compared, alike on all ranks.
        """
        total = torch.zeros_like(self.sketches[0])
        for one in seen:
            total += one.sketches.sum(dim=0)
        center = all_sum(total) / len(clients)
        for mine, sketches, gradients in seen:
            own = self(mine)[:, :, OWN].unsqueeze(2)
            self.sketches[mine] = own * self.sketches[mine] + sketches - center
            self.learned[mine] = (1 - _FORGOTTEN) * self.learned[mine] + lr * gradients
        share_owned(self.sketches, clients)
        share_owned(self.learned, clients)
        self.known[clients] = True
        order = torch.randperm(len(clients), generator=random).to(clients.device)
        for part in clients[order].split(_COMPARED):
            self._choose_neighbours(part)

    def _sources(self, clients: Tensor, leaf: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the places of stored models among the sources, and one tensor ``[C, size]``."""
        yield OWN, rows(leaf[clients])
        for place, others in enumerate(self.neighbours[clients].clamp(min=0).unbind(1), MEAN + 1):
            yield place, rows(leaf[others])

    def _choose_neighbours(self, clients: Tensor) -> None:
        """Choose the neighbours of the clients ``[C]`` from each other and their present ones."""
        before = self.neighbours[clients]
        sketches = F.normalize(self.sketches[clients], dim=2)
        known = F.normalize(self.sketches[before.clamp(min=0)], dim=3)
        similarity = torch.cat(
            [
                torch.einsum("clk,cmlk->clm", sketches, known),
                torch.einsum("clk,dlk->cld", sketches, sketches),
            ],
            dim=2,
        )
        itself = clients.unsqueeze(1) == clients
        twice = (before.unsqueeze(2) == clients).any(dim=1)
        left_out = torch.cat([before < 0, itself | twice], dim=1)
        best = similarity.mean(dim=1).masked_fill(left_out, -1).topk(before.shape[1])
        candidates = torch.cat([before, clients.expand(len(clients), -1)], dim=1)
        after = candidates.gather(1, best.indices).masked_fill(best.values <= 0, -1)
        places = best.indices.unsqueeze(1).expand(-1, similarity.shape[1], -1)
        self.similarity[clients] = similarity.gather(2, places)
        stayed = (before.unsqueeze(2) == after.unsqueeze(1)) & (after >= 0).unsqueeze(1)
        learned = self.learned[clients]
        carried = learned[:, :, MEAN + 1 :] @ stayed.to(learned)
        self.learned[clients] = torch.cat([learned[:, :, : MEAN + 1], carried], dim=2)
        self.neighbours[clients] = after

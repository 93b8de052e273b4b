"""Hypernetworks: each computes a client's weights of all models, layer by layer."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils import parameters_to_vector

from pflight.states.state import rows

BLOCK = 16
"""Clients in one matrix product."""

_ALIGNED = 16  # numbers


class HyperNetwork(nn.Module):
    """Maps the embedding of one client to the logits of its weights ``[num_layers, num_clients]``.

    The embedding passes three hidden layers with ReLU, and then one linear map for each layer of
    the client's model; these maps are computed as one ``nn.Linear``.

    Args:
        num_layers: Layers of the client's model.
        num_clients: Number of clients with mixed models.
        embedding_dim: Size of the embedding, which is drawn from the standard normal distribution.
        hidden_dim: Width of the hidden layers.
        weights: How the logits become weights: with ``"softmax"`` they start as zeros, with
            ``"relu_norm"`` the linear maps are drawn from U(0, 1), without bias.

    Example:
        >>> HyperNetwork(num_layers=2, num_clients=5)().shape
        torch.Size([2, 5])
    """

    def __init__(
        self,
        num_layers: int,
        num_clients: int,
        embedding_dim: int = 100,
        hidden_dim: int = 100,
        weights: Literal["softmax", "relu_norm"] = "softmax",
    ) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(embedding_dim))
        self.hidden = nn.Sequential(
            nn.Linear(embedding_dim, hidden_dim),
            nn.ReLU(),
            nn.Linear(hidden_dim, hidden_dim),
            nn.ReLU(),
            nn.Linear(hidden_dim, hidden_dim),
            nn.ReLU(),
        )
        self.output = nn.Linear(hidden_dim, num_layers * num_clients)
        nn.init.zeros_(self.output.bias)
        start = nn.init.zeros_ if weights == "softmax" else nn.init.uniform_
        start(self.output.weight)
        self.shape = num_layers, num_clients

    def forward(self) -> Tensor:
        """Return the logits ``[num_layers, num_clients]``."""
        return self.output(self.hidden(self.embedding.unsqueeze(0))).view(self.shape)


class HyperNetworks(nn.Module):
    """The hypernetworks of all N clients, computed together, and their weights.

    The parameters of each hypernetwork are one vector, padded with zeros. If a client does not take
    part, its hypernetwork has no gradient. So no optimizer moves it, not even by momentum or weight
    decay.

    Args:
        networks: Modules of one class without inputs, in client order. They return logits
            ``[num_layers, N]`` and are read one at a time.
        weights: ``"softmax"``, or ``"relu_norm"``: positive parts divided by their sum. If no logit
            is positive, the client itself gets all weight.
        mixed: Mask ``[N]`` of the clients with mixed models; the others have weight 0.
    """

    mixed: Tensor

    def __init__(
        self,
        networks: Iterable[nn.Module],
        weights: Literal["softmax", "relu_norm"] = "softmax",
        mixed: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.weights = weights
        self.vectors = nn.ParameterList()
        for network in networks:
            if not len(self.vectors):
                self._shapes = {name: p.shape for name, p in network.named_parameters()}
                self._sizes = [shape.numel() for shape in self._shapes.values()]
                # A tuple keeps it from being a submodule: only its forward pass is used.
                self._network = (copy.deepcopy(network).to("meta"),)
            # Stacked rows have one alignment. So the other clients don't change a client's
            # weights, not even in the last bit.
            padding = -sum(self._sizes) % _ALIGNED
            self.vectors.append(F.pad(parameters_to_vector(network.parameters()), (0, padding)))
        everyone = torch.ones(len(self), dtype=torch.bool)
        self.register_buffer("mixed", everyone if mixed is None else mixed)

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, client: int) -> dict[str, Tensor]:
        """Return the parameters of one client's hypernetwork by name: views of its vector."""
        return self._named(self.vectors[client].detach())

    def forward(self, clients: Tensor) -> Tensor:
        """Return the weights of the clients ``[C, num_layers, N]``; over N they sum to 1."""
        logits = vmap(self._logits)(torch.stack([self.vectors[i] for i in clients.tolist()]))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.weights == "softmax":
            return logits.masked_fill(~self.mixed, -torch.inf).softmax(dim=2)
        positive = logits.relu() * self.mixed
        total = positive.sum(dim=2, keepdim=True)
        own = F.one_hot(clients, len(self)).unsqueeze(1).to(positive)
        return torch.where(total > 0, positive / torch.where(total > 0, total, 1), own)

    def set_gradients(self, clients: Tensor, weights: Tensor, gradients: Tensor) -> None:
        """Set the gradients of the hypernetworks of the clients ``[C]``.

        Args:
            clients: Ids ``[C]``.
            weights: The clients' weights ``[C, num_layers, N]``, with their autograd graph.
            gradients: Gradients with respect to these weights, of the same shape.
        """
        chosen = [self.vectors[client] for client in clients.tolist()]
        for vector, gradient in zip(
            chosen, torch.autograd.grad(weights, chosen, gradients), strict=True
        ):
            vector.grad = gradient

    def _named(self, vector: Tensor) -> dict[str, Tensor]:
        parts = vector[: sum(self._sizes)].split(self._sizes)
        return {
            name: part.view(shape)
            for part, (name, shape) in zip(parts, self._shapes.items(), strict=True)
        }

    def _logits(self, vector: Tensor) -> Tensor:
        return functional_call(self._network[0], self._named(vector), ())


@torch.no_grad()
def weighted_sums(models: Tensor, clients: Tensor, weights: Tensor) -> Tensor:
    """Return sums of one tensor of all models, one sum for each client: ``[C, ...]``.

    The matrix products have a fixed shape with a row for every client. So the other clients don't
    change a client's sum, not even in the last bit.

    Args:
        models: The tensor of each of the N models ``[N, ...]``.
        clients: Ids ``[C]``.
        weights: The weights of the models for these clients ``[C, N]``.

    Example:
        >>> models, halves = torch.tensor([1.0, 3.0]), torch.full((1, 2), 0.5)
        >>> weighted_sums(models, torch.tensor([1]), halves)
        tensor([2.])
    """
    table = rows(models).to(weights)
    blocks, block_of = (clients // BLOCK).unique(return_inverse=True)
    places = block_of * BLOCK + clients % BLOCK
    padded = weights.new_zeros(len(blocks) * BLOCK, len(table)).index_copy_(0, places, weights)
    sums = table.new_empty(len(padded), table.shape[1])
    for part, product in zip(padded.split(BLOCK), sums.split(BLOCK), strict=True):
        torch.mm(part, table, out=product)
    first = int(places[0]) if len(places) else 0
    if torch.equal(places, torch.arange(first, first + len(places), device=places.device)):
        sums = sums[first : first + len(places)]  # a view spares a copy
    else:
        sums = sums.index_select(0, places)
    return sums.view(-1, *models.shape[1:]).to(models)

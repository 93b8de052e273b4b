"""pFedHN: one hypernetwork generates the model of every client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar

import lightning as L
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from pflight.errors import ConfigurationError
from pflight.options import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    checked,
)
from pflight.randomness import Purpose, derive_seed, isolated, seed_everything
from pflight.runs.distributed import gather, owned
from pflight.server_callback import ServerCallback
from pflight.states.state import StateLayout, stack_states
from pflight.states.updates import ClientUpdates

from .registry import Method


@checked
class PFedHN(ServerCallback):
    r"""Personalized federated learning by hypernetworks (Shamsian et al. 2021, algorithm 1).

    The server has an embedding :math:`v_i` of each client, and a network :math:`h` with parameters
    :math:`\varphi` that generates the client's model from it, :math:`\theta_i = h(v_i; \varphi)`.
    Client i trains from :math:`\theta_i` and returns its change :math:`\Delta\theta_i`. The change
    replaces the negative gradient of its loss, and the server moves both along it,

    .. math:: \varphi \leftarrow \varphi + \kappa \, (\nabla_\varphi \theta_i)^T \Delta\theta_i,
        \qquad v_i \leftarrow v_i + \kappa_v \, (\nabla_{v_i} \theta_i)^T \Delta\theta_i,

    by a step of the server optimizer before the next client is sent its model. So the clients of a
    round train one after the other, in the order of their ids. A round of S clients equals S rounds
    of the paper. Other clients' embeddings don't change with any optimizer. A client is judged by
    :math:`h(v_i; \varphi)` without further training.

    The hypernetwork generates parameters; buffers stay with the clients. It never travels, and the
    server stores no client's model. With ``private_layers=1`` this is pFedHN-PC: the last layer,
    the classifier, is each client's own.

    A held-out client finds its embedding when it is tested, with a fixed :math:`\varphi`.
    ``newcomer_steps`` times, it trains and its embedding takes a step. This embedding is not kept.

    Args:
        private_layers: The number of last layers with parameters that stay with the clients.
        embedding_dim: Size of :math:`v_i`; by default one plus a quarter of the number of clients.
        hidden_dim: Width of the hypernetwork's hidden layers.
        hidden_layers: Number of hidden layers after the first.
        lr: :math:`\kappa`, the step size of the default server optimizer: SGD with momentum 0.9 and
            weight decay 0.001.
        embedding_lr: :math:`\kappa_v`; by default :math:`\kappa`.
        clip: The largest norm of the gradient of :math:`\varphi` and :math:`v_i` together, or
            ``None``.
        newcomer_steps: Number of trainings of a held-out client to find its embedding, by SGD with
            step size :math:`\kappa_v`; 0 keeps the random initial embedding.

    Attributes:
        hypernetwork: Builds :math:`h`, a module that maps ``[embedding_dim]`` to ``[size]``, from
            these two numbers.
        embeddings: Vectors ``[embedding_dim]``, one for each client.

    Raises:
        ConfigurationError: If an option is out of range, or no layer is left to generate.

    Example:
        >>> PFedHN(private_layers=1).clip
        50.0

    References:
        Shamsian et al., Personalized Federated Learning using Hypernetworks, ICML 2021,
        https://arxiv.org/abs/2103.04628.
    """

    embeddings: nn.ParameterList
    network: nn.Module
    refuses: ClassVar[Mapping[str, str]] = {
        "private": "its hypernetwork generates all layers but those of its own option",
    }

    def __init__(
        self,
        private_layers: NonNegativeInt = 0,
        embedding_dim: PositiveInt | None = None,
        hidden_dim: PositiveInt = 100,
        hidden_layers: NonNegativeInt = 3,
        lr: NonNegativeFloat = 0.01,
        embedding_lr: NonNegativeFloat | None = None,
        clip: PositiveFloat | None = 50.0,
        newcomer_steps: NonNegativeInt = 20,
    ) -> None:
        super().__init__(buffers="local")
        self.private_layers = private_layers
        self.embedding_dim = embedding_dim
        self.lr = lr
        self.embedding_lr = lr if embedding_lr is None else embedding_lr
        self.clip = clip
        self.newcomer_steps = newcomer_steps
        self.hypernetwork: Callable[[int, int], nn.Module] = partial(
            fully_connected, hidden_dim=hidden_dim, hidden_layers=hidden_layers
        )

    @property
    def algorithm_name(self) -> str:
        """pFedHN, or pFedHN-PC if clients keep their own classifiers."""
        return "pFedHN" + "-PC" * (self.private_layers > 0)

    def setup_server(self) -> None:
        """Draw the hypernetwork and the embeddings."""
        super().setup_server()
        self._found: dict[int, TensorDict] = {}  # models of newcomers found since the last round
        layout, count = self.clients.layout, self.clients.num_clients
        self.generated = tuple(n for n in layout.parameters if n not in {*self.private})
        initial = [layout.template[name] for name in self.generated]
        dim = self.embedding_dim or 1 + count // 4
        self._check_memory(dim, sum(value.numel() for value in initial))
        with isolated(self.clients.device):
            seed_everything(derive_seed(Purpose.SERVER, self.clients.seed), self.clients.device)
            embeddings = nn.ParameterList(torch.randn(dim) for _ in range(count))
            network = self.hypernetwork(dim, sum(value.numel() for value in initial))
        self.add_state("embeddings", embeddings)
        self.add_state("network", network)
        for module in self.modules.values():
            module.to(torch.promote_types(initial[0].dtype, torch.float))

    def private_names(self, module: L.LightningModule, layout: StateLayout) -> set[str]:
        """Return the names of buffers and of the last layers.

        Raises:
            ConfigurationError: If nothing is left to generate.
        """
        layers = [names for names in layout.layers.values() if {*names} & {*layout.parameters}]
        if self.private_layers >= len(layers):
            raise ConfigurationError(
                f"PFedHN: private_layers={self.private_layers} leaves nothing to generate of "
                f"{len(layers)} layers"
            )
        kept = layers[len(layers) - self.private_layers :]
        return {*layout.buffers, *(name for names in kept for name in names)}

    def _check_memory(self, dim: int, size: int) -> None:
        """Raise unless embeddings of a given size and the hypernetwork fit into memory."""
        try:
            with isolated(self.clients.device), torch.device("meta"):
                network = self.hypernetwork(dim, size)
        except Exception:  # the size of a user's own network is not known before
            return
        count = self.clients.num_clients
        parts = {
            "embeddings": 4 * dim * count,
            "the hypernetwork": sum(p.nbytes for p in network.parameters()),
        }
        if self.server.build_optimizer is None:  # SGD with momentum steps all of these
            parts["gradients and momentum"] = 2 * sum(parts.values())
        self.clients.check_memory(type(self).__name__, parts)

    def configure_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Return SGD with the steps of the hypernetwork and of the embeddings."""
        own = {id(embedding) for embedding in self.embeddings}
        groups: list[dict[str, Any]] = [
            {"params": [p for p in parameters if id(p) not in own]},
            {"params": list(self.embeddings), "lr": self.embedding_lr},
        ]
        return torch.optim.SGD(groups, lr=self.lr, momentum=0.9, weight_decay=1e-3)

    def generate(self, embedding: Tensor) -> dict[str, Tensor]:
        """Return the parameters, by name, that the hypernetwork generates from an embedding."""
        like = self.server.tensors(0, self.generated)
        parts = self.network(embedding).split([value.numel() for value in like.values()])
        return {
            name: part.view_as(value).to(value)
            for part, (name, value) in zip(parts, like.items(), strict=True)
        }

    def server_states(self) -> list[dict[str, Tensor]]:
        """Return every client's generated model, with the initial values of all other entries."""
        initial = self.server.tensors(0)
        return [{**initial, **self.generate(embedding)} for embedding in self.embeddings]

    def round(self, cohort: Tensor) -> None:
        """Run one round, client by client, with a step of the optimizer after each."""
        self._found = {}
        answers, mine = self.clients.train(cohort, self.send, max_chunk=1), owned(cohort)
        for client in cohort.split(1):
            change = self.change(next(answers)) if torch.isin(client, mine) else {}
            for answer in gather(change):
                if answer:
                    self.climb(int(client), answer)

    def broadcast(self, clients: Tensor) -> TensorDict:
        """Return the generated models of the clients ``[C]``."""
        return stack_states(self.generate(self.embeddings[i]) for i in clients.tolist())

    def send(self, clients: Tensor) -> TensorDict:
        """Return the generated models of the clients ``[C]``, and keep them for the update."""
        self._sent = self.broadcast(clients)
        return self._sent

    def change(self, updates: ClientUpdates) -> dict[str, Tensor]:
        """Return the change of a single client by name, empty if it did not answer."""
        if not len(updates.clients):
            return {}
        states, sent = updates.states, self._sent
        return {name: (states[name][0] - sent[name][0]).cpu() for name in self.generated}

    def climb(self, client: int, change: dict[str, Tensor]) -> None:
        """Move a client's generated model along its change, by a step of the optimizer."""
        optimizer = self.server.optimizer
        assert optimizer is not None
        embedding = self.embeddings[client]
        with torch.enable_grad():
            generated = self.generate(embedding)
        downhill = [-change[name].to(value) for name, value in generated.items()]
        torch.autograd.backward(list(generated.values()), downhill)
        if self.clip is not None:
            clip_grad_norm_([*self.network.parameters(), embedding], self.clip)
        optimizer.step()
        optimizer.zero_grad()

    def personalize(self, clients: Tensor) -> TensorDict:
        """Return the clients' generated models. Newcomers find their embedding first."""
        states = super().personalize(clients)
        known = self.clients.trainable.to(clients.device)
        new = (~torch.isin(clients, known)).nonzero().flatten().tolist()
        if not new or not self.newcomer_steps:
            return states
        states = states.clone()
        for row, client in zip(new, clients[new].tolist(), strict=True):
            if client not in self._found:
                self._found[client] = self._find(client, states[row : row + 1])
            states[row : row + 1] = self._found[client]
        return states

    def _find(self, client: int, state: TensorDict) -> TensorDict:
        """Return the generated model ``[1]`` of a newcomer, after finding its embedding."""
        if not self.clients.num_samples[client]:
            return state
        clients = torch.tensor([client], device=self.clients.device)
        embedding = self.embeddings[client].detach().clone().requires_grad_()
        for step in range(self.newcomer_steps):
            tried = self.clients.train_aside(clients, state, self.clients.rounds + step)
            if not len(tried.clients):
                break
            with torch.enable_grad():
                generated = self.generate(embedding)
            changes = [state[name][0] - tried.states[name][0] for name in generated]
            (slope,) = torch.autograd.grad(list(generated.values()), embedding, changes)
            embedding.data.add_(slope, alpha=-self.embedding_lr)
            found = stack_states([self.generate(embedding)])
            state = TensorDict({**tried.states, **found}, batch_size=[1])
        return state


def fully_connected(
    embedding_dim: int, size: int, hidden_dim: int = 100, hidden_layers: int = 3
) -> nn.Sequential:
    """Return a network from ``[embedding_dim]`` to ``[size]``.

    A linear map to ``hidden_dim`` features is followed by ``hidden_layers`` more, each after a
    ReLU, and by the output, which is linear in the last features.

    Example:
        >>> fully_connected(3, 8)(torch.zeros(3)).shape
        torch.Size([8])
    """
    layers: list[nn.Module] = [nn.Linear(embedding_dim, hidden_dim)]
    for _ in range(hidden_layers):
        layers += [nn.ReLU(), nn.Linear(hidden_dim, hidden_dim)]
    return nn.Sequential(*layers, nn.Linear(hidden_dim, size))


METHODS = (
    Method("pFedHN", PFedHN, "PFedHN()", "a model from a hypernetwork", manual=True),
    Method(
        "pFedHN-PC",
        PFedHN,
        "PFedHN(private_layers)",
        "a model from a hypernetwork, and own layers",
        manual=True,
        tested={},
    ),
)

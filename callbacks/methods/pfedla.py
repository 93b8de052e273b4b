"""pFedLA: each client starts from its own layer-wise mixture of all clients' models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Literal

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim import Optimizer

from pflight.errors import ConfigurationError
from pflight.options import NonNegativeFloat, NonNegativeInt, PositiveInt, checked
from pflight.randomness import Purpose, derive_seed, generator, isolated, seed_everything
from pflight.runs.distributed import all_sum
from pflight.states.state import WeightedMean, rows
from pflight.states.updates import ClientUpdates

from .hypernetworks import BLOCK, HyperNetwork, HyperNetworks, weighted_sums
from .registry import Method
from .sparse_mixtures import OWN, Observed, SparseMixtures
from .stored import StoredModels

_DEFAULTS = {
    "retain": 0,
    "weights": "softmax",
    "scale_free": False,
    "embedding_dim": 100,
    "hidden_dim": 100,
}
"""Of the options of mixtures of all models."""


@checked
class PFedLA(StoredModels):
    r"""Layer-wised model aggregation (Ma et al. 2022, algorithms 1 and 2).

    The server stores the last model :math:`\theta_j` of each of the N clients that can train, and
    trains a hypernetwork for each. Client i starts from its own mixture, layer by layer,

    .. math:: \bar\theta_i^l = \sum_{j=1}^N \alpha_i^{l,j} \theta_j^l,
        \qquad \alpha_i^l = HN_i^l(v_i; \psi_i)

    (eq. 3 to 6), and returns its change :math:`\Delta\theta_i`. All mixtures of a round use the
    same stored models. Then :math:`\theta_i = \bar\theta_i + \Delta\theta_i`. The change replaces
    the negative gradient of the client's loss. The hypernetwork moves along

    .. math:: \nabla_{v_i, \psi_i} \sum_l \langle \bar\theta_i^l, \Delta\theta_i^l \rangle
        = \sum_{l, j} \langle \theta_j^l, \Delta\theta_i^l \rangle \nabla \alpha_i^{l,j}

    (eq. 10 and 11). This needs only inner products of models. Only the models and hypernetworks of
    clients that answered are updated, with any server optimizer. The others' models stay in the
    mixtures.

    A newcomer, or a client without training samples, gets the mean of the N models. Its own is not
    among them. A layer is a module with its own parameters. Buffers stay with the clients, start as
    in the client module, and never travel. The server's memory grows linearly with N for the
    models, and with the square of N for the hypernetworks.

    With ``retain=k`` it is HeurpFedLA(k): a client keeps the k layers with the largest weights of
    its own model. It starts them from its own last values. They are sent only at its first
    participation, and don't train its hypernetwork. Clients always return all layers.

    The products grow with the square of the change, so the right step size depends on the data.
    TensorBoard shows the mean weight of a client's own model in each layer, over the round's
    clients, as ``pfedla/own_weight/<layer>``. If it stays at 1/N, the step is too small.
    ``scale_free``, which is not in the paper, divides each layer's products by
    :math:`\|\Delta\theta_i^l\|^2`. Then the difference between two models counts in units of the
    client's change.

    With ``neighbours=m``, which is not in the paper either, a mixture has m + 2 sources: the
    client's own model, the mean model that the server trains as FedAvg does, and the models of the
    m most similar clients. See
    :class:`~pflight.callbacks.methods.sparse_mixtures.SparseMixtures`. There are no hypernetworks.
    The server's memory is linear in N, and the time of a round in the size of its cohort. The step
    of the weights is free of scale. The server optimizer trains the mean model; by default it is
    SGD with step 1. A client that has not answered yet gets the mean model. A cohort needs two
    clients or more to find out who is similar.

    Args:
        retain: k, the number of layers that a client keeps.
        weights: How logits become weights. ``"softmax"`` starts from the uniform mean.
            ``"relu_norm"`` divides positive parts by their sum, and starts from random weights. A
            client without positive logits keeps the layer.
        embedding_dim: Size of a client's embedding :math:`v_i`.
        hidden_dim: Width of the hypernetworks' hidden layers.
        lr: Step size of the default server optimizer, SGD, which trains the hypernetworks. Their
            gradients have the size of the clients' squared changes in a round: the smaller these
            are, the larger the step size has to be, unless ``scale_free``. With ``neighbours`` it
            is the step of the weights' logits.
        scale_free: Whether a layer's products are divided by the square of its change.
        granularity: ``"layers"``, or ``"model"`` for one weight for all layers of a model, to which
            the paper compares its layer-wise weights.
        neighbours: m, the number of similar clients in a sparse mixture; by default all N models
            are mixed, as in the paper.
        sketch_dim: Numbers for each layer of a client by which similar clients are found.

    Attributes:
        hypernetwork: Builds one client's hypernetwork, a module without inputs that returns logits
            ``[layers, N]``, from the numbers of layers and clients; by default a
            :class:`~pflight.callbacks.methods.hypernetworks.HyperNetwork`.
        layers: The names of the tensors of each layer.
        stored: The models of all clients, without buffers; every tensor is ``[num_clients, ...]``.
            With ``neighbours`` they are deviations from the mean model.
        hypernetworks: One for each client, unless there are ``neighbours``.
        sparse: The weights of sparse mixtures, if there are ``neighbours``.

    Raises:
        ConfigurationError: If an option is out of range, or more layers are retained than there
            are, or an option of the hypernetworks is given with ``neighbours``.

    Example:
        >>> PFedLA(retain=1).weights
        'softmax'

    References:
        Ma et al., Layer-wised Model Aggregation for Personalized Federated Learning, CVPR 2022,
        https://arxiv.org/abs/2205.03993.
    """

    hypernetworks: HyperNetworks
    sparse: SparseMixtures

    def __init__(
        self,
        retain: NonNegativeInt = 0,
        weights: Literal["softmax", "relu_norm"] = "softmax",
        embedding_dim: PositiveInt = 100,
        hidden_dim: PositiveInt = 100,
        lr: NonNegativeFloat = 0.5,
        scale_free: bool = False,
        granularity: Literal["layers", "model"] = "layers",
        neighbours: PositiveInt | None = None,
        sketch_dim: PositiveInt = 256,
    ) -> None:
        super().__init__()
        given = {"retain": retain, "weights": weights, "scale_free": scale_free}
        given |= {"embedding_dim": embedding_dim, "hidden_dim": hidden_dim}
        if neighbours is not None and (
            odd := [name for name in given if given[name] != _DEFAULTS[name]]
        ):
            raise ConfigurationError(
                f"PFedLA: neighbours={neighbours} can't be combined with "
                f"{odd[0]}={given[odd[0]]!r}, which is for mixtures of all models"
            )
        self.retain = retain
        self.weights = weights
        self.lr = lr
        self.scale_free = scale_free
        self.granularity = granularity
        self.neighbours = neighbours
        self.sketch_dim = sketch_dim
        self.hypernetwork: Callable[[int, int], nn.Module] = partial(
            HyperNetwork, embedding_dim=embedding_dim, hidden_dim=hidden_dim, weights=weights
        )
        self.layers: dict[str, tuple[str, ...]] = {}

    @property
    def algorithm_name(self) -> str:
        """pFedLA, or HeurpFedLA where layers are retained; sparse, or of whole models."""
        name = f"HeurpFedLA({self.retain})" if self.retain else "pFedLA"
        name += f" ({self.neighbours} neighbours)" if self.neighbours else ""
        return name + " (whole models)" * (self.granularity == "model")

    def setup_server(self) -> None:
        """Store the initial model for every client, and draw the hypernetworks or the signs."""
        super().setup_server()
        count, stored = self.clients.num_clients, self.stored.tensors()
        layers = self.clients.layout.layers
        self.layers = {name: names for name, names in layers.items() if stored.keys() & names}
        if self.granularity == "model":
            self.layers = {"model": tuple(chain.from_iterable(self.layers.values()))}
        self._layer_of = {
            name: index for index, names in enumerate(self.layers.values()) for name in names
        }
        if self.retain > len(self.layers):
            hint = ", since granularity is 'model'" if self.granularity == "model" else ""
            raise ConfigurationError(
                f"PFedLA: retain={self.retain} exceeds the number of layers ({len(self.layers)}"
                f"{hint}): {', '.join(self.layers)}"
            )
        if self.neighbours is not None:
            for leaf in stored.values():
                leaf.zero_()
            options = self.neighbours, self.sketch_dim, generator(Purpose.SERVER, self.clients.seed)
            self.add_state("sparse", SparseMixtures(stored, self._layer_of, *options))
            return
        with isolated(self.clients.device):
            seed_everything(derive_seed(Purpose.SERVER, self.clients.seed), self.clients.device)
            networks = (self.hypernetwork(len(self.layers), count) for _ in range(count))
            mixed = torch.isin(torch.arange(count), self.clients.trainable.cpu())
            hypernetworks = HyperNetworks(networks, self.weights, mixed)
        dtype = next(iter(stored.values())).dtype
        hypernetworks.to(torch.promote_types(dtype, torch.float))
        self.add_state("hypernetworks", hypernetworks)

    def more_memory(self) -> dict[str, int]:
        """Return the bytes of all hypernetworks and a round's gradients, or of sparse mixtures."""
        count, layout = self.clients.num_clients, self.clients.layout
        layers = sum(not {*layout.parameters}.isdisjoint(own) for own in layout.layers.values())
        layers = layers if self.granularity == "layers" else 1
        if self.neighbours is not None:
            weights = count * (layers * (2 * self.neighbours + 2) + 2 * self.neighbours)
            return {"sketches": 4 * count * layers * self.sketch_dim, "weights": 4 * weights}
        try:
            with isolated(self.clients.device), torch.device("meta"):
                network = self.hypernetwork(layers, count)
        except Exception:  # the size of a user's own network is not known before
            return {}
        one, cohort = sum(p.nbytes for p in network.parameters()), self.clients.cohort_size
        return {"hypernetworks": count * one, "gradients of a round's hypernetworks": cohort * one}

    def configure_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Return SGD with the step size of the hypernetworks, or with 1 for the mean model."""
        return torch.optim.SGD(parameters, lr=self.lr if self.neighbours is None else 1.0)

    @torch.no_grad()
    def layer_weights(self, clients: Tensor | Sequence[int]) -> dict[str, Tensor]:
        """Return, by layer, the weights of all N clients' models for some clients, ``[C, N]``.

        With ``neighbours``, a row adds up to 1 together with the weight of the mean model.
        """
        if not self.layers:
            raise ConfigurationError(
                "PFedLA has no weights yet: run it with a Trainer, or load a checkpoint"
            )
        clients = torch.as_tensor(clients)
        if self.neighbours is None:
            weights = self.hypernetworks(clients)
        else:
            weights = self.sparse.spread(clients)
        return dict(zip(self.layers, weights.unbind(dim=1), strict=True))

    def round(self, cohort: Tensor) -> None:
        """Run one round. No stored model changes before all clients have trained."""
        self.on_round_start()
        for updates in self.clients.train(cohort, self.send, multiple_of=BLOCK):
            self.receive(updates)
        self.set_pseudo_gradients()

    def send(self, clients: Tensor) -> TensorDict:
        """Return the models to send to the clients ``[C]``, and keep them for the update."""
        self._sent = clients, self.broadcast(clients)
        return self._sent[1]

    def on_round_start(self) -> None:
        """Start a round without updates, with inner products and changes of zero."""
        super().on_round_start()
        if self.neighbours is not None:
            self._seen: list[Observed] = []
            self._mean_change = WeightedMean(self.server.tensors(0, self.stored.tensors()))
            return
        weights = self.hypernetworks(torch.arange(1))
        self._products = weights.new_zeros(len(self.hypernetworks), *weights.shape[1:])
        self._squares = self._products.new_zeros(self._products.shape[:2])

    def broadcast(self, clients: Tensor) -> TensorDict:
        """Return each client's mixture, with its own last values in its retained layers."""
        if self.neighbours is not None:
            return self.sparse.mixtures(clients, self.server.tensors(0), self.stored.tensors())
        weights = self.hypernetworks(clients)
        own = F.one_hot(clients, weights.shape[2]).unsqueeze(1).to(weights)
        retained = self._retained(clients, weights).unsqueeze(2)
        weights = torch.where(retained, own, weights)
        mixtures = {
            name: weighted_sums(leaf, clients, weights[:, self._layer_of[name]])
            for name, leaf in self.stored.tensors().items()
        }
        return TensorDict(mixtures, batch_size=[len(clients)])

    def receive(self, updates: ClientUpdates) -> None:
        """Keep a chunk's models, and the inner products of their changes with all stored models."""
        asked, mixtures = self._sent
        if len(updates.clients) < len(asked):
            mixtures = mixtures[torch.isin(asked, updates.clients)]
        if self.neighbours is not None:
            super().receive(self._observe(updates, mixtures))
            return
        for name, leaf in self.stored.tensors().items():
            change = rows(updates.states[name] - mixtures[name]).to(self._products)
            place = updates.clients, self._layer_of[name]
            self._products[place] += change @ rows(leaf).to(self._products).T
            if self.scale_free:
                self._squares[place] += change.square().sum(dim=1)
        super().receive(updates)

    def set_pseudo_gradients(self) -> None:
        """Set the hypernetworks' gradients and store the models of clients that answered."""
        if self.neighbours is not None:
            self._learn()
            return
        clients = self.store_models().to(self._products.device)
        if not len(clients):
            return
        products = all_sum(self._products)
        if self.scale_free:  # a layer that has not changed has products of zero
            squares = all_sum(self._squares).unsqueeze(2)
            products = products / torch.where(squares > 0, squares, 1)
        own = products.new_zeros(len(self.layers))
        for part in clients.split(BLOCK):  # in blocks, to save memory
            with torch.enable_grad():
                weights = self.hypernetworks(part)
            own += weights.detach()[torch.arange(len(part)), :, part].sum(dim=0)
            retained = self._retained(part, weights).unsqueeze(2)
            gradients = -products[part].masked_fill(retained, 0)
            self.hypernetworks.set_gradients(part, weights, gradients)
        self._log(own / len(clients))

    def _observe(self, updates: ClientUpdates, sent: TensorDict) -> ClientUpdates:
        """Observe a chunk's changes, and return the clients' deviations from the mean model."""
        deviations, states = self.stored.tensors(), updates.states
        mean = self.server.tensors(0, deviations)
        size = [len(updates.clients)]
        changes = TensorDict({n: states[n] - sent[n] for n in deviations}, batch_size=size)
        self._mean_change.add(changes, updates.num_samples)
        self._seen.append(self.sparse.observe(updates.clients, changes, sent, mean, deviations))
        apart = TensorDict({n: states[n] - mean[n] for n in deviations}, batch_size=size)
        return replace(updates, states=apart)

    def _learn(self) -> None:
        """Store deviations, update the sparse mixtures, and move the mean model."""
        clients = self.store_models().to(self.clients.device)
        self._mean_change.all_reduce()
        if not len(clients):
            return
        own = self.sparse(clients)[:, :, OWN].mean(dim=0)
        random = generator(Purpose.SERVER, self.clients.seed, self.clients.rounds)
        self.sparse.learn(clients, self._seen, self.lr, random)
        if self._mean_change.weights[0] > 0:
            changes = self._mean_change.compute()[0]
            mean = self.server.tensors(0, self.stored.tensors())
            self.server.set_pseudo_gradient(0, {n: mean[n] + changes[n] for n in mean})
        self._log(own)

    def _log(self, own: Tensor) -> None:
        """Log the mean weights of the clients' own models ``[layers]``."""
        means = zip(self.layers, own.tolist(), strict=True)
        self.clients.log({f"pfedla/own_weight/{layer}": value for layer, value in means})

    def server_states(self) -> list[dict[str, Tensor]]:
        """Return the stored model of every client, or the mean model of sparse mixtures."""
        if self.neighbours is not None:
            return [self.server.tensors(0)]
        return super().server_states()

    def bytes_down(self, clients: Tensor, sent: TensorDict) -> int:
        """Return the bytes of the sent layers. Retained layers are sent only once."""
        if not self.retain:
            return super().bytes_down(clients, sent)
        sizes = torch.zeros(len(self.layers), dtype=torch.long)
        for name, leaf in self.stored.tensors().items():
            sizes[self._layer_of[name]] += leaf[0].nbytes
        retained = self._retained(clients, self.hypernetworks(clients)).cpu()
        travels = ~(retained & self.received[clients.cpu()].unsqueeze(1))
        return int((travels * sizes).sum())

    def _retained(self, clients: Tensor, weights: Tensor) -> Tensor:
        """Return a mask of the layers that clients keep ``[C, layers]``; ties go to lower indices.

        Clients that never train keep none.
        """
        own = weights[torch.arange(len(clients)), :, clients]
        order = own.argsort(dim=1, descending=True, stable=True)
        retained = torch.zeros_like(own, dtype=torch.bool)
        retained.scatter_(1, order[:, : self.retain], True)
        return retained & self.hypernetworks.mixed[clients].unsqueeze(1)


METHODS = (
    Method(
        "pFedLA",
        PFedLA,
        "PFedLA()",
        "its own mixture of all models",
        manual=True,
        tested={"": {}, "relu-norm": {"weights": "relu_norm"}, "sparse": {"neighbours": 2}},
    ),
    Method(
        "HeurpFedLA",
        PFedLA,
        "PFedLA(retain=k)",
        "its own mixture of all models",
        manual=True,
        tested={"": {"retain": 1}},
    ),
)

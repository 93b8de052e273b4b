"""APPLE: every client mixes all core models with weights that it learns in training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from lightning import LightningModule
from tensordict import TensorDict
from torch import Tensor
from torch.func import grad_and_value

from pflight.local_client import LocalClient, LocalWork
from pflight.method import OWN, ClientMethod, Model
from pflight.models.client_methods.apfl import inner_product
from pflight.options import NonNegativeFloat, PositiveInt, checked
from pflight.runs.host import check_fits
from pflight.states.state import StateLayout, state_bytes

from .gradients import check_gradients
from .registry import Method
from .stored import StoredModels

_SHIFT, _SHARES, _SELF, _PULL = (f"{OWN}{name}" for name in ("shift", "shares", "self", "pull"))
_BANK = f"{OWN}bank."
_HELD = 2**28  # bytes of cores that several clients hold at once, at most


@checked
class MixedCores(ClientMethod):
    r"""APPLE's client: it trains its core model and the weights of its mixture of all cores.

    Its model is :math:`w_i = \sum_j p_{ij} c_j`, a sum of its own core :math:`c_i` and the other
    cores as it received them. With :math:`g = \nabla f_i(w_i)`, each step is (Luo and Wu 2022)

    .. math:: c_i \leftarrow c_i - \eta\, p_{ii}\, g, \qquad p_{ij} \leftarrow p_{ij} -
        \eta_2 \big(\langle g, c_j \rangle + \lambda(r)\,\mu\,(p_{ij} - p^0_j)\big),

    the first by the module's own optimizer. It sends :math:`c_i`, keeps :math:`p_i`, and is judged
    by its last trained :math:`w_i`. Before its first training it is judged by the mixture of the
    current cores with the weights :math:`p^0`. Fine-tuning is plain, from this model.

    Args:
        cores: The number of cores.
        weights_lr: :math:`\eta_2`, the step of the weights.

    """

    keeps_memory = True
    one_pass = False
    temporary = ("shares", "self", "pull", "bank.")
    own_of = "all"

    def __init__(self, cores: int = 1, weights_lr: NonNegativeFloat = 1e-3) -> None:
        self.cores = cores
        self.weights_lr = weights_lr

    def state(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return :math:`p_i - p^0`, and the entries that all clients are sent alike.

        Raises:
            ConfigurationError: If a client has no memory for all cores.
        """
        size = self.cores * sum(weight.nbytes for weight in weights.values())
        whose = f"APPLE with num_clients={self.cores}"
        instead = "take fewer clients, or a smaller network"
        check_fits(torch.device("cpu"), whose, {"the cores at a client": size}, instead)
        zeros = next(iter(weights.values())).new_zeros(self.cores)
        own = torch.cat([zeros.new_ones(1), zeros[1:]])
        bank = {f"bank.{n}": w.detach().expand(self.cores, *w.shape) for n, w in weights.items()}
        shares = torch.full_like(zeros, 1 / self.cores)
        return {"shift": zeros, "shares": shares, "self": own, "pull": zeros.sum(), **bank}

    def mixture(self, c: LocalClient) -> dict[str, Tensor]:
        """Return :math:`w_i`."""
        p, own = c.own["shares"] + c.own["shift"], c.own["self"]
        return {
            name: torch.tensordot(p * (1 - own), c.own[f"bank.{name}"], 1) + (p * own).sum() * core
            for name, core in c.weights.items()
        }

    def loss(self, c: LocalClient, batch: Any) -> Tensor:
        """Return the mixture's loss as a function of the core only, and step the weights."""
        if c.anchor is None:
            return c.task_loss(batch)
        shares, shift, own = c.own["shares"], c.own["shift"].clone(), c.own["self"]
        weight = ((shares + shift) * own).sum()
        with torch.no_grad():
            gradients, loss = grad_and_value(c.task_loss_at)(self.mixture(c), batch, c.buffers)
            slopes = torch.zeros_like(shift)
            for name, gradient in gradients.items():
                bank = c.own[f"bank.{name}"].flatten(1)
                slopes = slopes + (1 - own) * (bank @ gradient.flatten())
            slopes = slopes + own * inner_product(gradients, c.weights) + c.own["pull"] * shift
            # Clients that may not train have no core and no weight.
            c.own["shift"].copy_(torch.where(shares > 0, shift - self.weights_lr * slopes, shift))
        moved = {name: core - core.detach() for name, core in c.weights.items()}
        return loss + weight * inner_product(gradients, moved)

    def remember(self, c: LocalClient) -> Mapping[str, Tensor]:
        """Return :math:`w_i` and the buffers."""
        return {**c.state(), **self.mixture(c)}

    def models(self) -> dict[str, Model]:
        """Judge clients by their last mixtures, or by mixtures of the sent cores."""
        return {"": self._mixed}

    def _mixed(
        self, work: LocalWork, clients: Tensor, sent: TensorDict, states: TensorDict
    ) -> TensorDict:
        p = states[_SHARES] + states[_SHIFT]
        for name in [name for name in work.layout.own if name.startswith(_BANK)]:
            bank = states[name]
            mixtures = [torch.tensordot(*each, 1) for each in zip(p.to(bank), bank, strict=True)]
            if mixtures:  # one by one, since many clients share the cores in memory
                states[name.removeprefix(_BANK)] = torch.stack(mixtures)
        return states.update(work.remembered(clients, states).states)


@checked
class APPLE(StoredModels):
    r"""Adaptive personalized cross-silo federated learning (Luo and Wu 2022, algorithm 1).

    The server stores a core model of every client and sends all cores to each client. Clients mix
    the cores and train as in :class:`MixedCores`. The server takes no mean. Weights start at the
    clients' shares of all samples, :math:`p^0_j = n_j / \sum_k n_k`. A penalty pulls them there. It
    fades over the rounds r = 0, 1, ... to 0 in round L, by :math:`\lambda(r) = 10^{-3 r / L}` or
    :math:`\frac12 (\cos(\pi r / L) + 1)`.

    All cores start as the initial model. In the paper all clients take part in all rounds. Here a
    client that does not take part keeps its core and weights, and its core stays in the others'
    mixtures. Buffers stay with the clients. The server and each client need memory for all cores.

    Args:
        weights_lr: :math:`\eta_2`, the step of the weights.
        mu: :math:`\mu`, the weight of the penalty.
        schedule: How it fades: ``"exponential"`` or ``"cosine"``.
        penalty_rounds: L, the round from which there is no penalty.

    Attributes:
        shares: :math:`p^0`, 0 for clients that never train ``[num_clients]``.


    References:
        Luo and Wu, Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning,
        IJCAI 2022, https://arxiv.org/abs/2110.08394.
    """

    shares: Tensor
    refuses: ClassVar[Mapping[str, str]] = {
        "private": "its clients mix all entries of each other's models",
    }

    def __init__(
        self,
        weights_lr: NonNegativeFloat = 1e-3,
        mu: NonNegativeFloat = 0.1,
        schedule: Literal["exponential", "cosine"] = "exponential",
        penalty_rounds: PositiveInt = 16,
    ) -> None:
        super().__init__()
        self.weights_lr = weights_lr
        self.mu = mu
        self.schedule = schedule
        self.penalty_rounds = penalty_rounds
        self.client_method = MixedCores(weights_lr=weights_lr)

    def on_num_clients(self, num_clients: int) -> None:
        """Set the number of cores of clients to the number of clients."""
        self.client_method = MixedCores(num_clients, self.weights_lr)

    def setup_server(self) -> None:
        """Store the initial model as every client's core."""
        check_gradients(self.clients.module, "APPLE")
        super().setup_server()
        shares = torch.zeros(self.clients.num_clients, dtype=torch.double)
        if self.clients.data is not None:
            able = self.clients.trainable.cpu()
            shares[able] = self.clients.weights_of(able).double()
            shares /= shares.sum()
        self.add_state("shares", shares, on_cpu=True)

    def private_names(self, module: LightningModule, layout: StateLayout) -> set[str]:
        """Return the names of the private entries, including the weights."""
        return super().private_names(module, layout) | {_SHIFT}

    def more_memory(self) -> dict[str, int]:
        """Return the bytes of the cores of clients that train at once, at start and end."""
        bank, at_once = self._held()
        return {"clients' copies of all models": 2 * bank * min(at_once, self.clients.cohort_size)}

    def _held(self) -> tuple[int, int]:
        """Return the bytes of all cores, and the number of clients that may hold them at once."""
        layout = self.clients.layout
        bank = sum(layout.template[n].nbytes for n in layout.own if n.startswith(_BANK))
        return bank, max(1, _HELD // max(bank, 1))

    def round(self, cohort: Tensor) -> None:
        """Run one round, with a limited number of clients that hold all cores at once."""
        self.on_round_start()
        for updates in self.clients.train(cohort, self.broadcast, max_chunk=self._held()[1]):
            self.receive(updates)
        self.set_pseudo_gradients()

    def broadcast(self, clients: Tensor) -> TensorDict:
        """Return the clients' cores, and all cores for their mixtures."""
        count, sent = len(clients), self.models_of(clients)
        for name, leaf in self.stored.tensors().items():
            sent[f"{_BANK}{name}"] = leaf.expand(count, *leaf.shape)
        like = self.clients.layout.template[_SHARES].new_empty(0).to(clients.device)
        sent[_SHARES] = self.shares.to(like).expand(count, -1)
        sent[_SELF] = torch.nn.functional.one_hot(clients, len(self.shares)).to(like)
        sent[_PULL] = like.new_full((count,), self.mu * self.fade(self.clients.rounds))
        return sent

    def fade(self, round_index: int) -> float:
        r"""Return :math:`\lambda(r)`."""
        part = round_index / self.penalty_rounds
        if part >= 1:
            return 0.0
        return 0.001**part if self.schedule == "exponential" else (math.cos(math.pi * part) + 1) / 2

    def weights(self, clients: Tensor) -> Tensor:
        """Return :math:`p_i` of the clients ``[C, num_clients]``."""
        states = self.clients.start_states(clients, self.broadcast(clients))
        return states[_SHARES] + states[_SHIFT]

    def set_pseudo_gradients(self) -> None:
        """Store the cores of the clients that answered."""
        self.store_models()

    def bytes_down(self, clients: Tensor, sent: TensorDict) -> int:
        """Return the bytes of the other cores, and once of the own core and the shares.

        A client knows its id and the round.
        """
        core = state_bytes(sent.select(*self.stored.tensors()))
        others = int((self.shares > 0).sum()) - 1
        new = int((~self.clients.has_memory(clients)).sum())
        return len(clients) * others * core + new * (core + state_bytes(sent.select(_SHARES)))


METHODS = (
    Method(
        "APPLE",
        APPLE,
        "APPLE(weights_lr, mu)",
        "its own mixture of models",
        tested={"": {"weights_lr": 0.05}},
    ),
)

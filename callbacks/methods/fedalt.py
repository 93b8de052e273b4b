"""FedALT: every client has its own adapter, beside the mean of the others' last adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from lightning import LightningModule
from tensordict import TensorDict
from tensordict.utils import expand_as_right
from torch import Tensor, nn

from pflight.adapters.pairs import factor_names, find_pairs
from pflight.adapters.second import second_adapters, second_names
from pflight.local_client import LocalClient, LocalWork
from pflight.method import ClientMethod, Model
from pflight.options import PositiveInt, checked
from pflight.states.state import StateLayout, WeightedMean, entries
from pflight.states.updates import ClientUpdates

from .registry import Method
from .stored import StoredModels


class RestOfTheWorld(nn.Module):
    r"""The other clients' mean adapter of each layer, which does not train, and its weight.

    Args:
        module: The client module, whose layers get hooks.
        mixer: Whether each layer learns the weights of both adapters.
    """

    def __init__(self, module: nn.Module, mixer: bool) -> None:
        super().__init__()
        weigh = None if mixer else _halves
        self.layers = second_adapters(module, "FedALT", weigh, trains=False)


def _halves(x: Tensor) -> tuple[float, float]:
    return 0.5, 0.5


@checked
class OwnAndOthers(ClientMethod):
    r"""Trains the client's own adapter L beside R, the others' mean, which is fixed.

    A layer gives (Bian et al. 2025)

    .. math:: W_0 x + a_0(x)\,s\,B_R A_R x + a_1(x)\,s\,B_L A_L x, \qquad
        (a_0, a_1) = \mathrm{softmax}(G x).

    L and the mixer G train in one optimizer, and with them all else that trains. A client goes on
    from its own L, and is never set back to a mean. It sends L.

    Args:
        mixer: Whether there is a mixer; without one both weights are 1/2.

    References:
        Bian et al., FedALT: Federated Fine-Tuning through Adaptive Local Training with
        Rest-of-World LoRA, 2025, https://arxiv.org/abs/2503.11880.
    """

    keeps_memory = True

    def __init__(self, mixer: bool = True) -> None:
        self.mixer = mixer

    def beside(self, module: LightningModule) -> nn.Module:
        """Return the others' adapters and the mixers."""
        return RestOfTheWorld(module, self.mixer)

    def remembered(self, layout: StateLayout) -> tuple[str, ...]:
        """Return the names of the parameters that the client sends."""
        return layout.shared_parameters

    def remember(self, c: LocalClient) -> Mapping[str, Tensor]:
        """Return these parameters."""
        assert c.anchor is not None
        return {name: c.weights[name] for name in c.anchor}

    def before_training(self, work: LocalWork, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Start from the own adapter."""
        states = super().before_training(work, clients, sent)
        return self._own(work, clients, sent, states)

    def models(self) -> dict[str, Model]:
        """Judge clients by their own adapters beside those of the others."""
        return {"": self._own}

    def _own(
        self, work: LocalWork, clients: Tensor, sent: TensorDict, states: TensorDict
    ) -> TensorDict:
        received = {*sent.keys()}
        own = entries(work.remembered(clients, states).states)
        return states.update({name: value for name, value in own if name not in received})


@checked
class FedALT(StoredModels):
    r"""Adaptive local training with a rest-of-world adapter (FedALT, Bian et al. 2025).

    The module's own low-rank adapter L is the client's. Beside it each layer has a second adapter
    R, the mean of the other clients' last uploads, factor by factor:

    .. math:: A_R^i = \frac{1}{n - 1} \sum_{m \ne i} A_L^m, \qquad
        B_R^i = \frac{1}{n - 1} \sum_{m \ne i} B_L^m

    over the n clients that have taken part. Clients train as in :class:`OwnAndOthers`. Before
    anybody else has uploaded, R is the module's adapter as it is at first. A client that does not
    take part, or fails, counts with its last upload. The server stores the last L of each client.

    A client is judged by its own L and the newest R. A newcomer has the initial L and the mean of
    all uploads; the tags ``server/`` report the initial L with the client's R. Only R travels down
    and only L travels up. Mixers never travel.

    Args:
        mixer: Whether each layer learns the weights of both adapters for each of its inputs. By
            default it does; without a mixer both are 1/2.
        head: What becomes of all else that trains, such as a head: ``"private"`` keeps it with each
            client, ``"shared"`` takes the plain mean over the clients of a round.
        max_age: An upload counts for so many rounds; by default for ever.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.

    Attributes:
        stored: The last L of each client; every tensor is ``[num_clients, ...]``.
        uploaded: The round of each client's last upload, -1 for none ``[num_clients]``.

    Raises:
        ConfigurationError: If an option is out of range, or the client module has no plain LoRA.

    Example:
        >>> FedALT(mixer=False).head
        'private'

    References:
        Bian et al., FedALT: Federated Fine-Tuning through Adaptive Local Training with
        Rest-of-World LoRA, 2025, https://arxiv.org/abs/2503.11880.
    """

    uploaded: Tensor
    refuses: ClassVar[Mapping[str, str]] = {
        "term": "its clients start from adapters of their own, and not from the server's",
        "transform": "its clients send adapters that the server never sent",
    }

    def __init__(
        self,
        head: Literal["private", "shared"] = "private",
        max_age: PositiveInt | None = None,
        buffers: Literal["shared", "local", "reset"] = "local",
        *,
        mixer: bool | None = None,
    ) -> None:
        super().__init__(buffers)
        self.head = head
        self.max_age = max_age
        self.use_client_method(OwnAndOthers, mixer=mixer)

    @property
    def algorithm_name(self) -> str:
        """FedALT, and whether there is no mixer."""
        method: Any = self.clients.client_method
        return "FedALT" + " (no mixer)" * (not method.mixer)

    def private_names(self, module: LightningModule, layout: StateLayout) -> set[str]:
        """Return the names of the private entries, with the mixers and perhaps the head."""
        added, factors = {*layout.extra}, self.owned_names(module, layout)
        trained = {*layout.parameters}
        head = trained - factors - added if self.head == "private" else set()
        return super().private_names(module, layout) | (trained & added) | head

    def owned_names(self, module: LightningModule, layout: StateLayout) -> set[str]:
        """Return the names of the adapters' factors."""
        factors = factor_names(find_pairs(module))
        return super().owned_names(module, layout) | {*factors}

    @property
    def factors(self) -> dict[str, str]:
        """The names of R's factors that travel, by those of L."""
        found, sent = second_names(self.clients.module), {*self.sent_names}
        return {own: other for own, other in found.items() if own in sent}

    @property
    def stored_names(self) -> tuple[str, ...]:
        """Names of the stored entries, the factors of L."""
        return tuple(self.factors)

    @property
    def head_names(self) -> tuple[str, ...]:
        """Names of all else that travels, both ways."""
        factors = self.factors
        others = {*factors, *factors.values()}
        return tuple(name for name in self.sent_names if name not in others)

    def setup_server(self) -> None:
        """Make the server's model, and store the initial adapter for every client."""
        super().setup_server()
        never = torch.full((self.clients.num_clients,), -1)
        self.add_state("uploaded", never, on_cpu=True)

    def round(self, cohort: Tensor) -> None:
        """Run one round; clients return what they are not sent."""
        self.on_round_start()
        returns = (*self.stored_names, *self.head_names)
        for updates in self.clients.train(cohort, self.broadcast, returns=returns):
            self.receive(updates)
        self.set_pseudo_gradients()

    def on_round_start(self) -> None:
        """Start a round without updates."""
        super().on_round_start()
        self.mean = WeightedMean(self.server.tensors(0, self.head_names))

    def receive(self, updates: ClientUpdates) -> None:
        """Keep a chunk's adapters, and add its heads to the mean."""
        super().receive(updates)
        self.mean.add(updates.states, updates.num_samples.new_ones(len(updates.clients)))

    def set_pseudo_gradients(self) -> None:
        """Store the adapters of the clients that answered, and set the head to its mean."""
        self.uploaded[self.store_models()] = self.clients.rounds
        self.mean.all_reduce()
        if self.mean.weights[0] > 0:
            self.server.set_pseudo_gradient(0, self.mean.compute()[0])

    def broadcast(self, clients: Tensor) -> TensorDict:
        """Return the mean of the others' adapters, and the head."""
        sent = self.server.expand(0, self.head_names, len(clients))
        return sent.update(self.others(clients))

    def others(self, clients: Tensor | None = None) -> dict[str, Tensor]:
        """Return R by its names ``[C, ...]``: the mean of the uploads that count.

        Args:
            clients: Ids ``[C]``, whose own uploads are left out; ``None`` for one mean of all.
        """
        known = self.uploaded >= 0
        if self.max_age is not None:
            known &= self.clients.rounds - self.uploaded <= self.max_age
        found, stored = {}, self.stored.tensors()
        for own, other in self.factors.items():
            leaf, initial = stored[own], self.clients.layout.template[other]
            counts = known.to(leaf.device, torch.double)
            total = (leaf[counts > 0]).sum(0, dtype=torch.double)[None]
            count = counts.sum()[None]
            if clients is not None:
                mine, rows = counts[clients], leaf[clients]
                total = total - expand_as_right(mine, rows) * rows
                count = count - mine
            mean = total / expand_as_right(count.clamp(min=1), total)
            used = torch.where(expand_as_right(count, total) > 0, mean, initial.to(mean))
            found[other] = used.to(leaf.dtype)
        return found

    def server_states(self) -> list[dict[str, Tensor]]:
        """Return the server's model: the initial L, with R over all clients."""
        mean = {name: value[0] for name, value in self.others().items()}
        return [{**self.server.tensors(0), **mean}]


METHODS = (
    Method(
        "FedALT",
        FedALT,
        "FedALT(mixer, head)",
        "its own adapter, and the others' mean",
        needs="adapters",
        manual=True,
        tested={
            "": {},
            "shared": {"head": "shared", "buffers": "shared", "mixer": False},
            "age": {"max_age": 1},
        },
    ),
)

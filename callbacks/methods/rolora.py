"""RoLoRA: rounds train the two factors of low-rank adapters in turn."""

from __future__ import annotations

from typing import Literal

import torch
from lightning import LightningModule
from tensordict import TensorDict
from torch import Tensor

from pflight.adapters.pairs import trained_pairs, zero_first
from pflight.fedavg import FedAvg
from pflight.method import ClientMethod, Phase
from pflight.options import checked
from pflight.states.state import StateLayout, WeightedMean, state_bytes, state_tensors

from .registry import Method


class InTurn(ClientMethod):
    """Trains one factor of each low-rank adapter in even rounds, and the other in odd rounds.

    The resting factor has no gradient, so momentum and weight decay don't move it. All other
    parameters train in every round. Fine-tuning trains both factors.
    """

    def check(self, module: LightningModule) -> None:
        """Raise unless the module has adapters whose factors train.

        Raises:
            ConfigurationError: If it has none, or only one factor of an adapter trains.
        """
        self.factors(module)

    def factors(self, module: LightningModule) -> tuple[set[str], set[str]]:
        """Return the names of the factors that train in even rounds, and those of odd rounds.

        Even rounds train B. In a pair that begins with A = 0, as in an embedding, they train A: the
        other factor has no gradient yet.

        Raises:
            ConfigurationError: As in :meth:`check`.
        """
        tensors = state_tensors(module)
        even, odd = set[str](), set[str]()
        for pair in trained_pairs(module, "RoLoRA"):
            first, second = zero_first(pair, tensors)
            even.add(first)
            odd.add(second)
        return even, odd

    def phases(self, module: LightningModule, epochs: int, anchored: bool) -> list[Phase] | None:
        """Return the phase of even rounds and that of odd rounds."""
        if not anchored:
            return None
        (even, odd), names = self.factors(module), {*StateLayout.of(module).names}
        return [
            Phase(0, epochs, names - odd, turn=(0, 2)),
            Phase(0, epochs, names - even, turn=(1, 2)),
        ]


@checked
class RoLoRA(FedAvg):
    r"""RoLoRA (Chen et al. 2024): rounds train the factors of low-rank adapters in turn.

    In rounds 0, 2 and so on clients train the factors B, and in all others the factors A. The other
    factor rests: it is the same for all clients. So the mean of the factors that were trained is
    exact: :math:`\sum_i w_i\, s B_i A = s \big(\sum_i w_i B_i\big) A`. FedIT lacks this.

    Clients send only the factors that they train. All other trained layers, such as a head, train
    and travel in every round. Adapters of embeddings begin with A, since their A is 0 at first.

    Args:
        weighting: As in :class:`FedAvg`.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.

    Raises:
        ConfigurationError: If the client module has no plain low-rank adapters, or a factor of one
            is frozen.

    References:
        Chen et al., Robust Federated Finetuning of LLMs via Alternating Optimization of LoRA, 2024,
        https://arxiv.org/abs/2502.01755.
    """

    aggregates = False
    client_method = InTurn()

    def __init__(
        self,
        weighting: Literal["samples", "uniform"] = "samples",
        buffers: Literal["shared", "local", "reset"] = "shared",
    ) -> None:
        super().__init__(weighting, buffers)

    def owned_names(self, module: LightningModule, layout: StateLayout) -> set[str]:
        """Return the names of the factors."""
        return super().owned_names(module, layout).union(*self.client_method.factors(module))

    def setup_server(self) -> None:
        """Make the server's model."""
        super().setup_server()
        self.factors = self.client_method.factors(self.clients.module)

    @property
    def training(self) -> set[str]:
        """Names of the factors that train in this round."""
        return self.factors[self.clients.current.entry.index % 2]

    @property
    def returned(self) -> list[str]:
        """Names of the entries that clients send in this round."""
        resting = self.factors[(self.clients.current.entry.index + 1) % 2]
        return [name for name in self.sent_names if name not in resting]

    def round(self, cohort: Tensor) -> None:
        """Run one round with the factors whose turn it is."""
        self.on_round_start()
        for updates in self.clients.train(cohort, self.broadcast, returns=self.returned):
            self.receive(updates)
        self.set_pseudo_gradients()

    def on_round_start(self) -> None:
        """Start a mean of the entries that clients send."""
        self.mean = WeightedMean(self.server.tensors(0, self.returned))

    def bytes_down(self, clients: Tensor, sent: TensorDict) -> int:
        """Return the bytes of what the clients ``[C]`` lack.

        A client of the last round still has the factors that rested then, which train now. Both
        factors have changed since any earlier round.
        """
        history = self.clients.history
        before = torch.tensor(history[-1].clients if history else [], dtype=torch.long)
        known = int(torch.isin(clients.cpu(), before).sum())
        return super().bytes_down(clients, sent) - known * state_bytes(sent.select(*self.training))


METHODS = (
    Method(
        "RoLoRA",
        RoLoRA,
        "RoLoRA(weighting)",
        "the server's adapters",
        needs="adapters",
        manual=True,
    ),
)

"""What clients with personal models build on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from pflight.state import StateModule, call_with

from .client import Batch, ClientModule


class RelocatedClient(ClientModule):
    """A client that can ask for its loss at other weights than those of its network.

    A subclass says in :meth:`loss` what it makes of that. Without an anchor, as in fine-tuning and
    centralized training, it is a plain client.

    Args:
        *args: As in :class:`ClientModule`.
        **kwargs: As in :class:`ClientModule`.
    """

    def weights(self) -> dict[str, Tensor]:
        """Return the network's trainable parameters, by their names in it."""
        return {name: p for name, p in self.network.named_parameters() if p.requires_grad}

    def statistics(self) -> dict[str, Tensor]:
        """Return the network's buffers, such as BatchNorm's, by their names in it."""
        kept = self.network.state_dict().keys()
        return {name: t for name, t in self.network.named_buffers() if name in kept}

    def loss_at(
        self, weights: Mapping[str, Tensor], batch: Batch, statistics: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the task's loss on a batch with other tensors in the network.

        Args:
            weights: Trainable parameters, by their names in the network.
            batch: Features and labels.
            statistics: Buffers by name, which the pass updates in place.
        """
        loss = _Loss(self.network, super().loss)
        tensors = {f"network.{name}": t for name, t in {**weights, **statistics}.items()}
        return call_with(loss, tensors, batch)


class PersonalClient(RelocatedClient):
    """A client that has a personal model beside the one that it shares.

    The shared model is the network. The personal one has a copy of every tensor of it that may
    change, under ``personal.``, and starts as the network is given.

    Args:
        *args: As in :class:`ClientModule`.
        **kwargs: As in :class:`ClientModule`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        weights = self.weights()
        self.personal = StateModule({**weights, **self.statistics()}, parameters=weights)

    def clip_groups(self) -> list[list[nn.Parameter]]:
        """Return the personal model's parameters apart from all others."""
        if self.anchor is None:  # the personal model rests
            return super().clip_groups()
        personal = list(self.personal.parameters())
        own = set(map(id, personal))
        return [[p for p in self.parameters() if id(p) not in own], personal]

    def personal_weights(self) -> dict[str, Tensor]:
        """Return the personal model's parameters, by their names in the network."""
        return dict(self.personal.named_parameters())

    def personal_statistics(self) -> dict[str, Tensor]:
        """Return the personal model's buffers, by their names in the network."""
        return dict(self.personal.named_buffers())


class _Loss(nn.Module):
    """Gives the loss of a network as its forward pass, as ``functional_call`` needs it."""

    def __init__(self, network: nn.Module, loss: Callable[[Batch], Tensor]) -> None:
        super().__init__()
        self.network = network
        self.loss = loss

    def forward(self, batch: Batch) -> Tensor:
        return self.loss(batch)

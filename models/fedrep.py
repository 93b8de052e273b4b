"""The client of FedRep."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import nn

from pflight.errors import ConfigurationError
from pflight.layers import Layers
from pflight.options import check_range, checked
from pflight.state import StateLayout

from .client import ClientModule

LAST_LAYER = Layers(last=1)


@checked
class FedRepClient(ClientModule):
    r"""A client that trains its head first and its body afterwards.

    Its model is :math:`h \circ \phi`. In the first ``head_epochs`` local epochs it trains the head
    :math:`h` while the body :math:`\phi` rests, and in all others the body while the head rests
    (Collins et al. 2021, algorithm 1, its client and server updates). What rests has no gradient,
    so that neither momentum nor weight decay moves it, and is in evaluation mode, so that BatchNorm
    uses its running statistics and leaves them as they are.

    Args:
        *args: As in :class:`ClientModule`.
        head: The layers of the head.
        head_epochs: Local epochs in which the head is trained.
        **kwargs: As in :class:`ClientModule`.

    Raises:
        ConfigurationError: If ``head_epochs`` is out of range, or there is no such head to train.

    Example:
        >>> client = FedRepClient(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), num_classes=2)
        >>> client.head.of(client)
        ('network.1',)

    References:
        Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML
        2021, https://arxiv.org/abs/2102.07078.
    """

    def __init__(
        self, *args: Any, head: Layers = LAST_LAYER, head_epochs: int = 1, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        check_range(self, "[0, inf)", head_epochs=head_epochs)
        self.head = head
        self.head_epochs = head_epochs
        layers, chosen = StateLayout.of(self).layers, head.of(self)
        self._parts = {
            "head": {layer: names for layer, names in layers.items() if layer in chosen},
            "body": {layer: names for layer, names in layers.items() if layer not in chosen},
        }
        # No list, whose contents an engine that stacks clients watches.
        self._resting: deque[tuple[nn.Module | nn.Parameter, str]] = deque()
        if head_epochs and not any(
            isinstance(thing, nn.Parameter) for thing, _ in self._awake("head")
        ):
            raise ConfigurationError(
                "FedRepClient: the head has no parameter that is trained; "
                f"the layers are {', '.join(layers)}"
            )

    def on_train_epoch_start(self) -> None:
        """Let the body rest in the epochs of the head, and the head in all others."""
        self._resting.extend(
            self._awake("body" if self.current_epoch < self.head_epochs else "head")
        )
        for thing, switch in self._resting:
            setattr(thing, switch, False)

    def on_train_epoch_end(self) -> None:
        """End the rest."""
        for thing, switch in self._resting:
            setattr(thing, switch, True)
        self._resting.clear()

    def _awake(self, part: str) -> list[tuple[nn.Module | nn.Parameter, str]]:
        """Return the modules and parameters of a part that train, each with what says so."""
        parameters = dict(self.named_parameters())
        awake: list[tuple[nn.Module | nn.Parameter, str]] = []
        for layer, names in self._parts[part].items():
            awake.append((self.get_submodule(layer), "training"))
            awake += [(parameters[n], "requires_grad") for n in names if n in parameters]
        return [(thing, switch) for thing, switch in awake if getattr(thing, switch)]

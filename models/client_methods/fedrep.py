"""The client method of FedRep."""

from __future__ import annotations

from lightning import LightningModule
from torch import nn

from pflight.errors import ConfigurationError
from pflight.method import ClientMethod, Phase
from pflight.options import NonNegativeInt, checked
from pflight.states.head import named_head
from pflight.states.layers import Layers
from pflight.states.state import StateLayout, other_places

_NO_HEADS = (
    nn.modules.batchnorm._NormBase,
    nn.Embedding,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.PReLU,
    nn.RMSNorm,
)


@checked
class HeadFirst(ClientMethod):
    r"""Trains a client's head first and its body afterwards.

    Its model is :math:`h \circ \phi`. In the first ``head_epochs`` local epochs it trains the head
    :math:`h`, and the body :math:`\phi` rests. In all others it trains the body, and the head rests
    (Collins et al. 2021, algorithm 1, its client and server updates). A resting part has no
    gradient, so neither momentum nor weight decay moves it. It is in evaluation mode, so BatchNorm
    uses its running statistics and leaves them as they are.

    Args:
        head: The layers of the head; by default the head of :func:`~pflight.states.head.head_of`.
            If none is named and the last layer is not linear, the last layer.
        head_epochs: Local epochs that train the head.

    Raises:
        ConfigurationError: If ``head_epochs`` is out of range.

    References:
        Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML
        2021, https://arxiv.org/abs/2102.07078.
    """

    algorithm = "FedRep"

    def __init__(self, head: Layers | None = None, head_epochs: NonNegativeInt = 1) -> None:
        self.head = head
        self.head_epochs = head_epochs

    def head_in(self, module: LightningModule) -> Layers:
        """Return the layers of the head of a client module."""
        if self.head is not None:
            return self.head
        (name,) = (last := Layers(last=1)).of(module)
        part = module.get_submodule(name)
        if isinstance(part, nn.Linear) or named_head(module):
            return Layers(head=True)
        if isinstance(part, _NO_HEADS):
            raise ConfigurationError(
                f"{self.algorithm}: the last layer that has tensors of its own is {name}, a "
                f"{type(part).__name__}, and no head: name the module that maps features to "
                f"outputs, as in head = 'classifier'{_ties_of(module)}"
            )
        return last

    def check(self, module: LightningModule) -> None:
        """Raise if there is no such head to train."""
        if self.head_epochs:
            self.check_parts(module, "head")

    def check_parts(self, module: LightningModule, *names: str) -> None:
        """Raise unless there is a parameter to train in each of these :meth:`parts`."""
        parts = self.trained(module)
        for name in names:
            if not parts[name]:
                layers = StateLayout.of(module).layers
                raise ConfigurationError(
                    f"{self.algorithm}: the {name} has no parameter that is trained; the layers "
                    f"are {', '.join(layers)}"
                )

    def phases(self, module: LightningModule, epochs: int, anchored: bool) -> list[Phase]:
        """Return the epochs of the head, then those of the body."""
        parts, first = self.trained(module), min(epochs, self.head_epochs)
        found = [Phase(0, first, parts["head"]), Phase(first, epochs - first, parts["body"])]
        return [phase for phase in found if phase.epochs]

    def trained(self, module: LightningModule) -> dict[str, set[str]]:
        """Return the :meth:`parts`, without names of parts that train no parameter."""
        trained, parts = StateLayout.of(module).parameters, self.parts(module)
        return {part: set() if n.isdisjoint(trained) else n for part, n in parts.items()}

    def parts(self, module: LightningModule) -> dict[str, set[str]]:
        """Return the names of all tensors of the ``head``, the ``body``, and both: ``full``."""
        layers, whole = StateLayout.of(module).layers, {*StateLayout.of(module).names}
        head = {name for layer in self.head_in(module).of(module) for name in layers[layer]}
        return {"head": head, "body": whole - head, "full": whole}


def _ties_of(module: LightningModule) -> str:
    """Say which tensors of a module have two names, if there are any."""
    ties = [f"{alias} is {first}" for alias, first in other_places(module).items()]
    return f"; {', '.join(ties)}" if ties else ""

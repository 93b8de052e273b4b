"""FedProto: clients have their own models, and share the mean features of their classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from lightning import LightningModule
from tensordict import TensorDict
from torch import Tensor, nn

from pflight.local_client import LocalWork
from pflight.method import Model
from pflight.options import checked
from pflight.states.head import EXTRA, Head
from pflight.states.state import StateLayout
from pflight.states.updates import ClientUpdates

from .local import Local
from .prototypes import COUNTS, MEANS, ClassMeans, Prototypes, Prototypical, prototype_bytes
from .registry import Method

_OWN, _NEAREST = f"{EXTRA}.own", f"{EXTRA}.nearest"


class NearestPrototype(Prototypes):
    """Prototypes that can predict in place of the head.

    Args:
        classes: Number of classes.
        width: Number of features.
    """

    own: Tensor
    nearest: Tensor

    def __init__(self, classes: int, width: int) -> None:
        super().__init__(classes, width)
        self.register_buffer("own", torch.zeros(classes))  # numbers of the client's own samples
        self.register_buffer("nearest", torch.zeros(()))  # whether the nearest one predicts

    def forward(self, z: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the head's output, or negative distances of the features to prototypes.

        The prototypes of the client's own classes count, or all prototypes if it has none.
        """
        logits = head(z)
        known = self.counts > 0
        mine = known & (self.own > 0)
        known = torch.where(mine.any(), mine, known)
        distances = (z.unsqueeze(1) - self.means).square().sum(2)
        farthest = distances.amax(1, keepdim=True)
        nearness = torch.where(known, -distances, -farthest - 1)
        return torch.where((self.nearest > 0) & known.any(), nearness.to(logits.dtype), logits)


@checked
class ByPrototypes(Prototypical):
    """Judges clients by the nearest prototype as well as by their head.

    Args:
        lam: As in :class:`~pflight.callbacks.methods.prototypes.Prototypical`.
        align: Likewise.

    Raises:
        ConfigurationError: If an option is out of range.
    """

    def extra(self, module: LightningModule, head: Head) -> nn.Module:
        """Return the prototypes."""
        return NearestPrototype(int(module.num_classes), head.width)  # type: ignore[arg-type]

    def models(self) -> dict[str, Model]:
        """Judge clients by the nearest prototype, too."""
        return {"prototype/": self._by_prototype}

    def _by_prototype(
        self, work: LocalWork, clients: Tensor, sent: TensorDict, states: TensorDict
    ) -> TensorDict:
        own = work.class_counts_of(clients).to(states[_OWN])
        return states.update({_OWN: own, _NEAREST: torch.ones_like(states[_NEAREST])})


@checked
class FedProto(Local):
    r"""Federated prototype learning (Tan et al. 2022, algorithm 1).

    Every client has its own model. All models start from a common one. A client sends the mean
    features :math:`c_{ik}` of its classes, with their numbers of samples, and gets

    .. math:: \bar c_k = \frac{\sum_i n_{ik} c_{ik}}{\sum_i n_{ik}}

    over the clients of the last round that have the class and answered. A class without new means
    keeps its prototype. Clients train as in
    :class:`~pflight.callbacks.methods.prototypes.Prototypical`. A client is judged by its own
    model. The tags ``prototype/`` report predictions by the nearest prototype among the classes of
    its training samples.

    Args:
        lam: Weight of the distance to the prototypes; by default 1, or the value of the client
            module's own client method. With 0 this is :class:`Local`.
        align: ``"sample"`` or ``"class"``, as in
            :class:`~pflight.callbacks.methods.prototypes.Prototypical`.
        weighting: ``"samples"`` as above, or ``"uniform"`` for the plain mean over the clients that
            have the class.

    Raises:
        ConfigurationError: If an option is out of range, or the clients' module has no classes or
            no head.

    Example:
        >>> FedProto(lam=0.1).client_method
        ByPrototypes(lam=0.1, align='sample')

    References:
        Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022,
        https://arxiv.org/abs/2105.00243.
    """

    def __init__(
        self,
        lam: float | None = None,
        align: Literal["sample", "class"] | None = None,
        weighting: Literal["samples", "uniform"] = "samples",
    ) -> None:
        super().__init__()
        self.weighting = weighting
        self.use_client_method(ByPrototypes, lam=lam, align=align)

    def private_names(self, module: LightningModule, layout: StateLayout) -> set[str]:
        """Return the names of all entries except the prototypes."""
        return super().private_names(module, layout) - {MEANS, COUNTS, _OWN, _NEAREST}

    @property
    def sent_names(self) -> tuple[str, ...]:
        """Names of the prototypes, with numbers of samples."""
        return (MEANS, COUNTS)

    def on_round_start(self) -> None:
        """Start new sums."""
        self._means = ClassMeans(*self.server.tensors(0, self.sent_names).values())

    def receive(self, updates: ClientUpdates) -> None:
        """Add the prototypes of a chunk of clients to the sums."""
        means, counts = (updates.states[name] for name in self.sent_names)
        self._means.add(means, counts if self.weighting == "samples" else counts > 0)

    def set_pseudo_gradients(self) -> None:
        """Update the means of the sent classes."""
        self._means.update()

    def bytes_down(self, clients: Tensor, sent: TensorDict) -> int:
        """Return the bytes of the known prototypes, and once of the initial model."""
        known, row = int((sent[COUNTS][:1] > 0).sum()), sent[MEANS][0, 0].nbytes
        return super().bytes_down(clients, sent) + len(clients) * known * row

    def bytes_up(self, updates: ClientUpdates) -> int:
        """Return the bytes of the clients' prototypes, with class and number of samples."""
        number = updates.states[COUNTS].element_size()
        return prototype_bytes(updates, number if self.weighting == "samples" else 0)


METHODS = (
    Method(
        "FedProto",
        FedProto,
        "FedProto(lam=1.0)",
        "its own model",
        needs="a head and classes",
        tested={"": {}, "class": {"align": "class", "weighting": "uniform"}},
    ),
)

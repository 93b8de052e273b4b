"""FedProto: clients with models of their own, which share the mean features of their classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from lightning import LightningModule
from tensordict import TensorDict
from torch import Tensor, nn

from pflight.distributed import all_sum
from pflight.half import Half, LocalClient, LocalWork
from pflight.head import EXTRA, Head
from pflight.options import check_range, checked
from pflight.updates import ClientUpdates

from .local import Local

_MEANS, _COUNTS, _OWN, _NEAREST = (
    f"{EXTRA}.{name}" for name in ("means", "counts", "own", "nearest")
)
_ID = 8  # bytes of a class's number


class Prototypes(nn.Module):
    """Prototypes of classes, and whether they predict in place of the head.

    Args:
        classes: Number of classes.
        width: Number of features.
    """

    means: Tensor
    counts: Tensor
    own: Tensor
    nearest: Tensor

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.register_buffer("means", torch.zeros(classes, width))
        self.register_buffer("counts", torch.zeros(classes))  # 0 where there is no prototype
        self.register_buffer("own", torch.zeros(classes))  # of the client's own samples
        self.register_buffer("nearest", torch.zeros(()))

    def forward(self, z: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what the head gives, or less the farther the features are from a prototype.

        Prototypes of the client's own classes count, or all where it has none of them.
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
class Prototypical(Half):
    r"""Pulls a client's features towards the global prototypes of their classes.

    To the loss is added, over a batch of B samples with features :math:`z` of dimension d,

    .. math:: \frac{\lambda}{B d} \sum_b \|z_b - \bar c_{y_b}\|^2

    where samples of a class without prototype :math:`\bar c` add nothing (FedProto, Tan et al.
    2022, eq. 7, as in its authors' code). With ``align="class"`` it is
    :math:`\frac{\lambda}{d} \sum_k \|\hat z_k - \bar c_k\|^2`, where :math:`\hat z_k` are the
    means of the batch's classes. After training, the client's prototypes are its classes' mean
    features over all its training samples, in evaluation mode (eq. 3).

    Args:
        lam: Weight :math:`\lambda` of the distance.
        align: ``"sample"`` or ``"class"``.

    Raises:
        ConfigurationError: If an option is out of range.

    References:
        Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022,
        https://arxiv.org/abs/2105.00243.
    """

    needs_head = True
    needs_classes = True

    def __init__(self, lam: float = 1.0, align: Literal["sample", "class"] = "sample") -> None:
        check_range(self, "[0, inf)", lam=lam)
        self.lam = lam
        self.align = align

    def extra(self, module: LightningModule, head: Head) -> nn.Module:
        """Return the prototypes."""
        return Prototypes(int(module.num_classes), head.width)  # type: ignore[arg-type]

    def loss(self, c: LocalClient, batch: Any) -> Tensor:
        """Return the client's own loss plus the distance to the prototypes."""
        if not self.lam:
            return c.task_loss(batch)
        loss, z, _ = c.task_loss_and_features(batch)
        return loss + self.lam * distance_to_prototypes(
            c, batch, z, c.extra["means"], c.extra["counts"] > 0, self.align
        )

    def finish(
        self, work: LocalWork, clients: Tensor, starts: TensorDict, trained: TensorDict
    ) -> TensorDict:
        """Put the clients' own prototypes, and how many samples they are made of."""
        means, counts = own_prototypes(work, clients, trained, trained[_MEANS][0])
        return trained.update({_MEANS: means, _COUNTS: counts, _OWN: counts})


def distance_to_prototypes(
    c: LocalClient,
    batch: Any,
    z: Tensor,
    means: Tensor,
    known: Tensor,
    align: Literal["sample", "class"] = "sample",
) -> Tensor:
    """Return how far features are from the prototypes of their classes.

    Args:
        c: The client.
        batch: What the features are of.
        z: Features ``[n, d]``.
        means: Prototypes ``[K, d]``.
        known: Which classes have one ``[K]``.
        align: Whether each sample is compared, or the batch's mean of each class.
    """
    rows = c.classes(batch)
    if align == "sample":
        squares = (z - rows @ means).square().mean(1)
        return c.mean(squares * (rows @ known.to(z.dtype)))
    sizes = rows.sum(0)
    centers = (rows.T @ z) / sizes.clamp(min=1).unsqueeze(1)
    return ((centers - means).square().mean(1) * (known & (sizes > 0))).sum()


def own_prototypes(
    work: LocalWork, clients: Tensor, states: TensorDict, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Return clients' mean features by class ``[C, K, d]``, or 0, and counts ``[C, K]``.

    Args:
        work: What the clients can do.
        clients: Ids ``[C]``.
        states: Their models ``[C]``.
        like: A tensor ``[K, d]`` of their type.
    """
    sums = work.sums(clients, states, class_sums, {"z": like, "n": like[:, 0]})
    return sums["z"] / sums["n"].clamp(min=1).unsqueeze(2), sums["n"]


def class_sums(c: LocalClient, batch: Any) -> dict[str, Tensor]:
    """Return the sums of a batch's features by class ``[K, d]``, and numbers of samples ``[K]``."""
    _, z, _ = c.task_loss_and_features(batch)
    rows = c.classes(batch)
    return {"z": rows.T @ z, "n": rows.sum(0)}


@checked
class FedProto(Local):
    r"""Federated prototype learning (Tan et al. 2022, algorithm 1).

    Every client has a model of its own, all of which start from a common one. It sends the mean
    features :math:`c_{ik}` of its classes, with their numbers of samples, and gets

    .. math:: \bar c_k = \frac{\sum_i n_{ik} c_{ik}}{\sum_i n_{ik}}

    over the clients of the last round with the class that answered; a class that nobody has sent
    keeps its prototype. What clients do with them is :class:`Prototypical`'s. A client is judged by
    its own model; the tags ``prototype/`` are those of the nearest prototype among the classes of
    its training samples.

    Args:
        lam: Weight of the distance to the prototypes, by default 1; or that of the client module's
            own half. With 0 this is :class:`Local`.
        align: ``"sample"`` or ``"class"``, as in :class:`Prototypical`.
        weighting: ``"samples"`` as above, or ``"uniform"`` for the plain mean over the clients that
            have the class.

    Raises:
        ConfigurationError: If an option is out of range, or the clients' module has no classes or
            no head.

    Example:
        >>> FedProto(lam=0.1).half
        Prototypical(lam=0.1, align='sample')

    References:
        Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022,
        https://arxiv.org/abs/2105.00243.
    """

    further_models = ("prototype/",)

    def __init__(
        self,
        lam: float | None = None,
        align: Literal["sample", "class"] | None = None,
        weighting: Literal["samples", "uniform"] = "samples",
    ) -> None:
        super().__init__()
        self.weighting = weighting
        self.bring(Prototypical, lam=lam, align=align)

    def setup_server(self) -> None:
        """Keep the initial model and the global prototypes; all else is private to the clients."""
        super().setup_server()
        self.private = tuple(n for n in self.private if n not in (_MEANS, _COUNTS, _NEAREST))

    @property
    def sent_names(self) -> tuple[str, ...]:
        """Names of the prototypes, with numbers of samples."""
        return (_MEANS, _COUNTS)

    def on_round_start(self) -> None:
        """Start new sums."""
        state = self.server.tensors(0, self.sent_names)
        self._sums = torch.zeros_like(state[_MEANS], dtype=torch.double)
        self._weights = torch.zeros_like(state[_COUNTS], dtype=torch.double)

    def receive(self, updates: ClientUpdates) -> None:
        """Add the prototypes of a chunk of clients to the sums."""
        means, counts = (updates.states[name].double() for name in self.sent_names)
        weights = counts if self.weighting == "samples" else (counts > 0).double()
        self._sums += (means * weights.unsqueeze(2)).sum(0)
        self._weights += weights.sum(0)

    def step(self) -> None:
        """Take the means of the classes that somebody has sent."""
        sums, weights = all_sum(self._sums), all_sum(self._weights)
        state = self.server.tensors(0, self.sent_names)
        means = torch.where(weights.unsqueeze(1) > 0, sums / weights.unsqueeze(1), state[_MEANS])
        state[_MEANS].copy_(means)
        state[_COUNTS].copy_(torch.where(weights > 0, weights, state[_COUNTS]))

    def further_model(self, name: str, clients: Tensor) -> TensorDict:
        """Return the clients' own models ``[C]``, which predict by the nearest prototype."""
        states = self.personalize(clients)
        return states.update({_NEAREST: torch.ones_like(states[_NEAREST])})

    def bytes_down(self, clients: Tensor, sent: TensorDict) -> int:
        """Return the bytes of the known prototypes, and once those of the initial model."""
        known, row = int((sent[_COUNTS][:1] > 0).sum()), sent[_MEANS][0, 0].nbytes
        return super().bytes_down(clients, sent) + len(clients) * known * row

    def bytes_up(self, updates: ClientUpdates) -> int:
        """Return the bytes of the clients' prototypes, with class and number of samples."""
        counts, row = updates.states[_COUNTS], updates.states[_MEANS][:1, 0].nbytes
        number = counts.element_size() * (self.weighting == "samples")
        return int((counts > 0).sum()) * (row + _ID + number)

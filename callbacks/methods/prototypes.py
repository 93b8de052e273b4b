"""Prototypes: the mean features of classes, at a client and over clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from pflight.local_client import LocalClient, LocalWork
from pflight.method import ClientMethod
from pflight.options import NonNegativeFloat, checked
from pflight.runs.distributed import all_sum
from pflight.states.head import EXTRA
from pflight.states.updates import ClientUpdates

MEANS, COUNTS = f"{EXTRA}.means", f"{EXTRA}.counts"
_ID = 8  # bytes of a class's number


class Prototypes(nn.Module):
    """Prototypes of classes beside a head that predicts.

    Args:
        classes: Number of classes.
        width: Number of features.
    """

    means: Tensor
    counts: Tensor

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.register_buffer("means", torch.zeros(classes, width))
        self.register_buffer("counts", torch.zeros(classes))  # 0 where there is no prototype

    def forward(self, z: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the head's output."""
        return head(z)


@checked
class Prototypical(ClientMethod):
    r"""Pulls a client's features towards the global prototypes of their classes.

    For a batch of B samples with features :math:`z` of dimension d, the loss gets the term

    .. math:: \frac{\lambda}{B d} \sum_b \|z_b - \bar c_{y_b}\|^2

    where samples of a class without prototype :math:`\bar c` add nothing (FedProto, Tan et al.
    2022, eq. 7, as in its authors' code). With ``align="class"`` the term is
    :math:`\frac{\lambda}{d} \sum_k \|\hat z_k - \bar c_k\|^2`, with the means :math:`\hat z_k` of
    the batch's classes. After training, the client's prototypes are its classes' mean features over
    all its training samples, in evaluation mode (eq. 3).

    Args:
        lam: Weight :math:`\lambda` of the distance.
        align: ``"sample"`` or ``"class"``.


    References:
        Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022,
        https://arxiv.org/abs/2105.00243.
    """

    needs_head = True
    needs_classes = True
    per_sample = ("counts",)

    def __init__(
        self, lam: NonNegativeFloat = 1.0, align: Literal["sample", "class"] = "sample"
    ) -> None:
        self.lam = lam
        self.align = align

    def loss(self, c: LocalClient, batch: Any) -> Tensor:
        """Return the client's own loss plus the distance to the prototypes."""
        if not self.lam:
            return c.task_loss(batch)
        loss, z, _ = c.task_loss_and_features(batch)
        means, known, rows = c.extra["means"], c.extra["counts"] > 0, c.classes(batch)
        if self.align == "sample":
            squares = (z - rows @ means).square().mean(1)
            return loss + self.lam * c.mean(squares * (rows @ known.to(z.dtype)))
        sizes = rows.sum(0)
        centers = (rows.T @ z) / sizes.clamp(min=1).unsqueeze(1)
        squares = (centers - means).square().mean(1)
        return loss + self.lam * (squares * (known & (sizes > 0))).sum()

    def check_sent(self, sent: Mapping[str, Tensor], num_samples: int, num_steps: int) -> str:
        """Refuse counts that are not whole numbers, or don't add up to all samples."""
        counts = sent.get(COUNTS)
        if counts is None or _may_count(counts, num_samples):
            return ""
        return f"its counts by class are not those of its {num_samples} samples"

    def finish(
        self, work: LocalWork, clients: Tensor, starts: TensorDict, trained: TensorDict
    ) -> TensorDict:
        """Store the clients' own prototypes and their numbers of samples."""
        means, counts = own_prototypes(work, clients, trained, trained[MEANS][0])
        return trained.update({MEANS: means, COUNTS: counts})


def _may_count(counts: Tensor, num_samples: int) -> bool:
    """Return whether numbers of samples by class ``[K]`` are possible for a client."""
    exact = torch.finfo(counts.dtype).eps * num_samples  # half precision has few whole numbers
    whole = exact >= 0.5 or bool((counts == counts.round()).all())
    total = abs(float(counts.double().sum()) - num_samples)
    return whole and bool((counts >= 0).all()) and total <= len(counts) * exact


class ClassMeans:
    """Means over clients of vectors by class. They replace the previous means.

    Args:
        means: The previous means ``[K, d]``. A class without new vectors keeps its mean.
        weights: The weights of the previous means ``[K]``, 0 for a class without a mean.
    """

    def __init__(self, means: Tensor, weights: Tensor) -> None:
        self._means = means
        self._weights = weights
        self._sums = torch.zeros_like(means, dtype=torch.double)
        self._totals = torch.zeros_like(weights, dtype=torch.double)

    def add(self, means: Tensor, weights: Tensor) -> None:
        """Add the vectors of some clients ``[C, K, d]`` with weights ``[C, K]``."""
        self._sums += torch.einsum("ckd,ck->kd", means.double(), weights.double())
        self._totals += weights.double().sum(0)

    def update(self) -> None:
        """Replace the previous means. Every rank has to call it."""
        sums, totals = all_sum(self._sums), all_sum(self._totals).unsqueeze(1)
        self._means.copy_(torch.where(totals > 0, sums / totals, self._means))
        self._weights.copy_(torch.where(totals[:, 0] > 0, totals[:, 0], self._weights))


def prototype_bytes(updates: ClientUpdates, more: int = 0) -> int:
    """Return the bytes of clients' prototypes, each with its class and ``more`` bytes."""
    row = updates.states[MEANS][:1, 0].nbytes
    return int((updates.states[COUNTS] > 0).sum()) * (row + _ID + more)


def own_prototypes(
    work: LocalWork, clients: Tensor, states: TensorDict, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Return clients' mean features by class ``[C, K, d]``, or 0, and counts ``[C, K]``.

    Args:
        work: The clients' possible work.
        clients: Ids ``[C]``.
        states: The clients' models ``[C]``.
        like: A tensor ``[K, d]`` of the prototypes' type.
    """
    sums = work.sums(clients, states, class_sums, {"z": like, "n": like[:, 0]})
    return sums["z"] / sums["n"].clamp(min=1).unsqueeze(2), sums["n"]


def class_sums(c: LocalClient, batch: Any) -> dict[str, Tensor]:
    """Return sums of a batch's features ``[K, d]`` and numbers of samples ``[K]`` by class."""
    _, z, _ = c.task_loss_and_features(batch)
    rows = c.classes(batch)
    return {"z": rows.T @ z, "n": rows.sum(0)}

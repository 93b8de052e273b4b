"""The server's trust in its nodes: bounds for their updates and for their weights."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pflight.command.arguments import MAX_SAMPLES

from .messages import MessageError

_GROWTH = 1e3  # largest norm of an update, relative to that of the model, or to 1
_STEPS = 10**9  # largest growth of a counter
_APART = 10.0  # largest norm of a statistic, relative to the median of the round
_LEAST = 1e-12  # smallest share that is left for others
_VARIANCE = re.compile(r"(^|\.)running_var$")


@dataclass(frozen=True)
class Bounds:
    """Bounds set by the operator of the server.

    Attributes:
        max_samples: Largest number of samples of a client in a split.
        max_share: Largest share of a client in the weights of a mean; ``None`` for no bound.
    """

    max_samples: int = MAX_SAMPLES
    max_share: float | None = None

    def capped(self, counts: Tensor) -> Tensor:
        r"""Return weights ``[C]``, each at most ``max_share`` of their sum.

        They are :math:`\min(n_i, \tau)` with the largest valid :math:`\tau`. If there is no such
        :math:`\tau`, they are equal.

        Example:
            >>> Bounds(max_share=0.5).capped(torch.tensor([1000, 10, 10, 10])).tolist()
            [30.0, 10.0, 10.0, 10.0]
        """
        share, known = self.max_share, counts[counts > 0].double()
        if share is None or not len(known) or float(known.max() / known.sum()) <= share:
            return counts
        if share * len(known) < 1:
            return (counts > 0).double()
        ordered = known.sort(descending=True).values
        rest, tau = ordered.sum() - ordered.cumsum(0), float(ordered[-1])
        for capped in range(1, len(ordered)):
            if (left := 1 - share * capped) > _LEAST:
                tau = share * float(rest[capped - 1]) / left
            if float(ordered[capped]) <= tau:
                break
        return counts.double().clamp(max=tau)


def norm_of(tensors: Sequence[Tensor]) -> float:
    """Return the Euclidean norm of all tensors together, without overflow."""
    return math.hypot(*(float(tensor.double().norm()) for tensor in tensors))


def check_update(update: Mapping[str, Tensor], sent: Mapping[str, Tensor], gradient: bool) -> None:
    r"""Raise if an update is too large or impossible.

    Args:
        update: Entries of a model, or a gradient, from a client's node.
        sent: The same entries, as the server sent them.
        gradient: Whether the parameters are gradients.

    Raises:
        MessageError: If the norm is over :math:`10^3 \max(1, \|\theta\|)`, a counter is negative
            or has grown by more than :math:`10^9`, or a variance is negative.
    """
    before, changes = [], []
    for name, value in update.items():
        old = sent[name].to(value.device)
        if not value.is_floating_point():
            if value.dtype != torch.bool and value.numel():
                low, high = int(value.min()), int((value.long() - old.long()).max())
                if low < min(0, int(old.min())) or high > _STEPS:
                    raise MessageError(f"its {name} counts what can't be")
            continue
        if _VARIANCE.search(name) and bool((value < 0).any()) and bool((old >= 0).all()):
            raise MessageError(f"its {name} is a negative variance")
        before.append(old)
        changes.append(value if gradient else value.double() - old.double())
    largest = _GROWTH * max(1.0, norm_of(before))
    if (found := norm_of(changes)) > largest:
        raise MessageError(f"its update has norm {found:.2g}, of at most {largest:.2g}")


def outliers(statistics: Mapping[int, Mapping[str, Tensor]], floor: float) -> dict[int, str]:
    """Return the clients with a statistic over ten times the median norm, and why.

    Args:
        statistics: The entries that each client sends beside its model, by name.
        floor: Norms up to this value are never too large.
    """
    found: dict[int, str] = {}
    for name in dict.fromkeys(name for own in statistics.values() for name in own):
        norms = {i: norm_of([own[name]]) for i, own in statistics.items() if name in own}
        median = float(torch.tensor([*norms.values()], dtype=torch.double).median())  # lower median
        found |= {
            i: f"its {name} has norm {norm:.2g}, where the round's median is {median:.2g}"
            for i, norm in norms.items()
            if norm > max(_APART * median, floor)
        }
    return found

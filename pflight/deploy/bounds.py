"""What a server believes of its nodes: bounds of what they send, and of what they weigh."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pflight.command.deploy_command import MAX_SAMPLES

from .messages import MessageError

_GROWTH = 1e3  # times the norm of the model, or 1, that an update may have
_STEPS = 10**9  # by which a counter may grow
_APART = 10.0  # times the median of the round that a statistic may have
_LEAST = 1e-12  # share that is left for others
_VARIANCE = re.compile(r"(^|\.)running_var$")


@dataclass(frozen=True)
class Bounds:
    """Bounds that a server's operator sets.

    Attributes:
        max_samples: Samples that a client may have in a split.
        max_share: Share that a client may have of the weight of a mean; ``None`` for no bound.
    """

    max_samples: int = MAX_SAMPLES
    max_share: float | None = None

    def capped(self, counts: Tensor) -> Tensor:
        r"""Return weights ``[C]`` of which none has more than its share of their sum.

        They are :math:`\min(n_i, \tau)` with the largest :math:`\tau` for which that holds, and
        equal where none does.

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
    """Return the Euclidean norm of tensors together, which never overflows."""
    return math.hypot(*(float(tensor.double().norm()) for tensor in tensors))


def check_update(update: Mapping[str, Tensor], sent: Mapping[str, Tensor], gradient: bool) -> None:
    r"""Raise if an update is too large, or no such client can have made it.

    Args:
        update: What a client's node sends of a model, or a gradient.
        sent: What it was sent, of the same entries.
        gradient: Whether parameters are gradients.

    Raises:
        MessageError: If its norm is over :math:`10^3 \max(1, \|\theta\|)`, a counter is negative or
            has grown by more than :math:`10^9`, or a variance is negative.
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
    """Return the clients of a round that send a statistic of ten times the others' norm, and why.

    Args:
        statistics: What each client sends beside its model, by name.
        floor: A norm that is never too large.
    """
    found: dict[int, str] = {}
    for name in dict.fromkeys(name for own in statistics.values() for name in own):
        norms = {i: norm_of([own[name]]) for i, own in statistics.items() if name in own}
        median = float(torch.tensor([*norms.values()], dtype=torch.double).median())  # the lower
        found |= {
            i: f"its {name} has norm {norm:.2g}, where the round's median is {median:.2g}"
            for i, norm in norms.items()
            if norm > max(_APART * median, floor)
        }
    return found

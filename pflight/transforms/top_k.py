"""Sparse updates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from pflight.options import Interval, checked

from .base import Draw, Transform

_INDEX = 4  # bytes


@checked
class TopK(Transform):
    r"""Sends the largest entries of an update alone, and zeros for the others.

    Of :math:`d` parameters the :math:`k = \max(1, \lceil f d \rceil)` entries of the largest
    absolute value travel, over all layers together. Among equal values the first counts. With error
    feedback (Stich et al. 2018, algorithm 1) a client adds what was left out, :math:`e`, to its
    next update: it sends :math:`T(\Delta + e)`, and :math:`e` becomes
    :math:`\Delta + e - T(\Delta + e)`.

    An update takes the bytes of :math:`k` values, with a whole number of four bytes or a bit for
    each entry to say which they are, whichever is smaller.

    Args:
        fraction: The part :math:`f` of the entries, in (0, 1]. With 1 nothing is left out.
        error_feedback: Whether clients remember what was left out, in :math:`d` numbers each.

    References:
        Stich et al., Sparsified SGD with Memory, NeurIPS 2018, https://arxiv.org/abs/1809.07599.
    """

    stage = "compress"

    def __init__(
        self,
        fraction: Annotated[float, Interval("(0, 1]")] = 0.1,
        error_feedback: bool = True,
    ) -> None:
        self.fraction = fraction
        self.error_feedback = error_feedback

    @property
    def neutral(self) -> bool:
        """Whether nothing is left out."""
        return self.fraction == 1

    def count(self, size: int) -> int:
        """Return k for d parameters.

        Example:
            >>> TopK(0.1).count(30), TopK(0.1).count(31)
            (3, 4)
        """
        return max(1, math.ceil(Fraction(str(self.fraction)) * size))

    def __call__(self, updates: Tensor, draw: Draw) -> Tensor:
        """Return the updates ``[C, d]`` with zeros for all but the largest entries."""
        count, sizes = self.count(updates.shape[1]), updates.abs()
        least = sizes.topk(count, dim=1, sorted=True).values[:, -1:]
        above, equal = sizes > least, sizes == least
        left = count - above.sum(dim=1, keepdim=True)
        return updates * (above | (equal & (equal.cumsum(dim=1) <= left)))

    def nbytes(self, size: int, itemsize: int) -> int:
        """Return the bytes of the values and of where they are; at most those of all values."""
        count = self.count(size)
        where = min(count * _INDEX, math.ceil(size / 8))
        return min(size * itemsize, count * itemsize + where)

    def pack(self, update: Tensor) -> dict[str, Tensor] | None:
        """Return the values ``[k]``, and their places or one bit for each entry."""
        size = len(update)
        if self.nbytes(size, update.itemsize) == update.nbytes:
            return None
        count = self.count(size)
        places = update.nonzero().flatten()
        if len(places) < count:  # zeros fill up, from the first
            zeros = (update == 0).nonzero().flatten()[: count - len(places)]
            places = torch.cat([places, zeros]).sort().values
        if count * _INDEX <= math.ceil(size / 8):
            return {"values": update[places], "places": places.int()}
        bits = np.zeros(size, dtype=bool)
        bits[places.numpy()] = True
        return {"values": update[places], "bits": torch.from_numpy(np.packbits(bits))}

    def packed_like(self, size: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return tensors of the shapes and types of a packed update."""
        like = self.pack(torch.zeros(size, dtype=dtype))
        return {} if like is None else like

    def unpack(self, parts: Mapping[str, Tensor], size: int) -> Tensor:
        """Return the update ``[d]``."""
        values = parts["values"]
        if "places" in parts:
            places = parts["places"].long()
            if places.min() < 0 or places.max() >= size or len(places.unique()) < len(places):
                raise ValueError("places of its values are out of range or given twice")
        else:
            bits = np.unpackbits(parts["bits"].numpy(), count=size)
            places = torch.from_numpy(bits).nonzero().flatten()
            if len(places) != len(values):
                raise ValueError(f"it marks {len(places)} places for {len(values)} values")
        update = values.new_zeros(size)
        update[places] = values
        return update

"""One data set as columns: the features, and what is known of each sample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pflight.loaders import Rows

from .dealing import Bools, Ints


@dataclass(frozen=True)
class Samples:
    """A data set: features, which may be read from a file, and facts on each of its ``n`` samples.

    Attributes:
        x: Features ``[N, ...]``.
        y: Labels ``[n]``, int64.
        groups: Who made each sample ``[n]``, where the data say so.
        test: Which samples belong to the data set's own test set ``[n]``, where it has one.
        rows: Where in ``x`` each sample lies ``[n]``; ``None`` means that sample ``i`` is ``x[i]``.

    Example:
        >>> samples = Samples(torch.zeros(4, 1, 28, 28), torch.tensor([0, 1, 2, 1]))
        >>> ones = samples.where(samples.y.numpy() == 1)
        >>> ones.y.tolist(), ones.rows.tolist(), ones.x is samples.x
        ([1, 1], [1, 3], True)
    """

    x: Rows
    y: Tensor
    groups: Ints | None = None
    test: Bools | None = None
    rows: Ints | None = None

    def rows_of(self, indices: Tensor) -> Tensor:
        """Return where in ``x`` the samples of some positions ``[m]`` lie, ``[m]``."""
        return indices if self.rows is None else torch.from_numpy(self.rows)[indices]

    def where(self, keep: Bools) -> Samples:
        """Return the samples of a mask ``[n]``; their features stay where they are."""
        rows = np.arange(len(self.y)) if self.rows is None else self.rows
        return Samples(
            self.x,
            self.y[torch.from_numpy(keep)],
            None if self.groups is None else self.groups[keep],
            None if self.test is None else self.test[keep],
            rows[keep],
        )

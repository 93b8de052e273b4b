"""One data set as columns: features, labels, and further facts about each sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pflight.data.loaders import Rows

from .dealing import Bools, Ints


@dataclass(frozen=True)
class Samples:
    """A data set: features, which may be read from a file, and facts about its ``n`` samples.

    Attributes:
        x: Features ``[N, ...]``.
        y: Labels ``[n]``, int64.
        groups: The person who made each sample ``[n]``, if the data say so.
        test: Which samples belong to the data set's own test set ``[n]``, if it has one.
        rows: The row of ``x`` of each sample ``[n]``; ``None`` means that sample ``i`` is ``x[i]``.
        names: The names of the people, if the data know them; a sample's group is a position in
            this list.

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
    names: Sequence[str] = ()

    def rows_of(self, indices: Tensor) -> Tensor:
        """Return the rows of ``x`` of the samples at some positions ``[m]``."""
        return indices if self.rows is None else torch.from_numpy(self.rows)[indices]

    def where(self, keep: Bools) -> Samples:
        """Return the samples of a mask ``[n]``; their features are not copied."""
        rows = np.arange(len(self.y)) if self.rows is None else self.rows
        return Samples(
            self.x,
            self.y[torch.from_numpy(keep)],
            None if self.groups is None else self.groups[keep],
            None if self.test is None else self.test[keep],
            rows[keep],
            self.names,
        )

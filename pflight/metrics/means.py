"""The means over clients of a metric.

``pflight/experiments/statistics.py`` has the same means of results that were read from files.
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

MEANS = ("macro_", "micro_", "pooled_", "worst_decile_")
"""How the names of means begin. What is pooled is a metric of all samples together."""


def micro(values: Tensor, weights: Tensor) -> Tensor:
    """Return the mean over clients ``[C]``, weighted by numbers of samples, say."""
    return (weights * values).sum() / weights.sum()


def worst_decile(values: Tensor, best: Literal["max", "min"]) -> Tensor:
    """Return the mean of the worst tenth of the clients ``[C]``, rounded up."""
    worst = values.sort(descending=best == "min").values[: math.ceil(len(values) / 10)]
    return worst.mean()

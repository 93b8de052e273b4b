"""Cells of tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def cell(values: Sequence[float], digits: int = 1) -> str:
    """Return the mean, and the standard deviation of several values; nothing of none."""
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"

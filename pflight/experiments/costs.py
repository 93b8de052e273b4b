"""The costs of runs: bytes and time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from .outcome import Outcome


def bytes_of(run: Outcome) -> int:
    """Return the bytes that a run sent and received."""
    return run.bytes_down + run.bytes_up


def bytes_of_participation(run: Outcome) -> float:
    """Return the bytes that a client sends and receives when it takes part in a round."""
    return bytes_of(run) / run.participations if run.participations else math.nan


def seconds_of(runs: Sequence[Outcome]) -> float:
    """Return the median over seeds of the time of a round; NaN if it isn't known."""
    return median([run.seconds for run in runs if run.seconds is not None])


def median(values: Sequence[float]) -> float:
    """Return the median, which is infinite if too many values are; NaN without values.

    Example:
        >>> median([3, 5, math.inf]), median([3, math.inf])
        (5, inf)
    """
    return statistics.median(values) if values else math.nan

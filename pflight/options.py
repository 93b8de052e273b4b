"""Options that have to be numbers."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any


def number(value: Any) -> float:
    """Return a finite number as it is, and NaN for all else, which no comparison lets pass.

    Example:
        >>> number(0.5) > 0, number(None) > 0, number(float("inf")) > 0
        (True, False, False)
    """
    given = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if given else math.nan


def whole(value: Any) -> float:
    """Return a whole number as it is, and NaN for all else, which no comparison lets pass.

    Example:
        >>> whole(2) >= 1, whole(2.5) >= 1, whole(True) >= 1, whole(None) >= 1
        (True, False, False, False)
    """
    return number(value) if isinstance(value, Integral) else math.nan

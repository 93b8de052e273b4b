"""Options that have to be numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

from .errors import ConfigurationError


def number(value: Any) -> float:
    """Return a finite number as it is, and NaN for all else, which no comparison lets pass.

    Example:
        >>> number(0.5) > 0, number(None) > 0, number(float("inf")) > 0
        (True, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        return math.nan
    return float(value)


def whole(value: Any) -> float:
    """Return a whole number as it is, and NaN for all else, which no comparison lets pass.

    Example:
        >>> whole(2) >= 1, whole(2.5) >= 1, whole(True) >= 1, whole(None) >= 1
        (True, False, False, False)
    """
    return number(value) if isinstance(value, Integral) else math.nan


def check_at_least(least: float, kind: Callable[[Any], float], owner: str, **options: Any) -> None:
    """Raise unless all options of ``owner`` are numbers of a kind, and not below ``least``.

    Args:
        least: The smallest value that is allowed.
        kind: :func:`number` or :func:`whole`.
        owner: Whose options they are.
        **options: The options.

    Raises:
        ConfigurationError: Naming the option.
    """
    for name, value in options.items():
        if not kind(value) >= least:
            raise ConfigurationError(f"{owner}: {name} must be at least {least}, got {value}")

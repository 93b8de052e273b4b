"""The format of numbers in tables and on the axes of figures."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .statistics import Floats, floats, mean_and_deviation
from .tables import DASH

_SHARES = {"acc", "accuracy", "f1"}
_BYTES = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True)
class Unit:
    """A unit, and the number of decimals of its numbers.

    Attributes:
        name: The unit's name, such as ``%``; empty if there is none.
        factor: Factor of values.
        decimals: The number of decimals; ``None`` for three significant digits.
    """

    name: str = ""
    factor: float = 1.0
    decimals: int | None = 1

    def of(self, what: str) -> str:
        """Return a heading or label with the unit.

        Example:
            >>> PERCENT.of("macro acc")
            'macro acc, %'
        """
        return f"{what}, {self.name}" if self.name else what

    def text(self, value: float, more: int = 0) -> str:
        """Return a value, with some more decimals; a dash if it is not finite.

        Example:
            >>> PERCENT.text(0.93849), PERCENT.text(0.93849, more=1), PERCENT.text(math.inf)
            ('93.8', '93.85', '–')
        """
        if not math.isfinite(value):
            return DASH
        if self.decimals is None:
            return f"{self.factor * value:.{3 + more}g}"
        written = f"{self.factor * value:.{self.decimals + more}f}"
        return written if float(written) else written.removeprefix("-")

    def cell(self, values: Sequence[float]) -> str:
        """Return mean and standard deviation over seeds; a dash if a value is missing.

        Example:
            >>> PERCENT.cell([0.9, 0.92]), PERCENT.cell([0.9]), PERCENT.cell([])
            ('91.0 ± 1.4', '90.0', '–')
        """
        mean, deviation = mean_and_deviation(values)
        if not math.isfinite(deviation):
            return self.text(mean)
        return f"{self.text(mean)} ± {self.text(deviation)}"


PERCENT = Unit("%", 100.0)
COUNT = Unit(decimals=0)


def unit_of(metric: str, values: Floats) -> Unit:
    """Return the unit of a metric: accuracies and F1 in [0, 1] are written in percent.

    Args:
        metric: The metric's name.
        values: Its values.

    Example:
        >>> unit_of("top5_acc", np.array([0.5])).name, unit_of("mae", np.array([0.5])).decimals
        ('%', 3)
    """
    share = not _SHARES.isdisjoint(re.split(r"[^a-z0-9]+", metric.lower()))
    if share and not ((values < 0) | (values > 1)).any():
        return PERCENT
    return Unit(decimals=_decimals(values, digits=3))


def unit_of_bytes(sizes: Sequence[float]) -> Unit:
    """Return the decimal unit that gives sizes a usual length, zeros aside.

    Example:
        >>> unit_of_bytes([38_480, 76_960, 0])
        Unit(name='kB', factor=0.001, decimals=1)
    """
    typical = _typical(floats(sizes))
    power = min(max(int(math.log10(typical)) // 3, 0), len(_BYTES) - 1) if typical else 0
    return Unit(_BYTES[power], 1000.0**-power, 1 if power else 0)


def unit_of_seconds(times: Sequence[float]) -> Unit:
    """Return seconds, with decimals that suit the times."""
    return Unit("s", decimals=_decimals(floats(times), digits=3))


def _decimals(values: Floats, digits: int) -> int | None:
    """Return the decimals that give a typical value so many digits; ``None`` far from 1."""
    typical = _typical(values)
    if typical and not 1e-4 <= typical < 1e7:
        return None
    return max(0, digits - 1 - math.floor(math.log10(typical))) if typical else 1


def _typical(values: Floats) -> float:
    """Return the median size of the values that are neither zero nor unknown; zero of none."""
    sizes = np.abs(values[np.isfinite(values) & (values != 0)])
    return float(np.median(sizes)) if len(sizes) else 0.0

"""The statistics of a comparison, from the values of clients in runs with several seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .outcome import Curve, Mode

Floats = NDArray[np.float64]

DRAWS = 10_000
FEWEST = 6  # pairs for a sign test below 0.05, and for an interval
SEED = 0
LEVEL = 0.95
_AT_ONCE = 2**22  # drawn clients that are held in memory


def floats(values: Any) -> Floats:
    """Return values as an array, with NaN for ``None``."""
    return np.array(values, dtype=np.float64)


def macro(values: Floats) -> float:
    """Return the plain mean over the clients that have a value."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def micro(values: Floats, samples: Sequence[int]) -> float:
    """Return the mean over the clients that have a value, weighted by their samples."""
    known, counts = np.isfinite(values), np.array(samples, dtype=np.float64)
    weights = counts[known].sum()
    return float(values[known] @ counts[known] / weights) if weights else math.nan


def worst_decile(values: Floats, mode: Mode) -> float:
    """Return the mean of the worst tenth of the clients that have a value, rounded up.

    Example:
        >>> worst_decile(np.array([0.9, 0.2, 0.5, np.nan]), "max")
        0.2
    """
    known = np.sort(values[np.isfinite(values)])
    worst = math.ceil(len(known) / 10)
    return macro(known[:worst] if mode == "max" else known[len(known) - worst :])


def share_below(differences: Floats, mode: Mode) -> float:
    """Return the share of clients with a difference in the worse direction."""
    if not len(differences):
        return math.nan
    return float(((differences < 0) if mode == "max" else (differences > 0)).mean())


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean over seeds and the standard deviation (ddof 1), NaN of a single seed.

    Example:
        >>> mean_and_deviation([1.0, 3.0])
        (2.0, 1.4142135623730951)
    """
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    return float(np.mean(values)) if len(values) else math.nan, deviation


def median(values: Sequence[float]) -> float:
    """Return the median, which is infinite if too many values are; NaN without values.

    Example:
        >>> median([3, 5, math.inf]), median([3, math.inf])
        (5, inf)
    """
    return statistics.median(values) if values else math.nan


def reaching(curve: Curve, tag: str, target: float, mode: Mode) -> tuple[float, float]:
    """Return the first evaluated round that reaches a target, and the bytes until then.

    Returns:
        Both are infinite if no round does.
    """
    for trained, traffic, value in zip(
        curve.round, curve.bytes, curve.values.get(tag, ()), strict=False
    ):
        if value is not None and (value >= target if mode == "max" else value <= target):
            return trained, traffic
    return math.inf, math.inf


@dataclass(frozen=True)
class Difference:
    """The mean difference of one method from another, over clients and then over seeds.

    Attributes:
        mean: The difference.
        low: Lower end of its 95 % interval; NaN with fewer than six pairs of clients.
        high: Upper end; likewise.
        p: Two-sided, of no difference, from the draws of the interval, and at least the smallest p
            of a sign test over the pairs that differ.
        seeds: Number of seeds that both methods have.
        clients: Number of pairs of clients, of all seeds.
        above: Number of seeds with a positive difference.
        below: Number of seeds with a negative difference.
    """

    mean: float
    low: float
    high: float
    p: float
    seeds: int
    clients: int
    above: int
    below: int


def differences(
    pairs: Sequence[Sequence[Floats]], draws: int = DRAWS, seed: int = SEED
) -> list[Difference]:
    """Compare pairs of methods by a hierarchical bootstrap.

    A draw resamples the seeds with replacement. For each drawn seed, it resamples the clients anew,
    with replacement. Its value is the mean over the seeds of the means over the clients. The
    interval has the percentiles of the draws. With ``B`` draws, ``p`` is twice
    ``(b + 1) / (B + 1)``, and ``b`` is the smaller number of draws that are at most, or at least,
    zero. Few pairs support less than the draws suggest, so fewer than six have no interval. Also,
    ``p`` is at least ``2 ** (1 - m)``, the value of a sign test with ``m`` differing pairs that all
    agree.

    Args:
        pairs: For each pair of methods, and each seed that both have, the differences of their
            clients; no seed is without clients.
        draws: Number of draws.
        seed: Seed of the draws. Draws depend on the numbers of clients alone. So they are the same
            for all pairs with the same numbers, and other pairs don't matter.

    Example:
        >>> better = [np.array([0.1, 0.2, 0.3]), np.array([0.2, 0.2, 0.2])]
        >>> (found,) = differences([better])
        >>> round(found.mean, 3), found.low > 0, found.p, found.above, found.clients
        (0.2, True, 0.03125, 2, 6)
    """
    shapes = [tuple(len(column) for column in columns) for columns in pairs]
    drawn = np.empty((len(pairs), draws))
    for shape in dict.fromkeys(shapes):
        alike = [index for index, other in enumerate(shapes) if other == shape]
        columns = [
            np.stack(by_pair, axis=1) for by_pair in zip(*(pairs[i] for i in alike), strict=True)
        ]
        drawn[alike] = _drawn(columns, draws, seed).T
    return [_difference(columns, values) for columns, values in zip(pairs, drawn, strict=True)]


def _drawn(columns: Sequence[Floats], draws: int, seed: int) -> Floats:
    """Return the draws ``[draws, pairs]`` from differences ``[clients, pairs]`` by seed."""
    rng = np.random.default_rng(seed)
    seeds = rng.integers(len(columns), size=(draws, len(columns)))
    total = np.zeros((draws, columns[0].shape[1]))
    for index, column in enumerate(columns):
        draw, _ = np.nonzero(seeds == index)
        size = len(column)
        step = max(1, _AT_ONCE // size)
        for rows in (draw[start : start + step] for start in range(0, len(draw), step)):
            clients = rng.integers(size, size=(len(rows), size))
            places = (clients + size * np.arange(len(rows))[:, None]).ravel()
            times = np.bincount(places, minlength=clients.size).reshape(clients.shape)
            np.add.at(total, rows, times.astype(np.float64) @ column / size)
    return total / len(columns)


def _difference(columns: Sequence[Floats], drawn: Floats) -> Difference:
    scale = max(np.abs(column).max() for column in columns)
    drawn = np.where(np.abs(drawn) < 1e-12 * scale, 0, drawn)  # these are zero up to rounding
    pairs = np.concatenate(columns)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    if len(pairs) < FEWEST:
        low = high = math.nan
    fewer = min((drawn <= 0).sum(), (drawn >= 0).sum())
    apart = int((np.abs(pairs) >= 1e-12 * scale).sum()) if scale else 0
    p = max(2 * float(fewer + 1) / (len(drawn) + 1), smallest_sign_test(apart))
    means = [column.mean() for column in columns]
    return Difference(
        mean=float(np.mean(means)),
        low=float(low),
        high=float(high),
        p=min(1.0, p),
        seeds=len(columns),
        clients=len(pairs),
        above=sum(bool(mean > 0) for mean in means),
        below=sum(bool(mean < 0) for mean in means),
    )


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values after Holm's correction for the number of tests.

    The smallest of ``m`` is multiplied by ``m``, the next by ``m - 1``, and so on; none becomes
    smaller than one before it, or larger than 1.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]

    References:
        Holm, A Simple Sequentially Rejective Multiple Test Procedure, Scandinavian Journal of
        Statistics 1979.
    """
    values = np.array(p, dtype=np.float64)
    order = values.argsort(kind="stable")
    factors = len(values) - np.arange(len(values))
    corrected = np.empty_like(values)
    corrected[order] = np.minimum(np.maximum.accumulate(factors * values[order]), 1)
    return corrected.tolist()


def smallest_sign_test(pairs: int) -> float:
    """Return the smallest two-sided p that a sign test over pairs, or over seeds, can give.

    Example:
        >>> smallest_sign_test(3), smallest_sign_test(6)
        (0.25, 0.03125)
    """
    return min(1.0, 2.0 ** (1 - pairs))


def resamples(seeds: int) -> int:
    """Return the number of different ways to draw as many seeds as there are, with replacement.

    Example:
        >>> resamples(3), resamples(5)
        (10, 126)
    """
    return math.comb(2 * seeds - 1, seeds)

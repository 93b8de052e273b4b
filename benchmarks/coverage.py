"""How often the statistics of ``pflight compare`` find differences where there are none.

    python benchmarks/coverage.py

Methods that are equally good are simulated: the value of a client is normal, and with it, for each
method and seed, varies the mean over the clients: not at all, as much as the mean of 20 clients
does by chance, and three times as much. The first table says how often the 95 % interval of a
difference contains zero, the second how many of several equal methods are not bold, since their
interval from the best one is above zero, and in how many tables Holm's correction separates one.
"""

from __future__ import annotations

import argparse
import math

import numpy as np
from numpy.typing import NDArray

from pflight.experiments.statistics import LEVEL, differences, holm

CLIENTS = 20
SPREADS = {"not at all": 0, "as much": 1, "three times as much": 3}


def simulated(
    rng: np.random.Generator, methods: int, seeds: int, spread: float
) -> NDArray[np.float64]:
    """Return values ``[methods, seeds, clients]`` of methods that are equally good.

    Args:
        rng: What draws them.
        methods: How many.
        seeds: How many.
        spread: Standard deviation over seeds, in those of the mean over a seed's clients.
    """
    by_seed = rng.normal(0, spread / math.sqrt(CLIENTS), (methods, seeds, 1))
    return by_seed + rng.normal(size=(methods, seeds, CLIENTS))


def coverage(options: argparse.Namespace, seeds: int, spread: float) -> float:
    """Return the share of the intervals of a difference that contain zero."""
    rng = np.random.default_rng(0)
    pairs = simulated(rng, options.comparisons, seeds, spread)
    found = differences([list(pair) for pair in pairs], options.draws)
    return float(np.mean([one.low <= 0 <= one.high for one in found]))


def mistakes(
    options: argparse.Namespace, methods: int, seeds: int, spread: float
) -> tuple[float, float]:
    """Return the share of methods that are not bold, and of tables in which Holm's finds one."""
    rng = np.random.default_rng(0)
    not_bold, separated = [], []
    for _ in range(options.tables):
        values = simulated(rng, methods, seeds, spread)
        best = values.mean(axis=(1, 2)).argmax()
        others = np.delete(values, best, axis=0)
        found = differences([list(values[best] - other) for other in others], options.draws)
        not_bold += [one.low > 0 for one in found]
        separated.append(min(holm([one.p for one in found])) < 1 - LEVEL)
    return float(np.mean(not_bold)), float(np.mean(separated))


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--comparisons", type=int, default=2000, help="of the first table")
    parser.add_argument("--tables", type=int, default=200, help="for each line of the second")
    parser.add_argument("--draws", type=int, default=10_000, help="of the bootstrap")
    options = parser.parse_args()
    print(f"| seeds | {' | '.join(SPREADS)} |\n|---|{'---|' * len(SPREADS)}")
    for seeds in (1, 2, 3, 5, 10):
        cells = [f"{coverage(options, seeds, spread):.0%}" for spread in SPREADS.values()]
        print(f"| {seeds} | {' | '.join(cells)} |", flush=True)
    print("\n| methods | seeds | means vary | not bold | tables with one that Holm's separates |")
    print("|---|---|---|---|---|")
    for methods in (5, 38):
        for seeds in (3, 5):
            for name, spread in SPREADS.items():
                cells = [f"{share:.0%}" for share in mistakes(options, methods, seeds, spread)]
                print(f"| {methods} | {seeds} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

"""What a round takes from its clients, in runs of `papers.py` that test after each of some rounds.

    python benchmarks/forgetting.py runs/papers/fedec/cifar10_100_2/fedec_wo/0

The accuracy of the own models of a round's clients right after it, less that of the models which
they had before: the mean over clients and rounds, with a 95 % interval (from six of
them on), and the share that fell.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from papers import Test, tests_in, values_of, with_interval
from run_table import print_table

from pflight.experiments.statistics import differences


def gains(tests: list[Test]) -> NDArray[np.float64]:
    """Return what the rounds after the first test change of the accuracy of their clients.

    Args:
        tests: After rounds that follow each other.

    Raises:
        ValueError: They don't, or there is only one.
    """
    if len(tests) < 2:
        raise ValueError("it takes the tests after two rounds at least")
    found = []
    for before, after in pairwise(tests):
        if after["round"] != before["round"] + 1:
            raise ValueError(f"round {before['round'] + 1} was not tested")
        (earlier, _), (later, _) = (
            values_of(test, "own", ids=after["clients"]) for test in (before, after)
        )
        found.append(later - earlier)
    return np.concatenate(found)


def of_run(folder: Path) -> str:
    """Return a run's line of the table."""
    try:
        changed = 100 * gains(tests_in(folder / "tests"))
    except ValueError as error:
        raise SystemExit(f"{folder}: {error}") from None
    (mean,) = differences([[changed]])
    lost = 100 * (changed < 0).mean()
    return f"| {folder} | {with_interval(mean.mean, mean.low, mean.high)} | {lost:.0f} % |"


def main() -> None:
    """Print the table."""
    head = ["run", "change of the accuracy of a round's clients, in points", "lost"]
    print_table(__doc__, head, lambda folder: [of_run(folder)])


if __name__ == "__main__":
    main()

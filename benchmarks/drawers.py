"""Whether a drawer's number in Omniglot is one person in all alphabets.

    python benchmarks/drawers.py --root data

How wide and high a drawing is, and how much ink it has, is a person's habit. Of each of the 20
numbers of an alphabet the mean logarithms over characters are taken, relative to those of all
drawings of the character. The table has their correlations over the numbers: between every other
character and the rest of an alphabet, where a number is a person, and between two alphabets.
"""

from __future__ import annotations

import argparse
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from pflight.datamodules import Omniglot

PIXELS = 105
Habits = NDArray[np.float64]
"""Of each number: mean log width, log height and log ink ``[numbers, 3]``."""


def habits_of(root: str) -> dict[int, list[Habits]]:
    """Return the habits of each alphabet's drawers, character by character, by its first drawer."""
    drawings = Omniglot(root, download=False, image_size=PIXELS, drawer="person").load()
    characters, people = drawings.y.numpy(), drawings.groups
    ink = drawings.x.numpy()[:, 0] > 127
    sizes = [ink.any(axis=axis).sum(axis=1) for axis in (1, 2)]
    seen = np.log(np.stack([*sizes, ink.sum(axis=(1, 2))], axis=1))
    found: dict[int, list[Habits]] = {}
    for character in np.unique(characters):
        (rows,) = np.nonzero(characters == character)
        rows = rows[np.argsort(people[rows])]
        relative = seen[rows] - seen[rows].mean(axis=0)
        found.setdefault(int(people[rows[0]]), []).append(relative)
    return found


def correlations(one: list[Habits], other: list[Habits]) -> Habits:
    """Return the correlations of the mean habits in two lists of characters ``[3]``."""
    pairs = np.mean(one, axis=0).T, np.mean(other, axis=0).T
    return np.array([np.corrcoef(left, right)[0, 1] for left, right in zip(*pairs, strict=True)])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--root", default="data", help="folder of the archives")
    found = habits_of(parser.parse_args().root)
    kinds = {
        "halves of an alphabet": [correlations(own[::2], own[1::2]) for own in found.values()],
        "two alphabets": [correlations(*pair) for pair in combinations(found.values(), 2)],
    }
    print("| correlation between | pairs | width | height | ink |\n|---|---|---|---|---|")
    for kind, values in kinds.items():
        cells = zip(np.mean(values, axis=0), np.std(values, axis=0), strict=True)
        print(f"| {kind} | {len(values)} |", *(f"{mean:.2f} ± {std:.2f} |" for mean, std in cells))


if __name__ == "__main__":
    main()

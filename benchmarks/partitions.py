"""What each data set's clients hold: the tables and the pictures of the documentation.

    python benchmarks/partitions.py [digits cifar10 ...] [--root data] [--pictures docs/images]

Nothing is fetched: where a data set is not in ``root``, labels are generated that agree with it in
number. That is exact where all classes are equally large, and a likeness of FEMNIST and CelebA, of
which the papers print no more than the mean size of a client.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pflight.datamodules import (
    CIFAR10,
    CIFAR100,
    EMNIST,
    ByUser,
    ClassesPerClient,
    ClusteredSynthetic,
    Digits,
    FashionMNIST,
    FederatedDataModule,
    Omniglot,
    PartitionedDataModule,
    Samples,
    Synthetic,
)
from pflight.errors import ConfigurationError


class Labels(PartitionedDataModule):
    """Samples without features."""

    def __init__(
        self, labels: np.ndarray, owners: np.ndarray | None = None, **options: Any
    ) -> None:
        super().__init__(num_classes=int(labels.max()) + 1, **options)
        self.content = Samples(torch.zeros(len(labels)), torch.from_numpy(labels), owners)

    def load(self) -> Samples:
        return self.content


def balanced(num_classes: int, each: int, k: int) -> Labels:
    labels = np.arange(num_classes).repeat(each)
    return Labels(labels, partition=ClassesPerClient(k), num_clients=100)


def people(count: int, draw: Callable[[np.random.Generator], tuple[int, np.ndarray]]) -> Labels:
    """Generate people, each with a number of samples and with odds of the classes."""
    random = np.random.default_rng(0)
    sizes, odds = zip(*(draw(random) for _ in range(count)), strict=True)
    labels = [
        random.choice(len(p), size, p=p / p.sum()) for size, p in zip(sizes, odds, strict=True)
    ]
    owners = np.arange(count).repeat(sizes)
    return Labels(np.concatenate(labels), owners, partition=ByUser())


def writer(random: np.random.Generator) -> tuple[int, np.ndarray]:
    """A writer's samples: half of them digits, a mean of 227."""
    odds = np.r_[np.full(10, 1 / 20), np.full(52, 1 / 104)] * random.gamma(4, size=62)
    return int(random.lognormal(np.log(227) - 0.125, 0.5)), odds


def person(random: np.random.Generator) -> tuple[int, np.ndarray]:
    """A person's portraits, a mean of 21, some of them smiling."""
    smiles = random.beta(2, 2)
    return int(5 + 30 * random.beta(3, 2.6)), np.array([1 - smiles, smiles])


REAL: dict[str, Callable[[str], FederatedDataModule]] = {
    "digits": lambda root: Digits(),
    "fashion_mnist": lambda root: FashionMNIST(root, download=False),
    "emnist": lambda root: EMNIST(
        root, download=False, partition=ClassesPerClient(10), num_clients=100
    ),
    "cifar10": lambda root: CIFAR10(
        root, download=False, partition=ClassesPerClient(2), num_clients=100
    ),
    "cifar100": lambda root: CIFAR100(
        root, download=False, partition=ClassesPerClient(10), num_clients=100
    ),
    "omniglot": lambda root: Omniglot(root, download=False),
    "synthetic": lambda root: Synthetic(1.0, 1.0),
    "clustered": lambda root: ClusteredSynthetic(num_clients=20),
}
LIKE: dict[str, Callable[[], FederatedDataModule]] = {
    "emnist": partial(balanced, 47, 2800, 10),
    "cifar10": partial(balanced, 10, 6000, 2),
    "cifar100": partial(balanced, 100, 600, 10),
    "femnist": partial(people, 3550, writer),
    "celeba": partial(people, 9343, person),
}


def found(name: str, root: str) -> tuple[FederatedDataModule, str]:
    """Return the data set, or what is like it, and how to call it."""
    try:
        data = REAL[name](root)
        data.setup()
        return data, name
    except (ConfigurationError, KeyError):
        data = LIKE[name]()
        data.setup()
        return data, f"{name} (generated labels)"


def main() -> None:
    """Print and draw the data sets that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = list(REAL | LIKE)
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(names))
    parser.add_argument("--root", default="data")
    parser.add_argument("--pictures", type=Path, help="folder for the pictures")
    options = parser.parse_args()
    for name in options.names or names:
        data, title = found(name, options.root)
        print(f"{title}\n{data.summary()}\n")
        if options.pictures:
            path = options.pictures / f"partition-{name}.png"
            data.partition_figure().savefig(path, dpi=100)


if __name__ == "__main__":
    main()

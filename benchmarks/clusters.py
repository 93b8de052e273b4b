"""Whether the clients of a cluster hold the same classes, in runs of clustered methods.

    python benchmarks/clusters.py runs/papers/fesem/fashion_mnist/fesem_4/0

The *share* is how much of the variance of the clients' class frequencies lies between the clusters
of the last checkpoint: 0 if all clusters have the same frequencies, 1 if all clients of a cluster
do. Beside it stand the mean and the largest share of random clusters of the same sizes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import yaml
from jsonargparse import ArgumentParser
from numpy.typing import NDArray
from run_table import print_table

from pflight.datamodules import FederatedDataModule
from pflight.runs.checkpoint import read_checkpoint

DRAWS = 2000


def between(frequencies: NDArray[np.float64], clusters: NDArray[np.int64]) -> float:
    """Return the share of the variance of clients that lies between clusters.

    Args:
        frequencies: Of classes, ``[clients, classes]``.
        clusters: Of the clients.
    """
    means = np.empty_like(frequencies)
    for cluster in np.unique(clusters):
        means[clusters == cluster] = frequencies[clusters == cluster].mean(axis=0)
    return float(means.var(axis=0).sum() / frequencies.var(axis=0).sum())


def of_run(folder: Path) -> str:
    """Return a run's line of the table."""
    parser = ArgumentParser()
    parser.add_argument("--data", type=FederatedDataModule)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    data = parser.instantiate_classes(parser.parse_object({"data": config["data"]})).data
    data.prepare_data()
    data.setup("fit")
    counts = data.class_counts().double().numpy()
    callbacks = read_checkpoint(folder / "checkpoints" / "last.ckpt")["callbacks"].values()
    found = [state["assignments"].numpy() for state in callbacks if "assignments" in state]
    if not found:
        raise SystemExit(f"{folder} is of a method without clusters")
    (clusters,) = found
    known = (clusters >= 0) & (counts.sum(axis=1) > 0)
    clusters, counts = clusters[known], counts[known]
    frequencies = counts / counts.sum(axis=1, keepdims=True)
    rng = np.random.default_rng(0)
    random = [between(frequencies, rng.permutation(clusters)) for _ in range(DRAWS)]
    sizes = ", ".join(str(size) for size in sorted(np.bincount(clusters), reverse=True))
    share = between(frequencies, clusters)
    return f"| {folder} | {sizes} | {share:.2f} | {np.mean(random):.2f} | {max(random):.2f} |"


def main() -> None:
    """Print the table."""
    head = ["run", "clients by cluster", "share", "random, mean", "random, largest"]
    print_table(__doc__, head, lambda folder: [of_run(folder)])


if __name__ == "__main__":
    main()

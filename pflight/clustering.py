"""Clustering clients by the models that they send."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from .distributed import all_sum
from .engines import ClientUpdates
from .state import StateLayout, rows


def cluster_updates(
    clients: Tensor,
    updates: Iterable[ClientUpdates],
    layout: StateLayout,
    *,
    num_clusters: int,
    restarts: int,
    seed: int,
) -> Tensor | None:
    """Cluster clients by :func:`kmeans` on the parameters of the models that they sent.

    Args:
        clients: Ids of those that were asked, on any rank, ascending ``[M]``.
        updates: The updates of this rank's clients.
        layout: The layout of their states.
        num_clusters: K.
        restarts: As in :func:`kmeans`.
        seed: As in :func:`kmeans`.

    Returns:
        The cluster of each client ``[M]``, -1 where it did not answer; ``None`` if fewer than K
        clients answered.
    """
    size = sum(layout.template[name].numel() for name in layout.parameters)
    points = torch.zeros(len(clients), size, dtype=torch.double)
    answers = torch.zeros(len(clients), dtype=torch.long)
    for update in updates:
        members = torch.searchsorted(clients, update.clients.cpu())
        leaves = [rows(update.states[name]) for name in layout.parameters]
        points[members] = torch.cat(leaves, dim=1).cpu().double()
        answers[members] = 1
    all_sum(points)
    answered = all_sum(answers) > 0
    if answered.sum() < num_clusters:
        return None
    clusters = torch.full((len(clients),), -1)
    clusters[answered] = kmeans(points[answered], num_clusters, restarts, seed)
    return clusters


def kmeans(points: Tensor, num_clusters: int, restarts: int, seed: int) -> Tensor:
    """Return the cluster of each point by Lloyd's algorithm, the best of several starts.

    It starts from K distinct random points, and runs until nothing changes, at most 300 times. A
    cluster that runs empty starts again from the point farthest from its center.

    Args:
        points: ``[M, d]``.
        num_clusters: K.
        restarts: Number of starts, of which the lowest inertia wins.
        seed: Of the starts.

    Example:
        >>> kmeans(torch.tensor([[0.0], [10.0], [1.0]]), num_clusters=1, restarts=1, seed=0)
        tensor([0, 0, 0])
    """
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    estimator = KMeans(
        num_clusters,
        init="random",
        n_init=restarts,
        max_iter=300,
        tol=0.0,
        random_state=seed % 2**32,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # equal points
        return torch.from_numpy(estimator.fit_predict(points.numpy())).long()

"""Cluster clients by their sent models."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from pflight.runs.distributed import all_sum, gather, is_distributed
from pflight.states.state import rows
from pflight.states.updates import ClientUpdates

Linkage = Literal["single", "complete", "average", "spectral"]


def parameter_vectors(states: TensorDict, names: Iterable[str]) -> Tensor:
    """Concatenate entries of a stack ``[C]`` to vectors ``[C, d]``, in float32 or more.

    Example:
        >>> states = TensorDict({"w": torch.ones(2, 3, 4), "b": torch.zeros(2, 3)}, [2])
        >>> parameter_vectors(states, ["w", "b"]).shape
        torch.Size([2, 15])
    """
    vectors = torch.cat([rows(states[name]) for name in names], dim=1)
    return vectors.to(torch.promote_types(vectors.dtype, torch.float32))


def gather_states(
    updates: Iterable[ClientUpdates], device: torch.device
) -> tuple[Tensor, TensorDict]:
    """Return the clients that answered on any rank, ascending ``[M]``, and their states ``[M]``.

    Every rank has to call it. The ids are on the CPU, the states on the device.
    """
    chunks = [(update.clients.cpu(), update.states) for update in updates]
    if is_distributed():
        moved = [(clients, states.cpu()) for clients, states in chunks]
        chunks = [chunk for rank in gather(moved) for chunk in rank]
    clients, order = torch.cat([clients for clients, _ in chunks]).sort()
    return clients, TensorDict.cat([states.to(device) for _, states in chunks])[order]


def cluster_updates(
    clients: Tensor,
    updates: Iterable[ClientUpdates],
    like: Mapping[str, Tensor],
    *,
    num_clusters: int,
    restarts: int,
    seed: int,
) -> Tensor | None:
    """Cluster clients by :func:`kmeans` on the parameters of their sent models.

    Args:
        clients: Ids of the clients that were asked to train, on any rank, ascending ``[M]``.
        updates: The updates of this rank's clients.
        like: The entries that count, of one model.
        num_clusters: K.
        restarts: As in :func:`kmeans`.
        seed: As in :func:`kmeans`.

    Returns:
        The cluster of each client ``[M]``, -1 if it did not answer; ``None`` if fewer than K
        clients answered.
    """
    answered, points = sent_points(clients, updates, like)
    if len(points) < num_clusters:
        return None
    clusters = torch.full((len(clients),), -1)
    clusters[answered] = kmeans(points, num_clusters, restarts, seed)
    return clusters


def sent_points(
    clients: Tensor, updates: Iterable[ClientUpdates], like: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return which clients answered on any rank ``[M]``, and their parameters ``[A, d]``.

    Args:
        clients: As in :func:`cluster_updates`.
        updates: As in :func:`cluster_updates`.
        like: As in :func:`cluster_updates`.
    """
    size = sum(value.numel() for value in like.values())
    points = torch.zeros(len(clients), size, dtype=torch.double)
    answers = torch.zeros(len(clients), dtype=torch.long)
    for update in updates:
        members = torch.searchsorted(clients, update.clients.cpu())
        points[members] = parameter_vectors(update.states, like).cpu().double()
        answers[members] = 1
    all_sum(points)
    answered = all_sum(answers) > 0
    return answered, points[answered]


def proposed_clusters(points: Tensor, numbers: Collection[int]) -> dict[int, Tensor]:
    """Return the partitions of points that stand out from those with more or fewer clusters.

    Ward's method merges the points, and once more their directions as seen from the mean of all.
    Directions don't depend on how far each client has moved, which grows with its number of
    samples. Distances tell more if groups are of unequal size. Each of the two proposes the number
    of clusters after which the height of the merges rises most: the largest ratio of the merge of K
    clusters to the one before.

    Args:
        points: ``[M, d]``.
        numbers: Allowed numbers of clusters. Only those from 2 to M - 1 can be proposed.

    Returns:
        The cluster of each point ``[M]``, by number of clusters. If both propose the same number,
        the partition is that of the directions.

    Example:
        >>> points = torch.tensor([[1.0, 0.0], [1.1, 0.0], [0.0, 5.0], [0.0, 5.2], [-3.0, -3.0]])
        >>> proposed_clusters(points, range(2, 5))
        {3: tensor([1, 1, 0, 0, 2])}
    """
    from scipy.cluster.hierarchy import fcluster, linkage

    numbers = [k for k in sorted(numbers) if 2 <= k < len(points)]
    moves = (points - points.mean(0)).double().numpy(force=True)
    if not numbers or not moves.any():
        return {}
    lengths = np.linalg.norm(moves, axis=1, keepdims=True)
    directions = moves / np.maximum(lengths, np.finfo(float).tiny)
    found = {}
    for seen in (moves, directions):
        tree = linkage(seen, "ward")
        heights = tree[::-1, 2]  # the first merges two clusters
        least = np.finfo(float).eps * heights[0]
        rises = [heights[k - 2] / max(heights[k - 1], least) for k in numbers]
        best = numbers[int(np.argmax(rises))]
        found[best] = torch.from_numpy(fcluster(tree, best, "maxclust")).long() - 1
    return found


def linked(
    clients: Tensor,
    updates: Iterable[ClientUpdates],
    distance: Callable[[TensorDict, Mapping[str, Tensor]], Tensor],
    num_clusters: int,
    device: torch.device,
) -> Tensor | None:
    """Cluster clients by the distances of their sent models, with average linkage.

    Args:
        clients: As in :func:`cluster_updates`.
        updates: As in :func:`cluster_updates`.
        distance: Returns the distances ``[M]`` of a stack of models to one of them.
        num_clusters: K.
        device: Where distances are computed.

    Returns:
        As :func:`cluster_updates`.
    """
    from sklearn.cluster import AgglomerativeClustering

    answered, states = gather_states(updates, device)
    if len(answered) < num_clusters:
        return None
    table = torch.stack([distance(states, state) for state in states]).cpu()
    estimator = AgglomerativeClustering(num_clusters, metric="precomputed", linkage="average")
    clusters = torch.full((len(clients),), -1)
    found = estimator.fit_predict(((table + table.T) / 2).numpy()) if len(table) > 1 else [0]
    clusters[torch.searchsorted(clients, answered)] = torch.as_tensor(found).long()
    return clusters


def kmeans(points: Tensor, num_clusters: int, restarts: int, seed: int) -> Tensor:
    """Return the cluster of each point by Lloyd's algorithm, the best of several starts.

    It starts from K distinct random points, and runs until nothing changes, at most 300 times. A
    cluster that runs empty starts again from the point farthest from its center.

    Args:
        points: ``[M, d]``.
        num_clusters: K.
        restarts: Number of starts. The one with the lowest inertia is taken.
        seed: Seed of the starts.

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


def in_order(labels: Iterable[int]) -> Tensor:
    """Return clusters numbered in the order of their first members.

    Example:
        >>> in_order([2, 0, 2, 1])
        tensor([0, 1, 0, 2])
    """
    numbers: dict[int, int] = {}
    return torch.tensor([numbers.setdefault(int(label), len(numbers)) for label in labels])


def laplacian(distances: Tensor) -> Tensor:
    r"""Return the normalised Laplacian of Gaussian similarities, in double precision.

    Similarities are :math:`S = \exp(-d^2 / 2 \sigma^2)`, where :math:`\sigma` is the median of the
    distances of different items. If it is 0, all similarities are 1. With the degrees
    :math:`\Delta_{ii} = \sum_j S_{ij}`, the Laplacian is :math:`I - \Delta^{-1/2} S \Delta^{-1/2}`.

    Args:
        distances: Symmetric ``[M, M]``, with 0 on the diagonal.
    """
    distances = distances.double()
    upper = distances[torch.ones_like(distances).triu(1) > 0]
    sigma = float(np.median(upper.numpy())) if len(upper) else 0.0
    similar = torch.exp(-((distances / sigma) ** 2) / 2) if sigma else torch.ones_like(distances)
    degrees = similar.sum(1)
    return torch.eye(len(distances)).double() - similar / torch.outer(degrees, degrees).sqrt()


def spectral(distances: Tensor, least: int, most: int, seed: int) -> Tensor:
    """Return the cluster of each item ``[M]`` by spectral clustering of the :func:`laplacian`.

    The number K of clusters is that before the largest gap of the ascending eigenvalues. The
    smaller number wins a tie. :func:`kmeans` splits the rows of the first K eigenvectors, each row
    with length 1.

    Args:
        distances: Symmetric ``[M, M]``, with 0 on the diagonal.
        least: The smallest K, at most M.
        most: The largest K.
        seed: Seed of k-means.

    Example:
        >>> apart = (torch.tensor([0.0, 0.0, 1.0, 1.0])[:, None] != torch.tensor([0.0, 0, 1, 1]))
        >>> spectral(apart.double(), least=2, most=3, seed=0)
        tensor([0, 0, 1, 1])
    """
    values, vectors = torch.linalg.eigh(laplacian(distances))
    gaps = values[least - 1 : most + 1].diff().round(decimals=12)
    num_clusters = least + int(gaps.argmax()) if len(gaps) else least
    rows = torch.nn.functional.normalize(vectors[:, :num_clusters])
    return in_order(kmeans(rows, num_clusters, restarts=10, seed=seed))


def bipartition(similarities: Tensor, linkage: Linkage = "single", seed: int = 0) -> Tensor:
    """Split M items in two by pairwise similarities, and return those apart from the first.

    The most similar groups are merged until two are left. Among equally similar pairs, the one with
    the smallest (i, j) comes first. With ``"single"`` linkage the largest similarity between the
    two groups is the smallest possible.

    Args:
        similarities: Symmetric ``[M, M]``, M at least 2.
        linkage: The similarity of two groups: the largest of their pairs (``"single"``), the
            smallest (``"complete"``) or the mean (``"average"``). ``"spectral"`` is spectral
            clustering of cosines, with the affinity ``(1 + cosine) / 2``.
        seed: Seed of spectral clustering.

    Returns:
        BoolTensor ``[M]``, False for the first item and those in its group.

    Example:
        >>> bipartition(torch.tensor([[1.0, 0.2, 0.9], [0.2, 1.0, -0.5], [0.9, -0.5, 1.0]]))
        tensor([False,  True, False])
    """
    similarities = torch.maximum(similarities, similarities.T)  # rounding may make them differ
    if linkage == "spectral":
        groups = _spectral(similarities, seed)
    else:
        groups = _agglomerate(similarities.double().numpy(force=True).copy(), linkage)
    return torch.from_numpy(groups != groups[0])


def _agglomerate(similarities: NDArray[np.float64], linkage: Linkage) -> NDArray[np.int64]:
    """Merge until two groups are left; SciPy's linkages break ties in another order."""
    count = len(similarities)
    groups, sizes = np.arange(count), np.ones(count)
    np.fill_diagonal(similarities, -np.inf)
    for _ in range(count - 2):
        i, j = divmod(int(similarities.argmax()), count)
        one, other = similarities[i], similarities[j]
        if linkage == "single":
            merged = np.maximum(one, other)
        elif linkage == "complete":
            merged = np.minimum(one, other)
        else:
            merged = (sizes[i] * one + sizes[j] * other) / (sizes[i] + sizes[j])
        similarities[i] = similarities[:, i] = merged
        similarities[j] = similarities[:, j] = similarities[i, i] = -np.inf
        groups[groups == j] = i
        sizes[i] += sizes[j]
    return groups


def _spectral(cosines: Tensor, seed: int) -> NDArray[np.int64]:
    from sklearn.cluster import SpectralClustering

    affinity = ((1 + cosines.double()) / 2).clamp(min=0).numpy(force=True)
    estimator = SpectralClustering(2, affinity="precomputed", random_state=seed % 2**32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few points, equal points, points without affinity
        return estimator.fit_predict(affinity)


@dataclass(frozen=True)
class TrimmedMean:
    """A mean or median of M values that is robust to a few outliers.

    Args:
        beta: Share to leave out: ``m = floor(beta * M)``, but always less than half.
        trim: ``"coordinate"`` leaves out the ``m`` smallest and the ``m`` largest values of each
            coordinate; ``"radius"`` the ``m`` values farthest from the median of all.
        estimate: ``"mean"`` or ``"median"`` of the rest, by coordinate.

    Example:
        >>> TrimmedMean(beta=0.2)(torch.tensor([[0.0], [1.0], [2.0], [3.0], [50.0]]))
        tensor([2.])
    """

    beta: float
    trim: Literal["coordinate", "radius"] = "coordinate"
    estimate: Literal["mean", "median"] = "mean"

    def near(self, points: Tensor) -> Tensor:
        """Return the indices of the points ``[M, d]`` that trimming by radius keeps."""
        indices = torch.arange(len(points), device=points.device)
        if self.trim == "coordinate" or not self._cut(len(points)):
            return indices
        distances = (points - _median(points)).square().sum(1)
        return distances.argsort(stable=True)[: len(points) - self._cut(len(points))].sort().values

    def rest(self, values: Tensor) -> Tensor:
        """Return the values ``[M, ...]`` that trimming by coordinate keeps."""
        cut = self._cut(len(values)) if self.trim == "coordinate" else 0
        return values.sort(dim=0).values[cut:-cut] if cut else values

    def __call__(self, values: Tensor) -> Tensor:
        """Return the mean or median ``[...]`` of the values ``[M, ...]`` given by :meth:`near`."""
        rest = self.rest(values)
        return rest.mean(0) if self.estimate == "mean" else _median(rest)

    def _cut(self, count: int) -> int:
        return min(math.floor(self.beta * count + 1e-9), (count - 1) // 2)


def _median(values: Tensor) -> Tensor:
    """Return the median over the first dimension; the mean of the middle two if M is even."""
    count = len(values)
    return values.sort(dim=0).values[(count - 1) // 2 : count // 2 + 1].mean(0)


def trimmed_kmeans(
    points: Tensor,
    num_clusters: int,
    mean: TrimmedMean,
    *,
    restarts: int,
    iterations: int,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Cluster points by Lloyd's algorithm, with centers that are robust to outliers.

    It starts from K distinct random points. A cluster that runs empty starts again from the point
    farthest from its center. The start with the lowest inertia over the points that trimming keeps
    is taken.

    Args:
        points: ``[M, d]``, at least K.
        num_clusters: K.
        mean: Computes a center from the points of its cluster.
        restarts: Number of starts.
        iterations: Maximum number of steps in each.
        seed: Seed of the starts.

    Returns:
        The cluster of each point ``[M]``, and the centers ``[K, d]``.

    Example:
        >>> points = torch.tensor([[1.0], [1.0], [1.0], [1.0], [-50.0], [9.0], [9.0], [9.0]])
        >>> clusters, centers = trimmed_kmeans(
        ...     points, 2, TrimmedMean(beta=0.2), restarts=5, iterations=8, seed=0)
        >>> centers.sort(dim=0).values.flatten()
        tensor([1., 9.])
    """
    random = torch.Generator().manual_seed(seed)

    @lru_cache(maxsize=4 * num_clusters)  # since starts reach the same clusters repeatedly
    def center_of(*members: int) -> tuple[Tensor, float]:
        chosen = points[list(members)]
        chosen = chosen[mean.near(chosen)]
        center = mean(chosen)
        return center, (mean.rest(chosen) - center).square().sum().item()

    best = points[:0], points[:0]
    lowest = math.inf
    for _ in range(restarts):
        centers = points[torch.randperm(len(points), generator=random)[:num_clusters]]
        clusters = torch.full((len(points),), -1, device=points.device)
        for _ in range(iterations):
            before, clusters = clusters, _assign(points, centers)
            if torch.equal(before, clusters):
                break
            inertia = 0.0
            for k in clusters.unique().tolist():
                centers[k], part = center_of(*(clusters == k).nonzero().flatten().tolist())
                inertia += part
        if inertia < lowest:
            lowest, best = inertia, (clusters, centers)
    return best


def nearest(points: Tensor, centers: Tensor) -> Tensor:
    """Return the index of the center ``[K, d]`` nearest to each point ``[M, d]``.

    Example:
        >>> nearest(torch.tensor([[0.0], [6.0]]), torch.tensor([[1.0], [9.0]]))
        tensor([0, 1])
    """
    return _distances(points, centers).argmin(dim=1)


def _distances(points: Tensor, centers: Tensor) -> Tensor:
    """Return L2 distances ``[M, K]``, precise also for close points."""
    return torch.cdist(points, centers, compute_mode="donot_use_mm_for_euclid_dist")


def _assign(points: Tensor, centers: Tensor) -> Tensor:
    """Return the nearest center of each point; an empty cluster gets the farthest point."""
    distances, clusters = _distances(points, centers).min(dim=1)
    for k in range(len(centers)):
        if not (clusters == k).any():
            farthest = distances.argmax()
            clusters[farthest], distances[farthest] = k, 0
    return clusters

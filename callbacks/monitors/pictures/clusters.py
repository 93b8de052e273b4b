"""The clients' models in two dimensions, coloured by cluster."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from pflight.data.cohort import sample_clients
from pflight.data.palette import COLORS, FAINT, point_style
from pflight.federation import Federation
from pflight.options import Interval, checked
from pflight.randomness import Purpose, generator
from pflight.runs.distributed import gather
from pflight.states.state import rows
from pflight.states.updates import ClientUpdates

from .picture import RepeatedPicture, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH = 2048
_POINTS: dict[str, Any] = {"s": 36, "alpha": 0.7, "linewidths": 0}
_CROSSES: dict[str, Any] = {"s": 200, "color": "black", "marker": "+", "linewidths": 1.0}


@checked
class ClusterPlot(RepeatedPicture):
    """Draws the clients' returned models in the plane of their first two principal components.

    A point stands for the parameters that a client returned at its last participation. If the
    server callback has ``assignments``, as FeSEM does, points are coloured by cluster, and crosses
    are the clusters' models. ``assignments`` is a LongTensor ``[num_clients]`` with -1 for none.
    With many clients, only a random sample is drawn. The picture is called ``clusters``. It needs
    at least two clients that have answered.

    Models of more than 2,048 parameters are folded to 2,048 numbers with random signs (see
    :func:`fold`). This changes distances by about 3 %. So the sample takes at most 8 kB per client,
    in memory and in each checkpoint: 3.3 MB for 400 clients.

    Args:
        max_clients: Number of clients in the sample; FeSEM's authors draw 400.
        every: As in :class:`RepeatedPicture`.

    Raises:
        ConfigurationError: If ``max_clients`` is below 2, or ``every`` below 1.

    References:
        Long et al., Multi-Center Federated Learning: Clients Clustering for Better
        Personalization, World Wide Web 2023, https://arxiv.org/abs/2108.08647.
    """

    def __init__(
        self, max_clients: Annotated[int, Interval("[2, inf)")] = 400, every: int | None = None
    ) -> None:
        super().__init__(every)
        self.max_clients = max_clients
        self._sample = torch.empty(0, dtype=torch.long)
        self._names: tuple[str, ...] = ()
        self._models: dict[int, Tensor] = {}
        self._arrived: dict[int, Tensor] = {}

    def start(self, federation: Federation) -> None:
        """Subscribe to the clients' updates."""
        self._sample = sample_clients(
            federation.clients.trainable, self.max_clients, federation.clients.seed
        )
        self._names = federation.layout.parameters
        if not federation.history:
            self._models = {}
        if self._collect not in federation.clients.on_updates:
            federation.clients.on_updates.append(self._collect)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Gather the models of all ranks, and draw if it is time."""
        for arrived in gather(self._arrived):
            self._models |= arrived
        self._arrived = {}
        super().on_train_epoch_end(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the last round and unsubscribe."""
        super().on_train_end(trainer, pl_module)
        self._stop(pl_module)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Unsubscribe."""
        self._stop(pl_module)

    def figures(self, federation: Federation) -> Mapping[str, Figure]:
        """Return the picture of the current models."""
        if len(self._models) < 2:
            return {}
        clients = torch.tensor(sorted(self._models))
        models = torch.stack([self._models[client] for client in clients.tolist()])
        assignments = getattr(federation.server_callback, "assignments", None)
        if assignments is None:
            return {"clusters": cluster_figure(models)}
        clusters = assignments[clients]
        states = [federation.server.tensors(k, self._names) for k in range(len(federation.server))]
        centers = fold(torch.stack([_flat(state) for state in states]))
        return {"clusters": cluster_figure(models, clusters, centers)}

    def state_dict(self) -> dict[str, Any]:
        """Return the clients' models, for the checkpoint."""
        if not self._models:
            return {}
        clients = torch.tensor(list(self._models))
        return {"clients": clients, "models": torch.stack(list(self._models.values()))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        if state_dict:
            clients = state_dict["clients"].tolist()
            self._models = dict(zip(clients, state_dict["models"], strict=True))

    def _collect(self, updates: ClientUpdates) -> None:
        clients = updates.clients.cpu()
        drawn = torch.isin(clients, self._sample).nonzero().flatten()
        if len(drawn):
            leaves = [rows(updates.states[name][drawn]) for name in self._names]
            vectors = torch.cat([leaf.float() for leaf in leaves], dim=1).cpu()
            self._arrived.update(zip(clients[drawn].tolist(), fold(vectors), strict=True))

    def _stop(self, module: L.LightningModule) -> None:
        if isinstance(module, Federation) and self._collect in module.clients.on_updates:
            module.clients.on_updates.remove(self._collect)


def cluster_figure(
    models: Tensor, clusters: Tensor | None = None, centers: Tensor | None = None
) -> Figure:
    """Draw models in the plane of their first two principal components.

    Args:
        models: One model per row ``[M, d]``, ``M`` at least 2.
        clusters: The cluster of each ``[M]``, -1 for none; ``None`` draws no colours.
        centers: The clusters' models ``[K, d]``, projected onto the same plane.

    Returns:
        A figure without a window, ready for a logger or ``savefig``. Up to 70 clusters have
        different colours and markers.
    """
    from matplotlib.ticker import MaxNLocator
    from sklearn.decomposition import PCA

    pca = PCA(min(2, *models.shape), svd_solver="full")
    with np.errstate(invalid="ignore"):  # equal models have no variance to share out
        pca.fit(models.double().numpy())
    shares = np.nan_to_num(pca.explained_variance_ratio_)

    def project(vectors: Tensor) -> NDArray[np.float64]:
        plane = pca.transform(vectors.double().numpy())
        return np.pad(plane, ((0, 0), (0, 2 - plane.shape[1]))).T

    figure = new_figure()
    axes = figure.add_subplot()
    x, y = project(models)
    if clusters is None:
        axes.scatter(x, y, color=COLORS[0], **_POINTS)
    else:
        for k in clusters.unique().tolist():
            members = clusters.numpy() == k
            color, marker = point_style(k) if k >= 0 else (FAINT, "o")
            label = f"{k if k >= 0 else 'none'} ({members.sum()})"
            axes.scatter(x[members], y[members], color=color, marker=marker, label=label, **_POINTS)
        if centers is not None:
            axes.scatter(*project(centers), label="server model", zorder=0.5, **_CROSSES)
        figure.legend(
            title="cluster (clients)",
            loc="outside right upper",
            frameon=False,
            ncols=1 + len(clusters.unique()) // 20,
        )
    first, second = shares if len(shares) > 1 else (*shares, 0.0)
    axes.set_xlabel(f"first principal component ({first:.0%} of variance)")
    axes.set_ylabel(f"second principal component ({second:.0%} of variance)")
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.margins(0.06)
    axes.set_aspect("equal", adjustable="datalim")  # distances are the same in all directions
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def fold(vectors: Tensor, width: int = _WIDTH) -> Tensor:
    """Shorten vectors ``[M, d]`` to at most ``width`` numbers, roughly keeping their distances.

    Numbers get random signs, the same for all vectors, and every ``width``-th ones are added up.
    The expected squared distance of two results is that of the vectors; its relative standard
    deviation is about ``sqrt(2 / width)``. Vectors that are short enough are not changed.

    Example:
        >>> fold(torch.ones(3, 10)).shape, fold(torch.ones(3, 10), width=4).shape
        (torch.Size([3, 10]), torch.Size([3, 4]))

    References:
        Charikar, Chen and Farach-Colton, Finding Frequent Items in Data Streams, ICALP 2002.
    """
    size = vectors.shape[1]
    if size <= width:
        return vectors
    signed = F.pad(vectors * _signs(size), (0, -size % width))
    return signed.unflatten(1, (-1, width)).sum(1)


@lru_cache(maxsize=1)
def _signs(size: int) -> Tensor:
    drawn = torch.randint(2, (size,), generator=generator(Purpose.SAMPLE, size), dtype=torch.int8)
    return 2 * drawn - 1


def _flat(state: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([value.detach().float().flatten() for value in state.values()]).cpu()

"""A picture of example images from the clients of each cluster."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pflight.data.client_names import room_for
from pflight.data.cohort import sample_clients
from pflight.data.data_module import FederatedDataModule
from pflight.federation import Federation
from pflight.options import PositiveInt, checked

from .picture import RepeatedPicture, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INCHES = 0.4  # size of one image
_MOST_CLUSTERS = 12


@checked
class ClusterExamples(RepeatedPicture):
    """Shows training images of some clients of each cluster side by side.

    A block is a cluster, and a row in it is a client with its id. A client's images are evenly
    spaced in the order of their labels, so that a row shows the mixture of its classes. Up to 12
    clusters are shown, the largest ones, with a random sample of their members. If the server
    callback has no ``assignments``, all clients are one block. The picture is called ``examples``.
    If the data are not images of 1 or 3 channels, there is a warning and no picture.

    Args:
        per_cluster: Number of clients of each cluster.
        images: Number of images of each client.
        every: As in :class:`RepeatedPicture`.

    Raises:
        ConfigurationError: If an option is below 1.
    """

    def __init__(
        self, per_cluster: PositiveInt = 4, images: PositiveInt = 8, every: int | None = None
    ) -> None:
        super().__init__(every)
        self.per_cluster = per_cluster
        self.images = images
        self._has_images = False

    def start(self, federation: Federation) -> None:
        """Check whether the data are images."""
        first = int(federation.clients.trainable[0])
        x, _ = federation.clients.attached_data.samples(first, "train")
        self._has_images = is_image(x[0])
        if not self._has_images:
            warnings.warn(
                f"ClusterExamples draws no picture: a sample of shape {list(x.shape[1:])} is not "
                "an image",
                stacklevel=2,
            )

    def figures(self, federation: Federation) -> Mapping[str, Figure]:
        """Return the picture of the clusters' images."""
        if not self._has_images:
            return {}
        assignments = getattr(federation.server_callback, "assignments", None)
        clients = federation.clients.trainable
        groups = torch.zeros(len(clients)) if assignments is None else assignments[clients]
        values, sizes = groups[groups >= 0].long().unique(return_counts=True)
        largest = values[sizes.argsort(descending=True, stable=True)[:_MOST_CLUSTERS]]
        blocks = {
            k: self._block(federation, clients[groups == k]) for k in largest.sort().values.tolist()
        }
        if not blocks:
            return {}
        label = federation.clients.label
        if assignments is None:
            return {"examples": examples_figure(blocks, label=label)}
        counts = dict(zip(values.tolist(), sizes.tolist(), strict=True))
        return {"examples": examples_figure(blocks, counts, label)}

    def _block(self, federation: Federation, members: Tensor) -> dict[int, Tensor]:
        shown = sample_clients(members, self.per_cluster, federation.clients.seed)
        data = federation.clients.attached_data
        return {client: self._row(data, client) for client in shown.tolist()}

    def _row(self, data: FederatedDataModule, client: int) -> Tensor:
        x, y = data.samples(client, "train")
        chosen = torch.linspace(0, len(y) - 1, min(self.images, len(y))).round().long()
        return x[y.argsort(stable=True)[chosen]]


def is_image(sample: Tensor) -> bool:
    """Return whether a sample is an image: numbers ``[H, W]``, ``[1, H, W]`` or ``[3, H, W]``."""
    return sample.dim() == 2 or (sample.dim() == 3 and len(sample) in (1, 3))


def examples_figure(
    blocks: Mapping[int, Mapping[int, Tensor]],
    sizes: Mapping[int, int] | None = None,
    label: Callable[[int], str] = str,
) -> Figure:
    """Show images by cluster and client.

    Each channel is scaled so that its values, over all images shown, span the range from black to
    full colour, which undoes a normalisation of the data.

    Args:
        blocks: For each cluster, for each client, images ``[n, H, W]``, ``[n, 1, H, W]`` or
            ``[n, 3, H, W]``; at least one image in all.
        sizes: The number of clients in each cluster, for the titles; ``None`` for no titles.
        label: Returns a client's name.

    Returns:
        A figure without a window, ready for a logger or ``savefig``.
    """
    images = [row for block in blocks.values() for row in block.values()]
    low, high = _range([row.unsqueeze(1) if row.dim() == 3 else row for row in images])
    across = max(len(row) for row in images)
    down = max(len(block) for block in blocks.values())
    columns = min(len(blocks), max(1, math.ceil(math.sqrt(len(blocks) * down / across))))
    lines = math.ceil(len(blocks) / columns)
    title = 0.0 if sizes is None else 0.27
    aside = 0.35 + room_for(label(client) for block in blocks.values() for client in block)
    width = columns * (across * _INCHES + aside) + 0.25
    figure = new_figure(width, lines * (down * _INCHES + title + 0.08))
    grid = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes in grid[len(blocks) :]:
        axes.set_axis_off()
    for axes, (k, block) in zip(grid, blocks.items(), strict=False):
        tiles = [_display(row, low, high) for row in block.values()]
        mosaic = _mosaic(tiles, down, across)
        height = len(mosaic) / down
        axes.imshow(mosaic, interpolation="nearest")
        axes.set_yticks(height * (np.arange(len(block)) + 0.5) - 0.5, [*map(label, block)])
        axes.set_xticks([])
        axes.tick_params(length=0, pad=2)
        axes.spines[:].set_visible(False)
        if sizes is not None:
            some = f"{sizes[k]} client{'s' if sizes[k] != 1 else ''}"
            axes.set_title(f"cluster {k}: {some}", fontsize="medium", loc="left")
    for axes in grid[::columns]:
        axes.set_ylabel("client")
    figure.align_ylabels()
    return figure


def _range(images: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the least and the greatest value of each channel ``[C, 1, 1]``."""
    values = torch.cat([row.double().movedim(1, 0).flatten(1) for row in images], dim=1)
    return values.amin(1).view(-1, 1, 1), values.amax(1).view(-1, 1, 1)


def _display(images: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return images ``[n, H, W, 3]`` with colours from 0 to 1."""
    images = images.unsqueeze(1) if images.dim() == 3 else images
    spread = torch.where(high > low, high - low, 1.0)
    return ((images - low) / spread).expand(-1, 3, -1, -1).movedim(1, 3)


def _mosaic(tiles: list[Tensor], down: int, across: int) -> np.ndarray[Any, Any]:
    """Arrange images on white, a row for each client, with gaps between them."""
    _, height, width, _ = tiles[0].shape
    gap = max(1, width // 14)
    mosaic = torch.ones(down, height + gap, across, width + gap, 3, dtype=torch.double)
    for line, row in zip(mosaic, tiles, strict=False):
        line[:height, : len(row), :width] = row.movedim(0, 1)
    return mosaic.flatten(0, 1).flatten(1, 2).numpy()

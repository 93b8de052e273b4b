"""Descriptions of a partition: a text table and a stacked bar chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .client_names import drawn, room_for
from .loaders import Split
from .palette import COLORS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_NAMED = 60
_MOST_BARS = 200


def partition_table(
    title: Sequence[str], sizes: Mapping[Split, Tensor], classes: Tensor | None = None
) -> str:
    """Return a table of the clients' sample counts and classes.

    Args:
        title: Parts of the first line.
        sizes: Each client's number of samples ``[num_clients]``, by split.
        classes: Each client's number of samples of each class, ``[num_clients, num_classes]``, if
            there are classes.

    Returns:
        Lines of text: a title, a row for each split and for all, and the classes per client.
    """
    total = torch.stack([*sizes.values()]).sum(dim=0)
    rows = [("", "clients", "samples", "min", "median", "max")]
    for name, counts in (*sizes.items(), ("all", total)):
        rows.append(
            (name, str(int((counts > 0).sum())), f"{int(counts.sum()):,}", *_spread(counts))
        )
    if classes is not None:
        rows.append(("classes", "", "", *_spread((classes > 0).sum(dim=1))))
    lines = ["{:<8}{:>8}{:>10}{:>8}{:>8}{:>8}".format(*row) for row in rows]
    return "\n".join([", ".join(title), *lines])


def _spread(values: Tensor) -> tuple[str, str, str]:
    """Return the minimum, median and maximum over clients."""
    median = values.double().quantile(0.5).item()
    return str(int(values.min())), f"{median:g}", str(int(values.max()))


def partition_figure(
    classes: Tensor, new_clients: Tensor, labels: Sequence[str] | None = None
) -> Figure:
    """Draw each client's samples by class as stacked bars.

    More than 10 classes are drawn as 10 ranges of labels. Up to 60 clients are in the order of
    their ids. More clients are sorted by their most frequent class. From more than 200, only an
    evenly spaced selection is drawn. Newcomers are drawn pale.

    Args:
        classes: Each client's number of samples of each class, ``[num_clients, num_classes]``.
        new_clients: Ids of the newcomers.
        labels: The clients' labels; by default their ids.

    Returns:
        A figure without a window, ready for a logger or ``savefig``.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    num_clients, num_classes = classes.shape
    groups = np.array_split(np.arange(num_classes), min(num_classes, len(COLORS)))
    by_class = classes.numpy()
    counts = np.stack([by_class[:, group].sum(axis=1) for group in groups], axis=1)
    clients = np.arange(num_clients)
    named = len(clients) <= _MOST_NAMED
    label = "client"
    if not named:
        clients = np.lexsort((-counts.sum(axis=1), counts.argmax(axis=1)))
        chosen = np.linspace(0, len(clients) - 1, min(len(clients), _MOST_BARS)).round().astype(int)
        clients = clients[chosen]
        some = f"{len(clients)} of " if len(clients) < num_clients else ""
        label = f"{some}{num_clients:,} clients, sorted by most frequent class"
    counts = counts[clients]
    pale = np.where(np.isin(clients, new_clients.numpy()), 0.35, 1.0)

    below = room_for(labels) if named and labels else 0.0
    figure = Figure(figsize=(9, 4 + below), layout="constrained")
    axes = figure.add_subplot()
    places = np.arange(len(clients))
    bottom = np.zeros(len(clients))
    for heights, color in zip(counts.T, COLORS, strict=False):
        shown = np.flatnonzero(heights)
        axes.bar(
            places[shown],
            heights[shown],
            bottom=bottom[shown],
            width=0.8 if named else 1.0,
            color=[(color, alpha) for alpha in pale[shown]],
        )
        bottom += heights
    keys = [
        Patch(color=color, label=_range(group))
        for group, color in zip(groups, COLORS, strict=False)
    ]
    if (pale < 1).any():
        keys.append(Patch(color=(COLORS[3], 0.35), label="pale: new client"))
    figure.legend(
        handles=keys, title="class", loc="outside right upper", frameon=False, reverse=True
    )
    axes.set_xlim(-0.6, len(clients) - 0.4)
    axes.set_xlabel(label)
    axes.set_ylabel("samples")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if named:
        shown = places[:: 1 + len(places) // 31]
        axes.set_xticks(shown)
        if labels is not None:
            axes.set_xticks(shown, [drawn(labels[int(i)]) for i in shown], rotation=90)
    else:
        axes.set_xticks([])
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _range(classes: NDArray[np.int64]) -> str:
    return str(classes[0]) if len(classes) == 1 else f"{classes[0]} to {classes[-1]}"

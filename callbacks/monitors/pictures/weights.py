"""Pictures of each client's weights of all clients' models, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pflight.data.client_names import room_for
from pflight.data.palette import COLORS, FAINT, line_style
from pflight.errors import ConfigurationError
from pflight.federation import Federation
from pflight.options import NonNegativeInt, check_range, checked

from .picture import RepeatedPicture, new_figure, stacked, unstacked

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_LAYERS = 6
_MOST_CLIENTS = 50
_NAMED = 5  # other clients with a colour
_HATCHES = ("", "//", "..", "\\\\", "xx", "--", "")  # of the bars, from below
_PREFIX = "network."  # of layer names, left out in pictures


@checked
class AggregationWeights(RepeatedPicture):
    """Draws the server's weights in mixtures of clients' layers, as in pFedLA.

    ``weights/heatmap`` is a matrix of clients by clients for each layer.
    ``weights/client-<i>-evolution`` shows one client's weights over rounds for each layer.
    ``weights/client-<i>-layers`` shows this client's weights as a bar for each layer. The server
    callback needs a method ``layer_weights(clients)`` that returns
    ``{layer name: Tensor [C, num_clients]}`` with rows that sum to 1.

    Args:
        layers: Names of the layers as in ``federation.layout.layers``, with or without the prefix
            ``network.``; by default up to 6, evenly spaced from the first to the last.
        client: The client to draw over rounds and as bars.
        clients: The clients in the heatmap; by default all, or 50 evenly spaced ones.
        every: As in :class:`RepeatedPicture`.

    Raises:
        ConfigurationError: If ``every`` is below 1 or, before training starts, if the server
            callback has no such weights, or layers or clients are unknown.

    References:
        Ma et al., Layer-wised Model Aggregation for Personalized Federated Learning, CVPR 2022,
        figures 5 to 7, https://arxiv.org/abs/2205.03993.
    """

    def __init__(
        self,
        layers: Sequence[str] | None = None,
        client: NonNegativeInt = 0,
        clients: Sequence[int] | None = None,
        every: int | None = None,
    ) -> None:
        super().__init__(every)
        for other in clients or ():
            check_range(self, "[0, inf)", clients=other)
        self.layers = layers
        self.client = client
        self.clients = clients
        self._layers: dict[str, str] = {}  # from names in pictures to names of the callback
        self._shown = torch.empty(0, dtype=torch.long)
        self._matrices: dict[str, Tensor] = {}
        self._past: dict[int, Tensor] = {}

    @property
    def state_key(self) -> str:
        """A key by client, so that a checkpoint can hold several of these callbacks."""
        return self._generate_state_key(client=self.client, layers=self.layers)

    def start(self, federation: Federation) -> None:
        """Check that there are weights of these layers and clients."""
        callback = federation.server_callback
        if not hasattr(callback, "layer_weights"):
            raise ConfigurationError(
                "AggregationWeights needs a server callback with a method layer_weights(clients), "
                f"such as PFedLA; {type(callback).__name__} has none"
            )
        for client in (self.client, *(self.clients or ())):
            federation.clients.attached_data.check_client(client)
        names = callback.layer_weights(torch.tensor([self.client]))
        known = {name.removeprefix(_PREFIX): name for name in names}
        if self.layers is None:
            chosen = [[*known][i] for i in _spaced(len(known), _MOST_LAYERS)]
        else:
            chosen = [name.removeprefix(_PREFIX) for name in self.layers]
        if unknown := [name for name in chosen if name not in known]:
            raise ConfigurationError(
                f"AggregationWeights: unknown layer {unknown[0]!r}; there are {', '.join(known)}"
            )
        self._layers = {name: known[name] for name in chosen}
        self._shown = (
            torch.from_numpy(_spaced(federation.num_clients, _MOST_CLIENTS))
            if self.clients is None
            else torch.tensor(self.clients)
        )
        if not federation.history:
            self._past = {}

    def observe(self, federation: Federation) -> None:
        """Record the client's weights of this round."""
        clients = torch.cat([self._shown, torch.tensor([self.client])])
        weights: dict[str, Tensor] = federation.server_callback.layer_weights(clients)  # type: ignore[attr-defined]
        rows = {name: weights[key].detach().float().cpu() for name, key in self._layers.items()}
        self._matrices = {name: row[:-1, self._shown] for name, row in rows.items()}
        now = torch.stack([row[-1] for row in rows.values()])
        self._past[federation.history[-1].index] = now

    def figures(self, federation: Federation) -> Mapping[str, Figure]:
        """Return the heatmap, the weights over rounds and the bars."""
        past = torch.stack(list(self._past.values()))
        rounds, names = list(self._past), list(self._matrices)
        label = federation.clients.label
        whose = self.client, label
        return {
            "weights/heatmap": heatmap_figure(self._matrices, self._shown.tolist(), label),
            f"weights/client-{self.client}-evolution": evolution_figure(
                past, rounds, names, *whose
            ),
            f"weights/client-{self.client}-layers": bars_figure(past[-1], names, *whose),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the client's weights so far, for the checkpoint."""
        return {"past": stacked(self._past)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        self._past = unstacked(state_dict["past"])


def heatmap_figure(
    matrices: Mapping[str, Tensor], clients: Sequence[int], label: Callable[[int], str] = str
) -> Figure:
    """Draw a matrix of weights for each layer.

    Args:
        matrices: For each layer, weights ``[C, C]``. Row ``i`` holds client ``i``'s weights of all
            clients.
        clients: Their ids, ``C`` of them.
        label: Returns a client's name.

    Returns:
        A figure without a window, ready for a logger or ``savefig``. All panels have the same
        colour scale. It shows the square root of a weight, so small weights differ visibly, too.
    """
    from matplotlib.colors import PowerNorm

    highest = max(_highest(matrix) for matrix in matrices.values())
    step = next(s for s in (1, 2, 5, 10, 20, 50, len(clients)) if len(clients) <= 8 * s)
    places = range(0, len(clients), step)
    names = [label(clients[place]) for place in places]
    room = room_for(names)
    figure, panels, _ = _panels(len(matrices), 2.9 + room, 2.8 + room, aside=1.0)
    for axes, (layer, matrix) in zip(panels, matrices.items(), strict=True):
        image = axes.imshow(matrix.numpy(), cmap="cividis", norm=PowerNorm(0.5, 0.0, highest))
        axes.set_title(layer, fontsize="medium")
        axes.set_xticks(places, names)
        axes.set_yticks(places, names)
        axes.tick_params(length=2, labelsize="small")
        if room:
            axes.tick_params(axis="x", rotation=90)
    figure.supxlabel("client whose layer is taken", fontsize="medium")
    figure.supylabel("client that takes it", fontsize="medium")
    figure.colorbar(image, ax=panels, label="weight", aspect=30, shrink=0.9)
    return figure


def evolution_figure(
    weights: Tensor,
    rounds: Sequence[int],
    layers: Sequence[str],
    client: int,
    label: Callable[[int], str] = str,
) -> Figure:
    """Draw one client's weights over rounds, a panel for each layer.

    Args:
        weights: Weights ``[R, L, num_clients]``.
        rounds: The rounds' numbers, ``R`` of them.
        layers: The layers' names, ``L`` of them.
        client: The client.
        label: Returns a client's name.

    Returns:
        A figure without a window, ready for a logger or ``savefig``. The client itself, in front,
        and the clients with the largest weights in the last round have colours and markers. All
        others are grey. The axis shows the square root of a weight, so small weights differ
        visibly, too.
    """
    from matplotlib.ticker import MaxNLocator

    named = _heaviest(weights[-1], client)
    aside = 2.2 + room_for(map(label, named))
    figure, panels, columns = _panels(len(layers), 2.6, 2.4, aside, share=True)
    values = weights.numpy()
    others = np.setdiff1d(np.arange(values.shape[2]), named)
    for position, axes in enumerate(panels):
        if len(others):
            marker = "." if len(rounds) == 1 else None
            rest = values[:, position, others]
            lines = axes.plot(rounds, rest, color=FAINT, linewidth=0.6, marker=marker)
            lines[0].set_label(_others(len(others)))
        for place, other in enumerate(named):
            axes.plot(
                rounds,
                values[:, position, other],
                linewidth=2.2 if other == client else 1.3,
                zorder=3 if other == client else 2,
                label=_name(other, client, label),
                **line_style(place, len(rounds)),
            )
        axes.set_title(layers[position], fontsize="medium")
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True, min_n_ticks=1))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yscale("function", functions=(lambda w: np.sqrt(np.maximum(w, 0)), np.square))
    panels[0].set_ylim(0.0, 1.05 * _highest(weights))
    for axes in panels[-columns:]:  # also above an empty panel
        axes.tick_params(labelbottom=True)
    figure.supxlabel("round", fontsize="medium")
    figure.supylabel(f"weight for client {label(client)}", fontsize="medium")
    _legend(figure, panels[0], reverse=False)
    return figure


def bars_figure(
    weights: Tensor, layers: Sequence[str], client: int, label: Callable[[int], str] = str
) -> Figure:
    """Draw one client's weights of all clients' layers as stacked bars, one bar per layer.

    Args:
        weights: Weights ``[L, num_clients]``.
        layers: The layers' names, ``L`` of them.
        client: The client; its own weight is at the bottom.
        label: Returns a client's name.

    Returns:
        A figure without a window, ready for a logger or ``savefig``. The client and the five other
        clients with the largest weights have their own bars. All others are added up.
    """
    named = _heaviest(weights, client)
    values = weights.numpy()
    parts = {_name(other, client, label): values[:, other] for other in named}
    if rest := values.shape[1] - len(named):
        parts[_others(rest)] = values.sum(axis=1) - sum(parts.values())
    figure = new_figure(7.0 + room_for(map(label, named)))
    axes = figure.add_subplot()
    bottom = np.zeros(len(layers))
    colors = [*COLORS[: len(named)], FAINT]
    for color, hatch, (name, heights) in zip(colors, _HATCHES, parts.items(), strict=False):
        axes.bar(
            layers,
            heights,
            bottom=bottom,
            width=0.7,
            label=name,
            color=color,
            hatch=hatch,
            edgecolor="white",
            linewidth=0.6,
        )
        bottom += heights
    axes.set_xlabel("layer")
    axes.set_ylabel(f"weight for client {label(client)}")
    axes.set_xlim(-0.6, len(layers) - 0.4)
    axes.set_ylim(0.0, 1.02)
    if max(map(len, layers)) * len(layers) > 50:
        axes.tick_params(axis="x", rotation=30)
    axes.spines[["top", "right"]].set_visible(False)
    _legend(figure, axes, reverse=True)
    return figure


def _panels(
    count: int, width: float, height: float, aside: float, share: bool = False
) -> tuple[Figure, list[Axes], int]:
    """Return a figure with panels, up to three in a row, and the number of panels in a row."""
    columns = min(count, 3)
    lines = math.ceil(count / columns)
    figure = new_figure(columns * width + aside, lines * height + 0.4)
    grid = figure.subplots(lines, columns, squeeze=False, sharex=share, sharey=share).flatten()
    for axes in grid[count:]:
        axes.set_axis_off()
    return figure, list(grid[:count]), columns


def _legend(figure: Figure, axes: Axes, reverse: bool) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, reverse=reverse)


def _heaviest(weights: Tensor, client: int) -> list[int]:
    """Return the client, then the others with the largest mean weights over layers."""
    order = weights.mean(0).argsort(descending=True, stable=True).tolist()
    return [client, *[other for other in order if other != client][:_NAMED]]


def _highest(weights: Tensor) -> float:
    return float(weights[weights.isfinite()].max()) if weights.isfinite().any() else 1.0


def _name(other: int, client: int, label: Callable[[int], str]) -> str:
    return f"client {label(other)}{', itself' if other == client else ''}"


def _others(count: int) -> str:
    return f"{count} other{'s' if count != 1 else ''}"


def _spaced(count: int, most: int) -> np.ndarray[Any, Any]:
    return np.linspace(0, count - 1, min(count, most)).round().astype(np.int64)

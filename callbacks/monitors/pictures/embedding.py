"""A picture of the clients' average features over rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pflight.data.client_names import room_for
from pflight.data.cohort import sample_clients
from pflight.data.loaders import Split
from pflight.data.palette import point_style
from pflight.errors import ConfigurationError
from pflight.federation import Federation
from pflight.models.classifier import as_classifier
from pflight.options import PositiveInt, check_range, checked
from pflight.randomness import Purpose, derive_seed
from pflight.runs.distributed import gather, owned

from .picture import Picture, new_figure, stacked, unstacked

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Color = Literal["client", "round"]

_MOST_IN_LEGEND = 40
_PALEST = 0.25
_POINTS: dict[str, Any] = {"s": 16, "linewidths": 0}
_ID: dict[str, Any] = {"fontsize": 6, "xytext": (2, 2), "textcoords": "offset points"}
_PATHS: dict[str, Any] = {"linewidth": 0.6, "zorder": 1}


@checked
class EmbeddingTrajectory(Picture):
    """Draws the clients' average features of every round in two dimensions, by t-SNE.

    After each round, every client of a random sample runs its judged model on its own samples. A
    point is the mean input of the network's last linear layer, for each client and round. With
    ``finetune_epochs``, the clients are fine-tuned for this. t-SNE needs all points at once, so the
    picture is drawn when the fit ends. This takes about a second per thousand points. The picture
    is called ``embedding``, or ``embedding/first-<n>-rounds``.

    The averages are part of each checkpoint, which grows with the number of rounds drawn.

    Args:
        rounds: Numbers of first rounds to draw, with a picture for each number; by default one
            picture of all rounds. FedEC draws 30 and 100. A shorter run is drawn up to its end.
        max_clients: Number of clients in the sample.
        every: Number of rounds between two averages.
        split: The samples to average over: ``train``, ``val`` or ``test``.
        color: The meaning of colours: ``client``, with later rounds darker, or ``round``.

    Raises:
        ConfigurationError: If an option is out of range or, before training starts, if the network
            has no linear layer or no client has samples of that split.

    References:
        FedEC, figure 2.
    """

    def __init__(
        self,
        rounds: Sequence[int] | None = None,
        max_clients: PositiveInt = 10,
        every: PositiveInt = 1,
        split: Split = "train",
        color: Color = "client",
    ) -> None:
        super().__init__()
        for count in rounds or ():
            check_range(self, "[1, inf)", rounds=count)
        self.rounds = rounds
        self.max_clients = max_clients
        self.every = every
        self.split = split
        self.color = color
        self._clients = torch.empty(0, dtype=torch.long)
        self._features: dict[int, Tensor] = {}

    def start(self, federation: Federation) -> None:
        """Choose the clients."""
        client = as_classifier(federation.client, type(self).__name__)
        if not any(isinstance(module, nn.Linear) for module in client.modules()):
            raise ConfigurationError(
                "EmbeddingTrajectory draws the inputs of the network's last linear layer, but "
                f"{type(client.network).__name__} has none"
            )
        clients = federation.clients.trainable
        clients = clients[federation.clients.attached_data.num_samples(self.split)[clients] > 0]
        if not len(clients):
            raise ConfigurationError(f"EmbeddingTrajectory: no client has {self.split} samples")
        if not federation.history:
            self._features = {}
        if not self._features:
            self._clients = sample_clients(clients, self.max_clients, federation.clients.seed)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the average features after this round."""
        super().on_train_epoch_end(trainer, pl_module)
        if not isinstance(pl_module, Federation):
            return
        index, last = pl_module.history[-1].index, max(self.rounds or (math.inf,))
        if (index + 1) % self.every == 0 and index < last:
            data = pl_module.clients.attached_data
            mine = {
                client: mean_features(
                    pl_module.client_module(client).to(pl_module.device),
                    data.samples(client, self.split)[0],
                )
                for client in owned(self._clients).tolist()
            }
            found = {client: mean for rank in gather(mine) for client, mean in rank.items()}
            self._features[index] = torch.stack([found[c] for c in self._clients.tolist()])

    def figures(self, federation: Federation) -> Mapping[str, Figure]:
        """Return a figure of all rounds, or of the first ones."""
        last = max(self._features, default=-1)
        counts = sorted({min(count, last + 1) for count in self.rounds or ()})
        names = {f"embedding/first-{count}-rounds": count for count in counts}
        seed = derive_seed(Purpose.SAMPLE, federation.clients.seed) % 2**32
        figures = {}
        for name, count in (names or {"embedding": last + 1}).items():
            if seen := [index for index in self._features if index < count]:
                features = torch.stack([self._features[index] for index in seen])
                how = self.color, seed, federation.clients.label
                figures[name] = embedding_figure(features, seen, self._clients, *how)
        return figures

    def state_dict(self) -> dict[str, Any]:
        """Return the features so far, for the checkpoint."""
        return {"clients": self._clients, "features": stacked(self._features)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        self._clients = state_dict["clients"]
        self._features = unstacked(state_dict["features"])


def mean_features(client: L.LightningModule, x: Tensor, batch_size: int = 1024) -> Tensor:
    """Return the mean inputs of the last linear layer to run, over samples.

    Args:
        client: The client module; it is left in evaluation mode.
        x: Samples ``[n, ...]``.
        batch_size: Samples in one pass.

    Returns:
        The mean ``[features]``, float32 on the CPU; if the layer is applied to a sequence, also
        over its positions.

    Example:
        >>> from pflight.models import Classifier
        >>> network = nn.Sequential(nn.ReLU(), nn.Linear(2, 3))
        >>> mean_features(Classifier(network, 3), torch.tensor([[1.0, -8.0], [3.0, 2.0]]))
        tensor([2., 1.])
    """
    seen: dict[str, Tensor] = {}

    def note(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen["last"] = inputs[0].flatten(0, -2)

    like = next(client.parameters())
    total, count = torch.zeros(()), 0
    linear = [module for module in client.modules() if isinstance(module, nn.Linear)]
    hooks = [layer.register_forward_pre_hook(note) for layer in linear]
    client.eval()
    with torch.no_grad():
        for part in x.split(batch_size):
            client(part.to(like) if part.is_floating_point() else part.to(like.device))
            total = total + seen["last"].sum(0).cpu()
            count += len(seen["last"])
    for hook in hooks:
        hook.remove()
    return total.float() / count


def embedding_figure(
    features: Tensor,
    rounds: Sequence[int],
    clients: Tensor,
    color: Color = "client",
    seed: int = 0,
    label: Callable[[int], str] = str,
) -> Figure:
    """Draw the clients' average features in two dimensions by t-SNE.

    Args:
        features: Averages ``[R, C, features]``; those that are not finite are left out.
        rounds: The rounds' numbers, ``R`` of them.
        clients: The clients' ids ``[C]``.
        color: ``client``, with later rounds darker, or ``round``.
        seed: Seed of t-SNE.
        label: Returns a client's name in the legend.

    Returns:
        A figure without a window, ready for a logger or ``savefig``. A thin line follows each
        client from round to round. More than 40 clients are labelled by their ids at their last
        points instead of in a legend.
    """
    from matplotlib.ticker import MaxNLocator

    points = _tsne(features, seed)
    times = np.asarray(rounds)
    in_legend = color == "client" and len(clients) <= _MOST_IN_LEGEND
    names = [*map(label, clients.tolist())] if in_legend else [""]
    figure = new_figure(7.0 + room_for(names) * (1 + (len(clients) - 1) // 20))
    axes = figure.add_subplot()
    if color == "client":
        shades = np.linspace(1.0, _PALEST, len(times))[::-1]
        named = []
        for c, client in enumerate(clients.tolist()):
            style, marker = point_style(c)
            x, y = points[:, c].T
            axes.plot(x, y, color=style, alpha=0.4, **_PATHS)
            axes.scatter(x, y, c=[(style, a) for a in shades], marker=marker, **_POINTS)
            if in_legend:
                named.append(_key(names[c], style, marker))
            else:
                for place in points[np.isfinite(x), c][-1:]:
                    axes.annotate(str(client), place, **_ID)
        if in_legend:
            columns = 1 + (len(clients) - 1) // 20
            figure.legend(
                handles=named,
                title="client",
                loc="outside right upper",
                frameon=False,
                ncols=columns,
            )
        if len(times) > 1:
            ends = [_key(str(times[end]), ("black", shades[end])) for end in (0, -1)]
            figure.legend(handles=ends, title="round", loc="outside right lower", frameon=False)
    else:
        x, y = points.T
        axes.plot(x.T, y.T, color="black", alpha=0.3, **_PATHS)
        shown = axes.scatter(x, y, c=np.tile(times, (len(clients), 1)), cmap="viridis", **_POINTS)
        figure.colorbar(shown, label="round", aspect=30, ticks=MaxNLocator(6, integer=True))
    axes.set_xlabel("t-SNE 1")
    axes.set_ylabel("t-SNE 2")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.margins(0.06)
    axes.set_aspect("equal", adjustable="datalim")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _key(label: str, color: Any, marker: str = "o") -> Line2D:
    """Return an entry of a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color=color, marker=marker, markersize=5, linestyle="", label=label)


def _tsne(features: Tensor, seed: int) -> NDArray[np.float64]:
    """Return the points in two dimensions ``[R, C, 2]``, NaN where features are not finite."""
    from sklearn.manifold import TSNE

    flat = features.flatten(0, 1).double().numpy()
    finite = np.isfinite(flat).all(axis=1)
    points = np.full((len(flat), 2), np.nan)
    known = flat[finite]
    if len(known) and np.ptp(known, axis=0).any():
        tsne = TSNE(
            perplexity=min(30.0, (len(known) - 1) / 3) if len(known) > 3 else 1.0,
            init="pca" if min(known.shape) > 1 else "random",
            random_state=seed,
        )
        points[finite] = tsne.fit_transform(known)
    else:
        points[finite] = 0.0
    return points.reshape(*features.shape[:2], 2)

"""How soon clients whose group changes are served as members of their new group."""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning as L
import torch
from torch import Tensor

from pflight.data.palette import COLORS, FAINT
from pflight.errors import ConfigurationError
from pflight.federation import Federation
from pflight.options import PositiveInt, checked
from pflight.runs.files import replacing
from pflight.runs.round_log import log_values

from .picture import Picture, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLE = "drift.csv"
"""The file in the run folder."""
_PARTICIPATIONS, _BEFORE, _NOW, _FOLLOWED = range(4)  # columns of the record


class Step(NamedTuple):
    """The clients that moved, after so many participations since their move.

    Attributes:
        participations: Number of participations since the move.
        clients: Number of clients that moved and were then judged; twice if they moved twice.
        before: Their mean metric before the move.
        now: Their mean metric.
        reassigned: The share of them that was in a cluster of its new group; NaN without clusters.
    """

    participations: int
    clients: int
    before: float
    now: float
    reassigned: float


@checked
class DriftPlot(Picture):
    """Measures how soon a method follows clients that move to another group.

    Data that drift and know their groups, such as ``KnownClusters(moves={10: 0.25})``, are needed.
    A client is followed from the round in which its entry in ``data.clusters`` changes. If the
    server callback has ``assignments``, as FeSEM does, the client is reassigned once its cluster
    belongs to its new group: most of the cluster's other members are of this group. Clients that
    have moved and are not yet reassigned don't count as members. Accuracy is compared with the last
    one before the move, on the validation samples, after each participation since. After 0, the
    client has not participated yet.

    TensorBoard shows these values with each validation:

    * ``drift/moved``: how many clients have moved so far, twice if they moved twice;
    * ``drift/waiting``: how many of them have not been reassigned yet;
    * ``drift/participations``: after how many participations the others were, on average;
    * ``drift/lost_acc``: how much the metric is below that before the move, for clients that have
      participated at most ``most`` times since.

    The picture is called ``drift``. The table behind it is ``drift.csv`` in the run folder, with
    the fields of :class:`Step`.

    Args:
        metric: The name of the clients' metric.
        most: Clients are followed for so many participations.

    Attributes:
        record: For each client that moved, its first evaluation after each number of participations
            ``[M, 4]``: this number, its metric before the move, its metric now, and whether it had
            been reassigned. The latter is NaN without clusters.

    Raises:
        ConfigurationError: Before training starts, if the data don't drift or know no groups. After
            the first validation, if there is no such metric.
    """

    def __init__(self, metric: str = "acc", most: PositiveInt = 10) -> None:
        super().__init__()
        self.metric = metric
        self.most = most
        self._clear(0)

    def _clear(self, clients: int) -> None:
        self._groups = torch.empty(0, dtype=torch.long)
        self._taken = torch.full((clients,), -1)  # participations since the move; -1 for none
        self._needed = torch.full((clients,), -1)  # those until it was reassigned
        self._before = torch.full((clients,), torch.nan, dtype=torch.double)
        self._now = torch.full((clients,), torch.nan, dtype=torch.double)
        self._judged = torch.full((clients,), -1)  # participations at the last recorded evaluation
        self._all_needed = torch.empty(0, dtype=torch.long)  # of all moves that were followed
        self._moves = 0
        self.record = torch.empty(0, 4, dtype=torch.double)

    def start(self, federation: Federation) -> None:
        """Check that clients can move."""
        data = federation.clients.attached_data
        if not data.drifts:
            raise ConfigurationError(
                f"DriftPlot needs data that drift, as KnownClusters(moves=...) do, but {data} don't"
            )
        if data.clusters is None:
            raise ConfigurationError(f"DriftPlot needs the clients' groups: {data} has no clusters")
        if not federation.history or len(self._taken) != federation.num_clients:
            self._clear(federation.num_clients)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Note who has moved, taken part, and been reassigned in a round."""
        if not isinstance(pl_module, Federation):
            return
        groups = pl_module.clients.attached_data.clusters
        assert groups is not None
        groups = groups.cpu().clone()
        if len(self._groups):
            moved = groups != self._groups
            self._moves += int(moved.sum())
            self._taken[moved], self._needed[moved], self._judged[moved] = 0, -1, -1
            self._before[moved] = self._now[moved]
        self._groups = groups
        entry = pl_module.history[-1]
        took_part = torch.zeros(len(groups), dtype=torch.bool)
        took_part[[*{*entry.clients} - {*entry.failed}]] = True
        self._taken[took_part & (self._taken >= 0)] += 1
        assignments = getattr(pl_module.server_callback, "assignments", None)
        if assignments is not None:
            there = self._in_new_group(assignments.cpu()) & took_part
            self._needed[there] = self._taken[there]
            self._all_needed = torch.cat([self._all_needed, self._taken[there]])

    def _in_new_group(self, assignments: Tensor) -> Tensor:
        """Return a mask of the waiting clients whose cluster belongs to their new group."""
        waiting = (self._taken >= 0) & (self._needed < 0)
        settled = ~waiting & (assignments >= 0)
        size = int(assignments.max()) + 2, int(self._groups.max()) + 1
        counts = torch.zeros(size, dtype=torch.long)
        pairs = assignments[settled], self._groups[settled]
        counts.index_put_(pairs, torch.ones(int(settled.sum()), dtype=torch.long), accumulate=True)
        members = counts[assignments]  # by group; none in the last row, for clients without cluster
        own = members[torch.arange(len(members)), self._groups]
        return waiting & (own > 0) & (2 * own > members.sum(dim=1))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compare the clients that have moved with themselves before, and log it."""
        fits = trainer.state.fn == "fit" and not trainer.sanity_checking
        if not (fits and isinstance(pl_module, Federation)):
            return
        found = pl_module.client_metrics("val")
        if self.metric not in found:
            known = ", ".join(name for name in found if name != "num_samples")
            raise ConfigurationError(f"DriftPlot: no metric {self.metric!r}; clients have {known}")
        self._now = found[self.metric].double()
        followed = (self._taken >= 0) & (self._taken <= self.most)
        followed &= ~(self._now - self._before).isnan()
        new = followed & (self._taken > self._judged)
        self._judged[new] = self._taken[new]
        clusters = getattr(pl_module.server_callback, "assignments", None) is not None
        there = (self._needed >= 0).double() if clusters else torch.full_like(self._now, torch.nan)
        columns = self._taken.double(), self._before, self._now, there
        self.record = torch.cat([self.record, torch.stack(columns, dim=1)[new]])
        values = {"drift/moved": float(self._moves)}
        if clusters:
            values["drift/waiting"] = float(((self._taken >= 0) & (self._needed < 0)).sum())
        if len(self._all_needed):
            values["drift/participations"] = float(self._all_needed.double().mean())
        if followed.any():
            lost = (self._before - self._now)[followed].mean()
            values[f"drift/lost_{self.metric}"] = float(lost)
        pl_module.history[-1].metrics.update(values)
        log_values(pl_module, values, pl_module.history[-1].index)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the picture, and write the table."""
        super().on_train_end(trainer, pl_module)
        if not isinstance(pl_module, Federation) or not trainer.is_global_zero:
            return
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            _write(Path(trainer.default_root_dir, TABLE), steps_of(self.record))

    def figures(self, federation: Federation) -> Mapping[str, Figure]:
        """Return the picture, if a client has moved and been judged."""
        steps = steps_of(self.record)
        return {"drift": drift_figure(steps, self.metric)} if steps else {}

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of the clients that have moved, for the checkpoint."""
        kept = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return {"moves": self._moves, **kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        known = dict(state_dict)
        self._moves = known.pop("moves")
        vars(self).update(known)


def steps_of(record: Tensor) -> list[Step]:
    """Return the means of a :attr:`DriftPlot.record`, or several ones, by participations.

    Args:
        record: ``[M, 4]``.
    """
    found = []
    for count in record[:, _PARTICIPATIONS].unique().tolist():
        part = record[record[:, _PARTICIPATIONS] == count]
        means = part.mean(dim=0).tolist()
        found.append(Step(int(count), len(part), means[_BEFORE], means[_NOW], means[_FOLLOWED]))
    return found


def drift_figure(steps: Sequence[Step], metric: str = "acc") -> Figure:
    """Draw a metric and the share of reassigned clients by participations since a move.

    Args:
        steps: The measurements, at least one.
        metric: The metric's name.

    Returns:
        A figure without a window, ready for a logger or ``savefig``. Without clusters it has the
        panel of the metric alone.

    Example:
        >>> steps = [Step(0, 5, 0.9, 0.3, 0.0), Step(1, 5, 0.9, 0.8, 0.8)]
        >>> [axes.get_ylabel() for axes in drift_figure(steps).axes]
        ['mean acc of clients that moved', 'share in a cluster of the new group']
    """
    from matplotlib.ticker import MaxNLocator

    panels = 1 + any(step.reassigned == step.reassigned for step in steps)
    figure = new_figure(4.4 * panels, 3.6)
    grid = figure.subplots(1, panels, squeeze=False)[0]
    counts = [step.participations for step in steps]
    line: dict[str, Any] = {"color": COLORS[0], "marker": "o", "markersize": 4}
    before = [step.before for step in steps]
    grid[0].plot(counts, before, color=FAINT, linestyle="--", label="before the move")
    grid[0].plot(counts, [step.now for step in steps], label="after it", **line)
    grid[0].set_ylabel(f"mean {metric} of clients that moved")
    if all(0 <= step.now <= 1 and 0 <= step.before <= 1 for step in steps):
        grid[0].set_ylim(-0.02, 1.02)
    grid[0].legend(frameon=False, loc="lower right")
    if panels > 1:
        grid[1].plot(counts, [step.reassigned for step in steps], **line)
        grid[1].set_ylabel("share in a cluster of the new group")
        grid[1].set_ylim(-0.02, 1.02)
    for axes in grid:
        axes.set_xlabel("participations since the move")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
        axes.grid(axis="y", color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _write(path: Path, steps: Sequence[Step]) -> None:
    """Write the table, or warn if that is impossible."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(Step._fields)
    writer.writerows(steps)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            partial.write_text(file.getvalue())
    except OSError as error:
        warnings.warn(f"the table of the drift can't be written: {error}", stacklevel=2)

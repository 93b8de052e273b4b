"""A picture of the metrics of one or several runs over rounds."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pflight.data.palette import line_style
from pflight.errors import ConfigurationError
from pflight.federation import Federation
from pflight.history import Round
from pflight.options import checked

from .picture import Picture, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curve = tuple[Sequence[int], Sequence[float]]

_METRICS = ("val/micro_acc", "val/macro_acc")
_WORDS = {"val": "validation", "acc": "accuracy", "f1": "F1"}


@checked
class ConvergencePlot(Picture):
    """Draws metrics over rounds when a fit ends, together with those of earlier runs.

    There is a panel for each metric and a curve for each run, such as FeSEM with several numbers of
    clusters, or several algorithms. The picture is called ``convergence``.

    Args:
        metrics: Tags of the metrics, as in TensorBoard.
        runs: Folders of earlier runs, read from their TensorBoard events: a list, or a dictionary
            from labels to folders.
        label: This run's name among them.

    Raises:
        ConfigurationError: If there is no metric or, before training starts, if a folder has none
            of the metrics.
    """

    def __init__(
        self,
        metrics: Sequence[str] = _METRICS,
        runs: dict[str, str] | list[str] | None = None,
        label: str = "this run",
    ) -> None:
        super().__init__()
        if not metrics:
            raise ConfigurationError("ConvergencePlot: metrics must have at least one tag")
        self.metrics = list(metrics)
        self.runs = runs if isinstance(runs, dict) else {Path(run).name: run for run in runs or ()}
        self.label = label
        self._curves: dict[str, dict[str, Curve]] = {}
        if self.label in self.runs or (runs is not None and len(self.runs) < len(runs)):
            raise ConfigurationError(
                f"ConvergencePlot: runs need different labels, got {[*(runs or ()), label]}"
            )

    def start(self, federation: Federation) -> None:
        """Read the earlier runs."""
        self._curves = {label: _read(run, self.metrics) for label, run in self.runs.items()}

    def figures(self, federation: Federation) -> Mapping[str, Figure]:
        """Return the curves of this run and of the others."""
        curves = {**self._curves, self.label: _of_history(federation.history, self.metrics)}
        known = [m for m in self.metrics if any(m in run for run in curves.values())]
        if missing := [metric for metric in self.metrics if metric not in known]:
            warnings.warn(
                f"ConvergencePlot leaves out {' and '.join(missing)}, which no round has",
                stacklevel=2,
            )
        return {"convergence": _draw(curves, known)} if known else {}


def convergence_figure(
    runs: Mapping[str, Sequence[Round] | str | os.PathLike[str]],
    metrics: Sequence[str] = _METRICS,
) -> Figure:
    """Draw metrics of several runs over rounds, a panel for each metric.

    Args:
        runs: From labels to runs, each a ``federation.history`` or a run folder with TensorBoard
            events.
        metrics: Tags of the metrics.

    Returns:
        A figure without a window, ready for a logger or ``savefig``.

    Raises:
        ConfigurationError: If a run has none of the metrics.

    Example:
        >>> history = [Round(t, [0], metrics={"val/macro_acc": t / 10}) for t in range(5)]
        >>> figure = convergence_figure({"K = 1": history}, ["val/macro_acc"])
        >>> figure.axes[0].get_ylabel()
        'validation macro accuracy'
    """
    curves: dict[str, dict[str, Curve]] = {}
    for label, run in runs.items():
        if isinstance(run, str | os.PathLike):
            curves[label] = _read(run, metrics)
        else:
            curves[label] = _of_history(run, metrics)
            if not curves[label]:
                raise ConfigurationError(f"no round of {label!r} has {' or '.join(metrics)}")
    return _draw(curves, metrics)


def _of_history(history: Sequence[Round], metrics: Sequence[str]) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for metric in metrics:
        if entries := [entry for entry in history if metric in entry.metrics]:
            values = [entry.metrics[metric] for entry in entries]
            curves[metric] = ([entry.index for entry in entries], values)
    return curves


def _read(folder: str | os.PathLike[str], metrics: Sequence[str]) -> dict[str, Curve]:
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

    if not Path(folder).is_dir():
        raise ConfigurationError(f"there is no run folder {folder}")
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    scalars = {m: found.Scalars(m) for m in metrics if m in found.Tags()["scalars"]}
    if not scalars:
        raise ConfigurationError(
            f"the TensorBoard events in {folder} have none of {', '.join(metrics)}"
        )
    return {
        m: ([e.step for e in events], [e.value for e in events]) for m, events in scalars.items()
    }


def _draw(curves: Mapping[str, Mapping[str, Curve]], metrics: Sequence[str]) -> Figure:
    from matplotlib.ticker import MaxNLocator

    columns = min(len(metrics), 3)
    lines = math.ceil(len(metrics) / columns)
    figure = new_figure(max(6.0, 4.2 * columns) + (len(curves) > 1) * 1.2, 3.6 * lines)
    grid = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes in grid[len(metrics) :]:
        axes.set_axis_off()
    handles = {}
    for axes, metric in zip(grid, metrics, strict=False):
        for position, (label, run) in enumerate(curves.items()):
            if metric in run:
                rounds, values = run[metric]
                style = line_style(position, len(rounds))
                (handles[label],) = axes.plot(rounds, values, linewidth=1.6, **style)
        axes.set_xlabel("round")
        axes.set_ylabel(_in_words(metric))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.grid(axis="y", color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    if len(curves) > 1:
        shown = [label for label in curves if label in handles]
        figure.legend(
            [handles[label] for label in shown],
            shown,
            loc="outside right upper",
            frameon=False,
            ncols=1 + len(shown) // 16,
        )
    return figure


def _in_words(tag: str) -> str:
    """Return a tag as a label: ``val/macro_acc`` becomes "validation macro accuracy"."""
    words = tag.replace("/", " ").replace("_", " ").split()
    return " ".join(_WORDS.get(word, word) for word in words)

"""The figures of a comparison: validation over rounds and bytes, and the clients' test values."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pflight.data.palette import FAINT, line_style

from .findings import LOCAL, Findings
from .outcome import Curve
from .rows import Row, by_client
from .statistics import Floats, floats
from .units import Unit, unit_of_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST = 12  # curves, besides those of the baselines
_COLOURED = 4  # best curves that have a colour, besides the baselines; the others are grey
_BASELINES = (LOCAL, "FedAvg")
_HUES = 0, 2, 4, 1, 6, 5, 9  # colours of the palette, without the greys
_LINE = 0.05  # height of a name, as a share of the frame's
_FAR = 10.0  # times as many bytes, from which their axis is logarithmic
_DPI = 150
_EDGE = "#3f3f3f"
_GREY = "#8a8a8a"


class Figures:
    """Draws a comparison; each figure has no window, and is ready for ``savefig``.

    Args:
        findings: The numbers.
    """

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._tag = f"val/macro_{findings.metric}"

    def curves(self) -> Figure:
        """Draw the validation metric over rounds: means of seeds, and the best row's range."""
        return self._drawn("rounds", "rounds", lambda curve: floats(curve.round))

    def traffic(self) -> Figure:
        """Draw the validation metric over the bytes sent and received until then."""
        sizes = [size for run in self._findings.runs for size in run.curve.bytes]
        unit = unit_of_bytes(sizes)
        label = f"sent and received until then by all clients, {unit.name}"
        return self._drawn("traffic", label, lambda curve: unit.factor * floats(curve.bytes))

    def boxes(self) -> Figure:
        """Draw the test values of all clients at all seeds, in the order of the table."""
        found, unit = self._findings, self._unit
        values = []
        for row in found.finished:
            by_seed = [by_client(run, found.metric, found.when) for run in row.runs.values()]
            joined = unit.factor * np.concatenate(by_seed)
            values.append(joined[np.isfinite(joined)])
        figure = _figure(7.0, 1.6 + 0.24 * len(values))
        axes = figure.add_subplot()
        axes.boxplot(
            values,
            orientation="horizontal",
            widths=0.6,
            showmeans=True,
            patch_artist=True,
            boxprops={"facecolor": FAINT, "edgecolor": _EDGE},
            medianprops={"color": _EDGE, "linewidth": 1.6},
            meanprops={"marker": "D", "markersize": 4, "mfc": "#bd1f01", "mec": "none"},
            flierprops={"marker": ".", "markersize": 3, "mfc": _EDGE, "mec": "none", "alpha": 0.4},
            whiskerprops={"color": _EDGE},
            capprops={"color": _EDGE},
        )
        places = range(1, len(values) + 1)
        axes.set_yticks(places, [_short(row.label) for row in found.finished])
        axes.invert_yaxis()
        when = "at the chosen round" if found.when == "chosen" else "after the last round"
        axes.set_xlabel(_words(unit.of(f"test {found.metric} of a client {when}")))
        _plain(axes, "x")
        figure.suptitle(
            "Clients of all seeds: quartiles, median (line) and mean (diamond)", fontsize=10
        )
        return figure

    def pngs(self) -> dict[str, bytes]:
        """Return the figures that have something to show as PNG, by name."""
        draw: dict[str, Callable[[], Figure]] = {}
        if any(run.curve.values.get(self._tag) for run in self._findings.runs):
            draw |= {"curves": self.curves, "traffic": self.traffic}
        if self._findings.finished:
            draw["boxes"] = self.boxes
        return {name: _png(figure()) for name, figure in draw.items()}

    def _is_baseline(self, row: Row) -> bool:
        return row.method in _BASELINES or row is self._findings.baseline

    @property
    def _unit(self) -> Unit:
        return self._findings.units[self._findings.metric]

    def _shown(self) -> list[Row]:
        """Return the best rows, and the baselines behind them."""
        found = self._findings
        best = found.finished[:_MOST]
        return best + [row for row in found.finished[_MOST:] if self._is_baseline(row)]

    def _drawn(self, what: str, label: str, places: Callable[[Curve], Floats]) -> Figure:
        from matplotlib.ticker import MaxNLocator

        found, unit, rows = self._findings, self._unit, self._shown()
        figure = _figure(8.5, 4.8)
        axes = figure.add_subplot()
        ends: list[float] = []
        later: list[Floats] = []  # values with room in the frame; curves may begin outside
        names: list[tuple[Row, float, float, str]] = []  # with the end and the colour of its line
        named = [row for row in rows if row in rows[:_COLOURED] or self._is_baseline(row)]
        for row in rows:
            x, values = _over_seeds(row, self._tag, places)
            if not len(x):
                continue
            values = unit.factor * values
            ends.append(x[-1])
            later.append(values[:, len(x) // 5 :].ravel())
            means, strong = values.mean(axis=0), row in named
            style: dict[str, Any] = {"color": FAINT}
            if strong:
                style = line_style(_HUES[named.index(row) % len(_HUES)], len(x))
            width, above = (1.6, 3) if strong else (1.0, 2)
            axes.plot(x, means, linewidth=width, label=row.label, zorder=above, **style)
            names.append((row, x[-1], means[-1], style["color"] if strong else _GREY))
            if len(values) > 1 and row in (found.best, found.baseline):
                low, high = values.min(axis=0), values.max(axis=0)
                axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
        if what == "traffic" and ends and max(ends) > _FAR * min(ends):
            axes.set_xscale("log")
        else:
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=what == "rounds", min_n_ticks=1))
        axes.set_xlabel(label)
        axes.set_ylabel(_words(unit.of(f"validation macro {found.metric}")))
        if found.target is not None:
            axes.axhline(unit.factor * found.target, color=_EDGE, linestyle=":", linewidth=1)
            later.append(floats([unit.factor * found.target]))
        shown = np.concatenate([*later, np.empty(0)])
        shown = shown[np.isfinite(shown)]
        if len(shown):
            low, high = shown.min(), shown.max()
            axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
        _plain(axes, "y")
        _name_ends(axes, names)
        number = len(found.finished)
        some = f";\nthe {_MOST} best of {number} and the baselines are shown"
        spread = "mean of seeds, range of the best" if len(found.seeds) > 1 else "one seed"
        if found.baseline is not None and len(found.seeds) > 1:
            spread += " and the baseline"
        axes.set_title(
            f"Validation by {what}: {spread}{some if len(rows) < number else ''}", fontsize=10
        )
        return figure


def _name_ends(axes: Axes, names: Sequence[tuple[Row, float, float, str]]) -> None:
    """Write names beside the frame, at the heights where their lines end, one below the other."""
    low, high = axes.get_ylim()
    step = (high - low) * _LINE
    known = [name for name in names if np.isfinite(name[2])]
    order = sorted(known, key=lambda name: -name[2])
    top = math.inf
    for place, (row, x, y, color) in enumerate(order):
        left = len(order) - 1 - place  # that need room below
        height = min(max(min(y, high), low + left * step), top - step)
        top = height
        axes.annotate(
            _short(row.label, 26),
            (x, min(max(y, low), high)),
            (1.03, (height - low) / (high - low)),
            textcoords="axes fraction",
            va="center",
            fontsize=8,
            color=color,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.5, "relpos": (0, 0.5)},
        )


def _over_seeds(row: Row, tag: str, places: Callable[[Curve], Floats]) -> tuple[Floats, Floats]:
    """Return the places and values ``[seeds, rounds]`` at the rounds that all seeds evaluated."""
    curves = [run.curve for run in row.runs.values() if tag in run.curve.values]
    if not curves:
        return np.empty(0), np.empty((0, 0))
    shared = set.intersection(*({*curve.round} for curve in curves))
    chosen = [np.isin(curve.round, sorted(shared)) for curve in curves]
    x = [places(curve)[kept] for curve, kept in zip(curves, chosen, strict=True)]
    y = [floats(curve.values[tag])[kept] for curve, kept in zip(curves, chosen, strict=True)]
    return np.mean(x, axis=0), np.stack(y)


def _short(label: str, most: int = 40) -> str:
    return _words(label if len(label) <= most else f"{label[: most - 1]}…")


def _words(text: str) -> str:
    """Return a text that matplotlib doesn't take for mathematics."""
    return text.replace("$", r"\$")


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=_DPI, layout="constrained")


def _plain(axes: Axes, grid: Literal["x", "y"]) -> None:
    axes.grid(axis=grid, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()

"""The colours of all pictures, distinguishable for colour-blind readers and in grey."""

from __future__ import annotations

from typing import Any

# Petroff (2021), "Accessible color sequences for data visualization", arXiv:2107.02270.
COLORS = (
    "#3f90da",
    "#ffa90e",
    "#bd1f01",
    "#94a4a2",
    "#832db6",
    "#a96b59",
    "#e76300",
    "#b9ac70",
    "#717581",
    "#92dadd",
)
MARKERS = "os^DvPX"
FAINT = "#c8c8c8"  # for items without a colour of their own
KINDS = len(COLORS) * len(MARKERS)
"""Pairs of a colour and a marker; neighbours differ in both."""


def point_style(index: int) -> tuple[str, str]:
    """Return the colour and the marker of the ``index``-th of up to :data:`KINDS` kinds of points.

    Example:
        >>> point_style(0), point_style(10)
        (('#3f90da', 'o'), ('#3f90da', 'D'))
    """
    return COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]


def line_style(index: int, points: int) -> dict[str, Any]:
    """Return the colour of the ``index``-th line and the markers at some of its points.

    Example:
        >>> line_style(1, points=50)["marker"], line_style(1, points=50)["markevery"]
        ('s', 5)
    """
    color, marker = point_style(index)
    every = max(1, points // 10)
    return {"color": color, "marker": marker, "markersize": 4, "markevery": every}

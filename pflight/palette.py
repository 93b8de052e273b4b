"""The colours of all pictures, told apart also by colour-blind readers and in grey."""

from __future__ import annotations

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
MARKERS = "os^D"
FAINT = "#c8c8c8"  # what is there and has no colour of its own


def point_style(index: int) -> tuple[str, str]:
    """Return the colour and the marker of the ``index``-th of up to 40 kinds of points.

    Example:
        >>> point_style(0), point_style(10)
        (('#3f90da', 'o'), ('#3f90da', 's'))
    """
    return COLORS[index % len(COLORS)], MARKERS[index // len(COLORS) % len(MARKERS)]

"""Comparisons: many methods, settings and seeds, and one table of their results."""

from .comparing import compare, report
from .results import Results
from .tuning import Tuning

__all__ = ["Results", "Tuning", "compare", "report"]

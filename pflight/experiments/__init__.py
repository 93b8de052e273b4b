"""Comparisons: many methods, settings and seeds, and one table of their results.

``comparing`` is where a command or a call begins. ``plan`` makes its runs, and ``tuning`` those of
a search. ``jobs`` shares them among processes, each of which is a ``worker``. ``measuring`` trains
and tests one run. Its result is an ``outcome``, a file. ``reading`` makes outcomes of other run
folders. The outcomes of one configuration are a row (``rows``). ``comparison`` has all rows,
``findings`` and ``statistics`` their numbers, and ``results``, ``tables``, ``figures``, ``lines``
and ``footer`` what a reader sees.
"""

from .comparing import compare, report
from .results import Results
from .tuning import Tuning

__all__ = ["Results", "Tuning", "compare", "report"]

"""Differences between methods that the papers print, beside those of the runs here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

Figure = tuple[str, ...]
"""Where a figure belongs: experiment, column, method, seed and measure."""
Pair = tuple[str, str, str]
"""A column, and the two of its methods whose difference is meant."""

ENDS = ("low", "high")


class Difference(NamedTuple):
    """By how much a method is above another one, in points.

    Attributes:
        mean: Over the seeds that both have.
        interval: 95 %: of t over several seeds, over clients for one, ``None`` if it is not known.
        seeds: How many there are.
    """

    mean: float
    interval: tuple[float, float] | None
    seeds: int


def titled(spec: Mapping[str, Any], pair: Sequence[str]) -> str:
    """Return the title of the difference between two methods."""
    return " \N{MINUS SIGN} ".join(spec["methods"][method]["title"] for method in pair)


def pairs(spec: Mapping[str, Any]) -> list[Pair]:
    """Return what an experiment's claims compare."""
    rows = spec.get("claims", {}).get("rows", [])
    return [tuple(pair) for row in rows for pair in row["pairs"] if pair]


def all_published(spec: Mapping[str, Any], column: str, method: str) -> list[str]:
    """Return the figures that a paper prints of a method, which its title names.

    Args:
        spec: The experiment's part of ``papers.yaml``.
        column: Of the paper's table, or one that names it as ``published``.
        method: The method.

    Returns:
        Figures in the order of the measures, mostly one.
    """
    source = spec["columns"].get(column, {}).get("published", column)
    figures, title = spec.get("published", {}).get(source, {}), spec["methods"][method]["title"]
    found = figures.get(title, figures.get(title.split(",")[0], []))
    several = found if isinstance(found, list) else [found]
    return [f"{figure:.2f}" if isinstance(figure, float) else figure for figure in several]


def published(spec: Mapping[str, Any], column: str, method: str) -> str:
    """Return the first of the figures that a paper prints of a method, or nothing."""
    return next(iter(all_published(spec, column, method)), "")


def printed(spec: Mapping[str, Any], column: str, pair: Sequence[str]) -> tuple[float, str] | None:
    """Return the difference of two figures of a paper, with and without its spread.

    Args:
        spec: The experiment's part of ``papers.yaml``.
        column: Of the paper's table.
        pair: The methods.

    Returns:
        ``None`` if the paper has no figure of one, or the same line for both.
    """
    texts = [published(spec, column, method) for method in pair]
    lines = {spec["methods"][method]["title"].split(",")[0] for method in pair}
    if not all(texts) or len(lines) == 1:
        return None
    (one, *_), (other, *_) = parted = [[float(part) for part in t.split("±")] for t in texts]
    spreads = [part[1] for part in parted if len(part) > 1]
    spread = f" ± {math.hypot(*spreads):.1f}" if spreads else ""
    return one - other, f"{one - other:.1f}{spread}"


def by_seed(
    figures: Mapping[Figure, float], experiment: str, pair: Pair, measure: str
) -> dict[str, float]:
    """Return the differences between two methods by seed, for the seeds of both.

    Args:
        figures: All that is known, in percent.
        experiment: Whose methods they are.
        pair: The methods.
        measure: By which they are compared.
    """
    column, *methods = pair
    ours, theirs = (
        {
            where[3]: value
            for where, value in figures.items()
            if (*where[:3], where[4]) == (experiment, column, method, measure)
        }
        for method in methods
    )
    return {seed: ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())}


def difference_here(
    figures: Mapping[Figure, float], experiment: str, pair: Pair, measure: str
) -> Difference | None:
    """Return the difference between the runs of two methods, by seeds; ``None`` if there is none.

    Args:
        figures: All that is known, in percent.
        experiment: Whose methods they are.
        pair: The methods.
        measure: By which they are compared.
    """
    seeds = by_seed(figures, experiment, pair, measure)
    if not seeds:
        return None
    found = [*seeds.values()]
    mean = float(np.mean(found))
    if len(found) > 1 and not np.ptp(found):
        return Difference(mean, (mean, mean), len(found))
    if len(found) > 1:
        ends = stats.t.interval(0.95, len(found) - 1, loc=mean, scale=stats.sem(found))
        return Difference(mean, (float(ends[0]), float(ends[1])), len(found))
    column, *methods = pair
    where = experiment, column, " - ".join(methods), *seeds
    low, high = (figures.get((*where, f"{measure}_{end}"), math.nan) for end in ENDS)
    return Difference(mean, None if math.isnan(low) else (low, high), 1)


def verdict(paper: float, here: Difference) -> str:
    """Return whether a difference is the paper's.

    Returns:
        ``"open"`` if 0 and the paper's difference are in the interval; ``"no"`` if 0 alone is in
        it, or the sign is another; ``"less"`` and ``"more"`` below half and above twice the
        paper's; ``"yes"`` otherwise.
    """
    low, high = here.interval or (here.mean, here.mean)
    if low <= 0 <= high:
        return "open" if low <= paper <= high else "no"
    ratio = here.mean / paper
    if ratio < 0:
        return "no"
    return "less" if ratio < 0.5 else "more" if ratio > 2 else "yes"


def claims_table(
    experiment: str, spec: Mapping[str, Any], figures: Mapping[Figure, float], titles: list[str]
) -> str:
    """Return the table of an experiment's claims.

    A cell has the difference of the first measure, and the verdict; the verdicts of the other
    measures where they are others.

    Args:
        experiment: Its name.
        spec: Its part of ``papers.yaml``; ``claims`` has ``measures``, ``heads`` and ``rows``.
        figures: All that is known.
        titles: Of the claims' measures.
    """
    claims = spec["claims"]
    lines = [["difference", "paper", *claims["heads"]]]
    lines.append(["---"] * len(lines[0]))
    for row in claims["rows"]:
        column, *methods = next(pair for pair in row["pairs"] if pair)
        paper, text = printed(spec, claims.get("published", column), methods) or (math.nan, "")
        cells = [row["title"], text]
        for pair in row["pairs"]:
            found = [
                pair and difference_here(figures, experiment, tuple(pair), measure)
                for measure in claims["measures"]
            ]
            cells.append(_cell(paper, found, titles) if found[0] else "")
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def details_table(
    experiment: str,
    column: str,
    spec: Mapping[str, Any],
    figures: Mapping[Figure, float],
    titles: list[str],
) -> str:
    """Return the table of all differences that ``details`` names, by each measure.

    A cell has the mean over the seeds of both methods, its interval and the difference at each
    seed.

    Args:
        experiment: Its name.
        column: Likewise. Pairs of which a method has no figure there are left out.
        spec: The experiment's part of ``papers.yaml``.
        figures: All that is known.
        titles: Of the experiment's measures.
    """
    is_printed = column in spec.get("published", {})
    source = column if is_printed else spec.get("claims", {}).get("published", column)
    lines = [["difference", "paper", *titles]]
    lines.append(["---"] * len(lines[0]))
    for one, other in spec["details"]:
        pair = column, one, other
        found = [_detail(figures, experiment, pair, measure) for measure in spec["measures"]]
        if any(found):
            paper = printed(spec, source, pair[1:])
            lines.append([titled(spec, pair[1:]), paper[1] if paper else "", *found])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _detail(figures: Mapping[Figure, float], experiment: str, pair: Pair, measure: str) -> str:
    here = difference_here(figures, experiment, pair, measure)
    if here is None:
        return ""
    notes = [] if here.interval is None else ["{:.1f} to {:.1f}".format(*here.interval)]
    if here.seeds > 1:
        seeds = by_seed(figures, experiment, pair, measure).values()
        notes.append(", ".join(f"{_rounded(value)}" for value in seeds))
    return f"{_rounded(here.mean)}" + (f" ({'; '.join(notes)})" if notes else "")


def _rounded(value: float) -> float:
    return round(value, 1) + 0.0  # not -0.0


def _cell(paper: float, found: list[Difference | None], titles: list[str]) -> str:
    main, verdicts = found[0], [one and verdict(paper, one) for one in found]
    assert main is not None
    interval = "" if main.interval is None else "{:.1f} to {:.1f}, ".format(*main.interval)
    others = [
        f"{title}: {said}"
        for said, title in zip(verdicts, titles, strict=True)
        if said not in (None, verdicts[0])
    ]
    said = f"{verdicts[0]} ({'; '.join(others)})" if others else verdicts[0]
    return f"{_rounded(main.mean)} ({interval}{main.seeds}): {said}"

"""The figures of a comparison show what they say."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.image import imread

from pflight.data.palette import FAINT
from pflight.experiments.outcome import Curve
from pflight.experiments.results import Results

from .made import comparison, outcome

ACC = "val/macro_acc"


def test_curves_are_the_mean_and_range_of_seeds() -> None:
    runs = []
    for seed, values in enumerate([[0.2, 0.4, 0.6], [0.4, 0.5, 0.9]]):
        rounds = [5, 10, 15 + seed]  # of the last, only one seed has each
        curve = Curve(rounds, [1000 * r for r in rounds], {"val/macro_acc": [*values]})
        runs.append(outcome("FedAvg", seed, {"acc": [0.5, 0.6]}, curve=curve))
    figures = Results(runs, target=0.8).figures
    (axes,) = figures.curves().axes
    mean, target = axes.get_lines()
    np.testing.assert_allclose(mean.get_xydata(), [[5, 30], [10, 45]])
    assert target.get_ydata()[0] == pytest.approx(80)
    (band,) = axes.collections
    corners = {tuple(np.round(point, 6)) for point in band.get_paths()[0].vertices}
    assert {(5, 20), (5, 40), (10, 40), (10, 50)} <= corners
    assert axes.get_xlabel() == "rounds"
    assert axes.get_ylabel() == "validation macro acc, %"
    (axes,) = figures.traffic().axes
    np.testing.assert_allclose(axes.get_lines()[0].get_xydata(), [[5, 30], [10, 45]])
    assert axes.get_xlabel().endswith("by all clients, kB")


def test_the_frame_is_of_the_later_rounds_and_of_all_bytes() -> None:
    runs = []
    for method, size in {"A": 1, "B": 20}.items():
        values = [0.1, 0.2, 0.5, 0.6, 0.7, 0.6, 0.7, 0.8, 0.7, 0.8]
        curve = Curve([*range(1, 11)], [1000 * size * r for r in range(1, 11)], {ACC: values})
        runs.append(outcome(method, 0, {"acc": [0.5, 0.6]}, curve=curve))
    figures = Results(runs).figures
    axes = figures.curves().axes[0]
    low, high = axes.get_ylim()
    assert 45 < low < 50
    assert 80 < high < 85
    assert axes.get_xscale() == "linear"
    assert figures.traffic().axes[0].get_xscale() == "log"
    (axes,) = Results(runs[:1]).figures.traffic().axes
    assert axes.get_xscale() == "linear"


@pytest.mark.short("inf")
@pytest.mark.parametrize("later", [None, math.inf])
def test_curves_may_end_in_what_is_no_number(later: float | None) -> None:
    curve = Curve([1, 2, 3, 4, 5, 6], [100] * 6, {ACC: [0.5, *[later] * 5]})
    run = outcome("A", 0, {"acc": [0.5]}, curve=curve)
    for runs in ([run], [run, outcome("B", 0, {"acc": [0.5]})]):
        assert [*Results(runs).figures.pngs()] == ["curves", "traffic", "boxes"]


def test_one_seed_has_no_range() -> None:
    figure = Results(comparison({"A": 0.5}, seeds=1)).figures.curves()
    assert [*figure.axes[0].collections] == []
    assert "one seed" in figure.axes[0].get_title()


def test_of_many_methods_the_best_and_the_baselines_are_drawn() -> None:
    levels = {f"M{number}": 0.5 + number / 100 for number in range(38)}
    levels |= {"Local": 0.3, "FedAvg": 0.2}
    results = Results(comparison(levels, seeds=2), baseline="M7", draws=10)
    figure = results.figures.curves()
    labels = [line.get_label() for line in figure.axes[0].get_lines()]
    order = [row.label for row in results.findings.rows]
    assert labels == [*order[:12], "M7", "Local", "FedAvg"]
    assert "the 12 best of 40 and the baselines are shown" in figure.axes[0].get_title()
    assert {text.get_text() for text in figure.axes[0].texts} == {*labels}
    lines = figure.axes[0].get_lines()
    grey = [line.get_label() for line in lines if line.get_color() == FAINT]
    assert grey == order[4:12]
    assert len(figure.axes[0].collections) == 2  # ranges of the best and the baseline
    figure.canvas.draw()
    heights = sorted(text.get_window_extent().y0 for text in figure.axes[0].texts)
    assert all(two - one > 10 for one, two in pairwise(heights))
    boxes = results.figures.boxes()
    assert [tick.get_text() for tick in boxes.axes[0].get_yticklabels()] == order
    boxes.canvas.draw()
    places = [tick.get_window_extent() for tick in boxes.axes[0].get_yticklabels()]
    assert all(one.y0 >= two.y1 - 1 for one, two in pairwise(places))


def test_boxes_are_of_all_clients() -> None:
    runs = [
        outcome("A", 0, {"mae": [1.0, 2.0, None]}, mode="min"),
        outcome("A", 1, {"mae": [3.0, 8.0, 9.0]}, mode="min"),
    ]
    (axes,) = Results(runs).figures.boxes().axes
    medians = [line for line in axes.get_lines() if line.get_linewidth() == 1.6]
    assert medians[0].get_xdata()[0] == 3.0
    assert axes.get_xlabel() == "test mae of a client after the last round"


def test_pictures_are_complete() -> None:
    long = "A method with a name that does not end, at least not soon"
    runs = comparison({r"costs $5 or $\6$": 0.5, long: 0.6})
    pngs = Results(runs).figures.pngs()
    assert [*pngs] == ["curves", "traffic", "boxes"]
    for png in pngs.values():
        assert imread(io.BytesIO(png))[..., :3].std() > 0
    without = [replace(run, curve=Curve([], [], {})) for run in runs]
    assert [*Results(without).figures.pngs()] == ["boxes"]
    assert Results([]).figures.pngs() == {}

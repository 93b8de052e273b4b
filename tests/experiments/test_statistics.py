"""The statistics, against loops that follow their definitions."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import binomtest

from pflight.experiments.outcome import Curve
from pflight.experiments.statistics import (
    differences,
    holm,
    macro,
    mean_and_deviation,
    micro,
    reaching,
    resamples,
    share_below,
    smallest_sign_test,
    worst_decile,
)

NAN = math.nan


@pytest.mark.parametrize("clients", [1, 9, 10, 11, 35])
def test_means_over_clients(clients: int) -> None:
    rng = random.Random(clients)
    values = [rng.random() if rng.random() < 0.8 else NAN for _ in range(clients)] + [0.5]
    samples = [rng.randrange(1, 50) for _ in values]
    known = [(value, count) for value, count in zip(values, samples, strict=True) if value == value]
    total = sum(count for _, count in known)
    assert macro(np.array(values)) == pytest.approx(sum(v for v, _ in known) / len(known))
    assert micro(np.array(values), samples) == pytest.approx(sum(v * n for v, n in known) / total)
    ordered = sorted(v for v, _ in known)
    worst = -(-len(ordered) // 10)
    low, high = ordered[:worst], ordered[::-1][:worst]
    assert worst_decile(np.array(values), "max") == pytest.approx(sum(low) / worst)
    assert worst_decile(np.array(values), "min") == pytest.approx(sum(high) / worst)


def test_means_of_no_client_are_nan() -> None:
    nobody = np.array([NAN, NAN])
    assert math.isnan(macro(nobody))
    assert math.isnan(micro(nobody, [3, 4]))
    assert math.isnan(worst_decile(nobody, "max"))
    assert math.isnan(share_below(np.array([]), "max"))


def test_share_below_counts_what_is_worse() -> None:
    differences = np.array([-0.1, 0.0, 0.1, 0.2])
    assert share_below(differences, "max") == 0.25
    assert share_below(differences, "min") == 0.5


def test_deviation_has_one_degree_of_freedom_less() -> None:
    values = [0.2, 0.5, 0.9]
    mean = sum(values) / 3
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / 2)
    assert mean_and_deviation(values) == pytest.approx((mean, deviation))
    assert math.isnan(mean_and_deviation([0.2])[1])
    assert all(map(math.isnan, mean_and_deviation([])))


def by_loops(columns: Sequence[Sequence[float]], draws: int, seed: int) -> list[float]:
    """Return the values of draws: seeds, then the clients of each, with replacement."""
    rng = random.Random(seed)
    found = []
    for _ in range(draws):
        means = []
        for _ in columns:
            clients = rng.choice(columns)
            drawn = [rng.choice(clients) for _ in clients]
            means.append(sum(drawn) / len(drawn))
        found.append(sum(means) / len(means))
    return sorted(found)


@pytest.mark.parametrize("seeds", [1, 2, 3, 5])
def test_the_interval_is_that_of_loops(seeds: int) -> None:
    rng = np.random.default_rng(seeds)
    columns = [rng.normal(0.02, 0.05, size=6 + 3 * seed) for seed in range(seeds)]
    (found,) = differences([columns])
    draws = by_loops([column.tolist() for column in columns], draws=10_000, seed=1)
    scale = np.std(draws)
    assert found.mean == pytest.approx(sum(sum(c) / len(c) for c in columns) / seeds)
    assert found.low == pytest.approx(draws[249], abs=0.15 * scale)
    assert found.high == pytest.approx(draws[9749], abs=0.15 * scale)
    below = sum(value <= 0 for value in draws) / len(draws)
    assert found.p == pytest.approx(2 * min(below, 1 - below), abs=0.02)
    assert (found.seeds, found.clients) == (seeds, sum(map(len, columns)))
    assert found.above == sum(column.mean() > 0 for column in columns)
    assert found.above + found.below == seeds


def exact(columns: Sequence[Sequence[Fraction]]) -> Counter[Fraction]:
    """Return the distribution of a draw, as how many of all equally likely ways give a value."""
    by_seed = [
        Counter(sum(drawn) / len(column) for drawn in itertools.product(column, repeat=len(column)))
        for column in columns
    ]
    assert len({sum(counts.values()) for counts in by_seed}) == 1
    one = sum(by_seed, start=Counter())  # of one place, for which a seed is drawn
    whole: Counter[Fraction] = Counter()
    for drawn in itertools.product(one.items(), repeat=len(columns)):
        value = sum(mean for mean, _ in drawn) / len(columns)
        whole[value] += math.prod(ways for _, ways in drawn)
    return whole


@pytest.mark.parametrize(
    "tenths",
    [
        [[1, 3, 2], [-2, 4, 3]],
        [[-3, 1, 2], [0, 0, 1]],
        [[1], [2], [-3], [1], [2], [-3]],  # each once gives zero, but not in floating point
        [[0, 0, 0], [0, 0, 0]],
    ],
)
def test_the_draws_are_those_of_all_possible_ones(tenths: list[list[int]]) -> None:
    distribution = exact([[Fraction(value, 10) for value in column] for column in tenths])
    total = sum(distribution.values())
    draws = 40_000
    (found,) = differences([[np.array(column) / 10 for column in tenths]], draws=draws)
    below = sum(ways for value, ways in distribution.items() if value <= 0) / total
    above = sum(ways for value, ways in distribution.items() if value >= 0) / total
    apart = sum(value != 0 for column in tenths for value in column)
    p = max(2 * min(below, above), binomtest(apart, apart).pvalue if apart else 1)
    assert found.p == pytest.approx(min(1, p), abs=4 / math.sqrt(draws))
    for end, share in ((found.low, 0.025), (found.high, 0.975)):
        reached = sum(ways for value, ways in distribution.items() if value <= end + 1e-9) / total
        before = sum(ways for value, ways in distribution.items() if value < end - 1e-9) / total
        assert before - 0.005 <= share <= reached + 0.005


def test_a_pair_does_not_depend_on_others() -> None:
    rng = np.random.default_rng(0)
    pairs = [[rng.normal(size=size) for size in (7, 5)] for _ in range(4)]
    pairs.insert(2, [rng.normal(size=9)])
    together = differences(pairs)
    for pair, found in zip(pairs, together, strict=True):
        (alone,) = differences([pair])
        assert (alone.low, alone.high, alone.p) == pytest.approx((found.low, found.high, found.p))
    assert differences(pairs) == together


def test_many_clients_are_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = [np.random.default_rng(seed).normal(size=30) for seed in range(2)]
    (whole,) = differences([columns])
    monkeypatch.setattr("pflight.experiments.statistics._AT_ONCE", 100)
    (parts,) = differences([columns])
    assert (parts.low, parts.high) == pytest.approx((whole.low, whole.high), abs=0.05)


def test_no_difference_is_no_evidence() -> None:
    (found,) = differences([[np.zeros(4), np.zeros(3)]])
    assert (found.mean, found.low, found.high, found.p) == (0, 0, 0, 1)
    assert (found.above, found.below) == (0, 0)


def test_p_is_never_zero() -> None:
    (found,) = differences([[np.ones(14), np.ones(13)]], draws=999)
    assert found.p == 2 / 1000


@pytest.mark.parametrize("number", [1, 2, 7])
def test_holm_rejects_step_by_step(number: int) -> None:
    rng = random.Random(number)
    for _ in range(50):
        p = [rng.choice([rng.random(), 0.01, 0.04, rng.random() / 20]) for _ in range(number)]
        corrected = holm(p)
        for level in (0.01, 0.03, 0.05, 0.2):
            rejected = set()
            for step, index in enumerate(sorted(range(number), key=p.__getitem__)):
                if p[index] * (number - step) > level:
                    break
                rejected.add(index)
            assert {i for i, value in enumerate(corrected) if value <= level} == rejected
        assert max(corrected) <= 1
    assert holm([]) == []


@pytest.mark.parametrize("seeds", range(1, 8))
def test_what_seeds_can_show(seeds: int) -> None:
    assert smallest_sign_test(seeds) == pytest.approx(binomtest(seeds, seeds).pvalue)
    drawn = itertools.combinations_with_replacement(range(seeds), seeds)
    assert resamples(seeds) == len([*drawn])


def test_reaching_a_target() -> None:
    curve = Curve([5, 10, 15], [1, 2, 3], {"val/a": [None, 0.8, 0.7]})
    assert reaching(curve, "val/a", 0.8, "max") == (10, 2)
    assert reaching(curve, "val/a", 0.75, "min") == (15, 3)
    assert reaching(curve, "val/a", 0.9, "max") == (math.inf, math.inf)
    assert reaching(curve, "val/b", 0.1, "max") == (math.inf, math.inf)


@pytest.mark.parametrize("shape", [(1,), (5,), (2, 3), (1, 1, 1)])
def test_few_pairs_have_no_interval_and_no_small_p(shape: tuple[int, ...]) -> None:
    (found,) = differences([[np.full(size, 0.1) for size in shape]])
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    assert found.p == pytest.approx(binomtest(sum(shape), sum(shape)).pvalue)


def test_pairs_without_a_difference_say_nothing() -> None:
    (found,) = differences([[np.array([0.1] * 3 + [0.0] * 20)]])
    assert found.p >= binomtest(3, 3).pvalue
    assert not math.isnan(found.low)
    (equal,) = differences([[np.zeros(8)]])
    assert equal.p == 1


def test_many_pairs_are_not_bounded() -> None:
    (found,) = differences([[np.full(30, 0.1)]])
    assert found.p == pytest.approx(2 / 10_001)

"""Distances of adapters are the printed ones, and do not see a turn of the factors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

pytest.importorskip("peft")

from pflight.adapters import AdapterDistance, Pair
from pflight.callbacks import FeSEM
from pflight.errors import ConfigurationError
from pflight.modifiers import Private
from tests.adapters.worlds import Regressor, matrix, regressor, trained

PAIR = Pair("lin", "default", "a", "b", 1, 2.0)
ONE = {"a": matrix([[1, 0]]), "b": matrix([[1], [0], [2]])}
OTHER = {"a": matrix([[1, 2]]), "b": matrix([[0], [1], [1]])}
NAMES: list[Any] = ["product", "subspace", "cosine_B"]


def distance(name: Any, one: dict[str, Tensor], other: dict[str, Tensor], *pairs: Pair) -> float:
    stack = TensorDict({key: value[None] for key, value in one.items()}, [1])
    (found,) = AdapterDistance(name, pairs or (PAIR,))(stack, other)
    return float(found)


@pytest.mark.parametrize(("name", "value"), [*zip(NAMES, [44, 0.6, 0.367544], strict=True)])
def test_printed_values(name: Any, value: float) -> None:
    assert distance(name, ONE, OTHER) == pytest.approx(value, abs=6e-7)
    assert distance(name, OTHER, ONE) == pytest.approx(value, abs=6e-7)
    assert distance(name, ONE, ONE) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_layers_are_added_up_or_averaged(name: Any) -> None:
    far = Pair("far", "default", "a2", "b2", 1, 2.0)
    one, other = ({**x, "a2": x["a"], "b2": 0 * x["b"]} for x in (ONE, OTHER))
    expected = distance(name, ONE, OTHER) / (1 if name == "product" else 2)
    assert distance(name, one, other, PAIR, far) == pytest.approx(expected)


def test_a_turn_of_the_factors_is_no_distance() -> None:
    draw = torch.Generator().manual_seed(0)
    a, b, turn = (torch.randn(*n, generator=draw).double() for n in ((2, 5), (6, 2), (2, 2)))
    one, other = {"a": a, "b": b}, {"a": torch.linalg.inv(turn) @ a, "b": b @ turn}
    assert distance("product", one, other) == pytest.approx(0, abs=1e-20)
    assert distance("subspace", one, other) == pytest.approx(0, abs=1e-12)
    assert distance("cosine_B", one, other) > 0.01


@pytest.mark.parametrize("name", NAMES)
def test_zeros_have_no_distance_but_their_product(name: Any) -> None:
    zero = {"a": ONE["a"], "b": 0 * ONE["b"]}
    size = float((2 * ONE["b"] @ ONE["a"]).square().sum()) if name == "product" else 0
    assert distance(name, zero, ONE) == pytest.approx(size)
    assert not math.isnan(distance(name, zero, zero))


@pytest.mark.parametrize("name", NAMES)
def test_fesem_assigns_by_them(name: Any) -> None:
    federation = trained(FeSEM(2, distance=name), rounds=2)
    assert sorted(federation.callback.assignments.tolist()) == [0, 1]


@pytest.mark.parametrize(
    ("options", "module", "said"),
    [
        ({}, lambda: Regressor(torch.nn.Linear(2, 3)).double(), "needs low-rank adapters"),
        ({"modifiers": [Private("*lora_A*")]}, regressor, "lora_A.* does not travel"),
    ],
)
def test_what_they_need_is_said(options: dict[str, Any], module: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=f"FeSEM with distance='product'.*{said}"):
        trained(FeSEM(2, distance="product", **options), module=module())

"""Tests of the comparison of attributes."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pflight.callbacks import FedAvg
from pflight.engines.alone.contents import contents
from pflight.engines.alone.copies import Copies
from tests.runs import network_client, run, small_data


class Space:
    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


class Slotted:
    __slots__ = ("held",)


class Forgetful:
    def __getstate__(self) -> dict[str, Any]:
        return {}


class Listed(list[int]):
    pass


class Equal:
    """Equal to whatever it is compared with."""

    def __init__(self) -> None:
        self.held = [1]

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def holder() -> dict[str, Any]:
    inner = Space(numbers=[1, 2], names={"a"}, own=Equal())
    inner.itself = inner
    return {"inner": inner, "pairs": (1, [2, {"x": inner.numbers}]), "by": OrderedDict(a=1, b=2)}


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value["inner"].numbers.append(3),
        lambda value: value["inner"].names.add("b"),
        lambda value: setattr(value["inner"], "more", None),
        lambda value: delattr(value["inner"], "names"),
        lambda value: value["inner"].own.held.append(1),
        lambda value: setattr(value["inner"], "own", Equal()),
        lambda value: value["pairs"][1].pop(),
        lambda value: value["by"].move_to_end("a"),
        lambda value: value.update(inner=Space(**vars(value["inner"]))),
    ],
)
def test_a_change_inside_is_seen(change: Callable[[Any], None]) -> None:
    value = holder()
    before = contents([value])
    assert contents([value]) == before
    change(value)
    assert contents([value]) != before


@pytest.mark.parametrize(
    "value",
    [torch.zeros(1), torch.Generator(), iter([1]), io.StringIO(), Slotted(), Forgetful(), Listed()],
)
def test_unknown_kinds_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="is not known"):
        contents([{"held": [value]}])


class Counting(nn.Linear):
    """Counts its passes in a list, from the second client on if it is told to wait."""

    def __init__(self, counts: bool) -> None:
        super().__init__(4, 3)
        self.counts, self.passes, self.sizes = counts, [0], {"in": 4}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.passes[0] += 1
        return super().forward(x) + self.passes[0]


@pytest.mark.parametrize("counts", [False, True])
def test_a_copy_with_lists_is_used_again_unless_they_change(
    counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    fresh = Copies.fresh
    monkeypatch.setattr(Copies, "fresh", lambda self: (made.append(1), fresh(self))[1])
    run(network_client(Counting(counts)), small_data(), FedAvg(), 2, engine="sequential")
    assert (len(made) > 10) == counts

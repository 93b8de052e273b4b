"""Messages hold tensors, numbers and words; what is not as expected is said, and not used."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from pflight.deploy.flower import bytes_of
from pflight.deploy.messages import (
    MessageError,
    check_parts,
    count_of,
    entries_of,
    group_of,
    list_of,
    number_of,
    numbers_of,
    packed,
)
from tests.deploy.in_process import across

KINDS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool]


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return an equal tensor whose numbers don't lie one after the other."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("shape", [(), (0, 2), (3,), (2, 1, 4)])
def test_tensors_arrive_as_they_were(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(8)[: torch.Size(shape).numel()].view(shape).to(dtype)
    arrived = across(packed({"state": {"w": tensor, "t": strided(tensor)}}))
    found = entries_of(arrived, "state", {"w": tensor, "t": tensor})
    assert found["w"].dtype is dtype
    assert torch.equal(found["w"], tensor)
    assert torch.equal(found["t"], tensor)
    found["w"].fill_(1)  # it can be written to


def test_numbers_and_words_arrive_as_they_were() -> None:
    arrived = across(packed(numbers={"n": 3, "x": 0.1, "logs.a": [1.5, 2.0]}, words={"w": ["a"]}))
    assert (number_of(arrived, "n"), number_of(arrived, "x")) == (3, 0.1)
    assert numbers_of(arrived, "logs.") == {"a": [1.5, 2.0]}
    assert list_of(arrived, "w") == ["a"]
    assert list_of(arrived, "other") == []
    with pytest.raises(MessageError, match="no number m"):
        number_of(arrived, "m")


def given(
    kind: str = "float32 of shape [2, 2]", content: bytes = bytes(16), stype: str = "raw"
) -> RecordDict:
    """Return a state whose entry ``w`` is not quite 2 by 2 numbers."""
    words = ConfigRecord({"state.names": ["w"], "state.kinds": [kind]})
    array = Array("uint8", (len(content),), stype, content)
    return RecordDict({"state": ArrayRecord({"bytes": array}), "words": words})


WANTED = "where float32 of shape .2, 2. is wanted"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (given("float32 of shape [4, 1]"), f"w as float32 of shape .4, 1., {WANTED}"),
        (given(f"float32 of shape [{2**40}, {2**40}]"), WANTED),
        (given("float64 of shape [2, 2]", bytes(32)), f"w as float64 of shape .2, 2., {WANTED}"),
        (given("object"), f"it sent w as object, {WANTED}"),
        (given(stype="numpy.ndarray"), "it sent state as something else than raw"),
        (given(content=bytes(15)), "it sent 15 bytes, where 16 are wanted"),
        (given(content=bytes(2**20)), "it sent 1048576 bytes, where 16 are wanted"),
        (given(content=b"\xff" * 16), "its w is NaN or infinite"),
        (given(content=pickle.dumps(print)), "bytes, where 16 are wanted"),
        (packed({"state": {}}), "it sent no w"),
        (packed({"other": {"w": torch.zeros(2, 2)}}), "it sent no w"),
        (
            packed({"state": {"w": torch.zeros(2, 2), "v\n\x1b[2J": torch.zeros(1)}}),
            "v .?.2J, which",
        ),
        (packed(words={"state.names": ["w", "w"], "state.kinds": ["", ""]}), "an entry twice"),
        (packed(words={"state.names": ["w"], "state.kinds": []}), "without names"),
        (packed(words={"state.names": "w", "state.kinds": "k"}), "is not a list of words"),
    ],
)
def test_what_is_not_expected_is_not_used(content: RecordDict, said: str) -> None:
    with pytest.raises(MessageError, match=said) as error:
        entries_of(across(content), "state", {"w": torch.zeros(2, 2)})
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("like", "said"),
    [
        (torch.tensor(True), "its w has values that are neither true nor false"),
        (torch.tensor(0), "its w has larger numbers than any machine may send"),
        (torch.tensor(0j), "its w is NaN or infinite"),
    ],
)
def test_values_are_those_of_their_type(like: torch.Tensor, said: str) -> None:
    content = packed({"state": {"w": like}})
    data = b"\xff" * (like.nbytes - 1) + b"\x7f"
    content["state"]["bytes"] = Array("uint8", (len(data),), "raw", data)
    with pytest.raises(MessageError, match=said):
        entries_of(across(content), "state", {"w": like})


def test_a_message_has_known_parts() -> None:
    content = packed({"state": {"w": torch.zeros(2)}}, {"n": 1, "logs.a": 2.0}, {"w": "a"})
    check_parts(across(content), ("n", "logs."), ("w",), ("state",))
    for numbers, words, groups, said in [
        (("n", "logs"), ("w",), ("state",), "logs.a"),
        (("logs.",), ("w",), ("state",), "n"),
        (("n", "logs."), (), ("state",), "w"),
        (("n", "logs."), ("w",), (), "state"),
    ]:
        with pytest.raises(MessageError, match=f"^it sent {said}, which nobody asked for$"):
            check_parts(across(content), numbers, words, groups)


@pytest.mark.parametrize("value", [-1, 8, 1.0, float("inf"), [1]])
def test_a_whole_number_is_in_its_range(value: Any) -> None:
    assert count_of(packed(numbers={"n": 7}), "n", most=7) == 7
    with pytest.raises(MessageError, match=r"its n is .*, and no whole number from 0 to 7"):
        count_of(across(packed(numbers={"n": value})), "n", most=7)


def test_a_group_has_known_names_and_single_numbers() -> None:
    known = {"w": torch.zeros(2), "v": torch.zeros(3)}
    share = torch.tensor(0.5, dtype=torch.double)
    found = group_of(
        packed({"sent": {"w": torch.ones(2), "own.share": share}}), "sent", known, "own."
    )
    assert torch.equal(found["w"], torch.ones(2))
    assert float(found["own.share"]) == 0.5
    for odd in ({"u": torch.ones(2)}, {"own.table": torch.ones(2, 2)}):
        with pytest.raises(MessageError, match="it sent"):
            group_of(packed({"sent": odd}), "sent", known, "own.")


def test_the_envelope_is_small() -> None:
    states = {f"layer{i}.weight": torch.zeros(100, 100) + i for i in range(10)}
    carried, tensors = bytes_of(packed({"state": states}, {"round": 3})), 10 * 100 * 100 * 4
    assert tensors < carried < tensors + 100 * 10 + 1_000

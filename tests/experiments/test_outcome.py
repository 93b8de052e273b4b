"""Outcomes survive their files, and damaged files are an error that says what is wrong."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pflight.experiments.outcome import Curve, Failure, Moment, Outcome, ResultError, Tuned, signed

from .made import moment, outcome


def whole() -> Outcome:
    """Return an outcome that uses all fields."""
    return outcome(
        "FedAvg",
        3,
        {"acc": [0.5, None, 1], "mae": [0.1, 2.0, 3.0]},
        settings={"model.local_epochs": 5, "data.partition": {"alpha": [0.5]}},
        tuned=Tuned(20, "tpe", [100, 101], {"lr": 0.1}, 0.9, {"lr": [0.01, 1.0]}),
        directions={"acc": "max", "mae": None},
        chosen=moment(10, {"acc": [0.5, None, 0.75]}, {"test/macro_acc": 0.625}),
        newcomers=[3, 4],
        monitor="val/micro_acc",
    )


def test_an_outcome_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    whole().write(path)
    assert Outcome.read(path) == whole()
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    values = {"acc": [0.5, math.nan, math.inf]}
    outcome("A", 0, values, seconds=math.nan).write(path)
    json.loads(path.read_text(), parse_constant=pytest.fail)
    read = Outcome.read(path)
    assert read.last.per_client == {"acc": [0.5, None, None]}
    assert read.seconds is None


def test_a_failure_survives_its_file(tmp_path: Path) -> None:
    failure = Failure("k", "FedRep", {"lr": 0.1}, 1, "the network has no head: “é”", "log.txt")
    failure.write(tmp_path / "failure.json")
    assert Failure.read(tmp_path / "failure.json") == failure


def test_a_file_that_can_not_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    whole().write(path)
    with pytest.raises(TypeError):
        replace(whole(), settings={"model.optimizer": object()}).write(path)
    assert Outcome.read(path) == whole()


def changed(**changes: Any) -> str:
    """Return the JSON of an outcome with other values of some fields; ``...`` removes one."""
    fields = json.loads(json.dumps(whole(), default=vars))
    for name, value in changes.items():
        parts = name.split("__")
        place = fields
        for part in parts[:-1]:
            place = place[part]
        place[parts[-1]] = value
        if value is ...:
            del place[parts[-1]]
    return signed(json.dumps(fields))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Expecting value"),
        (changed()[:-40], "damaged"),
        ("[1]", "it has no checksum"),
        (json.dumps({"version": 1}), "it has no checksum"),
        (changed().replace("0.75", "0.85"), "its checksum does not match"),
        (changed(metric=...), "run has no metric"),
        (changed(last__round=...), "run.last has no round"),
        (changed(seed="3"), "run.seed is '3', not an integer"),
        (changed(seed=True), "run.seed is True"),
        (changed(method=None), "run.method is None, not a text"),
        (changed(mode="maximum"), "run.mode is 'maximum', not 'max' or 'min'"),
        (changed(directions__mae="up"), "run.directions.mae is 'up'"),
        (changed(clients=[0, 2, 1]), "clients are not ascending"),
        (changed(clients=[0, 1]), "samples.test has 3 values of 2 clients"),
        (changed(samples={"val": []}), "samples has no test"),
        (changed(last__per_client__acc=[0.5]), "last.per_client.acc has 1 values of 3 clients"),
        (changed(chosen__per_client__acc=[]), "chosen.per_client.acc has 0 values"),
        (changed(last__per_client__acc=[0.5, "1", 1]), "an element of run.last.per_client.acc"),
        (changed(curve__bytes=[1]), "the curve has 2 rounds, but 1 values of bytes"),
        (changed(tuned__trials=2.5), "run.tuned.trials is 2.5"),
        (changed(version=2), "version 2"),
    ],
)
def test_a_damaged_file_says_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(ResultError) as error:
        Outcome.read(path)
    assert str(path) in str(error.value)
    assert said in str(error.value)


def test_no_flipped_bit_goes_unnoticed(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    whole().write(path)
    content = path.read_bytes()
    for place in range(len(content)):
        bit = 1 << place % 8
        path.write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
        with pytest.raises(ResultError, match="damaged"):
            Outcome.read(path)


def test_bytes_that_are_no_text_are_damaged(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(ResultError, match=r"results\.json is damaged"):
        Outcome.read(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match=r"can't read .*none\.json: No such file"):
        Failure.read(tmp_path / "none.json")


def test_an_outcome_is_checked_when_it_is_made() -> None:
    with pytest.raises(ResultError, match=r"last\.per_client\.acc has 1 values of 3 clients"):
        replace(whole(), last=Moment(1, None, {}, {"acc": [0.5]}))
    with pytest.raises(ResultError, match="but 3 values of val/macro_acc"):
        Curve([1, 2], [1, 2], {"val/macro_acc": [0.1, 0.2, 0.3]})

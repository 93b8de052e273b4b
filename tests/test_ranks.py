"""Two ranks on the CPU compute what one does."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests import ranks_script
from tests.algorithm_tester import of_each_kind
from tests.ranks_script import ALGORITHMS, DIFFERENT, SAVED, fit

NAMES = of_each_kind(ALGORITHMS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def names(request: pytest.FixtureRequest) -> list[str]:
    """Return the algorithms that the tests of this session ask for."""
    here = [item for item in request.session.items if item.path == request.path]
    cases = [getattr(item, "callspec", None) for item in here]
    asked = {case.params.get("name") for case in cases if case is not None}
    return [name for name in ALGORITHMS if name in {"FedAvg", *asked}]


@pytest.fixture(scope="module")
def one(folder: Path, names: list[str]) -> dict[str, Any]:
    """What one rank computes; it also saves the checkpoints that two ranks resume."""
    return {name: fit(name, folder / "one") for name in names}


@pytest.fixture(scope="module")
def two(folder: Path, names: list[str], one: dict[str, Any]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", ranks_script.__name__, str(folder), *names]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, timeout=900, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]


def assert_equal_results(one: dict[str, Any], two: dict[str, Any]) -> None:
    for key in ("cohorts", "failed", "bytes", "global_step"):
        assert one[key] == two[key], key
    assert torch.equal(one["assignments"], two["assignments"])
    for key in ("server", "clients", "judged", "side path"):
        assert_close(one[key], two[key], rtol=1e-4, atol=1e-4, equal_nan=True)
    assert two["tested"] == pytest.approx(one["tested"], rel=1e-4, nan_ok=True)
    for left, right in zip(one["metrics"], two["metrics"], strict=True):
        assert right == pytest.approx(left, rel=1e-4, nan_ok=True)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_every_rank_ends_as_one_would_alone(
    name: str, rank: int, one: dict[str, Any], two: list[dict[str, Any]]
) -> None:
    assert_equal_results(one[name], two[rank][name])


@pytest.mark.parametrize("name", NAMES)
def test_the_ranks_agree_bit_for_bit(name: str, two: list[dict[str, Any]]) -> None:
    assert_close(two[0][name]["server"], two[1][name]["server"], rtol=0, atol=0)
    for left, right in zip(two[0][name]["metrics"], two[1][name]["metrics"], strict=True):
        assert left == pytest.approx(right, rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_go_on_from_the_checkpoint_of_one(
    name: str, one: dict[str, Any], two: list[dict[str, Any]]
) -> None:
    for rank in (0, 1):
        assert_equal_results(one[name], two[rank][f"{name} resumed"])


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
@pytest.mark.parametrize("name", NAMES)
def test_one_rank_goes_on_from_the_checkpoint_of_two(
    name: str, folder: Path, one: dict[str, Any], two: list[dict[str, Any]]
) -> None:
    saved = folder / "two" / f"{name}-epoch={SAVED - 1}.ckpt"
    assert_equal_results(one[name], fit(name, folder / "again", saved))


def test_every_client_is_evaluated_once(two: list[dict[str, Any]]) -> None:
    """But for the one that can't be fine-tuned."""
    for rank in (0, 1):
        assert two[rank]["FedAvg"]["judged"]["num_samples"].tolist() == [6, 6, 6, 0, 6, 6]


def test_failures_are_part_of_the_comparison(one: dict[str, Any]) -> None:
    assert any(3 in failed for failed in one["FedAvg"]["failed"])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_that_stops_the_run_stops_all_ranks(rank: int, two: list[dict[str, Any]]) -> None:
    failed = "failed", "failed on its val samples", "failed to predict"
    for said, how in zip(two[rank]["raised"], failed, strict=True):
        assert said == f"round 0: client 3 {how}: OSError: its disk is gone"


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_differ_say_so_before_they_train(what: str, two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert f"the ranks differ in {DIFFERENT[what]}" in rank["different"][what]


def test_ranks_that_don_t_differ_train(two: list[dict[str, Any]]) -> None:
    assert [rank["different"]["nothing"] for rank in two] == [None, None]

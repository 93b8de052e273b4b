"""What nodes claim is bounded: numbers of samples, updates, and what they send beside."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pflight.deploy.bounds import Bounds, check_update, norm_of, outliers
from pflight.deploy.messages import MessageError
from pflight.deploy.remote import Asked
from pflight.errors import ConfigurationError
from tests.deploy.test_lies import ABSENT, METHODS, Lie, deployed, entries, numbers
from tests.runs import assert_same

LIAR = 2
pytestmark = pytest.mark.filterwarnings(  # pytest.warns hands it on as if it were ours
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"
)


@pytest.mark.parametrize(
    ("share", "counts", "weights"),
    [
        (0.5, [1000, 10, 10, 10], [30, 10, 10, 10]),
        (0.3, [1000, 500, 10, 10, 10], [22.5, 22.5, 10, 10, 10]),
        (0.2, [5, 1, 1], [1, 1, 1]),  # no weights are that even
        (0.5, [100, 1], [1, 1]),
        (0.4, [3, 4, 3], [3, 4, 3]),
        (0.5, [7, 0, 1, 1], [2, 0, 1, 1]),
        (None, [10**9, 1], [10**9, 1]),
    ],
)
def test_weights_are_capped(share: float | None, counts: list[int], weights: list[float]) -> None:
    found = Bounds(max_share=share).capped(torch.tensor(counts)).double()
    torch.testing.assert_close(found, torch.tensor(weights, dtype=torch.double))


def test_norms_do_not_overflow() -> None:
    assert norm_of([torch.full((4,), 1e30), torch.zeros(2)]) == pytest.approx(2e30)
    sent = {"w": torch.zeros(2), "n": torch.tensor(3), "bn.running_var": torch.ones(1)}
    check_update(sent, sent, gradient=False)
    for name, value, said in (
        ("w", torch.tensor([2e3, 0.0]), "its update has norm 2e\\+03"),
        ("w", torch.tensor([4.1e19, 0.0]), "its update has norm 4.1e\\+19"),
        ("n", torch.tensor(-1), "its n counts what can't be"),
        ("n", torch.tensor(2**40), "its n counts"),
        ("bn.running_var", -torch.ones(1), "negative variance"),
    ):
        with pytest.raises(MessageError, match=said):
            check_update({**sent, name: value}, sent, gradient=False)


def test_a_statistic_far_from_those_of_others_is_odd() -> None:
    own = {i: {"means": torch.full((2,), float(i))} for i in (1, 2, 3)}
    assert outliers(own, floor=1.0) == {}
    assert [*outliers({**own, 4: {"means": torch.full((2,), 100.0)}}, floor=1.0)] == [4]
    assert outliers({**own, 4: {"means": torch.full((2,), 100.0)}}, floor=1e3) == {}


def at(name: str, change: Callable[[Tensor], Any]) -> Lie:
    """Change the first entry whose name has this in it."""

    def lie(state: dict[str, Tensor]) -> None:
        (first, *_) = (entry for entry in state if name in entry)
        change(state[first].view(-1))

    return entries(lie)


def set_to(value: float) -> Callable[[Tensor], Any]:
    return lambda entry: entry[:1].fill_(value)


LIES: dict[str, tuple[str, Lie, str]] = {
    "FedAvg": ("FedAvg", at("weight", set_to(3e38)), "its update has norm 3e\\+38"),
    "FedSGD": ("FedSGD", at("weight", set_to(1e20)), "its update has norm 1e\\+20"),
    "FeSEM": ("FeSEM", at("weight", set_to(1e30)), "its update has norm 1e\\+30"),
    "pFedHN": ("pFedHN", at("weight", set_to(1e30)), "its update has norm 1e\\+30"),
    "FedNova's path": ("FedNova", at("path", set_to(1e30)), "its path has length 1e\\+30"),
    "no path": ("FedNova", at("path", set_to(1e-30)), "its path has length 1e-30"),
    "FedPAC's counts": ("FedPAC", at("counts", set_to(-64)), "counts by class are not those"),
    "FedProto's counts": ("FedProto", at("counts", set_to(1e9)), "counts by class are not those"),
    "half a sample": ("FedProto", at("counts", lambda c: c.mul_(0.5)), "counts by class"),
    "FedProto's means": ("FedProto", at("means", set_to(1e9)), "means has norm 1e\\+09"),
    "FedGH's means": ("FedGH", at("means", set_to(1e9)), "means has norm 1e\\+09"),
    "SCAFFOLD's control": ("SCAFFOLD", at("control", set_to(1e4)), "control.* has norm 1e\\+04"),
    "FedAS's trace": ("FedAS", at("fisher", set_to(1e30)), "fisher has norm"),
    "a negative trace": ("FedAS", at("fisher", set_to(-1)), "Fisher information is negative"),
    "pFedFDA's covariance": ("pFedFDA", at("covariance", set_to(1e12)), "covariance has norm 1e"),
    "a variance": ("FedAvg", at("running_var", set_to(-1)), "negative variance"),
    "a counter": ("FedAvg", at("num_batches", set_to(2**40)), "counts what can't be"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", LIES)
@pytest.mark.long
def test_a_finite_message_ends_no_federation(case: str, tmp_path: Path) -> None:
    """The others' result is that of rounds in which its node was not connected."""
    method, lie, said = LIES[case]
    results = []
    for change in (lie, None):
        run = deployed(method, tmp_path / str(len(results)))

        def on_answer(asked: Asked, answer: Any, change: Any = change) -> Any:
            if asked.client != LIAR or asked.work not in ("train", "gradients"):
                return answer
            return ABSENT if change is None else change(answer) or answer

        run.post.on_answer = on_answer
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            federation = run.server(2)
        results.append((federation, [str(w.message) for w in caught]))
    (lied, messages), (absent, _) = results
    assert [entry.failed for entry in lied.history] == [[LIAR], [LIAR]]
    with pytest.warns(UserWarning, match=rf"round 0: client {LIAR} failed: .*{said}"):
        warnings.warn("; ".join(messages), stacklevel=1)
    for one, other in zip(lied.server_states(), absent.server_states(), strict=True):
        assert_same(one, other)


@pytest.mark.filterwarnings("ignore:round 0")
def test_a_node_decides_no_weight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers of samples are declared, bounded, printed and fixed; shares are capped."""
    claim = {"samples__train": 10**9}

    def on_answer(asked: Asked, answer: Any) -> Any:
        if asked.client == LIAR and asked.work == "describe":
            return numbers(**claim)(answer) or answer
        return answer

    run = deployed("FedAvg", tmp_path / "one")
    run.post.on_answer = on_answer
    refused = "client 2's node says: it says that it has 1,000,000,000 samples for train, of at"
    with pytest.raises(ConfigurationError, match=refused):
        run.server(1)
    claim["samples__train"] = claim["samples__val"] = 10**6
    run = deployed("FedAvg", tmp_path / "two")
    run.post.on_answer = on_answer
    with pytest.warns(UserWarning, match="client 2 says that it has more than half of all"):
        run.server(1)
    said = capsys.readouterr().out
    assert re.search(
        r"client 2 has 1,000,000 train, 1,000,000 val, \d+ test samples, 100.0% of", said
    )
    run = deployed("FedAvg", tmp_path / "three")
    run.post.on_answer = on_answer
    federation = run.server(1, max_share=0.3)
    assert federation.history[0].failed == []


@pytest.mark.filterwarnings("ignore")
def test_numbers_of_samples_are_fixed_for_a_run(tmp_path: Path) -> None:
    run = deployed("FedAvg", tmp_path)
    saved = tmp_path / "saved.ckpt"
    run.server(1).trainer.save_checkpoint(saved)

    def on_answer(asked: Asked, answer: Any) -> Any:
        if asked.client == LIAR and asked.work == "describe":
            return numbers(samples__train=8)(answer) or answer
        return answer

    run.post.on_answer = on_answer
    with pytest.raises(ConfigurationError, match=r"it has 8 train.* joined with 7 train"):
        run.server(2, ckpt_path=saved)


def test_every_method_is_lied_to() -> None:
    assert {method for method, _, _ in LIES.values()} <= METHODS.keys()

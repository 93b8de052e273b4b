"""Server state is declared: what is declared is saved, and what is forgotten is an error."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from pflight import Federation
from pflight.callbacks import CFL, FedAvg, ServerCallback
from pflight.errors import ConfigurationError
from pflight.runs.check_state import CheckState, fingerprint
from pflight.states.declared import DeclaredState
from tests.own_methods import MyFedDyn
from tests.runs import assert_same, linear_client, run, small_data


class Point(NamedTuple):
    x: int
    where: torch.Tensor


@dataclass(frozen=True)
class Choice:
    by: str
    values: dict[int, float]


class Keeping(FedAvg):
    """Declares a state of every kind."""

    def setup_server(self) -> None:
        super().setup_server()
        self.add_state("rounds", 0)
        self.add_state("seen", torch.zeros(6, dtype=torch.long), on_cpu=True)
        self.add_state("sums", {})
        self.add_state("points", [], kind=Point)
        self.add_state("choice", None, kind=Choice)
        self.add_state("mixer", nn.Linear(2, 2))

    def receive(self, updates: Any) -> None:
        super().receive(updates)
        self.seen[updates.clients] += 1

    def aggregate(self, mean: Any) -> Any:
        self.rounds += 1
        self.points.append(Point(self.rounds, mean["network.bias"].clone()))
        self.choice = Choice("round", {self.rounds: 0.5})
        for name, value in mean.items():
            self.sums[name] = self.sums.get(name, 0) + value
            mean[name] = value + 0.01 * self.sums[name] + 0.001 * self.seen.float().mean()
        return mean


class Counts(FedAvg):
    """Counts its rounds in an attribute that was made before."""

    def setup_server(self) -> None:
        super().setup_server()
        self.steps = 0

    def aggregate(self, mean: Any) -> Any:
        self.steps += 1
        return mean


class AddsUp(FedAvg):
    """Keeps a sum in an attribute that a round makes."""

    def aggregate(self, mean: Any) -> Any:
        bias = mean["network.bias"]
        self.total = bias if self.clients.rounds == 0 else self.total + bias
        return mean


class ChangesInPlace(FedAvg):
    """Changes a tensor in place."""

    def setup_server(self) -> None:
        super().setup_server()
        self.table = torch.zeros(6)

    def receive(self, updates: Any) -> None:
        super().receive(updates)
        self.table[updates.clients] += 1


class Collects(FedAvg):
    """Adds to a dictionary."""

    def setup_server(self) -> None:
        super().setup_server()
        self.known: dict[int, int] = {}

    def aggregate(self, mean: Any) -> Any:
        self.known[self.clients.rounds] = 1
        return mean


class OfItsClass(FedAvg):
    """Counts in an attribute that its class has, too."""

    steps = 0

    def aggregate(self, mean: Any) -> Any:
        self.steps += 1
        return mean


class KnowsAnObject(FedAvg):
    """Changes an object of its own."""

    def setup_server(self) -> None:
        super().setup_server()
        self.past = nn.BatchNorm1d(3)

    def aggregate(self, mean: Any) -> Any:
        self.past(mean["network.weight"].T)
        return mean


class LastsForARound(FedAvg):
    """Has constants, and sums of one round."""

    def setup_server(self) -> None:
        super().setup_server()
        self.names = [*self.sent_names]

    def broadcast(self, clients: torch.Tensor) -> Any:
        self._sent = super().broadcast(clients)
        return self._sent

    def receive(self, updates: Any) -> None:
        assert [*self._sent.keys()] == self.names
        super().receive(updates)


def fit(callback: ServerCallback, rounds: int = 3, *callbacks: Any, **options: Any) -> Federation:
    data = small_data(cohort_size=3)
    return run(linear_client(), data, callback, rounds, *callbacks, **options)


@pytest.mark.parametrize("kind", [Keeping, MyFedDyn])
def test_declared_state_is_resumed_to_the_bit(kind: type[FedAvg], tmp_path: Path) -> None:
    fit(kind(), 2).trainer.save_checkpoint(tmp_path / "half.ckpt")
    torch.load(tmp_path / "half.ckpt", weights_only=True)
    resumed = fit(kind(), 4, CheckState(), ckpt_path=tmp_path / "half.ckpt")
    whole = fit(kind(), 4)
    assert_same(resumed.server_states()[0], whole.server_states()[0])
    left, right = (fingerprint(run.callback.state_dict()) for run in (resumed, whole))
    assert left == right


def test_objects_come_back_as_they_were(tmp_path: Path) -> None:
    saved = fit(Keeping())
    saved.trainer.save_checkpoint(tmp_path / "run.ckpt")
    loaded = Federation.load_from_checkpoint(
        tmp_path / "run.ckpt", client=linear_client(), callback=Keeping()
    ).callback
    assert (loaded.rounds, loaded.choice) == (3, Choice("round", {3: 0.5}))
    assert [type(point) for point in loaded.points] == [Point] * 3
    assert torch.equal(loaded.points[1].where, saved.callback.points[1].where)
    assert torch.equal(loaded.mixer.weight, saved.callback.mixer.weight)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Counts, "steps"),
        (AddsUp, "total"),
        (ChangesInPlace, "table"),
        (Collects, "known"),
        (OfItsClass, "steps"),
        (KnowsAnObject, "past"),
    ],
)
def test_state_that_is_not_declared_is_an_error(kind: type[FedAvg], name: str) -> None:
    callback = kind()
    with pytest.raises(
        ConfigurationError, match=f"^{kind.__name__} keeps '{name}' from round to round and does"
    ):
        fit(callback, 3, CheckState())
    assert "round" not in vars(callback)
    fit(kind())


@pytest.mark.parametrize("kind", [FedAvg, Keeping, LastsForARound, CFL])
def test_the_check_changes_nothing(kind: type[ServerCallback]) -> None:
    checked, plain = fit(kind(), 3, CheckState()), fit(kind())
    assert_same(checked.server_states()[0], plain.server_states()[0])
    assert "round" not in vars(checked.callback)


def test_what_fails_for_another_reason_says_so() -> None:
    class Broken(FedAvg):
        def aggregate(self, mean: Any) -> Any:
            return self.nowhere

    with pytest.raises(AttributeError, match="nowhere"):
        fit(Broken(), 3, CheckState())


@pytest.mark.parametrize("value", [{1, 2}, [object()], {"a": nn.Linear(1, 1)}])
def test_what_a_checkpoint_cannot_hold_is_refused(value: Any) -> None:
    class Odd(FedAvg):
        def setup_server(self) -> None:
            super().setup_server()
            self.add_state("odd", value)

    with pytest.raises(ConfigurationError, match=r"^Odd: the state 'odd' has a .*, which a checkp"):
        fit(Odd())


def test_state_is_declared_in_setup_server() -> None:
    class TooEarly(FedAvg):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("steps", 0)

    with pytest.raises(ConfigurationError, match=r"^TooEarly: declare the state 'steps' in setup"):
        TooEarly()


def test_a_checkpoint_with_other_state_is_refused(tmp_path: Path) -> None:
    def version(*names: str) -> FedAvg:
        class Own(FedAvg):
            def setup_server(self) -> None:
                super().setup_server()
                for name in names:
                    self.add_state(name, 0)

        return Own()

    fit(version("a", "b"), 1).trainer.save_checkpoint(tmp_path / "run.ckpt")
    with pytest.raises(
        ConfigurationError, match="only the checkpoint has b and only this run has c"
    ):
        fit(version("a", "c"), 2, ckpt_path=tmp_path / "run.ckpt")


def test_tensors_move_wherever_they_are() -> None:
    tensor, device = torch.zeros(2), torch.device("meta")
    value = {"a": [tensor, (1, tensor)], "b": Point(1, tensor), "c": Choice("x", {})}
    moved = DeclaredState().move(value, device)
    for one in (moved["a"][0], moved["a"][1][1], moved["b"].where):
        assert one.is_meta
    assert (moved["b"].x, moved["c"]) == (1, Choice("x", {}))
    assert not DeclaredState(on_cpu=True).move(tensor, device).is_meta


def test_loaded_state_is_where_the_models_are(tmp_path: Path) -> None:
    class Moving(Keeping):
        def move_state(self) -> None:
            super().move_state()
            self.by_then = self.server.tensors(0)["network.bias"].detach().clone()

    saved = fit(Moving())
    saved.trainer.save_checkpoint(tmp_path / "run.ckpt")
    loaded = Federation.load_from_checkpoint(
        tmp_path / "run.ckpt", client=linear_client(), callback=Moving()
    )
    assert torch.equal(loaded.callback.by_then, saved.server_states()[0]["network.bias"])


def test_state_follows_the_models() -> None:
    federation = fit(Keeping())
    federation.to("meta")
    assert federation.callback.sums["network.bias"].is_meta
    assert not federation.callback.seen.is_meta

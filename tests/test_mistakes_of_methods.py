"""Mistakes in a method of one's own, which end the run in one line before they make a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from pflight.callbacks import FedAvg
from pflight.errors import ClientError, ConfigurationError
from pflight.local_client import Batches, LocalClient, LocalWork, Pass
from pflight.method import ClientMethod, Model
from pflight.models.client_methods import Proximal
from pflight.runs.check_state import CheckState
from pflight.transforms.base import Draw, Transform
from tests.runs import ENGINES, batchnorm_client, run, small_data


def fit(
    method: ClientMethod | None = None, callback: FedAvg | None = None, *checks: Any, **options: Any
) -> Any:
    """Run a method of one's own for two rounds."""
    callback = FedAvg() if callback is None else callback
    if method is not None:
        callback.client_method = method
    return run(batchnorm_client(), small_data(cohort_size=3), callback, 2, *checks, **options)


class With(ClientMethod):
    """Has an own entry, and one hook of a test."""

    def state(self, weights: Mapping[str, Tensor]) -> dict[str, Any]:
        return {"g.x": torch.zeros(2)}


class InPlaceBefore(With):
    def before_training(self, work: LocalWork, clients: Tensor, sent: TensorDict) -> TensorDict:
        states = super().before_training(work, clients, sent)
        states["network.0.bias"][0] += 8
        return states


class Unprefixed(With):
    def before_training(self, work: LocalWork, clients: Tensor, sent: TensorDict) -> TensorDict:
        states = super().before_training(work, clients, sent)
        return states.update({"g.x": torch.ones(len(clients), 2)})


class Nothing(With):
    def before_training(self, *_: Any) -> Any:
        return None


class Finished(With):
    """Returns something odd after training."""

    def __init__(self, odd: Any) -> None:
        self.odd = odd

    def finish(self, work: LocalWork, clients: Tensor, *states: TensorDict) -> Any:
        return self.odd(states[-1])


class Rule(With):
    def models(self) -> dict[str, Model]:
        return {"": lambda work, clients, sent, states: states[0]}


class Float(ClientMethod):
    def state(self, weights: Mapping[str, Tensor]) -> dict[str, Any]:
        return {"share": 0.5}


METHODS = {
    "in place": (InPlaceBefore(), "InPlaceBefore.before_training() changes tensors in place: "),
    "unprefixed": (
        Unprefixed(),
        "Unprefixed.before_training() returns states that have 'g.x': in a state it is "
        "'pflight_own.g.x'",
    ),
    "nothing": (
        Nothing(),
        "Nothing.before_training() has to return a TensorDict of batch size [3], a stack of full "
        "states, got NoneType",
    ),
    "a dict": (Finished(dict), "Finished.finish() has to return a TensorDict of batch size [3]"),
    "a part": (
        Finished(lambda states: states.exclude("network.0.bias")),
        "Finished.finish() returns states that lack 'network.0.bias'",
    ),
    "one state": (
        Rule(),
        "Rule.models(): the rule of '' has to return a TensorDict of batch size [6], a stack of "
        "full states, got one of batch size []",
    ),
    "a float": (Float(), "Float.state(): 'share' must be a tensor, got 0.5"),
}


@pytest.mark.parametrize(("method", "said"), METHODS.values(), ids=METHODS)
def test_what_a_client_method_returns_is_checked(method: ClientMethod, said: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        fit(method, engine="sequential")
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


class Server(FedAvg):
    """Has a hook of a test."""

    def __init__(self, target: Any = None, private: str | None = None) -> None:
        super().__init__()
        self.target, self.of_own = target, private

    def aggregate(self, mean: TensorDict) -> Any:
        return mean if self.target is None else self.target(mean)

    def private_names(self, *known: Any) -> set[str]:
        return super().private_names(*known) | ({self.of_own} if self.of_own else set())


class Careless(FedAvg):
    def __init__(self) -> None:
        self.share = 0.5


SERVERS = {
    "scalars": (
        Server(lambda mean: {name: value.sum() for name, value in mean.items()}),
        "a state given for the server's model has 'network.0.weight' of shape (), which the "
        "client's network does not have",
    ),
    "nothing": (
        Server(lambda mean: "none"),
        "a state given for the server's model has to map names to tensors, got str",
    ),
    "unknown": (
        Server(lambda mean: {"x": torch.zeros(1)}),
        "a state given for the server's model has 'x' of shape (1,), which the client's network "
        "does not have",
    ),
    "private": (
        Server(private="g.x"),
        "Server.private_names() has 'g.x', which is no entry of a client's state: in a state it "
        "is 'pflight_own.g.x'",
    ),
    "no super": (Careless(), "Careless.__init__ has to call super().__init__() first"),
}


@pytest.mark.parametrize(("callback", "said"), SERVERS.values(), ids=SERVERS)
def test_what_a_server_callback_returns_is_checked(callback: FedAvg, said: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        fit(With(), callback)
    assert str(error.value) == said


@ENGINES
def test_a_personal_copy_stays_with_its_client_without_a_word_about_it(engine: str) -> None:
    method = ClientMethod()
    method.personal = Proximal(0.1)
    plain, both = fit(engine=engine), fit(method, engine=engine)
    assert [e.bytes_up for e in plain.history] == [e.bytes_up for e in both.history]
    assert any(name.startswith("pflight_personal.") for name in both.callback.private)


class Twice(Pass):
    """Goes through the batches twice, or has an odd option."""

    def __init__(self, split: Any = "train", batch_size: int | None = None) -> None:
        self.split, self.batch_size = split, batch_size

    def __call__(self, c: LocalClient, batches: Batches) -> dict[str, Tensor]:
        return {"sizes": torch.tensor([sum(1 for _ in batches), sum(1 for _ in batches)])}


class Looking(ClientMethod):
    def __init__(self, look: Pass) -> None:
        self.look = look

    def before_training(self, work: LocalWork, clients: Tensor, sent: TensorDict) -> TensorDict:
        states = super().before_training(work, clients, sent)
        work.run(self.look, clients, states)
        return states


@ENGINES
def test_batches_can_be_gone_through_once(engine: str) -> None:
    with pytest.raises(ClientError, match="can be gone through once: keep them in a list"):
        fit(Looking(Twice()), engine=engine, on_client_error="raise")


@pytest.mark.parametrize("options", [{"split": "valid"}, {"batch_size": 0}, {"batch_size": -1}])
def test_the_options_of_a_pass_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"Twice: split must be one of train, val, test"):
        fit(Looking(Twice(**options)))


class Drawing(Transform):
    stage = "noise"

    def __call__(self, updates: Tensor, draw: Draw) -> Tensor:
        return updates + torch.randn_like(updates)


class Halves(Transform):
    """Sends the first entries, and says so badly."""

    stage = "compress"

    def __init__(self, size: int, scale: float) -> None:
        self.size, self.scale = size, scale

    def __call__(self, updates: Tensor, draw: Draw) -> Tensor:
        return torch.cat([updates[:, :2], torch.zeros_like(updates[:, 2:])], dim=1)

    def nbytes(self, size: int, itemsize: int) -> int:
        return self.size

    def pack(self, update: Tensor) -> dict[str, Tensor]:
        return {"first": update[:2] * self.scale}

    def packed_like(self, size: int, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"first": torch.zeros(2, dtype=dtype)}

    def unpack(self, parts: Mapping[str, Tensor], size: int) -> Tensor:
        return torch.cat([parts["first"], torch.zeros(size - 2)])


@pytest.mark.parametrize(
    ("transform", "said"),
    [
        (Drawing(), "Drawing draws from PyTorch's generator"),
        (Halves(3, 1), r"Halves: nbytes\(\) says 3, but what pack\(\) returns has 8 bytes"),
        (Halves(8, 2), r"Halves: unpack\(\) does not return the update that pack\(\) was given"),
    ],
)
def test_a_transform_is_checked_in_the_first_round(transform: Transform, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        fit(callback=FedAvg(modifiers=[transform]))
    assert fit(callback=FedAvg(modifiers=[Halves(8, 1)])).history[0].bytes_up


class Lazy(FedAvg):
    """Keeps a sum over rounds, which it makes when it is not there."""

    def set_pseudo_gradients(self) -> None:
        if not hasattr(self, "total"):
            self.total = 0.0
        self.total += float(self.mean.weights[0])
        super().set_pseudo_gradients()


def test_state_that_is_made_when_it_is_lacking_is_found() -> None:
    with pytest.raises(ConfigurationError, match="Lazy keeps 'total' from round to round"):
        fit(None, Lazy(), CheckState())

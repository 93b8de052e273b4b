"""Passes find in both engines what a client alone finds, whatever an author makes of a batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn import functional as F

from pflight import Federation
from pflight.callbacks import FedAvg
from pflight.engines.stacked.stack import Stack
from pflight.errors import ClientError
from pflight.local_client import Batches, LocalClient, Pass
from pflight.models import Classifier
from tests.runs import ENGINES, batchnorm_client, dropout_client, linear_client, run, small_data

RAGGED = (20, 5, 13)
EQUAL = (6, 9, 6, 6, 9, 6)
DOUBLE = {"dtype": torch.float64}

Function = Callable[[LocalClient, Any], dict[str, Tensor]]


class Finding(Pass):
    """Makes a list of what a function gives for each batch."""

    def __init__(self, function: Callable[[LocalClient, Any], Tensor], **options: Any) -> None:
        self.function = function
        vars(self).update(options)

    def __call__(self, c: LocalClient, batches: Batches) -> Mapping[str, Tensor]:
        return {"z": torch.stack([self.function(c, batch) for batch in batches])}


def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record how many clients share each call."""
    found, recorded = Stack.found, list[int]()

    def noted(self: Stack, look: Pass, state: dict[str, Tensor], *batches: Any) -> Any:
        recorded.append(len(state["num_samples"]))
        return found(self, look, state, *batches)

    monkeypatch.setattr(Stack, "found", noted)
    return recorded


def fitted(
    engine: str, counts: tuple[int, ...], client: Classifier | None = None, **options: Any
) -> Federation:
    client = linear_client() if client is None else client
    eval_batch_size = options.pop("eval_batch_size", None)
    data = small_data(counts, dtype=torch.float64, eval_batch_size=eval_batch_size)
    return run(client.double(), data, FedAvg(), 1, engine=engine, **options)


known = cache(fitted)


def of_all(federation: Federation, scale: bool = True) -> tuple[Tensor, TensorDict]:
    """Return all clients, each with a model of its own."""
    clients = torch.arange(federation.clients.num_clients)
    states = federation.clients.completed(clients, TensorDict({}, [len(clients)])).clone()
    for name in federation.clients.layout.parameters if scale else ():
        states[name] *= 1 + clients.view(-1, *[1] * (states[name].dim() - 1))
    return clients, states


def found_by(federation: Federation, look: Pass) -> list[dict[str, Tensor] | None]:
    return federation.clients.run(look, *of_all(federation))


def task_loss(c: LocalClient, batch: Any) -> Tensor:
    return c.task_loss(batch) * len(batch[1])


FUNCTIONS: dict[str, Callable[[LocalClient, Any], Tensor]] = {
    "task_loss": task_loss,
    "loss_at": lambda c, batch: c.task_loss_at({n: 2 * w for n, w in c.weights.items()}, batch),
    "mean": lambda c, batch: c.mean(batch[0].square()),
    "batch_mean": lambda c, batch: c.batch_mean(batch[0]),
    "batch_sum": lambda c, batch: c.batch_sum(batch[0]),
    "largest": lambda c, batch: batch[0].amax(0),
    "length": lambda c, batch: torch.tensor(float(len(batch[0]))),
    "spread": lambda c, batch: batch[0].var(0, correction=0),
    "weights": lambda c, batch: sum(w.sum() for w in c.weights.values()) * len(batch[0]),
    "module": lambda c, batch: F.cross_entropy(c.module(batch[0]), batch[1]),
    "samples": lambda c, batch: c.num_samples / c.mean_samples,
}


FUNCTION = pytest.mark.parametrize("name", [*FUNCTIONS])


@pytest.mark.parametrize("counts", [RAGGED, EQUAL])
@pytest.mark.parametrize("batch_size", [None, 1, 4])
@FUNCTION
def test_sums_are_those_of_one_client_alone(
    name: str, batch_size: int | None, counts: tuple[int, ...]
) -> None:
    """No batch is filled up, so that a function of the author's may count its samples."""
    results = []

    def measure(c: LocalClient, batch: Any) -> dict[str, Tensor]:
        return {"z": FUNCTIONS[name](c, batch)}

    for engine in ("sequential", "vectorized"):
        clients = (federation := known(engine, counts)).clients
        ids, states = of_all(federation)
        width = 4 if name in ("batch_mean", "batch_sum", "largest", "spread") else ()
        like = {"z": torch.zeros(width, dtype=torch.double)}
        sums = clients.sums(ids, states, measure, like, batch_size)["z"]
        looked = found_by(federation, Finding(FUNCTIONS[name], batch_size=batch_size))
        torch.testing.assert_close(
            torch.stack([own["z"].sum(0) for own in looked if own]), sums, check_dtype=False
        )
        results.append(sums)
    torch.testing.assert_close(*results)


@ENGINES
@pytest.mark.parametrize("eval_batch_size", [None, 4])
def test_rows_are_those_of_one_client_alone(engine: str, eval_batch_size: int | None) -> None:
    def centred(c: LocalClient, batch: Any) -> dict[str, Tensor]:
        return {"z": batch[0] - batch[0].mean(0)}

    federation = fitted(engine, RAGGED, eval_batch_size=eval_batch_size)
    clients, data = federation.clients, federation.clients.attached_data
    for i, found in enumerate(clients.rows(*of_all(federation), centred)):
        x = data.samples(i, "train")[0]
        right = torch.cat([part - part.mean(0) for part in x.split(eval_batch_size or len(x))])
        assert found is not None
        torch.testing.assert_close(found["z"], right)


@FUNCTION
def test_clients_with_as_many_samples_share_a_call(
    name: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    alone = found_by(known("sequential", EQUAL), Finding(FUNCTIONS[name]))
    federation = known("vectorized", EQUAL, clients_at_once=3)
    recorded = calls(monkeypatch)
    recwarn.clear()
    together = found_by(federation, Finding(FUNCTIONS[name]))
    assert recorded == [3, 2]  # of four clients with 6 samples the last is by itself
    assert not recwarn.list
    torch.testing.assert_close(together, alone)


def test_a_client_that_differs_shares_none(monkeypatch: pytest.MonkeyPatch) -> None:
    federation, recorded = known("vectorized", RAGGED), calls(monkeypatch)
    found_by(federation, Finding(task_loss))
    assert not recorded


def test_passes_say_that_they_are_not_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    federation, recorded = fitted("vectorized", EQUAL), calls(monkeypatch)
    found_by(federation, Finding(task_loss, stacks=False))
    federation.clients.losses(torch.arange(6), TensorDict({}, [6]))
    assert not recorded


def branching(c: LocalClient, batch: Any) -> Tensor:
    return c.task_loss(batch) if batch[0].sum() > 0 else c.mean(batch[0])


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (branching, "it branches on values"),
        (lambda c, batch: torch.tensor(float(c.num_samples)), "it asks for the value of num_samples"
         "|it branches on values or takes a number"),
        (lambda c, batch: torch.rand(2), "it draws random numbers"),
    ],
)  # fmt: skip
def test_it_falls_back_once_and_says_so_once(
    function: Callable[[LocalClient, Any], Tensor], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = found_by(known("sequential", EQUAL), Finding(function))
    federation, recorded = fitted("vectorized", EQUAL), calls(monkeypatch)
    with pytest.warns(
        UserWarning, match=f"Finding runs for one client after the other: ({reason})"
    ):
        assert_alike(found_by(federation, Finding(function)), alone)
    recorded.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_alike(found_by(federation, Finding(function)), alone)
    assert not recorded


def test_it_falls_back_where_clients_together_find_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Stack.found

    def wrong(*arguments: Any) -> dict[str, Tensor]:
        return {name: value * 1.1 for name, value in found(*arguments).items()}

    monkeypatch.setattr(Stack, "found", wrong)
    alone = found_by(known("sequential", EQUAL), Finding(task_loss))
    federation = fitted("vectorized", EQUAL)
    with pytest.warns(UserWarning, match="Finding runs .* get other results than one alone"):
        assert_alike(found_by(federation, Finding(task_loss)), alone)


def assert_alike(one: list[Any], other: list[Any]) -> None:
    """The engines trained the models, whose last digits may differ: it depends on the processor."""
    for left, right in zip(one, other, strict=True):
        torch.testing.assert_close(left["z"], right["z"], rtol=1e-12, atol=0)


@pytest.mark.filterwarnings("ignore:engine='vectorized'.*one by one:UserWarning")
@pytest.mark.parametrize("client", [dropout_client, batchnorm_client])
def test_the_network_is_in_evaluation_mode(client: Callable[[], Classifier]) -> None:
    """Also after a fit, and training goes on in its own mode."""

    def outputs(c: LocalClient, batch: Any) -> Tensor:
        return c.task_loss_and_logits(batch)[1]

    found = []
    for engine in ("sequential", "vectorized"):
        federation = fitted(engine, (6, 6, 6), client())
        found.append(found_by(federation, Finding(outputs)))
        module, states = federation.clients.module, of_all(federation)[1]
        for row, own in enumerate(found[-1]):
            state = {n: states[n][row] for n in module.state_dict()}
            x = federation.clients.attached_data.samples(row, "train")[0]
            assert own is not None
            right = torch.func.functional_call(module.eval(), state, (x,))
            torch.testing.assert_close(own["z"][0], right)
    torch.testing.assert_close(*found)


@ENGINES
def test_random_numbers_depend_on_round_and_client_alone(engine: str) -> None:
    class Draws(Pass):
        stacks = False

        def __call__(self, c: LocalClient, batches: Batches) -> dict[str, Tensor]:
            return {"z": torch.rand(3)}

    federation = fitted(engine, EQUAL)
    clients, (ids, states) = federation.clients, of_all(federation)
    once = clients.run(Draws(), ids, states)
    torch.rand(5)
    flipped = clients.run(Draws(), ids.flip(0), states[ids.flip(0)])
    for one, other in zip(once, flipped[::-1], strict=True):
        assert torch.equal(one["z"], other["z"])
    assert len({tuple(own["z"].tolist()) for own in once if own}) == len(ids)
    other = fitted(engine, EQUAL)
    other.clients.history.append(other.clients.history[-1])
    assert not torch.equal(found_by(other, Draws())[0]["z"], once[0]["z"])  # type: ignore[index]


@ENGINES
def test_a_client_that_fails_finds_nothing(engine: str) -> None:
    class Doubtful(Finding):
        def check(self, found: Mapping[str, Tensor]) -> None:
            if found["z"].sum() > 8:
                raise ValueError("that is too much")

    federation = fitted(engine, (*EQUAL, 0))
    with pytest.warns(UserWarning, match="client [14] failed to look .* too much"):
        looked = found_by(federation, Doubtful(FUNCTIONS["length"]))
    assert [row for row, own in enumerate(looked) if own is None] == [1, 4]
    assert looked[6] == {}
    assert [own["z"].item() for own in looked if own] == [6, 6, 6, 6]


@ENGINES
@pytest.mark.parametrize("failing", [0, 2, 5])
def test_every_client_of_a_stack_is_checked(engine: str, failing: int) -> None:
    class First(Pass):
        def __call__(self, c: LocalClient, batches: Batches) -> Mapping[str, Tensor]:
            return {"z": torch.stack([batch[0].sum() for batch in batches]).sum()}

        def check(self, found: Mapping[str, Tensor]) -> None:
            if torch.isclose(found["z"], refused):
                raise ValueError("not this one")

    federation = fitted(engine, (6,) * 6)
    refused = federation.clients.attached_data.samples(failing, "train")[0].sum()
    with pytest.warns(UserWarning, match=f"client {failing} failed to look .* not this one"):
        looked = found_by(federation, First())
    assert [row for row, own in enumerate(looked) if own is None] == [failing]


@ENGINES
@pytest.mark.parametrize("odd", [3.0, {"a": 3.0}, [("a", torch.ones(2))]])
def test_odd_results_are_said_with_the_name_of_the_pass(engine: str, odd: Any) -> None:
    class Odd(Pass):
        def __call__(self, c: LocalClient, batches: Batches) -> Any:
            return odd

    federation = fitted(engine, (6, 6), on_client_error="raise")
    with pytest.raises(ClientError, match=r"Odd must return tensors by name, got (float|list)"):
        found_by(federation, Odd())


@ENGINES
def test_nothing_changes(engine: str) -> None:
    """What is found may be a view of a client's tensors, which stay as they are."""
    federation = fitted(engine, EQUAL, batchnorm_client())
    ids, states = of_all(federation)
    before = states.clone()

    class Weights(Pass):
        def __call__(self, c: LocalClient, batches: Batches) -> Mapping[str, Tensor]:
            for buffer in c.buffers.values():
                buffer.add_(1)
            return c.weights

    found = federation.clients.run(Weights(), ids, states)
    assert (states == before).all()
    for row, own in enumerate(found):
        assert own is not None
        for name, value in own.items():
            assert torch.equal(value, states[name][row])
            value.zero_()
    assert (states == before).all()


def test_the_bits_of_losses_do_not_depend_on_the_engine_and_its_chunks() -> None:
    """A cluster that is chosen by them would otherwise depend on how clients are computed."""
    found = []
    for options in ({}, {"clients_at_once": 1}, {"clients_at_once": 4}, {"clients_at_once": 6}):
        engine = "vectorized" if options else "sequential"
        federation = fitted(engine, (7,) * 6, batchnorm_client(), **options)
        ids, _ = of_all(federation)
        start = {name: t.expand(6, *t.shape) for name, t in batchnorm_client().state_dict().items()}
        found.append(federation.clients.losses(ids, TensorDict(start, [6])))
        alone = [federation.clients.losses(ids[i : i + 1], TensorDict(start, [6])[i : i + 1])
                 for i in range(6)]  # fmt: skip
        assert torch.equal(torch.cat(alone), found[-1])
    assert all(torch.equal(found[0], other) for other in found)

"""What a client module knows of the round, and what of it changes over rounds."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflight import Federation
from pflight.callbacks import APFL, SCAFFOLD, Ditto, FedAvg, FedNova, FedPAC, FedRep, ServerCallback
from pflight.datamodules import TensorClients
from pflight.errors import ConfigurationError
from pflight.models import Classifier
from tests.runs import (
    CLASSES,
    ENGINES,
    FEATURES,
    linear_client,
    network_client,
    quiet_trainer,
    run,
    samples,
    sgd,
    small_data,
)

METHODS = [
    FedAvg(),
    FedRep(),
    Ditto(lam=0.5),
    APFL(alpha=0.3),
    FedPAC(head_lr=0.2),
    SCAFFOLD(option="I"),
]
"""A client's optimizer, one with phases, two models, a mixture, a phase with a step of its own."""


SEEN: list[tuple[str, int]] = []


def note(where: str, round_index: int) -> None:
    SEEN.append((where, round_index + 0))


class Own(L.LightningModule):
    """A module of a user's own, which is told its round."""

    round_index = 0

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(FEATURES, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        note("train", self.round_index)
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        note("val", self.round_index)
        self.log("val/loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        note("optimizer", self.round_index)
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OfATask(Classifier):
    def loss(self, batch: Any) -> Tensor:
        note("train", self.round_index)
        return super().loss(batch)


class Untold(Own):
    """Says how its round is found out by itself, and is left alone."""

    @property
    def round_index(self) -> int:  # type: ignore[override]
        return 7


@pytest.mark.filterwarnings("ignore:.*can't be stacked:UserWarning")
@ENGINES
def test_a_module_is_told_its_round(engine: str) -> None:
    federation = Federation(Own(), engine=engine)
    pairs = [samples(4, seed) for seed in range(2)]
    data = TensorClients(pairs, val=pairs, num_classes=CLASSES)
    for told in (range(3), range(3, 5)):
        SEEN.clear()
        quiet_trainer(len(told), FedAvg()).fit(federation, datamodule=data)
        assert {index for kind, index in SEEN if kind == "val"} == {*told}
        assert {*told} <= {index for kind, index in SEEN if kind == "train"}
        assert {*told} <= {index for kind, index in SEEN if kind == "optimizer"}
    SEEN.clear()
    quiet_trainer(1, FedAvg()).validate(federation, datamodule=data, verbose=False)
    assert {index for kind, index in SEEN if kind == "val"} == {4}
    assert Own().round_index == federation.client.round_index == 0


def test_a_task_is_told_its_round() -> None:
    SEEN.clear()
    run(linear_client(OfATask), small_data(), rounds=3, engine="sequential")
    assert sorted({index for _, index in SEEN}) == [0, 1, 2]


def test_a_module_that_does_not_ask_is_left_alone() -> None:
    data = TensorClients([samples(4, seed) for seed in range(2)], num_classes=CLASSES)
    run(Untold(), data, rounds=2)


class Annealed(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * 0.5**self.round_index


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
def test_a_step_that_asks_is_not_stacked() -> None:
    """A record of it would keep the round in which it was made."""
    with pytest.warns(UserWarning, match="its training_step asks for round_index"):
        stacked = run(linear_client(Annealed), small_data(), rounds=3, engine="vectorized")
    alone = run(linear_client(Annealed), small_data(), rounds=3, engine="sequential")
    torch.testing.assert_close(stacked.server_states(), alone.server_states())


@ENGINES
def test_the_clients_step_size_decays(engine: str) -> None:
    """As in gradient descent by hand."""
    x, y = samples(6, 0, dtype=torch.double)
    data = TensorClients([(x, y)] * 2, num_classes=CLASSES, batch_size=None)
    client = linear_client(optimizer=sgd(0.4)).double()
    state = {n: t.clone().requires_grad_() for n, t in client.state_dict().items()}
    for index in range(3):
        loss = F.cross_entropy(x @ state["network.weight"].T + state["network.bias"], y)
        for tensor, slope in zip(
            state.values(), torch.autograd.grad(loss, [*state.values()]), strict=True
        ):
            tensor.data -= 0.4 * 0.5**index * slope
    federation = run(client, data, rounds=3, engine=engine, client_lr_decay=0.5)
    for name, tensor in federation.server_states()[0].items():
        torch.testing.assert_close(tensor, state[name].detach())


def decaying(lr: float, factor: float) -> type[Classifier]:
    class Decaying(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(
                self.parameters(), lr=lr * factor**self.round_index, momentum=0.5
            )

    return Decaying


@ENGINES
@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
@pytest.mark.long
def test_methods_decay_alike(engine: str, method: ServerCallback) -> None:
    """By the option in both engines, and by the module itself where the method has no own step."""
    layers = nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES)

    def fit(kind: type[Classifier], **options: Any) -> Federation:
        torch.manual_seed(0)
        network = nn.Sequential(*(type(m)(**_sizes(m)) for m in layers))
        client = kind(network, CLASSES, partial(torch.optim.SGD, lr=0.3, momentum=0.5)).double()
        data = small_data(dtype=torch.double)
        made = type(method)(**method._given)
        return run(client, data, made, 3, local_epochs=2, **options)

    plain = fit(Classifier, engine=engine)
    decayed = fit(Classifier, engine=engine, client_lr_decay=0.7)
    alone = fit(Classifier, engine="sequential", client_lr_decay=0.7)
    by_itself = fit(decaying(0.3, 0.7), engine=engine)
    for client in range(3):
        state = decayed.client_state(client)
        torch.testing.assert_close(state, alone.client_state(client), rtol=1e-9, atol=1e-10)
        assert not torch.equal(
            state["network.0.weight"], plain.client_state(client)["network.0.weight"]
        )
        if type(method) is not FedPAC:
            torch.testing.assert_close(state, by_itself.client_state(client), rtol=1e-9, atol=1e-10)


def _sizes(module: nn.Module) -> dict[str, int]:
    if not isinstance(module, nn.Linear):
        return {}
    return {"in_features": module.in_features, "out_features": module.out_features}


class Scheduled(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)]


def test_what_needs_a_constant_step_says_so() -> None:
    client, data = linear_client(), small_data()
    for method, whose in ((SCAFFOLD(), "Controlled"), (FedNova(mu=0.1), "Normalised")):
        with pytest.raises(ConfigurationError, match=f"{whose} needs a step size that is the same"):
            run(client, data, method, client_lr_decay=0.9)
        with pytest.raises(ConfigurationError, match="got a step that depends on round_index"):
            run(decaying(0.3, 0.9)(nn.Linear(FEATURES, CLASSES), CLASSES), data, method)
    run(client, data, FedNova(), client_lr_decay=0.9)
    with pytest.raises(Exception, match=r"a schedule of its own.*round_index"):
        run(linear_client(Scheduled), data, client_lr_decay=0.9, on_client_error="raise")
    for wrong in (0.0, 1.1, float("nan")):
        with pytest.raises(ConfigurationError, match="client_lr_decay"):
            Federation(client, client_lr_decay=wrong)


GENERATORS = {
    "torch": (torch.Generator, lambda own: float(torch.rand((), generator=own))),
    "numpy": (partial(np.random.default_rng, 0), lambda own: own.random()),
    "python": (partial(random.Random, 0), lambda own: own.random()),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_own_generators_draw_by_seed_round_and_client(name: str) -> None:
    make, draw = GENERATORS[name]
    drawn: list[float] = []

    class Draws(Classifier):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.one, self.other = make(), make()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            drawn.extend([draw(self.one), draw(self.other)])
            return self.loss(batch)

    def numbers(**options: Any) -> list[float]:
        drawn.clear()
        run(linear_client(Draws), small_data((3, 3)), rounds=3, engine="sequential", **options)
        return [*drawn]

    first = numbers()
    assert len({*first}) == len(first) == 12
    assert first == numbers()
    assert {*first}.isdisjoint(numbers(seed=1))


class Sets(L.Callback):
    def __init__(self, change: Any) -> None:
        self.change = change

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 1:
            self.change(pl_module.client)


@torch.no_grad()
def zero(client: Any) -> None:
    client.network.weight.zero_()


CHANGES = {
    "federation.client.lr": lambda client: setattr(client, "lr", 0.1),
    "federation.client.gradient_clip_val": lambda client: setattr(client, "gradient_clip_val", 1.0),
    "federation.client.network.weight": zero,
    "federation.client.network.in_features": lambda client: setattr(
        client.network, "in_features", 1
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_client_that_is_changed_while_it_trains_is_an_error(name: str) -> None:
    federation = Federation(linear_client())
    trainer = quiet_trainer(3, FedAvg(), Sets(CHANGES[name]))
    with pytest.raises(ConfigurationError, match=f"{name} was set while the federation trains"):
        trainer.fit(federation, datamodule=small_data())
    assert len(federation.history) == 1


def test_a_client_may_be_changed_between_two_trainings() -> None:
    federation = Federation(network_client(nn.Linear(FEATURES, CLASSES)))
    quiet_trainer(1, FedAvg()).fit(federation, datamodule=small_data())
    before = federation.server_states()[0]["network.weight"].clone()
    federation.client.optimizer = sgd(0.0)
    quiet_trainer(2, FedAvg()).fit(federation, datamodule=small_data())
    torch.testing.assert_close(federation.server_states()[0]["network.weight"], before)

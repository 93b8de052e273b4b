"""FedNova (section C.3)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pflight import Federation
from pflight.callbacks import FedAvg, FedNova, FedProx
from pflight.callbacks.methods.fednova import Normalised
from pflight.datamodules import TensorClients
from pflight.errors import ConfigurationError
from pflight.models import Classifier
from tests.callbacks.test_scaffold import drawn_first
from tests.runs import (
    Normalised as Case,
)
from tests.runs import (
    Point,
    QuadraticClient,
    assert_same,
    batchnorm_client,
    linear_client,
    parameters,
    quadratic_client,
    run,
    sgd,
    shared,
    small_data,
    statistics,
    world_q,
)

STEPS = {1.0: 1, 3.0: 2, -2.0: 3}  # of the clients of world Q, by the first entry of b


class Unequal(QuadraticClient):
    """A client of world Q that takes a number of steps of its own."""

    def on_train_batch_start(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> int | None:
        return -1 if self.trainer.global_step >= STEPS[float(batch[0][0, 2])] else None


def world(callback: FedNova, rounds: int, data: TensorClients | None = None, **options: Any):
    client = Unequal(Point(), num_classes=2, optimizer=sgd(0.1, **options))
    return run(client, data or world_q(), callback, rounds, local_steps=3)


def test_n1() -> None:
    assert shared(world(FedNova(), 1)) == pytest.approx([0.490630, 0.291657], abs=1e-6)
    assert shared(world(FedNova(), 2)) == pytest.approx([0.835860, 0.513206], abs=1e-6)


def test_n1_with_two_of_three_clients() -> None:
    federation = world(FedNova(), 1, drawn_first([0, 1]))
    assert shared(federation) == pytest.approx([0.7525, 0.0371875], abs=1e-6)


VARIANTS = [
    ({"momentum": 0.9}, FedNova(), [0.819003, 0.478041]),
    ({}, FedNova(mu=1.0), [0.454627, 0.270850]),
    ({}, FedNova(mu=1.0, tau_eff="steps"), [0.487637, 0.290516]),
    ({"momentum": 0.9}, FedNova(mu=1.0), [0.768858, 0.447855]),
]


@pytest.mark.parametrize(("options", "callback", "expected"), VARIANTS)
def test_n1_with_momentum_and_a_proximal_term(
    options: dict[str, Any], callback: FedNova, expected: list[float]
) -> None:
    assert shared(world(callback, 1, **options)) == pytest.approx(expected, abs=1e-6)


PATHS = [
    ({}, 0.0, [1, 2, 3]),
    ({"momentum": 0.9}, 0.0, [1, 2.9, 5.61]),
    ({}, 1.0, [1, 1.9, 2.71]),
    ({"momentum": 0.9}, 1.0, [1, 2.8, 5.14]),
    ({"momentum": 0.9, "nesterov": True}, 0.0, [1.9, 4.61, 8.049]),
]


@pytest.mark.parametrize(("options", "mu", "expected"), PATHS)
def test_the_lengths_of_paths(options: dict[str, Any], mu: float, expected: list[float]) -> None:
    client_method = Normalised(mu)
    client_method.check(linear_client(optimizer=sgd(0.1, **options)))
    lengths = [float(client_method.path(torch.tensor(float(steps)))) for steps in (1, 2, 3)]
    assert lengths == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("steps", [1, 7, 100, 1023])
def test_a_path_is_where_gradients_of_one_lead(nesterov: bool, steps: int) -> None:
    """By torch's own SGD, on the loss of which the proximal term is a part."""
    options = {"momentum": 0.8, "nesterov": nesterov}
    client_method = Normalised(0.3)
    client_method.check(linear_client(optimizer=sgd(0.05, **options)))
    w = torch.zeros((), dtype=torch.double, requires_grad=True)
    optimizer = torch.optim.SGD([w], 0.05, **options)
    for _ in range(steps):
        w.grad = 1 + 0.3 * w.detach()
        optimizer.step()
    assert float(client_method.path(torch.tensor(steps))) == pytest.approx(
        -w.item() / 0.05, rel=1e-12
    )


@pytest.mark.short("*-sequential")
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(("mu", "tau_eff"), [(0.0, "norm"), (0.4, "steps")])
def test_three_rounds(mu: float, tau_eff: str, engine: str) -> None:
    case = Case.make()
    federation = case.run(FedNova(mu, tau_eff), engine=engine)
    theta, norms, varied = case.theta, case.statistics, False
    for round_, entry in enumerate(federation.history):
        counts = case.world.counts[entry.clients]
        p = counts / counts.sum()
        steps = np.array([len(case.batches(round_, i)) for i in entry.clients])
        varied |= len({*steps}) > 1
        paths = (1 - (1 - 0.1 * mu) ** steps) / (0.1 * mu) if mu else steps
        moves, stats = [], []
        for i in entry.clients:
            w, s = case.train(round_, i, theta, norms, lambda w, start=theta: mu * (w - start))
            moves.append(w - theta)
            stats.append(s)
        tau = p @ (steps if tau_eff == "steps" else paths)
        theta = theta + tau * (p / paths) @ np.array(moves)
        norms = p @ np.array(stats)
    assert varied
    state = federation.server_states()[0]
    assert parameters(state) == pytest.approx(theta, rel=1e-9, abs=1e-11)
    assert statistics(state) == pytest.approx(norms, rel=1e-9, abs=1e-11)


@pytest.mark.parametrize("buffers", ["local", "reset"])
def test_buffers_that_do_not_travel(buffers: str) -> None:
    """What a client sends besides the model is none of them."""
    data = small_data((6, 12, 7, 10), torch.float64, cohort_size=3)
    one, other = (
        run(batchnorm_client().double(), data, callback(buffers=buffers), 3, local_steps=3)
        for callback in (FedNova, FedAvg)
    )
    for i in range(4):
        states = one.client_state(i), other.client_state(i)
        torch.testing.assert_close(*states, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("mu", "other"), [(0.0, FedAvg()), (0.5, FedProx(mu=0.5))])
def test_with_equal_steps_it_is_fedavg_or_fedprox(mu: float, other: FedAvg) -> None:
    def fit(callback: FedAvg) -> Federation:
        client = batchnorm_client(optimizer=sgd(0.1, momentum=0.9)).double()
        data = small_data((6, 12, 7, 10), torch.float64, cohort_size=3)
        return run(client, data, callback, 3, local_steps=5)

    expected = fit(other).server_states()[0]
    torch.testing.assert_close(fit(FedNova(mu)).server_states()[0], expected, rtol=1e-9, atol=1e-11)


def test_with_steps_as_many_as_samples_it_is_a_uniform_mean() -> None:
    """Of the changes, times the number of clients and the squares of their shares."""
    data = small_data((3, 12, 6), torch.float64, batch_size=1)
    start = shared(run(linear_client(double=True), data, FedAvg(), 0))
    one = shared(run(linear_client(double=True), data, FedNova())) - start
    other = shared(run(linear_client(double=True), data, FedAvg("uniform"))) - start
    shares = np.array([3, 12, 6]) / 21
    assert one == pytest.approx(3 * (shares**2).sum() * other, rel=1e-9, abs=1e-12)


def test_a_client_without_a_step_takes_no_part() -> None:
    """Such as one that skips all batches."""

    class Idle(Classifier):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx)

        def on_train_batch_start(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> int | None:
            return -1 if len(batch[1]) == 3 else None

    whole = small_data((4, 3, 8), batch_size=None)
    part = TensorClients(
        [whole.samples(i, "train") for i in (0, 2)], num_classes=3, batch_size=None
    )
    one = run(linear_client(Idle), whole, FedNova(), local_epochs=2)
    other = run(linear_client(), part, FedNova(), local_epochs=2)
    assert shared(one) == pytest.approx(shared(other), rel=1e-6)


@pytest.mark.parametrize(("tau_eff", "scalars"), [("norm", 1), ("steps", 2)])
def test_it_sends_one_number_or_two_besides_the_model(tau_eff: str, scalars: int) -> None:
    data = small_data(cohort_size=3)
    one = run(batchnorm_client(), data, FedNova(tau_eff=tau_eff), 2)
    other = run(batchnorm_client(), data, FedAvg(), 2)
    for left, right in zip(one.history, other.history, strict=True):
        assert left.bytes_down == right.bytes_down
        assert left.bytes_up == right.bytes_up + 3 * 4 * scalars
    states = one.server_states()[0], other.server_states()[0]
    assert states[0].keys() == states[1].keys()


REFUSED = {
    "Adam": {"optimizer": lambda p: torch.optim.Adam(p, lr=0.1)},
    "gradient_clip_val=1.0": {"gradient_clip_val": 1.0},
    "lr=0.0": {"optimizer": sgd(0.0)},
    "dampening=0.5": {"optimizer": sgd(momentum=0.9, dampening=0.5)},
    "momentum=0.5, 0.9": {
        "optimizer": lambda p: torch.optim.SGD(
            [{"params": p[:1], "momentum": 0.5}, {"params": p[1:]}], lr=0.1, momentum=0.9
        )
    },
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_has_no_path_is_refused(reason: str) -> None:
    needs = f"FedNova: the length of a client's path needs SGD with one positive lr, got {reason}$"
    with pytest.raises(ConfigurationError, match=needs):
        run(linear_client(**REFUSED[reason]), small_data(), FedNova(), 0)


def test_bad_options_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="FedNova: mu must be at least 0, got -1"):
        FedNova(mu=-1)
    with pytest.raises(ConfigurationError, match="FedNova: tau_eff must be 'norm' or 'steps'"):
        FedNova(tau_eff="sum")


def test_from_equal_starts_and_ends_nothing_moves() -> None:
    client = quadratic_client((1.0, -1.0))
    assert_same(
        run(client, world_q([0], [1]), FedNova(), 2).server_states()[0], dict(client.state_dict())
    )


class Skipping(Classifier):
    """A module that trains on full batches alone."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        return self.loss(batch) if len(batch[1]) == 4 else None


class SkippingByHand(Skipping):
    """Likewise, in steps that it takes itself."""

    automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        if (loss := super().training_step(batch, batch_idx)) is not None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_batches_that_a_module_skips_are_no_steps() -> None:
    data = small_data((5, 12, 7), dtype=torch.float64)
    skipping, by_hand, all_of_them = (
        run(linear_client(kind, double=True), data, FedNova(), 2)
        for kind in (Skipping, SkippingByHand, Classifier)
    )
    assert_same(skipping.server_states()[0], by_hand.server_states()[0])
    weights = [one.server_states()[0]["network.weight"] for one in (skipping, all_of_them)]
    assert not torch.allclose(*weights)

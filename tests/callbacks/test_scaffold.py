"""SCAFFOLD (section 1.6)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from pflight import Federation
from pflight.callbacks import SCAFFOLD, FedAvg, FedSGD
from pflight.datamodules import TensorClients
from pflight.errors import ConfigurationError
from pflight.local_client import LocalClient
from pflight.method import OWN
from pflight.models import Classifier
from pflight.models.client_methods import Controlled
from tests import reference
from tests.runs import (
    CLASSES,
    assert_same,
    batches_of,
    batchnorm_client,
    dropout_client,
    failing_at_the_end,
    flat,
    linear_client,
    quadratic_client,
    run,
    sgd,
    shared,
    small_data,
    world_q,
)

OPTIONS = pytest.mark.parametrize("option", ["I", "II"])


def control(federation: Federation) -> np.ndarray:
    return flat(federation.server.tensors(0, federation.callback.controls))


def client_control(federation: Federation, client: int) -> np.ndarray:
    return flat(dict(federation.callback.client_controls(torch.tensor([client]))[0].items()))


def test_q5() -> None:
    one = run(quadratic_client(), world_q(), SCAFFOLD(), 1, local_steps=2)
    assert shared(one) == pytest.approx([0.2966666667, 0.1966666667], abs=1e-9)
    assert control(one) == pytest.approx([-1.4833333333, -0.9833333333], abs=1e-9)
    assert client_control(one, 0) == pytest.approx([-0.95, 1.8], abs=1e-12)
    two = run(quadratic_client(), world_q(), SCAFFOLD(), 2, local_steps=2)
    assert shared(two) == pytest.approx([0.5332111111, 0.3355444444], abs=1e-9)


def drawn_first(cohort: list[int]) -> TensorClients:
    """Return the data of world Q with this cohort in the first round."""
    train = [world_q().samples(i, "train") for i in range(3)]
    options = {"num_classes": 2, "batch_size": None, "cohort_size": len(cohort)}
    worlds = (TensorClients(train, seed=seed, **options) for seed in range(100))
    return next(data for data in worlds if data.cohorts.sample(0).tolist() == cohort)


def test_q5b_the_control_moves_by_the_share_of_all_clients() -> None:
    federation = run(quadratic_client(), drawn_first([0, 1]), SCAFFOLD(), 1, local_steps=2)
    assert shared(federation) == pytest.approx([0.635, -0.085], abs=1e-12)
    assert control(federation) == pytest.approx([-2.1166666667, 0.2833333333], abs=1e-9)
    assert client_control(federation, 2) == pytest.approx([0, 0], abs=0)


def test_option_one_keeps_the_gradients_at_the_servers_model() -> None:
    one = run(quadratic_client(), world_q(), SCAFFOLD(option="I"), 1, local_steps=2)
    assert shared(one) == pytest.approx([0.2966666667, 0.1966666667], abs=1e-9)
    for client, gradient in enumerate([(-1, 2), (-6, -1), (2, -4)]):  # -a b
        assert client_control(one, client) == pytest.approx(gradient, abs=1e-12)
    assert control(one) == pytest.approx([-5 / 3, -1], abs=1e-12)
    two = run(quadratic_client(), world_q(), SCAFFOLD(option="I"), 2, local_steps=2)
    gradients = np.array([(1, 2), (2, 1), (1, 1)]) * (shared(one) - [(1, -1), (3, 1), (-2, 4)])
    for client in range(3):
        assert client_control(two, client) == pytest.approx(gradients[client], abs=1e-12)


class Expected(NamedTuple):
    theta: np.ndarray
    control: np.ndarray
    own: np.ndarray


def scaffold(
    world: reference.World,
    theta: np.ndarray,
    cohorts: list[list[int]],
    batches: reference.Batches,
    lr: float,
    option: str,
    server_lr: float,
    decay: float,
) -> Expected:
    """Return what SCAFFOLD comes to; with weight decay, which is part of the loss."""
    control, own = np.zeros_like(theta), np.zeros((len(world.counts), len(theta)))
    for round_, cohort in enumerate(cohorts):
        models, changes = [], []
        for i in cohort:
            y, steps = theta.copy(), batches(round_, i)
            for batch in steps:
                y -= lr * (world.gradient(y, i, batch) + decay * y + control - own[i])
            if option == "I":
                new = world.gradient(theta, i, np.arange(world.counts[i]))
            else:
                new = own[i] - control + (theta - y) / (len(steps) * lr)
            models.append(y)
            changes.append(new - own[i])
            own[i] = new
        theta = theta + server_lr * (np.mean(models, axis=0) - theta)
        control = control + np.sum(changes, axis=0) / len(world.counts)
    return Expected(theta, control, own)


@pytest.mark.short("1.0-0.0-I", "0.7-0.01-II")
@OPTIONS
@pytest.mark.parametrize(("server_lr", "decay"), [(1.0, 0.0), (0.7, 0.01)])
def test_several_rounds_with_partial_participation(
    option: str, server_lr: float, decay: float
) -> None:
    data = small_data(cohort_size=3, dtype=torch.float64)
    optimizer = sgd(0.1, weight_decay=decay)
    client = linear_client(double=True, optimizer=optimizer)
    federation = run(client, data, SCAFFOLD(server_lr, option), rounds=5, local_epochs=2)
    expected = scaffold(
        reference.SoftmaxRegression([data.samples(i, "train") for i in range(6)], CLASSES),
        flat(linear_client(double=True).state_dict()),
        [entry.clients for entry in federation.history],
        lambda t, i: batches_of(data, t, i, 2),
        0.1,
        option,
        server_lr,
        decay,
    )
    assert shared(federation) == pytest.approx(expected.theta, rel=1e-12, abs=1e-14)
    assert control(federation) == pytest.approx(expected.control, rel=1e-12, abs=1e-14)
    for i in range(6):
        own = client_control(federation, i)
        assert own == pytest.approx(expected.own[i], rel=1e-12, abs=1e-13)


class Frozen(Controlled):
    """A client whose control variates stay 0."""

    def after_training(self, c: LocalClient) -> None:
        for value in c.own.values():
            value.zero_()


def test_with_controls_of_zero_it_is_uniform_fedavg() -> None:
    data = small_data(cohort_size=4, dtype=torch.float64)
    callback = SCAFFOLD()
    callback.client_method = Frozen()
    frozen = run(linear_client(double=True), data, callback, 3, local_epochs=2)
    plain = run(linear_client(double=True), data, FedAvg("uniform"), 3, local_epochs=2)
    assert shared(frozen) == pytest.approx(shared(plain), rel=1e-12, abs=1e-14)


@OPTIONS
def test_q5c_with_one_full_step_of_everybody_it_is_uniform_fedsgd(option: str) -> None:
    data = small_data(batch_size=None, dtype=torch.float64)
    client = linear_client(double=True, optimizer=sgd(0.2))
    controlled = run(client, data, SCAFFOLD(option=option), rounds=4, local_steps=1)
    plain = run(linear_client(double=True), data, FedSGD(lr=0.2, weighting="uniform"), rounds=4)
    assert shared(controlled) == pytest.approx(shared(plain), rel=1e-12, abs=1e-14)
    assert np.abs(client_control(controlled, 0)).max() > 0.01


@OPTIONS
@pytest.mark.filterwarnings("ignore:.*round .*failed:UserWarning")
def test_the_servers_control_is_the_mean_of_the_clients(option: str) -> None:
    """Also where clients fail, never answer, are held out or have no samples."""
    data = small_data(
        (5, 12, 7, 9, 3, 10, 0, 6), cohort_size=4, dropout=0.3, holdout_clients=0.25, seed=2
    )
    federation = run(dropout_client(failing_at_the_end()), data, SCAFFOLD(option=option), 6)
    assert any(3 in entry.failed for entry in federation.history)
    assert any(entry.failed != [3] for entry in federation.history if entry.failed)
    able = data.train_clients.tolist()
    controls = {i: client_control(federation, i) for i in range(8)}
    assert control(federation) == pytest.approx(
        np.mean([controls[i] for i in able], axis=0), abs=1e-6
    )
    answered = {i for entry in federation.history for i in set(entry.clients) - set(entry.failed)}
    for i in range(8):
        assert controls[i].any() == (i in answered)
    assert 0 < len(answered) < len(able)


def test_a_client_without_a_step_keeps_its_control() -> None:
    """BatchNorm can't train on a single sample."""
    data = small_data([1, 6, 8])
    federation = run(batchnorm_client(), data, SCAFFOLD(), 3)
    assert not federation.history[-1].failed
    assert not client_control(federation, 0).any()
    assert client_control(federation, 1).any()


def test_buffers_are_averaged_and_have_no_controls() -> None:
    data = small_data()
    federation = run(batchnorm_client(), data, SCAFFOLD())
    plain = run(batchnorm_client(), data, FedAvg("uniform")).server_states()[0]
    torch.testing.assert_close(federation.server_states()[0], plain)
    parameters = [name for name, _ in batchnorm_client().named_parameters()]
    added = [name for name in federation.layout.names if name not in plain]
    assert added == [f"{OWN}control.{name}" for name in parameters]


@pytest.mark.short("II")
@OPTIONS
def test_twice_the_model_travels_each_way(option: str) -> None:
    data = small_data(cohort_size=3)
    federation = run(batchnorm_client(), data, SCAFFOLD(option=option), 2)
    client = batchnorm_client()
    parameters = sum(4 * p.numel() for p in client.parameters())
    buffers = sum(b.nbytes for n, b in client.state_dict().items() if "running" in n or "num" in n)
    for entry in federation.history:
        assert entry.bytes_down == entry.bytes_up == 3 * (2 * parameters + buffers)


@pytest.mark.short("I")
@OPTIONS
def test_a_resumed_run_knows_all_controls(option: str, tmp_path: Path) -> None:
    def fit(rounds: int, **options: Any) -> Federation:
        callback = SCAFFOLD(option=option)
        return run(dropout_client(), small_data(cohort_size=3), callback, rounds, **options)

    fit(2).trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed, whole = fit(4, ckpt_path=tmp_path / "half.ckpt"), fit(4)
    assert_same(resumed.server_states()[0], whole.server_states()[0])
    everybody = torch.arange(6)
    assert_same(
        dict(resumed.callback.client_controls(everybody).items()),
        dict(whole.callback.client_controls(everybody).items()),
    )


@pytest.mark.short("II")
@OPTIONS
def test_many_clients_at_once_are_as_one_by_one(option: str) -> None:
    def fit(engine: str) -> Federation:
        client = batchnorm_client().double()
        data = small_data(cohort_size=4, dtype=torch.float64)
        return run(client, data, SCAFFOLD(option=option), 4, local_epochs=2, engine=engine)

    one, many = fit("sequential"), fit("vectorized")
    assert many.clients.attached_engine.obstacle is None
    tolerance = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(many.server_states()[0], one.server_states()[0], **tolerance)
    for i in range(6):
        assert client_control(many, i) == pytest.approx(client_control(one, i), abs=1e-11)


def test_clients_are_judged_by_the_servers_model_and_tuned_without_controls() -> None:
    federation = run(quadratic_client(), world_q(), SCAFFOLD(), 2, local_steps=2, finetune_epochs=1)
    theta = np.array([0.5332111111, 0.3355444444])
    tuned = federation.client_state(1)["network.theta"]
    assert tuned.tolist() == pytest.approx(theta - 0.1 * np.array([2, 1]) * (theta - [3, 1]))


REFUSED = {
    "momentum=0.9": {"optimizer": sgd(momentum=0.9)},
    "Adam;": {"optimizer": lambda p: torch.optim.Adam(p, lr=0.1)},
    "AdamW;": {"optimizer": lambda p: torch.optim.AdamW(p, lr=0.1)},
    "maximize=True": {"optimizer": sgd(maximize=True)},
    "gradient_clip_val=1.0": {"gradient_clip_val": 1.0},
    "lr=0.0;": {"optimizer": sgd(0.0)},
    "lr=0.1, 0.2;": {
        "optimizer": lambda p: torch.optim.SGD(
            [{"params": p[:1], "lr": 0.2}, {"params": p[1:]}], lr=0.1
        )
    },
}


@pytest.mark.short("momentum=0.9", "Adam;", "maximize=True", "lr=0.1, 0.2;")
@pytest.mark.parametrize("reason", REFUSED)
def test_option_two_needs_plain_sgd(reason: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"option II needs plain SGD .*, got {reason}"):
        run(linear_client(**REFUSED[reason]), small_data(), SCAFFOLD(), 0)
    run(linear_client(**REFUSED[reason]), small_data(), SCAFFOLD(option="I"), 0)


def test_option_two_refuses_schedules() -> None:
    class Scheduled(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    with pytest.raises(ConfigurationError, match=r"option II needs .*, got a scheduler"):
        run(linear_client(Scheduled), small_data(), SCAFFOLD())
    run(linear_client(Scheduled), small_data(), SCAFFOLD(option="I"), 2)


def test_option_two_refuses_what_asks_for_a_trainer() -> None:
    class Stretched(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1 / self.trainer.max_epochs)

    with pytest.raises(ConfigurationError, match=r"does not give before the start .* option I"):
        run(linear_client(Stretched), small_data(), SCAFFOLD())
    run(linear_client(Stretched), small_data(), SCAFFOLD(option="I"))


def test_option_one_corrects_what_momentum_is_fed() -> None:
    client = quadratic_client()
    client.optimizer = sgd(0.1, momentum=0.9)
    data = world_q([1], counts=[1, 1, 1])
    federation = run(client, data, SCAFFOLD(option="I"), 2, local_steps=2)
    other = run(client, data, FedAvg(), 2, local_steps=2)
    assert shared(federation) == pytest.approx(shared(other), rel=1e-12)  # one client: c = c_i


class Manual(Classifier):
    automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))


def test_what_does_not_fit_is_refused_before_training() -> None:
    with pytest.raises(
        ConfigurationError, match="SCAFFOLD: option must be 'I', 'II' or null, got 'V'"
    ):
        SCAFFOLD(option="V")
    with pytest.raises(ConfigurationError, match="Manual with manual optimization"):
        run(linear_client(Manual), small_data(), SCAFFOLD())
    with pytest.raises(ConfigurationError, match="SCAFFOLD: lr must be over 0, got 0"):
        SCAFFOLD(lr=0)

"""FedAvgM, FedAdam and FedYogi: FedAvg with another server optimizer, given by a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.optim import Optimizer

from pflight.callbacks import FedAvg
from pflight.errors import ConfigurationError
from pflight.local_client import LocalClient
from pflight.models import Classifier
from pflight.optim import Yogi
from tests import reference
from tests.runs import (
    CLASSES,
    assert_same,
    batches_of,
    batchnorm_client,
    flat,
    linear_client,
    run,
    small_data,
    watched,
)

NAMES = pytest.mark.parametrize("name", ["fedavgm", "fedadam", "fedyogi"])


def optimizer_of(name: str) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    """Return the server optimizer of a shipped configuration."""
    text = files("pflight.configs").joinpath(f"algorithm/{name}.yaml").read_text(encoding="utf-8")
    chosen = yaml.safe_load(text)["model"]["server_optimizer"]
    module, _, kind = chosen["class_path"].rpartition(".")
    return partial(getattr(import_module(module), kind), **chosen["init_args"])


class Momentum:
    """FedAvgM (Hsu et al. 2019): v <- 0.9 v + g, and the step is v."""

    velocity = 0.0

    def step(self, gradient: np.ndarray) -> np.ndarray:
        self.velocity = 0.9 * self.velocity + gradient
        return self.velocity


class Adam:
    """With torch's correction of the bias."""

    mean, square, rounds = 0.0, 0.0, 0

    def step(self, gradient: np.ndarray) -> np.ndarray:
        self.rounds += 1
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.99 * self.square + 0.01 * gradient**2
        mean = self.mean / (1 - 0.9**self.rounds)
        return 0.03 * mean / (np.sqrt(self.square / (1 - 0.99**self.rounds)) + 1e-3)


class ReddisYogi:
    """FedYogi (Reddi et al. 2021, algorithm 2)."""

    mean, square = 0.0, 1e-6

    def step(self, gradient: np.ndarray) -> np.ndarray:
        self.mean = 0.9 * self.mean + 0.1 * gradient
        sign = np.sign(self.square - gradient**2)
        self.square = self.square - 0.01 * gradient**2 * sign
        return 0.03 * self.mean / (np.sqrt(self.square) + 1e-3)


EXPECTED = {"fedavgm": Momentum, "fedadam": Adam, "fedyogi": ReddisYogi}


@NAMES
def test_several_rounds_with_partial_participation(name: str) -> None:
    data = small_data(cohort_size=3, dtype=torch.float64)
    client = linear_client(double=True)
    federation = run(client, data, FedAvg(), 6, local_epochs=2, server_optimizer=optimizer_of(name))
    world = reference.SoftmaxRegression([data.samples(i, "train") for i in range(6)], CLASSES)
    theta, server = flat(client.state_dict()), EXPECTED[name]()
    for round_, entry in enumerate(federation.history):
        cohort = [entry.clients]
        batches = lambda _, i, round_=round_: batches_of(data, round_, i, 2)  # noqa: E731
        theta = theta - server.step(theta - reference.fedavg(world, theta, cohort, batches, 0.1))
    assert flat(federation.server_states()[0]) == pytest.approx(theta, rel=1e-12, abs=1e-13)


@pytest.mark.short("fedyogi")
@NAMES
def test_a_resumed_run_is_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    def fit(rounds: int, **options: Any) -> dict[str, Tensor]:
        data = small_data(cohort_size=3)
        optimizer = optimizer_of(name)
        federation = run(
            batchnorm_client(), data, FedAvg(), rounds, server_optimizer=optimizer, **options
        )
        federation.trainer.save_checkpoint(tmp_path / f"{rounds}.ckpt")
        return federation.server_states()[0]

    fit(2)
    assert_same(fit(4, ckpt_path=tmp_path / "2.ckpt"), fit(4))


def fail_later(c: LocalClient) -> None:
    """Fail from the second round on."""
    if c.anchor["network.bias"].ne(linear_client().network.bias).any():
        raise RuntimeError("out of battery")


@pytest.mark.short("fedavgm", "fedyogi")
@NAMES
@pytest.mark.filterwarnings("ignore:.*round .*failed:UserWarning")
def test_a_round_without_answers_moves_nothing(name: str) -> None:
    def fit(client: Classifier, rounds: int) -> dict[str, Tensor]:
        federation = run(
            client, small_data(), FedAvg(), rounds, server_optimizer=optimizer_of(name)
        )
        return federation.server_states()[0]

    assert_same(fit(watched(linear_client(), fail_later), 3), fit(linear_client(), 1))


@pytest.mark.short("fedadam")
@NAMES
def test_buffers_are_set_to_their_mean(name: str) -> None:
    data = small_data()
    stepped = run(batchnorm_client(), data, FedAvg(), 1, server_optimizer=optimizer_of(name))
    plain = run(batchnorm_client(), data, FedAvg(), 1)
    for buffer in ("running_mean", "running_var", "num_batches_tracked"):
        name_ = f"network.1.{buffer}"
        assert torch.equal(stepped.server_states()[0][name_], plain.server_states()[0][name_])


class TestYogi:
    def stepped(self, gradients: list[list[float]], **options: Any) -> list[float]:
        """Return where two weights at 0 are after some gradients."""
        weights = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        optimizer = Yogi([weights], **options)
        for gradient in gradients:
            weights.grad = torch.tensor(gradient, dtype=torch.float64)
            optimizer.step()
        return weights.tolist()

    def test_two_steps_by_hand(self) -> None:
        """From v = 1 to 1 + 0.1 * 4, then down to 1.4 - 0.1; where g^2 = v it stays."""
        one = self.stepped([[2.0, 1.0]], lr=0.5, betas=(0.5, 0.9), eps=1.0)
        assert one == pytest.approx([-0.5 / (1.4**0.5 + 1), -0.5 * 0.5 / 2])
        two = self.stepped([[2.0, 1.0], [1.0, 1.0]], lr=0.5, betas=(0.5, 0.9), eps=1.0)
        assert two == pytest.approx([one[0] - 0.5 / (1.3**0.5 + 1), one[1] - 0.5 * 0.75 / 2])

    def test_the_second_moment_does_not_forget(self) -> None:
        """After one large gradient small ones hardly lower it, where Adam's decays."""
        gradients = [[1.0, 1.0]] + [[0.01, 0.01]] * 300
        yogi = self.stepped(gradients, lr=0.01, betas=(0.0, 0.9))
        weights = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        adam = torch.optim.Adam([weights], lr=0.01, betas=(0.0, 0.9), eps=1e-3)
        for gradient in gradients:
            weights.grad = torch.tensor(gradient, dtype=torch.float64)
            adam.step()
        assert yogi[0] > 5 * weights[0].item()

    def test_what_has_no_gradient_stays(self) -> None:
        stays, moves = (nn.Parameter(torch.ones(1)) for _ in range(2))
        optimizer = Yogi([{"params": [stays]}, {"params": [moves], "lr": 1.0}], lr=0.1)
        moves.grad = torch.ones(1)
        assert optimizer.step(lambda: 3.5) == 3.5
        assert stays.item() == 1
        assert moves.item() == pytest.approx(1 - 0.1 / (0.01**0.5 + 1e-3), abs=1e-4)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"lr": 0.0}, "lr must be over 0, got 0.0"),
            ({"betas": (0.9, 1.0)}, r"betas must be in \[0, 1\), got 1.0"),
            ({"eps": 0.0}, "eps must be over 0, got 0.0"),
        ],
    )
    def test_options_out_of_range(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError, match=f"Yogi: {message}"):
            self.stepped([], **options)

"""Reptile, FedDist and FedDWS (sections 1.7 and 3.1)."""

from pathlib import Path

import lightning as L
import pytest
import torch

from pflight.callbacks import FedAvg, Reptile
from pflight.errors import ConfigurationError
from tests.runs import (
    assert_same,
    batchnorm_client,
    flat,
    linear_client,
    quadratic_client,
    run,
    sgd,
    small_data,
    world_q,
)

Q6 = [
    (Reptile(lr=0.6), [0.178, 0.118]),
    (Reptile("samples", lr=0.6), [0.267, 0.173]),
    (Reptile(lr=0.5), [0.1483333333, 0.0983333333]),
]


@pytest.mark.parametrize(("callback", "expected"), Q6, ids=["FedDist", "FedDWS", "Reptile"])
def test_q6(callback: Reptile, expected: list[float]) -> None:
    federation = run(quadratic_client(), world_q(), callback, local_steps=2)
    assert flat(federation.server_states()[0]) == pytest.approx(expected, abs=1e-9)


@pytest.mark.short("samples")
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_a_step_of_one_is_fedavg(weighting: str) -> None:
    data = small_data(cohort_size=3)
    one = run(batchnorm_client(), data, Reptile(weighting), rounds=4)
    other = run(batchnorm_client(), data, FedAvg(weighting), rounds=4)
    assert_same(one.server_states()[0], other.server_states()[0])


def test_the_step_holds_for_floating_buffers_and_counters_take_the_maximum() -> None:
    data = small_data()
    start = batchnorm_client().state_dict()
    whole = run(batchnorm_client(), data, Reptile()).server_states()[0]
    part = run(batchnorm_client(), data, Reptile(lr=0.25)).server_states()[0]
    for name in ("network.0.weight", "network.1.running_mean", "network.1.running_var"):
        expected = start[name] + 0.25 * (whole[name] - start[name])
        torch.testing.assert_close(part[name], expected)
    tracked = "network.1.num_batches_tracked"
    assert part[tracked] == whole[tracked] == 3  # the largest client has 12 samples


def test_the_step_decays_linearly_to_zero() -> None:
    seen = []

    class Watched(Reptile):
        def set_pseudo_gradients(self) -> None:
            seen.append(self.server.lr)
            super().set_pseudo_gradients()

    run(linear_client(), small_data(), Watched(lr=0.8, decay="linear"), rounds=4)
    assert seen == pytest.approx([0.8, 0.6, 0.4, 0.2])
    seen.clear()
    run(linear_client(), small_data(), Watched(lr=0.8), rounds=3)
    assert seen == [0.8] * 3


class Stop(L.Callback):
    """Ends a run after two rounds, and saves it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def test_a_decayed_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"

    def fit(*callbacks: L.Callback, **options: Path) -> dict[str, torch.Tensor]:
        callback = Reptile(lr=0.8, decay="linear")
        federation = run(linear_client(), small_data(), callback, 4, *callbacks, **options)
        return federation.server_states()[0]

    fit(Stop(path))
    assert_same(fit(ckpt_path=path), fit())


def test_a_finished_run_goes_on_with_a_longer_decay(tmp_path: Path) -> None:
    seen = []

    class Watched(Reptile):
        def set_pseudo_gradients(self) -> None:
            seen.append(self.server.lr)
            super().set_pseudo_gradients()

    path = tmp_path / "done.ckpt"
    done = run(linear_client(), small_data(), Watched(lr=0.8, decay="linear"), rounds=2)
    done.trainer.save_checkpoint(path)
    run(linear_client(), small_data(), Watched(lr=0.8, decay="linear"), 4, ckpt_path=path)
    assert seen == pytest.approx([0.8, 0.4, 0.4, 0.2])


def test_another_server_optimizer_takes_the_pseudo_gradient() -> None:
    federation = run(
        quadratic_client(), world_q(), Reptile(), local_steps=2, server_optimizer=sgd(0.5)
    )
    assert flat(federation.server_states()[0]) == pytest.approx(Q6[2][1], abs=1e-9)


def test_options_out_of_range() -> None:
    with pytest.raises(ConfigurationError, match="lr must be over 0, got 0"):
        Reptile(lr=0)
    with pytest.raises(ConfigurationError, match="decay must be 'linear' or null, got 'cosine'"):
        Reptile(decay="cosine")
    with pytest.raises(ConfigurationError, match="Reptile: weighting must be"):
        Reptile("size")
    with pytest.raises(ConfigurationError, match="needs the Trainer's max_epochs"):
        run(linear_client(), small_data(), Reptile(decay="linear"), rounds=-1)

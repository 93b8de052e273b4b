"""pFedMe (section 4.1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pflight import Federation
from pflight.callbacks import FedAvg, PFedMe
from pflight.datamodules import TensorClients
from pflight.errors import ConfigurationError
from tests import reference
from tests.runs import (
    CLASSES,
    ENGINES,
    batches_of,
    batchnorm_client,
    failing,
    flat,
    judged,
    linear_client,
    network,
    quadratic_client,
    quiet_trainer,
    run,
    sgd,
    shared,
    small_data,
    world_q,
)

P1 = {"lam": 2.0, "personal_steps": 2, "personal_lr": 0.1}


@ENGINES
def test_p1(engine: str) -> None:
    data = world_q([0])
    client = quadratic_client(lr=0.05)
    federation = run(client, data, PFedMe(**P1), 1, local_steps=2, engine=engine)
    assert judged(federation, 0) == pytest.approx([0.25908, -0.44544], abs=1e-15)
    assert shared(federation) == pytest.approx([0.041208, -0.073344], abs=1e-15)
    federation = run(client, data, PFedMe(2.0, **P1), 1, local_steps=2, engine=engine)
    assert shared(federation) == pytest.approx([0.082416, -0.146688], abs=1e-15)


def test_the_loss_is_the_envelope_and_its_gradient_the_pull() -> None:
    """Near the minimiser, which for a quadratic is (a b + lam w) / (a + lam)."""
    callback = PFedMe(lam=2.0, personal_steps=400, personal_lr=0.1)
    federation = run(quadratic_client(lr=0.05), world_q([0]), callback, 1, local_steps=1)
    a, b = np.array([1, 2]), np.array([1, -1])
    theta = a * b / (a + 2)
    assert judged(federation, 0) == pytest.approx(theta, abs=1e-12)
    assert shared(federation) == pytest.approx(0.05 * 2 * theta, abs=1e-12)
    envelope = (a / 2 * (theta - b) ** 2 + theta**2).sum()
    assert federation.history[0].metrics["train/loss"] == pytest.approx(envelope, rel=1e-6)


def pfedme(
    world: reference.World,
    w: np.ndarray,
    cohorts: list[list[int]],
    batches: reference.Batches,
    weighting: str,
    beta: float,
    mu: float,
) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Return the server's weights and the personal ones; lam 3, K 4, inner step 0.1, outer 0.2."""
    personal = {}
    for round_, cohort in enumerate(cohorts):
        sent = []
        for i in cohort:
            own, theta = w, w
            for batch in batches(round_, i):
                for _ in range(4):
                    gradient = world.gradient(theta, i, batch)
                    theta = theta - 0.1 * (gradient + 3 * (theta - own) + mu * theta)
                own = own - 0.2 * 3 * (own - theta)
            personal[i] = theta
            sent.append(own)
        weights = world.counts[cohort] if weighting == "samples" else None
        w = (1 - beta) * w + beta * np.average(sent, axis=0, weights=weights)
    return w, personal


@pytest.mark.short("*-sequential")
@ENGINES
@pytest.mark.parametrize(
    ("weighting", "beta", "mu"), [("samples", 1.0, 0.0), ("uniform", 1.5, 0.1)]
)
def test_several_rounds_with_partial_participation(
    weighting: str, beta: float, mu: float, engine: str
) -> None:
    data = small_data(cohort_size=3, dtype=torch.float64)
    options = {"lam": 3.0, "personal_steps": 4, "personal_lr": 0.1, "mu": mu}
    client = linear_client(double=True, optimizer=sgd(0.2))
    callback = PFedMe(beta, weighting, **options)
    federation = run(client, data, callback, rounds=3, local_epochs=2, engine=engine)
    expected, models = pfedme(
        reference.SoftmaxRegression([data.samples(i, "train") for i in range(6)], CLASSES),
        flat(linear_client(double=True).state_dict()),
        [entry.clients for entry in federation.history],
        lambda t, i: batches_of(data, t, i, 2),
        weighting,
        beta,
        mu,
    )
    assert shared(federation) == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert len(models) < 6
    for i, theta in models.items():
        assert judged(federation, i) == pytest.approx(theta, rel=1e-12, abs=1e-14)


def test_all_clients_may_train_and_the_cohort_alone_is_averaged() -> None:
    client = batchnorm_client()
    data = small_data(cohort_size=2)
    plain = run(client, data, PFedMe(personal_steps=2), 1)
    federation = run(client, data, PFedMe(personal_steps=2, train_all=True), 1)
    torch.testing.assert_close(federation.server_states()[0], plain.server_states()[0])
    (entry,), (expected,) = federation.history, plain.history
    assert sorted(entry.clients) == list(range(6))
    assert (entry.bytes_down, entry.bytes_up) == (3 * expected.bytes_down, expected.bytes_up)
    whole = run(client, small_data(), PFedMe(personal_steps=2), 1)
    assert federation.clients.memory.seen("memory", torch.arange(6)).all()
    for i in range(6):
        torch.testing.assert_close(federation.client_state(i), whole.client_state(i))


def test_with_one_step_of_each_it_is_fedavg() -> None:
    data = small_data(cohort_size=3, dtype=torch.float64)
    client = linear_client(double=True, optimizer=sgd(0.25))
    callback = PFedMe(lam=4.0, personal_steps=1, personal_lr=0.1)
    federation = run(client, data, callback, 4, local_steps=1)
    plain = run(linear_client(double=True), data, FedAvg(), 4, local_steps=1)
    assert shared(federation) == pytest.approx(network(plain.server_states()[0]), rel=1e-12)


def test_the_personal_model_is_no_alias_of_the_shared_one_and_depends_on_lam() -> None:
    lengths = []
    for lam in (0.5, 2.0, 8.0):
        options = {"lam": lam, "personal_steps": 20, "personal_lr": 0.1}
        client = quadratic_client(lr=0.01)
        federation = run(client, world_q(), PFedMe(**options), 1, local_steps=1)
        personal = judged(federation, 1)
        assert np.linalg.norm(personal - shared(federation)) > 0.1
        lengths.append(np.linalg.norm(personal))  # from w, which is 0 in all inner steps
    assert lengths[0] > 1.2 * lengths[1] > 1.2**2 * lengths[2]


def test_newcomers_run_the_inner_loop_from_the_servers_model() -> None:
    def fit(train_newcomers: bool) -> Federation:
        train = [world_q().samples(i, "train") for i in range(3)]
        data = TensorClients(train, num_classes=2, batch_size=None, cohort_size=1)
        callback = PFedMe(train_newcomers=train_newcomers, **P1)
        return run(quadratic_client(lr=0.05), data, callback, 1, local_steps=2)

    federation = fit(train_newcomers=True)
    (seen,) = federation.history[0].clients
    new = next(i for i in range(3) if i != seen)
    a, b = np.array([(1, 2), (2, 1), (1, 1)][new]), np.array([(1, -1), (3, 1), (-2, 4)][new])
    w = theta = shared(federation)
    for _ in range(2):
        for _ in range(2):
            theta = theta - 0.1 * (a * (theta - b) + 2 * (theta - w))
        w = w - 0.05 * 2 * (w - theta)
    assert judged(federation, new) == pytest.approx(theta, abs=1e-14)
    assert not federation.clients.memory.seen("memory", torch.tensor([new])).any()
    federation = fit(train_newcomers=False)
    assert judged(federation, new) == pytest.approx(shared(federation), abs=0)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of Lightning, as it loads
def test_a_newcomers_failure_names_the_last_round_also_from_a_checkpoint(tmp_path: Path) -> None:
    data = small_data(holdout_clients=0.34, seed=5)
    assert 3 in data.new_clients
    client = linear_client(failing())
    run(client, data, PFedMe(), 3, trainer={"limit_val_batches": 0}).trainer.save_checkpoint(
        tmp_path / "run.ckpt"
    )
    trainer = quiet_trainer(1, PFedMe(), limit_val_batches=0)
    with pytest.warns(UserWarning, match="round 2: client 3 failed to find its place"):
        trainer.test(
            Federation(client), datamodule=data, ckpt_path=tmp_path / "run.ckpt", verbose=False
        )


@pytest.mark.short("sequential")
@ENGINES
def test_fine_tuning_goes_on_from_the_model_that_a_client_would_use(engine: str) -> None:
    """For clients that took part the personal model, for others that of the inner loop."""
    data = small_data(dtype=torch.float64, cohort_size=2, batch_size=None)
    client, options = linear_client(double=True), {"lam": 3.0, "personal_lr": 0.1}
    plain, tuned = (
        run(client, data, PFedMe(**options), 2, finetune_epochs=epochs, engine=engine)
        for epochs in (0, 2)
    )
    taken_part = {i for entry in plain.history for i in entry.clients}
    assert 0 < len(taken_part) < 6
    world = reference.SoftmaxRegression([data.samples(i, "train") for i in range(6)], CLASSES)
    for i in range(6):
        everything = [np.arange(world.counts[i])] * 2
        expected = reference.local_training(world, judged(plain, i), i, everything, 0.1)
        assert judged(tuned, i) == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert tuned.history[-1].metrics["val/finetuned/loss"] == tuned.history[-1].metrics["val/loss"]


def test_buffers_are_those_of_the_inner_passes_and_go_with_both() -> None:
    data = small_data(batch_size=None)
    federation = run(batchnorm_client(), data, PFedMe(personal_steps=3), 2)
    counter, mean = "network.1.num_batches_tracked", "network.1.running_mean"
    server, states = federation.server_states()[0], [federation.client_state(i) for i in range(6)]
    assert server[counter] == 6  # three inner steps on a batch, one batch a round
    counts = torch.tensor([5.0, 12, 7, 9, 3, 10])
    kept = torch.stack([state[mean] for state in states])
    torch.testing.assert_close(server[mean], (counts / counts.sum()) @ kept)
    assert (kept[0] - kept[1]).abs().max() > 0.01


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lam": 0.0}, "lam must be over 0, got 0.0"),
        ({"personal_lr": -1.0}, "personal_lr must be over 0, got -1.0"),
        ({"personal_steps": 0}, "personal_steps must be at least 1, got 0"),
        ({"mu": -0.1}, "mu must be at least 0, got -0.1"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"PFedMe: {message}"):
        PFedMe(**options)


def test_what_does_not_fit() -> None:
    with pytest.raises(ConfigurationError, match="PFedMe: beta must be over 0, got 0"):
        PFedMe(beta=0)

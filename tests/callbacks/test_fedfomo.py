"""FedFomo (section 6.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.testing import assert_close

from pflight import Federation
from pflight.callbacks import FedFomo, Local
from pflight.datamodules import TensorClients
from pflight.datamodules.partitions.held_out import HeldOut
from pflight.errors import ConfigurationError
from pflight.history import Round
from tests import reference
from tests.runs import (
    CLASSES,
    ENGINES,
    FEATURES,
    assert_same,
    batches_of,
    batchnorm_client,
    dropout_client,
    failing_at_the_end,
    flat,
    linear_client,
    quadratic_client,
    run,
    small_data,
    watched,
    world_q,
)

UNEQUAL = 8, 15, 9, 13, 4, 10  # of which BatchNorm is never left with a single sample
SIZE = 4 * (FEATURES * CLASSES + CLASSES)


class Stored(FedFomo):
    """Starts with stored models of its own, and keeps what is sent."""

    def __init__(
        self, models: Sequence[tuple[float, float]], received: Sequence[bool], **options: Any
    ) -> None:
        super().__init__(**{"num_models": len(models), "epsilon": 0.0, **options})
        self.models, self.known = models, received
        self.sent: list[TensorDict] = []

    def setup_server(self) -> None:
        super().setup_server()
        for leaf in self.stored.tensors().values():
            leaf.copy_(torch.tensor(self.models, dtype=torch.float64))
        self.received |= torch.tensor(self.known)

    def mixtures(self, clients: Tensor, scores: Tensor) -> TensorDict:
        self.sent.append(super().mixtures(clients, scores))
        return self.sent[-1]


def client_one_and(*others: tuple[float, float], **options: Any) -> tuple[Stored, Federation]:
    """Run a round in which client 1 of world Q, at (0, 0), is sent the models of the others."""
    x, y = world_q().samples(0, "train")
    data = TensorClients([(x, y), *[(x[:0], y[:0])] * len(others)], num_classes=2, batch_size=None)
    callback = Stored([(0, 0), *others], [False, *[True] * len(others)], **options)
    return callback, run(quadratic_client(), data, callback)


def test_h4() -> None:
    callback, federation = client_one_and((1, 0), (1, -1), (3, 0))
    (sent,) = callback.sent
    assert flat(dict(sent[0].items())) == pytest.approx([1, -0.6796228], abs=1e-7)
    assert callback.affinity[0].tolist() == pytest.approx([0, 0.5, 1.0606602, 0], abs=1e-7)
    assert not callback.affinity[1:].any()
    trained = flat(federation.client_state(0))  # one step of 0.1 down a (theta - b)
    assert trained == pytest.approx([1, -0.6796228 - 0.2 * (-0.6796228 + 1)], abs=1e-7)


def test_the_own_model_where_no_other_is_better() -> None:
    callback, _ = client_one_and((3, 0), (0, 0), (-1, 5))
    assert flat(dict(callback.sent[0][0].items())).tolist() == [0, 0]
    assert not callback.affinity.any()


def test_scores_add_up_over_rounds() -> None:
    x, y = world_q().samples(0, "train")
    data = TensorClients([(x, y), (x[:0], y[:0])], num_classes=2, batch_size=None)
    callback = Stored([(0, 0), (1, -1)], [False, True])
    run(quadratic_client(), data, callback, 2)
    first = 1.5 / 2**0.5
    # The first round takes the client to (1, -1), where the gradient is 0: no score in the second.
    assert callback.affinity[0, 1].item() == pytest.approx(first, abs=1e-12)
    assert flat(dict(callback.sent[1][0].items())).tolist() == pytest.approx([1, -1], abs=1e-12)


def softmax_losses(theta: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
    logits = x @ theta[:-CLASSES].reshape(CLASSES, -1).T + theta[-CLASSES:]
    shifted = logits - logits.max(axis=1, keepdims=True)
    own = shifted[np.arange(len(y)), y] - np.log(np.exp(shifted).sum(axis=1))
    return float(-own.mean())


def fedfomo(
    data: HeldOut, theta: np.ndarray, cohorts: Sequence[Sequence[int]], epochs: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return models and affinities where everybody is sent all models that there are."""
    count = data.num_clients
    world = reference.SoftmaxRegression([data.samples(i, "train") for i in range(count)], CLASSES)
    models, affinity, known = [theta] * count, np.zeros((count, count)), set()
    for round_, cohort in enumerate(cohorts):
        trained = {}
        for i in cohort:
            x, y = (part.numpy() for part in data.samples(i, "held_out"))
            scores = np.zeros(count)
            for n in known - {i}:
                gain = softmax_losses(models[i], x, y) - softmax_losses(models[n], x, y)
                scores[n] = max(0, gain / np.linalg.norm(models[n] - models[i]))
            start = models[i].copy()
            if scores.any():
                start += sum(
                    w * (model - models[i])
                    for w, model in zip(scores / scores.sum(), models, strict=True)
                )
            batches = batches_of(data, round_, i, epochs)
            trained[i] = reference.local_training(world, start, i, batches, lr=0.1)
            affinity[i] += scores
        known |= trained.keys()
        for i, model in trained.items():
            models[i] = model
    return models, affinity


@pytest.mark.short("sequential")
@ENGINES
def test_several_rounds_with_partial_participation(engine: str) -> None:
    data = small_data(cohort_size=4, seed=1, dtype=torch.float64)
    client, callback = linear_client(double=True), FedFomo(num_models=9)
    federation = run(client, data, callback, 5, local_epochs=2, engine=engine)
    cohorts = [entry.clients for entry in federation.history]
    start = flat(dict(client.state_dict()))
    models, affinity = fedfomo(HeldOut(data, 0.2), start, cohorts, epochs=2)
    assert callback.affinity.numpy() == pytest.approx(affinity, rel=1e-10, abs=1e-12)
    assert (affinity > 0).sum() > 7
    for i in range(6):
        assert flat(federation.client_state(i)) == pytest.approx(models[i], rel=1e-11, abs=1e-13)


class TestReductions:
    @pytest.mark.parametrize("options", [{"num_models": 0}, {"num_models": 3, "epsilon": 0.5}])
    def test_without_models_it_is_local_training(self, options: dict[str, Any]) -> None:
        """Without the models of others: none are sent, or none are there."""
        data = small_data(UNEQUAL if not options["num_models"] else [9], dtype=torch.float64)
        client = batchnorm_client().double()
        one = run(client, data, FedFomo(**options), 4, local_epochs=2)
        other = run(client, HeldOut(data, 0.2), Local(), 4, local_epochs=2)
        for i in range(data.num_clients):
            assert_same(one.client_state(i), other.client_state(i))
        assert one.client_state(0)["network.1.num_batches_tracked"].dtype == torch.int64
        for left, right in zip(one.history, other.history, strict=True):
            assert left.clients == right.clients
            assert left.bytes_down == right.bytes_down


class TestChoice:
    def choose(self, affinity: Sequence[float], seed: int = 0, **options: Any) -> list[list[int]]:
        """Return what client 0 of six is sent, in as many rounds as one likes."""
        callback = FedFomo(**options)
        federation = run(linear_client(), small_data(), callback, 0, seed=seed)
        callback.received[:] = torch.tensor([True] * 5 + [False])
        callback.affinity[0] = torch.tensor(affinity)
        chosen = []
        for _ in range(200):
            chosen.append(callback.choose(torch.tensor([0]))[0].tolist())
            federation.history.append(Round(0, []))
        return chosen

    def test_the_best_are_sent_never_the_own_or_one_that_is_not_there(self) -> None:
        for sent in self.choose([9, 0.3, 0.1, 0.2, 0.4, 9], num_models=3, epsilon=0.0):
            assert sent == [4, 1, 3]

    def test_ties_are_broken_at_random(self) -> None:
        chosen = self.choose([0, 0, 0, 1, 0, 0], num_models=2, epsilon=0.0)
        assert {first for first, _ in chosen} == {3}
        counts = torch.tensor([second for _, second in chosen]).bincount(minlength=6)
        assert counts[[0, 3, 5]].tolist() == [0, 0, 0]
        assert (counts[[1, 2, 4]] > 40).all()

    def test_random_ones_with_probability_epsilon(self) -> None:
        options = {"num_models": 1, "epsilon": 0.6, "decay": 0.0}
        best = sum(sent == [4] for sent in self.choose([0, 3, 2, 1, 4, 0], **options))
        assert 0.4 < best / 200 < 0.7  # 0.4, and a fourth of 0.6

    def test_epsilon_decays(self) -> None:
        chosen = self.choose([0, 3, 2, 1, 4, 0], num_models=1, epsilon=1.0, decay=0.02)
        assert sum(sent == [4] for sent in chosen[:25]) < 20
        assert all(sent == [4] for sent in chosen[50:])

    def test_nobody_is_sent_twice_and_all_if_there_are_no_more(self) -> None:
        for sent in self.choose([0, 3, 2, 1, 4, 0], num_models=9, epsilon=0.5, decay=0.0):
            assert sorted(sent) == [0, 1, 2, 3, 4]  # 0, its own, fills up
        for seed in range(3):
            chosen = self.choose([0] * 6, seed, num_models=3, epsilon=0.5, decay=0.0)
            assert all(len({*sent}) == 3 for sent in chosen)

    def test_draws_depend_on_the_seed(self) -> None:
        one, other = (self.choose([0] * 6, seed, num_models=2) for seed in (0, 1))
        assert one != other


def test_traffic_is_the_initial_model_once_and_then_m_models() -> None:
    federation = run(linear_client(), small_data(cohort_size=3), FedFomo(num_models=2), 5)
    seen: set[int] = set()
    for entry in federation.history:
        models = sum(min(2, len(seen - {i})) for i in entry.clients)
        new = len({*entry.clients} - seen)
        assert entry.bytes_down == SIZE * (models + new)
        assert entry.bytes_up == 3 * SIZE
        seen |= {*entry.clients}


def test_four_samples_are_three_to_train_on_and_one_to_compare_by() -> None:
    counts: list[int] = []
    client = watched(linear_client(), lambda c: counts.append(int(c.num_samples)))
    federation = run(client, small_data([4, 4, 4]), FedFomo(), 2, engine="sequential")
    assert counts == [3] * 6
    assert all(np.isfinite(flat(federation.client_state(i))).all() for i in range(3))


def test_losses_are_in_evaluation_mode_and_leave_buffers_alone() -> None:
    class Recording(FedFomo):
        def scores(self, clients: Tensor) -> Tensor:
            twice = super().scores(clients), super().scores(clients)
            assert torch.equal(*twice)  # with dropout
            return twice[0]

    callback = Recording(num_models=5)
    run(dropout_client(), small_data(), callback, 3)
    assert (callback.affinity > 0).any()
    federation = run(batchnorm_client(), small_data(UNEQUAL), FedFomo(num_models=5), 3)
    batches = [2, 3, 2, 3, 1, 2]  # of 6, 12, 7, 10, 3 and 8 samples that are trained on
    tracked = [federation.client_state(i)["network.1.num_batches_tracked"] for i in range(6)]
    assert tracked == [3 * count for count in batches]


@pytest.mark.filterwarnings("ignore:.*round .*failed:UserWarning")
def test_a_client_that_fails_keeps_everything() -> None:
    client, callback = linear_client(failing_at_the_end()), FedFomo(num_models=5)
    federation = run(client, small_data(), callback, 3)
    assert callback.received.tolist() == [True] * 3 + [False] + [True] * 2
    assert_same(federation.client_state(3), dict(client.state_dict()))
    assert not callback.affinity[3].any()
    assert not callback.affinity[:, 3].any()
    assert callback.affinity.any()


def test_newcomers_are_judged_by_the_initial_model_and_their_first_mixture() -> None:
    data = small_data(holdout_clients=0.34)
    callback = FedFomo(num_models=4)
    federation = run(linear_client(), data, callback, 3)
    newcomers = data.new_clients
    for i in newcomers.tolist():
        assert_same(federation.client_state(i), dict(linear_client().state_dict()))
    mixtures = callback.broadcast(newcomers)
    held_out = federation.clients.losses(newcomers, mixtures, "held_out")
    initial = federation.clients.losses(newcomers, callback.models_of(newcomers), "held_out")
    assert (held_out < initial).all()


@pytest.mark.long
def test_clients_alike_weigh_more_than_others() -> None:
    """Two groups of clients with opposite labels."""
    random = torch.Generator().manual_seed(0)
    train = []
    for i in range(6):
        x = torch.randn(40, FEATURES, generator=random)
        y = (x[:, 0] > 0).long()
        train.append((x, y if i < 3 else 1 - y))
    data = TensorClients(train, num_classes=CLASSES, batch_size=10)
    callback = FedFomo(num_models=5)
    run(linear_client(), data, callback, 8)
    same = torch.arange(6).unsqueeze(0) // 3 == torch.arange(6).unsqueeze(1) // 3
    assert callback.affinity[same].sum() > 10 * callback.affinity[~same].sum()


def test_a_loaded_federation_knows_every_model(tmp_path: Any) -> None:
    callback = FedFomo()
    federation = run(linear_client(), small_data(), callback, 2)
    federation.trainer.save_checkpoint(tmp_path / "run.ckpt")
    again = FedFomo()
    loaded = Federation.load_from_checkpoint(
        tmp_path / "run.ckpt", client=linear_client(), callback=again
    )
    assert_close(again.affinity, callback.affinity, rtol=0, atol=0)
    for one, other in zip(loaded.server_states(), federation.server_states(), strict=True):
        assert_same(one, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_models": -1}, "num_models must be at least 0, got -1"),
        ({"held_out": 0.0}, r"held_out must be in \(0, 1\), got 0\.0"),
        ({"held_out": 1.0}, r"held_out must be in \(0, 1\), got 1\.0"),
        ({"epsilon": 1.1}, r"epsilon must be in \[0, 1\], got 1\.1"),
        ({"epsilon": float("nan")}, r"epsilon must be a finite number, got nan"),
        ({"decay": -0.1}, r"decay must be at least 0, got -0\.1"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        FedFomo(**options)

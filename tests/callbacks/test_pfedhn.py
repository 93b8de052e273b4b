"""pFedHN (section 6.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from pflight import Federation
from pflight.callbacks import Local
from pflight.callbacks.methods.pfedhn import PFedHN, fully_connected
from pflight.datamodules import TensorClients
from pflight.errors import ConfigurationError
from pflight.local_client import LocalClient
from pflight.states.updates import ClientUpdates
from tests.runs import (
    CLASSES,
    FEATURES,
    A,
    B,
    assert_same,
    batchnorm_client,
    flat,
    linear_client,
    quadratic_client,
    run,
    sgd,
    small_data,
    watched,
    world_q,
)

UNEQUAL = 6, 12, 7, 10, 3, 8  # no batch of a single sample, which BatchNorm can't take


class Linear(PFedHN):
    """``theta = W v`` with one number for an embedding."""

    def __init__(self, embeddings: Sequence[float], **options: Any) -> None:
        super().__init__(embedding_dim=1, **options)
        self.first = embeddings
        self.hypernetwork = partial(nn.Linear, bias=False)

    def setup_server(self) -> None:
        super().setup_server()
        with torch.no_grad():
            self.network.weight.copy_(torch.tensor([[1.0], [-1.0]]))
            for embedding, value in zip(self.embeddings, self.first, strict=True):
                embedding.fill_(value)

    @property
    def matrix(self) -> list[float]:
        return self.network.weight.flatten().tolist()


def quadratics(
    callback: PFedHN, clients: Sequence[int] = (0,), rounds: int = 1, **options: Any
) -> Federation:
    options = {"server_optimizer": sgd(0.5), **options}
    return run(quadratic_client(), world_q(clients), callback, rounds, **options)


def test_h1() -> None:
    callback = Linear([2.0])
    federation = quadratics(callback)
    assert callback.matrix == pytest.approx([0.9, -0.8], abs=1e-12)
    assert callback.embeddings[0].item() == pytest.approx(1.85, abs=1e-12)
    theta = flat(federation.client_state(0))
    assert theta == pytest.approx([1.665, -1.48], abs=1e-12)
    losses = [(a / 2 * (t - b) ** 2) for a, t, b in zip(A[0], theta, B[0], strict=True)]
    assert sum(losses) == pytest.approx(0.4515125, abs=1e-12)
    assert_same(federation.server_states()[0], federation.client_state(0))


def test_each_client_is_sent_what_those_before_it_have_changed() -> None:
    """The second is sent (0.9, -0.8) and moves by (0.42, 0.18)."""
    callback = Linear([2.0, 1.0])
    quadratics(callback, clients=(0, 1))
    assert callback.matrix == pytest.approx([1.11, -0.71], abs=1e-12)
    assert [e.item() for e in callback.embeddings] == pytest.approx([1.85, 1.117], abs=1e-12)


def test_steps_carry_momentum_from_client_to_client() -> None:
    callback = Linear([2.0, 1.0])
    quadratics(callback, clients=(0, 1), server_optimizer=sgd(0.5, momentum=0.5))
    assert callback.matrix == pytest.approx([1.06, -0.61], abs=1e-12)  # and half of (-0.1, 0.2)
    assert [e.item() for e in callback.embeddings] == pytest.approx([1.85, 1.117], abs=1e-12)


def test_the_default_optimizer_has_a_step_for_embeddings_of_its_own() -> None:
    callback = Linear([2.0], lr=0.0, embedding_lr=0.5)
    federation = quadratics(callback, server_optimizer=None)
    assert callback.matrix == [1.0, -1.0]
    assert callback.embeddings[0].item() == pytest.approx(1.85 - 0.5 * 1e-3 * 2, abs=1e-12)
    (optimizer,) = federation.trainer.optimizers
    assert [(g["momentum"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.9, 1e-3)] * 2


def test_the_gradient_is_clipped_over_network_and_embedding() -> None:
    callback = Linear([2.0], clip=0.1)
    quadratics(callback)
    gradient = torch.tensor([0.2, -0.4, 0.3], dtype=torch.double)  # of W and v: see H1
    step = 0.5 * gradient / gradient.norm() * 0.1
    moved = torch.tensor([*callback.matrix, callback.embeddings[0].item()], dtype=torch.double)
    assert_close(torch.tensor([1.0, -1.0, 2.0]).double() - moved, step, rtol=1e-5, atol=0)


class Recording(PFedHN):
    """Keeps embeddings as they were before each round, and the last changes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.before: list[list[Tensor]] = []

    def round(self, cohort: Tensor) -> None:
        self.before.append([embedding.detach().clone() for embedding in self.embeddings])
        super().round(cohort)

    def change(self, updates: ClientUpdates) -> dict[str, Tensor]:
        self.sent, self.last = self._sent[0], super().change(updates)
        return self.last


@pytest.mark.parametrize("optimizer", [sgd(0.05), None])
def test_a_step_moves_the_output_towards_the_trained_model(optimizer: Any) -> None:
    callback = Recording()
    run(linear_client(), small_data([20]), callback, server_optimizer=optimizer)
    after = callback.broadcast(torch.tensor([0]))[0]
    far = sum(float(change.square().sum()) for change in callback.last.values())
    near = sum(
        float((callback.sent[name] + change - after[name]).square().sum())
        for name, change in callback.last.items()
    )
    assert near < 0.99 * far


class Identity(PFedHN):
    """Embeddings that are the models themselves, and start as the client's."""

    def __init__(self, size: int, **options: Any) -> None:
        super().__init__(embedding_dim=size, clip=None, **options)
        self.hypernetwork = lambda dim, size: nn.Identity()

    def setup_server(self) -> None:
        super().setup_server()
        start = self.server.tensors(0, self.generated)
        with torch.no_grad():
            for embedding in self.embeddings:
                embedding.copy_(torch.cat([value.flatten() for value in start.values()]))


@pytest.mark.short("0", "2")
@pytest.mark.parametrize("private_layers", [0, 1, 2])
def test_the_identity_is_local_training(private_layers: int) -> None:
    data = small_data(UNEQUAL, cohort_size=3, dtype=torch.float64)
    client = batchnorm_client(optimizer=sgd(0.1, momentum=0.9)).double()
    size = {0: 63, 1: 42, 2: 30}[private_layers]
    callback = Identity(size, private_layers=private_layers)
    one = server, _ = [
        run(client, data, kind, rounds=5, local_epochs=2, server_optimizer=sgd(1.0))
        for kind in (callback, Local())
    ]
    for i in range(6):
        assert_close(*(fed.client_state(i) for fed in one), rtol=1e-12, atol=1e-14)
    assert server.client_state(0)["network.1.num_batches_tracked"].dtype == torch.int64


@pytest.mark.parametrize(
    "optimizer",
    [None, sgd(1.0, momentum=0.9, weight_decay=0.1), partial(torch.optim.Adam, lr=0.1)],
    ids=["default", "momentum", "Adam"],
)
def test_no_optimizer_moves_the_embeddings_of_absent_clients(
    optimizer: Callable[..., torch.optim.Optimizer] | None,
) -> None:
    callback, data = Recording(), small_data(cohort_size=2)
    federation = run(linear_client(), data, callback, 5, server_optimizer=optimizer)
    after = [*callback.before[1:], list(callback.embeddings)]
    for entry, old, new in zip(federation.history, callback.before, after, strict=True):
        assert [i for i in range(6) if not torch.equal(old[i], new[i])] == entry.clients
    assert federation.trainer.global_step == 5  # a round is one, however many clients


class TestPrivateHead:
    """pFedHN-PC."""

    def test_the_head_stays_with_its_client_and_does_not_travel(self) -> None:
        callback = PFedHN(private_layers=1)
        federation = run(batchnorm_client(), small_data(UNEQUAL, cohort_size=3), callback, 4)
        head = {"network.3.weight", "network.3.bias"}
        assert head.isdisjoint(callback.generated)
        assert head < {*callback.private}
        travels = 3 * 4 * (FEATURES * 6 + 6 + 6 + 6)
        for entry in federation.history:
            assert (entry.bytes_down, entry.bytes_up) == (travels, travels)
        trained = sorted({i for entry in federation.history for i in entry.clients})
        weights = [flat({"": federation.client_state(i)["network.3.weight"]}) for i in range(6)]
        start = flat({"": batchnorm_client().state_dict()["network.3.weight"]})
        assert [i for i in range(6) if (weights[i] != start).any()] == trained
        assert (weights[trained[0]] != weights[trained[1]]).any()

    def test_too_many_layers(self) -> None:
        with pytest.raises(ConfigurationError, match=r"private_layers=3 leaves nothing .* 3 layer"):
            run(batchnorm_client(), small_data(UNEQUAL), PFedHN(private_layers=3))


class TestNewcomers:
    @pytest.mark.parametrize("steps", [0, 1, 3])
    def test_the_embedding_follows_its_changes_and_nothing_else_moves(self, steps: int) -> None:
        train = [world_q().samples(i, "train") for i in range(3)]
        data = TensorClients(train, num_classes=2, batch_size=None, holdout_clients=0.34)
        (newcomer,) = data.new_clients.tolist()
        callback = Linear([2.0, 1.0, 0.5], embedding_lr=0.5, newcomer_steps=steps)
        federation = run(quadratic_client(), data, callback, 2, server_optimizer=sgd(0.5))
        matrix = torch.tensor(callback.matrix, dtype=torch.double)
        v = callback.first[newcomer]
        a, b = (torch.tensor(part[newcomer], dtype=torch.double) for part in (A, B))
        for _ in range(steps):
            change = -0.1 * a * (matrix * v - b)
            v = v + 0.5 * float(matrix @ change)
        expected = (matrix * v).tolist()
        assert flat(federation.client_state(newcomer)) == pytest.approx(expected, abs=1e-12)
        assert callback.embeddings[newcomer].item() == callback.first[newcomer]
        assert callback.matrix == matrix.tolist()

    def test_a_newcomer_of_pfedhn_pc_trains_its_head(self) -> None:
        data = small_data(holdout_clients=0.34)
        callback = PFedHN(private_layers=1, newcomer_steps=30)
        federation = run(batchnorm_client(), data, callback, 3)
        newcomer = int(data.new_clients[0])
        start = batchnorm_client().state_dict()["network.3.weight"]
        assert not torch.equal(federation.client_state(newcomer)["network.3.weight"], start)
        (tested,) = federation.trainer.test(federation, datamodule=data, verbose=False)
        assert tested["test/new/loss"] < tested["test/new/server/loss"]

    def test_one_without_samples_is_served_what_is_generated(self) -> None:
        callback = PFedHN()
        federation = run(linear_client(), small_data([5, 0, 7]), callback, 2)
        sent = callback.broadcast(torch.tensor([1]))
        assert_same(federation.client_state(1), {n: v[0] for n, v in sent.items()})


@pytest.mark.filterwarnings("ignore:.*round .*failed:UserWarning")
@pytest.mark.parametrize("everybody", [False, True])
def test_clients_that_fail_move_nothing(everybody: bool) -> None:
    def fail(c: LocalClient) -> None:
        if everybody or c.num_samples == 9:  # client 3
            raise RuntimeError("out of battery")

    client, callback, other = watched(linear_client(), fail), PFedHN(), PFedHN()
    run(client, small_data(), callback, rounds=2, all_may_fail=everybody)
    run(client, small_data(), other, rounds=0)
    same = [torch.equal(*pair) for pair in zip(callback.embeddings, other.embeddings, strict=True)]
    assert same == [everybody or i == 3 for i in range(6)]
    pairs = zip(callback.network.parameters(), other.network.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs) == everybody


def test_the_default_hypernetwork_is_as_published() -> None:
    callback = PFedHN()
    run(linear_client(), small_data(), callback)
    assert [tuple(e.shape) for e in callback.embeddings] == [(2,)] * 6  # 1 + 6 // 4
    shapes = [tuple(layer.weight.shape) for layer in callback.network if hasattr(layer, "weight")]
    size = FEATURES * CLASSES + CLASSES
    assert shapes == [(100, 2), (100, 100), (100, 100), (100, 100), (size, 100)]
    assert len(fully_connected(3, 8, hidden_layers=0)) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"private_layers": -1}, "private_layers must be at least 0, got -1"),
        ({"embedding_dim": 0}, "embedding_dim must be at least 1, got 0"),
        ({"hidden_dim": 0}, "hidden_dim must be at least 1, got 0"),
        ({"hidden_layers": -1}, "hidden_layers must be at least 0, got -1"),
        ({"lr": -0.1}, r"lr must be at least 0, got -0\.1"),
        ({"embedding_lr": torch.nan}, "embedding_lr must be a finite number or null, got nan"),
        ({"clip": 0.0}, r"clip must be over 0, got 0\.0"),
        ({"newcomer_steps": -1}, "newcomer_steps must be at least 0, got -1"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PFedHN(**options)

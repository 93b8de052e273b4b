"""Centralized training against a plain loop over the pooled samples."""

import copy

import pytest
import torch
from torch import Tensor, nn

from pflight.callbacks import Centralized
from pflight.callbacks.methods.centralized import PooledData
from pflight.datamodules import TensorClients
from pflight.errors import ConfigurationError
from tests.runs import assert_same, linear_client, run, small_data

COUNTS = (5, 12, 7, 0, 3, 10)


def world(**options) -> TensorClients:
    return small_data(COUNTS, dtype=torch.float64, holdout_clients=0.17, **options)


def test_it_is_a_plain_loop_over_all_samples_but_newcomers() -> None:
    data = world()
    client = linear_client(double=True)
    module = copy.deepcopy(client)
    federation = run(client, data, Centralized(), rounds=3, local_epochs=2)
    owners = [i for i in range(6) if i not in data.new_clients.tolist() and COUNTS[i]]
    x, y = (
        torch.cat(parts) for parts in zip(*(data.samples(i, "train") for i in owners), strict=True)
    )
    pooled = PooledData(data)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for round in range(3):
        for epoch in range(2):
            order = pooled.order(owners[0], round, epoch)
            assert sorted(order.tolist()) == list(range(len(y)))
            for rows in order.split(4):
                optimizer.zero_grad()
                nn.functional.cross_entropy(module(x[rows]), y[rows]).backward()
                optimizer.step()
    (state,) = federation.server_states()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-14)
    for i in range(6):
        assert_same(federation.client_state(i), state)
    assert [entry.bytes_down + entry.bytes_up for entry in federation.history] == [0, 0, 0]
    assert [entry.clients for entry in federation.history] == [owners[:1]] * 3


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_engines_and_cohorts_make_no_difference(engine: str) -> None:
    torch.manual_seed(0)
    client = linear_client(double=True)
    one = run(copy.deepcopy(client), world(), Centralized(), 2)
    other = run(copy.deepcopy(client), world(cohort_size=2), Centralized(), 2, engine=engine)
    for left, right in zip(one.server_states(), other.server_states(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-14)


def test_every_client_is_judged_by_its_own_samples() -> None:
    data = world()
    pooled = PooledData(data)
    assert pooled.num_samples("train").tolist() == [
        sum(COUNTS) - COUNTS[newcomer(data)],
        0,
        0,
        0,
        0,
        0,
    ]
    assert pooled.class_counts("train").sum(1).tolist() == pooled.num_samples("train").tolist()
    for split in ("val", "test"):
        assert torch.equal(pooled.num_samples(split), data.num_samples(split))
        for i in range(6):
            for left, right in zip(pooled.samples(i, split), data.samples(i, split), strict=True):
                assert torch.equal(left, right)


def newcomer(data: TensorClients) -> int:
    (found,) = data.new_clients.tolist()
    assert found != 0
    return found


def test_each_part_is_augmented_as_its_owner_sees_it() -> None:
    class Shifted(TensorClients):
        def augment(self, x: Tensor, client: int, round: int, epoch: int = 0) -> Tensor:
            return x + 10 * client + round + epoch / 10

    data = Shifted(
        [(torch.zeros(n, 2), torch.zeros(n, dtype=torch.long)) for n in (2, 3)], num_classes=2
    )
    pooled = PooledData(data)
    seen = pooled.augment(pooled.samples(0, "train")[0], 0, round=1, epoch=2)
    assert seen[:, 0].tolist() == pytest.approx([1.2, 1.2, 11.2, 11.2, 11.2])


def test_what_can_not_be_pooled_is_refused() -> None:
    for name in ("finetune_epochs", "newcomer_epochs"):
        with pytest.raises(ConfigurationError, match=rf"Centralized: .* {name} must be 0"):
            run(linear_client(), small_data(), Centralized(), **{name: 1})

    def elsewhere(client: int, split: str) -> None:
        raise ConfigurationError(f"the samples of client {client} are on another machine")

    data = small_data()
    data.samples = elsewhere
    with pytest.raises(ConfigurationError, match="client 0 are on another machine"):
        PooledData(data)

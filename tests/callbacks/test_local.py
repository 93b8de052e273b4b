import pytest
import torch
from torch.testing import assert_close

from pflight.callbacks import Local
from tests import reference
from tests.runs import (
    CLASSES,
    assert_same,
    batches_of,
    batchnorm_client,
    flat,
    linear_client,
    quadratic_client,
    run,
    small_data,
    world_q,
)


def test_q0_a_client_carries_its_model_across_rounds() -> None:
    federation = run(quadratic_client(), world_q(), Local(), rounds=2, local_steps=2)
    assert flat(federation.client_state(0)) == pytest.approx([0.3439, -0.5904], abs=1e-12)


def test_several_rounds_with_partial_participation() -> None:
    data = small_data(cohort_size=2, dtype=torch.float64)
    client = linear_client(double=True)
    federation = run(client, data, Local(), rounds=5, local_epochs=2)
    cohorts = [entry.clients for entry in federation.history]
    world = reference.SoftmaxRegression(
        [data.samples(i, "train") for i in range(data.num_clients)], CLASSES
    )
    expected = reference.local(
        world, flat(client.state_dict()), cohorts, lambda t, i: batches_of(data, t, i, 2), lr=0.1
    )
    for i, model in enumerate(expected):
        assert flat(federation.client_state(i)) == pytest.approx(model, rel=1e-12, abs=1e-14)


def test_the_common_initial_model_stays_what_it_was_and_serves_newcomers() -> None:
    data = small_data(holdout_clients=0.34)
    client = linear_client()
    federation = run(client, data, Local(), rounds=2)
    assert_same(federation.server_states()[0], client.state_dict())
    (newcomer, _) = data.new_clients.tolist()
    assert_same(federation.client_state(newcomer), client.state_dict())


def test_only_the_initial_model_travels_once_per_client() -> None:
    data = small_data(cohort_size=3)
    federation = run(linear_client(), data, Local(), rounds=6)
    size = 4 * (4 * 3 + 3)
    seen: set[int] = set()
    for entry in federation.history:
        assert entry.bytes_down == size * len(set(entry.clients) - seen)
        assert entry.bytes_up == 0
        seen |= set(entry.clients)


def test_a_client_kept_in_memory_is_no_view_of_what_is_returned() -> None:
    federation = run(linear_client(), small_data(), Local())
    first = federation.client_state(1)
    for value in first.values():
        value.zero_()
    assert flat(federation.client_state(1)).any()
    assert_close(federation.client_state(1), federation.client_state(1))


def test_names_come_in_the_order_of_the_state_dict() -> None:
    client = batchnorm_client()
    federation = run(client, small_data(cohort_size=3), Local(), rounds=2)
    names = list(client.state_dict())
    assert list(federation.server_states()[0]) == names
    assert all(list(federation.client_state(i)) == names for i in range(6))

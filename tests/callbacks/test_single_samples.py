"""Clients with a single sample, on which BatchNorm can't train: they carry no weight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pflight import Federation
from pflight.callbacks import (
    APFL,
    CFL,
    L2GD,
    SCAFFOLD,
    Ditto,
    FedALA,
    FedAvg,
    FedDANE,
    FedSGD,
    Local,
    PerFedAvg,
    PFedLA,
    PFedMe,
    Reptile,
    ServerCallback,
)
from pflight.local_client import LocalClient
from pflight.method import ClientMethod
from tests.runs import (
    ENGINES,
    assert_same,
    batchnorm_client,
    linear_client,
    run,
    sgd,
    small_data,
)

METHODS: dict[str, Callable[[], ServerCallback]] = {
    "FedAvg": FedAvg,
    "FedAvg-uniform": lambda: FedAvg("uniform"),
    "FedSGD": lambda: FedSGD(lr=0.3),
    "FedSGD-batches": lambda: FedSGD(lr=0.3, weighting="uniform", batches=1),
    "FedDANE": FedDANE,
    "FedDANE-uniform": lambda: FedDANE(True, "uniform"),
    "SCAFFOLD-I": lambda: SCAFFOLD(option="I"),
    "SCAFFOLD-II": SCAFFOLD,
    "Reptile": lambda: Reptile(lr=0.6),
    "Ditto": Ditto,
    "APFL": APFL,
    "pFedMe": lambda: PFedMe(train_newcomers=False),
    "Per-FedAvg": lambda: PerFedAvg(steps=0),
    "FedALA": FedALA,
    "L2GD": L2GD,
    "Local": Local,
    "CFL": lambda: CFL(1e3, 0, min_size=1, warmup=0),
}


def test_a_single_sample_at_the_end_makes_no_batch() -> None:
    """With batches of four: it joins the one before, or is left out where it is the only one."""
    data = small_data([5, 9, 8, 1, 0])
    merged, plain = (
        run(client, data, FedAvg()) for client in (batchnorm_client(), linear_client())
    )
    clients = torch.arange(5)
    assert merged.clients.num_batches(clients).tolist() == [1, 2, 2, 0, 0]
    assert plain.clients.num_batches(clients).tolist() == [2, 3, 2, 1, 0]


@pytest.mark.short("*-sequential")
@ENGINES
@pytest.mark.parametrize("method", METHODS)
def test_the_others_train_as_if_they_were_alone(method: str, engine: str) -> None:
    def fit(counts: list[int]) -> Federation:
        client = batchnorm_client(optimizer=sgd(0.2))
        return run(client, small_data(counts), METHODS[method](), 3, engine=engine)

    with_two, without = fit([6, 8, 1, 1]), fit([6, 8])
    assert len(with_two.server_states()) == len(without.server_states())
    for left, right in zip(with_two.server_states(), without.server_states(), strict=True):
        torch.testing.assert_close(left, right)
    for i in range(2):
        torch.testing.assert_close(with_two.client_state(i), without.client_state(i))
    assert with_two.history[-1].clients == [0, 1, 2, 3]
    assert not with_two.history[-1].failed
    for left, right in zip(with_two.history, without.history, strict=True):
        assert left.bytes_up == right.bytes_up


def test_who_changes_its_model_all_the_same_is_counted() -> None:
    class Answering(ClientMethod):
        def after_training(self, c: LocalClient) -> None:
            c.weights["network.0.weight"].fill_(1.0)

    client = batchnorm_client()
    client.client_method = Answering()
    state = run(client, small_data([6, 1]), FedAvg("uniform")).server_states()[0]
    sent, alone = (
        client.state_dict()["network.0.bias"],
        run(client, small_data([6]), FedAvg()).server_states()[0]["network.0.bias"],
    )
    torch.testing.assert_close(state["network.0.bias"], (sent + alone) / 2)


def test_their_models_are_in_no_mixture_of_pfedla() -> None:
    callback = PFedLA()
    run(batchnorm_client(), small_data([6, 8, 1]), callback, 2)
    for weights in callback.layer_weights([0, 1, 2]).values():
        torch.testing.assert_close(weights[:, :2].sum(dim=1), torch.ones(3))
        assert not weights[:, 2].any()


def test_they_are_judged_like_newcomers_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "lightning.pytorch.pflight"):
        federation = run(batchnorm_client(), small_data([6, 8, 1]), Ditto(), 3)
    assert_same(federation.client_state(2), federation.server_states()[0])
    lines = [line for line in caplog.messages if "BatchNorm" in line]
    assert lines == [
        "1 of 3 clients have a single sample, on which BatchNorm can't train, and carry no "
        "weight: 2"
    ]


@pytest.mark.parametrize("method", METHODS)
def test_where_nobody_can_train_nothing_moves(method: str) -> None:
    client = batchnorm_client()
    federation = run(client, small_data([1, 1]), METHODS[method](), 2)
    assert [entry.bytes_up for entry in federation.history] == [0, 0]
    for name, value in federation.server_states()[0].items():
        assert torch.equal(value, client.state_dict()[name])

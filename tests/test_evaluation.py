"""Evaluation of clients that share server models."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from tensordict import TensorDict
from torch import nn

from pflight import Federation
from pflight.callbacks import FedAvg, FeSEM, Local
from pflight.datamodules import TensorClients
from pflight.models import ProximalClient
from tests.runs import (
    CLASSES,
    ENGINES,
    FEATURES,
    linear_client,
    network_client,
    run,
    samples,
    small_data,
)


@pytest.fixture
def clustered() -> tuple[Federation, FeSEM]:
    server = FeSEM(2, init_clients=3, newcomers="mean")
    client = linear_client(ProximalClient, double=True)
    data = small_data(dtype=torch.float64, cohort_size=2)
    return run(client, data, server, rounds=2, engine="sequential"), server


def test_clients_are_grouped_by_center_and_none_gets_a_copy(
    clustered: tuple[Federation, FeSEM],
) -> None:
    _, server = clustered
    assert server.assignments.unique().tolist() == [-1, 0, 1]  # some have not been seen
    everyone = torch.tensor([5, 3, 0, 1, 4, 2])
    groups = list(server.broadcast_groups(everyone))
    assert len(groups) == 3
    assert sorted(torch.cat([clients for clients, _ in groups]).tolist()) == list(range(6))
    for clients, sent in groups:
        assert len(server.assignments[clients].unique()) == 1
        expected = server.broadcast(clients)
        for name, leaf in sent.items():
            assert leaf.untyped_storage().nbytes() == leaf[0].nbytes
            assert torch.equal(leaf, expected[name])
    apart = torch.stack([server.broadcast(torch.tensor([i]))[0] for i in everyone.tolist()])
    assert (server.broadcast(everyone) == apart).all()


def test_each_client_is_judged_by_its_center(clustered: tuple[Federation, FeSEM]) -> None:
    federation, _ = clustered
    data, losses = federation.clients.attached_data, federation.client_metrics("val")["loss"]
    for client in range(6):
        module = federation.client_module(client)
        expected = torch.nn.functional.cross_entropy(
            module(data.samples(client, "val")[0]), data.samples(client, "val")[1]
        )
        torch.testing.assert_close(losses[client], expected.detach(), rtol=1e-12, atol=0)


def test_a_callback_without_groups_sends_all_clients_their_models_at_once() -> None:
    federation = run(linear_client(), small_data(), FedAvg())
    clients = torch.arange(4)
    ((group, sent),) = federation.server_callback.broadcast_groups(clients)
    assert torch.equal(group, clients)
    assert isinstance(sent, TensorDict)
    assert sent.batch_size == (4,)


def test_what_is_logged_can_be_monitored() -> None:
    federation = run(linear_client(), small_data(), FedAvg(), rounds=2)
    logged = federation.trainer.callback_metrics
    for name, value in federation.history[-1].metrics.items():
        assert logged[name].item() == pytest.approx(value)
    assert "communication/total_bytes_up" in logged
    assert set(federation.trainer.progress_bar_metrics) == {"val/micro_acc", "val/macro_acc"}


@pytest.mark.short("*-sequential", "8-1-Local-vectorized")
@ENGINES
@pytest.mark.parametrize("callback", [FedAvg, Local])
@pytest.mark.parametrize(("width", "expected"), [(8, 1), (1_000, 2)])
def test_small_networks_are_evaluated_on_one_thread(width, expected, callback, engine) -> None:
    class Watches(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            threads.add(torch.get_num_threads())
            return super().forward(x)

    threads: set[int] = set()
    client = network_client(nn.Sequential(Watches(FEATURES, width), nn.Linear(width, CLASSES)))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        starts = LambdaCallback(on_test_epoch_start=lambda *_: threads.clear())
        data = TensorClients([samples(4, 0)] * 3, test=[samples(500, 1)] * 3, num_classes=CLASSES)
        federation = run(client, data, callback(), 1, starts, engine=engine)
        federation.trainer.test(federation, datamodule=data, verbose=False)
        assert threads == {expected}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)

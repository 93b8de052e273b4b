"""BlazeFL, with its FedAvg server and its trainer of one client after another.

Every client has a ``DataLoader`` over its samples, as in BlazeFL's own examples.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import torch
from blazefl.contrib import FedAvgBaseClientTrainer, FedAvgBaseServerHandler
from torch.utils.data import DataLoader, TensorDataset

from .networks import make_network, weights_of
from .workloads import Record, Task, Weights


class Name(StrEnum):
    """BlazeFL chooses networks by name."""

    NETWORK = "network"


class Networks:
    """Makes the network; BlazeFL's ``ModelSelector``."""

    def __init__(self, task: Task, record: Record) -> None:
        self.task, self.record = task, record

    def select_model(self, model_name: Name) -> torch.nn.Module:
        return make_network(self.task.workload, self.record)


class Partition:
    """Gives a client's samples; BlazeFL's ``PartitionedDataset``."""

    def __init__(self, task: Task) -> None:
        pairs = zip(map(torch.from_numpy, task.x), map(torch.from_numpy, task.y), strict=True)
        self.datasets = [TensorDataset(x, y) for x, y in pairs]

    def get_dataset(self, type_: Any, cid: int | None) -> TensorDataset:
        return self.datasets[cid or 0]

    def get_dataloader(
        self, type_: Any, cid: int | None, batch_size: int, generator: torch.Generator | None = None
    ) -> DataLoader[Any]:
        dataset = self.get_dataset(type_, cid)
        return DataLoader(dataset, batch_size=batch_size, shuffle=True, generator=generator)


def run(task: Task, rounds: int, record: Record) -> Weights:
    workload = task.workload
    networks, partition = Networks(task, record), Partition(task)
    server = FedAvgBaseServerHandler(
        model_selector=networks,
        model_name=Name.NETWORK,
        dataset=partition,
        global_round=rounds,
        num_clients=workload.clients,
        sample_ratio=workload.cohort / workload.clients,
        device="cpu",
        batch_size=workload.batch_size,
        seed=0,
    )
    trainer = FedAvgBaseClientTrainer(
        model_selector=networks,
        model_name=Name.NETWORK,
        dataset=partition,
        device="cpu",
        num_clients=workload.clients,
        epochs=1,
        batch_size=workload.batch_size,
        lr=workload.lr,
        seed=0,
    )
    for _ in range(rounds):
        trainer.local_process(server.downlink_package(), server.sample_clients())
        for package in trainer.uplink_package():
            server.load(package)
        record.end_round()
    return weights_of(server.model)

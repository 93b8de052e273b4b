"""Flower's simulation on Ray, with an actor of one thread for each core.

Clients are the user's own functions: here they are the raw loop. An actor reads the images once and
keeps them, so that none travel in a round.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn

from .networks import make_network, weights_of
from .workloads import Record, Task, Weights

client_app = ClientApp()


@cache
def _actor(name: str, folder: str) -> tuple[Task, nn.Module]:
    torch.set_num_threads(1)
    task = Task.load(name, Path(folder))
    return task, make_network(task.workload)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train one client on what the server sends."""
    config = message.content["config"]
    task, network = _actor(config["workload"], config["folder"])
    workload, client = task.workload, int(context.node_config["partition-id"])
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(network.parameters(), lr=workload.lr)
    x, y = torch.from_numpy(task.x[client]), torch.from_numpy(task.y[client])
    batches = torch.randperm(len(y)).split(workload.batch_size)
    for batch in batches:
        optimizer.zero_grad()
        F.cross_entropy(network(x[batch]), y[batch]).backward()
        optimizer.step()
    counts = MetricRecord({"num-examples": len(y), "steps": len(batches)})
    arrays = ArrayRecord(network.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": counts}), reply_to=message)


def run(task: Task, rounds: int, record: Record) -> Weights:
    workload, network = task.workload, make_network(task.workload)
    server_app = ServerApp()

    def count(replies: Sequence[RecordDict], weighted_by: str) -> MetricRecord:
        for reply in replies:
            metrics = reply["metrics"]
            record.count(metrics["num-examples"], metrics["steps"])
        return MetricRecord()

    def end_round(server_round: int, arrays: ArrayRecord) -> None:
        if server_round:  # before the first it is called with 0
            record.end_round()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=workload.cohort / workload.clients,
            fraction_evaluate=0.0,
            min_train_nodes=workload.cohort,
            min_available_nodes=workload.clients,
            train_metrics_aggr_fn=count,
        )
        result = strategy.start(
            grid,
            ArrayRecord(network.state_dict()),
            num_rounds=rounds,
            train_config=ConfigRecord({"workload": task.name, "folder": str(task.folder)}),
            evaluate_fn=end_round,
        )
        network.load_state_dict(result.arrays.to_torch_state_dict())

    run_simulation(
        server_app,
        client_app,
        num_supernodes=workload.clients,
        backend_config={
            "init_args": {"num_cpus": os.cpu_count(), "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    return weights_of(network)

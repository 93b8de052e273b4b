"""fluke, with its own server, clients and loader; clients forget their model after a round."""

from __future__ import annotations

import torch
from fluke import FlukeENV
from fluke.algorithms import CentralizedFL
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.server import Server
from fluke.utils import FederationObserver

from .networks import make_network, weights_of
from .workloads import Record, Task, Weights


class Ends(FederationObserver):
    """Records the end of every round."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def end_round(self, round: int) -> None:
        self.record.end_round()


def run(task: Task, rounds: int, record: Record) -> Weights:
    workload = task.workload
    environment = FlukeENV()
    environment.set_seed(0)
    environment.set_device("cpu")
    environment.set_eval_cfg(server=False)
    optimizer = OptimizerConfigurator({"name": "SGD", "lr": workload.lr})
    clients = [
        Client(
            index,
            FastDataLoader(x, y, num_labels=10, batch_size=workload.batch_size, shuffle=True),
            None,
            optimizer,
            torch.nn.CrossEntropyLoss(),
            local_epochs=1,
            persistency=False,
        )
        for index, (x, y) in enumerate(
            zip(map(torch.from_numpy, task.x), map(torch.from_numpy, task.y), strict=True)
        )
    ]
    network = make_network(workload, record)
    server = Server(network, None, clients, weighted=True)
    federation = CentralizedFL(workload.clients, None, {}, clients=clients, server=server)
    federation.set_callbacks(Ends(record))
    federation.finalize = lambda: None  # nothing to evaluate
    federation.run(rounds, workload.cohort / workload.clients)
    return weights_of(server.model)

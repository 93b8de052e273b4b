"""Flower's own FedAvg, as its quickstart has it, on handwritten digits; deployment.py runs it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

server, client = ServerApp(), ClientApp()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def samples(context: Context) -> tuple[TensorDataset, TensorDataset]:
    """Return a node's training and validation samples."""
    place, nodes = (int(context.node_config[name]) for name in ("place", "nodes"))
    digits = load_digits()
    x = torch.tensor(digits.data[place::nodes] / 16, dtype=torch.float)
    y = torch.tensor(digits.target[place::nodes])
    cut = len(y) // 10
    return TensorDataset(x[cut:], y[cut:]), TensorDataset(x[:cut], y[:cut])


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds, and write down when each of them ended."""
    nodes, rounds = (int(os.environ[name]) for name in ("FEDAVG_NODES", "FEDAVG_ROUNDS"))
    log = Path(os.environ["FEDAVG_LOG"])

    def ended(round: int, arrays: ArrayRecord) -> None:
        with log.open("a") as file:
            file.write(f"{time.time()}\n")

    everyone = {"min_train_nodes": nodes, "min_evaluate_nodes": nodes, "min_available_nodes": nodes}
    start = ArrayRecord(network().state_dict())
    FedAvg(**everyone).start(grid, start, num_rounds=rounds, evaluate_fn=ended)


def loaded(message: Message) -> nn.Module:
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return model


@client.train()
def train(message: Message, context: Context) -> Message:
    """Train for two epochs."""
    model, (own, _) = loaded(message), samples(context)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = torch.zeros(())
    for _ in range(2):
        for x, y in DataLoader(own, batch_size=10, shuffle=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    return answer(message, loss, len(own), ArrayRecord(model.state_dict()))


@client.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate on the validation samples."""
    model, (_, own) = loaded(message), samples(context)
    x, y = own.tensors
    with torch.no_grad():
        return answer(message, nn.functional.cross_entropy(model(x), y), len(own))


def answer(
    message: Message, loss: Tensor, count: int, arrays: ArrayRecord | None = None
) -> Message:
    metrics = MetricRecord({"loss": float(loss), "num-examples": count})
    content = RecordDict({"metrics": metrics} | ({} if arrays is None else {"arrays": arrays}))
    return Message(content=content, reply_to=message)

"""pflight, with each of its engines and on two ranks."""

from __future__ import annotations

import logging
import warnings
from functools import partial
from typing import Any, Literal

import lightning as L
import numpy as np
import torch

from pflight import Federation, keep_freed_memory
from pflight.callbacks import FedAvg
from pflight.datamodules import TensorClients
from pflight.models import Classifier

from .networks import make_network
from .workloads import Record, Task, Weights

Engine = Literal["auto", "sequential", "vectorized"]


class Ends(L.Callback):
    """Records the end of every round."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.record.end_round()


def make_federation(
    task: Task,
    engine: Engine = "auto",
    kind: type[Federation] = Federation,
) -> Federation:
    """Return a federation for a workload."""
    sgd = partial(torch.optim.SGD, lr=task.workload.lr)
    client = Classifier(make_network(task.workload), num_classes=10, optimizer=sgd)
    return kind(client, engine=engine)


def fit(
    federation: Federation,
    task: Task,
    rounds: int,
    record: Record,
    data_module: type[TensorClients] = TensorClients,
    **trainer: Any,
) -> None:
    """Train a federation under the stock Trainer, which writes nothing.

    Samples and steps are those of the clients that the federation says have answered.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    workload = task.workload
    pairs = list(zip(map(torch.from_numpy, task.x), map(torch.from_numpy, task.y), strict=True))
    data = data_module(
        pairs, num_classes=10, cohort_size=workload.cohort, batch_size=workload.batch_size
    )
    L.Trainer(
        max_epochs=rounds,
        callbacks=[FedAvg(), Ends(record)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"accelerator": "cpu", **trainer},
    ).fit(federation, datamodule=data)
    for entry in federation.history:
        answered = workload.sizes[sorted({*entry.clients} - {*entry.failed})]
        record.count(int(answered.sum()), int(np.ceil(answered / workload.batch_size).sum()))


def train(
    task: Task, rounds: int, record: Record, engine: Engine = "auto", **options: Any
) -> Weights:
    """Train with one of the engines; ``options`` are those of :func:`fit`."""
    keep_freed_memory()
    federation = make_federation(task, engine)
    fit(federation, task, rounds, record, **options)
    return [tensor.cpu().numpy() for tensor in federation.server_states()[0].values()]


auto = partial(train, engine="auto")
sequential = partial(train, engine="sequential")
vectorized = partial(train, engine="vectorized")


def two_ranks(task: Task, rounds: int, record: Record) -> Weights:
    """Train on two processes of one thread each."""
    torch.set_num_threads(1)
    weights = train(task, rounds, record, strategy="ddp", devices=2)
    torch.distributed.destroy_process_group()  # Lightning leaves gloo's threads running
    return weights

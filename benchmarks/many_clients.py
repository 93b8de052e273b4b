"""What very many clients cost: to build their data, to train some, and to evaluate all.

    python benchmarks/many_clients.py [--clients 100000] [--samples 5] [--features 60]

FedAvg of a logistic regression, 100 clients a round; every client has so many samples to train on
and as many to validate. *Dealt* is one data set of as many samples, dealt to them by a partition.
CPU time is that of all threads.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import lightning as L
import torch
from options import at_least
from quiet import quiet
from torch import Tensor

from pflight import Federation
from pflight.callbacks import FedAvg
from pflight.datamodules import (
    IID,
    FederatedDataModule,
    PartitionedDataModule,
    Samples,
    TensorClients,
)
from pflight.models import Classifier, LogisticRegression

CLASSES, COHORT, ROUNDS = 10, 100, 10


class Dealt(PartitionedDataModule):
    """Random samples, dealt to clients at random."""

    def __init__(self, clients: int, samples: int, features: int) -> None:
        super().__init__(
            partition=IID(),
            num_clients=clients,
            num_classes=CLASSES,
            val_fraction=0.5,
            test_fraction=0.0,
            cohort_size=min(COHORT, clients),
        )
        self.size = 2 * clients * samples, features

    def load(self) -> Samples:
        """Draw the samples."""
        random = torch.Generator().manual_seed(0)
        return Samples(torch.randn(self.size, generator=random), torch.arange(self.size[0]) % 10)


def pairs(clients: int, samples: int, features: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Draw the samples of clients, tensors of their own each."""
    random = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(samples, features, generator=random),
            torch.randint(CLASSES, (samples,), generator=random),
        )
        for _ in range(clients)
    ]


def tensors(clients: int, samples: int, features: int) -> Callable[[], FederatedDataModule]:
    """Return what builds a data module of tensors, which are there already."""
    train, val = (pairs(clients, samples, features, seed) for seed in (0, 1))
    sizes = {"num_classes": CLASSES, "cohort_size": min(COHORT, clients)}
    return lambda: TensorClients(train, val=val, **sizes)


def dealt(clients: int, samples: int, features: int) -> Callable[[], FederatedDataModule]:
    """Return what deals one data set to clients."""

    def build() -> FederatedDataModule:
        data = Dealt(clients, samples, features)
        data.setup()
        return data

    return build


@contextmanager
def measured(row: list[str]) -> Iterator[None]:
    """Add the seconds that something takes, and those of the processor, to a row of the table."""
    wall, processor = time.perf_counter(), time.process_time()
    yield
    taken = time.perf_counter() - wall, time.process_time() - processor
    row.append(f"{taken[0]:.2f} ({taken[1]:.2f})")


def costs(build: Callable[[], FederatedDataModule], features: int) -> list[str]:
    """Return the cells of a row."""
    row: list[str] = []
    with measured(row):
        data = build()
    sgd = partial(torch.optim.SGD, lr=0.01)

    def federation() -> Federation:
        return Federation(Classifier(LogisticRegression(features, CLASSES), CLASSES, sgd))

    def trainer(rounds: int) -> L.Trainer:
        return L.Trainer(
            max_epochs=rounds,
            accelerator="cpu",
            callbacks=[FedAvg()],
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    trained, fitter = federation(), trainer(ROUNDS)
    with measured(row):
        fitter.fit(trained, datamodule=data)
    judge = trainer(ROUNDS)
    judge.limit_val_batches = 1.0
    with measured(row):
        judge.validate(trained, datamodule=data, verbose=False)
    with measured(row):
        data.summary()
    with TemporaryDirectory() as folder:
        path = Path(folder, "one.ckpt")
        with measured(row):
            fitter.save_checkpoint(path)
        with measured(row):
            trainer(ROUNDS + 1).fit(federation(), datamodule=data, ckpt_path=path)
        row.append(f"{path.stat().st_size / 1e6:.1f}")
    return row


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=at_least(1), default=100_000)
    parser.add_argument("--samples", type=at_least(1), default=5)
    parser.add_argument("--features", type=at_least(1), default=60)
    options = parser.parse_args()
    quiet()
    columns = f"built | {ROUNDS} rounds | validated | described | saved | resumed | checkpoint, MB"
    print(f"| {options.clients:,} clients | {columns} |")
    print("|" + "---|" * 8)
    for name, kind in (("tensors of their own", tensors), ("dealt", dealt)):
        build = kind(options.clients, options.samples, options.features)
        print(f"| {name} | {' | '.join(costs(build, options.features))} |", flush=True)


if __name__ == "__main__":
    main()

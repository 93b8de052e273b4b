"""What a round costs late in a long run, and early: time, memory, and the bytes of a checkpoint.

    python benchmarks/growth.py [--rounds 10000] [--folder FOLDER]

FeSEM(4) on 100 clients, ten a round, with evaluation, TensorBoard and a checkpoint in every round.
Times are the medians of the 100 rounds up to each that is named, from the start of one to the start
of the next; saving is part of them, and is measured alone as well. Resident memory is what the
operating system reports; garbage is collected first.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from dataclasses import astuple, dataclass
from functools import partial
from itertools import pairwise
from operator import sub
from pathlib import Path
from tempfile import TemporaryDirectory

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from options import at_least
from quiet import quiet

from pflight import Federation
from pflight.callbacks import FeSEM
from pflight.datamodules import TensorClients
from pflight.models import MLP, ProximalClient

MARKS = 100, 200, 500, 1000, 2000, 5000
WINDOW = 100  # rounds of which the medians are taken


@dataclass(frozen=True)
class Cost:
    """What rounds cost."""

    milliseconds: float
    processor: float
    saving: float
    kilobytes: float
    mebibytes: float


class TimedCheckpoint(ModelCheckpoint):
    """Saves after every round, and notes how long that takes the processor, in ms."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder, save_on_train_epoch_end=True, enable_version_counter=False)
        self.saving: list[float] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        started = time.process_time()
        super().on_train_epoch_end(trainer, pl_module)
        self.saving.append(1000 * (time.process_time() - started))


class Costs(L.Callback):
    """Notes what rounds cost, by the number of rounds."""

    def __init__(self, rounds: list[int], checkpoints: TimedCheckpoint) -> None:
        self.rounds = rounds
        self.checkpoints = checkpoints
        self.starts: list[tuple[float, float]] = []
        self.costs: dict[int, Cost] = {}

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.starts.append((time.perf_counter(), time.process_time()))
        if trainer.current_epoch in self.rounds:
            self.note(trainer.current_epoch)
            self.starts[-1] = time.perf_counter(), time.process_time()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.starts.append((time.perf_counter(), time.process_time()))
        self.note(trainer.current_epoch)

    def note(self, done: int) -> None:
        """Note what the last rounds cost."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        times = zip(*(map(sub, b, a) for a, b in pairwise(self.starts[-WINDOW - 1 :])), strict=True)
        self.costs[done] = Cost(
            *(1000 * statistics.median(seconds) for seconds in times),
            statistics.median(self.checkpoints.saving[-WINDOW:]),
            Path(self.checkpoints.best_model_path).stat().st_size / 1000,
            pages * 4096 / 2**20,
        )


def run(rounds: int, folder: str) -> dict[int, Cost]:
    """Train and return what rounds cost, by the number of rounds."""
    random = torch.Generator().manual_seed(0)

    def clients(samples: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            (torch.randn(samples, 64, generator=random), torch.arange(samples) % 10)
            for _ in range(100)
        ]

    data = TensorClients(
        clients(20),
        test=clients(10),
        val=clients(10),
        num_classes=10,
        batch_size=10,
        cohort_size=10,
    )
    sgd = partial(torch.optim.SGD, lr=0.01)
    federation = Federation(ProximalClient(MLP(64, [64], 10), 10, optimizer=sgd, scaling="eq7"))
    checkpoints = TimedCheckpoint(folder)
    costs = Costs([count for count in MARKS if count < rounds], checkpoints)
    trainer = L.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        callbacks=[
            FeSEM(4, init_clients=10),
            costs,
            checkpoints,
        ],
        logger=TensorBoardLogger(folder, default_hp_metric=False),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(federation, datamodule=data)
    return costs.costs


def main() -> None:
    """Print a table, and how the last row compares with the first."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=at_least(WINDOW + 1), default=10_000)
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    options = parser.parse_args()
    quiet()
    with TemporaryDirectory(dir=options.folder) as folder:
        costs = run(options.rounds, folder)
    print("| rounds | ms a round | CPU, ms | of which saving | checkpoint, kB | memory, MiB |")
    print("|---|---|---|---|---|---|")
    for rounds, cost in costs.items():
        print(f"| {rounds:,} | {' | '.join(f'{value:.1f}' for value in astuple(cost))} |")
    (first, early), *_, (last, late) = costs.items()
    ratio = late.processor / early.processor
    print(f"\nA round takes {ratio:.2f} times as much of the processor after {last:,} as {first}")


if __name__ == "__main__":
    main()

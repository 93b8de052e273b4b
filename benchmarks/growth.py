"""How much memory a long run takes beyond its first rounds.

    python benchmarks/growth.py [--rounds 1000] [--folder FOLDER]

FeSEM(4) on 100 clients, ten a round, with evaluation, TensorBoard and a checkpoint in every round.
Resident memory is what the operating system reports after a round; garbage is collected first.
"""

from __future__ import annotations

import argparse
import gc
import logging
import warnings
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from options import at_least

from pflight import Federation
from pflight.callbacks import FeSEM
from pflight.datamodules import TensorClients
from pflight.models import MLP, ProximalClient

FIRST = 50  # rounds in which caches fill


class ResidentMemory(L.Callback):
    """Notes the resident memory, in MiB, after every ``every`` rounds."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.mebibytes: dict[int, float] = {}

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        done = trainer.current_epoch + 1
        if done % self.every == 0:
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.mebibytes[done] = pages * 4096 / 2**20


def run(rounds: int, folder: str) -> dict[int, float]:
    """Train and return the resident memory by round."""
    random = torch.Generator().manual_seed(0)

    def clients(samples: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            (torch.randn(samples, 64, generator=random), torch.arange(samples) % 10)
            for _ in range(100)
        ]

    data = TensorClients(
        clients(20), clients(10), clients(10), num_classes=10, batch_size=10, cohort_size=10
    )
    sgd = partial(torch.optim.SGD, lr=0.01)
    federation = Federation(ProximalClient(MLP(64, [64], 10), 10, optimizer=sgd, scaling="eq7"))
    memory = ResidentMemory(FIRST)
    trainer = L.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        callbacks=[
            FeSEM(4, init_clients=10),
            memory,
            ModelCheckpoint(folder, save_on_train_epoch_end=True, enable_version_counter=False),
        ],
        logger=TensorBoardLogger(folder, default_hp_metric=False),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(federation, datamodule=data)
    return memory.mebibytes


def main() -> None:
    """Print the resident memory by round, and what was added after the first rounds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=at_least(2 * FIRST), default=1000)
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    with TemporaryDirectory(dir=options.folder) as folder:
        mebibytes = run(options.rounds, folder)
    print("| rounds | resident memory, MiB |")
    print("|---|---|")
    for rounds, size in mebibytes.items():
        print(f"| {rounds} | {size:.1f} |")
    print(f"\n{max(mebibytes.values()) - mebibytes[FIRST]:.1f} MiB more than after {FIRST} rounds")


if __name__ == "__main__":
    main()

"""Peak memory against the number of clients, for the same number of samples in all.

    python benchmarks/memory.py [--clients 30 3000 10000] [--rounds 3] [--folder FOLDER]

FeSEM(4) with an MLP 784-200-10 and full participation, client memory on disk, and a checkpoint
every ten rounds and after the last. Every run is a process of its own; its peak is what the
operating system counted beyond the interpreter with all its imports. 180 MiB of it are the 60,000
samples.
"""

from __future__ import annotations

import argparse
import logging
import resource
import subprocess
import sys
import time
import warnings
from functools import partial
from tempfile import TemporaryDirectory

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from pflight import Federation
from pflight.callbacks import FeSEM
from pflight.datamodules import TensorClients
from pflight.models import MLP, ProximalClient

SAMPLES = 60_000


def peak() -> float:
    """Return the most memory so far that this process had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(clients: int, rounds: int, folder: str) -> None:
    """Train once and print a row of the table."""
    interpreter = peak()
    random = torch.Generator().manual_seed(0)
    shape = (SAMPLES // clients, 784)
    train = [
        (torch.randn(shape, generator=random), torch.randint(10, shape[:1], generator=random))
        for _ in range(clients)
    ]
    data = TensorClients(train, num_classes=10, batch_size=20)
    sgd = partial(torch.optim.SGD, lr=0.01)
    client = ProximalClient(MLP(784, [200], 10), 10, optimizer=sgd, scaling="eq7")
    federation = Federation(client, client_memory="disk")
    checkpoint = ModelCheckpoint(folder, every_n_epochs=10, save_last=True)
    trainer = L.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        callbacks=[FeSEM(4), checkpoint],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    started = time.perf_counter()
    trainer.fit(federation, datamodule=data)
    seconds = (time.perf_counter() - started) / rounds
    print(
        f"| {clients} | {SAMPLES // clients} | {peak() - interpreter:.0f} | {interpreter:.0f} "
        f"| {seconds:.1f} |",
        flush=True,
    )


def main() -> None:
    """Print a row for each number of clients."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[30, 3000, 10_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    parser.add_argument("--single", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if options.single:
        run(options.clients[0], options.rounds, options.folder)
        return
    print("| clients | samples each | peak memory, MiB | interpreter, MiB | s per round |")
    print("|---|---|---|---|---|", flush=True)
    for clients in options.clients:
        with TemporaryDirectory(dir=options.folder) as folder:
            arguments = ["--single", "--clients", str(clients), "--rounds", str(options.rounds)]
            arguments += ["--folder", folder]
            subprocess.run([sys.executable, __file__, *arguments], check=True)


if __name__ == "__main__":
    main()

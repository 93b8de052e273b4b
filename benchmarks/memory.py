"""Peak memory against the number of clients, for the same number of samples in all.

    python benchmarks/memory.py [--clients 30 3000] [--rounds 3]

FeSEM(4) with an MLP 784-200-10 and full participation. Every run is a process of its own; its peak
is what the operating system counted, and includes the interpreter and the 60,000 samples.
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

import lightning as L
import torch

from pflight import Federation
from pflight.callbacks import FeSEM
from pflight.datamodules import TensorClients
from pflight.models import MLP, ProximalClient

SAMPLES = 60_000


def run(clients: int, rounds: int) -> None:
    """Train once and print a row of the table."""
    random = torch.Generator().manual_seed(0)
    shape = (SAMPLES // clients, 784)
    train = [
        (torch.randn(shape, generator=random), torch.randint(10, shape[:1], generator=random))
        for _ in range(clients)
    ]
    data = TensorClients(train, num_classes=10, batch_size=20)
    sgd = partial(torch.optim.SGD, lr=0.01)
    federation = Federation(ProximalClient(MLP(784, [200], 10), 10, optimizer=sgd, scaling="eq7"))
    trainer = L.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        callbacks=[FeSEM(4)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    started = time.perf_counter()
    trainer.fit(federation, datamodule=data)
    seconds = (time.perf_counter() - started) / rounds
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"| {clients} | {SAMPLES // clients} | {peak:.0f} | {seconds:.1f} |", flush=True)


def main() -> None:
    """Print a row for each number of clients."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[30, 3000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--single", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if options.single:
        run(options.clients[0], options.rounds)
        return
    print("| clients | samples each | peak memory, MiB | s per round |")
    print("|---|---|---|---|", flush=True)
    for clients in options.clients:
        arguments = ["--single", "--clients", str(clients), "--rounds", str(options.rounds)]
        subprocess.run([sys.executable, __file__, *arguments], check=True)


if __name__ == "__main__":
    main()

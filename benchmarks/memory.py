"""Peak memory against the number of clients, for the same number of samples in all.

    python benchmarks/memory.py [--clients 30 3000 10000] [--rounds 3] [--folder FOLDER]
    python benchmarks/memory.py --method fedec --client_memory ram disk --clients 10000

FeSEM(4), or FedEC, whose clients keep a model each, with an MLP 784-200-10 and full participation,
and a checkpoint every ten rounds. Every run is a process of its own; its peak is what the operating
system counted beyond the interpreter with all its imports. 180 MiB of it are the 60,000 samples.
The seconds are those of the median round, the first left out, without checkpoints.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from options import at_least
from quiet import quiet
from stopwatch import Stopwatch

from pflight import Federation, keep_freed_memory
from pflight.callbacks import FeSEM, Reptile
from pflight.datamodules import TensorClients
from pflight.models import MLP, ElasticClient, ProximalClient

SAMPLES = 60_000
METHODS = {
    "fesem": (partial(FeSEM, 4), partial(ProximalClient, scaling="eq7")),
    "fedec": (Reptile, ElasticClient),
}


def peak() -> float:
    """Return the most memory so far that this process had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(
    method: str,
    client_memory: Literal["ram", "disk"],
    clients: int,
    rounds: int,
    samples: int = SAMPLES,
) -> None:
    """Train once in the working folder, and print a row of the table."""
    interpreter = peak()
    random = torch.Generator().manual_seed(0)
    shape = (samples // clients, 784)
    train = [
        (torch.randn(shape, generator=random), torch.randint(10, shape[:1], generator=random))
        for _ in range(clients)
    ]
    data = TensorClients(train, num_classes=10, batch_size=20)
    server, client = METHODS[method]
    sgd = partial(torch.optim.SGD, lr=0.01)
    federation = Federation(
        client(MLP(784, [200], 10), 10, optimizer=sgd), client_memory=client_memory
    )
    stopwatch = Stopwatch()
    trainer = L.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        callbacks=[server(), stopwatch, ModelCheckpoint(every_n_epochs=10)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(federation, datamodule=data)
    print(
        f"| {method}, {client_memory} | {clients} | {samples // clients} "
        f"| {peak() - interpreter:.0f} | {interpreter:.0f} "
        f"| {statistics.median(stopwatch.seconds[1:]):.1f} |",
        flush=True,
    )


def main() -> None:
    """Print a row for each number of clients."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--method", choices=METHODS, default="fesem")
    parser.add_argument("--client_memory", nargs="+", choices=["ram", "disk"], default=["disk"])
    parser.add_argument("--clients", type=at_least(1), nargs="+", default=[30, 3000, 10_000])
    parser.add_argument("--rounds", type=at_least(2), default=3)
    parser.add_argument("--samples", type=at_least(1), default=SAMPLES, help="of all clients")
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    parser.add_argument("--single", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    keep_freed_memory()
    quiet()
    if options.single:
        run(
            options.method,
            options.client_memory[0],
            options.clients[0],
            options.rounds,
            options.samples,
        )
        return
    print("| kept | clients | samples each | peak memory, MiB | interpreter, MiB | s per round |")
    print("|---|---|---|---|---|---|", flush=True)
    for kind, clients in product(options.client_memory, options.clients):
        with TemporaryDirectory(dir=options.folder) as folder:
            arguments = ["--single", "--method", options.method, "--client_memory", kind]
            arguments += ["--clients", str(clients), "--rounds", str(options.rounds)]
            arguments += ["--samples", str(options.samples)]
            script = Path(__file__).resolve()
            subprocess.run([sys.executable, script, *arguments], check=True, cwd=folder)


if __name__ == "__main__":
    main()

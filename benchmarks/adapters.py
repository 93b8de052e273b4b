"""What adapters cost: time beside a plain loop with peft, memory of many clients, and checkpoints.

    python benchmarks/adapters.py [--rounds 3] [--repeats 3] [--threads 2] [--clients 100]

The loop and pflight train the same adapters of a GPT-2 on the same batches, in turn, in one
process. Both engines are compared with the loop. Then processes of their own train one client and
many, and print their peak memory and the size of the last checkpoint.
"""

from __future__ import annotations

import argparse
import copy
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import lightning as L
import torch
import torch.nn.functional as F
from options import at_least
from quiet import quiet
from stopwatch import Stopwatch
from torch import Tensor

from pflight import Federation, keep_freed_memory
from pflight.callbacks import FedAvg
from pflight.datamodules import TensorClients
from pflight.models import CausalTransformer, LanguageModel, LoRA

VOCABULARY, LENGTH, SEQUENCES, BATCH = 97, 64, 32, 8
ENGINES = ("sequential", "vectorized")


def network(width: int, layers: int) -> LoRA:
    """Return a GPT-2 with adapters, the same at every call."""
    torch.manual_seed(0)
    return LoRA(
        CausalTransformer(VOCABULARY, LENGTH, width, layers, heads=4),
        targets=["c_attn", "c_fc"],
        rank=4,
        alpha=8,
    )


def data_of(clients: int) -> TensorClients:
    """Return clients of random text."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (clients, SEQUENCES, LENGTH + 1), generator=random)
    pairs = [(own[:, :-1], own[:, 1:]) for own in ids]
    return TensorClients(pairs, num_classes=None, batch_size=BATCH)


def trained(
    model: LoRA, data: TensorClients, rounds: int, engine: str, folder: str | None = None
) -> tuple[list[float], Federation]:
    """Return the seconds of each round, and the federation."""
    client = LanguageModel(model, optimizer=partial(torch.optim.SGD, lr=0.01))
    federation, stopwatch = Federation(client, engine=engine), Stopwatch()
    trainer = L.Trainer(
        default_root_dir=folder,
        max_epochs=rounds,
        accelerator="cpu",
        callbacks=[FedAvg(), stopwatch],
        logger=False,
        enable_checkpointing=folder is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(federation, datamodule=data)
    return stopwatch.seconds, federation


def loop(
    model: LoRA, data: TensorClients, clients: int, rounds: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Do the same by hand, and return the seconds of each round and the server's adapters."""
    model = copy.deepcopy(model).train()
    adapters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    server = {name: value.detach().clone() for name, value in adapters.items()}
    seconds = []
    for round_index in range(rounds):
        started = time.perf_counter()
        total = {name: torch.zeros_like(value) for name, value in server.items()}
        for client in range(clients):
            x, y = data.samples(client, "train")
            with torch.no_grad():
                for name, value in adapters.items():
                    value.copy_(server[name])
            optimizer = torch.optim.SGD(adapters.values(), lr=0.01)
            for batch in data.order(client, round_index, 0).split(BATCH):
                optimizer.zero_grad()
                F.cross_entropy(model(x[batch]).flatten(0, 1), y[batch].flatten()).backward()
                optimizer.step()
            for name, value in adapters.items():
                total[name] += value.detach() / clients
        server = total
        seconds.append(time.perf_counter() - started)
    return seconds, server


def ratios(options: argparse.Namespace) -> Iterator[str]:
    """Yield a row for each engine: seconds of both, their ratio, and how far adapters differ."""
    clients, model = 10, network(64, 2)
    data = data_of(clients)
    for engine in ENGINES:
        theirs = loop(model, data, clients, 2)[1]
        ours = trained(model, data, 2, engine)[1].server_states()[0]
        far = max((ours[f"network.{name}"] - theirs[name]).abs().max().item() for name in theirs)
        pairs = [
            (
                statistics.median(loop(model, data, clients, options.rounds)[0]),
                statistics.median(trained(model, data, options.rounds, engine)[0]),
            )
            for _ in range(options.repeats)
        ]
        raw, mine = (statistics.median(column) for column in zip(*pairs, strict=True))
        of_pairs = sorted(ours / theirs for theirs, ours in pairs)
        yield (
            f"| {engine} | {raw:.3f} | {mine:.3f} | {statistics.median(of_pairs):.3f} "
            f"({of_pairs[0]:.3f} to {of_pairs[-1]:.3f}) | to {far:.0e} |"
        )


def measure(clients: int) -> None:
    """Train a larger model in this process, and print its memory and its checkpoint in MB."""
    model = network(384, 8)
    adapters = sum(p.nbytes for p in model.parameters() if p.requires_grad) / 1e6
    with TemporaryDirectory() as folder:
        trained(model, data_of(clients), 1, "sequential", folder)
        (checkpoint,) = Path(folder).rglob("*.ckpt")
        size = os.path.getsize(checkpoint) / 1e6
    base = sum(p.nbytes for p in model.parameters()) / 1e6 - adapters
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"| {clients} | {base:.1f} | {adapters:.2f} | {peak:.0f} | {size:.2f} |")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--repeats", type=at_least(1), default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clients", type=at_least(2), default=100)
    parser.add_argument("--measure", type=at_least(1), help=argparse.SUPPRESS)
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    quiet()
    if options.measure:
        measure(options.measure)
        return
    print("| engine | loop, s a round | pflight, s a round | ratio (min to max) | same adapters |")
    print("|---|---|---|---|---|")
    for row in ratios(options):
        print(row, flush=True)
    print("\n| clients | base, MB | adapters, MB | peak memory, MB | checkpoint, MB |")
    print("|---|---|---|---|---|", flush=True)
    for clients in (1, options.clients):
        command = [sys.executable, __file__, "--measure", str(clients)]
        subprocess.run([*command, "--threads", str(options.threads)], check=True)


if __name__ == "__main__":
    main()

"""What images cost that are read from folders when they are needed: time and memory.

    python benchmarks/lazy_data.py time [--rounds 5] [--side 64]
    python benchmarks/lazy_data.py memory [--images 5000 50000] [--folder FOLDER]

JPEGs of noise lie in a folder for each client. *time* trains a small network on them for a local
epoch, in turn with pflight and with a hand-written loop over one DataLoader for all clients, and
compares the processor's time, that of the readers included. *memory* trains in a process of its
own and tells how much that and its readers held at most, beyond the interpreter with its imports.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from options import at_least
from PIL import Image
from quiet import quiet
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Sampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from pflight import Federation
from pflight.callbacks import FedAvg
from pflight.datamodules import DatasetClients

CLASSES = 10
TICK = 1 / os.sysconf("SC_CLK_TCK")


class Classifier(L.LightningModule):
    """A network of two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            *(nn.Conv2d(3, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 32, 5, 2), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, CLASSES)),
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.network(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def draw(root: Path, images: int, clients: int, side: int) -> None:
    """Write the clients' images."""
    random = np.random.default_rng(0)
    for number in range(images):
        folder = root / f"{number % clients:05}" / str(number // clients % CLASSES)
        folder.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(256, size=(side, side, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.jpeg")


def read(root: Path) -> list[ImageFolder]:
    """Return the images of each client, which are not read yet."""
    change = [v2.ToImage(), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)]
    return [ImageFolder(client, v2.Compose(change)) for client in sorted(root.iterdir())]


def train(data: DatasetClients, rounds: int, *callbacks: L.Callback) -> None:
    """Train a federation."""
    trainer = L.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        callbacks=[FedAvg(), *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Federation(Classifier()), datamodule=data)


# Time


class ClientBatches(Sampler[list[int]]):
    """Batches of one client after the other, shuffled, of datasets that are put in a row."""

    def __init__(self, sizes: list[int], batch_size: int) -> None:
        self.sizes = sizes
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        first = 0
        for size in self.sizes:
            for part in (first + torch.randperm(size)).split(self.batch_size):
                yield part.tolist()
            first += size


def loop(datasets: list[ImageFolder], batch_size: int, num_workers: int) -> Callable[[], None]:
    """Return a function that trains for a round without a library."""
    loader = DataLoader(
        ConcatDataset(datasets),
        batch_sampler=ClientBatches([len(dataset) for dataset in datasets], batch_size),
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )
    module = Classifier()

    def a_round() -> None:
        batches = iter(loader)
        start = {name: value.clone() for name, value in module.state_dict().items()}
        total = {name: torch.zeros_like(value) for name, value in start.items()}
        for dataset in datasets:
            module.load_state_dict(start)
            optimizer = module.configure_optimizers()
            for _ in range(-(-len(dataset) // batch_size)):
                optimizer.zero_grad()
                module.training_step(next(batches), 0).backward()
                optimizer.step()
            for name, value in module.state_dict().items():
                total[name] += value / len(datasets)
        module.load_state_dict(total)
        next(batches, None)

    return a_round


def processor_time() -> float:
    """Return the seconds that this process and its children have computed so far."""
    seconds = time.process_time()
    for child in multiprocessing.active_children():
        with suppress(FileNotFoundError):
            fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
            seconds += (int(fields[11]) + int(fields[12])) * TICK
    return seconds


class InTurn(L.Callback):
    """Has something else done before each round, and notes what both take."""

    def __init__(self, other: Callable[[], None]) -> None:
        self.other = other
        self.seconds: list[tuple[float, float]] = []

    def on_train_epoch_start(self, *_: object) -> None:
        begun = processor_time()
        self.other()
        self.between = processor_time()
        self.theirs = self.between - begun

    def on_train_epoch_end(self, *_: object) -> None:
        self.seconds.append((self.theirs, processor_time() - self.between))


def compare(root: Path, rounds: int, batch_size: int, num_workers: int) -> None:
    """Print a row of the table of times."""
    datasets = read(root)
    in_turn = InTurn(loop(datasets, batch_size, num_workers))
    data = DatasetClients(datasets, batch_size=batch_size, num_workers=num_workers)
    train(data, rounds + 1, in_turn)
    pairs = in_turn.seconds[1:]
    ratios = sorted(ours / theirs for theirs, ours in pairs)
    theirs, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(
        f"| {num_workers} | {batch_size} | {theirs:.3f} | {ours:.3f} "
        f"| {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}) |",
        flush=True,
    )


# Memory


def memory(process: int | None, field: str) -> float:
    """Return what ``/proc`` knows of the memory of a process, in MiB; 0 for one that has ended."""
    with suppress(OSError):
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        sizes = [line.split()[1] for line in lines if line.startswith(field)]
        return sum(map(int, sizes)) / 1024
    return 0.0


def peak_of(root: Path, rounds: int, batch_size: int, num_workers: int) -> None:
    """Train, and print a row of the table of memory."""
    Classifier().configure_optimizers()  # which imports more of PyTorch
    imports = memory(os.getpid(), "Rss")
    held, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            readers = multiprocessing.active_children()
            held.append(sum(memory(reader.pid, "Private_") for reader in readers))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        data = DatasetClients(read(root), batch_size=batch_size, num_workers=num_workers)
        train(data, rounds)
    finally:
        done.set()
        watcher.join()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - imports
    images = int(data.num_samples("train").sum())
    print(
        f"| {images:,} | {data.num_clients} | {num_workers} | {peak:.0f} | {max(held):.0f} "
        f"| {imports:.0f} |",
        flush=True,
    )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tables", nargs="+", choices=["time", "memory"])
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--side", type=at_least(8), default=64, help="pixels of an image's side")
    parser.add_argument("--images", type=at_least(1), nargs="+", default=[5000, 50_000])
    parser.add_argument("--num_workers", type=at_least(0), nargs="+", default=[0, 2])
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    parser.add_argument("--single", help=argparse.SUPPRESS)
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    if options.single:
        peak_of(Path(options.single), options.rounds, 32, options.num_workers[0])
        return
    if "time" in options.tables:
        print("| readers | batch | loop, s a round | pflight, s a round | ratio (min to max) |")
        print("|---|---|---|---|---|", flush=True)
        with TemporaryDirectory(dir=options.folder) as folder:
            draw(Path(folder), images=1000, clients=10, side=options.side)
            for num_workers in options.num_workers:
                for batch_size in (10, 32):
                    compare(Path(folder), options.rounds, batch_size, num_workers)
    if "memory" in options.tables:
        print("| images | clients | readers | peak, MiB | of readers, MiB | imports, MiB |")
        print("|---|---|---|---|---|---|", flush=True)
        for images in options.images:
            with TemporaryDirectory(dir=options.folder) as folder:
                draw(Path(folder), images, clients=max(1, images // 100), side=32)
                for num_workers in options.num_workers:
                    script = [sys.executable, Path(__file__).resolve(), "memory"]
                    arguments = ["--single", folder, "--rounds", str(min(options.rounds, 3))]
                    arguments += ["--num_workers", str(num_workers)]
                    subprocess.run([*script, *arguments], check=True)


if __name__ == "__main__":
    main()

"""What LEAF's FEMNIST costs: parsing its JSON once, then opening the cache and reading clients.

    python benchmarks/leaf.py [--writers 20 200] [--samples 227]

The files are generated, 100 writers in each, as LEAF writes them: a full-size FEMNIST is
``--writers 3550`` (6 GB of JSON and 2.5 GB of cache in the folder for temporary files). Every step
is a process of its own; its memory is the peak above what the imported libraries take.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from quiet import quiet

from pflight.datamodules import LeafFEMNIST

STEPS = ("parse", "open", "use")
USED_CLIENTS = 10


def generate(root: Path, writers: int, samples: int) -> None:
    """Write LEAF's files; the images are drawn from 500, whose text is made once."""
    random = np.random.default_rng(0)
    ink = random.random((500, 784)) < 0.25
    images = np.where(ink, random.integers(0, 255, ink.shape) / 255, 1.0)
    texts = [json.dumps(image) for image in images.tolist()]
    (root / "all_data").mkdir(parents=True)
    for number, first in enumerate(range(0, writers, 100)):
        users = [f"f{writer:04}" for writer in range(first, min(first + 100, writers))]
        with (root / "all_data" / f"all_data_{number}.json").open("w") as file:
            counts = [samples] * len(users)
            file.write(f'{{"users": {json.dumps(users)}, "num_samples": {counts}, "user_data": {{')
            for user in users:
                x = ", ".join(texts[i] for i in random.integers(len(texts), size=samples))
                y = random.integers(62, size=samples).tolist()
                file.write(", " if user != users[0] else "")
                file.write(f'"{user}": {{"x": [{x}], "y": {y}}}')
            file.write("}}")


def resident(peak: bool = False) -> float:
    """Return this process's memory in MiB, now or at its peak."""
    name = "VmHWM:" if peak else "VmRSS:"
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index(name) + 1]) / 1024


def run(step: str, root: str) -> None:
    """Do one step and print its seconds and its memory in MiB."""
    data = LeafFEMNIST(root, download=False)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before, started = resident(), time.perf_counter()
    if step == "parse":
        data.prepare_data()
    else:
        data.setup()
    if step == "use":
        for client in range(USED_CLIENTS):
            data.samples(client, "train")
    seconds = time.perf_counter() - started
    print(seconds, resident(peak=True) - before)


def size(folder: Path) -> float:
    """Return the size of all files in a folder in MB."""
    return sum(path.stat().st_size for path in folder.rglob("*")) / 1e6


def main() -> None:
    """Print a row for each number of writers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--writers", type=int, nargs="+", default=[20, 200])
    parser.add_argument("--samples", type=int, default=227)
    parser.add_argument("--step", nargs=2, metavar=("STEP", "ROOT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    quiet()
    if options.step:
        run(*options.step)
        return
    print(
        "| writers | samples | JSON, MB | parsing, MB/s | its memory, MiB | cache, MB | opening, s "
        f"| its memory, MiB | with {USED_CLIENTS} clients read, MiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for writers in options.writers:
        with tempfile.TemporaryDirectory() as root:
            generate(Path(root), writers, options.samples)
            figures = []
            for step in STEPS:
                arguments = [sys.executable, __file__, "--step", step, root]
                output = subprocess.run(arguments, check=True, capture_output=True, text=True)
                figures.append([float(figure) for figure in output.stdout.split()])
            (parsing, built), (opening, opened), (_, used) = figures
            text, cache = size(Path(root, "all_data")), size(Path(root, "cache"))
            print(
                f"| {writers} | {writers * options.samples:,} | {text:.0f} | {text / parsing:.0f} "
                f"| {built:.0f} | {cache:.0f} | {opening:.2f} | {opened:.0f} | {used:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

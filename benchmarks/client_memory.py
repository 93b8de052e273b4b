"""Client memory in RAM and on disk: peak memory, speed, and the checkpoint.

    python benchmarks/client_memory.py [--clients 10000] [--folder FOLDER]

Every client keeps an MLP 784-200-10, 0.64 MB. All clients are written, saved and read once, in
chunks as large as a round's. Each row is a process of its own; its peak is what the operating
system counted, and includes the interpreter. ``resumed`` is the time until a checkpoint is loaded.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import lightning as L
import torch
from options import at_least
from tensordict import TensorDict

from pflight.models import MLP
from pflight.runs.checkpoint import AtomicCheckpointIO, read_checkpoint
from pflight.runs.memory import ClientMemory, MappedMemory
from pflight.states.state import StateLayout, expand_state

CHUNK = 26  # clients, 16 MiB
KINDS = {"ram": ClientMemory, "disk": MappedMemory}


def states(clients: torch.Tensor, template: dict[str, torch.Tensor]) -> TensorDict:
    """Return another model for each client."""
    stack = expand_state(template, len(clients))
    return stack.apply(lambda leaf: leaf + clients.view(-1, *[1] * (leaf.dim() - 1)))


def run(kind: str, clients: int, folder: str) -> None:
    """Write, save and read the memory of all clients once, and print a row of the table."""
    template = StateLayout.of(MLP(784, [200], 10)).template
    megabytes = clients * sum(value.nbytes for value in template.values()) / 1e6
    chunks = torch.arange(clients).split(CHUNK)
    memory = KINDS[kind]()
    memory.open(folder)
    checkpoint = Path(folder, "last.ckpt")

    spent = dict.fromkeys(("written", "saved", "read", "resumed"), 0.0)
    for chunk in chunks:
        values = states(chunk, template)
        spent["written"] -= time.perf_counter()
        memory.write("private", chunk, values)
        spent["written"] += time.perf_counter()
    spent["saved"] -= time.perf_counter()
    content = {
        "state_dict": {},
        "pytorch-lightning_version": L.__version__,
        "pflight": {"memory": memory.save()},
    }
    AtomicCheckpointIO().save_checkpoint(content, checkpoint)
    spent["saved"] += time.perf_counter()
    default = expand_state(template, CHUNK)
    for chunk in chunks:
        spent["read"] -= time.perf_counter()
        values = memory.read("private", chunk, default[: len(chunk)])
        spent["read"] += time.perf_counter()
        expected = states(chunk, template)
        assert all(torch.equal(values[name], expected[name]) for name in template)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    del memory, content
    spent["resumed"] -= time.perf_counter()
    KINDS[kind]().load(read_checkpoint(checkpoint)["pflight"]["memory"])
    spent["resumed"] += time.perf_counter()
    print(
        f"| {kind} | {clients} | {megabytes:.0f} | {peak:.0f} "
        f"| {megabytes / spent['written']:.0f} | {megabytes / spent['read']:.0f} "
        f"| {spent['saved']:.1f} | {spent['resumed']:.1f} "
        f"| {os.path.getsize(checkpoint) / 1e6:.1f} |",
        flush=True,
    )


def main() -> None:
    """Print a row for each kind of memory."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=at_least(1), default=10_000)
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    parser.add_argument("--single", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.single:
        run(options.single, options.clients, options.folder)
        return
    print(
        "| memory | clients | states, MB | peak RAM, MiB | written, MB/s | read, MB/s "
        "| saved, s | resumed, s | checkpoint, MB |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for kind in KINDS:
        with TemporaryDirectory(dir=options.folder) as folder:
            arguments = ["--single", kind, "--clients", str(options.clients), "--folder", folder]
            subprocess.run([sys.executable, __file__, *arguments], check=True)


if __name__ == "__main__":
    main()

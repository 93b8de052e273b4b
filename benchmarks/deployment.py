"""What a deployed round costs, and whether it is the simulated one, with nodes on this machine.

    python benchmarks/deployment.py [--nodes 5] [--rounds 5] [method ...]

A method is a configuration in configs/algorithm, by default those of six kinds. Each is run by
``pflight deploy`` over TLS with a node for every client, and by ``pflight fit``; the table has the
largest difference between the weights of the two, seconds a round and bytes.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from options import at_least
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

METHODS = ("fedavg", "fesem", "fedec", "ditto", "pfedla", "scaffold")


def largest_difference(one: Path, other: Path) -> float:
    """Return the largest difference between the server's weights in two run folders."""
    states = [
        torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for folder in (one, other)
    ]
    assert states[0].keys() == states[1].keys()
    return max(
        float((states[0][n].double() - states[1][n].double()).abs().max()) for n in states[0]
    )


def seconds_a_round(folder: Path) -> float:
    """Return the mean time from the end of a round to that of the next."""
    events = EventAccumulator(str(folder))
    events.Reload()
    ends = [point.wall_time for point in events.Scalars("clients/sampled")]
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def command(*arguments: object) -> str:
    """Run a command of pflight, and return what it prints."""
    words = [sys.executable, "-m", "pflight", *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", default=METHODS)
    parser.add_argument("--nodes", type=at_least(2), default=5)
    parser.add_argument("--rounds", type=at_least(2), default=5)
    options = parser.parse_args()
    print("| method | difference | seconds a round | simulated | bytes carried to train |")
    print("|---|---|---|---|---|", flush=True)
    for method in options.methods:
        with tempfile.TemporaryDirectory() as folder:
            deployed, simulated = Path(folder, "deployed"), Path(folder, "simulated")
            given = ["--config", "configs/data/digits.yaml", "--trainer.max_epochs", options.rounds]
            given += ["--config", f"configs/algorithm/{method}.yaml", "--trainer.accelerator=cpu"]
            demo = "deploy", "demo", "--nodes", options.nodes, "--folder", deployed
            said = command(*demo, *given)
            clients = f"--data.init_args.num_clients={options.nodes}"
            root = f"--trainer.default_root_dir={simulated}"
            command("fit", *given, clients, root, "--model.engine=sequential")
            runs = deployed / "run", simulated
            carried = re.search(r"messages to train carried (.*), all in all", said)
            assert carried is not None
            times = " | ".join(f"{seconds_a_round(run):.2f}" for run in runs)
            row = method, f"{largest_difference(*runs):.1e}", times, carried[1]
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()

"""Seconds from the shell to the first round, and how many of them are imports.

    python benchmarks/startup.py [--repeats 5]

``pflight fit`` trains FeSEM on scikit-learn's digits, as the quick start does, and is left when its
first round begins. Every command is a process of its own, and they take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import lightning as L
from options import at_least

ROOT = Path(__file__).resolve().parents[1]
ROWS = {
    "import torch": ["-c", "import torch"],
    "import lightning": ["-c", "import lightning"],
    "import pflight": ["-c", "import pflight"],
    "first round": [
        *["-m", "pflight", "fit", "--config", str(ROOT / "configs" / "quickstart.yaml")],
        *["--trainer.default_root_dir", ".", "--trainer.callbacks+", "startup.Leave"],
    ],
}


class Leave(L.Callback):
    """Ends the process when its first round begins."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        os._exit(0)


def seconds(arguments: list[str]) -> float:
    """Return how long Python runs with these arguments."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    with TemporaryDirectory() as folder:
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, *arguments],
            check=True,
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return time.perf_counter() - started


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=at_least(1), default=5)
    options = parser.parse_args()
    for arguments in ROWS.values():  # files are read, and modules compiled
        seconds(arguments)
    taken = [[seconds(row) for row in ROWS.values()] for _ in range(options.repeats)]
    print("| | s | min to max |")
    print("|---|---|---|")
    for name, column in zip(ROWS, zip(*taken, strict=True), strict=True):
        print(
            f"| {name} | {statistics.median(column):.2f} | {min(column):.2f} to {max(column):.2f} |"
        )


if __name__ == "__main__":
    main()

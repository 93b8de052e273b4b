"""Seconds from the shell to an answer or to the first round, and how many of them are imports.

    python benchmarks/startup.py [--repeats 5]

``pflight fit`` trains FeSEM on scikit-learn's digits, as the quick start does, and is left when its
first round begins. The other commands answer without Lightning: one is misspelt, and one is what a
shell asks for a completion. Every command is a process of its own, and they take turns.
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
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
ROWS = {
    "import torch": ["-c", "import torch"],
    "import lightning": ["-c", "import lightning"],
    "the same, no garbage collection": ["-c", "import gc; gc.disable(); import lightning"],
    "import pflight": ["-c", "import pflight"],
    "first round": [
        *["-m", "pflight", "fit", "--config", QUICKSTART],
        *["--trainer.default_root_dir", ".", "--trainer.callbacks+", "startup.Leave"],
    ],
    "`pflight --version`": ["-m", "pflight", "--version"],
    "`pflight --help`": ["-m", "pflight", "--help"],
    "`pflight list`": ["-m", "pflight", "list"],
    "`pflight fot`": ["-m", "pflight", "fot"],
    "a completion": ["-m", "pflight"],
}
REFUSED = "`pflight fot`"
LINE = f"pflight fit -c {QUICKSTART} --data.num_cl"
TAB = {
    "_ARGCOMPLETE": "1",
    "_ARGCOMPLETE_STDOUT_FILENAME": os.devnull,
    "COMP_LINE": LINE,
    "COMP_POINT": str(len(LINE)),
}


class Leave(L.Callback):
    """Ends the process when its first round begins."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        os._exit(0)


def seconds(row: str) -> tuple[float, float]:
    """Return how long Python runs with a row's arguments, and how long on a processor."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    environment |= TAB if row == "a completion" else {}
    with TemporaryDirectory() as folder:
        started, before = time.perf_counter(), os.times()
        done = subprocess.run(
            [sys.executable, *ROWS[row]],
            check=False,
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        taken, after = time.perf_counter() - started, os.times()
    if done.returncode != (2 if row == REFUSED else 0):
        raise RuntimeError(f"{row} ended with status {done.returncode}")
    user = after.children_user - before.children_user
    return taken, user + after.children_system - before.children_system


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=at_least(1), default=5)
    options = parser.parse_args()
    for row in ROWS:  # files are read, and modules compiled
        seconds(row)
    taken = [[seconds(row) for row in ROWS] for _ in range(options.repeats)]
    print("| | s | min to max | on a processor |")
    print("|---|---|---|---|")
    for name, column in zip(ROWS, zip(*taken, strict=True), strict=True):
        whole, processor = zip(*column, strict=True)
        middle, range_ = statistics.median(whole), f"{min(whole):.2f} to {max(whole):.2f}"
        print(f"| {name} | {middle:.2f} | {range_} | {statistics.median(processor):.2f} |")


if __name__ == "__main__":
    main()

"""Run one row of the benchmark in this process.

    PYTHONPATH=benchmarks python -m peers raw.loop W1 --data FOLDER --rounds 10 --out FILE

``FILE`` is a NumPy archive: the end of each round in seconds, the samples and steps of local
training, and the server's weights.
"""

from __future__ import annotations

import argparse
import os
from importlib import import_module
from pathlib import Path

import numpy as np

from .workloads import WORKLOADS, Record, Task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("row", help="module.function")
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--data", type=Path, required=True, help="folder of the images")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    module, _, function = options.row.partition(".")
    run = getattr(import_module(f".{module}", __package__), function)
    record = Record()
    weights = run(Task.load(options.workload, options.data), options.rounds, record)
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        np.savez(
            options.out, *weights, ends=record.ends, samples=record.samples, steps=record.steps
        )


if __name__ == "__main__":
    main()

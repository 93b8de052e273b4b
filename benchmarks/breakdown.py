"""Where the time of a round goes in pflight, on the workloads of ``compare.py``.

    python benchmarks/breakdown.py [--root FOLDER] [--rounds 10] [W1 W2 W3]

First the seconds of local training, of the rest of a round, and of the Trainer between two rounds;
then, from a run of its own under PyTorch's profiler, the operators that take most time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from options import at_least, folder, known
from peers.images import write_images
from peers.pflight import auto, fit, make_federation
from peers.workloads import WORKLOADS, Record, Task
from stopwatch import timing
from torch import Tensor
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity, profile

from pflight import Federation, keep_freed_memory

WARM_UP = 3  # rounds in which kernels are chosen and networks recorded
PROFILED = 3


class TimedFederation(Federation):
    """Takes the seconds of every round, and those of local training."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.rounds: list[float] = []
        self.training: list[float] = []

    def training_step(self, cohort: Tensor, batch_idx: int) -> None:
        """Run a round."""
        spent: list[float] = []
        started = time.perf_counter()
        with timing(self.clients.attached_engine, "train", spent.append):
            super().training_step(cohort, batch_idx)
        self.rounds.append(time.perf_counter() - started)
        self.training.append(sum(spent))


def parts(task: Task, rounds: int) -> list[float]:
    """Return the median seconds of local training, of the rest of a round, and of the Trainer."""
    federation, record = make_federation(task, kind=TimedFederation), Record()
    fit(federation, task, rounds, record)
    laps, inside = np.diff(record.ends), np.array(federation.rounds[1:])
    training = np.array(federation.training[1:])
    return [float(np.median(part)) for part in (training, inside - training, laps - inside)]


def profiled(
    run: Callable[[Task, int, Record], Any],
    task: Task,
    record: Record,
    kinds: Sequence[ProfilerActivity] = (ProfilerActivity.CPU,),
) -> tuple[EventList, float]:
    """Return what some rounds spent by operator, once they are all alike, and their seconds."""
    profiler = profile(activities=kinds)
    record.at_end = lambda count: profiler.start() if count == WARM_UP else None
    run(task, WARM_UP + PROFILED, record)
    profiler.stop()
    return profiler.key_averages(), record.ends[-1] - record.ends[WARM_UP - 1]


def largest(spent: Mapping[str, float], count: int) -> str:
    """Return the names of the largest numbers, with their shares of the sum."""
    total = sum(spent.values())
    names = sorted(spent, key=lambda name: -spent[name])[:count]
    return ", ".join(f"`{name[:40]}` {spent[name] / total:.0%}" for name in names)


def main() -> None:
    """Print a table of both."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "workloads", nargs="*", type=known(WORKLOADS), default=list(WORKLOADS), metavar="workload"
    )
    parser.add_argument("--rounds", type=at_least(1), default=10)
    parser.add_argument("--root", type=folder, help="folder of Fashion-MNIST's idx files")
    options = parser.parse_args()
    keep_freed_memory()
    print("| | local training | rest of the round | Trainer | operators |")
    print("|---|---|---|---|---|")
    with TemporaryDirectory() as images:
        write_images(Path(images), options.root)
        for name in options.workloads:
            task = Task.load(name, Path(images))
            seconds = " | ".join(f"{1000 * part:.1f} ms" for part in parts(task, options.rounds))
            events, _ = profiled(auto, task, Record())
            shares = largest({event.key: event.self_cpu_time_total for event in events}, 5)
            print(f"| {name} | {seconds} | {shares} |", flush=True)


if __name__ == "__main__":
    main()

"""pflight on a GPU, beside loops written by hand, on the workloads of ``compare.py``.

    python benchmarks/gpu.py [--root FOLDER] [--rounds 10] [--device cpu] [W1 W2 W3 W1x100]

W1x100 is W1 with all of its 100 clients in a round. Each row trains in this process, and is timed
from the fourth round on, when kernels are chosen and memory is held. Some more rounds run under
PyTorch's profiler, for the share of the time in which the GPU computes and for what it computes.
Where there is no GPU the same rows run on the CPU, and the table's first line says so.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from breakdown import WARM_UP, largest, profiled
from options import at_least, folder
from peers import pflight, raw
from peers.images import write_images
from peers.workloads import EQUAL, WORKLOADS, Record, Task
from stopwatch import wait
from torch.profiler import ProfilerActivity

SLOWEST = 4  # kernels that are named


@dataclass
class DeviceRecord(Record):
    """Takes the time of a round when the device has done it.

    Attributes:
        device: Where rounds run.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def end_round(self) -> None:
        """Wait for the device, and take the time."""
        wait(self.device)
        super().end_round()


def rows_on(device: torch.device) -> dict[str, Callable[..., Any]]:
    """Return what is run, by its name in the table."""
    accelerator = "gpu" if device.type == "cuda" else "cpu"
    ours = {"accelerator": accelerator, "devices": 1}
    return {
        "raw loop": partial(raw.loop, device=device.type),
        "raw loop, channels last": partial(raw.channels_last, device=device.type),
        "raw `vmap`": partial(raw.vectorized, device=device.type),
        "**pflight**": partial(pflight.auto, **ours),
        "pflight, sequential": partial(pflight.sequential, **ours),
        "pflight, vectorized": partial(pflight.vectorized, **ours),
    }


def task_of(name: str, folder: Path) -> Task:
    """Read a workload, whose name may end with ``x`` and another number of clients in a round."""
    workload, _, cohort = name.partition("x")
    task = Task.load(workload, folder)
    if not cohort:
        return task
    return task._replace(workload=replace(task.workload, cohort=int(cohort)))


def seconds_and_mebibytes(
    run: Callable[..., Any], task: Task, rounds: int, device: torch.device
) -> tuple[float, float | None]:
    """Return the median seconds of a round, and the peak of the GPU's memory, if it is one."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    record = DeviceRecord(device=device)
    run(task, WARM_UP + rounds, record)
    seconds = statistics.median(np.diff(record.ends)[WARM_UP - 1 :])
    if device.type != "cuda":
        return seconds, None
    return seconds, torch.cuda.max_memory_allocated(device) / 2**20


def busy_and_slowest(
    run: Callable[..., Any], task: Task, device: torch.device
) -> tuple[float | None, str]:
    """Return the share of the time in which the GPU computes, and what takes most of it.

    The latter are kernels and their shares of all kernels' time; on a CPU, operators.
    """
    record = DeviceRecord(device=device)
    if device.type != "cuda":
        events, _ = profiled(run, task, record)
        return None, largest({event.key: event.self_cpu_time_total for event in events}, SLOWEST)
    events, seconds = profiled(run, task, record, [ProfilerActivity.CUDA])
    kernels = {
        event.key: event.self_device_time_total
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA
    }
    return sum(kernels.values()) / 1e6 / seconds, largest(kernels, SLOWEST)


def table(task: Task, rounds: int, device: torch.device) -> Iterator[str]:
    """Yield the lines of a workload's table."""
    yield "| | s a round | ratio | MiB | busy | most time in |"
    yield "|---|---|---|---|---|---|"
    first = None
    for name, run in rows_on(device).items():
        seconds, peak = seconds_and_mebibytes(run, task, rounds, device)
        busy, slowest = busy_and_slowest(run, task, device)
        first = first or seconds
        cells = [
            name,
            f"{seconds:.4f}",
            f"{seconds / first:.2f}",
            "" if peak is None else f"{peak:.0f}",
            "" if busy is None else f"{busy:.0%}",
            slowest,
        ]
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = [*EQUAL, "W1x100"]
    parser.add_argument("workloads", nargs="*", default=names, metavar="workload")
    parser.add_argument("--rounds", type=at_least(1), default=10, help="rounds that are timed")
    parser.add_argument("--root", type=folder, help="folder of Fashion-MNIST's idx files")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="a GPU, where there is one")
    options = parser.parse_args()
    for name in options.workloads:
        workload, times, cohort = name.partition("x")
        if workload not in WORKLOADS or (times and not cohort.isdigit()):
            parser.error(f"unknown workload {name}; there are {', '.join(names)}")
    found = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(options.device or found)
    if device.type == "cuda":
        if found == "cpu":
            sys.exit("--device cuda: PyTorch finds no GPU")
        print(f"{torch.cuda.get_device_name(device)}, PyTorch {torch.__version__}")
    else:
        print(f"No GPU is used: everything runs on the CPU, PyTorch {torch.__version__}")
    with TemporaryDirectory() as images:
        write_images(Path(images), options.root)
        for name in options.workloads:
            print(f"\n**{name}**\n")
            for line in table(task_of(name, Path(images)), options.rounds, device):
                print(line, flush=True)


if __name__ == "__main__":
    main()

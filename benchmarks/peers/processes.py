"""Run a row in a fresh process, and watch its memory from outside."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from .workloads import WORKLOADS, Weights

BENCHMARKS = Path(__file__).parents[1]
MARK = "PFLIGHT_BENCHMARK"
PAUSE = 0.2  # seconds between two looks at the memory
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
ONE_THREAD = {**dict.fromkeys(THREADS, "1"), "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "WANDB_MODE": "disabled"}


class RowError(Exception):
    """A row did not end well; the message is one line that says why."""


@dataclass(frozen=True)
class Run:
    """What a process did.

    Attributes:
        seconds: Of each round but the first, in which libraries warm up and compile.
        samples: Samples of all local training.
        steps: Steps of all local training.
        weights: The server's, at the end.
        peak: Most memory, in bytes, of the process and its children, shared pages counted once;
            ``None`` if it wasn't watched.
    """

    seconds: list[float]
    samples: int
    steps: int
    weights: Weights
    peak: int | None = None

    @property
    def median(self) -> float:
        """Seconds of the median round."""
        return statistics.median(self.seconds)


def run_row(
    python: Path,
    row: str,
    workload: str,
    *,
    data: Path,
    rounds: int,
    timeout: float = 1800,
    one_thread: bool = False,
    watch: bool = False,
) -> Run:
    """Run a row in a process of its own, and end all processes that it leaves behind.

    Args:
        python: Interpreter that has the library.
        row: ``module.function``, as in ``python -m peers``.
        workload: Name of a workload.
        data: Folder of the images.
        rounds: Number of rounds, two at least.
        timeout: Seconds after which the row has failed.
        one_thread: Compute on one thread, rather than on as many as the row chooses.
        watch: Measure memory, which disturbs the timing.

    Raises:
        RowError: With the last line of what it said.
    """
    mark = uuid.uuid4().hex
    environ = {name: value for name, value in os.environ.items() if name not in THREADS}
    environ |= {**QUIET, "PYTHONPATH": str(BENCHMARKS), MARK: mark}
    if one_thread:
        environ |= ONE_THREAD
    with TemporaryDirectory() as folder:
        out, log = Path(folder, "out.npz"), Path(folder, "log.txt")
        options = ["--data", str(data), "--rounds", str(rounds), "--out", str(out)]
        with log.open("w") as said:
            command = [str(python), "-m", "peers", row, workload, *options]
            with subprocess.Popen(
                command, cwd=folder, env=environ, stdout=said, stderr=subprocess.STDOUT
            ) as process:
                try:
                    peak = _watch(process, mark, timeout) if watch else None
                    code = process.wait(timeout)
                except subprocess.TimeoutExpired:
                    raise RowError(f"took more than {timeout:.0f} s") from None
                finally:
                    process.kill()
                    for pid in marked(mark):
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
        if code or not out.is_file():
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            errors = [line for line in lines if "Error" in line.split(":")[0]]
            raise RowError((errors or lines or [f"exit code {code}"])[-1].strip())
        with np.load(out) as saved:
            weights = [saved[f"arr_{index}"] for index in range(len(saved.files) - 3)]
            shapes = [weight.shape for weight in weights]
            expected = [weight.shape for weight in WORKLOADS[workload].initial_weights()]
            if shapes != expected:
                raise RowError(f"weights of shapes {shapes}, not {expected}")
            seconds = np.diff(saved["ends"]).tolist()
            return Run(seconds, int(saved["samples"]), int(saved["steps"]), weights, peak)


def marked(mark: str) -> list[int]:
    """Return the processes that inherited a mark, also those that are nobody's children."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:  # it has ended, or is somebody else's
            continue
    return found


def memory(mark: str) -> int:
    """Return the bytes that marked processes hold; what several share is counted once."""
    total = 0
    for pid in marked(mark):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def _watch(process: subprocess.Popen[bytes], mark: str, timeout: float) -> int | None:
    if not Path("/proc/self/smaps_rollup").exists():
        return None  # only Linux tells
    peak, end = 0, time.monotonic() + timeout
    while process.poll() is None:
        if time.monotonic() > end:
            raise subprocess.TimeoutExpired(process.args, timeout)
        peak = max(peak, memory(mark))
        time.sleep(PAUSE)
    return peak

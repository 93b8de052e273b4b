"""Choice of the engine, and of the number of clients at once: by a fixed rule, never by a clock.

The rule looks at the network, the batch and the device. So equal runs take equal paths, and a
resumed run goes on as it began.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.model_summary import get_human_readable_count
from torch import Tensor

from pflight.engines.alone.client import task_loss
from pflight.engines.alone.engine import Engine, SequentialEngine
from pflight.engines.stacked.engine import VectorizedEngine
from pflight.engines.stacked.probe import has_sample_losses
from pflight.errors import ConfigurationError

from .check import Operations, count_operations
from .client_setup import ClientSetup

EngineName = Literal["auto", "sequential", "vectorized"]


class _Limits(NamedTuple):
    """Limits of stacking on a kind of device, measured on CPUs by ``benchmarks/engines.py``."""

    parameters: float
    """Most bytes of a chunk's parameters, unless the chunk has only a few clients."""
    samples: float
    """Most bytes of a chunk's samples. They are put in order before each epoch."""
    operations: float
    """Most operations of a chunk's forward pass, unless the chunk has only a few clients."""
    cached: float
    """Most bytes of a few clients' parameters that stay in the cache between steps."""
    busy: float
    """From so many operations of its forward pass on, one client keeps the device busy alone."""
    thin: float
    """The same for operations of convolutions with few input channels. They run slower stacked."""
    rows: float
    """Stacking only batches of equal size pays from so many clients in a call, on average."""


_LIMITS = {
    "cpu": _Limits(32 * 2**20, 256 * 2**20, 600e6, 32 * 2**20, busy=500e6, thin=8e6, rows=5),
    "cuda": _Limits(256 * 2**20, 2**30, math.inf, math.inf, busy=math.inf, thin=math.inf, rows=1),
}
_FEW = 4  # least clients at once, if their samples allow it


@dataclass(frozen=True)
class Choice:
    """A chosen engine.

    Attributes:
        engine: ``"sequential"`` or ``"vectorized"``.
        chunk: Number of clients that are trained at once.
        reason: Reason of the choice.

    Example:
        >>> str(Choice("vectorized", 10, "small steps"))
        'vectorized engine, up to 10 clients at once: small steps'
    """

    engine: Literal["sequential", "vectorized"]
    chunk: int
    reason: str

    def __str__(self) -> str:
        many = f", up to {self.chunk:,} clients at once" if self.chunk > 1 else ""
        return f"{self.engine} engine{many}: {self.reason}"


def choose(wanted: EngineName, chunk: int | None, setup: ClientSetup) -> Choice:
    """Choose an engine.

    Stacking clients saves PyTorch's overhead of each operation. This is most of a small network's
    step. Stacking loses if one client's step fills the processor or its caches. It also loses with
    many operations in convolutions of few input channels, such as of images: they run slower
    stacked. A chunk fits into a CPU's caches or a GPU's memory.

    Args:
        wanted: The requested engine, or ``"auto"``.
        chunk: The requested number of clients at once, if any.
        setup: The client module, its client method, and its data.
    """
    data, layout = setup.data, setup.layout
    if wanted == "sequential":
        return Choice(wanted, 1, "as asked for")
    if not setup.example:
        return Choice("sequential", 1, "samples are read one by one")
    if wanted == "auto" and data.cohorts.size == 1:
        return Choice("sequential", 1, "one client in a round")
    limits = _limits_of(setup.device)
    counts = data.num_samples("train")
    batch = min(data.batch_size or math.inf, int(counts[data.train_clients].max()))
    total, thin = (batch * count for count in _operations(setup))
    given, chunk = chunk, chunk or _chunk_size(limits, setup, total)
    if wanted == "vectorized":
        return Choice(wanted, chunk, "as asked for")
    if math.isinf(total):
        return Choice("sequential", 1, "neither its forward pass nor its training step can be run")
    step = f"{get_human_readable_count(int(total)).strip()} operations a batch"
    if total >= limits.busy:
        return Choice("sequential", 1, f"{step} keep the device busy")
    if thin >= limits.thin:
        reason = f"of {step} too many are in convolutions with few channels"
        return Choice("sequential", 1, reason)
    if chunk < _FEW and not given:
        reason = f"{_FEW} clients' samples exceed {limits.samples / 2**20:,.0f} MiB"
        return Choice("sequential", 1, reason)
    if _FEW * layout.nbytes > limits.cached:
        reason = f"{_FEW} models of {layout.nbytes / 2**20:,.1f} MiB don't fit into the caches"
        return Choice("sequential", 1, reason)
    return Choice("vectorized", chunk, f"{step} leave the device idle one by one")


def _operations(setup: ClientSetup) -> Operations:
    """Count the operations of a sample's forward pass; if it fails, of its training step."""
    x, *others = (leaf[:1].clone() for leaf in setup.example)

    def step(module: LightningModule, x: Tensor) -> Tensor:
        return task_loss(module, setup.batch([x, *others]))

    found = count_operations(setup.client, x.clone())
    return found if math.isfinite(found.total) else count_operations(setup.client, x, step)


def _limits_of(device: torch.device) -> _Limits:
    return _LIMITS["cpu" if device.type == "cpu" else "cuda"]


def _chunk_size(limits: _Limits, setup: ClientSetup, operations: float) -> int:
    """Return how many clients to stack, independent of the number of clients."""
    largest = int(setup.data.num_samples("train").max())
    sample = sum(leaf[0].nbytes for leaf in setup.example)
    by_parameters = limits.parameters / max(setup.layout.nbytes, 1)
    by_operations = limits.operations / max(operations, 1)
    by_samples = limits.samples / max(sample * largest, 1)
    return max(1, int(min(max(by_parameters, _FEW), max(by_operations, _FEW), by_samples)))


def build_engine(
    wanted: EngineName,
    chunk: int | None,
    setup: ClientSetup,
    warned: set[str] | None = None,
    in_steps: bool = False,
) -> tuple[Engine, Choice]:
    """Return the engine that trains the clients, ready for use, and the reason of the choice.

    If clients can't be stacked, or only few at a time, the engine is a vectorized one. It then
    trains them one by one, but still stacks the evaluation.

    Args:
        wanted: The requested engine, or ``"auto"``.
        chunk: The requested number of clients at once, if any.
        setup: The client module, its client method, and its data.
        warned: As in :class:`VectorizedEngine`.
        in_steps: Whether local work is given in steps, not epochs.

    Raises:
        ConfigurationError: As in :meth:`SequentialEngine.check_input`, or if clients can't be
            interrupted.
    """
    if setup.client_timeout is None:
        choice = choose(wanted, chunk, setup)
    else:
        if wanted == "vectorized":
            raise ConfigurationError(
                "client_timeout needs engine='sequential': clients that train together take their "
                "time together"
            )
        choice = Choice("sequential", 1, "client_timeout is for clients that train one by one")
    if choice.engine == "sequential" and wanted != "vectorized":
        engine = SequentialEngine(setup)
        engine.check_input()
        return engine, choice
    vectorized = VectorizedEngine(setup, choice.chunk, warned)
    vectorized.check_input()
    name, asked = type(setup.client).__name__, "engine='vectorized', but"
    if vectorized.obstacle:
        choice = Choice("sequential", 1, f"{name} can't be stacked, {vectorized.obstacle}")
        if wanted == "vectorized":
            vectorized.warn_once(f"{asked} clients train one by one: {choice.reason}")
    elif in_steps and setup.phases(1, anchored=True):
        vectorized.obstacle = "clients with phases are stacked with local_epochs, not local_steps"
        choice = Choice("sequential", 1, vectorized.obstacle)
    elif wanted == "vectorized" and setup.task is not None and not vectorized.stacks_evaluation:
        vectorized.warn_once(
            f"{asked} {name} is evaluated one by one: its predictions can't be stacked, or depend "
            "on the other samples of a batch"
        )
    elif wanted == "auto" and not vectorized.fills_batches:
        rows, enough = vectorized.rows_per_call(), _limits_of(setup.device).rows
        if rows < min(enough, choice.chunk, setup.data.cohorts.size):
            reason = f"only {rows:.1f} clients at a time have batches of one size, on average"
            if not has_sample_losses(setup.client):
                reason += "; with a method sample_losses(batch), batches may be filled up"
            choice = Choice("sequential", 1, reason)
            vectorized.obstacle = reason
    return vectorized, choice

"""Which engine trains the clients, and how many at once: a fixed rule, never a clock.

The rule looks at the network, the batch and the device, so that equal runs take equal paths and a
resumed run goes on as it began.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from pflight.datamodules import FederatedDataModule
from pflight.models import ClientModule
from pflight.state import StateLayout

from .sequential import SequentialEngine
from .vectorized import VectorizedEngine

EngineName = Literal["auto", "sequential", "vectorized"]

_CHUNK_BYTES = {"cpu": 6 * 2**20, "cuda": 256 * 2**20}  # of a chunk's parameters
_SAMPLE_BYTES = {"cpu": 32 * 2**20, "cuda": 2**30}  # of a chunk's samples
_MOST_WORK = 60e6  # parameters times batch from which a client's step keeps a CPU busy alone


@dataclass(frozen=True)
class Choice:
    """An engine.

    Attributes:
        engine: ``"sequential"`` or ``"vectorized"``.
        chunk: Clients that are trained at once.
        reason: Why.

    Example:
        >>> str(Choice("vectorized", 10, "small steps"))
        'vectorized engine, up to 10 clients at once: small steps'
    """

    engine: Literal["sequential", "vectorized"]
    chunk: int
    reason: str

    def __str__(self) -> str:
        many = f", up to {self.chunk} clients at once" if self.chunk > 1 else ""
        return f"{self.engine} engine{many}: {self.reason}"


def choose(
    wanted: EngineName,
    chunk: int | None,
    client: ClientModule,
    data: FederatedDataModule,
    device: torch.device,
) -> Choice:
    """Choose an engine.

    Stacking clients saves what PyTorch spends around each operation, which is most of a small
    network's step, and loses where one client's step fills the processor. Convolutions of stacked
    weights are slow on a CPU.

    Args:
        wanted: The engine asked for, or ``"auto"``.
        chunk: Clients at once, if it was given.
        client: The client module.
        data: Where the clients' samples come from.
        device: Where clients train.
    """
    size = chunk or chunk_size(StateLayout.of(client), data, device)
    if wanted == "vectorized":
        return Choice(wanted, size, "as asked for")
    if wanted == "sequential":
        return Choice(wanted, 1, "as asked for")
    parameters = sum(p.numel() for p in client.parameters())
    counts = data.num_samples("train")[data.train_clients]
    batch = min(data.batch_size or int(counts.max()), int(counts.max()))
    if data.cohorts.size == 1:
        return Choice("sequential", 1, "one client in a round")
    if device.type == "cpu":
        if any(isinstance(module, nn.modules.conv._ConvNd) for module in client.modules()):
            return Choice("sequential", 1, "stacked convolutions are slow on a CPU")
        if parameters * batch > _MOST_WORK:
            return Choice(
                "sequential",
                1,
                f"{parameters:,} parameters with batches of {batch} keep a CPU busy",
            )
    reason = f"{parameters:,} parameters with batches of {batch} leave the device idle one by one"
    return Choice("vectorized", size, reason)


def chunk_size(layout: StateLayout, data: FederatedDataModule, device: torch.device) -> int:
    """Return how many clients fit at once: into the caches of a CPU, or into a GPU's memory."""
    kind = "cpu" if device.type == "cpu" else "cuda"
    by_parameters = _CHUNK_BYTES[kind] // layout.nbytes
    counts = data.num_samples("train")
    x, _ = data.samples(int(data.train_clients[0]), "train")
    by_samples = _SAMPLE_BYTES[kind] // max(1, x[0].nbytes * int(counts.max()))
    return max(1, min(by_parameters, by_samples))


def build_engine(
    wanted: EngineName, chunk: int | None, client: ClientModule, *args: Any
) -> tuple[SequentialEngine, Choice]:
    """Return the engine that trains the clients, ready for use, and why it is the one.

    Args:
        wanted: The engine asked for, or ``"auto"``.
        chunk: Clients at once, if it was given.
        client: The client module.
        *args: The other arguments of :class:`SequentialEngine`.

    Raises:
        ConfigurationError: As in :meth:`SequentialEngine.check_input`.
    """
    _, data, _, device, _ = args
    choice = choose(wanted, chunk, client, data, device)
    if choice.engine == "sequential":
        engine = SequentialEngine(client, *args)
        engine.check_input()
        return engine, choice
    vectorized = VectorizedEngine(client, *args, chunk=choice.chunk)
    vectorized.check_input()
    if vectorized.obstacle:
        name = type(client).__name__
        choice = Choice("sequential", 1, f"{name} can't be stacked, {vectorized.obstacle}")
    return vectorized, choice

"""What every row of the benchmark has to do: clients, their samples, network and first weights.

Only NumPy is needed here, so that this file is the same in the environment of every library.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Weights = list[NDArray[np.float32]]


@dataclass(frozen=True)
class Workload:
    """Rounds of FedAvg: SGD with a constant step, one local epoch.

    Attributes:
        clients: Clients in all.
        cohort: Clients that train in a round.
        samples: Images of 28 x 28 pixels per client, in the mean.
        batch_size: Images of a local step; an epoch's last batch may be smaller.
        layers: Shape of each layer's weight: ``(out, in)``, or ``(out, in, size, size)`` for a
            convolution that keeps the size of the image. Convolutions are followed by ReLU and 2x2
            max pooling, and all but the last linear layer by ReLU.
        rounds: Rounds of a run, more of them where they are short.
        lr: Step of SGD.
        ragged: Clients have from 20 to 200 % of so many images, most of them fewer.
    """

    clients: int
    cohort: int
    samples: int
    batch_size: int
    layers: tuple[tuple[int, ...], ...]
    rounds: int = 10
    lr: float = 0.01
    ragged: bool = False

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Number of images of each client ``[clients]``."""
        if not self.ragged:
            return np.full(self.clients, self.samples)
        share = 0.2 + 1.8 * np.linspace(0, 1, self.clients) ** 1.25  # 1 in the mean
        return np.random.default_rng(0).permutation((self.samples * share).astype(np.int64))

    @property
    def steps(self) -> float:
        """Number of a client's steps in a round, in the mean."""
        return float(np.ceil(self.sizes / self.batch_size).mean())

    def initial_weights(self) -> Weights:
        """Return each layer's weight and bias, uniform in +-1/sqrt(inputs) as PyTorch has it."""
        random = np.random.default_rng(0)
        weights = []
        for shape in self.layers:
            bound = 1 / math.sqrt(math.prod(shape[1:]))
            for tensor in (shape, shape[:1]):
                weights.append(random.uniform(-bound, bound, tensor).astype(np.float32))
        return weights

    def draw(self, round_index: int) -> tuple[NDArray[np.int64], list[NDArray[np.int64]]]:
        """Return a round's clients ``[cohort]`` and the order of the samples of each."""
        random = np.random.default_rng(round_index)
        clients = random.permutation(self.clients)[: self.cohort]
        return clients, [random.permutation(count) for count in self.sizes[clients]]


CNN = ((32, 1, 5, 5), (64, 32, 5, 5), (512, 3136), (10, 512))
WORKLOADS = {
    "W1": Workload(100, cohort=10, samples=600, batch_size=32, layers=CNN),
    "W2": Workload(1000, cohort=100, samples=60, batch_size=10, layers=((10, 784),), rounds=30),
    "W3": Workload(
        100, cohort=100, samples=100, batch_size=10, layers=((200, 784), (10, 200)), rounds=15
    ),
}
EQUAL = tuple(WORKLOADS)
WORKLOADS |= {f"{name}-ragged": replace(WORKLOADS[name], ragged=True) for name in ("W2", "W3")}


class Task(NamedTuple):
    """A workload and its data."""

    workload: Workload
    x: Sequence[NDArray[np.float32]]
    """Each client's images ``[samples, 1, 28, 28]``."""
    y: Sequence[NDArray[np.int64]]
    """Each client's labels ``[samples]``."""
    name: str = ""
    folder: Path = Path()
    """Where it was read from, for processes that read it again."""

    @classmethod
    def load(cls, name: str, folder: Path) -> Task:
        """Read what :func:`~.images.write_images` wrote."""
        workload = WORKLOADS[name]
        *ends, count = np.cumsum(workload.sizes)
        x, y = (
            np.split(np.array(np.load(folder / f"train_{part}.npy", mmap_mode="r")[:count]), ends)
            for part in "xy"
        )
        return cls(workload, x, y, name, folder)


@dataclass
class Record:
    """What a run did: when each round ended, and the samples and steps of all local training.

    Attributes:
        ends: Seconds at the end of each round.
        samples: Of all local training.
        steps: Of all local training.
        at_end: Called after every round with the number of rounds so far.
    """

    ends: list[float] = field(default_factory=list)
    samples: int = 0
    steps: int = 0
    at_end: Callable[[int], None] = lambda _: None

    def count(self, samples: int, steps: int = 1) -> None:
        """Take note of local training."""
        self.samples += samples
        self.steps += steps

    def end_round(self) -> None:
        """Take the time; what lies between two ends is a round, and nothing is left out."""
        self.ends.append(time.perf_counter())
        self.at_end(len(self.ends))

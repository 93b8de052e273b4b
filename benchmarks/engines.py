"""The two engines on networks of many kinds, and which of them ``engine="auto"`` chooses.

    python benchmarks/engines.py [--repeats 5] [--chunks 4 16 64] [--device cuda] [case ...]

Each case trains the same clients for one local epoch by turns, one by one and stacked; samples are
generated. The last column is the time of auto's choice over that of the faster engine: 1 where the
choice is right. With ``--chunks`` the table also has the time of stacks of so many clients.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from lightning.pytorch.plugins import Precision
from options import at_least
from stopwatch import wait
from torch import nn

from pflight import keep_freed_memory
from pflight.datamodules import TensorClients
from pflight.engines import ClientSetup, Engine, build_engine
from pflight.method import ClientMethod, client_method_of, layout_with
from pflight.models import (
    FEMNISTCNN,
    MLP,
    Classifier,
    ElasticClient,
    LogisticRegression,
    McMahanCNN,
    PFedHNCNN,
    ResNet18,
)
from pflight.states.state import StateLayout, expand_state


@dataclass(frozen=True)
class Case:
    """A network, the shape of its samples, and how much clients train on.

    Attributes:
        network: Builds the network.
        shape: Of a sample.
        batch: Samples of a step.
        samples: Of a client.
        unequal: Clients have from a fourth of so many samples to seven fourths.
        clients: In a round.
        momentum: Of SGD.
        client: Kind of client module.
    """

    network: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int = 10
    samples: int = 60
    clients: int = 20
    momentum: float = 0.0
    unequal: bool = False
    client: Callable[..., Classifier] = Classifier


def normed() -> nn.Module:
    """Return an MLP with BatchNorm."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 100), nn.BatchNorm1d(100), nn.ReLU(), nn.Linear(100, 10)
    )


def small_convolutional() -> nn.Module:
    """Return two small convolutions and a linear layer."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(784, 10)),
    )


def strided() -> nn.Module:
    """Return two convolutions that halve the image in place of pooling."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(4096, 10)),
    )


def lenet() -> nn.Module:
    """Return LeNet-5 with maxima and rectified units."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


class Attentive(nn.Module):
    """Attends to the rows of an image, in a block of a transformer without dropout."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.enter = nn.Linear(28, size)
        self.block = nn.TransformerEncoderLayer(size, 4, 2 * size, 0.0, batch_first=True)
        self.leave = nn.Linear(size, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of a batch of images."""
        return self.leave(self.block(self.enter(x.squeeze(1))).mean(1))


WARM = 10  # turns, in which what is repeated often is recorded
IMAGE, COLOR = (1, 28, 28), (3, 32, 32)
CASES = {
    "logistic regression, batch 10 (W2)": Case(partial(LogisticRegression, 784, 10), IMAGE),
    "logistic regression, batch 100": Case(
        partial(LogisticRegression, 784, 10), IMAGE, batch=100, samples=300
    ),
    "MLP 64-64-10": Case(partial(MLP, 64, [64], 10), (64,)),
    "MLP 784-200-10 (W3)": Case(partial(MLP, 784, [200], 10), IMAGE, samples=100),
    "MLP 784-200-10, batch 64": Case(partial(MLP, 784, [200], 10), IMAGE, batch=64, samples=256),
    "MLP 784-200-10, momentum": Case(
        partial(MLP, 784, [200], 10), IMAGE, samples=100, momentum=0.9
    ),
    "MLP 784-200-10, FedEC": Case(
        partial(MLP, 784, [200], 10), IMAGE, samples=100, client=ElasticClient
    ),
    "logistic regression, unequal clients": Case(
        partial(LogisticRegression, 784, 10), IMAGE, unequal=True
    ),
    "MLP 784-200-10, unequal clients": Case(
        partial(MLP, 784, [200], 10), IMAGE, samples=100, unequal=True
    ),
    "MLP 784-500-500-10": Case(partial(MLP, 784, [500, 500], 10), IMAGE),
    "MLP 784-1000-1000-10, batch 32": Case(
        partial(MLP, 784, [1000, 1000], 10), IMAGE, batch=32, samples=128, clients=8
    ),
    "MLP 784-500-500-10, batch 100": Case(
        partial(MLP, 784, [500, 500], 10), IMAGE, batch=100, samples=400, clients=12
    ),
    "MLP 784-2000-2000-10, batch 32": Case(
        partial(MLP, 784, [2000, 2000], 10), IMAGE, batch=32, samples=96, clients=6
    ),
    "transformer block, batch 20": Case(Attentive, IMAGE, batch=20, samples=60),
    "MLP with BatchNorm, batch 20": Case(normed, IMAGE, batch=20, samples=100),
    "MLP with BatchNorm, unequal clients": Case(normed, IMAGE, batch=20, samples=100, unequal=True),
    "small convolutions": Case(small_convolutional, IMAGE, samples=40),
    "small convolutions, batch 32": Case(small_convolutional, IMAGE, batch=32, samples=128),
    "small convolutions, unequal clients": Case(
        small_convolutional, IMAGE, samples=40, unequal=True
    ),
    "LeNet-5, batch 10": Case(lenet, IMAGE, samples=30),
    "LeNet-5, batch 64": Case(lenet, IMAGE, batch=64, samples=128, clients=10),
    "strided convolutions, batch 10": Case(strided, COLOR, samples=30),
    "strided convolutions, batch 50": Case(strided, COLOR, batch=50, samples=100, clients=10),
    "pFedHN's CNN": Case(partial(PFedHNCNN, 10, 3, 32), COLOR, batch=32, samples=96, clients=8),
    "FEMNIST's CNN, batch 10": Case(partial(FEMNISTCNN, 10), IMAGE, samples=20, clients=4),
    "McMahan's CNN, batch 32 (W1)": Case(
        partial(McMahanCNN, 10), IMAGE, batch=32, samples=64, clients=4
    ),
    "ResNet-18, batch 10": Case(partial(ResNet18, 10), COLOR, samples=10, clients=2),
}


def seconds(engines: list[Engine], case: Case, repeats: int) -> list[float]:
    """Return each engine's median seconds for all clients, by turns, once all are warm."""
    times: list[list[float]] = [[] for _ in engines]
    clients = torch.arange(case.clients)
    for turn in range(WARM + repeats):
        for engine, own in zip(engines, times, strict=True):
            setup = engine.setup
            starts = expand_state(setup.layout.template, case.clients).to(setup.device)
            wait(setup.device)
            begun = time.perf_counter()
            engine.train(clients, starts, round_index=turn)
            wait(setup.device)
            own.append(time.perf_counter() - begun)
    return [statistics.median(own[WARM:]) for own in times]


def row(name: str, case: Case, chunks: list[int], repeats: int, device: torch.device) -> str:
    """Measure a case and return its row of the table."""
    torch.manual_seed(0)
    least, most = (case.samples // 4, case.samples * 7 // 4) if case.unequal else [case.samples] * 2
    samples = [
        (torch.randn(count, *case.shape), torch.randint(10, (count,)))
        for count in torch.randint(least, most + 1, (case.clients,)).tolist()
    ]
    data = TensorClients(samples, num_classes=10, batch_size=case.batch)
    sgd = partial(torch.optim.SGD, lr=0.01, momentum=case.momentum)
    client = case.client(case.network(), 10, optimizer=sgd).to(device)
    client_method = client_method_of(client) or ClientMethod()
    layout = layout_with(client_method, StateLayout.of(client))
    setup = ClientSetup(client, client_method, layout, data, Precision(), device, seed=0)
    sequential, _ = build_engine("sequential", None, setup)
    vectorized, asked = build_engine("vectorized", None, setup)
    others = [build_engine("vectorized", chunk, setup)[0] for chunk in chunks]
    _, choice = build_engine("auto", None, setup)
    alone, stacked, *rest = seconds([sequential, vectorized, *others], case, repeats)
    chosen = alone if choice.engine == "sequential" else stacked
    cells = [
        f"{sum(value.numel() for value in layout.template.values()):,}",
        f"{1000 * alone:.1f}",
        f"{1000 * stacked:.1f} ({asked.chunk})",
        *(f"{1000 * other:.1f}" for other in rest),
        choice.engine,
        f"{chosen / min(alone, stacked):.2f}",
    ]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="case", help="beginnings of names of cases")
    parser.add_argument("--repeats", type=at_least(1), default=5)
    parser.add_argument("--chunks", nargs="+", type=at_least(1), default=[], help="clients at once")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    keep_freed_memory()
    for beginning in options.cases:
        if not any(name.startswith(beginning) for name in CASES):
            parser.error(f"no case begins with {beginning!r}; there are {'; '.join(CASES)}")
    sizes = [f"stacks of {chunk}, ms" for chunk in options.chunks]
    titles = ["case", "numbers", "sequential, ms", "vectorized (at once), ms", *sizes]
    titles += ["auto", "auto / faster"]
    print(f"| {' | '.join(titles)} |")
    print("|---" * len(titles) + "|")
    for name, case in CASES.items():
        if not options.cases or name.startswith(tuple(options.cases)):
            made = row(name, case, options.chunks, options.repeats, torch.device(options.device))
            print(made, flush=True)


if __name__ == "__main__":
    main()

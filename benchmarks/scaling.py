"""How the time of a round grows: with clients, the model, centers, and ranks.

    python benchmarks/scaling.py [--repeats 3] [--picture scaling.png] [curve ...]
    python benchmarks/scaling.py clients --values 10 100 1000 10000

Every curve is fitted by ``seconds = a * x ** e``; a cost that grows with ``x`` alone has the
exponent 1, and fixed costs bring it below. Clients are generated: 20 samples each, batch 10. A
point is the median round, evaluation and start-up left out, of a federation that is trained in a
process of its own.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import lightning as L
import numpy as np
import torch
from options import at_least, known
from quiet import quiet
from stopwatch import Stopwatch
from tensordict import TensorDict

from pflight import Federation, keep_freed_memory
from pflight.callbacks import FedAvg, FeSEM, PFedLA, ServerCallback
from pflight.datamodules import TensorClients
from pflight.engines import ClientUpdates
from pflight.models import MLP, Classifier

FEATURES, CLASSES, SAMPLES = 64, 10, 20


@dataclass(frozen=True)
class Curve:
    """What is varied, and how a point of the curve is measured in seconds."""

    label: str
    values: tuple[int, ...]
    measure: Callable[[int, int], float]


def fitted(
    server: ServerCallback, clients: int, hidden: int, rounds: int, ranks: int = 1
) -> tuple[Federation, list[float]]:
    """Train a federation with full participation; return it with the seconds of its rounds."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(clients, SAMPLES, FEATURES, generator=random)
    y = torch.randint(CLASSES, (clients, SAMPLES), generator=random)
    data = TensorClients(list(zip(x, y, strict=True)), num_classes=CLASSES, batch_size=10)
    torch.manual_seed(0)
    sgd = partial(torch.optim.SGD, lr=0.01)
    client = Classifier(MLP(FEATURES, [hidden], CLASSES), CLASSES, optimizer=sgd)
    federation, stopwatch = Federation(client), Stopwatch()
    several = {"strategy": "ddp", "devices": ranks, "use_distributed_sampler": False}
    trainer = L.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        callbacks=[server, stopwatch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **(several if ranks > 1 else {}),
    )
    trainer.fit(federation, datamodule=data)
    return federation, stopwatch.seconds


def round_seconds(
    server: Callable[[], ServerCallback], clients: int, hidden: int, repeats: int, ranks: int = 1
) -> float:
    """Return the median time of a round, the first left out."""
    _, seconds = fitted(server(), clients, hidden, 1 + repeats, ranks)
    return statistics.median(seconds[1:])


def e_step_seconds(clients: int, repeats: int) -> float:
    """Return the time in which FeSEM(4) assigns so many clients, in chunks as they arrive."""
    server = FeSEM(4, init_clients=4)
    federation, _ = fitted(server, 8, 200, rounds=1)
    template = federation.layout.template
    size = max(1, 2**24 // federation.layout.nbytes)
    random = torch.Generator().manual_seed(0)
    states = TensorDict(
        {
            name: torch.randn(size, *value.shape, generator=random)
            for name, value in template.items()
        },
        batch_size=[size],
    )
    seconds = []
    with torch.no_grad():
        for _ in range(repeats):
            server.on_round_start()
            started = time.perf_counter()
            for count in [size] * (clients // size) + [clients % size]:
                ids = torch.arange(count) % 8
                server.receive(ClientUpdates(ids, states[:count], torch.ones(count)))
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def server_step_seconds(clients: int, repeats: int) -> float:
    """Return the time that a round of pFedLA takes beyond the same round of FedAvg."""
    with_step, without = (
        round_seconds(server, clients, 64, repeats) for server in (PFedLA, FedAvg)
    )
    return max(with_step - without, 1e-6)


CURVES = {
    "clients": Curve(
        "clients in a round",
        (10, 100, 1000, 10_000),
        lambda x, repeats: round_seconds(FedAvg, x, 64, repeats),
    ),
    "model": Curve(
        "hidden units",
        (64, 256, 1024, 4096),
        lambda x, repeats: round_seconds(FedAvg, 20, x, repeats),
    ),
    "centers": Curve(
        "FeSEM's centers",
        (1, 2, 4, 8, 16),
        lambda x, repeats: round_seconds(partial(FeSEM, x), 100, 200, repeats),
    ),
    "ranks": Curve(
        "ranks", (1, 2), lambda x, repeats: round_seconds(FedAvg, 200, 1024, repeats, ranks=x)
    ),
    "e-step": Curve("clients of FeSEM's E-step", (100, 1000, 10_000), e_step_seconds),
    "pfedla": Curve("clients of pFedLA's server", (10, 100, 1000), server_step_seconds),
}


def exponent(values: list[int], seconds: list[float]) -> float:
    """Return the slope of the curve between logarithms."""
    slope, _ = np.polyfit(np.log(values), np.log(seconds), 1)
    return float(slope)


def draw(points: dict[str, tuple[list[int], list[float]]], path: str) -> None:
    """Draw all curves with logarithmic axes, one panel each; dotted is what would be linear."""
    from matplotlib.figure import Figure

    columns = min(3, len(points))
    rows = -(-len(points) // columns)
    figure = Figure(figsize=(2.6 * columns, 2.3 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for axes, (name, (values, seconds)) in zip(panels, points.items(), strict=False):
        axes.loglog(values, seconds, color="#0072b2", marker="o", markersize=4, linewidth=1.8)
        if name != "ranks":
            linear = [seconds[0] * value / values[0] for value in values]
            axes.loglog(values, linear, color="#777777", linestyle=":", linewidth=1)
        axes.set(xlabel=CURVES[name].label, ylabel="seconds")
        axes.set_xticks(values, [f"{value:,}" for value in values])
        axes.minorticks_off()
        least, most = min(seconds), max(seconds)
        axes.set_ylim(10 ** np.floor(np.log10(least)), 10 ** np.ceil(np.log10(most)))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in list(panels):
        axes.set_axis_off()
    figure.savefig(path, dpi=150)


def measured(name: str, value: int, repeats: int) -> float:
    """Measure a point in a process of its own."""
    arguments = ["--single", name, "--values", str(value), "--repeats", str(repeats)]
    process = subprocess.run(
        [sys.executable, __file__, *arguments], check=True, capture_output=True, text=True
    )
    return float(process.stdout.split()[-1])


def main() -> None:
    """Print each curve's points and its exponent, and draw them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "curves", nargs="*", type=known(CURVES), default=list(CURVES), metavar="curve"
    )
    parser.add_argument("--values", type=int, nargs="+", help="in place of the curves' own")
    parser.add_argument("--repeats", type=at_least(1), default=3)
    parser.add_argument("--picture", help="file for the picture of the curves")
    parser.add_argument("--single", choices=CURVES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    keep_freed_memory()
    quiet()
    if options.single:
        print(CURVES[options.single].measure(options.values[0], options.repeats))
        return
    points: dict[str, tuple[list[int], list[float]]] = {}
    print("| curve | seconds | exponent |")
    print("|---|---|---|", flush=True)
    for name in options.curves:
        values = options.values or list(CURVES[name].values)
        seconds = [measured(name, value, options.repeats) for value in values]
        points[name] = values, seconds
        cells = ", ".join(f"{v}: {s:.4f}" for v, s in zip(values, seconds, strict=True))
        slope = f"{exponent(values, seconds):.2f}" if len(values) > 1 else "-"
        print(f"| {name} | {cells} | {slope} |", flush=True)
    if options.picture:
        draw(points, options.picture)


if __name__ == "__main__":
    main()

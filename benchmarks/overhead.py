"""What a round costs beside a hand-written PyTorch loop that does the same steps.

    python benchmarks/overhead.py [--rounds 5] [--repeats 5] [--threads 2] [workload ...]

Both train the same clients on the same batches from the same start, in turn, in one process, so
that the ratio holds on a noisy machine. The loop is what one would write without a library: load
the server's weights, build SGD, step through the batches, add up the weighted mean.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import lightning as L
import torch
import torch.nn.functional as F
from options import at_least
from quiet import quiet
from stopwatch import Stopwatch
from torch import Tensor, nn

from pflight import Federation, keep_freed_memory
from pflight.callbacks import FedAvg
from pflight.datamodules import TensorClients
from pflight.models import MLP, Classifier, LogisticRegression, McMahanCNN


@dataclass(frozen=True)
class Workload:
    """One local epoch of some clients a round."""

    network: Callable[[], nn.Module]
    clients: int
    samples: int
    batch_size: int


WORKLOADS = {
    "cnn": Workload(McMahanCNN, clients=10, samples=600, batch_size=32),
    "logistic": Workload(partial(LogisticRegression, 784, 10), 100, samples=60, batch_size=10),
    "mlp": Workload(partial(MLP, 784, [200], 10), 100, samples=100, batch_size=10),
}


def clients_of(workload: Workload) -> list[tuple[Tensor, Tensor]]:
    """Make the clients' samples, the same at every call."""
    random = torch.Generator().manual_seed(0)
    shape = (workload.samples, 1, 28, 28)
    return [
        (
            torch.randn(shape, generator=random),
            torch.randint(10, shape[:1], generator=random),
        )
        for _ in range(workload.clients)
    ]


def federation_rounds(
    workload: Workload, data: TensorClients, network: nn.Module, rounds: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the seconds of each round, and the server's model at the end."""
    client = Classifier(network, num_classes=10, optimizer=partial(torch.optim.SGD, lr=0.01))
    federation, stopwatch = Federation(client), Stopwatch()
    trainer = L.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        callbacks=[FedAvg(), stopwatch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(federation, datamodule=data)
    state = federation.server_states()[0]
    return stopwatch.seconds, {n.removeprefix("network."): value for n, value in state.items()}


def loop_rounds(
    workload: Workload, data: TensorClients, network: nn.Module, rounds: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Do the same by hand."""
    server, model = copy.deepcopy(network).state_dict(), copy.deepcopy(network)
    model.train()
    seconds = []
    for round_index in range(rounds):
        started = time.perf_counter()
        total = {name: torch.zeros_like(value) for name, value in server.items()}
        for client in range(workload.clients):
            x, y = data.samples(client, "train")
            model.load_state_dict(server)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            order = data.order(client, round_index, 0)
            for batch in order.split(workload.batch_size):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x[batch]), y[batch])
                loss.backward()
                optimizer.step()
            weight = len(y) / (workload.samples * workload.clients)
            for name, value in model.state_dict().items():
                total[name] += weight * value
        server = total
        seconds.append(time.perf_counter() - started)
    return seconds, server


def main() -> None:
    """Print the seconds per round of both and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), metavar="workload")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--repeats", type=at_least(1), default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    quiet()
    print("| workload | loop, s a round | pflight, s a round | ratio (min to max) | same weights |")
    print("|---|---|---|---|---|")
    for name in options.workloads:
        workload = WORKLOADS[name]
        data = TensorClients(clients_of(workload), num_classes=10, batch_size=workload.batch_size)
        torch.manual_seed(0)
        network = workload.network()
        run = partial(federation_rounds, workload, data, network)
        loop = partial(loop_rounds, workload, data, network)
        (_, ours), (_, theirs) = run(2), loop(2)
        difference = max((ours[key] - theirs[key]).abs().max().item() for key in ours)
        pairs = [
            (statistics.median(loop(options.rounds)[0]), statistics.median(run(options.rounds)[0]))
            for _ in range(options.repeats)
        ]
        ratios = sorted(mine / raw for raw, mine in pairs)
        raw, mine = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(
            f"| {name} | {raw:.4f} | {mine:.4f} | {statistics.median(ratios):.3f} "
            f"({ratios[0]:.3f} to {ratios[-1]:.3f}) | to {difference:.0e} |",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""What pFedLA costs on the server, and whose models weigh most in its mixtures.

    python benchmarks/pfedla.py time
    python benchmarks/pfedla.py sparse
    python benchmarks/pfedla.py partial --root data
    python benchmarks/pfedla.py chain digits
    python benchmarks/pfedla.py steps --root data

``time`` measures the server's part of rounds in which all clients take part, with the CNN of the
paper's tables: medians of the seconds in which it mixes models, multiplies what clients have
changed with the stored models, and steps the hypernetworks. ``sparse`` measures the same with
neighbours, by the size of the cohort and the number of clients, and the memory of the whole
process. ``partial`` compares sparse mixtures with Local and FedAvg where ten of 100 clients take
part in a round, each with 90 images to train on and an MLP. ``chain`` has eight clients with four
classes each, of which neighbours share three, as in figure 6 of the paper, and says what a client's
own model, those of its neighbours and those of clients with none of its classes weigh. Where all
weigh the same it is 1/8. ``steps`` tries rules and sizes of the hypernetworks' step on four data
sets: the paper's step, the one that is divided by the square of a layer's change, and Adam.
"""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import lightning as L
import torch
from cells import cell
from quiet import quiet
from stopwatch import timing
from tensordict import TensorDict
from torch import Tensor, nn

from pflight import Federation, keep_freed_memory
from pflight.callbacks import FedAvg, Local, PFedLA, ServerCallback
from pflight.datamodules import (
    CIFAR10,
    ClassesPerClient,
    ConsecutiveClasses,
    Digits,
    DominantClasses,
    FashionMNIST,
    FederatedDataModule,
    Synthetic,
    TensorClients,
)
from pflight.engines import ClientUpdates
from pflight.models import MLP, Classifier, LogisticRegression, PFedHNCNN

RULES = {
    "paper": [0.05, 0.5, 5.0, 50.0],
    "scale-free": [0.01, 0.1, 1.0, 10.0],
    "Adam": [0.0001, 0.001, 0.01, 0.1],
}


@dataclass(frozen=True)
class Task:
    """A data set, the network for it, and the samples of each client."""

    data: Callable[..., FederatedDataModule]
    network: Callable[[], nn.Module]
    lr: float
    samples: int


SPLIT = {"val_fraction": 0.2, "test_fraction": 0.3}
SOME = {"num_clients": 10, "partition": ClassesPerClient(4, samples_per_client=200), **SPLIT}
ALL = {"num_clients": 20, "partition": ClassesPerClient(4), **SPLIT}
CLIENTS = {
    "digits": partial(Digits, **ALL),
    "fashion_mnist": partial(FashionMNIST, **SOME),
    "cifar10": partial(CIFAR10, **SOME),
    "synthetic": partial(Synthetic, alpha=1.0, beta=1.0, num_clients=20, max_samples=200, **SPLIT),
}
NETWORKS = {
    "digits": (partial(MLP, 64, [64], 10), 0.1),
    "fashion_mnist": (partial(MLP, 784, [100], 10), 0.05),
    "cifar10": (partial(PFedHNCNN, 10, 3, 32), 0.02),
    "synthetic": (partial(LogisticRegression, 60, 10), 0.01),
}

FEW = {"num_clients": 100, "cohort_size": 10, "batch_size": 20, "val_fraction": 0.1}
FEW |= {"test_fraction": 0.3}
PARTIAL = {
    "fashion_mnist, four classes": ("fashion_mnist", ClassesPerClient(4, samples_per_client=150)),
    "fashion_mnist, two dominant": ("fashion_mnist", DominantClasses(2, samples_per_client=150)),
    "cifar10, four classes": ("cifar10", ClassesPerClient(4, samples_per_client=150)),
    "cifar10, two dominant": ("cifar10", DominantClasses(2, samples_per_client=150)),
}
SMALL = {"fashion_mnist": partial(MLP, 784, [100], 10), "cifar10": partial(MLP, 3072, [64], 10)}
METHODS = {
    "Local": Local,
    "FedAvg": FedAvg,
    "pFedLA, 5 neighbours": partial(PFedLA, neighbours=5),
}


def task_of(options: argparse.Namespace) -> Task:
    """Return the task that was asked for."""
    if options.task == "digits":
        return Task(Digits, partial(MLP, 64, [64], 10), lr=0.1, samples=160)
    data = partial(FashionMNIST, root=options.root)
    return Task(data, partial(PFedHNCNN, 10, 1, 28), lr=0.02, samples=300)


def fit(
    federation: Federation, server: ServerCallback, data: FederatedDataModule, rounds: int
) -> L.Trainer:
    """Train a federation under a Trainer that writes nothing, and return that."""
    trainer = L.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        callbacks=[server],
        logger=False,
        check_val_every_n_epoch=rounds,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(federation, datamodule=data)
    return trainer


class TimedFederation(Federation):
    """Takes the seconds of the server's part of every round."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.rounds: list[dict[str, float]] = []

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds of a block to a part of the current round."""
        started = time.perf_counter()
        yield
        self.rounds[-1][part] += time.perf_counter() - started

    def training_step(self, cohort: Tensor, batch_idx: int) -> None:
        """Run a round."""
        self.rounds.append(defaultdict(float))
        with self.timed("round"), timing(self.clients.attached_engine, "train", self.note_training):
            super().training_step(cohort, batch_idx)

    def note_training(self, seconds: float) -> None:
        """Add up what a chunk of clients took to train."""
        self.rounds[-1]["training"] += seconds


class TimedPFedLA(PFedLA):
    """Says which part of a round it is at."""

    def __init__(
        self, timed: Callable[[str], AbstractContextManager[None]], neighbours: int | None = None
    ) -> None:
        super().__init__(neighbours=neighbours)
        self.timed = timed

    def broadcast(self, clients: Tensor) -> TensorDict:
        """Return each client's mixture."""
        with self.timed("mixtures"):
            return super().broadcast(clients)

    def receive(self, updates: ClientUpdates) -> None:
        """Multiply changes with stored models."""
        with self.timed("products"):
            super().receive(updates)


def print_times(options: argparse.Namespace) -> None:
    """Print the seconds of the server's part of a round by the number of clients."""
    print("| clients | mixtures | products | step | all | least |")
    print("|---|---|---|---|---|---|")
    for count in options.clients:
        random = torch.Generator().manual_seed(0)
        image = (1, 3, 32, 32)
        train = [(torch.randn(image, generator=random), torch.tensor([0])) for _ in range(count)]
        federation = TimedFederation(Classifier(PFedHNCNN(10, 3, 32), num_classes=10))
        fit(
            federation,
            TimedPFedLA(federation.timed),
            TensorClients(train, num_classes=10),
            options.rounds,
        )
        rounds = federation.rounds[1:]  # the first warms up
        server = [times["round"] - times["training"] for times in rounds]
        parts = [[times[part] for times in rounds] for part in ("mixtures", "products")]
        parts += [[whole - sum(some) for whole, *some in zip(server, *parts, strict=True)], server]
        cells = [f"{statistics.median(part):.3f}" for part in parts]
        print(f"| {count} | {' | '.join(cells)} | {min(server):.3f} |", flush=True)


def print_sparse_times(options: argparse.Namespace) -> None:
    """Print the seconds of a round's server part by clients and cohort, and the memory used."""
    print("| clients | cohort | server | least | training | GB in use at most |")
    print("|---|---|---|---|---|---|")
    for count in options.clients:
        random = torch.Generator().manual_seed(0)
        x = torch.randn(count, 2, 64, generator=random)
        train = [(own, torch.tensor([0, client % 10])) for client, own in enumerate(x)]
        for cohort in options.cohorts:
            federation = TimedFederation(Classifier(MLP(64, [64], 10), num_classes=10))
            data = TensorClients(train, num_classes=10, cohort_size=cohort)
            fit(federation, TimedPFedLA(federation.timed, options.neighbours), data, options.rounds)
            rounds = federation.rounds[1:]  # the first warms up
            server = [times["round"] - times["training"] for times in rounds]
            trained = statistics.median(times["training"] for times in rounds)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
            cells = f"{statistics.median(server):.3f} | {min(server):.3f} | {trained:.3f}"
            print(f"| {count} | {cohort} | {cells} | {peak:.2f} |", flush=True)
            del federation, data  # or the next would come beside them
            gc.collect()


def print_steps(options: argparse.Namespace) -> None:
    """Print what each rule and size of the step reaches on each data set."""
    print("| data set | step | validation | test | own weight |")
    print("|---|---|---|---|---|")
    for name, rule in product(options.tasks, options.rules):
        for lr in RULES[rule]:
            found = [judged(name, rule, lr, seed, options) for seed in range(options.seeds)]
            cells = [cell([100 * values[place] for values in found]) for place in range(3)]
            print(f"| {name} | {rule}, {lr:g} | {' | '.join(cells)} |", flush=True)


def print_partial(options: argparse.Namespace) -> None:
    """Print what methods reach where a tenth of the clients take part in a round."""
    print(f"| clients | {' | '.join(METHODS)} |")
    print(f"|---|{'---|' * len(METHODS)}")
    for task in options.tasks:
        found: dict[str, list[float]] = defaultdict(list)
        for seed in range(options.seeds):
            name, partition = PARTIAL[task]
            source, cached = (
                (CIFAR10, {"cache_dir": options.cache_dir})
                if name == "cifar10"
                else (FashionMNIST, {})
            )
            data = source(root=options.root, partition=partition, seed=seed, **FEW, **cached)
            for method, server in METHODS.items():
                torch.manual_seed(seed)
                client = Classifier(SMALL[name](), 10, optimizer=partial(torch.optim.SGD, lr=0.05))
                federation = Federation(client, local_epochs=2, seed=seed)
                trainer = fit(federation, server(), data, options.rounds)
                (values,) = trainer.test(federation, datamodule=data, verbose=False)
                found[method].append(100 * values["test/macro_acc"])
                progress = f"{task}, seed {seed}: {method} {found[method][-1]:.1f}"
                print(progress, file=sys.stderr, flush=True)
        print(f"| {task} | {' | '.join(map(cell, found.values()))} |", flush=True)


def judged(
    name: str, rule: str, lr: float, seed: int, options: argparse.Namespace
) -> tuple[float, float, float]:
    """Return validation and test accuracy of a run, and the mean weight of a client's own model."""
    network, step = NETWORKS[name]
    root = {"root": options.root} if name in ("fashion_mnist", "cifar10") else {}
    data = CLIENTS[name](**root, batch_size=10, seed=seed)
    server = PFedLA(lr=lr, scale_free=rule == "scale-free")
    torch.manual_seed(seed)
    client = Classifier(network(), 10, optimizer=partial(torch.optim.SGD, lr=step))
    adam = partial(torch.optim.Adam, lr=lr) if rule == "Adam" else None
    federation = Federation(client, local_epochs=2, server_optimizer=adam, seed=seed)
    trainer = fit(federation, server, data, options.rounds)
    (values,) = trainer.test(federation, datamodule=data, verbose=False)
    clients = range(federation.num_clients)
    own = [weights.diagonal().mean() for weights in server.layer_weights(clients).values()]
    validation = federation.history[-1].metrics["val/macro_acc"]
    return validation, values["test/macro_acc"], float(torch.stack(own).mean())


def print_chain(options: argparse.Namespace) -> None:
    """Print what models weigh for eight clients in a chain, by layer."""
    task = task_of(options)
    chain = ConsecutiveClasses(4, minimum=task.samples, log_mean=-9.0, log_std=0.0)
    first, second = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    apart = torch.minimum((first - second) % 10, (second - first) % 10)
    groups = {"own": apart == 0, "neighbours": apart == 1, "strangers": apart >= 4}
    print(f"| step | layer | {' | '.join(groups)} | clients whose own is the largest |")
    print("|---|---|---|---|---|---|")
    for lr in options.steps:
        totals: dict[str, Tensor] = {}
        for seed in range(options.seeds):
            clients = {"num_clients": 8, "cohort_size": options.cohort}
            data = task.data(partition=chain, batch_size=10, seed=seed, **clients)
            sparse = {} if options.neighbours is None else {"neighbours": options.neighbours}
            server = PFedLA(options.retain, options.weights, lr=lr, **sparse)
            torch.manual_seed(seed)
            optimizer = partial(torch.optim.SGD, lr=task.lr)
            client = Classifier(task.network(), 10, optimizer=optimizer)
            federation = Federation(client, local_epochs=2, seed=seed)
            fit(federation, server, data, options.rounds)
            for layer, weights in server.layer_weights(range(8)).items():
                values = [weights[members].mean() for members in groups.values()]
                values.append((weights.argmax(dim=1) == torch.arange(8)).sum())
                totals[layer] = totals.get(layer, torch.zeros(4)) + torch.stack(values)
        for layer, total in totals.items():
            *means, largest = (total / options.seeds).tolist()
            cells = " | ".join(f"{mean:.3f}" for mean in means)
            print(f"| {lr:g} | {layer} | {cells} | {largest:.1f} of 8 |", flush=True)


def main() -> None:
    """Print the table that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    timing = commands.add_parser("time")
    timing.add_argument("--clients", type=int, nargs="+", default=[10, 100])
    timing.add_argument("--rounds", type=int, default=11)
    timing.set_defaults(run=print_times)
    sparse = commands.add_parser("sparse")
    sparse.add_argument("--clients", type=int, nargs="+", default=[2000, 20000])
    sparse.add_argument("--cohorts", type=int, nargs="+", default=[50, 100, 200])
    sparse.add_argument("--neighbours", type=int, default=5)
    sparse.add_argument("--rounds", type=int, default=11)
    sparse.set_defaults(run=print_sparse_times)
    few = commands.add_parser("partial")
    few.add_argument("--tasks", choices=PARTIAL, nargs="+", default=list(PARTIAL))
    few.add_argument("--root", default="data", help="folder of Fashion-MNIST and CIFAR-10")
    few.add_argument("--cache-dir", help="folder that keeps the decoded images of CIFAR-10")
    few.add_argument("--rounds", type=int, default=80)
    few.add_argument("--seeds", type=int, default=3)
    few.set_defaults(run=print_partial)
    chain = commands.add_parser("chain")
    chain.add_argument("task", choices=["digits", "fashion_mnist"])
    chain.add_argument("--root", default="data", help="folder of the Fashion-MNIST files")
    chain.add_argument("--steps", type=float, nargs="+", default=[0.005, 0.05, 0.5, 5.0])
    chain.add_argument("--retain", type=int, default=0)
    chain.add_argument("--weights", choices=["softmax", "relu_norm"], default="softmax")
    chain.add_argument("--neighbours", type=int, help="of sparse mixtures; by default all models")
    chain.add_argument("--cohort", type=int, help="clients in a round; by default all")
    chain.add_argument("--rounds", type=int, default=50)
    chain.add_argument("--seeds", type=int, default=3)
    chain.set_defaults(run=print_chain)
    steps = commands.add_parser("steps")
    steps.add_argument("--tasks", choices=CLIENTS, nargs="+", default=list(CLIENTS))
    steps.add_argument("--rules", choices=RULES, nargs="+", default=list(RULES))
    steps.add_argument("--root", default="data", help="folder of Fashion-MNIST and CIFAR-10")
    steps.add_argument("--rounds", type=int, default=30)
    steps.add_argument("--seeds", type=int, default=3)
    steps.set_defaults(run=print_steps)
    options = parser.parse_args()
    keep_freed_memory()
    quiet()
    options.run(options)


if __name__ == "__main__":
    main()

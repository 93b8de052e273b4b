"""How well each method serves the clients, over several seeds: a table and a picture.

    python benchmarks/accuracy.py digits
    python benchmarks/accuracy.py fashion_mnist --root data --seeds 3 --rounds 20

Every seed draws its own partition, network and batches; all methods see the same. The table has the
mean and standard deviation over seeds after the last round, on the clients' test samples.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning as L
import torch

from pflight import Federation
from pflight.callbacks import FedAvg, FedSGD, FeSEM, Local, ServerCallback
from pflight.datamodules import ClassesPerClient, Digits, FashionMNIST, FederatedDataModule
from pflight.models import MLP, ClientModule, McMahanCNN, ProximalClient


@dataclass(frozen=True)
class Method:
    """An algorithm: its two halves, and options of the federation."""

    server: Callable[[], ServerCallback]
    client: Callable[..., ClientModule] = ClientModule
    options: dict[str, Any] = field(default_factory=dict)


METHODS = {
    "Local": Method(Local),
    "FedSGD": Method(partial(FedSGD, lr=0.5)),
    "FedAvg": Method(FedAvg),
    "FedAvg + fine-tuning": Method(FedAvg, options={"finetune_epochs": 2}),
    "FedProx": Method(FedAvg, partial(ProximalClient, mu=0.1)),
    "FeSEM(2)": Method(partial(FeSEM, 2), partial(ProximalClient, mu=0.1, scaling="eq7")),
    "FeSEM(4)": Method(partial(FeSEM, 4), partial(ProximalClient, mu=0.1, scaling="eq7")),
    "FeSEM(8)": Method(partial(FeSEM, 8), partial(ProximalClient, mu=0.1, scaling="eq7")),
}
COLUMNS = ("micro_acc", "macro_acc", "micro_f1", "macro_f1", "worst_decile_acc")


@dataclass(frozen=True)
class Task:
    """A data set with two classes per client, and the network for it."""

    data: Callable[..., FederatedDataModule]
    network: Callable[[], torch.nn.Module]
    lr: float


def task_of(options: argparse.Namespace) -> Task:
    """Return the task that was asked for."""
    if options.task == "digits":
        return Task(partial(Digits, num_clients=20), partial(MLP, 64, [64], 10), lr=0.1)
    data = partial(FashionMNIST, root=options.root, num_clients=50, cohort_size=10)
    return Task(data, McMahanCNN, lr=0.05)


def run(
    method: Method, task: Task, options: argparse.Namespace, seed: int
) -> tuple[list[float], dict[str, float]]:
    """Return the macro validation accuracy by round and the test metrics of the last round."""
    data = task.data(partition=ClassesPerClient(2), batch_size=10, seed=seed)
    torch.manual_seed(seed)
    optimizer = partial(torch.optim.SGD, lr=task.lr)
    client = method.client(task.network(), 10, optimizer=optimizer)
    federation = Federation(client, local_epochs=2, seed=seed, **method.options)
    trainer = L.Trainer(
        max_epochs=options.rounds,
        accelerator="cpu",
        callbacks=[method.server()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(federation, datamodule=data)
    curve = [entry.metrics["val/macro_acc"] for entry in federation.history]
    (metrics,) = trainer.test(federation, datamodule=data, verbose=False)
    return curve, {name: metrics[f"test/{name}"] for name in COLUMNS}


def draw(curves: dict[str, list[list[float]]], path: str) -> None:
    """Draw the validation accuracy by round, the mean over seeds with its range."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    colors = (
        "#777777",
        "#e69f00",
        "#56b4e9",
        "#009e73",
        "#cc79a7",
        "#f0c000",
        "#0072b2",
        "#d55e00",
    )
    for color, (name, runs) in zip(colors, curves.items(), strict=False):
        values = torch.tensor(runs)
        rounds = torch.arange(1, values.shape[1] + 1)
        axes.plot(rounds, values.mean(0), color=color, label=name, linewidth=1.8)
        axes.fill_between(
            rounds, values.amin(0), values.amax(0), color=color, alpha=0.12, linewidth=0
        )
    axes.set(xlabel="communication round", ylabel="macro accuracy (validation)", xlim=(1, None))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run all methods, print the table, and draw the picture if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("task", choices=["digits", "fashion_mnist"])
    parser.add_argument("--root", default="data", help="folder of the Fashion-MNIST files")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--picture", help="file for the picture of the curves")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    task = task_of(options)
    print("| method | micro acc. | macro acc. | micro F1 | macro F1 | worst decile |")
    print("|---|---|---|---|---|---|")
    curves: dict[str, list[list[float]]] = {}
    for name, method in METHODS.items():
        runs = [run(method, task, options, seed) for seed in range(options.seeds)]
        curves[name] = [curve for curve, _ in runs]
        cells = []
        for column in COLUMNS:
            values = [100 * metrics[column] for _, metrics in runs]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            cells.append(f"{statistics.mean(values):.1f} ± {spread:.1f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    if options.picture:
        draw(curves, options.picture)


if __name__ == "__main__":
    main()

"""How well each method serves the clients, over several seeds: a table and a picture.

    python benchmarks/accuracy.py digits
    python benchmarks/accuracy.py fashion_mnist --root data --clients 100 --cohort 10
    python benchmarks/accuracy.py digits --partition iid --groups rotation --methods FedAvg FeSEM(4)

Every seed draws its own partition, network and batches; all methods see the same. The table has the
mean and standard deviation over seeds after the last round, of the models that clients use: their
macro accuracy on validation samples, by which options are to be chosen, and what they reach on test
samples. Under "fine-tuned" is the macro test accuracy of copies of what the server sends
(of clients' own models with Local) that were trained as in one more round. With ``--groups`` the
clients lie in four groups that nobody tells the server, and the table says how well the clusters
agree with them: the adjusted Rand index, 1 where they are the same.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import lightning as L
import torch
from cells import cell
from sklearn.metrics import adjusted_rand_score

from pflight import Federation
from pflight.callbacks import FedAvg, FedSGD, FeSEM, Local, PFedLA, Reptile, ServerCallback
from pflight.datamodules import (
    CIFAR10,
    IID,
    ClassesPerClient,
    ClassShards,
    Digits,
    DominantClasses,
    FashionMNIST,
    FederatedDataModule,
    KnownClusters,
    Partition,
)
from pflight.models import MLP, ClientModule, ElasticClient, PFedHNCNN, ProximalClient


@dataclass(frozen=True)
class Method:
    """An algorithm: its two halves."""

    server: Callable[[], ServerCallback]
    client: Callable[..., ClientModule] = ClientModule


@dataclass(frozen=True)
class Task:
    """A data set, the network for it, and how clients train."""

    data: Callable[..., FederatedDataModule]
    network: Callable[[], torch.nn.Module]
    batch_size: int
    optimizer: dict[str, float]


def methods_of(kappas: list[float], alphas: list[float]) -> dict[str, Method]:
    """Return all methods by name; those with a kappa or an alpha once for each value."""
    proximal = partial(ProximalClient, mu=0.1, scaling="eq7")
    methods = {
        "Local": Method(Local),
        "FedSGD": Method(partial(FedSGD, lr=0.5)),
        "FedAvg": Method(FedAvg),
        "FedProx": Method(FedAvg, partial(ProximalClient, mu=0.1)),
        "FeSEM(2)": Method(partial(FeSEM, 2), proximal),
        "FeSEM(4)": Method(partial(FeSEM, 4), proximal),
        "FeSEM(8)": Method(partial(FeSEM, 8), proximal),
        "FeSEM-MA(4)": Method(partial(FeSEM, 4, matching="bbp_map"), proximal),
        "FedEC-wo": Method(Reptile, partial(ElasticClient, constraint=None)),
    }
    for constraint, name in (("kl", "FedEC"), ("l2", "FedEC-l2")):
        for alpha in alphas:
            client = partial(ElasticClient, alpha=alpha, constraint=constraint)
            methods[f"{name}, {alpha:g}"] = Method(Reptile, client)
    for retain, name in ((0, "pFedLA"), (1, "HeurpFedLA(1)")):
        for kappa in kappas:
            methods[f"{name}, {kappa:g}"] = Method(partial(PFedLA, retain, lr=kappa))
    return methods


NAMES = [name.split(",")[0] for name in methods_of([0.5], [1.0])]
USUAL = ["Local", "FedSGD", "FedAvg", "FedProx", "FeSEM(2)", "FeSEM(4)", "FeSEM(8)"]
PARTITIONS: dict[str, Callable[[int | None], Partition]] = {
    "iid": lambda _: IID(),
    "classes2": lambda size: ClassesPerClient(2, samples_per_client=size),
    "classes4": lambda size: ClassesPerClient(4, samples_per_client=size),
    "dominant2": lambda size: DominantClasses(2, samples_per_client=size),
    "shards2": lambda _: ClassShards(2),
}
COLUMNS = {
    "validation": "val/macro_acc",
    "micro acc.": "test/micro_acc",
    "macro acc.": "test/macro_acc",
    "micro F1": "test/micro_f1",
    "macro F1": "test/macro_f1",
    "worst decile": "test/worst_decile_acc",
    "fine-tuned": "finetuned",
}


def task_of(options: argparse.Namespace) -> Task:
    """Return the task that was asked for."""
    if options.task == "digits":
        return Task(Digits, partial(MLP, 64, [64], 10), 10, {"lr": 0.1})
    convolutional = options.network == "cnn"
    if options.task == "fashion_mnist":
        data = partial(FashionMNIST, root=options.root)
        network = partial(PFedHNCNN, 10, 1, 28) if convolutional else partial(MLP, 784, [100], 10)
        return Task(data, network, 32, {"lr": 0.05})
    data = partial(CIFAR10, root=options.root, official_test=True)
    network = partial(PFedHNCNN, 10, 3, 32) if convolutional else partial(MLP, 3072, [100], 10)
    return Task(data, network, 32, {"lr": 0.02, "momentum": 0.5})


def data_of(task: Task, options: argparse.Namespace, seed: int) -> FederatedDataModule:
    """Return the clients of a seed."""
    partition = PARTITIONS[options.partition](options.samples)
    shared = {"batch_size": task.batch_size, "cohort_size": options.cohort, "seed": seed}
    data = task.data(partition=partition, num_clients=options.clients, **shared)
    return KnownClusters(data, 4, options.groups, **shared) if options.groups else data


def run(
    method: Method, task: Task, options: argparse.Namespace, seed: int
) -> tuple[list[float], dict[str, float]]:
    """Return the macro validation accuracy by round, and the last round's metrics.

    Beside these metrics by tag there are ``finetuned`` and, where there are clusters, ``groups``.
    """
    data = data_of(task, options, seed)
    torch.manual_seed(seed)
    optimizer = partial(torch.optim.SGD, **task.optimizer)
    client = method.client(task.network(), 10, optimizer=optimizer)
    federation = Federation(client, local_epochs=options.local_epochs, seed=seed)
    server = method.server()
    trainer = L.Trainer(
        max_epochs=options.rounds,
        accelerator="cpu",
        callbacks=[server],
        logger=False,
        check_val_every_n_epoch=1 if options.picture else options.rounds,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(federation, datamodule=data)
    curve = [entry.metrics.get("val/macro_acc", torch.nan) for entry in federation.history]
    (values,) = trainer.test(federation, datamodule=data, verbose=False)
    tuned_too = replace(federation.clients.training, finetune_epochs=options.local_epochs)
    federation.clients.training = tuned_too
    (tuned,) = trainer.test(federation, datamodule=data, verbose=False)
    last = federation.history[-1].metrics
    values = {**last, **values, "finetuned": tuned["test/finetuned/macro_acc"]}
    if isinstance(data, KnownClusters) and isinstance(server, FeSEM):
        values["groups"] = adjusted_rand_score(data.clusters, server.assignments)
    return curve, values


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
    axes.set(xlabel="communication rounds", ylabel="macro accuracy (validation)", xlim=(1, None))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run the methods, print the table, and draw the picture if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("task", choices=["digits", "fashion_mnist", "cifar10"])
    parser.add_argument("--root", default="data", help="folder of the files")
    parser.add_argument("--partition", choices=PARTITIONS, default="classes2")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--samples", type=int, help="of each client, by default all there are")
    parser.add_argument("--cohort", type=int, help="clients in a round, by default all")
    parser.add_argument("--network", choices=["mlp", "cnn"], default="mlp", help="for pictures")
    parser.add_argument("--groups", choices=["labels", "rotation", "features"])
    parser.add_argument("--methods", nargs="+", choices=NAMES, default=USUAL)
    parser.add_argument(
        "--kappa", type=float, nargs="+", default=[0.5], help="steps of pFedLA's hypernetworks"
    )
    parser.add_argument(
        "--alpha", type=float, nargs="+", default=[1.0], help="weights of FedEC's constraint"
    )
    parser.add_argument("--local_epochs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--picture", help="file for the picture of the curves")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    task = task_of(options)
    methods = {
        name: method
        for name, method in methods_of(options.kappa, options.alpha).items()
        if name.split(",")[0] in options.methods
    }
    columns = [*COLUMNS, *(["groups"] if options.groups else [])]
    print(f"| method | {' | '.join(columns)} |")
    print("|---" * (1 + len(columns)) + "|")
    curves: dict[str, list[list[float]]] = {}
    for name, method in methods.items():
        runs = [run(method, task, options, seed) for seed in range(options.seeds)]
        curves[name] = [curve for curve, _ in runs]
        cells = [cell([100 * values[tag] for _, values in runs]) for tag in COLUMNS.values()]
        if options.groups:
            found = [values["groups"] for _, values in runs if "groups" in values]
            cells.append(f"{statistics.mean(found):.2f}" if found else "")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    if options.picture:
        draw(curves, options.picture)


if __name__ == "__main__":
    main()

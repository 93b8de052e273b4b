r"""Whether ``FeSEM("auto")`` finds known groups, and makes clusters only where they pay.

    python benchmarks/num_clusters.py run rotation:1 rotation:4 labels:8 --seeds 10 --out results/k
    python benchmarks/num_clusters.py run rotation:4 dirichlet:1 --seeds 3 --rounds 30 --compare \
        --out results/k30
    python benchmarks/num_clusters.py table results/k results/k30

Clients hold scikit-learn's digits, dealt equally. A case is a kind and the number of groups, which
differ by this kind. ``dirichlet`` and ``omniglot`` have no groups, but clients that differ. A run
chooses the number of clusters and trains for ``--rounds`` rounds. With ``--compare``, FedAvg and
Local train as long, and all are tested. Each run appends a line to ``runs.csv``; a command that
is given again goes on.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from quiet import quiet
from scipy.ndimage import rotate
from sklearn.metrics import adjusted_rand_score
from torch import Tensor
from torch.optim import SGD

from pflight import Federation
from pflight.callbacks import FedAvg, FeSEM, Local, ServerCallback
from pflight.datamodules import IID, Digits, Dirichlet, Omniglot, TensorClients
from pflight.datamodules.partitions.partition import ByUser
from pflight.models import MLP, Classifier, PFedHNCNN

Change = Callable[[Tensor, Tensor, int, torch.Generator], tuple[Tensor, Tensor]]
"""Gets images ``[n, 1, 8, 8]``, labels ``[n]``, the group and its random generator."""
COLUMNS = ("kind", "groups", "clients", "seed", "found", "rand_index", "p", "seconds")
COLUMNS += ("auto", "fedavg", "auto_below", "fedavg_below")


def turned(x: Tensor, y: Tensor, group: int, _: torch.Generator, angle: int) -> Any:
    """Turn the images of a group by so many times the angle."""
    turns = rotate(x.numpy(), angle * group, axes=(2, 3), reshape=False, order=1)
    return torch.from_numpy(turns), y


def flipped(x: Tensor, y: Tensor, group: int, _: torch.Generator) -> Any:
    """Leave the first group's images, and flip those of three others."""
    return [x, x.flip(3), x.flip(2), x.transpose(2, 3)][group], y


def permuted(x: Tensor, y: Tensor, group: int, random: torch.Generator) -> Any:
    """Give each group but the first an order of pixels of its own."""
    order = torch.randperm(64, generator=random)
    return x.flatten(1)[:, order].view_as(x) if group else x, y


def offset(x: Tensor, y: Tensor, group: int, random: torch.Generator) -> Any:
    """Add a pattern to the images of each group but the first."""
    return x + bool(group) * torch.randn(x.shape[1:], generator=random), y


CHANGES: dict[str, Change] = {
    "none": lambda x, y, group, random: (x, y),
    "dirichlet": lambda x, y, group, random: (x, y),
    "rotation": partial(turned, angle=90),
    "rotation45": partial(turned, angle=45),
    "labels": lambda x, y, group, random: (x, (y + group) % 10),
    "permuted_labels": lambda x, y, group, random: (x, torch.randperm(10, generator=random)[y]),
    "inverted": lambda x, y, group, random: (1 - x if group else x, y),
    "pixels": permuted,
    "flipped": flipped,
    "offset": offset,
    "moved": lambda x, y, group, random: (x.roll(2 * group, 3), y),
}


def digits(kind: str, groups: int, clients: int, seed: int) -> tuple[TensorClients, Tensor]:
    """Return the clients, and the group of each ``[clients]``."""
    partition = Dirichlet(alpha=0.5) if kind == "dirichlet" else IID()
    base = Digits(partition, clients, val_fraction=0.2, test_fraction=0.3, seed=seed)
    base.prepare_data()
    base.setup()
    random = torch.Generator().manual_seed(seed)
    truth = torch.randperm(clients, generator=random) % groups

    def changed(split: Any) -> list[tuple[Tensor, Tensor]]:
        made = []
        for client, group in enumerate(truth.tolist()):
            own = torch.Generator().manual_seed(1000 * seed + group)
            made.append(CHANGES[kind](*base.samples(client, split), group, own))
        return made

    splits = {split: changed(split) for split in ("val", "test")}
    data = TensorClients(changed("train"), **splits, num_classes=10, batch_size=10, seed=seed)
    return data, truth


def world(kind: str, groups: int, clients: int, seed: int, root: str) -> Any:
    """Return the clients' data, their groups and their module."""
    torch.manual_seed(seed)
    if kind == "omniglot":
        data = Omniglot(root, partition=ByUser(), batch_size=10, seed=seed)
        data.prepare_data()
        data.setup()
        network = PFedHNCNN(num_classes=data.num_classes, in_channels=1, image_size=28)
        module = Classifier(network, data.num_classes, optimizer=partial(SGD, lr=0.05))
        return data, torch.zeros(data.num_clients), module
    data, truth = digits(kind, groups, clients, seed)
    module = Classifier(MLP(64, [64], 10), 10, optimizer=partial(SGD, lr=0.1))
    return data, truth, module


def fitted(callback: ServerCallback, data: Any, module: Any, seed: int, rounds: int) -> Federation:
    """Train a federation for some rounds."""
    federation = Federation(module, local_epochs=5, seed=seed)
    trainer = L.Trainer(
        max_epochs=rounds,
        callbacks=[callback],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    trainer.fit(federation, datamodule=data)
    return federation


def tested(federation: Federation, data: Any) -> Tensor:
    """Return each client's accuracy on its test samples ``[clients]``."""
    federation.trainer.test(federation, datamodule=data, verbose=False)
    return federation.client_metrics("test")["acc"]


def one_run(case: str, clients: int, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Choose the number of clusters of a case, and train."""
    kind, groups = case.split(":")
    data, truth, module = world(kind, int(groups), clients, seed, options.root)
    began = time.monotonic()
    auto = fitted(FeSEM("auto"), data, module, seed, options.rounds)
    seconds = time.monotonic() - began
    selection, found = auto.callback.selection, auto.callback.num_clusters
    several = [k for k in selection.losses if k > 1]
    row = {
        "kind": kind,
        "groups": groups,
        "clients": len(truth),
        "seed": seed,
        "found": found,
        "rand_index": adjusted_rand_score(truth, auto.callback.assignments),
        "p": min(map(selection.p_value, several), default=1.0),
        "seconds": round(seconds),
    }
    if options.compare:
        accuracies = {"auto": tested(auto, data)}
        for name, callback in (("fedavg", FedAvg()), ("local", Local())):
            other = fitted(callback, data, module, seed, options.rounds)
            accuracies[name] = tested(other, data)
        local = accuracies["local"]
        for name in ("auto", "fedavg"):
            row[name] = 100 * float(accuracies[name].nanmean())
            row[f"{name}_below"] = 100 * float((accuracies[name] < local).double().mean())
    return row


def run(options: argparse.Namespace) -> None:
    """Run what is not in ``runs.csv`` yet."""
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "runs.csv"
    rows = read(path)
    done = {(row["kind"], row["groups"], row["clients"], row["seed"]) for row in rows}
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if not rows:
            writer.writeheader()
        for seed in range(options.seeds):
            for case in options.cases:
                clients = 20 if case.startswith("omniglot") else options.clients
                if (*case.split(":"), str(clients), str(seed)) not in done:
                    row = one_run(case, clients, seed, options)
                    writer.writerow(row)
                    file.flush()
                    print(row, flush=True)


def read(path: Path) -> list[dict[str, str]]:
    """Return the lines of a file of runs, none if there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def table(options: argparse.Namespace) -> None:
    """Print the table of some folders."""
    rows = [row for folder in options.folders for row in read(folder / "runs.csv")]
    cases = dict.fromkeys((row["kind"], row["groups"], row["clients"]) for row in rows)
    head = ["groups differ by", "groups", "clients", "right K", "K", "least Rand index"]
    head += ["auto", "FedAvg", "below Local: auto", "FedAvg"]
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    for case in cases:
        own = [row for row in rows if (row["kind"], row["groups"], row["clients"]) == case]
        found = [int(row["found"]) for row in own]
        right = sum(k == int(case[1]) for k in found)
        index = min(float(row["rand_index"]) for row in own)
        measures = [_mean(own, name) for name in COLUMNS[-4:]]
        counts = ", ".join(f"{k} ({found.count(k)})" for k in sorted(set(found)))
        cells = [*case, f"{right} of {len(own)}", counts, f"{index:.2f}", *measures]
        print(f"| {' | '.join(cells)} |")


def _mean(rows: list[dict[str, str]], name: str) -> str:
    values = [float(row[name]) for row in rows if row[name]]
    return f"{np.mean(values):.1f}" if values else ""


def main() -> None:
    """Run, or print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run", help="run cases, such as rotation:4")
    kinds = ", ".join((*CHANGES, "omniglot"))
    runs.add_argument("cases", nargs="+", help=f"KIND:GROUPS; kinds are {kinds}")
    runs.add_argument("--clients", type=int, default=20)
    runs.add_argument("--seeds", type=int, default=10)
    runs.add_argument("--rounds", type=int, default=1, help="rounds after the choice")
    runs.add_argument("--compare", action="store_true", help="also train FedAvg and Local")
    runs.add_argument("--root", default="data", help="folder of Omniglot's archives")
    runs.add_argument("--out", type=Path, required=True)
    runs.set_defaults(do=run)
    tables = commands.add_parser("table", help="print the table of folders")
    tables.add_argument("folders", type=Path, nargs="+")
    tables.set_defaults(do=table)
    options = parser.parse_args()
    quiet()
    options.do(options)


if __name__ == "__main__":
    main()

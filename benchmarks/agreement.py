"""Nine methods through PFLlib and through pflight: the same clients, first weights and step sizes.

    git clone https://github.com/TsingZ0/PFLlib
    pip install h5py matplotlib scikit-learn
    python benchmarks/agreement.py PFLlib
    python benchmarks/agreement.py PFLlib --batch_size 10 --seeds 5

Without ``--batch_size`` clients take all their samples in a batch, so that nothing is random, and
the models of both libraries have to be the same up to rounding: the table has the largest
difference of a weight, of the server's model and of the models by which clients are judged, as a
share of the largest change since the start. With it, batches come in other orders, and accuracies
have to agree as well as those of two seeds.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from cells import cell
from quiet import quiet
from torch import Tensor, nn

from pflight import Federation
from pflight.callbacks import (
    APFL,
    SCAFFOLD,
    Ditto,
    FedALA,
    FedAvg,
    FedProx,
    FedRep,
    PFedMe,
    ServerCallback,
    SharedPart,
)
from pflight.datamodules import ClassesPerClient, Digits
from pflight.models import MLP, Classifier
from pflight.states.layers import Layers

LR, EPOCHS, HEAD_EPOCHS, MU = 0.1, 4, 3, 0.5
STARTING = 11  # epochs in which PFLlib's FedALA learns weights first, if the loss hardly changes


@dataclass(frozen=True)
class Method:
    """A method in both libraries.

    Attributes:
        module: PFLlib's module of the server.
        server: And its class.
        callback: pflight's.
        options: What PFLlib is told beside the usual.
        split: Whether PFLlib wants a network of a base and a head.
        personal: Of a client of PFLlib, the module by which it is judged.
        epochs: Local epochs of pflight.
    """

    module: str
    server: str
    callback: Callable[[], ServerCallback]
    options: dict[str, Any] = field(default_factory=dict)
    split: bool = False
    personal: Callable[[Any], nn.Module] = lambda client: client.model
    epochs: int = EPOCHS


def pfedmes_own(client: Any) -> nn.Module:
    """Return a client's model with what PFLlib takes for its personal parameters."""
    client.update_parameters(client.model, client.personalized_params)
    return client.model


METHODS = {
    "FedAvg": Method("serveravg", "FedAvg", FedAvg),
    "FedProx": Method("serverprox", "FedProx", partial(FedProx, mu=MU), {"mu": MU}),
    "FedPer": Method(
        "serverper", "FedPer", partial(SharedPart, private=Layers(last=1)), split=True
    ),
    "FedRep": Method(
        "serverrep",
        "FedRep",
        partial(FedRep, head_epochs=HEAD_EPOCHS),
        {"plocal_epochs": HEAD_EPOCHS},
        split=True,
        epochs=EPOCHS + HEAD_EPOCHS,
    ),
    "Ditto": Method(
        "serverditto",
        "Ditto",
        partial(Ditto, lam=MU),
        {"mu": MU, "plocal_epochs": EPOCHS},
        personal=lambda client: client.model_per,
    ),
    "APFL": Method(
        "serverapfl",
        "APFL",
        partial(APFL, alpha=0.5, alpha_lr=LR),
        {"alpha": 0.5},
        personal=lambda client: client.model_per,
    ),
    "pFedMe": Method(
        "serverpFedMe",
        "pFedMe",
        partial(PFedMe, lam=5.0, personal_lr=0.05, personal_steps=5, mu=0.001),
        {"lamda": 5.0, "p_learning_rate": 0.05, "K": 5, "beta": 1.0},
        personal=pfedmes_own,
    ),
    "SCAFFOLD": Method("serverscaffold", "SCAFFOLD", SCAFFOLD, {"server_learning_rate": 1.0}),
    "FedALA": Method(
        "serverala",
        "FedALA",
        partial(FedALA, layers=1, lr=1.0, share=1.0, start_epochs=STARTING),
        {"eta": 1.0, "rand_percent": 100, "layer_idx": 2},
    ),
}
NETWORK = partial(MLP, 64, [32], 10)


@dataclass(frozen=True)
class Models:
    """What a run ends with.

    Attributes:
        server: The server's model.
        own: The models by which clients are judged.
    """

    server: Tensor
    own: list[Tensor]


def by_pflight(method: Method, data: Digits, network: nn.Module, rounds: int, seed: int) -> Models:
    """Run a method in pflight."""
    client = Classifier(network, 10, optimizer=partial(torch.optim.SGD, lr=LR))
    federation = Federation(client, local_epochs=method.epochs, seed=seed)
    trainer = L.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        callbacks=[method.callback()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    with redirect_stdout(StringIO()):
        trainer.fit(federation, datamodule=data)

    def flat(state: dict[str, Tensor]) -> Tensor:
        return torch.cat([state[f"network.{n}"].flatten() for n, _ in network.named_parameters()])

    own = [flat(federation.client_state(i)) for i in range(data.num_clients)]
    return Models(flat(federation.server_states()[0]), own)


class Over(Exception):  # noqa: N818 (nothing is wrong)
    """All rounds are over."""


def by_pfllib(
    method: Method, data: Digits, network: nn.Module, rounds: int, batch_size: int | None
) -> Models:
    """Run a method in PFLlib, which is on Python's path."""
    module = import_module(f"flcore.servers.{method.module}")
    sizes = data.num_samples("train")
    if method.split:
        head, network.output = network.output, nn.Identity()
        network = import_module("flcore.trainmodel.models").BaseHeadSplit(network, head)
    arguments = argparse.Namespace(**USUAL, **method.options)
    arguments.model, arguments.global_rounds = network, rounds
    arguments.batch_size = batch_size or int(sizes.max())
    arguments.num_clients, arguments.num_classes = data.num_clients, 10
    remaining = iter(range(rounds))

    def look(*_: Any) -> None:
        """Stop when a model that all rounds have trained has been sent."""
        if next(remaining, None) is None:
            raise Over

    with files_of(data), redirect_stdout(StringIO()):
        server = getattr(module, method.server)(arguments, 0)
        server.evaluate = look if method.server != "pFedMe" else lambda: None
        server.evaluate_personalized = look if method.server == "pFedMe" else lambda: None
        with suppress(Over):
            server.train()

    def flat(model: nn.Module) -> Tensor:
        return nn.utils.parameters_to_vector(model.parameters()).detach().clone()

    return Models(flat(server.global_model), [flat(method.personal(c)) for c in server.clients])


USUAL: dict[str, Any] = {
    "algorithm": "",
    "dataset": "clients",
    "device": "cpu",
    "save_folder_name": "models",
    "local_learning_rate": LR,
    "local_epochs": EPOCHS,
    "few_shot": 0,
    "learning_rate_decay": False,
    "learning_rate_decay_gamma": 1.0,
    "join_ratio": 1.0,
    "random_join_ratio": False,
    "time_select": False,
    "time_threthold": 1e9,
    "goal": "",
    "top_cnt": 100,
    "auto_break": False,
    "eval_gap": 1,
    "client_drop_rate": 0.0,
    "train_slow_rate": 0.0,
    "send_slow_rate": 0.0,
    "dlg_eval": False,
    "dlg_gap": 1,
    "batch_num_per_client": 1,
    "num_new_clients": 0,
    "fine_tuning_epoch_new": 0,
}
"""What PFLlib's command line says by default, but for the step, the epochs and the cohort."""


@contextmanager
def files_of(data: Digits) -> Iterator[None]:
    """Work in a folder where PFLlib finds the clients' samples."""
    with tempfile.TemporaryDirectory() as folder:
        for split in ("train", "test"):
            place = Path(folder, "dataset", "clients", split)
            place.mkdir(parents=True)
            for client in range(data.num_clients):
                x, y = data.samples(client, split)
                np.savez(place / f"{client}.npz", data={"x": x.numpy(), "y": y.numpy()})
        work = Path(folder, "system")
        work.mkdir()
        with chdir(work):
            yield


def accuracy(models: Sequence[Tensor], data: Digits) -> float:
    """Return the mean over clients of their models' accuracy on test samples, in percent."""
    network, found = NETWORK(), []
    for client, weights in enumerate(models):
        nn.utils.vector_to_parameters(weights, network.parameters())
        x, y = data.samples(client, "test")
        with torch.no_grad():
            found.append((network(x).argmax(dim=1) == y).float().mean().item())
    return 100 * statistics.mean(found)


def apart(one: Tensor, other: Tensor, start: Tensor) -> float:
    """Return the largest difference of two models, as a share of the largest change."""
    return float((one - other).abs().max() / (one - start).abs().max())


def line(name: str, options: argparse.Namespace) -> str:
    """Return a method's line of the table."""
    method, accuracies, differences = METHODS[name], [], []
    for seed in range(options.seeds):
        partition = ClassesPerClient(4, samples_per_client=80)
        split = {"val_fraction": 0.0, "test_fraction": 0.5, "batch_size": options.batch_size}
        data = Digits(partition=partition, num_clients=10, seed=seed, **split)
        data.setup()
        torch.manual_seed(seed)
        network = NETWORK()
        start = nn.utils.parameters_to_vector(network.parameters()).detach()
        mine = by_pflight(method, data, copy.deepcopy(network), options.rounds, seed)
        theirs = by_pfllib(method, data, copy.deepcopy(network), options.rounds, options.batch_size)
        accuracies.append([accuracy(models.own, data) for models in (mine, theirs)])
        shared = slice(len(theirs.server))  # the base alone, if it is split
        differences.append(
            [
                apart(mine.server[shared], theirs.server, start[shared]),
                max(apart(a, b, start) for a, b in zip(mine.own, theirs.own, strict=True)),
            ]
        )
    cells = [name]
    if options.batch_size is None:
        cells += [f"{max(column):.0e}" for column in zip(*differences, strict=True)]
    for column in zip(*accuracies, strict=True):
        cells.append(cell(column))
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path, help="folder of PFLlib")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--batch_size", type=int, help="by default all of a client's samples")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    quiet()
    sys.path.insert(0, str((options.checkout / "system").resolve()))
    differences = ["server's models apart", "own models apart"] if not options.batch_size else []
    head = ["method", *differences, "pflight", "PFLlib"]
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    for name in options.methods:
        print(line(name, options), flush=True)


if __name__ == "__main__":
    main()

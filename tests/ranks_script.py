"""Trains federations on one or two ranks; ``python -m tests.ranks_script FOLDER`` runs two.

Everything that the ranks know at the end is written to ``FOLDER``, for the tests to compare.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import defaultdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from pflight import Federation
from pflight.adapters.side_path import addends_of
from pflight.callbacks import FedAvg, FedDANE, FedProx, PerFedAvg, PFedMe
from pflight.datamodules import FederatedDataModule, KnownClusters, TensorClients
from pflight.errors import ClientError, ConfigurationError
from pflight.models import Classifier
from tests import algorithm_tester
from tests.algorithm_tester import Algorithm
from tests.combinations import COMBINATIONS
from tests.runs import (
    CLASSES,
    FEATURES,
    batchnorm_client,
    dropout_client,
    failing_at_the_end,
    linear_client,
    quiet_trainer,
    samples,
    sgd,
    small_data,
)

ROUNDS, SAVED = 4, 2
ON_DISK = "Local on disk"
DRIFTING = "FeSEM-reassign drifting"
DROPOUT = {"CFL-splitting", "FeSEM", "FeSEM-MA", "IFCA", "L2GD", "Local", ON_DISK, "TrimmedKMeans"}
DROPOUT |= {DRIFTING, "CFL-reassign", "FeSEM-auto"}
BATCHNORM = {
    "APFL",
    "Ditto",
    "FedEC-forget",
    "FedALA",
    "FedAvg",
    "FedBN",
    "FedEC",
    "FedFomo",
    "FedRep",
}
BATCHNORM |= {"APPLE", "FedAMP", "FedBABU", "FedCAC", "FedDyn", "FedExP", "FedNova"}
BATCHNORM |= {"FedDBE", "FedGH", "FedPAC", "FedProto", "HeurpFedLA", "SCAFFOLD", "pFedHN"}
BATCHNORM |= {"FedAS", "FedSGD", "GPFL", "kNN-Per", "pFedFDA", "pFedLA", "pFedLA-sparse"}
BATCHNORM |= {"FedBABU-own", "FedDyn-own", "Halfway-own", "Scaled-own"}
BATCHNORM |= {"HetLoRA", "HetLoRA-product", "HetLoRA-prune", "HiLoRA", "RoLoRA"}
OTHERS = {  # which the common tester has without what needs the data of newcomers
    "FedDANE": Algorithm(FedDANE),
    "Per-FedAvg": Algorithm(PerFedAvg),
    "pFedMe": Algorithm(PFedMe),
    **{name: Algorithm(callback) for name, callback in COMBINATIONS.items()},
}
SIDES = ("residual", "stack") if find_spec("peft") else ()
ADAPTED = {f"FedAvg-{how}": Algorithm(partial(FedAvg, aggregate=how)) for how in SIDES}
ALGORITHMS = {
    name: algorithm_tester.ALGORITHMS[name.removesuffix(" on disk").removesuffix(" drifting")]
    for name in sorted(DROPOUT | BATCHNORM)
}
ALGORITHMS |= OTHERS | ADAPTED


def adapted_client(kind: type[Classifier]) -> Classifier:
    """Return a client module with adapters."""
    import peft

    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(FEATURES, 6), torch.nn.Linear(6, CLASSES))
    config = peft.LoraConfig(r=2, lora_alpha=2, target_modules=["0", "1"])
    return kind(peft.get_peft_model(network, config), CLASSES, optimizer=sgd(0.1))


def fit(name: str, folder: Path, ckpt_path: Path | None = None, **options: Any) -> dict[str, Any]:
    """Train, save a checkpoint after some rounds, test, and return all that is known."""
    algorithm, make = ALGORITHMS[name], dropout_client if name in DROPOUT else batchnorm_client
    make = adapted_client if name in ADAPTED else make
    options_of_data = {"cohort_size": 4, "dropout": 0.2, "holdout_clients": 0.2, "eval_chunk": 3}
    data: FederatedDataModule = small_data(**options_of_data)
    if name == DRIFTING:
        data = KnownClusters(data, 2, moves={1: 0.5, 3: 0.5}, batch_size=4, **options_of_data)
    client, memory = (
        make(failing_at_the_end(algorithm.client)),
        "disk" if name == ON_DISK else "ram",
    )
    tuning = {"finetune_epochs": 1, "newcomer_epochs": 2}
    federation = Federation(client, local_epochs=2, client_memory=memory, **tuning)
    saver = ModelCheckpoint(folder, f"{name}-{{epoch}}", save_top_k=-1, every_n_epochs=SAVED)
    trainer = quiet_trainer(ROUNDS, algorithm.callback(), saver, default_root_dir=folder, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(federation, datamodule=data, ckpt_path=ckpt_path)
        (tested,) = trainer.test(federation, datamodule=data, verbose=False)
        clients = [federation.client_state(i) for i in range(data.num_clients)]
    judged = federation.client_metrics("test")
    return {
        "server": federation.server_states(),
        "clients": clients,
        "cohorts": [entry.clients for entry in federation.history],
        "failed": [entry.failed for entry in federation.history],
        "bytes": [(entry.bytes_down, entry.bytes_up) for entry in federation.history],
        "metrics": [entry.metrics for entry in federation.history],
        "tested": tested,
        "judged": judged,
        "global_step": trainer.global_step,
        "assignments": getattr(federation.callback, "assignments", torch.empty(0)),
        "side path": [
            left @ right[0] if right else left
            for addend in addends_of(federation.client)
            for left, *right in [addend.factors]
        ],
    }


DIFFERENT = {
    "samples": "the clients' samples",
    "weights": "the initial weights",
    "data.batch_size": "data.batch_size (4 on rank 0, 5 on rank 1)",
    "client.optimizer": "client.optimizer (partial(SGD, [], {lr: 0.1}) on rank 0",
    "model.local_epochs": "model.local_epochs (1 on rank 0, 2 on rank 1)",
    "model.max_epochs": "model.max_epochs (1 on rank 0, 2 on rank 1)",
    "algorithm.mu": "algorithm.mu (0.1 on rank 0, 0.2 on rank 1)",
}
"""What the ranks may differ in, and how it is called."""


class Unreadable(TensorClients):
    """Data of which one client's samples, of the second rank, can't be read any more."""

    def samples(self, client: int, split: Any) -> Any:
        if client == 3 and vars(self).get("gone"):
            raise OSError("its disk is gone")
        return super().samples(client, split)


def raised(stage: str, **options: Any) -> str | None:
    """Return what a rank raises where a client of the second fails and that stops the run."""
    pairs = [samples(8, seed) for seed in range(6)]
    data = Unreadable(pairs, val=pairs, test=pairs, num_classes=CLASSES, batch_size=4, eval_chunk=2)
    data.gone = True
    federation = Federation(linear_client(), on_client_error="raise")
    try:
        getattr(quiet_trainer(2, **options), stage)(federation, datamodule=data)
    except ClientError as error:
        return str(error)
    return None


def different(what: str, **options: Any) -> str | None:
    """Return what a rank raises where its federation differs from that of the other rank."""
    rank = int(os.environ.get("LOCAL_RANK", 0))
    own = defaultdict(int, {what: rank})
    pairs = [samples(8, seed + own["samples"]) for seed in range(4)]
    data = TensorClients(pairs, num_classes=CLASSES, batch_size=4 + own["data.batch_size"])
    client = linear_client(optimizer=sgd(0.1 * (1 + own["client.optimizer"])))
    if own["weights"]:
        torch.nn.init.zeros_(client.network.weight)
    federation = Federation(client, local_epochs=1 + own["model.local_epochs"])
    callback = FedProx(0.1 * (1 + own["algorithm.mu"]))
    trainer = quiet_trainer(1 + own["model.max_epochs"], callback, **options)
    try:
        trainer.fit(federation, datamodule=data)
    except ConfigurationError as error:
        return str(error)
    return None


def main(folder: str, *names: str) -> None:
    """Run algorithms on two ranks, from the start and on from one rank's checkpoint."""
    two = {"strategy": "ddp", "devices": 2}
    results = {}
    for name in names:
        results[name] = fit(name, Path(folder) / "two", **two)
        saved = Path(folder) / "one" / f"{name}-epoch={SAVED - 1}.ckpt"
        results[f"{name} resumed"] = fit(name, Path(folder) / "resumed", saved, **two)
    results["raised"] = [raised(stage, **two) for stage in ("fit", "validate", "predict")]
    results["different"] = {what: different(what, **two) for what in ("nothing", *DIFFERENT)}
    rank = torch.distributed.get_rank()
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

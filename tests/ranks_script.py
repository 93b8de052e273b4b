"""Trains federations on one or two ranks; ``python -m tests.ranks_script FOLDER`` runs two.

Everything that the ranks know at the end is written to ``FOLDER``, for the tests to compare.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from pflight import Federation
from pflight.callbacks import FedDANE, PerFedAvg, PFedMe
from pflight.datamodules import TensorClients
from pflight.errors import ClientError
from tests import algorithm_tester
from tests.algorithm_tester import Algorithm
from tests.runs import (
    CLASSES,
    batchnorm_client,
    dropout_client,
    failing_at_the_end,
    linear_client,
    quiet_trainer,
    samples,
    small_data,
)

ROUNDS, SAVED = 4, 2
ON_DISK = "Local on disk"
DROPOUT = {"CFL-splitting", "FeSEM", "FeSEM-MA", "IFCA", "L2GD", "Local", ON_DISK, "TrimmedKMeans"}
BATCHNORM = {"APFL", "Ditto", "FedALA", "FedAvg", "FedBN", "FedEC", "FedFomo", "FedRep"}
BATCHNORM |= {"APPLE", "FedAMP", "FedBABU", "FedCAC", "FedDyn", "FedExP", "FedNova"}
BATCHNORM |= {"FedDBE", "FedGH", "FedPAC", "FedProto", "HeurpFedLA", "SCAFFOLD", "pFedHN"}
BATCHNORM |= {"FedAS", "FedSGD", "GPFL", "kNN-Per", "pFedFDA", "pFedLA"}
BATCHNORM |= {"FedBABU-own", "FedDyn-own", "Halfway-own", "Scaled-own"}
OTHERS = {  # which the common tester has without what needs the data of newcomers
    "FedDANE": Algorithm(FedDANE),
    "Per-FedAvg": Algorithm(PerFedAvg),
    "pFedMe": Algorithm(PFedMe),
}
ALGORITHMS = {
    name: algorithm_tester.ALGORITHMS[name.removesuffix(" on disk")]
    for name in sorted(DROPOUT | BATCHNORM)
} | OTHERS


def fit(name: str, folder: Path, ckpt_path: Path | None = None, **options: Any) -> dict[str, Any]:
    """Train, save a checkpoint after some rounds, test, and return all that is known."""
    algorithm, make = ALGORITHMS[name], dropout_client if name in DROPOUT else batchnorm_client
    data = small_data(cohort_size=4, dropout=0.2, holdout_clients=0.2, eval_chunk=3)
    client, memory = (
        make(failing_at_the_end(algorithm.client)),
        "disk" if name == ON_DISK else "ram",
    )
    federation = Federation(client, local_epochs=2, finetune_epochs=1, client_memory=memory)
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
    }


class Unreadable(TensorClients):
    """Data of which one client's samples, of the second rank, can't be read any more."""

    def samples(self, client: int, split: Any) -> Any:
        if client == 3 and vars(self).get("gone"):
            raise OSError("its disk is gone")
        return super().samples(client, split)


def raised(stage: str, **options: Any) -> str | None:
    """Return what a rank raises where a client of the second fails and that stops the run."""
    pairs = [samples(8, seed) for seed in range(6)]
    data = Unreadable(pairs, pairs, pairs, num_classes=CLASSES, batch_size=4, eval_chunk=2)
    data.gone = True
    federation = Federation(linear_client(), on_client_error="raise")
    try:
        getattr(quiet_trainer(2, **options), stage)(federation, datamodule=data)
    except ClientError as error:
        return str(error)
    return None


def main(folder: str) -> None:
    """Run every algorithm on two ranks, from the start and on from one rank's checkpoint."""
    two = {"strategy": "ddp", "devices": 2}
    results = {}
    for name in ALGORITHMS:
        results[name] = fit(name, Path(folder) / "two", **two)
        saved = Path(folder) / "one" / f"{name}-epoch={SAVED - 1}.ckpt"
        results[f"{name} resumed"] = fit(name, Path(folder) / "resumed", saved, **two)
    results["raised"] = [raised(stage, **two) for stage in ("fit", "validate", "predict")]
    rank = torch.distributed.get_rank()
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Trains a federation in a process of its own, on from the last checkpoint if there is one.

The tests kill ``python -m tests.training_script ALGORITHM ROUNDS FOLDER`` and start it again.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from pflight import Federation
from pflight.callbacks import FeSEM, Local, ServerCallback
from pflight.models import Classifier, ProximalClient
from tests.runs import dropout_client, quiet_trainer, small_data

KINDS: dict[str, tuple[Any, type[Classifier], dict[str, Any]]] = {
    "local": (Local, Classifier, {}),
    "local on disk": (Local, Classifier, {"client_memory": "disk"}),
    "fesem": (lambda: FeSEM(2), ProximalClient, {}),
}


class PrintsItsTraining:
    """Says so when a client has trained."""

    def on_train_end(self) -> None:
        print("trained", flush=True)


def fit(
    algorithm: str,
    rounds: int,
    *callbacks: L.Callback,
    folder: str | None = None,
    ckpt_path: str | None = None,
) -> Federation:
    """Train with dropout and shuffled batches."""
    server, kind, options = KINDS[algorithm]
    printing = type("Printing", (PrintsItsTraining, kind), {})
    federation = Federation(dropout_client(printing), local_epochs=2, **options)
    callback: ServerCallback = server()
    trainer_options = {"limit_val_batches": 0, "default_root_dir": folder}
    trainer = quiet_trainer(rounds, callback, *callbacks, **trainer_options)
    trainer.fit(federation, datamodule=small_data(cohort_size=3), ckpt_path=ckpt_path)
    return federation


def summary(federation: Federation) -> dict[str, Any]:
    """Return all weights by name, and the cohorts."""
    weights = {
        f"{who}/{name}": value
        for who, state in [
            *((f"server {k}", state) for k, state in enumerate(federation.server_states())),
            *((f"client {i}", federation.client_state(i)) for i in range(federation.num_clients)),
        ]
        for name, value in state.items()
    }
    return {"weights": weights, "clients": [entry.clients for entry in federation.history]}


def main(algorithm: str, rounds: str, folder: str) -> None:
    """Resume from ``last.ckpt`` if it exists, and write ``result.pt`` at the end."""
    last = Path(folder) / "last.ckpt"
    resumed_from = torch.load(last, weights_only=True)["epoch"] + 1 if last.exists() else 0
    saver = ModelCheckpoint(folder, save_last=True, every_n_epochs=1)
    ckpt_path = str(last) if resumed_from else None
    federation = fit(algorithm, int(rounds), saver, folder=folder, ckpt_path=ckpt_path)
    result = {**summary(federation), "resumed_from": resumed_from}
    torch.save(result, Path(folder) / "result.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Seconds in which all clients are evaluated, with the server's model and with models of their own.

    python benchmarks/evaluation.py [--clients 1000] [--rounds 10]

Logistic regression 784-10 and 10 validation samples of each client: W2 of ``compare.py``, and an
MLP 784-200-10. FedAvg's clients share a model; with Local each has its own, and the initial model
is evaluated as well. The seconds are those of the Trainer's validation, logs included.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import lightning as L
import torch
from options import at_least
from quiet import quiet
from stopwatch import Stopwatch

from pflight import Federation, keep_freed_memory
from pflight.callbacks import FedAvg, Local
from pflight.datamodules import TensorClients
from pflight.models import MLP, Classifier, LogisticRegression
from pflight.server_callback import ServerCallback

NETWORKS = {
    "logistic regression": partial(LogisticRegression, 784, 10),
    "MLP 784-200-10": partial(MLP, 784, [200], 10),
}
MODELS: dict[str, type[ServerCallback]] = {"one for all": FedAvg, "one each": Local}
SAMPLES = 60, 10  # to train on, to validate


def validations(network: str, models: str, clients: int, rounds: int) -> list[float]:
    """Return the seconds of the validations after each round but the first."""
    random = torch.Generator().manual_seed(0)
    train, val = (
        [
            (torch.randn(count, 784, generator=random), torch.arange(count) % 10)
            for _ in range(clients)
        ]
        for count in SAMPLES
    )
    data = TensorClients(
        train, val=val, num_classes=10, batch_size=10, cohort_size=min(100, clients)
    )
    sgd = partial(torch.optim.SGD, lr=0.01)
    federation = Federation(Classifier(NETWORKS[network](), num_classes=10, optimizer=sgd))
    stopwatch = Stopwatch()
    L.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        callbacks=[MODELS[models](), stopwatch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    ).fit(federation, datamodule=data)
    return stopwatch.validations[1:]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=at_least(1), default=1000)
    parser.add_argument("--rounds", type=at_least(2), default=10)
    options = parser.parse_args()
    keep_freed_memory()
    quiet()
    print("| network | models | ms | min to max |")
    print("|---|---|---|---|")
    for network in NETWORKS:
        for models in MODELS:
            taken = [
                1000 * s for s in validations(network, models, options.clients, options.rounds)
            ]
            spread = f"{min(taken):.0f} to {max(taken):.0f}"
            print(
                f"| {network} | {models} | {statistics.median(taken):.0f} | {spread} |", flush=True
            )


if __name__ == "__main__":
    main()

"""Clients that move to another group: how soon each method follows, and the accuracy it loses.

20 clients hold scikit-learn's digits, in four groups of known difference. In one round a quarter
of them moves to another group. The script trains each method at each seed, and prints a table in
Markdown: the accuracy of the moved clients before and after their move by participations, and the
share of them that was in a cluster of its new group by then.

    python benchmarks/drift.py
    python benchmarks/drift.py --methods FeSEM "FeSEM, reassign" --differences inverted --seeds 1
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor

from pflight import Federation
from pflight.callbacks import CFL, IFCA, DriftPlot, FedEC, FeSEM, PFedLA, ServerCallback
from pflight.callbacks.monitors.pictures.drift import steps_of
from pflight.datamodules import IID, Digits, KnownClusters
from pflight.models import MLP, Classifier

GROUPS = 4
METHODS: dict[str, Callable[[], ServerCallback]] = {
    "FeSEM": partial(FeSEM, GROUPS, mu=0.1),
    "FeSEM, reassign": partial(FeSEM, GROUPS, mu=0.1, reassign=2.0),
    "IFCA": partial(IFCA, GROUPS),
    "CFL": partial(CFL, 0.8, 0.4, warmup=4, min_size=5),
    "CFL, reassign": partial(CFL, 0.8, 0.4, warmup=4, min_size=5, reassign=True),
    "FedEC": FedEC,
    "FedEC, forget": partial(FedEC, forget=True),
    "pFedLA": PFedLA,
}


def inverted(x: Tensor, y: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Show digits as they are, inverted, mirrored, or both."""
    x = x.flip(-1) if group >= 2 else x
    return (1 - x if group % 2 else x), y


DIFFERENCES: dict[str, Any] = {"rotation": "rotation", "labels": "labels", "inverted": inverted}


def measured(method: str, difference: str, seed: int, options: argparse.Namespace) -> DriftPlot:
    """Train one federation, and return its measurements."""
    digits = Digits(num_clients=20, val_fraction=0.2, test_fraction=0.3, partition=IID(), seed=seed)
    moves = {options.move: options.share}
    data = KnownClusters(
        digits,
        GROUPS,
        DIFFERENCES[difference],
        moves=moves,
        batch_size=10,
        participation=options.participation,
        seed=seed,
    )
    torch.manual_seed(seed)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    client = Classifier(MLP(64, [64], 10), num_classes=10, optimizer=optimizer)
    plot = DriftPlot()
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=options.rounds,
            callbacks=[METHODS[method](), plot],
            default_root_dir=folder,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        trainer.fit(Federation(client, local_epochs=5, seed=seed), datamodule=data)
    return plot


def main() -> None:
    """Print the table, a row at a time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    known = [*DIFFERENCES]
    parser.add_argument("--differences", nargs="+", choices=known, default=known[:2])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--move", type=int, default=14, help="the round in which clients move")
    parser.add_argument("--share", type=float, default=0.25, help="the share of them that moves")
    parser.add_argument("--participation", type=float, default=1.0)
    parser.add_argument("--after", type=int, nargs="+", default=[1, 2, 5], help="participations")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    heads = ["difference", "method", "before"]
    heads += [f"after {count}" for count in options.after]
    heads += [f"reassigned by {count}" for count in options.after]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for difference in options.differences:
        for method in options.methods:
            plots = [measured(method, difference, seed, options) for seed in range(options.seeds)]
            rows = torch.cat([plot.record for plot in plots])
            steps = {step.participations: step for step in steps_of(rows)}
            found = [steps.get(count) for count in options.after]
            before = next(step.before for step in steps.values())
            cells = [difference, method, f"{100 * before:.1f}"]
            cells += ["" if step is None else f"{100 * step.now:.1f}" for step in found]
            shares = [torch.nan if step is None else step.reassigned for step in found]
            cells += ["" if share != share else f"{100 * share:.0f}" for share in shares]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

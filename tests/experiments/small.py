"""Comparisons that take a second: four clients, a tiny network, three rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pflight.command.process import quieten
from pflight.experiments.comparison import Comparison
from pflight.experiments.measuring import Task
from pflight.experiments.plan import Plan, methods_of, of_data
from pflight.experiments.tuning import Tuning
from pflight.experiments.worker import make

DATA = """
data:
  class_path: Digits
  init_args: {num_clients: 4, batch_size: 20, val_fraction: 0.2, holdout_clients: 0.25}
model:
  client:
    init_args:
      num_classes: 10
      network:
        class_path: pflight.models.MLP
        init_args: {in_features: 64, hidden: [4], num_classes: 10}
      optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
trainer: {max_epochs: 3, accelerator: cpu}
"""


def data_config(folder: Path, text: str = DATA) -> str:
    """Write a configuration without a method, and return its path."""
    path = folder / "data.yaml"
    path.write_text(text)
    return str(path)


def method_config(folder: Path, name: str, callback: str, title: str = "") -> str:
    """Write the configuration of a method of one's own, and return its path."""
    path = folder / f"{name}.yaml"
    comment = f"# {title}\n" if title else ""
    path.write_text(f"{comment}trainer:\n  callbacks+: [{callback}]\n")
    return str(path)


def comparison(
    folder: Path,
    methods: Sequence[str] = ("fedavg", "local"),
    settings: Mapping[str, Sequence[Any]] | None = None,
    *,
    seeds: int = 1,
    tuning: Tuning | None = None,
    text: str = DATA,
) -> Comparison:
    """Return a comparison whose results are in ``out``."""
    fixed, varied = of_data(settings or {})
    plan = Plan([data_config(folder, text)], fixed)
    out = folder / "out"
    known = methods_of(methods)
    found = Comparison(plan, known, varied, seeds=seeds, tuning=tuning, folder=out)
    found.save()
    return found


def finish(comparison: Comparison) -> list[Task]:
    """Make all runs in this process, and return them in their order."""
    quieten()
    made = []
    while due := comparison.due():
        made.append(due[0])
        make(due[0], lambda _: None)
    return made

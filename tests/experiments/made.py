"""Outcomes of runs that were never made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pflight.experiments.outcome import Curve, Moment, Outcome

Values = Sequence[float | None]


def outcome(method: str, seed: int, values: Mapping[str, Values], **changes: Any) -> Outcome:
    """Return an outcome with each client's values of some metrics after the last round."""
    metric = next(iter(values))
    number = len(values[metric])
    fields: dict[str, Any] = {
        "key": f"key of {method}",
        "method": method,
        "settings": {},
        "tuned": None,
        "seed": seed,
        "metric": metric,
        "mode": "max",
        "directions": dict.fromkeys(values),
        "clients": list(range(number)),
        "newcomers": [],
        "samples": {"test": [client + 1 for client in range(number)]},
        "last": moment(20, values),
        "chosen": None,
        "curve": Curve([5, 10], [100, 200], {f"val/macro_{metric}": [0.5, 0.7]}),
        "bytes_down": 3000,
        "bytes_up": 1000,
        "participations": 40,
        "failed": 0,
        "seconds": 0.5,
        "threads": 1,
        "beside": 2,
        "device": "cpu",
        "host": "box",
        "fingerprints": {
            kind: f"{kind}-{seed}" for kind in ("data", "weights", "cohorts", "batches")
        },
    }
    return Outcome(**{**fields, **changes})


def moment(
    rounds: int, values: Mapping[str, Values], reported: Mapping[str, float | None] | None = None
) -> Moment:
    """Return a moment with each client's values, and reported values by tag."""
    return Moment(rounds, 0.8, {**(reported or {})}, {name: [*v] for name, v in values.items()})


def comparison(
    methods: Mapping[str, float], seeds: int = 3, clients: int = 8, noise: float = 0.02
) -> list[Outcome]:
    """Return runs with random accuracies and F1 around a level for each method."""
    found = []
    for place, (method, level) in enumerate(methods.items()):
        for seed in range(seeds):
            shared = np.random.default_rng(seed).normal(0, 0.1, clients)
            own = np.random.default_rng([seed, place])
            columns = [
                {
                    name: np.clip(level + shared + own.normal(0, noise, clients), 0, 1).tolist()
                    for name in ("acc", "f1")
                }
                for _ in range(2)
            ]
            run = outcome(method, seed, columns[0], chosen=moment(15, columns[1]))
            found.append(run)
    return found

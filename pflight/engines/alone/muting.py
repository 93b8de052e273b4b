"""A pass of a client's module without logs and metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L
from torchmetrics import Metric


@contextmanager
def muted(module: L.LightningModule) -> Iterator[None]:
    """Keep a copy from logging, and its metrics from counting."""
    metrics = [part for part in module.modules() if isinstance(part, Metric)]
    counted = [(metric, _states(metric), metric._update_count) for metric in metrics]
    for metric in metrics:  # not in place: the pass may be differentiated
        _set_states(metric, metric._copy_state_dict())
    own = vars(module)
    before = {name: own.get(name) for name in ("log", "log_dict")}  # it may be muted already
    own.update(dict.fromkeys(before, _no_log))
    try:
        yield
    finally:
        for name, held in before.items():
            if held is None:
                del own[name]
            else:
                own[name] = held
        for metric, states, count in counted:
            _set_states(metric, states)
            metric._update_count, metric._computed = count, None


def _states(metric: Metric) -> dict[str, Any]:
    return {name: getattr(metric, name) for name in metric._defaults}


def _set_states(metric: Metric, states: Mapping[str, Any]) -> None:
    for name, value in states.items():
        setattr(metric, name, value)


def _no_log(*_: Any, **__: Any) -> None:
    """Replace ``self.log``."""

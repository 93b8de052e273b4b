"""The server half of each algorithm, one file per algorithm, and the monitors that draw."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .fedavg import FedAvg
from .fedsgd import FedSGD
from .fesem import FeSEM
from .local import Local
from .reptile import Reptile
from .server import ServerCallback

if TYPE_CHECKING:
    from .progress import FederationProgressBar
    from .report import PredictionWriter, ResultTable
    from .tensorboard import TensorBoardReport

__all__ = [
    "FeSEM",
    "FedAvg",
    "FedSGD",
    "FederationProgressBar",
    "Local",
    "PredictionWriter",
    "Reptile",
    "ResultTable",
    "ServerCallback",
    "TensorBoardReport",
]

# Monitors know the federation, which knows the callbacks above: they are imported on first use.
_MONITORS = {
    "FederationProgressBar": "progress",
    "PredictionWriter": "report",
    "ResultTable": "report",
    "TensorBoardReport": "tensorboard",
}


def __getattr__(name: str) -> Any:
    if name in _MONITORS:
        return getattr(import_module(f"{__name__}.{_MONITORS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""The server half of each algorithm, one file per algorithm, and the monitors that draw."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .apfl import APFL
from .cfl import FedCluster
from .ditto import Ditto
from .fedala import FedALA
from .fedavg import FedAvg
from .feddane import FedDANE
from .fedec import FedEC
from .fedfomo import FedFomo
from .fedprox import FedProx
from .fedsgd import FedSGD
from .fesem import FeSEM
from .hypocluster import HypoCluster
from .l2gd import L2GD
from .local import Local
from .per_fedavg import PerFedAvg
from .pfedhn import PFedHN
from .pfedla import PFedLA
from .pfedme import PFedMe
from .reptile import Reptile
from .robust import Robust
from .scaffold import SCAFFOLD
from .selection import ClusterSelection, select_num_clusters
from .server import ServerCallback
from .shared_part import FedRep, SharedPart

if TYPE_CHECKING:
    from .pictures import (
        AggregationWeights,
        ClusterExamples,
        ClusterPlot,
        ConvergencePlot,
        EmbeddingTrajectory,
        convergence_figure,
    )
    from .progress import FederationProgressBar
    from .report import PredictionWriter, ResultTable
    from .tensorboard import TensorBoardReport

__all__ = [
    "APFL",
    "L2GD",
    "SCAFFOLD",
    "AggregationWeights",
    "ClusterExamples",
    "ClusterPlot",
    "ClusterSelection",
    "ConvergencePlot",
    "Ditto",
    "EmbeddingTrajectory",
    "FeSEM",
    "FedALA",
    "FedAvg",
    "FedCluster",
    "FedDANE",
    "FedEC",
    "FedFomo",
    "FedProx",
    "FedRep",
    "FedSGD",
    "FederationProgressBar",
    "HypoCluster",
    "Local",
    "PFedHN",
    "PFedLA",
    "PFedMe",
    "PerFedAvg",
    "PredictionWriter",
    "Reptile",
    "ResultTable",
    "Robust",
    "ServerCallback",
    "SharedPart",
    "TensorBoardReport",
    "convergence_figure",
    "select_num_clusters",
]

# Monitors know the federation, which knows the callbacks above: they are imported on first use.
_MONITORS = {
    "AggregationWeights": "pictures",
    "ClusterExamples": "pictures",
    "ClusterPlot": "pictures",
    "ConvergencePlot": "pictures",
    "EmbeddingTrajectory": "pictures",
    "FederationProgressBar": "progress",
    "PredictionWriter": "report",
    "ResultTable": "report",
    "TensorBoardReport": "tensorboard",
    "convergence_figure": "pictures",
}


def __getattr__(name: str) -> Any:
    if name in _MONITORS:
        return getattr(import_module(f"{__name__}.{_MONITORS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

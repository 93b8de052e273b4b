"""Server callbacks, the server half of each algorithm, and monitors, which show a run."""

from pflight.fedavg import FedAvg
from pflight.server_callback import ServerCallback

from .methods.apfl import APFL
from .methods.apple import APPLE
from .methods.cfl import CFL
from .methods.ditto import Ditto
from .methods.fedala import FedALA
from .methods.fedamp import FedAMP, HeurFedAMP
from .methods.fedbabu import FedBABU
from .methods.fedcac import FedCAC
from .methods.feddane import FedDANE
from .methods.feddyn import FedDyn
from .methods.fedec import FedEC
from .methods.fedexp import FedExP
from .methods.fedfomo import FedFomo
from .methods.fednova import FedNova
from .methods.fedprox import FedProx
from .methods.fedsgd import FedSGD
from .methods.fesem import FeSEM, select_num_clusters
from .methods.ifca import IFCA
from .methods.l2gd import L2GD
from .methods.local import Local
from .methods.num_clusters import ClusterSelection
from .methods.per_fedavg import PerFedAvg
from .methods.pfedhn import PFedHN
from .methods.pfedla import PFedLA
from .methods.pfedme import PFedMe
from .methods.reptile import Reptile
from .methods.scaffold import SCAFFOLD
from .methods.shared_part import FedRep, SharedPart
from .methods.trimmed_kmeans import TrimmedKMeans
from .monitors.pictures.clusters import ClusterPlot
from .monitors.pictures.convergence import ConvergencePlot, convergence_figure
from .monitors.pictures.embedding import EmbeddingTrajectory
from .monitors.pictures.examples import ClusterExamples
from .monitors.pictures.weights import AggregationWeights
from .monitors.progress import FederationProgressBar
from .monitors.report import PredictionWriter, ResultTable
from .monitors.tensorboard import TensorBoardReport

FedCluster = CFL  # the names of the first edition
HypoCluster = IFCA
Robust = TrimmedKMeans

__all__ = [
    "APFL",
    "APPLE",
    "CFL",
    "IFCA",
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
    "FedAMP",
    "FedAvg",
    "FedBABU",
    "FedCAC",
    "FedCluster",
    "FedDANE",
    "FedDyn",
    "FedEC",
    "FedExP",
    "FedFomo",
    "FedNova",
    "FedProx",
    "FedRep",
    "FedSGD",
    "FederationProgressBar",
    "HeurFedAMP",
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
    "TrimmedKMeans",
    "convergence_figure",
    "select_num_clusters",
]

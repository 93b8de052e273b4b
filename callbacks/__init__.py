"""Server callbacks, one for each algorithm, and monitors, which show a run."""

from pflight.fedavg import FedAvg
from pflight.server_callback import ServerCallback

from .methods.apfl import APFL
from .methods.apple import APPLE
from .methods.centralized import Centralized
from .methods.cfl import CFL
from .methods.ditto import Ditto
from .methods.fedala import FedALA
from .methods.fedalt import FedALT
from .methods.fedamp import FedAMP, HeurFedAMP
from .methods.fedas import FedAS
from .methods.fedbabu import FedBABU
from .methods.fedcac import FedCAC
from .methods.fedcp import FedCP
from .methods.feddane import FedDANE
from .methods.feddbe import FedDBE
from .methods.feddpa import FedDPA
from .methods.feddyn import FedDyn
from .methods.fedec import FedEC
from .methods.fedexp import FedExP
from .methods.fedfomo import FedFomo
from .methods.fedgh import FedGH
from .methods.fedlc import FedLC
from .methods.fedlease import FedLEASE
from .methods.fednova import FedNova
from .methods.fedpac import FedPAC
from .methods.fedproto import FedProto
from .methods.fedprox import FedProx
from .methods.fedrod import FedRoD
from .methods.fedrs import FedRS
from .methods.fedsgd import FedSGD
from .methods.fesem import FeSEM, select_num_clusters
from .methods.gpfl import GPFL
from .methods.hetlora import HetLoRA
from .methods.hilora import HiLoRA
from .methods.ifca import IFCA
from .methods.knn_per import KNNPer
from .methods.l2gd import L2GD
from .methods.local import Local
from .methods.moon import MOON
from .methods.num_clusters import ClusterSelection
from .methods.per_fedavg import PerFedAvg
from .methods.pfedfda import PFedFDA
from .methods.pfedhn import PFedHN
from .methods.pfedla import PFedLA
from .methods.pfedme import PFedMe
from .methods.reptile import Reptile
from .methods.rolora import RoLoRA
from .methods.scaffold import SCAFFOLD
from .methods.shared_part import FedRep, SharedPart
from .methods.trimmed_kmeans import TrimmedKMeans
from .monitors.client_means import ClientMeans
from .monitors.client_table import ClientTable
from .monitors.pictures.clusters import ClusterPlot
from .monitors.pictures.convergence import ConvergencePlot, convergence_figure
from .monitors.pictures.drift import DriftPlot
from .monitors.pictures.embedding import EmbeddingTrajectory
from .monitors.pictures.examples import ClusterExamples
from .monitors.pictures.weights import AggregationWeights
from .monitors.progress import FederationProgressBar
from .monitors.report import PredictionWriter, ResultTable
from .monitors.tensorboard import TensorBoardReport

FedCluster = CFL  # names in the first edition
HypoCluster = IFCA
Robust = TrimmedKMeans

__all__ = [
    "APFL",
    "APPLE",
    "CFL",
    "GPFL",
    "IFCA",
    "L2GD",
    "MOON",
    "SCAFFOLD",
    "AggregationWeights",
    "Centralized",
    "ClientMeans",
    "ClientTable",
    "ClusterExamples",
    "ClusterPlot",
    "ClusterSelection",
    "ConvergencePlot",
    "Ditto",
    "DriftPlot",
    "EmbeddingTrajectory",
    "FeSEM",
    "FedALA",
    "FedALT",
    "FedAMP",
    "FedAS",
    "FedAvg",
    "FedBABU",
    "FedCAC",
    "FedCP",
    "FedCluster",
    "FedDANE",
    "FedDBE",
    "FedDPA",
    "FedDyn",
    "FedEC",
    "FedExP",
    "FedFomo",
    "FedGH",
    "FedLC",
    "FedLEASE",
    "FedNova",
    "FedPAC",
    "FedProto",
    "FedProx",
    "FedRS",
    "FedRep",
    "FedRoD",
    "FedSGD",
    "FederationProgressBar",
    "HetLoRA",
    "HeurFedAMP",
    "HiLoRA",
    "HypoCluster",
    "KNNPer",
    "Local",
    "PFedFDA",
    "PFedHN",
    "PFedLA",
    "PFedMe",
    "PerFedAvg",
    "PredictionWriter",
    "Reptile",
    "ResultTable",
    "RoLoRA",
    "Robust",
    "ServerCallback",
    "SharedPart",
    "TensorBoardReport",
    "TrimmedKMeans",
    "convergence_figure",
    "select_num_clusters",
]

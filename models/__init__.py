"""The client half of each algorithm, one file per client module, and the networks."""

from .apfl import APFLClient
from .client import Batch, ClientModule
from .client_halves import is_half
from .corrected import CorrectedClient
from .ditto import DittoClient
from .elastic import ElasticClient
from .feddane import DaneClient
from .fedrep import FedRepClient
from .networks.convolutional import (
    FEMNISTCNN,
    CelebACNN,
    FedBNCNN,
    FedFomoCNN,
    FedRepCNN,
    McMahanCNN,
    PFedHNCNN,
)
from .networks.dense import MLP, LogisticRegression
from .networks.resnet import ResNet18
from .per_fedavg import PerFedAvgClient
from .pfedme import PFedMeClient
from .proximal import ProximalClient
from .scaffold import ScaffoldClient

__all__ = [
    "FEMNISTCNN",
    "MLP",
    "APFLClient",
    "Batch",
    "CelebACNN",
    "ClientModule",
    "CorrectedClient",
    "DaneClient",
    "DittoClient",
    "ElasticClient",
    "FedBNCNN",
    "FedFomoCNN",
    "FedRepCNN",
    "FedRepClient",
    "LogisticRegression",
    "McMahanCNN",
    "PFedHNCNN",
    "PFedMeClient",
    "PerFedAvgClient",
    "ProximalClient",
    "ResNet18",
    "ScaffoldClient",
    "is_half",
]

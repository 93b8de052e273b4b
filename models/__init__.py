"""The client half of each algorithm, one file per client module, and the networks."""

from .client import Batch, ClientModule
from .convolutional import (
    FEMNISTCNN,
    CelebACNN,
    FedBNCNN,
    FedFomoCNN,
    FedRepCNN,
    McMahanCNN,
    PFedHNCNN,
)
from .corrected import CorrectedClient
from .elastic import ElasticClient
from .feddane import DaneClient
from .networks import MLP, LogisticRegression
from .proximal import ProximalClient
from .resnet import ResNet18
from .scaffold import ScaffoldClient

__all__ = [
    "FEMNISTCNN",
    "MLP",
    "Batch",
    "CelebACNN",
    "ClientModule",
    "CorrectedClient",
    "DaneClient",
    "ElasticClient",
    "FedBNCNN",
    "FedFomoCNN",
    "FedRepCNN",
    "LogisticRegression",
    "McMahanCNN",
    "PFedHNCNN",
    "ProximalClient",
    "ResNet18",
    "ScaffoldClient",
]

"""The client half of each algorithm, one file per client module, and the networks."""

from .apfl import APFLClient
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
from .ditto import DittoClient
from .elastic import ElasticClient
from .feddane import DaneClient
from .fedrep import FedRepClient
from .networks import MLP, LogisticRegression
from .per_fedavg import PerFedAvgClient
from .personal import RelocatedClient
from .pfedme import PFedMeClient
from .proximal import ProximalClient
from .resnet import ResNet18
from .scaffold import ScaffoldClient


def is_half(client: ClientModule) -> bool:
    """Return whether a client module is a client half of an algorithm itself."""
    halves = CorrectedClient, ElasticClient, FedRepClient, ProximalClient, RelocatedClient
    return isinstance(client, halves)


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

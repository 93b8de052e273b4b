"""Ready-made tasks, the networks, and the client halves of the algorithms."""

from pflight.task import Batch, Task

from .classifier import Classifier
from .convolutional import (
    FEMNISTCNN,
    CelebACNN,
    FedBNCNN,
    FedFomoCNN,
    FedRepCNN,
    McMahanCNN,
    PFedHNCNN,
)
from .elastic import ElasticClient
from .networks import MLP, LogisticRegression
from .proximal import ProximalClient
from .regressor import Regressor
from .resnet import ResNet18

ClientModule = Classifier
"""What :class:`Classifier` was called at first."""

__all__ = [
    "FEMNISTCNN",
    "MLP",
    "Batch",
    "CelebACNN",
    "Classifier",
    "ClientModule",
    "ElasticClient",
    "FedBNCNN",
    "FedFomoCNN",
    "FedRepCNN",
    "LogisticRegression",
    "McMahanCNN",
    "PFedHNCNN",
    "ProximalClient",
    "Regressor",
    "ResNet18",
    "Task",
]

"""Ready-made tasks, the networks, and the client methods of the algorithms."""

from pflight.task import Batch, Task

from .classifier import Classifier
from .elastic import ElasticClient
from .language_model import LanguageModel
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
from .networks.text import CausalTransformer, LoRA
from .proximal import ProximalClient
from .regressor import Regressor

ClientModule = Classifier
"""The former name of :class:`Classifier`."""

__all__ = [
    "FEMNISTCNN",
    "MLP",
    "Batch",
    "CausalTransformer",
    "CelebACNN",
    "Classifier",
    "ClientModule",
    "ElasticClient",
    "FedBNCNN",
    "FedFomoCNN",
    "FedRepCNN",
    "LanguageModel",
    "LoRA",
    "LogisticRegression",
    "McMahanCNN",
    "PFedHNCNN",
    "ProximalClient",
    "Regressor",
    "ResNet18",
    "Task",
]

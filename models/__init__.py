"""The client half of each algorithm, one file per client module, and the networks."""

from .client import Batch, ClientModule
from .networks import MLP, LogisticRegression, McMahanCNN
from .proximal import ProximalClient

__all__ = [
    "MLP",
    "Batch",
    "ClientModule",
    "LogisticRegression",
    "McMahanCNN",
    "ProximalClient",
]

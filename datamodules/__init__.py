"""What the clients of a federation hold: data sets, and how they are dealt to clients."""

from __future__ import annotations

from .digits import Digits
from .fashion_mnist import FashionMNIST
from .federated import Centralized, ClientData, FederatedDataModule, Split
from .loaders import IndexedSamples
from .omniglot import Omniglot
from .partition import IID, ClassesPerClient, Dirichlet, DominantClasses, Natural, Partition
from .partitioned import PartitionedDataModule
from .tensors import TensorClients

__all__ = [
    "IID",
    "Centralized",
    "ClassesPerClient",
    "ClientData",
    "Digits",
    "Dirichlet",
    "DominantClasses",
    "FashionMNIST",
    "FederatedDataModule",
    "IndexedSamples",
    "Natural",
    "Omniglot",
    "Partition",
    "PartitionedDataModule",
    "Split",
    "TensorClients",
]

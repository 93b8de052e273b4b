"""What the clients of a federation hold: data sets, and how they are dealt to clients."""

from __future__ import annotations

from .digits import Digits
from .federated import Centralized, ClientData, FederatedDataModule
from .loaders import IndexedSamples
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
    "FederatedDataModule",
    "IndexedSamples",
    "Natural",
    "Partition",
    "PartitionedDataModule",
    "TensorClients",
]

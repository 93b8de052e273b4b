"""What the clients of a federation hold: data sets, and how they are dealt to clients."""

from __future__ import annotations

from .augmentation import Augmentation, CropAndFlip
from .cifar import CIFAR10, CIFAR100, CIFARDataModule
from .datasets import DatasetClients
from .digits import Digits
from .emnist import EMNIST
from .fashion_mnist import FashionMNIST
from .federated import Centralized, ClientData, FederatedDataModule, Split
from .held_out import HeldOut
from .hidden_groups import HiddenGroups
from .images import ImageDataModule, LabelledImages
from .leaf import LeafCelebA, LeafDataModule, LeafFEMNIST
from .loaders import IndexedSamples, Visit
from .omniglot import Omniglot
from .partition import (
    IID,
    ClassesPerClient,
    ClassShards,
    ConsecutiveClasses,
    Dirichlet,
    DominantClasses,
    Natural,
    Partition,
)
from .partitioned import PartitionedDataModule
from .samples import Samples
from .synthetic import ClusteredSynthetic, Synthetic
from .tensors import TensorClients

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "EMNIST",
    "IID",
    "Augmentation",
    "CIFARDataModule",
    "Centralized",
    "ClassShards",
    "ClassesPerClient",
    "ClientData",
    "ClusteredSynthetic",
    "ConsecutiveClasses",
    "CropAndFlip",
    "DatasetClients",
    "Digits",
    "Dirichlet",
    "DominantClasses",
    "FashionMNIST",
    "FederatedDataModule",
    "HeldOut",
    "HiddenGroups",
    "ImageDataModule",
    "IndexedSamples",
    "LabelledImages",
    "LeafCelebA",
    "LeafDataModule",
    "LeafFEMNIST",
    "Natural",
    "Omniglot",
    "Partition",
    "PartitionedDataModule",
    "Samples",
    "Split",
    "Synthetic",
    "TensorClients",
    "Visit",
]

"""Federated data: data sets, and partitions of their samples among clients."""

from pflight.data.augmentation import Augmentation
from pflight.data.data_module import Centralized, ClientData, FederatedDataModule
from pflight.data.loaders import IndexedSamples, Split, Visit

from .crop_and_flip import CropAndFlip
from .datasets import DatasetClients
from .partitions.given import Given
from .partitions.group_moves import GroupMoves
from .partitions.held_out import HeldOut
from .partitions.known_clusters import KnownClusters
from .partitions.partition import (
    IID,
    ByUser,
    ClassesPerClient,
    ClassShards,
    ConsecutiveClasses,
    Dirichlet,
    DominantClasses,
    Partition,
)
from .partitions.partitioned import PartitionedDataModule
from .partitions.samples import Samples
from .sources.cifar import CIFAR10, CIFAR100, CIFARDataModule
from .sources.digits import Digits
from .sources.emnist import EMNIST
from .sources.fashion_mnist import FashionMNIST
from .sources.images import ImageDataModule, LabelledImages
from .sources.leaf import LeafCelebA, LeafDataModule, LeafFEMNIST
from .sources.natural import NaturalClients
from .sources.omniglot import Omniglot
from .sources.shakespeare import Shakespeare
from .sources.synthetic import ClusteredSynthetic, Synthetic
from .tensors import TensorClients

HiddenGroups = KnownClusters  # names in the first edition
Natural = ByUser

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "EMNIST",
    "IID",
    "Augmentation",
    "ByUser",
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
    "Given",
    "GroupMoves",
    "HeldOut",
    "HiddenGroups",
    "ImageDataModule",
    "IndexedSamples",
    "KnownClusters",
    "LabelledImages",
    "LeafCelebA",
    "LeafDataModule",
    "LeafFEMNIST",
    "Natural",
    "NaturalClients",
    "Omniglot",
    "Partition",
    "PartitionedDataModule",
    "Samples",
    "Shakespeare",
    "Split",
    "Synthetic",
    "TensorClients",
    "Visit",
]

"""Data with clients in known clusters, to test methods that find clusters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from pflight.data.data_module import FederatedDataModule
from pflight.data.fingerprint import checksum_of, joined
from pflight.data.loaders import Split
from pflight.errors import ConfigurationError
from pflight.options import PositiveFloat, PositiveInt, checked
from pflight.randomness import Purpose, generator

from .group_moves import GroupMoves, check_moves

Change = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""A function of features ``[n, ...]``, labels ``[n]`` and a cluster. It returns as many changed
features and labels, the same ones each time."""
Difference = Literal["labels", "rotation", "features"] | Change


@checked
class KnownClusters(FederatedDataModule):
    """Other data, changed so that clients fall into known clusters.

    Each client belongs to one cluster, drawn at random; the clusters' sizes differ by at most one.
    Cluster 0 has the data unchanged; cluster ``k`` has different

    * ``labels``: class ``y`` becomes ``(y + k) mod num_classes``. So no two clusters agree on any
      class, and a model that is right for one is wrong for all others. Permuted labels are the test
      of Sattler et al. (2021).
    * ``rotation``: images ``[n, C, H, W]`` are turned anticlockwise by ``k`` times 90 degrees, as
      in IFCA (Ghosh et al., 2020); they must be square, with at most four clusters. Vectors
      ``[n, d]`` are multiplied by a random orthogonal matrix.
    * ``features``: one offset is added to all samples, an independent normal number of standard
      deviation ``shift`` for each feature, like the fixed pattern of a sensor.

    For any other difference, give a function of features, labels and the cluster. With ``moves``,
    clients change their clusters. They keep their samples, which are then changed as in the new
    cluster, in all splits.

    The wrapped data, with their partition and seed, decide what each client holds. Cohorts,
    batches, newcomers and augmentation follow the options given here, not those of the wrapped
    data. A newcomer there without training samples is one here, too.

    Args:
        data: The data of the clients.
        num_clusters: Number of clusters.
        difference: What differs between clusters: ``labels``, ``rotation`` or ``features``, or a
            function ``(x, y, cluster)`` that returns the changed ``(x, y)``, for cluster 0 as well.
        shift: Standard deviation of the offsets, in units of the features; for ``features`` only.
        moves: From a round to the share of the clients that move to another cluster in it, as in
            :class:`GroupMoves`; by default none ever moves.
        **kwargs: Further arguments of :class:`FederatedDataModule`. ``seed`` also draws the
            clusters and their differences.

    Raises:
        ConfigurationError: An option is out of its range, or does not fit the data.

    Example:
        >>> from pflight.datamodules import TensorClients
        >>> pairs = [(torch.eye(3), torch.arange(3))] * 4
        >>> data = KnownClusters(TensorClients(pairs, num_classes=3), num_clusters=2)
        >>> data.setup()
        >>> [(int(data.clusters[i]), data.labels(i, "train").tolist()) for i in range(4)]
        [(0, [0, 1, 2]), (1, [1, 2, 0]), (1, [1, 2, 0]), (0, [0, 1, 2])]

    References:
        Ghosh et al., An Efficient Framework for Clustered Federated Learning, NeurIPS 2020, section
        6, https://arxiv.org/abs/2006.04088.
        Sattler et al., Clustered Federated Learning: Model-Agnostic Distributed Multitask
        Optimization under Privacy Constraints, IEEE TNNLS 2021, https://arxiv.org/abs/1910.01991.
    """

    def __init__(
        self,
        data: FederatedDataModule,
        num_clusters: PositiveInt = 4,
        difference: Difference = "labels",
        shift: PositiveFloat = 1.0,
        *,
        moves: dict[int, float] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_classes=None, **kwargs)
        check_moves(moves or {})
        self.data = data
        self.num_clusters = num_clusters
        self.difference = difference
        self.shift = shift
        self.moves = moves or {}
        self._round = 0

    @property
    def num_clients(self) -> int:  # type: ignore[override]
        """Number of clients of the wrapped data."""
        return self.data.num_clients

    @property
    def num_classes(self) -> int:  # type: ignore[override]
        """Number of classes of the wrapped data."""
        return self.data.num_classes

    @property
    def client_names(self) -> Sequence[str]:  # type: ignore[override]
        """Names of the clients of the wrapped data."""
        return self.data.client_names

    @property
    def fill(self) -> Tensor:  # type: ignore[override]
        """Pixel values outside an image of the wrapped data."""
        return self.data.fill

    @property
    def clusters(self) -> Tensor:  # type: ignore[override]
        """The current cluster of each client, ``[num_clients]``; known after ``setup``."""
        return self._memberships.at(self._round)

    @cached_property
    def _memberships(self) -> GroupMoves:
        """The clusters of all rounds."""
        random = generator(Purpose.PARTITION, self.seed, 3)
        first = torch.randperm(self.num_clients, generator=random) % self.num_clusters
        return GroupMoves(first, self.moves, self.seed)

    @property
    def drifts(self) -> bool:
        """Whether clients move, or the wrapped data depend on the round."""
        return bool(self.moves) or self.data.drifts

    def at_round(self, round: int) -> None:
        """Put clients into the clusters that they have in a round."""
        self._round = round
        self.data.at_round(round)

    @cached_property
    def new_clients(self) -> Tensor:
        """Sorted ids of the newcomers: drawn ones, and wrapped ones that can't train."""
        theirs = self.data.new_clients
        untrained = theirs[self.num_samples("train")[theirs] == 0]
        return torch.cat([super().new_clients, untrained]).unique()

    def prepare_data(self) -> None:
        """Fetch the wrapped data's files."""
        self.data.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Set the wrapped data up and check that the clusters can differ."""
        self.data.setup(stage)
        self._check()
        super().setup(stage)

    def samples(self, client: int, split: Split) -> tuple[Tensor, Tensor]:
        """See :meth:`FederatedDataModule.samples`."""
        x, y = self.data.samples(client, split)
        cluster = int(self.clusters[client])
        if not isinstance(self.difference, str):
            return self.difference(x, y, cluster)
        if self.difference == "labels":
            return x, self._relabelled(y, cluster)
        if self.difference == "features":
            return x + self._offsets[cluster].to(x), y
        if x.ndim == 4:
            return x.rot90(cluster, dims=(2, 3)), y
        return x @ self._rotations[cluster].to(x), y

    def num_samples(self, split: Split = "train") -> Tensor:
        """See :meth:`FederatedDataModule.num_samples`."""
        return self.data.num_samples(split)

    def labels(self, client: int, split: Split) -> Tensor:
        """See :meth:`FederatedDataModule.labels`."""
        if not isinstance(self.difference, str):
            return self.samples(client, split)[1]
        y = self.data.labels(client, split)
        return self._relabelled(y, int(self.clusters[client])) if self.difference == "labels" else y

    def fingerprint(self) -> Tensor:
        """Return checksums of the wrapped data's fingerprints, the clusters and the labels."""
        kinds = "labels", "rotation", "features"
        kind = kinds.index(self.difference) if isinstance(self.difference, str) else len(kinds)
        drawn = checksum_of(torch.tensor([kind, self.shift, self.seed], dtype=torch.double))
        differences = torch.full_like(self.clusters, drawn)
        clusters = self._memberships.checksum() if self.moves else self.clusters
        own = clusters, differences, super().fingerprint()
        return joined(self.data.fingerprint(), *own)

    def _relabelled(self, y: Tensor, cluster: int) -> Tensor:
        return (y + cluster) % self.num_classes

    @cached_property
    def _sample(self) -> Tensor:
        """An empty batch of features, ``[0, ...]``, for their shape and type."""
        return self.data.samples(0, "train")[0][:0]

    @cached_property
    def _offsets(self) -> Tensor:
        """The offset of each cluster's features, ``[num_clusters, ...]``."""
        offsets = self.shift * self._normal(self._sample.shape[1:])
        offsets[0] = 0
        return offsets

    @cached_property
    def _rotations(self) -> Tensor:
        """The orthogonal matrix of each cluster, ``[num_clusters, d, d]``."""
        size = self._sample.shape[1]
        rotations = torch.linalg.qr(self._normal((size, size))).Q
        rotations[0] = torch.eye(size)
        return rotations

    def _normal(self, shape: tuple[int, ...]) -> Tensor:
        random = generator(Purpose.DATA, self.seed, 3)
        return torch.randn(self.num_clusters, *shape, generator=random, dtype=torch.float64)

    def _check(self) -> None:
        """Raise unless there are enough clients, who can move, and the difference fits the data."""
        if self.num_clusters > self.num_clients:
            raise ConfigurationError(
                f"num_clusters is {self.num_clusters}, but there are only {self.num_clients} "
                "clients"
            )
        _ = self._memberships
        if not isinstance(self.difference, str):
            return
        if self.difference == "labels":
            if not self.data.knows_classes:
                raise ConfigurationError(
                    f"difference='labels' needs known classes, but {self.data} has none"
                )
            if self.num_clusters > self.num_classes:
                raise ConfigurationError(
                    f"difference='labels' allows at most num_classes={self.num_classes} clusters, "
                    f"got num_clusters={self.num_clusters}"
                )
            return
        shape = list(self._sample.shape[1:])
        if not self._sample.is_floating_point():
            raise ConfigurationError(
                f"difference={self.difference!r} needs floating-point features, but those of "
                f"{self.data} are {self._sample.dtype}"
            )
        if self.difference == "features":
            return
        if len(shape) not in (1, 3) or (len(shape) == 3 and shape[1] != shape[2]):
            raise ConfigurationError(
                f"difference='rotation' needs vectors or square images, but the features of "
                f"{self.data} have the shape {shape}"
            )
        if len(shape) == 3 and self.num_clusters > 4:
            raise ConfigurationError(
                "difference='rotation' allows at most 4 clusters of images, got "
                f"num_clusters={self.num_clusters}"
            )

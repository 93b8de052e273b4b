"""Generated data: clients of linear models, and clients of known clusters."""

from __future__ import annotations

import math
import os
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray

from pflight.datamodules.partitions.dealing import Ints
from pflight.datamodules.partitions.known_clusters import Difference, KnownClusters
from pflight.datamodules.partitions.partition import ByUser
from pflight.datamodules.partitions.partitioned import PartitionedDataModule
from pflight.datamodules.partitions.samples import Samples
from pflight.errors import ConfigurationError
from pflight.options import Interval, NonNegativeFloat, NonNegativeInt, PositiveInt, checked
from pflight.randomness import Purpose, numpy_generator

Floats = NDArray[np.float64]
Features = NDArray[np.float32]

_ENDLESS = 2.0**60  # samples, where a log-normal number overflows


class _Generated(PartitionedDataModule):
    """Clients that draw their own samples, independently of the other clients."""

    num_features: int
    least: int
    """Samples that every client has."""

    def size(self, client: int) -> int:
        """Return a client's number of samples."""
        return self.least

    def draw(self, client: int) -> tuple[Features, Ints]:
        """Return a client's features ``[n, num_features]`` and labels ``[n]``."""
        raise NotImplementedError

    def load(self) -> Samples:
        """See :meth:`PartitionedDataModule.load`.

        Raises:
            ConfigurationError: The samples take more than the machine's memory.
        """
        memory, total = _memory(), 0
        for client in range(self.num_clients):
            size = self.size(client)
            total += size
            samples = total + self.least * (self.num_clients - client - 1)
            drawn = size * (self.num_features + self.num_classes)  # in 64 bits, as is the model
            model = self.num_features * self.num_classes
            needed = 8 * (samples * (self.num_features + 1) + drawn + model)
            if needed > memory:
                raise ConfigurationError(
                    f"{samples:,} or more samples of {self.num_clients:,} clients take "
                    f"{needed / 2**30:,.0f} GiB, but this machine has {memory / 2**30:,.0f}: "
                    "make fewer or smaller ones"
                )
        features, labels = zip(*map(self.draw, range(self.num_clients)), strict=True)
        x, y = (torch.from_numpy(np.concatenate(parts)) for parts in (features, labels))
        return Samples(x, y, np.repeat(np.arange(self.num_clients), [len(part) for part in labels]))


@checked
class Synthetic(_Generated):
    """The synthetic(α, β) data of FedProx: each client labels its own features by its own model.

    Client ``k`` draws ``u_k ~ N(0, α)`` and a linear model ``W_k, b_k ~ N(u_k, 1)``. Then it draws
    ``B_k ~ N(0, β)`` and the mean ``v_k ~ N(B_k, 1)`` of its features ``x ~ N(v_k, Σ)``, with a
    diagonal ``Σ_jj = j^-1.2``. Labels are ``y = argmax softmax(W_k x + b_k)``. The client has
    ``floor(s) + min_samples`` samples, ``ln s ~ N(log_mean, log_std²)``. So ``alpha`` controls the
    difference of models, and ``beta`` the difference of features. With ``iid``, all clients have
    the same model with ``u = 0``, and ``v = 0``.

    The paper defines α and β as variances, but its released code uses them as standard deviations.
    The two agree at 0 and 1. At 0.5 these data are the code's, which everyone uses.

    Args:
        alpha: Standard deviation of the mean ``u_k`` of a client's model.
        beta: Standard deviation of the mean ``B_k`` of a client's features.
        num_clients: Number of clients. Client ``k`` is the same among few and among many.
        iid: Whether all clients have one model and one distribution of features.
        num_features: Length of a sample's vector of features.
        num_classes: Number of classes.
        min_samples: Samples that every client has, whatever is drawn.
        max_samples: Maximum number of samples of a client; ``null`` for no maximum.
        log_mean: Mean of the logarithm of the number of further samples.
        log_std: Standard deviation of that logarithm.
        val_fraction: Share of each client's samples for validation.
        test_fraction: Share of each client's samples for testing.
        **kwargs: Further arguments of :class:`FederatedDataModule`. ``seed`` also draws the data.

    Raises:
        ConfigurationError: An option is out of its range.

    Example:
        >>> data = Synthetic(alpha=1, beta=1, num_clients=5)
        >>> data.setup()
        >>> x, y = data.samples(0, "train")
        >>> W, b = data.model(0)
        >>> bool((y.numpy() == (x.numpy() @ W.T + b).argmax(axis=1)).all())
        True

    References:
        Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, section 5.1 and
        appendix C.1, https://arxiv.org/abs/1812.06127.
    """

    def __init__(
        self,
        alpha: NonNegativeFloat = 0.5,
        beta: NonNegativeFloat = 0.5,
        num_clients: int = 30,
        iid: bool = False,
        num_features: PositiveInt = 60,
        num_classes: int = 10,
        min_samples: PositiveInt = 50,
        max_samples: int | None = None,
        log_mean: float = 4.0,
        log_std: NonNegativeFloat = 2.0,
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_classes=num_classes,
            partition=ByUser(),
            num_clients=num_clients,
            val_fraction=val_fraction,
            test_fraction=test_fraction,
            **kwargs,
        )
        if max_samples is not None and max_samples < min_samples:
            raise ConfigurationError(
                f"Synthetic: max_samples must be at least min_samples = {min_samples}, got "
                f"{max_samples}"
            )
        self.alpha = alpha
        self.beta = beta
        self.iid = iid
        self.num_features = num_features
        self.min_samples = self.least = min_samples
        self.max_samples = max_samples
        self.log_mean = log_mean
        self.log_std = log_std

    def model(self, client: int) -> tuple[Floats, Floats]:
        """Return the model that labels a client's samples.

        Args:
            client: The client's id.

        Returns:
            Weights ``W_k``, ``[num_classes, num_features]``, and bias ``b_k``, ``[num_classes]``.
        """
        random = numpy_generator(Purpose.DATA, self.seed, 1, 0 if self.iid else client)
        mean = 0.0 if self.iid else random.normal(0, self.alpha)
        weights = random.normal(mean, 1, (self.num_classes, self.num_features))
        return weights, random.normal(mean, 1, self.num_classes)

    def size(self, client: int) -> int:
        """Return a client's number of samples."""
        return self._count(numpy_generator(Purpose.DATA, self.seed, 2, client))

    def _count(self, random: np.random.Generator) -> int:
        further = min(random.lognormal(self.log_mean, self.log_std), _ENDLESS)
        count = int(further) + self.min_samples
        return min(count, self.max_samples or count)

    def draw(self, client: int) -> tuple[Features, Ints]:
        """Return a client's features ``[n, num_features]`` and labels ``[n]``."""
        random = numpy_generator(Purpose.DATA, self.seed, 2, client)
        count = self._count(random)
        mean = np.zeros(self.num_features)
        if not self.iid:
            mean += random.normal(random.normal(0, self.beta), 1, self.num_features)
        deviation = np.arange(1, self.num_features + 1) ** -0.6
        x = random.normal(mean, deviation, (count, self.num_features)).astype(np.float32)
        weights, bias = self.model(client)
        return x, (x @ weights.T + bias).argmax(axis=1)


class _Blobs(_Generated):
    """Normal clouds around one random point per class, equally many samples of each."""

    def __init__(
        self, samples_per_client: int, num_features: int, spread: float, **kwargs: Any
    ) -> None:
        super().__init__(partition=ByUser(), **kwargs)
        self.samples_per_client = self.least = samples_per_client
        self.num_features = num_features
        self.spread = spread

    def draw(self, client: int) -> tuple[Features, Ints]:
        """Return a client's features ``[n, num_features]`` and labels ``[n]``."""
        shape = self.num_classes, self.num_features
        points = numpy_generator(Purpose.DATA, self.seed, 1).normal(size=shape)
        labels = np.arange(self.samples_per_client) % self.num_classes
        random = numpy_generator(Purpose.DATA, self.seed, 2, client)
        return random.normal(points[labels], self.spread).astype(np.float32), labels


@checked
class ClusteredSynthetic(KnownClusters):
    """Generated clients of known clusters. The clusters' data differ in one chosen way.

    Class ``c`` is a normal cloud ``N(m_c, spread² I)`` around a point ``m_c ~ N(0, I)``. Each
    client has all classes in equal amounts, to within one sample, changed as in its cluster (see
    :class:`KnownClusters`). With fewer features, a single model is less right for all clusters.
    With ``num_classes + num_clusters - 2`` features or more, a linear model can ignore the offsets
    of ``difference="features"``.

    Args:
        num_clusters: Number of clusters.
        difference: As in :class:`KnownClusters`.
        shift: Standard deviation of the clusters' offsets; for ``features`` only.
        num_clients: Number of clients.
        samples_per_client: Samples of each client.
        num_features: Length of a sample's vector of features.
        num_classes: Number of classes.
        spread: Standard deviation of a class around its point.
        val_fraction: Share of each client's samples for validation.
        test_fraction: Share of each client's samples for testing.
        seed: Seed of the data, the clusters, the cohorts and the order of the samples.
        **kwargs: Further arguments of :class:`KnownClusters`, such as ``moves``.

    Raises:
        ConfigurationError: An option is out of its range.

    Example:
        >>> data = ClusteredSynthetic(num_clusters=3, num_clients=10)
        >>> data.setup()
        >>> data.clusters.bincount().tolist()
        [4, 3, 3]
    """

    def __init__(
        self,
        num_clusters: int = 4,
        difference: Difference = "labels",
        shift: float = 1.0,
        num_clients: PositiveInt = 40,
        samples_per_client: PositiveInt = 100,
        num_features: PositiveInt = 4,
        num_classes: PositiveInt = 10,
        spread: NonNegativeFloat = 0.25,
        val_fraction: Annotated[float, Interval("[0, 1)")] = 0.1,
        test_fraction: Annotated[float, Interval("[0, 1)")] = 0.2,
        seed: NonNegativeInt = 0,
        **kwargs: Any,
    ) -> None:
        blobs = _Blobs(
            samples_per_client,
            num_features,
            spread,
            num_classes=num_classes,
            num_clients=num_clients,
            val_fraction=val_fraction,
            test_fraction=test_fraction,
            seed=seed,
        )
        super().__init__(blobs, num_clusters, difference, shift, seed=seed, **kwargs)


def _memory() -> float:
    """Return the bytes of the machine's memory; infinity if they are unknown."""
    if not hasattr(os, "sysconf"):
        return math.inf
    return float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")

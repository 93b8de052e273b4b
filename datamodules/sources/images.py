"""Data sets of images of one size, held as bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pflight.datamodules.partitions.dealing import Ints
from pflight.datamodules.partitions.partition import ClassesPerClient, Partition
from pflight.datamodules.partitions.partitioned import PartitionedDataModule
from pflight.datamodules.partitions.samples import Samples
from pflight.errors import ConfigurationError
from pflight.options import checked

from .root import absence, announce_download, check_root


@dataclass(frozen=True)
class LabelledImages:
    """The content of one file of a data set, or of a pair of files.

    Attributes:
        source: The file or files, in the words of an error.
        pixels: Images ``[n, C, H, W]``, uint8.
        labels: Their classes ``[n]``.
        test: Whether they belong to the data set's own test set.
    """

    source: str
    pixels: NDArray[np.uint8]
    labels: Ints
    test: bool


@checked
class ImageDataModule(PartitionedDataModule):
    """Images of one size, kept in memory as bytes and normalised when they are read.

    Features are float32 ``[n, C, H, W]``: bytes scaled to [0, 1], less the mean, over the standard
    deviation of their channel. A data set of one's own sets the class attributes and
    ``num_classes``, and defines :meth:`missing`, :meth:`fetch` and :meth:`read`.

    Args:
        root: Folder of the data set.
        download: Whether to fetch a data set that is not there, with torchvision, into ``root``.
        mean: Mean of each channel, of pixels in [0, 1]; ``null`` means the data set's usual one.
        std: Standard deviation of each channel; ``null`` means the data set's usual one.
        partition: How samples are dealt to clients.
        num_clients: Number of clients.
        **kwargs: Further arguments of :class:`PartitionedDataModule`.

    Raises:
        ConfigurationError: An option is out of its range.
    """

    title: ClassVar[str]
    """The data set's name in errors."""

    shape: ClassVar[tuple[int, int, int]]
    """Channels, height and width of an image."""

    usual_mean: ClassVar[Sequence[float]]
    """Mean of each channel of the training images, of pixels in [0, 1]."""

    usual_std: ClassVar[Sequence[float]]
    """Standard deviation of each channel of the training images."""

    elsewhere: ClassVar[str] = ""
    """A further proposal in an error about missing files: ", or ..."."""

    def __init__(
        self,
        root: str = "data",
        download: bool = True,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        partition: Partition = ClassesPerClient(2),  # noqa: B008 (a frozen value object)
        num_clients: int | None = 100,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_classes=None, partition=partition, num_clients=num_clients, **kwargs)
        self.root = root
        self.download = download
        means = self._per_channel("mean", self.usual_mean if mean is None else mean)
        deviations = self._per_channel("std", self.usual_std if std is None else std)
        if not bool((deviations > 0).all()):
            raise ConfigurationError(f"{type(self).__name__}: std must be over 0, got {std}")
        self._scale = 1 / (255 * deviations)
        self._shift = means / deviations
        self.fill = -self._shift

    def missing(self) -> str | None:
        """Name the missing files and the folders searched; ``None`` if nothing is missing."""
        raise NotImplementedError(f"{type(self).__name__} must define missing()")

    def fetch(self) -> None:
        """Download the data set into ``root``."""
        raise NotImplementedError(f"{type(self).__name__} must define fetch()")

    def read(self) -> Iterator[LabelledImages]:
        """Read the data set, file by file.

        Raises:
            ConfigurationError: A file is damaged.
        """
        raise NotImplementedError(f"{type(self).__name__} must define read()")

    def prepare_data(self) -> None:
        """Download the data set if it is not there and ``download`` allows it."""
        check_root(self.root)
        if not self.download or self.missing() is None:
            return
        note = absence(self.root)
        announce_download(self.title, self.root)
        try:
            self.fetch()
        except Exception as error:  # torchvision raises many kinds of errors.
            reason = " ".join(str(error).split())
            raise ConfigurationError(
                f"could not download {self.title} to {self.root}{note}: {reason}"
            ) from error

    def load(self) -> Samples:
        """See :meth:`PartitionedDataModule.load`."""
        parts = list(self.parts())
        labels = np.concatenate([part.labels for part in parts])
        x = np.empty((len(labels), *self.shape), np.uint8)
        np.concatenate([part.pixels for part in parts], out=x)
        return Samples(
            torch.from_numpy(x),
            torch.from_numpy(labels),
            test=np.concatenate([np.full(len(part.labels), part.test) for part in parts]),
        )

    def parts(self) -> Iterator[LabelledImages]:
        """Read the data set, file by file, and check that it is this data set.

        Raises:
            ConfigurationError: A file is missing or damaged, or has images of another shape or
                labels out of range.
        """
        check_root(self.root)
        if (missing := self.missing()) is not None:
            raise ConfigurationError(
                f"{missing}{absence(self.root)}; download=True fetches it in prepare_data()"
                f"{self.elsewhere}"
            )
        for part in self.read():
            if misfit := self._misfit(part):
                raise ConfigurationError(f"{part.source} is not {self.title}: {misfit}")
            yield part

    def transform(self, x: Tensor) -> Tensor:
        """Scale bytes to [0, 1] and normalise each channel."""
        return x.float().mul_(self._scale).sub_(self._shift)

    def _misfit(self, part: LabelledImages) -> str | None:
        """Name an error in some images or labels, if there is one."""
        pixels, labels = part.pixels.shape, part.labels.shape
        if pixels != (*labels, *self.shape):
            return (
                f"images of shape {list(pixels)} with labels of shape {list(labels)}; expected "
                f"[n, {', '.join(map(str, self.shape))}] with [n]"
            )
        lowest, highest = part.labels.min(initial=0), part.labels.max(initial=0)
        if lowest < 0 or highest >= self.num_classes:
            return f"labels {lowest} to {highest}; expected 0 to {self.num_classes - 1}"
        return None

    def _per_channel(self, name: str, values: Sequence[float]) -> Tensor:
        channels = self.shape[0]
        if len(values) != channels:
            raise ConfigurationError(
                f"{type(self).__name__}: {name} must have one value for each channel, {channels}, "
                f"got {list(values)}"
            )
        return torch.tensor(values).view(-1, 1, 1)

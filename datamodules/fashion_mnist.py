"""Fashion-MNIST, downloaded or read from its idx files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pflight.errors import ConfigurationError

from .idx import read_idx
from .partition import ClassesPerClient, Ints, Partition
from .partitioned import PartitionedDataModule

_MEAN = 0.2860
_STD = 0.3530
_PARTS = ("train", "t10k")
_FILES = tuple(f"{part}-{kind}-ubyte" for part in _PARTS for kind in ("images-idx3", "labels-idx1"))


class FashionMNIST(PartitionedDataModule):
    """70,000 pictures of clothes of 28 x 28 pixels in 10 classes (Xiao et al., 2017).

    The official training and test sets are pooled, dealt to clients, and split anew for each
    client. Pixels are kept as bytes (55 MB) and normalised when they are read: features are float32
    ``[n, 1, 28, 28]``.

    Args:
        root: Folder with the four idx files, plain or ``.gz`` (as Debian's package
            ``dataset-fashion-mnist`` installs them), or with torchvision's ``FashionMNIST/raw``.
        download: Whether to fetch files that are missing, with torchvision, into ``root``.
        partition: How samples are dealt to clients.
        num_clients: Number of clients.
        val_fraction: Share of each client's samples for validation.
        test_fraction: Share of each client's samples for testing.
        **kwargs: Further arguments of :class:`FederatedDataModule`.
    """

    def __init__(
        self,
        root: str = "data",
        download: bool = True,
        partition: Partition = ClassesPerClient(2),  # noqa: B008 (a frozen value object)
        num_clients: int = 100,
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_classes=10,
            partition=partition,
            num_clients=num_clients,
            val_fraction=val_fraction,
            test_fraction=test_fraction,
            **kwargs,
        )
        self.root = root
        self.download = download

    def prepare_data(self) -> None:
        """Download the files that are missing, if ``download`` allows it."""
        if not self.download or None not in (self._find(name) for name in _FILES):
            return
        from torchvision import datasets

        try:
            datasets.FashionMNIST(self.root, download=True)
        except (OSError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise ConfigurationError(
                f"could not download Fashion-MNIST to {self.root}: {reason}"
            ) from error

    def load(self) -> tuple[Tensor, Tensor, Ints | None]:
        """See :meth:`PartitionedDataModule.load`."""
        found = {name: self._find(name) for name in _FILES}
        missing = [name for name, path in found.items() if path is None]
        if missing:
            folders = " and ".join(str(folder) for folder in self._folders())
            raise ConfigurationError(
                f"Fashion-MNIST's {', '.join(missing)} (plain or .gz) not found in {folders}; "
                "download=True fetches them in prepare_data(), or set root to the folder of "
                "Debian's package dataset-fashion-mnist"
            )
        arrays = {name: read_idx(path) for name, path in found.items() if path is not None}
        images = [arrays[f"{part}-images-idx3-ubyte"] for part in _PARTS]
        labels = [arrays[f"{part}-labels-idx1-ubyte"] for part in _PARTS]
        for pixels, kinds in zip(images, labels, strict=True):
            highest = kinds.max(initial=0)
            if pixels.shape[1:] != (28, 28) or kinds.shape != pixels.shape[:1] or highest > 9:
                raise ConfigurationError(
                    f"the files in {self.root} are not Fashion-MNIST: images of shape "
                    f"{list(pixels.shape)}, labels of shape {list(kinds.shape)} up to {highest}"
                )
        x = torch.from_numpy(np.concatenate(images)).unsqueeze(1)
        return x, torch.from_numpy(np.concatenate(labels)).long(), None

    def transform(self, x: Tensor) -> Tensor:
        """Scale bytes to [0, 1], subtract the mean 0.2860 and divide by the deviation 0.3530."""
        return x.float().mul_(1 / (255 * _STD)).sub_(_MEAN / _STD)

    def _folders(self) -> tuple[Path, Path]:
        return Path(self.root), Path(self.root, "FashionMNIST", "raw")

    def _find(self, name: str) -> Path | None:
        names = [folder / file for folder in self._folders() for file in (name, f"{name}.gz")]
        return next((path for path in names if path.is_file()), None)

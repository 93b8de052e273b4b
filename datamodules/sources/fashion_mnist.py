"""Fashion-MNIST, downloaded or read from its idx files."""

from __future__ import annotations

from pathlib import Path

from .idx import IdxDataModule


class FashionMNIST(IdxDataModule):
    """70,000 pictures of clothes of 28 x 28 pixels in 10 classes (Xiao et al., 2017).

    60,000 are for training, 10,000 for testing. Held as bytes they take 55 MB; features are
    float32 ``[n, 1, 28, 28]`` of mean 0 (0.2860 before) and deviation 1 (0.3530 before).

    ``root`` is a folder with the four idx files, plain or ``.gz``, or with a folder
    ``fashion-mnist`` (as Debian's package ``dataset-fashion-mnist`` installs it) or torchvision's
    ``FashionMNIST/raw`` that has them. The arguments are those of :class:`ImageDataModule`.
    """

    title = "Fashion-MNIST"
    usual_mean = (0.2860,)
    usual_std = (0.3530,)
    num_classes = 10
    prefixes = "train", "t10k"
    elsewhere = ", or set root to the folder of Debian's package dataset-fashion-mnist"

    def folders(self) -> list[Path]:
        """See :meth:`IdxDataModule.folders`."""
        folders = "", "fashion-mnist", "FashionMNIST/raw"
        return [Path(self.root, folder) for folder in folders]

    def fetch(self) -> None:
        """See :meth:`ImageDataModule.fetch`."""
        from torchvision import datasets

        datasets.FashionMNIST(self.root, download=True)

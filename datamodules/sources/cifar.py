"""CIFAR-10 and CIFAR-100, downloaded or read from parquet files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pflight.datamodules.partitions.samples import Samples
from pflight.errors import ConfigurationError
from pflight.options import checked

from .cache import SampleWriter, cached_samples
from .images import ImageDataModule, LabelledImages
from .parquet import decode_image, parquet_columns, parquet_files, read_parquet


@checked
class CIFARDataModule(ImageDataModule):
    """The source of CIFAR-10's and CIFAR-100's 60,000 images.

    Args:
        root: Folder with Hugging Face's parquet files, ``train-*.parquet`` and ``test-*.parquet``,
            or else with torchvision's ``cifar-10-batches-py`` or ``cifar-100-python``. The parquet
            files may also be in a folder ``cifar10`` or ``cifar100``, and inside these in
            ``plain_text``, ``cifar100`` or ``data``.
        cache_dir: Folder that keeps the images of parquet files decoded; ``null`` decodes them
            anew each time, in four seconds or so.
        **kwargs: Further arguments of :class:`ImageDataModule`.
    """

    shape = (3, 32, 32)

    torchvision_name: ClassVar[str]
    """The class in torchvision; in lower case, the usual folder."""

    label_column: ClassVar[str]
    """The column of labels in the parquet files."""

    def __init__(self, root: str = "data", cache_dir: str | None = None, **kwargs: Any) -> None:
        super().__init__(root, **kwargs)
        self.cache_dir = cache_dir

    def missing(self) -> str | None:
        """See :meth:`ImageDataModule.missing`."""
        if self._parquet_files():
            return None
        from torchvision.datasets.utils import check_integrity

        source = self._torchvision()
        folder = Path(self.root, source.base_folder)
        files = [*source.train_list, *source.test_list]
        files.append([source.meta["filename"], source.meta["md5"]])
        bad = [name for name, md5 in files if not check_integrity(folder / name, md5)]
        if not bad:
            return None
        return (
            f"{self.title} not found: no train-*.parquet and test-*.parquet in {self.root}, and "
            f"{', '.join(bad)} missing or damaged in {folder}"
        )

    def fetch(self) -> None:
        """See :meth:`ImageDataModule.fetch`."""
        self._torchvision()(self.root, download=True)

    def load(self) -> Samples:
        """See :meth:`PartitionedDataModule.load`."""
        files = self._parquet_files()
        if self.cache_dir is None or not files:
            return super().load()
        folder, name = Path(self.cache_dir), self.torchvision_name.lower()
        cached = cached_samples(folder, name, files, {}, self._build, self.num_classes)
        return replace(cached, groups=None)

    def _build(self, writer: SampleWriter) -> None:
        """Write all images to the cache."""
        for part in self.parts():
            writer.add(part.pixels, part.labels, group="", test=part.test)

    def read(self) -> Iterator[LabelledImages]:
        """See :meth:`ImageDataModule.read`."""
        files = self._parquet_files()
        return chain.from_iterable(map(self._parquet, files)) if files else self._pickles()

    def _pickles(self) -> Iterator[LabelledImages]:
        for train in (True, False):
            data = self._torchvision()(self.root, train=train)
            yield LabelledImages(
                source=str(Path(self.root, data.base_folder)),
                pixels=data.data.transpose(0, 3, 1, 2),
                labels=np.array(data.targets),
                test=not train,
            )

    def _parquet(self, path: Path) -> Iterator[LabelledImages]:
        image = "img" if "img" in parquet_columns(path) else "image"
        num_rows = 0
        for batch in read_parquet(path, [image, self.label_column]):
            pixels = [
                decode_image(content, f"{path}: row {row}", "RGB", self.shape[1:])
                for row, content in enumerate(batch[image], num_rows)
            ]
            labels = batch[self.label_column]
            odd = [label for label in labels if type(label) is not int]
            if odd:
                raise ConfigurationError(
                    f"{path}: {self.label_column} must have whole numbers, got {odd[0]!r}"
                )
            num_rows += len(labels)
            yield LabelledImages(
                source=str(path),
                pixels=np.stack(pixels).transpose(0, 3, 1, 2),
                labels=np.array(labels),
                test=path.name.startswith("test"),
            )
        if not num_rows:
            raise ConfigurationError(f"{path} has no rows")

    def _parquet_files(self) -> list[Path]:
        """Return the files for training and for testing of the first folder that has both."""
        usual = self.torchvision_name.lower()
        for folder in (Path(self.root, usual), Path(self.root)):
            for inside in (folder, *(folder / name for name in ("plain_text", usual, "data"))):
                train, test = (
                    parquet_files(inside, f"{part}-*.parquet") for part in ("train", "test")
                )
                if train and test:
                    return train + test
        return []

    def _torchvision(self) -> Any:
        from torchvision import datasets

        return getattr(datasets, self.torchvision_name)


class CIFAR10(CIFARDataModule):
    """60,000 colour photographs of 32 x 32 pixels in 10 classes (Krizhevsky, 2009).

    50,000 are for training, 10,000 for testing. Held as bytes they take 176 MB; features are
    float32 ``[n, 3, 32, 32]``, normalised by the mean and the deviation of each channel of the
    training images. The arguments are those of :class:`CIFARDataModule`.
    """

    title = "CIFAR-10"
    torchvision_name = "CIFAR10"
    label_column = "label"
    num_classes = 10
    usual_mean = (0.4914, 0.4822, 0.4465)
    usual_std = (0.2470, 0.2435, 0.2616)


class CIFAR100(CIFARDataModule):
    """60,000 colour photographs of 32 x 32 pixels in 100 classes (Krizhevsky, 2009).

    As :class:`CIFAR10`, with 500 training and 100 test images of each class; labels are the fine
    ones.
    """

    title = "CIFAR-100"
    torchvision_name = "CIFAR100"
    label_column = "fine_label"
    num_classes = 100
    usual_mean = (0.5071, 0.4865, 0.4409)
    usual_std = (0.2673, 0.2564, 0.2762)

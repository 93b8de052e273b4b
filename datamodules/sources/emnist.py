"""EMNIST, handwritten digits and letters, downloaded or read from its idx files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pflight.options import checked

from .idx import IdxDataModule
from .images import LabelledImages

EMNISTSplit = Literal["balanced", "byclass", "bymerge", "digits", "letters", "mnist"]

_NUM_CLASSES = {
    "balanced": 47, "byclass": 62, "bymerge": 47, "digits": 10, "letters": 26, "mnist": 10,
}  # fmt: skip


@checked
class EMNIST(IdxDataModule):
    """Handwritten digits and letters of 28 x 28 pixels, in six versions (Cohen et al., 2017).

    | ``split`` | samples | classes |
    |---|---|---|
    | ``byclass`` | 814,255 | 62: digits, upper case, lower case |
    | ``bymerge`` | 814,255 | 47: where both cases look alike, they are one class |
    | ``balanced`` | 131,600 | the same 47, equally many of each |
    | ``letters`` | 145,600 | 26: both cases are one class |
    | ``digits`` | 280,000 | 10 |
    | ``mnist`` | 70,000 | 10 |

    Labels start at 0 in each version, and characters stand upright, white on black. In the files,
    ``letters`` start at 1, and all characters are transposed. A sample takes 784 bytes in memory.
    Features are float32 ``[n, 1, 28, 28]``. For all versions, the usual mean 0.1736 and deviation
    0.3248 are from ``byclass``.

    Args:
        root: Folder with the split's four idx files (``emnist-<split>-train-images-idx3-ubyte`` and
            so on), plain or ``.gz``, or with a folder ``gzip`` or torchvision's ``EMNIST/raw`` that
            has them.
        split: Which version; see the table.
        **kwargs: Further arguments of :class:`ImageDataModule`.

    Raises:
        ConfigurationError: There is no such version.

    Example:
        >>> EMNIST(split="letters").num_classes
        26
    """

    title = "EMNIST"
    usual_mean = (0.1736,)
    usual_std = (0.3248,)

    def __init__(self, root: str = "data", split: EMNISTSplit = "balanced", **kwargs: Any) -> None:
        super().__init__(root, **kwargs)
        self.split = split
        self.num_classes = _NUM_CLASSES[split]
        self.prefixes = f"emnist-{split}-train", f"emnist-{split}-test"

    def folders(self) -> list[Path]:
        """See :meth:`IdxDataModule.folders`."""
        return [Path(self.root, folder) for folder in ("", "gzip", "EMNIST/raw")]

    def fetch(self) -> None:
        """See :meth:`ImageDataModule.fetch`."""
        from torchvision import datasets

        datasets.EMNIST(self.root, self.split, download=True)

    def read(self) -> Iterator[LabelledImages]:
        """See :meth:`ImageDataModule.read`."""
        first_label = 1 if self.split == "letters" else 0
        for part in super().read():
            upright = part.pixels.swapaxes(-1, -2)
            yield replace(part, pixels=upright, labels=part.labels - first_label)

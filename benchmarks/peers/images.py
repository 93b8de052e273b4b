"""The images that all rows train on, written once for all processes of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

TRAIN, TEST = 60_000, 10_000
MEAN, STD = 0.2860, 0.3530  # of Fashion-MNIST's pixels between 0 and 1


def write_images(folder: Path, root: Path | None) -> None:
    """Write ``train_x.npy``, ``train_y.npy``, ``test_x.npy`` and ``test_y.npy``, shuffled.

    Images are float32 ``[n, 1, 28, 28]`` of mean 0 and deviation 1.

    Args:
        folder: Where to.
        root: Folder of Fashion-MNIST's idx files, plain or ``.gz``. Without it, images of the same
            shape are drawn: one pattern a class, and noise.
    """
    random = np.random.default_rng(0)
    if root is None:
        pattern = 0.1 * random.standard_normal((10, 1, 28, 28), dtype=np.float32)
    for split, count in (("train", TRAIN), ("test", TEST)):
        if root is None:
            y = random.integers(10, size=count)
            x = pattern[y] + random.standard_normal((count, 1, 28, 28), dtype=np.float32)
        else:
            x, y = _fashion_mnist(root, split)
            order = random.permutation(len(y))
            x, y = x[order], y[order]
        np.save(folder / f"{split}_x.npy", x)
        np.save(folder / f"{split}_y.npy", y)


def _fashion_mnist(root: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    from pflight.datamodules.sources.idx import read_idx

    prefix = {"train": "train", "test": "t10k"}[split]
    arrays = []
    for name in ("images-idx3-ubyte", "labels-idx1-ubyte"):
        path = root / f"{prefix}-{name}"
        arrays.append(read_idx(path if path.is_file() else path.with_name(f"{path.name}.gz")))
    images, labels = arrays
    x = ((images[:, np.newaxis] / 255 - MEAN) / STD).astype(np.float32)
    return x, labels.astype(np.int64)

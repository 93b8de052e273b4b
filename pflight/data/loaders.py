"""Loaders of samples that are gathered batch by batch, and the visits to clients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from pflight.messages import OF_LOADERS, OWN_BATCHES
from pflight.randomness import Purpose, shuffled

Batch = tuple[Tensor, Tensor]
Split = Literal["train", "val", "test", "held_out"]
"""``held_out``: the samples that :class:`~pflight.datamodules.HeldOut` keeps out of training."""
SPLITS: tuple[Split, ...] = ("train", "val", "test")


class Rows(Protocol):
    """Features of samples: a tensor, or an object that reads them from a file."""

    def __getitem__(self, rows: Tensor, /) -> Tensor:
        """Return the features ``[m, ...]`` of some rows ``[m]``."""
        ...


class Visit(NamedTuple):
    """The batches of a client in one local epoch or in an evaluation.

    Attributes:
        client: The client's id.
        round: Index of the communication round; ``None`` in an evaluation.
        epoch: Index of the local epoch within the round.
        parts: For each batch, the positions of its samples among the client's.
    """

    client: int
    round: int | None
    epoch: int
    parts: Sequence[Tensor]


def labels_of(batch: Any) -> Tensor:
    """Return the classes ``[n]`` of a batch.

    Raises:
        TypeError: If the batch is not a pair of inputs and classes.
    """
    y = batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else None
    if not isinstance(y, Tensor) or y.dim() != 1 or y.is_floating_point():
        raise TypeError("its batches are not pairs of inputs and classes [n]")
    return y


def sample_order(count: int, seed: int, round: int, client: int = 0, epoch: int = 0) -> Tensor:
    """Return a permutation of ``count`` samples as a pure function of the arguments."""
    return shuffled([count], Purpose.ORDER, seed, round, epoch, streams=[client])[0]


class IndexedSamples(Dataset[Batch]):
    """Samples with features as rows of a larger tensor or file; batches are gathered at once.

    Args:
        x: Features ``[N, ...]``.
        y: Labels of these samples ``[n]``.
        rows: Their positions in ``x`` ``[n]``; ``None`` means that sample ``i`` is ``x[i]``.
        transform: A function to apply to gathered features.
    """

    def __init__(
        self,
        x: Rows,
        y: Tensor,
        rows: Tensor | None = None,
        transform: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.x = x
        self.y = y
        self.rows = rows
        self.transform = transform

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Batch:
        x, y = self.__getitems__([index])
        return x[0], y[0]

    def __getitems__(self, batch: Sequence[int]) -> Batch:
        """Gather a batch: features ``[b, ...]`` and labels ``[b]``."""
        chosen = torch.as_tensor(batch)
        x = self.x[chosen if self.rows is None else self.rows[chosen]]
        return x if self.transform is None else self.transform(x), self.y[chosen]


class AugmentedSamples(Dataset[Batch]):
    """Samples with features that change as they are gathered.

    Args:
        samples: The unchanged samples.
        augment: A function of the features of a batch ``[b, ...]`` and their positions ``[b]``.
    """

    def __init__(
        self, samples: IndexedSamples, augment: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        self.samples = samples
        self.augment = augment

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Batch:
        x, y = self.__getitems__([index])
        return x[0], y[0]

    def __getitems__(self, batch: Sequence[int]) -> Batch:
        """Gather a batch: features ``[b, ...]`` and labels ``[b]``."""
        x, y = self.samples.__getitems__(batch)
        return self.augment(x, torch.as_tensor(batch)), y


class EpochSampler(Sampler[int]):
    """Yields the order of the epoch given to ``set_epoch``.

    Args:
        count: Number of samples.
        order: A function of the epoch that returns a permutation ``[count]``.
    """

    def __init__(self, count: int, order: Callable[[int], Tensor]) -> None:
        self.count = count
        self.order = order
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration's order; Lightning calls it."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(self.order(self.epoch).tolist())


def as_gathered(batch: Any) -> Any:
    """Return the batch unchanged. It is already gathered and needs no collating."""
    return batch


def batch_loader(
    dataset: IndexedSamples | AugmentedSamples,
    batch_size: int | None,
    sampler: EpochSampler | None = None,
) -> DataLoader[Batch]:
    """Return a DataLoader of gathered batches; ``batch_size=None`` means one batch of all."""
    size = max(1, len(dataset)) if batch_size is None else batch_size
    return DataLoader(dataset, batch_size=size, sampler=sampler, collate_fn=as_gathered)


def warn_of_loader_options(owner: object, whose: str) -> None:
    """Warn of attributes, as of a DataLoader, that change no client's batches."""
    for name in OF_LOADERS:
        if getattr(owner, name, None) not in (None, False):
            warnings.warn(f"{whose}.{name} has no effect: {OWN_BATCHES}", stacklevel=2)


def empty_loader() -> list[Tensor]:
    """Return an empty list, which makes Lightning skip an evaluation, and silence its warning."""
    warnings.filterwarnings("ignore", "Total length of `list` across ranks is zero")
    return []

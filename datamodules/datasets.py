"""Clients whose samples are torch Datasets, read only when they are needed."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Sampler, default_collate

from pflight.data_module import FederatedDataModule
from pflight.errors import ConfigurationError
from pflight.loaders import SPLITS, Split, Visit, as_gathered
from pflight.options import check_range, checked
from pflight.randomness import Purpose, derive_seed, seed_everything

_ASIDE = np.random.MT19937(0)
_CPU = torch.device("cpu")
_END = object()
_MASK = (1 << 63) - 1
_STRIDE = 0x9E3779B97F4A7C15  # between the seeds of neighbouring samples
Datasets = Sequence[Dataset[Any]]
Key = tuple[int, int, int]
"""A sample's position among the datasets, its index, and its seed."""


@checked
class DatasetClients(FederatedDataModule):
    """Federated data with one map-style torch ``Dataset`` for each client.

    Samples are read when a batch needs them, by one DataLoader for all clients; counting uses a
    dataset's ``len`` and reads none. ``collate_fn`` makes batches, in any form that the client
    module's steps take. Random transforms of a sample depend only on
    ``(seed, round, client, epoch, index)``, so that they are the same with any number of workers
    and in a resumed run. Random numbers in ``collate_fn`` follow those of the batch's last sample.

    Args:
        train: Each client's training samples. To deal one Dataset to clients, give a list of
            ``torch.utils.data.Subset``.
        val: Each client's validation samples, in the same order; ``None`` means none.
        test: Each client's test samples.
        num_classes: Number of classes, if samples have them and the client module needs it.
        batch_size: Samples in a local training batch; ``None`` means all of the client's.
        num_workers: Processes that read samples, as in a DataLoader.
        collate_fn: Makes a batch from a list of samples, as in a DataLoader.
        pin_memory: As in a DataLoader.
        **kwargs: Further arguments of :class:`FederatedDataModule`.

    Raises:
        ConfigurationError: If a list is empty or of another length, or a dataset can't be counted.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> hospital = TensorDataset(torch.zeros(5, 4), torch.ones(5, 1))
        >>> data = DatasetClients(train=[hospital, hospital], batch_size=2)
        >>> data.num_clients, data.num_samples("train").tolist()
        (2, [5, 5])
    """

    def __init__(
        self,
        train: Datasets,
        val: Datasets | None = None,
        test: Datasets | None = None,
        *,
        num_classes: int | None = None,
        batch_size: int | None = 32,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_classes=num_classes, batch_size=batch_size, **kwargs)
        self.num_clients = len(train)
        if not self.num_clients:
            raise ConfigurationError(
                f"{type(self).__name__}: train is empty: a federation needs at least one client"
            )
        self.datasets: dict[Split, list[Dataset[Any]]] = {}
        for split, given in zip(SPLITS, (train, val, test), strict=True):
            nothing: list[Dataset[Any]] = [_NoSamples()] * self.num_clients
            datasets = nothing if given is None else list(given)
            if len(datasets) != self.num_clients:
                raise ConfigurationError(
                    f"{type(self).__name__}: {split} has {len(datasets)} clients, but train has "
                    f"{self.num_clients}"
                )
            for client, dataset in enumerate(datasets):
                if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
                    raise ConfigurationError(
                        f"client {client}, {split}: {type(dataset).__name__} is not a map-style "
                        "Dataset, which has __len__ and __getitem__"
                    )
            self.datasets[split] = datasets
        check_range(self, "[0, inf)", num_workers=num_workers)
        self.num_workers = num_workers
        self.collate_fn = collate_fn
        self.pin_memory = pin_memory
        self._sizes = {
            split: torch.tensor([len(dataset) for dataset in datasets])  # type: ignore[arg-type]
            for split, datasets in self.datasets.items()
        }
        self._loaders: dict[Split, _Loader] = {}
        self.setup()

    def num_samples(self, split: Split = "train") -> Tensor:
        """Return each client's number of samples, ``[num_clients]``."""
        return self._sizes[split]

    def batches(self, split: Split, visits: Sequence[Visit]) -> Iterator[Any]:
        """Yield the batches of some visits to clients, made by ``collate_fn``."""
        if split not in self._loaders:
            samples = _Samples(self.datasets[split], self.collate_fn or default_collate)
            self._loaders[split] = _Loader(samples, self.num_workers, self.pin_memory)
        return self._loaders[split].batches(_keys(visits, self.seed))

    def teardown(self, stage: str | None = None) -> None:
        """End the workers; a later stage starts new ones."""
        for loader in self._loaders.values():
            loader.close()
        self._loaders.clear()

    def on_exception(self, exception: BaseException) -> None:
        """End the workers when a run fails."""
        self.teardown()

    @property
    def knows_classes(self) -> bool:
        """Whether classes can be counted: no, since all samples would have to be read."""
        return False

    def dataset(self, clients: Tensor, split: Split) -> Dataset[Any]:  # type: ignore[override]
        """Return the samples of some clients, one client after the other, as one torch Dataset."""
        chosen = [self.datasets[split][client] for client in clients.tolist()]
        return _Collated(chosen, self.collate_fn or default_collate)


def _keys(visits: Sequence[Visit], seed: int) -> Iterator[list[Key]]:
    """Yield the keys of each batch's samples."""
    for client, round, epoch, parts in visits:
        first = derive_seed(Purpose.AUGMENT, seed, round or 0, client, epoch)
        for part in parts:
            yield [(client, index, first + index * _STRIDE & _MASK) for index in part.tolist()]


class _NoSamples(Dataset[Any]):
    """A client without samples."""

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> Any:
        raise IndexError(index)


class _Collated(ConcatDataset[Any]):
    """The samples of some clients as a Dataset that returns batches."""

    def __init__(
        self, datasets: Sequence[Dataset[Any]], collate_fn: Callable[[list[Any]], Any]
    ) -> None:
        super().__init__(datasets)
        self.collate_fn = collate_fn

    def __getitems__(self, indices: list[int]) -> Any:
        return self.collate_fn([self[index] for index in indices])


class _Samples(Dataset[Any]):
    """All clients' samples as a Dataset that returns batches."""

    def __init__(
        self, datasets: Sequence[Dataset[Any]], collate_fn: Callable[[list[Any]], Any]
    ) -> None:
        self.datasets = datasets
        self.collate_fn = collate_fn

    def __getitems__(self, keys: list[Key]) -> Any:
        return self.collate_fn([self[key] for key in keys])

    def __getitem__(self, key: Key) -> Any:
        client, index, seed = key
        seed_everything(seed, _CPU)
        return self.datasets[client][index]


class _Schedule(Sampler[list[Key]]):
    """The batches that a loader will read next."""

    batches: Iterable[list[Key]] = ()

    def __iter__(self) -> Iterator[list[Key]]:
        return iter(self.batches)


class _Loader:
    """A DataLoader with persistent workers, which read whatever batches are needed next."""

    def __init__(self, samples: _Samples, num_workers: int, pin_memory: bool) -> None:
        self._schedule = _Schedule()
        self._loader = DataLoader(
            samples,
            batch_sampler=self._schedule,
            num_workers=num_workers,
            collate_fn=as_gathered,
            pin_memory=pin_memory,
            persistent_workers=num_workers > 0,
            generator=torch.Generator(),  # or it would draw a seed out of a client's numbers
        )
        self._end: weakref.finalize[..., Any] | None = None

    def close(self) -> None:
        """End the workers, if there are any."""
        if self._end is not None:
            self._end()

    def batches(self, batches: Iterable[list[Key]]) -> Iterator[Any]:
        """Yield batches of these samples."""
        self._schedule.batches = batches
        with _drawing_aside():
            iterator = iter(self._loader)
        if self._loader.num_workers and self._end is None:
            # The garbage collector would close the queues first, and then wait for the workers.
            self._end = weakref.finalize(self, iterator._shutdown_workers)  # type: ignore[attr-defined]
        while True:
            with _drawing_aside():
                batch = next(iterator, _END)
            if batch is _END:
                return
            yield batch


@contextmanager
def _drawing_aside() -> Iterator[None]:
    """Let samples seed the global generators, and restore these at the end.

    Copying NumPy's state takes longer than reading a small sample, so its functions draw from
    another generator meanwhile. Only a cached second normal number of that generator is lost.
    """
    python, numpy = random.getstate(), np.random.mtrand.get_bit_generator()
    np.random.mtrand.set_bit_generator(_ASIDE)
    try:
        with torch.random.fork_rng([]):
            yield
    finally:
        random.setstate(python)
        np.random.mtrand.set_bit_generator(numpy)

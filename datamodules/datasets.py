"""Clients with samples in torch Datasets, read only when needed."""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from multiprocessing.connection import wait
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Sampler,
    Subset,
    TensorDataset,
    default_collate,
)
from torch.utils.data._utils import signal_handling

from pflight.data.augmentation import Augmentation
from pflight.data.client_names import check_names
from pflight.data.data_module import FederatedDataModule
from pflight.data.fingerprint import checksum_of
from pflight.data.loaders import (
    SPLITS,
    Split,
    Visit,
    as_gathered,
    labels_of,
    warn_of_loader_options,
)
from pflight.errors import ConfigurationError, described, said_by
from pflight.messages import OWN_BATCHES
from pflight.options import NonNegativeInt, checked, whole
from pflight.randomness import Purpose, derive_seed, seed_everything

_ASIDE = np.random.MT19937(0)
_CPU = torch.device("cpu")
_END = object()
_LOOK = 0.2  # seconds between two looks at the workers
_MASK = (1 << 63) - 1
_MOMENT = 1.0  # seconds until a dying worker is gone
_STRIDE = 0x9E3779B97F4A7C15  # between the seeds of neighbouring samples
Datasets = Sequence[Dataset[Any]]
Key = tuple[int, int, int]
"""A sample's position among the datasets, its index, and its seed."""
T = TypeVar("T")


@checked
class DatasetClients(FederatedDataModule):
    """Federated data with one map-style torch ``Dataset`` for each client.

    If all are a ``TensorDataset`` or a ``Subset`` of one, and there is no ``collate_fn``, their
    tensors are used directly. Then many clients can train at once. Other samples are read when a
    batch needs them, by one DataLoader for all clients. Counting uses a dataset's ``len`` and reads
    nothing, but classes can only be counted by reading. ``collate_fn`` makes batches, in any form
    that the client module's steps take. For an ``augmentation`` they must be pairs of images and
    labels. Random transforms of a sample depend only on ``(seed, round, client, epoch, index)``. So
    they are the same with any number of workers and in a resumed run. Random numbers in
    ``collate_fn`` follow those of the batch's last sample.

    Args:
        train: Each client's training samples. To deal one Dataset to clients, give a list of
            ``torch.utils.data.Subset``.
        val: Each client's validation samples, in the same order; ``None`` means none.
        test: Each client's test samples.
        num_classes: Number of classes, if samples have them and the client module needs it.
        client_names: The clients' names, one for each, such as hospitals; by default none.
        batch_size: Samples in a local training batch; ``None`` means all of the client's.
        num_workers: Processes that read samples, as in a DataLoader.
        collate_fn: Makes a batch from a list of samples, as in a DataLoader.
        pin_memory: As in a DataLoader.
        **kwargs: Further arguments of :class:`FederatedDataModule`.

    Raises:
        ConfigurationError: If a list is empty or of another length, two clients have one name, a
            dataset can't be counted, or a ``Subset`` has samples that do not exist.

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
        *,
        val: Datasets | None = None,
        test: Datasets | None = None,
        num_classes: int | None = None,
        client_names: Sequence[str] = (),
        batch_size: int | None = 32,
        num_workers: NonNegativeInt = 0,
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
        names = check_names(type(self).__name__, client_names, self.num_clients)
        self.client_names = names
        self.datasets: dict[Split, list[Dataset[Any]]] = {}
        self._sizes: dict[Split, Tensor] = {}
        for split, given in zip(SPLITS, (train, val, test), strict=True):
            nothing: list[Dataset[Any]] = [_NoSamples()] * self.num_clients
            datasets = nothing if given is None else list(given)
            if len(datasets) != self.num_clients:
                raise ConfigurationError(
                    f"{type(self).__name__}: {split} has {len(datasets)} clients, but train has "
                    f"{self.num_clients}"
                )
            sizes = []
            for client, dataset in enumerate(datasets):
                who = f"client {self.numbered(client)}, {split}"
                if isinstance(dataset, DataLoader):
                    raise ConfigurationError(
                        f"{who}: give the dataset of this DataLoader. "
                        f"{OWN_BATCHES}; sampler and drop_last are not used"
                    )
                if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
                    raise ConfigurationError(
                        f"{who}: {type(dataset).__name__} is not a map-style Dataset, which has "
                        "__len__ and __getitem__"
                    )
                try:
                    _chosen(dataset)
                except IndexError as error:
                    raise ConfigurationError(f"{who}: {error}") from error
                sizes.append(_size(dataset, who))
            who = f"client {self.numbered(0)}, {split}"
            warn_of_loader_options(datasets[0], f"{who}: {type(datasets[0]).__name__}")
            self.datasets[split] = datasets
            self._sizes[split] = torch.tensor(sizes)
        self.num_workers = num_workers
        self.collate_fn = collate_fn
        self.pin_memory = pin_memory
        self._loaders: dict[Split, _Loader] = {}
        self._labels: dict[tuple[int, Split], Tensor] = {}
        self._tables = self._as_tables() if collate_fn is None else None
        self.setup()

    def _as_tables(self) -> list[TensorDataset] | None:
        """Return the clients' Datasets of tensors, if all have one."""
        tables = []
        for dataset in chain.from_iterable(self.datasets.values()):
            while type(dataset) is Subset:
                dataset = dataset.dataset
            if type(dataset) is TensorDataset:
                tables.append(dataset)
            elif type(dataset) is not _NoSamples:
                return None
        return tables

    @property
    def holds_tensors(self) -> bool:
        """Whether the clients' samples are tensors that lie in memory."""
        return self._tables is not None

    def samples(self, client: int, split: Split) -> Any:
        """Return the tensors of one client's samples, if they lie in memory.

        Raises:
            ConfigurationError: If they don't.
        """
        if not self._tables:
            raise ConfigurationError(f"{self}: its samples are read one by one, by batches()")
        self.check_client(client)
        dataset, rows = _chosen(self.datasets[split][client])
        if isinstance(dataset, TensorDataset):
            tensors = dataset.tensors
        else:  # a client without samples
            tensors, rows = self._tables[0].tensors, torch.empty(0, dtype=torch.long)
        return tensors if rows is None else tuple(tensor[rows] for tensor in tensors)

    def num_samples(self, split: Split = "train") -> Tensor:
        """Return each client's number of samples, ``[num_clients]``."""
        return self._sizes[split]

    def labels(self, client: int, split: Split) -> Tensor:
        """Return one client's classes ``[n]``. This reads all its samples once.

        Raises:
            ConfigurationError: If they can't be read, or are no pairs of an input and a class.
        """
        if self.drifts or (client, split) not in self._labels:
            size = int(self._sizes[split][client])
            parts = torch.arange(size).split(self.eval_batch_size or size) if size else ()
            try:
                found = [*map(labels_of, self.batches(split, [Visit(client, None, 0, parts)]))]
            except Exception as error:  # of the user's Datasets
                raise ConfigurationError(
                    f"client {self.numbered(client)} has {split} samples whose classes can't be "
                    f"read: {described(error)}"
                ) from error
            self._labels[client, split] = torch.cat(found) if found else torch.empty(0).long()
        return self._labels[client, split]

    def fingerprint(self) -> Tensor:
        """Return checksums of the samples without reading any, ``[num_clients]``.

        They cover the indices of a ``Subset``, and the last tensor of a ``TensorDataset``. For
        other Datasets, only the numbers of samples are compared.
        """
        sums = [0] * self.num_clients
        for split in SPLITS:
            for client, dataset in enumerate(self.datasets[split]):
                for numbers in _known(dataset):
                    sums[client] = checksum_of(numbers, sums[client])
        return torch.tensor(sums)

    def batches(self, split: Split, visits: Sequence[Visit]) -> Iterator[Any]:
        """Yield the batches of some visits to clients, made by ``collate_fn`` and augmented.

        Raises:
            ConfigurationError: If batches shall be augmented, but are no pairs of images and
                labels.
        """
        if self.holds_tensors:
            return super().batches(split, visits)
        if self.drifts or split not in self._loaders:
            samples = _Samples(self.datasets[split], self.collate_fn or default_collate)
            self._loaders[split] = _Loader(samples, self.num_workers, self.pin_memory)
        batches = self._loaders[split].batches(_keys(visits, self.seed, self.id_offset))
        if self.augmentation is None:
            return batches
        return self._augmented(batches, self.augmentation, split, visits)

    def _augmented(
        self,
        batches: Iterator[Any],
        augmentation: Augmentation,
        split: Split,
        visits: Sequence[Visit],
    ) -> Iterator[Any]:
        """Yield batches; images are changed in local epochs."""
        for client, round, epoch, parts in visits:
            if round is None:
                yield from islice(batches, len(parts))
                continue
            noise = self.noise(int(self._sizes[split][client]), client, round, epoch)
            for part, batch in zip(parts, batches, strict=False):
                is_pair = isinstance(batch, tuple | list) and len(batch) == 2
                if not (is_pair and isinstance(batch[0], Tensor)):
                    raise ConfigurationError(
                        f"{self}: an augmentation changes the images of pairs (images, labels), "
                        "which the batches are not"
                    )
                x, y = batch
                yield augmentation(x, noise[part].to(x.device), self.fill.to(x)), y

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
        """Whether classes can be counted: never, since all samples would have to be read."""
        return False

    def dataset(self, clients: Tensor, split: Split) -> Dataset[Any]:  # type: ignore[override]
        """Return the samples of some clients, one client after the other, as one torch Dataset."""
        chosen = [self.datasets[split][client] for client in clients.tolist()]
        return _Collated(chosen, self.collate_fn or default_collate)


def _size(dataset: Dataset[Any], who: str) -> int:
    """Return the number of samples by a client's dataset."""
    who = f"{who}: the length of {type(dataset).__name__}"
    try:
        size = len(dataset)  # type: ignore[arg-type]
    except Exception as error:
        raise ConfigurationError(f"{who} can't be told: {described(error)}") from error
    if not whole(size) >= 0:
        raise ConfigurationError(f"{who} must be below 2**32, got {size}")
    return size


def _known(dataset: Dataset[Any]) -> Iterator[Tensor]:
    """Yield the facts about a Dataset's samples that need no reading."""
    dataset, rows = _chosen(dataset)
    if rows is not None:
        yield rows
    if isinstance(dataset, TensorDataset):
        yield dataset.tensors[-1] if rows is None else dataset.tensors[-1][rows]


def _chosen(dataset: Dataset[Any]) -> tuple[Dataset[Any], Tensor | None]:
    """Return the Dataset under a ``Subset``, and the indices of its samples there, ``[n]``.

    Raises:
        IndexError: If an index is none of the Dataset's.
    """
    rows = None
    while isinstance(dataset, Subset):
        try:
            chosen = torch.as_tensor(dataset.indices, dtype=torch.long)
        except (TypeError, ValueError):  # keys of a Dataset that has no numbers
            break
        rows = chosen if rows is None else chosen[rows]
        dataset = dataset.dataset
        if isinstance(dataset, Subset | TensorDataset):  # other Datasets may have any index
            size = len(dataset)
            if len(outside := rows[(rows < -size) | (rows >= size)]):
                raise IndexError(
                    f"the Subset has sample {outside[0]} of a {type(dataset).__name__} of {size}"
                )
    return dataset, rows


def _keys(visits: Sequence[Visit], seed: int, id_offset: int) -> Iterator[list[Key]]:
    """Yield the keys of each batch's samples."""
    for client, round, epoch, parts in visits:
        first = derive_seed(Purpose.AUGMENT, seed, round or 0, client + id_offset, epoch)
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


class WorkerEndedError(RuntimeError):
    """A worker of a DataLoader has died."""


class _Loader:
    """A DataLoader with persistent workers that read the next needed batches.

    If a worker dies, or is still busy when a client's time is up, new workers take over.
    """

    def __init__(self, samples: _Samples, num_workers: int, pin_memory: bool) -> None:
        self._schedule = _Schedule()
        self._new = partial(
            DataLoader,
            samples,
            batch_sampler=self._schedule,
            num_workers=num_workers,
            collate_fn=as_gathered,
            pin_memory=pin_memory,
            persistent_workers=num_workers > 0,
            generator=torch.Generator(),  # it would draw from a client's numbers otherwise
        )
        self._loader: DataLoader[Any] = self._new()
        self._end: weakref.finalize[..., Any] | None = None

    def close(self) -> None:
        """End the workers, if there are any."""
        if self._end is not None:
            self._end()

    def batches(self, batches: Iterable[list[Key]]) -> Iterator[Any]:
        """Yield batches of these samples.

        Raises:
            WorkerEndedError: If a worker dies of the next batch.
        """
        rest = iter(batches)
        while True:
            ahead: deque[list[Key]] = deque()
            try:
                for batch in self._read(_noted(rest, ahead)):
                    ahead.popleft()
                    yield batch
                return
            except WorkerEndedError:  # any of the batches read ahead may be the cause
                first, *others = ahead
            yield from self._read([first])
            rest = chain(others, rest)

    def _read(self, batches: Iterable[list[Key]]) -> Iterator[Any]:
        self._schedule.batches = batches
        try:
            iterator = self._watched(self._begin)
        except WorkerEndedError:  # batches were read ahead and are not wanted any more
            iterator = self._watched(self._begin)
        while (batch := self._watched(partial(next, iterator, _END))) is not _END:
            yield batch

    def _begin(self) -> Iterator[Any]:
        iterator: Any = iter(self._loader)
        if self._loader.num_workers and self._end is None:
            # PyTorch would raise that a worker died wherever this process is at that time, or,
            # after the first Trainer, which takes its signals back, only after some seconds.
            signal_handling._remove_worker_pids(id(iterator))
            iterator._worker_pids_set = False
            iterator._try_get_data = partial(iterator._try_get_data, timeout=_LOOK)
            # The collector of cycles would close the queues first, and then wait for the workers.
            self._end = weakref.finalize(self, _end, iterator)
        return iterator

    def _watched(self, work: Callable[[], T]) -> T:
        """Return the result of some work with the workers, and replace them if it breaks off."""
        iterator = self._loader._iterator
        try:
            with _drawing_aside():
                return work()
        except BaseException as error:
            own = "DataLoader worker process" in said_by(error)  # which has raised it
            torn = isinstance(error, Exception) and not own
            workers = getattr(iterator, "_workers", [])
            ends = (
                wait([worker.sentinel for worker in workers], _MOMENT) if torn and workers else ()
            )
            dead = [worker for worker in workers if worker.sentinel in ends]
            if not dead and isinstance(error, Exception):
                raise
            for worker in workers:
                worker.kill()
            self.close()
            self._end, self._loader = None, self._new()
            if not isinstance(error, Exception):
                raise
            raise WorkerEndedError(
                f"the worker that read its samples ended with status {dead[0].exitcode}"
            ) from error


def _end(iterator: Any) -> None:
    """End the workers of a DataLoader's iterator, also those that ignore SIGTERM."""
    iterator._shutdown_workers()
    for worker in iterator._workers:
        worker.kill()


def _noted(batches: Iterable[T], notes: deque[T]) -> Iterator[T]:
    for batch in batches:
        notes.append(batch)
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

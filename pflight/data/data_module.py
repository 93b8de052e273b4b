"""The data of a federation's clients, and the loaders that yield cohorts of clients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

from pflight.errors import ConfigurationError, described
from pflight.options import Interval, NonNegativeInt, PositiveInt, checked
from pflight.randomness import Purpose, generator, shuffled

from .augmentation import Augmentation
from .client_names import numbered
from .cohort import ClientLoader, CohortLoader, CohortSampler, check_cohort_options
from .fingerprint import checksum_of
from .loaders import (
    SPLITS,
    AugmentedSamples,
    Batch,
    EpochSampler,
    IndexedSamples,
    Split,
    Visit,
    batch_loader,
    empty_loader,
    sample_order,
)
from .partition_report import partition_figure, partition_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@checked
class FederatedDataModule(L.LightningDataModule):
    """The data of a federation's clients, and the cohorts that train on them.

    A subclass for your own data defines ``num_clients`` and :meth:`samples`, and
    :meth:`num_samples` if counting is cheaper than loading. Loaders, cohorts, newcomers and
    pictures follow from these.

    Args:
        num_classes: Number of classes; labels are ``0 .. num_classes - 1``. ``None`` if a subclass
            sets it later, or if there are no classes.
        cohort_size: Clients that train in a round; with neither this nor ``participation``, all.
        participation: Share of the training clients that train in a round, a billionth to 1.
        cohort_sampling: ``uniform``, or ``samples``: in proportion to the clients' sample counts.
        availability: Probability that a client can be sampled in a round, a billionth to 1.
        dropout: Probability that a sampled client does not answer.
        batch_size: Samples in a local training batch; ``null`` means all of the client's.
        eval_batch_size: Samples in a batch of an evaluation; ``null`` means all of the client's.
        eval_chunk: Clients that are evaluated at once.
        holdout_clients: Share of the clients that never train and are tested as newcomers.
        augmentation: Changes training images at random in each local epoch; ``null`` for none.
        seed: Seed of the cohorts, the newcomers, the order of the samples and the augmentation.

    Raises:
        ConfigurationError: An option is out of its range.
    """

    num_clients: int
    """Number of clients, newcomers included; known after ``setup``."""

    num_classes: int
    """Number of classes; labels are ``0 .. num_classes - 1``."""

    clusters: Tensor | None = None
    """The true cluster of each client, ``[num_clients]``, if it is known after ``setup``."""

    client_names: Sequence[str] = ()
    """One name for each client, such as a hospital's; empty if clients have no names. Messages,
    pictures and the table of clients show the names. They are known after ``setup``."""

    fill = torch.tensor(0.0)
    """Pixel values outside an image ``[C, H, W]``, in a shape that expands to it."""

    id_offset = 0
    """Added to a client's id for its random numbers. It is not 0 on a deployment's node, if the
    client has another id there than in the federation."""

    def __init__(
        self,
        *,
        num_classes: PositiveInt | None,
        cohort_size: int | None = None,
        participation: float | None = None,
        cohort_sampling: Literal["uniform", "samples"] = "uniform",
        availability: float = 1.0,
        dropout: float = 0.0,
        batch_size: PositiveInt | None = 32,
        eval_batch_size: PositiveInt | None = 1024,
        eval_chunk: PositiveInt = 64,
        holdout_clients: Annotated[float, Interval("[0, 1)")] = 0.0,
        augmentation: Augmentation | None = None,
        seed: NonNegativeInt = 0,
    ) -> None:
        super().__init__()
        check_cohort_options(self, cohort_size, participation, availability, dropout)
        if num_classes is not None:
            self.num_classes = num_classes
        self.cohort_size = cohort_size
        self.participation = participation
        self.cohort_sampling = cohort_sampling
        self.availability = availability
        self.dropout = dropout
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.eval_chunk = eval_chunk
        self.holdout_clients = holdout_clients
        self.augmentation = augmentation
        self.seed = seed

    def samples(self, client: int, split: Split) -> tuple[Tensor, Tensor]:
        """Return one client's samples.

        Args:
            client: The client's id.
            split: ``"train"``, ``"val"`` or ``"test"``.

        Returns:
            Features ``[n, ...]`` and labels ``[n]`` (int64), or any nesting of tensors ``[n, ...]``
            that the client module's steps take; ``n`` may be 0. All clients' samples must have the
            same shape and type: a client with another one fails.
        """
        raise NotImplementedError(f"{type(self).__name__} must define samples(client, split)")

    def setup(self, stage: str | None = None) -> None:
        """Check the options against the data; calling it again changes nothing."""
        _ = self.cohorts

    def at_round(self, round: int) -> None:
        """Give clients the data that they have in a round; by default they always have the same.

        A subclass for data that drift defines it. A federation calls it before each round, before
        each evaluation with the round that has ended, and with 0 before the first. It may be called
        with any round at any time, on each rank. Then all other methods return what belongs to that
        round. A client's numbers of samples, newcomers and cohorts must not change.

        Args:
            round: Index of the communication round.
        """

    @property
    def drifts(self) -> bool:
        """Whether clients' data depend on the round: whether :meth:`at_round` is defined."""
        return type(self).at_round is not FederatedDataModule.at_round

    @property
    def holds_tensors(self) -> bool:
        """Whether :meth:`samples` is defined; otherwise only :meth:`batches` gives samples."""
        return type(self).samples is not FederatedDataModule.samples

    @property
    def knows_classes(self) -> bool:
        """Whether samples have classes that can be counted."""
        return getattr(self, "num_classes", None) is not None

    def check_client(self, client: int) -> None:
        """Raise unless ``client`` is one of the federation's.

        Raises:
            ConfigurationError: Names the client.
        """
        if not 0 <= client < self.num_clients:
            raise ConfigurationError(
                f"unknown client {client}: the ids are 0 to {self.num_clients - 1}"
            )

    def numbered(self, client: int) -> str:
        """Return a client's number, for people, with its name if it has one: ``3 (Charité)``."""
        return numbered(self.client_names, client)

    def num_samples(self, split: Split = "train") -> Tensor:
        """Return each client's number of samples, ``[num_clients]``."""
        return self._counts[split]

    def labels(self, client: int, split: Split) -> Tensor:
        """Return one client's labels, ``[n]``; without classes, the last tensor of its samples."""
        samples: Any = self.samples(client, split)
        return samples[1] if self.knows_classes else tree_leaves(samples)[-1]

    def class_counts(self, split: Split = "train", num_classes: int | None = None) -> Tensor:
        """Count each client's samples by class, ``[num_clients, num_classes]``.

        Args:
            split: The samples to count.
            num_classes: Number of classes, for data without this number.

        Raises:
            ConfigurationError: If the number of classes is unknown, or labels are no classes or out
                of range; the message names the client.
        """
        classes = getattr(self, "num_classes", None) if num_classes is None else num_classes
        if classes is None:
            raise ConfigurationError(
                f"{self} has no num_classes, so its samples can't be counted by class"
            )
        parts = [self.labels(client, split) for client in range(self.num_clients)]
        for client, y in enumerate(parts):
            if y.dim() != 1 or y.is_floating_point():
                raise ConfigurationError(
                    f"client {self.numbered(client)} has no classes [n] as labels of its {split} "
                    f"samples, but {y.dtype} of shape {list(y.shape)}"
                )
        owners = torch.arange(len(parts)).repeat_interleave(torch.tensor([*map(len, parts)]))
        labels = torch.cat(parts).to(owners)
        if (outside := (labels < 0) | (labels >= classes)).any():
            label, client = int(labels[outside][0]), int(owners[outside][0])
            raise ConfigurationError(
                f"client {self.numbered(client)} has the label {label} among its {split} samples, "
                f"but num_classes is {classes}"
            )
        cells = owners * classes + labels
        counts = cells.bincount(minlength=self.num_clients * classes)
        return counts.view(self.num_clients, classes)

    def fingerprint(self) -> Tensor:
        """Return a number for each client that identifies its samples, ``[num_clients]``.

        A run can be resumed only with the data that it began with: equal sample counts and equal
        fingerprints, both of round 0. By default a fingerprint is a checksum of the client's labels
        in their order. If a subclass defines :meth:`num_samples` but not :meth:`labels`, so that
        reading labels costs as much as reading features, all are 0. A subclass can return something
        better, such as checksums of its files.
        """
        own = type(self)
        counts_alone = own.num_samples is not FederatedDataModule.num_samples
        if counts_alone and own.labels is FederatedDataModule.labels:
            return torch.zeros(self.num_clients, dtype=torch.long)
        return self._from_labels[1]

    @property
    def _counts(self) -> dict[Split, Tensor]:
        return self._from_labels[0]

    @cached_property
    def _from_labels(self) -> tuple[dict[Split, Tensor], Tensor]:
        """Sample counts and checksums of all clients, from one pass over their labels."""
        counts: dict[Split, Tensor] = {}
        checksums = [0] * self.num_clients
        for split in SPLITS:
            sizes = []
            for client, checksum in enumerate(checksums):
                try:
                    labels = self.labels(client, split)
                    sizes.append(labels.shape[0])
                    checksums[client] = checksum_of(labels, checksum)
                except (KeyboardInterrupt, NotImplementedError, MisconfigurationException):
                    raise
                except BaseException as error:  # samples() is the user's code
                    raise ConfigurationError(
                        f"the {split} samples of client {self.numbered(client)} can't be counted: "
                        f"{described(error)}"
                    ) from error
            counts[split] = torch.tensor(sizes)
        return counts, torch.tensor(checksums)

    @cached_property
    def new_clients(self) -> Tensor:
        """Sorted ids of the newcomers: a seeded random share ``holdout_clients`` of the clients."""
        count = math.floor(self.holdout_clients * self.num_clients + 0.5)
        random = generator(Purpose.PARTITION, self.seed, 2)
        return torch.randperm(self.num_clients, generator=random)[:count].sort().values

    @cached_property
    def train_clients(self) -> Tensor:
        """Sorted ids of the clients that are drawn to train: those with samples, but no newcomers.

        ``Clients.trainable`` leaves out those whose samples make no batch.
        """
        may_train = self.num_samples("train") > 0
        may_train[self.new_clients] = False
        return may_train.nonzero().flatten()

    @cached_property
    def cohorts(self) -> CohortSampler:
        """The sampler of the clients that train in a round."""
        return CohortSampler(
            self.train_clients,
            self.num_samples("train")[self.train_clients],
            size=self.cohort_size,
            participation=self.participation,
            sampling=self.cohort_sampling,
            availability=self.availability,
            dropout=self.dropout,
            seed=self.seed,
        )

    def order(self, client: int, round: int, epoch: int = 0) -> Tensor:
        """Return the order of a client's training samples, ``[n]``.

        Args:
            client: The client's id.
            round: Index of the communication round.
            epoch: Index of the local epoch within the round.
        """
        count = int(self.num_samples("train")[client])
        return sample_order(count, self.seed, round, client + self.id_offset, epoch)

    def orders(self, clients: Sequence[int], round: int, epoch: int = 0) -> Sequence[Tensor]:
        """Return the :meth:`order` of several clients, faster than one by one."""
        if type(self).order is not FederatedDataModule.order:
            return [self.order(client, round, epoch) for client in clients]
        counts = self.num_samples("train")[list(clients)].tolist()
        streams = [client + self.id_offset for client in clients]
        return shuffled(counts, Purpose.ORDER, self.seed, round, epoch, streams=streams)

    def noise(self, count: int, client: int, round: int, epoch: int = 0) -> Tensor:
        """Return the random numbers for augmenting a client's samples, ``[count, num_draws]``.

        Args:
            count: Number of samples.
            client: The client's id.
            round: Index of the communication round.
            epoch: Index of the local epoch within the round.
        """
        draws = self.augmentation.num_draws if self.augmentation is not None else 0
        stream = client + self.id_offset
        random = generator(Purpose.AUGMENT, self.seed, round, stream, epoch)
        return torch.rand(count, draws, generator=random)

    def augment(self, x: Tensor, client: int, round: int, epoch: int = 0) -> Tensor:
        """Return a client's training features ``[n, ...]`` as it sees them in one local epoch.

        Without an ``augmentation`` these are the unchanged features. The other arguments are as in
        :meth:`order`.
        """
        if self.augmentation is None:
            return x
        noise = self.noise(len(x), client, round, epoch)
        return self.augmentation(x, noise.to(x.device), self.fill.to(x))

    def batches(self, split: Split, visits: Sequence[Visit]) -> Iterator[Any]:
        """Yield the batches of some visits to clients, in the form that a module's steps take.

        By default they are slices of :meth:`samples`, which may be any nesting of tensors.
        """
        for client, round, epoch, parts in visits:
            samples: Any = self.samples(client, split)
            if round is not None and self.augmentation is not None:
                x, y = samples
                samples = self.augment(x, client, round, epoch), y
            for part in parts:
                yield tree_map(lambda tensor, part=part: tensor[part], samples)

    def dataset(self, clients: Tensor, split: Split) -> IndexedSamples:
        """Return the samples of some clients, one client after the other, as one torch Dataset."""
        pairs = [self.samples(client, split) for client in clients.tolist()]
        if len(pairs) == 1:
            return IndexedSamples(*pairs[0])
        x, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        return IndexedSamples(x, y)

    def client(self, i: int) -> ClientData:
        """Return client ``i``'s data as an ordinary data module, for its own Trainer."""
        if hasattr(self, "num_clients"):
            self.check_client(i)
        return ClientData(self, i)

    def centralized(self) -> Centralized:
        """Return all clients' data, newcomers excepted, as one ordinary data module."""
        return Centralized(self)

    def train_dataloader(self) -> CohortLoader:
        """Return a loader of one cohort an epoch: sorted client ids ``[s]``."""
        return CohortLoader(self.cohorts)

    def val_dataloader(self) -> ClientLoader | list[Tensor]:
        """Return a loader, in chunks, of the clients with validation samples, without newcomers."""
        has_samples = self.num_samples("val") > 0
        has_samples[self.new_clients] = False
        return self._chunks(has_samples)

    def test_dataloader(self) -> ClientLoader | list[Tensor]:
        """Return a loader, in chunks, of the ids of all clients with test samples."""
        return self._chunks(self.num_samples("test") > 0)

    def predict_dataloader(self) -> ClientLoader | list[Tensor]:
        """Return a loader, in chunks, of the ids of all clients with test samples."""
        return self.test_dataloader()

    def _chunks(self, chosen: Tensor) -> ClientLoader | list[Tensor]:
        clients = chosen.nonzero().flatten()
        return ClientLoader(clients, self.eval_chunk) if len(clients) else empty_loader()

    def summary(self) -> str:
        """Return a small text table of the clients' samples, and of their classes if known."""
        title = [f"{type(self).__name__}: {self.num_clients} clients"]
        if self.knows_classes:
            title.append(f"{self.num_classes} classes")
        if partition := getattr(self, "partition", None):
            title.append(str(partition))
        if len(self.new_clients):
            title.append(f"{len(self.new_clients)} clients held out as newcomers")
        sizes = {split: self.num_samples(split) for split in SPLITS}
        classes = self._all_class_counts() if self.knows_classes else None
        return partition_table(title, sizes, classes)

    def partition_figure(self) -> Figure:
        """Draw each client's samples by class as stacked bars, all splits together."""
        labels = [*map(self.numbered, range(self.num_clients))] if self.client_names else None
        return partition_figure(self._all_class_counts(), self.new_clients, labels)

    def _all_class_counts(self) -> Tensor:
        """Count the samples of all splits, ``[num_clients, num_classes]``."""
        return torch.stack([self.class_counts(split) for split in SPLITS]).sum(dim=0)

    def __str__(self) -> str:
        return type(self).__name__


class _LocalData(L.LightningDataModule):
    """Loaders of the samples of some of a federation's clients."""

    def __init__(self, data: FederatedDataModule, order_of: int) -> None:
        super().__init__()
        self.data = data
        self.order_of = order_of

    @property
    def clients(self) -> Tensor:
        """Ids of the clients that own these samples."""
        raise NotImplementedError

    @property
    def num_classes(self) -> int:
        """Number of classes of the federation's data."""
        return self.data.num_classes

    def prepare_data(self) -> None:
        """Prepare the federation's data."""
        self.data.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Set the federation's data up."""
        self.data.setup(stage)

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return a loader of training batches, shuffled and augmented by seed and epoch."""
        data = self.data
        dataset = data.dataset(self.clients, "train")
        order = EpochSampler(len(dataset), partial(self._order, len(dataset)))
        if (augmentation := data.augmentation) is None:
            return batch_loader(dataset, data.batch_size, order)

        @lru_cache(maxsize=1)
        def noise(epoch: int) -> Tensor:
            return data.noise(len(dataset), self.order_of, epoch)

        def augment(x: Tensor, positions: Tensor) -> Tensor:
            return augmentation(x, noise(order.epoch)[positions], data.fill.to(x))

        return batch_loader(AugmentedSamples(dataset, augment), data.batch_size, order)

    def _order(self, count: int, epoch: int) -> Tensor:
        """Return the order of ``count`` training samples in an epoch; for one client, its own."""
        if len(self.clients) == 1:
            return self.data.order(int(self.clients), epoch)
        return sample_order(count, self.data.seed, epoch)

    def val_dataloader(self) -> DataLoader[Batch] | list[Tensor]:
        """Return a loader of validation batches in a fixed order."""
        return self._evaluation("val")

    def test_dataloader(self) -> DataLoader[Batch] | list[Tensor]:
        """Return a loader of test batches in a fixed order."""
        return self._evaluation("test")

    def predict_dataloader(self) -> DataLoader[Batch] | list[Tensor]:
        """Return a loader of test batches in a fixed order."""
        return self._evaluation("test")

    def _evaluation(self, split: Split) -> DataLoader[Batch] | list[Tensor]:
        dataset = self.data.dataset(self.clients, split)
        return batch_loader(dataset, self.data.eval_batch_size) if len(dataset) else empty_loader()


class ClientData(_LocalData):
    """One client's data as an ordinary data module.

    Epoch ``t`` of a plain Trainer has the client's batches of a federation's round ``t``, in the
    first local epoch, in the data's own ``order``. An ``augment`` or ``batches`` of the data's own
    is not used.

    Args:
        data: The federation's data.
        client: The client's id.
    """

    def __init__(self, data: FederatedDataModule, client: int) -> None:
        super().__init__(data, order_of=client)
        self.client = client

    def setup(self, stage: str | None = None) -> None:
        """Set the federation's data up and check that it has this client."""
        super().setup(stage)
        self.data.check_client(self.client)

    @property
    def clients(self) -> Tensor:
        """The client's id, ``[1]``."""
        return torch.tensor([self.client])


class Centralized(_LocalData):
    """The union of all clients' data, newcomers excepted, as one ordinary data module.

    Samples are shuffled by the seed and the epoch. With a single client the batches are the
    federation's. So one epoch of a plain Trainer is one round of FedAvg, up to rounding.

    Args:
        data: The federation's data.
    """

    def __init__(self, data: FederatedDataModule) -> None:
        super().__init__(data, order_of=0)

    @property
    def clients(self) -> Tensor:
        """Ids of all clients but the newcomers."""
        is_old = torch.ones(self.data.num_clients, dtype=torch.bool)
        is_old[self.data.new_clients] = False
        return is_old.nonzero().flatten()

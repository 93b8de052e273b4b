"""Data sets whose clients are persons, schools, places or states of the world."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pflight.data.fingerprint import joined
from pflight.datamodules.partitions.dealing import Ints
from pflight.datamodules.partitions.partition import ByUser
from pflight.datamodules.partitions.partitioned import PartitionedDataModule
from pflight.datamodules.partitions.samples import Samples
from pflight.errors import ConfigurationError
from pflight.options import PositiveInt, checked
from pflight.randomness import Purpose, numpy_generator

from .natural_sets import FOLDER, INSTALL, NOT_FEATURES, SETS, Columns, fingerprint
from .parquet import read_table
from .root import absence, check_root, is_file

FOLDS = 5
"""Five seeds in a row test each sample once, where a set has no recordings."""

Name = Literal["stops", "star", "chemistry", "aggression", "films", "votes", "exercises"]


@checked
class NaturalClients(PartitionedDataModule):
    """One of seven small data sets of natural clients, which ``pflight prepare natural`` writes.

    docs/natural.md says what the sets are, and what they must not be used for.

    **Features** are float32 ``[n, d]``. A number is standardised by its mean and deviation over the
    training samples of the clients that train; a missing one becomes 0. A category has a feature
    for each of its values, which is 0 or 1; a missing one counts as a value.

    **Splits.** Each client's rows fall into five random folds. Seed ``s`` tests on fold ``s mod 5``
    and validates on the next one. Seeds 0 to 4 have the same folds, seeds 5 to 9 others. If a set
    has recordings, each of them is of one split: a client trains on half of its recordings of each
    class, drawn at random, and on the other half in the next seed. A third of the other recordings
    is for validation.

    Args:
        name: The data set.
        root: Folder in which ``pflight prepare natural --root`` has written the files.
        num_clients: Take only so many clients, drawn at random; ``null`` means all.
        half: Take only the ``first`` half of the clients, as to pre-train a model, or the
            ``second``, as to adapt it: every second one, whatever the seed. ``null`` means both.
        holdout_clients: Share of the clients that never train and are tested as newcomers.
        **kwargs: Further arguments of :class:`FederatedDataModule`.

    Raises:
        ConfigurationError: An option is out of its range. In ``setup``: the file is missing or
            damaged.

    Attributes:
        features: The features' names, ``d`` of them. They are known after ``setup``.
    """

    features: list[str]

    def __init__(
        self,
        name: Name,
        root: str = "data",
        num_clients: PositiveInt | None = None,
        holdout_clients: float = 0.2,
        half: Literal["first", "second"] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_classes=len(SETS[name].classes),
            partition=ByUser(),
            num_clients=num_clients,
            val_fraction=1 / FOLDS,
            test_fraction=1 / FOLDS,
            official_test=False,
            holdout_clients=holdout_clients,
            **kwargs,
        )
        self.name = name
        self.root = root
        self.half = half
        self._columns: Columns = {}
        self._rows = np.empty(0, bool)
        self._checksum = 0

    def load(self) -> Samples:
        """See :meth:`PartitionedDataModule.load`; the features are encoded in :meth:`fitted`."""
        check_root(self.root)
        path = Path(self.root, FOLDER, f"{self.name}.parquet")
        if not is_file(path):
            raise ConfigurationError(
                f"{path} is missing{absence(self.root)}: write it by {INSTALL} and "
                f"`pflight prepare natural --root {self.root}`"
            )
        remedy = f"; write it again by `pflight prepare natural --root {self.root}`"
        columns, facts = read_table(path, "pflight", remedy)
        if facts.get("name") != self.name:
            raise ConfigurationError(f"{path} holds the set {facts.get('name')}{remedy}")
        if facts.get("fingerprint") != fingerprint(columns):
            raise ConfigurationError(
                f"{path} is damaged: it does not match its fingerprint{remedy}"
            )
        self._columns, self._checksum = columns, int(facts["fingerprint"][:8], 16)
        names = [*dict.fromkeys(columns["client"])]
        if self.half is not None:
            names = names[("first", "second").index(self.half) :: 2]
        number = {name: i for i, name in enumerate(names)}
        self._rows = np.array([name in number for name in columns["client"]])
        groups = np.array([number[name] for name in columns["client"][self._rows]])
        labels = torch.from_numpy(columns["label"][self._rows].astype(np.int64))
        return Samples(torch.empty(len(labels), 0), labels, groups, names=names)

    def fitted(self, samples: Samples) -> Samples:
        """Return the samples with encoded features."""
        train = [self._indices["train"][client] for client in self.train_clients.tolist()]
        rows = torch.cat([torch.empty(0, dtype=torch.long), *train]).numpy()
        found: dict[str, NDArray[Any]] = {}
        for name, values in self._columns.items():
            if name in NOT_FEATURES:
                continue
            own = values[self._rows]
            if values.dtype.kind == "O":  # each half has the features of both
                found |= {f"{name}={value}": own == value for value in sorted({*values})}
            elif values.dtype.kind == "b":
                found[name] = own
            else:
                found[name] = _standardised(own, rows)
        self.features = [*found]
        self._columns = {}
        x = np.stack([*found.values()], axis=1).astype(np.float32)
        return replace(samples, x=torch.from_numpy(x))

    def _deal(self, samples: Samples) -> tuple[list[Ints], list[Ints], list[Ints]]:
        """Return each client's positions for training, for validation and for testing."""
        labels, groups = samples.y.numpy(), samples.groups
        assert groups is not None
        wanted = getattr(self, "num_clients", None)
        block, turn = divmod(self.seed, FOLDS)
        recordings = self._columns.get("recording")
        train: list[Ints] = []
        val: list[Ints] = []
        test: list[Ints] = []
        for part in self.partition.split(labels, wanted, self.seed, groups):
            random = numpy_generator(Purpose.PARTITION, block, 6, int(groups[part[0]]))
            if recordings is None:
                split = _by_fold(len(part), random, turn)
            else:
                own = recordings[self._rows][part]
                split = _by_recording(labels[part], own, random, turn)
            for parts, number in ((train, 2), (val, 1), (test, 0)):
                parts.append(part[split == number])
        return train, val, test

    def fingerprint(self) -> Tensor:
        """Return checksums of each client's labels and positions, and of the file."""
        return joined(super().fingerprint(), torch.full((self.num_clients,), self._checksum))

    def digest(self) -> str:
        """Return the splits' SHA-256, in hexadecimal digits: equal digests mean equal splits.

        It covers the clients' names, their positions in each split, and the newcomers.
        """
        self._held()
        digest = hashlib.sha256("\0".join(self.client_names).encode())
        for part in (*self._indices["train"], *self._indices["val"], *self._indices["test"]):
            digest.update(np.array([len(part), *part.tolist()], "<i8").tobytes())
        digest.update(self.new_clients.numpy().astype("<i8").tobytes())
        return digest.hexdigest()


def _standardised(values: NDArray[Any], rows: Ints) -> NDArray[np.float64]:
    """Return numbers ``[n]`` less their mean over some rows, over their deviation there."""
    known = values[rows][~np.isnan(values[rows])]
    mean, deviation = (known.mean(), known.std()) if len(known) else (0.0, 0.0)
    return np.nan_to_num((values - mean) / (deviation or 1.0), nan=0.0)


def _by_fold(count: int, random: np.random.Generator, turn: int) -> Ints:
    """Return the split of each of a client's rows, ``[n]``: 0 tests, 1 validates, 2 trains."""
    fold = (random.permutation(count) + random.integers(FOLDS) - turn) % FOLDS
    return np.minimum(fold, 2)


def _by_recording(labels: Ints, recordings: Ints, random: np.random.Generator, turn: int) -> Ints:
    """Return the split of each row as :func:`_by_fold`, the same for a recording's rows."""
    train: list[int] = []
    others: list[int] = []
    for label in random.permutation(np.unique(labels)):
        own = np.roll(random.permutation(np.unique(recordings[labels == label])), turn).tolist()
        half = -(-len(own) // 2)
        train += own[:half]
        others += own[half:]
    val = np.roll(others, turn)[: len(others) // 3]
    return 2 * np.isin(recordings, train) + np.isin(recordings, val)

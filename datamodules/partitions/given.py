"""Partitions that were made elsewhere, as lists of positions in a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np

from pflight.errors import ConfigurationError, described
from pflight.options import checked

from .dealing import Ints
from .partition import Partition, Parts

_MOST_BYTES = 1 << 30
_SPLITS = "train", "val", "test"


@checked
@dataclass(frozen=True)
class Given(Partition):
    """The clients of a file that says which samples each of them has.

    The file is JSON or NumPy's npz. Positions count from 0 in the order of the data set. Where a
    data set has a test set of its own, training samples come first. With ``official_test``,
    positions count in the training samples.

    | file | content |
    |---|---|
    | JSON | a list of positions for each client: ``[[0, 5], [2, 3]]`` |
    | JSON | the same by the client's number: ``{"0": [0, 5], "1": [2, 3]}`` |
    | JSON | for each client ``{"train": [...], "val": [...], "test": [...]}`` |
    | JSON | FL-bench's: one of these as ``data_indices`` |
    | npz | an array for each client, named by its number |

    If the file has splits, they are kept. If it has no validation samples, ``val_fraction`` takes
    some of a client's training samples. A pickle is refused: ``pflight prepare partition`` turns it
    into JSON.

    Args:
        path: The file.

    Raises:
        ConfigurationError: The file is missing, is damaged, or has other content. The message names
            the file and the client.
    """

    path: str

    @property
    def title(self) -> str:
        """The file."""
        return self.path

    def split(
        self, labels: Ints, num_clients: int | None, seed: int, groups: Ints | None = None
    ) -> list[Ints]:
        """See :meth:`Partition.split`."""
        return [np.sort(np.concatenate([*parts.values()])) for parts in self._clients]

    def own_splits(self) -> tuple[Parts, Parts, Parts] | None:
        """See :meth:`Partition.own_splits`."""
        if "" in self._clients[0]:
            return None
        none = np.empty(0, np.int64)
        train, val, test = ([one.get(split, none) for one in self._clients] for split in _SPLITS)
        return train, val, test

    @cached_property
    def _clients(self) -> list[dict[str, Ints]]:
        return self.clients(self._content())

    def clients(self, content: Any) -> list[dict[str, Ints]]:
        """Return each client's positions by split; the key is empty if there are no splits.

        Args:
            content: What the file holds.

        Raises:
            ConfigurationError: The content is none of a partition.
        """
        if isinstance(content, Mapping) and "data_indices" in content:
            content = content["data_indices"]
        if isinstance(content, Mapping):
            numbers = [str(number) for number in range(len(content))]
            if {*map(str, content)} != {*numbers}:
                raise ConfigurationError(
                    f"{self.path}: clients must be numbered from 0, without gaps; it has "
                    f"{', '.join([*map(str, content)][:5])}"
                )
            content = [content[number] for number in numbers]
        if not isinstance(content, Sequence) or isinstance(content, str) or not content:
            raise ConfigurationError(f"{self.path} has no lists of positions, one for each client")
        found = [self._parts(one, client) for client, one in enumerate(content)]
        if len({"" in parts for parts in found}) > 1:
            raise ConfigurationError(f"{self.path}: some clients have splits, and others have none")
        return found

    def _parts(self, given: Any, client: int) -> dict[str, Ints]:
        """Return a client's positions by split."""
        if not isinstance(given, Mapping):
            return {"": self._positions(given, f"client {client}")}
        if not given.keys() <= {*_SPLITS} or not given:
            raise ConfigurationError(
                f"{self.path}: client {client} has {', '.join(map(str, given)) or 'nothing'}; "
                "splits are train, val and test"
            )
        return {
            split: self._positions(one, f"client {client}, {split}") for split, one in given.items()
        }

    def _positions(self, given: Any, who: str) -> Ints:
        try:
            found = np.asarray(given)
        except ValueError:  # lists of several lengths
            found = np.empty((), object)
        if isinstance(given, list) and bool in map(type, given):  # to NumPy, true is 1
            found = np.empty((), object)
        if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
            raise ConfigurationError(f"{self.path}: {who} has no list of whole numbers")
        return found.astype(np.int64)

    def _once(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Return a mapping of pairs whose keys must differ."""
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                name = f"client {key}" if key.isdigit() else key
                raise ConfigurationError(f"{self.path} has {name} twice")
            found[key] = value
        return found

    def _content(self) -> Any:
        """Read the file. Nothing in it is run."""
        path = Path(self.path)
        try:
            with path.open("rb") as file:
                start = file.read(2)
            if start[:1] == b"\x80" or path.suffix in (".pkl", ".pickle"):
                out = path.with_suffix(".indices.json" if path.suffix == ".json" else ".json")
                raise ConfigurationError(
                    f"{path} is a pickle, which may run code: turn it into JSON by `pflight "
                    f"prepare partition {path} --out {out}`"
                )
            if start != b"PK":
                return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=self._once)
            with ZipFile(path) as archive:
                if sum(one.file_size for one in archive.infolist()) > _MOST_BYTES:
                    raise ConfigurationError(f"{path} is too large for lists of positions")
            with np.load(path, allow_pickle=False) as arrays:
                return self._once([(name, arrays[name]) for name in arrays.files])
        except ConfigurationError:
            raise
        except OSError as error:
            raise ConfigurationError(f"can't read {path}: {error.strerror or error}") from error
        except Exception as error:  # of damaged files, and of pickles inside of npz
            if "allow_pickle" in str(error):
                raise ConfigurationError(
                    f"{path} holds pickled samples or lists: save an array of whole numbers for "
                    "each client"
                ) from error
            raise ConfigurationError(f"{path} is damaged: {described(error)}") from error

"""The data of a deployed federation: samples at each node, their numbers at the server."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pflight.data.data_module import FederatedDataModule
from pflight.data.loaders import SPLITS, Split
from pflight.data.wrapped import WrappedData
from pflight.errors import ConfigurationError


class OwnData(WrappedData):
    """The samples of one client, at its node. All other clients have no samples.

    Random numbers depend on the client's id in the federation, as in a simulation.

    Args:
        data: The node's data, with one client or many.
        own: The client's id in ``data``.
        place: The client's id in the federation.
        num_clients: The number of clients in the federation.
    """

    clusters = None
    client_names = ()

    def __init__(self, data: FederatedDataModule, own: int, place: int, num_clients: int) -> None:
        data.check_client(own)
        if not 0 <= place < num_clients:
            raise ConfigurationError(f"there is no client {place} among {num_clients}")
        super().__init__(data, cohort_size=None, participation=None, holdout_clients=0.0)
        data.id_offset = place - own
        self.own = own
        self.place, self.num_clients = place, num_clients

    def origin(self, client: int) -> int:
        """Return the id of this node's client in the node's data.

        Raises:
            ConfigurationError: If ``client`` belongs to another node.
        """
        if client != self.place:
            raise ConfigurationError(f"the samples of client {client} are on another machine")
        return self.own

    def taken(self, values: Tensor) -> Tensor:
        """Return the client's values in its row, 0 for all others, ``[num_clients, ...]``."""
        placed = values.new_zeros((self.num_clients, *values.shape[1:]))
        placed[self.place] = values[self.own]
        return placed


class NodeData(FederatedDataModule):
    """The data of all clients as the server knows them: numbers of samples only.

    The samples stay with the nodes. Unknown clients have no samples.

    Args:
        **options: As for :class:`~pflight.datamodules.FederatedDataModule`.

    Attributes:
        known: The clients that have described their data.
    """

    def __init__(self, *, num_classes: int | None = None, **options: Any) -> None:
        super().__init__(num_classes=None, **options)
        self.num_clients = 0
        self.known: dict[int, tuple[dict[Split, int], int]] = {}

    def know(self, client: int, sizes: dict[Split, int], fingerprint: int) -> None:
        """Store a node's description of its data.

        Args:
            client: The client's id.
            sizes: The client's number of samples, by split.
            fingerprint: A number that changes with the samples.
        """
        self.known[client] = sizes, fingerprint
        for name in ("train_clients", "cohorts"):
            vars(self).pop(name, None)

    def setup(self, stage: str | None = None) -> None:
        """Check the options against the data."""
        if not self.known:
            raise ConfigurationError("the nodes have not said yet how many samples they have")
        super().setup(stage)

    def num_samples(self, split: Split = "train") -> Tensor:
        """Return each client's number of samples, ``[num_clients]``."""
        if split not in SPLITS:
            known = ", ".join(SPLITS)
            raise ConfigurationError(f"nodes say how many samples they have for {known} alone")
        return self._of_all({client: sizes[split] for client, (sizes, _) in self.known.items()})

    def samples(self, client: int, split: Split) -> Any:
        """Raise, since the server has no samples.

        Raises:
            ConfigurationError: Always. The message names the client.
        """
        raise ConfigurationError(f"the {split} samples of client {client} are on its own machine")

    def class_counts(self, split: Split = "train", num_classes: int | None = None) -> Tensor:
        """Raise, since the server has no labels.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError("how many samples of each class a client has stays with its node")

    @property
    def holds_tensors(self) -> bool:
        """Whether :meth:`samples` is defined: never, since the server has no samples."""
        return False

    def fingerprint(self) -> Tensor:
        """Return the fingerprint of each node's samples."""
        return self._of_all({client: number for client, (_, number) in self.known.items()})

    def _of_all(self, numbers: dict[int, int]) -> Tensor:
        everyone = torch.zeros(self.num_clients, dtype=torch.long)
        everyone[[*numbers]] = torch.tensor([*numbers.values()], dtype=torch.long)
        return everyone

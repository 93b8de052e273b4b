"""A deployed federation's data: of one client at its node, and what the server knows of all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pflight.data.data_module import FederatedDataModule
from pflight.data.loaders import SPLITS, Split
from pflight.data.wrapped import WrappedData
from pflight.errors import ConfigurationError


class OwnData(WrappedData):
    """One client's samples as its node has them; all other clients have none.

    Random numbers are those of its id in the federation, as where all clients are simulated.

    Args:
        data: The node's data, of one client or of many.
        own: Which of the clients in ``data`` it is.
        place: Its id in the federation.
        num_clients: How many clients the federation has.
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
        """Return the id of the one client that is here in the node's data.

        Raises:
            ConfigurationError: If it is another client.
        """
        if client != self.place:
            raise ConfigurationError(f"the samples of client {client} are on another machine")
        return self.own

    def taken(self, values: Tensor) -> Tensor:
        """Return the client's values at its place, ``[num_clients, ...]``: 0 for all others."""
        placed = values.new_zeros((self.num_clients, *values.shape[1:]))
        placed[self.place] = values[self.own]
        return placed


class NodeData(FederatedDataModule):
    """What a server knows of its clients' data: how many samples there are.

    The samples stay with the nodes. A client of which nothing is known yet has none.

    Args:
        **options: As for :class:`~pflight.datamodules.FederatedDataModule`.

    Attributes:
        known: The clients of which something is known.
    """

    def __init__(
        self,
        *,
        num_classes: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_classes=None, **options)
        self.num_clients = 0
        self.known: dict[int, tuple[dict[Split, int], int]] = {}

    def know(self, client: int, sizes: dict[Split, int], fingerprint: int) -> None:
        """Take what a node has said of its data.

        Args:
            client: Whose they are.
            sizes: Its numbers of samples, by split.
            fingerprint: A number that changes with its samples.
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
        """Raise, since no samples are here.

        Raises:
            ConfigurationError: Naming the client.
        """
        raise ConfigurationError(f"the {split} samples of client {client} are on its own machine")

    def class_counts(self, split: Split = "train", num_classes: int | None = None) -> Tensor:
        """Raise, since no labels are here.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError("how many samples of each class a client has stays with its node")

    @property
    def holds_tensors(self) -> bool:
        """Whether samples are at hand: no."""
        return False

    def fingerprint(self) -> Tensor:
        """Return what each node gives as its samples' fingerprint."""
        return self._of_all({client: number for client, (_, number) in self.known.items()})

    def _of_all(self, numbers: dict[int, int]) -> Tensor:
        everyone = torch.zeros(self.num_clients, dtype=torch.long)
        everyone[[*numbers]] = torch.tensor([*numbers.values()], dtype=torch.long)
        return everyone

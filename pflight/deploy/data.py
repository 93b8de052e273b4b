"""A deployed federation's data: of one client at its node, and what the server knows of all."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pflight.data_module import FederatedDataModule
from pflight.errors import ConfigurationError
from pflight.loaders import SPLITS, Split, Visit

OPTIONS = tuple(inspect.signature(FederatedDataModule).parameters)
"""What any federated data can be told, such as ``cohort_size``."""


class OwnData(FederatedDataModule):
    """One client's samples as its node has them; all other clients have none.

    Args:
        data: The node's data, of one client or of many.
        own: Which of the clients in ``data`` it is.
        place: Its id in the federation.
        num_clients: How many clients the federation has.
    """

    def __init__(self, data: FederatedDataModule, own: int, place: int, num_clients: int) -> None:
        data.check_client(own)
        if not 0 <= place < num_clients:
            raise ConfigurationError(f"there is no client {place} among {num_clients}")
        given: dict[str, Any] = {name: getattr(data, name, None) for name in OPTIONS}
        alone = {"cohort_size": None, "participation": None, "holdout_clients": 0.0}
        super().__init__(**{**given, **alone})
        self.data = data
        self.own = own
        self.fill = data.fill
        self.place, self.num_clients = place, num_clients

    def samples(self, client: int, split: Split) -> Any:
        """See :meth:`FederatedDataModule.samples`."""
        self._check_own(client)
        return self.data.samples(self.own, split)

    def labels(self, client: int, split: Split) -> Tensor:
        """See :meth:`FederatedDataModule.labels`."""
        self._check_own(client)
        return self.data.labels(self.own, split)

    @property
    def holds_tensors(self) -> bool:
        """Whether the node's data are tensors."""
        return self.data.holds_tensors

    def num_samples(self, split: Split = "train") -> Tensor:
        """Return each client's number of samples, ``[num_clients]``: 0 for all others."""
        return self._in_place(self.data.num_samples(split))

    def class_counts(self, split: Split = "train", num_classes: int | None = None) -> Tensor:
        """Return each client's samples by class ``[num_clients, K]``: 0 for all others."""
        return self._in_place(self.data.class_counts(split, num_classes))

    def batches(self, split: Split, visits: Sequence[Visit]) -> Iterator[Any]:
        """See :meth:`FederatedDataModule.batches`."""
        for visit in visits:
            self._check_own(visit.client)
        return self.data.batches(split, [visit._replace(client=self.own) for visit in visits])

    def fingerprint(self) -> Tensor:
        """Return a number that identifies the samples, for each client."""
        return self._in_place(self.data.fingerprint())

    def prepare_data(self) -> None:
        """Prepare the node's data."""
        self.data.prepare_data()

    def teardown(self, stage: str | None = None) -> None:
        """Leave the workers of the node's data alone: there will be more messages."""

    def _in_place(self, values: Tensor) -> Tensor:
        placed = values.new_zeros((self.num_clients, *values.shape[1:]))
        placed[self.place] = values[self.own]
        return placed

    def _check_own(self, client: int) -> None:
        if client != self.place:
            raise ConfigurationError(f"the samples of client {client} are on another machine")


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

"""Training samples that clients do not train on, for algorithms that choose by validation loss."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pflight.data_module import FederatedDataModule
from pflight.fingerprint import joined
from pflight.loaders import Split, Visit
from pflight.options import check_range, checked
from pflight.randomness import Purpose, generator


@checked
class HeldOut(FederatedDataModule):
    """Other data of which each client holds out some training samples, as the split ``held_out``.

    They are drawn by the seed. Validation and test samples are not changed. At least one sample is
    held out and at least one is trained on; a client with a single sample uses it for both.

    Args:
        data: The data of all clients.
        share: Share of each client's training samples to hold out, in (0, 1).

    Raises:
        ConfigurationError: If the share is out of range.

    Example:
        >>> from pflight.datamodules import TensorClients
        >>> pair = torch.zeros(4, 2), torch.tensor([0, 1, 1, 0])
        >>> data = HeldOut(TensorClients([pair], num_classes=2), share=0.2)
        >>> len(data.labels(0, "train")), len(data.labels(0, "held_out"))
        (3, 1)
    """

    def __init__(self, data: FederatedDataModule, share: float) -> None:
        check_range(self, "(0, 1)", share=share)
        options = inspect.signature(FederatedDataModule).parameters
        given: dict[str, Any] = {name: getattr(data, name, None) for name in options}
        super().__init__(**given)
        self.num_clients = data.num_clients
        self.fill = data.fill
        self.data = data
        self.share = share

    def samples(self, client: int, split: Split) -> Any:
        """See :meth:`FederatedDataModule.samples`."""
        samples = self.data.samples(client, "train" if split == "held_out" else split)
        if split in ("val", "test"):
            return samples
        part = self._part(client, int(self.data.num_samples("train")[client]), split)
        return tree_map(lambda leaf: leaf[part], samples)

    def labels(self, client: int, split: Split) -> Tensor:
        """See :meth:`FederatedDataModule.labels`."""
        y = self.data.labels(client, "train" if split == "held_out" else split)
        return y if split in ("val", "test") else y[self._part(client, len(y), split)]

    @property
    def holds_tensors(self) -> bool:
        """Whether the wrapped data are tensors."""
        return self.data.holds_tensors

    def num_samples(self, split: Split = "train") -> Tensor:
        """Return each client's number of samples, ``[num_clients]``."""
        if split in ("val", "test"):
            return self.data.num_samples(split)
        counts = self.data.num_samples("train")
        held = (self.share * counts + 0.5).floor().long().clamp(min=1).minimum(counts - 1)
        return torch.where(counts < 2, counts, held if split == "held_out" else counts - held)

    def batches(self, split: Split, visits: Sequence[Visit]) -> Iterator[Any]:
        """See :meth:`FederatedDataModule.batches`."""
        if split in ("val", "test"):
            return self.data.batches(split, visits)
        counts = self.data.num_samples("train")
        moved = []
        for visit in visits:
            place = self._part(visit.client, int(counts[visit.client]), split)
            moved.append(visit._replace(parts=[place[part] for part in visit.parts]))
        return self.data.batches("train", moved)

    def fingerprint(self) -> Tensor:
        """Return the wrapped data's fingerprints, with checksums of the remaining labels."""
        whole = self.data.fingerprint()
        return joined(whole, super().fingerprint()) if self.holds_tensors else whole

    def _part(self, client: int, count: int, split: Split) -> Tensor:
        """Return the positions of a split among a client's ``count`` training samples."""
        order = torch.randperm(count, generator=generator(Purpose.SAMPLE, self.seed, client))
        if count < 2:
            return order
        held = min(max(math.floor(self.share * count + 0.5), 1), count - 1)
        return (order[:held] if split == "held_out" else order[held:]).sort().values

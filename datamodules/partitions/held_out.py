"""Training samples that clients do not train on, for algorithms that choose by validation loss."""

from __future__ import annotations

import torch
from torch import Tensor

from pflight.data.cohort import CohortSampler
from pflight.data.data_module import FederatedDataModule
from pflight.data.loaders import Split
from pflight.data.wrapped import WrappedData
from pflight.options import OpenUnitInterval, checked
from pflight.randomness import Purpose, generator


@checked
class HeldOut(WrappedData):
    """Other data, with some training samples of each client held out as the split ``held_out``.

    They are drawn by the seed. Validation and test samples are not changed. At least one sample is
    held out and at least one is trained on; a client with a single sample uses it for both.

    Args:
        data: The data of all clients, set up.
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

    cut = "train", "held_out"

    def __init__(self, data: FederatedDataModule, share: OpenUnitInterval) -> None:
        super().__init__(data)
        self.share = share

    @property
    def new_clients(self) -> Tensor:
        """Sorted ids of the newcomers, as in the wrapped data."""
        return self.data.new_clients

    @property
    def train_clients(self) -> Tensor:
        """Sorted ids of the clients that may train, as in the wrapped data."""
        return self.data.train_clients

    @property
    def cohorts(self) -> CohortSampler:
        """The wrapped data's sampler of cohorts."""
        return self.data.cohorts

    def num_samples(self, split: Split = "train") -> Tensor:
        """Return each client's number of samples, ``[num_clients]``."""
        if split not in self.cut:
            return super().num_samples(split)
        counts = self.data.num_samples("train")
        held = self._held(counts)
        return torch.where(counts < 2, counts, held if split == "held_out" else counts - held)

    def rows(self, client: int, split: Split) -> Tensor:
        """Return the positions of a split among a client's training samples, ``[n]``."""
        count = self.data.num_samples("train")[client]
        order = torch.randperm(int(count), generator=generator(Purpose.SAMPLE, self.seed, client))
        if count < 2:
            return order
        held = int(self._held(count))
        return (order[:held] if split == "held_out" else order[held:]).sort().values

    def _held(self, counts: Tensor) -> Tensor:
        """Return the numbers of held-out samples for ``counts`` of two or more samples."""
        held = (self.share * counts.double() + 0.5).floor().long()
        return held.clamp(min=1).minimum(counts - 1)

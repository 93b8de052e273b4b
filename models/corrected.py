"""A client whose gradients are corrected by a direction that is fixed for the round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from pflight.state import StateModule

from .client import Batch, ClientModule


class CorrectedClient(ClientModule):
    r"""A client that minimises its loss plus :math:`\langle d_i, w - w_{\text{anchor}} \rangle`.

    Every gradient is so corrected by the direction :math:`d_i`, which the subclass gives and which
    is fixed for the round. Without an anchor, as in fine-tuning and centralized training, there is
    no correction.
    """

    averages_samples: ClassVar[bool] = True

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss without a correction plus the linear term."""
        return super().loss(batch) + self.linear_term()

    def direction(self) -> Mapping[str, Tensor]:
        """Return :math:`d_i` by parameter name."""
        raise NotImplementedError(f"{type(self).__name__} does not define direction()")

    def linear_term(self) -> Tensor:
        r"""Return the scalar :math:`\langle d_i, w - w_{\text{anchor}} \rangle`."""
        total = torch.zeros((), device=self.device)
        if self.anchor is None:
            return total
        weights, direction = dict(self.named_parameters()), self.direction()
        for name, sent in self.anchor.tensors().items():
            total = total + (direction[name] * (weights[name] - sent)).sum()
        return total

    def _zeros(self) -> StateModule:
        """Return buffers of zeros for a vector as long as the trainable parameters."""
        return StateModule(
            {n: torch.zeros_like(p) for n, p in self.named_parameters() if p.requires_grad}
        )

"""Clipping of updates."""

from __future__ import annotations

from torch import Tensor

from pflight.options import PositiveFloat, checked

from .base import Draw, Transform


@checked
class Clip(Transform):
    r"""Scales a client's update down to a norm :math:`C`, if it is longer.

    The update :math:`\Delta` becomes :math:`\Delta \min(1, C / \|\Delta\|)`, with the L2 norm over
    all that travels of the model, in float64 (McMahan et al. 2018, section 2.1). A shorter update
    stays as it is, bit for bit.

    Args:
        norm: The norm :math:`C`; ``None`` for no limit.

    References:
        McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018,
        https://arxiv.org/abs/1710.06963.
    """

    stage = "clip"

    def __init__(self, norm: PositiveFloat | None = 1.0) -> None:
        self.norm = norm

    @property
    def neutral(self) -> bool:
        """Whether there is no limit."""
        return self.norm is None

    def __call__(self, updates: Tensor, draw: Draw) -> Tensor:
        """Return the updates ``[C, d]``, each of at most this norm."""
        assert self.norm is not None
        exact = updates.double()
        norms = exact.norm(dim=1, keepdim=True)
        clipped = (exact * (self.norm / norms)).to(updates.dtype)
        return updates.where(norms <= self.norm, clipped)

"""The usual augmentation of small images: random crops and flips."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pflight.data.augmentation import Augmentation
from pflight.options import NonNegativeInt, checked


@checked
@dataclass(frozen=True)
class CropAndFlip(Augmentation):
    """Shifts each image by up to ``padding`` pixels, and mirrors it with probability one half.

    An image is padded with ``fill`` on all sides, and a window of its own size is cut out. All
    ``(2 * padding + 1) ** 2`` windows are equally likely. Then, with probability one half, left and
    right are exchanged. This is the usual augmentation of CIFAR.

    Args:
        padding: Pixels that are added on each side; 0 does not shift images.
        flip: Whether to mirror images.

    Raises:
        ConfigurationError: ``padding`` is negative.

    Example:
        >>> image = torch.tensor([[[[1, 2], [3, 4]]]])
        >>> down_and_left = torch.tensor([[0.1, 0.9, 0.5]])
        >>> CropAndFlip(padding=1)(image, down_and_left, torch.tensor(0))
        tensor([[[[0, 0],
                  [2, 0]]]])

    References:
        K. He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, section 4.2.
    """

    padding: NonNegativeInt = 4
    flip: bool = True

    num_draws: ClassVar[int] = 3

    def __call__(self, x: Tensor, noise: Tensor, fill: Tensor) -> Tensor:
        """See :meth:`Augmentation.__call__`; the draws are for the row, the column, the flip."""
        if self.padding:
            x = self._crop(x, noise[:, :2], fill)
        if self.flip:
            x = torch.where(noise[:, 2, None, None, None] < 0.5, x.flip(-1), x)
        return x

    def _crop(self, x: Tensor, noise: Tensor, fill: Tensor) -> Tensor:
        num_images, channels, height, width = x.shape
        border = self.padding
        around = (num_images, channels, height + 2 * border, width + 2 * border)
        padded = fill.to(x).expand(around).clone()
        padded[..., border : border + height, border : border + width] = x
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)
        rows, columns = (noise * (2 * border + 1)).long().unbind(1)
        return windows[torch.arange(num_images, device=x.device), :, rows, columns]

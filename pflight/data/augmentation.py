"""The base class of augmentations, which change training images at random in every epoch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor


class Augmentation(ABC):
    """Changes training images, as a pure function of the images and of random numbers.

    The data module draws the numbers from its seed, the round and the client, and passes them in.
    So a run sees the same images with any engine.
    """

    num_draws: ClassVar[int]
    """Number of random numbers for one image."""

    @abstractmethod
    def __call__(self, x: Tensor, noise: Tensor, fill: Tensor) -> Tensor:
        """Change a batch of images.

        Args:
            x: Images ``[n, C, H, W]`` as the network gets them.
            noise: Independent numbers ``[n, num_draws]``, uniform in [0, 1).
            fill: Pixel values outside the image, in a shape that expands to ``[C, H, W]``.

        Returns:
            The changed images, of the shape and type of ``x``.
        """

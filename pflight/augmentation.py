"""How training images are changed anew each time that they are seen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor


class Augmentation(ABC):
    """A change to training images: a pure function of the images and of random numbers.

    A data module draws the numbers from its seed, the round and the client, and hands them over;
    so the same run sees the same images, whichever engine trains the clients.
    """

    num_draws: ClassVar[int]
    """Random numbers that one image takes."""

    @abstractmethod
    def __call__(self, x: Tensor, noise: Tensor, fill: Tensor) -> Tensor:
        """Change a batch of images.

        Args:
            x: Images ``[n, C, H, W]`` as the network gets them.
            noise: Independent numbers ``[n, num_draws]``, uniform in [0, 1).
            fill: What lies outside of an image, in a shape that expands to ``[C, H, W]``.

        Returns:
            The changed images, a tensor like ``x``.
        """

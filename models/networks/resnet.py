"""ResNet-18 for federated learning."""

from __future__ import annotations

from functools import partial
from typing import Literal

from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

from pflight.errors import ConfigurationError
from pflight.options import PositiveInt, checked


@checked
class ResNet18(ResNet):
    """torchvision's ResNet-18 with GroupNorm or BatchNorm, for small images or large ones.

    For small images the first convolution is 3x3 with stride 1, and no max pooling follows it. So a
    32x32 image keeps its size up to the second stage. Layers have torchvision's names; the last is
    ``fc``. Images can have any size. The number of parameters is the same with either
    normalisation:

    | | 10 classes | 100 classes | 1000 classes |
    |---|---|---|---|
    | small colour images | 11,173,962 | 11,220,132 | 11,681,832 |
    | large colour images | 11,181,642 | 11,227,812 | 11,689,512 |

    Args:
        num_classes: Number of logits.
        in_channels: Channels of an image.
        norm: ``"group"``, which does not depend on other samples, or ``"batch"``.
        num_groups: Groups of channels that GroupNorm normalises together; a divisor of 64.
        small_images: Whether the network begins as described for small images. With ``False``,
            ``norm="batch"`` and 3 channels, torchvision's weights can be loaded.


    Example:
        >>> import torch
        >>> network = ResNet18()
        >>> network(torch.zeros(5, 3, 32, 32)).shape
        torch.Size([5, 10])
        >>> sum(parameter.numel() for parameter in network.parameters())
        11173962

    References:
        He et al., Deep Residual Learning for Image Recognition, CVPR 2016,
        https://arxiv.org/abs/1512.03385; Wu and He, Group Normalization, ECCV 2018,
        https://arxiv.org/abs/1803.08494.
    """

    def __init__(
        self,
        num_classes: PositiveInt = 10,
        in_channels: PositiveInt = 3,
        norm: Literal["group", "batch"] = "group",
        num_groups: int = 32,
        small_images: bool = True,
    ) -> None:
        if num_groups < 1 or 64 % num_groups:
            raise ConfigurationError(f"ResNet18: num_groups must divide 64, got {num_groups}")
        normalisation = nn.BatchNorm2d if norm == "batch" else partial(nn.GroupNorm, num_groups)
        super().__init__(
            BasicBlock, [2, 2, 2, 2], num_classes=num_classes, norm_layer=normalisation
        )
        kernel_size, stride = (3, 1) if small_images else (7, 2)
        self.conv1 = nn.Conv2d(
            in_channels, 64, kernel_size, stride, padding=kernel_size // 2, bias=False
        )
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
        if small_images:
            self.maxpool = nn.Identity()

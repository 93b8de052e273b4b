"""Convolutional networks for small images, as the papers use them.

Each takes images ``[batch, channels, height, width]`` and returns logits ``[batch, num_classes]``.
Layers are registered in the order of their use: ``conv1``, its normalisation ``norm1``, and so on
to ``output``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch.nn.functional as F
from torch import Tensor, nn

from pflight.options import ClosedUnitInterval, Interval, PositiveInt, check_range, checked


@checked
class McMahanCNN(nn.Module):
    """The convolutional network of the first paper on federated averaging.

    Two 5x5 convolutions of 32 and 64 channels, each followed by ReLU and 2x2 max pooling. Then come
    512 hidden units with ReLU, and the output layer. With the default arguments it has 1,663,370
    parameters; with the 62 classes of FEMNIST 1,690,046.

    Args:
        num_classes: Number of logits.
        in_channels: Channels of an image: 1 for grey, 3 for colour.
        image_size: Height and width of an image, at least 4 pixels.
        hidden: Number of hidden units.

    Raises:
        ConfigurationError: If the images are too small.

    Example:
        >>> import torch
        >>> network = McMahanCNN()
        >>> network(torch.zeros(5, 1, 28, 28)).shape
        torch.Size([5, 10])
        >>> sum(parameter.numel() for parameter in network.parameters())
        1663370

    References:
        McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data,
        AISTATS 2017, section 3, https://arxiv.org/abs/1602.05629.
    """

    def __init__(
        self,
        num_classes: PositiveInt = 10,
        in_channels: PositiveInt = 1,
        image_size: Annotated[int, Interval("[4, inf)")] = 28,
        hidden: PositiveInt = 512,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 32, kernel_size=5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=5, padding=2)
        self.hidden = nn.Linear(64 * (image_size // 4) ** 2, hidden)
        self.output = nn.Linear(hidden, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits ``[batch, num_classes]``."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.hidden(x.flatten(1)))
        return self.output(x)


@checked
class FEMNISTCNN(McMahanCNN):
    """LEAF's network for FEMNIST: :class:`McMahanCNN` with 2048 hidden units.

    With the default arguments it has 6,603,710 parameters. The code that FeSEM's authors released
    has 248 hidden units, which makes 845,510.

    Args:
        num_classes: Number of logits.
        in_channels: Channels of an image.
        image_size: Height and width of an image, at least 4 pixels.
        hidden: Number of hidden units.

    Raises:
        ConfigurationError: If the images are too small.

    Example:
        >>> import torch
        >>> network = FEMNISTCNN()
        >>> network(torch.zeros(5, 1, 28, 28)).shape
        torch.Size([5, 62])
        >>> sum(parameter.numel() for parameter in network.parameters())
        6603710

    References:
        Caldas et al., LEAF: A Benchmark for Federated Settings, 2018,
        https://arxiv.org/abs/1812.01097.
    """

    def __init__(
        self,
        num_classes: int = 62,
        in_channels: int = 1,
        image_size: int = 28,
        hidden: int = 2048,
    ) -> None:
        super().__init__(num_classes, in_channels, image_size, hidden)


@checked
class CelebACNN(nn.Module):
    """LEAF's network for CelebA.

    Four 3x3 convolutions of 32 channels, each followed by BatchNorm, 2x2 max pooling that rounds
    sizes up, and ReLU; then the output layer. With the default arguments it has 31,202 parameters.
    BatchNorm is PyTorch's: evaluation takes running statistics. LEAF's own code takes the
    statistics of the test batch.

    Args:
        num_classes: Number of logits.
        in_channels: Channels of an image.
        image_size: Height and width of an image.

    Example:
        >>> import torch
        >>> network = CelebACNN()
        >>> network(torch.zeros(5, 3, 84, 84)).shape
        torch.Size([5, 2])
        >>> sum(parameter.numel() for parameter in network.parameters())
        31202

    References:
        Caldas et al., LEAF: A Benchmark for Federated Settings, 2018,
        https://arxiv.org/abs/1812.01097.
    """

    def __init__(
        self,
        num_classes: PositiveInt = 2,
        in_channels: PositiveInt = 3,
        image_size: PositiveInt = 84,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 32, kernel_size=3, padding=1)
        self.norm1 = nn.BatchNorm2d(32)
        self.conv2 = nn.Conv2d(32, 32, kernel_size=3, padding=1)
        self.norm2 = nn.BatchNorm2d(32)
        self.conv3 = nn.Conv2d(32, 32, kernel_size=3, padding=1)
        self.norm3 = nn.BatchNorm2d(32)
        self.conv4 = nn.Conv2d(32, 32, kernel_size=3, padding=1)
        self.norm4 = nn.BatchNorm2d(32)
        side = (image_size + 15) // 16
        self.output = nn.Linear(32 * side**2, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits ``[batch, num_classes]``."""
        x = F.relu(F.max_pool2d(self.norm1(self.conv1(x)), 2, ceil_mode=True))
        x = F.relu(F.max_pool2d(self.norm2(self.conv2(x)), 2, ceil_mode=True))
        x = F.relu(F.max_pool2d(self.norm3(self.conv3(x)), 2, ceil_mode=True))
        x = F.relu(F.max_pool2d(self.norm4(self.conv4(x)), 2, ceil_mode=True))
        return self.output(x.flatten(1))


class _LeNet(nn.Module):
    """Two 5x5 convolutions with ReLU and 2x2 max pooling, two hidden layers, and the output."""

    def __init__(
        self,
        num_classes: int,
        in_channels: int,
        image_size: int,
        channels: Sequence[int],
        hidden: Sequence[int],
        batch_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_range(self, "[16, inf)", image_size=image_size)
        check_range(self, "[1, inf)", num_classes=num_classes, in_channels=in_channels)
        side = ((image_size - 4) // 2 - 4) // 2
        self.conv1 = nn.Conv2d(in_channels, channels[0], kernel_size=5)
        self.norm1 = nn.BatchNorm2d(channels[0]) if batch_norm else nn.Identity()
        self.conv2 = nn.Conv2d(channels[0], channels[1], kernel_size=5)
        self.norm2 = nn.BatchNorm2d(channels[1]) if batch_norm else nn.Identity()
        self.hidden1 = nn.Linear(channels[1] * side**2, hidden[0])
        self.hidden2 = nn.Linear(hidden[0], hidden[1])
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(hidden[1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits ``[batch, num_classes]``."""
        # ReLU and max pooling commute, gradients included; pooling first leaves ReLU a quarter.
        x = F.relu(F.max_pool2d(self.norm1(self.conv1(x)), 2))
        x = F.relu(F.max_pool2d(self.norm2(self.conv2(x)), 2))
        x = F.relu(self.hidden1(x.flatten(1)))
        x = F.relu(self.hidden2(x))
        return self.output(self.dropout(x))


@checked
class FedRepCNN(_LeNet):
    """The network of FedRep and FedEC for CIFAR.

    Two 5x5 convolutions, each followed by ReLU and 2x2 max pooling, then two hidden layers with
    ReLU and the output layer. The default arguments are for CIFAR-10, and give 307,842 parameters.
    For CIFAR-100 the papers take
    ``num_classes=100, channels=(64, 128), hidden=(256, 128), dropout=0.6``, which makes 1,075,044.

    Args:
        num_classes: Number of logits.
        in_channels: Channels of an image.
        image_size: Height and width of an image, at least 16 pixels.
        channels: Channels of the two convolutions.
        hidden: Width of the two hidden layers.
        dropout: Share of the second hidden layer's units that training drops, from 0 to 1.


    Example:
        >>> import torch
        >>> network = FedRepCNN()
        >>> network(torch.zeros(5, 3, 32, 32)).shape
        torch.Size([5, 10])
        >>> sum(parameter.numel() for parameter in network.parameters())
        307842

    References:
        Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML
        2021, https://arxiv.org/abs/2102.07078.

        Lan et al., Elastically-Constrained Meta-Learner for Federated Learning, 2023,
        https://arxiv.org/abs/2306.16703.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        image_size: int = 32,
        channels: tuple[int, int] = (64, 64),
        hidden: tuple[int, int] = (120, 64),
        dropout: ClosedUnitInterval = 0.0,
    ) -> None:
        for width in channels:
            check_range(self, "[1, inf)", channels=width)
        for width in hidden:
            check_range(self, "[1, inf)", hidden=width)
        super().__init__(num_classes, in_channels, image_size, channels, hidden, dropout=dropout)


@checked
class PFedHNCNN(_LeNet):
    """The network of pFedHN and pFedLA.

    Two 5x5 convolutions of 16 and 32 channels, each followed by ReLU and 2x2 max pooling. Then come
    120 and 84 hidden units with ReLU, and the output layer. pFedHN has no BatchNorm; pFedLA has it
    on CIFAR, after each convolution. Parameters:

    | | without BatchNorm | with BatchNorm |
    |---|---|---|
    | 32x32 colour, 10 classes (CIFAR-10) | 121,182 | 121,278 |
    | 32x32 colour, 100 classes (CIFAR-100) | 128,832 | 128,928 |
    | 28x28 grey, 10 classes (EMNIST, Fashion-MNIST) | 85,822 | 85,918 |

    Args:
        num_classes: Number of logits.
        in_channels: Channels of an image.
        image_size: Height and width of an image, at least 16 pixels.
        batch_norm: Whether BatchNorm follows each convolution.

    Raises:
        ConfigurationError: If the images are too small.

    Example:
        >>> import torch
        >>> network = PFedHNCNN(batch_norm=True)
        >>> network(torch.zeros(5, 3, 32, 32)).shape
        torch.Size([5, 10])
        >>> sum(parameter.numel() for parameter in network.parameters())
        121278

    References:
        Shamsian et al., Personalized Federated Learning using Hypernetworks, ICML 2021,
        https://arxiv.org/abs/2103.04628.

        Ma et al., Layer-wised Model Aggregation for Personalized Federated Learning, CVPR 2022,
        https://arxiv.org/abs/2205.03993.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        image_size: int = 32,
        batch_norm: bool = False,
    ) -> None:
        super().__init__(num_classes, in_channels, image_size, (16, 32), (120, 84), batch_norm)


@checked
class FedFomoCNN(nn.Module):
    """FedFomo's network for CIFAR.

    Three 3x3 convolutions of 32, 64 and 64 channels with ReLU, 2x2 max pooling after the first two,
    then 64 hidden units with ReLU and the output layer. With the default arguments it has 122,570
    parameters; with BatchNorm 122,890.

    Args:
        num_classes: Number of logits.
        in_channels: Channels of an image.
        image_size: Height and width of an image, at least 18 pixels.
        batch_norm: Whether BatchNorm follows each convolution.

    Raises:
        ConfigurationError: If the images are too small.

    Example:
        >>> import torch
        >>> network = FedFomoCNN()
        >>> network(torch.zeros(5, 3, 32, 32)).shape
        torch.Size([5, 10])
        >>> sum(parameter.numel() for parameter in network.parameters())
        122570

    References:
        Zhang et al., Personalized Federated Learning with First Order Model Optimization, ICLR
        2021, https://arxiv.org/abs/2012.08565.
    """

    def __init__(
        self,
        num_classes: PositiveInt = 10,
        in_channels: PositiveInt = 3,
        image_size: Annotated[int, Interval("[18, inf)")] = 32,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        side = ((image_size - 2) // 2 - 2) // 2 - 2
        self.conv1 = nn.Conv2d(in_channels, 32, kernel_size=3)
        self.norm1 = nn.BatchNorm2d(32) if batch_norm else nn.Identity()
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3)
        self.norm2 = nn.BatchNorm2d(64) if batch_norm else nn.Identity()
        self.conv3 = nn.Conv2d(64, 64, kernel_size=3)
        self.norm3 = nn.BatchNorm2d(64) if batch_norm else nn.Identity()
        self.hidden = nn.Linear(64 * side**2, 64)
        self.output = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits ``[batch, num_classes]``."""
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        x = F.relu(self.norm3(self.conv3(x)))
        x = F.relu(self.hidden(x.flatten(1)))
        return self.output(x)


@checked
class FedBNCNN(nn.Module):
    """FedBN's network for digits.

    Three 5x5 convolutions of 64, 64 and 128 channels, then 2048 and 512 hidden units and the output
    layer. BatchNorm and ReLU follow every layer but the last, and 2x2 max pooling the first two.
    With the default arguments it has 14,219,210 parameters; without BatchNorm 14,213,578.

    Args:
        num_classes: Number of logits.
        in_channels: Channels of an image.
        image_size: Height and width of an image, at least 4 pixels.
        batch_norm: Whether there is BatchNorm.

    Raises:
        ConfigurationError: If the images are too small.

    Example:
        >>> import torch
        >>> network = FedBNCNN()
        >>> network(torch.zeros(5, 3, 28, 28)).shape
        torch.Size([5, 10])
        >>> sum(parameter.numel() for parameter in network.parameters())
        14219210

    References:
        Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR
        2021, https://arxiv.org/abs/2102.07623.
    """

    def __init__(
        self,
        num_classes: PositiveInt = 10,
        in_channels: PositiveInt = 3,
        image_size: Annotated[int, Interval("[4, inf)")] = 28,
        batch_norm: bool = True,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 64, kernel_size=5, padding=2)
        self.norm1 = nn.BatchNorm2d(64) if batch_norm else nn.Identity()
        self.conv2 = nn.Conv2d(64, 64, kernel_size=5, padding=2)
        self.norm2 = nn.BatchNorm2d(64) if batch_norm else nn.Identity()
        self.conv3 = nn.Conv2d(64, 128, kernel_size=5, padding=2)
        self.norm3 = nn.BatchNorm2d(128) if batch_norm else nn.Identity()
        self.hidden1 = nn.Linear(128 * (image_size // 4) ** 2, 2048)
        self.norm4 = nn.BatchNorm1d(2048) if batch_norm else nn.Identity()
        self.hidden2 = nn.Linear(2048, 512)
        self.norm5 = nn.BatchNorm1d(512) if batch_norm else nn.Identity()
        self.output = nn.Linear(512, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits ``[batch, num_classes]``."""
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        x = F.relu(self.norm3(self.conv3(x)))
        x = F.relu(self.norm4(self.hidden1(x.flatten(1))))
        x = F.relu(self.norm5(self.hidden2(x)))
        return self.output(x)

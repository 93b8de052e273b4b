"""The networks of the first federated learning experiments.

Each takes inputs ``[batch, ...]`` as the data module gives them and returns logits
``[batch, num_classes]``. The last layer is called ``output`` in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


class LogisticRegression(nn.Module):
    """Multinomial logistic regression.

    One linear layer over the flattened input: ``(in_features + 1) * num_classes`` parameters.

    Args:
        in_features: Numbers in one flattened sample.
        num_classes: Number of logits.

    Example:
        >>> import torch
        >>> network = LogisticRegression(in_features=64, num_classes=10)
        >>> network(torch.zeros(5, 1, 8, 8)).shape
        torch.Size([5, 10])
        >>> sum(parameter.numel() for parameter in network.parameters())
        650
    """

    def __init__(self, in_features: int, num_classes: int) -> None:
        super().__init__()
        self.output = nn.Linear(in_features, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits ``[batch, num_classes]``."""
        return self.output(x.flatten(1))


class MLP(nn.Module):
    """Fully connected layers with ReLU between them.

    The input is flattened. With widths ``d_0`` (``in_features``), ``d_1, ...`` (``hidden``) and
    ``d_L`` (``num_classes``) it has ``sum_l (d_{l-1} + 1) * d_l`` parameters: the 784-200-200-10
    network of McMahan et al. (2017) 199,210, and 784-200-10 159,010.

    Args:
        in_features: Numbers in one flattened sample.
        hidden: Width of every hidden layer; none gives logistic regression.
        num_classes: Number of logits.

    Example:
        >>> import torch
        >>> network = MLP(in_features=784, hidden=[200, 200], num_classes=10)
        >>> network(torch.zeros(5, 1, 28, 28)).shape
        torch.Size([5, 10])
        >>> sum(parameter.numel() for parameter in network.parameters())
        199210
    """

    def __init__(self, in_features: int, hidden: Sequence[int], num_classes: int) -> None:
        super().__init__()
        widths = [in_features, *hidden]
        self.hidden = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.output = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits ``[batch, num_classes]``."""
        x = x.flatten(1)
        for layer in self.hidden:
            x = F.relu(layer(x))
        return self.output(x)


class McMahanCNN(nn.Module):
    """The convolutional network with which federated averaging was introduced.

    Two 5x5 convolutions of 32 and 64 channels, each followed by ReLU and 2x2 max pooling, then 512
    hidden units with ReLU and the output layer. With the default arguments it has 1,663,370
    parameters; with the 62 classes of FEMNIST 1,690,046.

    Args:
        num_classes: Number of logits.
        in_channels: Channels of an image: 1 for grey, 3 for colour.
        image_size: Height and width of an image, at least 4 pixels.

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

    def __init__(self, num_classes: int = 10, in_channels: int = 1, image_size: int = 28) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 32, kernel_size=5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=5, padding=2)
        self.hidden = nn.Linear(64 * (image_size // 4) ** 2, 512)
        self.output = nn.Linear(512, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits ``[batch, num_classes]``."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.hidden(x.flatten(1)))
        return self.output(x)

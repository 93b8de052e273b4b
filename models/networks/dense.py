"""Logistic regression and fully connected networks.

Each takes inputs ``[batch, ...]`` as the data module gives them and returns logits
``[batch, num_classes]``. The last layer is called ``output``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from pflight.options import PositiveInt, check_range, checked


@checked
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

    def __init__(self, in_features: PositiveInt, num_classes: PositiveInt) -> None:
        super().__init__()
        self.output = nn.Linear(in_features, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits ``[batch, num_classes]``."""
        return self.output(x.flatten(1))


@checked
class MLP(nn.Module):
    """Fully connected layers with ReLU between them.

    The input is flattened. With widths ``d_0`` (``in_features``), ``d_1, ...`` (``hidden``) and
    ``d_L`` (``num_classes``) it has ``sum_l (d_{l-1} + 1) * d_l`` parameters. The 784-200-200-10
    network of McMahan et al. (2017) has 199,210, and 784-200-10 has 159,010. FedEC's network of
    three layers for FEMNIST is 784-512-256-10 here, with 535,818.

    Args:
        in_features: Numbers in one flattened sample.
        hidden: Width of every hidden layer; none gives logistic regression.
        num_classes: Number of logits.

    Raises:
        ConfigurationError: A width is below 1.

    Example:
        >>> import torch
        >>> network = MLP(in_features=784, hidden=[200, 200], num_classes=10)
        >>> network(torch.zeros(5, 1, 28, 28)).shape
        torch.Size([5, 10])
        >>> sum(parameter.numel() for parameter in network.parameters())
        199210
    """

    def __init__(
        self, in_features: PositiveInt, hidden: Sequence[int], num_classes: PositiveInt
    ) -> None:
        super().__init__()
        for width in hidden:
            check_range(self, "[1, inf)", hidden=width)
        widths = [in_features, *hidden]
        self.hidden = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.output = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits ``[batch, num_classes]``."""
        x = x.flatten(1)
        for layer in self.hidden:
            x = F.relu(layer(x))
        return self.output(x)

"""The operations of a network, counted and never timed."""

from __future__ import annotations

import copy
import math
import operator
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_THIN = 4  # input channels


class Operations(NamedTuple):
    """Floating-point operations of a forward pass."""

    total: float
    """Operations of matrix products and convolutions. They are most of all operations."""
    thin: float
    """Operations of convolutions with at most four input channels, such as of an image."""


def count_operations(
    network: nn.Module, x: Tensor, function: Callable[..., Any] = operator.call
) -> Operations:
    """Count the operations of a forward pass in evaluation mode.

    Args:
        network: The network; a copy of it is run.
        x: The network's input ``[batch, ...]``.
        function: A function of the copy and the input to run instead of a forward pass.

    Returns:
        The operations for all samples. They are infinite if they can't be counted: the network may
        have any size.

    Example:
        >>> count_operations(nn.Conv1d(2, 3, kernel_size=4), torch.ones(1, 2, 13))
        Operations(total=480.0, thin=480.0)
    """
    from torch.utils.flop_counter import FlopCounterMode

    convolution = torch.ops.aten.convolution
    network = copy.deepcopy(network).eval()
    first = next(network.parameters(), x)
    if x.is_floating_point():
        x = x.to(first.dtype)
    everything = FlopCounterMode(display=False)
    thin = FlopCounterMode(display=False, custom_mapping={convolution: _thin_operations})
    try:
        # Without gradients, transformers take other paths.
        with everything, thin, torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the module warns again when it trains
            function(network, x.to(first.device))
    except KeyboardInterrupt:
        raise
    except BaseException:  # a user's network may raise anything
        return Operations(math.inf, math.inf)
    return Operations(
        float(everything.get_total_flops()),
        float(thin.get_flop_counts().get("Global", {}).get(convolution, 0)),
    )


def _thin_operations(x: Any, weight: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    return 2 * math.prod(out_shape) * math.prod(weight[1:]) if weight[1] <= _THIN else 0

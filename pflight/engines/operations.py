"""How much arithmetic a network takes, counted and never timed."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


def forward_operations(network: nn.Module, x: Tensor) -> float:
    """Count the floating-point operations of a forward pass in evaluation mode.

    Multiplications of matrices and convolutions are counted, which take most of them.

    Args:
        network: The network; a copy of it is run.
        x: Its input ``[batch, ...]``.

    Returns:
        The operations for all samples; infinite for a network that can't be counted, which may be
        of any size.

    Example:
        >>> forward_operations(nn.Linear(3, 4), torch.ones(5, 3))
        120.0
    """
    from torch.utils.flop_counter import FlopCounterMode

    network = copy.deepcopy(network).eval()
    first = next(network.parameters(), x)
    if x.is_floating_point():
        x = x.to(first.dtype)
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            network(x.to(first.device))
    except Exception:
        return float("inf")
    return float(counter.get_total_flops())

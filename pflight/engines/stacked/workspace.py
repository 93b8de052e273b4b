"""Memory that stacked tensors use again and again."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Workspace:
    """Memory for tensors. It is the same at every call, since new memory takes time.

    Args:
        device: The device of the memory.

    Example:
        >>> workspace = Workspace(torch.device("cpu"))
        >>> large = workspace.tensor("x", (3, 4), torch.float32)
        >>> small = workspace.tensor("x", (2, 5), torch.float32)
        >>> small.data_ptr() == large.data_ptr()
        True
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.held: dict[str, Tensor] = {}

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the tensor of a name. Its values are undefined."""
        size = math.prod(shape)
        held = self.held.get(name)
        if held is None or held.numel() < size or held.dtype != dtype:
            held = self.held[name] = torch.empty(size, dtype=dtype, device=self.device)
        return held[:size].view(shape)

"""Embeddings of many clients at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class CheckedEmbeddings(TorchFunctionMode):
    """Makes the vector NaN for an index outside of an embedding's table.

    Under ``vmap`` such an index is no error, but reads a vector of another client.

    Example:
        >>> with CheckedEmbeddings():
        ...     F.embedding(torch.tensor([1, 2]), torch.tensor([[3.0], [4.0]])).flatten()
        tensor([4., nan])
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is not F.embedding:
            return function(*args, **(kwargs or {}))
        return _embed(*args, **(kwargs or {}))


def _embed(input: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
    known = (input >= 0) & (input < len(weight))
    vectors = F.embedding(input.clamp(0, len(weight) - 1), weight, *args, **options)
    return torch.where(known.unsqueeze(-1), vectors, torch.nan)

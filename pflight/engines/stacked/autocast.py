"""Mixed precision for stacked clients. ``torch.autocast`` reaches only some operations there."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_LOWER = {
    F.linear,
    F.bilinear,
    F.conv1d,
    F.conv2d,
    F.conv3d,
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
    F.scaled_dot_product_attention,
    F.multi_head_attention_forward,
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.addmm,
    torch.addbmm,
    torch.baddbmm,
    torch.einsum,
    torch.tensordot,
    torch.linalg.multi_dot,
    Tensor.matmul,
    Tensor.__matmul__,
    Tensor.__rmatmul__,
    Tensor.mm,
    Tensor.bmm,
    Tensor.addmm,
    Tensor.addbmm,
    Tensor.baddbmm,
}
_WHOLE = {
    F.batch_norm,
    F.instance_norm,
    F.group_norm,
    F.layer_norm,
    F.softmax,
    F.log_softmax,
    F.cross_entropy,
    F.nll_loss,
    F.binary_cross_entropy_with_logits,
    F.kl_div,
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    torch.softmax,
    torch.log_softmax,
    Tensor.softmax,
    Tensor.log_softmax,
}


class StackedAutocast(TorchFunctionMode):
    """Casts the inputs of operations as ``torch.autocast`` does, also under ``vmap``.

    Matrix products and convolutions run in the lower precision. Normalisation, softmax and losses
    run in float32. All other operations keep their inputs' types. Parameters stay in float32, for
    the steps and the distances to anchors.

    Args:
        dtype: The lower precision.

    Example:
        >>> with StackedAutocast(torch.bfloat16):
        ...     logits = torch.vmap(F.linear)(torch.ones(2, 3, 5), torch.ones(2, 4, 5))
        ...     loss = F.cross_entropy(logits[0], torch.zeros(3, dtype=torch.long))
        >>> logits.dtype, loss.dtype
        (torch.bfloat16, torch.float32)
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _LOWER:
            args, kwargs = _cast((args, kwargs), torch.float32, self.dtype)
        elif function in _WHOLE:
            args, kwargs = _cast((args, kwargs), self.dtype, torch.float32)
        return function(*args, **kwargs)


def _cast(tree: Any, old: torch.dtype, new: torch.dtype) -> Any:
    def cast(leaf: Any) -> Any:
        return leaf.to(new) if isinstance(leaf, Tensor) and leaf.dtype == old else leaf

    return tree_map(cast, tree)

"""Stacked clients compute in the precisions in which ``torch.autocast`` lets a single one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pflight.engines.stacked.autocast import StackedAutocast

ATTENTION = nn.MultiheadAttention(4, 2, batch_first=True)


@pytest.mark.parametrize(
    "function",
    [
        F.linear,
        torch.matmul,
        torch.mm,
        lambda x, w: torch.addmm(x[0], x, w.T),
        lambda x, w: x[0].addmm(x, w.T),
        lambda x, w: x @ w.T,
        lambda x, w: torch.tensordot(x, w, dims=1),
        lambda x, w: torch.linalg.multi_dot([x, w, w]),
        lambda x, w: torch.einsum("ij,kj->ik", x, w),
        lambda x, w: torch.bmm(x.unsqueeze(0), w.unsqueeze(0)),
        lambda x, w: torch.baddbmm(x.unsqueeze(0), x.unsqueeze(0), w.unsqueeze(0)),
        lambda x, w: F.conv1d(x.unsqueeze(0), w.unsqueeze(2)),
        lambda x, w: F.scaled_dot_product_attention(x, w, w),
        lambda x, w: ATTENTION(x, w, w)[0],
        lambda x, w: ATTENTION(x, w, w, need_weights=False)[0],
        lambda x, w: F.cross_entropy(F.linear(x, w), torch.arange(4)),
        lambda x, w: F.mse_loss(F.linear(x, w), x),
        lambda x, w: x * w,
    ],
)
def test_precision_is_that_of_autocast(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(3, 4, 4), torch.randn(3, 4, 4)
    with sdpa_kernel(SDPBackend.MATH):
        with torch.autocast("cpu", torch.bfloat16):
            alone = [function(*pair) for pair in zip(x, w, strict=True)]
        with StackedAutocast(torch.bfloat16):
            stacked = torch.vmap(function)(x, w)
    assert stacked.dtype == alone[0].dtype
    torch.testing.assert_close(stacked, torch.stack(alone), rtol=0.02, atol=0.02)

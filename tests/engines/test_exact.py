"""What is compared is computed with all bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from torch.backends import cuda, cudnn

from pflight.engines.stacked.audit import takes_tf32, without_tf32


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Leave PyTorch's settings as they are by default."""
    yield
    torch.set_float32_matmul_precision("highest")
    cudnn.allow_tf32 = True


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@pytest.mark.parametrize("allowed", [True, False])
def test_settings_are_as_before(precision: str, allowed: bool) -> None:
    torch.set_float32_matmul_precision(precision)
    cudnn.allow_tf32 = allowed
    with suppress(KeyError), without_tf32():
        assert torch.get_float32_matmul_precision() == "highest"
        assert not cudnn.allow_tf32
        raise KeyError
    assert torch.get_float32_matmul_precision() == precision
    assert cudnn.allow_tf32 == allowed


@pytest.mark.skipif(not hasattr(cuda.matmul, "fp32_precision"), reason="PyTorch is too old")
def test_what_is_chosen_for_single_operations_is_left() -> None:
    cudnn.conv.fp32_precision = "ieee"
    cuda.matmul.fp32_precision = "tf32"
    with without_tf32():
        assert cudnn.rnn.fp32_precision == cuda.matmul.fp32_precision == "tf32"
        assert cudnn.conv.fp32_precision == "ieee"
    assert cudnn.rnn.fp32_precision == cuda.matmul.fp32_precision == "tf32"
    cudnn.conv.fp32_precision = "tf32"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_which_devices_take_tf32(device: str) -> None:
    gpu = device == "cuda"
    assert takes_tf32(torch.device(device)) == gpu
    cudnn.allow_tf32 = False
    assert not takes_tf32(torch.device(device))
    torch.set_float32_matmul_precision("high")
    assert takes_tf32(torch.device(device)) == gpu
    if hasattr(cudnn, "conv"):
        torch.set_float32_matmul_precision("highest")
        cudnn.allow_tf32 = True
        cudnn.conv.fp32_precision = "ieee"
        assert takes_tf32(torch.device(device)) == gpu
        cudnn.conv.fp32_precision = "tf32"

"""Arithmetic with known rounding, for comparisons."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import torch
from torch.backends import cudnn


@contextmanager
def without_tf32() -> Iterator[None]:
    """Compute with all bits of float32. A GPU's convolutions use TF32 by default.

    TF32 has 10 bits. A stack and a client alone use different kernels, and so differ in the third
    digit. Settings of single operations (``torch.backends.cudnn.conv.fp32_precision`` and the like)
    are not changed.
    """
    with ExitStack() as at_end:
        with suppress(RuntimeError):  # single operations differ
            precision = torch.get_float32_matmul_precision()
            if precision != "highest":
                at_end.callback(torch.set_float32_matmul_precision, precision)
                torch.set_float32_matmul_precision("highest")
        with suppress(RuntimeError):
            if cudnn.allow_tf32:
                at_end.callback(setattr, cudnn, "allow_tf32", True)
                cudnn.allow_tf32 = False
        yield


def takes_tf32(device: torch.device) -> bool:
    """Return whether a device may compute float32 products in TF32, a GPU's default."""
    if device.type != "cuda":
        return False
    try:
        return cudnn.allow_tf32 or torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # single operations differ
        return True

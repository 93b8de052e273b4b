"""Checksums that identify clients' data, and the bytes behind digests of tensors."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor


def checksum_of(numbers: Tensor, start: int = 0) -> int:
    """Return the CRC-32 of numbers in their order; it depends neither on device nor integer type.

    Args:
        numbers: A vector of integers; floats are taken as float64.
        start: The checksum of the numbers before them.

    Example:
        >>> checksum_of(torch.tensor([1, 2])) == checksum_of(torch.tensor([2, 1]))
        False
    """
    if numbers.dtype is not torch.long:
        numbers = numbers.double() if numbers.is_floating_point() else numbers.long()
    return zlib.crc32(numbers.cpu().numpy().tobytes(), start)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the numbers of a tensor as bytes, without a copy if they lie together on the CPU.

    Example:
        >>> bytes_of(torch.tensor([97, 98], dtype=torch.uint8)).tobytes()
        b'ab'
    """
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def joined(*fingerprints: Tensor) -> Tensor:
    """Combine several fingerprints ``[num_clients]`` into one for each client."""
    return torch.tensor([checksum_of(row) for row in torch.stack(fingerprints, dim=1)])

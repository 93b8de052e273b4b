"""Sums of low-rank products are those of the full matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pflight.adapters import LowRank

DOUBLE = {"dtype": torch.float64}


def random(d: int, k: int, *ranks: int, seed: int = 0) -> tuple[LowRank, Tensor]:
    """Return a sum of products, and the same as a full matrix."""
    draw = torch.Generator().manual_seed(seed)
    terms = [
        (torch.randn(d, r, generator=draw, **DOUBLE), torch.randn(r, k, generator=draw, **DOUBLE))
        for r in ranks
    ]
    return LowRank(terms), sum(left @ right for left, right in terms)  # type: ignore[return-value]


def full(x: LowRank) -> Tensor:
    return x.left @ x.right


def test_arithmetic_is_that_of_full_matrices() -> None:
    (x, dense), (y, other) = random(6, 5, 2, 3), random(6, 5, 1, seed=1)
    torch.testing.assert_close(full(x + y), dense + other)
    torch.testing.assert_close(full(x - y), dense - other)
    torch.testing.assert_close(full(3 * x), 3 * dense)
    torch.testing.assert_close(x.norm(), dense.norm())


def test_a_small_difference_keeps_its_digits() -> None:
    x, _ = random(6, 5, 2)
    y = LowRank([(x.left + 1e-9 * torch.ones_like(x.left), x.right)])
    expected = 1e-9 * (torch.ones_like(x.left) @ x.right).norm()
    torch.testing.assert_close((y - x).norm(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("ranks", [(2,), (3, 4), (7, 7)])
def test_the_decomposition_is_that_of_the_full_matrix(ranks: tuple[int, ...]) -> None:
    x, dense = random(6, 5, *ranks)
    u, s, v = x.svd()
    torch.testing.assert_close(u * s @ v, dense)
    torch.testing.assert_close(s, torch.linalg.svdvals(dense)[: len(s)])
    largest = u.abs().argmax(dim=0)
    assert (u[largest, torch.arange(u.shape[1])] > 0).all()


def test_compression_finds_the_rank() -> None:
    x, dense = random(8, 7, 2)
    wide = x + x + 2 * x
    assert wide.width == 6
    assert wide.compressed().width == 2
    torch.testing.assert_close(full(wide.compressed()), 4 * dense)


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_a_split_is_the_nearest_product_of_its_rank(rank: int) -> None:
    x, dense = random(6, 5, 3)
    sent = torch.zeros(6, rank, **DOUBLE), torch.ones(rank, 5, **DOUBLE)
    b, a = x.split(rank, 2.0, sent)
    u, s, v = torch.linalg.svd(dense)
    kept = min(rank, 3)
    torch.testing.assert_close(2 * b @ a, u[:, :kept] * s[:kept] @ v[:kept])
    torch.testing.assert_close(b[:, :kept].norm(dim=0), a[:kept].norm(dim=1))


def test_directions_that_are_0_have_the_row_that_was_sent() -> None:
    x, _ = random(6, 5, 1)
    sent = torch.full((6, 2), 7.0, **DOUBLE), torch.full((2, 5), 3.0, **DOUBLE)
    b, a = x.split(2, 1.0, sent)
    assert (b[:, 1] == 0).all()
    assert (a[1] == 3).all()
    zero = LowRank([(0 * x.left, x.right)])
    assert all(map(torch.equal, zero.split(2, 1.0, sent), sent))

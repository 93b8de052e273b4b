"""Sums of low-rank products. No matrix of the full size is made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

_ZERO = 1e-12
"""A singular value that is smaller, relative to the largest, counts as 0."""
Split = Literal["balanced", "left"]
"""Which factor gets the singular values: both their roots, or A all of them."""


class LowRank:
    r"""A sum of products, :math:`X = \sum_j L_j M_j`, as two factors ``[d, R]`` and ``[R, k]``.

    Args:
        terms: Pairs of factors ``[d, r_j]`` and ``[r_j, k]``, of one floating-point type.

    Example:
        >>> x = LowRank([(torch.ones(3, 1), torch.ones(1, 2))])
        >>> (2 * x - x).norm()
        tensor(2.4495)
    """

    def __init__(self, terms: Iterable[tuple[Tensor, Tensor]]) -> None:
        left, right = zip(*terms, strict=True)
        self.left = torch.cat(left, dim=1)
        self.right = torch.cat(right, dim=0)

    def __add__(self, other: LowRank) -> LowRank:
        """Return the sum."""
        return LowRank([(self.left, self.right), (other.left, other.right)])

    def __rmul__(self, factor: float | Tensor) -> LowRank:
        """Return the product with a number."""
        return LowRank([(factor * self.left, self.right)])

    def __sub__(self, other: LowRank) -> LowRank:
        """Return the difference."""
        return self + -1.0 * other

    @property
    def width(self) -> int:
        """Number of columns of the left factor, at least the rank."""
        return self.left.shape[1]

    def norm(self) -> Tensor:
        """Return the Frobenius norm, a scalar."""
        # The traces of Gram matrices would lose half of the digits in a small difference.
        return torch.linalg.matrix_norm(self._core()[1])

    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``U [d, n]``, ``S [n]`` and ``V [n, k]``: ``X = U @ diag(S) @ V``.

        S is descending. In each column of U the entry of the largest modulus is positive, by the
        lowest index on ties.
        """
        q, core, z = self._core()
        u, s, v = torch.linalg.svd(core, full_matrices=False)
        u, v = q @ u, v @ z.mT
        largest = u.abs().argmax(dim=0, keepdim=True)
        sign = torch.where(u.gather(0, largest) < 0, -1.0, 1.0).to(u.dtype)
        return u * sign, s, v * sign.mT

    def compressed(self) -> LowRank:
        """Return the same matrix with factors of its numerical rank, at least 1."""
        u, s, v = self.svd()
        rank = max(int((s > _ZERO * s[0]).sum()), 1)
        return LowRank([(u[:, :rank] * s[:rank], v[:rank])])

    def reduced(self, floor: float | Tensor, rank: int | None = None) -> LowRank:
        """Return the nearest matrix without singular values up to a floor.

        Args:
            floor: Singular values up to this number are left out.
            rank: The largest rank; ``None`` for any. The result may have no columns.
        """
        u, s, v = self.svd()
        kept = slice(int((s > floor).sum()) if rank is None else min(int((s > floor).sum()), rank))
        return LowRank([(u[:, kept] * s[kept], v[kept])])

    def split(
        self,
        rank: int,
        scale: float,
        sent: tuple[Tensor, Tensor],
        zero: float = _ZERO,
        split: Split = "balanced",
    ) -> tuple[Tensor, Tensor]:
        r"""Return B ``[d, rank]`` and A ``[rank, k]`` with the nearest ``scale * B @ A``.

        Where a singular value counts as 0, both factors would be 0, and would never have a gradient
        again. Then the row of A is that of what was sent.

        Args:
            rank: Number of columns of B and rows of A.
            scale: The scale of the product.
            sent: B and A as they were sent. They stay as they are if X is 0.
            zero: A singular value counts as 0 if it is not above this part of the largest.
            split: ``"balanced"`` gives both factors the root of the singular values. ``"left"``
                gives them to A: the columns of B are orthonormal.
        """
        u, s, v = self.svd()
        alive = min(int((s > zero * s[0]).sum()), rank)
        if not alive:
            return sent
        b, a = torch.zeros_like(sent[0]), sent[1].clone()
        values = s[:alive] / scale
        root = values.sqrt() if split == "balanced" else torch.ones_like(values)
        b[:, :alive] = u[:, :alive] * root
        a[:alive] = (root if split == "balanced" else values)[:, None] * v[:alive]
        return b, a

    def _core(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``Q``, ``C`` and ``Z`` with ``X = Q @ C @ Z.T`` and orthonormal Q and Z."""
        (q, r), (z, t) = torch.linalg.qr(self.left), torch.linalg.qr(self.right.mT)
        return q, r @ t.mT, z


def basis_of(matrix: Tensor) -> Tensor:
    """Return an orthonormal basis ``[d, rank]`` of a matrix's columns, by its numerical rank."""
    u, s, _ = torch.linalg.svd(matrix, full_matrices=False)
    return u[:, : int((s > 1e-7 * s[0]).sum())] if len(s) and s[0] > 0 else u[:, :0]

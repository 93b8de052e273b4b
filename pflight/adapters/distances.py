"""Distances between the adapters of clients and of a center."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from .low_rank import basis_of
from .pairs import Pair, matrix

DistanceName = Literal["product", "subspace", "cosine_B"]


class AdapterDistance:
    r"""A distance of stacked states ``[C]`` from a center, by their low-rank pairs alone.

    | name | of two pairs | over layers |
    |---|---|---|
    | ``"product"`` | :math:`\|s B A - s B' A'\|_F^2` | sum |
    | ``"subspace"`` | :math:`1 - \|U^\top U'\|_F^2 / \min(r, r')`, U a basis of B | mean |
    | ``"cosine_B"`` | :math:`1 - \langle B, B' \rangle / (\|B\|_F \|B'\|_F)` | mean |

    A turn of the factors, :math:`B Q` and :math:`Q^{-1} A`, changes neither product nor subspace.
    A B of zeros has no subspace and no angle. Its distance to everything is 0.

    Args:
        name: The name of the distance.
        pairs: The pairs.
    """

    def __init__(self, name: DistanceName, pairs: Sequence[Pair]) -> None:
        self.name = name
        self.pairs = pairs

    def __call__(self, states: TensorDict, center: Mapping[str, Tensor]) -> Tensor:
        """Return the distances ``[C]`` in double precision."""
        parts = torch.stack([self._of_layer(states, center, pair) for pair in self.pairs])
        return parts.sum(dim=0) if self.name == "product" else parts.mean(dim=0)

    def _of_layer(self, states: TensorDict, center: Mapping[str, Tensor], pair: Pair) -> Tensor:
        """Return the distances ``[C]`` of one pair."""
        if self.name == "product":
            other = pair.product(center)
            return torch.stack([(pair.product(state) - other).norm() ** 2 for state in states])
        of_one, b = _subspace if self.name == "subspace" else _cosine, matrix(center[pair.b])
        return torch.stack([of_one(matrix(own), b) for own in states[pair.b]])


def _subspace(one: Tensor, other: Tensor) -> Tensor:
    """Return how far the column spaces of two matrices ``[d, r]`` are apart, in [0, 1]."""
    u, v = basis_of(one), basis_of(other)
    if not u.shape[1] or not v.shape[1]:
        return one.new_zeros(())
    return (1 - (u.mT @ v).square().sum() / min(u.shape[1], v.shape[1])).clamp(min=0)


def _cosine(one: Tensor, other: Tensor) -> Tensor:
    """Return 1 minus the cosine of two matrices ``[d, r]`` as vectors, in [0, 2]."""
    norms = one.norm() * other.norm()
    return 1 - (one * other).sum() / norms if norms else one.new_zeros(())


def subspaces(factors: Tensor) -> Tensor:
    """Return orthonormal bases ``[C, d, r]`` of the columns of factors B, in double precision.

    Columns beyond a factor's numerical rank are 0.

    Args:
        factors: One factor B of each client ``[C, d, r]``; kernels of convolutions are flattened.
    """
    found = torch.zeros_like(factors.flatten(2), dtype=torch.double)
    for own, factor in zip(found, factors, strict=True):
        basis = basis_of(matrix(factor))
        own[:, : basis.shape[1]] = basis
    return found


def subspace_distances(one: Tensor, other: Tensor) -> Tensor:
    """Return the distances ``"subspace"`` of all pairs of :func:`subspaces`, of one layer.

    Args:
        one: Bases ``[C, d, r]``.
        other: Bases ``[M, d, r]``.

    Returns:
        Distances ``[C, M]``, each as in :class:`AdapterDistance`.
    """
    common = other.new_zeros(len(one), len(other))
    for row, basis in enumerate(one):
        common[row] = (basis.mT @ other).square().sum(dim=(1, 2))
    ranks = torch.minimum(_ranks(one)[:, None], _ranks(other))
    return torch.where(ranks > 0, 1 - common / ranks.clamp(min=1), 0.0).clamp(min=0)


def _ranks(bases: Tensor) -> Tensor:
    return bases.any(dim=1).sum(dim=1)

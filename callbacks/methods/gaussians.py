"""Gaussian features of classes with one covariance, and the linear discriminant between them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import log_softmax
from torch import Tensor

Floats = NDArray[np.float64]


class Gaussians(NamedTuple):
    """Means ``[K, d]`` of classes, and their common covariance ``[d, d]``."""

    means: Tensor
    covariance: Tensor

    def of(self, z: Tensor, y: Tensor, ridge: float) -> Gaussians:
        """Return Gaussians of features ``[n, d]`` of classes ``[n]``; missing classes keep means.

        Args:
            z: The features.
            y: The classes.
            ridge: Multiple of the identity that is added to the covariance.
        """
        rows = (y.unsqueeze(1) == torch.arange(len(self.means), device=y.device)).to(z)
        sizes = rows.sum(0).unsqueeze(1)
        means = torch.where(sizes > 0, rows.T @ z / sizes.clamp(min=1), self.means)
        rest = z - means[y]
        identity = torch.eye(z.shape[1]).to(z)
        return Gaussians(means, rest.T @ rest / max(len(z) - 1, 1) + ridge * identity)

    def mixed(self, local: Gaussians, share: Tensor) -> Gaussians:
        """Return a mixture, with a share of local means and a share of local covariance."""
        return Gaussians(
            torch.lerp(self.means, local.means, share[0]),
            torch.lerp(self.covariance, local.covariance, share[-1]),
        )

    def head(self, prior: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return weight ``[K, d]`` and bias ``[K]`` of the linear discriminant.

        Args:
            prior: Prior of the classes ``[K]``.
            eps: Share of a multiple of the identity in the covariance.
        """
        weight = torch.linalg.solve(self._regular(eps), self.means.T).T
        return weight, prior.log() - (self.means * weight).sum(1) / 2

    def axes(self, local: Gaussians, eps: float) -> tuple[Tensor, Tensor]:
        """Return feature axes ``[d, d]`` that make both covariances diagonal.

        Along these axes, the common covariance is the identity. The variances of the local one
        ``[d]`` are returned, too. Every mixture of both is diagonal.
        """
        variances, turned = torch.linalg.eigh(self._regular(eps))
        least = torch.finfo(variances.dtype).eps * variances.amax()
        white = turned * variances.clamp(min=least).rsqrt()
        variances, turned = torch.linalg.eigh(white.T @ local._regular(eps) @ white)
        return white @ turned, variances.clamp(min=0)

    def _regular(self, eps: float) -> Tensor:
        ridge = self.covariance.diagonal().mean() * torch.eye(len(self.covariance)).to(self.means)
        return torch.lerp(self.covariance, ridge, eps)


class Judged(NamedTuple):
    """Mixtures of common and local Gaussians, judged by samples.

    All values are along the axes of :meth:`Gaussians.axes`. So a mixture needs no linear algebra.
    """

    common: Floats  # means [K, d]
    local: Floats  # means [K, d]
    variances: Floats  # local ones [d]
    prior: Floats  # of the classes [K], its logarithm
    z: Floats  # features [n, d]
    y: NDArray[np.int64]  # classes [n]

    @classmethod
    def of(
        cls, common: Gaussians, local: Gaussians, eps: float, prior: Tensor, z: Tensor, y: Tensor
    ) -> Judged:
        """Return mixtures of Gaussians, judged by features ``[n, d]`` of classes ``[n]``."""
        axes, variances = common.axes(local, eps)
        along = common.means @ axes, local.means @ axes, variances, prior.log(), z @ axes, y
        return cls(*(part.cpu().numpy() for part in along))

    def loss(self, share: float, spread: float) -> tuple[float, Floats]:
        """Return the discriminant's mean cross-entropy, and its derivatives ``[2]``.

        Args:
            share: Share of the local means.
            spread: Share of the local covariance.
        """
        apart, wider = self.local - self.common, self.variances - 1
        means, variances = self.common + share * apart, 1 + spread * wider
        weight = means / variances
        by_share, by_spread = apart / variances, -weight * wider / variances
        bias = self.prior - (means * weight).sum(1) / 2
        logs = log_softmax(self.z @ weight.T + bias, axis=1)
        places = np.arange(len(self.y)), self.y
        errors = np.exp(logs)
        errors[places] -= 1
        by_weight, by_bias = errors.T @ self.z, errors.sum(0)
        slopes = [
            (by_weight * by_share).sum() - by_bias @ (means * by_share).sum(1),
            (by_weight * by_spread).sum() - by_bias @ (means * by_spread).sum(1) / 2,
        ]
        return -float(logs[places].mean()), np.array(slopes) / len(self.y)

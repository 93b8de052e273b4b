"""Means over a batch of which some samples only fill it up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_OF_CLASSES: set[Callable[..., Any]] = {F.cross_entropy, F.nll_loss}
_OF_NUMBERS: set[Callable[..., Any]] = {
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.huber_loss,
    F.kl_div,
    F.l1_loss,
    F.mse_loss,
    F.smooth_l1_loss,
}
_DIVIDED_BY_WEIGHTS: set[Callable[..., Any]] = {F.huber_loss, F.l1_loss, F.mse_loss}


class WeightedMeans(TorchFunctionMode):
    """Lets the losses of ``torch.nn.functional`` weigh the samples where they take their mean.

    A mean that is taken otherwise counts all samples alike, and so does one of other tensors than
    batches. Whether a client's whole loss can be weighted has to be tried.

    Args:
        weights: Of the samples ``[batch]``, summing to 1.

    Example:
        >>> import torch
        >>> with WeightedMeans(torch.tensor([0.5, 0.5, 0.0])):
        ...     F.mse_loss(torch.tensor([1.0, 3.0, 9.0]), torch.zeros(3))
        tensor(5.)
    """

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.weights = weights

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        reduction = kwargs.get("reduction")
        if function in _OF_CLASSES and reduction == "mean" and not args[1].is_floating_point():
            return self._mean_over_classes(function, args, kwargs)
        divided = function in _DIVIDED_BY_WEIGHTS and kwargs.get("weight") is not None
        known = function in _OF_NUMBERS | _OF_CLASSES and not divided
        if not known or reduction not in ("mean", "batchmean"):
            return function(*args, **kwargs)
        losses = function(*args, **{**kwargs, "reduction": "none"})
        if losses.dim() > 1:
            losses = losses.flatten(1)
            losses = losses.sum(1) if reduction == "batchmean" else losses.mean(1)
        return (losses * self.weights.to(losses.dtype)).sum()

    def _mean_over_classes(self, function: Any, args: Any, kwargs: Any) -> Tensor:
        """Return the mean over labels, of which some may be ignored, or weigh by their class."""
        losses = function(*args, **{**kwargs, "reduction": "none"})
        labels, of_classes = args[1], kwargs.get("weight")
        counted = (labels != kwargs.get("ignore_index", -100)).to(losses.dtype)
        if of_classes is not None:
            counted = counted * of_classes[labels.clamp(min=0)].to(losses.dtype)
        weights = self.weights.to(losses.dtype).view(-1, *[1] * (losses.dim() - 1))
        return (losses * weights).sum() / (counted * weights).sum()

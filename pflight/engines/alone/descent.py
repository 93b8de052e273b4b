"""Gradient descent without the overhead of ``torch.optim`` around every step."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.sgd import sgd

_OPTIONS = (
    "lr",
    "momentum",
    "dampening",
    "weight_decay",
    "nesterov",
    "maximize",
    "foreach",
    "fused",
)


def steps_only(optimizer: Optimizer, own: Container[int]) -> bool:
    """Return whether an optimizer steps only these parameters, given by ``id``."""
    return all(id(p) in own for group in optimizer.param_groups for p in group["params"])


class Descent:
    """Takes a client's steps of SGD with the arithmetic of ``zero_grad``, ``backward``, ``step``.

    PyTorch's calls look for hooks, profilers and graphs. This takes longer than the step of a small
    network itself. Here gradients are never stored in the parameters.

    Args:
        optimizer: The client's optimizer. It must pass :meth:`suits`.

    Example:
        >>> w = torch.nn.Parameter(torch.tensor([3.0]))
        >>> Descent(SGD([w], lr=0.5)).step((w - 1).square().sum())
        >>> w.detach()
        tensor([1.])
    """

    def __init__(self, optimizer: Optimizer) -> None:
        groups = optimizer.param_groups
        self._parameters = [parameter for group in groups for parameter in group["params"]]
        self._groups = [(len(group["params"]), _options(group)) for group in groups]
        self._momenta: list[Tensor | None] = [None] * len(self._parameters)

    @staticmethod
    def suits(optimizers: Sequence[Optimizer]) -> bool:
        """Return whether this is one plain SGD of torch, and nothing waits for its steps."""
        if len(optimizers) != 1 or type(optimizers[0]) is not SGD:
            return False
        (optimizer,) = optimizers
        return (
            "step" not in vars(optimizer)  # a learning-rate scheduler counts the steps
            and not optimizer._optimizer_step_pre_hooks
            and not optimizer._optimizer_step_post_hooks
            and not any(group["differentiable"] for group in optimizer.param_groups)
            # A fused step needs gradients with their parameters' strides, as backward() makes them.
            and not any(group["fused"] for group in optimizer.param_groups)
            and all(p.requires_grad for group in optimizer.param_groups for p in group["params"])
        )

    @property
    def options(self) -> list[dict[str, Any]]:
        """The options of the groups of parameters."""
        return [options for _, options in self._groups]

    def step(self, loss: Tensor) -> None:
        """Step along the gradient of a scalar. Independent parameters don't change."""
        awake = [place for place, p in enumerate(self._parameters) if p.requires_grad]
        found = torch.autograd.grad(
            loss, [self._parameters[place] for place in awake], allow_unused=True
        )
        gradients = dict(zip(awake, found, strict=True))
        first = 0
        with torch.no_grad():
            for count, options in self._groups:
                places = range(first, first + count)
                first = places.stop
                used = [place for place in places if gradients.get(place) is not None]
                momenta = [self._momenta[place] for place in used]
                sgd(
                    [self._parameters[place] for place in used],
                    [gradients[place] for place in used],
                    momenta,
                    has_sparse_grad=any(gradients[place].is_sparse for place in used),
                    **options,
                )
                for place, momentum in zip(used, momenta, strict=True):
                    self._momenta[place] = momentum


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group. ``foreach`` is PyTorch's own choice."""
    options = {name: group[name] for name in _OPTIONS}
    if options["foreach"] is None and all(p.device.type == "cpu" for p in group["params"]):
        options["foreach"] = False  # as PyTorch decides in every step
    return options

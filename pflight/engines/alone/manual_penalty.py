"""A penalty under manual optimization. No loss is known, so each step adds its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Penalty = Callable[[], Tensor | None]
"""Returns the scalar to add to the loss, or nothing."""


def penalise(optimizer: Optimizer, penalty: Penalty) -> None:
    """Add a penalty's gradient to an optimizer's steps: after its closure, if it has one."""

    def penalised(
        _: Optimizer, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = options.get("closure") or next(iter(args[1:]), None)
        if closure is None:
            _add_gradient(optimizer, penalty)
            return None

        def with_penalty() -> Any:
            output = closure()
            _add_gradient(optimizer, penalty)
            return output

        return args[:1], {**options, "closure": with_penalty}

    optimizer.register_step_pre_hook(penalised)


@torch.enable_grad()
def _add_gradient(optimizer: Optimizer, penalty: Penalty) -> None:
    """Add the gradient of a penalty to the gradients of an optimizer's parameters."""
    value = penalty()
    if value is None:
        return
    parameters = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    ]
    gradients = torch.autograd.grad(value, parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            held = parameter.grad
            parameter.grad = gradient if held is None else held + gradient

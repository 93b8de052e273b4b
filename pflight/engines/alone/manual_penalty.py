"""A penalty under manual optimization, where no loss is seen: its gradient, added at each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Penalty = Callable[[], Tensor | None]
"""Gives what is added to the loss, a scalar, or nothing."""


def penalise(optimizer: Optimizer, penalty: Penalty) -> None:
    """Have an optimizer step along a penalty's gradient, too: after its closure, if it has one."""

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
    """Add the gradient of a penalty to those that an optimizer steps along."""
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

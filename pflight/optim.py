"""Server optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from .options import PositiveFloat, check_range, checked


@checked
class Yogi(Optimizer):
    r"""Yogi (Zaheer et al. 2018), as the server of FedYogi (Reddi et al. 2021, algorithm 2).

    The second moment changes by a step of the size of the squared gradient. In Adam it decays:

    .. math:: m \leftarrow \beta_1 m + (1 - \beta_1) g, \qquad
        v \leftarrow v - (1 - \beta_2)\, g^2 \operatorname{sign}(v - g^2), \qquad
        \theta \leftarrow \theta - \frac{\eta\, m}{\sqrt{v} + \tau}

    starting at :math:`m = 0` and :math:`v = \tau^2`, without bias correction.

    Args:
        params: Parameters, or groups of them.
        lr: Step size :math:`\eta`.
        betas: :math:`\beta_1` and :math:`\beta_2`.
        eps: :math:`\tau`, the degree of adaptivity: the larger, the less adaptive.


    Example:
        >>> weight = torch.nn.Parameter(torch.tensor(1.0))
        >>> optimizer = Yogi([weight], lr=0.1, betas=(0.0, 0.0), eps=1.0)
        >>> weight.grad = torch.tensor(3.0)
        >>> optimizer.step()  # v rises from 1 to 10
        >>> round(weight.item(), 4)
        0.9279

    References:
        Zaheer et al., Adaptive Methods for Nonconvex Optimization, NeurIPS 2018. Reddi et al.,
        Adaptive Federated Optimization, ICLR 2021, https://arxiv.org/abs/2003.00295.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: PositiveFloat = 0.01,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: PositiveFloat = 1e-3,
    ) -> None:
        for beta in betas:
            check_range(self, "[0, 1)", betas=beta)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every parameter that has a gradient. Return the closure's result, if any."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                    state["square"] = torch.full_like(parameter, group["eps"] ** 2)
                mean, square = state["mean"], state["square"]
                squared = parameter.grad.square()
                mean.lerp_(parameter.grad, 1 - beta1)
                square.addcmul_(squared, (square - squared).sign(), value=beta2 - 1)
                parameter.addcdiv_(mean, square.sqrt().add_(group["eps"]), value=-group["lr"])
        return loss


def is_plain_step(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is SGD with step size 1, and nothing else.

    Example:
        >>> is_plain_step(torch.optim.SGD([torch.ones(1)], lr=1.0))
        True
    """
    plain = {"lr": 1, "momentum": 0, "weight_decay": 0, "maximize": False}
    return type(optimizer) is torch.optim.SGD and all(
        group[name] == value for group in optimizer.param_groups for name, value in plain.items()
    )

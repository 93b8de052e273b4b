"""The client of SCAFFOLD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from pflight.errors import ConfigurationError
from pflight.options import checked

from .client import ClientModule
from .corrected import CorrectedClient


@checked
class ScaffoldClient(CorrectedClient):
    r"""A client that corrects its drift by control variates.

    With the server's control variate :math:`c` and its own, :math:`c_i`, which starts at 0, every
    step is :math:`y \leftarrow y - \eta\,(g(y) + c - c_i)` (Karimireddy et al. 2020, eq. 3). After
    :math:`K` steps from :math:`x` its own becomes (eq. 4)

    .. math:: c_i^+ = \nabla f_i(x) \;\text{(option I)}, \qquad
        c_i^+ = c_i - c + \frac{x - y}{K\eta} \;\text{(option II)}

    and it sends :math:`y` and :math:`c_i^+ - c_i`. Control variates are over parameters, not
    buffers. Option I takes one more pass over the client's samples. Option II takes the mean
    gradient from the path, which only plain SGD allows; weight decay counts as part of the loss.

    Args:
        *args: As in :class:`ClientModule`.
        option: ``"I"`` or ``"II"``.
        **kwargs: As in :class:`ClientModule`.

    Raises:
        ConfigurationError: If the option is unknown, or option II meets momentum, clipping or
            another optimizer than SGD.

    Example:
        >>> client = ScaffoldClient(torch.nn.Linear(4, 2), num_classes=2)
        >>> client.control.tensors()["network.bias"]
        tensor([0., 0.])

    References:
        Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML
        2020, https://arxiv.org/abs/1910.06378.
    """

    keeps_memory: ClassVar[bool] = True

    def __init__(self, *args: Any, option: Literal["I", "II"] = "II", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.option = option
        self.control = self._zeros()  # c as it comes, the change of c_i as it goes
        if option == "I":
            self.gradient = self._zeros()  # of f_i at what the server sent
        else:
            self.lr = self._plain_step()

    def own_control(self) -> dict[str, Tensor]:
        """Return :math:`c_i` by parameter name, as it was before this round."""
        if self.memory is None:
            return {name: torch.zeros_like(c) for name, c in self.control.tensors().items()}
        kept = self.memory.tensors()
        return {name: self.seen * kept[f"control.{name}"] for name in self.control.tensors()}

    def direction(self) -> Mapping[str, Tensor]:
        """Return :math:`c - c_i` by parameter name."""
        own = self.own_control()
        return {name: control - own[name] for name, control in self.control.tensors().items()}

    def after_training(self) -> None:
        """Put the change of :math:`c_i` where :math:`c` was; none if no step was taken."""
        assert self.anchor is not None
        weights, own = dict(self.named_parameters()), self.own_control()
        for name, sent in self.anchor.tensors().items():
            control = self.control.tensors()[name]
            if self.option == "I":
                change = self.gradient.tensors()[name] - own[name]
            else:
                change = (sent - weights[name]) / (self.num_steps * self.lr) - control
            control.copy_(torch.where(self.num_steps > 0, change, 0.0))

    def remember(self) -> Mapping[str, Tensor]:
        """Return :math:`c_i^+`, all that this client keeps."""
        own = self.own_control()
        return {f"control.{name}": own[name] + c for name, c in self.control.tensors().items()}

    def _plain_step(self) -> float:
        """Return the step of plain SGD, or raise if the client trains by anything else."""
        optimizer = self.optimizer([p for p in self.parameters() if p.requires_grad])
        groups = optimizer.param_groups
        steps = {float(group["lr"]) for group in groups}
        reason = ""
        if type(optimizer) is not torch.optim.SGD:
            reason = type(optimizer).__name__
        elif any(group["momentum"] for group in groups):
            reason = f"momentum={max(group['momentum'] for group in groups)}"
        elif any(group["maximize"] for group in groups):
            reason = "maximize=True"
        elif len(steps) > 1 or not min(steps) > 0:
            reason = f"lr={', '.join(map(str, sorted(steps)))}"
        elif self.gradient_clip_val is not None:
            reason = f"gradient_clip_val={self.gradient_clip_val}"
        for hook in ("configure_optimizers", "configure_gradient_clipping"):
            if getattr(type(self), hook) is not getattr(ClientModule, hook):
                reason = f"its own {hook}"
        if reason:
            raise ConfigurationError(
                f"ScaffoldClient: option II needs plain SGD with one positive lr, got {reason}; "
                "use option I"
            )
        return steps.pop()

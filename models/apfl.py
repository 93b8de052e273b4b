"""The client of APFL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.func import grad_and_value

from pflight.options import check_range, checked

from .client import Batch
from .personal import PersonalClient


@checked
class APFLClient(PersonalClient):
    r"""A client whose personal model is a mixture of its own and the shared one.

    With :math:`\bar v = \alpha v + (1 - \alpha) w` both are stepped on every batch,

    .. math:: w \leftarrow w - \eta \nabla f_i(w), \qquad
        v \leftarrow v - \eta \alpha \nabla f_i(\bar v)

    (Deng et al. 2020, algorithm 1), by one optimizer whose loss is :math:`f_i(w) + f_i(\bar v)`,
    with :math:`w` held fixed in the second term; the gradients of :math:`w` and of :math:`v` are
    clipped by the norm of each. On the first batch of a round an adaptive :math:`\alpha` takes the
    step

    .. math:: \alpha \leftarrow \operatorname{clip}
        (\alpha - \eta_\alpha \langle \nabla f_i(\bar v), v - w \rangle, 0, 1),

    which counts from the second batch on. Each model has buffers of its own; a pass of the mixture
    updates those of :math:`v`. Without an anchor, as in fine-tuning and centralized training, this
    is a plain client.

    Args:
        *args: As in :class:`ClientModule`.
        alpha: Share :math:`\alpha` of the client's own model, or where it starts: 1 trains alone,
            0 follows the server.
        alpha_lr: Step :math:`\eta_\alpha`, in the paper :math:`\eta`; ``None`` leaves
            :math:`\alpha` fixed.
        **kwargs: As in :class:`ClientModule`.

    Raises:
        ConfigurationError: If an option is out of range.

    Example:
        >>> client = APFLClient(torch.nn.Linear(4, 2), num_classes=2, alpha=0.75)
        >>> client.alpha
        tensor(0.7500)

    References:
        Deng et al., Adaptive Personalized Federated Learning, 2020,
        https://arxiv.org/abs/2003.13461.
    """

    alpha: Tensor
    alpha_due: Tensor

    averages_samples: ClassVar[bool] = True

    def __init__(
        self, *args: Any, alpha: float = 0.5, alpha_lr: float | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        check_range(self, "[0, 1]", alpha=alpha)
        check_range(self, "(0, inf)", alpha_lr=alpha_lr)
        self.alpha_lr = alpha_lr
        dtype = next(self.network.parameters()).dtype
        self.register_buffer("alpha", torch.tensor(alpha, dtype=dtype))
        self.register_buffer("alpha_due", torch.tensor(1.0, dtype=dtype))

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of the shared model plus that of the mixture."""
        if self.anchor is None:
            return super().loss(batch)
        return super().loss(batch) + self.mixed_loss(batch)

    def mixed_loss(self, batch: Batch) -> Tensor:
        """Return the loss of the mixture, which depends on the client's own model alone."""
        own, statistics = self.personal_weights(), self.personal_statistics()
        shared = {name: w.detach() for name, w in self.weights().items()}
        alpha = self.alpha.clone()
        mixed = {name: alpha * v + (1 - alpha) * shared[name] for name, v in own.items()}
        if self.alpha_lr is None:
            return self.loss_at(mixed, batch, statistics)
        fixed = {name: value.detach() for name, value in mixed.items()}
        with torch.no_grad():
            gradients, loss = grad_and_value(self.loss_at)(fixed, batch, statistics)
            slope = inner_product(gradients, {n: v - shared[n] for n, v in own.items()})
            stepped = (alpha - self.alpha_lr * slope).clamp(0, 1)
            self.alpha.copy_(torch.where(self.alpha_due > 0, stepped, alpha))
            self.alpha_due.zero_()
        return loss + inner_product(gradients, {n: mixed[n] - fixed[n] for n in mixed})

    def after_training(self) -> None:
        r"""Have :math:`\alpha` adapt again in the next round."""
        self.alpha_due.fill_(1)


def inner_product(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Tensor:
    """Return the scalar product of two vectors that are given by name."""
    return torch.stack([(value * right[name]).sum() for name, value in left.items()]).sum()

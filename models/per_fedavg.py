"""The client of Per-FedAvg."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.func import grad
from torch.optim import Optimizer

from pflight.options import check_range, checked

from .client import Batch
from .personal import RelocatedClient


@checked
class PerFedAvgClient(RelocatedClient):
    r"""A client that trains for how well its model does after one step of adaptation.

    On parts D, D' and D'' of each batch, a step goes down :math:`f_i(\theta')` (Fallah et al. 2020,
    algorithm 1), where

    .. math:: \theta' = \theta - \alpha \nabla f_i(\theta; D), \qquad
        g = \nabla f_i(\theta'; D') \;\text{(FO)}, \qquad
        g - \alpha \nabla^2 f_i(\theta; D'')\, g \;\text{(Hessian)},

    the gradient being fed to the optimizer, whose step is the paper's :math:`\beta`. The product
    with the Hessian is exact, by differentiating twice. The parts are halves of the batch for the
    first-order method and thirds with the Hessian; where a part would be a single sample, each is
    the whole batch. Buffers are updated by the pass over D alone.

    Without an anchor this is a plain client. A federation then adapts it, and does so by SGD with
    step :math:`\alpha`; training it alone takes its own optimizer. ``gradient_clip_val`` is for
    the gradients that the optimizer is fed: steps of adaptation are not clipped.

    Args:
        *args: As in :class:`ClientModule`.
        alpha: Step :math:`\alpha` of the adaptation; 0 gives plain training on whole batches.
        hessian: Whether to differentiate through the adaptation.
        **kwargs: As in :class:`ClientModule`.

    Raises:
        ConfigurationError: If an option is out of range.

    Example:
        >>> client = PerFedAvgClient(torch.nn.Linear(4, 2), num_classes=2, hessian=True)
        >>> [len(y) for _, y in client.parts((torch.zeros(8, 4), torch.zeros(8)))]
        [3, 3, 2]

    References:
        Fallah et al., Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
        Meta-Learning Approach, NeurIPS 2020, https://arxiv.org/abs/2002.07948.
    """

    def __init__(
        self, *args: Any, alpha: float = 0.01, hessian: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        check_range(self, "[0, inf)", alpha=alpha)
        self.alpha = alpha
        self.hessian = hessian

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of the adapted model."""
        if self.anchor is None or not self.alpha:
            return super().loss(batch)
        adapt, judge, *curve = self.parts(batch)
        weights = self.weights()
        fixed = {name: w.detach() for name, w in weights.items()}
        with torch.no_grad():
            steps = grad(self.loss_at)(fixed, adapt, self.statistics())
        if self.hessian:  # of value 0, with the derivative of a gradient over D''
            (curve_part,) = curve
            bent = grad(self.loss_at)(weights, curve_part, self._copies())
            steps = {n: step + bent[n] - bent[n].detach() for n, step in steps.items()}
        adapted = {n: w - self.alpha * steps[n] for n, w in weights.items()}
        return self.loss_at(adapted, judge, self._copies())

    def parts(self, batch: Batch) -> list[Batch]:
        """Return the parts of a batch: D, D' and, with the Hessian, D''."""
        x, y = batch
        count = 3 if self.hessian else 2
        if len(y) < 2 * count:
            return [batch] * count
        return list(zip(x.tensor_split(count), y.tensor_split(count), strict=True))

    def configure_optimizers(self) -> Optimizer:
        r"""Build the optimizer; where a federation adapts the client, SGD with :math:`\alpha`."""
        if not self._adapts:
            return super().configure_optimizers()
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.alpha)

    def clip_groups(self) -> list[list[nn.Parameter]]:
        """Return all parameters, or none while a federation adapts the client."""
        return [] if self._adapts else super().clip_groups()

    @property
    def _adapts(self) -> bool:
        """Whether this is the adaptation, in a federation, and not training."""
        alone = self._trainer is None or isinstance(self._trainer, L.Trainer)
        return self.anchor is None and not alone

    def _copies(self) -> dict[str, Tensor]:
        """Return copies of the network's buffers, for passes that leave them as they are."""
        return {name: value.clone() for name, value in self.statistics().items()}

"""The proximal client of FedProx and FeSEM."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from pflight.options import check_range, checked

from .client import Batch, ClientModule


@checked
class ProximalClient(ClientModule):
    r"""A client whose parameters are pulled towards what the server sent.

    With ``scaling="plain"`` the penalty is :math:`\frac{\mu}{2}\|w - w_{\text{anchor}}\|^2`
    (FedProx, Li et al. 2020, eq. 2). With ``scaling="eq7"`` it is
    :math:`\lambda_i\|w - w_{\text{anchor}}\|^2` with :math:`\lambda_i = \mu\,\bar n / n_i`
    (FeSEM, Long et al. 2022, eq. 7 divided by :math:`\alpha_i`, so that the step size keeps its
    meaning), where :math:`n_i` is ``num_samples``, :math:`\bar n` is ``mean_samples``, and
    :math:`\mu` the paper's :math:`\lambda`. Norms are over parameters, not buffers.

    Args:
        *args: As in :class:`ClientModule`.
        mu: Weight of the penalty; 0 gives plain training.
        scaling: ``"plain"`` or ``"eq7"``.
        **kwargs: As in :class:`ClientModule`.

    Raises:
        ConfigurationError: If an option is out of range.

    Example:
        >>> ProximalClient(torch.nn.Linear(4, 2), num_classes=2, mu=0.1).penalty()
        tensor(0.)
    """

    averages_samples: ClassVar[bool] = True
    fedavg_name: ClassVar[str] = "FedProx"
    """What FedAvg is called with this client."""

    def __init__(
        self,
        *args: Any,
        mu: float = 0.1,
        scaling: Literal["plain", "eq7"] = "plain",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        check_range(self, "[0, inf)", mu=mu)
        self.mu = mu
        self.scaling = scaling

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean cross-entropy plus the proximal penalty."""
        return super().loss(batch) + self.penalty()

    def penalty(self) -> Tensor:
        """Return the scalar penalty; 0 where there is no anchor."""
        if self.anchor is None:
            return torch.zeros((), device=self.device)
        distance = self.squared_distance(self.anchor)
        if self.scaling == "plain":
            return self.mu / 2 * distance
        return self.mu * self.mean_samples / self.num_samples * distance

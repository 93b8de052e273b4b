"""The client of FedDANE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .corrected import CorrectedClient
from .proximal import ProximalClient


class DaneClient(CorrectedClient, ProximalClient):
    r"""A proximal client whose gradients are corrected to the mean gradient of several clients.

    In the second phase of a round it minimises

    .. math:: f_i(w) + \langle g - \nabla f_i(\theta),\, w - \theta \rangle
        + \frac{\mu}{2}\|w - \theta\|^2

    (FedDANE, Li et al. 2019, algorithm 2), with :math:`\theta` what the server sent and :math:`g`
    the mean gradient at :math:`\theta`. The correction is over parameters and without a gradient
    from the server, as in the first phase, it is 0.

    Args:
        *args: As in :class:`ClientModule`.
        **kwargs: As in :class:`ProximalClient`.

    Example:
        >>> import torch
        >>> client = DaneClient(torch.nn.Linear(4, 2), num_classes=2, mu=0.1)
        >>> client.correction.tensors()["network.bias"]
        tensor([0., 0.])

    References:
        Li et al., FedDANE: A Federated Newton-Type Method, 2019, https://arxiv.org/abs/2001.01920.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.correction = self._zeros()

    def direction(self) -> Mapping[str, Tensor]:
        r"""Return :math:`g - \nabla f_i(\theta)` by parameter name."""
        return self.correction.tensors()

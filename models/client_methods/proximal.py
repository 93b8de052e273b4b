"""The client method of FedProx and FeSEM, and of Ditto's personal model."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from pflight.local_client import LocalClient
from pflight.method import ClientMethod
from pflight.modifiers import pull
from pflight.options import NonNegativeFloat, checked


@checked
class Proximal(ClientMethod):
    r"""Pulls a client's parameters towards the server's.

    With ``scaling="plain"`` the penalty is :math:`\frac{\mu}{2}\|w - w_{\text{anchor}}\|^2`
    (FedProx, Li et al. 2020, eq. 2). With ``scaling="eq7"`` it is
    :math:`\lambda_i\|w - w_{\text{anchor}}\|^2` with :math:`\lambda_i = \mu\,\bar n / n_i` (FeSEM,
    Long et al. 2022, eq. 7 divided by :math:`\alpha_i`, so that the step size keeps its meaning).
    Here :math:`n_i` is the client's number of samples, :math:`\bar n` the mean number, and
    :math:`\mu` the paper's :math:`\lambda`. Norms are over parameters that are sent.
    :class:`pflight.modifiers.Proximal` is the same term for any method.

    Args:
        mu: Weight of the penalty; 0 gives plain training.
        scaling: ``"plain"`` or ``"eq7"``.
    """

    fedavg_name = "FedProx"

    def __init__(
        self, mu: NonNegativeFloat = 0.1, scaling: Literal["plain", "eq7"] = "plain"
    ) -> None:
        self.mu = mu
        self.scaling = scaling

    @property
    def needs_mean_samples(self) -> bool:  # type: ignore[override]
        """Whether the penalty depends on the mean number of samples."""
        return self.scaling == "eq7"

    def penalty(self, c: LocalClient) -> Tensor | None:
        """Return the scalar penalty; none if nothing was sent, as in fine-tuning."""
        return pull(c, self.mu, self.scaling)

"""FedEC: Reptile whose clients are held to their own historical model."""

from __future__ import annotations

from typing import Any, Literal

from pflight.half import Half
from pflight.models.halves.elastic import Elastic
from pflight.options import checked

from .reptile import CONSTRAINED, Reptile


@checked
class FedEC(Reptile):
    r"""FedEC (Lan et al. 2023, algorithm 1): an elastically constrained meta-learner.

    The server is Reptile's (eq. 8). Each client is held to the model that it had after its last
    participation, as :class:`~pflight.models.halves.Elastic` says, and is judged by it.

    Args:
        alpha: Weight of the constraint; with 0 this is FedEC-wo.
        constraint: ``"kl"``, ``"l2"`` or ``None``.
        weighting: As in :class:`Reptile`.
        lr: As in :class:`Reptile`.
        decay: As in :class:`Reptile`.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.

    Raises:
        ConfigurationError: If an option is out of range, or the constraint is ``"kl"`` and the
            clients' module has no classes.

    Example:
        >>> FedEC(alpha=0.5, constraint="l2").half.alpha
        0.5

    References:
        Lan et al., Elastically-Constrained Meta-Learner for Federated Learning, 2023,
        https://arxiv.org/abs/2306.16703.
    """

    def __init__(
        self,
        alpha: float = 1.0,
        constraint: Literal["kl", "l2"] | None = "kl",
        weighting: Literal["uniform", "samples"] = "uniform",
        lr: float = 1.0,
        decay: Literal["linear"] | None = None,
        buffers: Literal["shared", "local", "reset"] = "shared",
    ) -> None:
        super().__init__(weighting, lr, decay, buffers)
        self._half = self.make_half(Elastic, alpha=alpha, constraint=constraint)

    @property
    def algorithm_name(self) -> str:
        """FedEC, and which constraint it has."""
        half: Any = self.federation.client_half
        return CONSTRAINED[half.constraint]

    @property
    def half(self) -> Half:
        """The elastic constraint."""
        return self._half

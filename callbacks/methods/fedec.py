"""FedEC: Reptile with a constraint that keeps clients near their own historical models."""

from __future__ import annotations

from typing import Literal

from pflight.models.client_methods.elastic import Elastic
from pflight.options import checked

from .registry import Method
from .reptile import Reptile


@checked
class FedEC(Reptile):
    r"""FedEC (Lan et al. 2023, algorithm 1): an elastically constrained meta-learner.

    The server is Reptile's (eq. 8). Each client is constrained to stay near the model that it had
    after its last participation, as in :class:`~pflight.models.client_methods.Elastic`, and is
    judged by that model. Each round logs the mean of the constraint over the clients' steps, with
    its weight, as ``fedec/constraint``; clients without a history don't count.

    Args:
        alpha: Weight of the constraint; with 0 this is FedEC-wo. By default 1, or the value of the
            client module's own client method.
        constraint: ``"kl"``, ``"l2"`` or ``None``.
        weighting: As in :class:`Reptile`.
        lr: As in :class:`Reptile`.
        decay: As in :class:`Reptile`.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.
        forget: As in :class:`~pflight.models.client_methods.Elastic`, for data that drift.

    Raises:
        ConfigurationError: If an option is out of range, or the constraint is ``"kl"`` and the
            clients' module has no classes.

    Example:
        >>> FedEC(alpha=0.5, constraint="l2").client_method.alpha
        0.5

    References:
        Lan et al., Elastically-Constrained Meta-Learner for Federated Learning, 2023,
        https://arxiv.org/abs/2306.16703.
    """

    algorithm_name = Reptile.algorithm_name

    def __init__(
        self,
        alpha: float | None = None,
        constraint: Literal["kl", "l2"] | None = "kl",
        weighting: Literal["uniform", "samples"] = "uniform",
        lr: float = 1.0,
        decay: Literal["linear"] | None = None,
        buffers: Literal["shared", "local", "reset"] = "shared",
        *,
        forget: bool = False,
    ) -> None:
        super().__init__(weighting, lr, decay, buffers)
        client_method = self.use_client_method(Elastic, alpha=alpha)
        client_method.constraint, client_method.forget = constraint, forget
        self.chooses_client_method |= constraint != "kl" or forget


METHODS = (
    Method(
        "FedEC",
        FedEC,
        "FedEC(alpha)",
        "its own model",
        tested={"": {}, "forget": {"forget": True}},
    ),
    Method(
        "FedEC-l2",
        FedEC,
        'FedEC(alpha, constraint="l2")',
        "its own model",
        manual=True,
        tested={"": {"constraint": "l2"}},
    ),
    Method("FedEC-wo", FedEC, "FedEC(constraint=None)", "its own model", manual=True, tested={}),
)

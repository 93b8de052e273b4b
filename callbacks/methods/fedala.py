"""FedALA: each client learns its share of the server's model, number by number."""

from __future__ import annotations

from typing import Literal

from pflight.fedavg import FedAvg
from pflight.method import client_method_for
from pflight.models.client_methods.fedala import AdaptiveMixture
from pflight.options import checked

from .gradients import check_losses
from .registry import Method


@checked
class FedALA(FedAvg):
    r"""Federated learning with adaptive local aggregation (Zhang et al. 2023, algorithm 1).

    The server is FedAvg's. Each client starts from a mixture of the server's model with its own,
    with weights that it learns as in :class:`~pflight.models.client_methods.AdaptiveMixture`. It
    trains from there and sends the result back. It is judged by such a mixture as well.

    Args:
        layers: The number of last layers with parameters to mix, as in
            :class:`~pflight.models.client_methods.AdaptiveMixture`, like the three that follow.
        lr: The step of the weights; 0 is FedAvg.
        share: Share of an epoch's batches for learning the weights in a round.
        start_epochs: Epochs with this share of batches in the first participation.
        weighting: As in :class:`FedAvg`.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.

    Raises:
        ConfigurationError: If an option is out of range, there are fewer layers, or clients
            optimize by hand.

    Example:
        >>> FedALA(layers=2).weighting
        'samples'

    References:
        Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI
        2023, https://arxiv.org/abs/2212.01197.
    """

    def __init__(
        self,
        layers: int = 1,
        lr: float = 1.0,
        share: float = 0.8,
        start_epochs: int = 10,
        weighting: Literal["samples", "uniform"] = "samples",
        buffers: Literal["shared", "local", "reset"] = "shared",
    ) -> None:
        super().__init__(weighting, buffers)
        self.outer_method: AdaptiveMixture = client_method_for(
            self, AdaptiveMixture, layers=layers, lr=lr, share=share, start_epochs=start_epochs
        )

    def setup_server(self) -> None:
        """Make the server's model, and check the losses and the number of layers to mix."""
        check_losses(self.clients.module, "FedALA")
        super().setup_server()
        self.outer_method.mixed(self.clients.layout)

    @property
    def bytes_kept(self) -> int:
        """Bytes that a client keeps: the mixed layers, and a weight for each number."""
        layout = self.clients.layout
        mixed = self.outer_method.mixed(layout)
        return super().bytes_kept + 2 * sum(layout.template[name].nbytes for name in mixed)


METHODS = (Method("FedALA", FedALA, "FedALA(layers)", "its own model, mixed with the server's"),)

"""FedBABU: the federation trains only the body, under a fixed head."""

from __future__ import annotations

from typing import Any, Literal

from lightning import LightningModule
from torch import nn

from pflight.fedavg import FedAvg
from pflight.method import Phase
from pflight.models.client_methods.fedrep import HeadFirst
from pflight.options import checked
from pflight.server_callback import chosen_client_method
from pflight.states.layers import Layers
from pflight.states.state import StateLayout

from .registry import Method


@checked
class BodyOnly(HeadFirst):
    """Trains a client's body in the federation, and a chosen part in fine-tuning.

    The resting part has no gradient, so momentum and weight decay don't move it. It is in
    evaluation mode.

    Args:
        head: The layers of the head, as of :class:`~pflight.models.client_methods.HeadFirst`.
        finetune: The part to fine-tune: ``"full"``, ``"head"`` or ``"body"``.
    """

    algorithm = "FedBABU"

    def __init__(
        self, head: Layers | None = None, finetune: Literal["full", "head", "body"] = "full"
    ) -> None:
        super().__init__(head, head_epochs=0)
        self.finetune = finetune

    def check(self, module: LightningModule) -> None:
        """Raise if there is no body, or nothing to fine-tune."""
        self.check_parts(module, "body", self.finetune)

    def phases(self, module: LightningModule, epochs: int, anchored: bool) -> list[Phase]:
        """Return a single phase, of the body or of the part to fine-tune."""
        return [Phase(0, epochs, self.parts(module)["body" if anchored else self.finetune])]


@checked
class FedBABU(FedAvg):
    """FedBABU (Oh et al. 2022, algorithm 1): aggregated bodies, and a fixed head.

    All clients keep the module's initial head. It neither trains nor travels. The body is trained
    by FedAvg. A client is judged after fine-tuning, with ``finetune_epochs``. The tags ``server/``
    report the model before fine-tuning, with the initial head. Newcomers are treated like all
    others.

    Args:
        weighting: As in :class:`FedAvg`.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`, for the body.
        head: The layers of the head; by default those named by the client module or its client
            method, else the last layer.
        finetune: The part to fine-tune: ``"full"`` for the whole network, the default, ``"head"``
            or ``"body"``.

    Raises:
        ConfigurationError: If the client module names another client method, or if there is no
            body.

    References:
        Oh et al., FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR
        2022, https://arxiv.org/abs/2106.06042.
    """

    def __init__(
        self,
        weighting: Literal["samples", "uniform"] = "samples",
        buffers: Literal["shared", "local", "reset"] = "shared",
        *,
        head: Layers | None = None,
        finetune: Literal["full", "head", "body"] | None = None,
    ) -> None:
        super().__init__(weighting, buffers)
        self.use_client_method(BodyOnly, head=head, finetune=finetune)

    @property
    def name_in_results(self) -> str:
        """FedBABU; fine-tuning is part of the method."""
        return self.algorithm_name

    def owned_names(self, module: LightningModule, layout: StateLayout) -> set[str]:
        """Return the names of the head, which nobody trains."""
        client_method: Any = chosen_client_method(self, module)
        return client_method.parts(module)["head"]

    @property
    def sent_names(self) -> tuple[str, ...]:
        """Names of the entries that travel: the body's."""
        client_method: Any = self.clients.client_method
        body = client_method.parts(self.clients.module)["body"]
        return tuple(name for name in super().sent_names if name in body)


METHODS = (
    Method(
        "FedBABU",
        FedBABU,
        "FedBABU(finetune)",
        "a fine-tuned copy",
        manual=True,
        tested={
            "": {"head": Layers(types=nn.BatchNorm1d)},
            "body": {"head": Layers(types=nn.BatchNorm1d), "finetune": "body"},
        },
    ),
)

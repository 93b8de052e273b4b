"""FedDPA: FedAvg of a global adapter, and a local adapter beside it at every client."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from lightning import LightningModule
from tensordict import TensorDict
from torch import Tensor, nn

from pflight.adapters.second import second_adapters
from pflight.fedavg import FedAvg
from pflight.local_client import LocalClient, LocalWork
from pflight.method import OWN, ClientMethod, Model, Phase
from pflight.options import ClosedUnitInterval, PositiveInt, checked
from pflight.states.head import EXTRA
from pflight.states.state import StateLayout, state_tensors

from .registry import Method

_SHARE, _VISITS = f"{EXTRA}.share", f"{OWN}visits"
_JOINT = 0.5  # the share of the local adapter while both act and the global one trains


class LocalAdapters(nn.Module):
    r"""The local adapters of all layers, which begin as copies of the module's own ones.

    Each layer gives :math:`W_0 x + (1 - v) s B A x + v s B' A' x` with the scalar :attr:`share` v.

    Args:
        module: The client module, whose layers get hooks.
    """

    share: Tensor

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        weigh = partial(LocalAdapters.weights, self)  # copies of a module know that it is constant
        self.layers = second_adapters(module, "FedDPA", weigh, trains=True)
        self.register_buffer("share", next(self.layers.parameters()).new_zeros(()))

    def weights(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights of a layer's own and its local adapter."""
        return 1 - self.share, self.share


@checked
class TwoAdapters(ClientMethod):
    r"""Trains the module's own adapter, which is the global one, and a local adapter beside it.

    With both, a layer gives (Yang et al. 2024)

    .. math:: W_0 x + w\,s\,B_l A_l x + (1 - w)\,s\,B_g A_g x.

    From its second participation on, a client trains its local adapter first, with the global one
    as received and fixed, at share :math:`w`. Then it trains the global adapter alone, as plain
    training does, and sends it. Everything else that trains belongs to the global adapter. A client
    is judged with both adapters once its local one has trained, and before that without it.
    Fine-tuning trains the local adapter.

    Args:
        weight: Share :math:`w` of the local adapter.
        variant: ``"T"`` trains local adapters in the rounds; ``"F"`` only in fine-tuning, after the
            federation.
        personal_epochs: Epochs of the local adapter in each participation.
        joint: Whether the local adapter, fixed, takes part while the global one trains, each with
            share 1/2.

    References:
        Yang et al., Dual-Personalizing Adapter for Federated Foundation Models, NeurIPS 2024,
        https://arxiv.org/abs/2403.19211.
    """

    temporary = ("share",)

    def __init__(
        self,
        weight: ClosedUnitInterval = 0.5,
        variant: Literal["T", "F"] = "T",
        personal_epochs: PositiveInt = 1,
        joint: bool = False,
    ) -> None:
        self.weight = weight
        self.variant = variant
        self.personal_epochs = personal_epochs
        self.joint = joint

    @property
    def needs_constant_lr(self) -> bool:  # type: ignore[override]
        """Whether local adapters train in rounds: their step size does not decay."""
        return self.variant == "T"

    def beside(self, module: LightningModule) -> nn.Module:
        """Return the local adapters."""
        return LocalAdapters(module)

    def state(self, weights: Any) -> dict[str, Tensor]:
        """Return the number of participations."""
        return {"visits": torch.zeros(())}

    def phases(self, module: LightningModule, epochs: int, anchored: bool) -> list[Phase]:
        """Return a phase of all but the local adapters, or of these in fine-tuning."""
        names = [name for name in state_tensors(module) if _is_local(name) is not anchored]
        return [Phase(0, epochs, names)]

    def loss(self, c: LocalClient, batch: Any) -> Tensor:
        """Return the module's loss, in fine-tuning with both adapters."""
        if c.anchor is None:
            c.extra["share"].fill_(self.weight)
        return c.task_loss(batch)

    def before_training(self, work: LocalWork, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Train the local adapters of clients that have taken part before ``[C]``."""
        states = super().before_training(work, clients, sent)
        again = states[_VISITS] > 0
        if self.variant == "T" and again.any():
            starts = states[again]
            trained = work.finetune(
                clients[again],
                starts,
                epochs=self.personal_epochs,
                doing="to train its local adapter",
                or_nan=True,
            )
            for name in filter(_is_local, work.layout.names):
                column = states[name].clone()
                column[again] = trained[name]
                states[name] = column
        if self.joint:
            states[_SHARE] = torch.full_like(states[_SHARE], _JOINT)
        return states

    def after_training(self, c: LocalClient) -> None:
        """Count the participation."""
        c.own["visits"].add_(1)

    def models(self) -> dict[str, Model]:
        """Judge clients by both adapters."""
        return {"": self._both}

    def _both(
        self, work: LocalWork, clients: Tensor, sent: TensorDict, states: TensorDict
    ) -> TensorDict:
        if self.variant == "T":
            trained = states[_VISITS] > 1
            states[_SHARE] = (self.weight * trained).to(states[_SHARE])
        return states


@checked
class FedDPA(FedAvg):
    r"""Dual-personalizing adapters (FedDPA, Yang et al. 2024): a global and a local adapter.

    The module's own low-rank adapter is the global one: FedAvg takes the mean over clients, as in
    FedIT, whatever the local adapters do. A local adapter of the same form stands beside it in each
    layer and never travels. It starts as the module's own one does, with B = 0 for peft's default.
    Clients train both as in :class:`TwoAdapters`. Traffic is FedAvg's. A newcomer has the global
    adapter alone, and its own one after fine-tuning.

    Args:
        weighting: As in :class:`FedAvg`.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.
        weight: Share :math:`w` of the local adapter; by default 0.5, or the value of the client's
            own client method.
        variant: ``"T"`` trains local adapters in the rounds, ``"F"`` only in fine-tuning. Give
            ``finetune_epochs`` to the federation with ``"F"``.
        personal_epochs: Epochs of the local adapter in each participation; by default 1.
        joint: Whether the fixed local adapter takes part while the global one trains.

    Raises:
        ConfigurationError: If an option is out of range, or the client module has no plain LoRA.

    Example:
        >>> FedDPA(variant="F").client_method.weight
        0.5

    References:
        Yang et al., Dual-Personalizing Adapter for Federated Foundation Models, NeurIPS 2024,
        https://arxiv.org/abs/2403.19211.
    """

    def __init__(
        self,
        weighting: Literal["samples", "uniform"] = "samples",
        buffers: Literal["shared", "local", "reset"] = "shared",
        *,
        weight: float | None = None,
        variant: Literal["T", "F"] | None = None,
        personal_epochs: int | None = None,
        joint: bool | None = None,
    ) -> None:
        super().__init__(weighting, buffers)
        options = {"personal_epochs": personal_epochs, "joint": joint}
        self.use_client_method(TwoAdapters, weight=weight, variant=variant, **options)

    @property
    def algorithm_name(self) -> str:
        """FedDPA with its variant, and whether both adapters act in all training."""
        method: Any = self.clients.client_method
        return f"FedDPA-{method.variant}" + " (joint)" * method.joint

    def private_names(self, module: LightningModule, layout: StateLayout) -> set[str]:
        """Return the names of the private entries, including the local adapters."""
        local = {name for name in layout.names if _is_local(name)}
        return super().private_names(module, layout) | local | {*layout.own}


def _is_local(name: str) -> bool:
    return name.startswith(f"{EXTRA}.layers.")


METHODS = (
    Method(
        "FedDPA",
        FedDPA,
        "FedDPA(weight, variant)",
        "a global and a local adapter",
        needs="adapters",
        tested={"": {}, "F": {"variant": "F"}, "joint": {"weight": 0.3, "joint": True}},
    ),
)

"""The module that learns FedALA's weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pflight.state import StateModule, call_with, state_tensors

from .client import Batch, ClientModule


class MixingClient(ClientModule):
    r"""A client that learns how to mix two models, number by number.

    In the parameters with the given names it mixes a model :math:`\theta_i` of its own with one
    that it was sent, :math:`\theta`, by weights :math:`W` in [0, 1], the only parameters that it
    trains:

    .. math:: \hat\theta = \theta_i + (\theta - \theta_i) \odot W, \qquad
        W \leftarrow \operatorname{clip}(W - \eta \nabla_W f_i(\hat\theta), 0, 1)

    (FedALA, Zhang et al. 2023, algorithm 1). All other tensors are those that were sent. The loss
    is the given client's, :math:`f_i`.

    Args:
        client: Whose copy the loss is taken of; in ``network``, with what was sent.
        names: The parameters to mix, as in ``client.state_dict()``; the weights are in ``weights``,
            and the own ones in ``own``, under the same names.
        lr: :math:`\eta`.

    Example:
        >>> client = ClientModule(nn.Linear(4, 2), num_classes=2)
        >>> MixingClient(client, ["network.bias"], lr=1.0).weights.tensors()["network.bias"]
        Parameter containing:
        tensor([1., 1.], requires_grad=True)

    References:
        Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI
        2023, https://arxiv.org/abs/2212.01197.
    """

    network: ClientModule

    def __init__(self, client: ClientModule, names: Iterable[str], lr: float) -> None:
        super().__init__(
            copy.deepcopy(client).requires_grad_(False),
            client.num_classes,
            optimizer=partial(_BoundedSGD, lr=lr),
        )
        own = {name: state_tensors(client)[name] for name in names}
        self.own = StateModule(own)
        self.weights = StateModule({n: torch.ones_like(v) for n, v in own.items()}, parameters=own)

    def loss(self, batch: Batch) -> Tensor:
        """Return the client's loss at the mixture."""
        sent, weights = dict(self.network.named_parameters()), self.weights.tensors()
        tensors = {name: getattr(self, name) for name in self.told}
        for name, own in self.own.tensors().items():
            tensors[name] = torch.lerp(own, sent[name], weights[name])
        loss = _Loss(self.network)
        return call_with(loss, {f"client.{n}": t for n, t in tensors.items()}, batch)


class _Loss(nn.Module):
    """Calls a client's loss as its forward pass, as ``functional_call`` needs it."""

    def __init__(self, client: ClientModule) -> None:
        super().__init__()
        self.client = client

    def forward(self, batch: Batch) -> Tensor:
        return self.client.loss(batch)


class _BoundedSGD(torch.optim.SGD):
    """SGD that puts every number back into [0, 1] after its step."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.detach().clamp_(0, 1)
        return loss

"""FedNova: more steps don't give a client more weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from lightning import LightningModule
from tensordict import TensorDict
from torch import Tensor

from pflight.errors import ConfigurationError
from pflight.fedavg import FedAvg
from pflight.local_client import LocalClient
from pflight.method import OWN, ClientMethod, client_method_for
from pflight.models.client_methods.proximal import Proximal
from pflight.models.client_methods.sgd import sgd_of
from pflight.modifiers import Proximal as Pull
from pflight.options import checked
from pflight.states.state import WeightedMean
from pflight.states.updates import ClientUpdates

from .registry import Method

_ROUNDING = 1e-2  # relative error of a path in half precision
_PATH, _STEPS = f"{OWN}path", f"{OWN}steps"
_BITS = 32  # of a number of steps, at most


@checked
class Normalised(ClientMethod):
    r"""FedNova's client: it sends the length of its path as if all gradients were 1.

    This length is :math:`A_i = \|a_i\|_1` (Wang et al. 2020). With SGD of step :math:`\eta`,
    momentum :math:`\rho` and the proximal term :math:`\frac{\mu}{2} \|w - \theta\|^2`, it is the
    final u of the steps, from 0,

    .. math:: q = 1 - \eta\mu u, \qquad v \leftarrow \rho v + q, \qquad u \leftarrow u + v

    and with Nesterov momentum the last is :math:`u \leftarrow u + q + \rho v`. Weight decay
    counts as part of the loss.

    Args:
        mu: Weight :math:`\mu` of the proximal term. The term passes through the momentum as well.
        tells_steps: Whether the client sends the number of its steps, too.

    Raises:
        ConfigurationError: If an option is out of range.
    """

    per_sample = ("path", "steps")

    def __init__(self, mu: float = 0.0, tells_steps: bool = False) -> None:
        self.proximal = client_method_for(self, Proximal, mu=mu)
        self.tells_steps = tells_steps

    @property
    def mu(self) -> float:
        """The weight of all that pulls, with that of a modifier."""
        return self.proximal.mu + sum(one.mu for one in self.terms if isinstance(one, Pull))

    @property
    def needs_constant_lr(self) -> bool:  # type: ignore[override]
        """Whether the length depends on the step size, as it does with a pull."""
        return self.mu > 0

    def check(self, module: LightningModule) -> None:
        """Raise unless a module is trained by SGD without clipping. Others have no such path."""
        if any(isinstance(one, Pull) and one.scaling != "plain" for one in self.terms):
            raise ConfigurationError(
                "FedNova: the length of a client's path is that of a plain pull: take "
                "Proximal(scaling='plain')"
            )
        needs = "FedNova: the length of a client's path needs SGD with one positive lr"
        self.descending = sgd_of(module, needs, momentum=True)

    def check_sent(self, sent: Mapping[str, Tensor], num_samples: int, num_steps: int) -> str:
        """Refuse a path that fits no number of steps, or more steps than batches."""
        steps = torch.tensor(float(num_steps))
        longest, shortest = float(self.path(steps)), float(self.path(torch.ones(())))
        path, told = float(sent[_PATH]), float(sent.get(_STEPS, steps))
        fits = shortest * (1 - _ROUNDING) <= path <= longest * (1 + _ROUNDING)
        if path == 0 or (fits and 1 <= told <= num_steps and told.is_integer()):
            return ""
        return f"its path has length {path:.2g}, where that of {num_steps} steps is {longest:.2g}"

    def state(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the entries that it sends beside the model, at first 0."""
        zero = next(iter(weights.values())).new_zeros(())
        return {"path": zero, **({"steps": zero} if self.tells_steps else {})}

    def penalty(self, c: LocalClient) -> Tensor | None:
        """Return the proximal term."""
        return self.proximal.penalty(c) if self.proximal.mu else None

    def after_training(self, c: LocalClient) -> None:
        """Store the length of the path."""
        c.own["path"].copy_(self.path(c.num_steps))
        if self.tells_steps:
            c.own["steps"].copy_(c.num_steps)

    def path(self, steps: Tensor) -> Tensor:
        """Return :math:`A_i` after ``steps`` steps, a scalar.

        A step is a linear map of (u, v, 1). Its power is computed by repeated squaring, with the
        bits of the number of steps.
        """
        lr, rho, nesterov = self.descending
        q = torch.tensor([-lr * self.mu, 0.0, 1.0], dtype=torch.double)
        u, v, one = torch.eye(3, dtype=torch.double)
        moved = rho * v + q
        step = torch.stack([u + q + rho * moved if nesterov else u + moved, moved, one])
        place, step = one.to(steps.device), step.to(steps.device)
        for bit in range(_BITS):
            place = torch.where((steps.long() >> bit) % 2 == 1, step @ place, place)
            step = step @ step
        return place[0]


@checked
class FedNova(FedAvg):
    r"""Normalised averaging (Wang et al. 2020).

    The changes of the clients that answered are divided by the lengths of their paths
    :math:`A_i`, averaged, and multiplied by a common length:

    .. math:: \theta \leftarrow \theta + \tau \sum_{i \in S} p_i \frac{\theta_i - \theta}{A_i},
        \qquad p_i = \frac{n_i}{\sum_{j \in S} n_j}, \qquad \tau = \sum_{i \in S} p_i A_i,

    so that more steps don't give a client more weight. If all :math:`A_i` are equal, this is
    FedAvg, or FedProx. Clients train as in :class:`Normalised`. Only parameters are normalised.
    Buffers are averaged with the weights :math:`p_i`. A client without steps is left out.

    Args:
        mu: Weight of the clients' proximal term.
        tau_eff: The common length: ``"norm"`` for :math:`\sum p_i A_i`, ``"steps"`` for
            :math:`\sum p_i K_i` with the numbers of steps, as the authors have it if mu is over 0.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.

    Raises:
        ConfigurationError: If an option is out of range, or clients are not trained by SGD with a
            constant step and without clipping.

    References:
        Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated
        Optimization, NeurIPS 2020, https://arxiv.org/abs/2007.07481.
    """

    aggregates = False

    def __init__(
        self,
        mu: float = 0.0,
        tau_eff: Literal["norm", "steps"] = "norm",
        buffers: Literal["shared", "local", "reset"] = "shared",
    ) -> None:
        super().__init__("samples", buffers)
        self.tau_eff = tau_eff
        self.client_method = client_method_for(
            self, Normalised, mu=mu, tells_steps=tau_eff == "steps"
        )

    def broadcast(self, clients: Tensor) -> TensorDict:
        """Return only the server's model, since lengths and numbers of steps only come back."""
        own = {*self.clients.layout.own}
        names = [name for name in self.sent_names if name not in own]
        return self.server.expand(0, names, len(clients))

    def on_round_start(self) -> None:
        """Start the means."""
        super().on_round_start()
        self.normalised = WeightedMean(self.server.tensors(0, self.shared_parameters))

    def receive(self, updates: ClientUpdates) -> None:
        """Add a chunk's models to the means."""
        updates = updates.where(updates.states[_PATH] > 0)
        super().receive(updates)
        paths = updates.states[_PATH].double().cpu()
        self.normalised.add(updates.states, updates.num_samples / paths)

    def aggregate(self, mean: TensorDict) -> TensorDict:
        """Return the mean, with the parameters moved by the normalised changes."""
        self.normalised.all_reduce()
        models, share = self.normalised.compute()[0], self.normalised.weights / self.mean.weights
        tau = share[0] * mean[_STEPS if self.tau_eff == "steps" else _PATH]
        for name, theta in self.server.tensors(0, self.shared_parameters).items():
            mean[name] = theta + tau.to(theta) * (models[name] - theta)
        return mean


METHODS = (
    Method(
        "FedNova",
        FedNova,
        "FedNova(mu)",
        "the server's model",
        manual=True,
        tested={"": {}, "proximal": {"mu": 0.1, "tau_eff": "steps"}},
    ),
)

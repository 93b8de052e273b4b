"""Client methods that correct every gradient by a fixed direction in a round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from lightning import LightningModule
from tensordict import TensorDict
from torch import Tensor

from pflight.local_client import LocalClient, LocalWork
from pflight.method import OWN, ClientMethod, client_method_for
from pflight.options import checked
from pflight.states.state import StateLayout, entries

from .proximal import Proximal
from .sgd import sgd_of


class Corrected(ClientMethod):
    r"""Adds :math:`\langle d_i, w - w_{\text{anchor}} \rangle` to a client's loss.

    This corrects every gradient by the direction :math:`d_i`. The subclass gives the direction.
    Without an anchor, as in fine-tuning, there is no correction.
    """

    def direction(self, c: LocalClient) -> Mapping[str, Tensor]:
        """Return :math:`d_i` by parameter name."""
        raise NotImplementedError(f"{type(self).__name__} does not define direction()")

    def penalty(self, c: LocalClient) -> Tensor | None:
        r"""Return the scalar :math:`\langle d_i, w - w_{\text{anchor}} \rangle`."""
        if c.anchor is None:
            return None
        direction = self.direction(c)
        total = torch.zeros((), device=c.num_samples.device)
        for name, sent in c.anchor.items():
            total = total + (direction[name] * (c.weights[name] - sent)).sum()
        return total

    def own_gradients(self, work: LocalWork, clients: Tensor, states: TensorDict) -> TensorDict:
        """Return the clients' gradients at their states, uncorrected, by shared parameter."""
        nothing = {name: torch.zeros_like(states[name]) for name in work.layout.own}
        gradients = work.own_gradients(clients, states.clone(recurse=False).update(nothing))
        return gradients.select(*work.layout.shared_parameters)


@checked
class Dane(Corrected):
    r"""FedDANE's second phase: a proximal client, corrected to the mean gradient of several.

    It adds
    :math:`\langle g - \nabla f_i(\theta),\, w - \theta \rangle + \frac{\mu}{2}\|w - \theta\|^2`
    (FedDANE, Li et al. 2019, algorithm 2). Here :math:`\theta` is the server's model and :math:`g`
    the mean gradient at :math:`\theta`. Without a gradient from the server the correction is 0.

    Args:
        mu: Weight of the proximal penalty.
        scaling: As in :class:`Proximal`.

    Raises:
        ConfigurationError: If an option is out of range.

    References:
        Li et al., FedDANE: A Federated Newton-Type Method, 2019, https://arxiv.org/abs/2001.01920.
    """

    temporary = ("correction.",)

    def __init__(self, mu: float = 0.1, scaling: Literal["plain", "eq7"] = "plain") -> None:
        self.proximal = client_method_for(self, Proximal, mu=mu, scaling=scaling)

    def state(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return corrections of zero."""
        return {f"correction.{name}": torch.zeros_like(w) for name, w in weights.items()}

    def before_training(self, work: LocalWork, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Take the clients' own gradients from the mean that the server sends as corrections."""
        states = super().before_training(work, clients, sent)
        if not {*sent.keys()}.isdisjoint(work.layout.own):
            for name, own in entries(self.own_gradients(work, clients, states)):
                states[f"{OWN}correction.{name}"] = states[f"{OWN}correction.{name}"] - own
        return states

    def direction(self, c: LocalClient) -> Mapping[str, Tensor]:
        r"""Return :math:`g - \nabla f_i(\theta)` by parameter name."""
        return {name: c.own[f"correction.{name}"] for name in c.anchor or ()}

    def penalty(self, c: LocalClient) -> Tensor | None:
        """Return the proximal penalty and the linear term."""
        pull, linear = self.proximal.penalty(c), super().penalty(c)
        return None if pull is None or linear is None else pull + linear


@checked
class Controlled(Corrected):
    r"""SCAFFOLD's client: corrects its drift by control variates.

    The server has a control variate :math:`c`, and the client its own, :math:`c_i`, which starts at
    0. Every step is :math:`y \leftarrow y - \eta\,(g(y) + c - c_i)` (Karimireddy et al. 2020, eq.
    3). After :math:`K` steps from :math:`x` the client's becomes (eq. 4)

    .. math:: c_i^+ = \nabla f_i(x) \;\text{(option I)}, \qquad
        c_i^+ = c_i - c + \frac{x - y}{K\eta} \;\text{(option II)}

    and the client sends :math:`y` and :math:`c_i^+ - c_i`. Control variates are over parameters,
    not buffers. Option I takes one more pass over the client's samples. Option II takes the mean
    gradient from the path. Only plain SGD allows this. Weight decay counts as part of the loss.

    Args:
        option: ``"I"`` or ``"II"``.

    Raises:
        ConfigurationError: If the option is unknown.

    References:
        Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML
        2020, https://arxiv.org/abs/1910.06378.
    """

    keeps_memory = True
    temporary = ("gradient.",)

    def __init__(self, option: Literal["I", "II"] = "II") -> None:
        self.option = option
        self.needs_constant_lr = option == "II"
        self.lr = 0.0

    def check(self, module: LightningModule) -> None:
        """Raise if option II meets momentum, clipping or another optimizer than SGD."""
        if self.option == "II":
            needs = "SCAFFOLD: option II needs plain SGD with one positive lr"
            self.lr = sgd_of(module, needs, "use option I").lr

    def state(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``control`` (first c, later the change of c_i) and ``gradient``."""
        kinds = ("control", "gradient") if self.option == "I" else ("control",)
        return {f"{kind}.{n}": torch.zeros_like(w) for kind in kinds for n, w in weights.items()}

    def before_training(self, work: LocalWork, clients: Tensor, sent: TensorDict) -> TensorDict:
        """With option I, have clients take their gradients before they train."""
        states = super().before_training(work, clients, sent)
        if self.option == "I":
            for name, own in entries(self.own_gradients(work, clients, states)):
                states[f"{OWN}gradient.{name}"] = own
        return states

    def direction(self, c: LocalClient) -> Mapping[str, Tensor]:
        """Return :math:`c - c_i` by parameter name."""
        own = _own_control(c)
        return {name: c.own[f"control.{name}"] - own[name] for name in c.anchor or ()}

    def after_training(self, c: LocalClient) -> None:
        """Put the change of :math:`c_i` where :math:`c` was; none if no step was taken."""
        assert c.anchor is not None
        own = _own_control(c)
        for name, sent in c.anchor.items():
            control = c.own[f"control.{name}"]
            if self.option == "I":
                change = c.own[f"gradient.{name}"] - own[name]
            else:
                change = (sent - c.weights[name]) / (c.num_steps * self.lr) - control
            control.copy_(torch.where(c.num_steps > 0, change, 0.0))

    def remembered(self, layout: StateLayout) -> tuple[str, ...]:
        """Return the names of the control variates."""
        return tuple(name for name in layout.own if name.startswith(f"{OWN}control."))

    def remember(self, c: LocalClient) -> Mapping[str, Tensor]:
        """Return :math:`c_i^+`, all that this client keeps."""
        own = _own_control(c)
        return {f"{OWN}control.{name}": own[name] + c.own[f"control.{name}"] for name in own}


def _own_control(c: LocalClient) -> dict[str, Tensor]:
    """Return :math:`c_i` by parameter name, as it was before this round."""
    names = [name for name in c.weights if f"control.{name}" in c.own]
    if c.memory is None:
        return {name: torch.zeros_like(c.weights[name]) for name in names}
    return {name: c.seen * c.memory[f"{OWN}control.{name}"] for name in names}

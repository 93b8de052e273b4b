"""pFedMe: the server averages models that clients hold their personal ones to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim import Optimizer

from pflight.fedavg import FedAvg
from pflight.half import OWN
from pflight.models.halves.pfedme import MoreauEnvelope
from pflight.options import check_range, checked

if TYPE_CHECKING:
    pass


@checked
class PFedMe(FedAvg):
    r"""Federated learning with Moreau envelopes (T. Dinh et al. 2020, algorithm 1).

    The server's model moves by

    .. math:: w \leftarrow (1 - \beta)\,w + \beta \sum_{i \in S} p_i w_i

    over the clients that answered; buffers are averaged. What a client does is
    :class:`~pflight.models.halves.MoreauEnvelope`'s. It is judged by the personal model that it
    kept. One that has never taken part trains aside, as in a round, and is judged by the personal
    model that this gives, for which a federation needs its data. With ``finetune_epochs`` it is
    these models that are tuned.

    Args:
        beta: Step :math:`\beta` of the default server optimizer, SGD.
        weighting: As in :class:`FedAvg`; the paper has ``"uniform"``, its code ``"samples"``.
        train_newcomers: Whether clients that have never taken part train before they are judged;
            if not, they are judged by the server's model.
        train_all: Whether the clients outside the cohort train as well, as the paper has it: they
            are sent the server's model and keep their personal one, but send nothing back.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.
        lam: As in :class:`~pflight.models.halves.MoreauEnvelope`, like all that follow; by default
            what it has, or what the client's own half says.
        personal_lr: Inner step.
        personal_steps: Inner steps on a batch.
        mu: Weight decay of the inner steps.

    Raises:
        ConfigurationError: If an option is out of range, or the client names another half.

    References:
        T. Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020,
        https://arxiv.org/abs/2006.08848.
    """

    algorithm_name = "pFedMe"

    def __init__(
        self,
        beta: float = 1.0,
        weighting: Literal["samples", "uniform"] = "samples",
        train_newcomers: bool = True,
        train_all: bool = False,
        buffers: Literal["shared", "local", "reset"] = "shared",
        *,
        lam: float | None = None,
        personal_lr: float | None = None,
        personal_steps: int | None = None,
        mu: float | None = None,
    ) -> None:
        super().__init__(weighting, buffers)
        check_range(self, "(0, inf)", beta=beta)
        self.beta = beta
        self.train_newcomers = train_newcomers
        self.train_all = train_all
        self.bring(
            MoreauEnvelope,
            lam=lam,
            personal_lr=personal_lr,
            personal_steps=personal_steps,
            mu=mu,
        )

    def setup_server(self) -> None:
        """Make the server's model."""
        names, theta = self.clients.layout.names, f"{OWN}theta."
        self.pairs = [(n.removeprefix(theta), n) for n in names if n.startswith(theta)]
        super().setup_server()

    def configure_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Return SGD with the outer step."""
        return torch.optim.SGD(parameters, lr=self.beta)

    def round(self, cohort: Tensor) -> None:
        """Run a round, in which all others may train for themselves."""
        if self.train_all:
            everybody = self.clients.trainable.to(cohort.device)
            others = everybody[~torch.isin(everybody, cohort)]
            for _ in self.clients.train(others, self.broadcast, returns=()):
                pass
        super().round(cohort)

    def broadcast(self, clients: Tensor) -> TensorDict:
        """Return the server's model, where the inner steps start as well."""
        sent = super().broadcast(clients)
        return sent.update({own: sent[shared] for shared, own in self.pairs})

    def server_states(self) -> list[dict[str, Tensor]]:
        """Return the server's model, with itself as the personal one."""
        (state,) = super().server_states()
        return [{**state, **{own: state[shared] for shared, own in self.pairs}}]

    def bytes_down(self, clients: Tensor, sent: TensorDict) -> int:
        """Return the bytes sent to the clients ``[C]``, the model once."""
        return super().bytes_down(clients, sent.select(*self.sent_names))

    def personalize(self, clients: Tensor) -> TensorDict:
        """Return the personal models, those of newcomers from training aside ``[C]``."""
        states = self.clients.start_states(clients, self.broadcast(clients))
        kept = self.clients.remembered(clients, states)
        states = self.clients.completed(clients, kept.states)
        new = clients[~kept.seen.to(clients.device)]
        if len(new) and self.train_newcomers:
            tried = self.clients.train_aside(new, self.broadcast(new), self.clients.rounds)
            found = {shared: tried.states[own] for shared, own in self.pairs}
            states = states.clone()
            states[torch.isin(clients, tried.clients)] = tried.states.update(found)
        return states.update({own: states[shared] for shared, own in self.pairs})

    @property
    def sent_names(self) -> tuple[str, ...]:
        """Names of the entries of a state that travel, those of the network."""
        own = {own for _, own in self.pairs}
        return tuple(name for name in super().sent_names if name not in own)

"""FedDBE: FedAvg with a private bias on each client's features."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from lightning import LightningModule
from tensordict import TensorDict
from torch import Tensor, nn

from pflight.fedavg import FedAvg
from pflight.local_client import LocalClient, LocalWork
from pflight.method import ClientMethod
from pflight.options import ClosedUnitInterval, NonNegativeFloat, checked
from pflight.states.head import EXTRA, Head
from pflight.states.state import StateLayout, WeightedMean

from .registry import Method

_MEAN, _KNOWN = f"{EXTRA}.mean", f"{EXTRA}.known"


class DomainBias(nn.Module):
    r"""Adds a client's own :math:`\bar z_i` to the features, at first 0.

    The module also holds a running mean, the global mean of features, and whether the latter is
    known. Until then there is no bias.

    Args:
        width: Number of features.
    """

    known: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("known", torch.zeros(()))
        self.register_buffer("running", torch.zeros(width))

    def forward(self, z: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the head's output for features with the bias."""
        return head(z + self.known * self.bias)


@checked
class WithoutBias(ClientMethod):
    r"""Moves the client-specific part of the features from the shared network into a bias.

    With features :math:`z` of dimension d, the head gets :math:`z + \bar z_i`. The bias
    :math:`\bar z_i` is the client's own. It trains by plain steps with the client's learning rate,
    without momentum and weight decay. The loss gets the term

    .. math:: \frac{\kappa}{2d} \|r - \bar z_g\|^2, \qquad
        r \leftarrow (1 - \mu)\, r + \mu \cdot \text{mean}_B\, z

    (FedDBE, Zhang et al. 2023, eq. 4 to 7). Before a participation :math:`r = 0`. :math:`\bar z_g`
    is the mean feature over all clients, each with a model trained once on its own loss. The
    gradient goes through the mean of the current batch only.

    Args:
        kappa: Weight :math:`\kappa` of the global mean.
        mu: Share :math:`\mu` of a batch in the running mean.
        bias_lr: Step of :math:`\bar z_i` in place of the client's learning rate; 0 leaves it at 0.


    References:
        Zhang et al., Eliminating Domain Bias for Federated Learning in Representation Space,
        NeurIPS 2023, https://arxiv.org/abs/2311.14975.
    """

    needs_head = True
    temporary = ("running",)

    def __init__(
        self,
        kappa: NonNegativeFloat = 50.0,
        mu: ClosedUnitInterval = 1.0,
        bias_lr: NonNegativeFloat | None = None,
    ) -> None:
        self.kappa = kappa
        self.mu = mu
        self.bias_lr = bias_lr

    @property
    def extra_options(self) -> Mapping[str, Any]:  # type: ignore[override]
        """Options for plain steps of SGD, and for steps without weight decay of others."""
        plain = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
        return plain if self.bias_lr is None else {**plain, "lr": self.bias_lr}

    def extra(self, module: LightningModule, head: Head) -> nn.Module:
        """Return the bias."""
        return DomainBias(head.width)

    def loss(self, c: LocalClient, batch: Any) -> Tensor:
        """Return the client's own loss plus, except in fine-tuning, the distance of the means."""
        if c.received is None:
            return c.task_loss(batch)
        loss, z, _ = c.task_loss_and_features(batch)
        own, d = c.extra, z.shape[1]
        mean = (1 - self.mu) * own["running"] + self.mu * c.batch_mean(z)
        distance = (mean - own["mean"]).square().sum()
        with torch.no_grad():
            own["running"].copy_(mean)
        return loss + own["known"] * self.kappa / (2 * d) * distance

    def finish(
        self, work: LocalWork, clients: Tensor, starts: TensorDict, trained: TensorDict
    ) -> TensorDict:
        """Store each client's mean feature if the global one is not known yet."""
        if starts[_KNOWN].any():
            return trained
        like = {"z": trained[_MEAN][0], "n": trained[_KNOWN][0]}
        sums = work.sums(clients, trained, _features, like)
        return trained.update({_MEAN: sums["z"] / sums["n"].unsqueeze(1)})


def _features(c: LocalClient, batch: Any) -> dict[str, Tensor]:
    """Return the sum of a batch's features, and their number."""
    _, z, _ = c.task_loss_and_features(batch)
    return {"z": c.batch_sum(z), "n": c.batch_sum(torch.ones_like(z[:, 0]))}


@checked
class FedDBE(FedAvg):
    r"""FedAvg with domain bias eliminator (Zhang et al. 2023, algorithm 1).

    Before the first round, clients train once from the initial model on their own loss. They report
    their mean feature over all their samples, and forget the rest. The global mean is the mean of
    these features, weighted by samples. Afterwards the server is FedAvg's, and clients train as in
    :class:`WithoutBias`. A client is judged by the server's model with its own bias. The bias never
    travels. A newcomer's bias is 0, and ``finetune_epochs`` train it.

    Args:
        kappa: Weight of the global mean; by default 50, or the value of the client module's own
            client method.
        mu: Share of a batch in the running mean, by default 1.
        bias_lr: Step of the bias, by default the client's learning rate.
        init: Who reports a mean feature: ``"all"`` clients, or the first ``"cohort"``.
        weighting: As in :class:`FedAvg`.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.

    Raises:
        ConfigurationError: If an option is out of range, or the clients' network has no head.

    Example:
        >>> FedDBE(kappa=1.0, mu=0.5).client_method
        WithoutBias(kappa=1.0, mu=0.5, bias_lr=None)

    References:
        Zhang et al., Eliminating Domain Bias for Federated Learning in Representation Space,
        NeurIPS 2023, https://arxiv.org/abs/2311.14975.
    """

    aggregates = False

    def __init__(
        self,
        kappa: float | None = None,
        mu: float | None = None,
        bias_lr: float | None = None,
        init: Literal["all", "cohort"] = "all",
        weighting: Literal["samples", "uniform"] = "samples",
        buffers: Literal["shared", "local", "reset"] = "shared",
    ) -> None:
        super().__init__(weighting, buffers)
        self.init = init
        self.use_client_method(WithoutBias, kappa=kappa, mu=mu, bias_lr=bias_lr)

    def private_names(self, module: LightningModule, layout: StateLayout) -> set[str]:
        """Return the names of the private entries, including the bias."""
        return super().private_names(module, layout) | {f"{EXTRA}.bias"}

    def round(self, cohort: Tensor) -> None:
        """Run one round. The first round begins with the global mean."""
        state = self.server.tensors(0, (_MEAN, _KNOWN))
        self._informed = cohort[:0].cpu()  # clients that already have the model
        if not state[_KNOWN]:
            clients = self.clients.trainable if self.init == "all" else cohort
            mean = WeightedMean({_MEAN: state[_MEAN]})
            for updates in self.clients.train(clients, self.broadcast, returns=[_MEAN], keep=False):
                mean.add(updates.states, updates.num_samples)
            mean.all_reduce()
            self._informed = clients.cpu()
            if mean.weights[0] > 0:
                state[_MEAN].copy_(mean.compute()[_MEAN][0])
                state[_KNOWN].fill_(1)
        self.on_round_start()
        for updates in self.clients.train(cohort, self.broadcast, returns=self.returned):
            self.receive(updates)
        self.set_pseudo_gradients()

    @property
    def returned(self) -> list[str]:
        """Names of the entries that clients return in a round: the model."""
        return [name for name in self.sent_names if name not in (_MEAN, _KNOWN)]

    def on_round_start(self) -> None:
        """Start a new mean of models."""
        self.mean = WeightedMean(self.server.tensors(0, self.returned))

    def bytes_down(self, clients: Tensor, sent: TensorDict) -> int:
        """Return the bytes of the model, if clients lack it, and once of the global mean."""
        lacking = clients[~torch.isin(clients.cpu(), self._informed).to(clients.device)]
        size = super().bytes_down(lacking, sent.select(*self.returned))
        known, new = bool(self.server.tensors(0)[_KNOWN]), ~self.clients.has_memory(clients)
        return size + known * int(new.sum()) * sent[_MEAN][:1].nbytes


METHODS = (
    Method(
        "FedDBE",
        FedDBE,
        "FedDBE(kappa, mu)",
        "shared model, own bias on features",
        needs="a head",
        tested={"": {}, "cohort": {"kappa": 1.0, "mu": 0.5, "init": "cohort"}},
    ),
)

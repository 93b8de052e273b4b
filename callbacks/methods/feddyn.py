"""FedDyn: every client's earlier changes regularise its loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from tensordict import TensorDict
from tensordict.utils import expand_as_right
from torch import Tensor

from pflight.local_client import LocalClient, LocalWork
from pflight.method import OWN
from pflight.models.client_methods.corrected import Corrected
from pflight.modifiers import squared_distance
from pflight.options import NonNegativeFloat, checked
from pflight.states.state import StateModule, WeightedMean, entries, expand_state
from pflight.states.updates import ClientUpdates

from .personal import PersonalFedAvg
from .registry import Method


@checked
class Dynamic(Corrected):
    r"""FedDyn's client: a proximal client, led by the sum of its earlier changes.

    It minimises :math:`f_i(w) - \langle g_i, w \rangle + \frac{a_i}{2} \|w - \theta\|^2` with the
    server's model :math:`\theta`, and then (Acar et al. 2021, algorithm 1)

    .. math:: g_i \leftarrow g_i - a_i\,(\theta_i - \theta),

    where :math:`g_i` starts at 0 and never travels. The logged loss has
    :math:`\langle g_i, w - \theta \rangle` in place of :math:`\langle g_i, w \rangle`, with the
    same gradient.

    Args:
        a: Weight :math:`a_i = a` of the penalty; 0 gives plain training.
        size: Whether to use :math:`a_i = a\,\bar n / n_i` instead, with the mean number of samples
            :math:`\bar n` over all clients.

    """

    def __init__(self, a: NonNegativeFloat = 0.01, size: bool = False) -> None:
        self.a = a
        self.size = size

    def state(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the initial :math:`g_i`: 0."""
        return {f"g.{name}": torch.zeros_like(weight) for name, weight in weights.items()}

    @property
    def needs_mean_samples(self) -> bool:  # type: ignore[override]
        """Whether the weight depends on the mean number of samples."""
        return self.size

    def direction(self, c: LocalClient) -> Mapping[str, Tensor]:
        """Return :math:`-g_i` by parameter name."""
        return {name: -c.own[f"g.{name}"] for name in c.anchor or ()}

    def penalty(self, c: LocalClient) -> Tensor | None:
        """Return the linear term and the proximal one."""
        linear = super().penalty(c)
        if linear is None or c.anchor is None:
            return None
        weight = self._weight(c.mean_samples, c.num_samples)
        return linear + weight / 2 * squared_distance(c.weights, c.anchor)

    def after_training(self, c: LocalClient) -> None:
        """Move :math:`g_i` by this training's change of the model."""
        assert c.anchor is not None
        weight = self._weight(c.mean_samples, c.num_samples)
        for name, sent in c.anchor.items():
            c.own[f"g.{name}"].sub_(weight * (c.weights[name] - sent))

    def mirror(
        self,
        work: LocalWork,
        clients: Tensor,
        trained: TensorDict,
        starts: TensorDict,
        sent: TensorDict,
    ) -> TensorDict:
        """Move :math:`g_i` by the transformed update, so that H stays the mean of all."""
        counts, moved = work.num_samples_of(clients), {}
        for name in work.layout.shared_parameters:
            own = starts[f"{OWN}g.{name}"]
            mean = torch.full_like(counts, work.mean_samples, dtype=own.dtype)  # as clients do
            weight = expand_as_right(self._weight(mean, counts), own)
            moved[f"{OWN}g.{name}"] = own - weight * (sent[name] - starts[name])
        return TensorDict({**trained, **moved}, batch_size=trained.batch_size)

    def _weight(self, mean_samples: Tensor, num_samples: Tensor) -> Tensor:
        if self.size:
            return self.a * mean_samples / num_samples
        return torch.full_like(mean_samples, self.a)


@checked
class FedDyn(PersonalFedAvg):
    r"""Federated learning based on dynamic regularization (Acar et al. 2021, algorithm 1).

    The server adds up the changes of the clients that answered, divided by the number N of all
    clients that may take part. It moves beyond the plain mean of their models by this sum:

    .. math:: H \leftarrow H + \frac{1}{N} \sum_{i \in S} (\theta_i - \theta), \qquad
        \theta \leftarrow \frac{1}{|S|} \sum_{i \in S} \theta_i + H.

    In the paper :math:`H = -h / a`. Clients train as in :class:`Dynamic`, so
    :math:`H = -\frac{1}{N} \sum_i g_i / a_i` at all times. H is over parameters. Buffers are
    averaged. The first round moves the model by :math:`1 + |S| / N` times the mean change.

    Args:
        a: Weight of the penalty; by default 0.01, or the value of the client's own client method.
            The paper's step is undefined for 0. Here H then stays 0, which gives FedAvg with
            uniform weights.
        size: Whether clients with fewer samples have a larger weight, as in :class:`Dynamic`. Then
            the optimum weighs all samples equally, instead of all clients.
        judged: ``"received"`` judges clients by the server's model. ``"mean"`` judges them by the
            mean of the last models of all N clients, at first the initial one, as in the authors'
            code. Then the server stores these models.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.

    Attributes:
        lead: H by parameter name.

    Raises:
        ConfigurationError: If an option is out of range, or the client names another client method.

    Example:
        >>> FedDyn(a=0.1).client_method
        Dynamic(a=0.1, size=False)

    References:
        Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021,
        https://arxiv.org/abs/2111.04263.
    """

    aggregates = False

    lead: StateModule
    last: StateModule

    def __init__(
        self,
        a: float | None = None,
        size: bool | None = None,
        judged: Literal["received", "mean"] = "received",
        buffers: Literal["shared", "local", "reset"] = "shared",
    ) -> None:
        super().__init__("uniform", buffers)
        self.judged = judged
        self.judges_otherwise = judged == "mean"
        self.use_client_method(Dynamic, a=a, size=size)

    def setup_server(self) -> None:
        """Make the server's model, and H."""
        super().setup_server()
        models = self.server.tensors(0, self.shared_parameters)
        zeros = {name: torch.zeros_like(theta) for name, theta in models.items()}
        self.add_state("lead", StateModule(zeros))
        if self.judged == "mean":
            self.add_state("last", StateModule(models))

    @property
    def bytes_kept(self) -> int:
        """Bytes kept for each client, including its last returned model."""
        layout = self.clients.layout
        last = sum(layout.template[name].nbytes for name in self.shared_parameters)
        return super().bytes_kept + last * (self.judged == "mean")

    def on_round_start(self) -> None:
        """Start a new mean, also of the changes of clients' last models."""
        super().on_round_start()
        self._moved = WeightedMean(self.lead.tensors())

    def receive(self, updates: ClientUpdates) -> None:
        """Add a chunk's models to the mean, and store them if need be."""
        if self.judged == "mean":
            ids, models = updates.clients, updates.states.select(*self.shared_parameters)
            initial = {n: self.clients.layout.template[n].to(model) for n, model in entries(models)}
            before = self.clients.stored(ids, expand_state(initial, len(ids)))
            self._moved.add(models - before, torch.ones(len(ids)))
            self.clients.store(ids, models)
        super().receive(updates)

    def personalize(self, clients: Tensor) -> TensorDict:
        """Return the server's model, or the mean of the clients' last models."""
        sent = self.broadcast(clients)
        if self.judged == "mean":
            sent.update(expand_state(self.last.tensors(), len(clients)))
        return self.clients.judged(clients, sent)

    def aggregate(self, mean: TensorDict) -> TensorDict:
        """Return the mean, moved by H."""
        share, lead = self.mean.weights[0] / len(self.clients.trainable), self.lead.tensors()
        if self.judged == "mean":
            self._moved.all_reduce()
            for name, change in entries(self._moved.compute()[0]):
                self.last.tensors()[name].add_(share.to(change) * change)
        client_method = self.clients.client_method
        assert isinstance(client_method, Dynamic)
        if not client_method.a:
            return mean
        for name, theta in self.server.tensors(0, self.shared_parameters).items():
            lead[name] += share.to(theta) * (mean[name] - theta)
            mean[name] = mean[name] + lead[name]
        return mean


METHODS = (
    Method(
        "FedDyn",
        FedDyn,
        "FedDyn(a)",
        "the server's model",
        manual=True,
        tested={"": {}, "size": {"a": 0.1, "size": True, "judged": "mean"}},
    ),
)

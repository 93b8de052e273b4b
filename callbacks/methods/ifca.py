"""IFCA: each client chooses the server model with the lowest training loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from tensordict import TensorDict
from torch import Tensor

from pflight.errors import ConfigurationError
from pflight.options import NonNegativeInt, PositiveInt, checked
from pflight.randomness import Purpose, generator
from pflight.states.layers import Layers
from pflight.states.state import WeightedMean
from pflight.states.updates import ClientUpdates

from .gradients import check_losses
from .multi_center import MultiCenter
from .registry import Method

_NONE = Layers()


@checked
class IFCA(MultiCenter):
    r"""IFCA (Ghosh et al. 2020), also called hypothesis-based clustering (Mansour et al. 2020).

    The server keeps K models :math:`\theta_k` and sends them all. Client i chooses the model with
    the lowest loss over all its training samples, in evaluation mode:
    :math:`k_i = \arg\min_k f_i(\theta_k)`, the lowest index on ties. It trains from this model.
    Each model becomes the mean of the clients that chose it and answered. A model that nobody chose
    stays unchanged. Clients, newcomers included, are judged by their current choice, by training
    samples. A client without training samples is judged by the model with the most training samples
    among its members.

    With equal initial models, all clients would choose the same one. So in the first
    ``group_rounds`` rounds clients don't choose, but train in K random groups of equal size, as in
    IFCA's experiment on FEMNIST.

    Args:
        num_clusters: K.
        group_rounds: Number of these first rounds. With 0, clients choose at once between random
            models. The first has the client module's weights. The others have these weights
            shuffled within each tensor: a new draw if they were drawn independently.
        centers: K states, as from ``federation.server_states()``, to choose from at once.
        weighting: Weights of clients in the mean of their cluster, ``"samples"`` or ``"uniform"``.
        divide_by: ``"cluster"`` as above. ``"cohort"`` divides the sum of a cluster's weighted
            changes by the weight of all clients that answered. With uniform weights and one
            full-batch local step this is IFCA's gradient averaging.
        shared: Layers that all models share. They become the mean of all clients that answered,
            independently of their choices. For IFCA on FEMNIST these are all but the last.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.

    Attributes:
        assignments: LongTensor ``[num_clients]``, the cluster that each client chose when it last
            trained or was evaluated; -1 if it has none yet. It is used where a client's data are
            not available.

    Raises:
        ConfigurationError: If an option is out of range, equal weights leave nothing to shuffle, or
            clients optimize by hand.

    Example:
        >>> IFCA(num_clusters=3).weighting
        'samples'

    References:
        Mansour et al., Three Approaches for Personalization with Applications to Federated
        Learning, 2020, https://arxiv.org/abs/2002.10619.
        Ghosh et al., An Efficient Framework for Clustered Federated Learning, NeurIPS 2020,
        https://arxiv.org/abs/2006.04088.
    """

    algorithm_name = "IFCA"
    tag = "ifca"

    _groups: Tensor

    def __init__(
        self,
        num_clusters: PositiveInt = 3,
        group_rounds: NonNegativeInt = 1,
        centers: Sequence[Mapping[str, Any]] | None = None,
        weighting: Literal["samples", "uniform"] = "samples",
        divide_by: Literal["cluster", "cohort"] = "cluster",
        shared: Layers = _NONE,
        buffers: Literal["shared", "local", "reset"] = "shared",
    ) -> None:
        super().__init__(num_clusters, buffers=buffers, centers=centers, weighting=weighting)
        self.group_rounds = 0 if centers else group_rounds
        self.shared = shared
        self.divide_by = divide_by

    def setup_server(self) -> None:
        """Make K models, and either deal clients into groups or make the models different."""
        check_losses(self.clients.module, "IFCA")
        super().setup_server()
        private = self.modifiers.get("private")
        if private is not None and private.needs_head:
            rank_zero_warn(
                "IFCA + private head: a client's own head fits the body that it had last, so that "
                "it may never choose another cluster"
            )
        self._chosen = torch.full_like(self.assignments, -1)
        clients = self.clients.trainable
        random = generator(Purpose.SERVER, self.clients.seed)
        dealt = clients[torch.randperm(len(clients), generator=random)]
        self.add_state("_groups", torch.zeros_like(self.assignments), on_cpu=True)
        self._groups[dealt] = torch.arange(len(clients)) % self.num_clusters
        layers, server = self.clients.layout.layers, self.server
        names = {name for layer in self.shared.of(self.clients.module) for name in layers[layer]}
        self.common = tuple(name for name in self.sent_names if name in names)
        first = server.tensors(0, self.shared_parameters)
        for k in range(1, self.num_clusters):
            own = server.tensors(k, first)
            if shuffled := not self.centers and not self.group_rounds:
                own = {name: _shuffle(value, random) for name, value in first.items()}
            server.replace(k, {**own, **server.tensors(0, self.common)})
            own = server.tensors(k, first)
            if shuffled and all(torch.equal(value, first[name]) for name, value in own.items()):
                raise ConfigurationError(
                    "IFCA: shuffling gives no other model, since the weights of each tensor are "
                    "all equal: give centers, or group_rounds of 1 or more"
                )

    def on_round_start(self) -> None:
        """Start a round without choices."""
        super().on_round_start()
        self._chosen = torch.full_like(self.assignments, -1)

    def centers_of(self, clients: Tensor) -> Tensor:
        """Return the cluster that each client ``[C]`` chooses, or in first rounds its group."""
        chosen = self._groups[clients.cpu()] if self._grouping else self._choose(clients)
        self._chosen[clients.cpu()] = chosen
        return chosen

    def receive(self, updates: ClientUpdates) -> None:
        """Add a chunk's models to the means of their chosen clusters."""
        self.assign(updates, self._chosen[updates.clients.cpu()])

    def means(self) -> dict[int, TensorDict]:
        """Return the mean of each cluster chosen in this round, and shared layers for all."""
        means = super().means()
        common = WeightedMean(self.server.tensors(0, self.common))
        for k, mean in means.items():
            common.add(mean.unsqueeze(0), self.mean.weights[k : k + 1])
        if self.divide_by == "cohort":
            shares = self.mean.weights / self.mean.weights.sum()
            for k, mean in means.items():
                start = self.server.tensors(k, self.shared_parameters)
                for name, value in start.items():
                    mean[name] = torch.lerp(value, mean[name], shares[k].item())
        if means and self.common:
            (together,) = common.compute()
            means = {k: means.get(k, together).update(together) for k in range(self.num_clusters)}
        return means

    def bytes_down(self, clients: Tensor, sent: TensorDict) -> int:
        """Return the bytes of all K models for each of the clients ``[C]``, shared layers once."""
        model = super().bytes_down(clients, sent)
        own = model - super().bytes_down(clients, sent.select(*self.common))
        return model if self._grouping else model + (self.num_clusters - 1) * own

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let all clients choose again."""
        self._chosen.fill_(-1)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store the choices of all clients."""
        self.update_assignments(self._chosen)

    on_test_epoch_start = on_validation_epoch_start
    on_test_epoch_end = on_validation_epoch_end

    @property
    def _grouping(self) -> bool:
        return self.clients.rounds < self.group_rounds

    def _choose(self, clients: Tensor) -> Tensor:
        """Return the center with the lowest training loss, by client ``[C]``."""
        chosen, before = self.lowest_loss(clients), self.assignments[clients.cpu()]
        before = torch.where(before < 0, self.weights.argmax(), before)
        return torch.where(chosen < 0, before, chosen)


def _shuffle(values: Tensor, random: torch.Generator) -> Tensor:
    order = torch.randperm(values.numel(), generator=random)
    return values.detach().flatten()[order.to(values.device)].view_as(values)


METHODS = (
    Method(
        "IFCA",
        IFCA,
        "IFCA(num_clusters)",
        "the model that fits it best",
        tested={
            "": {"num_clusters": 2},
            "cohort": {
                "num_clusters": 2,
                "group_rounds": 2,
                "divide_by": "cohort",
                "buffers": "local",
            },
        },
    ),
)

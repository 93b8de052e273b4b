"""FedPAC: clients align their features, and each gets its own combination of heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from lightning import LightningModule
from numpy.typing import NDArray
from scipy.optimize import nnls
from tensordict import TensorDict
from torch import Tensor, nn

from pflight.errors import ConfigurationError
from pflight.fedavg import FedAvg
from pflight.local_client import LocalClient, LocalWork
from pflight.method import Model, Phase
from pflight.models.client_methods.fedrep import HeadFirst
from pflight.options import NonNegativeInt, PositiveFloat, checked
from pflight.runs.distributed import owned
from pflight.states.head import EXTRA, Head
from pflight.states.layers import Layers
from pflight.states.state import WeightedMean
from pflight.states.updates import ClientUpdates

from .clustering import gather_states
from .prototypes import COUNTS, MEANS, ClassMeans, Prototypes, Prototypical, class_sums
from .registry import Method

_SHARED, _SPREAD = f"{EXTRA}.shared", f"{EXTRA}.spread"
_HEAD = Layers(head=True)
_SMALLEST = 1e-3  # heads with smaller weights are left out
_RIDGE = 1e-12  # gives equal clients equal weights

Vector = NDArray[np.float64]


class Statistics(Prototypes):
    """Prototypes of classes, and the sent statistics of a client's features.

    Args:
        classes: Number of classes.
        width: Number of features.
    """

    def __init__(self, classes: int, width: int) -> None:
        super().__init__(classes, width)
        self.register_buffer("shared", torch.zeros(classes, width))  # means times class shares
        self.register_buffer("spread", torch.zeros(()))


@checked
class Aligned(Prototypical):
    r"""Trains a client's head first, then its body, with features pulled to prototypes.

    With the received body, a client computes the means :math:`\mu_{ic}` of its features by class.
    With its class shares :math:`p_{ic}` it also computes (FedPAC, Xu et al. 2023, eq. 9 to 12)

    .. math:: h_{ic} = p_{ic} \mu_{ic}, \qquad
        v_i = \frac{1}{n_i} \Big(\sum_c p_{ic} \overline{\|z\|^2}_{ic}
        - \sum_c p_{ic}^2 \|\mu_{ic}\|^2\Big).

    It trains first the head with a fixed body, then the body with a fixed head. In the second phase
    the loss gets the term :math:`\frac{\lambda}{B d} \sum_b \|z_b - \bar c_{y_b}\|^2` (eq. 6). A
    class without global prototype uses the client's own, :math:`\mu_{ic}`. In the first round there
    are no prototypes and no term. Then the client's prototypes are the means with the new body.

    Args:
        lam: Weight :math:`\lambda` of the distance.
        head_lr: Learning rate of the head; ``None`` for the client's own.
        head_epochs: Epochs of the head.


    References:
        Xu et al., Personalized Federated Learning with Feature Alignment and Classifier
        Collaboration, ICLR 2023, https://arxiv.org/abs/2306.11867.
    """

    keeps_memory = True

    def __init__(
        self, lam: float = 1.0, head_lr: PositiveFloat | None = 0.1, head_epochs: NonNegativeInt = 1
    ) -> None:
        super().__init__(lam)
        self.head_lr = head_lr
        self.head_epochs = head_epochs

    def extra(self, module: LightningModule, head: Head) -> nn.Module:
        """Return the statistics."""
        return Statistics(int(module.num_classes), head.width)  # type: ignore[arg-type]

    def phases(self, module: LightningModule, epochs: int, anchored: bool) -> list[Phase]:
        """Return the epochs of the head, then those of the body."""
        phases = HeadFirst(_HEAD, self.head_epochs).phases(module, epochs, anchored)
        first = phases[0]._replace(lr=self.head_lr) if self.head_epochs else phases[0]
        return [first, *phases[1:]]

    def before_training(self, work: LocalWork, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Compute the statistics with the received body, and own prototypes for missing ones."""
        states = super().before_training(work, clients, sent)
        means = states[MEANS]
        like = {"z": means[0], "n": means[0, :, 0], "squares": means[0, 0, 0]}
        sums = work.sums(clients, states, _moments, like)
        counts = sums["n"]
        total = counts.sum(1).clamp(min=1)
        own = sums["z"] / counts.clamp(min=1).unsqueeze(2)
        shared = sums["z"] / total.view(-1, 1, 1)
        spread = (sums["squares"] / total - shared.square().sum((1, 2))) / total
        known = states[COUNTS] > 0
        later = known.any(1, keepdim=True)
        return states.update(
            {
                MEANS: torch.where(known.unsqueeze(2), means, own),
                COUNTS: torch.where(known, states[COUNTS], counts * later),
                _SHARED: shared,
                _SPREAD: spread,
            }
        )

    def models(self) -> dict[str, Model]:
        """Judge clients by their last trained models, too."""
        return {"local/": self._local}

    def _local(
        self, work: LocalWork, clients: Tensor, sent: TensorDict, own: TensorDict
    ) -> TensorDict:
        states = self.start_states(work, clients, sent)
        return states.update(work.remembered(clients, states).states)


def _moments(c: LocalClient, batch: Any) -> dict[str, Tensor]:
    """Return a batch's sums of features and samples by class, and of squared features."""
    sums = class_sums(c, batch)
    _, z, _ = c.task_loss_and_features(batch)
    return {**sums, "squares": c.batch_sum(z.square().sum(1))}


@checked
class FedPAC(FedAvg):
    r"""Personalized federated learning with feature alignment and classifier combination.

    The server takes the mean of the bodies, as FedAvg does, and the mean of the prototypes,
    weighted by samples. Each client that sent a head :math:`V_i` gets its own combination
    :math:`\sum_j a_{ij} V_j` of the round's heads, with the weights

    .. math:: a_i = \arg\min_{a \ge 0, \sum a = 1} a^\top P_i\, a, \qquad P_i = \mathrm{diag}(v_j) +
        \Big(\sum_c \langle h_{ic} - h_{jc},\, h_{ic} - h_{kc} \rangle\Big)_{jk}

    (Xu et al. 2023, eq. 13 and 14). Weights below 0.001 are left out. Clients train as in
    :class:`Aligned`. A client is judged by the server's body with its combined head. It keeps this
    head until it takes part again. The tags ``local/`` report its trained model. A newcomer's head
    is the mean of the last returned heads, with the weights of the bodies.

    Args:
        lam: Weight of the distance to the prototypes; by default 1, or the value of the client
            module's own client method.
        head_lr: Learning rate of the head, by default 0.1.
        head_epochs: Epochs of the head before the local epochs of the body; by default 1.
            Fine-tuning begins with them.
        weighting: As in :class:`FedAvg`, for the body.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.

    Raises:
        ConfigurationError: If an option is out of range, the clients' module has no classes or no
            head, or clients train for local steps.

    Example:
        >>> FedPAC(lam=0.1).client_method
        Aligned(lam=0.1, align='sample', head_lr=0.1, head_epochs=1)

    References:
        Xu et al., Personalized Federated Learning with Feature Alignment and Classifier
        Collaboration, ICLR 2023, https://arxiv.org/abs/2306.11867.
    """

    aggregates = False

    owns_head = True

    def __init__(
        self,
        lam: float | None = None,
        head_lr: float | None = None,
        head_epochs: int | None = None,
        weighting: Literal["samples", "uniform"] = "samples",
        buffers: Literal["shared", "local", "reset"] = "shared",
    ) -> None:
        super().__init__(weighting, buffers)
        self.use_client_method(Aligned, lam=lam, head_lr=head_lr, head_epochs=head_epochs)

    def setup_server(self) -> None:
        """Make the server's model and prototypes."""
        super().setup_server()
        if self.clients.training.steps is not None:
            raise ConfigurationError(
                "FedPAC counts local epochs: give local_epochs instead of local_steps"
            )
        head = HeadFirst(_HEAD).parts(self.clients.module)["head"]
        self._head = [name for name in self.clients.layout.parameters if name in head]

    def round(self, cohort: Tensor) -> None:
        """Run one round: the head's epochs, then the local epochs of the body."""
        client_method = self.clients.client_method
        assert isinstance(client_method, Aligned)
        self.on_round_start()
        epochs = client_method.head_epochs + self.clients.training.epochs
        for updates in self.clients.train(cohort, self.broadcast, epochs=epochs):
            self.receive(updates)
        self.set_pseudo_gradients()

    def broadcast(self, clients: Tensor) -> TensorDict:
        """Return the body, each client's own head, and the prototypes."""
        names = [name for name in self.sent_names if name not in (_SHARED, _SPREAD)]
        sent = self.server.expand(0, names, len(clients))
        return sent.update(self.clients.stored(clients, sent.select(*self._head)))

    def on_round_start(self) -> None:
        """Start new means."""
        state = self.server.tensors(0, self.sent_names)
        told = (MEANS, COUNTS, _SHARED, _SPREAD)
        self.mean = WeightedMean({n: t for n, t in state.items() if n not in told})
        self._means = ClassMeans(state[MEANS], state[COUNTS])
        self._told: list[ClientUpdates] = []

    def receive(self, updates: ClientUpdates) -> None:
        """Add a chunk of clients to the means, and keep their heads."""
        super().receive(updates)
        self._means.add(updates.states[MEANS], updates.states[COUNTS])
        told = updates.states.select(*self._head, _SHARED, _SPREAD, COUNTS)
        self._told.append(replace(updates, states=told, kept=None))

    def set_pseudo_gradients(self) -> None:
        """Step the body, update the prototypes, and combine heads for clients that sent one."""
        super().set_pseudo_gradients()
        self._means.update()
        clients, states = gather_states(self._told, self.clients.device)
        self._told.clear()
        weights = combinations(
            states[_SHARED].flatten(1).double().cpu().numpy(),
            states[_SPREAD].double().cpu().numpy(),
            states[COUNTS].double().sum(1).cpu().numpy(),
        )
        mine = torch.isin(clients, owned(clients))
        combined = {
            name: torch.tensordot(torch.from_numpy(weights).to(states[name])[mine], states[name], 1)
            for name in self._head
        }
        self.clients.store(clients[mine], TensorDict(combined, batch_size=[int(mine.sum())]))

    def bytes_down(self, clients: Tensor, sent: TensorDict) -> int:
        """Return the bytes of bodies, heads and prototypes."""
        return super().bytes_down(clients, sent.exclude(COUNTS))


def combinations(shared: Vector, spread: Vector, counts: Vector) -> Vector:
    """Return the weights of all heads for each client ``[S, S]``.

    Args:
        shared: Means of features times class shares, by client ``[S, K d]``.
        spread: Their variances ``[S]``. For a client with a single sample, the largest variance is
            used.
        counts: Numbers of samples ``[S]``.
    """
    spread = np.where(counts > 1, spread, spread.max(initial=0)).clip(min=0)
    weights = np.zeros((len(shared), len(shared)))
    for own, row in zip(shared, weights, strict=True):
        distances = shared - own
        matrix = distances @ distances.T + np.diag(spread)
        size = np.trace(matrix) or 1.0
        # Up to their sum, the weights solve min u'Pu + (1'u - 1)^2, u >= 0.
        values, vectors = np.linalg.eigh(matrix / size + _RIDGE * np.eye(len(shared)))
        factor = np.sqrt(values.clip(min=0))[:, None] * vectors.T
        found, _ = nnls(np.vstack([factor, np.ones(len(shared))]), np.append(0 * spread, 1))
        found /= found.sum()
        if found.max() >= _SMALLEST:
            found[found < _SMALLEST] = 0
        row[:] = found / found.sum()
    return weights


METHODS = (
    Method(
        "FedPAC",
        FedPAC,
        "FedPAC(lam, head_lr)",
        "shared body, own mixture of heads",
        needs="a head and classes",
    ),
)

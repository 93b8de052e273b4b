"""pFedFDA: a shared body under a linear discriminant of each client's features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from lightning import LightningModule
from numpy.typing import NDArray
from scipy.optimize import minimize
from tensordict import TensorDict
from torch import Tensor, nn

from pflight.fedavg import FedAvg
from pflight.local_client import LocalClient, LocalWork
from pflight.method import ClientMethod, Model, Phase
from pflight.options import NonNegativeFloat, OpenUnitInterval, checked
from pflight.states.head import EXTRA, Head
from pflight.states.layers import body_names
from pflight.states.updates import ClientUpdates

from .gaussians import Gaussians, Judged
from .registry import Method

_MEANS, _COVARIANCE = f"{EXTRA}.means", f"{EXTRA}.covariance"
_WEIGHT, _BIAS = f"{EXTRA}.weight", f"{EXTRA}.bias"
_STARTS = np.linspace(0, 1, 11)


class Discriminant(nn.Module):
    """Means and covariance of features, and their linear discriminant, which predicts.

    Args:
        classes: Number of classes.
        width: Number of features.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.register_buffer("means", torch.rand(classes, width))
        self.register_buffer("covariance", torch.eye(width))
        self.register_buffer("weight", torch.zeros(classes, width))
        self.register_buffer("bias", torch.zeros(classes))

    def forward(self, z: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the discriminant's output in place of the head's."""
        return nn.functional.linear(z, self.weight, self.bias)


@checked
class Discriminating(ClientMethod):
    r"""Trains a body under the fixed linear discriminant of Gaussian features.

    Features of class :math:`c` are modelled as :math:`\mathcal N(\mu_c, \Sigma)`. This gives
    (pFedFDA, Mclaughlin and Su 2024, eq. 3 to 8)

    .. math:: w_c = S^{-1} \mu_c, \qquad b_c = \ln \pi_{ic} - \tfrac12 \mu_c^\top w_c, \qquad
        S = (1 - \epsilon) \Sigma + \epsilon \tfrac{\mathrm{tr} \Sigma}{d} I, \qquad
        \pi_{ic} \propto p_{ic} + \epsilon

    with class shares :math:`p_{ic}`. A client trains with the received statistics. Then it computes
    its own means, with the received ones for missing classes, and the covariance :math:`\Sigma_i =
    \frac{1}{\max(n_i - 1, 1)} \sum_b (z_b - \mu_{i y_b})(z_b - \mu_{i y_b})^\top + r
    I`. It sends :math:`\beta` of these plus :math:`1 - \beta` of the received ones. :math:`\beta`
    in [0, 1] minimises the cross-entropy over two stratified halves of its samples. Each half is
    judged by the statistics of the other. Classes of a single sample are left out. If no class is
    left, :math:`\beta` is 0. The search starts from points on a grid. A client is judged by the
    received body, with statistics computed in this way.

    Args:
        ridge: :math:`r`.
        eps: :math:`\epsilon`.
        betas: 2 for one :math:`\beta` of the means and another of the covariance, or 1.


    References:
        Mclaughlin and Su, Personalized Federated Learning via Feature Distribution Adaptation,
        NeurIPS 2024, https://arxiv.org/abs/2411.00329.
    """

    needs_head = True
    needs_classes = True
    temporary = ("weight", "bias")

    def __init__(
        self, ridge: NonNegativeFloat = 1.0, eps: OpenUnitInterval = 1e-4, betas: Literal[1, 2] = 2
    ) -> None:
        self.ridge = ridge
        self.eps = eps
        self.betas = betas

    def extra(self, module: LightningModule, head: Head) -> nn.Module:
        """Return the discriminant."""
        return Discriminant(int(module.num_classes), head.width)  # type: ignore[arg-type]

    def phases(self, module: LightningModule, epochs: int, anchored: bool) -> list[Phase]:
        """Train only the body."""
        return [Phase(0, epochs, body_names(module))]

    def before_training(self, work: LocalWork, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Write the discriminants of the received statistics into the states."""
        states = super().before_training(work, clients, sent)
        return self._discriminating(work, clients, sent, states)

    def finish(
        self, work: LocalWork, clients: Tensor, starts: TensorDict, trained: TensorDict
    ) -> TensorDict:
        """Store the mixtures of the clients' own and the received statistics."""
        return self._adapted(work, clients, trained)

    def models(self) -> dict[str, Model]:
        """Judge clients by their own statistics, also after fine-tuning; else by received ones."""
        return {"": self._own, "finetuned/": self._own, "server/": self._discriminating}

    def _own(
        self, work: LocalWork, clients: Tensor, sent: TensorDict, states: TensorDict
    ) -> TensorDict:
        """Write the discriminants of the clients' own statistics into the states."""
        if work.has_samples:
            states = self._adapted(work, clients, states)
        return self._discriminating(work, clients, sent, states)

    def _discriminating(
        self, work: LocalWork, clients: Tensor, sent: TensorDict, states: TensorDict
    ) -> TensorDict:
        """Write the discriminants of the statistics in the states into these."""
        priors = self._priors(work, clients, states)
        given = zip(states[_MEANS].double(), states[_COVARIANCE].double(), priors, strict=True)
        heads = [Gaussians(*own).head(prior, self.eps) for *own, prior in given]
        weight, bias = (torch.stack(parts) for parts in zip(*heads, strict=True))
        return states.update({_WEIGHT: weight.to(states[_WEIGHT]), _BIAS: bias.to(states[_BIAS])})

    def _priors(self, work: LocalWork, clients: Tensor, states: TensorDict) -> Tensor:
        counts = 0 * states[_BIAS]
        if work.has_samples:
            counts = work.class_counts_of(clients).to(counts.device)
        shares = counts.double() / counts.sum(1, keepdim=True).clamp(min=1) + self.eps
        return shares / shares.sum(1, keepdim=True)

    def _adapted(self, work: LocalWork, clients: Tensor, states: TensorDict) -> TensorDict:
        priors = self._priors(work, clients, states)
        means, covariances = states[_MEANS].clone(), states[_COVARIANCE].clone()
        for row, found in enumerate(work.rows(clients, states, _features)):
            sent = Gaussians(means[row].double(), covariances[row].double())
            if found is None or (found and not found["z"].isfinite().all()):  # it has failed
                means[row] = torch.nan
            elif found:
                z, y = found["z"].double(), found["y"]
                folds = halves(y, work.random(int(clients[row])))
                share = self.share(z, y, folds, sent, priors[row])
                means[row], covariances[row] = sent.mixed(sent.of(z, y, self.ridge), share)
        return states.update({_MEANS: means, _COVARIANCE: covariances})

    def share(self, z: Tensor, y: Tensor, folds: Tensor, sent: Gaussians, prior: Tensor) -> Tensor:
        r"""Return :math:`\beta` of a client: one for means and covariance each, or one for both.

        Args:
            z: Features of the client's samples ``[n, d]``.
            y: Their classes ``[n]``.
            folds: The half of each sample ``[n]``; negative ones are left out.
            sent: The received statistics.
            prior: Prior of the classes ``[K]``.
        """
        if not (folds >= 0).any():
            return torch.zeros(self.betas).to(z)
        one, other = ((z[folds == half], y[folds == half]) for half in (0, 1))
        judged = [
            Judged.of(sent, sent.of(*own, self.ridge), self.eps, prior, *samples)
            for own, samples in ((one, other), (other, one))
        ]

        def loss(at: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
            values, slopes = zip(*(half.loss(at[0], at[-1]) for half in judged), strict=True)
            return sum(values), np.sum(slopes, axis=(0,) if len(at) == 2 else None)

        # There may be several minima: search on each edge of the covariance's share, from its best.
        edges = [()] if self.betas == 1 else [(0.0,), (1.0,)]
        how = {"jac": True, "bounds": [(0.0, 1.0)] * self.betas, "method": "L-BFGS-B", "tol": 1e-12}
        found = []
        for edge in edges:
            starts = [np.array([share, *edge]) for share in _STARTS]
            found.append(minimize(loss, min(starts, key=lambda at: loss(at)[0]), **how))
        return torch.tensor(min(found, key=lambda one: one.fun).x).to(z)


def halves(y: Tensor, random: torch.Generator) -> Tensor:
    """Divide samples of classes ``[n]`` into two halves with about equal numbers of each class.

    Args:
        y: The classes.
        random: Draws the halves.

    Returns:
        0 or 1 for each sample, -1 for the only sample of a class ``[n]``.
    """
    folds = torch.full_like(y, -1)
    order = torch.randperm(len(y), generator=random).to(y.device)
    for label in y.unique():
        own = order[y[order] == label]
        folds[own] = torch.arange(len(own)).to(y) % 2 if len(own) > 1 else -1
    return folds


def _features(c: LocalClient, batch: Any) -> dict[str, Tensor]:
    return {"z": c.task_loss_and_features(batch)[1], "y": c.labels(batch)}


@checked
class PFedFDA(FedAvg):
    r"""Personalisation by feature distribution adaptation (Mclaughlin and Su 2024, algorithm 1).

    The server takes the means of bodies and of the statistics of features, as FedAvg does. The head
    of the network is not used and does not travel. Clients train as in :class:`Discriminating`.
    Clients, newcomers included, are judged by the server's body, with a discriminant adapted to
    their samples. A client without data uses the server's statistics.

    Args:
        ridge: Multiple of the identity in a client's covariance; by default 1, or the value of the
            client module's own client method.
        eps: Regularisation of covariance and class shares, by default 1e-4.
        betas: 2, the default, or 1.
        weighting: As in :class:`FedAvg`.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.

    Raises:
        ConfigurationError: If an option is out of range, or the clients' module has no classes or
            no head.

    Example:
        >>> PFedFDA(betas=1).client_method
        Discriminating(ridge=1.0, eps=0.0001, betas=1)

    References:
        Mclaughlin and Su, Personalized Federated Learning via Feature Distribution Adaptation,
        NeurIPS 2024, https://arxiv.org/abs/2411.00329.
    """

    owns_head = True

    def __init__(
        self,
        ridge: float | None = None,
        eps: float | None = None,
        betas: Literal[1, 2] | None = None,
        weighting: Literal["samples", "uniform"] = "samples",
        buffers: Literal["shared", "local", "reset"] = "shared",
    ) -> None:
        super().__init__(weighting, buffers)
        self.use_client_method(Discriminating, ridge=ridge, eps=eps, betas=betas)

    @property
    def algorithm_name(self) -> str:
        """The paper's name."""
        return "pFedFDA"

    @property
    def sent_names(self) -> tuple[str, ...]:
        """Names of the entries that travel: all but the head."""
        head = f"{self.clients.head.name}."
        return tuple(name for name in super().sent_names if not name.startswith(head))

    def bytes_down(self, clients: Tensor, sent: TensorDict) -> int:
        """Return the bytes of bodies and statistics, of a symmetric covariance only half."""
        return super().bytes_down(clients, sent) - len(clients) * self._spared

    def bytes_up(self, updates: ClientUpdates) -> int:
        """Likewise."""
        return super().bytes_up(updates) - len(updates.clients) * self._spared

    @property
    def _spared(self) -> int:
        covariance = self.clients.layout.template[_COVARIANCE]
        return len(covariance) * (len(covariance) - 1) // 2 * covariance.element_size()


METHODS = (
    Method(
        "pFedFDA",
        PFedFDA,
        "PFedFDA(ridge, eps)",
        "shared body, own discriminant",
        needs="a head and classes",
        tolerance=1e-7,  # a searched minimum is exact to the root of rounding errors
    ),
)

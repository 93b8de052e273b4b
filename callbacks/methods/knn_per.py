"""kNN-Per: FedAvg, with predictions by the client's nearest own samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from lightning import LightningModule
from tensordict import TensorDict
from torch import Tensor, nn

from pflight.fedavg import FedAvg
from pflight.local_client import LocalClient, LocalWork
from pflight.method import ClientMethod, Model
from pflight.options import ClosedUnitInterval, PositiveFloat, PositiveInt, checked
from pflight.states.head import EXTRA, Head

from .registry import Method

_STORE, _LABELS, _SHARE = (f"{EXTRA}.{name}" for name in ("store", "labels", "share"))
_SHARES = 10  # steps of lam from 0 to 1
_UNKNOWN = 0.5  # lam without validation samples

Kernel = Literal["squared", "distance"]


class Neighbours(nn.Module):
    r"""Mixes the head's output with the classes of the nearest features in a store.

    Args:
        classes: Number of classes.
        width: Number of features.
        capacity: Samples in the store.
        k: Neighbours.
        scale: Scale of the kernel.
        kernel: As in :class:`Nearest`.
    """

    store: Tensor
    labels: Tensor
    share: Tensor

    def __init__(
        self, classes: int, width: int, capacity: int, k: int, scale: float, kernel: Kernel
    ) -> None:
        super().__init__()
        self.classes = classes
        self.k = min(k, capacity)
        self.scale = scale
        self.kernel = kernel
        self.register_buffer("store", torch.zeros(capacity, width))
        self.register_buffer("labels", torch.full((capacity,), -1))  # -1 where there is nothing
        self.register_buffer("share", torch.zeros(()))

    def forward(self, z: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """Return logarithms of probabilities, or the head's output if the share is 0."""
        logits = head(z)
        votes = self.votes(z)
        mixed = mixture(self.share, votes, logits.softmax(1).to(votes)).log()
        return torch.where(self.share > 0, mixed.to(logits.dtype), logits)

    def votes(self, z: Tensor) -> Tensor:
        """Return the weights ``[n, K]`` of the nearest neighbours' classes, which sum to 1."""
        wide = torch.promote_types(self.store.dtype, torch.float32)  # half precision has no cdist
        exact = "donot_use_mm_for_euclid_dist"
        distances = torch.cdist(z.to(wide), self.store.to(wide), compute_mode=exact)
        distances = torch.where(self.labels >= 0, distances, torch.inf)
        nearest, places = (part[:, : self.k] for part in distances.sort(dim=1, stable=True))
        if self.kernel == "squared":
            exponents = -nearest.square() / (z.shape[1] * self.scale)
        else:
            exponents = -nearest / self.scale
        weights = (exponents - exponents[:, :1]).exp()  # the largest is 1
        classes = torch.arange(self.classes, device=z.device)
        rows = self.labels[places].unsqueeze(2) == classes
        totals = (weights.unsqueeze(2) * rows).sum(1)
        return totals / totals.sum(1, keepdim=True)


def mixture(share: Tensor, votes: Tensor, probabilities: Tensor) -> Tensor:
    """Return mixed probabilities, all above 0."""
    mixed = share * votes + (1 - share) * probabilities
    return mixed.clamp(min=torch.finfo(mixed.dtype).tiny)


@checked
class Nearest(ClientMethod):
    r"""Predicts with a client's nearest training samples. Training is plain.

    A client stores the features :math:`h_j` of its training samples, computed with the received
    model. For a sample with features h, the k nearest (the first on ties) vote for their classes
    with the weights :math:`e^{-\|h - h_j\|^2 / (d s)}`. With the votes :math:`q`, the prediction is
    :math:`\lambda_i q + (1 - \lambda_i)\,\mathrm{softmax}(\text{logits})` (kNN-Per, Marfoq et al.
    2022, eq. 6 to 8). :math:`\lambda_i` is the first of 0, 0.1, ..., 1 with the highest accuracy on
    the client's validation samples, and 0.5 if it has none. A client without training samples
    predicts by the head.

    Args:
        k: Neighbours.
        scale: :math:`s`.
        lam: :math:`\lambda_i` of all clients, or ``None`` to choose it for each.
        capacity: Maximum number of samples in the store. Of more, some are drawn by seed, round and
            client.
        kernel: ``"squared"`` as above, or ``"distance"`` for :math:`e^{-\|h - h_j\| / s}`.


    References:
        Marfoq et al., Personalized Federated Learning through Local Memorization, ICML 2022,
        https://arxiv.org/abs/2111.09360.
    """

    needs_head = True
    needs_classes = True
    temporary = ("store", "labels", "share")

    def __init__(
        self,
        k: PositiveInt = 7,
        scale: PositiveFloat = 1.0,
        lam: ClosedUnitInterval | None = None,
        capacity: PositiveInt = 1000,
        kernel: Kernel = "squared",
    ) -> None:
        self.k = k
        self.scale = scale
        self.lam = lam
        self.capacity = capacity
        self.kernel: Kernel = kernel

    def extra(self, module: LightningModule, head: Head) -> nn.Module:
        """Return the store."""
        classes: Any = module.num_classes
        how = self.capacity, self.k, self.scale, self.kernel
        return Neighbours(int(classes), head.width, *how)

    def loss(self, c: LocalClient, batch: Any) -> Tensor:
        """Return the loss of the head's output alone."""
        return c.task_loss_and_features(batch, lambda _, logits: logits)[0]

    def models(self) -> dict[str, Model]:
        """Judge clients with filled stores."""
        return {"": self._filled, "finetuned/": self._filled}

    def _filled(
        self, work: LocalWork, clients: Tensor, sent: TensorDict, states: TensorDict
    ) -> TensorDict:
        """Fill the stores with features of the clients' models, and choose their shares."""
        if not work.has_samples:
            return states
        store, labels, share = (states[name].clone() for name in (_STORE, _LABELS, _SHARE))
        held_out: list[Any] = [{} for _ in clients]
        if self.lam is None:
            held_out = work.rows(clients, states, _outputs, "val")
        training = work.rows(clients, states, _outputs)
        for row, (own, others) in enumerate(zip(training, held_out, strict=True)):
            if own is None or others is None:
                store[row] = torch.nan  # it has failed
            elif own:
                random = work.random(int(clients[row]))
                chosen = torch.randperm(len(own["y"]), generator=random)[: self.capacity]
                chosen = chosen.sort().values.to(store.device)
                store[row, : len(chosen)] = own["z"][chosen].to(store)
                labels[row, : len(chosen)] = own["y"][chosen]
                share[row] = self._share(store[row], labels[row], others)
        return states.update({_STORE: store, _LABELS: labels, _SHARE: share})

    def _share(self, store: Tensor, labels: Tensor, others: dict[str, Tensor]) -> float:
        """Return a client's share of the votes."""
        if self.lam is not None or not others:
            return _UNKNOWN if self.lam is None else self.lam
        logits, y = others["logits"], others["y"]
        how = self.capacity, self.k, self.scale, self.kernel
        neighbours = Neighbours(logits.shape[1], store.shape[1], *how).to(store)
        neighbours.store, neighbours.labels = store, labels
        votes, probabilities = neighbours.votes(others["z"]), logits.softmax(1).to(store)
        shares = torch.arange(_SHARES + 1).to(store) / _SHARES
        mixtures = [mixture(share, votes, probabilities) for share in shares]
        right = [(mixed.argmax(1) == y).sum() for mixed in mixtures]
        return float(shares[torch.stack(right).argmax()])


def _outputs(c: LocalClient, batch: Any) -> dict[str, Tensor]:
    _, z, logits = c.task_loss_and_features(batch)
    return {"z": z, "y": c.labels(batch), "logits": logits}


@checked
class KNNPer(FedAvg):
    r"""FedAvg with local memorisation (Marfoq et al. 2022, algorithm 1).

    Training is FedAvg's. Clients, newcomers included, are judged by the server's model together
    with their nearest training samples, as in :class:`Nearest`. The store never travels. The tags
    ``server/`` report the model alone.

    Args:
        k: Neighbours; by default 7, or the value of the client module's own client method.
        scale: Scale of the kernel, by default 1.
        lam: Share of the neighbours in a prediction; by default it is chosen for each client.
        capacity: Maximum number of stored samples of a client, by default 1000.
        kernel: ``"squared"``, the default, or ``"distance"``.
        weighting: As in :class:`FedAvg`.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.

    Raises:
        ConfigurationError: If an option is out of range, or the clients' module has no classes or
            no head.

    Example:
        >>> KNNPer(k=3).client_method.capacity
        1000

    References:
        Marfoq et al., Personalized Federated Learning through Local Memorization, ICML 2022,
        https://arxiv.org/abs/2111.09360.
    """

    def __init__(
        self,
        k: int | None = None,
        scale: float | None = None,
        lam: float | None = None,
        capacity: int | None = None,
        kernel: Kernel | None = None,
        weighting: Literal["samples", "uniform"] = "samples",
        buffers: Literal["shared", "local", "reset"] = "shared",
    ) -> None:
        super().__init__(weighting, buffers)
        self.use_client_method(Nearest, k=k, scale=scale, lam=lam, capacity=capacity, kernel=kernel)

    @property
    def algorithm_name(self) -> str:
        """The paper's name."""
        return "kNN-Per"


METHODS = (
    Method(
        "kNN-Per",
        KNNPer,
        "KNNPer(k, scale)",
        "the server's model, and its own samples",
        needs="a head and classes",
        tested={"": {"k": 3}},
    ),
)

"""FedAS: clients align the body with their own features; gradients give the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import lightning as L
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.func import grad

from pflight.engines.alone.client import task_loss
from pflight.engines.alone.copies import ready
from pflight.fedavg import FedAvg
from pflight.local_client import LocalClient, LocalWork
from pflight.method import ClientMethod, Model
from pflight.options import NonNegativeInt, PositiveFloat, checked
from pflight.states.head import EXTRA, Head, watched
from pflight.states.layers import body_names, head_entries
from pflight.states.state import StateLayout, entries
from pflight.states.updates import ClientUpdates

from .prototypes import own_prototypes
from .registry import Method

_FISHER = f"{EXTRA}.fisher"
_LEAST = 1e-30  # weight of a sample; matters only if no client has a gradient

Align = Literal["sample", "class"]


class Information(nn.Module):
    """Holds the size of a client's gradients. The head predicts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("fisher", torch.zeros(()))

    def forward(self, z: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the head's output."""
        return head(z)


class Aligning(L.LightningModule):
    """Aligns the features of a client module with the means of classes, in evaluation mode.

    Args:
        module: The client module. A copy is aligned, with a fixed head.
        width: Number of features.
        lr: Step of SGD.
        align: As in :class:`Synchronised`.
    """

    means: Tensor

    def __init__(self, module: L.LightningModule, width: int, lr: float, align: Align) -> None:
        super().__init__()
        self.module = ready(module)
        classes: Any = module.num_classes
        weight = next(self.module.parameters())
        self.register_buffer("means", weight.new_zeros(classes, width))
        self.lr = lr
        self.align = align

    def on_train_start(self) -> None:
        """Leave BatchNorm's statistics unchanged."""
        self.module.eval()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the distance of a batch's features from the means of their classes."""
        with watched(self.module) as seen:
            task_loss(self.module, batch)
        z = seen[-1][0]
        rows = (batch[1].unsqueeze(1) == torch.arange(len(self.means), device=z.device)).to(z)
        sizes = rows.sum(0)
        if self.align == "sample":
            return ((z - rows @ self.means).square().mean(1) / (rows @ sizes)).sum()
        centers = (rows.T @ z) / sizes.clamp(min=1).unsqueeze(1)
        return ((centers - self.means).square().mean(1) * (sizes > 0)).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD for the body."""
        body = {*body_names(self.module)}
        trained = [p for name, p in self.module.named_parameters() if name in body]
        return torch.optim.SGD(trained, lr=self.lr)


@checked
class Synchronised(ClientMethod):
    r"""Aligns the body that a client receives with its own features, before it trains.

    With its model of its last participation, a client computes the means :math:`c_{ik}` of its
    features by class. Then it aligns the received body, in evaluation mode and with a new SGD. On
    each batch it takes a step along the gradient of

    .. math:: \sum_{k \in B} \frac{1}{n_k d} \sum_{b \in k} \|z_b - c_{ik}\|^2

    with :math:`n_k` the batch's samples of class k (FedAS, Yang et al. 2024, eq. 4 to 6); with
    ``align="class"`` of :math:`\frac{1}{d} \sum_k \|\bar z_k - c_{ik}\|^2`. Then it trains the body
    with its own head, and sends

    .. math:: F_i = \sum_B \|\nabla f_i(B)\|^2

    over body, head and all batches, in evaluation mode (eq. 8). In its first participation there is
    nothing to align with. It keeps its model, and is judged by it.

    Args:
        align: ``"sample"`` or ``"class"``.
        align_lr: Step of the alignment.
        align_epochs: Epochs of the alignment; with 0 there is none.
        fisher: ``"batch"`` as above, or ``"sample"`` for the mean over samples.


    References:
        Yang et al., FedAS: Bridging Inconsistency in Personalized Federated Learning, CVPR 2024.
    """

    needs_head = True
    needs_classes = True
    keeps_memory = True
    per_sample = ("fisher",)

    def __init__(
        self,
        align: Align = "sample",
        align_lr: PositiveFloat = 0.01,
        align_epochs: NonNegativeInt = 1,
        fisher: Literal["batch", "sample"] = "batch",
    ) -> None:
        self.align: Align = align
        self.align_lr = align_lr
        self.align_epochs = align_epochs
        self.fisher = fisher

    def check_sent(self, sent: Mapping[str, Tensor], num_samples: int, num_steps: int) -> str:
        """Refuse a negative trace."""
        return "its Fisher information is negative" if bool(sent[_FISHER] < 0) else ""

    def extra(self, module: L.LightningModule, head: Head) -> nn.Module:
        """Return room for the sent size of gradients."""
        return Information()

    def before_training(self, work: LocalWork, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Return the received bodies, aligned, with the clients' own heads."""
        states = super().before_training(work, clients, sent)
        kept = work.remembered(clients, states)
        seen = kept.seen.to(clients.device)
        head, own = f"{work.head.name}.", {*work.layout.own}
        body = [n for n in work.layout.parameters if not n.startswith(head) and n not in own]
        if not (seen.any() and self.align_epochs and body):
            return states
        before = states.clone(recurse=False).update(kept.states)
        like = torch.zeros(work.head.outputs, work.head.width).to(states[_FISHER])
        means, _ = own_prototypes(work, clients, before, like)
        given = {f"module.{n}": value for n, value in entries(states) if n not in own}
        starts = TensorDict({**given, "means": means}, batch_size=[len(clients)])
        aligned = states.clone()
        width = work.head.width
        trained = work.learn(
            lambda module: Aligning(module, width, self.align_lr, self.align),
            clients[seen],
            starts[seen],
            doing="to align its body",
            epochs=self.align_epochs,
        )
        for name in body:
            aligned[name][seen] = trained[f"module.{name}"]
        return aligned

    def models(self) -> dict[str, Model]:
        """Judge clients by their last trained models."""
        return {"": self._trained}

    def _trained(
        self, work: LocalWork, clients: Tensor, sent: TensorDict, states: TensorDict
    ) -> TensorDict:
        return states.update(work.remembered(clients, states).states)

    def finish(
        self, work: LocalWork, clients: Tensor, starts: TensorDict, trained: TensorDict
    ) -> TensorDict:
        """Store the size of the clients' gradients."""
        alone = self.fisher == "sample"
        size, like = 1 if alone else work.batch_size, {"fisher": trained[_FISHER][0]}
        layout, head = work.layout, f"{work.head.name}."
        counted = {*layout.shared_parameters, *(n for n in layout.parameters if n.startswith(head))}
        squares = partial(_squared_gradient, counted)
        fisher = work.sums(clients, trained, squares, like, size)["fisher"]
        if alone:
            fisher = fisher / work.num_samples_of(clients)
        return trained.update({_FISHER: fisher})


def _squared_gradient(counted: set[str], c: LocalClient, batch: Any) -> dict[str, Tensor]:
    buffers = {name: buffer.clone() for name, buffer in c.buffers.items()}
    slopes = grad(c.task_loss_at)({**c.weights}, batch, buffers)
    squares = [slope.square().sum() for name, slope in slopes.items() if name in counted]
    return {"fisher": torch.stack(squares).sum()}


@checked
class FedAS(FedAvg):
    r"""Federated learning with alignment and client-synchronisation (Yang et al. 2024).

    Heads are the clients' own. The server takes the mean of bodies with the weights
    :math:`F_i / \sum_j F_j`, or by numbers of samples if all are 0. Clients train, and compute
    :math:`F_i`, as in :class:`Synchronised`. A newcomer has the server's body with the initial
    head.

    Args:
        align: ``"sample"``, the default, or ``"class"``; or the value of the client module's own
            client method.
        align_lr: Step of the alignment, by default 0.01.
        align_epochs: Epochs of the alignment, by default 1.
        fisher: ``"batch"``, the default, or ``"sample"``.
        buffers: As in :class:`~pflight.callbacks.ServerCallback`.

    Raises:
        ConfigurationError: If an option is out of range, or the clients' module has no classes or
            no head.

    Example:
        >>> FedAS(align_epochs=2).client_method.align_lr
        0.01

    References:
        Yang et al., FedAS: Bridging Inconsistency in Personalized Federated Learning, CVPR 2024.
    """

    def __init__(
        self,
        align: Align | None = None,
        align_lr: float | None = None,
        align_epochs: int | None = None,
        fisher: Literal["batch", "sample"] | None = None,
        buffers: Literal["shared", "local", "reset"] = "shared",
    ) -> None:
        super().__init__("samples", buffers)
        how = {"align": align, "align_lr": align_lr, "align_epochs": align_epochs}
        self.use_client_method(Synchronised, **how, fisher=fisher)

    def private_names(self, module: L.LightningModule, layout: StateLayout) -> set[str]:
        """Return the names of the private entries, including the head."""
        return super().private_names(module, layout) | head_entries(module, layout)

    def receive(self, updates: ClientUpdates) -> None:
        """Add a chunk's bodies to the mean, weighted by gradients."""
        counts = updates.num_samples.to(updates.states[_FISHER].device)
        self.mean.add(updates.states, updates.states[_FISHER].double() + _LEAST * counts)

    def broadcast(self, clients: Tensor) -> TensorDict:
        """Return the body."""
        return super().broadcast(clients).exclude(_FISHER)


METHODS = (
    Method(
        "FedAS",
        FedAS,
        "FedAS(align_lr)",
        "its own model",
        needs="a head and classes",
        tested={"": {"align_lr": 0.1}},
    ),
)

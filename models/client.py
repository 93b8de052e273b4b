"""The client half of an algorithm: one client's model, loss and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, Literal

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer
from torchmetrics.functional.classification import multiclass_accuracy

from pflight.options import check_range, checked
from pflight.state import StateModule, state_tensors

Batch = tuple[Tensor, Tensor]


@checked
class ClientModule(L.LightningModule):
    """One client's model, loss and optimizer; trains alone under a stock Trainer too.

    An algorithm's client half is a subclass with another :meth:`loss`. Inside a federation the
    module is told, before it trains, what the server sent (:attr:`anchor`), what this client kept
    from earlier rounds (:attr:`memory`), and scalars (:attr:`num_samples`, :attr:`mean_samples`,
    :attr:`seen`, :attr:`num_steps`). None of these is a parameter or part of ``state_dict()``. A
    module without an anchor, as in centralized training, has a zero penalty. What it sets on itself
    while it trains lasts as long as the client's local training; only its state is kept.

    Args:
        network: Maps a batch of inputs ``[batch, ...]`` to logits ``[batch, num_classes]``.
        num_classes: Number of classes.
        optimizer: Builds the optimizer from the trainable parameters, anew at every participation.
        gradient_clip_val: Clip this client's gradients at this value (``None``: no clipping), with
            several models those of each by itself. The Trainer's option of the same name can't do
            it, because the Trainer sees the server only.
        gradient_clip_algorithm: ``"norm"`` or ``"value"``.

    Raises:
        ConfigurationError: If an option is out of range.

    Attributes:
        anchor: The state that the server sent this round, or ``None``.
        memory: The state that this client kept, or ``None``; in an engine that trains many clients
            at once, the state that it starts from if it kept none.
        num_samples: Scalar tensor, the client's number of training samples.
        mean_samples: Scalar tensor, the mean of that number over all clients that may train,
            whatever the cohort; newcomers and clients without training samples never do.
        seen: Scalar tensor, 1 if this client's memory has been written, else 0.
        num_steps: Scalar tensor, the optimizer steps of this participation, for
            :meth:`after_training`.

    Example:
        >>> client = ClientModule(torch.nn.Linear(4, 2), num_classes=2)
        >>> client.loss((torch.zeros(3, 4), torch.tensor([0, 1, 1]))).shape
        torch.Size([])
    """

    keeps_memory: ClassVar[bool] = False
    """Whether a client keeps a state between its participations, which it finds in ``memory``."""

    judged_by_memory: ClassVar[bool] = False
    """Whether a client is judged by the state that it kept, once there is one."""

    averages_samples: ClassVar[bool] = True
    """Whether :meth:`loss` is a mean over samples, taken by a loss of ``torch.nn.functional``, plus
    terms that don't look at the batch; it speeds clients of unequal size up. It is said of the
    :meth:`loss` of the class that sets it: a subclass with another one has to say so itself."""

    told: ClassVar[tuple[str, ...]] = ("num_samples", "mean_samples", "seen", "num_steps")
    """Names of the scalars that a federation tells a client."""

    num_samples: Tensor
    mean_samples: Tensor
    seen: Tensor
    num_steps: Tensor

    def __init__(
        self,
        network: nn.Module,
        num_classes: int,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = lambda p: torch.optim.SGD(
            p, lr=0.01
        ),
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] = "norm",
    ) -> None:
        super().__init__()
        check_range(self, "[1, inf)", num_classes=num_classes)
        check_range(self, "(0, inf)", gradient_clip_val=gradient_clip_val)
        self.network = network
        self.num_classes = num_classes
        self.optimizer = optimizer
        self.gradient_clip_val = gradient_clip_val
        self.gradient_clip_algorithm = gradient_clip_algorithm
        self.anchor: StateModule | None = None
        self.memory: StateModule | None = None
        for name in self.told:
            self.register_buffer(name, torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits ``[batch, num_classes]`` of a batch of inputs."""
        return self.network(x)

    def loss(self, batch: Batch) -> Tensor:
        """Return the scalar that this client minimises: mean cross-entropy plus its penalty."""
        x, y = batch
        return F.cross_entropy(self(x), y)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of a batch and log it as ``train/loss``."""
        loss = self.loss(batch)
        self.log("train/loss", loss.detach(), batch_size=len(batch[1]))
        return loss

    def squared_distance(self, state: StateModule) -> Tensor:
        r"""Return :math:`\|w - \hat w\|^2` to a state, over this client's trainable parameters."""
        held = state.tensors()
        distance = torch.zeros((), device=self.device)
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                distance = distance + (parameter - held[name]).square().sum()
        return distance

    def after_training(self) -> None:
        """Change what this client sends or keeps, beyond its trained parameters.

        Called once after local training in a round, without gradients and before :meth:`remember`;
        not after fine-tuning. Buffers are changed in place, as BatchNorm does, by tensor operations
        alone: an engine that trains many clients at once runs them on all of these together.
        """

    def remember(self) -> Mapping[str, Tensor]:
        """Return what this client keeps, under names of its state: its model as it was trained.

        Called after local training where :attr:`keeps_memory` is set. The values are copied, and
        never travel.
        """
        return state_tensors(self)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log loss and accuracy when this module is validated by itself."""
        self._log_quality(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log loss and accuracy when this module is tested by itself."""
        self._log_quality(batch, "test")

    def predict_step(self, batch: Batch | Tensor, batch_idx: int = 0) -> Tensor:
        """Return the logits ``[batch, num_classes]`` of a batch, with or without labels."""
        return self(batch if isinstance(batch, Tensor) else batch[0])

    def configure_optimizers(self) -> Optimizer:
        """Build the optimizer over the trainable parameters."""
        return self.optimizer([p for p in self.parameters() if p.requires_grad])

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip at the client's own value, or at the Trainer's when it trains alone under one."""
        if self.gradient_clip_val is None:
            super().configure_gradient_clipping(
                optimizer, gradient_clip_val, gradient_clip_algorithm
            )
        else:
            self.clip_gradients(optimizer, self.gradient_clip_val, self.gradient_clip_algorithm)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of each of the :meth:`clip_groups` by themselves."""
        groups = self.clip_groups()
        if len(groups) == 1:
            super().clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif gradient_clip_val:
            by_value = gradient_clip_algorithm == "value"
            clip = clip_grad_value_ if by_value else clip_grad_norm_
            stepped = {id(p) for options in optimizer.param_groups for p in options["params"]}
            for group in groups:
                clip([p for p in group if id(p) in stepped], gradient_clip_val)

    def clip_groups(self) -> list[list[nn.Parameter]]:
        """Return the parameters of each model that is trained now, which has a norm of its own.

        Gradients are clipped group by group, by default all together; with several groups, or none,
        the parameters outside them are not clipped.
        """
        return [list(self.parameters())]

    def _log_quality(self, batch: Batch, stage: str) -> None:
        x, y = batch
        logits = self(x)
        accuracy = multiclass_accuracy(logits, y, num_classes=self.num_classes, average="micro")
        values = {f"{stage}/loss": F.cross_entropy(logits, y), f"{stage}/acc": accuracy}
        self.log_dict(values, prog_bar=True, batch_size=len(y))

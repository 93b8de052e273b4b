"""One client in local training, alone."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor

from pflight.data.loaders import labels_of
from pflight.errors import ConfigurationError
from pflight.local_client import Named, memory_for
from pflight.method import ClientMethod
from pflight.states.head import EXTRA, Outputs, head_of, watched
from pflight.states.state import call_with
from pflight.task import Task, trains_as_a_task

from .copies import Copies
from .muting import muted
from .trainer import loss_of, step_arguments

SCALARS = ("num_samples", "mean_samples", "seen", "num_steps")
"""Names of a client's scalars. A client method can read them."""
_NO_LOSS = "its training_step returned no loss"


class ClientModel:
    """A client's model for a client method: the part that is the same alone and in a stack."""

    module: L.LightningModule
    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    _call: tuple[tuple[Any, ...], dict[str, Any]]
    _batch: Any
    client_method: ClientMethod
    remembered: Mapping[str, Tensor] | None

    @property
    def memory(self) -> Mapping[str, Tensor] | None:
        """See :class:`~pflight.method.LocalClient`."""
        if not self.client_method.terms:  # it is asked for in each step
            return self.remembered
        return memory_for(None, self.remembered)

    @memory.setter
    def memory(self, kept: Mapping[str, Tensor] | None) -> None:
        self.remembered = kept

    def memory_of(self, term: Named) -> Mapping[str, Tensor] | None:
        """See :class:`~pflight.method.LocalClient`."""
        return memory_for(term, self.remembered)

    def task_loss(self, batch: Any) -> Tensor:
        """See :class:`~pflight.method.LocalClient`."""
        raise NotImplementedError

    def _loss_at(self, tensors: Mapping[str, Tensor], batch: Any) -> Tensor:
        """Return the module's loss with other tensors instead of its own."""
        raise NotImplementedError

    def mean(self, values: Tensor) -> Tensor:
        """See :class:`~pflight.method.LocalClient`."""
        raise NotImplementedError

    def task_loss_at(
        self,
        weights: Mapping[str, Tensor],
        batch: Any,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """See :class:`~pflight.method.LocalClient`."""
        held = self.buffers if buffers is None else buffers
        return self._loss_at({**weights, **held}, batch)

    def task_loss_and_logits(self, batch: Any) -> tuple[Tensor, Tensor]:
        """See :class:`~pflight.method.LocalClient`."""
        logits: Tensor | None = None

        def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            nonlocal logits
            self._call, logits = (args, kwargs), output

        hook = self.module.register_forward_hook(note, with_kwargs=True)
        try:
            loss = self.task_loss(batch)
        finally:
            hook.remove()
        if logits is None:
            raise RuntimeError("its loss never calls self(...), whose logits are asked for")
        return loss, logits

    @torch.no_grad()
    def logits_with(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """See :class:`~pflight.method.LocalClient`."""
        args, kwargs = self._call
        with _evaluating(self.module):
            return call_with(self.module, self._lent(tensors), operator.call, *args, **kwargs)

    @property
    def extra(self) -> Mapping[str, Tensor]:
        """See :class:`~pflight.method.LocalClient`."""
        prefix, tensors = f"{EXTRA}.", {**self.weights, **self.buffers}
        return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}

    def task_loss_and_features(
        self, batch: Any, outputs: Outputs | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`~pflight.method.LocalClient`."""
        self._batch = batch
        with watched(self.module, outputs) as seen:
            loss = self.task_loss(batch)
        return loss, *self._last(seen)

    @torch.no_grad()
    def features_with(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """See :class:`~pflight.method.LocalClient`."""
        with _evaluating(self.module), watched(self.module) as seen:
            self._loss_at(self._lent(tensors), self._batch)
        return self._last(seen)

    def predict(
        self, features: Tensor, classify: Callable[[Tensor], Tensor], **options: Any
    ) -> Tensor:
        """See :class:`~pflight.method.LocalClient`."""
        extra = self.module.get_submodule(EXTRA)
        return call_with(extra, self.extra, operator.call, features, classify, **options)

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        """See :class:`~pflight.method.LocalClient`."""
        if isinstance(self.module, Task):
            return self.mean(self.module.losses(outputs, batch[1]))
        return self.mean(F.cross_entropy(outputs, self.labels(batch), reduction="none"))

    def labels(self, batch: Any) -> Tensor:
        """See :class:`~pflight.method.LocalClient`."""
        return labels_of(batch)

    def classes(self, batch: Any) -> Tensor:
        """See :class:`~pflight.method.LocalClient`."""
        y = self.labels(batch).unsqueeze(1)
        count: Any = self.module.num_classes
        rows = y == torch.arange(count, device=y.device)
        return rows.to(next(iter(self.weights.values())).dtype)

    def _lent(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors with copies of the buffers, since a step may change buffers in place."""
        return {n: t.clone() if n in self.buffers else t for n, t in tensors.items()}

    def _last(self, seen: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        if not seen:
            raise RuntimeError(f"its loss never calls its head, {head_of(self.module).name}")
        return seen[-1]


@contextmanager
def _evaluating(module: L.LightningModule) -> Iterator[None]:
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


class AloneClient(ClientModel):
    """One client alone, for its client method: a :class:`~pflight.method.LocalClient`.

    Args:
        copies: The module's copies.
        client_method: The client method of this model.
        own: The client method's own entries, without their prefix.
        scalars: The scalars by name, such as ``num_samples``.
        received: The model that the server sent, with buffers.
        shared: For a personal copy, the client with the shared model.

    Attributes:
        has_loss: Whether a training step has given a loss.
        skipped: Whether the last training step returned no loss.
        num_skipped: Number of steps without a loss in this training.
    """

    def __init__(
        self,
        copies: Copies,
        client_method: ClientMethod,
        own: Mapping[str, Tensor],
        scalars: Mapping[str, Tensor],
        received: Mapping[str, Tensor] | None,
        shared: AloneClient | None = None,
    ) -> None:
        self.copies = copies
        self.client_method = client_method
        self.module = copies.module
        self.trainer = copies.trainer
        self.own = own
        self.shared = shared
        self.remembered = None
        self.class_counts = torch.empty(0)
        self.num_samples, self.mean_samples, self.seen, self.num_steps = (
            scalars[name] for name in SCALARS
        )
        parameters = {*copies.parameters}
        self.weights = {name: copies.live[name] for name in copies.parameters}
        self.buffers = {name: t for name, t in copies.live.items() if name not in parameters}
        self.set_anchor(received)
        self.has_loss = self.skipped = False
        self.num_skipped = 0
        self._own_step: Callable[[], Tensor] | None = None
        self.trainer.penalty = self._penalty

    # For client methods

    def task_loss(self, batch: Any) -> Tensor:
        """See :class:`~pflight.method.LocalClient`."""
        if self._own_step is None:
            return task_loss(self.module, batch)
        return self._own_step()

    def mean(self, values: Tensor) -> Tensor:
        """See :class:`~pflight.method.LocalClient`."""
        return values.sum() / len(values)

    def batch_mean(self, values: Tensor) -> Tensor:
        """See :class:`~pflight.method.LocalClient`."""
        return values.mean(0)

    def batch_sum(self, values: Tensor) -> Tensor:
        """See :class:`~pflight.method.LocalClient`."""
        return values.sum(0)

    def state(self) -> dict[str, Tensor]:
        """See :class:`~pflight.method.LocalClient`."""
        held = self.copies.tensors()
        return {name: held[name] for name in self.copies.live}

    def _loss_at(self, tensors: Mapping[str, Tensor], batch: Any) -> Tensor:
        index = 0 if self._own_step is None else self.trainer.batch_idx
        try:
            return call_with(self.module, tensors, task_loss, batch, index)
        except RuntimeError as error:
            if "mutate a captured Tensor" not in str(error):
                raise
            raise RuntimeError(
                "its training_step changes a tensor in place that is not in its state_dict(), such "
                "as a non-persistent buffer, through which the algorithm can't differentiate"
            ) from error

    # For the engine

    def set_anchor(self, received: Mapping[str, Tensor] | None) -> None:
        """Set the anchor to the model that the server sent."""
        self.received = self.anchor = received
        if received is not None:
            self.anchor = {name: received[name] for name in self.copies.shared}

    def remember(self) -> Mapping[str, Tensor]:
        """Return the memory that the client method keeps of this client."""
        return self.client_method.remember_all(self)

    def after_training(self) -> None:
        """Let the client method change its own entries."""
        self.client_method.after_training(self)

    def step(self, own_step: Callable[[], Any], batch: Any) -> Any:
        """Run a training step of the module with the client method's loss."""
        if not self.module.automatic_optimization:
            return own_step()
        if trains_as_a_task(self.module):
            self.has_loss = True
            loss = self.client_method.objective(self, batch)
            self.module.log("train/loss", loss.detach(), batch_size=len(batch[1]))
            return loss
        output: Any = None

        def run() -> Tensor:
            nonlocal output
            output = own_step()
            loss = loss_of(output)
            if loss is None:
                raise _StepSkippedError(_NO_LOSS)
            return loss

        self._own_step, self.skipped = run, False
        try:
            loss = self.client_method.objective(self, batch)
        except _StepSkippedError:
            self.skipped = True
            self.num_skipped += 1
            return output
        finally:
            self._own_step = None
        self.has_loss = True
        return {**output, "loss": loss} if isinstance(output, dict) else loss

    def loss(self, batch: Any, size: int) -> Tensor | None:
        """Return the loss of a training step, outside of training and without logs."""

        def step(batch: Any) -> Tensor | None:
            with muted(self.module):
                return loss_of(self.step(lambda: training_step(self.module, batch), batch))

        return self.trainer.loss(batch, size, step)

    def _penalty(self) -> Tensor | None:
        return self.client_method.added(self)


class _StepSkippedError(RuntimeError):
    """A training step returned no loss."""


def training_step(module: L.LightningModule, batch: Any, index: int = 0) -> Any:
    """Run a module's training step and return its output. Its batch index is optional."""
    return module.training_step(*step_arguments(module, batch, index))


def task_loss(module: L.LightningModule, batch: Any, index: int = 0) -> Tensor:
    """Return a module's loss on a batch: a task's ``loss``, or the loss of the training step.

    In other modules, ``loss`` may be anything, such as ``nn.functional.mse_loss``.

    Args:
        module: The client module.
        batch: The batch of a training step.
        index: Index of the batch in its epoch.

    Raises:
        ConfigurationError: If the module optimizes by hand. Its training step gives no loss.
    """
    if trains_as_a_task(module):
        return module.loss(batch)
    if not module.automatic_optimization:
        raise ConfigurationError(
            f"the algorithm asks for the loss of its clients, which {type(module).__name__} with "
            "manual optimization does not hand out"
        )
    with muted(module):
        loss = loss_of(training_step(module, batch, index))
    if loss is None:
        raise _StepSkippedError(_NO_LOSS)
    return loss

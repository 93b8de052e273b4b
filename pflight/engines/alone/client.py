"""One client in local training, alone: what its client method sees, and its models."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from pflight.data.loaders import labels_of
from pflight.engines.base import in_evaluation
from pflight.engines.client_setup import ClientSetup
from pflight.errors import ConfigurationError
from pflight.local_client import Named, memory_for
from pflight.method import OWN, PERSONAL, ClientMethod
from pflight.randomness import generators_of, isolated
from pflight.runs.allocator import give_freed_memory_back
from pflight.states.head import EXTRA, Outputs, head_of, watched
from pflight.states.state import StateModule, call_with
from pflight.states.updates import STOPS
from pflight.task import Task, trains_as_a_task

from .copies import Copies, muted
from .trainer import STEP_HOOKS, loss_of, step_arguments

SCALARS = ("num_samples", "mean_samples", "seen", "num_steps")
"""Names of a client's scalars. A client method can read them."""
_NO_LOSS = "its training_step returned no loss"
HOOKS = (
    *("on_fit_start", "on_train_start", "on_train_epoch_start"),
    *STEP_HOOKS,
    *("on_train_epoch_end", "on_train_end", "on_fit_end"),
)
"""Hooks of a module around its training."""
_LARGE_KERNEL = 2**20  # weights; such a convolution takes 1.2 times as long channels-last


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
        """See :class:`~pflight.local_client.LocalClient`."""
        if not self.client_method.terms:  # it is asked for in each step
            return self.remembered
        return memory_for(None, self.remembered)

    @memory.setter
    def memory(self, kept: Mapping[str, Tensor] | None) -> None:
        self.remembered = kept

    def memory_of(self, term: Named) -> Mapping[str, Tensor] | None:
        """See :class:`~pflight.local_client.LocalClient`."""
        return memory_for(term, self.remembered)

    def task_loss(self, batch: Any) -> Tensor:
        """See :class:`~pflight.local_client.LocalClient`."""
        raise NotImplementedError

    def _loss_at(self, tensors: Mapping[str, Tensor], batch: Any) -> Tensor:
        """Return the module's loss with other tensors instead of its own."""
        raise NotImplementedError

    def mean(self, values: Tensor) -> Tensor:
        """See :class:`~pflight.local_client.LocalClient`."""
        raise NotImplementedError

    def task_loss_at(
        self,
        weights: Mapping[str, Tensor],
        batch: Any,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """See :class:`~pflight.local_client.LocalClient`."""
        held = self.buffers if buffers is None else buffers
        return self._loss_at({**weights, **held}, batch)

    def task_loss_and_logits(self, batch: Any) -> tuple[Tensor, Tensor]:
        """See :class:`~pflight.local_client.LocalClient`."""
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
        """See :class:`~pflight.local_client.LocalClient`."""
        args, kwargs = self._call
        with in_evaluation(self.module.modules()):
            return call_with(self.module, self._lent(tensors), operator.call, *args, **kwargs)

    @property
    def extra(self) -> Mapping[str, Tensor]:
        """See :class:`~pflight.local_client.LocalClient`."""
        prefix, tensors = f"{EXTRA}.", {**self.weights, **self.buffers}
        return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}

    def task_loss_and_features(
        self, batch: Any, outputs: Outputs | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`~pflight.local_client.LocalClient`."""
        self._batch = batch
        with watched(self.module, outputs) as seen:
            loss = self.task_loss(batch)
        return loss, *self._last(seen)

    @torch.no_grad()
    def features_with(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """See :class:`~pflight.local_client.LocalClient`."""
        with in_evaluation(self.module.modules()), watched(self.module) as seen:
            self._loss_at(self._lent(tensors), self._batch)
        return self._last(seen)

    def predict(
        self, features: Tensor, classify: Callable[[Tensor], Tensor], **options: Any
    ) -> Tensor:
        """See :class:`~pflight.local_client.LocalClient`."""
        extra = self.module.get_submodule(EXTRA)
        return call_with(extra, self.extra, operator.call, features, classify, **options)

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        """See :class:`~pflight.local_client.LocalClient`."""
        if isinstance(self.module, Task):
            return self.mean(self.module.losses(outputs, batch[1]))
        return self.mean(F.cross_entropy(outputs, self.labels(batch), reduction="none"))

    def labels(self, batch: Any) -> Tensor:
        """See :class:`~pflight.local_client.LocalClient`."""
        return labels_of(batch)

    def classes(self, batch: Any) -> Tensor:
        """See :class:`~pflight.local_client.LocalClient`."""
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


class AloneClient(ClientModel):
    """One client alone, for its client method: a :class:`~pflight.local_client.LocalClient`.

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
        noted: For each of the client method's notes, its sum and the number of steps ``[2]``.
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
        self.noted = {
            name: torch.zeros(2, dtype=torch.double, device=self.seen.device)
            for name in client_method.all_notes
        }
        self._own_step: Callable[[], Tensor] | None = None
        self.trainer.penalty = self._penalty

    # For client methods

    def note(self, name: str, value: Tensor, counts: Tensor) -> None:
        """See :class:`~pflight.local_client.LocalClient`."""
        self.noted[name] += torch.stack([value.detach() * counts, counts])

    def task_loss(self, batch: Any) -> Tensor:
        """See :class:`~pflight.local_client.LocalClient`."""
        if self._own_step is None:
            return task_loss(self.module, batch)
        return self._own_step()

    def mean(self, values: Tensor) -> Tensor:
        """See :class:`~pflight.local_client.LocalClient`."""
        return values.sum() / len(values)

    def batch_mean(self, values: Tensor) -> Tensor:
        """See :class:`~pflight.local_client.LocalClient`."""
        return values.mean(0)

    def batch_sum(self, values: Tensor) -> Tensor:
        """See :class:`~pflight.local_client.LocalClient`."""
        return values.sum(0)

    def state(self) -> dict[str, Tensor]:
        """See :class:`~pflight.local_client.LocalClient`."""
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


class LocalModels:
    """A client's copy of the module and, if its method has one, its personal copy.

    Args:
        setup: The client module, its client method, and its data.

    Attributes:
        client: The current client.
        clients: The client's models. The personal one is first: it may read the other before a
            step.
        hooks: The module's own hooks around its training steps.
        plain: Whether the module trains exactly as a ready-made task.
        draws: Whether the module has its own random generators.
    """

    client: AloneClient
    clients: list[AloneClient]

    def __init__(self, setup: ClientSetup) -> None:
        self.setup = setup
        self.client_method = setup.client_method
        self._channels_last = False
        self._drifted: set[str] = set()
        self._copies: Any = None
        self.clients = []
        self._personal_copies: Copies | None = None
        module = setup.client
        self.draws = bool(generators_of(module))
        self.hooks = [hook for hook in HOOKS if is_overridden(hook, module)]
        self.plain = (
            trains_as_a_task(module)
            and setup.form is not None
            and not self.hooks
            and module.automatic_optimization
            and getattr(module, "gradient_clip_val", None) is None
            and type(module).configure_gradient_clipping is Task.configure_gradient_clipping
            and type(module).configure_optimizers is Task.configure_optimizers
        )
        self.renew()

    def renew(self) -> None:
        """Forget all changes of the copies."""
        setup = self.setup
        for copies in filter(None, (self._copies, self._personal_copies)):
            copies.close()
        for client in self.clients:
            vars(client).clear()  # its received model and its memory
        if self.clients:
            give_freed_memory_back()
        device = setup.device
        arguments = setup.client, setup.layout, setup.precision, device, self._channels_last
        self._copies = Copies(*arguments)
        self._personal_copies = None if self.client_method.personal is None else Copies(*arguments)
        own = [name for name in setup.layout.own if name.startswith(OWN)]
        held = StateModule({name.removeprefix(OWN): setup.layout.template[name] for name in own})
        setup.precision.convert_module(held).to(device)
        self._own = held.tensors()
        dtype = setup.dtype if setup.dtype.is_floating_point else torch.float32
        self._scalars = {name: torch.zeros((), dtype=dtype, device=device) for name in SCALARS}

    @property
    def module(self) -> L.LightningModule:
        """The current copy of the client module."""
        return self._copies.module

    def load(
        self,
        start: Mapping[str, Tensor],
        anchored: bool,
        memory: Mapping[str, Tensor] | None = None,
        client: int | None = None,
    ) -> None:
        """Load the next client into the copies.

        Args:
            start: The client's state.
            anchored: Whether the client knows its start, the model that the server sent.
            memory: The client's memory.
            client: The client's id, if it needs its own class counts.
        """
        self._load(self._copies, start, "")
        for name, tensor in self._own.items():
            tensor.copy_(start[f"{OWN}{name}"])
        for name in ("seen", "num_steps"):
            self._scalars[name].zero_()
        self._scalars["mean_samples"].fill_(self.setup.mean_samples)
        received = self._laid_out({n: start[n] for n in self._copies.live}) if anchored else None
        known = self._own, self._scalars, received
        self.client = AloneClient(self._copies, self.client_method, *known)
        self.clients = [self.client]
        if client is not None and self.client_method.needs_classes:
            self.client.class_counts = self.setup.class_counts[client]
        if memory is not None:
            self.client.remembered = self._laid_out(memory)
            self.client.seen.fill_(1)
        if self._personal_copies is None:
            return
        self._load(self._personal_copies, start, PERSONAL)
        if anchored:
            assert self.client_method.personal is not None
            personal = AloneClient(
                self._personal_copies, self.client_method.personal, *known, self.client
            )
            self.clients = [personal, self.client]

    def _load(self, copies: Copies, start: Mapping[str, Tensor], prefix: str) -> None:
        copies.load(start, prefix, reuse=self.plain)
        if self.setup.tells_round:
            copies.set_round(self.setup.round_index)

    def _laid_out(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return tensors of the module in the memory format of its copies."""
        if not self._channels_last:
            return tensors
        return {
            name: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t
            for name, t in tensors.items()
        }

    def evaluated(self, state: Mapping[str, Tensor]) -> L.LightningModule:
        """Return the copy of the module with a client's tensors, in evaluation mode."""
        self._load(self._copies, state, "")
        return self.module.eval()

    def mend_frozen(self) -> None:
        """Reset changed frozen tensors. Warn once of each."""
        for copies in filter(None, (self._copies, self._personal_copies)):
            for name in copies.frozen.mend(copies.module):
                if name not in self._drifted:
                    self._drifted.add(name)
                    rank_zero_warn(f"training changed the frozen {name!r}; it is reset each time")

    def state(self) -> dict[str, Tensor]:
        """Return the state of the current client."""
        held = {**self._copies.tensors(), **{f"{OWN}{n}": t for n, t in self._own.items()}}
        if self._personal_copies is not None:
            held |= {f"{PERSONAL}{n}": t for n, t in self._personal_copies.tensors().items()}
        return held

    def try_channels_last(self) -> None:
        """Use the memory format channels-last if it is faster and the module allows it."""
        kernels = [
            part.weight.numel()
            for part in self.setup.client.modules()
            if isinstance(part, nn.Conv2d)
        ]
        on_cpu = self.setup.device.type == "cpu"
        if on_cpu and self.plain and 0 < max(kernels, default=0) < _LARGE_KERNEL:
            self._channels_last = True
            self.renew()
            with isolated(self.setup.device):
                self._channels_last = self._runs()
            self.renew()

    def _runs(self) -> bool:
        """Try a step and an evaluation. A ``view`` in the client may need the usual layout."""
        setup = self.setup
        start = {name: t.to(setup.device) for name, t in setup.layout.template.items()}
        memory = None
        if self.client_method.remembers:
            names = self.client_method.all_remembered(setup.layout)
            memory = {name: start[entry] for name, entry in names.items()}
        try:
            self.load(start, anchored=True, memory=memory, client=0)
            batch = setup.batch([leaf.clone() for leaf in setup.example])
            with setup.forward_context(), torch.enable_grad():
                for client in self.clients:
                    client.client_method.objective(client, batch).backward()
            with torch.no_grad():
                self.client.after_training()
                self.client.remember()
            self.client.module.eval()
            with setup.forward_context(), torch.no_grad():
                self.client.module(setup.example[0])
        except STOPS:
            raise
        except BaseException:
            return False
        return True

"""One client module for many clients at once."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from lightning import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.rank_zero import rank_zero_debug
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from pflight.adapters.side_path import addends_of
from pflight.engines.alone.client import ClientModel, training_step
from pflight.engines.alone.copies import Frozen
from pflight.engines.alone.trainer import loss_of
from pflight.engines.base import resting
from pflight.engines.client_setup import ClientSetup
from pflight.local_client import Batches, Part, Pass
from pflight.method import OWN, PERSONAL, ClientMethod, Phase
from pflight.states.head import step_extra
from pflight.states.state import StateLayout, call_with, other_places
from pflight.task import trains_as_a_task

from .autocast import StackedAutocast

_ADVICE = "There is a performance drop because we have not yet implemented the batching rule"
Columns = dict[str, Tensor]
"""Tensors ``[C, ...]`` by their names in a client, one row for each of ``C`` clients."""
ANCHOR, MEMORY = "anchor.", "memory."
"""Prefixes of a client's inputs that are not in its state."""
_OFTEN = 12  # calls with the same shapes before the first record; before the second twice as many
_RECORDS = 16  # largest number of records


class CheckedEmbeddings(TorchFunctionMode):
    """Makes the vector NaN for an index outside of an embedding's table.

    Under ``vmap`` such an index is no error, but reads a vector of another client.

    Example:
        >>> with CheckedEmbeddings():
        ...     F.embedding(torch.tensor([1, 2]), torch.tensor([[3.0], [4.0]])).flatten()
        tensor([4., nan])
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is not F.embedding:
            return function(*args, **(kwargs or {}))
        return _embed(*args, **(kwargs or {}))


def _embed(input: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
    known = (input >= 0) & (input < len(weight))
    vectors = F.embedding(input.clamp(0, len(weight) - 1), weight, *args, **options)
    return torch.where(known.unsqueeze(-1), vectors, torch.nan)


class Mode(NamedTuple):
    """The inputs of clients in training."""

    anchored: bool
    """Whether clients know the model that the server sent: in a round, not in fine-tuning."""
    remembers: bool
    """Whether clients know their memory."""


class Stack:
    """A client module and its client method. Under ``vmap``, stacks replace their tensors.

    After some calls, the operations of the gradients are recorded. They are then repeated, bit for
    bit, without the module: the Python code takes longer than small operations.

    Args:
        module: A copy of the client module in its training modes. It belongs to this object.
        client_method: The client method.
        layout: The state layout of both.

    Attributes:
        after_training: Lets the client method change all clients' own entries in place.
        remember: Returns the clients' memory ``[C, ...]``, given their states and inputs.
    """

    def __init__(
        self, module: LightningModule, client_method: ClientMethod, layout: StateLayout
    ) -> None:
        self.module = module
        self.client_method = client_method
        self.layout = layout
        stay = {*layout.own, *layout.frozen}
        own = {*layout.own}
        self.parameters = [name for name in layout.parameters if name not in own]
        self.shared = layout.shared_parameters
        self.live = [name for name in layout.names if name not in stay]
        self.buffers = [name for name in self.live if name not in {*self.parameters}]
        self.memory = client_method.all_remembered(layout)
        self.own = [n.removeprefix(OWN) for n in layout.own if n.startswith(OWN)]
        self.mode = Mode(anchored=True, remembers=False)
        self.training_phase: Phase | None = None
        self._frozen = Frozen(module, layout)
        self._tied = other_places(module)
        self._versions: list[int] = []  # of the module's side path
        self._modes: Hashable = None  # modes of the modules and parameters
        self._calls: Counter[Hashable] = Counter()
        self._records: dict[Hashable, Callable[..., Any]] = {}
        self._logs: dict[Mode, bool] = {}
        self._gradients = vmap(grad_and_value(self._loss, has_aux=True))
        self._outputs = vmap(self._output)
        self.after_training = vmap(self._finish, out_dims=None)
        self.remember = vmap(self._keep)
        self._training = [(part, part.training) for part in module.modules()]
        # PyTorch's advice on slow operations under vmap is not for users. It names this file.
        warnings.filterwarnings("ignore", _ADVICE)
        module._trainer = _NoTrainer()  # type: ignore[assignment]
        self.log = StepLog()
        vars(module).update(log=self.log, log_dict=self.log.values)
        self.prepare(self.mode)

    @property
    def changes_afterwards(self) -> bool:
        """Whether the client method changes its own entries after training."""
        methods = self.client_method, self.client_method.personal or self.client_method
        return any(type(own).after_training is not ClientMethod.after_training for own in methods)

    def logged(self, mode: Mode) -> Collection[str]:
        """Return the names under which a training step logs its loss.

        There are none if the client method uses other losses.
        """
        if not self._logs.get(mode, True):
            return ()
        return ("train/loss",) if trains_as_a_task(self.module) else self.log.names

    def prepare(self, mode: Mode) -> None:
        """Get ready to train."""
        self.mode = mode
        for part, training in self._training:
            part.training = training
        self._note_modes()

    def take_frozen(self, states: Mapping[str, Tensor]) -> None:
        """Set the frozen tensors from the states ``[C]``. All states have the same ones."""
        self._frozen.take({name: states[name][0] for name in self.layout.frozen})

    @contextmanager
    def phase(self, phase: Phase | None) -> Iterator[None]:
        """Freeze the parameters that don't train in a phase."""
        self.training_phase = phase
        try:
            with resting(self.module, self.layout, phase):
                self._note_modes()
                yield
        finally:
            self.training_phase = None
            self._note_modes()

    def _note_modes(self) -> None:
        self._forget_records_of_another_side_path()
        modules, parameters = self.module.modules(), self.module.parameters()
        self._modes = (
            tuple(module.training for module in modules),
            tuple(parameter.requires_grad for parameter in parameters),
        )

    def _forget_records_of_another_side_path(self) -> None:
        """Forget the recorded operations if the side path, a constant in them, has changed."""
        versions = [addend.version for addend in addends_of(self.module)]
        if versions != self._versions:
            self._versions = versions
            self._calls.clear()
            self._records.clear()

    def optimizer(self, setup: ClientSetup) -> tuple[Any, bool]:
        """Return a client's optimizer, and whether it comes from the client method.

        Args:
            setup: The setup, with the round.
        """
        module = self.module
        parameters = [p for p in module.parameters() if p.requires_grad]
        chosen = self.client_method.optimizer(parameters, self.mode.anchored)
        if chosen is not None:
            return chosen, True
        if setup.tells_round:
            vars(module)["round_index"] = setup.round_index
        own: Any = module.configure_optimizers()
        if setup.tells_round:  # a recorded step is used in all rounds
            vars(module)["round_index"] = Refused("its training_step asks for round_index")
        if isinstance(own, Optimizer):
            step_extra(module, own, self.client_method.extra_options)
        return own, False

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the module's parameters by their names in a client's state.

        If a client also trains a personal copy, each parameter has two names.
        """
        parameters = dict(self.module.named_parameters())
        awake = {name: parameters[name] for name in self.parameters}
        if self.client_method.personal is None or not self.mode.anchored:
            return awake
        return {**awake, **{f"{PERSONAL}{name}": p for name, p in awake.items()}}

    # One client, under vmap

    def _loss(
        self, parameters: Columns, others: Columns, batch: Any, weights: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Columns]]:
        return self.losses({**parameters, **others}, batch, weights)

    def losses(
        self, tensors: Mapping[str, Tensor], batch: Any, weights: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Columns]]:
        """Return a client's objective, the loss that its training step would log, and its notes.

        The objective has the loss of the client's personal model.
        """
        models = [self._client(tensors, weights)]
        with CheckedEmbeddings(), _attention_on(self.module.device):
            losses = [self.client_method.objective(models[0], batch)]
            if self.client_method.personal is not None and self.mode.anchored:
                # The personal loss may read the shared model, but does not train it.
                shared = self._client({n: t.detach() for n, t in tensors.items()}, weights)
                personal = StackedClient(
                    self, self.client_method.personal, tensors, weights, shared
                )
                losses.append(self.client_method.personal.objective(personal, batch))
                models.append(personal)
        loss = sum(losses[1:], losses[0])
        own = [model.own_loss for model in models if model.own_loss is not None]
        if trains_as_a_task(self.module):  # a task logs the client method's loss
            own = losses
        self._logs[self.mode] = bool(own)
        noted = {name: value for model in models for name, value in model.noted.items()}
        return loss, (own[-1].detach() if own else torch.zeros_like(loss), noted)

    def _client(
        self, tensors: Mapping[str, Tensor], weights: Tensor | None = None
    ) -> StackedClient:
        return StackedClient(self, self.client_method, tensors, weights)

    def _output(self, tensors: Columns, x: Tensor) -> Tensor:
        with CheckedEmbeddings(), _attention_on(self.module.device):
            return self.call(methodcaller("forward", x), {n: tensors[n] for n in self.live})

    def _finish(self, tensors: Columns) -> None:
        self.client_method.after_training(self._client(tensors))

    def _keep(self, tensors: Columns) -> Columns:
        return dict(self.client_method.remember_all(self._client(tensors)))

    def call(self, function: Callable[[Any], Any], tensors: Mapping[str, Tensor]) -> Any:
        """Call a function of the module with other tensors instead of its own."""
        return call_with(self.module, tensors, function, places=self._tied)

    # All clients of a stack

    def gradients(
        self,
        parameters: Columns,
        others: Columns,
        batch: Any,
        weights: Tensor | None = None,
    ) -> tuple[Columns, Tensor, Tensor, Columns]:
        """Return the gradients ``[C, ...]`` of the parameters, and the losses ``[C]``.

        The third result are the losses that the clients' own training steps would log. The fourth
        are their notes by name: the value, and whether it counts ``[C, 2]``.

        Args:
            parameters: Stacked parameters.
            others: All other tensors that differ between clients; buffers are changed in place.
            batch: The argument of the module's ``loss``, with tensors ``[C, batch, ...]``.
            weights: Weights of the samples ``[C, batch]``; ``None`` if all are equal.
        """
        extra = () if weights is None else (weights,)
        arguments = parameters, others, batch, *extra
        tensors = *parameters.values(), *others.values(), *tree_leaves(batch), *extra
        key = (
            self.mode,
            (*parameters, None, *others),
            self._modes,
            tuple((tensor.shape, tensor.stride()) for tensor in tensors),
        )
        if key not in self._records:
            self._calls[key] += 1
            records = len(self._records)
            if self._calls[key] < _OFTEN * (records + 1) or records == _RECORDS:
                gradients, (loss, aside) = self._gradients(*arguments)
                return gradients, loss, *aside
            self._records[key] = self._record(*arguments)
        gradients, (loss, aside) = self._records[key](*arguments)
        return gradients, loss, *aside

    def _record(self, parameters: Columns, others: Columns, *batch: Any) -> Callable[..., Any]:
        """Return the recorded operations of :meth:`gradients`; if this fails, the function."""
        copies = {name: _copy(value) for name, value in others.items()}
        try:
            return make_fx(lambda *args: self._gradients(*args))(parameters, copies, *batch)
        except Exception as error:
            rank_zero_debug(
                f"the gradients of {type(self.module).__name__} stay unrecorded: {error}"
            )
            return self._gradients

    def outputs(self, state: Columns, x: Tensor) -> Tensor:
        """Return the outputs of ``forward`` ``[C, batch, ...]`` in evaluation mode."""
        self.module.eval()
        return self._outputs({name: state[name] for name in self.live}, x)

    def found(
        self, look: Pass, state: Columns, sizes: Sequence[int], batches: list[Any]
    ) -> Columns:
        """Return a pass's results for all clients ``[C, ...]``, in evaluation mode.

        Args:
            look: The pass.
            state: The clients' models and inputs.
            sizes: Number of samples in each batch of a client.
            batches: The clients' batches, with tensors ``[C, batch, ...]``.
        """

        def find(tensors: Columns, batches: list[Any]) -> Columns:
            with CheckedEmbeddings(), _attention_on(self.module.device):
                client, own = self._client(tensors), {n: tensors[n] for n in self.live}
                # The client's module has the client's tensors, too: the pass may use it.
                return dict(self.call(lambda _: look(client, Batches(sizes, batches)), own))

        self.prepare(Mode(anchored=False, remembers=False))
        self.module.eval()
        return vmap(find)(state, batches)


def _input(name: str) -> Any:
    """Return a property that reads an input of a client at each access."""
    return property(
        lambda row: row.tensors[name], doc="See :class:`~pflight.local_client.LocalClient`."
    )


class StackedClient(ClientModel):
    """One client of a stack, for its client method: a :class:`~pflight.local_client.LocalClient`.

    Args:
        stacked: The stack.
        client_method: The client method of this model.
        tensors: The client's state and inputs, by name.
        sample_weights: Weights of a batch's samples ``[batch]``, with sum 1, or ``None``.
        shared: For a personal copy, the client with the shared model.

    Attributes:
        own_loss: The result of :meth:`task_loss` without gradients, or ``None``.
        noted: The notes of this step, each with whether it counts ``[2]``.
        real: Mask ``[batch]`` of the samples that don't just fill up the batch; ``None`` for all.
    """

    num_samples, mean_samples = _input("num_samples"), _input("mean_samples")
    class_counts, seen, num_steps = _input("class_counts"), _input("seen"), _input("num_steps")

    def __init__(
        self,
        stacked: Stack,
        client_method: ClientMethod,
        tensors: Mapping[str, Tensor],
        sample_weights: Tensor | None = None,
        shared: StackedClient | None = None,
    ) -> None:
        self.stacked = stacked
        self.module = stacked.module
        self.client_method = client_method
        self.tensors = tensors
        self.sample_weights = sample_weights
        self.shared = shared
        prefix = "" if shared is None else PERSONAL
        self.weights = {name: tensors[f"{prefix}{name}"] for name in stacked.parameters}
        self.buffers = {name: tensors[f"{prefix}{name}"] for name in stacked.buffers}
        self.own = {name: tensors[f"{OWN}{name}"] for name in stacked.own}
        mode = stacked.mode
        self.anchor = Part(tensors, ANCHOR, stacked.shared) if mode.anchored else None
        self.received = Part(tensors, ANCHOR, stacked.live) if mode.anchored else None
        self.remembered = Part(tensors, MEMORY, stacked.memory) if mode.remembers else None
        self.own_loss: Tensor | None = None
        self.noted: dict[str, Tensor] = {}
        self.real = None if sample_weights is None else sample_weights > 0

    def note(self, name: str, value: Tensor, counts: Tensor) -> None:
        """See :class:`~pflight.local_client.LocalClient`."""
        self.noted[name] = self.noted.get(name, 0) + torch.stack([value.detach() * counts, counts])

    def task_loss(self, batch: Any) -> Tensor:
        """See :class:`~pflight.local_client.LocalClient`."""
        loss = self._loss_at(self.state(), batch)
        self.own_loss = loss.detach()
        return loss

    def mean(self, values: Tensor) -> Tensor:
        """See :class:`~pflight.local_client.LocalClient`."""
        if self.sample_weights is None:
            return values.sum() / len(values)
        of_samples = values.flatten(1).sum(1) if values.dim() > 1 else values
        return (of_samples * self.sample_weights.to(of_samples.dtype)).sum()

    def batch_mean(self, values: Tensor) -> Tensor:
        """See :class:`~pflight.local_client.LocalClient`."""
        if self.sample_weights is None:
            return values.mean(0)
        return torch.tensordot(self.sample_weights.to(values.dtype), values, 1)

    def batch_sum(self, values: Tensor) -> Tensor:
        """See :class:`~pflight.local_client.LocalClient`."""
        if self.real is None:
            return values.sum(0)
        return torch.tensordot(self.real.to(values.dtype), values, 1)

    def classes(self, batch: Any) -> Tensor:
        """See :class:`~pflight.local_client.LocalClient`."""
        rows = super().classes(batch)
        return rows if self.real is None else rows * self.real.unsqueeze(1)

    def state(self) -> dict[str, Tensor]:
        """See :class:`~pflight.local_client.LocalClient`."""
        return {**self.weights, **self.buffers}

    def _loss_at(self, tensors: Mapping[str, Tensor], batch: Any) -> Tensor:
        weighted = self.sample_weights is not None
        if not trains_as_a_task(self.module):
            step = self._weighted_step if weighted else _step
            return self.stacked.call(partial(step, batch=batch), tensors)
        if weighted:
            losses = self.stacked.call(methodcaller("sample_losses", batch), tensors)
            return self._mean_loss(losses, batch)
        return self.stacked.call(methodcaller("loss", batch), tensors)

    def _mean_loss(self, losses: Tensor, batch: Any) -> Tensor:
        """Return the mean of the losses ``[n]`` of a batch's real samples."""
        module: Any = self.module
        if self.sample_weights is None or not hasattr(module, "sample_weights"):
            return self.mean(losses)
        weights = module.sample_weights(batch) * self.sample_weights.to(losses.dtype)
        return (losses * weights).sum() / weights.sum()

    def _weighted_step(self, module: Any, batch: Any) -> Tensor:
        """Return the loss of the module's training step, with a weighted mean as ``loss``.

        The step may only pass its batch to ``loss``. Otherwise it would see the samples that fill
        up the batch.
        """
        unread = Refused("its training_step does more with a batch than hand it to loss()")

        def loss(given: Any) -> Tensor:
            given = batch if given is unread else given
            return self._mean_loss(module.sample_losses(given), given)

        vars(module)["loss"] = loss
        try:
            return _step(module, unread)
        finally:
            del vars(module)["loss"]


def stacked_context(setup: ClientSetup) -> AbstractContextManager[Any]:
    """Return the context of stacked passes."""
    if isinstance(setup.precision, MixedPrecision):
        return StackedAutocast(torch.bfloat16)  # float16 is refused
    return setup.forward_context()


@contextmanager
def _attention_on(device: torch.device) -> Iterator[None]:
    """Let attention be stacked: as matrix products on a CPU, and with all masks.

    On a CPU, PyTorch's usual kernel has no batching rule. It would run once for each client. The
    package ``transformers`` leaves a mask out if it hides nothing. A stack can't ask that, since
    the answer may differ from client to client.
    """
    masks = sys.modules.get("transformers.masking_utils")
    usual = {name: getattr(masks, name) for name in _ASKING if hasattr(masks, name)}
    try:
        for name in usual:
            setattr(masks, name, lambda *_, **__: False)
        with sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" else nullcontext():
            yield
    finally:
        for name, function in usual.items():
            setattr(masks, name, function)


_ASKING = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")


def _copy(stack: Tensor) -> Tensor:
    """Copy a stack with its strides. Rows may share memory; then they are only read."""
    return stack[:1].clone().expand_as(stack) if stack.stride(0) == 0 else stack.clone()


def _step(module: LightningModule, batch: Any) -> Tensor:
    """Return the loss of the module's own training step."""
    index: Any = Refused("its training_step asks for batch_idx")
    loss = loss_of(training_step(module, batch, index))
    if loss is None:
        raise RuntimeError("its training_step returned no loss")
    return loss


class _NoTrainer:
    """Replaces a module's trainer. It has no attributes."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # it is being copied
            raise AttributeError(name)
        raise RuntimeError(f"it asks for trainer.{name}")


class Refused:
    """Replaces a value that differs between clients. It raises at any use.

    Args:
        reason: The message.
    """

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def _refuse(self, *_: Any) -> NoReturn:
        raise RuntimeError(self._reason)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # it is being copied
            raise AttributeError(name)
        self._refuse()

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __pow__ = __rpow__ = _refuse
    __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = _refuse
    __divmod__ = __neg__ = __abs__ = __and__ = __or__ = __xor__ = __lshift__ = __rshift__ = _refuse
    __bool__ = __int__ = __float__ = __index__ = __str__ = __repr__ = __format__ = _refuse
    __len__ = __iter__ = __getitem__ = __contains__ = _refuse


class StepLog:
    """Replaces ``self.log`` in a stack. A step may log its loss.

    Attributes:
        names: The logged names of the loss.
    """

    def __init__(self) -> None:
        self.names: Collection[str] = ()

    def __call__(self, name: str, *_: Any, **__: Any) -> None:
        """Note that a value is logged."""
        if name not in self.names:
            raise RuntimeError(f"it logs {name!r} while it trains, beside its loss")

    def values(self, values: Mapping[str, Any], *_: Any, **__: Any) -> None:
        """Note that some values are logged."""
        for name in values:
            self(name)


def no_logs(*_: Any, **__: Any) -> NoReturn:
    """Replace ``self.log`` of a client alone in comparisons with a stack."""
    raise RuntimeError("it logs")

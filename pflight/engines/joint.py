"""One client module that stands for many clients at once."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, NoReturn

from lightning.pytorch.utilities.rank_zero import rank_zero_debug
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from pflight.models.client import Batch, ClientModule
from pflight.state import StateLayout, StateModule, other_places, state_tensors

from .embeddings import CheckedEmbeddings
from .weighted import WeightedMeans

# PyTorch's advice on what vmap runs client by client is not for users, and names this file.
warnings.filterwarnings(
    "ignore", "There is a performance drop because we have not yet implemented the batching rule"
)

Stack = dict[str, Tensor]
"""Tensors ``[C, ...]`` by their names in a client, one row for each of ``C`` clients."""


_OFTEN = 12  # calls with the same shapes before the first record; for the second twice as many
_RECORDS = 16  # at most


class Phase(NamedTuple):
    """Successive local epochs in which a client trains the same parameters in the same modes."""

    first: int
    epochs: int


class JointClient:
    """A client module whose tensors are replaced by stacks of them, under ``vmap``.

    What its gradients take is recorded when it is asked for again and again, and then repeated, bit
    for bit, without the module: Python around the operations takes longer than small ones.

    Args:
        client: A copy of the client module that is this object's own.
        layout: Its state layout.
    """

    def __init__(self, client: ClientModule, layout: StateLayout) -> None:
        self.client = client
        tensors = state_tensors(client)
        self._anchor = StateModule({n: tensors[n] for n in layout.parameters}, persistent=False)
        self._memory = (
            StateModule(client.remember(), persistent=False) if client.keeps_memory else None
        )
        self._trainer = client._trainer = _NoTrainer()  # type: ignore[assignment]
        client.log = client.log_dict = _no_logs  # type: ignore[method-assign]
        self._tied = other_places(client)
        self.changes_afterwards = type(client).after_training is not ClientModule.after_training
        self.remembers_its_state = type(client).remember is ClientModule.remember
        self._modes: Hashable = None  # of the modules and parameters
        self._calls: Counter[Hashable] = Counter()
        self._records: dict[Hashable, Callable[..., Any]] = {}
        self._gradients = vmap(grad_and_value(self._loss))
        self._logits = vmap(self._caller("forward"))
        self._after_training = vmap(self._caller("after_training"), out_dims=None)
        self._remember = vmap(self._caller("remember"))

    def prepare(self, anchored: bool, remembers: bool) -> None:
        """Train with or without an anchor, with or without a memory."""
        self.client.train()
        self.client.anchor = self._anchor if anchored else None
        self.client.memory = self._memory if remembers else None
        self._note_modes()

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Let the client do what its hooks do around the epochs of a phase."""
        self._call_hook("on_train_epoch_start", phase.first)
        self._note_modes()
        try:
            yield
        finally:
            self._call_hook("on_train_epoch_end", phase.first)
            self._note_modes()

    def _note_modes(self) -> None:
        modules, parameters = self.client.modules(), self.client.parameters()
        self._modes = (
            tuple(module.training for module in modules),
            tuple(parameter.requires_grad for parameter in parameters),
        )

    def optimizer(self) -> Optimizer:
        """Return what a client's ``configure_optimizers`` gives, over this module's parameters.

        Scalars that are a client's own have no value in it, since the optimizer is one for all.
        """
        with self._untold():
            return self.client.configure_optimizers()

    @contextmanager
    def _untold(self) -> Iterator[None]:
        """Take away the values that a client is told: asking for one of them is an error."""
        client = self.client
        told = {name: getattr(client, name) for name in client.told}
        try:
            for name, value in told.items():
                setattr(client, name, value.to("meta"))
            yield
        finally:
            for name, value in told.items():
                setattr(client, name, value)

    def loss(self, state: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Return the loss of a single client."""
        return self._loss({}, dict(state), batch)

    def _loss(
        self, parameters: Stack, others: Stack, batch: Batch, weights: Tensor | None = None
    ) -> Tensor:
        with nullcontext() if weights is None else WeightedMeans(weights):
            return self._caller("loss")(parameters, others, batch)

    def gradients(
        self,
        parameters: Stack,
        others: Stack,
        x: Tensor,
        y: Tensor,
        weights: Tensor | None = None,
    ) -> tuple[Stack, Tensor]:
        """Return the gradients ``[C, ...]`` of the parameters, and the losses ``[C]``.

        Args:
            parameters: Stacked parameters.
            others: All other tensors that differ between clients; buffers are changed in place.
            x: Features ``[C, batch, ...]``.
            y: Labels ``[C, batch]``.
            weights: Of the samples ``[C, batch]``; ``None`` if all count alike.
        """
        extra = () if weights is None else (weights,)
        arguments = parameters, others, (x, y), *extra
        tensors = *parameters.values(), *others.values(), x, y, *extra
        mode = self.client.anchor is None, self.client.memory is None, *parameters, None, *others
        key = mode, self._modes, tuple((tensor.shape, tensor.stride()) for tensor in tensors)
        if key not in self._records:
            self._calls[key] += 1
            records = len(self._records)
            if self._calls[key] < _OFTEN * (records + 1) or records == _RECORDS:
                return self._gradients(*arguments)
            self._records[key] = self._record(*arguments)
        return self._records[key](*arguments)

    def _record(self, parameters: Stack, others: Stack, *batch: Any) -> Callable[..., Any]:
        """Return the operations behind :meth:`gradients` or, where they can't be had, itself."""
        copies = {name: _copy(value) for name, value in others.items()}
        try:
            return make_fx(lambda *args: self._gradients(*args))(parameters, copies, *batch)
        except Exception as error:
            rank_zero_debug(
                f"the gradients of {type(self.client).__name__} stay unrecorded: {error}"
            )
            return self._gradients

    def logits(self, state: Stack, x: Tensor) -> Tensor:
        """Return the logits ``[C, batch, num_classes]`` in evaluation mode."""
        self.client.eval()
        return self._logits({}, state, x)

    def after_training(self, state: Stack) -> None:
        """Let all clients change their buffers in place."""
        self._after_training({}, state)

    def remember(self, state: Stack) -> Stack:
        """Return what the clients keep."""
        return dict(self._remember({}, state))

    def _call_hook(self, name: str, epoch: int) -> None:
        """Call a hook of the client, which alone may ask for the epoch."""
        self._trainer.current_epoch = epoch
        with self._untold():
            getattr(self.client, name)()
        del self._trainer.current_epoch

    def _caller(self, method: str) -> Callable[..., Any]:
        called = _Method(self.client, method)

        def call(parameters: Mapping[str, Tensor], others: Mapping[str, Tensor], *args: Any) -> Any:
            tensors = {**parameters, **others}
            tensors |= {alias: tensors[n] for alias, n in self._tied.items() if n in tensors}
            named = {f"client.{name}": tensor for name, tensor in tensors.items()}
            with CheckedEmbeddings(), _attention_of(tensors.values()):
                return functional_call(called, named, args, tie_weights=False)

        return call


def _attention_of(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Return where attention is computed from products of matrices, which can be stacked.

    On a CPU, the kernel that PyTorch would choose has no batching rule, and runs once for each
    client.
    """
    on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
    return sdpa_kernel(SDPBackend.MATH) if on_cpu else nullcontext()


def _copy(stack: Tensor) -> Tensor:
    """Copy a stack with its strides: rows may be the same memory, and are then only read."""
    return stack[:1].clone().expand_as(stack) if stack.stride(0) == 0 else stack.clone()


class _Method(nn.Module):
    """Calls a method of a client as its forward pass, as ``functional_call`` needs it."""

    def __init__(self, client: ClientModule, method: str) -> None:
        super().__init__()
        self.client = client
        self.method = method

    def forward(self, *args: Any) -> Any:
        return getattr(self.client, self.method)(*args)


class _NoTrainer:
    """Stands where a client looks for its trainer, and has nothing but, in hooks, the epoch."""

    current_epoch: int

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # it is being copied
            raise AttributeError(name)
        raise RuntimeError(f"it asks for trainer.{name}")


def _no_logs(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("it logs")

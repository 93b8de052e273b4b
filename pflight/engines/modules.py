"""Any LightningModule as a client: one after the other, under a Trainer that is stepped by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from tensordict import TensorDict
from torch import Tensor, nn
from torch.func import functional_call

from pflight.datamodules import FederatedDataModule, Split, Visit
from pflight.errors import ConfigurationError
from pflight.half import PERSONAL, Half, check_manual
from pflight.metrics import ClientValues
from pflight.models import ClientModule
from pflight.state import StateLayout, rest_frozen, state_tensors

from .module_trainer import ModuleTrainer, loss_of
from .sequential import ONE_THREAD, SequentialEngine
from .updates import ClientUpdates, Evaluation

class ModuleEngine(SequentialEngine):
    """Trains and evaluates clients one by one, whatever LightningModule they are.

    Each participation begins with a pristine copy of the module, which shares with all others the
    tensors that are overwritten and those that are frozen, so that no list, counter or buffer of
    one client reaches the next. It trains by its own ``training_step`` and hooks, with the client
    half's penalty added from outside.

    Args:
        half: The client half of the algorithm.
        *args: As in :class:`SequentialEngine`.
    """

    def __init__(self, half: Half, *args: Any) -> None:
        self.half = half
        self._stream: _Stream | None = None
        self._drifted: set[str] = set()
        super().__init__(*args)

    def check_input(self) -> None:
        """Raise if the module lacks what the half needs, or its optimizers can't be built."""
        module = self.template
        self.half.check(module)
        check_manual(self.half, module)
        if not is_overridden("training_step", module):
            raise ConfigurationError(
                f"{type(module).__name__} has no training_step: a client trains by its own"
            )
        for hook in ("configure_callbacks", "on_save_checkpoint", "on_load_checkpoint"):
            if is_overridden(hook, module):
                rank_zero_warn(
                    f"{type(module).__name__}.{hook} is ignored: the federation's Trainer has the "
                    "callbacks and writes the checkpoints"
                )
        if self._is_small():
            self.threads = 1
        if any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
            raise ConfigurationError(
                "SyncBatchNorm would mix clients of different ranks: use BatchNorm"
            )

    def _is_small(self) -> bool:
        """Whether a step takes too little arithmetic to gain from several threads."""
        parts = list(self.template.modules())
        if any(isinstance(part, nn.modules.conv._ConvNd | nn.RNNBase) for part in parts):
            return False
        weights = sum(parameter.numel() for parameter in self.template.parameters())
        counts = self.data.num_samples("train")
        return 2 * weights * min(self.data.batch_size or math.inf, int(counts.max())) < ONE_THREAD

    # Training

    def train(self, clients: Tensor, *args: Any, **kwargs: Any) -> ClientUpdates:
        """See :meth:`SequentialEngine.train`."""
        visits = self._visits(clients, **kwargs)
        with self._streaming("train", visits):
            return super().train(clients, *args, **kwargs)

    def gradients(self, clients: Tensor, *args: Any, **kwargs: Any) -> ClientUpdates:
        """See :meth:`SequentialEngine.gradients`."""
        visits = self._visits(clients, epochs=1, **kwargs)
        with self._streaming("train", visits):
            return super().gradients(clients, *args, **kwargs)

    def _visits(
        self,
        clients: Tensor,
        *,
        round_index: int,
        epochs: int = 1,
        steps: int | None = None,
        batches: int | None = None,
        **_: Any,
    ) -> list[Visit]:
        """Return the local epochs of some clients, each with the samples of its batches."""
        visits = []
        for client in clients.tolist():
            sizes = self._batch_sizes(int(self.data.num_samples("train")[client]))
            left = steps if steps is not None else epochs * len(sizes)
            for epoch in range(-(-left // len(sizes)) if sizes else 0):
                used = sizes[: min(left, len(sizes) if batches is None else batches)]
                order = self.data.order(client, round_index, epoch)
                parts = order[: sum(used)].split(used)
                visits.append(Visit(client, round_index, epoch, parts))
                left -= len(sizes)
        return visits

    def _train_one(self, client_id: int, round_index: int, epochs: int, steps: int | None) -> None:
        client, trainer = self.client, self.trainer
        count = int(self.data.num_samples("train")[client_id])
        sizes = self._batch_sizes(count)
        client.num_samples.fill_(count)
        assert self._stream is not None
        everyone = [client, *([client.personal] if client.personal is not None else [])]
        for one in everyone:
            one.trainer.start(None if steps is not None else epochs, len(sizes), steps, one.step)
        done = 0
        for visit in self._stream.visits_of(client_id):
            with _all(one.trainer.epoch() for one in everyone):
                for index, part in enumerate(visit.parts):
                    batch, last = self._stream.batch(visit, index), index + 1 == len(sizes)
                    goes_on = [one.trainer.step(batch, len(part), last) for one in everyone]
                    done += 1
                    if not all(goes_on):
                        break
        for one in everyone:
            one.trainer.end()
        if done and client.module.automatic_optimization:
            self._check_gradients(client)
        trainer.batches_seen = done

    def _check_gradients(self, client: _LocalClient) -> None:
        weights = client.weights.values()
        if client.trainer.global_step and all(weight.grad is None for weight in weights):
            raise RuntimeError(
                "its loss depends on none of its weights: a function that it keeps may still hold "
                "the module that was given, where every client trains a copy"
            )

    def _gradient(self, client_id: int, round_index: int, batches: int | None) -> list[Tensor]:
        client = self.client
        client.num_samples.fill_(int(self.data.num_samples("train")[client_id]))
        client.zero_grad()
        assert self._stream is not None
        for visit in self._stream.visits_of(client_id):
            count = sum(map(len, visit.parts))
            for index, part in enumerate(visit.parts):
                loss = client.trainer.task_loss(self._stream.batch(visit, index), len(part))
                if loss is not None:
                    (loss * (len(part) / count)).backward()
        zero = torch.zeros((), device=self.device)
        tensors = dict(zip(self.layout.names, self._tensors, strict=True))
        return [
            (zero if tensor.grad is None else tensor.grad).expand_as(tensor)
            if name in self.layout.parameters
            else tensor
            for name, tensor in tensors.items()
        ]

    # Evaluation

    def evaluate(  # type: ignore[override]
        self, clients: Tensor, states: TensorDict, split: Split
    ) -> ClientValues | Evaluation:
        """Run each client's model on its own samples of a split; return what it logs.

        Raises:
            ConfigurationError: If the module logs nothing.
        """
        if isinstance(self.template, ClientModule):
            return super().evaluate(clients, states, split)
        values, step = ClientValues(), "test_step" if split == "test" else "validation_step"
        if not is_overridden(step, self.template):  # as Lightning does
            return values
        for _, client, stream, visit in self._rows(clients, states, split):
            batches = ((stream.batch(visit, i), len(part)) for i, part in enumerate(visit.parts))
            logged, directions = self.trainer.evaluate(split, batches, len(visit.parts))
            if not logged:
                raise ConfigurationError(
                    f"{type(self.template).__name__}.{step} logs nothing to judge clients by: "
                    f"call self.log('{split}/...', value) in it"
                )
            values.add(client, split, logged, directions)
        return values

    def predict(self, clients: Tensor, states: TensorDict, split: Split) -> list[Any]:
        """Return what each client's ``predict_step`` gives for its batches of a split."""
        return [
            (client, self.trainer.predict(
                (stream.batch(visit, i), len(part)) for i, part in enumerate(visit.parts)
            ))
            for _, client, stream, visit in self._rows(clients, states, split)
        ]

    @torch.no_grad()
    def losses(self, clients: Tensor, states: TensorDict, split: Split) -> Tensor:
        """Return the mean loss ``[C]`` of each client's model on its own samples of a split.

        It is that of the module's training step, in evaluation mode, without the half's penalty;
        NaN for a client without samples, or whose step raises.
        """
        means = torch.full((len(clients),), torch.nan, dtype=torch.double, device=self.device)
        for row, client, stream, visit in self._rows(clients, states, split):
            self.client.module.eval()
            total, count = torch.zeros((), dtype=torch.double, device=self.device), 0
            try:
                for index, part in enumerate(visit.parts):
                    loss = self.trainer.task_loss(stream.batch(visit, index), len(part))
                    assert loss is not None
                    total, count = total + loss.double() * len(part), count + len(part)
            except Exception:  # training will say why
                continue
            means[row] = total / count
        return means

    def _rows(
        self, clients: Tensor, states: TensorDict, split: Split
    ) -> Iterator[tuple[int, int, _Stream, Visit]]:
        """Load each client's model in turn; go on to the next where it has no samples."""
        size = self.data.eval_batch_size
        counts = self.data.num_samples(split)
        visits = {}
        for client in clients.tolist():
            if count := int(counts[client]):
                visits[client] = Visit(client, None, 0, torch.arange(count).split(size or count))
        with self._streaming(split, list(visits.values())):
            assert self._stream is not None
            for row, client in enumerate(clients.tolist()):
                if client in visits:
                    self._load([states[name][row] for name in self.layout.names], anchored=False)
                    yield row, client, self._stream, visits[client]

    def _forward(self, x: Tensor) -> list[Tensor]:
        self.client.module.eval()  # type: ignore[attr-defined]
        return super()._forward(x)

    @contextmanager
    def _streaming(self, split: Split, visits: list[Visit]) -> Iterator[None]:
        outer, self._stream = self._stream, _Stream(self.data, split, visits)
        try:
            yield
        finally:
            self._stream = outer

    # The copies in which clients train

    def _build(self) -> None:
        layout, precision, device = self.layout, self.precision, self.device
        names = [name for name in layout.names if name not in layout.own]
        self._copies = _Copies(self.template, names, layout, precision, device)
        self._mixes_samples = self._copies.mixes_samples
        self.trainer = self._copies.trainer  # type: ignore[assignment]
        self._personal_copies = None
        if self.half.personal is not None:
            self._personal_copies = _Copies(self.template, names, layout, precision, device)
        self.client = _LocalClient(self, self._copies, self.half)  # type: ignore[assignment]

    def _load(self, start: list[Tensor], anchored: bool) -> None:
        columns = dict(zip(self.layout.names, start, strict=True))
        anchor = None
        if anchored:
            anchor = {name: columns[name] for name in self._copies.parameters}
        self._copies.load(columns)
        self.client = client = _LocalClient(self, self._copies, self.half)  # type: ignore[assignment]
        client.anchor = anchor
        if self._personal_copies is not None and self.half.personal is not None and anchored:
            self._personal_copies.load(columns, PERSONAL)
            client.personal = _LocalClient(self, self._personal_copies, self.half.personal)
            client.personal.anchor = anchor
        elif self._personal_copies is not None:
            self._personal_copies.load(columns, PERSONAL)

    def _recall(self, memory: list[Tensor]) -> None:
        self.client.memory = dict(zip(self.client.remember(), memory, strict=True))  # type: ignore[assignment]

    def _take_over_buffers(self) -> None:
        """Name what was frozen and has changed, once, and put it back."""
        for name in self._copies.mend_frozen():
            if name not in self._drifted:
                self._drifted.add(name)
                rank_zero_warn(f"training changed the frozen {name!r}; it is reset each time")

    @property
    def _tensors(self) -> list[Tensor]:
        held = self._copies.tensors()
        if self._personal_copies is not None:
            held |= {f"{PERSONAL}{n}": t for n, t in self._personal_copies.tensors().items()}
        return [held[name] for name in self.layout.names]


class _Copies:
    """Copies of a module, one at a time, that share the tensors which each of them overwrites."""

    def __init__(
        self,
        template: L.LightningModule,
        names: Sequence[str],
        layout: StateLayout,
        precision: Precision,
        device: torch.device,
    ) -> None:
        self._pristine = precision.convert_module(copy.deepcopy(template)).to(device)
        live = state_tensors(self._pristine)
        kept = {*layout.frozen}
        self.live = {name: live[name] for name in names if name not in kept}
        self._frozen = {name: live[name].clone() for name in names if name in kept}
        self._shared = {id(t): t for t in [*live.values(), *self._pristine.parameters()]}
        self.parameters = [name for name in layout.parameters if name in self.live]
        self.mixes_samples = any(
            isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training
            for part in rest_frozen(self._pristine).modules()
        )
        self.trainer = ModuleTrainer(precision, device)
        self.module = self._pristine
        self._fresh()

    def load(self, start: Mapping[str, Tensor], prefix: str = "") -> None:
        """Make a copy for the next client, with the tensors of its own that it starts from."""
        for parameter in self._pristine.parameters():
            parameter.grad = None
        with torch.no_grad():
            for name, tensor in self.live.items():
                tensor.copy_(start[f"{prefix}{name}"])
        self._fresh()

    def tensors(self) -> dict[str, Tensor]:
        """Return what stands in the copy now, by name."""
        held = state_tensors(self.module)
        return {name: held[name] for name in (*self.live, *self._frozen)}

    def mend_frozen(self) -> list[str]:
        """Put back what was frozen and has changed; return the names."""
        held = state_tensors(self.module)
        changed = [n for n, value in self._frozen.items() if not torch.equal(held[n], value)]
        with torch.no_grad():
            for name in changed:
                held[name].copy_(self._frozen[name])
        return changed

    def _fresh(self) -> None:
        self.module = rest_frozen(copy.deepcopy(self._pristine, dict(self._shared)))
        self.trainer.attach(self.module)


class _LocalClient:
    """One client of its own, as a half sees it."""

    personal: _LocalClient | None = None

    def __init__(self, engine: ModuleEngine, copies: _Copies, half: Half) -> None:
        self.half = half
        self.module = copies.module
        self.trainer = copies.trainer
        self.anchor: Mapping[str, Tensor] | None = None
        self.memory: Mapping[str, Tensor] | None = None
        self._remembered = [*copies.live]
        own = dict(self.module.named_parameters())
        self.weights = {name: own[name] for name in copies.parameters}
        self.num_samples = torch.zeros((), device=engine.device)
        self.mean_samples = torch.full((), engine.mean_samples, device=engine.device)
        self.num_steps = torch.zeros((), device=engine.device)
        self._own_step: Callable[[], Any] | None = None
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []
        self.trainer._strategy.penalty = self._penalty

    def step(self, own_step: Callable[[], Any], batch: Any) -> Any:
        """Run a training step with what the half makes of its loss."""
        if not self.module.automatic_optimization:
            return own_step()
        output: Any = None

        def run() -> Tensor:
            nonlocal output
            output = own_step()
            loss = loss_of(output)
            if loss is None:
                raise _SkippedStep
            return loss

        self._own_step = run
        try:
            loss = self.half.loss(self, batch)
        except _SkippedStep:
            return output
        return {**output, "loss": loss} if isinstance(output, dict) else loss

    def task_loss(self, batch: Any) -> Tensor:
        """See :class:`~pflight.half.LocalClient`."""
        assert self._own_step is not None
        return self._own_step()

    def task_loss_and_logits(self, batch: Any) -> tuple[Tensor, Tensor]:
        """See :class:`~pflight.half.LocalClient`."""
        self._calls.clear()

        def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self._calls.append((args, kwargs, output))

        hook = self.module.register_forward_hook(note, with_kwargs=True)
        try:
            loss = self.task_loss(batch)
        finally:
            hook.remove()
        if not self._calls:
            raise RuntimeError("its training_step never calls self(...), whose logits are asked for")
        return loss, self._calls[-1][2]

    @torch.no_grad()
    def logits_with(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """See :class:`~pflight.half.LocalClient`."""
        args, kwargs, _ = self._calls[-1]
        training = [part for part in self.module.modules() if part.training]
        for part in training:
            part.training = False
        try:
            return functional_call(self.module, dict(tensors), args, kwargs)
        finally:
            for part in training:
                part.training = True

    def state(self) -> dict[str, Tensor]:
        """See :class:`~pflight.half.LocalClient`."""
        held = state_tensors(self.module)
        return {name: held[name] for name in self._remembered}

    def remember(self) -> Mapping[str, Tensor]:
        """Return what the half keeps of this client."""
        return self.half.remember(self)

    def after_training(self) -> None:
        """Nothing is left to do."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return what the module gives."""
        return self.module(x)

    def eval(self) -> None:
        """Put the module into evaluation mode."""
        self.module.eval()

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for weight in self.weights.values():
            weight.grad = None

    def _penalty(self) -> Tensor | None:
        return self.half.penalty(self)


class _SkippedStep(Exception):
    """A training step returned no loss."""


class _Stream:
    """The batches of some visits, taken in their order; after a failure the next visit's."""

    def __init__(self, data: FederatedDataModule, split: Split, visits: Sequence[Visit]) -> None:
        self._data = data
        self._split = split
        self._visits = list(visits)
        self._iterator: Iterator[Any] | None = None
        self._next = 0, 0  # visit and part that the iterator yields next

    def visits_of(self, client: int) -> list[Visit]:
        """Return the visits to a client."""
        return [visit for visit in self._visits if visit.client == client]

    def batch(self, visit: Visit, part: int) -> Any:
        """Return a batch of a visit."""
        place = self._place(visit), part
        if self._iterator is None or place != self._next:
            if part:
                raise RuntimeError("batches are taken in their order")
            self._iterator = iter(self._data.batches(self._split, self._visits[place[0] :]))
        try:
            batch = next(self._iterator)
        except BaseException:
            self._iterator = None
            raise
        last = part + 1 == len(visit.parts)
        self._next = (place[0] + 1, 0) if last else (place[0], part + 1)
        return batch

    def _place(self, visit: Visit) -> int:
        start = self._next[0]
        for place in (*range(start, len(self._visits)), *range(start)):
            if self._visits[place] is visit:
                return place
        raise ValueError("a visit that is not of this stream")


@contextmanager
def _all(contexts: Iterator[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield

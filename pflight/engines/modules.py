"""Any LightningModule as a client: one after the other, under a Trainer that is stepped by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from tensordict import TensorDict
from torch import Tensor, nn

from pflight.errors import ConfigurationError
from pflight.half import OWN, PERSONAL, Half, Phase
from pflight.loaders import Split, Visit
from pflight.metrics import ClientValues
from pflight.models.client import ClientModule

from .local import SCALARS, AloneClient, Copies, Stream, phase_of, resting
from .sequential import GRADIENT_BATCH, ONE_THREAD, SequentialEngine
from .updates import ClientFailure, ClientUpdates, Evaluation


class ModuleEngine(SequentialEngine):
    """Trains and evaluates clients one by one, whatever LightningModule they are.

    Each participation begins with a pristine copy of the module and trains by its own
    ``training_step`` and hooks, with what the client half adds to its loss from outside. A half
    with a personal model has a second copy of its own, which sees the same batches.

    Args:
        half: The client half of the algorithm.
        *args: As in :class:`SequentialEngine`.
    """

    template: LightningModule  # type: ignore[assignment]
    client: AloneClient  # type: ignore[assignment]

    def __init__(self, half: Half, *args: Any) -> None:
        self.half = half
        self._own_loss = False
        self._stream: Stream | None = None
        self._drifted: set[str] = set()
        self._phases: dict[int, list[Phase] | None] = {}
        super().__init__(*args)

    def _note_form(self) -> None:
        """Take samples as they come, unless they are judged by their classes."""
        if isinstance(self.template, ClientModule):
            super()._note_form()

    def check_input(self) -> None:
        """Raise if the module lacks what the half needs, or its optimizers can't be built."""
        module = self.template
        self.half.check(module)
        if not module.automatic_optimization and not self.half.only_adds:
            raise ConfigurationError(
                f"{type(self.half).__name__} replaces the loss of its clients, which "
                f"{type(module).__name__} with manual optimization does not hand out"
            )
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

    def gradients(
        self, clients: Tensor, states: TensorDict, *, round_index: int, batches: int | None = None
    ) -> ClientUpdates:
        """See :meth:`SequentialEngine.gradients`."""
        with self._streaming("train", self._visits_for_gradients(clients, round_index, batches)):
            return super().gradients(clients, states, round_index=round_index, batches=batches)

    def _visits(
        self,
        clients: Tensor,
        *,
        round_index: int,
        epochs: int = 1,
        steps: int | None = None,
        **_: Any,
    ) -> list[Visit]:
        """Return the local epochs of some clients, each with the samples of its batches."""
        visits = []
        for client in clients.tolist():
            sizes = self._batch_sizes(int(self.data.num_samples("train")[client]))
            left = steps if steps is not None else epochs * len(sizes)
            for epoch in range(-(-left // len(sizes)) if sizes else 0):
                used = sizes[: min(left, len(sizes))]
                order = self.data.order(client, round_index, epoch)
                parts = order[: sum(used)].split(used)
                visits.append(Visit(client, round_index, epoch, parts))
                left -= len(sizes)
        return visits

    def _visits_for_gradients(
        self, clients: Tensor, round_index: int, batches: int | None
    ) -> list[Visit]:
        """Return one visit to each client, with some of its batches or all samples as they lie."""
        visits = []
        for client in clients.tolist():
            sizes = self._batch_sizes(int(self.data.num_samples("train")[client]))[:batches]
            if batches is None:
                # A module that mixes the samples of a batch has to see them all at once.
                size = max(sum(sizes), 1) if self._mixes_samples else GRADIENT_BATCH
                parts = torch.arange(sum(sizes)).split(size)
            else:
                parts = self.data.order(client, round_index, 0)[: sum(sizes)].split(sizes)
            visits.append(Visit(client, round_index, 0, parts if sizes else ()))
        return visits

    def _train_one(self, client_id: int, round_index: int, epochs: int, steps: int | None) -> None:
        client, count = self.client, int(self.data.num_samples("train")[client_id])
        sizes = self._batch_sizes(count)
        client.num_samples.fill_(count)
        # A personal model first, which may look at the shared one as it is before its step.
        models = [client] if self._personal is None else [self._personal, client]
        for model in models:
            parameters = [p for p in model.module.parameters() if p.requires_grad]
            optimizer = self.half.optimizer(parameters, client.anchor is not None)
            limits = None if steps is not None else epochs, len(sizes), steps
            model.trainer.start(*limits, model.step, optimizer)
        assert self._stream is not None
        for visit, batches in self._stream.visits_of(client_id):
            phase = phase_of(self._phases_of(epochs), visit.epoch)
            with ExitStack() as stack:
                for model in models:
                    stack.enter_context(resting(model.module, self.layout, phase))
                    stack.enter_context(model.trainer.epoch())
                for index, (part, batch) in enumerate(zip(visit.parts, batches, strict=False)):
                    last = index + 1 == len(sizes)
                    goes_on = [model.trainer.step(batch, len(part), last) for model in models]
                    if not all(goes_on):
                        break
        for model in models:
            model.trainer.end()
        steps = client.trainer.global_step
        if client.module.automatic_optimization and steps and not client.skipped:
            self._check_gradients(client)

    def _phases_of(self, epochs: int) -> list[Phase] | None:
        if epochs not in self._phases:
            self._phases[epochs] = self.half.phases(self.template, epochs)
        return self._phases[epochs]

    def _check_gradients(self, client: AloneClient) -> None:
        if all(weight.grad is None for weight in client.weights.values()):
            raise RuntimeError(
                "its loss depends on none of its weights: a function that it keeps may still hold "
                "the module that was given, where every client trains a copy"
            )

    def _gradient(self, client_id: int, round_index: int, batches: int | None) -> list[Tensor]:
        client, weights = self.client, self.client.weights
        client.num_samples.fill_(int(self.data.num_samples("train")[client_id]))
        for weight in weights.values():
            weight.grad = None
        assert self._stream is not None
        for visit, epoch in self._stream.visits_of(client_id):
            count = sum(map(len, visit.parts))
            for part, batch in zip(visit.parts, epoch, strict=True):
                loss = client.trainer.loss(batch, len(part), lambda b: self.half.loss(client, b))
                (loss * (len(part) / count)).backward()
        zero = torch.zeros((), device=self.device)
        gradients = {
            name: (zero if weight.grad is None else weight.grad).expand_as(weight)
            for name, weight in weights.items()
        }
        held = dict(zip(self.layout.names, self._tensors, strict=True))
        return [gradients.get(name, tensor) for name, tensor in held.items()]

    # Evaluation

    def evaluate(  # type: ignore[override]
        self, clients: Tensor, states: TensorDict, split: Split
    ) -> tuple[ClientValues | Evaluation, list[ClientFailure]]:
        """Run each client's model on its own samples of a split; return what it logs.

        Raises:
            ConfigurationError: If the module logs nothing.
        """
        if isinstance(self.template, ClientModule):
            return super().evaluate(clients, states, split)
        values, step = ClientValues(), "test_step" if split == "test" else "validation_step"
        if not is_overridden(step, self.template):  # as Lightning does
            return values, []
        failures: list[ClientFailure] = []
        for _, client, visit, batches in self._rows(clients, states, split):
            logged: dict[str, Tensor] = {}
            with self._attempt(client, failures):
                logged, directions = self.client.trainer.evaluate(split, visit.parts, batches)
            if failures and failures[-1].client == client:
                continue
            if not logged:
                raise ConfigurationError(
                    f"{type(self.template).__name__}.{step} logs nothing to judge clients by: "
                    f"call self.log('{split}/...', value) in it"
                )
            values.add(client, split, logged, directions)
        return values, failures

    def predict(
        self, clients: Tensor, states: TensorDict, split: Split
    ) -> tuple[list[tuple[int, list[Any]]], list[ClientFailure]]:
        """Return what each client's ``predict_step`` gives for its batches of a split."""
        predictions, failures = [], list[ClientFailure]()
        for _, client, _, batches in self._rows(clients, states, split):
            with self._attempt(client, failures):
                predictions.append((client, self.client.trainer.predict(batches)))
        return predictions, failures

    @torch.no_grad()
    def losses(
        self, clients: Tensor, states: TensorDict, split: Split
    ) -> tuple[Tensor, list[ClientFailure]]:
        """Return the mean loss ``[C]`` of each client's model on its own samples of a split.

        It is that of the module's training step, in evaluation mode, without the half's penalty;
        NaN for a client without samples, or that fails.
        """
        failures: list[ClientFailure] = []
        means = torch.full((len(clients),), torch.nan, dtype=torch.double, device=self.device)
        for row, client, visit, batches in self._rows(clients, states, split):
            model = self.client
            model.module.eval()
            model.num_samples.fill_(int(self.data.num_samples("train")[client]))
            with self._attempt(client, failures):
                total = torch.zeros((), dtype=torch.double, device=self.device)
                for part, batch in zip(visit.parts, batches, strict=True):
                    loss = model.trainer.loss(batch, len(part), model.task_loss)
                    total = total + loss.double() * len(part)
                means[row] = total / sum(map(len, visit.parts))
        return means, failures

    def _rows(
        self, clients: Tensor, states: TensorDict, split: Split
    ) -> Iterator[tuple[int, int, Visit, Iterator[Any]]]:
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
                    for visit, batches in self._stream.visits_of(client):
                        yield row, client, visit, batches

    def _evaluates(self) -> None:
        self.client.module.eval()

    @contextmanager
    def _streaming(self, split: Split, visits: list[Visit]) -> Iterator[None]:
        outer, self._stream = self._stream, Stream(self.data, split, visits)
        try:
            yield
        finally:
            self._stream = outer

    # The copies in which clients train

    def _build(self) -> None:
        arguments = self.template, self.layout, self.precision, self.device
        self._copies = Copies(*arguments)
        self._personal_copies = None if self.half.personal is None else Copies(*arguments)
        module = self._copies.module
        self._mixes_samples = any(
            isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training
            for part in module.modules()
        )
        self._own = {
            name: self.layout.template[name].to(self.device, copy=True)
            for name in self.layout.own
            if name.startswith(OWN)
        }
        self._scalars = {name: torch.zeros((), device=self.device) for name in SCALARS}
        self._scalars["mean_samples"].fill_(self.mean_samples)
        self.trainer = self._copies.trainer  # type: ignore[assignment]
        self._take(None)

    def _take(self, anchor: dict[str, Tensor] | None) -> None:
        """Make the copies as they are the next client."""
        own = {name.removeprefix(OWN): tensor for name, tensor in self._own.items()}
        self.client = AloneClient(self._copies, self.half, own, self._scalars, anchor)
        self._personal = None
        if self._personal_copies is not None and self.half.personal is not None and anchor:
            self._personal = AloneClient(
                self._personal_copies, self.half.personal, own, self._scalars, anchor, self.client
            )

    def _load(self, start: list[Tensor], anchored: bool) -> None:
        columns = dict(zip(self.layout.names, start, strict=True))
        self._copies.load(columns, "", reuse=False)
        if self._personal_copies is not None:
            self._personal_copies.load(columns, PERSONAL, reuse=False)
        for name, tensor in self._own.items():
            tensor.copy_(columns[name])
        for name in ("seen", "num_steps"):
            self._scalars[name].zero_()
        self._take({n: columns[n] for n in self._copies.parameters} if anchored else None)

    def _recall(self, memory: list[Tensor]) -> None:
        self.client.seen.fill_(1)
        names = self.half.remembered(self.layout)
        self.client.memory = dict(zip(names, memory, strict=True))

    def _check_whole(self) -> None:
        """Raise if a client has put something else in the place of what it was to train."""
        for copies in (self._copies, self._personal_copies):
            if copies is not None:
                copies.check_whole()

    def _take_over_buffers(self) -> None:
        """Name what was frozen and has changed, once, and put it back."""
        for name in self._copies.mend_frozen():
            if name not in self._drifted:
                self._drifted.add(name)
                rank_zero_warn(f"training changed the frozen {name!r}; it is reset each time")

    @property
    def _tensors(self) -> list[Tensor]:  # type: ignore[override]
        held = {**self._copies.tensors(), **self._own}
        if self._personal_copies is not None:
            held |= {f"{PERSONAL}{n}": t for n, t in self._personal_copies.tensors().items()}
        return [held[name] for name in self.layout.names]

"""One client after the other, through the real hooks of its LightningModule."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim import LBFGS

from pflight.data_module import FederatedDataModule
from pflight.errors import ConfigurationError
from pflight.history import Logs, merge_logs
from pflight.loaders import Split
from pflight.models.client import Batch, ClientModule
from pflight.options import check_optimizer
from pflight.randomness import Purpose, derive_seed, isolated, seed_everything
from pflight.state import StateLayout, StateModule, entries, rows, state_tensors

from .descent import Descent
from .local_trainer import LocalTrainer
from .operations import count_operations
from .samples import Form, check_count, check_labels, read_samples, usual_samples
from .time_limit import time_limit
from .updates import STOPS, ClientFailure, ClientUpdates, Evaluation, Kept

_TRANSFER_HOOKS = (
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
)
_HOOKS = (
    "on_train_start",
    "on_train_epoch_start",
    *_TRANSFER_HOOKS,
    "on_train_batch_start",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
)
_LARGE_KERNEL = 2**20  # weights of a convolution from which on channels-last is slower
GRADIENT_BATCH = 512  # samples in one pass where their number does not matter
_FROM_SERVER = ("anchor", "memory")  # parts that are put into a client
_REGISTERS = [  # of modules, parameters and hooks; buffers are given back one by one
    name
    for name, held in vars(nn.Module()).items()
    if isinstance(held, dict) and name != "_buffers"
]
_NO_LOSS = "its training_step returned no loss for any batch"
ONE_THREAD = 20e6  # operations of a batch's forward pass from which on threads pay


_Evaluated = TypeVar("_Evaluated")


def _on_few_threads(evaluate: Callable[..., _Evaluated]) -> Callable[..., _Evaluated]:
    """Let clients be evaluated on one thread where their samples are too few for several."""

    @wraps(evaluate)
    def evaluated(
        self: SequentialEngine, clients: Tensor, states: TensorDict, split: Split
    ) -> _Evaluated:
        samples = int(self.data.num_samples(split)[clients.cpu()].sum())
        few = self._operations * max(samples, 1) < ONE_THREAD
        with _threads(1 if few else torch.get_num_threads()):
            return evaluate(self, clients, states, split)

    return evaluated


class SequentialEngine:
    """Trains and evaluates clients one by one on a single copy of the client module.

    Every participation loads the client's start into that copy, builds its optimizer anew, runs
    the local epochs or steps with all of the module's hooks, and copies the result into a row of
    the chunk. Batches are sliced out of tensors. Networks too small to gain from several threads
    train on one.

    Args:
        client: The client module; the engine trains a copy.
        layout: Its state layout.
        data: Where the clients' samples come from.
        precision: The precision plugin of the federation's Trainer.
        device: Where clients train.
        seed: Of all local randomness, together with round and client.
        client_timeout: Seconds after which what a client does is interrupted, or ``None``.

    Attributes:
        chunk: Clients that are trained at once, at most.
    """

    chunk = 1

    def __init__(
        self,
        client: ClientModule,
        layout: StateLayout,
        data: FederatedDataModule,
        precision: Precision,
        device: torch.device,
        seed: int,
        client_timeout: float | None = None,
    ) -> None:
        self.template = client
        self.layout = layout
        self.data = data
        self.precision = precision
        self.device = device
        self.seed = seed
        self.client_timeout = client_timeout
        self.mean_samples = float(data.num_samples("train")[data.train_clients].double().mean())
        self.threads = torch.get_num_threads()
        self._operations = math.inf  # of a sample's forward pass
        self._channels_last = False
        self._copies_input = False
        self._note_form()
        self._build()
        if self._mixes_samples and data.batch_size == 1:
            raise ConfigurationError("batch_size=1 can't train a network with BatchNorm")

    def _note_form(self) -> None:
        """Note the form that the clients' samples have in common."""
        with time_limit(self.client_timeout):
            x, y = self.precision.convert_input(usual_samples(self.data))
        self._form = Form.of((x, y))
        self._example = x[:2].to(self.device, copy=True), y[:2].to(self.device, copy=True)
        self._batch_size = len(y[: self.data.batch_size])

    # Training

    def train(
        self,
        clients: Tensor,
        starts: TensorDict,
        *,
        round_index: int,
        epochs: int = 1,
        steps: int | None = None,
        purpose: Purpose = Purpose.TRAIN,
        kept: Kept | None = None,
        on_client_end: Callable[[int], None] | None = None,
    ) -> ClientUpdates:
        """Train the clients ``[C]`` from their starts ``[C]``.

        Args:
            clients: Ids ``[C]``.
            starts: What each client starts from, full states ``[C]``; also its anchor.
            round_index: Keys the order of the batches and all other randomness.
            epochs: Local epochs, unless ``steps`` is given.
            steps: Batches to train on, over as many epochs as they take.
            purpose: ``FINETUNE`` trains without an anchor, so that penalties vanish.
            kept: What the clients kept, where their module keeps a memory.
            on_client_end: Called with the id of each client that has trained.
        """

        def train_one(client: int) -> list[Tensor]:
            self._train_one(client, round_index, epochs, steps)
            if purpose is Purpose.TRAIN:
                self.client.num_steps.fill_(self.trainer.global_step)
                with torch.no_grad():
                    self.client.after_training()
            if on_client_end is not None:
                on_client_end(client)
            return self._tensors

        return self._for_each_client(clients, starts, round_index, purpose, train_one, kept)

    def gradients(
        self, clients: Tensor, states: TensorDict, *, round_index: int, batches: int | None = None
    ) -> ClientUpdates:
        """Return each client's gradient of its loss at the states ``[C]``, in training mode.

        The gradient is over all of the client's training samples, or over the first ``batches``
        mini-batches of its epoch. Buffers in the result are those after the pass.
        """

        def gradient(client: int) -> list[Tensor]:
            return self._gradient(client, round_index, batches)

        return self._for_each_client(clients, states, round_index, Purpose.TRAIN, gradient)

    def _for_each_client(
        self,
        clients: Tensor,
        starts: TensorDict,
        round_index: int,
        purpose: Purpose,
        work: Callable[[int], list[Tensor]],
        kept: Kept | None = None,
    ) -> ClientUpdates:
        columns = [starts[name] for name in self.layout.names]
        moving = self.layout.moving
        places = [self.layout.names.index(name) for name in moving]
        results = _like(starts[name] for name in moving)
        memories = dict(entries(kept.states)) if kept is not None else {}
        remembered = _like(memories.values())
        logs: dict[int, Logs] = {}  # by row, of those that came to an end
        failures: list[ClientFailure] = []
        with _threads(self.threads):
            for row, client in enumerate(clients.tolist()):
                seed_everything(derive_seed(purpose, self.seed, round_index, client), self.device)
                with self._attempt(client, failures):
                    self._load([column[row] for column in columns], purpose is Purpose.TRAIN)
                    if kept is not None and kept.seen[row]:
                        self._recall([memory[row] for memory in memories.values()])
                    with torch.enable_grad():
                        tensors = work(client)
                    self._check_whole()
                    self._take_over_buffers()
                    own = self.client.remember() if kept is not None else {}
                    with torch.no_grad():
                        torch._foreach_copy_(
                            [result[row] for result in results], [tensors[i] for i in places]
                        )
                        for name, memory in zip(memories, remembered, strict=True):
                            _copy_whole(name, own[name], memory[row])
                    logs[row] = self.trainer.logs
        trained = TensorDict(dict(zip(moving, results, strict=True)), batch_size=[len(clients)])
        # What is frozen is as it was sent: one tensor for all clients.
        states = TensorDict(
            dict(zip(self.layout.names, columns, strict=True)) | dict(entries(trained)),
            batch_size=[len(clients)],
        )
        keep = TensorDict(dict(zip(memories, remembered, strict=True)), batch_size=[len(clients)])
        finite = finite_rows(trained)
        if memories and type(self.client).remember is not ClientModule.remember:
            finite = list(map(all, zip(finite, finite_rows(keep), strict=True)))
        for row in [row for row in logs if not finite[row]]:
            failures.append(ClientFailure(int(clients[row]), "its result is NaN or infinite"))
            del logs[row]
        done = torch.tensor(list(logs), dtype=torch.long, device=columns[0].device)
        if len(done) < len(clients):
            states, keep = states[done], keep[done]
        answered = clients[done.to(clients.device)]
        return ClientUpdates(
            answered,
            states,
            self.data.num_samples("train")[answered.cpu()],
            failures,
            merge_logs(logs.values()),
            keep if memories else None,
        )

    @contextmanager
    def _attempt(self, client: int, failures: list[ClientFailure]) -> Iterator[None]:
        """Note the failure of a client that raises or takes too long; the next gets a new copy."""
        try:
            if self.client_timeout is None:
                yield
            else:
                with time_limit(self.client_timeout):
                    yield
        except STOPS:
            raise
        except BaseException as error:
            failures.append(ClientFailure.of(client, error))
            self._build()

    def _train_one(self, client_id: int, round_index: int, epochs: int, steps: int | None) -> None:
        client, trainer = self.client, self.trainer
        x, y = self._samples(client_id, "train")
        count = int(self.data.num_samples("train")[client_id])
        check_count(count, y, y)
        self._check_classes(y)
        sizes = self._batch_sizes(count)
        client.num_samples.fill_(count)
        trainer.start(None if steps is not None else epochs, len(sizes), steps)
        trainer.configure_optimizers()
        descent = None
        if self._plain and not trainer.lr_scheduler_configs and Descent.suits(trainer.optimizers):
            descent = Descent(trainer.optimizers[0])
        client.train()
        self._call("on_train_start")
        while sizes and not trainer.finished:
            epoch = client_id, round_index, trainer.current_epoch
            order = self.data.order(*epoch).to(self.device)
            check_count(count, y, order)
            inputs = self.data.augment(x, *epoch)[order]
            batches = inputs.split(sizes), y[order].split(sizes)
            if descent is not None:
                self._descend(descent, *batches)
            else:
                self._train_epoch(*batches)
        self._call("on_train_end")
        if trainer.without_loss >= trainer.batches_seen > 0:
            raise ValueError(_NO_LOSS)

    def _descend(
        self, descent: Descent, inputs: tuple[Tensor, ...], labels: tuple[Tensor, ...]
    ) -> None:
        """Train a client without hooks of its own for an epoch."""
        client, trainer = self.client, self.trainer
        for index, batch in enumerate(zip(inputs, labels, strict=True)):
            trainer.batch_size = len(batch[1])
            with self._forward_context():
                loss = client.training_step(batch, index)
            descent.step(loss)
            trainer.global_step += 1
            trainer.batches_seen += 1
            if trainer.finished:
                break
        trainer.end_epoch()

    def _train_epoch(self, inputs: tuple[Tensor, ...], labels: tuple[Tensor, ...]) -> None:
        client, trainer = self.client, self.trainer
        step = self._automatic_step if client.automatic_optimization else self._manual_step
        self._call("on_train_epoch_start")
        for index, batch in enumerate(zip(inputs, labels, strict=True)):
            trainer.batch_size = len(batch[1])
            if self._transfers:
                batch = client.on_before_batch_transfer(batch, 0)
                batch = client.transfer_batch_to_device(batch, self.device, 0)
                batch = client.on_after_batch_transfer(batch, 0)
            skip = self._call("on_train_batch_start", batch, index) == -1
            output = None if skip else step(batch, index)
            trainer.batches_seen += 1
            trainer.step_schedulers("step", index)
            if index + 1 == len(labels):
                trainer.step_schedulers("epoch", trainer.current_epoch)
            if skip:
                break
            self._call("on_train_batch_end", _detached(output), batch, index)
            trainer.step_schedulers("step", index, plateau=True)
            if trainer.finished:
                break
        self._call("on_train_epoch_end")
        trainer.end_epoch()

    def _automatic_step(self, batch: Any, index: int) -> Any:
        """One step of automatic optimization, its hooks in Lightning's order."""
        client, (optimizer,) = self.client, self.trainer.optimizers
        output: Any = None

        def closure() -> Tensor | None:
            nonlocal output
            with self._forward_context():
                output = client.training_step(batch, index)
            loss = _loss_of(output)
            self.trainer.without_loss += loss is None
            self._call("on_before_zero_grad", optimizer)
            if "optimizer_zero_grad" in self._hooks:
                client.optimizer_zero_grad(self.trainer.current_epoch, index, optimizer)
            else:
                optimizer.zero_grad()
            if loss is not None:
                self._call("on_before_backward", loss)
                if "backward" in self._hooks:
                    client.backward(loss)
                else:
                    loss.backward()
                self._call("on_after_backward")
            self._call("on_before_optimizer_step", optimizer)
            if self._clips:
                client.configure_gradient_clipping(optimizer)
            return loss

        if "optimizer_step" in self._hooks:
            client.optimizer_step(self.trainer.current_epoch, index, optimizer, closure)
        elif isinstance(optimizer, LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        self.trainer.global_step += 1
        return output

    def _manual_step(self, batch: Any, index: int) -> Any:
        with self._forward_context():
            return self.client.training_step(batch, index)

    def _gradient(self, client_id: int, round_index: int, batches: int | None) -> list[Tensor]:
        client = self.client
        x, y = self._samples(client_id, "train")
        check_count(int(self.data.num_samples("train")[client_id]), y, y)
        self._check_classes(y)
        client.num_samples.fill_(len(y))
        self.trainer.start(1, 1)
        client.train()
        client.zero_grad()
        sizes = self._batch_sizes(len(y))[:batches]
        x = self.data.augment(x, client_id, round_index)
        if batches is not None:
            order = self.data.order(client_id, round_index, 0)[: sum(sizes)].to(self.device)
            x, y = x[order], y[order]
        # A module that mixes the samples of a batch has to see them all at once.
        part = max(len(y), 1) if self._mixes_samples else GRADIENT_BATCH
        if self._copies_input or self._own_loss:
            x = x.clone()
        losses = 0
        for batch in zip(x.split(part), y.split(part), strict=True) if sizes else ():
            self.trainer.batch_size = len(batch[1])
            with self._forward_context():
                loss = _loss_of(client.training_step(batch, 0))
            if loss is not None:
                losses += 1
                (loss * (len(batch[1]) / len(y))).backward()
        if sizes and not losses:
            raise ValueError(_NO_LOSS)
        zero = torch.zeros((), device=self.device)
        return [
            (zero if tensor.grad is None else tensor.grad).expand_as(tensor)
            if name in self.layout.parameters
            else tensor
            for name, tensor in zip(self.layout.names, self._tensors, strict=True)
        ]

    # Evaluation

    def check_input(self) -> None:
        """Raise unless the client can take the data's samples, and gives one logit per class.

        What is checked is what will be used: the outputs where there is something to evaluate or
        the loss is one of pflight's, and the loss unless the client trains by a ``training_step``
        of its own.

        Raises:
            ConfigurationError: Naming the shape of the samples.
        """
        x, y = (part.clone() for part in self._example)
        evaluated = any(self.data.num_samples(split).any() for split in ("val", "test"))
        trains_by_loss = type(self.client).training_step is ClientModule.training_step
        classifies = trains_by_loss and _classifies(self.client)
        expected = (len(x), self.template.num_classes)
        self.client.eval()
        version, asked = x._version, evaluated or classifies
        try:
            with time_limit(self.client_timeout), torch.no_grad(), self._forward_context():
                logits = self.client(x) if asked else None
                if trains_by_loss and not asked:
                    self.client.loss((x, y))
        except STOPS:
            raise
        except BaseException as error:
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise ConfigurationError(
                f"the network can't take the data's samples of shape {tuple(x.shape[1:])} "
                f"({str(x.dtype).removeprefix('torch.')}): {reason}"
            ) from error
        self._copies_input = x._version != version
        if asked:
            if not isinstance(logits, Tensor):
                raise ConfigurationError(
                    f"the network gives {type(logits).__name__}; it must give a tensor, the logits"
                )
            if tuple(logits.shape[: None if evaluated else 2]) != expected:
                raise ConfigurationError(
                    f"the network gives outputs of shape {tuple(logits.shape)} for {expected[0]} "
                    f"samples of {expected[1]} classes; it must give {expected}"
                )
        try:
            check_optimizer(ClientModule.configure_optimizers(self.client))
        except (KeyboardInterrupt, SIGTERMException):
            raise
        except BaseException as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ConfigurationError(f"the client's optimizer can't be built: {reason}") from error
        self._operations = count_operations(self.client, x[:1]).total
        if self._operations * self._batch_size < ONE_THREAD:
            self.threads = 1
        if self._gains_from_channels_last():
            self._channels_last = True
            self._build()
            with isolated(self.device):
                self._channels_last = self._runs((x, y))
            self._build()

    def _gains_from_channels_last(self) -> bool:
        """Whether convolutions and pooling run faster with the channels of a pixel side by side."""
        kernels = [
            module.weight.numel()
            for module in self.client.modules()
            if isinstance(module, nn.Conv2d)
        ]
        return (
            self.device.type == "cpu"
            and self._plain
            and 0 < max(kernels, default=0) < _LARGE_KERNEL
        )

    def _runs(self, batch: tuple[Tensor, Tensor]) -> bool:
        """Try a step and an evaluation; a ``view`` in the client may need the usual layout."""
        client = self.client
        start = [value.to(self.device) for value in self.layout.template.values()]
        try:
            self._load(start, anchored=True)
            if self._memory is not None:
                self._recall([held.contiguous() for held in self._memory.tensors().values()])
            client.train()
            with self._forward_context(), torch.enable_grad():
                client.loss(batch).backward()
            client.after_training()
            client.remember()
            client.eval()
            with self._forward_context(), torch.no_grad():
                client(batch[0])
        except STOPS:
            raise
        except BaseException:
            return False
        return True

    @torch.no_grad()
    @_on_few_threads
    def evaluate(
        self, clients: Tensor, states: TensorDict, split: Split
    ) -> tuple[Evaluation, list[ClientFailure]]:
        """Run each client's model, a row of ``states`` ``[C]``, on its own samples of a split.

        Where all rows are views of one state it is loaded once and sees the clients' samples in
        common batches.

        Returns:
            The outputs of the clients that gave any, and what became of the others: their samples
            can't be read or have labels that are no classes, the model fails on them, or its
            outputs are not finite.
        """
        columns = [states[name] for name in self.layout.names]
        ids, classes = clients.tolist(), self.template.num_classes
        failures: list[ClientFailure] = []
        samples = self._samples_of_all(ids, split, failures)
        logits = self._logits_at_once(columns, samples)
        if logits is None:
            logits = {}
            for row, (x, _) in samples.items():
                with self._attempt(ids[row], failures):
                    self._load([column[row] for column in columns], anchored=False)
                    logits[row] = self._logits(x)
        nothing = torch.empty(0, device=self.device)
        outputs = torch.cat([nothing.view(0, classes), *logits.values()])
        if outputs.dtype.itemsize < 4:  # bfloat16 loses too much of a loss
            outputs = outputs.float()
        targets = torch.cat([nothing.long(), *(samples[row][1] for row in logits)])
        counts = torch.tensor([len(part) for part in logits.values()], dtype=torch.long)
        owners = clients.cpu()[list(logits)].repeat_interleave(counts).to(self.device)
        losses = F.cross_entropy(outputs, targets, reduction="none")
        evaluation = Evaluation(owners, outputs, targets, losses)
        if not (finite := losses.isfinite()).all():
            odd = owners[~finite].unique()
            reason = "the outputs of its model, or their losses, are NaN or infinite"
            failures += [ClientFailure(client, reason) for client in odd.tolist()]
            sound = ~torch.isin(owners, odd)
            evaluation = Evaluation(*(column[sound] for column in evaluation))
        return evaluation, failures

    def _samples_of_all(
        self, ids: list[int], split: Split, failures: list[ClientFailure]
    ) -> dict[int, Batch]:
        """Return the samples of some clients and their classes, by row, and note who has none."""
        classes, limit = self.template.num_classes, self.client_timeout
        samples: dict[int, Batch] = {}
        try:
            with time_limit(limit and limit * len(ids)):
                samples = {row: self._samples(client, split) for row, client in enumerate(ids)}
                if samples:
                    check_labels(torch.cat([y for _, y in samples.values()]), classes)
        except STOPS:
            raise
        except BaseException:  # whose it is will be seen one by one
            samples = {}
            for row, client in enumerate(ids):
                with self._attempt(client, failures):
                    x, y = self._samples(client, split)
                    check_labels(y, classes)
                    samples[row] = x, y
        return samples

    @torch.no_grad()
    def losses(
        self, clients: Tensor, states: TensorDict, split: Split
    ) -> tuple[Tensor, list[ClientFailure]]:
        """Return the mean loss ``[C]`` of each client's model on its own samples of a split.

        It is the client module's own loss, in evaluation mode and without an anchor, so that
        penalties vanish; NaN for a client without samples, or that fails.
        """
        means = torch.full((len(clients),), torch.nan, dtype=torch.double, device=self.device)
        failures: list[ClientFailure] = []
        with _threads(self.threads):
            for row, client in enumerate(clients.tolist()):
                with self._attempt(client, failures):
                    x, y = self._samples(client, split)
                    if not len(y):
                        continue
                    self._check_classes(y)
                    if self._copies_input or self._own_loss:
                        x = x.clone()
                    size = self.data.eval_batch_size or len(y)
                    self._load([states[name][row] for name in self.layout.names], anchored=False)
                    self._evaluates()
                    self.client.num_samples.fill_(int(self.data.num_samples("train")[client]))
                    with self._forward_context():
                        sums = [
                            self.client.loss(batch).double() * len(batch[1])
                            for batch in zip(x.split(size), y.split(size), strict=True)
                        ]
                    means[row] = torch.stack(sums).sum() / len(y)
        return means, failures

    def _logits_at_once(
        self, columns: list[Tensor], samples: dict[int, Batch]
    ) -> dict[int, Tensor] | None:
        """Return the logits of clients that have one and the same model, by row, or ``None``.

        Args:
            columns: The models ``[C, ...]``.
            samples: Of the clients, by row; some may be missing.
        """
        if not are_one(columns) or not samples:
            return None
        limit = self.client_timeout
        try:
            with time_limit(limit and limit * len(samples)):
                self._load([column[0] for column in columns], anchored=False)
                logits = self._logits(torch.cat([x for x, _ in samples.values()]))
        except STOPS:
            raise
        except BaseException:  # whose it is will be seen one by one
            self._build()
            return None
        return dict(zip(samples, logits.split([len(y) for _, y in samples.values()]), strict=True))

    def _evaluates(self) -> None:
        """Set all modules to evaluation, of which a model may have let some train."""
        if any(module.training for module in self._modules):
            self.client.eval()

    def _logits(self, x: Tensor) -> Tensor:
        """Return the logits of the model at hand, in evaluation mode."""
        self._evaluates()
        if self._copies_input:
            x = x.clone()
        with self._forward_context():
            parts = x.split(self.data.eval_batch_size or len(x) or 1)
            logits = torch.cat([self.client(part) for part in parts])
        if logits.shape != (len(x), self.template.num_classes):
            raise ValueError(
                f"its model gives outputs of shape {list(logits.shape)} for {len(x)} samples of "
                f"{self.template.num_classes} classes"
            )
        return logits

    # The copy of the client in which everybody trains

    def copy_of_client(self) -> ClientModule:
        """Return a new copy of the client on the device and in the precision of training."""
        client = copy.deepcopy(self.template)
        self.precision.convert_module(client).to(self.device)
        dtype = self.layout.template[self.layout.parameters[0]].dtype
        for name in client.told:  # as precise as the network
            setattr(client, name, getattr(client, name).to(dtype))
        client.mean_samples.fill_(self.mean_samples)
        return client

    def _build(self) -> None:
        client = self.copy_of_client()
        if self._channels_last:
            client.to(memory_format=torch.channels_last)
        tensors = state_tensors(client)
        self._tensors = list(tensors.values())
        self._anchor = StateModule(
            {name: tensors[name] for name in self.layout.parameters}, persistent=False
        )
        self._memory = (
            StateModule(client.remember(), persistent=False) if client.keeps_memory else None
        )
        self._parameters = [self.layout.names.index(name) for name in self.layout.parameters]
        self.client = client
        self.trainer = LocalTrainer(client, self.precision)
        client._trainer = self.trainer  # type: ignore[assignment]
        client.log = self.trainer.log  # type: ignore[method-assign]
        client.log_dict = self.trainer.log_dict  # type: ignore[method-assign, assignment]
        self._hooks = {hook for hook in _HOOKS if is_overridden(hook, client)}
        self._transfers = not self._hooks.isdisjoint(_TRANSFER_HOOKS)
        self._clips = (
            client.gradient_clip_val is not None
            or type(client).configure_gradient_clipping
            is not ClientModule.configure_gradient_clipping
        )
        self._own_loss = type(
            client
        ).training_step is not ClientModule.training_step or not _classifies(client)
        self._plain = (
            not self._hooks
            and not self._clips
            and client.automatic_optimization
            and type(client).training_step is ClientModule.training_step
        )
        self._mixes_samples = any(
            isinstance(module, nn.modules.batchnorm._BatchNorm) for module in client.modules()
        )
        client.anchor, client.memory = self._anchor, self._memory
        self._attributes = [(vars(module), dict(vars(module))) for module in client.modules()]
        self._modules = list(client.modules())
        self._registers = [vars(module)[name] for module in self._modules for name in _REGISTERS]
        self._registered = [held.copy() for held in self._registers]
        self._lengths = list(map(len, self._registers))
        self._parts = [
            (held, name, part, f"{path}.{name}".lstrip("."))
            for path, module in client.named_modules()
            for held in (module._parameters, module._modules)
            for name, part in held.items()
            if path.split(".")[0] not in _FROM_SERVER and (path or name not in _FROM_SERVER)
        ]
        self._requires_grad = [(p, p.requires_grad) for p in client.parameters()]
        self._kinds = [(t.shape, t.dtype, t.device) for t in self._tensors]
        own = set(map(id, self._tensors))
        self._buffers = [
            (module._buffers, name, buffer)
            for module in client.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and id(buffer) in own
        ]

    def _load(self, start: list[Tensor], anchored: bool) -> None:
        # What the client before has set is not this one's.
        for attributes, given in self._attributes:
            attributes.update(given, training=attributes["training"])
            for name in attributes.keys() - given.keys():
                del attributes[name]
        if list(map(len, self._registers)) != self._lengths:
            for held, registered in zip(self._registers, self._registered, strict=True):
                held.clear()
                held.update(registered)
        for parameter, required in self._requires_grad:
            parameter.requires_grad = required
        for held, name, buffer in self._buffers:
            held[name] = buffer
        with torch.no_grad():
            torch._foreach_copy_(self._tensors, start)
        if anchored:
            self._anchor.hold(start[position] for position in self._parameters)
        self.client.anchor = self._anchor if anchored else None
        self.client.memory = None
        self.client.seen.zero_()
        self.client.num_steps.zero_()

    def _check_whole(self) -> None:
        """Raise if a client has put something else in the place of what it was to train."""
        for held, name, part, path in self._parts:
            if held.get(name) is not part:
                raise RuntimeError(f"it replaced or deleted its {path}")
        for name, tensor, kind in zip(self.layout.names, self._tensors, self._kinds, strict=True):
            if (tensor.shape, tensor.dtype, tensor.device) != kind:
                raise RuntimeError(f"it changed the shape, type or device of its {name}")

    @torch.no_grad()
    def _take_over_buffers(self) -> None:
        """Copy what stands in the place of a buffer, which a client need not change in place."""
        for held, name, buffer in self._buffers:
            if (current := held.get(name)) is None:
                raise RuntimeError(f"it deleted its buffer {name}")
            if current is not buffer:
                _copy_whole(name, current, buffer)

    def _recall(self, memory: list[Tensor]) -> None:
        assert self._memory is not None
        self._memory.hold(memory)
        self.client.memory = self._memory
        self.client.seen.fill_(1)

    def _samples(self, client_id: int, split: Split) -> Batch:
        batch = self.precision.convert_input(read_samples(self.data, client_id, split))
        x, y = self._form.fitted(batch)
        return x.to(self.device), y.to(self.device)

    def _check_classes(self, y: Tensor) -> None:
        """Raise if labels are no classes, where the loss takes them for some."""
        if not self._own_loss and not self._form.y and not y.is_floating_point():
            check_labels(y, self.template.num_classes)

    def has_batches(self, clients: Tensor) -> Tensor:
        """Return a mask ``[C]`` of the clients that have a batch to train on."""
        counts = self.data.num_samples("train")[clients.cpu()]
        return (counts > (1 if self._mixes_samples else 0)).to(clients.device)

    def _batch_sizes(self, num_samples: int) -> list[int]:
        """Sizes of an epoch's batches.

        BatchNorm can't train on a single sample: such a last batch joins the one before, and is
        left out where it is the client's only one (:meth:`has_batches`).
        """
        size = self.data.batch_size or max(num_samples, 1)
        sizes = [size] * (num_samples // size)
        if rest := num_samples % size:
            sizes.append(rest)
        if self._mixes_samples and sizes and sizes[-1] == 1:
            sizes.pop()
            if sizes:
                sizes[-1] += 1
        return sizes

    def _call(self, hook: str, *args: Any) -> Any:
        return getattr(self.client, hook)(*args) if hook in self._hooks else None

    def _forward_context(self) -> AbstractContextManager[None]:
        plain = type(self.precision) is Precision
        return nullcontext() if plain else self.precision.forward_context()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _like(columns: Iterable[Tensor]) -> list[Tensor]:
    """Return empty tensors in which rows lie one after the other."""
    return [torch.empty_like(column, memory_format=torch.contiguous_format) for column in columns]


def are_one(columns: Iterable[Tensor]) -> bool:
    """Return whether all rows of a stack are views of one state."""
    return all(len(column) == 1 or column.stride(0) == 0 for column in columns)


def _copy_whole(name: str, value: Tensor, into: Tensor) -> None:
    """Copy a tensor into one of its shape."""
    if value.shape != into.shape:
        raise RuntimeError(
            f"its {name} is of shape {list(value.shape)}, where {list(into.shape)} is wanted"
        )
    into.copy_(value)


def definers_of_loss(client: ClientModule) -> list[type]:
    """Return the classes that define a loss of the client, which may call each other's."""
    return [kind for kind in type(client).__mro__ if "loss" in vars(kind)]


def _classifies(client: ClientModule) -> bool:
    """Return whether its loss is the cross-entropy of its logits, plus penalties of pflight's."""
    return all(kind.__module__.split(".")[0] == "pflight" for kind in definers_of_loss(client))


def _loss_of(output: Any) -> Tensor | None:
    """Return the loss in what a ``training_step`` returned."""
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, Tensor | None) or (loss is None and output is not None):
        raise TypeError(
            "its training_step must return a tensor, a dict with one named loss, or None, "
            f"not {type(output).__name__}"
        )
    return loss


def _detached(output: Any) -> Any:
    """Return a step's output as Lightning hands it to ``on_train_batch_end``."""
    if isinstance(output, Tensor):
        return {"loss": output.detach()}
    return output


def finite_rows(states: TensorDict) -> list[bool]:
    """Tell for each state of a stack whether all its floating values are finite."""
    finite = []
    for _, leaf in entries(states):
        if leaf.is_floating_point():
            precise = torch.promote_types(leaf.dtype, torch.float32)
            finite.append(rows(leaf).sum(dim=1, dtype=precise).isfinite())  # faster than a norm
    return torch.stack(finite).all(dim=0).tolist()

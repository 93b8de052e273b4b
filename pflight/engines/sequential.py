"""One client after the other, through the real hooks of its LightningModule."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim import LBFGS

from pflight.datamodules import FederatedDataModule, Split
from pflight.errors import ConfigurationError
from pflight.history import Logs, merge_logs
from pflight.models import ClientModule
from pflight.randomness import Purpose, derive_seed, isolated, seed_everything
from pflight.state import StateLayout, StateModule, entries, rows, state_tensors

from .descent import Descent
from .local_trainer import LocalTrainer
from .operations import count_operations
from .updates import ClientFailure, ClientUpdates, Evaluation, Kept

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
_ONE_THREAD = 20e6  # operations of a batch's forward pass from which on threads pay


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
    ) -> None:
        self.template = client
        self.layout = layout
        self.data = data
        self.precision = precision
        self.device = device
        self.seed = seed
        self.mean_samples = float(data.num_samples("train")[data.train_clients].double().mean())
        self.threads = torch.get_num_threads()
        self._channels_last = False
        self._build()
        if self._mixes_samples and data.batch_size == 1:
            raise ConfigurationError("batch_size=1 can't train a network with BatchNorm")

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
        results = _like(columns)
        memories = dict(entries(kept.states)) if kept is not None else {}
        remembered = _like(memories.values())
        logs: dict[int, Logs] = {}  # by row, of those that came to an end
        failures: list[ClientFailure] = []
        with _threads(self.threads):
            for row, client in enumerate(clients.tolist()):
                seed_everything(derive_seed(purpose, self.seed, round_index, client), self.device)
                try:
                    self._load([column[row] for column in columns], purpose is Purpose.TRAIN)
                    if kept is not None and kept.seen[row]:
                        self._recall([memory[row] for memory in memories.values()])
                    with torch.enable_grad():
                        tensors = work(client)
                    self._take_over_buffers()
                    own = self.client.remember() if kept is not None else {}
                except MisconfigurationException:  # a mistake for all, not this client's failure
                    raise
                except Exception as error:
                    reason = " ".join(f"{type(error).__name__}: {error}".split())
                    failures.append(ClientFailure(client, reason, error))
                    self._build()
                    continue
                with torch.no_grad():
                    torch._foreach_copy_([result[row] for result in results], tensors)
                    for name, memory in zip(memories, remembered, strict=True):
                        memory[row] = own[name]
                logs[row] = self.trainer.logs
        states = TensorDict(
            dict(zip(self.layout.names, results, strict=True)), batch_size=[len(clients)]
        )
        finite = finite_rows(states)
        for row in [row for row in logs if not finite[row]]:
            failures.append(ClientFailure(int(clients[row]), "its result is NaN or infinite"))
            del logs[row]
        done = torch.tensor(list(logs), dtype=torch.long, device=columns[0].device)
        keep = TensorDict(dict(zip(memories, remembered, strict=True)), batch_size=[len(clients)])
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

    def _train_one(self, client_id: int, round_index: int, epochs: int, steps: int | None) -> None:
        client, trainer = self.client, self.trainer
        x, y = self._samples(client_id, "train")
        sizes = self._batch_sizes(len(y))
        client.num_samples.fill_(len(y))
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
            inputs = self.data.augment(x, *epoch)[order]
            batches = inputs.split(sizes), y[order].split(sizes)
            if descent is not None:
                self._descend(descent, *batches)
            else:
                self._train_epoch(*batches)
        self._call("on_train_end")

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
        for batch in zip(x.split(part), y.split(part), strict=True) if sizes else ():
            self.trainer.batch_size = len(batch[1])
            with self._forward_context():
                loss = _loss_of(client.training_step(batch, 0))
            if loss is not None:
                (loss * (len(batch[1]) / len(y))).backward()
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
        x, y = self._samples(int(self.data.train_clients[0]), "train")
        batch, x, y = len(x[: self.data.batch_size]), x[:2], y[:2]
        evaluated = any(self.data.num_samples(split).any() for split in ("val", "test"))
        trains_by_loss = type(self.client).training_step is ClientModule.training_step
        classifies = trains_by_loss and _classifies(self.client)
        expected = (len(x), self.client.num_classes)
        self.client.eval()
        try:
            with torch.no_grad(), self._forward_context():
                logits = self.client(x) if evaluated or classifies else None
                if trains_by_loss and logits is None:
                    self.client.loss((x, y))
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            raise ConfigurationError(
                f"the network can't take the data's samples of shape {tuple(x.shape[1:])} "
                f"({str(x.dtype).removeprefix('torch.')}): {reason}"
            ) from error
        if logits is not None and tuple(logits.shape[: None if evaluated else 2]) != expected:
            raise ConfigurationError(
                f"the network gives outputs of shape {tuple(logits.shape)} for {expected[0]} "
                f"samples of {expected[1]} classes; it must give {expected}"
            )
        try:
            ClientModule.configure_optimizers(self.client)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ConfigurationError(f"the client's optimizer can't be built: {reason}") from error
        if count_operations(self.client, x[:1]).total * batch < _ONE_THREAD:
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
        except Exception:
            return False
        return True

    @torch.no_grad()
    def evaluate(self, clients: Tensor, states: TensorDict, split: Split) -> Evaluation:
        """Run each client's model, a row of ``states`` ``[C]``, on its own samples of a split.

        Where all rows are views of one state it is loaded once and sees the clients' samples in
        common batches.
        """
        columns = [states[name] for name in self.layout.names]
        shared = all(len(column) == 1 or column.stride(0) == 0 for column in columns)
        samples = [self._samples(client, split) for client in clients.tolist()]
        self.client.eval()
        logits: list[Tensor] = []
        if shared and samples:
            self._load([column[0] for column in columns], anchored=False)
            logits = self._forward(torch.cat([x for x, _ in samples]))
        else:
            logits = self.logits_of_each(columns, samples)
        outputs = torch.cat(logits)
        if outputs.dtype.itemsize < 4:  # bfloat16 loses too much of a loss
            outputs = outputs.float()
        targets = torch.cat([y for _, y in samples])
        counts = torch.tensor([len(y) for _, y in samples])
        owners = clients.cpu().repeat_interleave(counts).to(self.device)
        losses = F.cross_entropy(outputs, targets, reduction="none")
        return Evaluation(owners, outputs, targets, losses)

    @torch.no_grad()
    def losses(self, clients: Tensor, states: TensorDict, split: Split) -> Tensor:
        """Return the mean loss ``[C]`` of each client's model on its own samples of a split.

        It is the client module's own loss, in evaluation mode and without an anchor, so that
        penalties vanish; NaN for a client without samples, or whose loss raises.
        """
        self.client.eval()
        means = torch.full((len(clients),), torch.nan, dtype=torch.double, device=self.device)
        with _threads(self.threads):
            for row, client in enumerate(clients.tolist()):
                x, y = self._samples(client, split)
                size = self.data.eval_batch_size or max(len(y), 1)
                self._load([states[name][row] for name in self.layout.names], anchored=False)
                self.client.num_samples.fill_(int(self.data.num_samples("train")[client]))
                batches = zip(x.split(size), y.split(size), strict=True)
                try:
                    with self._forward_context():
                        sums = [
                            self.client.loss(batch).double() * len(batch[1]) for batch in batches
                        ]
                except Exception:  # training will say why
                    continue
                means[row] = torch.stack(sums).sum() / len(y)
        return means

    def logits_of_each(
        self, columns: list[Tensor], samples: list[tuple[Tensor, Tensor]]
    ) -> list[Tensor]:
        """Return the logits of each client's model, a row of every column, on its own samples."""
        logits = []
        for row, (x, _) in enumerate(samples):
            self._load([column[row] for column in columns], anchored=False)
            logits += self._forward(x)
        return logits

    def _forward(self, x: Tensor) -> list[Tensor]:
        with self._forward_context():
            return [self.client(part) for part in x.split(self.data.eval_batch_size or len(x) or 1)]

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
        self._plain = (
            not self._hooks
            and not self._clips
            and client.automatic_optimization
            and type(client).training_step is ClientModule.training_step
        )
        self._mixes_samples = any(
            isinstance(module, nn.modules.batchnorm._BatchNorm) for module in client.modules()
        )
        client.anchor = self._anchor
        self._attributes = [(vars(module), dict(vars(module))) for module in client.modules()]
        self._requires_grad = [(p, p.requires_grad) for p in client.parameters()]
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

    @torch.no_grad()
    def _take_over_buffers(self) -> None:
        """Copy what stands in the place of a buffer, which a client need not change in place."""
        for held, name, buffer in self._buffers:
            current = held[name]
            if current is not None and current is not buffer:
                buffer.copy_(current)

    def _recall(self, memory: list[Tensor]) -> None:
        assert self._memory is not None
        self._memory.hold(memory)
        self.client.memory = self._memory
        self.client.seen.fill_(1)

    def _samples(self, client_id: int, split: Split) -> tuple[Tensor, Tensor]:
        x, y = self.precision.convert_input(self.data.samples(client_id, split))
        return x.to(self.device), y.to(self.device)

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


def definers_of_loss(client: ClientModule) -> list[type]:
    """Return the classes that define a loss of the client, which may call each other's."""
    return [kind for kind in type(client).__mro__ if "loss" in vars(kind)]


def _classifies(client: ClientModule) -> bool:
    """Return whether its loss is the cross-entropy of its logits, plus penalties of pflight's."""
    return all(kind.__module__.split(".")[0] == "pflight" for kind in definers_of_loss(client))


def _loss_of(output: Any) -> Tensor | None:
    """Return the loss in what a ``training_step`` returned."""
    return output["loss"] if isinstance(output, dict) else output


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

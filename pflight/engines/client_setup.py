"""The clients' parts that an engine knows before training: module, client method and data."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pflight.data.data_module import FederatedDataModule
from pflight.data.loaders import Split
from pflight.errors import ConfigurationError
from pflight.method import ClientMethod
from pflight.states.state import StateLayout, resting_parts
from pflight.task import Task

from .samples import Form, checked, usual_samples
from .time_limit import check_timer

_NAMED = 5  # clients in a message about many


class ClientSetup:
    """The client module, its client method, and its data.

    Args:
        client: The client module; engines train copies.
        client_method: The client method.
        layout: The state layout of both.
        data: The data module with the clients' samples.
        precision: The precision plugin of the federation's Trainer.
        device: The device of the training.
        seed: Seed of all local randomness, together with round and client.
        client_timeout: Seconds after which a client's code is interrupted, or ``None``.
        lr_decay: Factor of the clients' step sizes in each round after the first.

    Raises:
        ConfigurationError: If clients can't be interrupted here, or samples can't be augmented.

    Attributes:
        task: The client module, if it is a task that is judged by its outputs.
        predicts_outputs: Whether ``task`` has no ``predict_step`` of its own.
        has_loss_of_its_kind: Whether the client module is a task with the loss of a ready-made one.
        form: Form of the clients' samples, if the data module holds them as tensors.
        example: Two samples of this form.
        mean_samples: Mean number of training samples of the clients that may train.
        mixes_samples: Whether BatchNorm makes a sample's outputs depend on the rest of its batch.
        round_index: Index of the current round of training, or of the last one.
    """

    def __init__(
        self,
        client: LightningModule,
        client_method: ClientMethod,
        layout: StateLayout,
        data: FederatedDataModule,
        precision: Precision,
        device: torch.device,
        seed: int,
        client_timeout: float | None = None,
        lr_decay: float = 1.0,
    ) -> None:
        self.client = client
        self.client_method = client_method
        self.layout = layout
        self.data = data
        self.precision = precision
        self.device = device
        self.seed = seed
        self.client_timeout = client_timeout
        self.lr_decay = lr_decay
        self.round_index = 0
        if client_timeout is not None:
            check_timer()
        self.task: Task | None = None
        self.predicts_outputs = self.has_loss_of_its_kind = False
        if isinstance(client, Task):
            self.has_loss_of_its_kind = _of_its_kind(client, "loss", "losses", "training_step")
            if data.holds_tensors and _of_its_kind(client, "validation_step", "test_step"):
                self.task = client
                self.predicts_outputs = _of_its_kind(client, "predict_step")
        resting = {id(part) for part in resting_parts(client)}
        self.mixes_samples = any(
            isinstance(part, nn.modules.batchnorm._BatchNorm)
            and id(part) not in resting
            and (part.training or isinstance(client, Task))
            for part in client.modules()
        )
        self.mean_samples = float(data.num_samples("train")[self.trainable].double().mean())
        self.form: Form | None = None
        self.example: list[Tensor] = []
        if data.holds_tensors:
            usual = usual_samples(data, self._of_pairs, client_timeout)
            samples = precision.convert_input(usual)
            self.form = Form.of(samples)
            if data.augmentation is not None and self.form.names[0] != "features":
                raise ConfigurationError(
                    f"{data}: an augmentation changes the images of pairs (images, labels), but "
                    f"samples() returns {', '.join(self.form.names)}"
                )
            self.example = [leaf[:2].to(device, copy=True) for leaf in tree_leaves(samples)]

    def pace(self, groups: Iterable[dict[str, Any]], anchored: bool) -> None:
        """Multiply the step sizes of an optimizer's groups by the round's decay.

        Args:
            groups: The optimizer's groups of parameters.
            anchored: Whether this is a participation in a round. Fine-tuning is not.
        """
        if self.lr_decay != 1 and anchored:
            for group in groups:
                group["lr"] = group["lr"] * self.lr_decay**self.round_index

    @cached_property
    def tells_round(self) -> bool:
        """Whether the module has a ``round_index`` that can be set."""
        found = inspect.getattr_static(self.client, "round_index", None)
        return found is not None and not isinstance(found, property)

    @property
    def _as_they_are(self) -> bool:
        return type(self.precision) is Precision

    @property
    def dtype(self) -> torch.dtype:
        """The type of the client's parameters."""
        return self.layout.template[self.layout.parameters[0]].dtype

    @cached_property
    def class_counts(self) -> Tensor:
        """Training samples of every client by class ``[num_clients, K]``, in parameters' dtype."""
        classes: Any = self.client.num_classes
        return self.data.class_counts("train", classes).to(self.device, self.dtype)

    @property
    def _of_pairs(self) -> bool:
        return isinstance(self.client, Task)

    def samples(self, client: int, split: Split) -> list[Tensor]:
        """Return the tensors of a client's samples, on the device.

        Raises:
            TypeError: If the samples are no tensors.
            ValueError: If the samples' form differs from other clients', or their number from the
                data module's.
        """
        assert self.form is not None
        samples: Any = self.data.samples(client, split)
        if not self._as_they_are or not self.form.fits_pair(samples):
            samples = self.precision.convert_input(checked(samples, self._of_pairs))
            samples = self.form.fitted(samples)
        if samples[0].shape[0] != (count := int(self.data.num_samples(split)[client])):
            called = {"train": "training", "val": "validation"}.get(split, split.replace("_", " "))
            raise ValueError(
                f"it has {len(samples[0])} {called} samples, but num_samples() says {count}"
            )
        return [leaf.to(self.device) for leaf in samples]

    def augmented(self, leaves: list[Tensor], *visit: int) -> list[Tensor]:
        """Return the augmented training samples of a client in one local epoch.

        Args:
            leaves: The tensors of the samples.
            *visit: The client, round and epoch.
        """
        if self.form is None or self.form.names[0] != "features":
            return leaves
        return [self.data.augment(leaves[0], *visit), *leaves[1:]]

    def has_batches(self, clients: Tensor) -> Tensor:
        """Return a mask ``[C]`` of the clients that have a batch to train on."""
        counts = self.data.num_samples("train")[clients.cpu()]
        return (counts > (1 if self.mixes_samples else 0)).to(clients.device)

    @property
    def trainable(self) -> Tensor:
        """Ids of the clients with a batch to train on, ascending; all train clients if none has."""
        clients = self.data.train_clients
        able = clients[self.has_batches(clients)]
        return able if len(able) else clients  # if no client learns anything, nothing moves

    def idle_clients(self) -> str | None:
        """Return a message that names the clients without a batch to train on, if any."""
        clients = self.data.train_clients
        idle = clients[~self.has_batches(clients)].tolist()
        if not idle:
            return None
        named = ", ".join(map(self.data.numbered, idle[:_NAMED])) + ", ..." * (len(idle) > _NAMED)
        return (
            f"{len(idle)} of {len(clients)} clients have a single sample, on which BatchNorm can't "
            f"train, and carry no weight: {named}"
        )

    def batch_sizes(self, num_samples: int) -> list[int]:
        """Return the sizes of an epoch's batches.

        BatchNorm can't train on a single sample. A last batch of one sample joins the batch before.
        It is left out if it is the client's only batch (:meth:`has_batches`).
        """
        size = self.data.batch_size or max(num_samples, 1)
        sizes = [size] * (num_samples // size)
        if rest := num_samples % size:
            sizes.append(rest)
        if self.mixes_samples and sizes and sizes[-1] == 1:
            sizes.pop()
            if sizes:
                sizes[-1] += 1
        return sizes

    def forward_context(self) -> AbstractContextManager[None]:
        """Return the context for passes in the Trainer's precision."""
        return nullcontext() if self._as_they_are else self.precision.forward_context()


def _of_its_kind(client: Task, *methods: str) -> bool:
    """Return whether methods of a task are pflight's, and not a user's own."""
    defined = (getattr(type(client), method).__module__ for method in methods)
    return all(module.split(".")[0] == "pflight" for module in defined)

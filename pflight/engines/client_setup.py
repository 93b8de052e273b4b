"""The clients' parts that an engine knows before training: module, client method, and samples."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import torch
from lightning import LightningModule
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_unflatten,
)

from pflight.data.data_module import FederatedDataModule
from pflight.data.loaders import Split
from pflight.errors import ConfigurationError
from pflight.method import ClientMethod, Phase
from pflight.states.state import StateLayout, resting_parts
from pflight.states.updates import STOPS, ClientFailure
from pflight.task import Task

from .time_limit import check_timer, time_limit

_ASKED = 5  # clients whose samples are read; one or two may be unusual
_NAMED = 5  # clients in a message about many


class Kind(NamedTuple):
    """Shape and type of one of the tensors of a sample."""

    shape: torch.Size
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} of shape {list(self.shape)}"


class Form(NamedTuple):
    """The common structure of all clients' samples.

    Samples are any nesting of tensors ``[n, ...]``, most often a pair of features and labels.
    """

    names: tuple[str, ...]
    """Names of the tensors."""
    kinds: tuple[Kind, ...]
    """Kinds of the tensors of a single sample."""
    spec: TreeSpec

    @classmethod
    def of(cls, samples: Any) -> Form:
        """Return the form of some samples."""
        named, spec = tree_flatten_with_path(samples)
        kinds = tuple(Kind(leaf.shape[1:], leaf.dtype) for _, leaf in named)
        if _is_pair(samples):
            return cls(("features", "labels"), kinds, spec)
        return cls(tuple(f"samples{keystr(path)}" for path, _ in named), kinds, spec)

    def fits_pair(self, samples: Any) -> bool:
        """Return whether the samples are features and as many labels of this form. It is fast."""
        if len(self.kinds) != 2 or not _is_pair(samples):
            return False
        (x, y), (of_x, of_y) = samples, self.kinds
        return (
            x.shape[1:] == of_x.shape
            and y.shape[1:] == of_y.shape
            and x.dtype == of_x.dtype
            and y.dtype == of_y.dtype
            and x.dim() > 0 < y.dim()
            and x.shape[0] == y.shape[0]
            and self.names[0] == "features"
        )

    def fitted(self, samples: Any) -> list[Tensor]:
        """Return the tensors of samples of this form. No samples at all also fit.

        Raises:
            ValueError: If the samples have another form.
        """
        leaves, _ = tree_flatten(samples)
        form = Form.of(samples)
        if form.names != self.names:
            raise ValueError(
                f"its samples hold {', '.join(form.names)}, those of other clients "
                f"{', '.join(self.names)}"
            )
        if form.kinds == self.kinds:
            return leaves
        if not len(leaves[0]):
            return [
                leaf.new_empty((0, *shape), dtype=dtype)
                for leaf, (shape, dtype) in zip(leaves, self.kinds, strict=True)
            ]
        parts = zip(self.names, form.kinds, self.kinds, strict=True)
        name, own, usual = next(part for part in parts if part[1] != part[2])
        raise ValueError(f"its {name} are {own}, those of other clients {usual}")

    def batch(self, leaves: list[Tensor]) -> Any:
        """Return samples made of tensors in the order of :attr:`names`."""
        return tuple(leaves) if self.names[0] == "features" else tree_unflatten(leaves, self.spec)


def _is_pair(samples: Any) -> bool:
    return (
        isinstance(samples, tuple | list)
        and len(samples) == 2
        and all(isinstance(part, Tensor) for part in samples)
    )


def checked(samples: Any, of_pairs: bool) -> Any:
    """Return a client's samples, checked: tensors of one length.

    Args:
        samples: The client's samples.
        of_pairs: Whether the samples have to be features and labels.

    Raises:
        TypeError: If the samples are not a pair of tensors or, without ``of_pairs``, a nesting.
        ValueError: If the tensors have different lengths.
    """
    leaves = tree_leaves(samples)
    if of_pairs and not _is_pair(samples):
        of_parts = isinstance(samples, tuple | list)
        kinds = [type(part).__name__ for part in samples] if of_parts else []
        got = f"({', '.join(kinds[:3])}{', ...' * (len(kinds) > 3)})" if kinds else ""
        raise TypeError(
            f"samples() must return a pair of tensors, features and labels, "
            f"not {got or type(samples).__name__}"
        )
    odd = next((leaf for leaf in leaves if not isinstance(leaf, Tensor)), None)
    if odd is not None or not leaves:
        what = f"with a {type(odd).__name__} in it" if leaves else "that holds nothing"
        raise TypeError(f"samples() must return tensors, not a {type(samples).__name__} {what}")
    if not all(leaf.dim() and len(leaf) == len(leaves[0]) for leaf in leaves):
        shapes = [list(leaf.shape) for leaf in leaves]
        if _is_pair(samples):
            raise ValueError(
                f"samples() must return as many labels as features, not features of shape "
                f"{shapes[0]} and labels of shape {shapes[1]}"
            )
        raise ValueError(f"samples() must return tensors of one length, not of shapes {shapes}")
    return samples


def check_order(count: int, order: Tensor) -> None:
    """Raise a ``ValueError`` unless this is an order of ``count`` samples."""
    if len(order) != count:
        raise ValueError(f"order() gives {len(order)} positions for {count} training samples")


def usual_samples(data: FederatedDataModule, of_pairs: bool, timeout: float | None) -> Any:
    """Return the training samples of a client, in the most frequent form.

    Only the first clients are read. Finite samples are preferred. Any of these clients may differ,
    fail, or take longer than ``timeout`` seconds.

    Raises:
        ConfigurationError: If all these clients fail.
    """
    found: list[Any] = []
    failures: list[ClientFailure] = []
    for client in data.train_clients[:_ASKED].tolist():
        try:
            with time_limit(timeout):
                found.append(checked(data.samples(client, "train"), of_pairs))
        except STOPS:
            raise
        except BaseException as error:
            failures.append(ClientFailure.of(client, error))
    if not found:
        first = failures[0]
        whose = f"client {data.numbered(first.client)}"
        raise ConfigurationError(
            f"the training samples of {whose} can't be used: {first.reason}"
        ) from first.error
    forms = [Form.of(samples)[:2] for samples in found]
    (form, _), *_ = Counter(forms).most_common(1)
    usual = [samples for samples, own in zip(found, forms, strict=True) if own == form]
    return next(filter(are_finite, usual), usual[0])


def are_finite(samples: Any) -> bool:
    """Return whether results on these samples can be compared."""
    try:
        return all(bool(leaf.isfinite().all()) for leaf in tree_leaves(samples))
    except Exception:  # tensors without elements or rows
        return False


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
        self._phases: dict[tuple[int, bool], list[Phase] | None] = {}
        self._as_they_are = type(precision) is Precision  # whether samples keep their types
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
            usual = usual_samples(data, isinstance(client, Task), client_timeout)
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

    def phases(self, epochs: int, anchored: bool) -> list[Phase] | None:
        """Return the phases of the round's local training, or ``None`` if all epochs are alike."""
        key = epochs, anchored
        if key not in self._phases:
            self._phases[key] = self.client_method.phases(self.client, *key)
        phases = self._phases[key]
        return phases and [phase for phase in phases if phase.in_round(self.round_index)]

    @cached_property
    def tells_round(self) -> bool:
        """Whether the module has a ``round_index`` that can be set."""
        found = inspect.getattr_static(self.client, "round_index", None)
        return found is not None and not isinstance(found, property)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the client's parameters."""
        return self.layout.template[self.layout.parameters[0]].dtype

    @cached_property
    def class_counts(self) -> Tensor:
        """Training samples of every client by class ``[num_clients, K]``, in parameters' dtype."""
        classes: Any = self.client.num_classes
        return self.data.class_counts("train", classes).to(self.device, self.dtype)

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
            samples = self.precision.convert_input(checked(samples, isinstance(self.client, Task)))
            samples = self.form.fitted(samples)
        if samples[0].shape[0] != (count := int(self.data.num_samples(split)[client])):
            called = {"train": "training", "val": "validation"}.get(split, split.replace("_", " "))
            raise ValueError(
                f"it has {len(samples[0])} {called} samples, but num_samples() says {count}"
            )
        return [leaf.to(self.device) for leaf in samples]

    def batch(self, leaves: list[Tensor]) -> Any:
        """Return a batch made of tensors, in the order of the samples' form."""
        assert self.form is not None
        return self.form.batch(leaves)

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

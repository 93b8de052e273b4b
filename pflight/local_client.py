"""The client as its method sees it: one client in training, and what clients do by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from lightning import LightningModule
from tensordict import TensorDict
from torch import Tensor

from .data.loaders import Split
from .states.head import Head, Outputs
from .states.state import StateLayout
from .states.updates import ClientUpdates, Kept

_TERM = "pflight_term."


class Named(Protocol):
    """A term that a modifier adds to the loss; see :class:`pflight.modifiers.Term`."""

    @property
    def name(self) -> str:
        """Its name."""


class LocalClient(Protocol):
    """One client in local training, as a client method sees it.

    Tensors are those of one client, also where an engine trains many at once.
    """

    @property
    def module(self) -> LightningModule:
        """A copy of the client module, in which this client trains."""

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """Its trainable parameters, by their names in ``module.state_dict()``."""

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """Its buffers that travel, likewise."""

    @property
    def own(self) -> Mapping[str, Tensor]:
        """The entries of :meth:`~pflight.method.ClientMethod.state`; change them in place."""

    @property
    def anchor(self) -> Mapping[str, Tensor] | None:
        """The trainable parameters as the server sent them; ``None`` in fine-tuning.

        Those that stay with the client are not among them, so that distances and corrections are
        sums over these names.
        """

    @property
    def received(self) -> Mapping[str, Tensor] | None:
        """The whole model as the server sent it, with buffers; ``None`` in fine-tuning."""

    @property
    def extra(self) -> Mapping[str, Tensor]:
        """The tensors of the module of :meth:`~pflight.method.ClientMethod.extra`, by name."""

    @property
    def memory(self) -> Mapping[str, Tensor] | None:
        """What the client method remembered of this client, or ``None``.

        Where many clients train at once, one without memory gets its start state here; see
        :attr:`seen`.
        """

    def memory_of(self, term: Named) -> Mapping[str, Tensor] | None:
        """The model that a modifier's term remembers of this client, likewise."""

    @property
    def seen(self) -> Tensor:
        """1 where there is something remembered, or else 0."""

    @property
    def num_samples(self) -> Tensor:
        """Number of this client's training samples."""

    @property
    def mean_samples(self) -> Tensor:
        """Mean number of training samples over all clients that may train."""

    @property
    def class_counts(self) -> Tensor:
        """This client's samples by class ``[K]``, if the client method ``needs_classes``."""

    @property
    def num_steps(self) -> Tensor:
        """Steps of this participation, once its training is over."""

    @property
    def shared(self) -> LocalClient | None:
        """For a personal copy, the client whose model it stands beside."""

    def note(self, name: str, value: Tensor, counts: Tensor) -> None:
        """Note a scalar of this step. The round logs the mean over all steps of its clients.

        Args:
            name: The tag, one of the ``notes`` of the client method or term.
            value: The scalar; its gradient is not used.
            counts: 1, or 0 if this step does not count, such as :attr:`seen`.
        """

    def task_loss(self, batch: Any) -> Tensor:
        """Return the scalar loss of the client's own module on a batch."""

    def task_loss_at(
        self,
        weights: Mapping[str, Tensor],
        batch: Any,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return the module's loss at other weights, without a word in logs and metrics.

        Args:
            weights: Trainable parameters, by name.
            batch: What the module's step takes.
            buffers: Buffers, which the pass updates in place; by default :attr:`buffers`. Under
                ``torch.func.grad`` they have to be given.
        """

    def task_loss_and_logits(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the module's loss on a batch, and what its ``forward`` gave on the way."""

    def logits_with(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return what ``forward`` gives for the same inputs with other tensors.

        Without gradients and in evaluation mode, for the inputs of the last
        :meth:`task_loss_and_logits`.
        """

    def task_loss_and_features(
        self, batch: Any, outputs: Outputs | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the module's loss on a batch, its features, and what its head gives for them.

        Args:
            batch: What the module's step takes.
            outputs: What takes the place of the head's outputs, and of what an extra module makes
                of them, in this loss.

        Returns:
            The loss, the features ``[n, d]``, and the head's own outputs ``[n, K]``.
        """

    def features_with(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return features ``[n, d]`` and the head's outputs with other tensors, such as a memory.

        Without gradients and in evaluation mode, for the batch of the last
        :meth:`task_loss_and_features`.
        """

    def predict(
        self, features: Tensor, classify: Callable[[Tensor], Tensor], **options: Any
    ) -> Tensor:
        """Return the predictions of the extra module for features ``[n, d]``.

        It is the module that :meth:`~pflight.method.ClientMethod.extra` adds.

        Args:
            features: The features.
            classify: What stands for the head, a function of features.
            **options: What else the module takes.
        """

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        """Return the mean loss of other outputs ``[n, K]`` for the samples of a batch.

        It is the task's own loss, or cross-entropy for any other module.
        """

    def labels(self, batch: Any) -> Tensor:
        """Return the classes ``[n]`` of a batch's samples."""

    def classes(self, batch: Any) -> Tensor:
        """Return the classes ``[n, K]`` of a batch's samples as rows of zeros with a one.

        A sample that only fills a batch up has none, so that sums over samples are products of
        matrices with this one.
        """

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over a batch's samples of what there is of each: values ``[n, ...]``.

        Further dimensions of a sample are summed. A loss has to take its means by this, so that an
        engine may leave samples out that only fill a batch up.
        """

    def batch_mean(self, values: Tensor) -> Tensor:
        """Return the mean ``[...]`` over a batch's samples of values ``[n, ...]``."""

    def batch_sum(self, values: Tensor) -> Tensor:
        """Return the sum ``[...]`` over a batch's samples of values ``[n, ...]``."""

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of the client's model that may change, by name."""


class Passed:
    """A :class:`LocalClient` that notes the logits of the pass that its loss makes of a batch.

    Args:
        client: The client.
        notes: Whether it does.
        batch: The batch; ``None`` if the client optimizes by hand.

    Attributes:
        batch: The batch, for :meth:`LocalClient.labels` and the like.
    """

    def __init__(self, client: LocalClient, notes: bool = False, batch: Any = None) -> None:
        self._client = client
        self._notes = notes
        self._from_features = False
        self._logits: Tensor | None = None
        self.batch = batch

    @property
    def logits(self) -> Tensor:
        """The network's logits ``[n, K]`` in this pass, with gradients.

        Raises:
            RuntimeError: If no term says that it needs them.
        """
        if self._logits is None:
            raise RuntimeError("a term that looks at logits has to set needs_logits")
        return self._logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def task_loss(self, batch: Any) -> Tensor:
        """See :class:`LocalClient`."""
        return self.task_loss_and_logits(batch)[0] if self._notes else self._client.task_loss(batch)

    def task_loss_and_logits(self, batch: Any) -> tuple[Tensor, Tensor]:
        """See :class:`LocalClient`."""
        loss, logits = self._client.task_loss_and_logits(batch)
        self._from_features, self._logits = False, logits
        return loss, logits

    def task_loss_and_features(
        self, batch: Any, outputs: Outputs | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`LocalClient`."""
        loss, features, logits = self._client.task_loss_and_features(batch, outputs)
        self._from_features, self._logits = True, logits
        return loss, features, logits

    def logits_with(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the logits ``[n, K]`` of the same batch with other tensors, such as a memory."""
        if self._from_features:
            return self._client.features_with(tensors)[1]
        return self._client.logits_with(tensors)


class Part(Mapping[str, Tensor]):
    """A view of a client's tensors with a common prefix, by names without this prefix."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str, names: Any) -> None:
        self._tensors = tensors
        self._prefix = prefix
        self._names = names

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[f"{self._prefix}{name}"]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def term_prefix(term: Named) -> str:
    """Return what the names begin with of all that a client remembers for a term."""
    return f"{_TERM}{term.name}."


def memory_for(
    term: Named | None, remembered: Mapping[str, Tensor] | None
) -> Mapping[str, Tensor] | None:
    """Return the part of a client's memory that is for a term, or for its method alone."""
    if remembered is None:
        return None
    if term is not None:
        begin = term_prefix(term)
        names = [name.removeprefix(begin) for name in remembered if name.startswith(begin)]
        return Part(remembered, begin, names)
    own = [name for name in remembered if not name.startswith(_TERM)]
    return remembered if len(own) == len(remembered) else Part(remembered, "", own)


Measure = Callable[[LocalClient, Any], Mapping[str, Tensor]]
"""Returns what the samples of a batch give, by name."""


class Batches:
    """The batches of one client in a :class:`Pass`, which can be gone through once.

    Args:
        sizes: How many samples each batch has.
        batches: The batches, in their order.
    """

    def __init__(self, sizes: Sequence[int], batches: Iterable[Any]) -> None:
        self.sizes = sizes
        self._batches = batches
        self._begun = False

    def __iter__(self) -> Iterator[Any]:
        if self._begun:
            raise RuntimeError(
                "the batches of a pass can be gone through once: keep them in a list"
            )
        self._begun = True
        return iter(self._batches)


class Pass:
    """A look through one client's samples, which changes nothing; see :meth:`LocalWork.run`.

    The network is in evaluation mode, without gradients. Samples come in the order of the data, and
    random numbers are seeded by round and client.

    Attributes:
        split: Which of the client's samples.
        batch_size: Samples in a batch, at most; by default as in an evaluation.
        stacks: Whether an engine may look at many clients in one call under ``torch.func.vmap``.
            Their results then differ by rounding from those of one client alone. Set it to
            ``False`` where bits matter, such as for a choice between nearly equal numbers.
    """

    split: Split = "train"
    batch_size: int | None = None
    stacks: bool = True

    def __call__(self, c: LocalClient, batches: Batches) -> Mapping[str, Tensor]:
        """Return what is found, as tensors by name: a function of the client and its batches.

        Args:
            c: The client, with the model that it has in this pass.
            batches: At least one batch.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define __call__()")

    def check(self, found: Mapping[str, Tensor]) -> None:
        """Raise if what one client has found can't be used; the client has then failed."""


class LocalWork(Protocol):
    """What clients can do by themselves, with their own samples and memory; nothing of it travels.

    All is for a stack of clients ``[C]``; on a machine that holds a single client, C is 1.
    """

    @property
    def layout(self) -> StateLayout:
        """The layout of the clients' states, with all that the client method adds."""

    @property
    def head(self) -> Head:
        """The head of the clients' module."""

    def start_states(self, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Return full states ``[C]``: what was kept, over what is sent, over the initial model."""

    def remembered(self, clients: Tensor, states: TensorDict) -> Kept:
        """Return what the clients' method remembers, by default entries of ``states`` ``[C]``."""

    def read(self, slot: str, clients: Tensor, default: TensorDict) -> TensorDict:
        """Return what was written into a slot of the clients' memory, by default ``default``."""

    def write(self, slot: str, clients: Tensor, states: TensorDict) -> None:
        """Write ``states`` ``[C]`` into a slot of the clients' memory."""

    def own_gradients(self, clients: Tensor, states: TensorDict) -> TensorDict:
        """Return each client's gradient over all its samples, at its state, by parameter ``[C]``.

        It is that of the client method's loss, with its penalty and the terms of modifiers. No
        buffer changes. A client whose pass fails is left out and gets NaN, with which its
        training fails as well.
        """

    def finetune(
        self,
        clients: Tensor,
        states: TensorDict,
        *,
        epochs: int = 1,
        steps: int | None = None,
        doing: str = "to be fine-tuned",
        or_nan: bool = False,
    ) -> TensorDict:
        """Return copies of the states ``[C]`` trained on the task's loss alone.

        Args:
            clients: Ids ``[C]``.
            states: Where they start; a client whose training fails keeps its own.
            epochs: Local epochs.
            steps: Batches in place of epochs.
            doing: What they do, for messages.
            or_nan: Whether a client whose training fails gets NaN instead, with which its training
                in the round fails as well.
        """

    def train_aside(self, clients: Tensor, sent: TensorDict) -> ClientUpdates:
        """Train as in a round, from what is sent ``[C]``; nothing is kept."""

    def random(self, client: int) -> torch.Generator:
        """Return what draws random numbers for a client, by seed and round."""

    @property
    def has_samples(self) -> bool:
        """Whether there are samples: not where a federation is loaded without its data."""

    @property
    def batch_size(self) -> int:
        """Samples in a batch of local training, at most."""

    @property
    def mean_samples(self) -> float:
        """Mean number of training samples of the clients that may train."""

    def num_samples_of(self, clients: Tensor) -> Tensor:
        """Return the clients' numbers of training samples ``[C]``."""

    def class_counts_of(self, clients: Tensor) -> Tensor:
        """Return the clients' training samples by class ``[C, K]``."""

    def run(
        self, look: Pass, clients: Tensor, states: TensorDict
    ) -> list[dict[str, Tensor] | None]:
        """Return what a pass finds out of each client's own samples, by client.

        ``None`` for a client whose pass fails, and an empty dictionary for one without samples.

        Args:
            look: The pass.
            clients: Ids ``[C]``.
            states: Their models ``[C]``.
        """

    def sums(
        self,
        clients: Tensor,
        states: TensorDict,
        measure: Measure,
        like: Mapping[str, Tensor],
        batch_size: int | None = None,
    ) -> TensorDict:
        """Return sums over each client's training samples ``[C]``, in evaluation mode.

        A client whose pass fails is left out and gets NaN, and one without samples zeros.

        Args:
            clients: Ids ``[C]``.
            states: Their models ``[C]``.
            measure: Gets a client and a batch; returns the sums over the samples of the batch.
            like: Zeros of the sums' shapes and types, by their names.
            batch_size: Of the batches, where it matters.
        """

    def rows(
        self, clients: Tensor, states: TensorDict, measure: Measure, split: Split = "train"
    ) -> list[dict[str, Tensor] | None]:
        """Return what each of a client's samples of a split gives, in evaluation mode, by client.

        ``None`` for a client whose pass fails, and an empty dictionary without samples.

        Args:
            clients: Ids ``[C]``.
            states: Their models ``[C]``.
            measure: Gets a client and a batch; returns tensors ``[n, ...]`` of the batch's samples.
            split: Of their samples.
        """

    def num_batches(self, clients: Tensor) -> Tensor:
        """Return how many batches there are in a local epoch of the clients ``[C]``.

        It is 0 for a client that can't train, for want of samples.
        """

    def learn(
        self,
        build: Callable[[LightningModule], LightningModule],
        clients: Tensor,
        starts: TensorDict,
        *,
        doing: str,
        epochs: int = 1,
        steps: int | None = None,
    ) -> TensorDict:
        """Return ``starts`` ``[C]`` as another module than the clients' own trains them.

        It sees the first batches of the round, in their order. A client whose training fails is
        left out and gets NaN, with which its own training fails as well.

        Args:
            build: Makes that module of the client module, always the same one.
            clients: Ids ``[C]``.
            starts: Its states.
            doing: What they do, for messages.
            epochs: Local epochs.
            steps: Batches in place of epochs.
        """

"""The client side of a method: what it adds to the training of a client's own module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self, TypeVar

import torch
from lightning import LightningModule
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim import Optimizer

from .errors import ConfigurationError
from .local_client import LocalClient, LocalWork, Passed, term_prefix
from .modifiers import Term
from .randomness import Purpose, derive_seed, isolated, seed_everything
from .states.head import EXTRA, Head, add_extra, head_of, mark
from .states.state import StateLayout
from .states.updates import Kept

OWN = "pflight_own."
"""What the names of a client method's own entries in a client's state begin with."""
PERSONAL = "pflight_personal."
"""What the names of a client's personal copy of its module begin with."""
Model = Callable[[LocalWork, Tensor, TensorDict, TensorDict], TensorDict]
"""Makes a model of clients; see :meth:`ClientMethod.models`."""


class Phase(NamedTuple):
    """Successive local epochs in which a client trains the same parameters."""

    first: int
    """The epoch with which it begins."""
    epochs: int
    names: Collection[str]
    """Of the parameters that train; layers that have none of them are in evaluation mode.

    Without any, nothing happens in these epochs.
    """
    lr: float | None = None
    """Learning rate in place of the optimizer's own."""
    turn: tuple[int, int] | None = None
    """The rounds that have this phase: with ``(1, 2)`` every second one, from round 1. By default
    all rounds have it."""

    def in_round(self, index: int) -> bool:
        """Return whether a round has this phase."""
        return self.turn is None or index % self.turn[1] == self.turn[0]


_NOW_MODELS = {"judged", "as_sent", "after_finetuning", "further", "further_models"}


class ClientMethod:
    """What a method does at its clients, beside their own module; this one does nothing.

    A client method holds options alone, so that it can be pickled, written in YAML and shared by
    all clients. Nothing of it is mixed into the user's module: the engine calls it from outside. A
    subclass overrides what differs from plain training, most often :meth:`penalty`. What it
    computes are functions of tensors, so that an engine can run them for many clients at once.

    What clients do around their training is for a stack of them ``[C]``, by what :class:`LocalWork`
    they have: :meth:`before_training`, :meth:`finish`, :meth:`keep`, and the :meth:`models` by
    which they are judged. In a deployment C is 1.

    Attributes:
        keeps_memory: Whether clients remember something from one participation to the next.
        judged_by_memory: Whether a client is judged by the model that it remembers. This takes no
            rule in :meth:`models`. Fine-tuning does not change this model.
        averages_samples: Whether what it adds to the loss is a mean over samples, or does not
            depend on them. Only then may batches be padded.
        personal: The client method by which each client trains a second, personal copy of its
            module on the same batches, which never travels; ``None`` for no copy.
            :class:`~pflight.models.client_methods.Personal` also judges clients by it.
        needs_head: Whether it looks at features, the input of the module's head.
        needs_classes: Whether it needs a module with ``num_classes``, and samples with classes.
        extra_options: Options of the optimizer for the parameters of :meth:`extra`, such as their
            ``lr``; by default as for the module's own.
        temporary: What the names of own entries, and of the extra module's, begin with that are
            made anew in each participation, and so are neither sent back nor kept.
        needs_constant_lr: Whether it needs a step size that is the same in all rounds.
        needs_mean_samples: Whether it looks at :attr:`LocalClient.mean_samples`. Clients on other
            machines are told this number only then, and NaN otherwise.
        own_of: Which weights :meth:`state` gets: of the parameters that are ``"shared"`` with the
            server, or ``"all"``.
        terms: What modifiers add to the loss; see :meth:`with_terms`.
        notes: Tags of the scalars that it notes in a step, with :meth:`LocalClient.note`.
        one_pass: Whether :meth:`loss` makes one pass of a batch through the module, whose logits a
            term may look at.
        per_sample: Names of own and extra entries that grow with a client's number of samples.
            Before a server compares clients by them, it divides by it.
    """

    keeps_memory: bool = False
    judged_by_memory: bool = False
    averages_samples: bool = True
    needs_head: bool = False
    needs_classes: bool = False
    extra_options: Mapping[str, Any] = {}
    temporary: tuple[str, ...] = ()
    per_sample: tuple[str, ...] = ()
    needs_mean_samples: bool = False
    needs_constant_lr: bool = False
    own_of: Literal["shared", "all"] = "shared"
    personal: ClientMethod | None = None
    fedavg_name: str | None = None
    terms: tuple[Term, ...] = ()
    one_pass: bool = True
    notes: tuple[str, ...] = ()

    def __init_subclass__(cls) -> None:
        """Raise if a subclass defines a method of an earlier version, which nothing would call."""
        super().__init_subclass__()
        own = {name for kind in cls.__mro__ if kind is not ClientMethod for name in vars(kind)}
        if earlier := sorted(own & _NOW_MODELS):
            raise TypeError(
                f"{cls.__name__}.{earlier[0]} is of an earlier version: return its rule by its tag "
                "from models()"
            )

    def check(self, module: LightningModule) -> None:
        """Raise if a module lacks what this client method needs.

        Raises:
            ConfigurationError: In one line, before the start.
        """

    def extra(self, module: LightningModule, head: Head) -> nn.Module | None:
        """Return a module that predicts from features in place of the head alone, or ``None``.

        It is called with features ``[n, d]`` and the head, a function of features, and returns
        outputs, in training as in evaluation. Its parameters train with the client module's own,
        in the same optimizer; they and its buffers are entries of each client's state. For this
        :attr:`needs_head` has to be set.

        Args:
            module: The client module.
            head: Its head, with the number of features.
        """
        return None

    def beside(self, module: LightningModule) -> nn.Module | None:
        """Return a module whose hooks change what layers of a client module give, or ``None``.

        Its parameters and buffers are entries of a client's state, as those of :meth:`extra` are.
        A client method has one of the two.

        Args:
            module: A copy of the client module, for the hooks.
        """
        return None

    def state(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the entries that it adds to each client's state, as they are at first.

        Args:
            weights: The module's trainable parameters by name, but for those that are private;
                all with :attr:`own_of` ``"all"``, or if none is shared.
        """
        return {} if self.personal is None else self.personal.state(weights)

    def check_sent(self, sent: Mapping[str, Tensor], num_samples: int, num_steps: int) -> str:
        """Return what is wrong with what a client sends beside its model; by default nothing.

        A server asks that does not train its clients itself. No client can have sent what is wrong.

        Args:
            sent: The client's entries, by their names in the layout.
            num_samples: Its training samples, as it has declared.
            num_steps: The steps that it takes with these, at most.
        """
        return ""

    def penalty(self, c: LocalClient) -> Tensor | None:
        """Return a scalar that is added to the loss, a function of tensors; ``None`` for none."""
        return None

    def loss(self, c: LocalClient, batch: Any) -> Tensor:
        """Return the scalar that the client minimises on a batch: its own loss plus the penalty."""
        loss, penalty = c.task_loss(batch), self.penalty(c)
        return loss if penalty is None else loss + penalty

    def with_terms(self, terms: Sequence[Term]) -> Self:
        """Return a copy with the terms that modifiers add to the loss."""
        method = copy.copy(self)
        if terms:
            method.terms = tuple(terms)
        return method

    def objective(self, c: LocalClient, batch: Any) -> Tensor:
        """Return what engines minimise: :meth:`loss` and the terms of modifiers.

        Where the module steps its own optimizers, they take :meth:`added` instead.
        """
        if not self.terms:
            return self.loss(c, batch)
        passed: Any = Passed(c, any(term.needs_logits for term in self.terms), batch)
        loss = self.loss(passed, batch)
        for value in self._values(passed):
            loss = loss + value
        return loss

    def added(self, c: LocalClient) -> Tensor | None:
        """Return what :meth:`objective` adds to the task's loss, for methods that only add."""
        penalty = self.penalty(c)
        parts = [*([] if penalty is None else [penalty]), *self._values(Passed(c))]
        return sum(parts[1:], parts[0]) if parts else None

    def _values(self, c: Passed) -> list[Tensor]:
        values = []
        for term in self.terms:
            value = term.value(c)
            if value is None:
                continue
            if not isinstance(value, Tensor) or value.dim():
                found = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"{value!r}"
                raise TypeError(
                    f"{type(term).__name__}.value must return a scalar tensor, got {found}"
                )
            values.append(value)
        return values

    def optimizer(self, parameters: Sequence[nn.Parameter], anchored: bool) -> Optimizer | None:
        """Return an optimizer in place of the module's own; ``None`` leaves it to the module.

        Args:
            parameters: The module's trainable parameters.
            anchored: Whether this is a participation in a round, and not fine-tuning.
        """
        return None

    def phases(self, module: LightningModule, epochs: int, anchored: bool) -> list[Phase] | None:
        """Return the phases of local training; ``None`` if all parameters train in all epochs.

        Args:
            module: The client module.
            epochs: How many local epochs there are; the last phase goes on if it takes more.
            anchored: Whether this is a participation in a round, and not fine-tuning.
        """
        return None

    def after_training(self, c: LocalClient) -> None:
        """Change own entries in place after a participation, without gradients."""
        if self.personal is not None:
            self.personal.after_training(c)

    def remembered(self, layout: StateLayout) -> tuple[str, ...]:
        """Return the names of what a client keeps, by default of its whole model."""
        stay = {*layout.own, *layout.frozen}
        return tuple(name for name in layout.names if name not in stay)

    def remember(self, c: LocalClient) -> Mapping[str, Tensor]:
        """Return what a client keeps after its training, under :meth:`remembered` names."""
        return c.state()

    def all_remembered(self, layout: StateLayout) -> dict[str, str]:
        """Return the names of all that a client keeps, also for terms of modifiers.

        Each name maps to the entry of a state that is used if nothing was kept.
        """
        own = self.remembered(layout) if self.keeps_memory else ()
        model = ClientMethod.remembered(self, layout)
        return {name: name for name in own} | {
            f"{term_prefix(term)}{name}": name
            for term in self.terms
            if term.remembers
            for name in model
        }

    def remember_all(self, c: LocalClient) -> Mapping[str, Tensor]:
        """Return all that a client keeps after its training, by :meth:`all_remembered` names."""
        kept = dict(self.remember(c)) if self.keeps_memory else {}
        for term in self.terms:
            if term.remembers:
                kept |= {f"{term_prefix(term)}{name}": value for name, value in c.state().items()}
        return kept

    @property
    def all_notes(self) -> tuple[str, ...]:
        """The :attr:`notes` of this method, of its personal copy, and of the terms of modifiers."""
        personal = () if self.personal is None else self.personal.all_notes
        return (*self.notes, *personal, *(name for term in self.terms for name in term.notes))

    @property
    def remembers(self) -> bool:
        """Whether a client keeps anything for its method, or for the terms of modifiers."""
        return self.keeps_memory or any(term.remembers for term in self.terms)

    @property
    def remembers_its_state(self) -> bool:
        """Whether what a client keeps is its whole model, as it is."""
        plain = type(self).remember is ClientMethod.remember
        return plain and not any(term.remembers for term in self.terms)

    @property
    def judging_memory(self) -> str | None:
        """The prefix, in the memory, of the entries of the model by which a client is judged.

        ``None`` if it is judged by another model.
        """
        if self.judged_by_memory:
            return ""
        return next((term_prefix(term) for term in self.terms if term.judges), None)

    def personal_value(self, states: TensorDict, shared: str, personal: str) -> Tensor:
        """Return an entry ``[C, ...]`` of the models by which clients are judged.

        The client method of a personal copy says so, by default that it is the copy's.

        Args:
            states: The clients' states ``[C]``.
            shared: The entry's name in the shared model.
            personal: Its name in the personal one.
        """
        return states[personal]

    def start_states(self, work: LocalWork, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Return the full states ``[C]`` with which clients begin to train, or to be judged.

        Args:
            work: What the clients can do.
            clients: Ids ``[C]``.
            sent: What the server sends them ``[C]``; what they kept is laid over it.
        """
        return work.start_states(clients, sent)

    def before_training(self, work: LocalWork, clients: Tensor, sent: TensorDict) -> TensorDict:
        """Return the full states ``[C]`` from which clients train, which are also their anchors.

        By default they are those of :meth:`start_states`, with the same arguments.
        """
        return self.start_states(work, clients, sent)

    def recall(self, work: LocalWork, clients: Tensor, starts: TensorDict, kept: Kept) -> Kept:
        """Return the memory with which clients train ``[C]``, by default all that they kept.

        A client that ``seen`` leaves out trains as in its first participation.

        Args:
            work: What the clients can do.
            clients: Ids ``[C]``.
            starts: What :meth:`before_training` gave ``[C]``.
            kept: What they kept ``[C]``.
        """
        return kept

    def finish(
        self, work: LocalWork, clients: Tensor, starts: TensorDict, trained: TensorDict
    ) -> TensorDict:
        """Return the states ``[C]`` that clients send and keep, by default as they were trained.

        Args:
            work: What the clients can do.
            clients: Ids ``[C]`` of those that have trained.
            starts: What :meth:`before_training` gave ``[C]``.
            trained: Their states after training ``[C]``. A client that gets a NaN here has failed.
        """
        return trained

    def mirror(
        self,
        work: LocalWork,
        clients: Tensor,
        trained: TensorDict,
        starts: TensorDict,
        sent: TensorDict,
    ) -> TensorDict:
        """Return what clients keep ``[C]`` whose update was transformed, by default ``trained``.

        Override it if an entry follows what the server knows of this client, as FedDyn's gradient
        does: this must follow the transformed update.

        Args:
            work: What the clients can do.
            clients: Ids ``[C]``.
            trained: What :meth:`finish` gave ``[C]``.
            starts: What :meth:`before_training` gave ``[C]``.
            sent: What the clients send ``[C]``: ``trained`` with transformed parameters.
        """
        return trained

    def keep(
        self, work: LocalWork, clients: Tensor, starts: TensorDict, trained: TensorDict
    ) -> None:
        """Write what else clients keep that have trained; by default nothing.

        Args:
            work: What the clients can do.
            clients: Ids ``[C]``.
            starts: What :meth:`before_training` gave ``[C]``.
            trained: What :meth:`finish` gave ``[C]``.
        """

    def models(self) -> dict[str, Model]:
        """Return the rules by which clients' models are made, by the prefix of their tags.

        A rule is a function of the clients' ``work``, their ids ``[C]``, what the server sends them
        now ``[C]``, and full states ``[C]`` to begin with. It returns full states ``[C]``. It may
        replace entries of the states, but not change tensors in place. Without a rule, the states
        are the model:

        - ``""``, the clients' own models, begins with :meth:`start_states`, or with what clients
          remember if they are judged by their memory;
        - ``"server/"`` begins with what is sent, over the initial model;
        - ``"finetuned/"`` begins with the fine-tuned own models, and makes the new own models;
        - any other, such as ``"local/"``, is a further model, which only a rule makes. It begins
          with the own models, after fine-tuning if there is any.
        """
        return {}

    @property
    def further_models(self) -> tuple[str, ...]:
        """The tags of the further models of :meth:`models`.

        Raises:
            ConfigurationError: If a tag does not end with a slash, or is that of newcomers.
        """
        usual = ("", "server/", "finetuned/")
        further = tuple(tag for tag in self.models() if tag not in usual)
        for tag in further:
            if not tag.endswith("/") or tag == "new/":
                raise ConfigurationError(
                    f"{type(self).__name__}.models(): a further model needs a tag such as "
                    f"'local/', got {tag!r}"
                )
        return further

    def __eq__(self, other: object) -> bool:
        """Return whether two client methods are of one kind and have the same options."""
        return type(self) is type(other) and vars(self) == vars(other)

    def __repr__(self) -> str:
        """Return the kind with its options, as in Python."""
        options = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({options})"

    def __hash__(self) -> int:
        return hash(type(self))

    @property
    def kinds(self) -> tuple[type[ClientMethod], ...]:
        """The classes of this client method and of that of the personal copy, if there is one."""
        return (type(self), *(() if self.personal is None else self.personal.kinds))

    @property
    def only_adds(self) -> bool:
        """Whether it adds a penalty and nothing else, which manual optimization allows."""
        return type(self).loss is ClientMethod.loss and self.personal is None


ClientMethodT = TypeVar("ClientMethodT", bound=ClientMethod)


def client_method_for(owner: object, kind: type[ClientMethodT], **options: Any) -> ClientMethodT:
    """Return a client method; an option of it that is out of range is named as that of its owner.

    Raises:
        ConfigurationError: If an option is.
    """
    try:
        return kind(**options)
    except ConfigurationError as error:
        reason = str(error).removeprefix(f"{kind.__name__}: ")
        raise ConfigurationError(f"{type(owner).__name__}: {reason}") from error


def client_method_of(module: LightningModule) -> ClientMethod | None:
    """Return the client method that a client module names as its attribute ``client_method``."""
    client_method = getattr(module, "client_method", None)
    return client_method if isinstance(client_method, ClientMethod) else None


def add_what_it_needs(client_method: ClientMethod, module: LightningModule, seed: int) -> None:
    """Add the further module of a client method, if it has one, to a copy of the client module.

    Args:
        client_method: The client method.
        module: That copy.
        seed: Keys what is drawn for the further module.

    Raises:
        ConfigurationError: If the client method needs classes or a head that the module does not
            have, or an output of the head for each class.
    """
    if client_method.needs_classes and not hasattr(module, "num_classes"):
        raise ConfigurationError(
            f"the algorithm needs classes, and {type(module).__name__} has no num_classes to say "
            "how many its head tells apart"
        )
    if client_method.needs_head:
        head = head_of(module)
        if client_method.needs_classes and head.outputs not in (0, module.num_classes):
            raise ConfigurationError(
                f"the algorithm needs an output for each class, but the head of "
                f"{type(module).__name__}, {head.name}, gives {head.outputs}, and num_classes is "
                f"{module.num_classes}"
            )
        mark(module, head)  # as it is before there are further layers
    with isolated(torch.device("cpu")):
        seed_everything(derive_seed(Purpose.SERVER, seed), torch.device("cpu"))
        extra = client_method.extra(module, head_of(module)) if client_method.needs_head else None
        beside = client_method.beside(module)
    if extra is not None:
        add_extra(module, extra)
    elif beside is not None:
        module.add_module(EXTRA, beside)


def layout_with(client_method: ClientMethod, layout: StateLayout) -> StateLayout:
    """Return the layout of a module's state with all that a client method adds to it.

    Args:
        client_method: The client method.
        layout: The layout of the client module alone, which knows its private entries.
    """
    shared = client_method.own_of == "shared" and layout.shared_parameters
    weights = {name: layout.template[name] for name in shared or layout.parameters}
    own: dict[str, Tensor] = {}
    given: Mapping[str, Any] = client_method.state(weights)
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            kind = type(client_method).__name__
            raise ConfigurationError(f"{kind}.state(): {name!r} must be a tensor, got {tensor!r}")
        own[f"{OWN}{name}"] = tensor
    if client_method.personal is not None:
        layout = layout.with_copy(PERSONAL)
    return layout.with_entries(own)

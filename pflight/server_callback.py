"""The base class of server callbacks, the server callback of an algorithm."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal, Self

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .adapters.low_rank import Split
from .adapters.pairs import Pair, plain_pairs
from .adapters.product_mean import PairMean, ProductMean, ResidualMean, StackMean
from .adapters.side_path import SidePath, add_hooks, restarted
from .clients import Clients
from .data.data_module import FederatedDataModule
from .errors import ConfigurationError
from .messages import nothing_sent
from .method import (
    OWN,
    PERSONAL,
    ClientMethod,
    ClientMethodT,
    client_method_for,
    client_method_of,
)
from .modifiers import Frozen, Modifier, OfLayers, Private, Term, by_name, check_owners, private_in
from .optim import is_plain_step
from .options import NonNegativeInt, arguments, checked
from .runs.checks import check_same_options
from .states.declared import DeclaredState
from .states.head import EXTRA
from .states.layers import head_entries
from .states.server_models import ServerModels, unit_vectors
from .states.state import StateLayout, WeightedMean, state_bytes
from .states.updates import ClientUpdates
from .transforms.base import STAGES, Transform
from .transforms.pipeline import Pipeline

Modifiers = dict[str, Modifier] | list[Modifier] | None
"""What the option ``modifiers`` of a server callback takes."""
Aggregate = Literal["factors", "product", "residual", "stack"]
"""What the option ``aggregate`` of a server callback takes."""
_OF_ADAPTERS: dict[str, tuple[Any, Any]] = {
    "aggregate": (Aggregate, "factors"),
    "split": (Split, "balanced"),
    "residual_rank": (NonNegativeInt | None, None),
    "restart": (Literal["draw", "keep"], "draw"),
    "log_product_error": (bool, False),
}
"""The options of callbacks that aggregate adapters: types and defaults."""


@checked
class ServerCallback(L.Callback):
    """The server callback of an algorithm: what clients are sent, and how updates are aggregated.

    A new algorithm is one file with a subclass. Most override :meth:`receive` and
    :meth:`set_pseudo_gradients`. What clients do is for the :class:`~pflight.method.ClientMethod`
    to say:

    - :meth:`setup_server` makes the server's models, once per federation;
    - :meth:`round` is one communication round: :meth:`broadcast`, local training,
      :meth:`receive` for every chunk of updates as it arrives, then :meth:`set_pseudo_gradients`;
    - :meth:`set_pseudo_gradients` turns partial sums into pseudo-gradients, which the server
      optimizer applies;
    - :meth:`personalize` has clients give the models by which they are judged.

    What the server keeps from round to round is declared in :meth:`setup_server`, by
    :meth:`add_state`. The sums of one round are made in :meth:`on_round_start`. With several ranks,
    add sums up over ranks before you use them, as :class:`pflight.states.state.WeightedMean` does.

    Args:
        buffers: How buffers such as BatchNorm's statistics are treated: ``"shared"`` averages them
            like parameters, ``"local"`` keeps them with the client, ``"reset"`` starts every
            participation with the initial ones.
        modifiers: What is added to the method, such as private layers or a further term of the
            loss: a list of :class:`~pflight.modifiers.Modifier`, or a mapping by their names. Every
            server callback has this option, also one whose ``__init__`` does not name it.

    Attributes:
        clients: The clients, set before :meth:`setup_server` is called.
        server: The server's models, likewise.
        modules: Further modules on the server, by name, whose parameters the server optimizer
            steps.
        client_method: The client method of the algorithm: what it adds to the training of a
            client's module.
        outer_method: The client method for what clients do around their training, whatever client
            method trains them;
            ``None`` if the client method decides on that.
        chooses_client_method: Whether this callback decides on the client method; otherwise a
            client method that the client module names takes its place.
        sends_model: Whether clients send models that the server makes models of. If so, a run in
            which all trainable parameters are private is refused.
        sends_gradients: Whether gradients are the updates that transforms change.
        owns_head: Whether it has a rule of its own for the head, which then can't be made private.
        judges_otherwise: Whether :meth:`personalize` has a rule of its own, by default whether a
            subclass overrides it.
        aggregates: Whether its means of models are made by :meth:`new_mean`. It then has the option
            ``aggregate``: ``"factors"`` takes means of all entries; ``"product"`` takes the mean of
            the products of low-rank factors, and splits it again; ``"residual"`` and ``"stack"``
            add what factors can't hold to a side path of the layers.
        has_one_model: Whether it has a single server model, which a side path needs.
        refuses: Kinds of modifiers that it can't be combined with, each with the reason:
            ``"private"``, ``"term"``, ``"transform"``.
    """

    clients: Clients
    server: ServerModels
    client_method: ClientMethod = ClientMethod()
    outer_method: ClientMethod | None = None
    chooses_client_method: bool = True
    sends_model: bool = True
    sends_gradients: bool = False
    owns_head: bool = False
    judges_otherwise: bool = False
    aggregates: bool = False
    has_one_model: bool = True
    refuses: ClassVar[Mapping[str, str]] = {}
    modifiers: dict[str, Modifier]
    aggregation: Aggregate
    pairs: list[Pair]
    """The low-rank pairs whose products are averaged."""
    side_path: SidePath
    split: Split
    residual_rank: int | None
    restart: Literal["draw", "keep"]
    log_product_error: bool
    _given: dict[str, Any]
    _states: dict[str, DeclaredState]

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Record the options, by which two callbacks of a class are compared."""
        callback = super().__new__(cls)
        given = arguments(cls.__init__, callback, *args, **options)
        callback.modifiers = by_name(cls.__name__, given.pop("modifiers", None))
        of_adapters = {name: given.get(name, value) for name, (_, value) in _OF_ADAPTERS.items()}
        callback.aggregation = of_adapters.pop("aggregate")
        vars(callback).update(of_adapters)
        callback._given = given
        if callback.active_modifiers:
            given["modifiers"] = {one.name: one for one in callback.active_modifiers}
        return callback

    def __init_subclass__(cls, **options: Any) -> None:
        """Name an algorithm after its class, unless it says otherwise; add the options of all."""
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            further: dict[str, tuple[Any, Any]] = {"modifiers": (Modifiers, None)}
            further |= _OF_ADAPTERS if cls.aggregates else {}
            cls.__init__ = _with_options(cls.__init__, further)  # type: ignore[method-assign]
        if "algorithm_name" not in vars(cls):
            cls.algorithm_name = ServerCallback.algorithm_name  # type: ignore[method-assign]
        if "personalize" in vars(cls):
            cls.judges_otherwise = True

    def __init__(
        self,
        buffers: Literal["shared", "local", "reset"] = "shared",
        *,
        modifiers: Modifiers = None,
    ) -> None:
        self.buffers = buffers
        self.modules: dict[str, nn.Module] = {}
        self._states = {}

    def use_client_method(self, kind: type[ClientMethodT], **options: Any) -> ClientMethodT:
        """Set the client method, built with those of the options that are not ``None``.

        If all are ``None``, a client method of this class that the client module names is used
        instead.

        Raises:
            ConfigurationError: If an option is out of range; the message names this callback.
        """
        given = {name: value for name, value in options.items() if value is not None}
        self.client_method = client_method = client_method_for(self, kind, **given)
        self.chooses_client_method = bool(given)
        return client_method

    @property
    def algorithm_name(self) -> str:
        """The algorithm's usual name with these options; not inherited by subclasses."""
        return type(self).__name__

    @property
    def name_in_results(self) -> str:
        """The algorithm's name with its modifiers, and "+ fine-tuning" if clients are tuned."""
        tuned = self.clients.training.finetune_epochs > 0 and not self.personalizes
        titles = sorted(one.title for one in self.active_modifiers)
        titles += [f"{self.aggregation} aggregation"] if self.aggregation != "factors" else []
        name = " + ".join([self.algorithm_name, *titles])
        return KNOWN.get(name, name) + " + fine-tuning" * tuned

    @property
    def active_modifiers(self) -> list[Modifier]:
        """The modifiers by name, without those that change nothing."""
        return [one for one in self.modifiers.values() if not one.neutral]

    @property
    def terms(self) -> list[Term]:
        """The terms that modifiers add to the loss."""
        return [one for one in self.active_modifiers if isinstance(one, Term)]

    @property
    def transforms(self) -> list[Transform]:
        """What changes updates before they travel."""
        return [one for one in self.active_modifiers if isinstance(one, Transform)]

    def combined_method(self, module: L.LightningModule) -> ClientMethod:
        """Return the client method for a client module, with the terms of modifiers.

        Raises:
            ConfigurationError: If the method and its modifiers can't be combined.
        """
        if "buffers" not in vars(self):
            raise ConfigurationError(
                f"{type(self).__name__}.__init__ has to call super().__init__() first"
            )
        self.check_modifiers()
        return chosen_client_method(self, module).with_terms(self.terms)

    def check_modifiers(self) -> None:
        """Raise unless the method allows these kinds of modifiers, and they go together.

        Other refusals need the module or the run: :meth:`owned_names` for the method's own entries,
        :func:`~pflight.engines.check.check_client` for logits and manual optimization, and
        :meth:`setup_server` of some methods.

        Raises:
            ConfigurationError: In one line, with the reason.
        """
        name, active = type(self).__name__, self.active_modifiers
        for one in active:
            reason = self.refuses.get(one.kind or "")
            if reason is None and one.kind and not self.sends_model:
                reason = "its server sends no model, so this would change nothing"
            if reason is not None:
                raise ConfigurationError(
                    f"{name} can't be combined with {type(one).__name__}: {reason}"
                )
        if self.sends_gradients and (idle := [one for one in self.terms if one.remembers]):
            raise ConfigurationError(
                f"{name} can't be combined with {type(idle[0]).__name__}: its clients take no step "
                "after which they could remember a model"
            )
        steps = [type(one).__name__ for one in active if one.replaces == "step"]
        if len(steps) > 1:
            raise ConfigurationError(
                f"{name}: {' and '.join(steps)} both replace the training step: take one of them"
            )
        for one in active:
            if not isinstance(one, Term | Transform | OfLayers):
                raise ConfigurationError(
                    f"{name}: {type(one).__name__} would change nothing: derive it from "
                    "pflight.modifiers.Term or pflight.transforms.Transform"
                )
            if isinstance(one, Transform) and getattr(one, "stage", None) not in STAGES:
                raise ConfigurationError(
                    f"{type(one).__name__}: stage must be one of {', '.join(STAGES)}"
                )
        for stage in STAGES:
            both = [type(one).__name__ for one in self.transforms if one.stage == stage]
            if len(both) > 1:
                raise ConfigurationError(
                    f"{name}: {' and '.join(both)} both {stage} updates: take one of them"
                )

    def attach(self, clients: Clients, server: ServerModels, before: ServerCallback | None) -> None:
        """Become the server callback of a federation, in place of an earlier one if there is one.

        Args:
            clients: The clients.
            server: The server's models.
            before: The callback that set the federation up, whose state is taken over.

        Raises:
            ConfigurationError: If ``before`` is of another class or has other options, or another
                federation has been set up by it since.
        """
        if before is None:
            self.clients, self.server, clients.callback = clients, server, self
            self._states, server.on_moved = {}, self.move_state
            self.pairs = self._pairs_to_aggregate()
            if self.has_side_path:
                path = SidePath.of(self.pairs, clients.num_clients)
                self.add_state("side_path", path, kind=SidePath)
            self.setup_server()
            self._check_one_model()
            sent = {*self.sent_names}
            if self.sends_model and not self.shared_parameters:
                raise ConfigurationError(nothing_sent(self))
            if vectors := [name for name in unit_vectors(clients.module) if name in sent]:
                rank_zero_warn(
                    f"spectral norm keeps vectors of length 1 in {', '.join(vectors)}, and their "
                    "mean over clients has another: with buffers='local' clients keep their own"
                )
            return
        attached(before, clients)
        if type(self) is not type(before):
            raise ConfigurationError(
                f"this federation was trained with {type(before).__name__}, but this Trainer has "
                f"{type(self).__name__}: make a new Federation for another algorithm"
            )
        if self is not before:
            check_same_options(type(self).__name__, before._given, self._given)
            vars(self).update(vars(before))
            clients.callback = self
            server.on_moved = self.move_state

    def local_data(self, data: FederatedDataModule) -> FederatedDataModule:
        """Return the data that the clients use, by default unchanged.

        It is called first, each time that a Trainer runs the federation.
        """
        return data

    def on_num_clients(self, num_clients: int) -> None:
        """Learn how many clients there are, before the entries of the client method are made.

        It is called each time that a Trainer runs the federation, or a checkpoint is loaded.
        """

    def setup_server(self) -> None:
        """Make the server's parameters, by default one model; called once per federation.

        What the server keeps from round to round is declared here, by :meth:`add_state`, and not in
        ``__init__``. So a callback that has been used before starts anew. A checkpoint is loaded
        later. Layout, data and number of :attr:`clients` are known by now. Raise
        :class:`~pflight.errors.ConfigurationError` for options that don't fit them.
        """
        self.server.add(1)

    def add_state(
        self, name: str, value: Any, *, kind: type | None = None, on_cpu: bool = False
    ) -> None:
        """Declare a state and set it: ``self.<name>`` is saved, loaded and moved from now on.

        It may be changed in place or replaced. A checkpoint has its value at the end of a round.
        Call this in :meth:`setup_server`.

        Args:
            name: The name of the attribute.
            value: Its first value: a tensor, number, string or ``None``; a dictionary, list or
                tuple of these; or a module, which also becomes one of :attr:`modules`.
            kind: A dataclass or named tuple, if the value is of this class, ``None``, or a list of
                its objects. Its fields are values as above.
            on_cpu: Whether tensors stay on the CPU, such as a table that is indexed by client. All
                others are on the device of the server's models.

        Raises:
            ConfigurationError: If a checkpoint can't hold the value, or it is too early.
        """
        if "clients" not in vars(self):
            raise ConfigurationError(
                f"{type(self).__name__}: declare the state {name!r} in setup_server(), not before"
            )
        setattr(self, name, value)
        if isinstance(value, nn.Module):
            self.modules[name] = value
            return
        self._states[name] = DeclaredState(kind, on_cpu)
        self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return the declared state, as tensors and primitives."""
        saved = {}
        for name, declared in self._states.items():
            try:
                saved[name] = declared.save(getattr(self, name))
            except TypeError as error:
                raise ConfigurationError(
                    f"{type(self).__name__}: the state {name!r} has a {error}, which a checkpoint "
                    "can't hold: declare tensors, numbers, strings, dictionaries or lists of them"
                ) from error
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, then call :meth:`on_state_loaded`."""
        saved, own = state_dict.keys(), self._states.keys()
        sides = {"the checkpoint": saved - own, "this run": own - saved}
        if found := [
            f"only {one} has {', '.join(sorted(sides[one]))}" for one in sides if sides[one]
        ]:
            name = type(self).__name__
            raise ConfigurationError(
                f"the checkpoint does not fit {name}, by its state: {' and '.join(found)}. Resume "
                f"with the options that {name} had"
            )
        for name, declared in self._states.items():
            setattr(self, name, declared.load(state_dict[name]))
        self.move_state()
        self.on_state_loaded()

    def on_state_loaded(self) -> None:
        """Fit the rest to a state that has been loaded, such as the number of server models.

        The server's models are loaded after it. It may be called twice.
        """

    def move_state(self) -> None:
        """Move the declared tensors to the device of the server's models."""
        for name, declared in self._states.items():
            setattr(self, name, declared.move(getattr(self, name), self.clients.device))
        if "side_path" in self._states:
            self.side_path.show(self.clients.module, self.pairs)

    def private_names(self, module: L.LightningModule, layout: StateLayout) -> set[str]:
        """Return the names of the entries that stay with the client and never travel.

        By default they are those of a personal copy of the module, and of buffers that are local.
        It is called before there are entries of the client method, and again with these. Neither
        :attr:`clients` nor :attr:`server` is known by then.

        Args:
            module: The client module.
            layout: The layout of the clients' states.
        """
        copied = {name for name in layout.own if name.startswith(PERSONAL)}
        return copied | ({*layout.module_buffers} if self.buffers == "local" else set())

    def staying_names(self, module: L.LightningModule, layout: StateLayout) -> set[str]:
        """Return the :meth:`private_names`, and those that modifiers make private.

        Raises:
            ConfigurationError: If the method has a rule of its own for one of these.
        """
        own, further = (
            self.private_names(module, layout),
            private_in(self.modifiers.values(), module, layout),
        )
        if further:
            owned = self.owned_names(module, layout)
            if self.modifiers_need_head:
                owned |= own & head_entries(module, layout)
            check_owners(type(self).__name__, "Private can't keep", further, owned, layout)
        return own | further

    def freeze(self, module: L.LightningModule) -> None:
        """Freeze what modifiers name in a copy of the client module.

        Raises:
            ConfigurationError: If the method has a rule of its own for one of these.
        """
        for one in self.active_modifiers:
            if isinstance(one, Frozen):
                layout = StateLayout.of(module)
                owned = self.private_names(module, layout) | self.owned_names(module, layout)
                names = one.names(module, layout)
                check_owners(type(self).__name__, "Frozen can't take", names, owned, layout)
                for name, parameter in module.named_parameters():
                    parameter.requires_grad_(parameter.requires_grad and name not in names)

    def owned_names(self, module: L.LightningModule, layout: StateLayout) -> set[str]:
        """Return the names of entries for which it has a rule of its own, beside private ones.

        They can't be made private. By default they are those of the head with :attr:`owns_head`.
        """
        return head_entries(module, layout) if self.owns_head else set()

    @property
    def private(self) -> tuple[str, ...]:
        """The :meth:`staying_names` in the layout's order, without what is frozen."""
        return self.clients.layout.private

    @property
    def kept_names(self) -> tuple[str, ...]:
        """Names of the entries that clients keep between rounds, by default the private ones."""
        private = [one for one in self.active_modifiers if isinstance(one, Private)]
        anew = private_in(
            (one for one in private if not one.keep), self.clients.module, self.clients.layout
        )
        return tuple(name for name in self.private if name not in anew)

    @property
    def shared_parameters(self) -> tuple[str, ...]:
        """Names of the trainable parameters that travel.

        A method compares and combines clients' models by these alone, since it never sees others.
        """
        sent = {*self.sent_names}
        return tuple(name for name in self.clients.layout.shared_parameters if name in sent)

    @property
    def bytes_kept(self) -> int:
        """Bytes that each client keeps in memory from its first participation on."""
        layout, client_method = self.clients.layout, self.clients.client_method
        kept = client_method.all_remembered(layout).values()
        left_out = Pipeline(self.transforms, layout, self.sent_names).bytes_kept
        return left_out + sum(layout.template[name].nbytes for name in (*kept, *self.kept_names))

    def new_mean(self, groups: int = 1) -> WeightedMean:
        """Return an empty mean of the entries that travel, by the rule of ``aggregate``.

        Args:
            groups: Number of means; the first models of the server are what each of them was sent.
        """
        names = self.sent_names
        if not self.pairs:
            return WeightedMean(self.server.tensors(0, names), groups)
        sent = [self.server.tensors(k, names) for k in range(groups)]
        how = self.pairs, self.log_product_error
        if self.aggregation == "residual":
            return ResidualMean(sent[0], *how, self.residual_rank)
        if self.aggregation == "stack":
            return StackMean(sent[0], *how, self.clients.layout.template)
        if self.aggregation == "product":
            return ProductMean(sent, *how, self.split)
        return PairMean(sent, *how)

    @property
    def has_side_path(self) -> bool:
        """Whether the server adds to the frozen weights of layers with adapters."""
        return self.aggregation in ("residual", "stack")

    def add_side_path(self, module: L.LightningModule) -> None:
        """Add the hooks of a side path to a copy of the client module, if there is one.

        Raises:
            ConfigurationError: If the module has no plain low-rank adapters.
        """
        if self.has_side_path:
            add_hooks(module, plain_pairs(module, self._aggregating))

    @torch.no_grad()
    def after_round(self, cohort: Tensor) -> None:
        """Log the product error of a round, and add its terms to the side path.

        Args:
            cohort: The clients that took part ``[S]``.
        """
        mean = getattr(self, "mean", None)
        if not isinstance(mean, PairMean):
            return
        if mean.error is not None:
            self.clients.log({"adapters/product_error": mean.error})
        if not self.has_side_path:
            return
        self.side_path.note(cohort)
        if not mean.terms or self.server.refused:
            return
        clients, model = self.clients, self.server.tensors(0)
        self.side_path.add(self.pairs, mean.terms, model)
        self.side_path.show(clients.module, self.pairs)
        if self.aggregation == "stack" and self.restart == "draw":
            start, keys = clients.layout.template, (clients.seed, clients.rounds)
            for name, factor in restarted(self.pairs, start, *keys):
                model[name].copy_(factor)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Raise if the server's step does not make its model the mean, which a side path needs.

        Raises:
            ConfigurationError: Naming the option.
        """
        plain = all(map(is_plain_step, trainer.optimizers)) and not trainer.lr_scheduler_configs
        if self.has_side_path and not plain:
            raise ConfigurationError(
                f"{self._aggregating} needs the server's default step, SGD with step size 1: leave "
                "out server_optimizer and server_scheduler"
            )

    @property
    def _aggregating(self) -> str:
        """What needs low-rank pairs, for messages."""
        option = f"aggregate={self.aggregation!r}"
        if self.aggregation == "factors":
            option = "log_product_error=True"
        return f"{type(self).__name__} with {option}"

    def _pairs_to_aggregate(self) -> list[Pair]:
        """Return the low-rank pairs whose products are averaged; none for means of all entries.

        Raises:
            ConfigurationError: If this callback or the module has no mean of products.
        """
        self._check_aggregation()
        if self.aggregation == "factors" and not self.log_product_error:
            return []
        pairs, sent = plain_pairs(self.clients.module, self._aggregating), {*self.sent_names}
        for pair in pairs:
            for one, other in (pair.names, pair.names[::-1]):
                if one in sent and other not in sent:
                    raise ConfigurationError(
                        f"{self._aggregating} needs both factors of an adapter, and {other!r} does "
                        "not travel: take aggregate='factors'"
                    )
        return [pair for pair in pairs if pair.a in sent]

    def _check_aggregation(self) -> None:
        """Raise unless the options of adapters fit each other and the method.

        Raises:
            ConfigurationError: Naming the option.
        """
        owner, method = self._aggregating, self.clients.client_method
        needed = {"split": "product", "residual_rank": "residual", "restart": "stack"}
        for option, aggregate in needed.items():
            _, default = _OF_ADAPTERS[option]
            if getattr(self, option) != default and self.aggregation != aggregate:
                raise ConfigurationError(
                    f"{type(self).__name__}: {option} needs aggregate={aggregate!r}"
                )
        if self.aggregation != "factors" and not self.aggregates:
            raise ConfigurationError(f"{owner}: this method has a rule of its own for its mean")
        keeps = type(self.clients.outer_method).keep is not ClientMethod.keep
        keeps = keeps or method.personal is not None or method.remembers
        if self.aggregation == "stack" and keeps:
            raise ConfigurationError(
                f"{owner}: clients of this method keep adapters from earlier rounds, and 'stack' "
                "starts new ones in each round: take another value"
            )

    def _check_one_model(self) -> None:
        """Raise if there is a side path, and more than one server model.

        Raises:
            ConfigurationError: Naming the option.
        """
        if self.has_side_path and not (self.has_one_model and len(self.server) == 1):
            raise ConfigurationError(
                f"{self._aggregating}: all clients of a process share one side path, and this "
                "method has several server models: take 'factors' or 'product'"
            )

    def configure_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Return the server optimizer, by default SGD with step 1: models become the aggregate."""
        return torch.optim.SGD(parameters, lr=1.0)

    def configure_scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """Return a scheduler of the server optimizer, stepped once a round; by default none."""
        return None

    def on_before_configure_optimizers(self, trainer: L.Trainer) -> None:
        """Prepare for training; models can be added here, before the server optimizer is built.

        It is called at the start of every ``fit``, after a checkpoint has been loaded.
        """

    def round(self, cohort: Tensor) -> None:
        """Run one communication round with the clients of ``cohort`` ``[S]``."""
        self.on_round_start()
        for updates in self.clients.train(cohort, self.broadcast):
            self.receive(updates)
            del updates  # before the next chunk trains
        self.set_pseudo_gradients()

    def on_round_start(self) -> None:
        """Start a round: reset the partial sums."""

    def broadcast(self, clients: Tensor) -> TensorDict:
        """Return what each of the clients ``[C]`` is sent: a stack ``[C]`` without private entries.

        A client starts from it, together with the private entries that it kept. It is counted as
        traffic. By default it is the first server model, as a view.
        """
        return self.server.expand(0, self.sent_names, len(clients))

    def broadcast_groups(self, clients: Tensor) -> Iterator[tuple[Tensor, TensorDict]]:
        """Split the clients ``[C]`` into groups, each with what :meth:`broadcast` sends it.

        An evaluation runs one group at a time, which is fastest if all clients of a group are sent
        the same model, as a view. By default all clients are one group.
        """
        yield clients, self.broadcast(clients)

    def receive(self, updates: ClientUpdates) -> None:
        """Add the updates of a chunk of clients to the partial sums."""
        raise NotImplementedError(f"{type(self).__name__} does not define receive()")

    def set_pseudo_gradients(self) -> None:
        """Turn the partial sums into pseudo-gradients of the server's parameters."""
        raise NotImplementedError(f"{type(self).__name__} does not define set_pseudo_gradients()")

    def personalize(self, clients: Tensor) -> TensorDict:
        """Return the models by which the clients ``[C]`` are judged: a stack of full states.

        By default it is what the clients make of what the server sends them.
        """
        return self.clients.judged(clients, self.broadcast(clients))

    @property
    def personalizes(self) -> bool:
        """Whether a client may be judged by another model than what the server sends."""
        outer = self.clients.outer_method
        by_rule = self.judges_otherwise or "" in outer.models()
        return by_rule or outer.judging_memory is not None or bool(self.kept_names)

    def server_states(self) -> list[dict[str, Tensor]]:
        """Return the server's models as full states, by default those of ``federation.server``."""
        models = self.server
        return [models.tensors(index) for index in range(len(models))]

    def bytes_down(self, clients: Tensor, sent: TensorDict) -> int:
        """Return the number of bytes sent to the clients ``[C]``, by default that of ``sent``."""
        size = len(clients) * state_bytes(sent)
        if not self.has_side_path:
            return size
        if self.aggregation == "stack" and self.restart == "draw" and len(self.side_path.sizes):
            # Clients draw one factor themselves, and the other one is 0.
            known = [name for pair in self.pairs for name in pair.names if name in sent]
            size -= len(clients) * state_bytes(sent.select(*known))
        return size + self.side_path.bytes_for(clients)

    def bytes_up(self, updates: ClientUpdates) -> int:
        """Return the number of bytes that clients sent, by default that of their states."""
        return len(updates.clients) * state_bytes(updates.states)

    @property
    def needs_head(self) -> bool:
        """Whether it, or its client method, has to know the head of the clients' network."""
        return self.client_method.needs_head or self.modifiers_need_head

    @property
    def modifiers_need_head(self) -> bool:
        """Whether a modifier has to know it."""
        return any(one.needs_head for one in self.active_modifiers)

    @property
    def sent_names(self) -> tuple[str, ...]:
        """Names of the entries of a state that travel."""
        layout = self.clients.layout
        reset = layout.module_buffers if self.buffers == "reset" else ()
        temporary = self.clients.client_method.temporary
        begin = tuple(f"{where}{name}" for name in temporary for where in (OWN, f"{EXTRA}."))
        passing = [name for name in (*layout.own, *layout.extra) if name.startswith(begin)]
        stay = {*self.private, *layout.frozen, *reset, *passing}
        return tuple(name for name in layout.names if name not in stay)


KNOWN = {
    "FedAvg + private head": "FedPer",
    "FedAvg + private body": "LG-FedAvg",
    "FedAvg + private norms": "FedBN",
    "FedAvg + proximal": "FedProx",
    "Reptile + elastic": "FedEC",
    "Reptile + elastic l2": "FedEC-l2",
}
"""Combinations that are methods of their own, by their usual names."""


def _with_options(
    init: Callable[..., None], further: Mapping[str, tuple[Any, Any]]
) -> Callable[..., None]:
    """Return a constructor that also takes options which ``__new__`` has read.

    Args:
        init: The constructor.
        further: The type and the default of each option.
    """
    signature = inspect.signature(init)
    further = {name: one for name, one in further.items() if name not in signature.parameters}
    if not further:
        return init

    @functools.wraps(init)
    def with_options(self: ServerCallback, *args: Any, **options: Any) -> None:
        init(self, *args, **{n: value for n, value in options.items() if n not in further})

    parameters = [*signature.parameters.values()]
    last = parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
    parameters[len(parameters) - last : len(parameters) - last] = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in further.items()
    ]
    with_options.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    kinds = {name: kind for name, (kind, _) in further.items()}
    with_options.__annotations__ = {**init.__annotations__, **kinds}
    return with_options


def server_callback_of(trainer: L.Trainer) -> ServerCallback | None:
    """Return the server callback among a Trainer's callbacks, if there is one.

    Raises:
        ConfigurationError: If there are two.
    """
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    given = [callback for callback in callbacks if isinstance(callback, ServerCallback)]
    if len(given) > 1:
        names = " and ".join(type(callback).__name__ for callback in given)
        raise ConfigurationError(f"a federation takes one server callback, got {names}")
    return given[0] if given else None


def attached(callback: ServerCallback | None, clients: Clients) -> ServerCallback:
    """Return the server callback that set a federation up, which has these clients.

    Raises:
        ConfigurationError: If none has, or it has set another federation up since.
    """
    if callback is None:
        raise ConfigurationError(
            "the federation has no server yet: run it with a Trainer, or load a checkpoint"
        )
    if callback.clients is not clients:
        raise ConfigurationError(
            f"this {type(callback).__name__} has been used for another federation since, and knows "
            "that one alone: give each federation that you go on with a callback of its own"
        )
    return callback


def chosen_client_method(callback: ServerCallback, module: L.LightningModule) -> ClientMethod:
    """Return the client method of a server callback, or the one that the client module names.

    Raises:
        ConfigurationError: If both have one with options of its own, and they differ.
    """
    brought, named = callback.client_method, client_method_of(module)
    if named is None or brought == named:
        return brought
    if type(brought) is ClientMethod or (
        brought.kinds == named.kinds and not callback.chooses_client_method
    ):
        return named
    raise ConfigurationError(
        f"{type(callback).__name__} has the client method {brought}, but "
        f"{type(module).__name__} names {named}: give the options to only one of them"
    )

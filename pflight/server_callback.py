"""The server half of an algorithm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, Self

import lightning as L
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .checks import check_same_options
from .clients import Clients
from .data_module import FederatedDataModule
from .engines.updates import ClientUpdates
from .errors import ConfigurationError
from .half import OWN, Half, HalfT, Participation, half_for, half_of
from .options import arguments, checked
from .server import ServerModels
from .state import state_bytes


@checked
class ServerCallback(L.Callback):
    """The server half of an algorithm: what is sent, how updates are aggregated, who gets what.

    A new algorithm is one file with a subclass. Most override :meth:`receive` and :meth:`step`.
    What clients do is their half's, or their participation's, to say:

    - :meth:`setup_server` makes the server's models, once per federation;
    - :meth:`round` is one communication round: :meth:`broadcast`, local training,
      :meth:`receive` for every chunk of updates as it arrives, then :meth:`step`;
    - :meth:`step` turns partial sums into pseudo-gradients, which the server optimizer applies;
    - :meth:`personalize` has clients give the models by which they are judged.

    State that a resumed run needs goes into ``state_dict`` and ``load_state_dict``, which Lightning
    calls. Partial sums are added up over ranks before they are used, as
    :class:`pflight.state.WeightedMean` does it.

    Args:
        buffers: What becomes of buffers such as BatchNorm's statistics: ``"shared"`` averages them
            like parameters, ``"local"`` keeps them with the client, ``"reset"`` starts every
            participation from the initial ones.

    Attributes:
        clients: The clients, set before :meth:`setup_server` is called.
        server: The server's models, likewise.
        modules: What else the server has parameters in, which its optimizer steps, by name.
        half: The client half of the algorithm: what it adds to the training of a client's module.
        participation: What clients do around their training, whatever half trains them; ``None`` if
            that is the half's to say.
        chooses_half: Whether that half is this one's to say, where the client module names another
            with options of its own.
        private: Names of the entries of a state that stay with the client and never travel, in the
            layout's order.
    """

    clients: Clients
    server: ServerModels
    half: Half = Half()
    participation: Participation | None = None
    chooses_half: bool = True
    _given: dict[str, Any]

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Note the options, which tell two servers of a kind apart."""
        callback = super().__new__(cls)
        callback._given = arguments(cls.__init__, callback, *args, **options)
        return callback

    def __init_subclass__(cls, **options: Any) -> None:
        """Call an algorithm as its class, unless the class itself says otherwise."""
        super().__init_subclass__(**options)
        if "algorithm_name" not in vars(cls):
            cls.algorithm_name = ServerCallback.algorithm_name  # type: ignore[method-assign]

    def __init__(self, buffers: Literal["shared", "local", "reset"] = "shared") -> None:
        self.buffers = buffers
        self.private: tuple[str, ...] = ()
        self.modules: dict[str, nn.Module] = {}

    def bring(self, kind: type[HalfT], **options: Any) -> HalfT:
        """Bring a client half along, made with those of the options that are not ``None``.

        If all are ``None``, a half of this kind that the client module names takes its place.

        Raises:
            ConfigurationError: If an option is out of range, as one of this class.
        """
        given = {name: value for name, value in options.items() if value is not None}
        self.half = half = half_for(self, kind, **given)
        self.chooses_half = bool(given)
        return half

    @property
    def algorithm_name(self) -> str:
        """What the field calls the algorithm with these options; not inherited by subclasses."""
        return type(self).__name__

    @property
    def name_in_results(self) -> str:
        """The algorithm's name, and whether its clients are judged after fine-tuning."""
        tuned = self.clients.training.finetune_epochs > 0 and not self.personalizes
        return self.algorithm_name + " + fine-tuning" * tuned

    def join(self, clients: Clients, server: ServerModels, before: ServerCallback | None) -> None:
        """Become the server half of some clients; go on with what another callback has trained.

        Args:
            clients: The clients.
            server: The server's models.
            before: The callback that set them up, if one has.

        Raises:
            ConfigurationError: If that is of another kind, or has other options.
        """
        if before is None:
            self.clients, self.server, clients.server_half = clients, server, self
            self.setup_server()
            return
        if type(self) is not type(before):
            raise ConfigurationError(
                f"this federation was set up by {type(before).__name__}, not by "
                f"{type(self).__name__}: make a new Federation for another algorithm"
            )
        if self is not before:
            check_same_options(type(self).__name__, before._given, self._given)
            vars(self).update(vars(before))
            clients.server_half = self

    def local_data(self, data: FederatedDataModule) -> FederatedDataModule:
        """Return the data as the clients are to use them, by default as they are.

        Called before anything else, each time that a Trainer runs the federation.
        """
        return data

    def setup_server(self) -> None:
        """Make the server's parameters, by default one model; called once per federation.

        :attr:`clients` know their layout, data and number here. Raise
        :class:`~pflight.errors.ConfigurationError` for options that don't fit them.
        """
        self.server.add(1)
        if self.buffers == "local":
            self.private = self.clients.layout.buffers

    @property
    def bytes_kept(self) -> int:
        """Bytes that each client keeps from the first round on in which it takes part."""
        layout, half = self.clients.layout, self.clients.half
        kept = half.remembered(layout) if half.keeps_memory else ()
        return sum(layout.template[name].nbytes for name in (*kept, *self.private))

    def configure_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Return the server optimizer: SGD with step 1, which sets a model to the aggregate."""
        return torch.optim.SGD(parameters, lr=1.0)

    def configure_scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """Return a scheduler of the server optimizer, stepped once a round; by default none."""
        return None

    def on_before_configure_optimizers(self, trainer: L.Trainer) -> None:
        """Get ready to train: the last moment to add models, before the server optimizer is built.

        Called at the start of every ``fit``, after a checkpoint has been loaded.
        """

    def round(self, cohort: Tensor) -> None:
        """Run one communication round with the clients of ``cohort`` ``[S]``."""
        self.on_round_start()
        for updates in self.clients.train(cohort, self.broadcast):
            self.receive(updates)
        self.step()

    def on_round_start(self) -> None:
        """Make empty partial sums for a new round."""

    def broadcast(self, clients: Tensor) -> TensorDict:
        """Return what each of the clients ``[C]`` is sent: a stack ``[C]`` without private entries.

        It is counted as traffic. By default the first server model, as a view.
        """
        return self.server.expand(0, self.sent_names, len(clients))

    def broadcast_groups(self, clients: Tensor) -> Iterator[tuple[Tensor, TensorDict]]:
        """Split the clients ``[C]`` into groups, each with what :meth:`broadcast` sends it.

        Evaluation runs a group at once: clients that are sent one and the same model, as a view,
        are best in a group of their own. By default all are one group.
        """
        yield clients, self.broadcast(clients)

    def receive(self, updates: ClientUpdates) -> None:
        """Fold the updates of a chunk of clients into partial sums."""
        raise NotImplementedError(f"{type(self).__name__} does not define receive()")

    def step(self) -> None:
        """Turn the partial sums into pseudo-gradients of the server's parameters."""
        raise NotImplementedError(f"{type(self).__name__} does not define step()")

    def personalize(self, clients: Tensor) -> TensorDict:
        """Return the model each of the clients ``[C]`` is judged by: a stack of full states.

        It is what clients make of what the server sends, which a subclass may change.
        """
        return self.clients.judged(clients, self.broadcast(clients))

    @property
    def personalizes(self) -> bool:
        """Whether a client may be judged by another model than what the server sends."""
        by_memory = self.clients.participation.judged_by_memory
        return self.judges_otherwise or bool(self.private) or by_memory

    @property
    def judges_otherwise(self) -> bool:
        """Whether it, or what clients do around their training, has a rule of its own for that."""
        participation = type(self.clients.participation)
        return (
            type(self).personalize is not ServerCallback.personalize
            or participation.judged is not Participation.judged
        )

    def server_states(self) -> list[dict[str, Tensor]]:
        """Return the server's models, full states, by default those of ``federation.server``."""
        models = self.server
        return [models.tensors(index) for index in range(len(models))]

    def bytes_down(self, clients: Tensor, sent: TensorDict) -> int:
        """Return the bytes sent to the clients ``[C]`` in all, by default those of ``sent``."""
        return len(clients) * state_bytes(sent)

    @property
    def sent_names(self) -> tuple[str, ...]:
        """Names of the entries of a state that travel."""
        layout = self.clients.layout
        reset = layout.buffers if self.buffers == "reset" else ()
        temporary = tuple(f"{OWN}{name}" for name in self.clients.half.temporary)
        passing = [name for name in layout.own if name.startswith(temporary)]
        stay = {*self.private, *layout.frozen, *reset, *passing}
        return tuple(name for name in layout.names if name not in stay)


def server_callback_of(trainer: L.Trainer) -> ServerCallback | None:
    """Return the server callback among a Trainer's callbacks, if there is one.

    Raises:
        ConfigurationError: If there are two.
    """
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    given = [callback for callback in callbacks if isinstance(callback, ServerCallback)]
    if len(given) > 1:
        names = " and ".join(type(callback).__name__ for callback in given)
        raise ConfigurationError(f"one server callback runs a federation, got {names}")
    return given[0] if given else None


def chosen_half(callback: ServerCallback, module: L.LightningModule) -> Half:
    """Return the half that a server callback brings, or the one that the client module names.

    Raises:
        ConfigurationError: If they are two, and it was not left to one to say.
    """
    brought, named = callback.half, half_of(module)
    if named is None or brought == named:
        return brought
    if type(brought) is Half or (brought.kinds == named.kinds and not callback.chooses_half):
        return named
    raise ConfigurationError(
        f"{type(callback).__name__} brings {brought}, and {type(module).__name__} names {named}: "
        "leave it to one of them to say what clients minimise"
    )

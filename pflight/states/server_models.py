"""The server's models: their optimizer with its schedule, and a watch over averaged buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pflight.errors import ConfigurationError, described
from pflight.options import check_optimizer
from pflight.randomness import Purpose, derive_seed, isolated, seed_everything

from .state import StateLayout, StateModule, expand_state
from .updates import ClientUpdates

Schedule = Callable[[Optimizer], LRScheduler | ReduceLROnPlateau | None]


@contextmanager
def server_work(device: torch.device, seed: int, rounds: int) -> Iterator[None]:
    """Run the server's code seeded, without autocast, inference mode and autograd.

    Args:
        device: The server's device.
        seed: Seed of the random numbers, together with ``rounds``.
        rounds: Number of rounds so far.
    """
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        isolated(device),
    ):
        seed_everything(derive_seed(Purpose.SERVER, seed, rounds), device)
        yield


def check_finite(values: Mapping[str, Any], whose: str, round_index: int) -> None:
    """Raise if one of the server's tensors is not finite.

    Args:
        values: The tensors by name. Only floating-point tensors are checked.
        whose: Name of the tensors' owner, for the message.
        round_index: The round that has ended.

    Raises:
        ConfigurationError: Naming the tensor.
    """
    for name, value in values.items():
        if isinstance(value, Tensor) and value.is_floating_point() and not value.isfinite().all():
            raise ConfigurationError(
                f"after round {round_index}, {whose} is not finite ({name}): lower the server's "
                "step; checkpoints of earlier rounds are as they were"
            )


class ServerModels(nn.ModuleList):
    """The models that the server keeps, each a :class:`~pflight.states.state.StateModule`.

    All models share one copy of the frozen entries.

    Args:
        layout: The layout of the client's state. Every model starts as its template.
        build_optimizer: Builds the server optimizer, if the user has chosen one.
        save_frozen: Whether ``state_dict()`` has the frozen entries, among the first model's.

    Attributes:
        frozen: The frozen entries by name.
        optimizer: The server optimizer, while a Trainer runs the federation.
        refused: Names of entries that were not finite in this round. No model takes them.
        on_moved: Called when the models may have moved to another device.
    """

    def __init__(
        self,
        layout: StateLayout,
        build_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
        save_frozen: bool = False,
    ) -> None:
        super().__init__()
        self.layout = layout
        self.build_optimizer = build_optimizer
        self.save_frozen = save_frozen
        self.frozen = {name: layout.template[name].clone() for name in layout.frozen}
        self.optimizer: Optimizer | None = None
        self.refused: list[str] = []
        self.on_moved: Callable[[], None] | None = None

    def of(self, layout: StateLayout) -> ServerModels:
        """Return models of another layout, with the same options."""
        return ServerModels(layout, self.build_optimizer, self.save_frozen)

    def add(self, count: int) -> None:
        """Add ``count`` models with the client module's initial weights."""
        layout = self.layout
        moving = {name: layout.template[name] for name in layout.moving}
        for _ in range(count):
            self.append(StateModule(moving, parameters=layout.parameters))

    def copy(self, index: int) -> None:
        """Add a copy of a model during a round.

        From now on the optimizer also steps the copy. It copies its state of the original for this.
        """
        assert self.optimizer is not None
        model = copy.deepcopy(self[index])
        originals = list(self[index].parameters())
        self.optimizer.param_groups[0]["params"] += list(model.parameters())
        for original, parameter in zip(originals, model.parameters(), strict=True):
            gathered = self.optimizer.state.get(original, {})
            self.optimizer.state[parameter] = copy.deepcopy(gathered)
        self.append(model)

    @property
    def lr(self) -> float:
        """The step size of the optimizer in this round."""
        assert self.optimizer is not None
        return float(self.optimizer.param_groups[0]["lr"])

    def tensors(self, index: int, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return the live tensors of one model by name."""
        model = self[index]
        assert isinstance(model, StateModule)
        chosen = [*(self.layout.template if names is None else names)]
        moving = model.tensors(name for name in chosen if name not in self.frozen)
        return {n: moving[n] if n in moving else self.frozen[n] for n in chosen}

    def expand(self, index: int, names: Iterable[str], count: int) -> TensorDict:
        """Return entries of one model for ``count`` clients, as a stack ``[count]`` of views."""
        return expand_state(self.tensors(index, names), count)

    @torch.no_grad()
    def set_pseudo_gradient(self, index: int, aggregate: Mapping[str, Tensor]) -> None:
        """Set a model's gradient to model minus aggregate, and its buffers to the aggregate's.

        SGD with step 1 then moves the parameters exactly to the aggregate. A model without a
        pseudo-gradient in a round does not change, with any optimizer.
        """
        self._check(index, aggregate)
        parameters = self.tensors(index, self.layout.parameters)
        distances = {
            name: parameters[name] - value if name in parameters else value
            for name, value in aggregate.items()
        }
        self.set_gradients(index, distances)

    @torch.no_grad()
    def set_gradients(self, index: int, gradients: Mapping[str, Tensor]) -> None:
        """Set the gradients of a model's parameters. Other entries replace the model's buffers.

        If a value is not finite, the model does not change.
        """
        self._check(index, gradients)
        tensors = self.tensors(index)
        if not self._may_take(tensors, gradients):
            return
        for name, value in gradients.items():
            tensor = tensors[name]
            if isinstance(tensor, nn.Parameter):
                tensor.grad = value.to(tensor, copy=True)
            else:
                tensor.copy_(value)

    @torch.no_grad()
    def replace(self, index: int, state: Mapping[str, Tensor]) -> None:
        """Replace a model without the server optimizer, if the new one is finite.

        Raises:
            ConfigurationError: If a shared parameter is missing, or an entry is not the network's.
        """
        tensors = self.tensors(index)
        for name in self.layout.shared_parameters:
            if name not in state:
                raise ConfigurationError(f"a state given for the server's model lacks {name!r}")
        self._check(index, state)
        if self._may_take(tensors, state):
            for name, value in state.items():
                tensors[name].copy_(value)

    def take_step(self, federation: Any, optimizer: Optimizer, round_index: int) -> None:
        """Step the server's models, then the scheduler unless it watches a metric.

        Gradients that are not finite are dropped with a warning.

        Args:
            federation: The federation, with the names of all parameters and the scheduler.
            optimizer: The server optimizer.
            round_index: The round that ends.

        Raises:
            ConfigurationError: If a model is not finite afterwards, or the scheduler can't step.
        """
        names = {p: name for name, p in federation.named_parameters()}
        refused, self.refused = self.refused, []
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None and not parameter.grad.isfinite().all():
                parameter.grad = None
                refused.append(names.get(parameter, "a parameter"))
        if refused:
            more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
            rank_zero_warn(
                f"round {round_index}: {refused[0]}{more} would not be finite: the server keeps "
                "what it had before"
            )
        optimizer.step()
        check_finite(dict(self.named_parameters()), "the server's model", round_index)
        scheduler = federation.lr_schedulers()
        if isinstance(scheduler, LRScheduler) and _monitored(scheduler) is None:
            try:
                scheduler.step()
            except Exception as error:
                raise ConfigurationError(
                    f"server_scheduler: {type(scheduler).__name__} can't step: {described(error)}"
                ) from error

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ServerModels:
        self.frozen = {name: fn(tensor) for name, tensor in self.frozen.items()}
        super()._apply(fn, recurse)
        if self.on_moved is not None:
            self.on_moved()
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.save_frozen:
            destination.update((f"{prefix}0.{name}", t) for name, t in self.frozen.items())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load frozen entries if saved. Earlier versions saved them with every model."""
        for name, tensor in self.frozen.items():
            saved = [state_dict.pop(f"{prefix}{i}.{name}", None) for i in range(len(self))]
            if saved and saved[0] is not None:
                self.frozen[name] = saved[0].to(tensor.device, copy=True)
                self.layout.template[name].copy_(saved[0])
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _check(self, index: int, state: Mapping[str, Tensor]) -> None:
        """Raise if a state has other entries, or other shapes, than a model.

        Raises:
            ConfigurationError: Naming the entry.
        """
        if not isinstance(state, Mapping | TensorDict):
            raise ConfigurationError(
                "a state given for the server's model has to map names to tensors, got "
                f"{type(state).__name__}"
            )
        tensors = self.tensors(index)
        for name, value in state.items():
            if name not in tensors or tensors[name].shape != value.shape:
                raise ConfigurationError(
                    f"a state given for the server's model has {name!r} of shape "
                    f"{tuple(value.shape)}, which the client's network does not have"
                )

    def _may_take(self, tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> bool:
        """Return whether values are finite wherever the model is. Note the names of others."""
        odd = [
            name
            for name, value in values.items()
            if not value.isfinite().all()
            and not (value.isfinite() | ~tensors[name].isfinite()).all()
        ]
        self.refused += odd
        return not odd


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    build: Callable[[Iterable[nn.Parameter]], Optimizer],
    schedule: Schedule,
) -> tuple[Optimizer, LRScheduler | ReduceLROnPlateau | None, str | None]:
    """Build the server optimizer, its scheduler if there is one, and the metric that it watches.

    Raises:
        ConfigurationError: If they can't be built.
    """
    try:
        optimizer = build(list(parameters))
        check_optimizer(optimizer)
        scheduler = schedule(optimizer)
        return optimizer, scheduler, _monitored(scheduler)
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"the server's optimizer can't be built: {reason}") from error


def _monitored(scheduler: object) -> str | None:
    """Return the metric that a scheduler watches, or ``None``."""
    plateau = isinstance(scheduler, ReduceLROnPlateau)
    return getattr(scheduler, "monitor", "val/macro_acc") if plateau else None


class WaitingSchedule(L.Callback):
    """Steps a server's scheduler that watches a metric, when the round has the metric.

    It also checks the server optimizer after a checkpoint was loaded.
    """

    @classmethod
    def once(cls, trainer: Any) -> list[L.Callback]:
        """Return one for a Trainer, unless it has one from an earlier stage."""
        return [] if any(isinstance(one, cls) for one in trainer.callbacks) else [cls()]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Raise if the checkpoint has the state of an optimizer of another class.

        Raises:
            ConfigurationError: Naming the missing options.
        """
        for optimizer in trainer.optimizers:
            # When PyTorch loads a state, it adds "differentiable" to the defaults only.
            expected = optimizer.defaults.keys() - {"differentiable"}
            if missing := sorted(expected - optimizer.param_groups[0].keys()):
                raise ConfigurationError(
                    f"the checkpoint does not fit this federation: its server optimizer is not a "
                    f"{type(optimizer).__name__}, which has {', '.join(missing)}"
                )

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Step the scheduler with the round's metric."""
        scheduler = pl_module.lr_schedulers()
        values = pl_module.history[-1].metrics
        if (monitor := _monitored(scheduler)) in values:
            scheduler.step(values[monitor])

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Warn if no round had the metric."""
        monitor, history = _monitored(pl_module.lr_schedulers()), pl_module.history
        if monitor and history and not any(monitor in entry.metrics for entry in history):
            rank_zero_warn(
                f"no round had {monitor!r}, which the server's ReduceLROnPlateau watches: the step "
                "size was never reduced"
            )


def unit_vectors(module: nn.Module) -> list[str]:
    """Return the names of the buffers with spectral norm's vectors of length 1.

    Example:
        >>> unit_vectors(nn.utils.parametrizations.spectral_norm(nn.Linear(2, 3)))
        ['parametrizations.weight.0._u', 'parametrizations.weight.0._v']
    """
    found = [
        f"{name}.{own}"
        for name, part in module.named_modules()
        for own in (
            *(("_u", "_v") if isinstance(part, _SpectralNorm) else ()),
            *(
                f"{hook.name}{end}"
                for hook in part._forward_pre_hooks.values()
                if isinstance(hook, SpectralNorm)
                for end in ("_u", "_v")
            ),
        )
    ]
    buffers = dict(module.named_buffers())
    return [name for name in (one.removeprefix(".") for one in found) if name in buffers]


class BufferWatch:
    """Warns once of buffers that clients change and that are no statistics of a norm.

    Single numbers, such as a counter, are not watched.

    Args:
        module: The client module.
        layout: Its state layout.
    """

    def __init__(self, module: nn.Module, layout: StateLayout) -> None:
        known = {*unit_vectors(module)}
        for name, part in module.named_modules():
            if isinstance(part, _NormBase):
                start = f"{name}." if name else ""
                known |= {f"{start}{own}" for own, _ in part.named_buffers(recurse=False)}
        own = {*layout.own, *layout.extra}
        vectors = {name for name, tensor in layout.template.items() if tensor.numel() > 1}
        self._names = vectors.intersection([*layout.averaged, *layout.counters]) - known - own

    def look(
        self, clients: Tensor, sent: TensorDict, updates: ClientUpdates, round_index: int
    ) -> None:
        """Compare the buffers that the clients ``[C]`` received and returned."""
        states = updates.states
        names = sorted(self._names.intersection(sent.keys(), states.keys()))
        rows = torch.isin(clients, updates.clients)
        changed = [name for name in names if self._differ(sent[name][rows], states[name])]
        if not changed:
            return
        self._names.clear()
        rank_zero_warn(
            f"round {round_index}: clients change the buffer {changed[0]}"
            f"{f' and {len(changed) - 1} more' if len(changed) > 1 else ''}, and the server takes "
            "their mean, or the maximum of whole numbers; if that makes no sense, as for a "
            "codebook or a mask, give the server callback buffers='local'"
        )

    @staticmethod
    def _differ(before: Tensor, after: Tensor) -> bool:
        return not torch.equal(before.nan_to_num(), after.nan_to_num())

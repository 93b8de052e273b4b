"""The server's models, as parameters for the server optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim import Optimizer

from pflight.errors import ConfigurationError
from pflight.randomness import Purpose, derive_seed, isolated, seed_everything

from .state import StateLayout, StateModule, expand_state


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


def take_step(federation: Any, optimizer: Optimizer, round_index: int) -> None:
    """Step the server's models. Drop gradients that are not finite, with a warning.

    Args:
        federation: The module with the server's models.
        optimizer: The server optimizer.
        round_index: The round that ends.

    Raises:
        ConfigurationError: If the step leaves a model that is not finite.
    """
    server, names = federation.server, {p: name for name, p in federation.named_parameters()}
    refused, server.refused = server.refused, []
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            parameter.grad = None
            refused.append(names.get(parameter, "a parameter"))
    if refused:
        more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        rank_zero_warn(
            f"round {round_index}: {refused[0]}{more} would not be finite: the server keeps what "
            "it had before"
        )
    optimizer.step()
    check_finite(dict(server.named_parameters()), "the server's model", round_index)


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
        tensors = self.tensors(index)
        if not self._may_take(tensors, gradients):
            return
        for name, value in gradients.items():
            tensor = tensors[name]
            if isinstance(tensor, nn.Parameter):
                tensor.grad = value.clone()
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
        for name, value in state.items():
            if name not in tensors or tensors[name].shape != value.shape:
                raise ConfigurationError(
                    f"a state given for the server's model has {name!r} of shape "
                    f"{tuple(value.shape)}, which the client's network does not have"
                )
        if self._may_take(tensors, state):
            for name, value in state.items():
                tensors[name].copy_(value)

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

"""The server's models, as parameters that the server optimizer steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim import Optimizer

from .errors import ConfigurationError
from .randomness import Purpose, derive_seed, isolated, seed_everything
from .state import StateLayout, StateModule, expand_state


@contextmanager
def server_work(device: torch.device, seed: int, rounds: int) -> Iterator[None]:
    """Run the server's code without autocast, inference mode and autograd, and seeded.

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


class ServerModels(nn.ModuleList):
    """The models that the server keeps, each a :class:`~pflight.state.StateModule`.

    Args:
        layout: The layout of the client's state; its template is where every model starts.
        build_optimizer: Builds the server optimizer, if the user has chosen one.

    Attributes:
        optimizer: The server optimizer, while a Trainer runs the federation.
    """

    def __init__(
        self,
        layout: StateLayout,
        build_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    ) -> None:
        super().__init__()
        self.layout = layout
        self.build_optimizer = build_optimizer
        self.optimizer: Optimizer | None = None

    def add(self, count: int) -> None:
        """Add ``count`` models that start as the client module's weights."""
        for _ in range(count):
            self.append(StateModule(self.layout.template, parameters=self.layout.parameters))

    def copy(self, index: int) -> None:
        """Add a copy of a model during a round.

        The optimizer steps it too from now on, with a copy of its state for the original.
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
        return model.tensors(names)

    def expand(self, index: int, names: Iterable[str], count: int) -> TensorDict:
        """Return entries of one model for ``count`` clients: a stack ``[count]`` of views."""
        return expand_state(self.tensors(index, names), count)

    @torch.no_grad()
    def set_pseudo_gradient(self, index: int, aggregate: Mapping[str, Tensor]) -> None:
        """Set a model's gradient to its difference to the aggregate, and its buffers to the latter.

        SGD with step 1 then moves the parameters all the way to the aggregate. A model without a
        pseudo-gradient in a round stays where it is, whatever the optimizer.
        """
        parameters = self.tensors(index, self.layout.parameters)
        distances = {
            name: parameters[name] - value if name in parameters else value
            for name, value in aggregate.items()
        }
        self.set_gradients(index, distances)

    @torch.no_grad()
    def set_gradients(self, index: int, gradients: Mapping[str, Tensor]) -> None:
        """Set the gradients of a model's parameters, and its buffers to the other entries."""
        tensors = self.tensors(index)
        for name, value in gradients.items():
            tensor = tensors[name]
            if isinstance(tensor, nn.Parameter):
                tensor.grad = value.clone()
            else:
                tensor.copy_(value)

    @torch.no_grad()
    def replace(self, index: int, state: Mapping[str, Tensor]) -> None:
        """Replace a model, without the server optimizer.

        Raises:
            ConfigurationError: If a parameter is missing, or an entry is not the network's.
        """
        tensors = self.tensors(index)
        for name in self.layout.parameters:
            if name not in state:
                raise ConfigurationError(f"a state given for the server's model lacks {name!r}")
        for name, value in state.items():
            if name not in tensors or tensors[name].shape != value.shape:
                raise ConfigurationError(
                    f"a state given for the server's model has {name!r} of shape "
                    f"{tuple(value.shape)}, which the client's network does not have"
                )
            tensors[name].copy_(value)

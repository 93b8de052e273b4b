"""Find networks that are chains of layers, by tracing.

A *chain* is a network's sequence of convolutions and linear layers in running order, each with the
BatchNorms that follow it. A permutation of a layer's neurons does not change the network's
function. :mod:`pflight.callbacks.methods.matching` uses this.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pflight.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.fx import Node

    from pflight.models.classifier import Classifier

_WEIGHTED = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear
_POOLINGS = {
    f"{kind}{dimensions}d"
    for kind in ("maxpool", "avgpool", "lppool", "adaptivemaxpool", "adaptiveavgpool")
    for dimensions in (1, 2, 3)
}
_ELEMENTWISE = {
    *(
        "identity",
        "contiguous",
        "relu",
        "relu6",
        "leakyrelu",
        "elu",
        "selu",
        "celu",
        "gelu",
        "silu",
    ),
    *("mish", "sigmoid", "logsigmoid", "tanh", "softplus", "softsign", "hardtanh", "hardsigmoid"),
    *("hardswish", "dropout", "dropout1d", "dropout2d", "dropout3d", "alphadropout"),
}


@dataclass(frozen=True)
class Layer:
    """A convolution or a linear layer of a chain, with the BatchNorms that follow it.

    Attributes:
        name: The module.
        weight: Name of its weight ``[width, inputs, ...]`` in a state.
        bias: Name of its bias ``[width]``, if it has one.
        norms: Names of the BatchNorms' vectors, with one entry for each neuron or, after a
            flattening, one block of entries.
        width: Number of neurons: output channels or units.
        convolves: Whether it is a convolution. Then a neuron has an output at each position.
    """

    name: str
    weight: str
    bias: str | None
    norms: tuple[str, ...]
    width: int
    convolves: bool

    def feeds(self, inputs: int, flat: bool) -> bool:
        """Whether ``inputs`` inputs can be its outputs, neuron by neuron, flattened or not.

        A linear layer applied at several positions has its neurons in the last dimension. Then
        flattening mixes them.
        """
        return inputs % self.width == 0 if self.convolves and flat else inputs == self.width

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of weight and bias."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of all tensors with entries for each neuron."""
        return self.weights + self.norms


Chain = tuple[Layer, ...]


def find_chain(module: nn.Module) -> Chain:
    """Find the layers of a network in running order, by tracing.

    Between two layers there may be BatchNorm, pooling, flattening, activations and dropout, as
    modules or as functions. Names are those of ``module.state_dict()``.

    Args:
        module: The network, or a client module with one.

    Raises:
        ConfigurationError: If the network is not a chain; the message names the layer or operation.

    Example:
        >>> network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
        >>> [(layer.weight, layer.width) for layer in find_chain(network)]
        [('0.weight', 4), ('3.weight', 2)]
    """
    unseen = {name for name, _ in module.named_parameters()}
    layers: list[Layer] = []
    spatial, obstacle, previous = 0, "", None  # dimensions of the positions of a neuron's outputs
    for step in _steps(module):
        if layers and step.inputs != [previous]:
            raise _no_chain(f"{step} does not take the output of one layer alone")
        previous = step.node
        if isinstance(step.module, _WEIGHTED | _BatchNorm):
            if not step.parameters <= unseen:
                raise _no_chain(f"{step} is used twice or shares its weights")
            unseen -= step.parameters
        if isinstance(step.module, _WEIGHTED):
            if obstacle:
                raise _no_chain(f"{obstacle} stands before {step}")
            layers.append(_layer(step, layers[-1:], spatial))
            spatial = step.module.weight.ndim - 2
        elif isinstance(step.module, _BatchNorm):
            if layers:
                if not layers[-1].feeds(step.module.num_features, flat=not spatial):
                    raise _no_chain(f"{step} does not take each output of {layers[-1].name!r}")
                layers[-1] = replace(layers[-1], norms=(*layers[-1].norms, *step.vectors))
        elif step.flattens:
            spatial = 0
        elif layers and not (step.is_elementwise or (spatial and step.pools(spatial))):
            obstacle = obstacle or str(step)
    if unseen:
        raise _no_chain(f"the parameter {min(unseen)!r} belongs to no such layer")
    return tuple(layers)


def matched_chain(client: Classifier, sent: Collection[str]) -> Chain:
    """Find the chain of a client's network. All its tensors must travel.

    Args:
        client: The client module.
        sent: Names of the entries of its state that travel.

    Raises:
        ConfigurationError: If the network is not a chain, a part of it stays with the client, or it
            does not end in one output for each class.
    """
    chain = find_chain(client)
    if chain[-1].width != client.num_classes:
        raise _no_chain(f"{chain[-1].name!r} does not end it with {client.num_classes} outputs")
    for name in (name for layer in chain for name in layer.tensors):
        if name not in sent:
            raise ConfigurationError(f"matching moves {name!r}, which does not travel")
    return chain


def _layer(step: _Step, before: Sequence[Layer], spatial: int) -> Layer:
    """Return a layer of the chain. Its inputs are the outputs of the layer before it, if any."""
    weight, convolves = step.module.weight, not isinstance(step.module, nn.Linear)
    if f"{step.name}.weight" not in step.parameters:
        raise _no_chain(f"{step} has a weight that is computed")
    if getattr(step.module, "groups", 1) != 1:
        raise _no_chain(f"{step} has {step.module.groups} groups")
    for layer in before:
        if convolves != bool(spatial) or not layer.feeds(weight.shape[1], flat=not spatial):
            raise _no_chain(f"{step} does not take each output of {layer.name!r} by itself")
    bias = None if step.module.bias is None else f"{step.name}.bias"
    return Layer(step.name, f"{step.name}.weight", bias, (), len(weight), convolves)


def _no_chain(why: str) -> ConfigurationError:
    return ConfigurationError(
        f"matching needs a chain of convolutions, BatchNorm, pooling and linear layers, but {why}"
    )


class _Step(NamedTuple):
    """One operation of a traced network, with the operations before it."""

    node: Node
    module: Any
    inputs: list[Node]

    @property
    def name(self) -> str:
        """The name of the module, or of the function."""
        target = self.node.target
        return target if isinstance(target, str) else target.__name__

    def __str__(self) -> str:
        if self.module is None:
            return f"the operation {self.name!r}"
        return f"{type(self.module).__name__} {self.name!r}"

    @property
    def kind(self) -> str:
        """The kind of operation, the same for ``nn.MaxPool2d`` and ``F.max_pool2d``."""
        name = self.name if self.module is None else type(self.module).__name__
        return name.lower().replace("_", "")

    @property
    def parameters(self) -> set[str]:
        """Names of its parameters."""
        return {f"{self.name}.{name}" for name, _ in self.module.named_parameters()}

    @property
    def vectors(self) -> list[str]:
        """Names of the tensors of a BatchNorm that have an entry for each channel."""
        tensors = self.module.state_dict().items()
        return [f"{self.name}.{name}" for name, tensor in tensors if tensor.ndim]

    @property
    def is_elementwise(self) -> bool:
        """Whether it treats each number separately."""
        return self.kind in _ELEMENTWISE

    def pools(self, dimensions: int) -> bool:
        """Whether it pools each channel separately, over positions of ``dimensions`` dimensions."""
        return self.kind in _POOLINGS and self.kind.endswith(f"{dimensions}d")

    @property
    def flattens(self) -> bool:
        """Whether it flattens each sample, channel by channel."""
        if isinstance(self.module, nn.Flatten):
            return (self.module.start_dim, self.module.end_dim) == (1, -1)
        given = self.node.args[1:]
        if self.kind == "flatten":
            return given == (1,) or (not given and self.node.kwargs == {"start_dim": 1})
        return self.kind in ("view", "reshape") and len(given) == 2  # [batch, all the rest]


def _steps(module: nn.Module) -> Iterator[_Step]:
    """Trace a network, without operations that only compute sizes, such as ``x.size(0)``."""
    from torch.fx import Tracer

    try:
        nodes = Tracer().trace(module).nodes
    except Exception as error:
        raise _no_chain(f"{type(module).__name__} can't be traced: {error}") from error
    modules = dict(module.named_modules())
    sizes: set[Node] = set()
    for node in nodes:
        part = modules[str(node.target)] if node.op == "call_module" else None
        step = _Step(node, part, [n for n in node.all_input_nodes if n not in sizes])
        if step.kind == "size" or node.args[1:] == ("shape",) or sizes.intersection(node.args[:1]):
            sizes.add(node)
        else:
            yield step

"""Plain training of networks in float64, one client after the other: what methods must compute."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflight import Federation
from pflight.datamodules import TensorClients
from pflight.models import Classifier
from tests.runs import CLASSES, FEATURES, batches_of, sgd, small_data

Loss = Callable[[nn.Sequential, Tensor, Tensor], Tensor]
"""Of a network, inputs and classes; it is in training mode."""


def data(**options: object) -> TensorClients:
    """Return unequal clients, of which a round has three."""
    return small_data(**{"cohort_size": 3, "dtype": torch.float64, **options})


def client(**options: object) -> Classifier:
    """Return a network with BatchNorm, of three features."""
    torch.manual_seed(3)
    layers = nn.Linear(FEATURES, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, CLASSES)
    options = {"optimizer": sgd(0.1), **options}
    return Classifier(nn.Sequential(*layers), CLASSES, **options).double()


def cohorts(federation: Federation) -> list[list[int]]:
    return [federation.clients.cohorts.sample(entry.index).tolist() for entry in federation.history]


def batches(data: TensorClients, round: int, client: int, epochs: int) -> list[np.ndarray]:
    """Return each local batch; a single sample joins the batch before it, for BatchNorm."""
    found: list[np.ndarray] = []
    for batch in batches_of(data, round, client, epochs):
        if len(batch) == 1:
            found[-1] = np.concatenate([found[-1], batch])
        else:
            found.append(batch)
    return found


def train(
    network: nn.Sequential,
    samples: tuple[Tensor, Tensor],
    order: Sequence[np.ndarray],
    loss: Loss,
    lr: float = 0.1,
    also: Iterable[Tensor] = (),
    rest: Iterable[Tensor] = (),
) -> None:
    """Take a step of gradient descent on each batch, in place.

    Args:
        network: Trains in training mode.
        samples: Inputs and classes.
        order: Which samples are in each batch.
        loss: What it minimises.
        lr: The step.
        also: Further tensors that are stepped.
        rest: Parameters that are not.
    """
    still = {id(tensor) for tensor in rest}
    stepped = [p for p in (*network.parameters(), *also) if id(p) not in still]
    network.train()
    for batch in order:
        x, y = (part[torch.as_tensor(batch)] for part in samples)
        gradients = torch.autograd.grad(loss(network, x, y), stepped)
        with torch.no_grad():
            for parameter, gradient in zip(stepped, gradients, strict=True):
                parameter -= lr * gradient


def features(network: nn.Sequential, x: Tensor) -> Tensor:
    return network[:-1](x)


@torch.no_grad()
def judged_features(network: nn.Sequential, x: Tensor) -> Tensor:
    """Return the features in evaluation mode."""
    return features(copy.deepcopy(network).eval(), x)


@torch.no_grad()
def class_means(network: nn.Sequential, samples: tuple[Tensor, Tensor]) -> dict[int, Tensor]:
    """Return the mean features of the classes that there are."""
    z, y = judged_features(network, samples[0]), samples[1]
    return {int(k): z[y == k].mean(0) for k in y.unique()}


def cross_entropy(network: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(network(x), y)


@torch.no_grad()
def average(networks: Sequence[nn.Module], weights: Iterable[float]) -> nn.Sequential:
    """Return the weighted mean of networks; counters take their maximum."""
    shares = torch.tensor([*weights], dtype=torch.float64)
    shares /= shares.sum()
    mean = copy.deepcopy(networks[0])
    for name, value in mean.state_dict().items():
        parts = torch.stack([network.state_dict()[name] for network in networks])
        if value.is_floating_point():
            value.copy_(torch.tensordot(shares, parts, 1))
        else:
            value.copy_(parts.amax(0))
    return mean  # type: ignore[return-value]


def assert_network(state: dict[str, Tensor], network: nn.Module) -> None:
    """Compare the network in a client's or the server's state to another."""
    own = {name.removeprefix("network."): value for name, value in state.items()}
    expected = {name: value.detach() for name, value in network.state_dict().items()}
    torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-12)

"""The workloads' networks in PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from .workloads import Record, Weights, Workload


def make_network(workload: Workload, record: Record | None = None) -> nn.Sequential:
    """Return a network with the workload's first weights.

    Args:
        workload: Says which layers.
        record: Counts the batches that the network and its deep copies are trained on.
    """
    modules: list[nn.Module] = []
    for shape in workload.layers:
        if len(shape) == 4:
            out, channels, size, _ = shape
            convolution = nn.Conv2d(channels, out, size, padding=size // 2)
            modules += [convolution, nn.ReLU(), nn.MaxPool2d(2)]
        else:
            flat = any(isinstance(module, nn.Linear) for module in modules)
            modules += [] if flat else [nn.Flatten()]
            modules += [nn.Linear(shape[1], shape[0]), nn.ReLU()]
    network = nn.Sequential(*modules[:-1])
    load_weights(network, workload.initial_weights())
    if record is not None:

        def count(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if module.training:
                record.count(len(inputs[0]))

        network.register_forward_hook(count)
    return network


@torch.no_grad()
def load_weights(network: nn.Module, weights: Weights) -> None:
    """Copy weights into a network."""
    for parameter, weight in zip(network.parameters(), weights, strict=True):
        parameter.copy_(torch.from_numpy(weight))


def weights_of(network: nn.Module) -> Weights:
    """Return a network's weights."""
    return [parameter.detach().numpy() for parameter in network.parameters()]


@torch.no_grad()
def accuracy(workload: Workload, weights: Weights, x: np.ndarray, y: np.ndarray) -> float:
    """Return the share of the images ``[n, 1, 28, 28]`` that a network labels as ``y`` ``[n]``."""
    network = make_network(workload)
    load_weights(network, weights)
    right = [
        (network(images).argmax(1) == labels).sum().item()
        for images, labels in zip(
            torch.from_numpy(x).split(1000), torch.from_numpy(y).split(1000), strict=True
        )
    ]
    return sum(right) / len(y)

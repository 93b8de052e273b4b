"""The networks: sizes, shapes, vmap over stacked clients, export and the command line."""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest
import torch
from jsonargparse import auto_cli
from torch import nn
from torch.func import functional_call, stack_module_state

from pflight.models.networks import MLP, LogisticRegression, McMahanCNN


class Case(NamedTuple):
    network: type[nn.Module]
    arguments: dict[str, object]
    sample: tuple[int, ...]
    num_parameters: int
    layers: list[str]

    def build(self) -> nn.Module:
        return self.network(**self.arguments)


CASES = {
    "logistic regression": Case(
        LogisticRegression,
        {"in_features": 64, "num_classes": 10},
        sample=(1, 8, 8),
        num_parameters=650,
        layers=["output"],
    ),
    "MLP 784-200-10": Case(
        MLP,
        {"in_features": 784, "hidden": [200], "num_classes": 10},
        sample=(1, 28, 28),
        num_parameters=159_010,
        layers=["hidden.0", "output"],
    ),
    "MLP 784-200-200-10": Case(
        MLP,
        {"in_features": 784, "hidden": [200, 200], "num_classes": 10},
        sample=(784,),
        num_parameters=199_210,
        layers=["hidden.0", "hidden.1", "output"],
    ),
    "MLP without hidden layers": Case(
        MLP,
        {"in_features": 64, "hidden": [], "num_classes": 10},
        sample=(8, 8),
        num_parameters=650,
        layers=["output"],
    ),
    "McMahan CNN": Case(
        McMahanCNN,
        {},
        sample=(1, 28, 28),
        num_parameters=1_663_370,
        layers=["conv1", "conv2", "hidden", "output"],
    ),
    "McMahan CNN for FEMNIST": Case(
        McMahanCNN,
        {"num_classes": 62},
        sample=(1, 28, 28),
        num_parameters=1_690_046,
        layers=["conv1", "conv2", "hidden", "output"],
    ),
    "McMahan CNN for small colour images": Case(
        McMahanCNN,
        {"num_classes": 3, "in_channels": 3, "image_size": 9},
        sample=(3, 9, 9),
        num_parameters=(3 * 25 + 1) * 32 + (32 * 25 + 1) * 64 + (64 * 4 + 1) * 512 + 513 * 3,
        layers=["conv1", "conv2", "hidden", "output"],
    ),
}

every_network = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@every_network
def test_number_of_parameters_and_logits(case: Case) -> None:
    network = case.build()
    assert sum(parameter.numel() for parameter in network.parameters()) == case.num_parameters
    logits = network(torch.randn(4, *case.sample))
    assert logits.shape == (4, case.arguments.get("num_classes", 10))
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


@every_network
def test_a_layer_holds_its_weight_and_its_bias(case: Case) -> None:
    names = [name for name, _ in case.build().named_parameters()]
    assert names == [f"{layer}.{kind}" for layer in case.layers for kind in ("weight", "bias")]


@every_network
def test_vmap_equals_separate_networks(case: Case) -> None:
    networks = [case.build() for _ in range(3)]
    x = torch.randn(3, 5, *case.sample)
    parameters, buffers = stack_module_state(networks)
    stacked = torch.vmap(lambda p, b, x: functional_call(networks[0], (p, b), (x,)))
    expected = torch.stack([network(batch) for network, batch in zip(networks, x, strict=True)])
    torch.testing.assert_close(stacked(parameters, buffers, x), expected, rtol=1e-4, atol=1e-5)


@every_network
def test_export_keeps_the_function(case: Case) -> None:
    network = case.build().eval()
    batch = torch.export.Dim("batch", min=2)
    exported = torch.export.export(
        network, (torch.randn(4, *case.sample),), dynamic_shapes=({0: batch},)
    )
    x = torch.randn(7, *case.sample)
    torch.testing.assert_close(exported.module()(x), network(x))


@every_network
def test_the_command_line_builds_it(case: Case) -> None:
    def identity(network: nn.Module) -> nn.Module:
        return network

    path = f"{case.network.__module__}.{case.network.__qualname__}"
    choice = json.dumps({"class_path": path, "init_args": case.arguments})
    network = auto_cli(identity, args=[choice])
    assert isinstance(network, case.network)
    assert sum(parameter.numel() for parameter in network.parameters()) == case.num_parameters


def test_the_mlp_computes_its_formula() -> None:
    network = MLP(in_features=2, hidden=[2], num_classes=1)
    state = {
        "hidden.0.weight": torch.tensor([[1.0, 2.0], [-1.0, 1.0]]),
        "hidden.0.bias": torch.tensor([0.5, 0.0]),
        "output.weight": torch.tensor([[2.0, 3.0]]),
        "output.bias": torch.tensor([1.0]),
    }
    network.load_state_dict(state)
    # Hidden units: relu(1 + 4 + 0.5) = 5.5, relu(-1 + 2) = 1; and relu(-2.5) = 0, relu(-1) = 0.
    logits = network(torch.tensor([[1.0, 2.0], [-1.0, -1.0]]))
    torch.testing.assert_close(logits, torch.tensor([[15.0], [1.0]]))


def test_the_cnn_keeps_the_size_in_its_convolutions_and_halves_it_by_pooling() -> None:
    network = McMahanCNN()
    shapes = []
    for layer in (network.conv1, network.conv2, network.hidden):
        layer.register_forward_hook(lambda _, inputs, output: shapes.append(tuple(output.shape)))
    network(torch.randn(1, 1, 28, 28))
    assert shapes == [(1, 32, 28, 28), (1, 64, 14, 14), (1, 512)]

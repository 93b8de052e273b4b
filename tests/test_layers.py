"""Choosing a client's layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pflight.errors import ConfigurationError
from pflight.models import Classifier, FedBNCNN, ResNet18
from pflight.states.layers import Layers
from tests.runs import CLASSES, FEATURES, batchnorm_client

BATCHNORM = nn.modules.batchnorm._BatchNorm


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"last": 1}, [3]),
        ({"first": 2}, [0, 1]),
        ({"first": 3}, [0, 1, 3]),
        ({"first": 1, "last": 1}, [0, 3]),
        ({"first": 2, "last": 2}, [0, 1, 3]),
        ({"names": "network.1"}, [1]),
        ({"names": "network"}, [0, 1, 3]),
        ({"names": ["network.[03]", "*.3"]}, [0, 3]),
        ({"types": nn.Linear}, [0, 3]),
        ({"types": [nn.BatchNorm1d, nn.Conv2d]}, [1]),
        ({"types": nn.LayerNorm}, []),
        ({"names": ("network.3",), "types": (BATCHNORM,)}, [1, 3]),
    ],
)
def test_by_name_position_and_kind(options: dict[str, Any], expected: list[int]) -> None:
    chosen = Layers(**options).of(batchnorm_client())
    assert chosen == tuple(f"network.{place}" for place in expected)


def test_a_name_is_no_beginning_of_a_name() -> None:
    network = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(11)))
    assert Layers("1").of(network) == ("1",)
    assert Layers("1*").of(network) == ("1", "10")


def test_batchnorm_is_found_by_its_kind_whatever_its_name() -> None:
    client = Classifier(ResNet18(norm="batch"), num_classes=10)
    chosen = Layers(types=nn.BatchNorm2d).of(client)
    assert "network.layer2.0.downsample.1" in chosen
    held = [n for n, module in client.named_modules() if isinstance(module, nn.BatchNorm2d)]
    assert sorted(chosen) == sorted(held)
    assert len(chosen) == 20
    assert not Layers(types=BATCHNORM).of(Classifier(ResNet18(), num_classes=10))
    both = Layers(types=BATCHNORM).of(Classifier(FedBNCNN(), num_classes=10))
    kinds = {type(FedBNCNN().get_submodule(name.removeprefix("network."))) for name in both}
    assert kinds == {nn.BatchNorm1d, nn.BatchNorm2d}


def test_batchnorm_without_parameters_and_parametrized_layers_are_layers() -> None:
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, 5))
    network = nn.Sequential(normed, nn.BatchNorm1d(5, affine=False), nn.Linear(5, CLASSES))
    assert Layers(types=BATCHNORM).of(network) == ("1",)
    assert Layers(types=nn.Linear).of(network) == ("0", "2")


def test_positions_count_the_layers_with_parameters() -> None:
    """Not the class weights of a loss."""
    module = nn.Module()
    module.norm = nn.BatchNorm1d(FEATURES, affine=False)
    module.body, module.head = nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES)
    module.criterion = nn.CrossEntropyLoss(weight=torch.ones(CLASSES))
    assert Layers(last=1).of(module) == ("head",)
    assert Layers(first=1).of(module) == ("body",)
    assert Layers("criterion").of(module) == ("criterion",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"last": 4}, "last=4, but there are only 3 layers: network.0, network.1, network.3"),
        ({"first": 5, "last": 1}, "first=5, but there are only 3 layers"),
        ({"names": "0"}, "'0' matches none of the 3 layers: network.0, network.1, network.3"),
        ({"names": ["network.0", "network.2"]}, "'network.2' matches none"),
        ({"names": "network.0.weight"}, "'network.0.weight' matches none"),
    ],
)
def test_what_there_is_not(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"Layers: {message}"):
        Layers(**options).of(batchnorm_client())


def test_what_makes_no_sense() -> None:
    with pytest.raises(ConfigurationError, match="Layers: last must be at least 0, got -1"):
        Layers(last=-1)


def test_the_client_is_not_changed() -> None:
    client = batchnorm_client()
    before = {name: value.clone() for name, value in client.state_dict().items()}
    Layers(last=2).of(client)
    torch.testing.assert_close(dict(client.state_dict()), before, rtol=0, atol=0)

"""The networks: sizes, shapes, vmap over stacked clients, export and the command line."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import torchvision
import yaml
from jsonargparse import auto_cli
from torch import nn
from torch.func import functional_call, stack_module_state
from torch.nn.modules.batchnorm import _BatchNorm

from pflight.command.cli import main
from pflight.errors import ConfigurationError
from pflight.models import (
    FEMNISTCNN,
    MLP,
    CelebACNN,
    FedBNCNN,
    FedFomoCNN,
    FedRepCNN,
    LogisticRegression,
    McMahanCNN,
    PFedHNCNN,
    ResNet18,
)
from pflight.states.state import StateLayout
from tests.pages import DIGITS


class Case(NamedTuple):
    network: type[nn.Module]
    arguments: dict[str, Any]
    sample: tuple[int, ...]
    num_classes: int
    num_parameters: int
    layers: str

    def build(self) -> nn.Module:
        """Return the network as it trains, but for dropout: it computes the same twice."""
        network = self.network(**self.arguments)
        for module in network.modules():
            if isinstance(module, nn.Dropout):
                module.eval()
        return network


MCMAHAN = "conv1 conv2 hidden output"
CELEBA = "conv1 norm1 conv2 norm2 conv3 norm3 conv4 norm4 output"
LENET = "conv1 conv2 hidden1 hidden2 output"
LENET_NORM = "conv1 norm1 conv2 norm2 hidden1 hidden2 output"
FOMO = "conv1 conv2 conv3 hidden output"
FOMO_NORM = "conv1 norm1 conv2 norm2 conv3 norm3 hidden output"
FEDBN = "conv1 conv2 conv3 hidden1 hidden2 output"
FEDBN_NORM = "conv1 norm1 conv2 norm2 conv3 norm3 hidden1 norm4 hidden2 norm5 output"
CIFAR100 = {"num_classes": 100, "channels": (64, 128), "hidden": (256, 128), "dropout": 0.6}

CASES = {
    "logistic regression": Case(
        LogisticRegression, {"in_features": 64, "num_classes": 10}, (1, 8, 8), 10, 650, "output"
    ),
    "MLP 784-200-10": Case(
        MLP,
        {"in_features": 784, "hidden": [200], "num_classes": 10},
        (1, 28, 28),
        10,
        159_010,
        "hidden.0 output",
    ),
    "MLP 784-200-200-10": Case(
        MLP,
        {"in_features": 784, "hidden": [200, 200], "num_classes": 10},
        (784,),
        10,
        199_210,
        "hidden.0 hidden.1 output",
    ),
    "MLP of FedEC": Case(
        MLP,
        {"in_features": 784, "hidden": [512, 256], "num_classes": 10},
        (1, 28, 28),
        10,
        535_818,
        "hidden.0 hidden.1 output",
    ),
    "MLP without hidden layers": Case(
        MLP, {"in_features": 64, "hidden": [], "num_classes": 10}, (8, 8), 10, 650, "output"
    ),
    "McMahan": Case(McMahanCNN, {}, (1, 28, 28), 10, 1_663_370, MCMAHAN),
    "McMahan for FEMNIST": Case(
        McMahanCNN, {"num_classes": 62}, (1, 28, 28), 62, 1_690_046, MCMAHAN
    ),
    "McMahan for small colour images": Case(
        McMahanCNN,
        {"num_classes": 3, "in_channels": 3, "image_size": 9},
        (3, 9, 9),
        3,
        (3 * 25 + 1) * 32 + (32 * 25 + 1) * 64 + (64 * 4 + 1) * 512 + 513 * 3,
        MCMAHAN,
    ),
    "LEAF FEMNIST": Case(FEMNISTCNN, {}, (1, 28, 28), 62, 6_603_710, MCMAHAN),
    "LEAF FEMNIST of FeSEM": Case(FEMNISTCNN, {"hidden": 248}, (1, 28, 28), 62, 845_510, MCMAHAN),
    "LEAF CelebA": Case(CelebACNN, {}, (3, 84, 84), 2, 31_202, CELEBA),
    "FedRep CIFAR10": Case(FedRepCNN, {}, (3, 32, 32), 10, 307_842, LENET),
    "FedRep CIFAR100": Case(FedRepCNN, CIFAR100, (3, 32, 32), 100, 1_075_044, LENET),
    "pFedHN CIFAR10": Case(PFedHNCNN, {}, (3, 32, 32), 10, 121_182, LENET),
    "pFedLA CIFAR10": Case(PFedHNCNN, {"batch_norm": True}, (3, 32, 32), 10, 121_278, LENET_NORM),
    "pFedLA CIFAR100": Case(
        PFedHNCNN,
        {"num_classes": 100, "batch_norm": True},
        (3, 32, 32),
        100,
        128_928,
        LENET_NORM,
    ),
    "pFedLA EMNIST": Case(
        PFedHNCNN, {"in_channels": 1, "image_size": 28}, (1, 28, 28), 10, 85_822, LENET
    ),
    "FedFomo": Case(FedFomoCNN, {}, (3, 32, 32), 10, 122_570, FOMO),
    "FedFomo with BatchNorm": Case(
        FedFomoCNN, {"batch_norm": True}, (3, 32, 32), 10, 122_890, FOMO_NORM
    ),
    "FedBN": Case(FedBNCNN, {}, (3, 28, 28), 10, 14_219_210, FEDBN_NORM),
    "FedBN without BatchNorm": Case(
        FedBNCNN, {"batch_norm": False}, (3, 28, 28), 10, 14_213_578, FEDBN
    ),
}

every_network = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@every_network
def test_number_of_parameters_and_logits(case: Case) -> None:
    network = case.build()
    assert sum(parameter.numel() for parameter in network.parameters()) == case.num_parameters
    logits = network(torch.randn(4, *case.sample))
    assert logits.shape == (4, case.num_classes)
    F.cross_entropy(logits, torch.arange(4) % case.num_classes).backward()
    gradients = {name: parameter.grad for name, parameter in network.named_parameters()}
    assert [name for name, gradient in gradients.items() if gradient is None] == []
    assert all(gradients[name].any() for name in gradients if name.endswith("weight"))


@every_network
def test_a_layer_holds_its_weight_and_its_bias_and_layers_run_in_their_order(case: Case) -> None:
    network = case.build()
    layers = StateLayout.of(network).layers
    assert " ".join(layers) == case.layers
    for layer, names in layers.items():
        assert names[:2] == (f"{layer}.weight", f"{layer}.bias")
    ran = []
    for layer in layers:
        network.get_submodule(layer).register_forward_hook(
            lambda *_, layer=layer: ran.append(layer)
        )
    network(torch.randn(2, *case.sample))
    assert ran == list(layers)


@every_network
def test_vmap_equals_separate_networks(case: Case) -> None:
    networks = [case.build() for _ in range(2)]
    x = torch.randn(2, 4, *case.sample)
    parameters, buffers = stack_module_state(networks)
    stacked = torch.vmap(lambda p, b, x: functional_call(networks[0], (p, b), (x,)))
    expected = torch.stack([network(batch) for network, batch in zip(networks, x, strict=True)])
    torch.testing.assert_close(stacked(parameters, buffers, x), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.short(
    "logistic regression", "McMahan", "LEAF CelebA", "pFedLA EMNIST", "FedRep CIFAR10", "FedBN"
)
@every_network
def test_export_keeps_the_function(case: Case) -> None:
    network = case.build().eval()
    batch = torch.export.Dim("batch", min=2)
    exported = torch.export.export(
        network, (torch.randn(4, *case.sample),), dynamic_shapes=({0: batch},)
    )
    x = torch.randn(7, *case.sample)
    torch.testing.assert_close(exported.module()(x), network(x), rtol=1e-4, atol=1e-5)


@every_network
def test_the_command_line_builds_it(case: Case) -> None:
    path = f"pflight.models.{case.network.__name__}"
    network = parse_network({"class_path": path, "init_args": case.arguments})
    assert type(network) is case.network
    assert sum(parameter.numel() for parameter in network.parameters()) == case.num_parameters


@pytest.mark.parametrize("network", [PFedHNCNN, FedFomoCNN, FedBNCNN])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_batch_norm_is_there_when_asked_for(network: Any, batch_norm: bool) -> None:
    built = network(batch_norm=batch_norm)
    assert any(isinstance(module, _BatchNorm) for module in built.modules()) is batch_norm


@pytest.mark.parametrize(
    ("network", "least"),
    [
        (McMahanCNN, 4),
        (FEMNISTCNN, 4),
        (CelebACNN, 1),
        (FedRepCNN, 16),
        (PFedHNCNN, 16),
        (FedFomoCNN, 18),
        (FedBNCNN, 4),
    ],
)
def test_every_image_size_will_do_from_the_least_on(network: Any, least: int) -> None:
    for image_size in range(least, least + 18):
        built = network(image_size=image_size, in_channels=2).eval()
        assert len(built(torch.zeros(1, 2, image_size, image_size))) == 1
    if least > 1:
        message = f"{network.__name__}: image_size must be at least {least}, got {least - 1}"
        with pytest.raises(ConfigurationError, match=message):
            network(image_size=least - 1)


def test_dropout_out_of_range() -> None:
    with pytest.raises(ConfigurationError, match=r"FedRepCNN: dropout must be in \[0, 1\], got 6"):
        FedRepCNN(dropout=6)


def test_dropout_drops_the_last_hidden_units_in_training_only() -> None:
    network = FedRepCNN(dropout=0.6)
    dropped = []
    network.output.register_forward_hook(lambda _, inputs, __: dropped.append(inputs[0] == 0))
    x = torch.randn(50, 3, 32, 32)
    torch.testing.assert_close(network.eval()(x), network(x))
    before = dropped[0].float().mean()
    assert not torch.equal(network.train()(x), network(x))
    torch.testing.assert_close(
        dropped[-1].float().mean(), 1 - 0.4 * (1 - before), atol=0.03, rtol=0
    )


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


@pytest.mark.parametrize(
    ("network", "image", "expected"),
    [
        (McMahanCNN, (1, 28, 28), {"conv1": (32, 28, 28), "conv2": (64, 14, 14), "hidden": (512,)}),
        (FedRepCNN, (3, 32, 32), {"conv1": (64, 28, 28), "conv2": (64, 10, 10), "hidden1": (120,)}),
        (PFedHNCNN, (3, 32, 32), {"conv1": (16, 28, 28), "conv2": (32, 10, 10), "hidden2": (84,)}),
        (FedFomoCNN, (3, 32, 32), {"conv2": (64, 13, 13), "conv3": (64, 4, 4), "hidden": (64,)}),
        (FedBNCNN, (3, 28, 28), {"conv2": (64, 14, 14), "conv3": (128, 7, 7), "hidden2": (512,)}),
        (
            CelebACNN,
            (3, 84, 84),
            {"conv2": (32, 42, 42), "conv3": (32, 21, 21), "conv4": (32, 11, 11)},
        ),
        (ResNet18, (3, 32, 32), {"layer1": (64, 32, 32), "layer4": (512, 4, 4)}),
        (
            partial(ResNet18, small_images=False),
            (3, 64, 64),
            {"layer1": (64, 16, 16), "layer4": (512, 2, 2)},
        ),
    ],
)
def test_sizes_inside(network: Any, image: tuple[int, ...], expected: dict[str, Any]) -> None:
    built = network()
    sizes = {}
    for name in expected:
        built.get_submodule(name).register_forward_hook(
            lambda _, __, output, name=name: sizes.update({name: tuple(output.shape[1:])})
        )
    built(torch.randn(2, *image))
    assert sizes == expected


class TestResNet18:
    @pytest.mark.parametrize("norm", ["group", "batch"])
    @pytest.mark.parametrize(
        ("small_images", "num_classes", "num_parameters"),
        [
            (True, 10, 11_173_962),
            (True, 100, 11_220_132),
            (True, 1000, 11_681_832),
            (False, 10, 11_181_642),
            (False, 100, 11_227_812),
            (False, 1000, 11_689_512),
        ],
    )
    def test_number_of_parameters(
        self, norm: Any, small_images: bool, num_classes: int, num_parameters: int
    ) -> None:
        with torch.device("meta"):
            network = ResNet18(num_classes, norm=norm, small_images=small_images)
        assert sum(parameter.numel() for parameter in network.parameters()) == num_parameters

    def test_its_state_is_that_of_torchvision(self) -> None:
        theirs = torchvision.models.resnet18(num_classes=10).eval()
        ours = ResNet18(norm="batch", small_images=False).eval()
        ours.load_state_dict(theirs.state_dict())
        x = torch.randn(2, 3, 64, 64)
        torch.testing.assert_close(ours(x), theirs(x))

    def test_the_kind_of_normalisation(self) -> None:
        norms = {
            kind: [type(module) for module in ResNet18(norm=kind).modules()]
            for kind in ("group", "batch")
        }
        assert norms["group"].count(nn.GroupNorm) == norms["batch"].count(nn.BatchNorm2d) == 20
        assert nn.BatchNorm2d not in norms["group"]
        assert nn.GroupNorm not in norms["batch"]

    def test_gradients_reach_every_parameter(self) -> None:
        network = ResNet18(num_classes=3, in_channels=1)
        F.cross_entropy(network(torch.randn(3, 1, 8, 8)), torch.arange(3)).backward()
        assert all(parameter.grad is not None for parameter in network.parameters())

    def test_the_first_convolution_is_initialised_as_the_others(self) -> None:
        torch.manual_seed(0)
        network = ResNet18()
        deviation = network.conv1.weight.std()
        torch.testing.assert_close(
            deviation, network.layer1[0].conv1.weight.std(), atol=5e-3, rtol=0
        )

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            ({"norm": "layer"}, "ResNet18: norm must be 'group' or 'batch', got 'layer'"),
            ({"num_groups": 3}, "ResNet18: num_groups must divide 64, got 3"),
            ({"num_groups": 0}, "ResNet18: num_groups must divide 64, got 0"),
        ],
    )
    def test_options_out_of_range(self, option: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            ResNet18(**option)


class TestAnyNetworkByItsClassPath:
    """``--model.client.network`` takes what a user writes or installs."""

    @pytest.fixture(autouse=True)
    def _own_module(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        Path("own_networks.py").write_text(
            "from torch import Tensor, nn\n\n\n"
            "class Wide(nn.Module):\n"
            "    def __init__(self, width: int = 8) -> None:\n"
            "        super().__init__()\n"
            "        self.hidden = nn.Linear(64, width)\n"
            "        self.output = nn.Linear(width, 10)\n\n"
            "    def forward(self, x: Tensor) -> Tensor:\n"
            "        return self.output(self.hidden(x.flatten(1)).relu())\n\n\n"
            "def deep(layers: int) -> nn.Module:\n"
            "    hidden = [nn.Linear(64, 64) for _ in range(layers)]\n"
            "    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, 10))\n"
        )

    def fit(self, *args: str) -> dict[str, torch.Tensor]:
        small = ["--data.num_clients=4", "--trainer.max_epochs=1", "--trainer.accelerator=cpu"]
        folder = "--trainer.default_root_dir=run"
        main(["fit", f"--config={DIGITS}", *small, folder, *args])
        checkpoint = torch.load("run/checkpoints/last.ckpt", weights_only=True)
        return checkpoint["state_dict"]

    def test_a_class_of_the_users_own(self) -> None:
        network = "--model.client.network=own_networks.Wide"
        state = self.fit(network, "--model.client.network.width=5")
        assert state["server.0.network.hidden.weight"].shape == (5, 64)

    @pytest.mark.long
    def test_a_function_that_returns_a_network(self) -> None:
        network = "--model.client.network=own_networks.deep"
        state = self.fit(network, "--model.client.network.layers=3")
        assert state["server.0.network.4.weight"].shape == (10, 64)

    def test_a_network_of_torchvision(self, capsys: pytest.CaptureFixture[str]) -> None:
        network = "--model.client.network=torchvision.models.resnet18"
        classes = "--model.client.network.num_classes=10"
        with pytest.raises(SystemExit):
            main(["fit", f"--config={DIGITS}", network, classes, "--print_config"])
        config = yaml.safe_load(capsys.readouterr().out)
        spec = config["model"]["init_args"]["client"]["init_args"]["network"]
        assert isinstance(parse_network(spec), torchvision.models.ResNet)


def parse_network(spec: dict[str, Any]) -> nn.Module:
    """Return the network that the command line builds for a class path and its arguments."""

    def identity(network: nn.Module) -> nn.Module:
        return network

    return auto_cli(identity, args=[json.dumps(spec)])

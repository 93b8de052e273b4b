"""Pairs are found in all layers of peft, whatever their names, and give its own deltas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

peft = pytest.importorskip("peft")

from pflight.adapters import find_pairs  # noqa: E402
from pflight.adapters.pairs import matrix, plain_pairs  # noqa: E402
from pflight.errors import ConfigurationError  # noqa: E402


class Network(nn.Module):
    """Has one layer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D as Transposed

        self.embedding = nn.Embedding(7, 4)
        self.linear = nn.Linear(4, 6)
        self.transposed = Transposed(6, 4)
        self.convolution = nn.Conv2d(2, 6, (3, 2), stride=2, padding=1)
        self.head = nn.Linear(6, 3)


pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to"),
    pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd"),
]
TARGETS = ["embedding", "linear", "transposed", "convolution"]


def adapted(targets: list[str] = TARGETS, network: nn.Module | None = None, **options: Any) -> Any:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=targets, **options)
    return peft.get_peft_model(network or Network(), config)


def layers(model: Any) -> dict[str, Any]:
    return dict(model.named_modules())


def delta(pair: Any, model: Any) -> Tensor:
    """Return a pair's product in the form of the layer's frozen weight."""
    layer = layers(model)[pair.layer]
    product = pair.product(model.state_dict())
    dense = product.left @ product.right
    weight = layer.get_base_layer().weight
    turned = getattr(layer, "fan_in_fan_out", False) or isinstance(
        layer.get_base_layer(), nn.Embedding
    )
    return (dense.mT if turned else dense).reshape(weight.shape)


@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True}, {"rank_pattern": {"linear": 3}, "alpha_pattern": {"linear": 5}}],
)
def test_products_are_pefts_own_deltas(options: dict[str, Any]) -> None:
    model = adapted(**options).double()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_()
    pairs = find_pairs(model)
    assert [pair.layer.rpartition(".")[2] for pair in pairs] == TARGETS
    for pair in pairs:
        expected = layers(model)[pair.layer].get_delta_weight(pair.adapter)
        torch.testing.assert_close(delta(pair, model), expected)


def test_scales_and_ranks_are_those_of_each_layer() -> None:
    model = adapted(["linear", "head"], use_rslora=True, rank_pattern={"head": 1})
    assert [(p.rank, round(p.scale, 6)) for p in find_pairs(model)] == [(2, 2.121320), (1, 3.0)]


def test_every_adapter_of_a_layer_is_a_pair() -> None:
    model = adapted(["linear"])
    model.add_adapter("second", peft.LoraConfig(r=1, lora_alpha=1, target_modules=["head"]))
    assert [(p.layer[-6:], p.adapter) for p in find_pairs(model)] == [
        ("linear", "default"),
        ("l.head", "second"),
    ]


def _adalora() -> Any:
    network = nn.Sequential()
    network.add_module("fc", nn.Linear(4, 4))
    config = peft.AdaLoraConfig(target_modules=["fc"], init_r=2, total_step=9, tinit=1, tfinal=1)
    return peft.get_peft_model(network, config)


def test_layers_that_are_only_called_so_are_none() -> None:
    network = nn.Sequential()
    network.add_module("lora_A", nn.Linear(4, 4))
    network.add_module("lora_B", nn.Linear(4, 4))
    assert find_pairs(network) == []
    (pair,) = find_pairs(adapted(["lora_A"], network))
    assert pair.layer == "base_model.model.lora_A"


def test_tied_layers_have_one_pair() -> None:
    network = nn.Module()
    network.one = network.other = nn.Linear(4, 4)
    assert len(find_pairs(adapted(["one", "other"], network))) == 1


def test_matrices_have_the_rank_inside() -> None:
    model = adapted()
    state = model.state_dict()
    for pair in find_pairs(model):
        assert matrix(state[pair.a]).shape[0] == matrix(state[pair.b]).shape[1] == 2


def test_merged_adapters_are_refused() -> None:
    model = adapted(["linear"])
    model.merge_adapter()
    with pytest.raises(ConfigurationError, match=r"linear' are merged into its weights"):
        find_pairs(model)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: nn.Linear(2, 2), "Linear has none: make them with peft's get_peft_model"),
        (lambda: adapted(["linear"], use_dora=True), r"linear': it is a Dora\w*, not a plain LoRA"),
        (lambda: _adalora(), "fc': it is an AdaLoRA, not a plain LoRA"),
        (
            lambda: adapted(["0"], nn.Sequential(nn.Conv2d(4, 4, 1, groups=2))),
            "'base_model.model.0': its convolution has groups",
        ),
    ],
)
def test_other_kinds_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^Mine (needs|can't use).*{said}"):
        plain_pairs(make(), "Mine")

"""Models of the package transformers with adapters and padded texts train in a stack."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("peft")
pytest.importorskip("transformers")

import peft
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, masking_utils

from pflight import Federation
from pflight.adapters.export import write_model
from pflight.callbacks import FedAvg
from pflight.datamodules import TensorClients
from pflight.models import Classifier
from tests.runs import run, sgd

# peft 0.21 with transformers 5.24
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
WORDS, WIDTH, CLASSES = 50, 16, 3


class Bert(nn.Module):
    """Classifies padded texts by the mean of the last layer; 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = BertConfig(
            vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=32, **options,
        )  # fmt: skip
        lora = peft.LoraConfig(r=2, target_modules=["query", "value"])
        self.body = peft.get_peft_model(BertModel(config, add_pooling_layer=False), lora)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        found = self.body(input_ids=tokens, attention_mask=(tokens > 0).long())
        return self.head(found.last_hidden_state.mean(1))


class GPT2(nn.Module):
    """Classifies padded texts by three logits of the last word."""

    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(
            vocab_size=WORDS, n_embd=WIDTH, n_layer=2, n_head=2, n_positions=32, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=1, use_cache=False,
        )  # fmt: skip
        lora = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        self.body = peft.get_peft_model(GPT2LMHeadModel(config), lora)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens > 0).long()
        return self.body(input_ids=tokens, attention_mask=mask).logits[:, -1, :CLASSES]


def texts() -> TensorClients:
    """Return four clients with texts of different lengths. One client has no padding."""
    draw = torch.Generator().manual_seed(0)
    clients = []
    for client in range(4):
        tokens = torch.randint(1, WORDS, (6, 10), generator=draw)
        for row in range(6 if client else 0):
            tokens[row, 4 + (row + client) % 6 :] = 0
        clients.append((tokens, torch.randint(CLASSES, (6,), generator=draw)))
    return TensorClients(clients, num_classes=CLASSES, batch_size=3)


def trained(network: type[nn.Module], engine: str, **options: Any) -> Federation:
    torch.manual_seed(0)
    client = Classifier(network(), CLASSES, optimizer=sgd(0.1)).double()

    return run(client, texts(), FedAvg(**options), 2, engine=engine)


def test_only_the_adapters_of_a_transformer_are_exported(tmp_path: Path) -> None:
    """The models of transformers inside know of adapters, too, and are not written."""
    federation = trained(Bert, "sequential")
    module: Any = federation.client_module(0)
    written = write_model(module, tmp_path / "out", federation.layout.moving)
    assert {str(path.relative_to(tmp_path / "out")) for path in written} == {
        "adapter_config.json", "adapter_model.safetensors", "extra.safetensors"
    }  # fmt: skip
    tokens = torch.arange(1, 11).view(1, 10)
    expected = module.network.body(tokens).last_hidden_state
    base = copy.deepcopy(module.network.body).unload()
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "out").double().eval()
    assert torch.equal(loaded(tokens).last_hidden_state, expected)


@pytest.mark.parametrize("network", [Bert, GPT2])
@pytest.mark.parametrize("options", [{}, {"aggregate": "residual", "log_product_error": True}])
def test_a_stack_trains_as_one_client_alone(
    network: type[nn.Module], options: dict[str, Any]
) -> None:
    usual = masking_utils._ignore_causal_mask_sdpa
    runs = [trained(network, engine, **options) for engine in ("sequential", "vectorized")]
    one, other = (run.server_states()[0] for run in runs)
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-12, atol=1e-14)
    assert any("lora_B" in name and value.any() for name, value in one.items())
    assert masking_utils._ignore_causal_mask_sdpa is usual
    assert [getattr(run.clients.engine, "obstacle", None) for run in runs] == [None, None]
    if options:
        tokens, tag = torch.arange(1, 11).view(1, 10), "adapters/product_error"
        outputs = [run.client_module(0).network(tokens) for run in runs]
        torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-14)
        assert max(entry.metrics[tag] for run in runs for entry in run.history) < 1e-6

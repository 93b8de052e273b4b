"""Networks for text: a small GPT-2, and adapters by peft."""

from __future__ import annotations

import warnings
from importlib import import_module

import pytest
import torch
from torch import nn

from pflight.adapters.export import write_model
from pflight.callbacks import FedAvg
from pflight.datamodules import TensorClients
from pflight.errors import ConfigurationError
from pflight.models import CausalTransformer, LanguageModel, LoRA
from pflight.models.networks import text
from tests.runs import quiet_trainer, run, sgd

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

TOKENS, LENGTH = 11, 6
SHAPE = {"vocabulary": TOKENS, "length": LENGTH, "width": 16, "layers": 2, "heads": 2}


def network(seed: int = 0, **options) -> CausalTransformer:
    torch.manual_seed(seed)
    return CausalTransformer(**SHAPE, **options)


def adapted(**options) -> LanguageModel:
    base = network()
    torch.manual_seed(1)
    return LanguageModel(LoRA(base, **{"targets": ["c_attn"], "rank": 2, **options}), sgd(0.5))


def data() -> TensorClients:
    """Return three clients that count in steps of their own, of unequal size."""
    clients = []
    for client, count in enumerate((5, 4, 7)):
        starts = torch.arange(count)[:, None]
        ids = (starts + (client + 1) * torch.arange(LENGTH + 1)) % TOKENS
        targets = ids[:, 1:].clone()
        targets[0, 3:] = -100
        clients.append((ids[:, :-1], targets))
    return TensorClients(clients, val=clients, num_classes=None, batch_size=3)


def ids() -> torch.Tensor:
    return torch.randint(TOKENS, (4, LENGTH), generator=torch.Generator().manual_seed(0))


class TestCausalTransformer:
    def test_sees_no_later_token(self):
        one, other = ids(), ids()
        other[:, 4:] = (other[:, 4:] + 1) % TOKENS
        model = network()
        assert model(one).shape == (4, LENGTH, TOKENS)
        assert torch.allclose(model(one)[:, :4], model(other)[:, :4], atol=1e-6)
        assert not torch.allclose(model(one)[:, 4:], model(other)[:, 4:])

    def test_odd_options_are_named(self):
        with pytest.raises(ConfigurationError, match="width must be a multiple of heads=2, got 15"):
            CausalTransformer(**{**SHAPE, "width": 15})


class TestLoRA:
    def test_is_pefts_and_says_nothing(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            own = adapted(rank=3, alpha=6.0).network
        torch.manual_seed(0)
        base = CausalTransformer(**SHAPE)
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=3, lora_alpha=6.0, target_modules=["c_attn"], fan_in_fan_out=True
        )
        other = peft.get_peft_model(base, config)
        for name, parameter in own.model.named_parameters():
            assert torch.equal(parameter, other.get_parameter(name))
            assert parameter.requires_grad == ("lora_" in name)
        assert torch.equal(own(ids()), other(ids()))

    def test_further_layers_train_as_a_whole(self):
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        own = LoRA(layers, ["0"], rank=2, trained=["1"])
        assert sum(p.numel() for p in own.parameters() if p.requires_grad) == 2 * 8 + 10

    def test_odd_layers_are_named(self):
        with pytest.raises(ConfigurationError, match=r"LoRA: .*nothing"):
            LoRA(network(), ["nothing"])

    @pytest.mark.parametrize("form", ["safetensors", "checkpoint", "export"])
    def test_loads_weights_of_its_network(self, form, tmp_path):
        trained, path = LanguageModel(network(seed=3), sgd(0.5)), tmp_path / "weights.safetensors"
        if form == "safetensors":
            safetensors.save_model(trained.network, path)
        elif form == "checkpoint":
            path = tmp_path / "last.ckpt"
            trainer = quiet_trainer(1, limit_train_batches=0)
            loader = torch.utils.data.DataLoader([(ids()[0], ids()[0])])
            trainer.fit(trained, loader, loader)
            trainer.save_checkpoint(path)
        else:
            (path,) = write_model(trained, tmp_path / "out")
        own = adapted(weights=str(path)).network  # whose adapters begin at 0
        assert torch.equal(own(ids()), trained.network(ids()))
        assert not torch.equal(own(ids()), adapted().network(ids()))

    def test_odd_files_are_named(self, tmp_path):
        with pytest.raises(ConfigurationError, match=r"LoRA: there is no file .*nowhere\.ckpt"):
            adapted(weights=str(tmp_path / "nowhere.ckpt"))
        path = tmp_path / "odd.ckpt"
        path.write_bytes(b"odd")
        with pytest.raises(ConfigurationError, match=r"can't load .*odd\.ckpt"):
            adapted(weights=str(path))
        wider = CausalTransformer(**{**SHAPE, "width": 32})
        path = tmp_path / "wider.safetensors"
        safetensors.save_model(wider, path)
        with pytest.raises(ConfigurationError, match=r"wider\.safetensors.*size mismatch"):
            adapted(weights=str(path))


@pytest.mark.parametrize(
    "kind", [lambda: CausalTransformer(**SHAPE), lambda: LoRA(nn.Linear(2, 2), [])]
)
def test_missing_libraries_are_named(kind, monkeypatch):
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(text, "import_module", missing)
    with pytest.raises(ConfigurationError, match=r"pip install 'pflight\[peft\]'"):
        kind()
    assert import_module is not missing


def test_adapters_train_stacked_as_one_by_one():
    one, stacked = (
        run(adapted(), data(), FedAvg(), 2, local_epochs=2, engine=engine)
        for engine in ("sequential", "vectorized")
    )
    assert not stacked.clients.attached_engine.obstacle
    before = adapted().state_dict()
    trained = {name for name in before if "lora_" in name}
    after, other = one.server[0].state_dict(), stacked.server[0].state_dict()
    for name, value in after.items():
        assert torch.allclose(value, other[name], atol=1e-6)
        assert torch.equal(value, before[name]) == (name not in trained)
    assert one.history[0].bytes_up == 3 * 4 * sum(before[name].numel() for name in trained)

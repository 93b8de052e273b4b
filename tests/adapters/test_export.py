"""What is exported is loaded by peft and safetensors, and has the client's outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("peft")

import peft
import safetensors.torch

from pflight import Federation
from pflight.__main__ import main
from pflight.adapters.export import write_model
from pflight.callbacks import FedAvg, Local
from pflight.errors import ConfigurationError
from pflight.models import Classifier
from tests.runs import CLASSES, FEATURES, linear_client, run, small_data

FORMS: dict[str, Any] = {
    "plain": {},
    "patterns": {"rank_pattern": {"hidden": 3}, "alpha_pattern": {"hidden": 5}},
    "rslora": {"use_rslora": True},
    "head": {"target_modules": ["hidden"], "modules_to_save": ["head"]},
    "bias": {"bias": "lora_only"},
}


class Network(nn.Sequential):
    """Two linear layers with names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.add_module("hidden", nn.Linear(FEATURES, 6))
        self.add_module("act", nn.ReLU())
        self.add_module("head", nn.Linear(6, CLASSES))


class Beside(nn.Module):
    """Has a head outside of the PeftModel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = adapted(target_modules=["hidden"])
        self.top = nn.Linear(CLASSES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(self.body(x))


def adapted(**options: Any) -> Any:
    config = {"r": 2, "lora_alpha": 3, "target_modules": ["hidden", "head"], **options}
    return peft.get_peft_model(Network(), peft.LoraConfig(**config))


def trained(network: nn.Module) -> Federation:
    return run(
        Classifier(network, num_classes=CLASSES), small_data(), Local(), 2, engine="sequential"
    )


@pytest.mark.parametrize("form", FORMS)
def test_peft_loads_a_clients_adapter(form: str, tmp_path: Path) -> None:
    federation = trained(adapted(**FORMS[form]))
    module = federation.client_module(1)
    write_model(module, tmp_path / "out", federation.layout.moving)
    assert not (tmp_path / "out/extra.safetensors").exists()
    loaded = peft.PeftModel.from_pretrained(Network(), tmp_path / "out").eval()
    x = torch.randn(5, FEATURES)
    assert torch.equal(loaded(x), module.network(x))
    assert not torch.equal(loaded(x), federation.client_module(0).network(x))


def test_what_is_outside_of_the_adapters_has_a_file_of_its_own(tmp_path: Path) -> None:
    federation = trained(Beside())
    module = federation.client_module(1)
    written = write_model(module, tmp_path, federation.layout.moving)
    assert tmp_path / "extra.safetensors" in written
    extra = safetensors.torch.load_file(tmp_path / "extra.safetensors")
    assert sorted(extra) == ["network.top.bias", "network.top.weight"]
    assert torch.equal(extra["network.top.bias"], module.network.top.bias)


def test_two_adapted_parts_have_folders_of_their_own(tmp_path: Path) -> None:
    network = nn.Sequential(
        adapted(target_modules=["hidden"]), nn.Linear(CLASSES, FEATURES), adapted()
    )
    federation = trained(network)
    module = federation.client_module(0)
    write_model(module, tmp_path, federation.layout.moving)
    for place in (0, 2):
        folder = tmp_path / f"network.{place}"
        loaded = peft.PeftModel.from_pretrained(Network(), folder).eval()
        x = torch.randn(5, FEATURES)
        assert torch.equal(loaded(x), module.network[place](x))
    extra = safetensors.torch.load_file(tmp_path / "extra.safetensors")
    assert sorted(extra) == ["network.1.bias", "network.1.weight"]


def test_a_module_without_adapters_has_all_its_weights(tmp_path: Path) -> None:
    federation = run(linear_client(), small_data(), FedAvg(), 1, engine="sequential")
    module = federation.client_module(0)
    (path,) = write_model(module, tmp_path / "new", federation.layout.moving)
    found, expected = safetensors.torch.load_file(path), module.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_path_as_text_and_the_module_suffice(tmp_path: Path) -> None:
    module = trained(Beside()).client_module(0)
    written = write_model(module, f"{tmp_path}/out")
    assert {path.name for path in written} == {
        "adapter_config.json", "adapter_model.safetensors", "extra.safetensors"
    }  # fmt: skip


def test_a_folder_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("")
    with pytest.raises(ConfigurationError, match="exists already and is not empty"):
        write_model(nn.Linear(2, 2), tmp_path, [])


def test_a_changed_base_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="init_lora_weights='olora', which changes"):
        write_model(adapted(init_lora_weights="olora"), tmp_path / "out", [])


def network() -> nn.Module:
    """Return a network for the digits; the configuration below names it."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["1"]))  # type: ignore[no-any-return]


CONFIG = """
model:
  local_epochs: 1
  client:
    class_path: pflight.models.Classifier
    init_args: {network: {class_path: tests.adapters.test_export.network}}
trainer: {max_epochs: 1}
"""


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text(CONFIG)
    configs = "--config=configs/quickstart.yaml", "--config=own.yaml"
    main(["fit", *configs, "--trainer.default_root_dir=run"])
    main(["export", "run", "--client", "3", "--out", "three"])
    main(["export", "run", "--server", "1", "--out", "server"])
    main(["export", "run", "--out", "all"])
    assert len(list(Path("all").glob("client_*/adapter_model.safetensors"))) == 20
    one, again, server = (
        safetensors.torch.load_file(f"{folder}/adapter_model.safetensors")
        for folder in ("three", "all/client_3", "server")
    )
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert one.keys() == server.keys()
    assert "pflight: wrote three/adapter_config.json" in capsys.readouterr().out


def test_a_server_without_a_model_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text(CONFIG)
    configs = [f"--config={name}.yaml" for name in ("configs/quickstart", "own")]
    method = "--trainer.callbacks=pflight.callbacks.FedDPA"
    main(["fit", *configs, method, "--trainer.default_root_dir=run"])
    with pytest.raises(SystemExit):
        main(["export", "run", "--server", "--out", "server"])
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "error" in line)
    assert line.startswith("pflight: error: --server: the server's model lacks what FedDPA adds")
    assert not Path("server").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nowhere", "--out=x"], "nowhere is no folder of a run: it has no config.yaml"),
        (["nowhere", "--client=1", "--server", "--out=x"], "nowhere is no folder"),
    ],
)
def test_errors_are_one_line(
    args: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["export", *args])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err

"""Methods over adapters: by their names, in one comparison, with a tiny GPT-2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

from pflight.callbacks import FedAvg, Local, SharedPart
from pflight.errors import ConfigurationError
from pflight.models import LanguageModel
from pflight.modifiers import Frozen, Private
from pflight.runs.folder import RESULTS
from pflight.states.layers import Layers
from tests.made_plays import write_plays
from tests.models.test_text import adapted, data
from tests.pages import ROOT
from tests.runs import assert_same, run

from .small import comparison, finish

UNEVEN = ["rolora", "hetlora", "fedlease", "hilora"]  # rounds or clients differ in their bytes
METHODS = ["local", "fedit", "ffa_lora", "fedsa_lora", "feddpa", "fedalt", "fesem", "ifca", "ditto"]
METHODS += UNEVEN
P_A, P_B = 4 * 2 * 2 * 16, 4 * 2 * 2 * 48
"""Bytes of all factors A and B: float32, two layers, rank 2, from 16 numbers to 48."""


def text(folder: Path) -> str:
    """Return the shipped configuration with few small roles, and a tiny network."""
    config = yaml.safe_load((ROOT / "configs/comparison/adapters.yaml").read_text())
    options, client = config["data"]["init_args"], config["model"]["client"]["init_args"]
    options |= {"root": write_plays(folder, roles=2, length=20), "half": None, "length": 16}
    options |= {"min_characters": 200, "batch_size": 4}
    network = client["network"]["init_args"]
    network |= {"rank": 2, "targets": ["c_attn"], "weights": None}
    network["network"]["init_args"] |= {"width": 16, "heads": 2, "length": 16}
    config["trainer"]["max_epochs"] = 2
    return yaml.safe_dump(config)


@pytest.mark.short("two")
@pytest.mark.parametrize("names", [["ffa_lora", "feddpa"], METHODS], ids=["two", "all"])
def test_methods_run_by_their_names(names, tmp_path):
    made = finish(comparison(tmp_path, names, text=text(tmp_path)))
    found = [json.loads(Path(task.folder, RESULTS).read_text()) for task in made]
    assert len(found) == len(names)
    up = {"ffa_lora": P_B, "fedsa_lora": P_A, "local": 0}
    for name, one in zip(names, found, strict=True):
        assert name in UNEVEN or one["bytes_up"] == one["participations"] * up.get(name, P_A + P_B)
    assert len({json.dumps(one["fingerprints"]) for one in found}) == 1  # of data, weights, cohorts
    for one in found:
        assert one["metric"] == "perplexity"
        assert one["mode"] == "min"
        assert len(one["newcomers"]) == 2
        assert one["last"]["values"]["test/macro_perplexity"] > 0
        assert {"test/worst_decile_perplexity", "test/new/macro_perplexity"} <= {
            *one["last"]["values"]
        }
        assert not one["failed"]


def states(method: FedAvg | Local, client: LanguageModel | None = None) -> dict[str, Tensor]:
    """Return all clients' models after two rounds."""
    federation = run(client or adapted(), data(), method, 2, engine="sequential")
    models = enumerate(map(federation.client_state, range(3)))
    return {f"{i} {name}": value for i, state in models for name, value in state.items()}


def test_ffa_lora_is_fedit_of_a_module_whose_a_is_frozen():
    client = adapted()
    for name, parameter in client.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    ffa = states(FedAvg(modifiers=[Frozen("*lora_A*")]))
    assert_same(ffa, states(FedAvg(), client))
    start = adapted().state_dict()
    assert all(torch.equal(v, start[n[2:]]) for n, v in ffa.items() if "lora_A" in n)
    assert not any(torch.equal(v, start[n[2:]]) for n, v in ffa.items() if "lora_B" in n)


def test_fedsa_lora_shares_a_and_keeps_b():
    found = states(FedAvg("uniform", modifiers=[Private("*lora_B*")]))
    factors = [name[2:] for name in found if name.startswith("0 ") and "lora_" in name]
    for name in factors:
        own = [found[f"{i} {name}"] for i in range(3)]
        assert torch.equal(own[0], own[1]) == ("lora_A" in name)
    same = states(SharedPart(private=Layers("*lora_B*"), weighting="uniform"))
    assert_same(found, same)


def test_with_both_factors_private_nothing_would_travel():
    with pytest.raises(ConfigurationError, match=r"nothing is sent|no trained parameter travels"):
        states(FedAvg(modifiers=[Private("*lora_*")]))

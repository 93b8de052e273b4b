"""Modifiers in a deployment: nodes apply them, and small updates are small messages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import RecordDict

from pflight.callbacks import CFL, FedAvg, FedSGD, FeSEM, ServerCallback
from pflight.deploy.messages import packed
from pflight.deploy.node import STATE
from pflight.errors import ConfigurationError
from pflight.modifiers import Private, Proximal
from pflight.transforms import Clip, TopK
from tests.combinations import COMBINATIONS
from tests.deploy.in_process import Deployed
from tests.deploy.test_remote import assert_same_run
from tests.runs import batchnorm_client, run, small_data

CASES: dict[str, Callable[[], ServerCallback]] = COMBINATIONS | {
    "all": lambda: FedAvg(modifiers=[Private("norms"), Proximal(0.1), Clip(0.05), TopK(0.3)]),
    "FeSEM + top k": lambda: FeSEM(2, modifiers=[Private("head"), TopK(0.01)]),
    "FedSGD + top k": lambda: FedSGD(modifiers=[Clip(0.05), TopK(0.02)]),
    "CFL + private head": lambda: CFL(modifiers=[Private("head"), Clip(0.1)]),
}


@pytest.mark.short("FeSEM + top k", "CFL + private head", "all")
@pytest.mark.parametrize("name", CASES)
def test_deployed_is_simulated(name: str, tmp_path: Path) -> None:
    callback = CASES[name]
    data = small_data((5, 12, 7, 9), cohort_size=3)
    here = run(batchnorm_client(), data, callback(), 3, engine="sequential")
    deployed = Deployed(batchnorm_client, data, callback, tmp_path)
    there = deployed.server(3)
    assert_same_run(here, there)
    work = "gradients" if name.startswith("FedSGD") else "train"
    carried = sum(up for _, up in deployed.post.tensors[work])
    assert carried == sum(entry.bytes_up for entry in there.history)


def test_what_was_left_out_is_remembered_by_nodes(tmp_path: Path) -> None:
    """Also by one that starts again, and not of a round whose update was lost."""
    callback = partial(FedAvg, modifiers=[TopK(0.1)])
    data = small_data((5, 12, 7, 9))
    here = run(batchnorm_client(), data, callback(), 4, engine="sequential")
    deployed = Deployed(batchnorm_client, data, callback, tmp_path)
    there = deployed.server(2)
    there.trainer.save_checkpoint(tmp_path / "half.ckpt")
    deployed.post.nodes[1] = deployed.node(1)
    assert_same_run(here, deployed.server(4, ckpt_path=tmp_path / "half.ckpt"))


def test_a_node_without_the_modifier_is_refused(tmp_path: Path) -> None:
    deployed = Deployed(batchnorm_client, small_data(), FedAvg, tmp_path)
    deployed.callback = partial(FedAvg, modifiers=[Private("norms")])
    with pytest.raises(ConfigurationError, match=r"has other options than here: algorithm.modif"):
        deployed.server(1)


LIES: dict[str, Any] = {
    "bits": lambda parts: {
        **parts,
        "transformed.bits": torch.full_like(parts["transformed.bits"], 255),
    },
    "values": lambda parts: {**parts, "transformed.values": parts["transformed.values"][1:]},
    "infinite": lambda parts: {**parts, "transformed.values": parts["transformed.values"] / 0},
    "dense": lambda parts: {"network.0.weight": torch.zeros(6, 4)},
}


@pytest.mark.short("dense")
@pytest.mark.filterwarnings("ignore:.*failed")
@pytest.mark.parametrize("lie", LIES)
def test_a_message_that_nothing_was_packed_into_is_left_out(lie: str, tmp_path: Path) -> None:
    callback = partial(FedAvg, modifiers=[TopK(0.3)])
    deployed = Deployed(batchnorm_client, small_data(), callback, tmp_path)
    state = {
        name: torch.zeros_like(value) for name, value in batchnorm_client().state_dict().items()
    }
    pipeline = run(batchnorm_client(), small_data(), callback(), 1).clients.pipeline(state)
    like = pipeline.packed_like(state)

    def on_answer(asked: Any, answer: RecordDict) -> RecordDict:
        if asked.client != 2 or asked.work != "train":
            return answer
        return packed({STATE: LIES[lie](like)}, {"answered": 1})

    deployed.post.on_answer = on_answer
    federation = deployed.server(2)
    assert [entry.failed for entry in federation.history] == [[2], [2]]

"""Options of a server callback that comes after another one, in a Trainer or a checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pflight import Federation
from pflight.callbacks import (
    FedAvg,
    FedSGD,
    FeSEM,
    PerFedAvg,
    PFedLA,
    Reptile,
    ServerCallback,
    SharedPart,
)
from pflight.callbacks.methods.matching import BBPMAP
from pflight.errors import ConfigurationError
from pflight.models import Classifier, ProximalClient
from pflight.states.layers import Layers
from tests.runs import assert_same, linear_client, quiet_trainer, run, shared, small_data


class WithMore(FedAvg):
    """A user's callback, which hands most of its options on."""

    def __init__(self, *, tables: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.tables = tables


CENTERS = [linear_client().state_dict()] * 2
DIFFERENT: dict[str, tuple[ServerCallback, ServerCallback, str]] = {
    "weighting": (FedAvg(), FedAvg("uniform"), "weighting='samples'.*weighting='uniform'"),
    "buffers": (FedAvg(), FedAvg(buffers="local"), "buffers='shared'.*buffers='local'"),
    "lr": (Reptile(lr=0.6), Reptile(lr=0.3), r"Reptile\(lr=0.6\).*Reptile\(lr=0.3\)"),
    "several": (
        PFedLA(),
        PFedLA(retain=1, hidden_dim=3),
        r"PFedLA\(retain=0, hidden_dim=100\).*PFedLA\(retain=1, hidden_dim=3\)",
    ),
    "clusters": (FeSEM(2), FeSEM(3), "num_clusters=2.*num_clusters=3"),
    "matching": (FeSEM(2), FeSEM(2, matching=BBPMAP()), "matching=None.*matching=BBPMAP"),
    "centers": (FeSEM(2), FeSEM(2, centers=CENTERS), "centers=None.*centers="),
    "batches": (FedSGD(), FedSGD(batches=2), "batches=None.*batches=2"),
    "layers": (
        SharedPart(shared=Layers(last=1)),
        SharedPart(private=Layers(types=torch.nn.BatchNorm2d)),
        r"private=None, shared=Layers\(.*private=Layers\(",
    ),
    "handed on": (
        WithMore(weighting="uniform"),
        WithMore(weighting="samples", tables={"a": torch.ones(2)}),
        r"tables=None, weighting='uniform'.*tables=\{a: tensor\(2,\)\}, weighting='samples'",
    ),
}


@pytest.mark.short("weighting", "several", "clusters", "centers", "layers", "handed on")
@pytest.mark.parametrize("case", DIFFERENT)
def test_another_trainers_options_are_not_discarded_in_silence(case: str) -> None:
    first, second, message = DIFFERENT[case]
    first, second = copy.deepcopy(first), copy.deepcopy(second)
    federation = run(linear_client(), small_data(), first)
    before = shared(federation)
    with pytest.raises(ConfigurationError, match=f"this federation was trained with .*{message}"):
        quiet_trainer(2, second).fit(federation, datamodule=small_data())
    assert federation.callback is first
    assert (shared(federation) == before).all()


@pytest.mark.short("<lambda>0", "<lambda>3")
@pytest.mark.parametrize(
    "make",
    [
        lambda: FedAvg("uniform"),
        lambda: FeSEM(2, matching="bbp_map", candidates=[2, 3]),
        lambda: FeSEM(2, centers=[linear_client().state_dict()] * 2),
        lambda: SharedPart(private=Layers(types=[torch.nn.BatchNorm2d])),
        lambda: WithMore(tables={"a": torch.ones(2)}),
    ],
)
def test_equal_options_go_on(make: Any) -> None:
    federation = Federation(linear_client())
    for rounds in (2, 4):
        quiet_trainer(rounds, make()).fit(federation, datamodule=small_data())
    again = Federation(linear_client())
    callback = make()
    for rounds in (2, 4):
        quiet_trainer(rounds, callback).fit(again, datamodule=small_data())
    for left, right in zip(federation.server_states(), again.server_states(), strict=True):
        assert_same(left, right)


def test_what_a_chosen_number_of_clusters_became_is_no_other_option() -> None:
    federation = Federation(linear_client(ProximalClient))
    for rounds in (2, 3):
        callback = FeSEM("auto", candidates=(1, 2), criterion="distance")
        quiet_trainer(rounds, callback).fit(federation, datamodule=small_data())
    assert callback.num_clusters in (1, 2)


class TestCheckpoint:
    @pytest.fixture
    def said(self, caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
        caplog.set_level("WARNING", "lightning.pytorch.pflight")
        return lambda: [
            line for line in caplog.messages if line.startswith("the checkpoint was made")
        ]

    def save(self, callback: ServerCallback, path: Path, kind: Any = Classifier) -> Path:
        federation = run(linear_client(kind), small_data(), callback)
        federation.trainer.save_checkpoint(path / "run.ckpt")
        return path / "run.ckpt"

    def test_other_options_are_named(self, tmp_path: Path, said: Callable[[], list[str]]) -> None:
        path = self.save(PFedLA(retain=1), tmp_path)
        Federation.load_from_checkpoint(path, client=linear_client(), callback=PFedLA())
        (line,) = said()
        assert "made with PFedLA(retain=1); the run goes on with PFedLA(retain=0)" in line

    def test_a_run_that_goes_on_with_others_says_so(
        self, tmp_path: Path, said: Callable[[], list[str]]
    ) -> None:
        path = self.save(Reptile(lr=0.6), tmp_path)
        run(linear_client(), small_data(), Reptile(lr=0.3), 2, ckpt_path=path)
        (line,) = said()
        assert "was made with Reptile(lr=0.6); the run goes on with Reptile(lr=0.3)" in line

    def test_steps_of_adaptation_may_be_others_in_a_test(
        self, tmp_path: Path, said: Callable[[], list[str]]
    ) -> None:
        path = self.save(PerFedAvg(), tmp_path)
        federation, trainer = Federation(linear_client()), quiet_trainer(1, PerFedAvg(3))
        trainer.test(federation, datamodule=small_data(), ckpt_path=path, verbose=False)
        assert "goes on with PerFedAvg(steps=3)" in said()[0]

    def test_equal_options_are_not_worth_a_word(
        self, tmp_path: Path, said: Callable[[], list[str]]
    ) -> None:
        path = self.save(FeSEM(2, matching="bbp_map", candidates=(2, 3)), tmp_path)
        callback = FeSEM(num_clusters=2, matching="bbp_map", candidates=[2, 3])
        Federation.load_from_checkpoint(path, client=linear_client(), callback=callback)
        assert not said()

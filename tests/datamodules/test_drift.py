"""Data that depend on the round: every part of a run sees those of its round."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import TensorDataset

from pflight import Federation
from pflight.callbacks import CFL, Centralized, FedAvg, FedEC, FedFomo, FedRoD, FeSEM, Local
from pflight.data.loaders import Split
from pflight.datamodules import (
    ClusteredSynthetic,
    DatasetClients,
    FederatedDataModule,
    GroupMoves,
    KnownClusters,
)
from pflight.errors import ConfigurationError
from tests.deploy.in_process import Deployed
from tests.runs import (
    CLASSES,
    ENGINES,
    FEATURES,
    linear_client,
    quiet_trainer,
    run,
    samples,
    small_data,
    watched,
)
from tests.test_checkpoint import assert_equal_runs

pytestmark = pytest.mark.filterwarnings(
    "ignore:Be aware that when using `ckpt_path`, callbacks used to create:UserWarning"
)
MOVES = {1: 0.5, 3: 0.5}


def mirrored(x: Tensor, y: Tensor, cluster: int) -> tuple[Tensor, Tensor]:
    return x * (-1) ** cluster, y


def drifting(difference: Any = "labels", moves: Any = MOVES, **options: Any) -> KnownClusters:
    return KnownClusters(small_data(), 2, difference, moves=moves, batch_size=4, **options)


class Numbered(FederatedDataModule):
    """Data whose features are the round's number."""

    num_clients = 3

    def __init__(self, **options: Any) -> None:
        super().__init__(num_classes=CLASSES, **options)
        self.round = -1

    def at_round(self, round: int) -> None:
        self.round = round

    def samples(self, client: int, split: Split) -> tuple[Tensor, Tensor]:
        return torch.full((4, FEATURES), float(self.round)), torch.arange(4) % CLASSES


def test_groups_move_by_seed_to_other_groups() -> None:
    groups = torch.arange(12) % 3
    moves = GroupMoves(groups, {2: 0.25, 5: 1.0}, seed=1)
    stays = [int((moves.at(round) == groups).sum()) for round in range(5)]
    assert stays == [12, 12, 9, 9, 9]
    assert not (moves.at(5) == moves.at(4)).any()
    assert set(moves.at(5).tolist()) == {0, 1, 2}
    again, other = (GroupMoves(groups, {2: 0.25}, seed=seed).at(2) for seed in (1, 2))
    assert torch.equal(moves.at(2), again)
    assert not torch.equal(again, other)


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        ({0: 0.5}, "rounds are whole numbers from 1, got 0"),
        ({1: 0.0}, r"clients of round 1 must be in \(0, 1\], got 0"),
        ({1: 0.01}, "a share of 0.01 of 6 clients is none in round 1"),
        ({"soon": 0.5}, "rounds are whole numbers from 1, got 'soon'"),
        ({1: "all"}, "the share of clients of round 1 must be in"),
    ],
)
def test_bad_moves(moves: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        drifting(moves=moves).setup()


def test_one_group_can_not_move() -> None:
    data = KnownClusters(small_data(), 1, moves={1: 0.5})
    with pytest.raises(ConfigurationError, match="moves need two groups of clients or more"):
        data.setup()


@pytest.mark.parametrize("difference", ["labels", "rotation", "features", mirrored])
def test_a_moved_client_has_its_samples_changed_as_in_its_new_cluster(difference: Any) -> None:
    data, still = drifting(difference), drifting(difference, moves=None)
    data.setup()
    still.setup()
    for round in (4, 0, 1):
        data.at_round(round)
        moved = data.clusters != still.clusters
        assert moved.any() == (round > 0)
        for client in range(6):
            still._memberships = GroupMoves(data.clusters, {})  # as if it had always been there
            for split in ("train", "val", "test"):
                own, usual = data.samples(client, split), still.samples(client, split)
                assert all(map(torch.equal, own, usual))
                assert torch.equal(data.labels(client, split), own[1])
        vars(still).pop("_memberships")


def test_any_data_see_their_round() -> None:
    """In training, validation and a test, also after others have asked for another round."""
    trained, judged = set(), []

    class Judged(L.Callback):
        def on_validation_batch_end(self, *_: Any) -> None:
            judged.append((len(federation.history) - 1, data.round))

    def look(_: Any) -> None:
        trained.add((len(federation.history), data.round))

    data, client = Numbered(), watched(linear_client(), look)
    federation, trainer = Federation(client), quiet_trainer(3, Judged())
    trainer.fit(federation, datamodule=data)
    assert trained == {*judged} == {(0, 0), (1, 1), (2, 2)}
    data.at_round(0)
    trainer.test(federation, datamodule=data, verbose=False)
    assert data.round == 2


@pytest.mark.parametrize("callback", [FedFomo, Centralized, Local])
def test_wrapped_data_drift(callback: Callable[[], Any]) -> None:
    """A client that moves from round 1 trains as one that has always been there."""
    moved = run(linear_client(), drifting(moves={1: 1.0}), callback(), 3)
    still = run(linear_client(), drifting(moves=None), callback(), 3)
    (first, _, last), (same, _, other) = moved.history, still.history
    assert first.metrics == same.metrics
    assert last.metrics != other.metrics


def test_counted_classes_are_those_of_the_round() -> None:
    federation = run(linear_client(), drifting(), FedRoD(), 2)
    data, setup = federation.clients.attached_data, federation.clients.attached_engine.setup
    assert torch.equal(setup.class_counts.long(), data.class_counts("train"))
    federation.clients.at_round(0)
    before = data.class_counts("train")
    assert torch.equal(setup.class_counts.long(), before)
    data.at_round(1)
    assert not torch.equal(data.class_counts("train"), before)


def test_numbers_of_samples_must_stay() -> None:
    class Growing(Numbered):
        def num_samples(self, split: Split = "train") -> Tensor:
            return torch.tensor([4, 4 + max(self.round, 0), 4])

    message = r"Growing.at_round\(1\) changes the number of client 1's train samples, .* 4 became 5"
    with pytest.raises(ConfigurationError, match=message):
        run(linear_client(), Growing(), FedAvg(), 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_datasets_that_are_replaced_are_read(workers: int) -> None:
    class Replaced(DatasetClients):
        def at_round(self, round: int) -> None:
            parts = [TensorDataset(*samples(5, 10 * round + i)) for i in range(3)]
            self.datasets = dict.fromkeys(("train", "val", "test"), parts)

    parts = [TensorDataset(*samples(5, i)) for i in range(3)]
    arguments = {"val": parts, "test": parts, "num_classes": CLASSES}
    read = Replaced(
        parts, collate_fn=torch.utils.data.default_collate, num_workers=workers, **arguments
    )
    held = Replaced(parts, **arguments)
    one, other = (run(linear_client(), data, FedAvg(), 3) for data in (read, held))
    for left, right in zip(one.history, other.history, strict=True):
        assert left.metrics["train/loss"] == pytest.approx(right.metrics["train/loss"], rel=1e-4)


@ENGINES
@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_resumed_run_has_the_data_of_its_round(engine: str, kept: int, tmp_path: Path) -> None:
    options = {"local_epochs": 2, "finetune_epochs": 1, "engine": engine}
    saver = ModelCheckpoint(
        tmp_path, "{epoch}", save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=False
    )
    whole = run(linear_client(), drifting(cohort_size=4), FeSEM(2), 5, saver, **options)
    path = tmp_path / f"epoch={kept}.ckpt"
    resumed = run(linear_client(), drifting(cohort_size=4), FeSEM(2), 5, ckpt_path=path, **options)
    assert_equal_runs(resumed, whole)
    with pytest.raises(ConfigurationError, match="made with other data"):
        run(linear_client(), drifting(moves={1: 0.5}), FeSEM(2), 5, ckpt_path=path, **options)


def test_engines_agree() -> None:
    one, other = (
        run(linear_client(), drifting(mirrored), FeSEM(2), 4, engine=engine, finetune_epochs=1)
        for engine in ("sequential", "vectorized")
    )
    for left, right in zip(one.history, other.history, strict=True):
        assert left.metrics == pytest.approx(right.metrics, rel=1e-4, nan_ok=True)


@pytest.mark.parametrize(
    "callback",
    [
        lambda: FeSEM(2),
        lambda: FeSEM(2, reassign=1.1),
        lambda: CFL(1e3, 0.0, min_size=1, warmup=0, reassign=True),
        lambda: FedEC(forget=True),
    ],
    ids=["FeSEM", "FeSEM-reassign", "CFL-reassign", "FedEC-forget"],
)
def test_nodes_have_the_data_of_the_round(callback: Callable[[], Any], tmp_path: Path) -> None:
    """Each node of a deployment holds data that drift: it gives the simulated run."""
    options = {"local_epochs": 2}
    simulated = run(linear_client(), drifting(), callback(), 4, **options)
    deployed = Deployed(linear_client, drifting(), callback, tmp_path, **options).server(4)
    torch.testing.assert_close(deployed.server_states(), simulated.server_states())
    for here, there in zip(deployed.history, simulated.history, strict=True):
        assert (here.bytes_down, here.bytes_up) == (there.bytes_down, there.bytes_up)


def test_moves_on_generated_data() -> None:
    data = ClusteredSynthetic(4, num_clients=8, moves={1: 0.25})
    data.setup()
    before = data.clusters
    data.at_round(1)
    assert int((data.clusters != before).sum()) == 2

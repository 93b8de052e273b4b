"""How soon methods follow clients that move: what is measured, and what methods do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.testing import assert_close

from pflight import Federation
from pflight.callbacks import CFL, IFCA, DriftPlot, FedAvg, FedEC, FeSEM, Local
from pflight.callbacks.monitors.pictures.drift import steps_of
from pflight.datamodules import ClusteredSynthetic, KnownClusters
from pflight.errors import ConfigurationError
from tests.event_files import read_events
from tests.runs import linear_client, network_client, run, small_data

pytestmark = pytest.mark.filterwarnings(
    "ignore:Be aware that when using `ckpt_path`, callbacks used to create:UserWarning"
)
GROUPS = 3


class Assigning(FedAvg):
    """FedAvg that says in which cluster clients are: in the groups of `late` rounds before."""

    late = 2

    def round(self, cohort: Tensor) -> None:
        super().round(cohort)
        data = self.clients.attached_data
        now = self.clients.current.entry.index
        data.at_round(max(now - self.late, 0))
        self.assignments = data.clusters.clone()
        data.at_round(now)


def moving(moves: Any = None, **options: Any) -> KnownClusters:
    data = small_data([8] * 6)
    return KnownClusters(data, 2, moves=moves or {2: 0.34}, batch_size=4, **options)


def shifted(x: Tensor, y: Tensor, group: int) -> tuple[Tensor, Tensor]:
    return x.roll(group, dims=1) * (-1) ** group, y


def generated(difference: Any, seed: int, **options: Any) -> ClusteredSynthetic:
    return ClusteredSynthetic(
        GROUPS,
        difference,
        num_clients=12,
        samples_per_client=60,
        num_features=8,
        spread=0.1,
        moves={8: 0.25},
        batch_size=10,
        seed=seed,
        **options,
    )


def followed(callback: Any, data: ClusteredSynthetic, rounds: int = 11, **options: Any) -> Any:
    """Train, and return what was measured by participations."""
    network = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
    client = network_client(network)
    client.num_classes = 10
    plot = DriftPlot()
    run(client, data, callback, rounds, plot, local_epochs=5, **options)
    return {step.participations: step for step in steps_of(plot.record)}


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pflight.callbacks.monitors.pictures.picture._DPI", 60)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("difference", ["labels", "rotation", shifted])
@pytest.mark.parametrize(
    "method", [lambda: FeSEM(GROUPS, reassign=2.0), lambda: IFCA(GROUPS)], ids=["FeSEM", "IFCA"]
)
def test_clients_are_reassigned_within_two_participations(
    method: Any, difference: Any, seed: int
) -> None:
    steps = followed(method(), generated(difference, seed))
    assert steps[2].clients == 3
    assert steps[2].reassigned == 1
    assert steps[2].now > steps[2].before - 0.1


def test_without_the_remedy_fesem_and_cfl_keep_clients_where_they_are() -> None:
    def cfl(**options: Any) -> CFL:
        return CFL(1e3, 0.0, warmup=2, min_size=4, **options)

    for stays, follows in ((FeSEM(GROUPS), None), (cfl(), cfl(reassign=True))):
        found = followed(stays, generated("labels", 0))
        assert found[2].reassigned == 0
        assert found[2].now < found[2].before - 0.3
        if follows is not None:
            found = followed(follows, generated("labels", 0))
            assert found[2].reassigned == 1


def test_a_wrong_teacher_is_forgotten() -> None:
    plain, forgetting = (
        followed(FedEC(alpha=3.0, forget=forget), generated("labels", 0), 10)
        for forget in (False, True)
    )
    assert forgetting[1].now > plain[1].now + 0.1


def test_whoever_has_not_moved_keeps_the_teacher() -> None:
    """Where the historical model fits its client better, forgetting changes no bit."""
    data = generated("labels", 0)
    data.moves = {}
    states = []
    for forget in (False, True):
        federation = run(linear_client_of(data), data, FedEC(forget=forget), 3, local_epochs=5)
        states.append(federation.server_states())
    assert_close(*states, rtol=0, atol=0)


def linear_client_of(data: ClusteredSynthetic) -> Any:
    client = network_client(torch.nn.Linear(8, 10))
    client.num_classes = 10
    return client


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_participations_are_counted_since_the_move(participation: float, tmp_path: Path) -> None:
    data, plot = moving(participation=participation), DriftPlot()
    federation = run(linear_client(), data, Assigning(), 9, plot)
    first, moved = data._memberships.at(0), data._memberships.at(2) != data._memberships.at(0)
    assert len(first) == 6
    assert int(moved.sum()) == 2
    judged = [entry.metrics["drift/moved"] for entry in federation.history]
    assert judged == [0, 0] + [2] * 7
    counts: dict[int, int] = {}
    for client in moved.nonzero().flatten().tolist():
        taken, seen = 0, set()
        for entry in federation.history[2:]:
            taken += client in entry.clients
            seen.add(taken)
        for count in seen:
            counts[count] = counts.get(count, 0) + 1
    assert {step.participations: step.clients for step in steps_of(plot.record)} == counts
    if participation == 1:
        # the clusters follow in round 4, which is the third participation
        shares = {step.participations: step.reassigned for step in steps_of(plot.record)}
        assert shares == {1: 0, 2: 0, **dict.fromkeys(range(3, 8), 1)}
        waiting = [entry.metrics["drift/waiting"] for entry in federation.history]
        assert waiting == [0, 0, 2, 2, 0, 0, 0, 0, 0]
        assert federation.history[-1].metrics["drift/participations"] == 3
    table = (Path.cwd() / "drift.csv").read_text().splitlines()
    assert table[0] == "participations,clients,before,now,reassigned"
    assert len(table) == 1 + len(counts)
    assert [*Path.cwd().glob("pictures/drift-0008.png")]


def test_accuracy_is_compared_with_that_before_the_move() -> None:
    accuracies = []

    class Noting(FedAvg):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            accuracies.append(pl_module.client_metrics("val")["acc"].double())

    data, plot = moving({2: 0.5, 4: 0.5}), DriftPlot(most=1)
    federation = run(linear_client(), data, Noting(), 5, plot)
    by_round = {}
    for round in (2, 4):
        moved = data._memberships.at(round) != data._memberships.at(round - 1)
        by_round[round] = (accuracies[round - 1][moved], accuracies[round][moved])
        lost = (by_round[round][0] - by_round[round][1]).mean()
        assert federation.history[round].metrics["drift/lost_acc"] == pytest.approx(float(lost))
    (step,) = steps_of(plot.record)
    before, now = (torch.cat(parts).mean() for parts in zip(*by_round.values(), strict=True))
    assert (step.before, step.now) == pytest.approx((float(before), float(now)))
    assert step.clients == 6
    assert step.reassigned != step.reassigned


def test_a_resumed_run_measures_the_same(tmp_path: Path) -> None:
    def fit(folder: Path, *more: Any, **options: Any) -> tuple[Federation, DriftPlot]:
        plot, data = DriftPlot(), moving({2: 0.34, 5: 0.5}, participation=0.67)
        logger = TensorBoardLogger(folder, name=None, version="")
        how = {"trainer": {"default_root_dir": folder, "logger": logger}, **options}
        callback = FeSEM(2, reassign=1.5)
        return run(linear_client(), data, callback, 8, plot, *more, **how), plot

    saved = tmp_path / "saved"
    saver = ModelCheckpoint(saved, "{epoch}", save_top_k=-1, save_on_train_epoch_end=False)
    one, whole = fit(tmp_path / "one", saver)
    for epoch in (1, 2, 5):
        other, resumed = fit(tmp_path / f"{epoch}", ckpt_path=saved / f"epoch={epoch}.ckpt")
        assert torch.equal(resumed.record, whole.record)
        for left, right in zip(other.history, one.history, strict=True):
            assert left.metrics == pytest.approx(right.metrics, nan_ok=True, rel=0, abs=0)
            assert (left.bytes_down, left.bytes_up) == (right.bytes_down, right.bytes_up)
    events = read_events(tmp_path / "one")
    assert events.scalars["drift/moved"] == events.scalars["drift/waiting"] == [*range(8)]
    assert events.images["pictures/drift"] == [7]


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (lambda: small_data(), {}, "DriftPlot needs data that drift, as KnownClusters"),
        (lambda: moving(), {"metric": "auroc"}, "no metric 'auroc'; clients have acc, f1, loss"),
    ],
)
def test_what_can_not_be_measured(data: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run(linear_client(), data(), FedAvg(), 1, DriftPlot(**options))


def test_data_that_know_no_groups() -> None:
    class Unknown(KnownClusters):
        clusters = None

        def fingerprint(self) -> Tensor:
            return torch.zeros(6, dtype=torch.long)

        def samples(self, client: int, split: Any) -> Any:
            return self.data.samples(client, split)

        def labels(self, client: int, split: Any) -> Any:
            return self.data.labels(client, split)

    data = Unknown(small_data(), 2, moves={1: 0.5})
    with pytest.raises(ConfigurationError, match="DriftPlot needs the clients' groups: Unknown"):
        run(linear_client(), data, Local(), 1, DriftPlot())

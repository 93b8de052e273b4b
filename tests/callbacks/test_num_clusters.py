import random
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from sklearn.metrics import adjusted_rand_score
from torch import Tensor

from pflight import Federation
from pflight.callbacks import FedAvg, FeSEM
from pflight.callbacks.methods.clustering import proposed_clusters
from pflight.callbacks.methods.fesem import select_num_clusters
from pflight.callbacks.methods.num_clusters import (
    ClusterSelection,
    SampledClients,
)
from pflight.data.cohort import sample_clients
from pflight.datamodules import ClusteredSynthetic, TensorClients
from pflight.engines import ClientUpdates
from pflight.errors import ConfigurationError
from pflight.models import Classifier, LogisticRegression, ProximalClient
from tests.event_files import read_events
from tests.runs import (
    ENGINES,
    ByHand,
    assert_same,
    linear_client,
    quiet_trainer,
    run,
    sgd,
    small_data,
    watched,
)

CPU = {"accelerator": "cpu"}


def groups(clusters: int = 3, **options: object) -> ClusteredSynthetic:
    """Return clients of known groups that name the classes differently."""
    options = {"num_clients": 9, "num_classes": 5, "samples_per_client": 40, **options}
    options = {"batch_size": 10, "seed": 1, **options}
    return ClusteredSynthetic(num_clusters=clusters, **options)


def classifier() -> Classifier:
    torch.manual_seed(0)
    return Classifier(LogisticRegression(4, 5), num_classes=5, optimizer=sgd(0.1))


class TestChoice:
    def test_the_highest_accuracy_and_the_smaller_of_equals(self) -> None:
        accuracy = {2: 0.5, 3: 0.8, 4: 0.8, 5: 0.7}
        distance = {2: 9.0, 3: 8.0, 4: 1.0, 5: 0.9}
        assert ClusterSelection("accuracy", accuracy, distance).num_clusters == 3

    def test_the_largest_relative_drop_and_the_smaller_of_equals(self) -> None:
        accuracy = dict.fromkeys(range(1, 6), 0.5)
        distance = {1: 100.0, 2: 80.0, 3: 40.0, 4: 20.0, 5: 19.0}  # by 20, 50, 50, 5 %
        assert ClusterSelection("distance", accuracy, distance).num_clusters == 3

    def test_no_distance_is_left_to_fall(self) -> None:
        accuracy = dict.fromkeys(range(1, 4), 0.5)
        assert ClusterSelection("distance", accuracy, {1: 4.0, 2: 0.0, 3: 0.0}).num_clusters == 2

    def test_one_candidate(self) -> None:
        assert ClusterSelection("distance", {1: 0.5}, {1: 3.0}).num_clusters == 1

    def test_the_table(self) -> None:
        table = ClusterSelection("accuracy", {2: 0.5, 3: 0.75}, {2: 9.0, 3: 8.0}).table
        assert table.splitlines()[2:] == ["| 2 | 0.5000 | 9 |", "| 3 (chosen) | 0.7500 | 8 |"]


def held_out(
    losses: dict[int, list[float]], accuracy: dict[int, float] | None = None
) -> ClusterSelection:
    accuracy = accuracy or dict.fromkeys(losses, float("nan"))
    return ClusterSelection("held_out", accuracy, dict.fromkeys(losses, 1.0), losses)


class TestWhatPays:
    ONE = (2.0, 2.2, 1.9, 2.1, 2.3)
    LESS = (1.0, 1.1, 1.2, 0.9, 1.2)

    def test_lower_losses_of_all_clients(self) -> None:
        found = held_out({1: [*self.ONE], 2: [*self.LESS]}, {1: 0.5, 2: 0.5})
        assert found.pays(2)
        assert found.num_clusters == 2

    def test_the_p_value_is_that_of_a_paired_t_test(self) -> None:
        differences = np.array(self.ONE) - np.array(self.LESS)
        t = differences.mean() / (differences.std(ddof=1) / np.sqrt(5))
        expected = scipy.stats.t.sf(t, df=4)
        assert held_out({1: [*self.ONE], 2: [*self.LESS]}).p_value(2) == pytest.approx(expected)

    def test_a_mean_that_one_client_lowers_does_not_pay(self) -> None:
        found = held_out({1: [9.0, 1.0, 1.0, 1.0], 2: [1.0, 1.1, 1.0, 1.1]})
        assert found.mean_loss(2) < found.mean_loss(1)
        assert found.num_clusters == 1

    def test_a_lower_accuracy_does_not_pay(self) -> None:
        losses = {1: [*self.ONE], 2: [*self.LESS]}
        assert held_out(losses, {1: 0.51, 2: 0.5}).num_clusters == 1

    def test_more_clusters_have_to_pay_compared_to_fewer(self) -> None:
        lower = [loss - 0.5 for loss in self.LESS]
        about = [1.0, 1.1, 1.2, 0.9, 0.2]  # a lower mean, by one client
        for losses, expected in ((lower, 4), (about, 2), ([*self.LESS], 2)):
            found = held_out({1: [*self.ONE], 2: [*self.LESS], 4: losses})
            assert found.num_clusters == expected
        losses = {1: [*self.ONE], 2: [*self.LESS], 4: lower}
        assert held_out(losses, {1: 0.5, 2: 0.6, 4: 0.4}).num_clusters == 1

    def test_without_one_model_the_fewest_that_pay_are_taken(self) -> None:
        assert held_out({2: [*self.LESS], 3: [*self.ONE]}).num_clusters == 2
        assert held_out({2: [*self.ONE], 3: [*self.LESS]}).num_clusters == 3

    def test_clients_without_losses_are_left_out(self) -> None:
        nan = float("nan")
        found = held_out({1: [*self.ONE, nan, 0.0], 2: [*self.LESS, 9.0, nan]})
        assert found.p_value(2) == held_out({1: [*self.ONE], 2: [*self.LESS]}).p_value(2)
        assert held_out({1: [nan, 3.0], 2: [nan, 1.0]}).num_clusters == 1
        assert held_out({1: [nan, nan], 2: [nan, nan]}).num_clusters == 1

    def test_equal_losses_do_not_pay(self) -> None:
        assert held_out({1: [2.0, 2.0, 2.0], 2: [2.0, 2.0, 2.0]}).num_clusters == 1

    def test_one_model_alone(self) -> None:
        assert held_out({1: [*self.ONE]}).num_clusters == 1

    def test_the_table(self) -> None:
        table = held_out({1: [*self.ONE], 2: [*self.LESS]}, {1: 0.5, 2: 0.75}).table
        lines = table.splitlines()
        assert lines[0] == "| num_clusters | val/macro_acc | distance | loss | p |"
        assert lines[2] == "| 1 | 0.5000 | 1 | 2.1000 |  |"
        assert lines[3].startswith("| 2 (chosen) | 0.7500 | 1 | 1.0800 | 0.000")


class TestProposals:
    @staticmethod
    def blobs(sizes: list[int], seed: int = 0, dimension: int = 20) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(seed)
        centers = 3 * torch.randn(len(sizes), dimension, generator=random)
        truth = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        truth = truth[torch.randperm(len(truth), generator=random)]
        return centers[truth] + torch.randn(len(truth), dimension, generator=random), truth

    @pytest.mark.parametrize("sizes", [[10, 10], [7, 6, 7], [12, 4, 3, 3], [3] * 8])
    def test_groups_are_found(self, sizes: list[int]) -> None:
        points, truth = self.blobs(sizes)
        found = proposed_clusters(points, range(1, 11))
        assert adjusted_rand_score(truth, found[len(sizes)]) == 1

    def test_clients_that_moved_unequally_far(self) -> None:
        points, truth = self.blobs([8, 8, 8])
        order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
        far = torch.linspace(0.2, 5, 24)[order]
        points = far[:, None] * (points - points.mean(0))
        assert adjusted_rand_score(truth, proposed_clusters(points, [3])[3]) == 1

    def test_only_candidates_are_proposed(self) -> None:
        points, _ = self.blobs([7, 6, 7])
        assert set(proposed_clusters(points, [1, 2, 4])) <= {2, 4}
        assert proposed_clusters(points, [1]) == {}

    def test_too_few_points_and_equal_ones(self) -> None:
        assert proposed_clusters(torch.eye(2), range(1, 5)) == {}
        assert proposed_clusters(torch.ones(6, 3), range(1, 5)) == {}


class TestSample:
    def test_all_samples_are_those_of_the_data(self) -> None:
        data = small_data()
        sample = SampledClients(data, torch.tensor([1, 4]))
        for split in ("train", "val"):
            for new, old in enumerate((1, 4)):
                for left, right in zip(
                    sample.samples(new, split), data.samples(old, split), strict=True
                ):
                    assert torch.equal(left, right)

    def test_a_fifth_of_the_training_samples_is_held_out(self) -> None:
        data = groups(val_fraction=0.0, samples_per_client=52)
        data.setup()
        clients = torch.tensor([2, 5, 7])
        sample = SampledClients(data, clients)
        assert sample.num_samples("val").tolist() == [n // 5 for n in data.num_samples()[clients]]
        for new, old in enumerate(clients.tolist()):
            parts = [sample.samples(new, split) for split in ("train", "val")]
            x = torch.cat([x for x, _ in parts])
            assert torch.equal(x.unique(dim=0), data.samples(old, "train")[0].unique(dim=0))
            for split, (_, y) in zip(("train", "val"), parts, strict=True):
                assert torch.equal(sample.labels(new, split), y)
        again = SampledClients(data, torch.tensor([5]))
        assert torch.equal(again.samples(0, "val")[0], sample.samples(1, "val")[0])

    @pytest.mark.parametrize("val_fraction", [0.0, 0.1])
    def test_clients_are_as_they_are_in_the_data(self, val_fraction: float) -> None:
        class Own(ClusteredSynthetic):
            def augment(self, x: Tensor, client: int, round: int, epoch: int = 0) -> Tensor:
                return x + client

        data = Own(2, num_clients=9, val_fraction=val_fraction)
        data.setup()
        clients = [2, 5, 7]
        sample = SampledClients(data, torch.tensor(clients))
        assert torch.equal(sample.clusters, data.clusters[clients])
        for new, (old, order) in enumerate(zip(clients, sample.orders(range(3), 4), strict=True)):
            x, _ = sample.samples(new, "train")
            whole = data.samples(old, "train")[0][data.order(old, 4)]
            taken = (whole[:, None] == x).all(dim=2).any(dim=1)
            assert torch.equal(x[order], whole[taken])
            assert torch.equal(sample.augment(x, new, 4), x + old)

    def test_clients_are_drawn_by_the_seed(self) -> None:
        clients = torch.arange(3, 103)
        drawn = sample_clients(clients, 10, seed=1)
        assert drawn.tolist() == sorted(set(drawn.tolist()))
        assert len(drawn) == 10
        assert torch.isin(drawn, clients).all()
        assert torch.equal(drawn, sample_clients(clients, 10, seed=1))
        assert not torch.equal(drawn, sample_clients(clients, 10, seed=2))
        assert torch.equal(sample_clients(clients, 100, seed=1), clients)


class TestTrial:
    @pytest.mark.parametrize("criterion", ["accuracy", "distance"])
    def test_it_finds_the_number_of_groups(self, criterion: str) -> None:
        federation = Federation(classifier(), local_epochs=3)
        found = select_num_clusters(federation, groups(), (2, 3, 4), criterion, **CPU)
        assert found.num_clusters == 3
        assert list(found.accuracy) == [1, 2, 3, 4][criterion == "accuracy" :]

    @pytest.mark.parametrize("clusters", [1, 2, 3])
    def test_held_out_losses_find_the_groups(self, clusters: int) -> None:
        data = groups(clusters)
        found = select_num_clusters(Federation(classifier(), local_epochs=3), data, **CPU)
        assert found.num_clusters == clusters
        started = [found.clusters[i] for i in sorted(found.clusters)]
        if clusters == 1:
            assert not started
        else:
            assert adjusted_rand_score(data.clusters, started) == 1

    def test_it_does_not_see_clients_that_move_later(self) -> None:
        here, later = groups(), groups(moves={1: 0.5})
        found = [
            select_num_clusters(Federation(classifier(), local_epochs=3), data, **CPU)
            for data in (here, later)
        ]
        assert found[0] == found[1]

    @pytest.mark.short("vectorized")
    @ENGINES
    def test_held_out_losses_are_those_of_the_runs(self, engine: str) -> None:
        options = {"local_epochs": 3, "seed": 5, "engine": engine}
        data = groups()
        found = select_num_clusters(Federation(classifier(), **options), data, **CPU)
        for k, callback in ((1, FedAvg()), (3, FeSEM("auto"))):
            whole = run(classifier(), data, callback, 10, **options)
            expected = whole.client_metrics("val")["loss"].tolist()
            assert found.losses[k] == pytest.approx(expected, rel=1e-5)
            assert found.accuracy[k] == whole.history[-1].metrics["val/macro_acc"]

    def test_held_out_samples_are_not_trained_on(self) -> None:
        seen = []
        data = groups(val_fraction=0.0)
        client = watched(classifier(), lambda c: seen.append(int(c.num_samples)))
        found = select_num_clusters(Federation(client, engine="sequential"), data, [1, 2], **CPU)
        assert set(seen) == {n - n // 5 for n in data.num_samples("train").tolist()}
        assert np.isfinite(found.losses[1]).all()

    def test_without_one_model_among_the_candidates(self) -> None:
        data = groups(1)
        federation = Federation(classifier(), local_epochs=3)
        found = select_num_clusters(federation, data, (2, 3), **CPU)
        assert found.num_clusters in (2, 3)
        assert set(found.losses) <= {2, 3}
        assert len(found.clusters) == 9

    def test_identical_clients_have_one_model_or_as_few_clusters_as_allowed(self) -> None:
        pairs = [(torch.eye(4), torch.arange(4))] * 4
        data = TensorClients(pairs, val=pairs, num_classes=5, batch_size=4)
        for candidates, expected in (((1, 2, 3), 1), ((2, 3), 2)):
            federation = run(classifier(), data, FeSEM("auto", candidates=candidates))
            assert federation.callback.num_clusters == expected

    def test_a_module_that_optimizes_by_hand_is_judged_by_distance(self) -> None:
        federation = Federation(linear_client(ByHand))
        assert select_num_clusters(federation, small_data(), **CPU).criterion == "distance"
        with pytest.raises(ConfigurationError, match=r"held_out.* manual optimization"):
            select_num_clusters(federation, small_data(), criterion="held_out", **CPU)

    def test_the_traffic_is_said(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO", "lightning.pytorch.pflight")
        federation = Federation(classifier(), local_epochs=3)
        select_num_clusters(federation, groups(), rounds=4, **CPU)
        (line,) = [line for line in caplog.messages if "chose num_clusters 3" in line]
        megabytes = 2 * 4 * 9 * 25 * 4 / 2**20  # two runs of four rounds of nine clients
        assert f"{megabytes:.2f} MiB to clients and {megabytes:.2f} MiB back" in line

    @pytest.mark.short("bbp_map")
    @pytest.mark.parametrize("matching", [None, "bbp_map"])
    def test_its_numbers_are_those_of_a_run_of_three_rounds(self, matching: str | None) -> None:
        class Recording(FeSEM):
            def receive(self, updates: ClientUpdates) -> None:
                self.received = updates
                super().receive(updates)

        options = {"local_epochs": 2, "seed": 5}
        data = groups()
        federation = Federation(classifier(), **options)
        found = select_num_clusters(
            federation, data, (2, 4), "distance", callback=FeSEM(1, matching=matching), **CPU
        )
        for k in (2, 4):
            callback = Recording(k, matching=matching)
            whole = run(classifier(), data, callback, 3, **options)
            assert found.accuracy[k] == whole.history[-1].metrics["val/macro_acc"]
            updates = callback.received
            distances = [
                sum(
                    (updates.states[name][i] - whole.server_states()[center][name]).square().sum()
                    for name, _ in classifier().named_parameters()
                )
                for i, center in enumerate(callback.assignments[updates.clients].tolist())
            ]
            assert found.distance[k] == pytest.approx(float(np.mean(distances)), rel=1e-4)

    def test_only_a_sample_trains(self) -> None:
        asked = set()
        data = small_data(counts=[11, 12, 13, 14, 15, 16])
        client = watched(linear_client(), lambda c: asked.add(int(c.num_samples)))
        federation = Federation(client, engine="sequential")
        callback = FeSEM(1, init_clients=3)
        select_num_clusters(federation, data, (1, 2), callback=callback, **CPU)
        sample = sample_clients(torch.arange(6), 3, seed=0)
        assert asked == set(data.num_samples()[sample].tolist())

    def test_it_leaves_everything_as_it_was(self) -> None:
        data, client = groups(), classifier()
        federation = run(client, data, FeSEM(2), 2)
        before = federation.server_states()
        torch.manual_seed(4)
        np.random.seed(4)
        random.seed(4)
        expected = torch.rand(1), np.random.rand(), random.random()
        torch.manual_seed(4)
        np.random.seed(4)
        random.seed(4)
        given = federation.callback
        assignments = given.assignments.clone()
        select_num_clusters(federation, data, (2, 3), callback=given, **CPU)
        assert (torch.rand(1), np.random.rand(), random.random()) == expected
        for left, right in zip(before, federation.server_states(), strict=True):
            assert_same(left, right)
        assert_same(dict(client.state_dict()), dict(classifier().state_dict()))
        assert len(federation.history) == 2
        assert federation.clients.attached_data is data
        assert given.num_clusters == 2
        assert torch.equal(given.assignments, assignments)

    def test_matching_takes_part(self) -> None:
        federation = Federation(linear_client(ProximalClient))
        given = FeSEM("auto", matching="bbp_map")
        found = select_num_clusters(federation, small_data(), (2, 3), callback=given, **CPU)
        assert all(distance > 0 for distance in found.distance.values())

    def test_candidates_above_the_number_of_clients_are_left_out(self) -> None:
        federation = Federation(linear_client())
        data = small_data(counts=[5, 5])
        found = select_num_clusters(federation, data, (1, 2, 3), "distance", **CPU)
        assert list(found.accuracy) == [1, 2]

    def test_what_can_not_be_done(self) -> None:
        federation = Federation(linear_client())
        with pytest.raises(ConfigurationError, match=r"from \[7, 8\]: only 6 clients can train"):
            select_num_clusters(federation, small_data(), (7, 8), **CPU)
        with pytest.raises(ConfigurationError, match="rounds must be at least 2, got 1"):
            select_num_clusters(federation, small_data(), (1, 2), rounds=1, **CPU)
        tiny = groups(val_fraction=0.0, samples_per_client=4, num_classes=4)
        with pytest.raises(ConfigurationError, match="no client has validation samples"):
            select_num_clusters(Federation(linear_client()), tiny, **CPU)


class TestAuto:
    options = {"num_clusters": "auto", "candidates": (2, 3, 4), "criterion": "distance"}  # noqa: RUF012

    def test_it_goes_on_as_a_run_with_that_number(self) -> None:
        auto = run(classifier(), groups(), FeSEM(**self.options), 4, local_epochs=3)
        assert auto.callback.num_clusters == 3
        assert list(auto.callback.selection.accuracy) == [1, 2, 3, 4]
        given = run(classifier(), groups(), FeSEM(3), 4, local_epochs=3)
        assert torch.equal(auto.callback.assignments, given.callback.assignments)
        for left, right in zip(auto.server_states(), given.server_states(), strict=True):
            assert_same(left, right)
        assert auto.history[-1].metrics == given.history[-1].metrics

    @pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
    @pytest.mark.long
    def test_a_resumed_run_does_not_choose_again(self, tmp_path: Path) -> None:
        client_method = run(classifier(), groups(), FeSEM(**self.options), 2, local_epochs=3)
        client_method.trainer.save_checkpoint(tmp_path / "half.ckpt")
        torch.load(tmp_path / "half.ckpt", weights_only=True)
        resumed = run(
            classifier(),
            groups(),
            FeSEM("auto", candidates=[1]),  # which is what it would choose now
            4,
            local_epochs=3,
            ckpt_path=tmp_path / "half.ckpt",
        )
        assert resumed.callback.selection == client_method.callback.selection
        whole = run(classifier(), groups(), FeSEM(**self.options), 4, local_epochs=3)
        for left, right in zip(resumed.server_states(), whole.server_states(), strict=True):
            assert_same(left, right)
        loaded = Federation.load_from_checkpoint(
            tmp_path / "half.ckpt", client=classifier(), callback=FeSEM("auto")
        )
        assert loaded.callback.num_clusters == 3
        assert_same(loaded.client_state(0), client_method.client_state(0))

    @pytest.mark.long
    def test_with_a_server_optimizer_and_double_precision(self) -> None:
        federation = run(
            classifier(),
            groups(),
            FeSEM(**self.options),
            3,
            local_epochs=3,
            server_optimizer=sgd(0.5),
            trainer={"precision": "64-true"},
        )
        assert len(federation.server_states()) == federation.callback.num_clusters == 3
        for state in federation.server_states():
            assert {value.dtype for value in state.values()} == {torch.float64}
        first, second, _ = federation.server_states()
        assert not torch.equal(first["network.output.weight"], second["network.output.weight"])

    @pytest.mark.short("vectorized")
    @ENGINES
    def test_one_model_is_that_of_fedavg_to_the_bit(self, engine: str) -> None:
        data = {"cohort_size": 3, "holdout_clients": 0.2}
        auto = run(linear_client(), small_data(**data), FeSEM("auto"), 4, engine=engine)
        assert auto.callback.num_clusters == 1
        fedavg = run(linear_client(), small_data(**data), FedAvg(), 4, engine=engine)
        assert_same(auto.server_states()[0], fedavg.server_states()[0])
        for left, right in zip(auto.history, fedavg.history, strict=True):
            assert (left.clients, left.bytes_down) == (right.clients, right.bytes_down)
            assert {key: left.metrics[key] for key in right.metrics} == right.metrics
        tested = [
            federation.trainer.test(federation, datamodule=small_data(**data), verbose=False)
            for federation in (auto, fedavg)
        ]
        assert tested[0] == tested[1]

    @pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
    @pytest.mark.parametrize("clusters", [1, 3])
    def test_a_resumed_run_goes_on_as_it_was(self, clusters: int, tmp_path: Path) -> None:
        options = {"local_epochs": 3}
        half = run(classifier(), groups(clusters), FeSEM("auto"), 2, **options)
        half.trainer.save_checkpoint(tmp_path / "half.ckpt")
        rest = {"ckpt_path": tmp_path / "half.ckpt", **options}
        resumed = run(classifier(), groups(clusters), FeSEM("auto"), 4, **rest)
        whole = run(classifier(), groups(clusters), FeSEM("auto"), 4, **options)
        assert whole.callback.num_clusters == resumed.callback.num_clusters == clusters
        for left, right in zip(resumed.server_states(), whole.server_states(), strict=True):
            assert_same(left, right)

    def test_a_callback_chooses_anew_for_another_federation(self) -> None:
        callback = FeSEM("auto")
        first = run(classifier(), groups(1), callback, 2, local_epochs=3)
        assert (callback.num_clusters, callback.one_model) == (1, True)
        assert len(first.server_states()) == 1
        run(classifier(), groups(3), callback, 2, local_epochs=3)
        assert (callback.num_clusters, callback.one_model) == (3, False)

    def test_clients_start_in_the_clusters_that_were_found(self) -> None:
        data = groups(dropout=0.4, seed=3)
        auto = run(classifier(), data, FeSEM("auto"), 1, local_epochs=3)
        selection = auto.callback.selection
        assert 0 < len(auto.history[0].failed) < 9
        assert auto.callback.assignments.tolist() == [selection.clusters[i] for i in range(9)]

    def test_an_untrained_federation_is_judged_by_its_start(self) -> None:
        federation, data = Federation(classifier()), groups()
        quiet_trainer(1, FeSEM("auto")).validate(federation, datamodule=data, verbose=False)
        assert_same(federation.client_state(0), dict(classifier().state_dict()))

    def test_the_table_is_in_tensorboard(self, tmp_path: Path) -> None:
        logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
        callback = FeSEM("auto", candidates=[1, 2])
        run(linear_client(ProximalClient), small_data(), callback, trainer={"logger": logger})
        logger.finalize("success")
        assert read_events(Path(logger.log_dir)).texts == {"fesem/num_clusters": [0]}

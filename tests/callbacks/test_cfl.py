from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import SGD, Adam

from pflight.callbacks import CFL, FedAvg, Local
from pflight.callbacks.methods.clustering import bipartition
from pflight.datamodules import TensorClients
from pflight.errors import ConfigurationError
from pflight.models import Classifier
from tests.runs import (
    Point,
    QuadraticClient,
    assert_same,
    batchnorm_client,
    flat,
    linear_client,
    quiet_trainer,
    run,
    sgd,
    small_data,
)

EAGER = {"eps1": 1e6, "eps2": 0.0, "min_size": 1, "warmup": 0}
C1 = (1.0, 0.0), (0.9, 0.1), (-1.0, 0.1), (-0.95, -0.05)
TREE = (10, 1), (-10, 1), (10, -1), (-10, -1), (10, 1.2), (-10, 1.2)


def targets(*models: tuple[float, float], **options: object) -> TensorClients:
    """Return clients that return these models after one step of size 1 from anywhere."""
    train = [
        (torch.tensor([[1.0, 1.0, *model]], dtype=torch.float64), torch.zeros(1, dtype=torch.long))
        for model in models
    ]
    return TensorClients(train, num_classes=2, **options)


def target_client(kind: type[Classifier] = QuadraticClient) -> Classifier:
    return kind(Point(), num_classes=2, optimizer=sgd(1.0))


class TestSplitting:
    def test_c1(self) -> None:
        callback = CFL(eps1=0.04, eps2=1.0, warmup=0)
        federation = run(target_client(), targets(*C1), callback)
        metrics = federation.history[0].metrics
        assert metrics["cfl/mean_norm_0"] == pytest.approx(0.0395285, abs=1e-7)
        assert metrics["cfl/max_norm_0"] == pytest.approx(1.0049876, abs=1e-7)
        assert callback.assignments.tolist() == [0, 0, 1, 1]
        first, second = (flat(state) for state in federation.server_states())
        assert first == pytest.approx([0.95, 0.05], abs=1e-12)
        assert second == pytest.approx([-0.975, 0.025], abs=1e-12)
        (split,) = callback.splits
        assert (split.round, split.cluster, split.new) == (0, 0, 1)
        assert flat(split.state).tolist() == [0, 0]
        units = F.normalize(torch.tensor(C1, dtype=torch.float64))
        expected = torch.stack([units[:2].mean(0), units[2:].mean(0)])
        torch.testing.assert_close(split.directions, expected, rtol=1e-12, atol=1e-14)

    @pytest.mark.parametrize(
        ("options", "clusters"),
        [
            ({"eps1": 0.0395}, 1),
            ({"eps1": 0.0396}, 2),
            ({"eps2": 1.0049}, 2),
            ({"eps2": 1.0050}, 1),
            ({"gamma": 0.9944}, 2),  # the criterion is 0.9944755
            ({"gamma": 0.9945}, 1),
            ({"min_size": 3}, 2),
            ({"min_size": 4}, 1),
        ],
    )
    def test_every_condition_counts(self, options: dict, clusters: int) -> None:
        callback = CFL(**{"eps1": 0.04, "eps2": 1.0, "warmup": 0, **options})
        federation = run(target_client(), targets(*C1), callback)
        assert len(federation.server_states()) == clusters

    def test_rounds_count_from_one(self) -> None:
        callback = CFL(**{**EAGER, "warmup": 2})
        federation = run(target_client(), targets((1, 0), (-1, 0)), callback, rounds=4)
        assert callback.splits[0].round == 2
        assert "cfl/mean_norm_0" not in federation.history[1].metrics

    def test_successive_splits_keep_a_partition_of_the_clients(self) -> None:
        callback = CFL(**EAGER)
        federation = run(target_client(), targets(*TREE), callback, rounds=2)
        assert [(s.round, s.cluster, s.new) for s in callback.splits] == [
            (0, 0, 1),  # the new clusters are not tested at once
            (1, 0, 2),
            (1, 1, 3),
        ]
        assert callback.assignments.tolist() == [0, 1, 2, 3, 0, 1]
        models = [flat(state).tolist() for state in federation.server_states()]
        assert models == [[10, 1.1], [-10, 1.1], [10, -1], [-10, -1]]
        assert federation.history[-1].metrics["cfl/size_0"] == 2

    def test_weights(self) -> None:
        """By samples, the mean update is (3 * (1, 0) + 1 * (-1, 0)) / 4 at first."""
        x = torch.tensor([[1.0, 1, 1, 0]] * 3 + [[1, 1, -1, 0]], dtype=torch.float64)
        y = torch.zeros(4, dtype=torch.long)
        data = TensorClients([(x[:3], y[:3]), (x[3:], y[3:])], num_classes=2, batch_size=None)
        for weighting, norm in (("samples", 0.5), ("uniform", 0.0)):
            callback = CFL(0.1, 0.5, min_size=1, warmup=0, weighting=weighting)
            federation = run(target_client(), data, callback)
            assert federation.history[0].metrics["cfl/mean_norm_0"] == norm
            assert len(callback.splits) == (weighting == "uniform")

    @pytest.mark.parametrize("linkage", ["single", "complete", "average", "spectral"])
    def test_equal_updates_are_split_if_one_insists(self, linkage: str) -> None:
        callback = CFL(linkage=linkage, **EAGER)
        federation = run(target_client(), targets((1, 0), (1, 0), (1, 0)), callback)
        assert sorted(callback.assignments.unique().tolist()) == [0, 1]
        for state in federation.server_states():
            assert flat(state).tolist() == [1, 0]

    def test_momentum_goes_to_both_halves(self) -> None:
        """Round 1 goes from 0 to 4; in round 2 both halves add half of that step to their own."""
        data = targets((2, 0), (6, 0))
        callback = CFL(**{**EAGER, "warmup": 1})
        optimizer = partial(SGD, lr=1.0, momentum=0.5)
        federation = run(target_client(), data, callback, 2, server_optimizer=optimizer)
        assert [flat(state).tolist() for state in federation.server_states()] == [[4, 0], [8, 0]]


class TestPartialParticipation:
    def test_a_cluster_is_tested_when_all_members_are_known(self) -> None:
        data = targets(*C1, cohort_size=2)
        callback = CFL(eps1=0.0, warmup=0)
        federation = run(target_client(), data, callback, rounds=12)
        known: set[int] = set()
        tested = 0
        for entry in federation.history:
            known |= set(entry.clients)
            assert ("cfl/mean_norm_0" in entry.metrics) == (len(known) == 4)
            if len(known) == 4:
                known, tested = set(), tested + 1
        assert tested >= 2

    def test_a_half_without_an_answer_stays_where_it_was(self) -> None:
        data = targets((1, 0), (-1, 0), cohort_size=1)
        callback = CFL(**EAGER)
        rounds = run(target_client(), data, callback, 12).callback.splits[0].round + 1
        assert rounds > 1
        callback = CFL(**EAGER)
        federation = run(target_client(), data, callback, rounds)
        (answered,) = federation.history[-1].clients
        assert flat(federation.client_state(answered)).tolist() == [(1, -1)[answered], 0]
        assert_same(federation.client_state(1 - answered), callback.splits[0].state)

    def test_resumed_while_updates_wait(self, tmp_path: Path) -> None:
        data = small_data(cohort_size=3)
        options = {"server_optimizer": partial(Adam, lr=0.1)}
        whole, client_method, rest = (CFL(**EAGER) for _ in range(3))
        expected = run(linear_client(), data, whole, 11, **options)
        saved = run(linear_client(), data, client_method, 5, **options)
        assert client_method.splits
        assert client_method.state_dict()["_changes"]
        saved.trainer.save_checkpoint(tmp_path / "half.ckpt")
        torch.load(tmp_path / "half.ckpt", weights_only=True)
        resumed = run(linear_client(), data, rest, 11, ckpt_path=tmp_path / "half.ckpt", **options)
        assert len(client_method.splits) < len(whole.splits) == len(rest.splits)
        for one, other in zip(expected.server_states(), resumed.server_states(), strict=True):
            assert_same(one, other)
        assert torch.equal(whole.assignments, rest.assignments)

    def test_an_earlier_checkpoint_has_fewer_models(self, tmp_path: Path) -> None:
        data, callback = small_data(), CFL(**EAGER)
        federation = run(linear_client(), data, callback)
        early = federation.server_states()
        federation.trainer.save_checkpoint(tmp_path / "early.ckpt")
        trainer = quiet_trainer(4, callback)
        trainer.fit(federation, datamodule=data, ckpt_path=tmp_path / "early.ckpt")
        assert len(federation.server_states()) > len(early)
        trainer.test(federation, data, ckpt_path=tmp_path / "early.ckpt", verbose=False)
        for one, other in zip(federation.server_states(), early, strict=True):
            assert_same(one, other)


class TestNewcomers:
    groups = (10, 1.0), (10, -1.0), (-10, 1.0), (-10, -1.0)

    def federation(self) -> tuple:
        data = targets(*(self.groups * 4), holdout_clients=0.3)
        callback = CFL(**{**EAGER, "min_size": 3})
        return data, callback, run(target_client(), data, callback, rounds=3)

    def test_they_descend_the_tree(self) -> None:
        data, callback, federation = self.federation()
        assert len(callback.splits) == 3
        assert len({i % 4 for i in data.new_clients.tolist()}) > 1
        for client in data.new_clients.tolist():
            assert callback.assignments[client] == -1
            assert tuple(flat(federation.client_state(client))) == self.groups[client % 4]

    def test_they_may_join_later(self) -> None:
        _, callback, federation = self.federation()
        everybody = targets(*(self.groups * 4))
        quiet_trainer(4, callback).fit(federation, datamodule=everybody)
        assert (callback.assignments == callback.assignments[:4].repeat(4)).all()

    def test_each_descends_once_in_an_evaluation(self) -> None:
        data, _, federation = self.federation()
        for i in data.new_clients.tolist():
            federation.client_state(i)
        # Each is asked at the root, and at the split of its half: nobody is asked again.
        size = federation.history[0].bytes_down // len(federation.history[0].clients)
        assert federation.clients.aside.down == 2 * len(data.new_clients) * size
        before = federation.clients.aside.down
        federation.client_state(int(data.new_clients[0]))
        assert federation.clients.aside.down == before

    def test_what_travels_for_it_counts_in_their_round(self) -> None:
        _, callback, federation = self.federation()
        data = targets(*(self.groups * 4))
        late = int((callback.assignments < 0).sum())
        size = federation.history[0].bytes_down // len(federation.history[0].clients)
        quiet_trainer(4, callback).fit(federation, datamodule=data)
        # Each is sent the root's model before its split, and that of the half that it follows.
        assert federation.history[3].bytes_down == (16 + 2 * late) * size
        assert federation.history[3].bytes_up == (16 + 2 * late) * size

    def test_those_without_samples_get_the_mean_of_the_clusters(self) -> None:
        callback = CFL(**EAGER)
        data = small_data(counts=[4, 0, 6], dtype=torch.float64)
        federation = run(linear_client(double=True), data, callback)
        models = [flat(state) for state in federation.server_states()]
        assert flat(federation.client_state(1)) == pytest.approx(
            np.average(models, axis=0, weights=[4, 6]), rel=1e-12
        )

    def test_one_that_fails_is_named(self) -> None:
        data = targets(*C1, holdout_clients=0.25)
        newcomer = int(data.new_clients)

        class Failing(QuadraticClient):
            def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
                if tuple(batch[0][0, 2:].tolist()) == C1[newcomer]:
                    raise RuntimeError("out of battery")
                return super().loss(batch)

        federation = run(target_client(Failing), data, CFL(**EAGER))
        with pytest.warns(UserWarning, match=f"client {newcomer} failed to find its place: .*out"):
            state = federation.client_state(newcomer)
        assert_same(state, federation.server_states()[0])


class TestReductions:
    @pytest.mark.short("uniform")
    @pytest.mark.parametrize("weighting", ["uniform", "samples"])
    def test_never_split_it_is_fedavg(self, weighting: str) -> None:
        data = small_data(cohort_size=3, dtype=torch.float64)
        client = batchnorm_client().double()
        one = run(client, data, CFL(0, 0, warmup=0, weighting=weighting), 4)
        other = run(client, data, FedAvg(weighting), 4)
        torch.testing.assert_close(
            one.server_states(), other.server_states(), rtol=1e-12, atol=1e-14
        )

    def test_singletons_are_local(self) -> None:
        data = small_data(counts=[5, 12], dtype=torch.float64)
        client = linear_client(double=True)
        one = run(client, data, CFL(**EAGER), 4)
        other = run(client, data, Local(), 4)
        for i in range(2):
            torch.testing.assert_close(
                one.client_state(i), other.client_state(i), rtol=1e-12, atol=1e-14
            )


class TestBipartition:
    c1b = torch.tensor(
        [[1, 0.9, 0.2, -0.5], [0.9, 1, 0.8, 0.1], [0.2, 0.8, 1, 0.7], [-0.5, 0.1, 0.7, 1]]
    )

    def test_c1b(self) -> None:
        assert bipartition(self.c1b, "single").tolist() == [False, False, False, True]
        assert bipartition(self.c1b, "complete").tolist() == [False, False, True, True]

    def test_average(self) -> None:
        """After {0, 1} the means are 0.5 to 2 and -0.2 to 3; the pair {2, 3} has 0.7."""
        assert bipartition(self.c1b, "average").tolist() == [False, False, True, True]
        nearer = self.c1b.clone()
        nearer[0, 2] = nearer[2, 0] = 0.75  # to 2 it is 0.775 now
        assert bipartition(nearer, "average").tolist() == [False, False, False, True]

    def test_single_linkage_is_the_optimum(self) -> None:
        random = torch.Generator().manual_seed(1)
        better = 0
        for _ in range(50):
            units = F.normalize(torch.randn(7, 3, generator=random, dtype=torch.float64))
            cosines = units @ units.T

            def across(second: Tensor, cosines: Tensor = cosines) -> float:
                return cosines[~second][:, second].max().item()

            sides = [torch.tensor([False, *side]) for side in product([False, True], repeat=6)]
            optimum = min(across(side) for side in sides if side.any())
            assert across(bipartition(cosines)) == optimum
            better += optimum < across(bipartition(cosines, "complete"))
        assert better > 10

    @pytest.mark.parametrize(
        ("linkage", "second"),
        [("single", [0, 0, 0, 1]), ("complete", [0, 0, 1, 1]), ("average", [0, 0, 1, 1])],
    )
    def test_ties_go_to_the_smallest_pair(self, linkage: str, second: list[int]) -> None:
        square = torch.tensor([[1.0, 0, -1, 0], [0, 1, 0, -1], [-1, 0, 1, 0], [0, -1, 0, 1]])
        assert bipartition(square, linkage).int().tolist() == second

    @pytest.mark.parametrize("linkage", ["single", "complete", "average", "spectral"])
    def test_two_groups_and_two_things(self, linkage: str) -> None:
        units = F.normalize(torch.tensor(C1))
        assert bipartition(units @ units.T, linkage).tolist() == [False, False, True, True]
        two = units[[0, 2]]
        assert bipartition(two @ two.T, linkage).tolist() == [False, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps1": -1}, "eps1 must be at least 0, got -1"),
        ({"eps2": float("nan")}, "eps2 must be a finite number, got nan"),
        ({"gamma": -0.1}, "gamma must be at least 0"),
        ({"warmup": -1}, "warmup must be at least 0"),
        ({"min_size": 0}, "min_size must be at least 1, got 0"),
        ({"linkage": "ward"}, "linkage must be 'single', .*, got 'ward'"),
        ({"weighting": "equal"}, "CFL: weighting must be"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        CFL(**options)

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from pflight.callbacks import FedAvg, TrimmedKMeans
from pflight.callbacks.methods.clustering import TrimmedMean, trimmed_kmeans
from pflight.datamodules import TensorClients
from pflight.engines import ClientUpdates
from pflight.errors import ConfigurationError
from pflight.local_client import LocalClient
from pflight.method import ClientMethod
from pflight.models import Classifier
from tests import reference
from tests.runs import (
    CLASSES,
    Point,
    QuadraticClient,
    assert_same,
    batches_of,
    batchnorm_client,
    flat,
    linear_client,
    quadratic_client,
    run,
    sgd,
    small_data,
    watched,
)

NEAR = (0.0, 0.0), (0.2, 0.0), (0.0, 0.2), (0.1, 0.1), (50.0, -50.0)
FAR = (9.0, 9.0), (9.2, 9.0), (9.0, 9.2), (9.1, 9.1), (9.2, 9.3)
PARAMETERS = [name for name, _ in batchnorm_client().named_parameters()]
C3B = (1.0, 1.0), (1.2, 0.8), (0.8, 1.2), (1.0, 1.0), (100.0, -100.0)


def targets(*models: tuple[float, float], **options: object) -> TensorClients:
    """Return clients that return these models after one step of size 1 from anywhere."""
    train = [
        (torch.tensor([[1.0, 1.0, *model]], dtype=torch.float64), torch.zeros(1, dtype=torch.long))
        for model in models
    ]
    return TensorClients(train, num_classes=2, **options)


def target_client(kind: type[Classifier] = QuadraticClient) -> Classifier:
    return kind(Point(), num_classes=2, optimizer=sgd(1.0))


def tensor(*points: tuple[float, ...]) -> Tensor:
    return torch.tensor(points, dtype=torch.float64)


class TestTrimmedMean:
    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({"beta": 0.0}, [10.06, -9.94]),
            ({"beta": 0.2}, [0.1, 0.1 / 3]),
            ({"beta": 0.2, "estimate": "median"}, [0.1, 0]),
            ({"beta": 0.0, "estimate": "median"}, [0.1, 0]),
            ({"beta": 0.2, "trim": "radius"}, [0.075, 0.075]),
            ({"beta": 0.2, "trim": "radius", "estimate": "median"}, [0.05, 0.05]),
            ({"beta": 0.49}, [0.1, 0]),
        ],
    )
    def test_c3(self, options: dict, expected: list[float]) -> None:
        mean, points = TrimmedMean(**options), tensor(*NEAR)
        assert mean(points[mean.near(points)]).tolist() == pytest.approx(expected, abs=1e-12)

    @pytest.mark.parametrize(("count", "expected"), [(1, 0.0), (2, 0.5), (3, 1.0), (4, 1.5)])
    def test_something_is_always_left(self, count: int, expected: float) -> None:
        points = torch.arange(count, dtype=torch.float64).unsqueeze(1)
        for trim in ("coordinate", "radius"):
            mean = TrimmedMean(0.49, trim)
            kept = mean.near(points)
            assert len(kept) > count / 2
        assert TrimmedMean(0.49)(points).tolist() == [expected]

    def test_a_share_of_a_count_is_not_rounded_down_by_accident(self) -> None:
        points = torch.zeros(100, 1)
        points[:29] = 1000.0
        assert 0.29 * 100 < 29
        assert TrimmedMean(0.29)(points).item() == 0


class TestTrimmedKMeans:
    def test_it_finds_the_best_partition(self) -> None:
        random = torch.Generator().manual_seed(4)
        for _ in range(20):
            points = torch.randn(7, 2, generator=random, dtype=torch.float64)
            points[4:] += 3

            def inertia(clusters: Tensor, points: Tensor = points) -> float:
                groups = [points[clusters == k] for k in (0, 1)]
                return sum((g - g.mean(0)).square().sum().item() for g in groups)

            options = {"restarts": 20, "iterations": 30, "seed": 0}
            clusters, centers = trimmed_kmeans(points, 2, TrimmedMean(0.0), **options)
            sides = [torch.tensor([0, *side]) for side in product([0, 1], repeat=6)]
            best = min(inertia(side) for side in sides if side.any())
            assert inertia(clusters) == pytest.approx(best, rel=1e-12)
            for k in (0, 1):
                expected = points[clusters == k].mean(0)
                torch.testing.assert_close(centers[k], expected, rtol=1e-12, atol=1e-14)

    def test_equal_points_leave_clusters_empty(self) -> None:
        options = {"restarts": 3, "iterations": 8, "seed": 0}
        clusters, centers = trimmed_kmeans(torch.ones(4, 2), 3, TrimmedMean(0.2), **options)
        assert set(clusters.tolist()) <= {0, 1, 2}
        assert centers.tolist() == [[1, 1]] * 3


class TestRounds:
    @pytest.mark.parametrize("rounds", [1, 3])
    def test_c3(self, rounds: int) -> None:
        callback = TrimmedKMeans(2, cluster_beta=0.2, beta=0.2)
        federation = run(target_client(), targets(*NEAR, *FAR), callback, rounds)
        near, far = callback.assignments[[0, 5]].tolist()
        assert callback.assignments.tolist() == [near] * 5 + [far] * 5
        models = [flat(state) for state in federation.server_states()]
        assert models[near] == pytest.approx([0.1, 0.1 / 3], abs=1e-12)
        assert models[far] == pytest.approx([9.1, 9.1], abs=1e-12)

    def test_c3b(self) -> None:
        """From 0, a client that aims at -g has the gradient g."""
        data = targets(*(tuple(-g for g in gradient) for gradient in C3B))
        callback = TrimmedKMeans(1, cluster_beta=0.2, init_epochs=1)
        federation = run(quadratic_client(), data, callback)
        expected = [-0.1 * 3.2 / 3, -0.1 * 2.8 / 3]
        assert expected == pytest.approx([-0.1066667, -0.0933333], abs=1e-7)
        assert flat(federation.server_states()[0]) == pytest.approx(expected, abs=1e-12)

    def test_several_rounds_with_some_of_the_clients(self) -> None:
        data = small_data(cohort_size=4, dtype=torch.float64)
        callback = TrimmedKMeans(2, beta=0.34, init_epochs=2)
        client = linear_client(double=True)
        first = run(client, data, callback)
        centers = [flat(state) for state in first.server_states()]
        assert first.history[0].clients == [0, 1, 2, 3, 4, 5]
        assignments = callback.assignments.tolist()
        again = TrimmedKMeans(2, beta=0.34, init_epochs=2)
        federation = run(client, data, again, 5)
        clients = range(data.num_clients)
        world = reference.SoftmaxRegression([data.samples(i, "train") for i in clients], CLASSES)
        for entry in federation.history[1:]:
            assert len(entry.clients) == 4
            trained: dict[int, list[np.ndarray]] = {}
            for i in entry.clients:
                batches = batches_of(data, entry.index, i, 1)
                start = centers[assignments[i]]
                model = reference.local_training(world, start, i, batches, lr=0.1)
                trained.setdefault(assignments[i], []).append(model)
            for k, models in trained.items():
                cut = min(int(0.34 * len(models)), (len(models) - 1) // 2)
                centers[k] = np.sort(models, axis=0)[cut : len(models) - cut].mean(axis=0)
        assert again.assignments.tolist() == assignments
        for state, center in zip(federation.server_states(), centers, strict=True):
            assert flat(state) == pytest.approx(center, rel=1e-12, abs=1e-14)

    def test_stage_1_has_epochs_of_its_own(self) -> None:
        data = small_data(dtype=torch.float64)
        client = linear_client(double=True)
        one = run(client, data, TrimmedKMeans(1, cluster_beta=0, init_epochs=3), local_steps=1)
        other = run(client, data, FedAvg("uniform"), local_epochs=3)
        torch.testing.assert_close(
            one.server_states(), other.server_states(), rtol=1e-12, atol=1e-14
        )

    def test_without_trimming_one_cluster_is_uniform_fedavg(self) -> None:
        data = small_data(dtype=torch.float64)
        client = batchnorm_client().double()
        one = run(client, data, TrimmedKMeans(1, beta=0, cluster_beta=0, init_epochs=1), 4)
        other = run(client, data, FedAvg("uniform"), 4)
        torch.testing.assert_close(
            one.server_states(), other.server_states(), rtol=1e-12, atol=1e-14
        )

    @pytest.mark.filterwarnings("ignore:round .*exploded:UserWarning")
    @pytest.mark.parametrize("options", [{}, {"trim": "radius"}, {"estimate": "median"}])
    def test_one_attacker_moves_nothing_far(self, options: dict) -> None:
        class Attacked(ClientMethod):
            def after_training(self, c: LocalClient) -> None:
                theta = c.weights["network.theta"]
                theta.copy_(torch.where(c.num_samples == 2, 1e6, theta))

        x, y = targets((1, 1)).samples(0, "train")
        honest = [targets((1 + i / 10, 1)).samples(0, "train") for i in range(5)]
        data = TensorClients([*honest, (x.repeat(2, 1), y.repeat(2))], num_classes=2)
        callback = TrimmedKMeans(1, cluster_beta=0.2, **options)
        client = target_client()
        client.client_method = Attacked()
        federation = run(client, data, callback, 3)
        assert flat(federation.server_states()[0]) == pytest.approx([1.2, 1], abs=0.11)

    @pytest.mark.parametrize("trim", ["coordinate", "radius"])
    def test_buffers(self, trim: str) -> None:
        class Recording(TrimmedKMeans):
            def receive(self, updates: ClientUpdates) -> None:
                self.received = updates.states
                super().receive(updates)

        callback = Recording(1, beta=0.25, trim=trim)
        federation = run(batchnorm_client(), small_data(counts=[8, 8, 8, 40]), callback, 2)
        (state,), received = federation.server_states(), callback.received
        assert state["network.1.num_batches_tracked"].dtype == torch.long
        if trim == "coordinate":
            assert state["network.1.num_batches_tracked"] == 110  # of 40 samples, 11 epochs
            expected = received["network.1.running_mean"].sort(dim=0).values[1:3].mean(0)
        else:
            vectors = torch.cat([received[name].flatten(1) for name in PARAMETERS], dim=1)
            distances = (vectors - vectors.sort(dim=0).values[1:3].mean(0)).square().sum(1)
            kept = distances.argsort()[:3]
            expected = received["network.1.running_mean"][kept].mean(0)
        torch.testing.assert_close(state["network.1.running_mean"], expected)


class TestWhoMissesStage1:
    def test_newcomers_go_to_the_nearest_center(self) -> None:
        groups = ((0, 0), (10, 10), (0.5, 0), (10.5, 10)) * 3
        data = targets(*groups, holdout_clients=0.34)
        callback = TrimmedKMeans(2)
        federation = run(target_client(), data, callback, 2)
        others = [i for i in range(12) if i not in data.new_clients]
        for newcomer in data.new_clients.tolist():
            assert callback.assignments[newcomer] == -1
            like = next(i for i in others if i % 2 == newcomer % 2)
            assert_same(federation.client_state(newcomer), federation.client_state(like))

    def test_they_begin_with_it_when_they_answer(self) -> None:
        data = small_data(dropout=0.5, dtype=torch.float64)
        callback = TrimmedKMeans(2, init_epochs=2)
        federation = run(linear_client(double=True), data, callback, 1)
        missed = federation.history[0].failed
        assert missed
        assert (callback.assignments[missed] == -1).all()
        callback = TrimmedKMeans(2, init_epochs=2)
        federation = run(linear_client(double=True), data, callback, 8)
        answered = {i for entry in federation.history for i in set(entry.clients) - {*entry.failed}}
        assert (callback.assignments >= 0).nonzero().flatten().tolist() == sorted(answered)

    @pytest.mark.filterwarnings("ignore:.*round .*failed:UserWarning")
    def test_with_fewer_answers_than_clusters_it_is_tried_again(self) -> None:
        def fail(c: LocalClient) -> None:
            if c.num_samples == 2:
                raise RuntimeError("out of battery")

        x, y = targets((1, 1)).samples(0, "train")
        data = TensorClients([(x, y)] + [(x.repeat(2, 1), y.repeat(2))] * 2, num_classes=2)
        callback = TrimmedKMeans(2)
        federation = run(watched(target_client(), fail), data, callback, 2)
        assert [entry.clients for entry in federation.history] == [[0, 1, 2]] * 2
        assert callback.assignments.tolist() == [-1, -1, -1]
        assert flat(federation.client_state(0)).tolist() == [0, 0]

    def test_equal_models_fill_no_two_clusters(self) -> None:
        callback = TrimmedKMeans(3)
        federation = run(target_client(), targets((1, 1), (1, 1), (1, 1), (5, 5)), callback, 3)
        for state in federation.server_states():
            assert flat(state).tolist() in ([1, 1], [5, 5])
        assert flat(federation.client_state(3)).tolist() == [5, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_clusters": 0}, "num_clusters must be at least 1, got 0"),
        ({"init_epochs": 0}, "init_epochs must be at least 1, got 0"),
        ({"num_restarts": 0}, "num_restarts must be at least 1, got 0"),
        ({"num_iterations": 0}, "num_iterations must be at least 1, got 0"),
        ({"beta": 0.5}, r"beta must be in \[0, 0.5\), got 0.5"),
        ({"cluster_beta": -0.1}, r"cluster_beta must be in \[0, 0.5\), got -0.1"),
        ({"trim": "ball"}, "trim must be 'coordinate' or 'radius', got 'ball'"),
        ({"estimate": "mode"}, "estimate must be 'mean' or 'median', got 'mode'"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"TrimmedKMeans: {message}"):
        TrimmedKMeans(**options)

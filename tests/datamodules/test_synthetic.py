"""Generated data: their statistics, and what one client's samples depend on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression as Fitted
from sklearn.metrics import adjusted_rand_score

from pflight.callbacks import FeSEM
from pflight.data.data_module import FederatedDataModule
from pflight.data.loaders import SPLITS
from pflight.datamodules.sources.synthetic import ClusteredSynthetic, Synthetic
from pflight.errors import ConfigurationError
from pflight.models import LogisticRegression, ProximalClient
from tests.runs import run, sgd


def ready(data: FederatedDataModule) -> FederatedDataModule:
    data.setup()
    return data


def synthetic(**options) -> Synthetic:
    """Return small clients, all of whose samples are for training."""
    fractions = {"val_fraction": 0.0, "test_fraction": 0.0}
    return ready(Synthetic(**{"max_samples": 50, **fractions, **options}))


def train(data: FederatedDataModule, client: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = data.samples(client, "train")
    return x.numpy(), y.numpy()


def assert_equal_clients(one: FederatedDataModule, other: FederatedDataModule, count: int) -> None:
    for client in range(count):
        for split in SPLITS:
            for left, right in zip(
                one.samples(client, split), other.samples(client, split), strict=True
            ):
                assert torch.equal(left, right)


class TestSynthetic:
    def test_has_the_papers_shape(self):
        data = ready(Synthetic())
        x, y = data.samples(3, "train")
        assert (data.num_clients, data.num_classes) == (30, 10)
        assert x.shape == (len(y), 60)
        assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
        assert sum(data.num_samples(split)[3] for split in SPLITS) >= 50

    @pytest.mark.parametrize("iid", [False, True])
    def test_every_sample_has_the_label_of_its_clients_model(self, iid):
        data = synthetic(iid=iid, num_clients=8)
        for client in range(8):
            x, y = train(data, client)
            weights, bias = data.model(client)
            assert (weights.shape, bias.shape) == ((10, 60), (10,))
            assert ((x @ weights.T + bias).argmax(axis=1) == y).all()

    @pytest.mark.parametrize("alpha", [0.0, 0.5, 2.0])
    def test_alpha_is_the_standard_deviation_of_the_models_mean(self, alpha):
        data = Synthetic(alpha, num_clients=500)
        weights, biases = zip(*map(data.model, range(500)), strict=True)
        entries = np.array(weights).reshape(500, -1)
        means = entries.mean(axis=1)
        assert means.std() == pytest.approx(np.hypot(alpha, 600**-0.5), rel=0.12)
        assert entries.std(axis=1).mean() == pytest.approx(1, rel=0.01)
        together = np.array(biases).mean(axis=1) - means
        assert together.std() == pytest.approx((1 / 10 + 1 / 600) ** 0.5, rel=0.12)

    @pytest.mark.parametrize("beta", [0.0, 0.5, 2.0])
    def test_beta_is_the_standard_deviation_of_the_features_mean(self, beta):
        data = synthetic(beta=beta, num_clients=500)
        means = np.array([train(data, client)[0].mean(axis=0) for client in range(500)])
        assert means.mean(axis=1).std() == pytest.approx(np.hypot(beta, 60**-0.5), rel=0.12)
        assert means.std(axis=1).mean() == pytest.approx(1, rel=0.03)

    def test_feature_j_has_variance_j_to_the_minus_1_2(self):
        data = synthetic(num_clients=200)
        variances = [train(data, client)[0].var(axis=0, ddof=1) for client in range(200)]
        expected = np.arange(1, 61) ** -1.2
        assert np.mean(variances, axis=0) == pytest.approx(expected, rel=0.1)

    def test_iid_clients_share_one_model_and_one_distribution(self):
        data = synthetic(alpha=1, beta=1, iid=True, num_clients=200)
        for one, other in zip(data.model(0), data.model(7), strict=True):
            assert (one == other).all()
        assert data.model(0)[0].mean() == pytest.approx(0, abs=0.15)
        means = np.array([train(data, client)[0].mean(axis=0) for client in range(200)])
        assert np.abs(means.mean(axis=0)).max() < 0.05
        assert means.std(axis=0)[0] == pytest.approx(50**-0.5, rel=0.2)

    def test_sizes_are_floored_lognormal_above_the_minimum(self):
        data = synthetic(num_clients=1500, num_features=1, max_samples=None)
        sizes = data.num_samples().numpy() - 50
        assert sizes.min() >= 0
        assert np.quantile(sizes, [0.16, 0.5, 0.84]) == pytest.approx([7, 54, 403], rel=0.2)

    def test_sizes_obey_their_options(self):
        data = synthetic(num_clients=300, min_samples=7, max_samples=20)
        assert data.num_samples().aminmax() == (7, 20)

    def test_a_client_is_the_same_among_few_and_among_many(self):
        few, many = (ready(Synthetic(num_clients=n, max_samples=80)) for n in (3, 9))
        assert_equal_clients(few, many, 3)

    def test_the_seed_decides(self):
        one, same, other = (synthetic(num_clients=2, seed=seed) for seed in (4, 4, 5))
        assert_equal_clients(one, same, 2)
        assert not np.array_equal(train(one, 0)[0], train(other, 0)[0])
        assert not np.array_equal(one.model(0)[0], other.model(0)[0])
        assert not np.array_equal(one.model(0)[0], one.model(1)[0])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"alpha": -1.0}, "alpha must be at least 0, got -1"),
            ({"beta": float("nan")}, "beta must be a finite number, got nan"),
            ({"log_std": -0.1}, "log_std must be at least 0, got -0.1"),
            ({"num_features": 0}, "num_features must be at least 1, got 0"),
            ({"min_samples": 0}, "min_samples must be at least 1, got 0"),
            ({"max_samples": 49}, "max_samples must be at least min_samples = 50, got 49"),
            ({"num_clients": 0}, "num_clients must be at least 1, got 0"),
        ],
    )
    def test_bad_options(self, options, message):
        with pytest.raises(ConfigurationError, match=message):
            Synthetic(**options)


def accuracies(data: FederatedDataModule) -> tuple[float, float]:
    """Return the test accuracies of one linear model for all, and of one for each cluster."""

    def accuracy(clients: torch.Tensor) -> float:
        train, test = (data.dataset(clients, split) for split in ("train", "test"))
        return Fitted(max_iter=500).fit(train.x, train.y).score(test.x, test.y)

    members = [(data.clusters == k).nonzero().flatten() for k in range(data.num_clusters)]
    return accuracy(torch.arange(data.num_clients)), float(np.mean([*map(accuracy, members)]))


class TestClusteredSynthetic:
    def test_every_client_has_all_classes_in_equal_amounts(self):
        data = ready(ClusteredSynthetic(samples_per_client=64, num_classes=6, num_features=3))
        counts = sum(data.class_counts(split) for split in SPLITS)
        assert data.num_clients == 40
        assert (counts.sum(dim=1) == 64).all()
        assert counts.unique().tolist() == [10, 11]
        assert data.samples(0, "test")[0].shape[1:] == (3,)

    def test_classes_are_clouds_of_the_spread_around_standard_normal_points(self):
        data = ready(ClusteredSynthetic(1, num_clients=10, num_features=50, spread=0.5))
        pooled = data.dataset(torch.arange(10), "train")
        clouds = [pooled.x[pooled.y == kind] for kind in range(10)]
        deviations = torch.stack([cloud.std(dim=0) for cloud in clouds])
        assert deviations.mean(dim=1).tolist() == pytest.approx([0.5] * 10, rel=0.05)
        points = torch.stack([cloud.mean(dim=0) for cloud in clouds])
        assert points.std().item() == pytest.approx(1, rel=0.1)

    @pytest.mark.parametrize(
        ("difference", "most"), [("labels", 0.3), ("rotation", 0.6), ("features", 0.9)]
    )
    def test_one_model_for_each_cluster_beats_one_for_all(self, difference, most):
        data = ready(ClusteredSynthetic(difference=difference, num_clients=20))
        pooled, clustered = accuracies(data)
        assert clustered > 0.95
        assert pooled < most

    @pytest.mark.short("labels")
    @pytest.mark.parametrize("difference", ["labels", "rotation", "features"])
    def test_fesem_finds_the_clusters(self, difference):
        data = ClusteredSynthetic(difference=difference, num_clients=16, batch_size=10)
        torch.manual_seed(0)
        network = LogisticRegression(in_features=4, num_classes=10)
        client = ProximalClient(network, 10, optimizer=sgd(0.3), mu=0.05)
        callback = FeSEM(4)
        federation = run(client, data, callback, rounds=2, local_epochs=3)
        assert adjusted_rand_score(data.clusters, callback.assignments) == 1
        assert federation.history[-1].metrics["fesem/rand_index"] == 1

    def test_a_client_is_the_same_among_few_and_among_many_but_for_its_cluster(self):
        few, many = (ready(ClusteredSynthetic(1, num_clients=n)) for n in (3, 9))
        assert_equal_clients(few, many, 3)

    def test_the_seed_decides(self):
        one, same, other = (ready(ClusteredSynthetic(seed=seed)) for seed in (1, 1, 2))
        assert_equal_clients(one, same, 4)
        assert torch.equal(one.clusters, same.clusters)
        assert not torch.equal(one.clusters, other.clusters)
        assert not torch.equal(one.samples(0, "test")[0], other.samples(0, "test")[0])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"samples_per_client": 0}, "samples_per_client must be at least 1, got 0"),
            ({"num_features": 0}, "num_features must be at least 1, got 0"),
            ({"spread": -1.0}, "spread must be at least 0, got -1"),
        ],
    )
    def test_bad_options(self, options, message):
        with pytest.raises(ConfigurationError, match=message):
            ClusteredSynthetic(**options)

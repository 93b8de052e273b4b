from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from pflight.callbacks import FedAvg, FedProx, FeSEM, Local
from pflight.callbacks.methods.chains import find_chain
from pflight.callbacks.methods.matching import BBPMAP, permute
from pflight.datamodules import TensorClients
from pflight.engines import ClientUpdates
from pflight.errors import ConfigurationError
from pflight.federation import Federation
from pflight.models import MLP, Classifier, ProximalClient
from pflight.modifiers import Private
from tests import reference
from tests.runs import (
    CLASSES,
    FEATURES,
    ByHand,
    Point,
    QuadraticClient,
    assert_same,
    batches_of,
    batchnorm_client,
    flat,
    linear_client,
    network_client,
    quadratic_client,
    quiet_trainer,
    run,
    sgd,
    small_data,
    world_q,
)


class Recording(FeSEM):
    """Keeps what the clients sent."""

    received: ClientUpdates

    def receive(self, updates: ClientUpdates) -> None:
        self.received = updates
        super().receive(updates)


def point(*theta: float) -> dict[str, Tensor]:
    return {"network.theta": torch.tensor(theta, dtype=torch.float64)}


def targets(*models: tuple[float, float], **options: Any) -> TensorClients:
    """Return clients that return these models after one step of size 1 from anywhere."""
    train = [
        (torch.tensor([[1.0, 1.0, *model]], dtype=torch.float64), torch.zeros(1, dtype=torch.long))
        for model in models
    ]
    return TensorClients(train, num_classes=2, **options)


def target_client() -> QuadraticClient:
    return QuadraticClient(Point(), num_classes=2, optimizer=sgd(1.0))


def inertia(models: np.ndarray, labels: np.ndarray) -> float:
    return sum(
        ((models[labels == k] - models[labels == k].mean(0)) ** 2).sum() for k in set(labels)
    )


def softmax_world(data: TensorClients) -> reference.SoftmaxRegression:
    clients = range(data.num_clients)
    return reference.SoftmaxRegression([data.samples(i, "train") for i in clients], CLASSES)


def perturbed(count: int) -> list[dict[str, Tensor]]:
    """Return distinct centers around the client's own weights."""
    random = torch.Generator().manual_seed(3)
    return [
        {
            name: value + 0.3 * torch.randn(value.shape, generator=random, dtype=torch.float64)
            for name, value in linear_client(double=True).state_dict().items()
        }
        for _ in range(count)
    ]


C4 = (0.0, 0.0), (0.0, 2.0), (10.0, 0.0), (10.0, 4.0)


def test_c4_e_step_and_m_step() -> None:
    callback = FeSEM(2, centers=[point(1, 1), point(9, 1)])
    federation = run(target_client(), targets(*C4), callback)
    assert callback.assignments.tolist() == [0, 0, 1, 1]
    assert [flat(state).tolist() for state in federation.server_states()] == [[0, 1], [10, 2]]
    assert [flat(federation.client_state(i)).tolist() for i in range(4)] == [
        [0, 1],
        [0, 1],
        [10, 2],
        [10, 2],
    ]


def test_c4_the_initialisation_finds_the_same_clusters() -> None:
    callback = FeSEM(2)
    federation = run(target_client(), targets(*C4), callback)
    first, second = callback.assignments.tolist()[::2]
    assert callback.assignments.tolist() == [first, first, second, second]
    centers = {k: flat(federation.server_states()[k]).tolist() for k in (first, second)}
    assert centers == {first: [0, 1], second: [10, 2]}
    assert inertia(np.array(C4), callback.assignments.numpy()) == 10


@pytest.mark.parametrize(
    ("scaling", "expected"), [("eq7", [0.186, 0.296]), ("plain", [0.189, 0.284])]
)
def test_c4_proximal_steps(scaling: str, expected: list[float]) -> None:
    callback = Recording(1, centers=[point(0, 1)], mu=0.1, scaling=scaling)
    run(quadratic_client(), world_q(), callback, local_steps=2)
    assert callback.received.states["network.theta"][0].tolist() == pytest.approx(
        expected, abs=1e-12
    )


@pytest.mark.short("2-eq7", "3-plain")
@pytest.mark.parametrize("scaling", ["eq7", "plain"])
@pytest.mark.parametrize("clusters", [2, 3])
def test_several_rounds_with_partial_participation(scaling: str, clusters: int) -> None:
    data = small_data(cohort_size=3, dtype=torch.float64)
    centers = perturbed(clusters)
    callback = FeSEM(clusters, centers=centers, mu=0.4, scaling=scaling)
    federation = run(linear_client(double=True), data, callback, rounds=6, local_epochs=2)
    expected, assignments = reference.fesem(
        softmax_world(data),
        [flat(center) for center in centers],
        [entry.clients for entry in federation.history],
        lambda t, i: batches_of(data, t, i, 2),
        lr=0.1,
        strength=0.4,
        scaling=scaling,
    )
    assert callback.assignments.tolist() == assignments
    for state, center in zip(federation.server_states(), expected, strict=True):
        assert flat(state) == pytest.approx(center, rel=1e-12, abs=1e-14)


def test_mean_samples_is_over_all_clients_with_data_whatever_the_cohort() -> None:
    data = small_data(counts=[5, 0, 12, 7], cohort_size=1, dtype=torch.float64)
    centers = perturbed(1)
    callback = FeSEM(1, centers=centers, mu=0.4)
    federation = run(linear_client(double=True), data, callback, rounds=2, local_epochs=2)
    expected, _ = reference.fesem(
        softmax_world(data),
        [flat(center) for center in centers],
        [entry.clients for entry in federation.history],
        lambda t, i: batches_of(data, t, i, 2),
        lr=0.1,
        strength=0.4,
    )
    assert flat(federation.server_states()[0]) == pytest.approx(expected[0], rel=1e-12, abs=1e-14)


class TestInitialisation:
    def run(self, rounds: int, **options: int) -> tuple[Federation, TensorClients]:
        data = small_data(cohort_size=2, dtype=torch.float64)
        client, callback = linear_client(double=True), FeSEM(2, mu=0.4, **options)
        return run(client, data, callback, rounds, local_epochs=2), data

    def models(self, data: TensorClients) -> np.ndarray:
        start = flat(linear_client(double=True).state_dict())
        world = softmax_world(data)
        pull = 2 * 0.4 * world.counts.mean()
        return np.stack(
            [
                reference.local_training(
                    world, start, i, batches_of(data, 0, i, 2), 0.1, pull / world.counts[i]
                )
                for i in range(data.num_clients)
            ]
        )

    def test_all_clients_train_once_and_no_partition_is_better(self) -> None:
        federation, data = self.run(rounds=1)
        assert federation.history[0].clients == list(range(6))
        models, labels = self.models(data), federation.callback.assignments.numpy()
        best = min(
            inertia(models, np.array(partition))
            for partition in product((0, 1), repeat=6)
            if len(set(partition)) == 2
        )
        assert inertia(models, labels) == pytest.approx(best, rel=1e-12)
        for k, state in enumerate(federation.server_states()):
            assert flat(state) == pytest.approx(models[labels == k].mean(0), rel=1e-12, abs=1e-14)

    def test_its_traffic_counts(self) -> None:
        federation, _ = self.run(rounds=1)
        assert federation.history[0].bytes_down == 6 * 15 * 8
        assert federation.history[0].bytes_up == 6 * 15 * 8

    def test_rounds_go_on_from_its_centers(self) -> None:
        first, data = self.run(rounds=1)
        last, _ = self.run(rounds=4)
        centers, assignments = reference.fesem(
            softmax_world(data),
            [flat(state) for state in first.server_states()],
            [entry.clients for entry in last.history[1:]],
            lambda t, i: batches_of(data, t, i, 2),
            lr=0.1,
            strength=0.4,
            assignments=first.callback.assignments.tolist(),
            first_round=1,
        )
        assert last.callback.assignments.tolist() == assignments
        for state, center in zip(last.server_states(), centers, strict=True):
            assert flat(state) == pytest.approx(center, rel=1e-12, abs=1e-14)

    def test_a_sample_of_clients_trains_and_the_others_come_as_newcomers(self) -> None:
        first, data = self.run(rounds=1, init_clients=4)
        seen = first.callback.assignments >= 0
        assert first.history[0].clients == seen.nonzero().flatten().tolist()
        assert seen.sum() == 4
        last, _ = self.run(rounds=5, init_clients=4)
        centers, assignments = reference.fesem(
            softmax_world(data),
            [flat(state) for state in first.server_states()],
            [entry.clients for entry in last.history[1:]],
            lambda t, i: batches_of(data, t, i, 2),
            lr=0.1,
            strength=0.4,
            assignments=first.callback.assignments.tolist(),
            first_round=1,
        )
        assert last.callback.assignments.tolist() == assignments
        for state, center in zip(last.server_states(), centers, strict=True):
            assert flat(state) == pytest.approx(center, rel=1e-12, abs=1e-14)

    def test_one_client_per_cluster(self) -> None:
        callback = FeSEM(4)
        federation = run(target_client(), targets(*C4), callback)
        assert sorted(callback.assignments.tolist()) == [0, 1, 2, 3]
        for i, model in enumerate(C4):
            assert tuple(flat(federation.client_state(i))) == model

    def test_equal_models_fill_no_two_clusters_but_training_goes_on(self) -> None:
        callback = FeSEM(3)
        federation = run(target_client(), targets((1, 1), (1, 1), (1, 1), (5, 5)), callback, 3)
        for state in federation.server_states():
            assert np.isfinite(flat(state)).all()
        assert flat(federation.client_state(0)).tolist() == [1, 1]
        assert flat(federation.client_state(3)).tolist() == [5, 5]


def test_ties_go_to_the_lowest_index_and_memberless_centers_stay() -> None:
    callback = FeSEM(3, centers=[point(2, 2), point(2, 2), point(50, 50)])
    federation = run(target_client(), targets(*C4), callback)
    assert callback.assignments.tolist() == [0, 0, 0, 0]
    assert [flat(state).tolist() for state in federation.server_states()] == [
        [5, 1.5],
        [2, 2],
        [50, 50],
    ]


def test_the_e_step_of_a_round_uses_the_centers_as_sent_whatever_the_chunks() -> None:
    class OneByOne(FeSEM):
        def round(self, cohort):
            self.on_round_start()
            for updates in self.clients.train(cohort, self.broadcast, max_chunk=1):
                self.receive(updates)
            self.set_pseudo_gradients()

    data = small_data(dtype=torch.float64)
    chunked, whole = (kind(2, centers=perturbed(2)) for kind in (OneByOne, FeSEM))
    one = run(linear_client(double=True), data, chunked, rounds=4)
    other = run(linear_client(double=True), data, whole, rounds=4)
    assert torch.equal(chunked.assignments, whole.assignments)
    for left, right in zip(one.server_states(), other.server_states(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-14)


class TestNewcomers:
    """Clients that have not trained: from where they train first, and by what they are judged."""

    def data(self) -> TensorClients:
        counts = [5, 12, 7, 9, 3, 10, 6, 2, 8, 4, 5, 6]
        return small_data(counts, holdout_clients=0.5, dtype=torch.float64)

    def fitted(self, newcomers: str | None, **options: Any) -> tuple[Federation, FeSEM]:
        callback = FeSEM(2, centers=perturbed(2), newcomers=newcomers)
        client = linear_client(double=True)
        return run(client, self.data(), callback, rounds=2, **options), callback

    def test_the_mean_of_the_centers_is_by_their_members_samples(self) -> None:
        federation, callback = self.fitted("mean")
        data = self.data()
        counts, assignments = data.num_samples().numpy(), callback.assignments.numpy()
        weights = [counts[assignments == k].sum() for k in range(2)]
        centers = [flat(state) for state in federation.server_states()]
        for newcomer in data.new_clients.tolist():
            assert assignments[newcomer] == -1
            assert flat(federation.client_state(newcomer)) == pytest.approx(
                np.average(centers, axis=0, weights=weights), rel=1e-12, abs=1e-14
            )

    def test_by_default_it_is_the_center_with_the_lowest_training_loss(self) -> None:
        federation, callback = self.fitted(None)
        data, centers = self.data(), federation.server_states()
        chosen = []
        for newcomer in data.new_clients.tolist():
            x, y = data.samples(newcomer, "train")
            losses = []
            for center in centers:
                logits = x @ center["network.weight"].T + center["network.bias"]
                losses.append(nn.functional.cross_entropy(logits, y).item())
            chosen.append(int(np.argmin(losses)))
            assert_same(federation.client_state(newcomer), centers[chosen[-1]])
            assert callback.assignments[newcomer] == -1
        assert len({*chosen}) == 2  # else the world would show nothing

    def test_or_the_center_nearest_to_what_it_trains_from_their_mean(self) -> None:
        data = targets(*(C4 * 4), holdout_clients=0.4)
        callback = FeSEM(2, centers=[point(1, 1), point(9, 1)], newcomers="distance")
        federation = run(target_client(), data, callback, rounds=2)
        centers = [flat(state).tolist() for state in federation.server_states()]
        newcomers = data.new_clients.tolist()
        assert len({i % 4 // 2 for i in newcomers}) == 2  # of both groups
        for newcomer in newcomers:
            own = flat(federation.client_state(newcomer)).tolist()
            assert own == centers[newcomer % 4 // 2]

    def test_training_is_the_same(self) -> None:
        options = {"init_clients": 2}
        runs = []
        for newcomers in ("mean", "loss", "distance"):
            callback = FeSEM(2, newcomers=newcomers, **options)
            data = small_data(cohort_size=2)
            runs.append((run(linear_client(), data, callback, rounds=3), callback))
        (mean, first), *others = runs
        for other, callback in others:
            assert callback.assignments.tolist() == first.assignments.tolist()
            for left, right in zip(mean.server_states(), other.server_states(), strict=True):
                assert_same(left, right)
            for one, another in zip(mean.history, other.history, strict=True):
                assert (one.bytes_down, one.bytes_up) == (another.bytes_down, another.bytes_up)

    @pytest.mark.parametrize(
        ("newcomers", "down", "up"), [("loss", 2, 0), ("distance", 1, 1), ("mean", 0, 0)]
    )
    def test_what_travels_for_it_is_logged(self, newcomers: str, down: int, up: int) -> None:
        callback = FeSEM(2, centers=perturbed(2), newcomers=newcomers)
        data, trainer = self.data(), quiet_trainer(1, callback)
        federation = Federation(linear_client(double=True))
        trainer.fit(federation, datamodule=data)
        (values,) = trainer.test(federation, datamodule=data, verbose=False)
        size = sum(value.nbytes for value in federation.server_states()[0].values())
        found = [values.get(f"test/bytes_{way}", 0) for way in ("down", "up")]
        assert found == [down * 6 * size, up * 6 * size]  # of six newcomers

    @pytest.mark.parametrize("newcomers", ["loss", "distance"])
    def test_each_is_looked_for_once_and_only_what_travels_counts(self, newcomers: str) -> None:
        private = Private("head")
        callback = FeSEM(2, newcomers=newcomers, modifiers=[private])
        data, trainer = self.data(), quiet_trainer(1, callback)
        network = nn.Sequential(nn.Linear(FEATURES, 6), nn.ReLU(), nn.Linear(6, CLASSES))
        federation = Federation(network_client(network).double(), finetune_epochs=1)
        trainer.fit(federation, datamodule=data)
        (values,) = trainer.test(federation, datamodule=data, verbose=False)
        size = (FEATURES * 6 + 6) * 8
        ways = (2, 0) if newcomers == "loss" else (1, 1)
        assert [values[f"test/bytes_{way}"] for way in ("down", "up")] == [
            n * 6 * size for n in ways
        ]

    def test_without_a_loss_they_go_by_distance(self) -> None:
        with pytest.raises(ConfigurationError, match="newcomers='loss' asks for the loss"):
            run(linear_client(ByHand), small_data(), FeSEM(2, newcomers="loss"))
        data = small_data(holdout_clients=0.34)
        federation = run(linear_client(ByHand), data, FeSEM(2), rounds=2)
        centers = [flat(state) for state in federation.server_states()]
        for newcomer in data.new_clients.tolist():
            own = flat(federation.client_state(newcomer))
            assert any(np.array_equal(own, center) for center in centers)


def test_distances_are_over_trainable_parameters_only() -> None:
    callback = FeSEM(2)
    client = batchnorm_client()
    run(client, small_data(), callback)
    states = [client.state_dict(), client.state_dict()]
    states[1] = {
        name: value + 100 if "running" in name else value for name, value in states[1].items()
    }
    again = FeSEM(2, centers=states)
    run(batchnorm_client(), small_data(), again)
    assert again.assignments.tolist() == [0] * 6  # ties, whatever the buffers


def test_every_center_owns_averaged_buffers() -> None:
    federation = run(batchnorm_client(), small_data(), FeSEM(2), rounds=3)
    for state in federation.server_states():
        assert state["network.1.num_batches_tracked"].dtype == torch.int64
        assert state["network.1.num_batches_tracked"] > 0
    first, second = federation.server_states()
    assert not torch.equal(first["network.1.running_mean"], second["network.1.running_mean"])


class TestReductions:
    def test_one_cluster_without_a_pull_is_uniform_fedavg(self) -> None:
        data = small_data(cohort_size=3, dtype=torch.float64)
        client = linear_client(double=True)
        callback = FeSEM(1, centers=[client.state_dict()])
        fesem = run(client, data, callback, rounds=4, local_epochs=2)
        fedavg = run(client, data, FedAvg("uniform"), rounds=4, local_epochs=2)
        assert_same(fesem.server_states()[0], fedavg.server_states()[0])

    def test_one_cluster_with_a_plain_pull_is_uniform_fedprox(self) -> None:
        data = small_data(cohort_size=3, dtype=torch.float64)
        client = linear_client(double=True)
        named = linear_client(ProximalClient, double=True, mu=0.7, scaling="plain")
        fedprox = FedProx(mu=0.7, weighting="uniform")
        runs = [
            run(client, data, FeSEM(1, centers=[client.state_dict()], mu=0.7, scaling="plain"), 4),
            run(named, data, FeSEM(1, centers=[client.state_dict()]), 4),
            run(client, data, fedprox, 4),
        ]
        for federation in runs[1:]:
            assert_same(federation.server_states()[0], runs[0].server_states()[0])

    def test_as_many_clusters_as_clients_are_local_training(self) -> None:
        data = small_data(counts=[5, 12, 7, 9], dtype=torch.float64)
        callback = FeSEM(4)
        client = linear_client(double=True, optimizer=sgd(0.02))
        fesem = run(client, data, callback, rounds=4)
        local = run(client, data, Local(), rounds=4)
        assert sorted(callback.assignments.tolist()) == [0, 1, 2, 3]
        for i in range(4):
            assert flat(fesem.client_state(i)) == pytest.approx(
                flat(local.client_state(i)), rel=1e-12, abs=1e-14
            )


class ModelClient(Classifier):
    """A client that returns the model which its samples carry, after one step of size 1."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        weights = torch.cat([p.flatten() for p in self.network.parameters()])
        return (weights - batch[0][0]).square().sum() / 2


def model_client(*widths: int) -> ModelClient:
    first, hidden, last = widths
    layers = nn.Linear(first, hidden), nn.ReLU(), nn.Linear(hidden, last)
    torch.manual_seed(1)
    return ModelClient(nn.Sequential(*layers).double(), last, optimizer=sgd(1.0))


def models(
    states: Sequence[Mapping[str, Tensor]], labels: Sequence[Sequence[int]]
) -> TensorClients:
    """Return clients that return these models and have samples of these classes."""
    train = [
        (torch.stack([torch.from_numpy(flat(state))] * len(y)), torch.tensor(y))
        for state, y in zip(states, labels, strict=True)
    ]
    classes = len(list(states[0].values())[-1])
    return TensorClients(train, num_classes=classes, batch_size=None)


def network(*values: list) -> dict[str, Tensor]:
    names = [f"network.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")]
    tensors = [torch.tensor(value, dtype=torch.float64) for value in values]
    return dict(zip(names, tensors, strict=True))


class TestMatching:
    """FeSEM-MA."""

    a = network([[2, 0], [0, 2]], [0, 0], [[1, -1], [5, 5]], [1, 5])
    b = network([[0.1, 2.1], [1.9, -0.1]], [0, 0], [[-1.1, 0.9], [7, 7]], [3, 7])
    labels = (0, 0, 0), (0, 1, 1)  # counts 3, 0 | 1, 2

    @pytest.mark.parametrize("estimate", ["mean", "map"])
    def test_c5_and_c5d(self, estimate: str) -> None:
        callback = FeSEM(1, matching=BBPMAP(estimate=estimate), centers=[self.a])
        federation = run(model_client(2, 2, 2), models([self.a, self.b], self.labels), callback)
        expected = {  # B's neurons change places; the last layer is 3 parts A and 1 part B, and B
            "mean": [1.95, -0.05, 0.05, 2.05, 0, 0, 0.975, -1.025, 7, 7, 1.5, 7],
            "map": [1.3, -0.1 / 3, 0.1 / 3, 4.1 / 3, 0, 0, 0.975, -1.025, 7, 7, 1.5, 7],
        }
        assert flat(federation.server_states()[0]) == pytest.approx(expected[estimate])

    def test_a_permuted_copy_belongs_to_its_center(self) -> None:
        client = model_client(3, 6, 2)
        chain = find_chain(client)
        torch.manual_seed(2)
        centers = [
            {name: torch.randn_like(value) for name, value in client.state_dict().items()}
            for _ in range(2)
        ]
        copies = [permute(centers[k], chain, [torch.randperm(6)]) for k in (0, 1, 0, 1)]
        data = models(copies, [[0, 1]] * 4)
        callback = FeSEM(2, matching="bbp_map", centers=centers)
        federation = run(client, data, callback, rounds=3)
        assert callback.assignments.tolist() == [0, 1, 0, 1]
        x = torch.randn(5, 3, dtype=torch.float64)
        for k, state in enumerate(federation.server_states()):
            client.load_state_dict(centers[k])
            expected = client(x)
            client.load_state_dict(state)
            torch.testing.assert_close(client(x), expected, rtol=1e-12, atol=1e-14)

    def test_newcomers_are_served_the_mean_of_aligned_centers(self) -> None:
        client = model_client(3, 6, 2)
        torch.manual_seed(2)
        center = {name: torch.randn_like(value) for name, value in client.state_dict().items()}
        copy = permute(center, find_chain(client), [torch.arange(6).roll(1)])
        callback = FeSEM(2, matching="bbp_map", centers=[center, copy])
        data = models([center] * 3, [[0, 1]] * 3)
        federation = Federation(client)
        quiet_trainer(1, callback).validate(federation, datamodule=data)
        torch.testing.assert_close(dict(federation.client_state(0)), center, rtol=1e-12, atol=1e-14)

    def test_neurons_that_keep_their_places_make_it_fesem(self) -> None:
        """With equal class counts; several rounds, partial participation, BatchNorm."""
        y = torch.arange(6) % CLASSES
        random = torch.Generator().manual_seed(8)
        train = [
            (torch.randn(6, 4, generator=random, dtype=torch.float64) + i % 2, y) for i in range(6)
        ]
        data = TensorClients(train, num_classes=CLASSES, cohort_size=4, batch_size=3)
        client = batchnorm_client(optimizer=sgd(0.01)).double()
        runs = [
            run(client, data, FeSEM(2, matching=matching, mu=0.1), rounds=5, local_epochs=2)
            for matching in (None, "bbp_map")
        ]
        plain, matched = (federation.callback.assignments for federation in runs)
        assert torch.equal(plain, matched)
        for left, right in zip(*(federation.server_states() for federation in runs), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-14)

    def test_chunks_do_not_matter(self) -> None:
        class Backwards(FeSEM):
            def round(self, cohort: Tensor) -> None:
                self.on_round_start()
                for updates in self.clients.train(cohort.flip(0), self.broadcast, max_chunk=1):
                    self.receive(updates)
                self.set_pseudo_gradients()

        client = network_client(MLP(4, [5], CLASSES)).double()
        data = small_data(dtype=torch.float64)
        torch.manual_seed(3)
        centers = [
            {name: torch.randn_like(value) for name, value in client.state_dict().items()}
            for _ in range(2)
        ]
        one, other = (
            run(client, data, kind(2, matching="bbp_map", centers=centers), rounds=3)
            for kind in (Backwards, FeSEM)
        )
        for left, right in zip(one.server_states(), other.server_states(), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-14)

    @pytest.mark.parametrize(
        ("layer", "options", "message"),
        [
            (nn.LayerNorm(6), {}, "LayerNorm 'network.1' stands before Linear 'network.2'"),
            (nn.BatchNorm1d(6), {"buffers": "local"}, r"network\.1\.running_mean.* not travel"),
            (nn.BatchNorm1d(6), {"buffers": "reset"}, r"network\.1\.running_mean.* not travel"),
        ],
    )
    def test_what_can_not_be_matched(self, layer: nn.Module, options: dict, message: str) -> None:
        client = network_client(nn.Sequential(nn.Linear(4, 6), layer, nn.Linear(6, CLASSES)))
        with pytest.raises(ConfigurationError, match=message):
            run(client, small_data(), FeSEM(2, matching="bbp_map", **options))

    def test_frozen_layers_can_not_be_matched(self) -> None:
        client = network_client(MLP(4, [5], CLASSES))
        client.network.hidden[0].weight.requires_grad_(False)
        with pytest.raises(ConfigurationError, match=r"hidden\.0\.weight', which does not travel"):
            run(client, small_data(), FeSEM(2, matching="bbp_map"))


def test_distances_of_ones_own() -> None:
    def along_the_second(states: TensorDict, center: Mapping[str, Tensor]) -> Tensor:
        return (states["network.theta"] - center["network.theta"])[:, 1].abs()

    # By the second coordinate alone (0, 0) and (10, 0) belong to the first center.
    callback = FeSEM(2, centers=[point(5, 0), point(1, 2)], distance=along_the_second)
    federation = run(target_client(), targets(*C4), callback)
    assert callback.assignments.tolist() == [0, 1, 0, 1]
    assert [flat(state).tolist() for state in federation.server_states()] == [[5, 0], [5, 3]]


def test_the_objective_and_the_moved_clients_are_logged() -> None:
    class Twice(FeSEM):
        """Lets the second round's clients change their centers."""

        def on_round_start(self) -> None:
            super().on_round_start()
            if self.clients.rounds:
                for k, center in enumerate([point(10, 2), point(0, 0)]):
                    self.server.replace(k, {**self.server.tensors(k), **center})

    callback = Twice(2, centers=[point(1, 1), point(9, 1)])
    federation = run(target_client(), targets(*C4), callback, rounds=2)
    first, second = (entry.metrics for entry in federation.history)
    assert (first["fesem/objective"], first["fesem/moved"]) == ((2 + 2 + 2 + 10) / 4, 0)
    assert (second["fesem/objective"], second["fesem/moved"]) == ((0 + 4 + 4 + 4) / 4, 4)


@pytest.mark.parametrize(
    ("distance", "message"),
    [
        (lambda states, center: torch.tensor(0.0), r"for each of 2 clients, got \[\]"),
        (lambda states, center: states["network.bias"], r"for each of 2 clients, got \[2, 3\]"),
        (lambda states, center: 0.0, "for each of 2 clients, got float"),
        (lambda states: 0.0, "failed: TypeError: .*positional argument"),
        (lambda states, center: torch.full(states.batch_size, torch.nan), "gave NaN"),
    ],
)
def test_a_distance_that_is_no_number_by_client(distance: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"FeSEM: distance .*{message}"):
        run(linear_client(), small_data(), FeSEM(2, distance=distance))


def test_known_groups_are_recovered() -> None:
    means = [(0.0, 0.0), (8.0, 8.0), (-8.0, 8.0)]
    groups = [0, 1, 2, 2, 1, 0, 0, 1, 2, 1]
    random = np.random.default_rng(5)
    data = targets(*(tuple(random.normal(means[group], 0.5)) for group in groups))
    callback = FeSEM(3)
    run(target_client(), data, callback, rounds=2)
    pairs = {(group, k) for group, k in zip(groups, callback.assignments.tolist(), strict=True)}
    assert len(pairs) == 3


def test_sizes_are_logged_every_round() -> None:
    federation = run(linear_client(), small_data(), FeSEM(2), rounds=3)
    for entry in federation.history:
        sizes = [entry.metrics[f"fesem/size_{k}"] for k in range(2)]
        assert sum(sizes) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_clusters": 0}, "num_clusters must be at least 1, got 0"),
        ({"num_clusters": "three"}, "a whole number or 'auto', got 'three'"),
        ({"num_clusters": 2, "num_restarts": 0}, "num_restarts must be at least 1, got 0"),
        ({"num_clusters": 3, "init_clients": 2}, r"init_clients \(2\)"),
        ({"num_clusters": 3, "centers": []}, "0 centers were given"),
        ({"num_clusters": 2, "matching": "bbp"}, "matching must be 'bbp_map', .*, got 'bbp'"),
        ({"num_clusters": 2, "matching": BBPMAP(grow=True)}, "grow=True makes centers wider"),
        (
            {"num_clusters": 2, "distance": "l1"},
            "distance must be 'l2', 'product', 'subspace', 'cosine_B' or a function, got 'l1'",
        ),
        ({"num_clusters": "auto", "candidates": []}, "candidates must be"),
        ({"num_clusters": "auto", "candidates": [0, 1]}, r"candidates must be .* got \[0, 1\]"),
        ({"num_clusters": "auto", "criterion": "loss"}, "criterion must be"),
        ({"num_clusters": "auto", "init_clients": 5}, r"init_clients \(5\)"),
        ({"num_clusters": "auto", "centers": []}, "0 centers were given for num_clusters=auto"),
        ({"num_clusters": 2, "buffers": "mine"}, "buffers must be"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        FeSEM(**options)


def test_centers_of_another_network() -> None:
    with pytest.raises(ConfigurationError, match=r"'network.theta' of shape \(3,\)"):
        run(target_client(), targets(*C4), FeSEM(1, centers=[point(1, 2, 3)]))

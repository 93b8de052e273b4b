from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflight import Federation
from pflight.callbacks import IFCA, FedAvg
from pflight.datamodules import TensorClients
from pflight.errors import ConfigurationError
from pflight.models import ProximalClient
from pflight.states.layers import Layers
from tests import reference
from tests.runs import (
    CLASSES,
    FEATURES,
    assert_same,
    batches_of,
    batchnorm_client,
    dropout_client,
    flat,
    linear_client,
    quadratic_client,
    quiet_trainer,
    run,
    samples,
    small_data,
    world_q,
)


def point(*theta: float) -> dict[str, Tensor]:
    return {"network.theta": torch.tensor(theta, dtype=torch.float64)}


C2 = [point(0, 0), point(-2, 3)]


def perturbed(count: int) -> list[dict[str, Tensor]]:
    """Return distinct centers around the client's own weights."""
    random = torch.Generator().manual_seed(3)
    return [
        {
            name: value + 0.5 * torch.randn(value.shape, generator=random, dtype=torch.float64)
            for name, value in linear_client(double=True).state_dict().items()
        }
        for _ in range(count)
    ]


def losses(data: TensorClients, client: int, theta: np.ndarray) -> float:
    """Return a client's mean cross-entropy on its training samples."""
    x, y = data.samples(client, "train")
    weight, bias = torch.from_numpy(theta).split([CLASSES * FEATURES, CLASSES])
    return F.cross_entropy(x @ weight.view(CLASSES, FEATURES).T + bias, y).item()


def ifca(
    data: TensorClients, centers: Sequence[np.ndarray], cohorts: list[list[int]], lr: float
) -> tuple[list[np.ndarray], list[int]]:
    """Return centers and choices in rounds of IFCA, two local epochs each."""
    clients = range(data.num_clients)
    world = reference.SoftmaxRegression([data.samples(i, "train") for i in clients], CLASSES)
    centers, chosen = list(centers), [-1] * data.num_clients
    for round_, cohort in enumerate(cohorts):
        trained: dict[int, list[tuple[int, np.ndarray]]] = {}
        for i in cohort:
            chosen[i] = int(np.argmin([losses(data, i, center) for center in centers]))
            batches = batches_of(data, round_, i, epochs=2)
            model = reference.local_training(world, centers[chosen[i]], i, batches, lr)
            trained.setdefault(chosen[i], []).append((world.counts[i], model))
        for k, members in trained.items():
            counts, models = zip(*members, strict=True)
            centers[k] = np.average(models, axis=0, weights=counts)
    return centers, chosen


class TestRounds:
    def test_c2(self) -> None:
        callback = IFCA(2, centers=C2)
        federation = run(quadratic_client(), world_q(), callback)
        assert callback.assignments.tolist() == [0, 0, 1]
        first, second = (flat(state) for state in federation.server_states())
        assert first == pytest.approx([0.475, 0.025], abs=1e-12)
        assert second == pytest.approx([-2, 3.1], abs=1e-12)
        assert federation.history[0].bytes_down == 3 * 2 * 16
        assert federation.history[0].bytes_up == 3 * 16

    def test_c2_losses(self) -> None:
        federation = Federation(quadratic_client())
        quiet_trainer(1, IFCA(2, centers=C2)).validate(federation, world_q())
        clients = torch.arange(3)
        for k, expected in enumerate([[1.5, 9.5, 10], [20.5, 27, 0.5]]):
            sent = federation.server.expand(k, federation.layout.names, 3)
            measured = federation.clients.losses(clients, sent)
            assert measured.tolist() == pytest.approx(expected, abs=1e-12)

    def test_several_rounds_with_some_of_the_clients(self) -> None:
        data = small_data(cohort_size=4, dtype=torch.float64)
        callback = IFCA(3, centers=perturbed(3))
        federation = run(linear_client(double=True), data, callback, 5, local_epochs=2)
        cohorts = [entry.clients for entry in federation.history]
        starts = [flat(center) for center in perturbed(3)]
        centers, chosen = ifca(data, starts, cohorts, lr=0.1)
        assert len(set(chosen)) > 1
        for state, center in zip(federation.server_states(), centers, strict=True):
            assert flat(state) == pytest.approx(center, rel=1e-12, abs=1e-14)
        for i in range(6):  # judged by the lowest training loss now
            best = min(centers, key=lambda center: losses(data, i, center))
            assert flat(federation.client_state(i)) == pytest.approx(best, rel=1e-12, abs=1e-14)

    def test_divided_by_the_cohort_it_averages_gradients(self) -> None:
        """Of three clients, whose gradients are (-1, 2) and (-6, -1), and (0, -1)."""
        callback = IFCA(2, centers=C2, weighting="uniform", divide_by="cohort")
        federation = run(quadratic_client(), world_q(), callback)
        first, second = (flat(state) for state in federation.server_states())
        assert first == pytest.approx([0.7 / 3, -0.1 / 3], abs=1e-12)
        assert second == pytest.approx([-2, 3 + 0.1 / 3], abs=1e-12)

    @pytest.mark.short("0-cluster", "1-cohort")
    @pytest.mark.parametrize("divide_by", ["cluster", "cohort"])
    @pytest.mark.parametrize("group_rounds", [0, 1])
    def test_shared_layers_are_the_mean_of_all_clients(
        self, group_rounds: int, divide_by: str
    ) -> None:
        """After a round they are FedAvg's, where all models begin alike."""
        client, data = batchnorm_client().double(), small_data(dtype=torch.float64)
        layers, head = Layers(first=2), {"network.3.weight", "network.3.bias"}
        options = {"group_rounds": group_rounds, "divide_by": divide_by, "shared": layers}
        federation = run(client, data, IFCA(3, **options), 1)
        states = federation.server_states()
        assert not torch.equal(states[0]["network.3.weight"], states[1]["network.3.weight"])
        for name in states[0].keys() - head:
            assert torch.equal(states[0][name], states[1][name])
            assert torch.equal(states[0][name], states[2][name])
        if group_rounds:
            plain = run(client, data, FedAvg(), 1).server_states()[0]
            for name in plain.keys() - head:
                torch.testing.assert_close(states[2][name], plain[name])

    def test_shared_layers_travel_once(self) -> None:
        federation = run(linear_client(), small_data(), IFCA(3, shared=Layers(last=1)), rounds=2)
        size = sum(4 * p.numel() for p in linear_client().parameters())
        assert [entry.bytes_down for entry in federation.history] == [6 * size] * 2
        client, callback = batchnorm_client(), IFCA(3, shared=Layers(first=2))
        federation = run(client, small_data(), callback, rounds=2)
        model = sum(value.nbytes for value in client.state_dict().values())
        head = sum(p.nbytes for p in client.network[3].parameters())
        assert [e.bytes_down for e in federation.history] == [6 * model, 6 * (model + 2 * head)]
        assert [e.bytes_up for e in federation.history] == [6 * model] * 2

    def test_ties_go_to_the_lowest_index_and_others_stay(self) -> None:
        callback = IFCA(3, centers=[point(0, 0), point(0, 0), point(50, 50)])
        federation = run(quadratic_client(), world_q(), callback)
        assert callback.assignments.tolist() == [0, 0, 0]
        assert flat(federation.server_states()[1]).tolist() == [0, 0]
        assert flat(federation.server_states()[2]).tolist() == [50, 50]

    @pytest.mark.parametrize("make", [linear_client, batchnorm_client])
    def test_one_model_is_fedavg(self, make: callable) -> None:
        data = small_data(cohort_size=3, dtype=torch.float64)
        client = make().double()
        one = run(client, data, IFCA(1), 4)
        other = run(client, data, FedAvg(), 4)
        torch.testing.assert_close(one.server_states(), other.server_states(), rtol=1e-12, atol=0)
        down = [entry.bytes_down for entry in one.history]
        assert down == [entry.bytes_down for entry in other.history]


class TestChoice:
    def test_test_samples_do_not_matter(self) -> None:
        train = [samples(9, i) for i in range(4)]
        runs = []
        for seed in (50, 60):
            test = [samples(9, seed + i) for i in range(4)]
            data = TensorClients(train, test=test, val=test, num_classes=CLASSES, batch_size=4)
            federation = run(linear_client(), data, IFCA(2, centers=perturbed(2)), 3)
            federation.trainer.validate(federation, data, verbose=False)
            runs.append(federation)
        one, other = runs
        assert torch.equal(one.callback.assignments, other.callback.assignments)
        for i in range(4):
            assert_same(one.client_state(i), other.client_state(i))

    @pytest.mark.parametrize("make", [batchnorm_client, dropout_client])
    def test_it_is_made_in_evaluation_mode(self, make: callable) -> None:
        data = small_data()
        federation = run(make(), data, IFCA(2), 3)
        module = make().eval()
        for i in range(6):
            x, y = data.samples(i, "train")
            measured = []
            for state in federation.server_states():
                module.load_state_dict(state)
                measured.append(F.cross_entropy(module(x), y).item())
            best = federation.server_states()[int(np.argmin(measured))]
            assert_same(federation.client_state(i), best)

    def test_penalties_have_no_part_in_it(self) -> None:
        data = small_data()
        for mu in (0.0, 100.0):
            client = linear_client(ProximalClient, mu=mu)
            federation = Federation(client)
            quiet_trainer(1, IFCA(2, centers=perturbed(2))).validate(federation, data)
            sent = federation.server.expand(0, federation.layout.names, 6)
            measured = federation.clients.losses(torch.arange(6), sent)
            plain = [losses(data, i, flat(perturbed(2)[0]).astype(np.float32)) for i in range(6)]
            assert measured.tolist() == pytest.approx(plain, rel=1e-5)

    def test_newcomers_choose_too(self) -> None:
        data = small_data(holdout_clients=0.34, dtype=torch.float64)
        federation = run(linear_client(double=True), data, IFCA(2, centers=perturbed(2)), 3)
        centers = [flat(state) for state in federation.server_states()]
        for i in data.new_clients.tolist():
            best = min(centers, key=lambda center: losses(data, i, center))
            assert flat(federation.client_state(i)) == pytest.approx(best, rel=1e-12)

    def test_without_training_samples_the_largest_cluster_decides(self) -> None:
        data = small_data(counts=[3, 0, 9, 4], dtype=torch.float64)
        callback = IFCA(2, centers=perturbed(2))
        federation = run(linear_client(double=True), data, callback)
        assignments = callback.assignments[[0, 2, 3]]
        sizes = torch.zeros(2).index_add_(0, assignments, torch.tensor([3.0, 9.0, 4.0]))
        assert_same(federation.client_state(1), federation.server_states()[int(sizes.argmax())])

    def test_without_its_data_a_client_keeps_what_it_chose_last(self, tmp_path: Path) -> None:
        data, callback = small_data(holdout_clients=0.34), IFCA(2)
        federation = run(linear_client(), data, callback, 3)
        assert (callback.assignments >= 0).sum() == 4  # newcomers have not been judged yet
        federation.trainer.test(federation, data, verbose=False)
        assert (callback.assignments >= 0).all()
        federation.trainer.save_checkpoint(tmp_path / "run.ckpt")
        loaded = Federation.load_from_checkpoint(
            tmp_path / "run.ckpt", client=linear_client(), callback=IFCA(2)
        )
        for i in range(6):
            assert_same(loaded.client_state(i), federation.client_state(i))


class TestStart:
    def test_random_groups_of_equal_size_train_first(self) -> None:
        data = small_data(dtype=torch.float64)
        callback = IFCA(3, group_rounds=2)
        federation = run(linear_client(double=True), data, callback, 3)
        one, two, three = federation.history
        assert [one.metrics[f"ifca/size_{k}"] for k in range(3)] == [2, 2, 2]
        model = sum(value.nbytes for value in federation.server_states()[0].values())
        assert one.bytes_down == two.bytes_down == 6 * model
        assert three.bytes_down == 3 * 6 * model

    def test_a_group_is_fedavg(self) -> None:
        data = small_data(dtype=torch.float64)
        callback = IFCA(2, group_rounds=2)
        federation = run(linear_client(double=True), data, callback, 2)
        counts = data.num_samples().numpy()
        clients = range(data.num_clients)
        world = reference.SoftmaxRegression([data.samples(i, "train") for i in clients], CLASSES)
        start = flat(linear_client(double=True).state_dict())
        for k, state in enumerate(federation.server_states()):
            members = callback._groups.eq(k).nonzero().flatten().tolist()
            expected = reference.fedavg(
                world, start, [members] * 2, lambda t, i: batches_of(data, t, i, 1), lr=0.1
            )
            assert counts[members].sum() > 0
            assert flat(state) == pytest.approx(expected, rel=1e-12, abs=1e-14)

    def test_shuffled_weights(self) -> None:
        client = linear_client(double=True)
        federation = Federation(client)
        quiet_trainer(1, IFCA(3, group_rounds=0)).validate(
            federation, small_data(dtype=torch.float64)
        )
        first, *others = federation.server_states()
        assert_same(first, dict(client.state_dict()))
        for state in others:
            for name, value in state.items():
                assert torch.equal(value.flatten().sort().values, first[name].flatten().sort()[0])
        weights = [state["network.weight"] for state in federation.server_states()]
        assert not any(torch.equal(weights[i], weights[j]) for i, j in ((0, 1), (0, 2), (1, 2)))

    def test_equal_weights_can_not_be_shuffled(self) -> None:
        client = linear_client()
        nn.init.zeros_(client.network.weight)
        nn.init.zeros_(client.network.bias)
        with pytest.raises(ConfigurationError, match="shuffling gives no other model"):
            run(client, small_data(), IFCA(2, group_rounds=0))
        run(client, small_data(), IFCA(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_clusters": 0}, "num_clusters must be at least 1, got 0"),
        ({"group_rounds": -1}, "group_rounds must be at least 0, got -1"),
        ({"divide_by": "clients"}, "divide_by must be 'cluster' or 'cohort', got 'clients'"),
        ({"weighting": "equal"}, "weighting must be 'samples' or 'uniform', got 'equal'"),
        ({"num_clusters": 3, "centers": C2}, "2 centers were given for num_clusters=3"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"IFCA: {message}"):
        IFCA(**options)


def test_more_models_than_clients() -> None:
    with pytest.raises(ConfigurationError, match=r"num_clusters \(3\) exceeds .* \(2\)"):
        run(linear_client(), small_data(counts=[4, 5]), IFCA(3))

"""pFedLA with sparse mixtures: own model, mean model and the most similar clients."""

import copy
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from pflight import Federation
from pflight.callbacks import FedAvg, PFedLA
from pflight.callbacks.methods import sparse_mixtures
from pflight.datamodules import FederatedDataModule, TensorClients
from pflight.errors import ConfigurationError
from pflight.models import Classifier
from tests.runs import (
    CLASSES,
    FEATURES,
    assert_same,
    batches_of,
    batchnorm_client,
    flat,
    linear_client,
    network_client,
    quiet_trainer,
    run,
    sgd,
    small_data,
)

State = dict[str, Tensor]

UNEQUAL = 8, 12, 7, 10, 13, 9
LAYERS = [
    ("network.0.weight", "network.0.bias"),
    ("network.1.weight", "network.1.bias"),
    ("network.3.weight", "network.3.bias"),
]


def train(client: Classifier, state: State, batches: Sequence, samples: tuple) -> State:
    client = copy.deepcopy(client).train()
    client.load_state_dict(state)
    optimizer, (x, y) = client.configure_optimizers(), samples
    for batch in batches:
        optimizer.zero_grad()
        F.cross_entropy(client(x[batch]), y[batch]).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in client.state_dict().items()}


def of_layer(state: State, layer: Sequence[str]) -> Tensor:
    return torch.cat([state[name].flatten() for name in layer])


class Reference:
    """The method once more, one client, layer and source at a time, with weights by source."""

    def __init__(self, client: Classifier, signs: State, m: int, k: int, lr: float, count: int):
        self.client, self.signs, self.m, self.k, self.lr = client, signs, m, k, lr
        self.mean = {name: value.clone() for name, value in client.state_dict().items()}
        self.apart: dict[int, State] = {}  # deviations of the clients that have answered
        self.buffers = [dict(self.mean) for _ in range(count)]
        self.near: dict[int, dict[int, list[float]]] = {}  # neighbours' cosines by layer
        self.learned: dict[int, list[dict]] = {}
        self.sketches: dict[int, list[Tensor]] = {}

    def weights(self, i: int) -> list[dict]:
        """Return the weights by source in each layer."""
        if i not in self.apart:
            return [{"mean": 1.0} for _ in LAYERS]
        found = []
        for index in range(len(LAYERS)):
            cosines = {j: values[index] for j, values in self.near[i].items()}
            room = [0.0] * (len(cosines) < self.m)
            start = {"own": max([*cosines.values(), *room]), "mean": 0.3, **cosines}
            raised = {
                s: math.exp(c / 0.1 + self.learned[i][index].get(s, 0.0)) for s, c in start.items()
            }
            found.append({s: value / sum(raised.values()) for s, value in raised.items()})
        return found

    def deviation(self, i: int, source: object, layer: Sequence[str]) -> Tensor:
        if source == "mean" or (source == "own" and i not in self.apart):
            return torch.zeros_like(of_layer(self.mean, layer))
        return of_layer(self.apart[i if source == "own" else source], layer)

    def start(self, i: int) -> State:
        state = dict(self.buffers[i])
        for layer, weights in zip(LAYERS, self.weights(i), strict=True):
            mixed = of_layer(self.mean, layer)
            mixed = mixed + sum(w * self.deviation(i, s, layer) for s, w in weights.items())
            parts = mixed.split([state[name].numel() for name in layer])
            for name, part in zip(layer, parts, strict=True):
                state[name] = part.view_as(state[name])
        return state

    def sketch(self, change: State, layer: Sequence[str]) -> Tensor:
        result = torch.zeros(self.k, dtype=torch.float64)
        for name in layer:
            signed = (change[name] * self.signs[name]).flatten()
            for place, value in enumerate(signed):
                result[place % self.k] += value
        return result

    def gradient(self, i: int, change: State) -> list[dict]:
        found = []
        for layer, weights in zip(LAYERS, self.weights(i), strict=True):
            moved = of_layer(change, layer)
            start = sum(w * self.deviation(i, s, layer) for s, w in weights.items())
            apart = {s: self.deviation(i, s, layer) - start for s in weights}
            spread = sum(w * apart[s].square().sum() for s, w in weights.items()).sqrt()
            scale = float(spread * moved.norm()) or 1.0
            found.append({s: w * float(apart[s] @ moved) / scale for s, w in weights.items()})
        return found

    def round(self, data: FederatedDataModule, index: int, cohort: Sequence[int]) -> None:
        starts = {i: self.start(i) for i in cohort}
        trained = {
            i: train(
                self.client, starts[i], batches_of(data, index, i, 2), data.samples(i, "train")
            )
            for i in cohort
        }
        names = [name for layer in LAYERS for name in layer]
        changes = {i: {n: trained[i][n] - starts[i][n] for n in names} for i in cohort}
        sketches = {i: [self.sketch(changes[i], layer) for layer in LAYERS] for i in cohort}
        before = {i: self.weights(i) for i in cohort}
        for i in cohort:
            gradients = self.gradient(i, changes[i])
            old = self.learned.get(i, [{} for _ in LAYERS])
            zeros = [torch.zeros(self.k, dtype=torch.float64) for _ in LAYERS]
            kept = self.sketches.get(i, zeros)
            self.learned[i] = [
                {s: 0.9 * o.get(s, 0.0) + self.lr * g for s, g in gradient.items()}
                for o, gradient in zip(old, gradients, strict=True)
            ]
            self.sketches[i] = [
                before[i][place].get("own", 0.0) * kept[place]
                + sketches[i][place]
                - sum(sketches[j][place] for j in cohort) / len(cohort)
                for place in range(len(LAYERS))
            ]
            self.buffers[i] = trained[i]
        cosines = {
            (i, j): [
                float(F.cosine_similarity(a, b, dim=0))
                for a, b in zip(self.sketches[i], self.sketches[j], strict=True)
            ]
            for i in cohort
            for j in {*cohort, *self.near.get(i, {})} - {i}
        }
        for i in cohort:
            total = {j: sum(values) for (one, j), values in cosines.items() if one == i}
            ranked = sorted(total, key=lambda j: -total[j])
            best = [j for j in ranked[: self.m] if total[j] > 0]
            stay = {"own", "mean", *best}
            self.learned[i] = [
                {s: z for s, z in layer.items() if s in stay} for layer in self.learned[i]
            ]
            self.near[i] = {j: cosines[i, j] for j in best}
            self.apart[i] = {n: trained[i][n] - self.mean[n] for n in names}
        sizes = data.num_samples("train").double()[list(cohort)]
        for name in names:
            moved = sum(n * changes[i][name] for n, i in zip(sizes, cohort, strict=True))
            self.mean[name] = self.mean[name] + moved / sizes.sum()


def alike(counts: Sequence[int] = (40,) * 6, dtype: torch.dtype = torch.float32) -> TensorClients:
    """Return two groups of clients with opposite labels."""
    random = torch.Generator().manual_seed(0)
    train = []
    for i, size in enumerate(counts):
        x = torch.randn(size, FEATURES, generator=random, dtype=dtype)
        y = (x[:, 0] > 0).long()
        train.append((x, y if i < len(counts) / 2 else 1 - y))
    return TensorClients(train, num_classes=CLASSES, batch_size=5, cohort_size=4)


@pytest.mark.parametrize("m", [1, 3])
def test_rounds_of_unequal_clients_with_momentum_and_batchnorm(m: int) -> None:
    data = alike(UNEQUAL, torch.float64)
    client = batchnorm_client(optimizer=sgd(0.1, momentum=0.9)).double()
    callback = PFedLA(neighbours=m, sketch_dim=8, lr=2.0)
    federation = run(client, data, callback, rounds=6, local_epochs=2)
    reference = Reference(client, callback.sparse.signs.tensors(), m, 8, 2.0, 6)
    for entry in federation.history:
        reference.round(data, entry.index, entry.clients)
    assert any(reference.near.values())  # or it shows little
    for i in range(6):
        assert_close(federation.client_state(i), reference.start(i), rtol=1e-9, atol=1e-11)
        spread = torch.stack(list(callback.layer_weights([i]).values()))[:, 0]
        for found, expected in zip(spread, reference.weights(i), strict=True):
            by_client = {i: expected.get("own", 0.0)} | {
                j: expected[j] for j in reference.near.get(i, {})
            }
            assert found.sum() == pytest.approx(1 - expected["mean"])
            assert {j: found[j].item() for j in by_client} == pytest.approx(by_client)


def test_clients_alike_come_to_weigh_more_than_others() -> None:
    callback = PFedLA(neighbours=2)
    run(linear_client(), alike(), callback, rounds=15)
    (weights,) = callback.layer_weights(range(6)).values()
    for i in range(6):
        first, second = weights[i].split(3)
        neighbours, strangers = (first, second) if i < 3 else (second, first)
        others = neighbours[[j for j in range(3) if j != i % 3]]
        assert min(weights[i, i], others.max()) > 0.2
        assert strangers.max() < 0.05


def test_where_the_mean_model_has_all_weight_it_is_fedavg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_mixtures, "_MEAN_SIMILARITY", 1e3)
    data = small_data(UNEQUAL, cohort_size=4, dtype=torch.float64)
    client = batchnorm_client(optimizer=sgd(0.1, momentum=0.9)).double()
    runs = [
        run(client, data, callback, rounds=4, local_epochs=2)
        for callback in (PFedLA(neighbours=2), FedAvg(buffers="local"))
    ]
    for i in range(6):
        left, right = (federation.client_state(i) for federation in runs)
        assert_close(left, right, rtol=1e-12, atol=1e-14)
    sparse, fedavg = (
        [(entry.bytes_down, entry.bytes_up) for entry in federation.history] for federation in runs
    )
    assert sparse == fedavg


def test_clients_that_have_not_answered_get_the_mean_model() -> None:
    data = small_data(cohort_size=2, holdout_clients=0.34)
    federation = run(linear_client(), data, PFedLA(neighbours=2), rounds=2)
    asked = {i for entry in federation.history for i in entry.clients}
    (mean,) = federation.server_states()
    assert len(asked) < 6
    for i in {*range(6)} - asked:
        assert_same(federation.client_state(i), mean)


def test_weights_do_not_depend_on_the_scale_of_the_data() -> None:
    """Features times 2 and steps over 4: all that the first layer learns is half as large."""

    def trained(scale: float) -> Tensor:
        data = small_data(dtype=torch.float64)
        pairs = [data.samples(i, "train") for i in range(6)]
        scaled = TensorClients([(x * scale, y) for x, y in pairs], num_classes=CLASSES)
        client = linear_client(double=True, optimizer=sgd(0.1 / scale**2))
        client.network.weight.data.div_(scale), client.network.bias.data.zero_()
        client.network.bias.requires_grad_(False)
        callback = PFedLA(neighbours=2)
        run(client, scaled, callback, rounds=4)
        (weights,) = callback.layer_weights(range(6)).values()
        return weights

    assert_close(trained(1.0), trained(2.0), rtol=0, atol=1e-9)


def test_only_clients_of_one_part_of_a_cohort_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sparse_mixtures, "_COMPARED", 2)
    met: list[set[int]] = []
    compare = sparse_mixtures.SparseMixtures._choose_neighbours

    def noted(self: sparse_mixtures.SparseMixtures, clients: Tensor) -> None:
        met.append({*clients.tolist()})
        compare(self, clients)

    monkeypatch.setattr(sparse_mixtures.SparseMixtures, "_choose_neighbours", noted)
    callback = PFedLA(neighbours=5)
    run(linear_client(), alike(), callback, rounds=6)
    assert max(map(len, met)) == 2
    found = False
    for i, near in enumerate(callback.sparse.neighbours.tolist()):
        known = {j for j in near if j >= 0}
        found |= bool(known)
        assert known <= set().union(*(pair for pair in met if i in pair)) - {i}
        assert len(known) == sum(j >= 0 for j in near)
    assert found


def test_the_server_optimizer_steps_the_mean_model() -> None:
    def trained(**options: object) -> Federation:
        return run(linear_client(), small_data(), PFedLA(neighbours=2), rounds=1, **options)

    client, (whole,) = linear_client(), trained().server_states()
    (half,) = trained(server_optimizer=sgd(0.5)).server_states()
    start = flat(dict(client.state_dict()))
    assert_close(flat(half) - start, (flat(whole) - start) / 2)


def test_whole_models_have_one_weight() -> None:
    callback = PFedLA(neighbours=2, granularity="model")
    network = nn.Sequential(nn.Linear(FEATURES, 6), nn.ReLU(), nn.Linear(6, CLASSES))
    run(network_client(network), small_data(), callback, rounds=2)
    assert list(callback.layer_weights([0])) == ["model"]


@pytest.mark.parametrize(
    ("option", "value"),
    [("retain", 1), ("weights", "relu_norm"), ("scale_free", True), ("hidden_dim", 5)],
)
def test_options_of_hypernetworks_are_refused(option: str, value: object) -> None:
    message = f"neighbours=2 can't be combined with {option}={value!r}"
    with pytest.raises(ConfigurationError, match=message):
        PFedLA(neighbours=2, **{option: value})


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (PFedLA(neighbours=3), r"sparse.\w+ is \(.*\) in the checkpoint and \(.*\) here"),
        (PFedLA(), "it has no hypernetworks of PFedLA, which was trained with other options"),
    ],
)
def test_a_checkpoint_of_other_mixtures_is_refused(
    other: PFedLA, said: str, tmp_path: Path
) -> None:
    federation = run(linear_client(), small_data(), PFedLA(neighbours=2))
    federation.trainer.save_checkpoint(tmp_path / "run.ckpt")
    with pytest.raises(ConfigurationError, match=f"does not fit this federation: {said}"):
        run(linear_client(), small_data(), other, 2, ckpt_path=tmp_path / "run.ckpt")


def test_the_memory_that_is_said_is_that_of_the_tables(caplog: pytest.LogCaptureFixture) -> None:
    callback = PFedLA(neighbours=3, sketch_dim=10)
    with caplog.at_level("INFO"):
        run(batchnorm_client(), small_data(), callback)
    (line,) = [line for line in caplog.messages if "num_clients=6" in line]
    sparse = callback.sparse
    weights = sparse.neighbours.nbytes + sparse.similarity.nbytes + sparse.learned.nbytes
    assert f"{sparse.sketches.nbytes} B for sketches, {weights} B for weights" in line


def test_the_weights_of_clients_own_models_are_logged() -> None:
    callback, data = PFedLA(neighbours=2), alike()
    federation = run(linear_client(), data, callback, rounds=6)
    assert federation.history[0].metrics["pfedla/own_weight/network"] == 0
    before = copy.deepcopy(callback)
    quiet_trainer(1, callback).fit(federation, datamodule=data)
    clients = federation.history[-1].clients
    own = before.layer_weights(clients)["network"][torch.arange(4), clients].mean()
    assert own > 0
    assert federation.history[-1].metrics["pfedla/own_weight/network"] == pytest.approx(own.item())

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from pflight.callbacks import FedAvg, Local, PFedLA
from pflight.datamodules import FederatedDataModule, TensorClients
from pflight.engines import ClientUpdates
from pflight.errors import ConfigurationError
from pflight.local_client import LocalClient
from pflight.method import ClientMethod
from pflight.models import Classifier, PFedHNCNN
from tests.runs import (
    CLASSES,
    FEATURES,
    QuadraticClient,
    assert_same,
    batches_of,
    batchnorm_client,
    failing,
    flat,
    linear_client,
    network_client,
    quiet_trainer,
    run,
    sgd,
    small_data,
    watched,
)

State = dict[str, Tensor]

UNEQUAL = 6, 12, 7, 10, 3, 8  # no batch of a single sample, which BatchNorm can't take


class Scalar(nn.Module):
    """A layer of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros((), dtype=torch.float64))


class Scalars(nn.ModuleList):
    """Layers of one number each; ``theta`` is all of them, and the logits of every sample."""

    @property
    def theta(self) -> Tensor:
        return torch.stack([layer.value for layer in self])

    def forward(self, x: Tensor) -> Tensor:
        return self.theta.expand(len(x), len(self))


class LinearHyperNetwork(nn.Module):
    """Logits ``U v`` with one number for an embedding."""

    def __init__(self, matrix: Sequence[Sequence[float]], embedding: float) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.tensor(matrix, dtype=torch.float64))
        self.embedding = nn.Parameter(torch.tensor(embedding, dtype=torch.float64))

    def forward(self) -> Tensor:
        return self.matrix * self.embedding


class Stored(PFedLA):
    """Starts with models of scalar layers of its own, and keeps what is received."""

    def __init__(self, models: Sequence[Sequence[float]], **options: object) -> None:
        super().__init__(**options)
        self.models = torch.tensor(models, dtype=torch.float64)
        self.answers: list[ClientUpdates] = []

    def setup_server(self) -> None:
        super().setup_server()
        for leaf, column in zip(self.stored.tensors().values(), self.models.T, strict=True):
            leaf.copy_(column)

    def receive(self, updates: ClientUpdates) -> None:
        super().receive(updates)
        self.answers.append(updates)


class Fixed(PFedLA):
    """Weights that are what they are."""

    def __init__(self, fixed: Tensor, **options: object) -> None:
        super().__init__(lr=0.0, **options)
        self.fixed = fixed.log().clamp(min=-1e4)

    def setup_server(self) -> None:
        super().setup_server()
        for client, logits in enumerate(self.fixed):
            network = self.hypernetworks[client]
            network["output.weight"].zero_()
            network["output.bias"].copy_(logits.flatten())


class Shuffled(PFedLA):
    """Hypernetworks whose weights differ from the start."""

    def setup_server(self) -> None:
        super().setup_server()
        random = torch.Generator().manual_seed(5)
        for client in range(len(self.hypernetworks)):
            network = self.hypernetworks[client]
            network["output.weight"].normal_(0, 0.3, generator=random)
            network["output.bias"].normal_(0, 0.3, generator=random)
        self.first = [
            {n: p.clone().requires_grad_() for n, p in self.hypernetworks[client].items()}
            for client in range(len(self.hypernetworks))
        ]


class Recording(PFedLA):
    """Keeps the hypernetworks as they were before each round."""

    def __init__(self, **options: object) -> None:
        super().__init__(embedding_dim=3, hidden_dim=4, **options)
        self.before: list[list[Tensor]] = []

    def snapshot(self) -> list[Tensor]:
        return [vector.detach().clone() for vector in self.hypernetworks.vectors]

    def on_round_start(self) -> None:
        super().on_round_start()
        self.before.append(self.snapshot())


def client_one() -> TensorClients:
    """Return client 1 of world Q, and one with two samples."""
    x = torch.tensor([[1.0, 2.0, 1.0, -1.0]], dtype=torch.float64)
    train = [(x.expand(n, 4), torch.zeros(n, dtype=torch.long)) for n in (1, 2)]
    return TensorClients(train, num_classes=2, batch_size=None)


class OnlyClientOne(ClientMethod):
    """Gives no answer with two samples."""

    def loss(self, c: LocalClient, batch: Any) -> Tensor:
        return super().loss(c, batch) * torch.where(c.num_samples == 1, 1.0, math.nan)


def two_layers() -> Classifier:
    client = QuadraticClient(Scalars([Scalar(), Scalar()]), num_classes=2, optimizer=sgd(0.1))
    client.client_method = OnlyClientOne()
    return client


def loss_of_client_one(theta: Tensor) -> float:
    first, second = theta.tolist()
    return 0.5 * (first - 1) ** 2 + (second + 1) ** 2


def h2(
    matrix: Sequence[Sequence[float]], embedding: float, rounds: int = 1, **options: object
) -> tuple:
    callback = Stored([(1, 0), (3, 2)], **{"lr": 1.0, **options})
    callback.hypernetwork = lambda *_: LinearHyperNetwork(matrix, embedding)
    federation = run(two_layers(), client_one(), callback, rounds)
    weights = torch.stack([rows[0] for rows in callback.layer_weights([0]).values()])
    return callback, federation, weights


@pytest.mark.filterwarnings("ignore:round .*client 1 failed:UserWarning")
class TestVectors:
    def test_h2_one_step_from_the_uniform_mean(self) -> None:
        callback, federation, weights = h2([[0, 0], [0, 0]], 1.0)
        (updates,) = callback.answers
        returned = torch.stack(list(updates.states.values()))
        assert returned.flatten().tolist() == pytest.approx([1.9, 0.6], abs=1e-12)
        network = callback.hypernetworks[0]
        assert network["matrix"].flatten().tolist() == pytest.approx(
            [0.05, -0.05, 0.2, -0.2], abs=1e-12
        )
        assert network["embedding"].item() == 1
        assert weights.flatten().tolist() == pytest.approx(
            [0.5249792, 0.4750208, 0.5986877, 0.4013123], abs=5e-8
        )
        # On the models as they were, the client's loss falls; with the wrong sign it would rise.
        mixture = (weights * callback.models.T).sum(dim=1)
        assert mixture.tolist() == pytest.approx([1.9500416, 0.8026247], abs=5e-8)
        assert loss_of_client_one(mixture) == pytest.approx(3.7007453, abs=5e-8)
        # On the models as they are now stored:
        assert flat(federation.server_states()[0]) == pytest.approx([1.9, 0.6], abs=1e-12)
        assert flat(federation.server_states()[1]).tolist() == [3, 2]
        assert flat(federation.client_state(0)) == pytest.approx([2.4225229, 1.1618373], abs=5e-8)

    def test_h2b_one_step_from_other_weights(self) -> None:
        callback, _, _ = h2([[0.3, -0.1], [0.2, 0.4]], 0.5)
        (updates,) = callback.answers
        start = torch.tensor([1.9003320, 1.0499584], dtype=torch.float64)
        change = -0.1 * torch.stack([start[0] - 1, 2 * (start[1] + 1)])
        returned = torch.stack(list(updates.states.values())).flatten()
        assert_close(returned, start + change, rtol=0, atol=5e-8)
        network = callback.hypernetworks[0]
        d1, d2 = 0.0445694, 0.2044842
        assert network["embedding"].item() == pytest.approx(0.5 - 0.0230691, abs=5e-8)
        assert network["matrix"].flatten().tolist() == pytest.approx(
            [0.3 + d1 / 2, -0.1 - d1 / 2, 0.2 + d2 / 2, 0.4 - d2 / 2], abs=5e-8
        )

    def test_h2_with_a_scale_free_step(self) -> None:
        callback, _, weights = h2([[0, 0], [0, 0]], 1.0, lr=0.1, scale_free=True)
        # The changes are -0.1 and -0.4: 0.05 and 0.2 of above are divided by 0.01 and 0.16.
        assert callback.hypernetworks[0]["matrix"].flatten().tolist() == pytest.approx(
            [0.5, -0.5, 0.125, -0.125], abs=1e-12
        )
        assert weights.flatten().tolist() == pytest.approx(
            [0.7310586, 0.2689414, 0.5621765, 0.4378235], abs=5e-8
        )

    def test_the_other_client_contributes_but_does_not_move(self) -> None:
        callback, federation, _ = h2([[0.3, -0.1], [0.2, 0.4]], 0.5, rounds=3)
        other = callback.hypernetworks[1]
        assert other["matrix"].flatten().tolist() == [0.3, -0.1, 0.2, 0.4]
        assert other["embedding"].item() == 0.5
        assert flat(federation.server_states()[1]).tolist() == [3, 2]

    @pytest.mark.short("1-2", "3-124", "5-12345")
    @pytest.mark.parametrize(
        ("retain", "kept"), [(0, ""), (1, "2"), (2, "24"), (3, "124"), (4, "1234"), (5, "12345")]
    )
    def test_h3_layers_are_ranked_by_own_weight(self, retain: int, kept: str) -> None:
        own = torch.tensor([0.30, 0.55, 0.20, 0.55, 0.10]).view(1, 5, 1)
        weights = torch.where(torch.eye(6).bool().unsqueeze(1), own, (1 - own) / 5)
        square = [nn.Linear(FEATURES, FEATURES) for _ in range(4)]
        client = network_client(nn.Sequential(*square, nn.Linear(FEATURES, CLASSES)))
        callback = Fixed(weights, retain=retain)
        federation = run(client, small_data(), callback)
        stored, sent = federation.server_states()[2], callback.broadcast(torch.tensor([2]))
        same = [
            all(torch.equal(sent[name][0], stored[name]) for name in names)
            for names in callback.layers.values()
        ]
        assert "".join(str(index + 1) for index in range(5) if same[index]) == kept


# The method once more: loops over clients, layers and models, and autograd through the mixtures.


def weights_of(parameters: State, shape: tuple[int, int], kind: str, client: int) -> Tensor:
    x = parameters["embedding"]
    for index in (0, 2, 4):
        weight, bias = (parameters[f"hidden.{index}.{part}"] for part in ("weight", "bias"))
        x = (weight @ x + bias).clamp(min=0)
    logits = (parameters["output.weight"] @ x + parameters["output.bias"]).reshape(shape)
    layers = []
    for row in logits:
        raised = row.exp() if kind == "softmax" else row.clamp(min=0)
        own = F.one_hot(torch.tensor(client), len(row)).to(row) + 0 * row
        layers.append(raised / raised.sum() if raised.sum() > 0 else own)
    return torch.stack(layers)


def train(client: Classifier, state: State, batches: Sequence, samples: tuple) -> State:
    client = copy.deepcopy(client).train()
    client.load_state_dict({name: value.detach() for name, value in state.items()})
    optimizer, (x, y) = client.configure_optimizers(), samples
    for batch in batches:
        optimizer.zero_grad()
        F.cross_entropy(client(x[batch]), y[batch]).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in client.state_dict().items()}


def reference(
    client: Classifier,
    data: FederatedDataModule,
    cohorts: Sequence[Sequence[int]],
    networks: list[State],
    layers: Sequence[Sequence[str]],
    *,
    lr: float,
    retain: int,
    kind: str,
    scale_free: bool,
) -> list[State]:
    """Return the model by which each client is judged."""
    clients, epochs = range(data.num_clients), 2
    initial = {name: value.clone() for name, value in client.state_dict().items()}
    last = [dict(initial) for _ in clients]
    shape = len(layers), len(clients)

    def start_of(i: int) -> tuple[State, list[int]]:
        alpha = weights_of(networks[i], shape, kind, i)
        ranked = sorted(range(len(layers)), key=lambda layer: (-alpha[layer, i].item(), layer))
        start = dict(last[i])  # buffers are the client's own
        for layer in ranked[retain:]:
            for name in layers[layer]:
                start[name] = sum(alpha[layer, j] * last[j][name] for j in clients)
        return start, ranked[retain:]

    for round_, cohort in enumerate(cohorts):
        trained = {}
        for i in cohort:
            start, mixed = start_of(i)
            samples = data.samples(i, "train")
            trained[i] = train(client, start, batches_of(data, round_, i, epochs), samples)
            starts, gradients = [], []
            for layer in mixed:
                change = [trained[i][name] - start[name].detach() for name in layers[layer]]
                square = sum(part.square().sum() for part in change) if scale_free else 1
                starts += [start[name] for name in layers[layer]]
                gradients += [-part / square for part in change]
            if starts:
                torch.autograd.backward(starts, gradients)
        for i in cohort:
            last[i] = trained[i]
            for name, parameter in networks[i].items():
                if parameter.grad is not None:
                    networks[i][name] = (parameter - lr * parameter.grad).detach()
                networks[i][name].requires_grad_()
    return [{n: v.detach() for n, v in start_of(i)[0].items()} for i in clients]


@pytest.mark.short("softmax-0-True", "softmax-2-False", "relu_norm-0-False", "relu_norm-1-True")
@pytest.mark.parametrize("scale_free", [False, True])
@pytest.mark.parametrize("retain", [0, 1, 2])
@pytest.mark.parametrize("kind", ["softmax", "relu_norm"])
def test_rounds_of_unequal_clients_with_momentum_and_batchnorm(
    kind: str, retain: int, scale_free: bool
) -> None:
    data = small_data(UNEQUAL, cohort_size=3, dtype=torch.float64)
    client = batchnorm_client(optimizer=sgd(0.1, momentum=0.9)).double()
    options = {"lr": 0.02 if scale_free else 2.0, "scale_free": scale_free}
    callback = Shuffled(retain, kind, embedding_dim=5, hidden_dim=7, **options)
    federation = run(client, data, callback, rounds=5, local_epochs=2)
    layers = [
        ("network.0.weight", "network.0.bias"),
        ("network.1.weight", "network.1.bias"),
        ("network.3.weight", "network.3.bias"),
    ]
    expected = reference(
        client,
        data,
        [entry.clients for entry in federation.history],
        callback.first,
        layers,
        retain=retain,
        kind=kind,
        **options,
    )
    for i in range(6):
        assert_close(federation.client_state(i), expected[i], rtol=1e-10, atol=1e-12)


def test_mixtures_are_of_the_models_before_the_round_whatever_the_chunks() -> None:
    class OneByOne(Shuffled):
        def round(self, cohort: Tensor) -> None:
            self.on_round_start()
            for updates in self.clients.train(cohort, self.send, max_chunk=1):
                self.receive(updates)
            self.set_pseudo_gradients()

    data = small_data(dtype=torch.float64)
    one, other = (
        run(linear_client(double=True), data, kind(lr=2.0), rounds=4)
        for kind in (OneByOne, Shuffled)
    )
    for i in range(6):
        assert_close(one.client_state(i), other.client_state(i), rtol=1e-12, atol=1e-14)


class TestReductions:
    def test_without_a_step_it_is_uniform_fedavg(self) -> None:
        data = small_data(UNEQUAL, dtype=torch.float64)
        client = batchnorm_client(optimizer=sgd(0.1, momentum=0.9)).double()
        pfedla = run(client, data, PFedLA(lr=0.0), rounds=4, local_epochs=2)
        fedavg = run(client, data, FedAvg("uniform", buffers="local"), rounds=4, local_epochs=2)
        for i in range(6):
            assert_close(pfedla.client_state(i), fedavg.client_state(i), rtol=1e-12, atol=1e-14)
        assert [entry.bytes_down for entry in pfedla.history] == [
            entry.bytes_down for entry in fedavg.history
        ]

    @pytest.mark.short("softmax")
    @pytest.mark.parametrize("kind", ["softmax", "relu_norm"])
    def test_with_all_layers_retained_it_is_local(self, kind: str) -> None:
        data = small_data(UNEQUAL, cohort_size=3)
        heurpfedla = run(batchnorm_client(), data, PFedLA(3, kind, lr=1.0), rounds=5)
        local = run(batchnorm_client(), data, Local(), rounds=5)
        for i in range(6):
            assert_same(heurpfedla.client_state(i), local.client_state(i))
        assert [entry.bytes_down for entry in heurpfedla.history] == [
            entry.bytes_down for entry in local.history
        ]

    @pytest.mark.short("0")
    @pytest.mark.parametrize("retain", [0, 1])
    def test_with_all_weight_on_its_own_model_it_is_local(self, retain: int) -> None:
        data = small_data(UNEQUAL, cohort_size=3)
        own = torch.eye(6).unsqueeze(1).expand(6, 3, 6)
        fixed = run(batchnorm_client(), data, Fixed(own, retain=retain), rounds=5)
        local = run(batchnorm_client(), data, Local(), rounds=5)
        for i in range(6):
            assert_same(fixed.client_state(i), local.client_state(i))


class TestTraffic:
    def rounds(self, retain: int) -> list[tuple[int, int]]:
        """Return bytes down and up of ten clients with the CNN of the paper's table 3.

        Each of them retains its third linear layer first, then its first.
        """
        own = torch.tensor([0.1, 0.1, 2.0, 0.1, 3.0]).view(1, 5, 1)
        weights = torch.where(torch.eye(10).bool().unsqueeze(1), own, torch.tensor(0.1))
        images = torch.zeros(1, 1, 28, 28)
        data = TensorClients([(images, torch.tensor([0]))] * 10, num_classes=10)
        client = Classifier(PFedHNCNN(10, 1, 28), num_classes=10)
        federation = run(client, data, Fixed(weights, retain=retain), rounds=3)
        return [(entry.bytes_down, entry.bytes_up) for entry in federation.history]

    def test_the_ratios_of_table_3(self) -> None:
        full = 10 * 4 * 85_822
        third, first = 10 * 4 * (84 * 10 + 10), 10 * 4 * (512 * 120 + 120)
        assert self.rounds(0) == [(full, full)] * 3
        assert self.rounds(1) == [(full, full)] + [(full - third, full)] * 2
        assert self.rounds(2) == [(full, full)] + [(full - third - first, full)] * 2
        totals = [sum(self.rounds(retain)[1]) for retain in (0, 1, 2)]
        assert totals[1] / totals[0] == pytest.approx(0.99505, abs=5e-6)
        assert totals[2] / totals[0] == pytest.approx(0.63639, abs=1e-5)

    @pytest.mark.short("0", "3")
    @pytest.mark.parametrize("retain", [0, 1, 3])
    def test_buffers_never_travel(self, retain: int) -> None:
        client = batchnorm_client()
        size = 4 * sum(parameter.numel() for parameter in client.parameters())
        federation = run(client, small_data(), PFedLA(retain), rounds=1)
        assert federation.history[0].bytes_down == federation.history[0].bytes_up == 6 * size

    @pytest.mark.filterwarnings("ignore:.*round .*failed:UserWarning")
    def test_retained_layers_are_sent_again_until_a_client_has_answered(self) -> None:
        def fail_at_first(c: LocalClient) -> None:
            if c.num_samples == 9 and not tried:
                tried.append(3)
                raise RuntimeError("out of battery")

        tried: list[int] = []
        callback, client = PFedLA(retain=1), watched(linear_client(), fail_at_first)
        federation = run(client, small_data(), callback, rounds=3, engine="sequential")
        size = 4 * (FEATURES * CLASSES + CLASSES)
        assert [entry.bytes_down for entry in federation.history] == [6 * size, size, 0]
        assert callback.received.all()


class TestScaleFree:
    @pytest.mark.parametrize("scale_free", [False, True])
    def test_weights_do_not_depend_on_the_size_of_changes(self, scale_free: bool) -> None:
        """Features times 2 and steps over 4: all that the first layer learns is half as large."""

        def trained(scale: float) -> Tensor:
            data = small_data(dtype=torch.float64)
            pairs = [data.samples(i, "train") for i in range(6)]
            scaled = TensorClients([(x * scale, y) for x, y in pairs], num_classes=CLASSES)
            client = linear_client(double=True, optimizer=sgd(0.1 / scale**2))
            client.network.weight.data.div_(scale), client.network.bias.data.zero_()
            client.network.bias.requires_grad_(False)
            callback = PFedLA(lr=0.5, scale_free=scale_free)
            run(client, scaled, callback, rounds=4)
            (weights,) = callback.layer_weights(range(6)).values()
            return weights

        same = torch.allclose(trained(1.0), trained(2.0), rtol=0, atol=1e-9)
        assert same == scale_free

    def test_a_layer_that_does_not_change_has_no_gradient(self) -> None:
        callback = PFedLA(lr=1.0, scale_free=True)
        run(linear_client(optimizer=sgd(0.0)), small_data(), callback, rounds=3)
        for weights in callback.layer_weights(range(6)).values():
            assert_close(weights, torch.full((6, 6), 1 / 6))


class TestParticipation:
    @pytest.mark.parametrize(
        "optimizer",
        [sgd(1.0, momentum=0.9, weight_decay=0.1), partial(torch.optim.Adam, lr=0.1)],
        ids=["momentum", "Adam"],
    )
    def test_no_optimizer_moves_the_hypernetworks_of_absent_clients(
        self, optimizer: Callable[..., torch.optim.Optimizer]
    ) -> None:
        callback = Recording()
        federation = run(
            linear_client(),
            small_data(cohort_size=2),
            callback,
            rounds=6,
            server_optimizer=optimizer,
        )
        after = [*callback.before[1:], callback.snapshot()]
        for entry, old, new in zip(federation.history, callback.before, after, strict=True):
            moved = [i for i in range(6) if not torch.equal(old[i], new[i])]
            assert set(moved) <= set(entry.clients)
            if entry.index > 0:  # at first all models are equal, and weights make no difference
                assert moved == entry.clients

    @pytest.mark.filterwarnings("ignore:.*round .*failed:UserWarning")
    @pytest.mark.parametrize("value", [None, math.nan])
    def test_a_client_that_fails_keeps_everything(self, value: float | None) -> None:
        callback = Recording()
        client = linear_client(failing(value=value))
        federation = run(client, small_data(), callback, rounds=3)
        assert torch.equal(callback.snapshot()[3], callback.before[0][3])
        assert_same(federation.server_states()[3], dict(client.state_dict()))
        assert not callback.received[3]
        assert not torch.equal(callback.snapshot()[2], callback.before[0][2])

    @pytest.mark.filterwarnings("ignore:.*round .*failed:UserWarning")
    def test_nobody_answers(self) -> None:
        class Failing(Classifier):
            def on_train_start(self) -> None:
                raise RuntimeError("out of battery")

        callback = Recording()
        client = linear_client(Failing)
        federation = run(client, small_data(), callback, rounds=2, all_may_fail=True)
        for old, new in zip(callback.before[0], callback.snapshot(), strict=True):
            assert torch.equal(old, new)
        assert_close(federation.client_state(0), dict(client.state_dict()))

    def test_newcomers_are_served_the_uniform_mean(self) -> None:
        data = small_data(holdout_clients=0.34, dtype=torch.float64)
        callback = PFedLA(lr=2.0)
        federation = run(linear_client(double=True), data, callback, rounds=3)
        trained = data.train_clients.tolist()
        states = federation.server_states()
        mean = sum(flat(states[i]) for i in trained) / len(trained)
        for newcomer in data.new_clients.tolist():
            assert flat(federation.client_state(newcomer)) == pytest.approx(mean, abs=1e-12)
            for weights in callback.layer_weights([newcomer]).values():
                assert weights[0, trained].tolist() == [pytest.approx(1 / len(trained))] * 4
                assert weights.sum() == pytest.approx(1)

    @pytest.mark.short("options0")
    @pytest.mark.parametrize("options", [{"counts": (6, 0, 7, 9)}, {"holdout_clients": 0.34}])
    def test_clients_that_never_train_count_for_nobody(self, options: dict) -> None:
        data = small_data(dtype=torch.float64, **options)
        layered = run(linear_client(double=True), data, PFedLA(lr=0.0), rounds=3)
        average = run(linear_client(double=True), data, FedAvg("uniform"), rounds=3)
        for i in range(data.num_clients):
            assert_close(layered.client_state(i), average.client_state(i))

    def test_newcomers_retain_nothing(self) -> None:
        data = small_data(holdout_clients=0.34)
        federation = run(linear_client(), data, PFedLA(retain=1, lr=0.0), rounds=3)
        trained = data.train_clients.tolist()
        mean = sum(flat(federation.server_states()[i]) for i in trained) / len(trained)
        for newcomer in data.new_clients.tolist():
            assert flat(federation.client_state(newcomer)) == pytest.approx(mean, abs=1e-6)

    def test_everybody_starts_from_the_common_initial_model(self) -> None:
        client = linear_client()
        federation = run(client, small_data(cohort_size=2), PFedLA(lr=2.0))
        trained = federation.history[0].clients
        for i, state in enumerate(federation.server_states()):
            same = all(torch.equal(state[n], v) for n, v in client.state_dict().items())
            assert same == (i not in trained)


class TestWeights:
    def test_names_shapes_and_sums(self) -> None:
        network = nn.Sequential(
            nn.Linear(FEATURES, 6),
            nn.BatchNorm1d(6),
            nn.ReLU(),
            nn.BatchNorm1d(6, affine=False),
            nn.Linear(6, CLASSES),
        )
        callback = Shuffled(lr=0.5)
        run(network_client(network), small_data(UNEQUAL), callback, rounds=2)
        weights = callback.layer_weights(torch.tensor([4, 1]))
        assert list(weights) == ["network.0", "network.1", "network.4"]
        for name, rows in weights.items():
            assert rows.shape == (2, 6)
            assert_close(rows.sum(dim=1), torch.ones(2))
            assert not rows.requires_grad
            assert torch.equal(rows[1], callback.layer_weights([1])[name][0])

    def test_relu_norm_starts_with_weights_of_its_own(self) -> None:
        callback = PFedLA(weights="relu_norm", lr=0.0)
        run(linear_client(), small_data(), callback)
        (weights,) = callback.layer_weights(range(6)).values()
        assert (weights > 0).all()
        assert weights.std(dim=1).min() > 0
        assert_close(weights.sum(dim=1), torch.ones(6))

    def test_relu_norm_leaves_a_layer_to_its_client_where_nothing_is_positive(self) -> None:
        callback = Fixed(torch.full((6, 1, 6), 0.5), weights="relu_norm")  # logits of log(0.5) < 0
        federation = run(linear_client(), small_data(cohort_size=3), callback, rounds=4)
        (weights,) = callback.layer_weights(range(6)).values()
        assert torch.equal(weights, torch.eye(6))
        local = run(linear_client(), small_data(cohort_size=3), Local(), rounds=4)
        for i in range(6):
            assert_same(federation.client_state(i), local.client_state(i))

    def test_the_default_hypernetwork_is_as_published(self) -> None:
        callback = PFedLA()
        run(linear_client(), small_data(), callback)
        shapes = {name: tuple(p.shape) for name, p in callback.hypernetworks[0].items()}
        assert shapes == {
            "embedding": (100,),
            **{f"hidden.{index}.weight": (100, 100) for index in (0, 2, 4)},
            **{f"hidden.{index}.bias": (100,) for index in (0, 2, 4)},
            "output.weight": (6, 100),
            "output.bias": (6,),
        }
        one, other = (callback.hypernetworks[i]["embedding"] for i in (0, 1))
        assert not torch.equal(one, other)

    @pytest.mark.long
    def test_clients_alike_come_to_weigh_more_than_others(self) -> None:
        """Two groups of clients with opposite labels."""
        random = torch.Generator().manual_seed(0)
        train = []
        for i in range(6):
            x = torch.randn(40, FEATURES, generator=random)
            y = (x[:, 0] > 0).long()
            train.append((x, y if i < 3 else 1 - y))
        data = TensorClients(train, num_classes=CLASSES, batch_size=10)
        callback = PFedLA(lr=5.0)
        run(linear_client(), data, callback, rounds=12)
        (weights,) = callback.layer_weights(range(6)).values()
        for i in range(6):
            first, second = weights[i].split(3)
            alike, others = (first, second) if i < 3 else (second, first)
            assert alike.min() > 2 * others.max()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retain": -1}, "retain must be at least 0, got -1"),
        ({"weights": "relu"}, "weights must be 'softmax' or 'relu_norm', got 'relu'"),
        ({"embedding_dim": 0}, "embedding_dim must be at least 1, got 0"),
        ({"hidden_dim": 0}, "hidden_dim must be at least 1, got 0"),
        ({"lr": -0.1}, "lr must be at least 0, got -0.1"),
        ({"lr": math.nan}, "lr must be a finite number, got nan"),
        ({"neighbours": 0}, "neighbours must be at least 1, got 0"),
        ({"sketch_dim": 0}, "sketch_dim must be at least 1, got 0"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PFedLA(**options)


def test_more_layers_retained_than_there_are() -> None:
    with pytest.raises(
        ConfigurationError, match=r"retain=4 exceeds .* \(3\): network.0, network.1"
    ):
        run(batchnorm_client(), small_data(UNEQUAL), PFedLA(retain=4))


def test_whole_models_are_one_layer_to_retain() -> None:
    message = r"retain=2 exceeds the number of layers \(1, since granularity is 'model'\): model"
    with pytest.raises(ConfigurationError, match=message):
        run(batchnorm_client(), small_data(UNEQUAL), PFedLA(retain=2, granularity="model"))


def test_one_weight_for_whole_models_is_that_of_one_layer() -> None:
    """With one layer both granularities are the same; with more, a client's weights are equal."""
    runs = [
        run(linear_client(), small_data(), PFedLA(lr=5.0, granularity=how), rounds=3)
        for how in ("layers", "model")
    ]
    for left, right in zip(*(federation.server_states() for federation in runs), strict=True):
        assert_same(left, right)
    whole = PFedLA(lr=5.0, granularity="model")
    network = nn.Sequential(nn.Linear(FEATURES, 6), nn.ReLU(), nn.Linear(6, CLASSES))
    federation = run(network_client(network), small_data(), whole, rounds=3)
    ((layer, weights),) = whole.layer_weights(range(6)).items()
    assert layer == "model"
    assert weights.std(dim=1).min() > 0
    stored = whole.stored.tensors()
    for client in range(6):
        state = federation.client_state(client)
        for name, models in stored.items():
            mixed = torch.tensordot(weights[client], models, 1)
            assert_close(state[name], mixed.to(state[name]))


def test_the_weights_of_clients_own_models_are_logged() -> None:
    callback = PFedLA(lr=5.0)
    federation = run(linear_client(), small_data(cohort_size=3), callback, rounds=3)
    first = federation.history[0].metrics
    assert first["pfedla/own_weight/network"] == pytest.approx(1 / 6)
    before = copy.deepcopy(callback)
    quiet_trainer(1, callback).fit(federation, datamodule=small_data(cohort_size=3))
    clients = federation.history[-1].clients
    weights = before.layer_weights(clients)["network"]
    own = weights[torch.arange(3), clients].mean()
    assert federation.history[-1].metrics["pfedla/own_weight/network"] == pytest.approx(own.item())


def test_there_are_no_weights_before_the_first_round() -> None:
    with pytest.raises(ConfigurationError, match="no weights yet"):
        PFedLA().layer_weights([0])

import math
from itertools import permutations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pflight.callbacks.methods.chains import find_chain, matched_chain
from pflight.callbacks.methods.matching import (
    BBPMAP,
    align,
    match,
    match_rows,
    matched_mean,
    matching_scores,
    permute,
)
from pflight.errors import ConfigurationError
from pflight.models import (
    MLP,
    CelebACNN,
    Classifier,
    FedBNCNN,
    FedFomoCNN,
    FedRepCNN,
    LogisticRegression,
    McMahanCNN,
    PFedHNCNN,
    ResNet18,
)
from tests.runs import assert_same

ONES = BBPMAP(gamma=1.0)
A = torch.tensor([[2.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
B = torch.tensor([[0.1, 2.1], [1.9, -0.1]], dtype=torch.float64)


def state_of(network: nn.Module) -> dict[str, Tensor]:
    """Return the network's state in float64, buffers as random as parameters."""
    state = {name: value.detach().clone() for name, value in network.double().state_dict().items()}
    for name, value in state.items():
        if "running" in name:
            value.uniform_(0.5, 2)
        elif value.is_floating_point():
            value.normal_()
        else:
            value.random_(1, 9)
    return state


def output(network: nn.Module, state: dict[str, Tensor], x: Tensor, train: bool = False) -> Tensor:
    network.load_state_dict(state)
    return network.train(train)(x)


def random_places(chain: tuple) -> list[Tensor]:
    return [torch.randperm(layer.width) for layer in chain[:-1]]


def small_cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 5),
        nn.ReLU(),
        nn.Linear(5, 3),
    )


class TestVectors:
    """The worked examples of the specification."""

    network = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))

    def states(self) -> list[dict[str, Tensor]]:
        last = ([[1.0, -1.0]], [[-1.1, 0.9]])
        return [
            {"0.weight": rows, "2.weight": torch.tensor(weight, dtype=torch.float64)}
            for rows, weight in zip((A, B), last, strict=True)
        ]

    def test_c5_scores(self) -> None:
        scores = matching_scores(
            B, A, torch.ones(2).double(), 2, BBPMAP(gamma=1.0, grow=True)
        ).tolist()
        assert scores[0] == pytest.approx([0.94, 3.6066667, 0.8237056, -0.5625887], abs=1e-7)
        assert scores[1] == pytest.approx([3.0733333, 0.4066667, 0.4237057, -0.9625887], abs=1e-7)

    @pytest.mark.parametrize("grow", [False, True])
    def test_c5_places(self, grow: bool) -> None:
        first, second = match_rows([A, B], BBPMAP(gamma=1.0, grow=grow))
        assert first.tolist() == [0, 1]
        assert second.tolist() == [1, 0]

    def test_c5_mean(self) -> None:
        mean = matched_mean(self.states(), find_chain(self.network), options=ONES)
        assert mean["0.weight"].flatten().tolist() == pytest.approx([1.95, -0.05, 0.05, 2.05])
        assert mean["2.weight"].flatten().tolist() == pytest.approx([0.95, -1.05])

    def test_c5_map_estimate(self) -> None:
        options = BBPMAP(gamma=1.0, estimate="map")
        estimate = matched_mean(self.states(), find_chain(self.network), options=options)
        assert estimate["0.weight"][0].tolist() == pytest.approx([1.3, -0.1 / 3])
        assert estimate["2.weight"].flatten().tolist() == pytest.approx([0.95, -1.05])

    def test_map_estimate_of_another_prior(self) -> None:
        # (0.4 / 0.5 + 3.9 / 2) / (1 / 0.5 + 2 / 2) = 2.75 / 3
        options = BBPMAP(sigma=2.0, sigma0=0.5, mu0=0.4, estimate="map")
        estimate = matched_mean(self.states(), find_chain(self.network), options=options)
        assert estimate["0.weight"][0].tolist() == pytest.approx([2.75 / 3, 0.75 / 3])

    def test_c5b_a_neuron_of_its_own(self) -> None:
        row = torch.tensor([[-3.0, -3.0]], dtype=torch.float64)
        options = BBPMAP(gamma=1.0, grow=True)
        scores = matching_scores(row, A, torch.ones(2).double(), 2, options)
        assert scores.flatten().tolist() == pytest.approx([4 / 3, 4 / 3, 7.6137056], abs=1e-7)
        states = self.states()
        states[1] = {"0.weight": row, "2.weight": torch.tensor([[5.0]], dtype=torch.float64)}
        options = BBPMAP(gamma=1.0, grow=True, passes=0)
        wide = matched_mean(states, find_chain(self.network), options=options)
        assert wide["0.weight"].tolist() == [[2, 0], [0, 2], [-3, -3]]
        assert wide["2.weight"].tolist() == [[0.5, -0.5, 2.5]]  # zeros where there is no neuron

    def test_c5c_blocks_of_a_flattened_layer(self) -> None:
        chain = find_chain(nn.Sequential(nn.Conv1d(1, 2, 1), nn.Flatten(), nn.Linear(4, 1)))
        state = {
            "0.weight": torch.tensor([[[5.0]], [[6.0]]]),
            "0.bias": torch.tensor([7.0, 8.0]),
            "2.weight": torch.tensor([[1.0, 2.0, 3.0, 4.0]]),
            "2.bias": torch.zeros(1),
        }
        moved = permute(state, chain, [torch.tensor([1, 0])])
        assert moved["2.weight"].tolist() == [[3, 4, 1, 2]]
        assert moved["0.weight"].flatten().tolist() == [6, 5]
        assert moved["0.bias"].tolist() == [8, 7]

    def test_c5d_the_last_layer_by_class(self) -> None:
        chain = find_chain(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 4)))
        states = [
            {
                "0.weight": torch.ones(1, 1),
                "0.bias": torch.zeros(1),
                "1.weight": torch.tensor(values).unsqueeze(1),
                "1.bias": torch.tensor(values),
            }
            for values in ([1.0, 5.0, 2.0, 0.0], [3.0, 7.0, 4.0, 8.0])
        ]
        counts = torch.tensor([[30, 0, 0, 3], [10, 20, 0, 1]])  # nobody has the third class
        mean = matched_mean(states, chain, counts)
        assert mean["1.weight"].flatten().tolist() == [1.5, 7, 3, 2]
        assert mean["1.bias"].tolist() == [1.5, 7, 3, 2]


class Reference:
    """BBP-MAP once more, with loops, straight from the formulas."""

    def __init__(self, options: BBPMAP, networks: int) -> None:
        self.o, self.networks = options, networks

    def old(self, members: list[np.ndarray], w: np.ndarray) -> float:
        o, total = self.o, 0.0
        q = 1 / o.sigma0 + len(members) / o.sigma
        for d in range(len(w)):
            s = o.mu0 / o.sigma0 + sum(m[d] / o.sigma for m in members)
            total += (s + w[d] / o.sigma) ** 2 / (q + 1 / o.sigma) - s**2 / q
        if o.grow:
            total += 2 * np.log(len(members) / (self.networks - len(members)))
        return total

    def new(self, w: np.ndarray, rank: int) -> float:
        o = self.o
        total = sum(
            (o.mu0 / o.sigma0 + value / o.sigma) ** 2 / (1 / o.sigma0 + 1 / o.sigma)
            - o.mu0**2 / o.sigma0
            for value in w
        )
        return total - 2 * np.log(rank) + 2 * np.log(o.gamma / self.networks)

    def match(self, rows: list[np.ndarray], orders: list[list[int]]) -> list[list[int]]:
        widths = [len(matrix) for matrix in rows]
        first = widths.index(max(widths))
        neurons = [{first: row} for row in range(widths[first])]  # {network: its row} of each
        others = sorted((j for j in range(len(rows)) if j != first), key=lambda j: (-widths[j], j))
        for j in [*others, *(j for order in orders for j in order)]:
            for neuron in neurons:
                neuron.pop(j, None)
            neurons = [neuron for neuron in neurons if neuron]
            scores = [
                [self.old([rows[k][m] for k, m in neuron.items()], w) for neuron in neurons]
                + [self.new(w, rank + 1) for rank in range(widths[j] * self.o.grow)]
                for w in rows[j]
            ]
            chosen = max(
                permutations(range(len(scores[0])), widths[j]),
                key=lambda places: sum(scores[row][i] for row, i in enumerate(places)),
            )
            known = len(neurons)
            neurons += [{j: row} for row, i in enumerate(chosen) if i >= known]
            for row, i in enumerate(chosen):
                if i < known:
                    neurons[i][j] = row
        places = [[0] * width for width in widths]
        for i, neuron in enumerate(neurons):
            for j, row in neuron.items():
                places[j][row] = i
        return places


def test_places_are_those_of_the_formulas() -> None:
    random = np.random.default_rng(4)
    for trial in range(40):
        grow = trial % 2 == 1
        networks = int(random.integers(2, 5))
        widths = random.integers(1, 4, networks) if grow else [4] * networks
        rows = [random.normal(size=(width, 3)) for width in widths]
        options = BBPMAP(
            gamma=float(random.uniform(0.2, 4)),
            sigma=float(random.uniform(0.3, 2)),
            sigma0=float(random.uniform(0.3, 2)),
            mu0=float(random.normal()),
            passes=int(random.integers(3)),
            grow=grow,
        )
        draws = torch.Generator().manual_seed(trial)
        orders = [torch.randperm(networks, generator=draws).tolist() for _ in range(options.passes)]
        expected = Reference(options, networks).match(rows, orders)
        found = match_rows(
            [torch.from_numpy(matrix) for matrix in rows],
            options,
            torch.Generator().manual_seed(trial),
        )
        assert [places.tolist() for places in found] == expected


@pytest.mark.parametrize("estimate", ["mean", "map"])
def test_a_cnn_is_averaged_layer_by_layer(estimate: str) -> None:
    torch.manual_seed(3)
    networks, options = 3, BBPMAP(estimate=estimate, passes=2, sigma0=2.0, mu0=0.1)
    chain = find_chain(small_cnn())
    states = [state_of(small_cnn()) for _ in range(networks)]
    counts = torch.tensor([[3, 0, 5], [1, 2, 0], [0, 2, 0]])
    found = matched_mean(states, chain, counts, options, torch.Generator().manual_seed(1))

    draws = torch.Generator().manual_seed(1)
    reference = Reference(options, networks)
    numpy = [{name: value.numpy() for name, value in state.items()} for state in states]
    incoming = [state["0.weight"].reshape(4, -1) for state in numpy]
    for layer, following, block in (("0", "4", 4), ("4", "6", 1)):
        rows = [
            np.column_stack([weight, state[f"{layer}.bias"]])
            for weight, state in zip(incoming, numpy, strict=True)
        ]
        orders = [torch.randperm(networks, generator=draws).tolist() for _ in range(2)]
        places = reference.match(rows, orders)
        mean = sum(matrix[np.argsort(place)] for matrix, place in zip(rows, places, strict=True))
        mean = mean / networks if estimate == "mean" else (0.1 / 2 + mean) / (1 / 2 + networks)
        assert found[f"{layer}.weight"].flatten(1).numpy() == pytest.approx(mean[:, :-1])
        assert found[f"{layer}.bias"].numpy() == pytest.approx(mean[:, -1])
        if layer == "0":
            for name in ("1.weight", "1.bias", "1.running_mean", "1.running_var"):
                vectors = [s[name][np.argsort(p)] for s, p in zip(numpy, places, strict=True)]
                assert found[name].numpy() == pytest.approx(np.mean(vectors, axis=0))
        incoming = [
            state[f"{following}.weight"].reshape(-1, len(place), block)[:, np.argsort(place)]
            for state, place in zip(numpy, places, strict=True)
        ]
        incoming = [weight.reshape(len(weight), -1) for weight in incoming]
    assert found["1.num_batches_tracked"] == max(s["1.num_batches_tracked"] for s in states)
    for c in range(3):
        weights = counts[:, c].numpy() / counts[:, c].sum().item()
        last = sum(w * weight[c] for w, weight in zip(weights, incoming, strict=True))
        bias = sum(w * state["6.bias"][c] for w, state in zip(weights, numpy, strict=True))
        assert found["6.weight"][c].numpy() == pytest.approx(last)
        assert found["6.bias"][c].item() == pytest.approx(bias)


@st.composite
def chains(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    """Draw a chain and the shape of its inputs."""
    widths = st.integers(1, 5)
    layers: list[nn.Module] = []
    dimensions = draw(st.sampled_from([1, 2]))
    convolution, norm, pool = (
        getattr(nn, f"{kind}{dimensions}d") for kind in ("Conv", "BatchNorm", "MaxPool")
    )
    channels, side = 2, 12
    shape = (channels, *[side] * dimensions)
    if draw(st.booleans()):
        layers.append(norm(channels))
    for _ in range(draw(st.integers(0, 2))):
        width, bias = draw(widths), draw(st.booleans())
        layers.append(convolution(channels, width, 3, bias=bias))
        channels, side = width, side - 2
        if draw(st.booleans()):
            layers.append(norm(channels, affine=draw(st.booleans())))
        layers.append(draw(st.sampled_from([nn.ReLU(), nn.Tanh(), nn.Identity()])))
        if draw(st.booleans()):
            layers.append(pool(2))
            side //= 2
    if draw(st.booleans()):
        average = getattr(nn, f"AdaptiveAvgPool{dimensions}d")
        layers.append(average(2))
        side = 2
    layers.append(nn.Flatten())
    features = channels * side**dimensions
    if draw(st.booleans()):
        layers.append(nn.BatchNorm1d(features))
    for _ in range(draw(st.integers(0, 2))):
        width = draw(widths)
        layers += [nn.Linear(features, width, bias=draw(st.booleans())), nn.ReLU()]
        if draw(st.booleans()):
            layers.append(nn.BatchNorm1d(width))
        layers.append(nn.Dropout(0.0))
        features = width
    return nn.Sequential(*layers, nn.Linear(features, 3, bias=draw(st.booleans()))), shape


@settings(max_examples=60, deadline=None)
@given(chains(), st.integers(0, 1000))
def test_a_permuted_copy_computes_the_same_function(
    drawn: tuple[nn.Module, tuple[int, ...]], seed: int
) -> None:
    network, shape = drawn
    torch.manual_seed(seed)
    state, chain = state_of(network), find_chain(network)
    copy = permute(state, chain, random_places(chain))
    x = torch.randn(6, *shape, dtype=torch.float64)
    for train in (False, True):
        torch.testing.assert_close(
            output(network, copy, x, train), output(network, state, x, train), rtol=1e-8, atol=1e-9
        )


@settings(max_examples=20, deadline=None)
@given(chains(), st.integers(0, 1000))
def test_permuted_copies_are_found_again(
    drawn: tuple[nn.Module, tuple[int, ...]], seed: int
) -> None:
    network, _ = drawn
    torch.manual_seed(seed)
    state, chain = state_of(network), find_chain(network)
    copies = [permute(state, chain, random_places(chain)) for _ in range(3)]
    for copy in copies:
        assert_same(align(copy, state, chain), state)
    torch.testing.assert_close(matched_mean([state, *copies], chain), state, rtol=1e-12, atol=1e-14)


def test_permuting_there_and_back() -> None:
    state, chain = state_of(small_cnn()), find_chain(small_cnn())
    places = random_places(chain)
    copy = permute(state, chain, places)
    assert not torch.equal(copy["0.weight"], state["0.weight"])
    assert_same(permute(copy, chain, [place.argsort() for place in places]), state)


def test_networks_of_other_widths_keep_their_functions_in_a_wider_one() -> None:
    narrow, wide = MLP(3, [2], 2), MLP(3, [4], 2)
    chain = find_chain(narrow)
    state = state_of(narrow)
    copy = permute(state, chain, [torch.tensor([3, 1])], widths=[4])
    x = torch.randn(5, 3, dtype=torch.float64)
    torch.testing.assert_close(output(wide.double(), copy, x), output(narrow, state, x))


def test_growth_adds_the_neurons_that_fit_nowhere() -> None:
    rows = [A, torch.tensor([[2.1, 0.0], [-9.0, -9.0]], dtype=torch.float64)]
    assert [p.tolist() for p in match_rows(rows, BBPMAP(grow=True, passes=0))] == [[0, 1], [0, 2]]
    assert [p.tolist() for p in match_rows(rows, BBPMAP())] == [[0, 1], [0, 1]]


def test_close_networks_are_averaged_as_they_stand() -> None:
    torch.manual_seed(5)
    chain = find_chain(small_cnn())
    start = state_of(small_cnn())
    states = [
        {
            n: v + 0.01 * torch.randn_like(v) if v.is_floating_point() else v
            for n, v in start.items()
        }
        for _ in range(4)
    ]
    mean = matched_mean(states, chain, torch.full((4, 3), 7))
    for name, value in mean.items():
        values = torch.stack([state[name] for state in states])
        expected = values.mean(0) if values.is_floating_point() else values.amax(0)
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-14)
        assert value.dtype == start[name].dtype


def test_one_network_is_its_own_mean() -> None:
    state = state_of(small_cnn())
    assert_same(matched_mean([state], find_chain(small_cnn())), state)


def test_the_widest_comes_first_then_the_lowest() -> None:
    rows = [A[:1], A.flip(0), A]
    assert match_rows(rows, BBPMAP(grow=True, passes=0))[1].tolist() == [0, 1]
    assert match_rows(rows[1:], BBPMAP(passes=0))[0].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("network", "widths"),
    [
        (LogisticRegression(8, 2), [2]),
        (MLP(64, [32, 16], 10), [32, 16, 10]),
        (McMahanCNN(hidden=8), [32, 64, 8, 10]),
        (CelebACNN(), [32, 32, 32, 32, 2]),
        (FedRepCNN(dropout=0.6), [64, 64, 120, 64, 10]),
        (PFedHNCNN(batch_norm=True), [16, 32, 120, 84, 10]),
        (FedFomoCNN(), [32, 64, 64, 64, 10]),
        (FedBNCNN(image_size=4), [64, 64, 128, 2048, 512, 10]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_the_networks_of_the_papers_are_chains(network: nn.Module, widths: list[int]) -> None:
    chain = find_chain(Classifier(network, num_classes=widths[-1]))
    assert [layer.width for layer in chain] == widths
    held = [name for layer in chain for name in layer.tensors]
    vectors = [f"network.{name}" for name, tensor in network.state_dict().items() if tensor.ndim]
    assert sorted(held) == sorted(vectors)


class Functional(nn.Module):
    """A chain in which nearly everything is a function."""

    def __init__(self, flatten: str = "view") -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.shared_activation = nn.ReLU()
        self.hidden = nn.Linear(12, 4)
        self.output = nn.Linear(4, 2)
        self.how = flatten

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.shared_activation(self.conv(x - 0.5)), 2)
        x = F.adaptive_avg_pool2d(F.dropout(x, 0.5, self.training), 2)
        if self.how == "view":
            x = x.view(x.size(0), -1)
        elif self.how == "reshape":
            x = x.reshape(x.shape[0], 12)
        elif self.how == "function":
            x = torch.flatten(x, 1)
        else:
            x = x.flatten(start_dim=1)
        x = torch.tanh(F.leaky_relu(self.shared_activation(self.hidden(x))))
        return F.log_softmax(self.output(x), dim=1)


@pytest.mark.parametrize("flatten", ["view", "reshape", "function", "method"])
def test_functions_are_understood(flatten: str) -> None:
    network = Functional(flatten)
    state, chain = state_of(network), find_chain(network)
    assert [layer.name for layer in chain] == ["conv", "hidden", "output"]
    x = torch.randn(3, 1, 6, 6, dtype=torch.float64)
    copy = permute(state, chain, random_places(chain))
    torch.testing.assert_close(output(network, copy, x), output(network, state, x))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x + F.relu(x))


class Scaled(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.scale * self.first(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(5, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.embedding(x).sum(1))


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def shared() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer)


def tied() -> nn.Module:
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = one.weight
    return nn.Sequential(one, nn.ReLU(), other)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (Residual(), "the operation 'add' does not take the output of one layer alone"),
        (Scaled(), "the operation 'mul' does not take"),
        (ResNet18(), "stands before Conv2d"),
        (shared(), "Linear '0' is used twice or shares its weights"),
        (tied(), "Linear '2' is used twice or shares its weights"),
        (Recurrent(), "the parameter 'embedding.weight' belongs to no such layer"),
        (nn.LSTM(4, 2), "LSTM can't be traced"),
        (Branching(), "Branching can't be traced"),
        (nn.Linear(2, 2), "the parameter 'bias' belongs to no such layer"),
        (
            nn.Sequential(nn.Conv2d(1, 4, 1), nn.Conv2d(4, 4, 1, groups=2)),
            "Conv2d '1' has 2 groups",
        ),
        (
            nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4), nn.Linear(4, 2)),
            "LayerNorm '1' stands before Linear '2'",
        ),
        (
            nn.Sequential(nn.Linear(2, 4), nn.MaxPool1d(2), nn.Linear(2, 2)),
            "MaxPool1d '1' stands before Linear '2'",
        ),
        (
            nn.Sequential(nn.Conv2d(1, 4, 1), nn.Flatten(2), nn.Linear(4, 2)),
            "Flatten '1' stands before Linear '2'",
        ),
        (
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(4, 2)),
            "Linear '1' does not take each output of '0' by itself",
        ),
        (  # a linear layer at each of five positions has its neurons last
            nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Flatten(), nn.Linear(30, 3)),
            "Linear '3' does not take each output of '0' by itself",
        ),
        (
            nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Flatten(), nn.Linear(25, 3)),
            "Linear '3' does not take each output of '0' by itself",
        ),
        (
            nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(12), nn.Linear(6, 3)),
            "BatchNorm1d '1' does not take each output of '0'",
        ),
        (  # which would pool over channels
            nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool3d(2), nn.Flatten(), nn.Linear(16, 2)),
            "MaxPool3d '1' stands before Linear '3'",
        ),
        (
            nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 4)), nn.Linear(4, 2)),
            "has a weight that is computed",
        ),
    ],
)
def test_other_networks_are_refused(network: nn.Module, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        find_chain(network)


def test_a_client_has_to_send_the_whole_chain_and_one_output_per_class() -> None:
    client = Classifier(MLP(3, [4], 2), num_classes=2)
    names = [name for name, _ in client.named_parameters()]
    assert len(matched_chain(client, names)) == 2
    with pytest.raises(ConfigurationError, match=r"moves 'network\.hidden\.0\.bias'"):
        matched_chain(client, [name for name in names if name != "network.hidden.0.bias"])
    with pytest.raises(ConfigurationError, match=r"'network\.output' does not end it with 3"):
        matched_chain(Classifier(MLP(3, [4], 2), num_classes=3), names)


def test_networks_of_other_widths_have_to_grow() -> None:
    with pytest.raises(ConfigurationError, match=r"different widths \[1, 2\] need grow=True"):
        match_rows([A, B[:1]])


def test_a_chain_of_one_layer_has_nothing_to_match() -> None:
    chain = find_chain(Classifier(LogisticRegression(3, 2), num_classes=2))
    state = {"network.output.weight": torch.ones(2, 3), "network.output.bias": torch.ones(2)}
    assert match([state, state], chain) == [(), ()]
    assert_same(align(state, state, chain), state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 0.0}, "gamma must be over 0, got 0.0"),
        ({"sigma": -1.0}, "sigma must be over 0"),
        ({"sigma0": 0.0}, "sigma0 must be over 0"),
        ({"passes": -1}, "passes must be at least 0, got -1"),
        ({"estimate": "median"}, "estimate must be 'mean' or 'map', got 'median'"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        BBPMAP(**options)


def test_biases_have_a_prior_of_their_own() -> None:
    rows, sums = (torch.tensor([row]).double() for row in ([1.0, 0.0, 2.0], [3.0, 0.0, -1.0]))
    options = BBPMAP(mu0=0.5, bias_mu0=0.1)
    (score,) = matching_scores(rows, sums, torch.ones(1), 2, options, biased=True).flatten()
    joint, before = (4.5**2 + 0.5**2 + 1.1**2) / 3, (3.5**2 + 0.5**2 + 0.9**2) / 2
    assert score.item() == pytest.approx(joint - before, abs=1e-6)
    states = [{"0.weight": torch.ones(1, 2), "0.bias": torch.ones(1)}] * 2
    states = [{**state, "1.weight": torch.ones(2, 1), "1.bias": torch.ones(2)} for state in states]
    chain = find_chain(nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 2)))
    mean = matched_mean(states, chain, options=BBPMAP(mu0=0.5, bias_mu0=0.1, estimate="map"))
    assert mean["0.weight"].tolist() == [[pytest.approx(2.5 / 3)] * 2]
    assert mean["0.bias"].tolist() == [pytest.approx(2.1 / 3)]


def test_ibms_code_weighs_popularity_once_and_caps_it() -> None:
    rows, sums, counts = torch.zeros(1, 2), torch.zeros(2, 2), torch.tensor([12.0, 4.0])
    paper, ibm = (
        matching_scores(rows, sums, counts, 20, BBPMAP(grow=True, compat_ibm=compat))
        for compat in (False, True)
    )
    assert paper[0, :2].tolist() == pytest.approx([2 * math.log(12 / 8), 2 * math.log(4 / 16)])
    assert ibm[0, :2].tolist() == pytest.approx([math.log(10 / 10), math.log(4 / 16)])
    assert torch.equal(paper[0, 2:], ibm[0, 2:])

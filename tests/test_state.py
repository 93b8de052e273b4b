from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor, nn

from pflight.models import ResNet18
from pflight.states.state import (
    StateLayout,
    StateModule,
    WeightedMean,
    call_with,
    expand_state,
    other_places,
    squared_distance,
    stack_states,
    state_bytes,
)
from tests.runs import batchnorm_client, linear_client

pytestmark = pytest.mark.fast


def stack(**leaves: Tensor) -> TensorDict:
    return TensorDict(leaves, batch_size=[len(next(iter(leaves.values())))])


class TestLayout:
    def test_kinds_follow_from_the_modules(self) -> None:
        layout = StateLayout.of(batchnorm_client())
        assert layout.names == tuple(batchnorm_client().state_dict())
        assert layout.counters == ("network.1.num_batches_tracked",)
        assert set(layout.averaged) == {"network.1.running_mean", "network.1.running_var"}
        assert set(layout.parameters) == {n for n, _ in batchnorm_client().named_parameters()}
        assert set(layout.buffers) == {*layout.averaged, *layout.counters}

    def test_bytes(self) -> None:
        client = batchnorm_client()
        expected = sum(v.numel() * v.element_size() for v in client.state_dict().values())
        assert StateLayout.of(client).nbytes == expected
        client.network[0].requires_grad_(False)  # which all clients share
        frozen = sum(t.nbytes for t in client.network[0].state_dict().values())
        assert StateLayout.of(client).nbytes == expected - frozen

    def test_it_copies(self) -> None:
        client = linear_client()
        layout = StateLayout.of(client)
        with torch.no_grad():
            client.network.weight.zero_()
        assert layout.template["network.weight"].any()


class TestStateModule:
    def test_names_are_those_of_the_state(self) -> None:
        state = dict(batchnorm_client().state_dict())
        held = StateModule(state, parameters=["network.0.weight"])
        assert set(held.state_dict()) == set(state)
        assert [name for name, _ in held.named_parameters()] == ["network.0.weight"]
        assert list(held.tensors()) == list(state)
        assert list(held.tensors(["network.3.bias", "network.0.bias"])) == [
            "network.3.bias",
            "network.0.bias",
        ]

    def test_tensors_are_live_and_start_as_copies(self) -> None:
        weight = torch.ones(2)
        held = StateModule({"w": weight}, parameters=["w"])
        with torch.no_grad():
            held.tensors()["w"].add_(1)
        assert held.state_dict()["w"].tolist() == [2, 2]
        assert weight.tolist() == [1, 1]

    def test_without_persistence_nothing_is_saved(self) -> None:
        assert not StateModule({"a.b": torch.ones(1)}, persistent=False).state_dict()

    def test_it_follows_dtypes_and_keeps_integers(self) -> None:
        held = StateModule({"w": torch.ones(1), "n": torch.tensor(3)}).double()
        assert held.tensors()["w"].dtype == torch.float64
        assert held.tensors()["n"].dtype == torch.int64


class TestWeightedMean:
    @given(
        st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(1, 1000)), min_size=1, max_size=12),
        st.integers(1, 12),
    )
    @settings(max_examples=40, deadline=None)
    def test_chunks_do_not_matter(self, rows: list[tuple[float, int]], size: int) -> None:
        values = torch.tensor([value for value, _ in rows], dtype=torch.float64).view(-1, 1)
        weights = torch.tensor([weight for _, weight in rows])
        mean = WeightedMean({"w": values[0]})
        for part, weight in zip(values.split(size), weights.split(size), strict=True):
            mean.add(stack(w=part), weight)
        expected = (values[:, 0] * weights).sum() / weights.sum()
        assert mean.compute()["w"][0].item() == pytest.approx(expected.item(), abs=1e-9)

    def test_integers_take_their_maximum_and_stay_integers(self) -> None:
        mean = WeightedMean({"n": torch.tensor(0), "w": torch.zeros(1)})
        mean.add(stack(n=torch.tensor([3, 5]), w=torch.ones(2, 1)), torch.ones(2))
        mean.add(stack(n=torch.tensor([2**60 + 1]), w=torch.ones(1, 1)), torch.ones(1))
        result = mean.compute()
        assert result["n"].dtype == torch.int64
        assert result["n"].tolist() == [2**60 + 1]

    def test_negative_integers_and_booleans(self) -> None:
        mean = WeightedMean({"n": torch.tensor(0), "b": torch.tensor(False)})
        mean.add(stack(n=torch.tensor([-3, -5]), b=torch.tensor([False, True])), torch.ones(2))
        assert mean.compute()["n"].tolist() == [-3]
        assert mean.compute()["b"].tolist() == [True]

    def test_groups(self) -> None:
        mean = WeightedMean({"w": torch.zeros(1), "n": torch.tensor(0)}, groups=3)
        states = stack(w=torch.tensor([[1.0], [2.0], [6.0]]), n=torch.tensor([4, 9, 7]))
        mean.add(states, torch.tensor([1.0, 1.0, 3.0]), torch.tensor([2, 0, 2]))
        result = mean.compute()
        assert result["w"][[0, 2]].flatten().tolist() == [2.0, 4.75]
        assert result["n"][[0, 2]].tolist() == [9, 7]
        assert mean.weights.tolist() == [1, 0, 4]

    def test_half_precision_is_summed_in_single(self) -> None:
        mean = WeightedMean({"w": torch.zeros(1, dtype=torch.bfloat16)})
        for _ in range(1000):
            mean.add(stack(w=torch.full((1, 1), 1.0, dtype=torch.bfloat16)), torch.ones(1))
        assert mean.compute()["w"].item() == 1.0
        assert mean.compute()["w"].dtype == torch.bfloat16

    def test_it_keeps_no_reference_to_what_it_was_given(self) -> None:
        values = torch.ones(1, 2)
        mean = WeightedMean({"w": torch.zeros(2)})
        mean.add(stack(w=values), torch.ones(1))
        values.zero_()
        assert mean.compute()["w"].tolist() == [[1, 1]]

    def test_one_member_is_exact(self) -> None:
        values = torch.rand(1, 100)
        mean = WeightedMean({"w": torch.zeros(100)})
        mean.add(stack(w=values), torch.tensor([7]))
        torch.testing.assert_close(mean.compute()["w"], values, rtol=1e-6, atol=0)


def test_squared_distance_keeps_the_precision_of_close_models() -> None:
    center = {"w": torch.full((3,), 1e4, dtype=torch.float64)}
    states = stack(w=torch.tensor([[1e4, 1e4, 1e4 + 1e-6], [0, 0, 0]], dtype=torch.float64))
    near, far = squared_distance(states, center).tolist()
    assert near == pytest.approx(1e-12, rel=1e-4)
    assert far == pytest.approx(3e8)


def test_stacks() -> None:
    states = stack_states([{"w": torch.ones(2)}, {"w": torch.zeros(2)}])
    assert states.batch_size == torch.Size([2])
    assert states["w"].tolist() == [[1, 1], [0, 0]]
    view = expand_state({"w": torch.ones(2, 3)}, 1000)
    assert view["w"].shape == (1000, 2, 3)
    assert view["w"].untyped_storage().nbytes() == 24
    assert state_bytes(view) == 24
    assert state_bytes(view[:0]) == 0


def test_a_parameter_that_needs_no_gradient_is_none_to_train() -> None:
    client = linear_client()
    client.network.bias.requires_grad_(False)
    layout = StateLayout.of(client)
    assert layout.parameters == ("network.weight",)
    assert isinstance(client.network, nn.Linear)


class TestLayers:
    """Which tensors belong to one layer."""

    def layers(self, network: nn.Module) -> dict[str, tuple[str, ...]]:
        return StateLayout.of(network).layers

    def test_a_layer_has_its_parameters_and_buffers(self) -> None:
        assert StateLayout.of(batchnorm_client()).layers == {
            "network.0": ("network.0.weight", "network.0.bias"),
            "network.1": (
                "network.1.weight",
                "network.1.bias",
                "network.1.running_mean",
                "network.1.running_var",
                "network.1.num_batches_tracked",
            ),
            "network.3": ("network.3.weight", "network.3.bias"),
        }

    def test_a_network_of_one_layer(self) -> None:
        names = ("network.weight", "network.bias")
        assert self.layers(linear_client()) == {"network": names}
        assert self.layers(nn.Linear(2, 1)) == {"": ("weight", "bias")}

    def test_frozen_parameters_are_in_their_layer(self) -> None:
        network = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1))
        assert self.layers(network)["0"] == ("0.weight", "0.bias")

    def test_a_module_with_children_has_a_layer_of_what_it_holds_itself(self) -> None:
        assert self.layers(nn.MultiheadAttention(4, 2)) == {
            "": ("in_proj_weight", "in_proj_bias"),
            "out_proj": ("out_proj.weight", "out_proj.bias"),
        }

    def test_all_gates_of_a_recurrent_network_are_one_layer(self) -> None:
        network = nn.Sequential(nn.LSTM(2, 3, num_layers=2))
        assert self.layers(network) == {"0": tuple(network.state_dict())}

    @pytest.mark.parametrize(
        "parametrize",
        [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm],
    )
    def test_a_parametrization_belongs_to_its_module(self, parametrize: Callable) -> None:
        network = nn.Sequential(parametrize(nn.Linear(3, 3)), nn.Linear(3, 1))
        layers = self.layers(network)
        assert list(layers) == ["0", "1"]
        assert layers["0"] == tuple(n for n in network.state_dict() if n.startswith("0."))
        assert list(self.layers(parametrize(nn.Linear(3, 3)))) == [""]

    def test_tied_tensors_are_in_the_layer_of_their_first_name(self) -> None:
        network = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))
        network[1].weight = network[0].weight
        assert self.layers(network) == {"0": ("0.weight",), "1": ("1.bias",)}

    def test_every_convolution_and_normalisation_of_a_resnet_is_a_layer(self) -> None:
        network = ResNet18(norm="batch")
        layers = self.layers(network)
        kinds = [type(network.get_submodule(layer)) for layer in layers]
        assert kinds.count(nn.Conv2d) == kinds.count(nn.BatchNorm2d) == 20
        assert kinds.count(nn.Linear) == len(kinds) - 40 == 1
        assert [*layers][:2] == ["conv1", "bn1"]
        assert len(layers["layer2.0.downsample.1"]) == 5

    @given(st.data())
    @settings(max_examples=60, deadline=None)
    def test_they_are_the_modules_that_hold_tensors(self, data: st.DataObject) -> None:
        network = nn.ModuleDict({"body": data.draw(networks()), "head": nn.Linear(1, 1)})
        expected = {}
        for layer, module in network.named_modules():
            if names := [name for name in module.state_dict() if "." not in name]:
                expected[layer] = tuple(f"{layer}.{name}" for name in names)
        assert list(self.layers(network).items()) == list(expected.items())
        held = [name for names in expected.values() for name in names]
        assert held == list(StateLayout.of(network).names)


def networks() -> st.SearchStrategy[nn.Module]:
    """Nested modules, some with tensors of their own, some used twice, some without tensors."""
    shared = [nn.Linear(1, 1), nn.PReLU()]
    leaves = st.one_of(
        st.sampled_from(shared),
        st.builds(lambda bias: nn.Linear(1, 1, bias=bias), st.booleans()),
        st.builds(lambda affine: nn.BatchNorm1d(1, affine=affine), st.booleans()),
        st.builds(nn.ReLU),
    )
    return st.recursive(
        leaves, lambda children: st.builds(nested, st.lists(children), st.booleans())
    )


def nested(children: list[nn.Module], scaled: bool) -> nn.Module:
    module = nn.Sequential(*children)
    if scaled:
        module.register_parameter("scale", nn.Parameter(torch.ones(1)))
    return module


class TwiceNamed(nn.Module):
    """Two layers of one weight, both of which have a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.last.weight = self.first.weight
        self.layers = nn.Sequential(self.first, self.last)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_a_tied_weight_is_put_in_each_place_once_and_taken_out_again() -> None:
    module = TwiceNamed()
    weight, x = module.first.weight, torch.randn(3, 2)
    other = torch.randn(2, 2)
    assert other_places(module) == {"last.weight": "first.weight"}
    y = call_with(module, {"first.weight": other}, lambda m: m(x))
    assert torch.equal(y, x @ other.T @ other.T)
    assert module.first.weight is weight
    assert module.last.weight is weight


def test_flags_of_a_mean_are_true_if_one_is() -> None:
    """Boolean entries take the maximum, as integers do."""
    states = TensorDict({"seen": torch.tensor([[False, True], [False, False]])}, [2])
    mean = WeightedMean({"seen": torch.tensor([False, False])})
    mean.add(states, torch.ones(2))
    assert mean.compute()["seen"].tolist() == [[False, True]]

"""FedLEASE computes the printed numbers, and what the authors' layers give in plain torch."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn

pytest.importorskip("peft")

import peft
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from pflight import Federation
from pflight.adapters import AdapterDistance
from pflight.adapters.experts import Experts
from pflight.adapters.export import write_model
from pflight.adapters.pairs import find_pairs
from pflight.callbacks import IFCA, FedAvg, FedLEASE
from pflight.callbacks.methods.fedlease import Routed, _directions, _distances
from pflight.datamodules import TensorClients
from pflight.errors import ConfigurationError
from pflight.modifiers import Frozen, Private
from pflight.runs.check_state import CheckState
from tests.adapters.worlds import A, B, Regressor, data_of, matrix, regressor
from tests.models.test_text import adapted
from tests.models.test_text import data as tokens
from tests.remote_clients import ask_remote_clients
from tests.runs import (
    ENGINES,
    Adapted,
    batchnorm_client,
    failing,
    quiet_trainer,
    run,
    small_data,
)

assert_close = partial(torch.testing.assert_close, atol=1e-13, rtol=1e-12)
LAYERS = ("one", "two")
LR, STEPS, SCALE = 0.1, 2, 1.5
SIZES = (4, 5, 6, 3, 5)
GROUPS = (0, 1, 0, 1, 0)


# The printed vectors


def experts_of_v(room: int, logits: Sequence[float]) -> Regressor:
    """Return world V with zeros as base, own expert 0, and a router with these logits at (1, 1)."""
    module = regressor()
    experts = Experts(module, room, "FedLEASE")
    module.add_module("experts", experts)
    state = module.state_dict()
    state["network.base_model.model.lin.base_layer.weight"].zero_()
    state[A][:], state[B][:] = matrix([[1, 0]]), matrix([[1], [0], [2]])
    state["experts.bank.a0"][:2] = torch.stack([matrix([[9, 9]]), matrix([[1, 2]])])
    state["experts.bank.b0"][:2] = torch.stack([matrix([[9], [9], [9]]), matrix([[0], [1], [1]])])
    state["experts.router.0.weight"].fill_(50.0)
    for slot, logit in zip((0, 1, room), logits, strict=True):
        state["experts.router.0.weight"][slot] = logit / 2
    state["experts.count"].fill_(2)
    return module


@pytest.mark.parametrize("room", [2, 3, 5])
@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ((1, 2, 3), (1.2, 2.4, 4.8)),
        ((2, 1, 3), (2, 0, 4)),
        ((1, 1, 1), (1, 3, 5)),  # the lower slots on ties
        ((1, 3, 3), (1, 3, 5)),
        ((3, 3, 4), (2, 0, 4)),
    ],
)
def test_printed_vectors(room: int, shares: tuple[float, ...], expected: tuple[float, ...]) -> None:
    """Rows of the router without an expert have no effect, however large they are."""
    module = experts_of_v(room, [math.log(share) for share in shares])
    found = module.network(matrix([[1, 1]]))
    assert_close(found, matrix([[*expected]]))


def test_the_own_expert_of_another_cluster() -> None:
    """As expert 1, the adapter has the place of expert 1, and the bank gives expert 0."""
    module = experts_of_v(2, [math.log(share) for share in (1, 2, 3)])
    state = module.state_dict()
    state["experts.own"].fill_(1)
    state["experts.bank.a0"][0], state["experts.bank.b0"][0] = state[A].clone(), state[B].clone()
    state[A][:], state[B][:] = matrix([[1, 2]]), matrix([[0], [1], [1]])
    found = module.network(matrix([[1, 1]]))  # slots 1 and 2, both of the own expert
    assert_close(found, matrix([[0, 6, 6]]))


# The authors' layer


def authors_layer(
    x: Tensor,
    base: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    route: Tensor,
    own: int,
    scale: float,
) -> Tensor:
    """Follow the loops of the authors' ``Linear.forward`` with ``adaptive`` (cf18cd6).

    Args:
        x: Inputs ``[n, tokens, k]``.
        base: The frozen weight ``[d, k]``.
        a: Factors A of all M experts.
        b: Factors B of all M experts.
        route: The router ``[2M - 1, k]``.
        own: The own expert.
        scale: The scale.
    """
    count, result = len(a), F.linear(x, base)
    weight = F.softmax(F.linear(x, route), dim=-1)
    top_weights, top_indices = torch.topk(weight, count, dim=-1)
    top_weights = top_weights / top_weights.sum(dim=-1, keepdim=True)
    mapping = torch.arange(weight.shape[-1])
    mapping[count:] = own
    for place in range(count):
        chosen, share = mapping[top_indices[:, :, place]], top_weights[:, :, place].unsqueeze(-1)
        for i in range(count):
            masked = torch.where((chosen == i).unsqueeze(-1), share, 0.0)
            result = result + masked * F.linear(F.linear(x, a[i]), b[i]) * scale
    return result


class Small(nn.Module):
    """Two linear layers; the second may be a Conv1D."""

    def __init__(self, conv1d: bool = False) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)
        if conv1d:
            self.two = pytest.importorskip("transformers.pytorch_utils").Conv1D(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).tanh())


def small(conv1d: bool = False, **options: Any) -> Any:
    """Return a module in double precision with adapters of rank 2 in both layers."""
    torch.manual_seed(3)
    config = {"r": 2, "lora_alpha": 3, "target_modules": [*LAYERS], **options}
    config |= {"fan_in_fan_out": conv1d} if conv1d else {}
    model = peft.get_peft_model(Small(conv1d), peft.LoraConfig(**config))
    return Regressor(model, LR).double()


def name_of(layer: str, factor: str) -> str:
    return f"network.base_model.model.{layer}.lora_{factor}.default.weight"


def base_of(layer: str) -> str:
    return f"network.base_model.model.{layer}.base_layer.weight"


def authors_network(
    x: Tensor, bases: Sequence[Tensor], factors: dict[str, list[Tensor]], own: int
) -> Tensor:
    """Return the outputs ``[n, 2]`` of :class:`Small`, by the authors' layers."""
    for index, (layer, base) in enumerate(zip(LAYERS, bases, strict=True)):
        a, b = factors[f"a {layer}"], factors[f"b {layer}"]
        (route,) = factors[f"route {layer}"]
        x = authors_layer(x.unsqueeze(1), base, a, b, route, own, SCALE).squeeze(1)
        x = x if index else x.tanh()
    return x


@pytest.mark.parametrize("conv1d", [False, True])
@pytest.mark.parametrize(("count", "room"), [(2, 2), (3, 3), (3, 6), (4, 5)])
def test_outputs_and_gradients_are_those_of_the_authors_layer(
    count: int, room: int, conv1d: bool
) -> None:
    module, draw = small(conv1d, target_modules=["two"]), torch.Generator().manual_seed(count)
    experts = Experts(module, room, "FedLEASE")
    module.add_module("experts", experts)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=draw, dtype=torch.double))
    experts.count.fill_(count)
    x, own = torch.randn(20, 5, 3, generator=draw).double(), count - 1
    experts.own.fill_(own)
    rows = [*range(count), *range(room, room + count - 1)]
    state = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    a, b = ([*state[f"experts.bank.{one}0"][:count].clone()] for one in "ab")
    a[own], b[own] = (state[name_of("two", factor)].clone().requires_grad_() for factor in "AB")
    route = state["experts.router.0.weight"][rows].clone().requires_grad_()
    base = state[base_of("two")]
    hidden = F.linear(x, module.network.base_model.model.one.weight).tanh()
    expected = authors_layer(hidden, base.T if conv1d else base, a, b, route, own, SCALE)
    if conv1d:
        expected = expected + state["network.base_model.model.two.base_layer.bias"]
    found = module.network(x)
    assert_close(found, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    own_a, own_b = (module.get_parameter(name_of("two", factor)).grad for factor in "AB")
    assert_close((own_a, own_b), (a[own].grad, b[own].grad))
    gradient = experts.router[0].weight.grad
    assert_close(gradient[rows], route.grad)
    others = [row for row in range(2 * room - 1) if row not in rows]
    assert not gradient[others].any()


def test_with_one_expert_the_layer_is_as_it_was() -> None:
    plain, module = small(), small()
    module.add_module("experts", Experts(module, 4, "FedLEASE"))
    x = torch.randn(7, 3, generator=torch.Generator().manual_seed(0)).double()
    for one in (plain, module):
        with torch.no_grad():
            one.get_parameter(name_of("one", "B")).fill_(0.3)
    assert torch.equal(module.network(x), plain.network(x))


def test_the_router_sees_inputs_before_dropout() -> None:
    module = small(lora_dropout=0.5)
    experts = Experts(module, 2, "FedLEASE")
    experts.count.fill_(2)
    seen = []
    experts.router[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    x = torch.ones(4, 3).double()
    module.train().network(x)
    assert torch.equal(seen[0], x)


def test_copies_have_experts_of_their_own() -> None:
    module = experts_of_v(2, [0.0, 1.0, 2.0])
    x = matrix([[1, 1]])
    before = module.network(x)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        other.state_dict()["experts.bank.b0"].zero_()
        assert not torch.equal(other.network(x), before)
        assert torch.equal(module.network(x), before)


# Clusters


def states_of(*b: Any) -> TensorDict:
    factors = torch.stack([torch.tensor(one).double() for one in b])
    zeros = factors.new_zeros(len(factors), 2, 2)
    return TensorDict({"b": factors, "b2": 2 * factors + 1, "a": zeros}, [len(factors)])


def pairs_of(*names: str) -> list[Any]:
    (pair, _) = find_pairs(small())
    made = copy.copy(pair)
    return [type(made)(name, "x", "a", name, 2, 1.0) for name in names]


def test_distances_are_those_of_cosines() -> None:
    """Also those of zeros, and means over members and adapters."""
    draw = torch.Generator().manual_seed(0)
    factors = torch.randn(6, 4, 2, generator=draw).double()
    factors[4] = 0
    states, pairs = states_of(*factors.tolist()), pairs_of("b", "b2")
    rows = _directions(states, pairs)
    distance = AdapterDistance("cosine_B", pairs)
    expected = torch.stack([distance(states, state) for state in states])
    assert_close(_distances(rows, rows), expected)
    means = [row[[1, 3, 4]].mean(0, keepdim=True) for row in rows]
    found = _distances(rows, means)[:, 0]
    assert_close(found, expected[:, [1, 3, 4]].mean(1))


def silhouette(table: Any, labels: Any) -> float:
    """Return the mean silhouette, as its definition has it."""
    scores = []
    for i, own in enumerate(labels):
        mates = [j for j, other in enumerate(labels) if other == own and j != i]
        if not mates:
            scores.append(0.0)
            continue
        a = np.mean([table[i, j] for j in mates])
        b = min(
            np.mean([table[i, j] for j, other in enumerate(labels) if other == k])
            for k in {*labels} - {own}
        )
        scores.append((b - a) / max(a, b) if max(a, b) else 0.0)
    return float(np.mean(scores))


def best_clusters(table: Any, most: int) -> list[int]:
    """Return the clusters of scipy's average linkage with the best silhouette."""
    tree = linkage(squareform(table, checks=False), "average")
    found = [list(fcluster(tree, k, "maxclust")) for k in range(2, min(most, len(table) - 1) + 1)]
    return max(found, key=lambda labels: silhouette(table, labels))


def same_partition(one: Sequence[int], other: Sequence[int]) -> bool:
    pairs = itertools.combinations(range(len(one)), 2)
    return all((one[i] == one[j]) == (other[i] == other[j]) for i, j in pairs)


class Silent:
    """Takes what a callback logs."""

    def __init__(self) -> None:
        self.logged: dict[str, float] = {}

    def log(self, values: dict[str, float]) -> None:
        self.logged |= values


@pytest.mark.parametrize("seed", range(5))
def test_the_number_of_experts_has_the_best_silhouette(seed: int) -> None:
    draw = np.random.default_rng(seed)
    points = draw.normal(size=(12, 3)) + 4 * draw.integers(0, 4, size=(12, 1))
    table = np.linalg.norm(points[:, None] - points[None], axis=2)
    callback = FedLEASE(max_experts=6)
    callback.clients = Silent()  # type: ignore[assignment]
    found = callback._clusters(torch.from_numpy(table)).tolist()
    expected = best_clusters(table, 6)
    assert same_partition(found, expected)
    assert callback.clients.logged["fedlease/silhouette"] == pytest.approx(
        silhouette(table, expected)
    )
    assert [*dict.fromkeys(found)] == sorted({*found})


@pytest.mark.parametrize(("num_experts", "clusters"), [("auto", 2), (1, 1), (3, 3), (5, 5)])
def test_the_smallest_number_wins_a_tie(num_experts: Any, clusters: int) -> None:
    callback = FedLEASE(num_experts)
    callback.clients = Silent()  # type: ignore[assignment]
    found = callback._clusters(1 - torch.eye(5).double())
    assert len({*found.tolist()}) == clusters


# A federation


def samples() -> list[tuple[Tensor, Tensor]]:
    """Return clients of two groups with opposite targets."""
    draw = torch.Generator().manual_seed(5)
    one = torch.randn(3, 2, generator=draw).double()
    maps = one, -one
    found = []
    for size, group in zip(SIZES, GROUPS, strict=True):
        x = torch.randn(size, 3, generator=draw).double()
        found.append((x, x @ maps[group] + 0.02 * torch.randn(size, 2, generator=draw).double()))
    return found


def data(**options: Any) -> TensorClients:
    return data_of(samples(), **options)


def fitted(
    callback: Any,
    rounds: int,
    engine: str = "sequential",
    module: Any = None,
    clients: TensorClients | None = None,
    path: Path | None = None,
    **options: Any,
) -> Federation:
    trainer = quiet_trainer(rounds, callback, CheckState())
    options = {"local_steps": STEPS, **options}
    federation = Federation(small() if module is None else module, engine=engine, **options)
    trainer.fit(federation, datamodule=data() if clients is None else clients, ckpt_path=path)
    return federation


class Reference:
    """FedLEASE in plain torch, with the authors' layers; all clients take part."""

    def __init__(self, routers: dict[str, Tensor], most: int) -> None:
        state = small().state_dict()
        self.bases = [state[base_of(layer)] for layer in LAYERS]
        start = {
            f"{one.lower()} {layer}": state[name_of(layer, one)] for layer in LAYERS for one in "AB"
        }
        local = [self.warmed(start, *client) for client in samples()]
        table = np.zeros((len(local), len(local)))
        for i, j in itertools.product(range(len(local)), repeat=2):
            cosines = [
                F.cosine_similarity(local[i][f"b {n}"].flatten(), local[j][f"b {n}"].flatten(), 0)
                for n in LAYERS
            ]
            table[i, j] = 1 - float(sum(cosines)) / len(LAYERS) if i != j else 0.0
        labels = best_clusters(table, most)
        order = [*dict.fromkeys(labels)]
        self.clusters = [order.index(label) for label in labels]
        self.count = len(order)
        self.experts = [self.mean(local, k) for k in range(self.count)]
        self.routers = [dict(routers) for _ in range(self.count)]
        self.rows: list[int] = []

    def mean(self, found: Sequence[dict[str, Tensor]], cluster: int) -> dict[str, Tensor]:
        members = [i for i, k in enumerate(self.clusters) if k == cluster]
        return {name: sum(found[i][name] for i in members) / len(members) for name in found[0]}

    def descend(self, values: dict[str, Tensor], loss: Any) -> dict[str, Tensor]:
        for _ in range(STEPS):
            values = {name: value.detach().requires_grad_() for name, value in values.items()}
            gradients = torch.autograd.grad(loss(values), [*values.values()])
            values = {
                name: value - LR * gradient
                for (name, value), gradient in zip(values.items(), gradients, strict=True)
            }
        return {name: value.detach() for name, value in values.items()}

    def warmed(self, start: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
        def loss(own: dict[str, Tensor]) -> Tensor:
            z = x
            for index, (layer, base) in enumerate(zip(LAYERS, self.bases, strict=True)):
                z = z @ (base + SCALE * own[f"b {layer}"] @ own[f"a {layer}"]).T
                z = z if index else z.tanh()
            return 0.5 * (y - z).square().sum(1).mean()

        return self.descend(start, loss)

    def round(self) -> None:
        trained = []
        for (x, y), own in zip(samples(), self.clusters, strict=True):

            def loss(values: dict[str, Tensor], x=x, y=y, own=own) -> Tensor:
                factors = {}
                for name in values:
                    bank = [one.get(name, values[name]) for one in self.experts]
                    bank[own] = values[name]
                    factors[name] = bank[:1] if "route" in name else bank
                    if "route" in name:
                        factors[name] = [values[name]]
                found = authors_network(x, self.bases, factors, own)
                return 0.5 * (y - found).square().sum(1).mean()

            trained.append(self.descend(self.experts[own] | self.routers[own], loss))
        for k in range(self.count):
            mean = self.mean(trained, k)
            self.routers[k] = {name: value for name, value in mean.items() if "route" in name}
            self.experts[k] = {name: value for name, value in mean.items() if "route" not in name}


@ENGINES
def test_rounds_are_those_of_the_authors_layers(engine: str) -> None:
    federation = fitted(FedLEASE(max_experts=3), 4, engine)
    callback, template = federation.callback, federation.layout.template
    room = 3
    initial = {
        f"route {layer}": template[f"pflight_extra.router.{i}.weight"]
        for i, layer in enumerate(LAYERS)
    }
    probe = Reference(initial, room)
    rows = [*range(probe.count), *range(room, room + probe.count - 1)]
    expected = Reference({name: value[rows] for name, value in initial.items()}, room)
    for _ in range(3):
        expected.round()
    assert callback.assignments.tolist() == expected.clusters == [0, 1, 0, 1, 0]
    states = callback.server_states()
    assert len(states) == expected.count == 2
    for k, state in enumerate(states):
        for i, layer in enumerate(LAYERS):
            for factor in "AB":
                found = state[name_of(layer, factor)]
                one = expected.experts[k][f"{factor.lower()} {layer}"]
                assert_close(found, one)
            router = state[f"pflight_extra.router.{i}.weight"]
            one = expected.routers[k][f"route {layer}"]
            assert_close(router[rows], one)
            assert not torch.equal(router[rows], initial[f"route {layer}"][rows])
    for i, (x, _) in enumerate(samples()):
        own = expected.clusters[i]
        factors = {
            f"{one} {layer}": [expert[f"{one} {layer}"] for expert in expected.experts]
            for layer in LAYERS
            for one in "ab"
        }
        factors |= {name: [value] for name, value in expected.routers[own].items()}
        found = federation.client_module(i).network(x)
        assert_close(found, authors_network(x, expected.bases, factors, own))


# Reductions


@ENGINES
@pytest.mark.parametrize("aggregate", ["factors", "product"])
def test_one_expert_is_fedavg(engine: str, aggregate: Any) -> None:
    one = fitted(FedLEASE(1, aggregate=aggregate), 3, engine)  # type: ignore[call-arg]
    other = fitted(FedAvg("uniform", aggregate=aggregate), 3, engine)  # type: ignore[call-arg]
    assert_close(one.server_states(), other.server_states())
    same = [(entry.bytes_down, entry.bytes_up) for entry in other.history]
    assert [(entry.bytes_down, entry.bytes_up) for entry in one.history] == same


class Fixed(IFCA):
    """Clusters that do not change."""

    def centers_of(self, clients: Tensor) -> Tensor:
        self._chosen[clients.cpu()] = torch.tensor(GROUPS)[clients.cpu()]
        return self._chosen[clients.cpu()]


@ENGINES
def test_without_a_router_it_is_fedavg_by_cluster(engine: str) -> None:
    callback = FedLEASE(router=False)
    first = fitted(callback, 1, engine)
    assert callback.assignments.tolist() == [*GROUPS]
    centers = first.server_states()
    one = fitted(FedLEASE(router=False), 4, engine)
    other = fitted(Fixed(2, centers=centers, weighting="uniform"), 3, engine)
    assert_close(one.server_states(), other.server_states())
    model = one.history[1].bytes_up
    assert model == other.history[1].bytes_up == one.history[1].bytes_down


def test_a_router_that_takes_the_own_expert_alone_is_no_router() -> None:
    """With logits of 0 for the own slots and less for all others, only these act."""
    module = small()
    experts = Experts(module, 3, "FedLEASE")
    experts.count.fill_(3)
    experts.own.fill_(1)
    x = torch.rand(5, 3).double() + 0.1
    with torch.no_grad():
        for tensor in experts.bank.buffers():
            tensor.fill_(2.0)
        for router in experts.router:
            router.weight.fill_(-10.0)
            router.weight[[1, 3, 4]] = 0.0
        module.get_parameter(name_of("one", "B")).fill_(0.3)
        plain = small()
        plain.get_parameter(name_of("one", "B")).fill_(0.3)
    own, others = experts.weights(0, x)
    assert_close(own, torch.ones(5, 1).double())
    assert not others.any()
    hidden = module.network.base_model.model.one(x)
    assert_close(hidden, plain.network.base_model.model.one(x))


# Bytes

P = 8 * 2 * ((3 + 4) + (4 + 2))
P_B = 8 * 2 * (4 + 2)


def routers(count: int) -> int:
    return 8 * (2 * count - 1) * (3 + 4)


@ENGINES
def test_bytes(engine: str) -> None:
    """Experts travel to a client if they changed since it last answered."""
    federation = fitted(FedLEASE(max_experts=4), 3, engine)
    n, router = len(SIZES), routers(2)
    up = n * (P + router)
    assert [(e.bytes_down, e.bytes_up) for e in federation.history] == [
        (n * P, n * P),
        (n * (2 * P + router), up),
        (n * (2 * P + router), up),
    ]


def test_an_expert_that_did_not_change_does_not_travel_again() -> None:
    """One client of a round leaves the other cluster's expert as it was."""
    clients = data(cohort_size=1)
    federation = fitted(FedLEASE(2), 12, clients=clients)
    history, router = federation.history, routers(2)
    groups = federation.callback.assignments
    changed, seen = {0: 0, 1: 0}, dict.fromkeys(range(len(SIZES)), -1)
    sizes = set()
    for entry in history[1:]:
        (client,) = entry.clients
        new = sum(changed[k] >= seen[client] for k in changed)
        sizes.add(new)
        assert entry.bytes_down == new * P + router
        assert entry.bytes_up == P + router
        changed[int(groups[client])] = seen[client] = entry.index
    assert sizes == {1, 2}


# Clients that missed the first round


def test_a_newcomer_goes_to_the_nearest_cluster() -> None:
    """It trains once, sends its B, and gets the expert of its own group."""
    clients = data(holdout_clients=0.4)
    new = clients_of(clients)
    federation = fitted(FedLEASE(2), 3, clients=clients)
    (values,) = federation.trainer.test(federation, datamodule=clients, verbose=False)
    members = federation.callback.assignments
    assert (members[new] == -1).all()
    found = federation.callback.looked[new]
    group = {int(members[i]): GROUPS[i] for i in range(len(SIZES)) if members[i] >= 0}
    assert len({*group.values()}) == 2, "both groups have members"
    assert [group[int(k)] for k in found] == [GROUPS[i] for i in new]
    assert values["test/bytes_down"] == len(new) * P
    assert values["test/bytes_up"] == len(new) * P_B


@pytest.mark.parametrize("options", [{"dropout": 0.4, "seed": 5}, {"holdout_clients": 0.4}])
def test_clients_may_be_on_machines_of_their_own(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server finds the same clusters from what these send, and counts the same bytes."""
    found = []
    for there in (False, True):
        if there:
            ask_remote_clients(monkeypatch)
        federation = fitted(FedLEASE(2), 4, clients=data(**options))
        callback = federation.callback
        sent = callback.broadcast(torch.arange(len(SIZES)))
        aside = federation.clients.aside
        found.append((callback.assignments, callback.looked, dict(sent.items())))
        found[-1] += (callback.server_states(), aside.down, aside.up)
        found[-1] += ([(e.bytes_down, e.bytes_up) for e in federation.history],)
    assert_close(*found, atol=0, rtol=0)


def clients_of(clients: TensorClients) -> list[int]:
    clients.setup("fit")
    return clients.new_clients.tolist()


@ENGINES
def test_clients_that_missed_the_first_round_join_later(engine: str) -> None:
    clients = data(dropout=0.4, seed=5)
    federation = fitted(FedLEASE(2), 8, engine, clients=clients)
    history, router = federation.history, routers(2)
    missed = {*history[0].failed}
    assert missed, "some client does not answer in the first round"
    joined = set(missed)
    for entry in history[1:]:
        answered = {*entry.clients} - {*entry.failed}
        late = joined & answered
        assert entry.bytes_up == len(late) * P_B + len(answered - late) * (P + router)
        joined -= late
    assert joined < missed
    assert (federation.callback.assignments >= 0).sum() == len(SIZES) - len(joined)
    for client in missed - joined:
        own = federation.callback.assignments[client]
        mates = [i for i in range(len(SIZES)) if GROUPS[i] == GROUPS[client] and i not in missed]
        assert all(federation.callback.assignments[i] == own for i in mates)


def test_if_too_few_answer_the_next_round_tries_again(recwarn: pytest.WarningsRecorder) -> None:
    federation = fitted(FedLEASE(), 1, clients=data(dropout=0.6, seed=1))
    said = [str(warning.message) for warning in recwarn]
    expected = "round 0: FedLEASE found no experts, since only 1 clients answered; the next round"
    assert any(one.startswith(expected) for one in said)
    assert len(federation.server_states()) == 1
    assert (federation.callback.assignments == -1).all()
    start = small().state_dict()
    state = federation.client_state(0)
    assert all(torch.equal(state[name], value) for name, value in start.items())


# Whatever it computes


@ENGINES
@pytest.mark.parametrize("saved", [1, 2])
def test_resumed_is_uninterrupted(engine: str, saved: int, tmp_path: Path) -> None:
    whole = fitted(FedLEASE(max_experts=3), 4, engine, clients=data(cohort_size=2))
    half = fitted(FedLEASE(max_experts=3), saved, engine, clients=data(cohort_size=2))
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    torch.load(tmp_path / "half.ckpt", weights_only=True)
    path, clients = tmp_path / "half.ckpt", data(cohort_size=2)
    resumed = fitted(FedLEASE(max_experts=3), 4, engine, clients=clients, path=path)
    pairs = zip(whole.callback.server_states(), resumed.callback.server_states(), strict=True)
    for left, right in pairs:
        assert all(torch.equal(left[name], right[name]) for name in left)
    assert [e.bytes_down for e in whole.history] == [e.bytes_down for e in resumed.history]
    loaded = Federation.load_from_checkpoint(path, client=small(), callback=FedLEASE(max_experts=3))
    for i in range(len(SIZES)):
        left, right = half.client_state(i), loaded.client_state(i)
        assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_longer_first_round() -> None:
    """Its epochs replace the steps of other rounds."""
    three = fitted(FedLEASE(1, warmup_epochs=3), 1).server_states()
    assert_close(three, fitted(FedAvg("uniform"), 1, local_steps=3).server_states())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, r"FedLEASE with num_experts=auto needs at least 3 clients that can train, and .* 2"),
        ({"num_experts": 3}, r"num_experts=3 needs at least 3 clients that can train, .* 2"),
    ],
)
def test_too_few_clients_are_refused(options: dict[str, Any], said: str) -> None:
    clients = TensorClients(samples()[:2], num_classes=None, batch_size=None)
    with pytest.raises(ConfigurationError, match=said):
        fitted(FedLEASE(**options), 1, clients=clients)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_experts": 0}, "num_experts must be at least 1, got 0"),
        ({"num_experts": "some"}, "num_experts"),
        ({"num_experts": 2.5}, "num_experts"),
        ({"num_experts": True}, "num_experts"),
        ({"max_experts": 1}, "max_experts"),
        ({"warmup_epochs": 0}, "warmup_epochs"),
        ({"weighting": "size"}, "weighting"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=f"FedLEASE: {said}"):
        FedLEASE(**options)


class Pictures(nn.Module):
    """Has a convolution and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.words, self.two = nn.Conv1d(1, 2, 1), nn.Embedding(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(x)


def of_pictures(*targets: str, **options: Any) -> Regressor:
    config = peft.LoraConfig(r=1, target_modules=[*targets], **options)
    return Regressor(peft.get_peft_model(Pictures(), config)).double()


def of_frozen_b() -> Regressor:
    module = small()
    for layer in LAYERS:
        module.get_parameter(name_of(layer, "B")).requires_grad_(False).fill_(0.5)
    return module


def tied() -> Regressor:
    module = small(target_modules=["one", "two"])
    body = module.network.base_model.model
    body.three = copy.deepcopy(body.one)
    body.three.lora_A, body.three.lora_B = body.one.lora_A, body.one.lora_B
    return module


@pytest.mark.parametrize(
    ("module", "modifiers", "said"),
    [
        (lambda: Regressor(nn.Linear(3, 2)).double(), [], "FedLEASE needs low-rank adapters"),
        (lambda: of_pictures("two", "conv"), [], "linear layers, and '.*conv' is none"),
        (lambda: of_pictures("two", "words"), [], "linear layers, and '.*words' is none"),
        (lambda: small(use_dora=True), [], "can't use the adapter of '.*one': it is a Dora"),
        (
            lambda: of_pictures("two", lora_bias=True),
            [],
            r"adapter of '.*two': it has a bias \(lora_bias\)",
        ),
        (tied, [], "adapter of '.*three': another layer has the same factors"),
        (of_frozen_b, [], "compares clients by their factors B, and '.*lora_B.*' does not train"),
        (small, [Private("*lora_B*")], "FedLEASE: Private can't keep"),
        (small, [Private("*one.lora_A*")], "FedLEASE: Private can't keep"),
        (small, [Frozen("*lora_A*")], "FedLEASE: Frozen can't take"),
    ],
)
def test_what_it_can_t_route_is_refused(module: Any, modifiers: list[Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        fitted(FedLEASE(modifiers=modifiers), 1, module=module())  # type: ignore[call-arg]


@pytest.mark.filterwarnings("ignore:.*client 3 failed:UserWarning")
def test_a_client_that_fails_is_in_no_cluster() -> None:
    federation = run(
        batchnorm_client(failing(Adapted)), small_data(cohort_size=3), FedLEASE(2), 3, CheckState()
    )
    assert (federation.callback.assignments == -1).nonzero().flatten().tolist() == [3]


def test_a_head_may_be_private() -> None:
    """It is trained and kept by each client, and is no part of any expert."""
    module = small(target_modules=["one"], modules_to_save=["two"])
    private = [Private("*modules_to_save*")]
    federation = fitted(FedLEASE(2, modifiers=private), 3, module=module)  # type: ignore[call-arg]
    name = "network.base_model.model.two.modules_to_save.default.weight"
    heads = [federation.client_state(i)[name] for i in range(len(SIZES))]
    assert all(not torch.equal(heads[0], other) for other in heads[1:])
    adapter, router = 8 * 2 * (3 + 4), 8 * 3 * 3
    assert federation.history[1].bytes_up == len(SIZES) * (adapter + router)


def test_a_mixture_is_not_exported(tmp_path: Path) -> None:
    """But the expert of a cluster is, if there is no router."""
    federation = fitted(FedLEASE(2), 2)
    with pytest.raises(ConfigurationError, match="can't be exported: it mixes several experts"):
        write_model(federation.client_module(0), tmp_path / "out")
    federation = fitted(FedLEASE(2, router=False), 2)
    assert write_model(federation.client_module(0), tmp_path / "out")


def test_the_client_method() -> None:
    assert Routed(3) == Routed(3) != Routed(2)
    assert repr(Routed(3)) == "Routed(experts=3)"


def test_transformers_are_stacked() -> None:
    """Layers of GPT-2 have inputs ``[n, tokens, k]``, and weights the other way round."""
    found = [
        run(adapted().double(), tokens(), FedLEASE(), 3, CheckState(), engine=engine)
        for engine in ("sequential", "vectorized")
    ]
    assert found[1].clients.attached_engine.obstacle is None
    assert_close(found[0].callback.server_states(), found[1].callback.server_states(), atol=1e-9)
    assert len(found[0].callback.server_states()) == 2

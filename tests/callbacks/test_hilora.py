"""HiLoRA computes the printed numbers, and what plain torch does with the same rounds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

pytest.importorskip("peft")

import peft
from transformers.pytorch_utils import Conv1D

from pflight import Federation
from pflight.adapters import AdapterDistance, LowRank, find_pairs
from pflight.adapters.distances import subspace_distances, subspaces
from pflight.adapters.export import write_model
from pflight.callbacks import FedAvg, HetLoRA, HiLoRA, Local
from pflight.callbacks.methods.clustering import laplacian, spectral
from pflight.callbacks.methods.hilora import Tiered, Tiers
from pflight.datamodules import TensorClients
from pflight.errors import ConfigurationError
from pflight.models import Classifier
from pflight.modifiers import Frozen, Private, Proximal
from pflight.runs.check_state import CheckState
from pflight.states.head import EXTRA
from tests.adapters.worlds import A, B, Regressor, data_of, matrix, regressor
from tests.remote_clients import ask_remote_clients
from tests.runs import (
    ENGINES,
    Adapted,
    assert_same,
    batchnorm_client,
    quiet_trainer,
    run,
    small_data,
)

LAYER = "network_base_model_model_lin_default"
ROOT, CLUSTER = (
    {own: f"{EXTRA}.{tier}.{LAYER}.{end}.weight" for own, end in ((A, "a"), (B, "b"))}
    for tier in ("root", "cluster")
)
STAGE, W0 = f"{EXTRA}.stage", "network.base_model.model.lin.base_layer.weight"
P = 5 * 8
"""Bytes of one adapter of the small world."""


def close(value: Tensor, *expected: float) -> None:
    """Compare with printed numbers."""
    torch.testing.assert_close(
        value.flatten().double(), torch.tensor(expected).double(), atol=6e-7, rtol=0
    )


# The printed vectors


def test_printed_clusters() -> None:
    factors = torch.tensor([[1.0, 0, 0], [1, 1, 0], [0, 0, 1]]).double().unsqueeze(2)
    bases = subspaces(factors)
    distances = subspace_distances(bases, bases)
    close(distances, 0, 0.5, 1, 0.5, 0, 1, 1, 1, 0)
    found = laplacian(distances)
    close(torch.linalg.eigvalsh(found), 0, 0.791819, 0.952792)
    similar = torch.tensor([[1, 0.882497, 0.606531], [0.882497, 1, 0.606531], [0.606531] * 2 + [1]])
    degrees = similar.double().sum(1)
    close(found, *(torch.eye(3) - similar / torch.outer(degrees, degrees).sqrt()).flatten())
    assert spectral(distances, 1, 10, seed=0).tolist() == [0, 0, 0]
    assert spectral(distances, 2, 2, seed=0).tolist() == [0, 0, 1]


def test_distances_are_those_of_pairs() -> None:
    """Also of zeros, and of factors whose columns depend on each other."""
    draw = torch.Generator().manual_seed(0)
    factors = torch.randn(6, 4, 2, generator=draw).double()
    factors[4], factors[2, :, 1] = 0, 2 * factors[2, :, 0]
    (pair,) = find_pairs(regressor(r=2))
    distance, bases = AdapterDistance("subspace", [pair]), subspaces(factors)
    states = [{pair.b: factor} for factor in factors]
    found = subspace_distances(bases, bases)
    for i, one in enumerate(states):
        for j, other in enumerate(states):
            expected = distance._of_layer({pair.b: one[pair.b][None]}, other, pair)  # type: ignore[arg-type]
            torch.testing.assert_close(found[i, j], expected[0], atol=1e-12, rtol=0)
    assert not found[4].any()
    assert subspace_distances(bases[:0], bases).shape == (0, 6)


@pytest.mark.parametrize(
    ("true", "numbers"),
    [
        ([0, 1, 0, 2, 1, 2, 0], (2, 6)),
        ([0, 1, 0, 2, 1, 2, 0], (3, 3)),
        ([0, 0, 1, 0, 0, 1, 0, 0, 0], (1, 6)),  # most pairs are of one group
        ([0, 0, 0, 0], (1, 1)),
    ],
)
def test_clusters_far_apart(true: list[int], numbers: tuple[int, int]) -> None:
    groups = torch.tensor(true)
    distances = ((groups[:, None] != groups).double() * 0.9 + 0.05).fill_diagonal_(0)
    assert spectral(distances, *numbers, seed=3).tolist() == true


def test_groups_of_equal_sizes_are_one_cluster_by_the_largest_gap() -> None:
    """Most pairs are of two groups, so their distance is the median, and they are similar."""
    groups = torch.arange(12) % 3
    distances = (groups[:, None] != groups).double()
    assert int(spectral(distances, 1, 10, seed=0).max()) == 0
    assert spectral(distances, 2, 10, seed=0).tolist() == groups.tolist()


@pytest.mark.parametrize("count", [1, 5])
def test_equal_clients_are_one_cluster(count: int) -> None:
    assert spectral(torch.zeros(count, count), 1, 10, seed=0).tolist() == [0] * count


def test_the_left_split() -> None:
    """World V: the columns of B are orthonormal, and the product is that of the other split."""
    terms = [(0.5 * matrix([[1], [0], [2]]), matrix([[1, 0]]))]
    terms += [(1.5 * matrix([[0], [1], [1]]), matrix([[1, 2]]))]
    x, sent = LowRank(terms), (torch.zeros(3, 2).double(), torch.ones(2, 2).double())
    b, a = x.split(2, 2.0, sent, split="left")
    balanced = x.split(2, 2.0, sent)
    torch.testing.assert_close(b.T @ b, torch.eye(2).double())
    torch.testing.assert_close(2 * b @ a, matrix([[0.5, 0], [1.5, 3], [2.5, 3]]))
    close(a.norm(dim=1), 5.122053 / 2, 0.717336 / 2)
    for found, other in zip((b.T, a), (balanced[0].T, balanced[1]), strict=True):
        torch.testing.assert_close(nn.functional.normalize(found), nn.functional.normalize(other))
    dead = LowRank(terms[:1]).split(2, 2.0, sent, split="left")
    assert not dead[0][:, 1].any()
    assert torch.equal(dead[1][1], sent[1][1])


class Local1:
    """A client with given tensors, for a penalty."""

    def __init__(self, module: Any, own: Tensor) -> None:
        self.module, self.weights, self.anchor = module, {B: own}, {}
        state = module.state_dict()
        self.extra = {n.removeprefix(f"{EXTRA}."): t for n, t in state.items() if EXTRA in n}


def test_printed_penalties() -> None:
    """World V: two factors B whose product is 2, so that its square is 4."""
    module, method = regressor(), Tiered(gamma_c=0.5, gamma_l=0.25)
    module.add_module(EXTRA, Tiers(module))
    first, second = matrix([[1], [0], [2]]), matrix([[0], [1], [1]])
    assert method.penalty(Local1(module, second)) == 0  # type: ignore[arg-type]
    module.state_dict()[ROOT[B]].copy_(first)
    assert method.penalty(Local1(module, second)) == 0.5 * 4  # type: ignore[arg-type]
    module.state_dict()[CLUSTER[B]].copy_(2 * first)
    assert method.penalty(Local1(module, second)) == 0.5 * 4 + 0.25 * 16  # type: ignore[arg-type]


# Layers

LAYERS: dict[str, tuple[Callable[[], nn.Module], Tensor, dict[str, Any]]] = {
    "linear": (lambda: nn.Linear(4, 3), torch.randn(5, 2, 4), {}),
    "conv1d": (lambda: Conv1D(3, 4), torch.randn(5, 2, 4), {"fan_in_fan_out": True}),
    "embedding": (lambda: nn.Embedding(7, 3), torch.arange(6).view(2, 3), {}),
    "conv2d": (lambda: nn.Conv2d(2, 3, 2, stride=2), torch.randn(5, 2, 4, 4), {}),
    "rslora": (lambda: nn.Linear(4, 3), torch.randn(5, 4), {"use_rslora": True}),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_adds_three_outputs(kind: str) -> None:
    """Peft's own deltas of each of the three adapters are the oracle."""
    make, x, options = LAYERS[kind]
    torch.manual_seed(0)
    config = peft.LoraConfig(**{"r": 2, "lora_alpha": 5, "target_modules": ["0"], **options})
    network = peft.get_peft_model(nn.Sequential(make()), config).double().eval()
    x = x if x.dtype == torch.long else x.double()
    before, tiers = network(x), Tiers(network)
    network.add_module(EXTRA, tiers)
    torch.testing.assert_close(network(x), before, atol=1e-15, rtol=0)
    (pair,) = find_pairs(network)
    state = network.state_dict()
    for name, value in state.items():
        if name in pair.names or name.startswith((f"{EXTRA}.root", f"{EXTRA}.cluster")):
            value.normal_()
    found, layer = network(x), network.base_model.model[0]  # type: ignore[operator,index]
    base, delta = layer.get_base_layer(), layer.get_delta_weight("default")
    for tier in (tiers.root, tiers.cluster):
        (second,) = tier.values()
        for name, value in zip(pair.names, second.factors, strict=True):
            state[name].copy_(value)
        delta = delta + layer.get_delta_weight("default")
    expected = functional_call(base, {"weight": base.weight + delta}, x)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)

    def loss(own: dict[str, Tensor], stage: Tensor) -> Tensor:
        return functional_call(network, {**own, f"{EXTRA}.stage": stage}, x).square().sum()

    own = {name: torch.stack([state[name], 2 * state[name]]) for name in pair.names}
    stacked = vmap(grad(loss))(own, torch.zeros(2))
    alone = grad(loss)({name: value[1] for name, value in own.items()}, torch.tensor(0.0))
    for name in pair.names:
        torch.testing.assert_close(stacked[name][1], alone[name], atol=1e-10, rtol=1e-10)


# A federation

SIZES, GROUPS = (3, 2, 4, 2, 3), (0, 1, 0, 1, 0)
LR, STEPS = 0.05, 3


def samples() -> list[tuple[Tensor, Tensor]]:
    """Return clients of two groups, which differ in the direction of their targets."""
    draw, found = torch.Generator().manual_seed(1), []
    maps = matrix([[3, 0, 0], [3, 0, 0.3]]), matrix([[0, 3, 0], [0, 3, 0.3]])
    for size, group in zip(SIZES, GROUPS, strict=True):
        x = torch.randn(size, 2, generator=draw).double()
        noise = 0.1 * torch.randn(size, 3, generator=draw).double()
        found.append((x, x @ maps[group] + noise))
    return found


def data(**options: Any) -> TensorClients:
    return data_of(samples(), **options)


def fitted(
    callback: Any,
    rounds: int,
    engine: str = "sequential",
    clients: TensorClients | None = None,
    path: Path | None = None,
    module: Any = None,
    **options: Any,
) -> Federation:
    module = regressor(lr=LR) if module is None else module
    federation = Federation(module, local_steps=STEPS, engine=engine, **options)
    trainer = quiet_trainer(rounds, callback, CheckState())
    trainer.fit(federation, datamodule=data() if clients is None else clients, ckpt_path=path)
    return federation


class Reference:
    """HiLoRA in plain torch with dense matrices, for all clients in each round."""

    def __init__(self, gamma_c: float = 0.0, gamma_l: float = 0.0) -> None:
        state = regressor().state_dict()
        self.base, self.start = state[W0].clone(), (state[A].clone(), torch.zeros(3, 1).double())
        self.gammas = gamma_c, gamma_l
        count = len(SIZES)
        self.own = [self.start] * count
        self.tiers: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(count)]
        self.noted: list[Tensor | None] = [None] * count

    def train(self, client: int) -> tuple[Tensor, Tensor]:
        (x, y), own = samples()[client], self.own[client]
        for _ in range(STEPS):
            a, b = (value.detach().requires_grad_() for value in own)
            delta = b @ a + sum(t[1] @ t[0] for t in self.tiers[client])
            loss = 0.5 * (y - x @ (self.base + 2 * delta).T).square().sum(1).mean()
            for gamma, tier in zip(self.gammas, self.tiers[client], strict=False):
                loss = loss + gamma * (tier[1].T @ b).square().sum()
            grads = torch.autograd.grad(loss, (a, b))
            own = a.detach() - LR * grads[0], b.detach() - LR * grads[1]
        return own

    def note(self, trained: list[tuple[Tensor, Tensor]]) -> None:
        for client, (_, b) in enumerate(trained):
            before, new = self.noted[client], b / b.norm()
            self.noted[client] = new if before is None else 0.9 * before + 0.1 * new

    def round(self, groups: list[list[int]], root: bool = False) -> None:
        trained = [self.train(client) for client in range(len(SIZES))]
        if root:
            self.note(trained)
        for members in groups:
            total = sum(SIZES[i] for i in members)
            dense = sum(SIZES[i] / total * 2 * trained[i][1] @ trained[i][0] for i in members)
            u, s, v = torch.linalg.svd(dense)  # type: ignore[arg-type]
            sign = u[u[:, 0].abs().argmax(), 0].sign()
            for i in members:
                self.own[i] = sign * s[0] * v[:1] / 2, sign * u[:, :1]
        if not groups:
            self.own = trained

    def next_stage(self) -> None:
        for tiers, own in zip(self.tiers, self.own, strict=True):
            tiers.append(own)
        self.own = [self.start] * len(SIZES)


GAMMAS = {"gamma_c": 0.4, "gamma_l": 0.7}


@ENGINES
def test_rounds_are_those_of_plain_torch(engine: str) -> None:
    """Two rounds of each stage, and two clusters that are found by the gap of eigenvalues."""
    callback = HiLoRA(min_clusters=2, root_rounds=2, cluster_rounds=2, tau=0, **GAMMAS)
    federation = fitted(callback, 6, engine)
    expected, n = Reference(**GAMMAS), len(SIZES)
    for _ in range(2):
        expected.round([[*range(n)]], root=True)
    expected.next_stage()
    clusters = [[i for i in range(n) if GROUPS[i] == k] for k in (0, 1)]
    for _ in range(2):
        expected.round(clusters)
    expected.next_stage()
    for _ in range(2):
        expected.round([])
    assert callback.assignments.tolist() == [*GROUPS]
    judged = callback.personalize(torch.arange(n))
    for i in range(n):
        found = [tuple(judged[names[one]][i] for one in (A, B)) for names in (ROOT, CLUSTER)]
        found.append((judged[A][i], judged[B][i]))
        for one, other in zip(found, [*expected.tiers[i], expected.own[i]], strict=True):
            torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)
    if engine == "vectorized":
        assert federation.clients.attached_engine.obstacle is None
    assert [e.metrics["hilora/stage"] for e in federation.history] == [0, 0, 1, 1, 2, 2]
    # A stage's start is known; the first cluster round has the root adapter in its place.
    down = [P, P, P, P, P, 0]
    assert [entry.bytes_down for entry in federation.history] == [n * size for size in down]
    assert [entry.bytes_up for entry in federation.history] == [n * P] * 4 + [0] * 2


# Reductions


@ENGINES
def test_the_root_alone_is_fedavg_of_products(engine: str) -> None:
    one, other = (
        fitted(callback, 3, engine, clients=data(cohort_size=3))
        for callback in (HiLoRA(root_rounds=9, tau=0), FedAvg(aggregate="product", split="left"))  # type: ignore[call-arg]
    )
    for name, value in other.server_states()[0].items():
        torch.testing.assert_close(one.server_states()[0][name], value, atol=1e-14, rtol=0)
    b = one.server_states()[0][B]
    torch.testing.assert_close(b.norm(), torch.tensor(1.0).double())
    same = [(entry.bytes_down, entry.bytes_up) for entry in other.history]
    assert [(entry.bytes_down, entry.bytes_up) for entry in one.history] == same


@ENGINES
def test_one_cluster_without_penalties_is_a_second_global_tier(engine: str) -> None:
    """It is FedAvg again, on a base that holds the first tier."""
    options = {"gamma_c": 0.0, "gamma_l": 0.0, "tau": 0}
    callback = HiLoRA(num_clusters=1, root_rounds=2, cluster_rounds=9, **options)
    one = fitted(callback, 4, engine)
    first = fitted(FedAvg(aggregate="product", split="left"), 2, engine)  # type: ignore[call-arg]
    root, module = first.server_states()[0], regressor(lr=LR)
    module.state_dict()[W0].add_(2 * root[B] @ root[A])
    second = fitted(FedAvg(aggregate="product", split="left"), 2, engine, module=module)  # type: ignore[call-arg]
    found, expected = one.server_states()[0], second.server_states()[0]
    for name in (A, B):
        torch.testing.assert_close(found[name], expected[name], atol=1e-13, rtol=0)
        tier = callback.server_states()[0][ROOT[name]]
        torch.testing.assert_close(tier, root[name], atol=1e-14, rtol=0)


@ENGINES
def test_leaves_alone_are_local(engine: str) -> None:
    """Also of partial cohorts, with norm layers and their statistics."""
    clients = small_data(cohort_size=3, dtype=torch.float64)
    leaf = HiLoRA(num_clusters=1, root_rounds=0, cluster_rounds=0)
    one, other = (
        run(batchnorm_client(Adapted).double(), clients, callback, 4, engine=engine)
        for callback in (leaf, Local())
    )
    for i in range(6):
        assert_same(one.client_state(i), other.client_state(i))
    assert all((e.bytes_down, e.bytes_up) == (0, 0) for e in one.history)


# Stages


def test_a_small_change_ends_a_stage() -> None:
    """The change is that of the products, over all layers."""
    federation = fitted(HiLoRA(root_rounds=9, tau=0), 4)
    callback: Any = federation.callback
    changes = [e.metrics["hilora/change"] for e in federation.history[2:]]
    assert "hilora/change" not in federation.history[1].metrics
    before, now = callback._last[0], federation.server_states()[0]
    old, new = (2 * one[B] @ one[A] for one in (before, now))
    torch.testing.assert_close(callback._change(), float((new - old).norm() / old.norm()))
    assert changes[0] > changes[1] > 0
    tau = (changes[0] + changes[1]) / 2
    ended = fitted(HiLoRA(root_rounds=9, cluster_rounds=9, tau=tau), 4)
    assert [e.metrics["hilora/stage"] for e in ended.history] == [0, 0, 0, 1]


def test_the_server_optimizer_starts_anew() -> None:
    """Momentum of the root stage would move the adapters of clusters."""

    def momentum(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0, momentum=0.9)

    callback = HiLoRA(num_clusters=1, root_rounds=2, tau=0)
    federation = fitted(callback, 3, server_optimizer=momentum)
    kept = federation.server.tensors(0)
    plain = fitted(HiLoRA(num_clusters=1, root_rounds=2, tau=0), 2, server_optimizer=momentum)
    root = plain.server_states()[0]
    for name in (A, B):
        assert torch.equal(kept[ROOT[name]], root[name])
    torch.testing.assert_close(kept[B].norm(), torch.tensor(1.0).double())


@pytest.mark.parametrize("saved", [1, 2, 3, 4])
def test_resumed_is_uninterrupted(saved: int, tmp_path: Path) -> None:
    def fit(rounds: int, path: Path | None = None) -> Federation:
        callback = HiLoRA(2, root_rounds=2, cluster_rounds=1)
        return fitted(callback, rounds, clients=data(cohort_size=3), path=path)

    whole, half = fit(6), fit(saved)
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    torch.load(tmp_path / "half.ckpt", weights_only=True)
    resumed = fit(6, tmp_path / "half.ckpt")
    for i in range(len(SIZES)):
        states = (one.client_module(i).state_dict() for one in (whole, resumed))
        assert_same(*states)
    for one, other in zip(whole.history, resumed.history, strict=True):
        assert (one.bytes_down, one.bytes_up) == (other.bytes_down, other.bytes_up)
        assert one.metrics == pytest.approx(other.metrics, abs=0, rel=0)
    assert [e.metrics["hilora/stage"] for e in whole.history] == [0, 0, 1, 2, 2, 2]


# Clients that missed the root stage


@ENGINES
def test_clients_that_missed_the_root_stage_join_later(engine: str) -> None:
    """They train once from the root adapter, send B, and join the cluster of their group."""
    clients = data(cohort_size=3, seed=0)
    callback = HiLoRA(2, root_rounds=1, cluster_rounds=3, tau=0)
    federation = fitted(callback, 6, engine, clients=clients)
    history, group = federation.history, callback.assignments
    seen, reached = {*history[0].clients}, dict.fromkeys(range(len(SIZES)), -1)
    late = False
    for entry in history[1:]:
        stage = int(entry.metrics["hilora/stage"])
        new = {*entry.clients} - seen
        late |= bool(new)
        down = P * len(new)
        for i in {*entry.clients} - new:
            root = P * (reached[i] < 1)
            if stage == 1:
                down += root + P * (entry.index > 1)
            else:
                down += root + P * (reached[i] < 2)
            reached[i] = stage
        for i in new:
            reached[i] = 1
        assert entry.bytes_down == down
        sent = len(entry.clients) - len(new)
        assert entry.bytes_up == 3 * 8 * len(new) + (P * sent if stage == 1 else 0)
        seen |= {*entry.clients}
    assert late
    assert [k == group[0] for k in group.tolist()] == [k == GROUPS[0] for k in GROUPS]


def test_a_newcomer_has_no_leaf() -> None:
    clients = data(holdout_clients=0.4)
    callback = HiLoRA(2, root_rounds=2, cluster_rounds=1, tau=0)
    federation = fitted(callback, 5, clients=clients)
    new, known = (ids.tolist() for ids in (clients.new_clients, clients.train_clients))
    (values,) = federation.trainer.test(federation, datamodule=clients, verbose=False)
    assert (values["test/bytes_down"], values["test/bytes_up"]) == (2 * P, 2 * 3 * 8)
    group = {GROUPS[i]: int(callback.assignments[i]) for i in known}
    assert (callback.assignments[new] == -1).all()
    for i in new:
        state = federation.client_module(i).state_dict()
        mate = next(j for j in known if GROUPS[j] == GROUPS[i])
        other = federation.client_module(mate).state_dict()
        assert callback.looked[i] == group[GROUPS[i]]
        assert not state[B].any()
        assert other[B].any()
        for names in (ROOT, CLUSTER):
            assert all(torch.equal(state[name], other[name]) for name in names.values())
    tuned = fitted(
        HiLoRA(2, root_rounds=2, cluster_rounds=1, tau=0), 5, clients=clients, newcomer_epochs=1
    )
    state = tuned.client_module(new[0]).state_dict()
    assert state[B].any()


def test_too_few_clients_lengthen_the_root_stage() -> None:
    callback = HiLoRA(2, root_rounds=1, cluster_rounds=9, tau=0)
    federation = fitted(callback, 8, clients=data(cohort_size=1))
    stages = [e.metrics["hilora/stage"] for e in federation.history]
    cohorts = [e.clients for e in federation.history]
    first = next(t for t in range(8) if len({i for one in cohorts[:t] for i in one}) == 2)
    assert stages == [0] * first + [1] * (8 - first)


def test_clients_may_be_on_machines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for there in (False, True):
        if there:
            ask_remote_clients(monkeypatch)
        callback = HiLoRA(2, root_rounds=2, cluster_rounds=2, **GAMMAS)
        federation = fitted(callback, 6, clients=data(cohort_size=3, holdout_clients=0.2))
        judged = dict(callback.personalize(torch.arange(len(SIZES))).items())
        sizes = [(e.bytes_down, e.bytes_up) for e in federation.history]
        aside = federation.clients.aside
        found.append((judged, callback.assignments, sizes, aside.down, aside.up))
    torch.testing.assert_close(*found, atol=0, rtol=0)


# Export, and what it can't do


def test_peft_loads_the_sum_of_all_three(tmp_path: Path) -> None:
    def network() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))

    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["0", "1"])
    client = Classifier(peft.get_peft_model(network(), config), 3)
    callback = HiLoRA(2, root_rounds=1, cluster_rounds=1)
    federation, x = run(client, small_data(), callback, 4), torch.randn(5, 4)
    module = federation.client_module(1)
    state = module.state_dict()
    for tier in ("root", "cluster"):
        factors = [v for n, v in state.items() if n.startswith(f"{EXTRA}.{tier}") and ".b." in n]
        assert len(factors) == 2
        assert all(value.any() for value in factors)
    write_model(module, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    loaded = peft.PeftModel.from_pretrained(network(), tmp_path).eval()
    torch.testing.assert_close(loaded(x), module(x), atol=1e-6, rtol=0)
    assert [pair.rank for pair in find_pairs(loaded)] == [6, 6]


@pytest.mark.parametrize(
    ("make", "module", "said"),
    [
        (HiLoRA, lambda: Regressor(nn.Linear(2, 3)).double(), "HiLoRA needs low-rank adapters"),
        (HiLoRA, lambda: regressor(use_dora=True), "HiLoRA can't use the adapter of .*: it is a"),
        (lambda: HiLoRA(6), regressor, r"HiLoRA: num_clusters \(6\) exceeds the number"),
        (lambda: HiLoRA(root_rounds=0), regressor, "with root_rounds=0 take num_clusters=1"),
        (lambda: HiLoRA(min_clusters=11), regressor, "min_clusters=11 exceeds max_clusters=10"),
        (lambda: HiLoRA(0), regressor, "HiLoRA: num_clusters must be"),
        (lambda: HiLoRA(ema=1.5), regressor, "HiLoRA: ema must be"),
        (lambda: HiLoRA(gamma_c=-1.0), regressor, "HiLoRA: gamma_c must be"),
        (
            lambda: HiLoRA(modifiers=[Private("*lora_B*")]),  # type: ignore[call-arg]
            regressor,
            "HiLoRA: Private can't keep .*lora_B.*, which HiLoRA itself keeps",
        ),
        (
            lambda: HiLoRA(modifiers=[Frozen("*lora_A*")]),  # type: ignore[call-arg]
            regressor,
            "HiLoRA: Frozen can't take .*lora_A",
        ),
        (
            lambda: HiLoRA(modifiers=[Proximal(0.1)]),  # type: ignore[call-arg]
            regressor,
            "HiLoRA can't be combined with Proximal: its clients start from adapters",
        ),
        (lambda: FedAvg(split="left"), regressor, "split needs aggregate='product'"),  # type: ignore[call-arg]
    ],
)
def test_what_is_refused(make: Any, module: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as error:
        fitted(make(), 1, module=module())
    assert "\n" not in str(error.value)


def test_frozen_adapters_stay_as_they_are() -> None:
    """They have no tiers, and don't travel."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 3))
    options = {"target_modules": ["0", "1"], "init_lora_weights": False}
    adapted = peft.get_peft_model(network, peft.LoraConfig(r=1, lora_alpha=1, **options))
    module = Regressor(adapted, lr=0.01).double()
    frozen, trained = find_pairs(module)
    for name in frozen.names:
        module.get_parameter(name).requires_grad_(False)
    callback = HiLoRA(1, root_rounds=1, cluster_rounds=1)
    federation, before = fitted(callback, 3, module=module), module.state_dict()
    after = federation.client_module(0).state_dict()
    assert all(torch.equal(after[name], before[name]) for name in frozen.names)
    assert not any(torch.equal(after[name], before[name]) for name in trained.names)
    assert not any(name in callback.broadcast(torch.tensor([0])) for name in frozen.names)
    tiers = [after[name] for name in after if "_0_default.b" in name]
    assert len(tiers) == 2
    assert not any(tier.any() for tier in tiers)


def test_biases_of_adapters_are_refused() -> None:
    network = nn.Sequential(nn.Linear(2, 3))
    config = peft.LoraConfig(r=1, target_modules=["0"], lora_bias=True)
    with pytest.raises(ConfigurationError, match=r"HiLoRA can't use the adapter of .*: lora_bias"):
        fitted(HiLoRA(), 1, module=Regressor(peft.get_peft_model(network, config)).double())


@ENGINES
def test_ranks_of_clients_may_have_the_left_split(engine: str) -> None:
    """A client of rank 1 gets the largest direction, whose column has length 1."""
    callback = HetLoRA({0: 1}, "samples", aggregate="product", split="left")  # type: ignore[call-arg]
    federation = fitted(callback, 2, engine, module=regressor(lr=LR, r=2))
    b = federation.callback.broadcast(torch.tensor([0, 1]))[B]
    torch.testing.assert_close(b[1].T @ b[1], torch.eye(2).double())
    assert torch.equal(b[0][:, 0], b[1][:, 0])
    assert not b[0][:, 1].any()

"""HetLoRA: vectors by hand, padding, reductions, both engines, traffic and bad input."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

pytest.importorskip("peft")

import peft

from pflight import Federation
from pflight.adapters import LowRank, find_pairs
from pflight.callbacks import FedAvg, HetLoRA
from pflight.callbacks.methods.hetlora import ShrinkingTails, _norms
from pflight.command.cli import main
from pflight.datamodules import TensorClients
from pflight.errors import ConfigurationError
from pflight.modifiers import Frozen, Private
from pflight.runs.check_state import CheckState
from pflight.states.state import StateLayout
from pflight.states.updates import ClientUpdates
from pflight.transforms import TopK
from tests.adapters.worlds import A, B, Regressor, clients, matrix, regressor, trained
from tests.callbacks.test_rolora import ADAMW, Optimized, Words, names_of, sentences, words
from tests.remote_clients import ask_remote_clients
from tests.runs import ENGINES, assert_same, quiet_trainer, run

SENT = {  # by two clients of ranks 1 and 2: A and B
    0: (matrix([[1, 0], [0, 0]]), matrix([[1, 0], [0, 0], [2, 0]])),
    1: (matrix([[1, 2], [0, 1]]), matrix([[0, 1], [1, 0], [1, 1]])),
}
fit = partial(trained, steps=None, local_epochs=2)  # a batch has all samples
two_ranks = partial(regressor, r=2, lora_alpha=4)


class Sent(HetLoRA):
    """Gets what :data:`SENT` has, in place of what clients have trained.

    The first client's B is multiplied by ``times``. It also sends what is beyond its rank.
    """

    times = 1.0

    def receive(self, updates: ClientUpdates) -> None:
        for row, client in enumerate(updates.clients.tolist()):
            a, b = SENT[client]
            updates.states[A][row] = a
            updates.states[B][row] = b * (self.times if client == 0 else 1)
            if client == 0:
                updates.states[A][row][1] = 7
                updates.states[B][row][:, 1] = 7
        super().receive(updates)


class Watched(HetLoRA):
    """Remembers what clients were sent, and what they sent, as it arrived."""

    def broadcast(self, clients: Tensor) -> TensorDict:
        found = super().broadcast(clients)
        if self.clients.current.goes_on:
            vars(self).setdefault("down", []).append((clients.tolist(), found.clone()))
        return found

    def receive(self, updates: ClientUpdates) -> None:
        vars(self).setdefault("up", []).append((updates.clients.tolist(), updates.states.clone()))
        super().receive(updates)


def close(found: Tensor, printed: Any) -> None:
    """Compare with numbers of six decimals."""
    torch.testing.assert_close(found, torch.tensor(printed).double(), rtol=0, atol=6e-7)


def learn(
    callback: Any,
    rounds: int = 3,
    ckpt_path: Any = None,
    cohort: int | None = None,
    module: Any = None,
    **options: Any,
) -> Federation:
    """Fit a federation of four clients of words, with adapters of rank 2."""
    federation = Federation(module or words(), local_epochs=2, **options)
    trainer = quiet_trainer(rounds, callback)
    trainer.fit(federation, datamodule=sentences(cohort_size=cohort), ckpt_path=ckpt_path)
    return federation


def beyond(federation: Federation, states: Any, rank: int) -> Tensor:
    """Return all entries of stacked states beyond a rank."""
    a = names_of(federation, "lora_A", "lora_embedding_A")
    b = names_of(federation, "lora_B", "lora_embedding_B")
    parts = [*(states[name][:, rank:] for name in a), *(states[name][:, :, rank:] for name in b)]
    return torch.cat([part.flatten() for part in parts])


def test_vectors() -> None:
    """Weights are proportional to the norms 2.236068 and 4 of the products."""
    callback = Sent({0: 1})
    federation = fit(callback, module=two_ranks())
    (state,) = federation.server_states()
    close(state[A], [[1, 1.282860], [0, 0.641430]])
    close(state[B], [[0.358570, 0.641430], [0.641430, 0], [1.358570, 0.641430]])
    weights = callback.mean.weights
    assert weights.item() == pytest.approx(2.236068 + 4, abs=6e-7)
    sent = callback.broadcast(torch.tensor([0, 1]))
    close(sent[A][0], [[1, 1.282860], [0, 0]])
    close(sent[B][0], [[0.358570, 0], [0.641430, 0], [1.358570, 0]])
    assert torch.equal(sent[A][1], state[A])
    assert torch.equal(federation.client_state(0)[A], sent[A][0])


@pytest.mark.parametrize(
    "layers",
    [
        nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)),
        nn.Sequential(nn.Conv2d(2, 3, 2), nn.Conv2d(3, 2, 1)),
        nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3)),
    ],
)
def test_norms_are_over_all_layers(layers: nn.Module) -> None:
    adapted = peft.get_peft_model(layers, peft.LoraConfig(r=2, target_modules=["0", "1"]))
    pairs, like = find_pairs(adapted), StateLayout.of(adapted).template
    states = TensorDict({n: torch.randn(3, *like[n].shape) for p in pairs for n in p.names}, [3])
    dense = [
        torch.cat([(s[p.b].flatten(1) @ s[p.a].flatten(1)).flatten() for p in pairs]).norm()
        for s in states
    ]
    assert len(pairs) == 2
    torch.testing.assert_close(_norms(states, pairs).float(), torch.stack(dense))


def test_products_of_different_ranks() -> None:
    """The first client's own scale is 4, the common one is 2: its B counts twice here."""
    ideal = matrix([[1, 1.5], [1.5, 3], [3.5, 4.5]])
    b, a = matrix([[0.344782], [0.634836], [1.089073]]), matrix([[0.747787, 1.071814]])

    class Doubled(Sent):
        times = 2.0

    callback = Doubled({0: 1}, "samples", aggregate="product")  # type: ignore[call-arg]
    one, three = (matrix([[1, 0]] * n) for n in (1, 3))
    data = TensorClients([(one, one[:, [0, 0, 1]]), (three, three[:, [0, 0, 1]])], batch_size=3)
    federation = run(two_ranks(), data, callback)  # type: ignore[arg-type]
    (state,) = federation.server_states()
    torch.testing.assert_close(2 * state[B] @ state[A], ideal)
    sent = callback.broadcast(torch.tensor([0]))
    root = 2**0.5  # both factors have a share of the scale
    torch.testing.assert_close(sent[B][0, :, :1], root * b, rtol=0, atol=1e-6)
    torch.testing.assert_close(sent[A][0, :1], root * a, rtol=0, atol=1e-6)
    assert not sent[B][0, :, 1:].any()
    error = (2 * sent[B][0] @ sent[A][0] - ideal).norm() / ideal.norm()
    assert error.item() == pytest.approx(0.083206, abs=6e-7)
    own = LowRank([(0.25 * 4 * SENT[0][1], SENT[0][0]), (0.75 * 2 * SENT[1][1], SENT[1][0])])
    close(own.svd()[1][:2], [6.831882, 0.570431])
    split = own.split(1, 4.0, (b, a))
    torch.testing.assert_close(split, (b, a), rtol=0, atol=6e-7)


@ENGINES
@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.Adam, lr=0.05, weight_decay=0.1),
        ADAMW,
        partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
    ],
)
def test_padding_stays_zero_by_itself(optimizer: Any, engine: str) -> None:
    """In double precision, before the server looks at it, for embeddings and linear layers."""
    module = words()
    module.optimizer = optimizer
    callback = Watched(dict.fromkeys(range(4), 1))
    federation = learn(callback, module=module, engine=engine)
    for ids, states in callback.down + callback.up:
        assert len(ids)
        assert not beyond(federation, states, 1).any()
        assert all(states[name].any() for name in names_of(federation, "lora_A", "head"))
    if engine == "vectorized":
        assert federation.clients.attached_engine.obstacle is None  # type: ignore[attr-defined]


def test_kernels_are_cut_at_their_ranks() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten())
    net = peft.get_peft_model(layers, peft.LoraConfig(r=2, target_modules=["0"]))
    samples = [(torch.randn(4, 2, 3, 3).double(), torch.randn(4, 12).double()) for _ in range(2)]
    callback = Watched({1: 1}, "uniform")
    data = TensorClients(samples, num_classes=None, batch_size=4)
    federation = run(Regressor(net).double(), data, callback, 2)  # type: ignore[arg-type]
    a, b = (n for part in "AB" for n in names_of(federation, f"lora_{part}"))
    for ids, states in callback.down + callback.up:
        for client, state in zip(ids, states, strict=True):
            assert state[a].shape == (2, 2, 2, 2)
            assert state[b].shape == (3, 2, 1, 1)
            assert state[a][0].any()
            assert bool(state[a][1].any()) == (client == 0)
            if client == 1:
                assert not state[b][:, 1].any()


@ENGINES
@pytest.mark.parametrize("aggregate", ["factors", "product"])
def test_of_equal_ranks_by_samples_it_is_fedit(aggregate: str, engine: str) -> None:
    """To the bit; with products it is FlexLoRA of equal ranks."""
    ranks = dict.fromkeys(range(4), 2)
    found = learn(HetLoRA(ranks, "samples", aggregate=aggregate), engine=engine)
    expected = learn(FedAvg(aggregate=aggregate), engine=engine)
    assert_same(found.server_states()[0], expected.server_states()[0])
    assert [e.bytes_up for e in found.history] == [e.bytes_up for e in expected.history]


def test_of_rank_one_it_is_fedit_of_rank_one() -> None:
    """At the same scale, 2, and with the same first row of A."""
    module = two_ranks()
    module.state_dict()[A][0] = torch.tensor([1, 0.5]).double()
    found = fit(HetLoRA({0: 1, 1: 1}, "samples"), rounds=3, module=module).server_states()[0]
    expected = fit(FedAvg(), rounds=3).server_states()[0]
    torch.testing.assert_close(found[A][:1], expected[A], rtol=0, atol=1e-14)
    torch.testing.assert_close(found[B][:, :1], expected[B], rtol=0, atol=1e-14)


def test_both_engines_agree() -> None:
    ranks = {0: 1, 2: 1}
    one, other = (learn(HetLoRA(ranks), engine=e) for e in ("sequential", "vectorized"))
    torch.testing.assert_close(one.server_states(), other.server_states(), rtol=1e-7, atol=1e-9)


def test_rows_that_nobody_has_stay() -> None:
    """A mean of zeros would never learn again."""
    callback = Watched({0: 1, 1: 1})
    federation = fit(callback, module=two_ranks(), rounds=2)
    (state,), first = federation.server_states(), federation.layout.template
    assert first[A][1].all()
    assert torch.equal(state[A][1], first[A][1])
    assert torch.equal(state[B][:, 1], first[B][:, 1])
    assert not torch.equal(state[A][0], first[A][0])


def test_directions_without_a_product_keep_the_row_of_the_server() -> None:
    """Not the zeros that a client of rank 1 was sent: a client of rank 2 learns from them later."""
    callback = HetLoRA({0: 1}, "samples", aggregate="product")  # type: ignore[call-arg]
    federation = fit(callback, module=two_ranks(), data=(0,))
    (state,), first = federation.server_states(), federation.layout.template
    assert first[A][1].all()
    assert torch.equal(state[A][1], first[A][1])
    assert not state[B][:, 1].any()
    assert not torch.equal(state[A][0], first[A][0])
    assert state[B][:, 0].any()


def test_without_products_weights_are_the_numbers_of_samples() -> None:
    """Only the head trains."""

    class OnlyHead(Optimized):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.network.base_model.model.head.parameters(), lr=0.1)

    callback = HetLoRA({0: 1})
    found = learn(callback, module=OnlyHead(words().network, ADAMW), engine="sequential")
    assert callback.mean.weights.item() == 4 + 7 + 3 + 6
    expected = learn(FedAvg(), module=OnlyHead(words().network, ADAMW), engine="sequential")
    heads = [
        {name: run.server_states()[0][name] for name in names_of(run, "head")}
        for run in (found, expected)
    ]
    assert_same(*heads)
    assert len(heads[0]) == 2


def test_ranks_by_samples() -> None:
    """The clients have 4, 7, 3 and 6 samples: 16/7, 4, 12/7 and 24/7 of rank 4."""
    config = peft.LoraConfig(r=4, target_modules=["layer"])
    module = Optimized(peft.get_peft_model(Words(), config), ADAMW).double()
    for options, ranks in (
        ({}, [2, 4, 2, 3]),
        ({"r_min": 3}, [3, 4, 3, 3]),
        ({"r_max": 2}, [1, 2, 1, 2]),
        ({"r_min": 2, "r_max": 3}, [2, 3, 2, 3]),
    ):
        callback = HetLoRA(**options)  # type: ignore[arg-type]
        learn(callback, rounds=1, module=module)
        assert callback.client_ranks.tolist() == ranks


def test_bytes() -> None:
    """Of an embedding of 5 words with 4 numbers, a layer from 4 to 4, and a head of 15 numbers."""
    federation = learn(HetLoRA({0: 1, 2: 1}), rounds=4, cohort=2)
    seen = set()
    for entry in federation.history:
        ranks = [1 if client in (0, 2) else 2 for client in entry.clients]
        expected = sum(8 * (rank * (5 + 4 + 4 + 4) + 15) for rank in ranks)
        assert entry.bytes_up == entry.bytes_down == expected
        seen.add(sum(ranks))
    assert len(seen) > 1


def test_a_sparse_message_has_no_padding() -> None:
    federation = learn(HetLoRA({0: 1}, modifiers=[TopK(0.1)]), rounds=1)
    size = 2 * 17 + 15
    assert federation.history[0].bytes_up == 4 * TopK(0.1).nbytes(size, 8)
    assert federation.history[0].bytes_down == 8 * (4 * size - 17)


@pytest.mark.parametrize("options", [{}, {"aggregate": "product"}, {"modifiers": [TopK(0.3)]}])
def test_resuming_is_exact(options: Any, tmp_path: Path) -> None:
    def callback() -> HetLoRA:
        return HetLoRA({0: 1, 3: 1}, **options)

    whole = learn(callback(), rounds=4, cohort=2)
    learn(callback(), rounds=2, cohort=2).trainer.save_checkpoint(tmp_path / "two.ckpt")
    resumed = learn(callback(), rounds=4, cohort=2, ckpt_path=tmp_path / "two.ckpt")
    assert_same(resumed.server_states()[0], whole.server_states()[0])
    assert [e.bytes_up for e in resumed.history] == [e.bytes_up for e in whole.history]
    other = HetLoRA({3: 1}, **options)
    with pytest.raises(ConfigurationError, match="client 0 has rank 2 here and rank 1 in the"):
        learn(other, rounds=4, cohort=2, ckpt_path=tmp_path / "two.ckpt")


def test_loaded_clients_have_their_ranks(tmp_path: Path) -> None:
    """Also without data, of which the ranks were made."""
    federation = learn(HetLoRA("samples"))
    federation.trainer.save_checkpoint(tmp_path / "run.ckpt")
    loaded = Federation.load_from_checkpoint(
        tmp_path / "run.ckpt", client=words(), callback=HetLoRA("samples")
    )
    assert 1 in federation.callback.client_ranks  # type: ignore[attr-defined]
    for client in range(4):
        assert_same(loaded.client_state(client), federation.client_state(client))


def test_nothing_else_outlives_a_round() -> None:
    federation = Federation(words())
    trainer = quiet_trainer(3, HetLoRA({0: 1}, **PRUNED), CheckState())
    trainer.fit(federation, datamodule=sentences(cohort_size=2))


@pytest.mark.parametrize("options", [{}, {"prune": 0.5, "gamma": 0.5}])
def test_clients_on_machines_of_their_own(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    here = learn(HetLoRA({0: 1}, **options), engine="sequential")
    ask_remote_clients(monkeypatch)
    there = learn(HetLoRA({0: 1}, **options), engine="sequential")
    assert_same(here.server_states()[0], there.server_states()[0])


class OneClient:
    """A client of the module :func:`two_ranks`, by its weights and what it was sent."""

    def __init__(self, a: Tensor, b: Tensor, sent: tuple[Tensor, Tensor]) -> None:
        self.module = two_ranks()
        self.weights = {A: a.clone().requires_grad_(), B: b.clone().requires_grad_()}
        self.anchor = dict(zip((A, B), sent, strict=True))

    def penalty(self, gamma: float = 0.5) -> Tensor:
        found = ShrinkingTails(0.5, gamma).penalty(self)  # type: ignore[arg-type]
        assert found is not None
        return found


def test_the_penalty_and_its_gradient() -> None:
    """Of rank 2 and q = 1: norms 5 of A's last row and 13 of B's last column."""
    a, b = matrix([[1, 2], [3, 4]]), matrix([[1, 5], [7, 0], [2, 12]])
    client = OneClient(a, b, (a, b))
    value = client.penalty()
    value.backward()
    assert value.item() == pytest.approx(0.5 * 5 * 13, abs=1e-12)
    close(client.weights[A].grad, [[0, 0], [0.5 * 13 * 3 / 5, 0.5 * 13 * 4 / 5]])
    close(client.weights[B].grad, [[0, 0.5 * 5 * 5 / 13], [0, 0], [0, 0.5 * 5 * 12 / 13]])
    whole = (matrix([[1, 2], [3, 4]]).norm() * b.norm() / 2).item()
    assert OneClient(a, b, (a, b)).penalty(0.4).item() == pytest.approx(whole, abs=1e-12)


def test_the_penalty_of_zeros_has_gradient_zero() -> None:
    """B is 0 in the first round. A client of rank 1 has nothing beyond its rank."""
    a, b = matrix([[1, 2], [3, 4]]), matrix([[1, 5], [7, 0], [2, 12]])
    first = OneClient(a, 0 * b, (a, 0 * b))
    cut = (a * matrix([[1], [0]]), b * matrix([[1, 0]]))
    for client, gamma in ((first, 0.5), (OneClient(*cut, cut), 0.99)):
        value = client.penalty(gamma)
        value.backward()
        for factor, rows in ((A, 0), (B, 1)):
            grad = client.weights[factor].grad
            assert grad is not None
            assert torch.isfinite(grad).all()
            assert not grad.movedim(rows, 0)[1].any()
    assert ShrinkingTails(1.0, 0.5).penalty(SimpleNamespace(anchor=None)) is None  # type: ignore[arg-type]


class Scripted(HetLoRA):
    """Gets the factors sent, with A multiplied by a number of each client."""

    factors = (1.0, 1.0)

    def receive(self, updates: ClientUpdates) -> None:
        before = self.broadcast(updates.clients)
        for row, client in enumerate(updates.clients.tolist()):
            updates.states[A][row] = self.factors[client] * before[A][row]
            updates.states[B][row] = before[B][row]
        super().receive(updates)


def _with_products() -> Regressor:
    module = two_ranks()
    module.state_dict()[A][:] = matrix([[1, 0.5], [0.5, 1]])
    module.state_dict()[B][:] = matrix([[1, 0], [0, 1], [1, 1]])
    return module


def test_a_smaller_product_prunes_and_others_do_not() -> None:
    """Smaller, equal and larger tails; the rank falls once, to q and not below the smallest."""
    for factors, r_min, ranks in (
        ((0.9, 1.0), None, [1, 2]),
        ((1.0, 1.1), None, [2, 2]),
        ((0.9, 0.9), None, [1, 1]),
        ((0.9, 0.9), 2, [2, 2]),
    ):
        kind = type("Given", (Scripted,), {"factors": factors})
        callback = kind({}, "uniform", prune=0.1, gamma=0.5, r_min=r_min)
        fit(callback, module=_with_products())
        assert callback.client_ranks.tolist() == ranks
        sent = callback.broadcast(torch.tensor([0, 1]))
        for client, rank in enumerate(ranks):
            assert bool(sent[A][client][1].any()) == (rank == 2)
    low = Scripted({0: 1, 1: 1}, "uniform", prune=0.1, gamma=0.5, r_min=2)
    low.factors = (0.9, 0.9)
    fit(low, module=_with_products())
    assert low.client_ranks.tolist() == [1, 1]  # ranks never grow
    module = regressor(r=3, lora_alpha=6)
    module.state_dict()[B].fill_(1)
    same = Scripted({0: 2, 1: 2}, "uniform", prune=0.1, gamma=0.5)
    fit(same, module=module)
    assert same.client_ranks.tolist() == [2, 2]  # rows that they were not sent don't count


PRUNED: dict[str, Any] = {"prune": 0.5, "gamma": 0.5}


def test_pruned_ranks_are_of_both_engines_and_of_the_wire() -> None:
    runs = []
    for engine in ("sequential", "vectorized"):
        callback = HetLoRA({0: 1}, **PRUNED)
        federation = learn(callback, rounds=4, engine=engine)
        ranks = callback.client_ranks
        assert 1 in ranks[1:]
        assert isinstance(federation.clients.client_method, ShrinkingTails)
        if engine == "vectorized":
            assert federation.clients.attached_engine.obstacle is None  # type: ignore[attr-defined]
        sent = callback.broadcast(torch.arange(4))
        assert not beyond(federation, sent[ranks == 1], 1).any()
        runs.append((federation, ranks))
    (one, ranks), (other, others) = runs
    assert torch.equal(ranks, others)
    torch.testing.assert_close(one.server_states(), other.server_states(), rtol=1e-7, atol=1e-9)
    ups, downs = ([getattr(e, f"bytes_{way}") for e in one.history] for way in ("up", "down"))
    assert ups == [e.bytes_up for e in other.history]
    assert ups[-1] == sum(8 * (rank * 17 + 15) for rank in ranks.tolist())
    assert downs[0] == 8 * (7 * 17 + 4 * 15)
    assert ups[:-1] == downs[1:]  # all take part: what they sent has the rank of the next round


def test_pruned_ranks_are_resumed(tmp_path: Path) -> None:
    def callback() -> HetLoRA:
        return HetLoRA({0: 1}, **PRUNED)

    whole = learn(callback(), rounds=5, cohort=2)
    half = learn(callback(), rounds=3, cohort=2)
    half.trainer.save_checkpoint(tmp_path / "three.ckpt")
    ranks = half.callback.client_ranks  # type: ignore[attr-defined]
    assert (ranks < torch.tensor([1, 2, 2, 2])).any()
    resumed = learn(callback(), rounds=5, cohort=2, ckpt_path=tmp_path / "three.ckpt")
    assert_same(resumed.server_states()[0], whole.server_states()[0])
    for name in ("bytes_up", "bytes_down"):
        found = ([getattr(e, name) for e in run.history] for run in (resumed, whole))
        assert len({tuple(each) for each in found}) == 1
    final = (run.callback.client_ranks for run in (resumed, whole))  # type: ignore[attr-defined]
    assert torch.equal(*final)


def test_ranks_of_a_checkpoint_may_have_been_pruned_but_not_grown(tmp_path: Path) -> None:
    """None is pruned in round 0, since B is 0 at its start."""
    first = learn(HetLoRA({0: 1}, **PRUNED), rounds=1)
    first.trainer.save_checkpoint(tmp_path / "one.ckpt")
    assert first.callback.client_ranks.tolist() == [1, 2, 2, 2]  # type: ignore[attr-defined]
    less = HetLoRA({0: 1, 3: 1}, **PRUNED)
    with pytest.raises(ConfigurationError, match="client 3 has rank 1 here and rank 2 in the"):
        learn(less, rounds=2, ckpt_path=tmp_path / "one.ckpt")


def test_without_pruning_nothing_changes() -> None:
    plain, off = (learn(HetLoRA({0: 1}, **o)) for o in ({}, {"prune": 0.0, "gamma": 0.5}))
    assert_same(plain.server_states()[0], off.server_states()[0])
    assert plain.callback.client_method is off.callback.client_method  # type: ignore[union-attr]


def test_its_name() -> None:
    assert fit(HetLoRA({0: 1}), module=two_ranks()).algorithm == "HetLoRA"


class Bounded(HetLoRA):
    """Its clients' weights are bounded, as in a deployment."""

    def setup_server(self) -> None:
        self.clients.bounds = type("Bounds", (), {"max_share": 0.5})  # type: ignore[attr-defined]
        super().setup_server()


def _half_frozen() -> Regressor:
    module = two_ranks()
    dict(module.named_parameters())[A].requires_grad = False
    return module


def _with_bias() -> Regressor:
    config = peft.LoraConfig(r=2, target_modules=["0"], lora_bias=True)
    return Regressor(peft.get_peft_model(nn.Sequential(nn.Linear(2, 3)), config)).double()


@pytest.mark.parametrize(
    ("make", "module", "said"),
    [
        (lambda: HetLoRA({1: 3}), two_ranks, "client 1 has rank 3, but the server's .* rank 2"),
        (
            lambda: HetLoRA({2: 1}),
            two_ranks,
            "HetLoRA: ranks: unknown client 2: clients are 0 to 1",
        ),
        (lambda: HetLoRA(r_max=3), two_ranks, "r_min=1 and r_max=3 must be .* the rank 2 of"),
        (lambda: HetLoRA(r_min=2, r_max=1), two_ranks, "r_min=2 and r_max=1 must be in this order"),
        (HetLoRA, _half_frozen, r"HetLoRA trains both factors .*, and '.*lora_A.*' is frozen"),
        (HetLoRA, _with_bias, "HetLoRA can't use the adapter of .*0': it has a bias"),
        (HetLoRA, lambda: two_ranks(use_dora=True), "HetLoRA can't use the adapter of .*Dora"),
        (
            HetLoRA,
            lambda: Regressor(nn.Linear(2, 3)).double(),
            "HetLoRA needs low-rank adapters, and Regressor has none",
        ),
        (
            lambda: HetLoRA(modifiers=[Private("*lora_B*")]),
            two_ranks,
            r"HetLoRA: Private can't keep .*lora_B",
        ),
        (
            lambda: HetLoRA(modifiers=[Frozen("*lora_A*")]),
            two_ranks,
            r"HetLoRA: Frozen can't take .*lora_A",
        ),
        (
            lambda: HetLoRA(aggregate="stack"),  # type: ignore[call-arg]
            two_ranks,
            "HetLoRA: aggregate='stack' has no ranks of clients: take 'factors' or 'product'",
        ),
        (Bounded, two_ranks, "--max-share bounds weights by samples: take weighting='samples'"),
    ],
)
def test_bad_input(make: Any, module: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        fit(make(), module=module())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ranks": {4: 0}}, "whole numbers from 1, got 0 for client 4"),
        ({"ranks": {4: 1.5}}, "got 1.5 for client 4"),
        ({"ranks": {"a": 1}}, "got 1 for client 'a'"),
        ({"ranks": [1, 2]}, r"ranks must be a dict or 'samples', got \[1, 2\]"),
        ({"ranks": {0: 1}, "r_min": 1}, 'r_min and r_max are for ranks="samples", and r_min for'),
        ({"ranks": {0: 1}, "r_max": 1, "prune": 1.0}, 'r_min and r_max are for ranks="samples"'),
        ({"prune": -1.0}, "prune must be at least 0, got -1"),
        ({"gamma": 1.0}, r"gamma must be in \(0, 1\), got 1"),
        ({"r_min": 0}, "r_min must be at least 1, got 0"),
        ({"weighting": "loss"}, "weighting must be 'norm', 'samples' or 'uniform'"),
    ],
)
def test_options(options: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        HetLoRA(**options)


def test_a_name_of_a_client_is_told() -> None:
    data = clients()
    data.client_names = ["Bern", "Rom"]
    with pytest.raises(ConfigurationError, match=r"client 1 \(Rom\) has rank 5"):
        run(two_ranks(), data, HetLoRA({1: 5}))  # type: ignore[arg-type]


MODEL = """
trainer:
  callbacks+:
    - class_path: HetLoRA
      init_args:
        ranks: {0: 1, 2: 3}
        aggregate: product
model:
  client:
    class_path: Classifier
    init_args:
      network:
        class_path: LoRA
        init_args:
          network:
            class_path: pflight.models.MLP
            init_args: {in_features: 64, hidden: [16], num_classes: 10}
          targets: ["hidden.0", "output"]
          rank: 4
      num_classes: 10
      optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.02}}  # at scale 4, 0.1 diverges
"""


@pytest.mark.long
def test_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A record of a run has numbers of clients as text, and continues the run."""
    monkeypatch.chdir(tmp_path)
    Path("model.yaml").write_text(MODEL)
    run = ["--config=configs/data/digits.yaml", "--config=model.yaml", "--data.num_clients=4"]
    small = ["--trainer.default_root_dir=run", "--trainer.accelerator=cpu"]
    main(["fit", *run, *small, "--trainer.max_epochs=1"])
    assert "ranks:\n        '0': 1\n        '2': 3" in Path("run/config.yaml").read_text()
    main(["fit", "--config=run/config.yaml", "--trainer.max_epochs=2", "--ckpt_path=last"])
    assert "continuing with round 1" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["fit", *run, *small, '--trainer.callbacks.ranks={"3": 9}'])
    said = "error: HetLoRA: client 3 has rank 9, but the server's adapters have rank 4"
    assert said in capsys.readouterr().err

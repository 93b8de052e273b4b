"""Residual and stack aggregation give the printed numbers, and those of full matrices."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

pytest.importorskip("peft")

import peft
import safetensors.torch

from pflight import Federation
from pflight.__main__ import main
from pflight.adapters import Pair, find_pairs
from pflight.adapters.export import write_model
from pflight.adapters.low_rank import LowRank
from pflight.adapters.product_mean import PairMean, ProductMean, ResidualMean, StackMean
from pflight.adapters.side_path import Addend, SidePath, add_hooks, addends_of
from pflight.callbacks import IFCA, Ditto, FedALA, FedAvg, FedProx, FeSEM
from pflight.data.cohort import CohortSampler
from pflight.datamodules import TensorClients
from pflight.deploy.agreement import agreement_on
from pflight.errors import ConfigurationError
from pflight.modifiers import Frozen, Private
from pflight.runs.check_state import CheckState
from tests.adapters.worlds import A, B, Regressor, clients, matrix, regressor, trained
from tests.other_device import other_device, strategy
from tests.runs import ENGINES, quiet_trainer

W0 = matrix([[1, 0], [0, 1], [1, 1]])
PAIR = Pair("lin", "default", "a", "b", 1, 2.0)
SENT = {"a": matrix([[5, 6]]), "b": matrix([[0], [0], [0]])}
SIDES: list[Any] = ["residual", "stack"]
SAMPLES = [
    (matrix([[1, 0], [0, 1]]), matrix([[1, 0, 0], [0, 0, 1]])),
    (matrix([[1, 1]]), matrix([[0, 1, 0]])),
]
WEIGHTS = 2 / 3, 1 / 3
THIRD = matrix([[2, 0.5]]), matrix([[1, 1, 0]])


def near(found: Tensor, expected: Any, digits: float = 6e-7) -> None:
    expected = torch.as_tensor(expected).double().reshape(found.shape)
    torch.testing.assert_close(found, expected, atol=digits, rtol=0)


def of_two(kind: Any, *options: Any) -> Any:
    """Return a mean of the two pairs of the printed example, after ``compute()``."""
    mean = kind(*options)
    a, b = matrix([[1, 0], [1, 2]])[:, None], matrix([[1, 0, 2], [0, 1, 1]])[..., None]
    mean.add(TensorDict({"a": a, "b": b}, [2]), torch.tensor([0.25, 0.75]))
    mean.all_reduce()
    mean.means = mean.compute()[0]
    return mean


def dense(x: LowRank) -> Tensor:
    return x.left @ x.right


def test_printed_factors_and_products() -> None:
    factors = of_two(PairMean, [SENT], [PAIR], True)
    near(factors.means["a"], [1, 1.5])
    near(factors.means["b"], [0.25, 0.75, 1.25])
    assert factors.error == pytest.approx(0.251166, abs=6e-7)
    assert not factors.terms
    product = of_two(ProductMean, [SENT], [PAIR], True)
    near(product.means["b"], [0.088396, 1.038011, 1.214803])
    near(product.means["a"], [0.905540, 1.319479])
    assert product.error == pytest.approx(0.138695, abs=6e-7)


def test_printed_residual() -> None:
    mean = of_two(ResidualMean, SENT, [PAIR], True)
    near(mean.means["a"], [1, 1.5])
    near(mean.means["b"], [0.25, 0.75, 1.25])
    (term,) = mean.terms.values()
    near(dense(term), [[0, -0.75], [0, 0.75], [0, -0.75]])
    assert term.width == 1
    assert float(term.norm()) == pytest.approx(1.299038, abs=6e-7)
    assert mean.error == pytest.approx(0, abs=1e-12)


def test_printed_stack() -> None:
    mean = of_two(StackMean, SENT, [PAIR], True, SENT)
    (term,) = mean.terms.values()
    near(dense(term), matrix([[1, 0], [0, 1], [2, 1]]) @ matrix([[0.25, 0], [0.75, 1.5]]) * 2)
    near(dense(term), [[0.5, 0], [1.5, 3], [2.5, 3]])
    assert torch.equal(mean.means["a"], SENT["a"])
    assert not mean.means["b"].any()
    assert mean.error == pytest.approx(0, abs=1e-12)


def test_a_truncated_residual_is_the_nearest() -> None:
    draw = torch.Generator().manual_seed(0)
    sent = {"a": torch.ones(2, 5).double(), "b": torch.zeros(6, 2).double()}
    pair = Pair("lin", "default", "a", "b", 2, 0.5)
    states = TensorDict(
        {n: torch.randn(4, *t.shape, generator=draw).double() for n, t in sent.items()}, [4]
    )
    terms = []
    for rank in (None, 2, 0):
        mean = ResidualMean(sent, [pair], rank=rank)
        mean.add(states, torch.ones(4))
        mean.compute()
        terms.append(mean.terms[pair])
    u, s, v = torch.linalg.svd(dense(terms[0]))
    torch.testing.assert_close(dense(terms[1]), u[:, :2] * s[:2] @ v[:2])
    assert [term.width for term in terms] == [5, 2, 0]


def base(federation: Federation) -> Tensor:
    """Return ``W0`` with the side path, of the linear model."""
    return W0 + side(federation.client)[0]


def side(module: nn.Module) -> list[Tensor]:
    """Return the side path of each pair as a full matrix, by the addends of a module."""
    return [left @ right[0] if right else left for left, *right in parts(module)]


def parts(module: nn.Module) -> list[tuple[Tensor, ...]]:
    return [addend.factors for addend in addends_of(module)]


def local(w: Tensor, b: Tensor, a: Tensor, client: int, steps: int) -> tuple[Tensor, Tensor]:
    """Return B and A after steps of a client alone, without any of our code."""
    x, y = SAMPLES[client]
    for _ in range(steps):
        b, a = b.detach().requires_grad_(), a.detach().requires_grad_()
        loss = 0.5 * (y - x @ (w + 2 * b @ a).mT).square().sum(1).mean()
        gradients = torch.autograd.grad(loss, (b, a))
        with torch.no_grad():
            b, a = (p - 0.1 * g for p, g in zip((b, a), gradients, strict=True))
    return b.detach(), a.detach()


def by_hand(how: str, rounds: int, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the base, B and A after rounds of full matrices."""
    w, b, a = W0, torch.zeros(3, 1).double(), matrix([[1, 0.5]])
    for _ in range(rounds):
        found = [local(w, b, a, client, steps) for client in (0, 1)]
        ideal = sum(p * 2 * y @ x for p, (y, x) in zip(WEIGHTS, found, strict=True))
        if how == "stack":
            w, b = w + ideal, torch.zeros_like(b)
        else:
            b, a = (sum(p * z[j] for p, z in zip(WEIGHTS, found, strict=True)) for j in (0, 1))
            w = w + ideal - 2 * b @ a
    return w, b, a


@ENGINES
def test_flora_for_two_rounds(engine: str) -> None:
    one, two = (
        trained(FedAvg(aggregate="stack", restart="keep"), rounds=rounds, engine=engine)
        for rounds in (1, 2)
    )
    near(base(one), [[0.773400, -0.116600], [-0.117542, 0.941229], [0.311717, 0.649258]])
    near(base(two), [[0.694193, -0.156615], [-0.160831, 0.919511], [0.066724, 0.525792]])
    state = two.server_states()[0]
    assert torch.equal(state[A], matrix([[1, 0.5]]))
    assert not state[B].any()


@ENGINES
@pytest.mark.parametrize("how", SIDES)
@pytest.mark.parametrize(("rounds", "steps"), [(3, 2), (2, 40)])  # many steps are recorded
def test_rounds_are_those_of_full_matrices(how: Any, rounds: int, steps: int, engine: str) -> None:
    keep = {"restart": "keep"} if how == "stack" else {}
    callback = FedAvg(aggregate=how, log_product_error=True, **keep)
    federation = trained(callback, rounds, steps, engine=engine)
    w, b, a = by_hand(how, rounds, steps)
    state = federation.server_states()[0]
    near(base(federation), w, 1e-11)
    near(state[B], b, 1e-11)
    near(state[A], a, 1e-11)
    errors = [entry.metrics["adapters/product_error"] for entry in federation.history]
    assert max(errors) < 1e-12


def test_the_first_residual_is_the_printed_one() -> None:
    federation = trained(FedAvg(aggregate="residual"))
    expected = [[-0.0033, -0.00385], [0.000875, 0.001021], [-0.00485, -0.005658]]
    near(side(federation.client)[0], expected)
    state = federation.server_states()[0]
    near(state[B], [-0.11, -0.058333, -0.336667])
    near(state[A], [1.015, 0.5125])


@pytest.mark.parametrize(("how", "error"), [("factors", 0.011060), ("product", 0.001714)])
def test_the_error_of_what_is_sent_is_logged(how: Any, error: float) -> None:
    federation = trained(FedAvg(aggregate=how, log_product_error=True))
    assert federation.history[0].metrics["adapters/product_error"] == pytest.approx(error, abs=6e-7)
    plain = trained(FedAvg(aggregate=how)).server_states()[0]
    assert all(torch.equal(plain[n], t) for n, t in federation.server_states()[0].items())
    assert "adapters/product_error" not in trained(FedAvg(aggregate=how)).history[0].metrics


def test_no_product_has_no_error() -> None:
    federation = trained(FedAvg(log_product_error=True), module=regressor(lr=0.0))
    assert federation.history[0].metrics["adapters/product_error"] == 0


def test_one_client_has_no_residual() -> None:
    federation = trained(FedAvg(aggregate="residual"), rounds=2, data=(1,))
    plain = trained(FedAvg(), rounds=2, data=(1,)).server_states()[0]
    assert parts(federation.client) == [()]
    assert all(torch.equal(plain[n], t) for n, t in federation.server_states()[0].items())


def test_without_a_residual_factors_are_averaged() -> None:
    federation = trained(FedAvg(aggregate="residual", residual_rank=0), rounds=2)
    plain = trained(FedAvg(), rounds=2).server_states()[0]
    assert parts(federation.client) == [()]
    assert all(torch.equal(plain[n], t) for n, t in federation.server_states()[0].items())


def test_outputs_after_a_round_agree_if_the_rank_suffices() -> None:
    x, module = torch.randn(5, 2).double(), regressor(r=2, lora_alpha=4)
    found = [
        trained(FedAvg(aggregate=how), module=copy.deepcopy(module)).client_module(0).network(x)
        for how in ("product", "residual", "stack")
    ]
    torch.testing.assert_close(found[1], found[0], atol=1e-10, rtol=0)
    torch.testing.assert_close(found[2], found[0], atol=1e-10, rtol=0)


def test_a_is_drawn_by_seed_and_round() -> None:
    one, again, other = (
        trained(FedAvg(aggregate="stack"), rounds, seed=seed).server_states()[0][A]
        for rounds, seed in ((2, 0), (2, 0), (2, 1))
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    first = trained(FedAvg(aggregate="stack")).server_states()[0][A]
    assert not torch.equal(one, first)
    assert first.abs().max() <= 2**-0.5  # the bound of peft's draws of two inputs


# All kinds of layers


class Layers(nn.Module):
    """Has one layer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        transposed = pytest.importorskip("transformers").pytorch_utils.Conv1D
        self.embedding = nn.Embedding(7, 4)
        self.linear = nn.Linear(4, 6)
        self.transposed = transposed(8, 6)
        self.convolution = nn.Conv2d(2, 6, (3, 2), stride=2, padding=1)
        self.line = nn.Conv1d(6, 3, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.transposed(self.linear(self.embedding(tokens)))  # [n, 6, 8]
        x = self.convolution(x.reshape(len(x), 2, 6, 4))  # [n, 6, 3, 3]
        return self.line(x.flatten(2)).mean(2)


KINDS = ["embedding", "linear", "transposed", "convolution", "line"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to"),
    pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd"),
]


def adapted(rank: int = 2, **options: Any) -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=rank, target_modules=KINDS, **{"lora_alpha": 3, **options})
    return peft.get_peft_model(Layers(), config)


def texts(count: int = 3, **options: Any) -> TensorClients:
    draw = torch.Generator().manual_seed(0)
    pairs = [
        (torch.randint(7, (6, 6), generator=draw), torch.randn(6, 3, generator=draw).double())
        for _ in range(count)
    ]
    return TensorClients(pairs, batch_size=3, **options)


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_a_side_path_is_pefts_own_delta(rank: int) -> None:
    """A merged adapter of peft with the same factors gives the same outputs."""
    oracle, model = adapted(rank, lora_alpha=rank).double(), adapted(2).double()
    for name, parameter in oracle.named_parameters():
        if "lora_" in name:
            parameter.data.normal_()
    state, of_oracle = oracle.state_dict(), {p.layer: p for p in find_pairs(oracle)}
    pairs = find_pairs(model)
    add_hooks(model, pairs)
    terms = {pair: of_oracle[pair.layer].product(state) for pair in pairs}
    path = SidePath.of(pairs, 1)
    path.add(pairs, terms, model.state_dict())
    path.show(model, pairs)
    forms = {len(factors) for factors in path.addends}
    assert forms == {1: {2}, 3: {1, 2}, 5: {1}}[rank]  # full matrices have one factor
    oracle.merge_adapter()
    x = torch.randint(7, (5, 6))
    torch.testing.assert_close(model(x), oracle(x), atol=1e-12, rtol=1e-12)
    path.add(pairs, {pair: -1.0 * term for pair, term in terms.items()}, model.state_dict())
    path.show(model, pairs)
    torch.testing.assert_close(model(x), adapted(2).double()(x), atol=1e-12, rtol=0)


def layers_after(how: Any, rounds: int, engine: str, **options: Any) -> Federation:
    data = options.pop("data", None) or texts()
    client = options.pop("client", None) or Regressor(adapted(), 0.5).double()
    callback = FedAvg(aggregate=how, log_product_error=True, **options)
    federation = Federation(client, local_steps=3, engine=engine)
    quiet_trainer(rounds, callback).fit(federation, datamodule=data)
    return federation


@pytest.mark.parametrize("how", SIDES)
def test_both_engines_agree_for_all_kinds_of_layers(how: Any) -> None:
    one, other = (layers_after(how, 3, engine) for engine in ("sequential", "vectorized"))
    assert one.clients.engine is not None
    assert getattr(other.clients.engine, "obstacle", "") is None
    for name, value in one.server_states()[0].items():
        torch.testing.assert_close(other.server_states()[0][name], value, rtol=1e-9, atol=1e-11)
    for left, right in zip(side(one.client), side(other.client), strict=True):
        assert left.any()
        torch.testing.assert_close(right, left, rtol=1e-9, atol=1e-11)
    x = torch.randint(7, (5, 6))
    outputs = [federation.client_module(1).network(x) for federation in (one, other)]
    torch.testing.assert_close(*outputs, rtol=1e-9, atol=1e-11)
    errors = [entry.metrics["adapters/product_error"] for entry in one.history]
    assert max(errors) < 1e-10


@pytest.mark.parametrize("how", SIDES)
def test_in_single_precision_nothing_gets_lost(how: Any) -> None:
    pairs = [(x, y.float()) for x, y in (texts().samples(i, "train") for i in range(3))]
    client = Regressor(adapted(), 0.5)
    found = layers_after(how, 2, "sequential", client=client, data=TensorClients(pairs))
    errors = [entry.metrics["adapters/product_error"] for entry in found.history]
    assert max(errors) < 1e-6
    assert all(factor.dtype == torch.float32 for own in parts(found.client) for factor in own)


def test_the_zero_factor_of_an_embedding_is_a() -> None:
    start = adapted().state_dict()
    found = layers_after("stack", 2, "sequential").server_states()[0]
    for pair in find_pairs(adapted()):
        zero, other = (pair.a, pair.b) if "embedding" in pair.layer else (pair.b, pair.a)
        assert not found[f"network.{zero}"].any()
        assert not torch.equal(found[f"network.{other}"], start[other].double())


# What clients share, and what they are judged by


@ENGINES
def test_all_clients_share_one_side_path(engine: str) -> None:
    federation = layers_after("residual", 2, engine)
    own = [*addends_of(federation.client)]
    models: Any = federation.clients.attached_engine
    copies = [models.models.client.module]
    copies += [models._stacked.module] if engine == "vectorized" else []
    for module in copies:
        found = [*addends_of(module)]
        assert len(found) == len(own) == len(KINDS)
        assert all(one is other for one, other in zip(found, own, strict=True))
    path = federation.server_callback.side_path
    held = [factor for addend in own for factor in addend.factors]
    for tensor, other in zip(held, [t for f in path.addends for t in f], strict=True):
        assert tensor.data_ptr() == other.data_ptr()
        assert tensor.dim() == 2


def test_a_clients_module_keeps_its_side_path() -> None:
    federation = trained(FedAvg(aggregate="residual"))
    x = torch.randn(5, 2).double()
    module = federation.client_module(0)
    before = module.network(x)
    expected = x @ (base(federation) + delta(federation)).mT
    torch.testing.assert_close(before, expected)
    trainer = quiet_trainer(3, federation.server_callback)
    trainer.fit(federation, datamodule=clients())
    assert torch.equal(module.network(x), before)
    assert not torch.equal(federation.client_module(0).network(x), before)


def delta(federation: Federation) -> Tensor:
    state = federation.server_states()[0]
    return 2 * state[B] @ state[A]


class Judged(Regressor):
    """Logs its loss."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx))


@ENGINES
def test_clients_are_judged_with_it(engine: str) -> None:
    network = regressor().network
    federation = Federation(Judged(network).double(), local_steps=2, engine=engine)
    data = TensorClients(SAMPLES, val=SAMPLES, batch_size=2)
    trainer = quiet_trainer(1, FedAvg(aggregate="stack"))
    trainer.fit(federation, datamodule=data)
    near(federation.client_metrics("val")["loss"], [0.296215, 0.692973])
    assert federation.history[0].metrics["val/macro_loss"] == pytest.approx(0.494594, abs=6e-7)


@pytest.mark.parametrize("how", SIDES)
def test_resuming_is_exact(how: Any, tmp_path: Path) -> None:
    def fit(rounds: int, path: Path | None = None) -> Federation:
        federation = Federation(regressor(), local_steps=2, engine="sequential")
        trainer = quiet_trainer(rounds, FedAvg(aggregate=how), CheckState())
        data = TensorClients([*SAMPLES, THIRD], batch_size=2, cohort_size=2)
        trainer.fit(federation, datamodule=data, ckpt_path=path)
        trainer.save_checkpoint(tmp_path / f"{rounds}.ckpt")
        return federation

    whole, _ = fit(4), fit(2)
    resumed = fit(4, tmp_path / "2.ckpt")
    loaded = Federation.load_from_checkpoint(
        tmp_path / "4.ckpt", client=regressor(), callback=FedAvg(aggregate=how)
    )
    x = torch.randn(5, 2).double()
    for other in (resumed, loaded):
        assert all(map(torch.equal, side(whole.client), side(other.client)))
        assert torch.equal(whole.client_module(0).network(x), other.client_module(0).network(x))
        one, two = whole.server_callback.side_path, other.server_callback.side_path
        assert torch.equal(one.sizes, two.sizes)
        assert torch.equal(one.known, two.known)
    assert [h.bytes_down for h in whole.history] == [h.bytes_down for h in resumed.history]
    with pytest.raises(ConfigurationError, match="only the checkpoint has side_path"):
        Federation.load_from_checkpoint(tmp_path / "4.ckpt", client=regressor(), callback=FedAvg())


def found_on(folder: Path, how: Any, engine: str, **options: Any) -> list[Tensor]:
    """Train a round, resume for a second; return models, losses and outputs."""
    path = None
    for rounds in (1, 2):
        module = Judged(regressor().network).double()
        federation = Federation(module, local_steps=2, engine=engine)  # type: ignore[arg-type]
        data = TensorClients(SAMPLES, val=SAMPLES, batch_size=2)
        trainer = quiet_trainer(rounds, FedAvg(aggregate=how), **options)
        trainer.fit(federation, datamodule=data, ckpt_path=path)
        trainer.save_checkpoint(path := folder / "last.ckpt")
    outputs = federation.client_module(0).network(torch.ones(1, 2).double()).detach()
    state = federation.server_states()[0]
    return [
        state[A],
        state[B],
        *side(federation.client),
        federation.client_metrics("val")["loss"],
        outputs,
    ]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
@ENGINES
@pytest.mark.parametrize("how", SIDES)
def test_devices_agree(
    how: Any, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pflight.engines.stacked.stack._OFTEN", 10**9)  # far tensors are not traced
    expected = found_on(tmp_path, how, engine)
    with other_device(monkeypatch):
        found = found_on(tmp_path, how, engine, strategy=strategy(), accelerator="auto")
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(getattr(one, "near", one), other, check_device=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@ENGINES
@pytest.mark.parametrize("how", SIDES)
def test_a_gpu_agrees(how: Any, engine: str, tmp_path: Path) -> None:
    expected = found_on(tmp_path, how, engine)
    found = found_on(tmp_path, how, engine, accelerator="gpu", devices=1)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, check_device=False)


# Bytes


@pytest.mark.parametrize("how", [*SIDES, "keep"])
def test_bytes_are_those_of_missed_terms(how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each layer a client gets the terms that it lacks, or the whole if that is smaller."""
    cohorts = [[0], [1], [1], [0], [0], [0], [1]]
    monkeypatch.setattr(CohortSampler, "sample", lambda _, round: torch.tensor(cohorts[round]))
    options: Any = {"aggregate": how} if how != "keep" else {"aggregate": "stack", "restart": how}
    callback = FedAvg(**options)
    federation = Federation(regressor(), local_steps=2, engine="sequential")
    data = TensorClients(SAMPLES, batch_size=2, cohort_size=1)
    quiet_trainer(7, callback).fit(federation, datamodule=data)
    assert [entry.clients for entry in federation.history] == cohorts
    number, factors = 8, 5 * 8
    # One client has no residual. Its product has rank 1, and so 5 of at most 6 numbers.
    term = 0 if how == "residual" else 5 * number
    rank, received = 0, {0: 0, 1: 0}
    for index, (entry, (client,)) in enumerate(zip(federation.history, cohorts, strict=True)):
        missed = index - received[client]
        whole = {0: 0, 1: 5 * number}.get(rank, 6 * number)
        own = 0 if how == "stack" and index else factors
        assert entry.bytes_down == own + min(missed * term, whole), index
        assert entry.bytes_up == factors
        received[client], rank = index, rank + (term > 0)


def test_the_bytes_of_a_term_are_those_of_its_rank() -> None:
    pairs = [PAIR, Pair("two", "default", "c", "d", 1, 1.0)]
    like = {"a": torch.zeros(1), "c": torch.zeros(1).double()}
    path, draw = SidePath.of(pairs, 3), torch.Generator().manual_seed(0)

    def add(one: int, two: int) -> None:
        ranks = (8, one, 9), (4, two, 3)
        made = [
            LowRank([(torch.randn(d, r, generator=draw), torch.randn(r, k, generator=draw))])
            for d, r, k in ranks
        ]
        terms = [LowRank([(x.left.double(), x.right.double())]) for x in made]
        path.add(pairs, dict(zip(pairs, terms, strict=True)), like)

    everyone = torch.arange(3)
    assert path.bytes_for(everyone) == 0
    add(1, 0)
    assert path.bytes_for(everyone) == 3 * 4 * 17
    path.note(torch.tensor([1]))
    add(2, 2)
    first, second = 4 * 2 * 17, 8 * 3 * 4  # the second layer's rank 2 is as much as its 12 numbers
    assert path.bytes_for(torch.tensor([1])) == first + second
    assert path.bytes_for(torch.tensor([0])) == 4 * 3 * 17 + second
    path.note(torch.tensor([1]))
    add(3, 0)
    assert path.bytes_for(torch.tensor([1])) == 4 * 3 * 17
    assert path.bytes_for(torch.tensor([0])) == 4 * 72 + second  # the first is a full matrix
    assert [len(factors) for factors in path.addends] == [1, 1]


# Export


@pytest.mark.parametrize(("rank", "forms"), [(1, {2}), (None, {1, 2})])  # full ones: 1
@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True}, {"rank_pattern": {"linear": 3}, "alpha_pattern": {"line": 5}}],
)
def test_an_exported_adapter_has_the_side_path(
    options: dict[str, Any], rank: int | None, forms: set[int], tmp_path: Path
) -> None:
    client = Regressor(adapted(**options), 0.5).double()
    federation = layers_after("residual", 1, "sequential", client=client, residual_rank=rank)
    module: Any = federation.client_module(0)
    assert {len(factors) for factors in parts(module)} == forms
    before = copy.deepcopy(module.network.peft_config["default"].to_dict())
    write_model(module, tmp_path / "out", federation.layout.moving)
    assert module.network.peft_config["default"].to_dict() == before
    torch.manual_seed(0)
    loaded = peft.PeftModel.from_pretrained(Layers(), tmp_path / "out").double().eval()
    assert not [*addends_of(loaded)]
    x = torch.randint(7, (5, 6))
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), module.network(x), atol=1e-6, rtol=0)
        assert (loaded(x) - adapted().double().eval()(x)).abs().max() > 1e-3


CONFIG = """
model:
  local_epochs: 1
  client:
    class_path: pflight.models.Classifier
    init_args: {network: {class_path: tests.adapters.test_export.network}}
trainer:
  max_epochs: 2
  callbacks+:
    - class_path: FedAvg
      init_args: {aggregate: residual, residual_rank: 3, log_product_error: true}
"""


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text(CONFIG)
    configs = "--config=configs/data/digits.yaml", "--config=own.yaml"
    options = "--trainer.callbacks.residual_rank=2", "--trainer.max_epochs=1"
    main(["fit", *configs, "--trainer.default_root_dir=run", *options])
    main(["export", "run", "--client", "3", "--out", "3"])
    main(["export", "run", "--server", "--out", "server"])
    one, server = (
        safetensors.torch.load_file(f"{who}/adapter_model.safetensors") for who in ("3", "server")
    )
    assert one.keys() == server.keys()
    assert all(torch.equal(one[entry], server[entry]) for entry in one)
    assert min(len(factor) for factor in one.values()) == 2 + 2  # the adapter's and the residual's


# Other methods, and what is refused


@ENGINES
@pytest.mark.parametrize(
    "make",
    [
        lambda **o: FedProx(mu=0.1, **o),
        lambda **o: FedAvg(modifiers=[Private("*line*")], **o),
        lambda **o: Ditto(lam=0.1, **o),
    ],
)
def test_methods_that_average_have_it(make: Any, engine: str) -> None:
    federation = Federation(Regressor(adapted(), 0.5).double(), local_steps=3, engine=engine)
    callback = make(aggregate="residual", log_product_error=True)
    quiet_trainer(2, callback, CheckState()).fit(federation, datamodule=texts())
    assert all(entry.metrics["adapters/product_error"] < 1e-10 for entry in federation.history)
    private = any("line" in one.layer for one in callback.pairs)
    assert private != bool(callback.modifiers)
    assert "residual" in federation.algorithm


@pytest.mark.parametrize("how", ["factors", "product"])
def test_clusters_log_the_error_of_all(how: Any) -> None:
    """One cluster has the error of FedAvg; clients in clusters of their own have none."""
    one = trained(IFCA(1, aggregate=how, log_product_error=True))
    plain = trained(FedAvg("samples", aggregate=how, log_product_error=True))
    name = "adapters/product_error"
    assert one.history[0].metrics[name] == pytest.approx(plain.history[0].metrics[name])
    assert plain.history[0].metrics[name] > 1e-4
    two = trained(FeSEM(2, aggregate=how, log_product_error=True))
    assert two.history[0].metrics[name] == pytest.approx(0, abs=1e-12)


def test_half_precision_is_not_that_of_the_side_path() -> None:
    term = LowRank([(torch.ones(6, 1).double(), torch.full((1, 5), 1 / 3).double())])
    path = SidePath.of([PAIR], 1)
    path.add([PAIR], {PAIR: term}, {"a": torch.zeros(1, dtype=torch.bfloat16)})
    assert {factor.dtype for factor in path.addends[0]} == {torch.float32}
    assert path.sizes.tolist() == [[4 * 11]]


class Two(FedAvg):
    """Has a second server model."""

    def setup_server(self) -> None:
        self.server.add(2)


class Stepped(FedAvg):
    """Has another default step."""

    def configure_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5)


def schedule(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (lambda: Stepped(aggregate="residual"), {}, "needs the server's default step"),
        (
            lambda: FedAvg(aggregate="stack"),
            {"server_optimizer": torch.optim.Adam},
            "FedAvg with aggregate='stack' needs the server's default step, SGD with step size 1",
        ),
        (
            lambda: FedAvg(aggregate="residual"),
            {"server_scheduler": schedule},
            "leave out server_optimizer and server_scheduler",
        ),
        (
            lambda: IFCA(2, aggregate="residual"),
            {},
            "IFCA with aggregate='residual': .* this method has several server models",
        ),
        (lambda: Two(aggregate="stack"), {}, "Two with .* this method has several server models"),
        (
            lambda: Ditto(aggregate="stack"),
            {},
            "Ditto with aggregate='stack': clients of this method keep adapters",
        ),
        (lambda: FedALA(aggregate="stack"), {}, "FedALA .* keep adapters from earlier"),
        (
            lambda: FedAvg(aggregate="residual", modifiers=[Private("*lora_B*")]),
            {},
            r"needs both factors of an adapter, and '.*lora_B.* does not travel",
        ),
        (
            lambda: FedAvg(aggregate="stack", modifiers=[Frozen("*lora_A*")]),
            {},
            r"needs both factors of an adapter, and '.*lora_A.* does not travel",
        ),
        (
            lambda: FedAvg(aggregate="residual"),
            {"module": lambda: regressor(use_dora=True)},
            "can't use the adapter of 'network.base_model.model.lin': it is a Dora",
        ),
        (
            lambda: FedAvg(aggregate="stack"),
            {"module": lambda: Regressor(nn.Linear(2, 3)).double()},
            "FedAvg with aggregate='stack' needs low-rank adapters",
        ),
        (
            lambda: FedAvg(log_product_error=True),
            {"module": lambda: Regressor(nn.Linear(2, 3)).double()},
            "FedAvg with log_product_error=True needs low-rank adapters",
        ),
        (lambda: FedAvg(residual_rank=1), {}, "residual_rank needs aggregate='residual'"),
        (lambda: FedAvg(restart="keep"), {}, "FedAvg: restart needs aggregate='stack'"),
    ],
)
def test_what_has_no_side_path_is_refused(make: Any, options: dict[str, Any], said: str) -> None:
    module = options.pop("module", regressor)()
    with pytest.raises(ConfigurationError, match=said):
        trained(make(), module=module, **options)


def test_bad_options_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="FedAvg: residual_rank must be at least 0, got -1"
    ):
        FedAvg(aggregate="residual", residual_rank=-1)


def test_a_module_with_a_side_path_begins_no_run() -> None:
    module: Any = trained(FedAvg(aggregate="residual")).client_module(0)
    with pytest.raises(ConfigurationError, match="Regressor has a side path of another run"):
        trained(FedAvg(aggregate="residual"), module=module)


@pytest.mark.parametrize("how", SIDES)
def test_deployments_refuse_it(how: Any) -> None:
    with pytest.raises(ConfigurationError, match="the nodes of a deployment don't get the server"):
        agreement_on(Federation(regressor()), FedAvg(aggregate=how), clients())


def test_an_infinite_side_path_is_an_error() -> None:
    term = LowRank([(torch.full((3, 1), torch.inf).double(), torch.ones(1, 2).double())])
    path = SidePath.of([PAIR], 1)
    path.addends[0] = (torch.zeros(3, 2).double(),)
    with pytest.raises(ConfigurationError, match="the side path of 'lin' is not finite"):
        path.add([PAIR], {PAIR: term}, SENT)


def test_tied_layers_share_an_addend() -> None:
    network = nn.Module()
    network.one = network.other = nn.Linear(4, 4)
    model: Any = peft.get_peft_model(network, peft.LoraConfig(r=1, target_modules=["one"]))
    add_hooks(model, find_pairs(model))
    (addend,) = addends_of(model)
    assert isinstance(addend, Addend)
    assert copy.deepcopy(addend) is addend


@pytest.mark.parametrize("how", ["factors", "product"])
def test_other_values_have_no_hooks_and_no_state(how: Any) -> None:
    federation = trained(FedAvg(aggregate=how))
    assert not [*addends_of(federation.client)]
    assert federation.server_callback.state_dict() == {}

"""RoLoRA: vectors by hand, reductions, both engines, traffic and bad input."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("peft")

import peft

from pflight import Federation
from pflight.callbacks import FedAvg, RoLoRA
from pflight.callbacks.methods.rolora import InTurn
from pflight.datamodules import TensorClients
from pflight.errors import ConfigurationError
from pflight.modifiers import Frozen, Private, Proximal
from pflight.runs.check_state import CheckState
from pflight.states.updates import ClientUpdates
from pflight.transforms import Clip, TopK
from tests.adapters.worlds import A, B, Regressor, clients, regressor, trained
from tests.remote_clients import ask_remote_clients
from tests.runs import ENGINES, assert_same, quiet_trainer

B_ROUND_0 = (-0.11, -0.058333, -0.336667)
A_ROUND_1 = (1.060573, 0.540898)
fit = partial(trained, steps=None, local_epochs=2)  # a batch has all samples


def close(found: Tensor, printed: Any) -> None:
    """Compare with numbers of six decimals."""
    torch.testing.assert_close(found.flatten(), torch.tensor(printed).double(), rtol=0, atol=6e-7)


def factors(federation: Federation) -> tuple[Tensor, Tensor]:
    """Return the server's B and A."""
    (state,) = federation.server_states()
    return state[B], state[A]


class Optimized(Regressor):
    """A regressor with any optimizer."""

    def __init__(self, network: nn.Module, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__(network)
        self.optimizer = optimizer

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())


ADAMW = partial(torch.optim.AdamW, lr=0.02, weight_decay=0.3)


class Words(nn.Module):
    """An embedding and a layer with adapters, and a head that trains as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(5, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(self.words(x))))


def words() -> Optimized:
    """Return a regressor of words with adapters of rank 2."""
    torch.manual_seed(3)
    config = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=["words", "layer"], modules_to_save=["head"]
    )
    return Optimized(peft.get_peft_model(Words(), config), ADAMW).double()


def sentences(**options: Any) -> TensorClients:
    """Return four unequal clients with words and targets."""
    draw = torch.Generator().manual_seed(5)
    samples = [
        (
            torch.randint(5, (count,), generator=draw),
            torch.randn(count, 3, generator=draw, dtype=torch.float64),
        )
        for count in (4, 7, 3, 6)
    ]
    return TensorClients(samples, val=samples, num_classes=None, batch_size=3, **options)


def learn(
    callback: Any = None, rounds: int = 3, ckpt_path: Any = None, cohort: int = 2, **options: Any
) -> Federation:
    """Fit a federation of words."""
    federation = Federation(words(), local_epochs=2, **options)
    trainer = quiet_trainer(rounds, RoLoRA() if callback is None else callback, CheckState())
    trainer.fit(federation, datamodule=sentences(cohort_size=cohort), ckpt_path=ckpt_path)
    return federation


def names_of(federation: Federation, *parts: str) -> set[str]:
    """Return the names of the entries with one of these parts."""
    return {name for name in federation.layout.parameters if any(part in name for part in parts)}


EVEN, ODD = ("lora_embedding_A", "lora_B"), ("lora_embedding_B", "lora_A")


@ENGINES
def test_vectors(engine: str) -> None:
    """Round 0 is FFA-LoRA's. Round 1 trains A beside the mean of B."""
    b, a = factors(fit(RoLoRA(), engine=engine))
    close(b, B_ROUND_0)
    close(a, (1, 0.5))
    federation = fit(RoLoRA(), rounds=2, engine=engine)
    b, a = factors(federation)
    close(b, B_ROUND_0)
    close(a, A_ROUND_1)
    module = federation.client_module(0)
    losses = [module.training_step(clients().samples(i, "train"), 0).item() for i in (0, 1)]
    assert losses == pytest.approx([0.294014, 0.651940], abs=6e-7)


@pytest.mark.parametrize(("client", "a"), [(0, (1.015591, 0.486079)), (1, (1.150537, 0.650537))])
def test_the_factor_that_each_client_sends(client: int, a: Any) -> None:
    sent = {}

    class Watched(RoLoRA):
        def receive(self, updates: ClientUpdates) -> None:
            sent.update(zip(updates.clients.tolist(), updates.states, strict=True))
            super().receive(updates)

    fit(Watched(), rounds=2)
    assert [*sent[client].keys()] == [A]
    close(sent[client][A], a)


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.SGD, lr=0.1),
        partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
        ADAMW,
    ],
)
def test_each_round_is_fedit_with_the_other_factor_frozen(optimizer: Any) -> None:
    """To the bit: the resting factor gets neither gradient nor weight decay."""
    before = Optimized(regressor().network, optimizer).double()
    for rounds in range(1, 5):
        module = Optimized(regressor().network, optimizer).double()
        found = fit(RoLoRA(), rounds=rounds, module=module).server_states()[0]
        resting = Frozen("*lora_A*" if rounds % 2 else "*lora_B*")
        expected = fit(FedAvg(modifiers=[resting]), module=before).server_states()[0]
        assert all(torch.equal(found[name], expected[name]) for name in (A, B))
        before.load_state_dict({name: expected[name] for name in before.state_dict()})


def test_without_odd_rounds_it_is_ffa_lora() -> None:
    class OnlyEven(InTurn):
        def phases(self, module: L.LightningModule, epochs: int, anchored: bool) -> Any:
            found = super().phases(module, epochs, anchored)
            return found and [found[0]._replace(turn=None)]

    class AlwaysB(RoLoRA):
        client_method = OnlyEven()
        returned = property(lambda self: [B])  # type: ignore[assignment]

    found = fit(AlwaysB(), rounds=3).server_states()[0]
    expected = fit(FedAvg(modifiers=[Frozen("*lora_A*")]), rounds=3).server_states()[0]
    assert all(torch.equal(found[name], expected[name]) for name in (A, B))


def test_embeddings_begin_with_the_other_factor() -> None:
    """Their A is 0 at first; a head trains in every round."""
    states = [learn(rounds=rounds).server_states()[0] for rounds in (1, 2, 3)]
    federation = learn(rounds=1)
    first = federation.layout.template
    even, odd = names_of(federation, *EVEN), names_of(federation, *ODD)
    head = names_of(federation, "head")
    assert (len(even), len(odd), len(head)) == (2, 2, 2)
    for before, after, moves, rests in zip(
        [first, *states], states, (even, odd, even), (odd, even, odd), strict=False
    ):
        assert not any(torch.equal(before[name], after[name]) for name in moves | head)
        assert all(torch.equal(before[name], after[name]) for name in rests)


def test_both_engines_agree() -> None:
    one, other = (learn(engine=engine, rounds=4) for engine in ("sequential", "vectorized"))
    assert other.clients.attached_engine.obstacle is None  # type: ignore[attr-defined]
    torch.testing.assert_close(one.server_states(), other.server_states(), rtol=1e-7, atol=1e-9)


def test_bytes() -> None:
    """A client of the round before has the factor that rested then; others lack both."""
    federation = learn(rounds=6)
    template = federation.layout.template

    def size(names: set[str]) -> int:
        return sum(template[name].nbytes for name in names)

    turns = [size(names_of(federation, *part)) for part in (EVEN, ODD)]
    head, before, again = size(names_of(federation, "head")), set[int](), 0
    for entry in federation.history:
        trained, rested = turns[entry.index % 2], turns[1 - entry.index % 2]
        both = {*entry.clients} & before
        again += len(both)
        assert entry.bytes_up == 2 * (trained + head)
        assert entry.bytes_down == 2 * (trained + rested + head) - len(both) * trained
        before = {*entry.clients}
    assert 0 < again < 10


def test_bytes_of_two_factors() -> None:
    """B has 3 numbers, A has 2; both clients take part in both rounds."""
    history = fit(RoLoRA(), rounds=3).history
    assert [entry.bytes_up for entry in history] == [2 * 3 * 8, 2 * 2 * 8, 2 * 3 * 8]
    assert [entry.bytes_down for entry in history] == [2 * 5 * 8, 2 * 3 * 8, 2 * 2 * 8]


@pytest.mark.parametrize("modifiers", [[], [Proximal(0.1), Clip(0.05), TopK(0.3)]])
def test_resuming_is_exact(modifiers: list[Any], tmp_path: Path) -> None:
    """Also what a client's sparse update left out, of each factor."""
    whole = learn(RoLoRA(modifiers=modifiers), rounds=5)
    stopped = learn(RoLoRA(modifiers=modifiers), rounds=3)
    stopped.trainer.save_checkpoint(tmp_path / "three.ckpt")
    resumed = learn(RoLoRA(modifiers=modifiers), rounds=5, ckpt_path=tmp_path / "three.ckpt")
    assert_same(resumed.server_states()[0], whole.server_states()[0])
    assert [one.bytes_down for one in resumed.history] == [one.bytes_down for one in whole.history]


def test_what_is_left_out_belongs_to_its_factor() -> None:
    """The other half of an update follows two rounds later, with the same factor."""
    whole = learn(RoLoRA(modifiers=[TopK(0.5)]), rounds=4, cohort=4)
    slots = whole.clients.memory.state_dict()
    assert len(slots) == 2
    sizes = {next(iter(clients.values()))["error"].numel() for clients in slots.values()}
    head = sum(whole.layout.template[name].numel() for name in names_of(whole, "head"))
    assert sizes == {
        head + sum(whole.layout.template[n].numel() for n in names_of(whole, *part))
        for part in (EVEN, ODD)
    }


def test_clients_on_machines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = learn(rounds=3, engine="sequential")
    ask_remote_clients(monkeypatch)
    there = learn(rounds=3, engine="sequential")
    assert_same(here.server_states()[0], there.server_states()[0])


def test_finetuning_trains_both_factors() -> None:
    federation = learn(rounds=1, finetune_epochs=1)
    server, own = federation.server_states()[0], federation.client_state(0)
    assert not any(torch.equal(server[n], own[n]) for n in names_of(federation, *EVEN, *ODD))


def test_its_name() -> None:
    assert fit(RoLoRA()).algorithm == "RoLoRA"


def _half_frozen() -> Regressor:
    module = regressor()
    dict(module.named_parameters())[A].requires_grad = False
    return module


@pytest.mark.parametrize(
    ("make", "module", "said"),
    [
        (
            RoLoRA,
            lambda: Regressor(nn.Linear(2, 3)).double(),
            "RoLoRA needs low-rank adapters, and Regressor has none",
        ),
        (
            RoLoRA,
            _half_frozen,
            r"RoLoRA trains both factors .*, and '.*lora_A.*' is frozen",
        ),
        (RoLoRA, lambda: regressor(use_dora=True), "RoLoRA can't use the adapter of .*Dora"),
        (
            lambda: RoLoRA(modifiers=[Private("*lora_B*")]),
            regressor,
            r"RoLoRA: Private can't keep .*lora_B",
        ),
        (
            lambda: RoLoRA(modifiers=[Frozen("*lora_A*")]),
            regressor,
            r"RoLoRA: Frozen can't take .*lora_A",
        ),
    ],
)
def test_bad_input(make: Any, module: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        fit(make(), module=module())


def test_the_mean_of_one_factor_has_no_other_rule() -> None:
    with pytest.raises(TypeError, match="aggregate"):
        RoLoRA(aggregate="product")  # type: ignore[call-arg]

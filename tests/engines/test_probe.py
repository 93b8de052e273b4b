"""What clients may do that one call for all of them can't: it is found out, or done right."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from pflight import Federation
from pflight.callbacks import (
    APFL,
    SCAFFOLD,
    Ditto,
    FedAvg,
    FedDANE,
    FedEC,
    FedRep,
    FedSGD,
    Local,
    PerFedAvg,
    PFedMe,
)
from pflight.datamodules import TensorClients
from pflight.engines.stacked.audit import Audit
from pflight.engines.stacked.training import StackedTraining
from pflight.errors import ClientError, ConfigurationError
from pflight.local_client import LocalClient
from pflight.method import ClientMethod, Phase
from pflight.models import Classifier
from pflight.models.client_methods import Dane
from tests.runs import (
    CLASSES,
    ENGINES,
    FEATURES,
    batchnorm_client,
    quiet_trainer,
    run,
    samples,
    sgd,
    small_data,
)

pytestmark = pytest.mark.filterwarnings(  # pytest.warns hands it on as if it were ours
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"
)

COUNTS = (5, 8, 1, 9, 12, 3)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES))


class KeepsAList(Classifier):
    """Looks at its parameters by another way than their names."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.listed = list(self.network.parameters())

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + sum(p.square().sum() for p in self.listed) / 2


class ClampsData(Classifier):
    def on_train_epoch_end(self) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.2, 0.2)


class Cools(Classifier):
    """Changes a buffer that is not saved."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_buffer("temperature", torch.ones(()).double(), persistent=False)

    def on_train_epoch_start(self) -> None:
        self.temperature.fill_(0.5**self.current_epoch)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]) / self.temperature, batch[1])


class PullsSmallBatches(ClientMethod):
    averages_samples = False

    def loss(self, c: LocalClient, batch: Any) -> Tensor:
        loss = c.task_loss(batch)
        if c.anchor is None or len(batch[1]) >= 4:
            return loss
        return loss + sum((w - c.anchor[name]).square().sum() for name, w in c.weights.items()) / 2


def distance(one: Tensor, other: Tensor) -> Tensor:
    return (one - other).square().sum()


with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)
    scripted_distance = torch.jit.script(distance)


class Scripted(ClientMethod):
    def penalty(self, c: LocalClient) -> Any:
        if c.anchor is None:
            return None
        return sum(scripted_distance(w, c.anchor[name]) for name, w in c.weights.items())


class CountsSteps(ClientMethod):
    def loss(self, c: LocalClient, batch: Any) -> Tensor:
        return c.task_loss(batch) * (1 + c.num_steps)


class FailsAlone(ClientMethod):
    def loss(self, c: LocalClient, batch: Any) -> Tensor:
        if c.anchor is None:
            raise ValueError("no anchor")
        return c.task_loss(batch)


class Thaws(Classifier):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.network[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.network[0].requires_grad_(self.current_epoch == 1)
        self.network[2].requires_grad_(self.current_epoch != 1)

    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), lr=0.1)


class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, FEATURES) / 3)
        self.again = self.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + F.linear(x, self.again) / 2


class AddsForFew(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(FEATURES, CLASSES)
        self.seldom = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.always(x) + (self.seldom(x) if len(x) < 3 else 0)


class ShortensRows(nn.Module):
    """Bounds its table in place, as it looks into it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 4, max_norm=3.0)
        self.output = nn.Linear(4 * FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.table((x > 0).long()).flatten(1))


class MeasuresOneHot(Classifier):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), F.one_hot(y, CLASSES).to(x))


class ByNumPy(Classifier):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * float(batch[0].numpy().mean())


class Masks(Classifier):
    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0])[batch[1] > 0], batch[1][batch[1] > 0])


class Ends(Classifier):
    """Trains on nothing after its first batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx else self.loss(batch)


class AsksForTheIndex(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * (2 if batch_idx == 3 else 1)


def is_rare(x: Tensor) -> Tensor:
    """Return which samples ``[n]`` are of a kind that few clients have."""
    return x[:, 0] > 2.5


class SkipsRareSamples(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if is_rare(batch[0]).any() else super().training_step(batch, batch_idx)


class RaisesAtRareSamples(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if is_rare(batch[0]).any():
            raise ValueError("a broken sensor")
        return super().training_step(batch, batch_idx)


class WeighsRareSamples(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        losses = F.cross_entropy(self(x), y, reduction="none")
        return torch.where(is_rare(x), 5 * losses, losses).mean()


class WeighsThemByItself(Classifier):
    """Has losses of samples, too, but its step is another one."""

    def sample_losses(self, batch: Any) -> Tensor:
        return super().sample_losses(batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * (1 + is_rare(batch[0]).sum())


class ScalesItsLoss(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss + loss.square() / 2


class HasNoLoss(L.LightningModule):
    """Is no task: all that it has is a training step."""

    def __init__(self, network: nn.Module, num_classes: int, optimizer: Any) -> None:
        super().__init__()
        self.network, self.num_classes, self.optimizer = network, num_classes, optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.network(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


class Mixes(Classifier):
    """Draws numbers in its training step alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        noise = torch.rand(()).item()
        return self.loss(batch) * (1 if noise < 1 else 2)


class LogsMore(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log_dict({"train/loss": loss, "train/size": float(len(batch[1]))})
        return loss


class LogsItsLoss(Classifier):
    """Is its loss in all that its training step gives and logs."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        loss = self.loss(batch)
        self.log("own/loss", loss)
        return {"loss": loss}


class Declares(Classifier):
    vectorizable = False


class Count:
    calls = 0


class CountsInAnObject(Classifier):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.count = Count()

    def loss(self, batch: Any) -> Tensor:
        self.count.calls += 1
        return super().loss(batch) * self.count.calls


class CountsInItsClass(Classifier):
    calls = 0

    def loss(self, batch: Any) -> Tensor:
        type(self).calls += 1
        return super().loss(batch) * (1 + self.calls // 10_000)


class CountsInAnother(Classifier):
    def loss(self, batch: Any) -> Tensor:
        Count.calls += 1
        return super().loss(batch) * (1 + Count.calls // 10_000)


CALLS = [0]


class CountsInAGlobal(Classifier):
    def loss(self, batch: Any) -> Tensor:
        CALLS[0] += 1
        return super().loss(batch) * (1 + CALLS[0] // 10_000)


class CountsDeep(Classifier):
    """Counts where nobody looks, and cools slowly."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.counts = [[0]]

    def loss(self, batch: Any) -> Tensor:
        self.counts[0][0] += 1
        return super().loss(batch) * 0.999 ** self.counts[0][0]


CLIENTS = {
    "keeps a list": (KeepsAList, "other results than one alone"),
    "clamps data": (ClampsData, "it has on_train_epoch_end of its own"),
    "cools": (Cools, "it has on_train_epoch_start of its own"),
    "pulls small batches": (PullsSmallBatches, None),
    "scripted": (Scripted, None),
    "counts steps": (CountsSteps, None),
    "fails alone": (FailsAlone, "a client alone fails: no anchor"),
    "thaws": (Thaws, "it has on_train_epoch_start of its own"),
    "two names": (TwoNames, None),
    "shortens rows": (ShortensRows, "changes the parameter network.table.weight in place"),
    "measures one-hot": (MeasuresOneHot, "it branches on values or takes a number out of a tensor"),
    "by numpy": (ByNumPy, "it takes values out of a tensor"),
    "masks": (Masks, "it makes tensors whose shape depends on values"),
    "adds for few": (AddsForFew, "network.seldom.bias has a gradient depends on the size"),
    "ends": (Ends, "its training_step returned no loss"),
    "asks for the index": (AsksForTheIndex, "its training_step asks for batch_idx"),
    "skips rare samples": (SkipsRareSamples, "it branches on values"),
    "raises at rare samples": (RaisesAtRareSamples, "it branches on values"),
    "weighs rare samples": (WeighsRareSamples, None),
    "weighs them by itself": (WeighsThemByItself, None),
    "scales its loss": (ScalesItsLoss, None),
    "has no loss": (HasNoLoss, None),
    "mixes": (Mixes, "it draws random numbers while it trains"),
    "logs more": (LogsMore, "it logs 'train/size' while it trains, beside its loss"),
    "logs its loss": (LogsItsLoss, None),
    "declares": (Declares, "it says that it is not vectorizable"),
    "counts in an object": (CountsInAnObject, "it sets attributes of itself while it trains"),
    "counts in its class": (CountsInItsClass, "it sets attributes of itself while it trains"),
    "counts in another": (CountsInAnother, "it sets attributes of itself while it trains"),
    "counts in a global": (CountsInAGlobal, "it sets attributes of itself while it trains"),
    "counts deep": (CountsDeep, "numbers of the module's own that change from call to call"),
}


def client_of(kind: type) -> Classifier:
    if issubclass(kind, nn.Module) and not issubclass(kind, L.LightningModule):
        return Classifier(kind(), CLASSES, sgd(0.1)).double()
    made: Any = kind if issubclass(kind, L.LightningModule) else Classifier
    client = made(network(), CLASSES, sgd(0.1))
    if issubclass(kind, ClientMethod):
        client.client_method = kind()
    return client.double()


@pytest.mark.parametrize(("kind", "reason"), CLIENTS.values(), ids=CLIENTS)
@pytest.mark.long
def test_both_engines_agree(
    kind: type, reason: str | None, recwarn: pytest.WarningsRecorder
) -> None:
    client = client_of(kind)
    train = [samples(count, seed, dtype=torch.float64) for seed, count in enumerate(COUNTS)]
    data = TensorClients(train, num_classes=CLASSES, batch_size=4, cohort_size=4)
    fit = partial(run, client, data, rounds=4, local_epochs=3)
    alone = fit(engine="sequential")
    recwarn.clear()
    stacked = fit(engine="vectorized")
    said = [text for text in map(str, (w.message for w in recwarn)) if "can't be stacked" in text]
    assert len(said) == (reason is not None)
    assert reason is None or reason in said[0]
    for left, right in zip(alone.server_states(), stacked.server_states(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)


class RestsItsNorm(Dane):
    def phases(self, module: Any, epochs: int, anchored: bool) -> list[Phase]:
        names = [name for name, _ in module.named_parameters() if not name.startswith("network.1")]
        return [Phase(0, epochs, names)]


def test_a_record_is_of_one_mode() -> None:
    """Gradients at the start are of modules that train, those of the epochs of one that rests."""
    layers = nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)
    client = Classifier(nn.Sequential(*layers), CLASSES, sgd(0.1)).double()
    client.client_method = RestsItsNorm()
    train = [samples(8, seed, dtype=torch.float64) for seed in range(4)]
    data = TensorClients(train, num_classes=CLASSES, batch_size=None, cohort_size=1)
    states = []
    for engine in ("sequential", "vectorized"):
        callback = FedDANE(same_set=True)
        callback.client_method = client.client_method
        federation = run(client, data, callback, rounds=14, engine=engine, clients_at_once=1)
        states.append(federation.server_states()[0])
    torch.testing.assert_close(*states)
    assert federation.clients.attached_engine.obstacle is None


class LeavesALayerOut(Classifier):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.beside = nn.Linear(2, 2)


def test_a_parameter_that_trains_from_the_second_participation_on() -> None:
    """By its memory alone: only from then on weight decay shrinks it."""
    client = LeavesALayerOut(network(), CLASSES, sgd(0.1, weight_decay=0.1)).double()
    data = small_data(cohort_size=4, dtype=torch.float64)
    alone = run(client, data, FedEC(constraint="l2"), 4, engine="sequential")
    with pytest.warns(UserWarning, match="beside.bias has a gradient depends on earlier particip"):
        stacked = run(client, data, FedEC(constraint="l2"), 4, engine="vectorized")
    for left, right in zip(alone.server_states(), stacked.server_states(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)
    assert not alone.server_states()[0]["beside.bias"].equal(client.beside.bias)


# What is found out later


class Turns(Classifier):
    """Changes its loss after so many calls, which it counts where nobody looks."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.counts = [[0]]

    def loss(self, batch: Any) -> Tensor:
        self.counts[0][0] += 1
        return super().loss(batch) * (2 if self.counts[0][0] > 14 else 1)


def same_sizes() -> TensorClients:
    train = [samples(8, seed, dtype=torch.float64) for seed in range(4)]
    return TensorClients(train, num_classes=CLASSES, batch_size=None, cohort_size=4)


@pytest.mark.short("FedAvg")
@pytest.mark.parametrize("callback", [FedAvg, FedSGD])
def test_a_module_that_changes_from_call_to_call_stops_the_run(callback: Any) -> None:
    rounds: list[int] = []

    class Counted(callback):
        def round(self, cohort: Tensor) -> None:
            rounds.append(len(rounds))
            super().round(cohort)

    match = r"a Turns that trained together .* Results so far are wrong: .*engine='sequential'"
    with pytest.raises(ConfigurationError, match=match) as raised:
        run(client_of(Turns), same_sizes(), Counted(), rounds=40, engine="vectorized")
    assert str(raised.value).startswith(f"round {rounds[-1]}: ")
    assert rounds[-1] in (3, 7, 15)
    run(client_of(Turns), same_sizes(), callback(), rounds=20, engine="sequential")


def test_stacks_of_one_are_audited_too() -> None:
    with pytest.raises(ConfigurationError, match="Results so far are wrong"):
        run(client_of(Turns), same_sizes(), rounds=40, engine="vectorized", clients_at_once=1)


@pytest.mark.parametrize("at_once", [1, 4])
def test_a_single_client_next_to_a_kink_stops_no_run(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[bool] = []

    def contradicts(*_: Any) -> bool:
        answers.append(not answers)
        return answers[-1]

    monkeypatch.setattr(Audit, "contradicts", contradicts)
    client = client_of(Classifier)
    run(client, same_sizes(), rounds=1, engine="vectorized", clients_at_once=at_once)
    assert answers == [True, False]


def test_clients_are_audited_in_rounds_of_powers_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    audited: list[list[Tensor]] = []
    contradicts = Audit.contradicts

    def noted(self: Audit, state: Any, leaves: list[Tensor], *found: Any) -> bool:
        audited.append(leaves)
        return contradicts(self, state, leaves, *found)

    monkeypatch.setattr(Audit, "contradicts", noted)
    data = TensorClients(
        [samples(count, seed, dtype=torch.float64) for seed, count in enumerate(COUNTS)],
        num_classes=CLASSES,
        batch_size=4,
        cohort_size=4,
    )
    run(client_of(Classifier), data, rounds=9, local_epochs=2, engine="vectorized")
    assert len(audited) == 4  # in rounds 0, 1, 3 and 7
    assert all(len(leaves[1]) <= 4 for leaves in audited)


HALVES = {
    "Ditto": lambda: Ditto(lam=0.5),
    "APFL": lambda: APFL(alpha=0.3, alpha_lr=0.1),
    "pFedMe": lambda: PFedMe(lam=5.0, personal_steps=2),
    "Per-FedAvg": lambda: PerFedAvg(alpha=0.1, hessian=True),
    "SCAFFOLD": lambda: SCAFFOLD(option="I"),
    "FedEC": lambda: FedEC(0.5),
    "FedRep": lambda: FedRep(head_epochs=1),
    "FedDANE": lambda: FedDANE(mu=0.3),
}


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.long
def test_halves_pass_every_audit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at every step of every chunk, and in single precision."""
    monkeypatch.setattr("pflight.engines.stacked.audit._ODD", 1e-3)
    in_step = StackedTraining._gradients

    def audited(self: StackedTraining, *args: Any, **options: Any) -> Any:
        self.audit.due = True
        return in_step(self, *args[:4], **{**options, "last": True})

    monkeypatch.setattr(StackedTraining, "_gradients", audited)
    client = batchnorm_client(optimizer=sgd(0.1, momentum=0.5 * (name != "SCAFFOLD")))
    federation = run(
        client,
        small_data(cohort_size=4),
        HALVES[name](),
        rounds=3,
        local_epochs=2,
        finetune_epochs=int(name in ("FedRep", "FedDANE")),
        engine="vectorized",
    )
    assert federation.clients.attached_engine.obstacle is None
    assert not any(entry.failed for entry in federation.history)


# Embeddings


def words(*unknown: int) -> list[tuple[Tensor, Tensor]]:
    """Return five clients of indices below 10, of which the second has others too."""
    random = torch.Generator().manual_seed(0)
    clients = [
        (torch.randint(10, (6, 3), generator=random), torch.arange(6) % CLASSES) for _ in range(5)
    ]
    for place, index in enumerate(unknown):
        clients[1][0][place, 0] = index
    return clients


def word_client() -> Classifier:
    torch.manual_seed(0)
    layers = nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, CLASSES)
    return Classifier(nn.Sequential(*layers), CLASSES, sgd(0.1)).double()


@pytest.mark.parametrize("index", [10, -1, 49])
@pytest.mark.filterwarnings("ignore:.*round .*failed:UserWarning")
def test_an_index_outside_of_its_table_is_its_clients_failure(index: int) -> None:
    """Where tables are stacked, it lies in that of another client."""
    data = TensorClients(words(index), num_classes=CLASSES, batch_size=3)
    stacked = run(word_client(), data, Local(), engine="vectorized", clients_at_once=5)
    assert stacked.history[0].failed == [1]
    sound = TensorClients(words(), num_classes=CLASSES, batch_size=3)
    others = run(word_client(), sound, Local(), engine="sequential")
    for client in (0, 2, 3, 4):
        torch.testing.assert_close(stacked.client_state(client), others.client_state(client))
    with pytest.raises(ClientError, match="client 1 failed: IndexError"):
        run(word_client(), data, engine="vectorized", on_client_error="raise")


@ENGINES
@pytest.mark.parametrize("callback", [FedAvg, Local])
def test_an_index_outside_of_its_table_is_its_clients_failure_in_evaluation(
    engine: str, callback: Callable[..., Any]
) -> None:
    data = TensorClients(words(), test=words(12), num_classes=CLASSES)
    federation = Federation(word_client(), engine=engine)
    trainer = quiet_trainer(1, callback())
    trainer.fit(federation, datamodule=data)
    with pytest.warns(UserWarning, match="client 1 failed on its test samples: IndexError: "):
        trainer.test(federation, datamodule=data, verbose=False)
    assert federation.client_metrics()["num_samples"].tolist() == [6, 0, 6, 6, 6]

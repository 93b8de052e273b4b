"""Any LightningModule is a client: its own steps, hooks, optimizers, batches and metrics."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import MeanAbsoluteError, MeanSquaredError, R2Score
from torchmetrics.classification import BinaryJaccardIndex
from torchmetrics.text import Perplexity

from pflight import ClientError, ConfigurationError, Federation
from pflight.callbacks import (
    APFL,
    IFCA,
    MOON,
    SCAFFOLD,
    Ditto,
    FedALA,
    FedAvg,
    FedCP,
    FedDANE,
    FedEC,
    FedFomo,
    FedProx,
    FedSGD,
    FeSEM,
    Local,
    PerFedAvg,
    PFedLA,
    PFedMe,
    Reptile,
    ServerCallback,
)
from pflight.datamodules import DatasetClients, FederatedDataModule
from pflight.models import Classifier, ElasticClient, ProximalClient
from tests.runs import assert_same, batchnorm_client, quiet_trainer, run, sgd, small_data

COUNTS = (9, 14, 6, 11)


class Regression(L.LightningModule):
    """A module of somebody who has never heard of federations."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
        self.mae, self.r2 = MeanAbsoluteError(), R2Score()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        predicted = self.net(x)
        self.mae(predicted, y)
        self.r2(predicted, y)
        self.log("val/mae", self.mae)
        self.log("val/r2", self.r2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def table(count: int, seed: int) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=random)
    return TensorDataset(x, x[:, :1] - 0.5 * x[:, 1:2] + seed % 5)


def hospitals(counts: Sequence[int] = COUNTS, **options: Any) -> DatasetClients:
    train = [table(count, client) for client, count in enumerate(counts)]
    val = [table(5 + client, 100 + client) for client in range(len(counts))]
    return DatasetClients(train, val=val, test=val, **{"batch_size": 4, **options})


def regression(**options: Any) -> Regression:
    torch.manual_seed(3)
    return Regression(**options)


METHODS = [
    FedAvg(),
    FedProx(0.1),
    FeSEM(2),
    PFedLA(),
    Reptile(),
    Local(),
    Ditto(lam=0.1),
    FedEC(constraint="l2", alpha=0.1),
    APFL(alpha=0.5, alpha_lr=0.01),
    PFedMe(lam=5.0),
    PerFedAvg(alpha=0.01),
    SCAFFOLD(),
    FedDANE(mu=0.1),
]


@pytest.mark.short("FeSEM", "PFedLA", "PFedMe", "FedDANE")
@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_a_module_of_ones_own_is_trained_by_any_method(method: ServerCallback, tmp_path) -> None:
    best = ModelCheckpoint(tmp_path, monitor="val/macro_mae", mode="min")
    stop = EarlyStopping("val/macro_mae", mode="min", patience=3)
    federation = run(regression(), hospitals(), copy.deepcopy(method), 5, best, stop)
    first, last = (federation.history[place].metrics["val/macro_mae"] for place in (0, -1))
    assert last < first
    assert float(best.best_model_score) == pytest.approx(
        min(entry.metrics["val/macro_mae"] for entry in federation.history)
    )


@pytest.mark.short("FedAvg", "Ditto", "PerFedAvg")
@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_resumed_is_uninterrupted(method: ServerCallback, tmp_path) -> None:
    def fit(rounds: int, **options: Any) -> Federation:
        data = hospitals(cohort_size=3)
        return run(regression(), data, copy.deepcopy(method), rounds, **options)

    fit(2).trainer.save_checkpoint(tmp_path / "half.ckpt")
    torch.load(tmp_path / "half.ckpt", weights_only=True)
    resumed, whole = fit(4, ckpt_path=tmp_path / "half.ckpt"), fit(4)
    for client in range(4):
        assert_same(resumed.client_state(client), whole.client_state(client))


def as_alone(module: L.LightningModule, data: DatasetClients) -> dict[str, Tensor]:
    """Train a module under a stock Trainer, on the batches of client 0 in round 0."""
    dataset = data.datasets["train"][0]
    batches = [dataset[part] for part in data.order(0, 0, 0).split(data.batch_size)]
    loader = DataLoader(batches, batch_size=None)
    quiet_trainer(limit_val_batches=0, num_sanity_val_steps=0).fit(module, loader)
    return dict(module.state_dict())


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`:UserWarning")
def test_one_client_with_all_data_is_plain_training() -> None:
    data, module = hospitals([17]), regression()
    module.net[2].p = 0.0  # whose draws are keyed by the client
    inside = run(module, data, FedAvg()).server_states()[0]
    torch.testing.assert_close(inside, as_alone(module, data))  # a mean of one rounds


def test_its_own_metrics_are_those_of_torchmetrics_on_each_client_alone() -> None:
    data = hospitals()
    federation = run(regression(), data, FedAvg(), 2)
    federation.trainer.validate(federation, datamodule=data, verbose=False)
    values = federation.client_metrics("val")
    for client in range(4):
        module = federation.client_module(client).eval()
        x, y = data.datasets["val"][client].tensors
        with torch.no_grad():
            expected = MeanAbsoluteError()(module.net(x), y), R2Score()(module.net(x), y)
        assert values["mae"][client] == pytest.approx(float(expected[0]), rel=1e-5)
        assert values["r2"][client] == pytest.approx(float(expected[1]), rel=1e-4, abs=1e-5)
    counts = torch.tensor([5, 6, 7, 8]).double()
    metrics = federation.trainer.callback_metrics
    assert metrics["val/macro_mae"] == pytest.approx(float(values["mae"].mean()))
    micro = float((counts * values["mae"]).sum() / counts.sum())
    assert metrics["val/micro_mae"] == pytest.approx(micro)
    assert metrics["val/mae"] == metrics["val/micro_mae"]
    assert metrics["val/worst_decile_mae"] == pytest.approx(float(values["mae"].max()))
    assert metrics["val/worst_decile_r2"] == pytest.approx(float(values["r2"].min()))


def test_fedprox_without_a_pull_is_fedavg_and_with_a_strong_one_stays() -> None:
    plain = run(regression(), hospitals(), FedAvg(), 2)
    assert_same(
        run(regression(), hospitals(), FedProx(0.0), 2).server_states()[0],
        plain.server_states()[0],
    )
    start = regression().state_dict()

    def moved(federation: Federation) -> float:
        state = federation.server_states()[0]
        return sum(float((state[name] - start[name]).square().sum()) for name in start)

    assert moved(run(regression(), hospitals(), FedProx(10.0), 2)) < moved(plain) / 2


class Sequences(Dataset):
    """Token sequences of unequal length."""

    def __init__(self, count: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, 7, (count,), generator=random).tolist()
        self.items = [torch.randint(1, 9, (n,), generator=random) for n in lengths]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self.items[index]
        return {"input_ids": tokens, "labels": int(tokens.sum()) % 2}


def padded(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence([s["input_ids"] for s in samples], batch_first=True)
    labels = torch.tensor([s["labels"] for s in samples])
    return {"input_ids": ids, "mask": ids > 0, "labels": labels}


class LSTMText(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(9, 6), nn.LSTM(6, 6, batch_first=True)
        self.head = nn.Linear(6, 2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        hidden, _ = self.lstm(self.embed(batch["input_ids"]))
        last = batch["mask"].sum(1) - 1
        return self.head(hidden[torch.arange(len(last)), last])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self(batch), batch["labels"])}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits = self(batch)
        accuracy = (logits.argmax(1) == batch["labels"]).float().mean()
        self.log_dict({"val_acc": accuracy, "val_loss": F.cross_entropy(logits, batch["labels"])})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class TransformerText(LSTMText):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        mask = batch["mask"]
        hidden = self.lstm(self.embed(batch["input_ids"]), src_key_padding_mask=~mask)
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.head(mean)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("kind", [LSTMText, TransformerText])
def test_dicts_of_padded_sequences(kind: type[LSTMText]) -> None:
    torch.manual_seed(0)
    train, val = ([Sequences(n, s + n) for n in (7, 9, 5)] for s in (0, 50))
    data = DatasetClients(train, val=val, batch_size=3, collate_fn=padded)
    federation = run(kind(), data, FedAvg(), 2, local_epochs=2)
    values = federation.client_metrics("val")
    for client in range(3):
        module = federation.client_module(client).eval()
        batch = padded([val[client][i] for i in range(len(val[client]))])
        with torch.no_grad():
            hits = (module(batch).argmax(1) == batch["labels"]).float().mean()
        assert values["acc"][client] == pytest.approx(float(hits), abs=1e-6)
    assert federation.history[-1].metrics["val/macro_loss"] > 0


class FrozenBackbone(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.5))
        self.backbone.requires_grad_(False)
        self.head = nn.Linear(5, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert not self.backbone.training
        return F.mse_loss(self.head(self.backbone(batch[0])), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/mse", F.mse_loss(self.head(self.backbone(batch[0])), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


def test_of_a_frozen_backbone_nothing_travels_and_nothing_drifts() -> None:
    torch.manual_seed(0)
    module = FrozenBackbone()
    federation = run(module, hospitals(), FedAvg(), 2)
    assert federation.history[0].bytes_up == 4 * 6 * 4  # clients, numbers of a head, bytes
    assert federation.history[0].bytes_down == 4 * 6 * 4
    state = federation.client_state(0)
    before = module.state_dict()
    for name in before:
        assert torch.equal(state[name], before[name]) == name.startswith("backbone")


def test_what_is_frozen_rests_too_while_weights_of_a_mixture_are_learned() -> None:
    federation = run(FrozenBackbone(), hospitals(), FedALA(), 2, on_client_error="raise")
    assert federation.history[-1].metrics["val/macro_mse"] > 0


@pytest.mark.parametrize("method", [FedAvg(), Ditto(lam=0.1), Local()], ids=lambda m: str(type(m)))
def test_clients_share_the_tensors_of_a_frozen_backbone(method: ServerCallback) -> None:
    torch.manual_seed(0)
    federation = Federation(FrozenBackbone())
    shared: list[bool] = []

    def note(updates: Any) -> None:
        for name, tensor in federation.server.expand(0, federation.layout.frozen, 1).items():
            shared.append(updates.states[name].data_ptr() == tensor.data_ptr())

    federation.clients.on_updates.append(note)
    quiet_trainer(2, copy.deepcopy(method)).fit(federation, datamodule=hospitals())
    assert shared
    assert all(shared)
    assert not set(federation.layout.frozen).intersection(federation.server_callback.private)


class Pretrained(FrozenBackbone):
    """Loads what it builds upon as Lightning has it, before it trains."""

    def prepare_data(self) -> None:
        self.pretrained = torch.eye(5, 3)

    def setup(self, stage: str) -> None:
        assert stage == "fit"
        self.backbone = nn.Linear(3, 5, bias=False).requires_grad_(False)
        self.backbone.weight.copy_(self.pretrained)


def test_a_module_is_set_up_once_and_before_its_state_is_looked_at() -> None:
    given = Pretrained()
    federation = run(given, hospitals(), FedAvg())
    assert torch.equal(federation.client_state(1)["backbone.weight"], torch.eye(5, 3))
    assert not hasattr(given, "pretrained")


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
def test_a_hook_that_no_client_calls_is_named() -> None:
    class Closing(Regression):
        def teardown(self, stage: str) -> None:
            """Close what setup() has opened."""

    with pytest.warns(UserWarning, match=r"Closing.teardown is ignored: the module is set up once"):
        run(Closing(), hospitals(), FedAvg())


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
def test_loaders_of_a_module_are_named() -> None:
    class Loading(Regression):
        def train_dataloader(self) -> Any:
            raise AssertionError("it is never asked")

    with pytest.warns(UserWarning, match=r"Loading.train_dataloader is ignored: the data module"):
        run(Loading(), hospitals(), FedAvg())


class Drifting(Regression):
    """Follows its own weights with a frozen layer, which its loss looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(3, 8).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.slow.weight.lerp_(self.net[0].weight, 0.5)
        apart = F.mse_loss(self.net[0](batch[0]), self.slow(batch[0]))
        return super().training_step(batch, batch_idx) + apart


@pytest.mark.filterwarnings("ignore:training changed the frozen")
@pytest.mark.parametrize("method", [Local(), Ditto(lam=0.1)], ids=["shared", "personal"])
def test_what_training_changes_of_the_frozen_never_reaches_the_next(method: ServerCallback) -> None:
    def fit(counts: Sequence[int]) -> Federation:
        torch.manual_seed(3)
        return run(Drifting(), hospitals(counts), copy.deepcopy(method))

    assert_same(fit([0, 14]).client_state(1), fit([9, 14]).client_state(1))


class Tallying(Regression):
    """Counts its training steps in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("method", [MOON(), FedCP()], ids=["MOON", "FedCP"])
def test_what_a_step_with_the_sent_model_counts_is_forgotten(method: ServerCallback) -> None:
    federation = run(Tallying(), hospitals([8, 8, 8]), method, 2)
    assert federation.server_states()[0]["steps"] == 4


class Versioned(Regression):
    """Has extra state that is no tensor, and saves nothing of a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(3, 3).requires_grad_(False)

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 1}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if "backbone" not in name}


@pytest.mark.parametrize("method", [FedAvg(), PFedMe(lam=5.0)], ids=["FedAvg", "pFedMe"])
def test_extra_state_and_what_is_not_saved_stay_with_the_module(method: ServerCallback) -> None:
    given = Versioned()
    federation = run(given, hospitals(), method)
    trained = federation.client_module(0)
    assert_same(trained.net.state_dict(prefix="net."), federation.client_state(0))
    assert_same(trained.backbone.state_dict(), given.backbone.state_dict())


class Leaky(Regression):
    """Keeps whatever it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.average: dict[str, Tensor] = {}
        self.register_buffer("steps", torch.zeros(()), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch_idx)
        self.steps += 1
        self.average["w"] = self.net[0].weight.detach().clone()
        return super().training_step(batch, batch_idx) * len(self.seen) * self.steps


def test_nothing_of_one_client_reaches_the_next() -> None:
    torch.manual_seed(3)
    module = Leaky()
    everyone = run(module, hospitals(), Local())
    assert not module.seen
    for client in (1, 3):
        torch.manual_seed(3)
        alone = run(
            Leaky(), hospitals([1] * client + [COUNTS[client]] + [1] * (3 - client)), Local()
        )
        assert_same(alone.client_state(client), everyone.client_state(client))


class Measures(Regression):
    """Logs objects of its training, and numbers of its epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.forwarded, self.updated, self.own = (MeanSquaredError(False) for _ in range(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        predicted = self.net(x)
        self.forwarded(predicted, y)
        self.updated.update(predicted, y)
        self.own.update(predicted.detach(), y)
        self.log("train/forwarded", self.forwarded)
        self.log("train/updated", self.updated, on_step=False, on_epoch=True)
        return F.mse_loss(predicted, y)

    def on_train_epoch_end(self) -> None:
        found, count = self.own.compute(), float(self.own.total)
        COMPUTED.append((float(found), count))
        self.own.reset()
        self.log("train/own", found)
        self.log("train/count", count)


COMPUTED: list[tuple[float, float]] = []


@pytest.mark.parametrize("local_epochs", [1, 2])
def test_metric_objects_of_the_training_are_of_whole_epochs(local_epochs: int) -> None:
    COMPUTED.clear()
    torch.manual_seed(3)
    federation = run(Measures(), hospitals(), FedAvg(), local_epochs=local_epochs)
    assert {count for _, count in COMPUTED} == {float(count) for count in COUNTS}
    values, counts = torch.tensor(COMPUTED).T
    right = float((values * counts).sum() / counts.sum())
    (entry,) = federation.history
    for name in ("forwarded", "updated", "own"):
        assert entry.metrics[f"train/{name}"] == pytest.approx(right, rel=1e-5)
    assert entry.metrics["train/count"] == pytest.approx(float((counts**2).sum() / counts.sum()))


class Talkative(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        warnings.warn("an odd batch", stacklevel=1)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        warnings.warn("an odd sample", stacklevel=1)
        super().validation_step(batch, batch_idx)


def test_what_a_module_warns_of_is_said_once_and_not_for_every_client() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        run(Talkative(), hospitals(), FedAvg(), rounds=2)
    said = [str(warning.message) for warning in caught]
    assert [said.count(what) for what in ("an odd batch", "an odd sample")] == [1, 1]


class GAN(L.LightningModule):
    """Two optimizers, by hand, with a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(2, 3), nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        generator, critic = self.optimizers()
        noise = torch.ones(len(real), 2)
        self.toggle_optimizer(critic)
        loss = F.softplus(self.critic(self.generator(noise))).mean()
        loss = loss + F.softplus(-self.critic(real)).mean()
        critic.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(critic, 1.0, "norm")
        critic.step()
        self.untoggle_optimizer(critic)
        self.toggle_optimizer(generator)
        loss = F.softplus(-self.critic(self.generator(noise))).mean()
        generator.zero_grad()
        self.manual_backward(loss)
        generator.step()
        self.untoggle_optimizer(generator)
        self.log("train/generator", loss)
        if self.trainer.is_last_batch:
            for scheduler in self.lr_schedulers():
                scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.Adam(self.generator.parameters(), lr=0.01),
            torch.optim.Adam(self.critic.parameters(), lr=0.02),
        ]
        return optimizers, [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in optimizers]


@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_two_optimizers_by_hand(mu: float) -> None:
    """A penalty enters before each of their steps."""
    data = hospitals([12])
    torch.manual_seed(1)
    module = GAN()
    inside = run(module, data, FedProx(mu)).server_states()[0]
    alone = as_alone(module, data)
    if mu:
        assert (inside["critic.weight"] - alone["critic.weight"]).abs().max() > 1e-5
    else:
        torch.testing.assert_close(inside, alone)


class ByHand(Regression):
    """The same steps by hand, in one of the ways to take them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.way = way

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers(use_pl_optimizer=not self.way.startswith("bare"))

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(self.net(batch[0]), batch[1])
            self.manual_backward(loss)
            return loss

        if self.way == "closure":
            optimizer.step(closure=closure)
        elif self.way == "bare closure":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


@pytest.mark.short("step", "bare closure")
@pytest.mark.parametrize("way", ["step", "closure", "bare", "bare closure"])
def test_a_penalty_is_that_of_automatic_optimization(way: str) -> None:
    method = FeSEM(num_clusters=1, mu=5.0)
    torch.manual_seed(3)
    by_hand = run(ByHand(way), hospitals(), copy.deepcopy(method), 2)
    expected = run(regression(), hospitals(), copy.deepcopy(method), 2)
    torch.testing.assert_close(by_hand.server_states(), expected.server_states())


ASK_FOR_THE_LOSS = {
    "Ditto": Ditto(lam=0.1),
    "IFCA": IFCA(2),
    "IFCA, from the third round on": IFCA(2, group_rounds=2),
    "FedFomo": FedFomo(),
    "FedALA, from the second round on": FedALA(),
    "FedSGD": FedSGD(),
    "FedDANE": FedDANE(),
    "SCAFFOLD": SCAFFOLD(option="I"),
}


@pytest.mark.parametrize("name", ASK_FOR_THE_LOSS)
def test_what_needs_the_loss_itself_refuses_manual_optimization(name: str) -> None:
    rounds: list[int] = []
    count = LambdaCallback(on_train_epoch_end=lambda trainer, _: rounds.append(trainer.global_step))
    with pytest.raises(ConfigurationError, match="GAN with manual optimization does not hand out"):
        run(GAN(), hospitals(), copy.deepcopy(ASK_FOR_THE_LOSS[name]), 4, count)
    assert rounds == []


ELSEWHERE = [PFedMe(lam=5.0), PerFedAvg(), APFL(alpha_lr=0.01)]
"""Methods that take the loss at other weights, where nothing is logged."""


class Updates(Regression):
    """Counts with a metric, and follows with its learning rate what it logs while it trains."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        predicted = self.net(batch[0])
        self.mae.update(predicted, batch[1])
        loss = F.mse_loss(predicted, batch[1])
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return [optimizer], [{"scheduler": plateau, "monitor": "train/loss"}]


@pytest.mark.filterwarnings("ignore:.*Skipping learning rate update:RuntimeWarning")
@pytest.mark.parametrize("method", ELSEWHERE, ids=lambda method: type(method).__name__)
def test_metrics_and_schedules_rest_where_the_loss_is_taken_elsewhere(method) -> None:
    torch.manual_seed(3)
    updates = run(Updates(), hospitals(), copy.deepcopy(method))
    expected = run(regression(), hospitals(), copy.deepcopy(method))
    for client in range(4):
        assert_same(updates.client_state(client), expected.client_state(client))


class CountsBatches(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("method", ELSEWHERE, ids=lambda method: type(method).__name__)
def test_a_tensor_that_changes_beside_the_state_is_said_to(method) -> None:
    with pytest.raises(ClientError, match="changes a tensor in place that is not in its state_d"):
        run(CountsBatches(), hospitals(), copy.deepcopy(method), on_client_error="raise")


def test_what_is_logged_is_that_of_the_personal_model() -> None:
    class Constant(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("train/one", 1.0)
            return super().training_step(batch, batch_idx)

    federation = run(Constant(), hospitals(), Ditto(lam=0.1))
    assert federation.history[0].metrics["train/one"] == 1


class Rows(L.LightningModule):
    """Looks up a row of an embedding for each sample."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.rows = nn.Embedding(4, 1, sparse=sparse)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.rows((x[:, 0] > 0).long()), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("method", [FedAvg(), FedSGD(lr=0.1)], ids=lambda m: type(m).__name__)
def test_sparse_gradients_are_gradients(method: ServerCallback) -> None:
    dense, sparse = (run(Rows(s), hospitals(), copy.deepcopy(method), 2) for s in (False, True))
    torch.testing.assert_close(sparse.server_states(), dense.server_states())


class Scheduled(Regression):
    """Notes what its trainer says at each step, for all copies."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        trainer, rates = self.trainer, [g["lr"] for g in self.optimizers().param_groups]
        NOTES.append(
            (
                *(batch_idx, trainer.global_step, trainer.current_epoch, trainer.is_last_batch),
                *(trainer.fit_loop.batch_idx, trainer.num_training_batches, rates),
                *(float(value) for value in trainer.callback_metrics.values()),
            )
        )
        loss = super().training_step(batch, batch_idx)
        if self.kind == "LBFGS":
            return loss
        self.log("size", float(len(batch[0])), on_step=True, on_epoch=True)
        return None if batch_idx == 1 else {"loss": loss, "more": 1}

    def on_train_epoch_end(self) -> None:
        NOTES.append(sorted((n, float(v)) for n, v in self.trainer.callback_metrics.items()))

    def configure_optimizers(self) -> Any:
        if self.kind == "LBFGS":
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        schedulers = torch.optim.lr_scheduler
        if self.kind == "plateau":
            plateau = schedulers.ReduceLROnPlateau(optimizer, patience=0)
            monitored = {"scheduler": plateau, "monitor": "train/loss", "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": monitored}
        interval = {"scheduler": schedulers.ExponentialLR(optimizer, 0.5), "interval": self.kind}
        return [optimizer], [interval]


NOTES: list[Any] = []


class Hooked(Scheduled):
    """The same, with Lightning's own loop around its steps."""

    def on_train_batch_end(self, *_: Any) -> None:
        """Do nothing."""


@pytest.mark.short("epoch", "LBFGS")
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
@pytest.mark.parametrize("kind", ["step", "epoch", "plateau", "LBFGS"])
def test_steps_without_hooks_are_those_of_lightnings_loop(kind: str) -> None:
    found = []
    for module in (Scheduled, Hooked):
        NOTES.clear()
        torch.manual_seed(3)
        federation = run(module(kind), hospitals(), FedAvg(), 2, local_epochs=2)
        metrics = federation.history[-1].metrics
        found.append((federation.server_states()[0], NOTES.copy(), metrics))
    (state, notes, metrics), (expected, their_notes, their_metrics) = found
    assert_same(state, expected)
    assert notes == their_notes
    assert metrics == their_metrics
    assert len(notes) > 2 * 4 * 2


class Short(Regression):
    def training_step(self, batch: Any) -> Tensor:
        return super().training_step(batch, 0)


def test_a_training_step_need_not_take_the_index_of_its_batch() -> None:
    torch.manual_seed(3)
    state = run(Short(), hospitals(), FedAvg()).server_states()[0]
    assert_same(state, run(regression(), hospitals(), FedAvg()).server_states()[0])


class Predicts(Regression):
    """Predicts without the index, and with hooks."""

    validation_step = L.LightningModule.validation_step

    def on_predict_start(self) -> None:
        self.scale = 2.0

    def on_predict_batch_end(self, outputs: Tensor, batch: Any, batch_idx: int) -> None:
        outputs += batch_idx

    def predict_step(self, batch: Any) -> Tensor:
        assert not self.training
        return self.scale * self.net(batch[0])


def test_predictions_are_those_of_a_stock_trainer() -> None:
    data = hospitals(eval_batch_size=4)
    federation = run(Predicts(), data, FedAvg(), on_client_error="raise")
    chunks = federation.trainer.predict(federation, datamodule=data)
    predictions = dict(pair for chunk in chunks for pair in chunk)
    assert sorted(predictions) == [*range(4)]
    for client, given in predictions.items():
        loader = DataLoader(data.datasets["test"][client], 4)
        expected = quiet_trainer().predict(federation.client_module(client), loader)
        torch.testing.assert_close(given, expected)


class Segmenter(L.LightningModule):
    """Judged by an object that counts pixels, over batches of unequal size."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Conv2d(1, 1, 3, padding=1)
        self.iou = BinaryJaccardIndex()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.iou.update(self.net(batch[0]), batch[1])
        self.log("val/iou", self.iou)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class NextToken(L.LightningModule):
    """Judged by the perplexity of sequences of unequal length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(9, 6), nn.LSTM(6, 9, batch_first=True)
        self.perplexity = Perplexity(ignore_index=0)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lstm(self.embed(ids))[0]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        ids = batch["input_ids"]
        return F.cross_entropy(self(ids[:, :-1]).mT, ids[:, 1:], ignore_index=0)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        ids = batch["input_ids"]
        self.perplexity(self(ids[:, :-1]), ids[:, 1:])
        self.log("val/perplexity", self.perplexity)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def clinic(count: int, seed: int) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, 4, 4, generator=random)
    return TensorDataset(x, (x + seed / 2 > 0).float())


@pytest.mark.parametrize("method", [FedAvg(), Ditto(lam=0.1)], ids=lambda m: type(m).__name__)
def test_objects_are_those_of_torchmetrics_on_each_client_alone(method: ServerCallback) -> None:
    torch.manual_seed(0)
    clinics = [clinic(count, seed) for seed, count in enumerate((3, 7, 4))]
    data = DatasetClients(clinics, val=clinics, batch_size=4, eval_batch_size=3)
    federation = run(Segmenter(), data, copy.deepcopy(method), 2)
    texts = [Sequences(count, count) for count in (7, 4, 9)]
    read = DatasetClients(texts, val=texts, batch_size=4, eval_batch_size=3, collate_fn=padded)
    writers = run(NextToken(), read, copy.deepcopy(method), 2)
    for client in range(3):
        module = federation.client_module(client).eval()
        x, y = clinics[client].tensors
        ids = padded(list(texts[client]))["input_ids"]
        with torch.no_grad():
            iou = BinaryJaccardIndex()(module.net(x), y)
            logits = writers.client_module(client).eval()(ids[:, :-1])
        perplexity = Perplexity(ignore_index=0)(logits, ids[:, 1:])
        assert federation.client_metrics("val")["iou"][client] == pytest.approx(float(iou))
        values = writers.client_metrics("val")["perplexity"]
        assert values[client] == pytest.approx(float(perplexity), rel=1e-5)


class Own(Regression):
    def __init__(self, original: list[Regression], closure: bool) -> None:
        super().__init__()
        self.original, self.closure = original, closure

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(OTHERS.parameters(), lr=0.1)


OTHERS = nn.Linear(3, 1)


def test_an_optimizer_of_other_tensors_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="not the module's own"):
        run(Own([], False), hospitals(), FedAvg())


@pytest.mark.filterwarnings("ignore:round .*failed:UserWarning")
def test_a_loss_of_the_original_module_fails() -> None:
    module = regression()
    original = module.net

    class Closure(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.mse_loss(original(batch[0]), batch[1])

    with pytest.raises(ClientError, match="all 4 trainings of clients failed"):
        run(Closure(), hospitals(), FedAvg())


class Shorthand(Regression):
    """Calls something else its loss, and asks for no index."""

    def loss(self, predicted: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(predicted, y)

    def training_step(self, batch: Any) -> Tensor:
        return self.loss(self.net(batch[0]), batch[1])


class Longhand(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])


@pytest.mark.parametrize(
    "method",
    [APFL(alpha=0.5), PerFedAvg(alpha=0.01), IFCA(2), FedFomo(), FedDANE(mu=0.1)],
    ids=lambda m: type(m).__name__,
)
def test_what_asks_for_the_loss_takes_that_of_the_training_step(method: ServerCallback) -> None:
    made = []
    for kind in (Shorthand, Longhand):
        torch.manual_seed(3)
        made.append(run(kind(), hospitals(), copy.deepcopy(method), 2, on_client_error="raise"))
    for client in range(4):
        assert_same(made[0].client_state(client), made[1].client_state(client))


class Silent(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log nothing."""


def test_a_module_that_logs_nothing_is_told_what_to_log() -> None:
    with pytest.raises(ConfigurationError, match=r"call self\.log"):
        run(Silent(), hospitals(), FedAvg())


class Sometimes(Regression):
    """Logs a value of its own for some clients alone, under a name with slashes; NaN for one."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        count = len(batch[0])
        self.log("val/size", float(count))
        if count > 2:
            self.log("val/head/size", float(count))
        self.log("val/odd", float("nan") if count == 1 else 1.0)


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
def test_values_that_some_clients_lack() -> None:
    train = [table(4, client) for client in range(4)]
    val = [table(count, 9) for count in (1, 0, 3, 4)]
    with pytest.warns(UserWarning, match="val/odd of client 0 is undefined, NaN or"):
        federation = run(Sometimes(), DatasetClients(train, val=val, batch_size=4), FedAvg())
    metrics = federation.history[-1].metrics
    assert metrics["val/macro_size"] == pytest.approx(8 / 3)
    assert metrics["val/macro_head/size"] == pytest.approx(3.5)
    assert metrics["val/micro_head/size"] == pytest.approx((9 + 16) / 7)
    assert metrics["val/macro_odd"] == 1.0
    values = federation.client_metrics("val")
    assert values["num_samples"].tolist() == [1, 0, 3, 4]
    assert values["head/size"].isnan().tolist() == [True, True, False, False]


class Overflowing(Regression):
    """Logs values that are infinite from the second round on."""

    factor = 1.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/mae", self.factor)
        self.log("val/count", float(len(batch[0])))


class Overflow(L.Callback):
    def on_validation_end(self, *_: Any) -> None:
        Overflowing.factor = float("inf")


@pytest.mark.filterwarnings("ignore:round 1. val/mae of client 0 and 3 others is undefined")
def test_a_metric_that_no_client_has_any_more_is_not_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Overflowing, "factor", 1.0)
    best = ModelCheckpoint(tmp_path, monitor="val/macro_mae", mode="min")
    stop = EarlyStopping("val/macro_mae", mode="min", patience=9)
    federation = run(Overflowing(), hospitals(), FedAvg(), 5, Overflow(), best, stop)
    assert len(federation.history) == 2  # not finite
    values = (federation.trainer.callback_metrics, federation.history[-1].metrics)
    assert all(math.isnan(found["val/macro_mae"]) for found in values)
    assert all(found["val/macro_count"] == 6.5 for found in values)
    assert best.best_model_score == 1.0


class Logs(Regression):
    """Logs the number of its validation samples under given names."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_dict({name: float(len(batch[0])) for name in self.names})


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
def test_a_value_that_is_called_like_a_mean_over_clients_does_not_take_its_place() -> None:
    """As with an accuracy and its mean over classes, of torchmetrics."""
    with pytest.warns(UserWarning, match="val/macro_acc is the mean over clients of another value"):
        federation = run(Logs("val/acc", "val/macro_acc"), hospitals([4, 4]), FedAvg())
    metrics = federation.history[-1].metrics
    assert metrics["val/macro_acc"] == 5.5
    assert metrics["val/micro_macro_acc"] == pytest.approx(61 / 11)


@pytest.mark.parametrize("names", [["val/num_samples"], ["val/mse", "val_mse"]])
def test_a_name_that_is_taken_is_an_error(names: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="under another name"):
        run(Logs(*names), hospitals(), FedAvg())


class Forces(Regression):
    """Needs gradients to be judged."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.enable_grad():
            x = batch[0].requires_grad_()
            (force,) = torch.autograd.grad(self.net(x).sum(), x)
        self.log("val/force", force.norm())


def test_gradients_in_validation_take_the_trainers_option() -> None:
    options = {"inference_mode": False}
    federation = run(Forces(), hospitals(), FedAvg(), trainer=options)
    assert len(federation.client_metrics("val")["force"].nonzero()) == 4


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
def test_a_schedule_by_a_value_of_validation_rests_while_clients_train() -> None:
    class Plateau(Regression):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return [optimizer], [{"scheduler": schedule, "monitor": "val/mae"}]

    with pytest.warns(RuntimeWarning, match="Skipping learning rate update"):
        scheduled = run(Plateau(), hospitals(), FedAvg())
    assert scheduled.history[-1].metrics["val/macro_mae"] > 0


class Reduced(Regression):
    """Reductions and hooks as Lightning has them."""

    def on_validation_epoch_start(self) -> None:
        self.total = 0.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.total += float(batch[1].sum())
        self.log("val/largest", batch[1].max(), reduce_fx="max")
        self.log("val/sum", batch[1].sum(), reduce_fx=torch.sum)
        self.log("val/mean", batch[1].mean(), on_step=True, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        self.log("val/total", self.total)


def test_reductions_and_epoch_hooks() -> None:
    data = hospitals(eval_batch_size=3)
    federation = run(Reduced(), data, FedAvg())
    values = federation.client_metrics("val")
    for client in range(4):
        _, y = data.datasets["val"][client].tensors
        expected = {"largest": y.max(), "sum": y.sum(), "total": y.sum(), "mean": y.mean()}
        for name, value in expected.items():
            assert values[name][client] == pytest.approx(float(value), rel=1e-5)
    assert {"val/macro_mean", "val/macro_total"} <= federation.history[-1].metrics.keys()
    assert not any("_step" in name or "_epoch" in name for name in federation.history[-1].metrics)


class Counting(Dataset):
    """Counts how often each sample is read, and draws at random."""

    def __init__(self, count: int) -> None:
        self.reads = [0] * count

    def __len__(self) -> int:
        return len(self.reads)

    def __getitem__(self, index: int) -> Any:
        self.reads[index] += 1
        x = torch.randn(3)
        return x, x[:1] + index


def test_samples_are_read_once_an_epoch_and_never_to_be_counted() -> None:
    train, val = ([Counting(count) for count in (5, 8)] for _ in range(2))
    data = DatasetClients(train, val=val, batch_size=4)
    data.num_samples("train")
    federation = Federation(Regression(), local_epochs=2)
    trainer = quiet_trainer(3, FedAvg())
    trainer.fit(federation, datamodule=data)
    assert [dataset.reads for dataset in train] == [[6] * 5, [6] * 8]
    assert [dataset.reads for dataset in val] == [[3] * 5, [3] * 8]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_random_samples_are_the_same_with_workers_and_when_resumed(tmp_path) -> None:
    def data(workers: int) -> DatasetClients:
        return DatasetClients(
            [Counting(5), Counting(8)],
            val=[Counting(3), Counting(3)],
            batch_size=3,
            num_workers=workers,
        )

    whole = run(regression(), data(0), FedAvg(), 4, local_epochs=2)
    for workers in (1, 2):
        client_method = run(regression(), data(workers), FedAvg(), 2, local_epochs=2)
        client_method.trainer.save_checkpoint(tmp_path / "half.ckpt")
        resumed = run(
            regression(), data(0), FedAvg(), 4, local_epochs=2, ckpt_path=tmp_path / "half.ckpt"
        )
        assert_same(resumed.server_states()[0], whole.server_states()[0])


@pytest.mark.filterwarnings("ignore:round .*failed:UserWarning")
def test_a_client_whose_samples_cannot_be_read_fails_alone() -> None:
    class Broken(Counting):
        def __getitem__(self, index: int) -> Any:
            if index == 2:
                raise OSError("cannot identify image file")
            return super().__getitem__(index)

    data = DatasetClients([Counting(5), Broken(6), Counting(7)], batch_size=2)
    federation = run(regression(), data, FedAvg(), 2)
    assert [entry.failed for entry in federation.history] == [[1], [1]]


NAMED = {
    "FedProx": (FedProx(0.3), FedAvg(), ProximalClient, {"mu": 0.3}),
    "FeSEM": (
        FeSEM(2, mu=0.3, scaling="eq7"),
        FeSEM(2),
        ProximalClient,
        {"mu": 0.3, "scaling": "eq7"},
    ),
    "FedEC": (FedEC(0.5), Reptile(), ElasticClient, {"alpha": 0.5}),
    "FedEC-l2": (FedEC(0.5, "l2"), Reptile(), ElasticClient, {"alpha": 0.5, "constraint": "l2"}),
}


@pytest.mark.short("*-sequential")
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("name", NAMED)
def test_a_method_is_what_it_is_with_a_client_that_names_it(name: str, engine: str) -> None:
    alone, callback, kind, options = NAMED[name]
    data = small_data(dtype=torch.float64, cohort_size=4)

    def fit(kind: type[Classifier], callback: ServerCallback, **options: Any) -> Federation:
        client = batchnorm_client(kind, optimizer=sgd(0.1, momentum=0.9), **options).double()
        return run(client, data, copy.deepcopy(callback), 4, local_epochs=2, engine=engine)

    one, other = fit(Classifier, alone), fit(kind, callback, **options)
    for i in range(6):
        assert_same(one.client_state(i), other.client_state(i))
    assert one.history == other.history


# Modules that can be stacked


class Dicts(FederatedDataModule):
    """Clients whose samples are dictionaries with a pair in them."""

    def __init__(self, counts: Sequence[int], batch_size: int | None = 4) -> None:
        super().__init__(num_classes=None, batch_size=batch_size, cohort_size=3)
        self.num_clients, self.counts = len(counts), {"train": counts, "val": [3] * len(counts)}

    def num_samples(self, split: Any = "train") -> Tensor:
        return torch.tensor(self.counts.get(split, [0] * self.num_clients))

    def samples(self, client: int, split: Any) -> dict[str, Any]:
        x, y = table(int(self.num_samples(split)[client]), client + 10 * (split == "val")).tensors
        x, y = x.double(), y.double()
        return {"x": (x[:, :2], x[:, 2:]), "y": y.squeeze(1)}


def test_samples_of_any_nesting_can_be_counted_and_told_from_others() -> None:
    class Nested(FederatedDataModule):
        def __init__(self, seed: int) -> None:
            super().__init__(num_classes=None)
            self.num_clients, self.given = 2, seed

        def samples(self, client: int, split: Any) -> Any:
            x, y = table(3 + client, self.given).tensors
            return {"x": (x,), "target": {"y": y.squeeze(1), "weight": x[:, 1:]}}

    assert Nested(1).num_samples("train").tolist() == [3, 4]
    assert not torch.equal(Nested(1).fingerprint(), Nested(2).fingerprint())


class Pairs(Dicts):
    """Clients whose samples are pairs."""

    def samples(self, client: int, split: Any) -> tuple[Tensor, Tensor]:
        samples = super().samples(client, split)
        return torch.cat(samples["x"], dim=1), samples["y"].unsqueeze(1)


class Stackable(L.LightningModule):
    """A module of one's own that says what its loss is, and nothing else of federations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 6), nn.Linear(1, 6, bias=False)
        self.out = nn.Sequential(nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return self.out(self.first(x[0]) + self.second(x[1])).squeeze(-1)

    def loss(self, batch: dict[str, Any]) -> Tensor:
        return F.mse_loss(self(batch["x"]), batch["y"])

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/mse", loss)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.log("val/mse", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)


class Filling(Stackable):
    """Says what the losses of samples are as well, so that batches may be filled up."""

    def sample_losses(self, batch: dict[str, Any]) -> Tensor:
        return F.mse_loss(self(batch["x"]), batch["y"], reduction="none")

    def loss(self, batch: dict[str, Any]) -> Tensor:
        return self.sample_losses(batch).mean()


STACKED = [method for method in METHODS if type(method) is not SCAFFOLD]  # which has no momentum


@pytest.mark.parametrize("kind", [Stackable, Filling])
@pytest.mark.parametrize("method", STACKED, ids=lambda method: type(method).__name__)
@pytest.mark.long
def test_a_module_with_a_loss_is_stacked(method: ServerCallback, kind: type[Stackable]) -> None:
    def fit(engine: str) -> Federation:
        torch.manual_seed(3)
        options = {"local_epochs": 2, "engine": engine}
        return run(kind().double(), Dicts((9, 14, 5, 11)), copy.deepcopy(method), 4, **options)

    alone, stacked = fit("sequential"), fit("vectorized")
    engine = stacked.clients.attached_engine
    assert engine.obstacle is None
    assert engine.fills_batches == (kind is Filling and type(method) is not PerFedAvg)
    for client in range(4):
        one, other = alone.client_state(client), stacked.client_state(client)
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
    for left, right in zip(alone.history, stacked.history, strict=True):
        assert ("train/mse" in left.metrics) == (type(method) not in (PFedMe, PerFedAvg))
        assert left.metrics == pytest.approx(right.metrics, rel=1e-9)


class Steps(Stackable):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * (1 + self.current_epoch)


class Chatty(Stackable):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("train/mean", batch["y"].mean())
        return super().training_step(batch, batch_idx)


class Declared(Stackable):
    vectorizable = False


OBSTACLES = {
    Regression: "it draws random numbers while it trains",
    Steps: "it asks for trainer.current_epoch",
    Chatty: "it logs 'train/mean' while it trains, beside its loss",
    Declared: "it says that it is not vectorizable",
}


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", OBSTACLES, ids=lambda kind: kind.__name__)
def test_a_module_that_cannot_be_stacked_trains_alone_and_is_told_why(kind: type) -> None:
    torch.manual_seed(3)
    module = kind().double()
    data = (Pairs if isinstance(module, Regression) else Dicts)((9, 14, 5, 11))
    with pytest.warns(UserWarning, match="clients train one by one") as warned:
        stacked = run(module, data, FedAvg(), engine="vectorized")
    assert any(OBSTACLES[kind] in str(warning.message) for warning in warned)
    alone = run(module, data, FedAvg(), engine="sequential")
    assert_same(alone.server_states()[0], stacked.server_states()[0])


def with_frozen_part(seed: int) -> Stackable:
    torch.manual_seed(seed)
    made = Stackable().double()
    made.first.requires_grad_(False)
    return made


@pytest.mark.short("sequential")
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_frozen_parts_are_those_of_the_checkpoint(engine: str, tmp_path: Path) -> None:
    """Also where the module that a run is resumed with was built with other random weights."""

    def fit(seed: int, rounds: int, **options: Any) -> Federation:
        data = Dicts((9, 14, 5, 11))
        return run(with_frozen_part(seed), data, FedAvg(), rounds, engine=engine, **options)

    kept = tmp_path / "half.ckpt"
    fit(1, 2, save_frozen=True).trainer.save_checkpoint(kept)
    whole, resumed = fit(1, 4), fit(2, 4, ckpt_path=kept)
    for client in range(4):
        assert_same(whole.client_state(client), resumed.client_state(client))
    assert torch.equal(resumed.client_state(0)["first.weight"], with_frozen_part(1).first.weight)
    assert whole.history[-1].metrics == resumed.history[-1].metrics
    resumed.trainer.save_checkpoint(tmp_path / "later.ckpt")  # of the frozen weights in use
    fit(1, 5, ckpt_path=tmp_path / "later.ckpt")
    with pytest.raises(ConfigurationError, match=r"other frozen weights: first\.weight differs"):
        fit(2, 5, ckpt_path=tmp_path / "later.ckpt")


@pytest.mark.parametrize("save_frozen", [False, True])
def test_frozen_parts_are_once_in_memory_and_at_most_once_in_a_checkpoint(
    save_frozen: bool, tmp_path: Path
) -> None:
    module = with_frozen_part(1)
    size = sum(p.nbytes for p in module.first.parameters())
    federation = run(module, Dicts((9, 14, 5, 11)), FeSEM(3), 1, save_frozen=save_frozen)
    models = [federation.server.tensors(k) for k in range(len(federation.server))]
    assert len(models) > 2
    assert len({model["first.weight"].data_ptr() for model in models}) == 1
    federation.trainer.save_checkpoint(tmp_path / "some.ckpt")
    saved = torch.load(tmp_path / "some.ckpt", weights_only=True)
    held = [name for name in saved["state_dict"] if ".first." in name]
    assert sum(saved["state_dict"][name].nbytes for name in held) == size * save_frozen
    again = Federation.load_from_checkpoint(
        tmp_path / "some.ckpt", client=with_frozen_part(1), callback=FeSEM(3)
    )
    for left, right in zip(again.server_states(), federation.server_states(), strict=True):
        assert_same(left, right)
    given = {"client": with_frozen_part(2), "callback": FeSEM(3)}
    if save_frozen:
        again = Federation.load_from_checkpoint(tmp_path / "some.ckpt", **given)
        assert_same(again.server_states()[1], federation.server_states()[1])
    else:
        with pytest.raises(ConfigurationError, match=r"first\.weight differs \(and 1 more\)"):
            Federation.load_from_checkpoint(tmp_path / "some.ckpt", **given)


def test_checkpoints_that_have_frozen_parts_with_each_model_load(tmp_path: Path) -> None:
    """They did so before version 0.2."""
    federation = run(with_frozen_part(1), Dicts((9, 14, 5, 11)), FeSEM(3), 1, save_frozen=True)
    federation.trainer.save_checkpoint(tmp_path / "new.ckpt")
    saved = torch.load(tmp_path / "new.ckpt", weights_only=True)
    first = {n: t for n, t in saved["state_dict"].items() if n.startswith("server.0.first.")}
    for k in range(1, len(federation.server)):
        saved["state_dict"] |= {n.replace("server.0", f"server.{k}"): t for n, t in first.items()}
    del saved["pflight"]["frozen"]
    torch.save(saved, tmp_path / "old.ckpt")
    again = Federation.load_from_checkpoint(
        tmp_path / "old.ckpt", client=with_frozen_part(2), callback=FeSEM(3)
    )
    for left, right in zip(again.server_states(), federation.server_states(), strict=True):
        assert_same(left, right)


class Quantized(Stackable):
    """Moves codes, and keeps a mask that it never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(4))
        self.register_buffer("mask", torch.ones(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.codes += 0.1
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("buffers", ["shared", "local"])
def test_buffers_that_clients_change_and_the_server_averages_are_named_once(buffers: str) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(Quantized().double(), Dicts((9, 14, 5, 11)), FedAvg(buffers=buffers), 2)
    messages = [str(warning.message) for warning in said if "codebook" in str(warning.message)]
    begins = "round 0: clients change the buffer codes, and the server takes their mean"
    assert [message.startswith(begins) for message in messages] == [True] * (buffers == "shared")


def test_divergences_need_logits() -> None:
    with pytest.raises(ConfigurationError, match="constraint='l2'"):
        run(regression(), hospitals(), FedEC())


def test_two_halves_are_an_error() -> None:
    with pytest.raises(
        ConfigurationError, match=r"FedProx has the client method .*, but ProximalClient names"
    ):
        run(batchnorm_client(ProximalClient), small_data(), FedProx(0.3))

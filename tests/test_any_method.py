"""Every algorithm's configuration trains a regression module that knows nothing of pflight."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from jsonargparse import ArgumentParser, Namespace
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanAbsoluteError

from pflight import Federation
from pflight.callbacks import FeSEM, ServerCallback
from pflight.command import catalogue
from pflight.datamodules import DatasetClients, FederatedDataModule, TensorClients
from pflight.errors import ConfigurationError
from pflight.models import MLP, Classifier
from tests.algorithm_tester import shipped
from tests.pages import ROOT
from tests.runs import quiet_trainer

CONFIGS = {path.stem: path for path in sorted((ROOT / "configs" / "algorithm").glob("*.yaml"))}
WITH_CLASSES = {
    f"pflight.callbacks.{method.callback.__name__}"
    for method in shipped()
    if method.needs == "a head and classes"
}
NEED_CLASSES = {  # or adapters, and what is said before the start
    "fedec": "constraint 'kl' compares logits",
    "fedlease": "FedLEASE needs low-rank adapters, and Diabetes has none",
    "fedalt": "FedALT needs low-rank adapters",
    "hilora": "HiLoRA needs low-rank adapters",
    "feddpa": "FedDPA needs low-rank adapters",
    "fedsa_lora": r"Private: '\*lora_B\*' matches none of",
    "ffa_lora": r"Frozen: '\*lora_A\*' matches none of",
    "hetlora": "HetLoRA needs low-rank adapters, and Diabetes has none",
    "rolora": "RoLoRA needs low-rank adapters, and Diabetes has none",
    "fesem_ma": "FeSEM: matching, .* needs logits and classes: .* not Diabetes",
} | {
    entry.name: "the algorithm needs classes, and Diabetes has no num_classes"
    for entry in catalogue.methods()
    if entry.class_path in WITH_CLASSES
}


class Diabetes(L.LightningModule):
    """A user's own, with steps, metric and optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1)
        self.layers = nn.Sequential(*layers)
        self.mae = MeanAbsoluteError()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x).squeeze(1), y)
        self.log("train/mse", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.mae(self.layers(x).squeeze(1), y)
        self.log("val/mae", self.mae)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def samples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, generator=random)
    return x, x.sum(1) + 0.1 * torch.randn(count, generator=random)


def in_memory() -> FederatedDataModule:
    train, val = ([samples(count, seed + i) for i in range(6)] for count, seed in ((12, 0), (6, 9)))
    return TensorClients(train, val=val, batch_size=6)


def lazy() -> FederatedDataModule:
    train, val = (
        [TensorDataset(*samples(count, seed + i)) for i in range(6)]
        for count, seed in ((12, 0), (6, 9))
    )
    return DatasetClients(train, val=val, batch_size=6)


def configured(path: Path) -> Namespace:
    """Return the server callback and the federation's options of a configuration."""
    config = yaml.safe_load(path.read_text())
    (server,) = config["trainer"]["callbacks+"]
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(ServerCallback, "server")
    parser.add_class_arguments(Federation, "model", skip={"client"}, instantiate=False)
    parsed = parser.parse_object({"server": server, "model": config.get("model", {})})
    return parser.instantiate(parsed)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of Lightning, as it loads
@pytest.mark.parametrize("data", [in_memory, lazy])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.long
def test_on_regression(name: str, data) -> None:
    config = configured(CONFIGS[name])
    federation = Federation(Diabetes(), **config.model)
    trainer = quiet_trainer(2, config.server)
    if name in NEED_CLASSES:
        with pytest.raises(ConfigurationError, match=NEED_CLASSES[name]) as error:
            trainer.fit(federation, datamodule=data())
        assert "\n" not in str(error.value)
        assert not federation.history
        return
    trainer.fit(federation, datamodule=data())
    assert not any(entry.failed for entry in federation.history)
    assert 0 < federation.history[-1].metrics["val/macro_mae"] < 5
    start = Diabetes().state_dict()
    moved = [federation.client_state(i)["layers.0.weight"] for i in range(6)]
    assert not any(torch.equal(weight, start["layers.0.weight"]) for weight in moved)


CLASSES = [name for name, said in NEED_CLASSES.items() if "algorithm needs classes" in said]


class Tumour(L.LightningModule):
    """A classifier of her own, which says how many classes there are."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.num_classes = 3
        self.verdict = nn.Linear(4, outputs)
        self.body = nn.Sequential(nn.Linear(5, 4), nn.ReLU())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        outputs = self.verdict(self.body(x))
        if outputs.shape[1] == 1:
            return nn.functional.mse_loss(outputs[:, 0], y.float())
        return nn.functional.cross_entropy(outputs, y)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val/acc", (self.verdict(self.body(x)).argmax(1) == y).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def labelled(count: int, seed: int) -> tuple[Tensor, Tensor]:
    x, y = samples(count, seed)
    return x, (y > -1).long() + (y > 1).long()


@pytest.mark.short(
    "fedpac-False", "fedproto-False", "fedrod_hyper-False", "gpfl-False", "pfedfda-False"
)
@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.parametrize("name", CLASSES)
def test_methods_of_classes_on_her_classifier(name: str, lazily: bool) -> None:
    pairs = [labelled(count, count) for count in (12, 2, 9)]
    data: FederatedDataModule = TensorClients(pairs, val=pairs, batch_size=6)
    if lazily:
        datasets = [TensorDataset(*pair) for pair in pairs]
        data = DatasetClients(datasets, val=datasets, batch_size=6)
    config = configured(CONFIGS[name])
    federation = Federation(Tumour(), **config.model)
    quiet_trainer(2, config.server).fit(federation, datamodule=data)
    assert not any(entry.failed for entry in federation.history)
    assert 0 <= federation.history[-1].metrics["val/macro_acc"] <= 1


def test_matching_counts_the_classes_of_datasets() -> None:
    datasets = [TensorDataset(*labelled(count, count)) for count in (12, 4, 9)]
    client = Classifier(MLP(len(datasets[0][0][0]), [4], 3), num_classes=3)
    federation = Federation(client)
    data = DatasetClients(datasets, batch_size=6)
    quiet_trainer(2, FeSEM(2, matching="bbp_map")).fit(federation, datamodule=data)
    assert not any(entry.failed for entry in federation.history)


@pytest.mark.parametrize("name", CLASSES)
def test_methods_of_classes_on_a_head_with_one_output(name: str) -> None:
    data = TensorClients([labelled(12, 0)], batch_size=6)
    federation = Federation(Tumour(outputs=1))
    trainer = quiet_trainer(2, configured(CONFIGS[name]).server)
    said = (
        "^the algorithm needs an output for each class, .* verdict, gives 1, and num_classes is 3$"
    )
    with pytest.raises(ConfigurationError, match=said):
        trainer.fit(federation, datamodule=data)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            TensorClients,
            "client 1, train: targets are torch.float32 .* client 0, train are torch.int64",
        ),
        (DatasetClients, "client 1 has train samples whose classes can't be read: .* not pairs of"),
    ],
)
def test_methods_of_classes_on_samples_without(kind: type, said: str) -> None:
    pairs = [labelled(4, 0), samples(4, 1)]
    given = pairs if kind is TensorClients else [TensorDataset(*pair) for pair in pairs]
    federation = Federation(Tumour())
    trainer = quiet_trainer(2, configured(CONFIGS["fedproto"]).server)
    with pytest.raises(ConfigurationError, match=said):
        trainer.fit(federation, datamodule=kind(given, batch_size=6))
    assert not federation.history

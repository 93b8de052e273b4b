"""Methods, a module and data of a user's own."""

import csv
import os
import signal

import lightning as L
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pflight.callbacks import FedAvg
from pflight.datamodules import DatasetClients


class Raising(FedAvg):
    """A method whose rounds fail."""

    def __init__(self, text: str = "no luck today"):
        super().__init__()
        self.text = text

    def round(self, cohort):
        raise ValueError(self.text)


class Killed(FedAvg):
    """A method whose process is killed in the second round, so many times."""

    def __init__(self, times: int = 9, where: str = "deaths"):
        super().__init__()
        self.times, self.where = times, where

    def on_train_batch_start(self, trainer, *args):
        deaths = os.path.getsize(self.where) if os.path.exists(self.where) else 0
        if trainer.current_epoch == 1 and deaths < self.times:
            with open(self.where, "a") as file:
                file.write("x")
            os.kill(os.getpid(), signal.SIGKILL)


class Line(L.LightningModule):
    """A module that logs a metric whose direction nobody knows."""

    logs = "mae"

    def __init__(self, lr: float = 0.1):
        super().__init__()
        self.net, self.lr = nn.Linear(2, 1), lr

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log(f"val/{self.logs}", (self.net(batch[0]) - batch[1]).abs().mean())

    def test_step(self, batch, batch_idx):
        self.log(f"test/{self.logs}", (self.net(batch[0]) - batch[1]).abs().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Crooked(Line):
    """A module that can't be trained."""

    def training_step(self, batch, batch_idx):
        raise RuntimeError("a line is not crooked")


class Hospitals(DatasetClients):
    """Clients from a CSV file: client, two features, target."""

    def __init__(self, table: str, batch_size: int = 4):
        with open(table) as file:
            rows = torch.tensor([[float(x) for x in row] for row in csv.reader(file)])
        parts = [rows[rows[:, 0] == one] for one in rows[:, 0].unique()]
        samples = [TensorDataset(part[:, 1:3], part[:, 3:]) for part in parts]
        super().__init__(samples, val=samples, test=samples, batch_size=batch_size)


class Sealed(TensorDataset):
    """Samples at which nobody may look."""

    def __getitem__(self, index):
        raise RuntimeError("somebody looks at test samples")

    __getitems__ = __getitem__


class Secret(DatasetClients):
    """Clients whose test samples are sealed."""

    def __init__(self):
        x = torch.randn(3, 12, 2, generator=torch.Generator().manual_seed(0))
        parts = [(one, one[:, :1]) for one in x]
        samples = [TensorDataset(*part) for part in parts]
        sealed = [Sealed(*part) for part in parts]
        super().__init__(samples, val=samples, test=sealed, batch_size=4)

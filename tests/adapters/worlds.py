"""A small linear model with an adapter of the package peft, and clients whose steps are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
import peft
import torch
from torch import Tensor, nn

import pflight
from pflight import Federation
from pflight.datamodules import TensorClients
from tests.runs import quiet_trainer

A, B = (f"network.base_model.model.lin.lora_{factor}.default.weight" for factor in "AB")


class Regressor(L.LightningModule):
    """Minimises half of the squared error of a network."""

    def __init__(self, network: nn.Module, lr: float = 0.1) -> None:
        super().__init__()
        self.network, self.lr = network, lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return 0.5 * (y - self.network(x)).square().sum(1).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def regressor(lr: float = 0.1, **options: Any) -> Regressor:
    """Return the module with ``W0``, ``A0`` and ``B0 = 0`` of rank 1 and scale 2."""
    network = nn.Sequential()
    network.add_module("lin", nn.Linear(2, 3, bias=False))
    config = {"r": 1, "lora_alpha": 2, "target_modules": ["lin"], **options}
    module = Regressor(peft.get_peft_model(network, peft.LoraConfig(**config)), lr).double()
    state = module.state_dict()
    state["network.base_model.model.lin.base_layer.weight"][:] = matrix([[1, 0], [0, 1], [1, 1]])
    if state[A].shape == (1, 2):
        state[A][:] = matrix([[1, 0.5]])
    return module


def matrix(rows: list[list[float]]) -> Tensor:
    """Return a matrix in double precision."""
    return torch.tensor(rows, dtype=torch.float64)


def clients(chosen: Sequence[int] = (0, 1)) -> TensorClients:
    """Return two clients, with two samples and with one, or some of them."""
    first = matrix([[1, 0], [0, 1]]), matrix([[1, 0, 0], [0, 0, 1]])
    second = matrix([[1, 1]]), matrix([[0, 1, 0]])
    return TensorClients([(first, second)[i] for i in chosen], batch_size=2)


def data_of(samples: Sequence[tuple[Tensor, Tensor]], **options: Any) -> TensorClients:
    """Return clients that train, validate and test on the same samples, by default in one batch."""
    options = {"batch_size": None, "num_classes": None, **options}
    return TensorClients(samples, val=samples, test=samples, **options)


def trained(callback: Any, rounds: int = 1, steps: int = 2, **options: Any) -> Federation:
    """Return a federation after some rounds of full-batch steps."""
    module, data = options.pop("module", None) or regressor(), options.pop("data", (0, 1))
    options.setdefault("engine", "sequential")
    federation = pflight.Federation(module, local_steps=steps, **options)
    quiet_trainer(rounds, callback).fit(federation, datamodule=clients(data))
    return federation

"""World T: features ``W x``, logits ``V z``, no biases, two clients and one full batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pflight.datamodules import TensorClients
from pflight.models import Classifier
from tests.runs import sgd

Rows = list[list[float]]

SAMPLES = (
    (torch.tensor([[1.0, 0], [0, 1]], dtype=torch.float64), torch.tensor([0, 1])),
    (torch.tensor([[1.0, 1], [0, 2], [-1, 0]], dtype=torch.float64), torch.tensor([1, 1, 2])),
)


def world_t(**options: Any) -> TensorClients:
    return TensorClients(
        SAMPLES, test=SAMPLES, val=SAMPLES, num_classes=3, batch_size=None, **options
    )


def client_t(lr: float = 0.1, body: Rows | None = None) -> Classifier:
    network = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 3, bias=False)).double()
    with torch.no_grad():
        network[0].weight.copy_(torch.tensor(body or [[1.0, 0], [0, 1]]))
        network[1].weight.copy_(torch.tensor([[1.0, 0], [0, 1], [-1, -1]]))
    return Classifier(network, 3, optimizer=sgd(lr))


def body(state: dict[str, Tensor]) -> Any:
    return state["network.0.weight"].detach()


def head(state: dict[str, Tensor]) -> Any:
    return state["network.1.weight"].detach()


def assert_rows(value: Tensor, expected: Any) -> None:
    """Compare with numbers of six decimals."""
    rounded = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(value.detach().double(), rounded, rtol=0, atol=6e-7)


def close(value: float) -> Any:
    return pytest.approx(value, abs=6e-7)

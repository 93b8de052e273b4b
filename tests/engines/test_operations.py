"""Counted operations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from pflight.engines.check import count_operations

IMAGES = torch.zeros(5, 3, 8, 8)


def test_products_and_convolutions_are_counted() -> None:
    network = nn.Sequential(
        *(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 3, padding=1)),
        *(nn.Flatten(), nn.Linear(256, 7)),
    )
    first, second, linear = 2 * 27 * 6 * 64, 2 * 54 * 4 * 64, 2 * 256 * 7
    assert count_operations(network, IMAGES) == (5 * (first + second + linear), 5 * first)


def test_nothing_to_count() -> None:
    assert count_operations(nn.Flatten(), IMAGES) == (0, 0)


def test_channels_of_a_group_are_what_counts() -> None:
    network = nn.Conv2d(8, 8, 1, groups=4)
    assert count_operations(network, torch.zeros(1, 8, 2, 2)).thin == 2 * 2 * 8 * 4


def test_attention_is_counted() -> None:
    """Where no gradients are taken, PyTorch runs a block as one operation that has no count."""
    block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.5, batch_first=True)
    weights = sum(p.numel() for p in block.parameters() if p.dim() > 1)
    assert count_operations(block, torch.zeros(1, 6, 16)).total >= 2 * 6 * weights


def test_counting_changes_nothing() -> None:
    network = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(), nn.Conv2d(3, 2, 1))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    generator = torch.get_rng_state()
    count_operations(network, IMAGES)
    assert network.training
    assert torch.equal(generator, torch.get_rng_state())
    torch.testing.assert_close(network.state_dict(), before)


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError


@pytest.mark.parametrize("network", [Failing(), nn.Linear(5, 2)])
def test_what_can_not_be_counted_may_be_of_any_size(network: nn.Module) -> None:
    assert count_operations(network, IMAGES) == (math.inf, math.inf)

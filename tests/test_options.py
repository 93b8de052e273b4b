"""Options that have to be numbers: anything else is refused at once, and named."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import nn

from pflight import Federation
from pflight.callbacks import FeSEM, PFedLA, Reptile
from pflight.errors import ConfigurationError
from pflight.models import ClientModule, ElasticClient, ProximalClient


def make(kind: type[ClientModule], **options: Any) -> ClientModule:
    return kind(nn.Linear(2, 2), 2, **options)


@pytest.mark.parametrize("value", [None, math.nan, math.inf, True, "1"])
@pytest.mark.parametrize(
    ("build", "name"),
    [
        (PFedLA, "lr"),
        (Reptile, "lr"),
        (partial(make, ElasticClient), "alpha"),
        (partial(make, ProximalClient), "mu"),
    ],
)
def test_finite_numbers(build: Callable[..., Any], name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"{name} must .*got {value}"):
        build(**{name: value})


@pytest.mark.parametrize("value", [None, 1.5, True, math.nan])
@pytest.mark.parametrize(
    ("build", "name"),
    [
        (PFedLA, "retain"),
        (FeSEM, "num_clusters"),
        (partial(FeSEM, 2), "init_clients"),
        (partial(FeSEM, 2), "num_restarts"),
        (partial(Federation, make(ClientModule)), "local_epochs"),
    ],
)
def test_whole_numbers(build: Callable[..., Any], name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"{name} must be .*got {value}"):
        build(**{name: value})


@pytest.mark.parametrize("candidates", [None, (), (2.5,), (0, 2)])
def test_candidates(candidates: Any) -> None:
    with pytest.raises(ConfigurationError, match="candidates must be numbers of clusters"):
        FeSEM("auto", candidates=candidates)

"""The rule of ``engine="auto"``."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from pflight.datamodules import TensorClients
from pflight.engines import VectorizedEngine, build_engine
from pflight.models import Classifier
from tests.runs import (
    CLASSES,
    FEATURES,
    batchnorm_client,
    dropout_client,
    linear_client,
    run,
    samples,
    small_data,
)


@pytest.mark.parametrize(
    ("client", "options", "reason"),
    [
        (linear_client(), {}, r"vectorized engine, up to 3 clients at once: \d+ op"),
        (linear_client(), {"cohort_size": 1}, "sequential engine: one client in a round"),
        (dropout_client(), {}, "sequential engine: .*draws random numbers"),
        (
            Classifier(
                nn.Sequential(
                    nn.Unflatten(1, (1, FEATURES)),
                    nn.Conv1d(1, 2, 3),
                    nn.Flatten(),
                    nn.Linear(4, CLASSES),
                ),
                CLASSES,
            ),
            {},
            r"vectorized engine, up to 3 clients at once: \d+ operations a batch",
        ),
        (
            Classifier(
                nn.Sequential(
                    nn.Unflatten(1, (1, FEATURES)),
                    nn.Conv1d(1, 400_000, FEATURES),
                    nn.MaxPool1d(1),
                    nn.Flatten(),
                    nn.AdaptiveMaxPool1d(CLASSES),
                ),
                CLASSES,
            ),
            {},
            r"sequential engine: of 1\d\.\d M operations a batch too many are in convol",
        ),
        (
            Classifier(
                nn.Sequential(nn.Linear(FEATURES, 2000), nn.Linear(2000, 2000), nn.Linear(2000, 3)),
                CLASSES,
            ),
            {},
            r"sequential engine: 4 models of 15\.3 MiB don't fit into the caches",
        ),
        (
            Classifier(
                nn.Sequential(nn.Linear(FEATURES, 10_000), nn.Linear(10_000, CLASSES)),
                CLASSES,
            ),
            {"counts": [4000] * 6, "batch_size": None},
            r"sequential engine: 560 M operations a batch keep the device busy",
        ),
    ],
)
def test_the_choice_and_its_reason(
    client: Classifier, options: dict, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = small_data(**options)
    with caplog.at_level("INFO"):
        engine = run(client, data, rounds=0, clients_at_once=3).clients.attached_engine
    stacks = isinstance(engine, VectorizedEngine) and engine.obstacle is None
    assert stacks == reason.startswith("vectorized")
    said = [text for text in caplog.messages if " engine" in text]
    assert len(said) == 1
    assert re.match(reason, said[0])


def test_the_engine_asked_for_is_taken() -> None:
    sequential = run(linear_client(), small_data(), engine="sequential").clients.attached_engine
    assert not isinstance(sequential, VectorizedEngine)
    assert isinstance(
        run(linear_client(), small_data(), engine="vectorized").clients.attached_engine,
        VectorizedEngine,
    )


def test_a_chunk_does_not_depend_on_the_number_of_clients() -> None:
    def chunk(clients: int) -> int:
        train = [samples(9, client) for client in range(clients)]
        data = TensorClients(train, num_classes=CLASSES)
        engine = run(linear_client(), data, engine="vectorized").clients.attached_engine
        assert isinstance(engine, VectorizedEngine)
        return engine.chunk

    assert chunk(2) == chunk(20)


def test_what_is_frozen_does_not_make_chunks_smaller() -> None:
    def chunk(client: Classifier) -> int:
        engine = run(client, small_data(), engine="vectorized").clients.attached_engine
        assert isinstance(engine, VectorizedEngine)
        return engine.chunk

    client = linear_client()
    plain = chunk(client)
    table = nn.Parameter(torch.zeros(1_000_000), requires_grad=False)
    client.network.register_parameter("table", table)
    assert chunk(client) == plain
    table.requires_grad = True
    assert chunk(client) < plain


@pytest.mark.parametrize(
    ("counts", "engine"),
    [([8] * 8, "vectorized"), ([4, 5, 6, 7, 9, 10, 11, 13], "sequential")],
)
def test_batchnorm_of_clients_whose_batches_are_unequal(counts: list[int], engine: str) -> None:
    """Only batches of one size can be stacked, and a call for each size takes longer."""
    federation = run(batchnorm_client(), small_data(counts=counts, cohort_size=None))
    _, choice = build_engine("auto", None, federation.clients.attached_engine.setup)
    assert choice.engine == engine
    if engine == "sequential":
        assert choice.reason == "only 1.7 clients at a time have batches of one size, on average"

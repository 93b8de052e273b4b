"""Memory that is said and held against what is left before anything is trained."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from pflight.callbacks import (
    APPLE,
    L2GD,
    FedALA,
    FedAvg,
    FedFomo,
    Local,
    PFedHN,
    PFedLA,
    Reptile,
    ServerCallback,
)
from pflight.errors import ConfigurationError
from pflight.models import Classifier, ElasticClient
from pflight.runs import host
from tests.runs import linear_client, run, small_data

PARAMETERS = 4 * 15  # bytes of the linear client


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets how much memory is left."""

    def leave(count: int) -> None:
        monkeypatch.setattr(host, "available_memory", lambda device: count)

    return leave


def test_pfedla_says_what_its_hypernetworks_really_take(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        federation = run(linear_client(), small_data(cohort_size=4), PFedLA(hidden_dim=7))
    (line,) = [line for line in caplog.messages if "num_clients=6" in line]
    vectors = federation.callback.hypernetworks.vectors
    one = 4 * (100 + 100 * 7 + 2 * 7 * 7 + 3 * 7 + 8 * 6)
    assert 0 <= vectors[0].nbytes - one < 64  # zeros that fill it up
    assert line == (
        f"PFedLA with num_clients=6 takes {6 * PARAMETERS} B for models, "
        f"{6 * one / 1000:.1f} kB for hypernetworks, "
        f"{4 * one / 1000:.1f} kB for gradients of a round's hypernetworks"
    )


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (PFedLA, r"360 B for models, .* for hypernetworks"),
        (
            partial(PFedLA, neighbours=2),
            r"360 B for models, 6.1 kB for sketches, 240 B",
        ),
        (FedFomo, r"360 B for models, 864 B for scores"),
        (APPLE, r"360 B for the cores at a client"),
        (PFedHN, r"48 B for embeddings, .* for the hypernetwork, .* for gradients and momentum"),
    ],
)
def test_what_does_not_fit_is_refused_with_all_numbers(
    callback: Callable[[], ServerCallback], message: str, left: Callable[[int], None]
) -> None:
    left(300)
    refused = f"num_clients=6 needs {message}.* only 300 B of memory are available"
    with pytest.raises(ConfigurationError, match=refused):
        run(linear_client(), small_data(), callback())


@pytest.mark.short("Local-*", "Reptile-*")
@pytest.mark.parametrize(
    ("callback", "kind", "kept"),
    [
        (Local, Classifier, PARAMETERS),
        (L2GD, Classifier, 2 * PARAMETERS),
        (FedALA, Classifier, 2 * PARAMETERS),
        (Reptile, ElasticClient, PARAMETERS),
    ],
)
def test_what_clients_keep_must_fit_into_ram_unless_it_is_on_disk(
    callback: Callable[[], ServerCallback],
    kind: type[Classifier],
    kept: int,
    left: Callable[[int], None],
) -> None:
    data = small_data(cohort_size=2)
    federation = run(linear_client(kind), data, callback(), 2, local_steps=1)
    slots = federation.clients.memory.state_dict().values()
    for i in federation.history[0].clients:
        size = sum(value.nbytes for slot in slots for value in slot[i].values())
        assert kept <= size <= kept + 8  # FedALA counts, too
    left(2 * 2 * kept - 1)
    with pytest.raises(ConfigurationError, match=f"4 clients that keep {kept} B each") as error:
        run(linear_client(kind), data, callback(), 2)
    assert "client_memory='disk'" in str(error.value)
    run(linear_client(kind), data, callback(), 1)  # half as many clients


def test_a_server_that_keeps_one_model_needs_none_of_it(left: Callable[[int], None]) -> None:
    left(0)
    run(linear_client(), small_data(), FedAvg())


@pytest.mark.skipif(sys.platform != "linux", reason="other systems say it otherwise")
def test_what_is_left_is_what_the_system_and_the_processs_own_limit_leave() -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_AS)
    left = host.available_memory(torch.device("cpu"))
    assert 2**20 < left < 2**50
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    taken = pages * resource.getpagesize()
    try:
        resource.setrlimit(resource.RLIMIT_AS, (taken + 2**28, before[1]))
        assert 0 < host.available_memory(torch.device("cpu")) <= 2**28
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)

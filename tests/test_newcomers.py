"""Newcomers that train before they are judged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pflight import Federation
from pflight.callbacks import Ditto, FedAvg, FedPAC, FedRep, FeSEM, ServerCallback, SharedPart
from pflight.datamodules import FederatedDataModule
from pflight.deploy.agreement import agreement_on
from pflight.errors import ConfigurationError
from pflight.models import Classifier
from pflight.states.layers import Layers
from tests.runs import (
    CLASSES,
    ENGINES,
    FEATURES,
    assert_same,
    linear_client,
    network_client,
    run,
    small_data,
)


def client() -> Classifier:
    layers = nn.Linear(FEATURES, 6), nn.ReLU(), nn.Linear(6, CLASSES)
    return network_client(nn.Sequential(*layers)).double()


def data() -> FederatedDataModule:
    return small_data(holdout_clients=0.34, dtype=torch.float64)


METHODS: dict[str, Callable[[], ServerCallback]] = {
    "FedAvg": FedAvg,
    "FedPer": lambda: SharedPart(private=Layers(head=True)),
    "FedRep": lambda: FedRep(head_epochs=1),
    "FedPAC": FedPAC,
    "Ditto": lambda: Ditto(lam=0.5),
    "FeSEM": lambda: FeSEM(2, init_clients=3),
}


def judged(make: Callable[[], ServerCallback], **options: Any) -> tuple[Federation, dict[str, Any]]:
    """Train and test. Return the federation, and the values by tag."""
    federation = run(client(), data(), make(), 2, **options)
    (values,) = federation.trainer.test(federation, datamodule=data(), verbose=False)
    return federation, values


@ENGINES
@pytest.mark.parametrize("name", METHODS)
def test_only_newcomers_train(name: str, engine: str) -> None:
    """They get the model of a run that fine-tunes all clients, and members that of a plain run."""
    plain, before = judged(METHODS[name], engine=engine)
    tuned, after = judged(METHODS[name], engine=engine, finetune_epochs=3)
    mixed, found = judged(METHODS[name], engine=engine, newcomer_epochs=3)
    new = data().new_clients.tolist()
    assert len(new) == 2
    for i in range(6):
        assert_same(mixed.client_state(i), (tuned if i in new else plain).client_state(i))
        assert_same(mixed.server_states()[0], plain.server_states()[0])
    assert found.keys() == before.keys()
    for tag, value in found.items():
        own = tag.startswith("test/new/") and not tag.startswith("test/new/server/")
        assert value == pytest.approx((after if own else before)[tag])
    assert found["test/new/loss"] != pytest.approx(before["test/new/loss"])
    for left, right in zip(mixed.history, plain.history, strict=True):
        assert (left.bytes_down, left.bytes_up) == (right.bytes_down, right.bytes_up)


@pytest.mark.parametrize("name", METHODS)
def test_engines_agree(name: str) -> None:
    one, other = (
        judged(METHODS[name], engine=engine, newcomer_epochs=2)[0]
        for engine in ("sequential", "vectorized")
    )
    for i in range(6):
        torch.testing.assert_close(one.client_state(i), other.client_state(i), rtol=0, atol=1e-9)


def test_only_members_train() -> None:
    _, before = judged(FedAvg)
    _, tuned = judged(FedAvg, finetune_epochs=2)
    federation, found = judged(FedAvg, finetune_epochs=2, newcomer_epochs=0)
    for i in data().new_clients.tolist():
        assert_same(federation.client_state(i), federation.server_states()[0])
    assert found["test/loss"] == found["test/finetuned/loss"] == tuned["test/loss"]
    assert found["test/new/loss"] == found["test/new/finetuned/loss"] == before["test/new/loss"]


def test_by_default_they_train_as_all_do() -> None:
    one, other = (
        judged(FedAvg, finetune_epochs=2, **more) for more in ({}, {"newcomer_epochs": 2})
    )
    assert one[1] == other[1]


def test_predictions_are_those_of_the_judged_models() -> None:
    federation, found = judged(FedAvg, newcomer_epochs=3)
    chunks = federation.trainer.predict(federation, datamodule=data())
    new = data().new_clients
    right = [
        (chunk.outputs.argmax(1) == chunk.targets)[chunk.clients == i].double().mean()
        for chunk in chunks
        for i in new
        if (chunk.clients == i).any()
    ]
    assert len(right) == len(new)
    assert torch.stack(right).mean().item() == pytest.approx(found["test/new/macro_acc"])


def test_without_data_members_are_known(tmp_path: Path) -> None:
    federation, _ = judged(FedAvg, newcomer_epochs=1)
    federation.trainer.save_checkpoint(tmp_path / "run.ckpt")
    loaded = Federation.load_from_checkpoint(
        tmp_path / "run.ckpt", client=client(), callback=FedAvg()
    )
    assert loaded.clients.newcomers.tolist() == data().new_clients.tolist()
    for i in range(6):
        if i in data().new_clients:
            with pytest.raises(ConfigurationError, match="needs the data"):
                loaded.client_state(i)
        else:
            assert_same(loaded.client_state(i), federation.client_state(i))


def test_deployments_refuse_it() -> None:
    federation = Federation(linear_client(), newcomer_epochs=1)
    with pytest.raises(ConfigurationError, match=r"newcomer_epochs: .* holds no client out"):
        agreement_on(federation, FedAvg(), small_data())

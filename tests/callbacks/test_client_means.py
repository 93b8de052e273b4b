"""A federation's metrics for one module that is trained on the samples of all clients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pflight import Federation
from pflight.callbacks import ClientMeans
from pflight.errors import ConfigurationError
from pflight.models import Classifier, Regressor
from tests.runs import CLASSES, FEATURES, linear_client, quiet_trainer, small_data

MEANS = {"micro_acc", "macro_acc", "micro_f1", "macro_f1", "pooled_acc", "worst_decile_acc"}


@pytest.mark.parametrize("f1_average", ["union", "all"])
def test_they_are_those_of_a_federation_with_this_model(f1_average: Any) -> None:
    data = small_data(holdout_clients=0.34, eval_batch_size=2)
    module = linear_client()
    trainer = quiet_trainer(2, ClientMeans(f1_average))
    trainer.fit(module, datamodule=data.centralized())
    found = {**trainer.callback_metrics}
    found |= trainer.test(module, datamodule=data.centralized(), verbose=False)[0]
    same = linear_client()
    same.load_state_dict(module.state_dict())
    federation, judge = Federation(same, f1_average=f1_average), quiet_trainer()
    (expected,) = judge.validate(federation, datamodule=data, verbose=False)
    expected |= judge.test(federation, datamodule=data, verbose=False)[0]
    for tag in [f"{group}{name}" for group in ("val/", "test/", "test/new/") for name in MEANS]:
        assert float(found[tag]) == pytest.approx(expected[tag]), tag
    for split in ("val", "test"):
        assert float(found[f"{split}/loss"]) == pytest.approx(expected[f"{split}/loss"])


def test_it_refuses_what_it_can_not_judge() -> None:
    with pytest.raises(ConfigurationError, match="use Centralized as the data, not ClientData"):
        quiet_trainer(1, ClientMeans()).fit(linear_client(), datamodule=small_data().client(0))
    module = Regressor(nn.Linear(FEATURES, 1))
    with pytest.raises(ConfigurationError, match="ClientMeans needs logits and classes"):
        quiet_trainer(1, ClientMeans()).fit(module, datamodule=small_data().centralized())
    with pytest.raises(ConfigurationError, match="f1_average"):
        ClientMeans("none")  # type: ignore[arg-type]


def test_a_network_in_another_precision() -> None:
    client = Classifier(nn.Linear(FEATURES, CLASSES), CLASSES)
    trainer = quiet_trainer(1, ClientMeans(), precision="bf16-mixed")
    trainer.fit(client, datamodule=small_data().centralized())
    assert 0 <= trainer.callback_metrics["val/macro_f1"] <= 1
    assert client.network.weight.dtype == torch.float32

"""The ready-made task for numbers: both engines, and what its clients are judged by."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torchmetrics.functional import mean_absolute_error, mean_squared_error, r2_score

from pflight import Federation
from pflight.callbacks import Ditto, FedAvg, FeSEM, Local, ServerCallback
from pflight.datamodules import FederatedDataModule
from pflight.errors import ConfigurationError
from pflight.models import Regressor
from tests.runs import ENGINES, quiet_trainer, run, sgd

COUNTS = {"train": (9, 14, 5, 11), "val": (6, 1, 4, 0), "test": (3, 5, 4, 6)}


class Numbers(FederatedDataModule):
    """Clients whose targets are numbers, or ``width`` of them."""

    def __init__(self, width: int | None = None, **options: Any) -> None:
        super().__init__(num_classes=None, **{"batch_size": 4, "cohort_size": 3, **options})
        self.num_clients, self.width = 4, width

    def num_samples(self, split: Any = "train") -> Tensor:
        return torch.tensor(COUNTS[split])

    def samples(self, client: int, split: Any) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(100 * len(split) + client)
        x = torch.randn(COUNTS[split][client], 3, generator=random, dtype=torch.float64)
        y = x[:, 0] - 0.5 * x[:, 1] + client
        return x, y if self.width is None else torch.stack(
            [y * (i + 1) for i in range(self.width)], 1
        )


def regressor(outputs: int = 1, **options: Any) -> Regressor:
    torch.manual_seed(2)
    network = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs))
    return Regressor(network, **{"optimizer": sgd(0.05), **options}).double()


@pytest.mark.short("FedAvg-None", "method1-1", "method2-2")
@pytest.mark.parametrize("width", [None, 1, 2])
@pytest.mark.parametrize(
    "method", [FedAvg, partial(FeSEM, 2, mu=0.1), partial(Ditto, lam=0.3), Local]
)
def test_both_engines_agree(method: Callable[[], ServerCallback], width: int | None) -> None:
    def fit(engine: str) -> Federation:
        module, data = regressor(width or 1), Numbers(width)
        return run(module, data, method(), 3, local_epochs=2, finetune_epochs=1, engine=engine)

    one, many = fit("sequential"), fit("vectorized")
    assert many.clients.attached_engine.obstacle is None
    assert many.clients.attached_engine.stacks_evaluation
    assert many.clients.attached_engine.fills_batches
    for client in range(4):
        torch.testing.assert_close(one.client_state(client), many.client_state(client))
    for left, right in zip(one.history, many.history, strict=True):
        assert left.metrics == pytest.approx(right.metrics, rel=1e-9)


@ENGINES
@pytest.mark.parametrize("width", [None, 2])
def test_clients_are_judged_as_by_torchmetrics_on_each_alone(
    engine: str, width: int | None
) -> None:
    data = Numbers(width)
    federation = run(regressor(width or 1), data, Local(), 2, engine=engine)
    values = federation.client_metrics("val")
    assert values["num_samples"].tolist() == list(COUNTS["val"])
    for client, count in enumerate(COUNTS["val"]):
        if not count:
            assert all(value[client].isnan() for n, value in values.items() if n != "num_samples")
            continue
        x, y = data.samples(client, "val")
        with torch.no_grad():
            given = federation.client_module(client)(x).view_as(y)
        expected = {
            "mae": mean_absolute_error(given, y),
            "rmse": mean_squared_error(given, y, squared=False),
            "loss": mean_squared_error(given, y),
        }
        for name, value in expected.items():
            assert values[name][client] == pytest.approx(float(value), rel=1e-6)
        if count == 1:
            assert values["r2"][client].isnan()  # it takes two
        else:
            assert values["r2"][client] == pytest.approx(float(r2_score(given, y)), rel=1e-5)


@ENGINES
def test_worse_is_more_of_an_error_and_less_of_what_is_explained(engine: str) -> None:
    federation = run(regressor(), Numbers(), Local(), 2, engine=engine)
    values, metrics = federation.client_metrics("val"), federation.history[-1].metrics
    known = {name: value[~value.isnan()] for name, value in values.items()}
    for name, worst in {"mae": max, "rmse": max, "loss": max, "r2": min}.items():
        expected = worst(known[name].tolist())
        assert metrics[f"val/worst_decile_{name}"] == pytest.approx(expected, rel=1e-6)
    assert metrics["val/macro_r2"] == pytest.approx(float(known["r2"].mean()), rel=1e-6)
    count = torch.tensor(COUNTS["val"]).double()[:3]
    micro = float((values["mae"][:3] * count).sum() / count.sum())
    assert metrics["val/micro_mae"] == pytest.approx(micro, rel=1e-6)


def test_the_best_checkpoint_has_the_least_error(tmp_path: Any) -> None:
    best = ModelCheckpoint(tmp_path, "best", monitor="val/macro_mae", mode="min")
    module = regressor(optimizer=sgd(0.2))  # which goes up and down
    federation = run(module, Numbers(), FedAvg(), 5, best)
    errors = [entry.metrics["val/macro_mae"] for entry in federation.history]
    assert float(best.best_model_score) == pytest.approx(min(errors), rel=1e-6)
    saved = torch.load(tmp_path / "best.ckpt", weights_only=True)
    assert saved["epoch"] == errors.index(min(errors))


def test_alone_under_a_stock_trainer_it_is_judged_alike() -> None:
    """Over several batches, too, of which the metrics of all samples are no means."""
    data = Numbers(eval_batch_size=4)
    module = regressor()
    (alone,) = quiet_trainer().test(module, data.client(3), verbose=False)
    x, y = data.samples(3, "test")
    with torch.no_grad():
        given = module(x).view_as(y)
    assert alone["test/r2"] == pytest.approx(float(r2_score(given, y)), rel=1e-5)
    assert alone["test/mae"] == pytest.approx(float(mean_absolute_error(given, y)), rel=1e-5)


def test_targets_and_outputs_that_do_not_fit_are_refused() -> None:
    class Classes(Numbers):
        def samples(self, client: int, split: Any) -> tuple[Tensor, Tensor]:
            x, y = super().samples(client, split)
            return x, y.long()

    with pytest.raises(ConfigurationError, match="its targets must be floating-point numbers"):
        run(regressor(), Classes(), FedAvg())
    with pytest.raises(ConfigurationError, match=r"outputs of shape \[2, 2\] for targets"):
        run(regressor(outputs=2), Numbers(), FedAvg())

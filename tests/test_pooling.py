"""Metrics of few or one-sided samples, and their values over the samples of all clients."""

import math
import pickle
import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics import (
    ExplainedVariance,
    KendallRankCorrCoef,
    MeanMetric,
    MeanSquaredError,
    Metric,
    MinMaxMetric,
    PearsonCorrCoef,
    R2Score,
    SpearmanCorrCoef,
)
from torchmetrics.classification import (
    BinaryAUROC,
    BinaryAveragePrecision,
    BinaryF1Score,
    BinaryMatthewsCorrCoef,
    BinaryRecall,
    BinarySpecificity,
    MulticlassAUROC,
    MulticlassAveragePrecision,
    MultilabelAUROC,
)

from pflight.callbacks import FedAvg
from pflight.datamodules import DatasetClients, TensorClients
from pflight.models import Regressor
from pflight.pooling import Pool, Seen, is_undefined
from tests.runs import run

SCORES = torch.tensor([0.2, 0.8, 0.6, 0.4])
BOTH, ONES = torch.tensor([0, 1, 0, 1]), torch.ones(4).long()
NUMBERS = torch.tensor([0.3, 1.9, -2.0, 0.4])
THREE = torch.tensor([0, 1, 2, 1])
OF_THREE = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.1, 0.2, 0.7], [0.3, 0.4, 0.3]])
TWO_LABELS = torch.stack([BOTH, ONES], dim=1)
LABEL_SCORES = torch.stack([SCORES, SCORES], dim=1)


@pytest.mark.parametrize(
    ("metric", "preds", "defined", "undefined"),
    [
        (BinaryAUROC(), SCORES, BOTH, [ONES, 1 - ONES]),
        (BinaryAUROC(thresholds=5), SCORES, BOTH, [ONES, 1 - ONES]),
        (BinaryAUROC(ignore_index=0), SCORES, None, [BOTH]),
        (BinaryAveragePrecision(), SCORES, ONES, [1 - ONES]),
        (MulticlassAUROC(3), OF_THREE, THREE, [BOTH, ONES]),
        (MulticlassAUROC(3, thresholds=5), OF_THREE, THREE, [BOTH]),
        (MulticlassAUROC(3, average="weighted"), OF_THREE, BOTH, [ONES]),
        (MulticlassAveragePrecision(3), OF_THREE, THREE, [BOTH]),
        (MultilabelAUROC(2), LABEL_SCORES, torch.stack([BOTH, 1 - BOTH], dim=1), [TWO_LABELS]),
        (MultilabelAUROC(2, average="micro"), LABEL_SCORES, TWO_LABELS, []),
        (BinaryRecall(), SCORES, ONES, [1 - ONES]),
        (BinarySpecificity(), SCORES, BOTH, [ONES]),
        (BinaryF1Score(), SCORES, BOTH, []),  # 0 by its option zero_division
        (BinaryMatthewsCorrCoef(), SCORES, BOTH, [ONES]),
        (R2Score(), SCORES, NUMBERS, [torch.full((4,), 0.1), torch.ones(1)]),
        (ExplainedVariance(), SCORES, NUMBERS, [torch.full((4,), 0.1), torch.ones(1)]),
        (MeanSquaredError(), SCORES, NUMBERS, []),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Metric) else "",
)
def test_a_metric_that_no_predictions_define_is_undefined(
    metric: Metric, preds: Tensor, defined: Tensor | None, undefined: list[Tensor]
) -> None:
    for targets, expected in [(defined, False), *((targets, True) for targets in undefined)]:
        if targets is not None:
            metric.reset()
            metric.update(preds[: len(targets)], targets)
            assert is_undefined(metric) is expected


@pytest.mark.parametrize(
    ("metric", "preds", "targets"),
    [
        (BinaryAUROC(), SCORES, BOTH),
        (BinaryAUROC(thresholds=5), SCORES, BOTH),
        (MulticlassAUROC(3), OF_THREE, THREE),
        (R2Score(), SCORES, NUMBERS),
        (MeanSquaredError(squared=False), SCORES, NUMBERS),
        (PearsonCorrCoef(), SCORES, NUMBERS),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Metric) else "",
)
def test_the_merged_states_of_clients_are_those_of_all_samples(
    metric: Metric, preds: Tensor, targets: Tensor
) -> None:
    pool = Pool(metric)
    for client, own in enumerate([slice(0, 1), slice(1, 4)]):  # the first is undefined
        metric.reset()
        metric.update(preds[own], targets[own])
        pool.add(client, Seen.by(metric))
    metric.reset()
    metric.update(preds, targets)
    pool = pickle.loads(pickle.dumps(pool))
    assert pool.value(range(4)) == pytest.approx(float(metric.compute()), rel=1e-5)
    metric.reset()
    metric.update(preds[1:], targets[1:])
    if not is_undefined(metric):
        assert pool.without([0]).value([0, 1]) == pytest.approx(float(metric.compute()))
    assert pool.value([]).isnan()


@pytest.mark.filterwarnings("ignore:Metric .* will save all targets:UserWarning")
@pytest.mark.parametrize("kind", [SpearmanCorrCoef, KendallRankCorrCoef])
def test_ranks_of_equal_targets_are_undefined(kind: type[Metric]) -> None:
    metric = kind()
    metric.update(SCORES, NUMBERS)
    assert not is_undefined(metric)
    metric.reset()
    metric.update(SCORES, torch.ones(4))
    assert is_undefined(metric)


def test_a_metric_that_holds_others_is_not_pooled() -> None:
    metric = MinMaxMetric(MeanMetric())
    metric.update(1.0)
    assert not Seen.by(metric).state
    assert not Seen.by(MeanMetric()).state  # has seen nothing


class Screening(L.LightningModule):
    """Scores patients, and logs AUROC as an object and perplexity's like as a ratio."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)
        self.auroc, self.r2 = BinaryAUROC(), R2Score()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.binary_cross_entropy_with_logits(self.net(x)[:, 0], y.float())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        scores = self.net(x)[:, 0]
        self.auroc.update(scores, y)
        self.r2.update(scores, x[:, 0])
        self.log("val/auroc", self.auroc)
        self.log("val_r2", self.r2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def patients() -> list[TensorDataset]:
    random = torch.Generator().manual_seed(3)
    counts = 12, 9, 1, 7
    x = [torch.randn(n, 3, generator=random) for n in counts]
    y = [(rows[:, 0] > 0).long() for rows in x]
    y[1][:] = 1  # only the ill are sent there
    return [TensorDataset(*pair) for pair in zip(x, y, strict=True)]


def test_auroc_by_hospital_and_of_all_patients() -> None:
    hospitals = patients()
    data = DatasetClients(hospitals, val=hospitals, eval_batch_size=4)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        federation = run(Screening(), data, FedAvg(), 1)
    values, metrics = federation.client_metrics("val"), federation.history[-1].metrics
    assert values["auroc"].isnan().tolist() == [False, True, True, False]
    assert values["r2"].isnan().tolist() == [False, False, True, False]
    module = federation.client_module(0).eval()
    x, y = (torch.cat(column) for column in zip(*(h.tensors for h in hospitals), strict=True))
    with torch.no_grad():
        scores = module.net(x)[:, 0]
    auroc, r2 = BinaryAUROC()(scores, y), R2Score()(scores, x[:, 0])
    assert metrics["val/pooled_auroc"] == pytest.approx(float(auroc))
    assert metrics["val/pooled_r2"] == pytest.approx(float(r2), rel=1e-5)
    assert metrics["val/macro_auroc"] == pytest.approx(float(values["auroc"][[0, 3]].mean()))
    assert not math.isnan(metrics["val/server/pooled_auroc"])
    messages = [str(warning.message) for warning in said]
    assert "round 0: val/auroc of client 1 and 1 others is undefined, NaN or infinite" in "".join(
        messages
    )
    assert not any("meaningless" in message for message in messages)


def test_a_regressor_s_errors_are_also_pooled() -> None:
    random = torch.Generator().manual_seed(1)
    x = [torch.randn(n, 3, generator=random) for n in (1, 5, 8, 6)]
    y = [rows.sum(dim=1) * scale for rows, scale in zip(x, (1.0, 2.0, 3.0, 0.0), strict=True)]
    pairs = [*zip(x, y, strict=True)]
    data = TensorClients(pairs, val=pairs, test=pairs)
    federation = run(Regressor(nn.Linear(3, 1)), data, FedAvg(), 1)
    values, metrics = federation.client_metrics("val"), federation.history[-1].metrics
    assert values["r2"].isnan().tolist() == [True, False, False, True]  # one sample; all are zero
    with torch.no_grad():
        given = federation.client_module(0)(torch.cat(x))[:, 0]
    expected = {"rmse": MeanSquaredError(squared=False), "r2": R2Score()}
    for name, metric in expected.items():
        pooled = float(metric(given, torch.cat(y)))
        assert metrics[f"val/pooled_{name}"] == pytest.approx(pooled, rel=1e-5)
    assert metrics["val/pooled_mae"] == pytest.approx(metrics["val/micro_mae"], rel=1e-5)
    assert metrics["val/pooled_rmse"] != pytest.approx(metrics["val/micro_rmse"], rel=1e-2)

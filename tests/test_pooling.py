"""Metrics of few or one-sided samples, and their values over the samples of all clients."""

import math
import pickle
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics import (
    ExplainedVariance,
    KendallRankCorrCoef,
    MeanMetric,
    MeanSquaredError,
    Metric,
    MinMaxMetric,
    MultioutputWrapper,
    NormalizedRootMeanSquaredError,
    PearsonCorrCoef,
    R2Score,
    RelativeSquaredError,
    SpearmanCorrCoef,
)
from torchmetrics.classification import (
    BinaryAUROC,
    BinaryAveragePrecision,
    BinaryCohenKappa,
    BinaryF1Score,
    BinaryJaccardIndex,
    BinaryMatthewsCorrCoef,
    BinaryPrecision,
    BinaryRecall,
    BinarySpecificity,
    MulticlassAUROC,
    MulticlassAveragePrecision,
    MulticlassSpecificity,
    MultilabelAUROC,
)

from pflight.callbacks import FedAvg
from pflight.datamodules import DatasetClients, TensorClients
from pflight.errors import ClientError
from pflight.metrics.pooling import Pool, Seen, is_undefined, value_of
from pflight.models import Classifier, Regressor
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
        (BinaryF1Score(), SCORES, ONES, [1 - ONES]),
        (BinaryPrecision(), 1 - ONES, ONES, [1 - ONES]),  # 0 by its option zero_division
        (BinaryJaccardIndex(), SCORES, ONES, [1 - ONES]),
        (BinaryCohenKappa(), SCORES, BOTH, [ONES]),
        (MulticlassSpecificity(2, average="macro"), SCORES > 0.5, BOTH, [ONES, 1 - ONES]),
        (RelativeSquaredError(), SCORES, NUMBERS, [torch.full((4,), 0.1), torch.ones(1)]),
        (1 - R2Score(), SCORES, NUMBERS, [torch.full((4,), 0.1)]),
        (2 * BinaryAUROC(), SCORES, BOTH, [ONES]),
        (MultioutputWrapper(R2Score(), 1), SCORES[:, None], NUMBERS[:, None], [ONES[:, None]]),
        (R2Score(), SCORES / 1e4, NUMBERS / 1e4, [torch.full((4,), 1e-5)]),
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


@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-5])
@pytest.mark.parametrize("adjusted", [0, 1])
def test_r2_does_not_depend_on_the_scale_of_targets(scale: float, adjusted: int) -> None:
    """Torchmetrics gives 0 where the targets' spread is below 1e-4."""
    metric = R2Score(adjusted=adjusted)
    metric.update(SCORES, NUMBERS)
    expected = float(metric.compute())
    metric.reset()
    metric.update(SCORES * scale, NUMBERS * scale)
    assert value_of(metric) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("count", [10, 300, 3000])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 123.4])
def test_equal_targets_are_equal_whatever_is_rounded(count: int, value: float) -> None:
    metric = R2Score()
    for part in torch.full((count,), value).split(7):
        metric.update(torch.zeros_like(part), part)
    assert value_of(metric).isnan()


def test_a_metric_that_holds_others_is_not_pooled() -> None:
    metric = MinMaxMetric(MeanMetric())
    metric.update(1.0)
    assert not Seen.by(metric).state
    assert not Seen.by(MeanMetric()).state  # has seen nothing


class Screening(L.LightningModule):
    """Scores patients, and logs AUROC as an object and perplexity's like as a ratio."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 1)
        self.auroc, self.r2 = BinaryAUROC(), R2Score()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.binary_cross_entropy_with_logits(self.net(x)[:, 0], y.float())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        scores = self.net(x)[:, 0].sigmoid()
        self.auroc.update(scores, y)
        self.r2.update(scores, x[:, 0])
        self.log("val/auroc", self.auroc)
        self.log("val_r2", self.r2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Unmerged(Screening):
    """Logs a metric whose states can't be merged."""

    def __init__(self) -> None:
        super().__init__()
        self.error = NormalizedRootMeanSquaredError("std")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.error.update(self.net(batch[0])[:, 0], batch[0][:, 0])
        self.log("val/nrmse", self.error)


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
        scores = module.net(x)[:, 0].sigmoid()
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


class Broken(Screening):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        raise KeyError("age")


@pytest.mark.filterwarnings("ignore:round 0. client . failed on its val samples")
@pytest.mark.parametrize("monitored", [False, True])
def test_if_nobody_can_be_judged_fit_ends_with_the_cause(monitored: bool, tmp_path: Path) -> None:
    hospitals = patients()
    data = DatasetClients(hospitals, val=hospitals)
    best = ModelCheckpoint(tmp_path, monitor="val/macro_auroc", mode="max")
    said = "no client could be judged on its val samples: all 4 failed, first .*KeyError: 'age'"
    with pytest.raises(ClientError, match=said):
        run(Broken(), data, FedAvg(), 2, *([best] if monitored else []))


class Mute(Classifier):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training and float(x.max()) > 50:
            raise ValueError("mute")
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:round .. client . failed on its val samples")
@pytest.mark.parametrize("mute", [1, 2])
def test_a_classifier_that_cannot_be_judged_is_an_error_at_the_end(mute: int) -> None:
    pairs = [(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))] * 2
    val = [(x + 100 * (client < mute), y) for client, (x, y) in enumerate(pairs)]
    data = TensorClients(pairs, val=val, num_classes=2)
    said = "no client could be judged on its val samples: all 2 failed, first .*mute"
    with pytest.raises(ClientError, match=said) if mute == 2 else nullcontext():
        run(Mute(nn.Linear(3, 2), 2), data, FedAvg(), 2)


@pytest.mark.filterwarnings("ignore:round 0. val/nrmse of client 2")  # of one sample
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
def test_metrics_that_cannot_be_merged_have_no_pooled_value() -> None:
    hospitals = patients()
    data = DatasetClients(hospitals, val=hospitals, eval_batch_size=4)
    with pytest.warns(UserWarning, match="there is no val/pooled_nrmse: .* raises IndexError"):
        federation = run(Unmerged(), data, FedAvg(), 1)
    metrics = federation.history[-1].metrics
    assert metrics["val/macro_nrmse"] > 0
    assert "val/pooled_nrmse" not in metrics


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

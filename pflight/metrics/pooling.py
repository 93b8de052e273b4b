"""Metric objects of many clients: undefined metrics, and values over all samples."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import (
    ExplainedVariance,
    KendallRankCorrCoef,
    Metric,
    R2Score,
    RelativeSquaredError,
    SpearmanCorrCoef,
)
from torchmetrics.classification import (
    BinaryAveragePrecision,
    BinaryCohenKappa,
    BinaryFBetaScore,
    BinaryJaccardIndex,
    BinaryMatthewsCorrCoef,
    BinaryPrecision,
    BinaryPrecisionRecallCurve,
    BinaryRecall,
    BinarySpecificity,
    MulticlassAveragePrecision,
    MulticlassCohenKappa,
    MulticlassMatthewsCorrCoef,
    MulticlassPrecisionRecallCurve,
    MulticlassSpecificity,
    MultilabelAveragePrecision,
    MultilabelPrecisionRecallCurve,
    MultilabelSpecificity,
)
from torchmetrics.utilities import dim_zero_cat

_NEED_POSITIVES = BinaryAveragePrecision, MulticlassAveragePrecision, MultilabelAveragePrecision
_OF_POSITIVES = BinaryRecall, BinaryPrecision, BinaryFBetaScore
_OF_NEGATIVES = BinarySpecificity, MulticlassSpecificity, MultilabelSpecificity
_OF_TWO_CLASSES = (
    BinaryMatthewsCorrCoef,
    MulticlassMatthewsCorrCoef,
    BinaryCohenKappa,
    MulticlassCohenKappa,
)
_CURVES = (
    BinaryPrecisionRecallCurve,
    MulticlassPrecisionRecallCurve,
    MultilabelPrecisionRecallCurve,
)


def value_of(metric: Metric) -> Tensor:
    """Return a metric's value for the samples that it has seen, or NaN if it is undefined."""
    value = own_value(metric)
    return metric.compute() if value is None else value


def own_value(metric: Metric) -> Tensor | None:
    """Return a value that takes the place of ``compute()``, or ``None``.

    It is NaN for an undefined metric. torchmetrics takes targets of a small spread for equal, and
    R² is then 0. Here R² of such targets is computed from larger numbers.
    """
    if is_undefined(metric):
        return torch.tensor(torch.nan)
    if type(metric) is R2Score:
        state: dict[str, Any] = metric.metric_state
        least = _spread(state).min()
        if torch.isclose(least, torch.zeros_like(least), atol=1e-4):
            larger = copy.deepcopy(metric)
            for name, power in (("sum_squared_error", 1), ("sum_error", 0.5), ("residual", 1)):
                setattr(larger, name, state[name] / least**power)
            larger._computed = None
            return larger.compute()
    return None


def is_undefined(metric: Metric) -> bool:
    """Return whether a metric has no value on the samples it has seen, for any predictions.

    torchmetrics returns 0 or 1 there, or raises. Examples are AUROC of samples of one class, R² of
    one sample or of equal targets, and recall or F1 without positives. A macro average over classes
    is undefined if one class is. A metric made of others is undefined if one of them is. Other
    metrics and users' metrics count as defined.
    """
    inner = [part for part in metric.modules() if isinstance(part, Metric) and part is not metric]
    if any(part.update_called and is_undefined(part) for part in inner):
        return True
    state: dict[str, Any] = metric.metric_state
    match metric:
        case R2Score() | RelativeSquaredError():
            counted, squares = state["total"], state["sum_squared_error"]
            return bool(counted < 2) or _are_equal(_spread(state), squares, counted)
        case ExplainedVariance():
            counted = state["num_obs"]
            squares = state["sum_squared_target"] / counted
            spread = squares - (state["sum_target"] / counted).square()
            return _are_equal(spread, squares, counted)
        case SpearmanCorrCoef() | KendallRankCorrCoef():
            targets = dim_zero_cat(state["target"])
            return bool((targets == targets[:1]).all(dim=0).any())
        case _ if isinstance(metric, _OF_TWO_CLASSES):
            return int((state["confmat"].sum(dim=1) > 0).sum()) < 2
        case BinaryJaccardIndex():
            return not state["confmat"][1].sum()
        case _ if isinstance(metric, _OF_NEGATIVES) and isinstance(state["tn"], Tensor):
            return not (state["tn"] + state["fp"]).all()
        case _ if isinstance(metric, _OF_POSITIVES) and isinstance(state["tp"], Tensor):
            return not (state["tp"] + state["fn"]).all()
        case _ if isinstance(metric, _CURVES):
            return _has_no_curve(metric, state)
    return False


def _spread(state: dict[str, Any]) -> Tensor:
    """Return the sum of squared differences of targets to their mean."""
    return state["sum_squared_error"] - state["sum_error"] * (state["sum_error"] / state["total"])


def _are_equal(spread: Tensor, squares: Tensor, count: Tensor | int) -> bool:
    """Return whether a spread of targets is within the rounding of their squares' sum."""
    return bool((spread <= torch.finfo(spread.dtype).eps * count * squares).any())


def _has_no_curve(metric: Metric, state: dict[str, Any]) -> bool:
    average = getattr(metric, "average", "macro")
    if average == "micro":
        return False
    positive, negative = _sides(metric, state)
    missing = positive == 0
    if not isinstance(metric, _NEED_POSITIVES):
        missing |= negative == 0
    if average == "weighted":  # by the positive samples of each class
        return not positive.any() or bool(missing[positive > 0].any())
    return bool(missing.any())


def _sides(metric: Metric, state: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the numbers of samples on either side of each class, ``[classes]`` or scalars."""
    if "confmat" in state:  # [thresholds, ..., 2, 2]
        negative, positive = state["confmat"][0].sum(dim=-1).unbind(dim=-1)
        return positive, negative
    targets = dim_zero_cat(state["target"])
    if isinstance(metric, MulticlassPrecisionRecallCurve):
        positive = torch.bincount(targets, minlength=metric.num_classes)
        return positive, len(targets) - positive
    return (targets == 1).sum(dim=0), (targets == 0).sum(dim=0)


class Seen(NamedTuple):
    """The state of a metric object at one client."""

    metric: Metric
    """The metric object; it may have been reset since."""
    state: dict[str, Any]

    @classmethod
    def by(cls, metric: Metric) -> Seen:
        """Return a metric's state. It is empty if it can't be merged with others.

        This is so if the metric holds other metrics, or was not updated.
        """
        inner = any(isinstance(part, Metric) for part in metric.children())
        if inner or not metric.update_called:
            return cls(metric, {})
        state = metric.metric_state.items()
        return cls(
            metric, {n: [*seen] if isinstance(seen, list) else seen.detach() for n, seen in state}
        )


class Pool:
    """The states of a metric object at some clients.

    Args:
        metric: The object; it is copied.
    """

    def __init__(self, metric: Metric) -> None:
        self._metric = copy.deepcopy(metric)
        self._metric.reset()
        self._states: dict[int, dict[str, Any]] = {}

    def add(self, client: int, seen: Seen) -> None:
        """Note the state of the client's metric."""
        self._states[client] = seen.state

    def update(self, other: Pool) -> None:
        """Add the states at other clients."""
        self._states |= other._states

    def without(self, clients: Collection[int]) -> Pool:
        """Return the states without those of some clients."""
        rest = copy.copy(self)
        rest._states = {i: state for i, state in self._states.items() if i not in clients}
        return rest

    def value(self, clients: Collection[int]) -> Tensor:
        """Return the metric of all samples of some clients; NaN without any, or if undefined.

        The states are merged as in torchmetrics for several processes.
        """
        states = [state for client, state in sorted(self._states.items()) if client in clients]
        if not states:
            return torch.tensor(torch.nan)
        merged = copy.deepcopy(self._metric)
        reductions: dict[str, Any] = merged._reductions
        for name, merge in reductions.items():
            parts = [state[name] for state in states]
            whole: Any
            if isinstance(parts[0], list):
                whole = [seen for part in parts for seen in part]
            else:
                whole = torch.stack(parts)
                whole = whole if merge is None else merge(whole)
            setattr(merged, name, whole)
        merged._update_count = len(states)
        return value_of(merged)

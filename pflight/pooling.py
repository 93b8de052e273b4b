"""Metric objects of many clients: which are undefined, and their values over all samples."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import ExplainedVariance, KendallRankCorrCoef, Metric, R2Score, SpearmanCorrCoef
from torchmetrics.classification import (
    BinaryAveragePrecision,
    BinaryMatthewsCorrCoef,
    BinaryPrecisionRecallCurve,
    BinaryRecall,
    BinarySpecificity,
    MulticlassAveragePrecision,
    MulticlassMatthewsCorrCoef,
    MulticlassPrecisionRecallCurve,
    MultilabelAveragePrecision,
    MultilabelPrecisionRecallCurve,
)
from torchmetrics.utilities import dim_zero_cat

_OF_POSITIVES = BinaryAveragePrecision, MulticlassAveragePrecision, MultilabelAveragePrecision
_CURVES = (
    BinaryPrecisionRecallCurve,
    MulticlassPrecisionRecallCurve,
    MultilabelPrecisionRecallCurve,
)


def value_of(metric: Metric) -> Tensor:
    """Return what a metric computes of the samples that it has seen, or NaN if it is undefined."""
    return torch.tensor(torch.nan) if is_undefined(metric) else metric.compute()


def is_undefined(metric: Metric) -> bool:
    """Return whether no predictions could give a metric a value on the samples that it has seen.

    torchmetrics returns 0 or 1 there, or raises. Examples are AUROC of samples of one class, R² of
    one sample or of equal targets, and recall without positives. A macro average over classes is
    undefined if one class is. Other metrics and those of users are taken as defined.
    """
    state: dict[str, Any] = metric.metric_state
    match metric:
        case R2Score():
            mean = state["sum_error"] / state["total"]
            spread = state["sum_squared_error"] - state["sum_error"] * mean
            # What R2Score itself takes for zero.
            zero = torch.isclose(spread, torch.zeros_like(spread), atol=1e-4)
            return bool(state["total"] < 2) or bool(zero.any())
        case ExplainedVariance():
            squares = state["sum_squared_target"] / state["num_obs"]
            spread = squares - (state["sum_target"] / state["num_obs"]).square()
            return bool((spread <= 1e-6 * squares).any())
        case SpearmanCorrCoef() | KendallRankCorrCoef():
            targets = dim_zero_cat(state["target"])
            return bool((targets == targets[:1]).all(dim=0).any())
        case BinaryMatthewsCorrCoef() | MulticlassMatthewsCorrCoef():
            return int((state["confmat"].sum(dim=1) > 0).sum()) < 2
        case BinaryRecall() if isinstance(state["tp"], Tensor):
            return not (state["tp"] + state["fn"]).all()
        case BinarySpecificity() if isinstance(state["tn"], Tensor):
            return not (state["tn"] + state["fp"]).all()
        case _ if isinstance(metric, _CURVES):
            return _has_no_curve(metric, state)
    return False


def _has_no_curve(metric: Metric, state: dict[str, Any]) -> bool:
    average = getattr(metric, "average", "macro")
    if average == "micro":
        return False
    positive, negative = _sides(metric, state)
    missing = positive == 0
    if not isinstance(metric, _OF_POSITIVES):
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
    """What a metric object has seen at one client."""

    metric: Metric
    """The object, which may since have been reset."""
    state: dict[str, Any]

    @classmethod
    def by(cls, metric: Metric) -> Seen:
        """Return what a metric has seen; its state is empty if it can't be merged with others.

        That is so if it holds other metrics, or was not updated.
        """
        inner = any(isinstance(part, Metric) for part in metric.children())
        if inner or not metric.update_called:
            return cls(metric, {})
        state = metric.metric_state.items()
        return cls(
            metric, {n: [*seen] if isinstance(seen, list) else seen.detach() for n, seen in state}
        )


class Pool:
    """What a metric object has seen at each of some clients.

    Args:
        metric: The object; it is copied.
    """

    def __init__(self, metric: Metric) -> None:
        self._metric = copy.deepcopy(metric)
        self._metric.reset()
        self._states: dict[int, dict[str, Any]] = {}

    def add(self, client: int, seen: Seen) -> None:
        """Note what the client's metric has seen."""
        self._states[client] = seen.state

    def update(self, other: Pool) -> None:
        """Add what was seen at other clients."""
        self._states |= other._states

    def without(self, clients: Collection[int]) -> Pool:
        """Return what was seen at all but some clients."""
        rest = copy.copy(self)
        rest._states = {i: state for i, state in self._states.items() if i not in clients}
        return rest

    def value(self, clients: Collection[int]) -> Tensor:
        """Return the metric of all samples of some clients; NaN without any, or if undefined.

        The states are merged as torchmetrics merges those of several processes.
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

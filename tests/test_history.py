"""The record of a run survives a checkpoint."""

from __future__ import annotations

import io
import math

import torch

from pflight.history import Round, dump_history, load_history


def saved_and_loaded(history: list[Round]) -> list[Round]:
    file = io.BytesIO()
    torch.save(dump_history(history), file)
    file.seek(0)
    return load_history(torch.load(file, weights_only=True))


def test_rounds_are_restored_with_the_metrics_that_each_of_them_has() -> None:
    history = [
        Round(0, [1, 4, 5], [4], 2**40, 12, {"train/loss": 0.1, "clients/sampled": 3}),
        Round(1, [2], [], 0, 0),
        Round(2, [], [], 7, 8, {"val/acc": 1 / 3, "train/loss": 0.2}),
    ]
    assert saved_and_loaded(history) == history


def test_a_metric_without_a_value_stays_without() -> None:
    (entry,) = saved_and_loaded([Round(0, [0], metrics={"val/acc": math.nan})])
    assert math.isnan(entry.metrics["val/acc"])


def test_a_run_without_rounds() -> None:
    assert saved_and_loaded([]) == []


def test_the_number_of_tensors_does_not_grow_with_the_rounds() -> None:
    def tensors(rounds: int) -> int:
        history = [Round(index, [index], metrics={"a": 1.0}) for index in range(rounds)]
        dumped = dump_history(history)
        leaves = torch.utils._pytree.tree_leaves(dumped)
        assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
        return len(leaves)

    assert tensors(3) == tensors(300)

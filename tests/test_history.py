"""The record of a run survives a checkpoint, which takes no longer late in a run than early."""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from pflight import Federation, history
from pflight.callbacks import FedAvg
from pflight.history import Journal, Round, Traffic, load_history
from tests.runs import linear_client, quiet_trainer, run, small_data


def saved_and_loaded(history: list[Round], journal: Journal | None = None) -> list[Round]:
    file = io.BytesIO()
    torch.save((journal or Journal()).dump(history), file)
    file.seek(0)
    return load_history(torch.load(file, weights_only=True))


def rounds(count: int, metrics: dict[str, float] | None = None) -> list[Round]:
    return [Round(index, [index, 2 * index + 1], metrics=metrics or {}) for index in range(count)]


def test_rounds_are_restored_with_the_metrics_that_each_of_them_has() -> None:
    history = [
        Round(0, [1, 4, 5], [4], 2**40, 12, {"train/loss": 0.1, "clients/sampled": 3}),
        Round(1, [2], [], 0, 0),
        Round(2, [], [], 7, 8, {"val/acc": 1 / 3, "train/loss": 0.2}),
        Round(3, [9, 3], [3], 7, 8, {"train/loss": 5e-324, "clients/sampled": 10**17 + 1}),
        Round(4, [0], [], 7, 8, {"val/acc": math.inf, "train/loss": -math.inf}),
    ]
    assert saved_and_loaded(history) == history


def test_a_metric_without_a_value_stays_without() -> None:
    (entry,) = saved_and_loaded([Round(0, [0], metrics={"val/acc": math.nan})])
    assert math.isnan(entry.metrics["val/acc"])


def test_numbers_of_tensors_and_arrays_are_numbers() -> None:
    values = {"one": torch.tensor(0.5), "two": np.float32(0.25), "three": np.float64(0.1)}
    (entry,) = saved_and_loaded([Round(0, [np.int64(3), np.int64(5)], metrics=values)])
    assert entry == Round(0, [3, 5], metrics={"one": 0.5, "two": 0.25, "three": 0.1})


def test_a_run_without_rounds() -> None:
    assert saved_and_loaded([]) == []


def test_the_last_round_may_still_be_added_to() -> None:
    journal, history = Journal(), rounds(3)
    assert saved_and_loaded(history, journal) == history
    history[-1].metrics["val/acc"] = 0.5
    assert saved_and_loaded(history, journal) == history
    history.append(Round(3, [1]))
    assert saved_and_loaded(history, journal) == history


@pytest.mark.parametrize("count", [0, 1, 3, 7])
def test_another_history_takes_its_place(count: int) -> None:
    journal = Journal()
    journal.dump(rounds(5))
    others = [Round(index, [index + 50]) for index in range(count)]
    assert saved_and_loaded(others, journal) == others


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda j: pickle.loads(pickle.dumps(j))])
def test_a_copy_of_a_journal_goes_on_alone(copied: Any) -> None:
    journal, history = Journal(), rounds(5)
    journal.dump(history)
    other, longer = copied(journal), [*history, Round(5, [7])]
    assert saved_and_loaded(longer, other) == longer
    assert saved_and_loaded(history, journal) == history


def test_a_checkpoint_writes_the_last_two_rounds_whatever_came_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[int] = []

    def lines(entry: Round, names: Any) -> bytes:
        written.append(entry.index)
        return before(entry, names)

    before, journal, history = history_lines(monkeypatch, lines), Journal(), rounds(300)
    journal.dump(history)
    for index in range(300, 303):
        written.clear()
        history.append(Round(index, [0]))
        journal.dump(history)
        assert written == [index - 1, index]


def history_lines(monkeypatch: pytest.MonkeyPatch, replacement: Any) -> Any:
    before = history._lines
    monkeypatch.setattr(history, "_lines", replacement)
    return before


def test_a_round_takes_few_bytes_and_its_names_are_written_once() -> None:
    names = [f"val/a metric with quite a long name/{number}" for number in range(20)]
    random = torch.Generator().manual_seed(0)
    history = [
        Round(i, torch.randperm(100, generator=random)[:10].sort().values.tolist())
        for i in range(500)
    ]
    for entry in history:
        entry.metrics = dict.fromkeys(names, torch.rand((), generator=random).item())
    size = len(Journal().dump(history))
    assert size < 40 * len(history)
    assert len(json.dumps([entry.metrics for entry in history])) > 1000 * len(history)


def test_everyone_in_every_round_takes_next_to_nothing() -> None:
    history = [Round(index, list(range(10_000))) for index in range(20)]
    assert len(Journal().dump(history)) < 100 * len(history)
    assert saved_and_loaded(history) == history


def test_traffic_adds_up_over_a_run_that_goes_on() -> None:
    history = [Round(0, [0], bytes_down=3, bytes_up=2), Round(1, [0], bytes_down=5, bytes_up=1)]
    traffic = Traffic(history)
    assert traffic.count(Round(2, [0], bytes_down=7, bytes_up=4)) == {
        "communication/bytes_down": 7,
        "communication/bytes_up": 4,
        "communication/total_bytes_down": 15,
        "communication/total_bytes_up": 7,
    }


class CountsReads(list[Round]):
    """A history that counts how many of its entries are asked for."""

    reads = 0

    def __iter__(self) -> Any:
        CountsReads.reads += len(self)
        return super().__iter__()

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        CountsReads.reads += len(found) if isinstance(place, slice) else 1
        return found


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_no_round_looks_through_all_that_came_before(tmp_path: Path) -> None:
    federation = Federation(linear_client())
    federation.clients.history = CountsReads()
    saver = ModelCheckpoint(tmp_path, save_on_train_epoch_end=True)
    for last in (10, 40):
        reads, before = CountsReads.reads, len(federation.history)
        quiet_trainer(last, FedAvg(), saver).fit(federation, datamodule=small_data())
        rounds = len(federation.history)
        # At the end, all are looked through twice: was any client trained, and was any judged?
        assert CountsReads.reads - reads <= 15 * (rounds - before) + 2 * rounds


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_an_earlier_checkpoint_has_its_own_history_whatever_came_after(tmp_path: Path) -> None:
    def saver(folder: str = "one") -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / folder, "{epoch}", save_top_k=-1, save_last=True)

    data, tmp = small_data(cohort_size=2), tmp_path / "one"
    whole = run(linear_client(), data, FedAvg(), 5, saver())
    again = run(linear_client(), data, FedAvg(), 4, saver(), ckpt_path=tmp / "epoch=1.ckpt")
    assert again.history == whole.history[:4]
    on = run(linear_client(), data, FedAvg(), 6, saver(), ckpt_path=tmp / "epoch=4.ckpt")
    assert on.history[:5] == whole.history
    assert [entry.index for entry in on.history] == list(range(6))
    logged = on.trainer.callback_metrics["communication/total_bytes_up"]
    assert logged == sum(entry.bytes_up for entry in on.history)
    loaded = Federation.load_from_checkpoint(tmp / "epoch=2.ckpt", client=linear_client())
    assert loaded.history == whole.history[:3]

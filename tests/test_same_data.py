"""A run goes on with the data that it began with, or says what differs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pflight import Federation
from pflight.callbacks import FedAvg, FedFomo
from pflight.datamodules import (
    IID,
    ClassesPerClient,
    FederatedDataModule,
    KnownClusters,
    PartitionedDataModule,
    Samples,
    TensorClients,
)
from pflight.errors import ConfigurationError
from pflight.models import Classifier
from tests.runs import CLASSES, FEATURES, linear_client, quiet_trainer, run, samples, small_data

COUNTS = (5, 12, 7, 9, 3, 10)
Make = Callable[[], FederatedDataModule]


def saved(path: Path, data: FederatedDataModule, **options: Any) -> Path:
    federation = run(linear_client(), data, rounds=1, **options)
    federation.trainer.save_checkpoint(path / "one.ckpt")
    return path / "one.ckpt"


def resumed(checkpoint: Path, data: FederatedDataModule, **options: Any) -> Federation:
    return run(linear_client(), data, rounds=2, ckpt_path=checkpoint, **options)


def with_labels(change: Callable[[int, Tensor], Tensor], split: str = "train") -> TensorClients:
    """Return the small data with other labels in a split."""
    data = small_data(COUNTS)
    pairs = {name: [data.samples(client, name) for client in range(6)] for name in ("train", "val")}
    pairs[split] = [(x, change(client, y)) for client, (x, y) in enumerate(pairs[split])]
    test = [data.samples(client, "test") for client in range(6)]
    return TensorClients(
        pairs["train"], test=test, val=pairs["val"], num_classes=CLASSES, batch_size=4
    )


def grouped(**options: Any) -> KnownClusters:
    options = {"num_clusters": 2, "difference": "features", **options}
    return KnownClusters(small_data(COUNTS), batch_size=4, **options)


class Dealt(PartitionedDataModule):
    """Samples of which many are alike, dealt to six clients."""

    def load(self) -> Samples:
        random = torch.Generator().manual_seed(0)
        return Samples(torch.randn(120, FEATURES, generator=random), torch.arange(120) % CLASSES)


def dealt(partition: Any = None, **options: Any) -> Dealt:
    partition = partition or IID()
    return Dealt(partition=partition, num_clients=6, num_classes=CLASSES, **options)


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (
            small_data,
            lambda: small_data((5, 12, 7, 40, 3, 10)),
            "client 3 has 40 training samples, 9 in the checkpoint;",
        ),
        (
            small_data,
            lambda: small_data((5, 12, 8, 40, 3, 11)),
            "client 2 has 8 training samples, 7 in the checkpoint; 2 other clients differ as well;",
        ),
        (
            small_data,
            lambda: with_labels(lambda client, y: (y + (client in (1, 4))) % CLASSES),
            "the labels or the selection of samples differ for clients 1, 4;",
        ),
        (
            small_data,
            lambda: with_labels(lambda client, y: (y + (client == 2)) % CLASSES, split="val"),
            "the labels or the selection of samples differ for client 2;",
        ),
        (
            lambda: small_data(holdout_clients=0.34),
            lambda: small_data(holdout_clients=0.34, seed=1),
            "only here or only in the checkpoint clients .* never train;",
        ),
        (dealt, lambda: dealt(ClassesPerClient(2)), "the labels .* clients 0, 1, 2, 3, 4 and 1 m"),
        (
            dealt,
            lambda: dealt(seed=1),
            "the labels .* differ for clients 0, 1, 2, 3, 4 and 1 more",
        ),
        (dealt, lambda: dealt(val_fraction=0.2), "client 0 has 12 training samples, 14 in the"),
        (grouped, lambda: grouped(seed=1), "the labels .* differ for clients"),
        (grouped, lambda: grouped(num_clusters=3), "the labels .* differ for clients"),
    ],
)
def test_other_data_are_an_error_that_says_what_differs(
    before: Make, now: Make, said: str, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigurationError, match=f"^the checkpoint was made with other data: {said}"
    ):
        resumed(saved(tmp_path, before()), now())


@pytest.mark.parametrize(
    "make", [small_data, dealt, grouped, lambda: small_data(holdout_clients=0.34)]
)
def test_the_same_data_made_again_are_no_others(make: Make, tmp_path: Path) -> None:
    resumed(saved(tmp_path, make()), make())


def test_labels_of_another_type_are_the_same(tmp_path: Path) -> None:
    resumed(saved(tmp_path, small_data()), with_labels(lambda _, y: y.to(torch.uint8)))


def test_other_data_may_be_allowed(tmp_path: Path) -> None:
    data = small_data((5, 12, 7, 40, 3, 10))
    federation = resumed(saved(tmp_path, small_data()), data, allow_other_data=True)
    assert len(federation.history) == 2
    federation.trainer.save_checkpoint(tmp_path / "two.ckpt")
    resumed(tmp_path / "two.ckpt", data)  # these are its own from now on
    with pytest.raises(ConfigurationError, match="client 3 has 9 training samples, 40 in the"):
        resumed(tmp_path / "two.ckpt", small_data())


def test_other_data_may_be_tested_on(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, small_data())
    federation, others = Federation(linear_client()), small_data((4, 4, 4, 4, 4, 4))
    trainer = quiet_trainer()
    for judge in (trainer.validate, trainer.test):
        judge(federation, datamodule=others, ckpt_path=checkpoint, verbose=False)
    trainer.predict(federation, datamodule=others, ckpt_path=checkpoint)
    loaded = Federation.load_from_checkpoint(checkpoint, client=linear_client())
    assert len(loaded.history) == 1


def test_what_a_callback_holds_out_belongs_to_the_data(tmp_path: Path) -> None:
    data = small_data(COUNTS)

    def fitted(rounds: int, share: float, **options: Any) -> Federation:
        return run(linear_client(), data, FedFomo(held_out=share), rounds, **options)

    fitted(1, 0.2).trainer.save_checkpoint(tmp_path / "one.ckpt")
    fitted(2, 0.2, ckpt_path=tmp_path / "one.ckpt")
    with pytest.raises(ConfigurationError, match="made with other data: client 0 has"):
        fitted(2, 0.5, ckpt_path=tmp_path / "one.ckpt")


class Slow(FederatedDataModule):
    """Samples that cost much to read; how many there are is known."""

    num_clients, offset = 3, 0.0

    def __init__(self) -> None:
        super().__init__(num_classes=CLASSES)
        self.read: list[tuple[int, str]] = []

    def samples(self, client: int, split: str) -> tuple[Tensor, Tensor]:
        self.read.append((client, split))
        return samples(4 if split == "train" else 0, client)


class SlowCounted(Slow):
    def num_samples(self, split: str = "train") -> Tensor:
        return torch.full((3,), 4 if split == "train" else 0)


class SlowKnown(SlowCounted):
    version = 0

    def fingerprint(self) -> Tensor:
        return torch.arange(3) * self.version


@pytest.mark.parametrize(("kind", "times"), [(Slow, 1), (SlowCounted, 0), (SlowKnown, 0)])
def test_samples_are_read_once_at_most(kind: type[Slow], times: int) -> None:
    data = kind()
    for _ in range(2):
        assert data.num_samples().tolist() == [4, 4, 4]
        assert data.fingerprint().shape == (3,)
    assert len(data.read) == times * 9


def test_a_data_set_may_know_better(tmp_path: Path) -> None:
    checkpoint, other = saved(tmp_path, SlowKnown()), SlowKnown()
    resumed(checkpoint, SlowKnown())
    other.version = 1
    with pytest.raises(ConfigurationError, match="differ for clients 1, 2;"):
        resumed(checkpoint, other)


@pytest.mark.parametrize("wrong", [torch.zeros(2), torch.zeros(3), torch.zeros(3, 1).long()])
def test_a_wrong_fingerprint_is_said(wrong: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlowKnown, "fingerprint", lambda self: wrong)
    with pytest.raises(ConfigurationError, match=r"SlowKnown\.fingerprint\(\) must return a whole"):
        saved(Path("nowhere"), SlowKnown())


def test_what_a_checkpoint_says_of_many_clients_is_small(tmp_path: Path) -> None:
    pair = torch.zeros(1, 2), torch.zeros(1, dtype=torch.long)
    data = TensorClients([pair] * 3000, num_classes=2, cohort_size=1)
    federation = run(Classifier(nn.Linear(2, 2), 2), data, FedAvg(), engine="sequential")
    federation.trainer.save_checkpoint(tmp_path / "one.ckpt")
    assert (tmp_path / "one.ckpt").stat().st_size < 12 * 3000 + 20_000

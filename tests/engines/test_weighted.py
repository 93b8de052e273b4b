"""Batches of unequal size in one call, filled up by samples that weigh nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflight.callbacks import FedAvg, FedSGD, ServerCallback
from pflight.engines.joint import JointClient
from pflight.engines.weighted import WeightedMeans
from pflight.models import Batch, ClientModule, ElasticClient, ProximalClient
from tests.engines.test_vectorized import both, double_data
from tests.runs import CLASSES, FEATURES, batchnorm_client, linear_client, network_client

WEIGHTS = torch.tensor([0.25, 0.0, 0.5, 0.25])
REAL = [0, 2, 2, 3]  # the same mean
COUNTS = [1, 9, 2, 5, 13, 8]


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss,
        F.l1_loss,
        F.huber_loss,
        F.smooth_l1_loss,
        F.binary_cross_entropy_with_logits,
        partial(F.kl_div, reduction="batchmean"),
        partial(F.kl_div, reduction="mean"),
        nn.BCEWithLogitsLoss(),
    ],
)
def test_losses_of_numbers(loss: Callable[..., Tensor]) -> None:
    values, targets = torch.randn(4, 3), torch.rand(4, 3)
    with WeightedMeans(WEIGHTS):
        weighted = loss(values, targets)
    torch.testing.assert_close(weighted, loss(values[REAL], targets[REAL]))


@pytest.mark.parametrize(
    "loss", [F.cross_entropy, partial(F.cross_entropy, label_smoothing=0.1), nn.NLLLoss()]
)
@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5)])
def test_losses_of_classes(loss: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    logits = torch.randn(shape).log_softmax(1)
    labels = torch.randint(3, (4, *shape[2:]))
    with WeightedMeans(WEIGHTS):
        weighted = loss(logits, labels)
    torch.testing.assert_close(weighted, loss(logits[REAL], labels[REAL]))


@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss])
def test_classes_that_weigh_and_classes_that_are_ignored(loss: Callable[..., Tensor]) -> None:
    options = {"weight": torch.tensor([1.0, 2.0, 3.0]), "ignore_index": 1}
    logits, labels = torch.randn(4, 3).log_softmax(1), torch.tensor([0, 2, 1, 2])
    with WeightedMeans(WEIGHTS):
        weighted = loss(logits, labels, **options)
    torch.testing.assert_close(weighted, loss(logits[REAL], labels[REAL], **options))


def test_probabilities_as_targets() -> None:
    logits, targets = torch.randn(4, 3, 2), torch.rand(4, 3, 2)
    with WeightedMeans(WEIGHTS):
        weighted = F.cross_entropy(logits, targets)
    torch.testing.assert_close(weighted, F.cross_entropy(logits[REAL], targets[REAL]))


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_other_reductions_are_left_alone(reduction: str) -> None:
    logits, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 1])
    with WeightedMeans(WEIGHTS):
        inside = F.cross_entropy(logits, labels, reduction=reduction)
    assert torch.equal(inside, F.cross_entropy(logits, labels, reduction=reduction))


class Own(ClientModule):
    """A client with a loss of its own."""

    averages_samples = True

    def __init__(self, *args: Any, own: Callable[[Tensor, Tensor], Tensor], **options: Any):
        super().__init__(*args, **options)
        self.own = own

    def loss(self, batch: Batch) -> Tensor:
        return self.own(self(batch[0]), batch[1])


def focal(logits: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(logits, y, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def decayed(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y) + 0.1 * F.mse_loss(logits, torch.zeros_like(logits))


def with_mean_logits(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y) + 1e-2 * logits.mean().square()


def without_a_class(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y) + (logits[:, 0] * (y == CLASSES - 1)).mean()


def of_classes(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, weight=torch.tensor([1.0, 1.0, 5.0]).to(logits))


def summed(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="sum")


def hardest(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="none").max()


def with_square_logits(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y) + 0.1 * logits.square().mean()


def seen_by_the_loss_alone(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y) + logits.detach().square().mean()


def calls_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Record the batch of each call in training, and whether its samples are weighted."""
    calls: list[tuple[int, bool]] = []
    gradients = JointClient.gradients

    def recorded(self: JointClient, *args: Any) -> Any:
        if len(args[2]) > 2:  # no trial
            calls.append((args[2].shape[1], args[4] is not None))
        return gradients(self, *args)

    monkeypatch.setattr(JointClient, "gradients", recorded)
    return calls


@pytest.mark.parametrize("batch_size", [4, None])
@pytest.mark.parametrize(
    ("loss", "filled"),
    [
        (F.cross_entropy, True),
        (decayed, True),
        (focal, False),
        (with_mean_logits, False),
        (without_a_class, False),
        (of_classes, True),
        (summed, False),
        (hardest, False),
        (with_square_logits, False),
        (seen_by_the_loss_alone, False),
    ],
)
@pytest.mark.parametrize("zeros", [True, False])
def test_losses_that_can_and_that_cant_be_weighted(
    loss: Callable[..., Tensor],
    filled: bool,
    batch_size: int | None,
    zeros: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both engines agree on any of them, also where a term vanishes for the first weights."""
    calls = calls_of(monkeypatch)
    data = double_data(counts=COUNTS, batch_size=batch_size, cohort_size=None)
    client = linear_client(partial(Own, own=loss), double=True)
    if zeros:
        for parameter in client.parameters():
            nn.init.zeros_(parameter)
    both(client, data=data, chunk=6, local_epochs=2)
    assert any(weighted for _, weighted in calls) == filled


def test_a_loss_that_does_not_say_that_it_is_a_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that is tried could tell what it does with other samples."""

    class Silent(Own):
        def loss(self, batch: Batch) -> Tensor:
            return super().loss(batch)

    calls = calls_of(monkeypatch)
    data = double_data(counts=COUNTS, cohort_size=None)
    both(linear_client(partial(Silent, own=F.cross_entropy), double=True), data=data, chunk=6)
    assert not any(weighted for _, weighted in calls)


@pytest.mark.parametrize(
    ("callback", "client", "a_round"),
    [
        (FedAvg, linear_client(ProximalClient, double=True), 2 * 3),
        (FedAvg, linear_client(ElasticClient, double=True), 2 * 3),
        (FedSGD, linear_client(double=True), 1),
        (partial(FedSGD, batches=2), linear_client(double=True), 1),
    ],
)
def test_one_call_a_step(
    callback: Callable[[], ServerCallback],
    client: ClientModule,
    a_round: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = calls_of(monkeypatch)
    data = double_data(counts=[7, 9, 10, 10, 11, 12], batch_size=4, cohort_size=None)
    both(client, callback, data=data, chunk=6, rounds=2, local_epochs=2)
    assert len(calls) == 2 * a_round
    assert all(weighted for _, weighted in calls)


def test_batches_of_one_size_are_not_weighted(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of(monkeypatch)
    both(linear_client(double=True), data=double_data(counts=[8] * 6, cohort_size=None), chunk=6)
    assert {weighted for _, weighted in calls} == {False}


def test_a_large_client_is_not_filled_up_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would cost more samples than a call does."""
    calls = calls_of(monkeypatch)
    data = double_data(counts=[900, 9, 5, 8, 7, 6], batch_size=None, cohort_size=None)
    both(linear_client(double=True), data=data, chunk=6, rounds=1)
    assert [size for size, _ in calls] == [9]  # the large one is alone, in a call of one row


@pytest.mark.parametrize("make", [batchnorm_client, linear_client])
def test_modules_whose_buffers_see_samples_are_grouped(
    make: Callable[..., ClientModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A statistic in a buffer would see the samples that fill batches up."""

    class Watching(ClientModule):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.register_buffer("mean", torch.zeros(FEATURES))

        averages_samples = True

        def loss(self, batch: Batch) -> Tensor:
            self.mean.mul_(0.5).add_(batch[0].flatten(1).mean(0).detach())
            return super().loss(batch)

    calls = calls_of(monkeypatch)
    data = double_data(counts=COUNTS, cohort_size=None)
    both(make(Watching).double(), data=data, chunk=6, local_epochs=2)
    assert not any(weighted for _, weighted in calls)


def test_samples_that_fill_up_are_real_ones() -> None:
    """A loss may be infinite for an image of zeros."""

    class Logarithm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.abs().log()

    client = network_client(nn.Sequential(Logarithm(), nn.Linear(FEATURES, CLASSES))).double()
    both(client, data=double_data(counts=COUNTS, cohort_size=None), chunk=6, local_epochs=2)

"""Batches of unequal size in one call, filled up by samples that weigh nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflight.callbacks import FedAvg, FedSGD, Reptile, ServerCallback
from pflight.engines.stacked.stack import Stack
from pflight.models import Batch, Classifier, ElasticClient, ProximalClient
from tests.engines.test_vectorized import both, double_data
from tests.runs import CLASSES, FEATURES, batchnorm_client, linear_client, network_client, run

COUNTS = [1, 9, 2, 5, 13, 8]


class Holding(Classifier):
    """A client with something of its own in place of the cross-entropy."""

    def __init__(self, *args: Any, own: Callable[[Tensor, Tensor], Tensor], **options: Any):
        super().__init__(*args, **options)
        self.own = own


class Own(Holding):
    """A client with losses of its own, of which its loss is the mean."""

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.own(outputs, targets)


class OwnMean(Holding):
    """A client with a loss of its own, and not a word of what its samples' losses are."""

    def loss(self, batch: Batch) -> Tensor:
        return self.own(self(batch[0]), batch[1])


class OwnBoth(OwnMean):
    """A client that says something else of its samples than its loss is the mean of."""

    def sample_losses(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], reduction="none")


plain = partial(F.cross_entropy, reduction="none")


def focal(logits: Tensor, y: Tensor) -> Tensor:
    losses = plain(logits, y)
    return (1 - (-losses).exp()) ** 2 * losses


def decayed(logits: Tensor, y: Tensor) -> Tensor:
    return plain(logits, y) + 0.1 * logits.square().mean(1)


def of_classes(logits: Tensor, y: Tensor) -> Tensor:
    return plain(logits, y, weight=torch.tensor([1.0, 1.0, 5.0]).to(logits))


def with_mean_logits(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y) + 1e-2 * logits.mean().square()


def without_a_class(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y) + (logits[:, 0] * (y == CLASSES - 1)).mean()


def summed(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="sum")


def hardest(logits: Tensor, y: Tensor) -> Tensor:
    return plain(logits, y).max()


def with_square_logits(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y) + 0.1 * logits.square().mean()


def seen_by_the_loss_alone(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y) + logits.detach().square().mean()


def calls_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Record the batch of each call in training, and whether its samples are weighted."""
    calls: list[tuple[int, bool]] = []
    gradients = Stack.gradients

    def recorded(
        self: Stack, own: Any, others: Any, batch: Any, weights: Tensor | None = None
    ) -> Any:
        if len(batch[0]) > 2:  # it is not the probe's
            calls.append((batch[0].shape[1], weights is not None))
        return gradients(self, own, others, batch, weights)

    monkeypatch.setattr(Stack, "gradients", recorded)
    return calls


@pytest.mark.short(
    "False-*-4",
    "True-Own-loss0-*-None",
    "True-OwnMean-cross_entropy-*-None",
    "True-OwnBoth-hardest-*-None",
    "True-OwnBoth-with_square_logits-*-4",
)
@pytest.mark.parametrize("batch_size", [4, None])
@pytest.mark.parametrize(
    ("kind", "loss", "filled"),
    [
        (Own, plain, True),
        (Own, decayed, True),
        (Own, focal, True),
        (Own, of_classes, True),
        (OwnMean, F.cross_entropy, False),
        (OwnMean, with_mean_logits, False),
        (OwnBoth, F.cross_entropy, True),
        (OwnBoth, with_mean_logits, False),
        (OwnBoth, without_a_class, False),
        (OwnBoth, summed, False),
        (OwnBoth, hardest, False),
        (OwnBoth, with_square_logits, False),
        (OwnBoth, seen_by_the_loss_alone, False),
    ],
)
@pytest.mark.parametrize("zeros", [True, False])
def test_losses_of_samples(
    kind: type[Holding],
    loss: Callable[..., Tensor],
    filled: bool,
    batch_size: int | None,
    zeros: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both engines agree on any of them, also where a term vanishes for the first weights."""
    calls = calls_of(monkeypatch)
    data = double_data(counts=COUNTS, batch_size=batch_size, cohort_size=None)
    client = linear_client(partial(kind, own=loss), double=True)
    if zeros:
        for parameter in client.parameters():
            nn.init.zeros_(parameter)
    both(client, data=data, chunk=6, local_epochs=2)
    assert any(weighted for _, weighted in calls) == filled


def test_own_losses_are_what_a_classifier_trains_on() -> None:
    data = double_data(counts=[9] * 6, cohort_size=None)
    fits = [
        run(linear_client(partial(kind, own=own), double=True), data, engine="sequential")
        for kind, own in ((Own, focal), (OwnMean, lambda *pair: focal(*pair).mean()))
    ]
    torch.testing.assert_close(*(fit.server_states()[0] for fit in fits))


@pytest.mark.parametrize(
    ("callback", "client", "a_round"),
    [
        (FedAvg, linear_client(ProximalClient, double=True), 2 * 3),
        (Reptile, linear_client(ElasticClient, double=True), 2 * 3),
        (FedSGD, linear_client(double=True), 1),
        (partial(FedSGD, batches=2), linear_client(double=True), 1),
    ],
)
def test_one_call_a_step(
    callback: Callable[[], ServerCallback],
    client: Classifier,
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


@pytest.mark.filterwarnings("ignore:round 0. clients change the buffer mean")
@pytest.mark.parametrize("make", [batchnorm_client, linear_client])
def test_modules_whose_buffers_see_samples_are_grouped(
    make: Callable[..., Classifier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A statistic in a buffer would see the samples that fill batches up."""

    class Watching(Classifier):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.register_buffer("mean", torch.zeros(FEATURES))

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

"""The engine trains a client as a stock Trainer would."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.core.hooks import DataHooks, ModelHooks
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import Sampler
from torchmetrics import SumMetric

from pflight.callbacks import FedAvg, Local
from pflight.data.data_module import ClientData
from pflight.data.loaders import batch_loader
from pflight.datamodules import TensorClients
from pflight.models import Classifier
from tests.runs import (
    CLASSES,
    FEATURES,
    assert_same,
    batchnorm_client,
    dropout_client,
    linear_client,
    network_client,
    quiet_trainer,
    run,
    samples,
    sgd,
    small_data,
)


class FirstRound(Sampler[int]):
    """The order in which client 0 sees its samples in the epochs of round 0."""

    def __init__(self, data: TensorClients) -> None:
        self.data = data
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return int(self.data.num_samples()[0])

    def __iter__(self) -> Iterator[int]:
        return iter(self.data.order(0, 0, self.epoch).tolist())


class FirstRoundData(ClientData):
    """Client 0's data, each epoch a local epoch of round 0."""

    def __init__(self, data: TensorClients) -> None:
        super().__init__(data, 0)

    def train_dataloader(self) -> Any:
        dataset = self.data.dataset(self.clients, "train")
        return batch_loader(dataset, self.data.batch_size, FirstRound(self.data))


def train_alone(client: Classifier, epochs: int, **options: Any) -> dict[str, Tensor]:
    trainer = quiet_trainer(epochs, limit_val_batches=0, **options)
    trainer.fit(client, datamodule=FirstRoundData(one_client()))
    return dict(client.state_dict())


def train_inside(client: Classifier, epochs: int, **options: Any) -> dict[str, Tensor]:
    federation = run(client, one_client(), FedAvg(), local_epochs=epochs, **options)
    return federation.server_states()[0]


def one_client() -> TensorClients:
    return small_data(counts=[11])  # batches of 4, 4 and 3


EPOCHS = 4
pytestmark = pytest.mark.filterwarnings("ignore:You have overridden `.*batch:UserWarning")


# Clients that a Lightning user might write


class WithScheduler(Classifier):
    """Takes its scheduler from a class attribute."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": self.schedule(optimizer)}


class EveryEpoch(WithScheduler):
    def schedule(self, optimizer):
        return StepLR(optimizer, 2, gamma=0.1)


class EverySecondEpoch(WithScheduler):
    def schedule(self, optimizer):
        return {"scheduler": ExponentialLR(optimizer, 0.3), "frequency": 2}


class EveryStep(WithScheduler):
    def schedule(self, optimizer):
        return {"scheduler": ExponentialLR(optimizer, 0.7), "interval": "step"}


class EverySecondStep(WithScheduler):
    def schedule(self, optimizer):
        return {"scheduler": ExponentialLR(optimizer, 0.3), "interval": "step", "frequency": 2}


class OneCycle(WithScheduler):
    def schedule(self, optimizer):
        steps = int(self.trainer.estimated_stepping_batches)
        return {"scheduler": OneCycleLR(optimizer, 0.5, total_steps=steps), "interval": "step"}


class ListsOfOptimizersAndSchedulers(Classifier):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [ExponentialLR(optimizer, 0.5)]


class OwnSchedulerStep(EveryEpoch):
    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()
        scheduler.step()


class PlateauByEpoch(WithScheduler):
    """Logs 1, 0, 0.4, ...: a mean over the epoch does not improve in the third one."""

    def schedule(self, optimizer):
        return {"scheduler": ReduceLROnPlateau(optimizer, factor=0.1, patience=0), "monitor": "m"}

    def training_step(self, batch, batch_idx):
        value = (1.0, 0.0, 0.4, 0.2)[self.current_epoch]
        self.log("m", value, on_step=False, on_epoch=True, batch_size=len(batch[1]))
        return super().training_step(batch, batch_idx)


class PlateauByStep(WithScheduler):
    def schedule(self, optimizer):
        plateau = ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
        return {"scheduler": plateau, "monitor": "train/loss", "interval": "step"}


class PlateauOnTheLastBatch(WithScheduler):
    """The monitored value is logged by the step: the last one counts, and it keeps falling."""

    def schedule(self, optimizer):
        plateau = ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
        return {"scheduler": plateau, "monitor": "m"}

    def training_step(self, batch, batch_idx):
        epoch = float(self.current_epoch)
        self.log("m", -epoch if batch_idx == 2 else 10 * epoch, batch_size=len(batch[1]))
        return super().training_step(batch, batch_idx)


class SometimesNone(Classifier):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class Dictionary(Classifier):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "extra": torch.ones(())}


class SkipsTheRest(Classifier):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 1 else None


class SkipsTheRestWithScheduler(EveryStep):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 1 else None


class ClipsByHand(Classifier):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, **_):
        self.clip_gradients(optimizer, 0.01, "value")


class ChangesGradients(Classifier):
    def on_after_backward(self):
        for parameter in self.network.parameters():
            parameter.grad.mul_(2)

    def on_before_optimizer_step(self, optimizer):
        for parameter in self.network.parameters():
            parameter.grad.add_(0.01)


class WarmUp(Classifier):
    """Lightning's documented recipe."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 5)


class OwnBackward(Classifier):
    def backward(self, loss, *args, **kwargs):
        (3 * loss).backward()

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)


class AugmentsOnTheDevice(Classifier):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return 2 * batch[0], batch[1]


class UsesEpochAndStep(Classifier):
    def loss(self, batch):
        return super().loss(batch) * (1 + self.current_epoch) / (1 + self.global_step)


class ScalesAtTheStart(Classifier):
    def on_train_start(self):
        with torch.no_grad():
            self.network.weight.mul_(0.5)

    def on_train_epoch_end(self):
        with torch.no_grad():
            self.network.weight.mul_(0.9)

    def on_train_end(self):
        with torch.no_grad():
            self.network.bias.add_(1)


class StopsInABatch(Classifier):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.trainer.should_stop = (self.current_epoch, batch_idx) == (1, 1)


class StopsAtTheStart(Classifier):
    def on_train_epoch_start(self):
        self.trainer.should_stop = self.current_epoch == 1


class StopsAtTheEnd(Classifier):
    def on_train_epoch_end(self):
        self.trainer.should_stop = self.current_epoch == 1


class Manual(Classifier):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()
        return loss


class TwoManualOptimizers(Manual):
    def configure_optimizers(self):
        weight = torch.optim.SGD([self.network.weight], lr=0.1, momentum=0.9)
        bias = torch.optim.Adam([self.network.bias], lr=0.05)
        return [weight, bias], [StepLR(weight, 1, gamma=0.5), ExponentialLR(bias, 0.9)]

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        if self.global_step > 4:
            for scheduler in self.lr_schedulers():
                scheduler.step()

    def on_train_epoch_end(self):
        if self.current_epoch == 1:
            self.lr_schedulers()[0].step()


class AccumulatesByHand(Manual):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class ManualClosure(Manual):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


KINDS = [
    EveryEpoch,
    EverySecondEpoch,
    EveryStep,
    EverySecondStep,
    OneCycle,
    ListsOfOptimizersAndSchedulers,
    OwnSchedulerStep,
    PlateauByEpoch,
    PlateauByStep,
    PlateauOnTheLastBatch,
    SometimesNone,
    Dictionary,
    SkipsTheRest,
    SkipsTheRestWithScheduler,
    ClipsByHand,
    ChangesGradients,
    WarmUp,
    OwnBackward,
    AugmentsOnTheDevice,
    UsesEpochAndStep,
    ScalesAtTheStart,
    StopsInABatch,
    StopsAtTheStart,
    StopsAtTheEnd,
    Manual,
    TwoManualOptimizers,
    AccumulatesByHand,
    ManualClosure,
]


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_client_ends_as_under_a_stock_trainer(kind: type[Classifier]) -> None:
    momentum = sgd(0.1, momentum=0.9)
    inside = train_inside(linear_client(kind, optimizer=momentum), EPOCHS)
    alone = train_alone(linear_client(kind, optimizer=momentum), EPOCHS)
    torch.testing.assert_close(inside, alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.Adam(p, lr=0.05),
        lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
        lambda p: torch.optim.RMSprop(p, lr=0.01),
    ],
    ids=["Adam", "AdamW", "SGD", "LBFGS", "RMSprop"],
)
def test_optimizers(optimizer: Callable) -> None:
    inside = train_inside(linear_client(optimizer=optimizer), EPOCHS)
    alone = train_alone(linear_client(optimizer=optimizer), EPOCHS)
    torch.testing.assert_close(inside, alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_the_clients_clipping_is_that_of_a_trainer(algorithm: str) -> None:
    clipped = linear_client(gradient_clip_val=0.05, gradient_clip_algorithm=algorithm)
    inside = train_inside(clipped, EPOCHS)
    by_trainer = train_alone(
        linear_client(), EPOCHS, gradient_clip_val=0.05, gradient_clip_algorithm=algorithm
    )
    torch.testing.assert_close(inside, by_trainer, rtol=0, atol=1e-6)
    by_client = train_alone(
        linear_client(gradient_clip_val=0.05, gradient_clip_algorithm=algorithm), EPOCHS
    )
    torch.testing.assert_close(inside, by_client, rtol=0, atol=1e-6)


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed", "bf16-true"])
def test_precision_is_that_of_the_trainer(precision: str) -> None:
    inside = train_inside(linear_client(), EPOCHS, trainer={"precision": precision})
    alone = train_alone(linear_client(), EPOCHS, precision=precision)
    torch.testing.assert_close(inside, alone, rtol=0, atol=1e-6 if "64" in precision else 1e-2)


def test_batchnorm_trains_as_alone() -> None:
    inside = train_inside(batchnorm_client(), EPOCHS)
    alone = train_alone(batchnorm_client(), EPOCHS)
    torch.testing.assert_close(inside, alone, rtol=0, atol=1e-6)


# The order of hooks

OF_THE_FIT = {  # those of a whole fit have no place in a client's local training
    "configure_callbacks",
    "configure_sharded_model",
    "teardown",
    "train_dataloader",
    "val_dataloader",
    "test_dataloader",
    "predict_dataloader",
}
BY_HAND = [
    "configure_optimizers",
    "training_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "backward",
    "configure_gradient_clipping",
    "lr_scheduler_step",
]
HOOKS = (
    sorted(
        {
            name
            for hooks in (ModelHooks, DataHooks)
            for name in vars(hooks)
            if not name.startswith("_")
        }
        - OF_THE_FIT
    )
    + BY_HAND
)


def recording(kind: type[Classifier], calls: list[str]) -> type[Classifier]:
    """Return a subclass that notes the name of every hook when it is called."""

    def noted(name: str) -> Callable:
        def hook(self: Classifier, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return getattr(super(Recorded, self), name)(*args, **kwargs)

        return hook

    Recorded = type("Recorded", (kind,), {name: noted(name) for name in HOOKS})  # noqa: N806
    return Recorded


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
@pytest.mark.parametrize(
    "kind",
    [
        Classifier,
        EveryEpoch,
        EveryStep,
        EverySecondStep,
        PlateauByEpoch,
        PlateauByStep,
        SometimesNone,
        SkipsTheRestWithScheduler,
        Manual,
        TwoManualOptimizers,
        ManualClosure,
    ],
    ids=lambda kind: kind.__name__,
)
def test_the_order_of_all_hooks(kind: type[Classifier]) -> None:
    inside: list[str] = []
    train_inside(linear_client(recording(kind, inside)), 2)
    alone: list[str] = []
    train_alone(linear_client(recording(kind, alone)), 2)
    assert inside == alone


def test_the_order_of_hooks_with_lbfgs() -> None:
    def optimizer(parameters):
        return torch.optim.LBFGS(parameters, max_iter=2)

    inside: list[str] = []
    train_inside(linear_client(recording(Classifier, inside), optimizer=optimizer), 1)
    alone: list[str] = []
    train_alone(linear_client(recording(Classifier, alone), optimizer=optimizer), 1)
    assert inside == alone


@pytest.mark.parametrize("kind", [Classifier, Dictionary, Manual])
def test_on_train_batch_end_sees_the_same_output(kind: type[Classifier]) -> None:
    seen: list[Any] = []

    class Watching(kind):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append((batch_idx, outputs))

    train_inside(linear_client(Watching), 1)
    inside = seen.copy()
    seen.clear()
    train_alone(linear_client(Watching), 1)
    assert len(inside) == len(seen) == 3
    for ours, theirs in zip(inside, seen, strict=True):
        assert type(ours[1]) is type(theirs[1])
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


class TestLocalSteps:
    class Counting(Classifier):
        batches: list[tuple[int, int]]

        def training_step(self, batch, batch_idx):
            type(self).batches.append((self.current_epoch, batch_idx))
            return super().training_step(batch, batch_idx)

    @pytest.mark.parametrize("steps", [1, 3, 4, 7])
    def test_they_go_over_as_many_epochs_as_they_take(self, steps: int) -> None:
        self.Counting.batches = []
        run(linear_client(self.Counting), one_client(), FedAvg(), local_steps=steps)
        expected = [(epoch, index) for epoch in range(3) for index in range(3)]
        assert self.Counting.batches == expected[:steps]

    def test_a_client_that_always_skips_its_epoch_does_not_run_forever(self) -> None:
        class Skipping(Classifier):
            epochs = 0

            def on_train_epoch_start(self):
                type(self).epochs += 1
                assert type(self).epochs < 100, "endless"

            def on_train_batch_start(self, batch, batch_idx):
                return -1

        federation = run(linear_client(Skipping), one_client(), FedAvg(), local_steps=2)
        assert federation.history[0].failed == []

    def test_a_one_cycle_schedule_knows_the_number_of_steps(self) -> None:
        for steps in (2, 7):
            federation = run(
                linear_client(OneCycle), one_client(), FedAvg(), rounds=2, local_steps=steps
            )
            assert federation.history[-1].failed == []


# What a client logs


def test_logs_are_means_by_sample_count_over_batches_epochs_and_clients() -> None:
    class Logging(Classifier):
        def training_step(self, batch, batch_idx):
            self.log("size", float(len(batch[1])))
            self.log_dict({"by_hand": batch_idx}, batch_size=1)
            self.log_dict({"a": torch.tensor(2.0), "b": self.current_epoch}, prog_bar=True)
            return super().training_step(batch, batch_idx)

    data = small_data(counts=[5, 8, 3])  # batches: 4 1, 4 4, 3
    federation = run(linear_client(Logging), data, FedAvg(), local_epochs=2)
    metrics = federation.history[0].metrics
    assert metrics["size"] == pytest.approx((16 + 1 + 16 + 16 + 9) / 16)
    assert metrics["by_hand"] == pytest.approx(2 / 5)
    assert metrics["a"] == 2
    assert metrics["b"] == 0.5
    assert np.isfinite(metrics["train/loss"])


def test_the_training_loss_of_a_full_batch_is_that_of_the_server() -> None:
    data = small_data(batch_size=None)
    client = linear_client()
    federation = run(client, data, FedAvg())
    x, y = data.dataset(torch.arange(6), "train").__getitems__(range(46))
    expected = nn.functional.cross_entropy(client(x), y).item()
    assert federation.history[0].metrics["train/loss"] == pytest.approx(expected, rel=1e-6)


# Randomness


def test_dropout_depends_on_seed_round_and_client_alone() -> None:
    together = run(dropout_client(), small_data(), Local(), local_epochs=2)
    drawn: set[int] = set()
    for seed in range(4):
        data = small_data(cohort_size=2)
        data.cohorts.seed = seed
        few = run(dropout_client(), data, Local(), local_epochs=2)
        (entry,) = few.history
        for i in entry.clients:
            assert_same(few.client_state(i), together.client_state(i))
        drawn |= set(entry.clients)
    assert len(drawn) > 2


def test_dropout_differs_by_seed_round_and_client() -> None:
    class Masks(Classifier):
        masks: list[Tensor]

        def training_step(self, batch, batch_idx):
            type(self).masks.append(nn.functional.dropout(torch.ones(64)))
            return super().training_step(batch, batch_idx)

    masks = []
    for seed in (0, 1):
        Masks.masks = []
        data = small_data(counts=[4, 4])
        options = {"local_epochs": 2, "seed": seed, "engine": "sequential"}
        run(linear_client(Masks), data, FedAvg(), rounds=2, **options)
        masks += [tuple(mask.tolist()) for mask in Masks.masks]
    assert len(set(masks)) == len(masks) == 2 * 2 * 2 * 2


def test_a_run_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(11), np.random.seed(11), random.seed(11)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    states = []

    class Watch(L.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            states.append((torch.get_rng_state(), np.random.get_state()[1], random.getstate()))

        on_train_batch_end = on_train_epoch_end = on_train_batch_start

    client = dropout_client()
    torch.set_rng_state(before[0])
    run(client, small_data(), FedAvg(), 2, Watch(), finetune_epochs=1)
    for state in states:
        assert torch.equal(state[0], before[0])
        assert np.array_equal(state[1], before[1])
        assert state[2] == before[2]


def test_users_own_randomness_in_a_client_is_reproducible() -> None:
    class Noisy(Classifier):
        def loss(self, batch):
            noise = random.random() + np.random.rand() + torch.rand(()).item()
            return super().loss(batch) * noise

    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    one = run(linear_client(Noisy), small_data(), FedAvg(), rounds=2)
    np.random.seed(2), random.seed(2)
    other = run(linear_client(Noisy), small_data(), FedAvg(), rounds=2)
    assert_same(one.server_states()[0], other.server_states()[0])


def test_evaluation_between_rounds_changes_nothing() -> None:
    data = small_data()
    often = run(dropout_client(), data, FedAvg(), rounds=4, finetune_epochs=1)
    never = run(dropout_client(), data, FedAvg(), rounds=4, trainer={"limit_val_batches": 0})
    assert_same(often.server_states()[0], never.server_states()[0])


def test_optimizer_state_is_rebuilt_at_every_participation() -> None:
    data = small_data(counts=[8], batch_size=None)
    momentum = run(linear_client(optimizer=sgd(0.1, momentum=0.9)), data, FedAvg(), rounds=5)
    plain = run(linear_client(), data, FedAvg(), rounds=5)
    assert_same(momentum.server_states()[0], plain.server_states()[0])


def test_a_network_may_use_a_parameter_twice_or_not_at_all() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(FEATURES, FEATURES)
            self.second = self.first
            self.idle = nn.Linear(2, 2)
            self.output = nn.Linear(FEATURES, CLASSES)

        def forward(self, x):
            return self.output(self.second(self.first(x)))

    inside = train_inside(network_client(Odd()), EPOCHS)
    alone = train_alone(network_client(Odd()), EPOCHS)
    torch.testing.assert_close(inside, alone, rtol=0, atol=1e-6)


class Counts(Classifier):
    """Keeps a count on itself, which must not reach the next client."""

    steps = 0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps += 1
        self.log("steps", float(self.steps))


def test_what_a_client_sets_on_itself_does_not_reach_the_next() -> None:
    data = small_data([8, 8, 8, 8])
    federation = run(linear_client(Counts), data, rounds=2)
    assert [entry.metrics["steps"] for entry in federation.history] == [1.5, 1.5]


@pytest.mark.parametrize(("width", "expected"), [(8, 1), (2_000, 2)])
def test_small_networks_train_on_one_thread_and_give_the_others_back(width, expected) -> None:
    class Watches(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            threads.append(torch.get_num_threads())

    threads: list[int] = []
    network = nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, CLASSES))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        data = small_data([1000], batch_size=None)
        run(network_client(network, Watches), data)
        assert threads == [expected]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# What one client leaves behind


class Leaving(Classifier):
    """Leaves something of itself behind at every loss, and trains by it."""

    def leave(self) -> Tensor | float:
        raise NotImplementedError

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * self.leave()


class LeavesAList(Leaving):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[int] = []

    def leave(self) -> float:
        self.seen.append(1)
        return len(self.seen)


class LeavesADictionary(Leaving):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.average = {"loss": 1.0}

    def leave(self) -> float:
        self.average["loss"] += 0.5
        return self.average["loss"]


class LeavesACounter(Leaving):
    count = 0

    def leave(self) -> float:
        self.count += 1
        return self.count


class Counter:
    """Counts its calls in itself, as a loss that is an object may do."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return self.calls


class LeavesAnObject(Leaving):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.scale = Counter()

    def leave(self) -> float:
        return self.scale()


class LeavesAnUnsavedBuffer(Leaving):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_buffer("steps", torch.zeros(()), persistent=False)

    def leave(self) -> Tensor:
        return self.steps.add_(1).clone()


class LeavesItsMode(Leaving):
    def leave(self) -> float:
        was = self.network.training
        self.network.eval()
        return 1.0 if was else 2.0


class LeavesItFrozen(Leaving):
    def leave(self) -> float:
        self.network.bias.requires_grad_(False)
        return 1.0


class LeavesAForwardHook(Leaving):
    def leave(self) -> float:
        self.network.register_forward_hook(lambda module, args, output: 2 * output)
        return 1.0


class LeavesAGradientHook(Leaving):
    def leave(self) -> float:
        self.network.weight.register_hook(lambda gradient: 2 * gradient)
        return 1.0


def double_gradient(parameter: Tensor) -> None:
    parameter.grad.mul_(2)


class LeavesAnAccumulationHook(Leaving):
    def leave(self) -> float:
        self.network.weight.register_post_accumulate_grad_hook(double_gradient)
        return 1.0


class LeavesAnotherParameter(Leaving):
    def leave(self) -> float:
        self.network.bias = nn.Parameter(self.network.bias.detach() + 1)
        return 1.0


class LeavesMetrics(Leaving):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.metric = SumMetric()

    def leave(self) -> Tensor:
        self.metric.update(1.0)
        return self.metric.compute()


LEAVING = [
    LeavesAList,
    LeavesADictionary,
    LeavesACounter,
    LeavesAnObject,
    LeavesAnUnsavedBuffer,
    LeavesItsMode,
    LeavesItFrozen,
    LeavesAForwardHook,
    LeavesAGradientHook,
    LeavesAnAccumulationHook,
    LeavesAnotherParameter,
    LeavesMetrics,
]


@pytest.mark.parametrize("general", [False, True], ids=["lean", "general"])
@pytest.mark.parametrize("kind", LEAVING, ids=lambda kind: kind.__name__)
def test_nothing_of_one_client_reaches_the_next(kind: type[Classifier], general: bool) -> None:
    """Of two clients with the same samples, the second trains as the first did."""
    if general:
        kind = type(kind.__name__, (kind,), {"on_train_start": lambda self: None})
    client = linear_client(kind, double=True)
    before = str(vars(client))
    same = samples(8, 1, torch.float64)
    data = TensorClients([same, same], num_classes=CLASSES, batch_size=8)
    federation = run(client, data, Local(), 2, local_epochs=3, engine="sequential")
    assert federation.history[0].failed == []
    states = [federation.client_state(i) for i in (0, 1)]
    torch.testing.assert_close(*states)  # batches are in another order
    assert not torch.equal(states[0]["network.weight"], client.network.weight)
    assert str(vars(client)) == before

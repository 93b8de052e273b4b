"""Many clients at once give what they give one by one."""

from __future__ import annotations

import copy
import gc
import random
import re
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from lightning import Callback
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

from pflight import Federation
from pflight.callbacks import FedAvg, FedRep, FedSGD, FeSEM, Local, Reptile, ServerCallback
from pflight.datamodules import TensorClients
from pflight.engines import VectorizedEngine
from pflight.engines.stacked.steps import StackedOptimizer
from pflight.errors import ClientError, ConfigurationError
from pflight.local_client import LocalClient
from pflight.method import OWN, ClientMethod
from pflight.models import Classifier, ElasticClient, ProximalClient
from pflight.states.state import StateLayout
from pflight.states.updates import ClientUpdates
from tests.runs import (
    CLASSES,
    ENGINES,
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

COUNTS = (5, 12, 7, 9, 3, 10)


def double_data(**options: Any) -> TensorClients:
    return small_data(**{"cohort_size": 4, "dtype": torch.float64, **options})


def bits(federation: Federation) -> list[dict[str, Tensor]]:
    return [*federation.server_states(), *map(federation.client_state, range(6))]


def obstacle(federation: Federation) -> str | None:
    assert isinstance(federation.clients.attached_engine, VectorizedEngine)
    return federation.clients.attached_engine.obstacle


def said_of(what: str, warned: pytest.WarningsRecorder) -> list[str]:
    texts = [str(warning.message) for warning in warned]
    return [text for text in texts if what in text]


def assert_close(one: Federation, other: Federation, tolerance: float = 1e-10) -> None:
    for left, right in zip(bits(one), bits(other), strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)
    for left, right in zip(one.history, other.history, strict=True):
        assert left.clients == right.clients
        assert left.failed == right.failed
        assert left.metrics == pytest.approx(right.metrics, rel=tolerance, abs=tolerance)


def both(
    client: Classifier,
    callback: Callable[[], ServerCallback] = FedAvg,
    data: TensorClients | None = None,
    rounds: int = 3,
    chunk: int | None = 3,
    **options: Any,
) -> Federation:
    """Run both engines, compare them, and return the vectorized run."""
    data = double_data() if data is None else data
    fit = partial(run, client, data, rounds=rounds, **options)
    stacked = fit(callback=callback(), engine="vectorized", clients_at_once=chunk)
    assert obstacle(stacked) is None
    assert_close(fit(callback=callback(), engine="sequential"), stacked)
    return stacked


# Equality with the sequential engine


@pytest.mark.parametrize(
    ("callback", "kind", "options"),
    [
        (partial(FeSEM, 2), ProximalClient, {"scaling": "eq7"}),
        (Reptile, ElasticClient, {"constraint": "l2"}),
        (Reptile, ElasticClient, {"constraint": None}),
        (FedSGD, ProximalClient, {}),
        (partial(FedSGD, batches=2), Classifier, {}),
    ],
)
def test_options_of_algorithms(
    callback: Callable[[], ServerCallback], kind: type[Classifier], options: dict[str, Any]
) -> None:
    """The common tester compares all algorithms with their default options."""
    both(batchnorm_client(kind, **options).double(), callback, rounds=4)


@pytest.mark.short(
    "optimizer0-duration0",
    "optimizer1-duration0",
    "optimizer2-duration0",
    "optimizer3-duration0",
    "optimizer4-duration1",
    "optimizer5-duration1",
    "optimizer6-duration1",
    "optimizer7-duration1",
)
@pytest.mark.parametrize("duration", [{"local_epochs": 3}, {"local_steps": 4}])
@pytest.mark.parametrize(
    "optimizer",
    [
        partial(SGD, lr=0.1),
        partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
        partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
        partial(SGD, lr=0.1, momentum=0.9, dampening=0.5, foreach=True),
        partial(Adam, lr=0.05, weight_decay=0.1),
        partial(Adam, lr=0.05, amsgrad=True),
        partial(AdamW, lr=0.05),
        partial(RMSprop, lr=0.02, momentum=0.5, centered=True),
    ],
)
def test_optimizers(optimizer: Callable[..., Any], duration: dict[str, int]) -> None:
    both(linear_client(double=True, optimizer=optimizer), **duration)


class TwoSteps(Classifier):
    """Trains weights and biases with steps of their own, and leaves one bias alone."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        layers = self.network[0], self.network[-1]
        groups = [
            {"params": [layer.weight for layer in layers], "lr": 0.1},
            {"params": [layers[0].bias], "lr": 0.01, "momentum": 0.5},
        ]
        return SGD(groups, lr=1.0)


def test_parameter_groups() -> None:
    stacked = both(batchnorm_client(TwoSteps).double(), local_epochs=2)
    states = zip(*(state["network.3.bias"] for state in bits(stacked)), strict=True)
    assert all(len({float(value) for value in values}) == 1 for values in states)


@pytest.mark.short("0.01-norm", "0.3-value", "100.0-norm")
@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("limit", [0.01, 0.3, 100.0])
def test_clipping(algorithm: str, limit: float) -> None:
    client = batchnorm_client(gradient_clip_val=limit, gradient_clip_algorithm=algorithm)
    both(client.double(), local_epochs=2)


@pytest.mark.short("4", "None")
@pytest.mark.parametrize("batch_size", [2, 4, 7, None])
def test_batchnorm_of_ragged_clients(batch_size: int | None) -> None:
    """A last single sample joins the batch before it, and a client of one sample stays still."""
    data = double_data(counts=[1, 9, 0, 5, 13, 8], batch_size=batch_size, cohort_size=None)
    both(batchnorm_client().double(), Local, data=data, local_epochs=2)


@pytest.mark.long
def test_fine_tuning() -> None:
    client = batchnorm_client(ProximalClient, mu=1.0).double()
    stacked = both(client, finetune_epochs=2)
    data = double_data()
    (quality,) = stacked.trainer.test(stacked, datamodule=data, verbose=False)
    alone = run(client, data, rounds=3, finetune_epochs=2, engine="sequential")
    (expected,) = alone.trainer.test(alone, datamodule=data, verbose=False)
    assert quality == pytest.approx(expected, abs=1e-10)


@pytest.mark.short("1", "4", "None")
@pytest.mark.parametrize("chunk", [1, 2, 4, 100, None])
def test_any_number_at_once(chunk: int | None) -> None:
    both(linear_client(ProximalClient, double=True), chunk=chunk)


def test_tied_frozen_and_unused_parameters() -> None:
    """Weight decay would move a parameter that the loss does not depend on."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(FEATURES, FEATURES)
            self.again = nn.Linear(FEATURES, FEATURES)
            self.again.weight = self.first.weight
            self.fixed = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
            self.unused = nn.Linear(2, 2)
            self.output = nn.Linear(FEATURES, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.output(self.fixed(self.again(self.first(x).tanh())))

    torch.manual_seed(0)
    network = Odd().double()
    client = Classifier(network, CLASSES, optimizer=sgd(weight_decay=0.5))
    state = both(client).server_states()[0]
    assert_same({"w": state["network.unused.weight"]}, {"w": network.unused.weight.data})


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_precision(precision: str) -> None:
    data = small_data(cohort_size=4)
    fit = partial(run, linear_client(), data, rounds=2, trainer={"precision": precision})
    stacked = fit(engine="vectorized")
    assert obstacle(stacked) is None
    assert_close(fit(engine="sequential"), stacked, 1e-10 if precision == "64-true" else 0.02)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_takes_no_fused_steps_on_a_cpu(dtype: torch.dtype) -> None:
    """PyTorch 2.13 and before leave all but the last few numbers as they were."""
    parameter, stack = torch.zeros(40, dtype=dtype), torch.zeros(2, 40, dtype=dtype)
    optimizer = StackedOptimizer(torch.optim.SGD([parameter], lr=0.5), {parameter: stack})
    (group,) = optimizer.optimizer.param_groups
    assert bool(group["fused"]) == (dtype.itemsize >= 4)
    optimizer.step([torch.ones(2, 40, dtype=dtype)])
    assert (stack == -0.5).all()


class Attentive(nn.Sequential):
    """Attends to the features of a sample."""

    def __init__(self) -> None:
        super().__init__(
            nn.Unflatten(1, (FEATURES, 1)),
            nn.Linear(1, 8),
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
            nn.Flatten(),
            nn.Linear(8 * FEATURES, CLASSES),
        )


def test_attention_is_stacked() -> None:
    """Vmap would warn of the CPU's own kernel, which runs once for each client."""
    both(network_client(Attentive()).double())


@pytest.mark.short("ProximalClient-linear_client", "ElasticClient-batchnorm_client")
@pytest.mark.parametrize("make", [linear_client, batchnorm_client])
@pytest.mark.parametrize("kind", [ProximalClient, ElasticClient])
def test_mixed_precision(make: Callable[..., Classifier], kind: type[Classifier]) -> None:
    """Products of matrices are in bfloat16; steps and distances to the anchor are not."""
    fit = partial(run, make(kind), small_data(cohort_size=4), rounds=2)
    mixed = partial(fit, trainer={"precision": "bf16-mixed"})
    stacked, single = mixed(engine="vectorized"), fit(engine="vectorized")
    assert obstacle(stacked) is None
    assert all(value.dtype != torch.bfloat16 for value in stacked.server_states()[0].values())
    assert_close(mixed(engine="sequential"), stacked, 0.02)
    with pytest.raises(AssertionError):
        assert_close(single, stacked, 1e-5)
    assert_close(single, stacked, 0.02)


class CountsSteps(ClientMethod):
    """Sends how many steps a client took, and remembers twice that."""

    keeps_memory = True

    def state(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"taken": torch.zeros((), dtype=torch.float64)}

    def after_training(self, c: LocalClient) -> None:
        c.own["taken"].copy_(c.num_steps)

    def remembered(self, layout: StateLayout) -> tuple[str, ...]:
        return (f"{OWN}taken",)

    def remember(self, c: LocalClient) -> dict[str, Tensor]:
        return {f"{OWN}taken": 2 * c.own["taken"]}


class Counting(Classifier):
    """Names its client method itself."""

    client_method = CountsSteps()


def test_what_a_client_does_after_training() -> None:
    client = linear_client(Counting, double=True)
    stacked = both(client, Local, data=double_data(cohort_size=None), rounds=1, local_epochs=2)
    steps = [2 * -(-count // 4) for count in COUNTS]
    everyone = torch.arange(6)
    kept = stacked.clients.remembered(everyone, stacked.callback.personalize(everyone)).states
    assert kept[f"{OWN}taken"].tolist() == [2 * count for count in steps]


def networks() -> st.SearchStrategy[nn.Module]:
    """Chains of layers with activations and normalisation between them, for 1 x 4 x 4 images."""

    @st.composite
    def chain(draw: st.DrawFn) -> nn.Module:
        channels = [1, *draw(st.lists(st.integers(1, 4), max_size=2))]
        layers: list[nn.Module] = []
        for before, after in pairwise(channels):
            layers += [nn.Conv2d(before, after, 3, padding=1)]
            layers += draw(st.sampled_from([[], [nn.BatchNorm2d(after)], [nn.GroupNorm(1, after)]]))
            layers += [draw(st.sampled_from([nn.ReLU(), nn.Tanh()]))]
        if len(channels) > 1 and draw(st.booleans()):
            layers += [draw(st.sampled_from([nn.MaxPool2d(2), nn.AvgPool2d(2)]))]
        layers += [nn.Flatten()]
        with torch.no_grad():
            width = nn.Sequential(*layers).eval()(torch.zeros(1, 1, 4, 4)).shape[1]
        widths = [width, *draw(st.lists(st.integers(1, 6), max_size=2))]
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after, bias=draw(st.booleans()))]
            layers += draw(st.sampled_from([[], [nn.BatchNorm1d(after)], [nn.LayerNorm(after)]]))
            layers += [draw(st.sampled_from([nn.ReLU(), nn.GELU(), nn.Tanh()]))]
        return nn.Sequential(*layers, nn.Linear(widths[-1], CLASSES))

    return chain()


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
@given(
    network=networks(),
    counts=st.lists(st.integers(4, 11), min_size=6, max_size=6),
    batch_size=st.sampled_from([4, 5, None]),
    optimizer=st.sampled_from([sgd(0.05), sgd(0.05, momentum=0.9)]),
    kind=st.sampled_from([Classifier, ProximalClient, ElasticClient]),
    epochs=st.integers(1, 2),
)
@pytest.mark.long
def test_random_networks(
    network: nn.Module,
    counts: list[int],
    batch_size: int | None,
    optimizer: Callable[..., Any],
    kind: type[Classifier],
    epochs: int,
) -> None:
    shape = 1, 4, 4
    train = []
    for client, count in enumerate(counts):
        random_ = torch.Generator().manual_seed(client)
        x = torch.randn(count, *shape, generator=random_, dtype=torch.float64)
        train.append((x, torch.randint(CLASSES, (count,), generator=random_)))
    data = TensorClients(
        train, test=train, num_classes=CLASSES, batch_size=batch_size, cohort_size=4
    )
    client = network_client(network, kind, optimizer=optimizer).double()
    fit = partial(run, client, data, rounds=2, local_epochs=epochs)
    stacked = fit(engine="vectorized", clients_at_once=3)
    assert obstacle(stacked) is None
    assert_close(fit(engine="sequential"), stacked, 1e-8)


# Clients that have come to their end


@pytest.mark.parametrize("optimizer", [sgd(momentum=0.9, weight_decay=0.1), partial(Adam, lr=0.1)])
def test_a_finished_client_does_not_move(optimizer: Callable[..., Any]) -> None:
    """Beside one that trains ten times as long, a client ends as beside its like, bit for bit."""
    short, long = samples(4, 0, torch.float64), samples(40, 1, torch.float64)

    def first(*others: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        data = TensorClients([short, *others], num_classes=CLASSES, batch_size=4)
        client = linear_client(double=True, optimizer=optimizer)
        return run(client, data, Local(), engine="vectorized", clients_at_once=2).client_state(0)

    assert_same(first(short), first(long))


# Failures


class Fragile(Classifier):
    """Gives NaN, where the samples of a client are large."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return super().loss((x, y)) * torch.where(x.abs().max() > 50, torch.nan, 1.0)


@pytest.mark.filterwarnings("ignore:.*round .*failed:UserWarning")
def test_a_client_that_gives_nan_is_left_out_alone() -> None:
    train = [samples(count, client, torch.float64) for client, count in enumerate(COUNTS)]
    train[3] = 100 * train[3][0], train[3][1]
    data = TensorClients(train, num_classes=CLASSES, batch_size=4)
    asked: list[int] = []

    class Asked(FedAvg):
        def round(self, cohort: Tensor) -> None:
            self.clients.on_client_end = asked.append
            super().round(cohort)

    client = linear_client(Fragile, double=True)
    stacked = both(client, Asked, data, rounds=1)
    assert stacked.history[0].failed == [3]
    assert sorted(asked) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    with pytest.raises(ClientError, match="round 0: client 3 failed: its result is NaN"):
        run(client, data, engine="vectorized", on_client_error="raise")


class Broken(TensorClients):
    """Loses the samples of a client."""

    def augment(self, x: Tensor, client: int, round: int, epoch: int = 0) -> Tensor:
        if client == 2:
            raise OSError("its disk is gone")
        return x


def broken_data() -> Broken:
    train = [samples(count, client, torch.float64) for client, count in enumerate(COUNTS)]
    return Broken(train, num_classes=CLASSES, batch_size=4)


@pytest.mark.filterwarnings("ignore:.*round .*failed:UserWarning")
def test_a_client_that_raises_is_left_out_alone() -> None:
    data, client = broken_data(), linear_client(double=True)
    stacked = both(client, data=data, rounds=2)
    assert [entry.failed for entry in stacked.history] == [[2], [2]]
    with pytest.raises(ClientError, match="client 2 failed: OSError: its disk is gone"):
        run(client, data, engine="vectorized", on_client_error="raise")


@pytest.mark.filterwarnings("ignore:.*round .*failed:UserWarning")
def test_frozen_tensors_are_left_alone_where_a_client_fails(
    recwarn: pytest.WarningsRecorder,
) -> None:
    client = network_client(nn.Sequential(nn.Linear(FEATURES, 6), nn.Linear(6, CLASSES))).double()
    client.network[0].requires_grad_(False)
    stacked = both(client, data=broken_data(), rounds=2)
    assert [entry.failed for entry in stacked.history] == [[2], [2]]
    assert said_of("expanded tensors", recwarn) == []


@pytest.mark.filterwarnings("ignore:.*round .*failed:UserWarning")
def test_a_phase_ends_where_a_client_fails() -> None:
    client = network_client(nn.Sequential(nn.Linear(FEATURES, 6), nn.Linear(6, CLASSES))).double()
    engine = run(
        client, broken_data(), FedRep(), engine="vectorized", local_epochs=2
    ).clients.attached_engine
    assert isinstance(engine, VectorizedEngine)
    assert engine._stacked.training_phase is None


# What can't be stacked


class Hooked(Classifier):
    def on_train_batch_end(self, *_: Any) -> None:
        pass


class OwnStep(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * (1 + batch_idx)


class Branching(Classifier):
    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = super().loss(batch)
        return 2 * loss if loss > 1 else loss


class Scheduled(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class OwnLearningRate(Classifier):
    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=1 / self.trainer.num_training_batches)


class OwnGenerator(Classifier):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.random = np.random.default_rng(0)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().loss(batch) * float(self.random.random())


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, CLASSES, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding((x[:, 0] > 0).long())


class Dicing(Classifier):
    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().loss(batch) * random.random()


class NumpyDicing(Classifier):
    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().loss(batch) * float(np.random.rand())


class Remembering(Classifier):
    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.last_loss = super().loss(batch)
        return self.last_loss


class Logging(Classifier):
    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.log("shown", 1.0)
        return super().loss(batch)


class Watchful(Classifier):
    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().loss(batch) * (1 + self.current_epoch)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(1, 5, batch_first=True)
        self.output = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.cell(x.unsqueeze(2))[0][:, -1])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: linear_client(Hooked), "it has on_train_batch_end of its own"),
        (lambda: linear_client(OwnStep), "stacked, its training_step asks for batch_idx"),
        (lambda: linear_client(Branching), "stacked, it branches on values"),
        (
            lambda: linear_client(Scheduled),
            r"its configure_optimizers\(\) gives more than one optimizer, or a schedule",
        ),
        (
            lambda: linear_client(OwnLearningRate),
            r"configure_optimizers\(\) needs a client of its own: it asks for trainer.num_training",
        ),
        (lambda: linear_client(OwnGenerator), "numbers of the module's own that change"),
        (lambda: network_client(SparseEmbedding()), "many at once fail: [^.]*$"),
        (lambda: linear_client(Dicing), "it draws random numbers"),
        (lambda: linear_client(NumpyDicing), "it draws random numbers"),
        (dropout_client, "it draws random numbers while it trains, as dropout does"),
        (lambda: linear_client(Remembering), "it sets attributes of itself"),
        (lambda: linear_client(Logging), "stacked, it logs"),
        (lambda: linear_client(Watchful), "stacked, it asks for trainer.current_epoch"),
        (lambda: linear_client(optimizer=partial(Adagrad, lr=0.1)), "gives Adagrad"),
        (lambda: network_client(Recurrent()), "vmap can't do lstm, of recurrent"),
        (
            lambda: network_client(nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.RReLU())),
            "vmap can't do rrelu_with_noise$",
        ),
    ],
)
@pytest.mark.long
def test_what_can_not_be_stacked_runs_one_by_one(
    make: Callable[[], Classifier], reason: str, recwarn: pytest.WarningsRecorder
) -> None:
    data = small_data(cohort_size=4)
    stacked = run(make(), data, rounds=2, engine="vectorized")
    assert obstacle(stacked) is not None
    (said,) = said_of("can't be stacked", recwarn)
    assert said.startswith("engine='vectorized', but clients train one by one: ")
    assert re.search(reason, said)
    alone = run(make(), data, rounds=2, engine="sequential")
    for left, right in zip(bits(alone), bits(stacked), strict=True):
        assert_same(left, right)


def test_more_than_none_at_once() -> None:
    with pytest.raises(ConfigurationError, match="clients_at_once must be at least 1, got 0"):
        Federation(linear_client(), clients_at_once=0)


# Runs


@pytest.mark.parametrize("make", [batchnorm_client, linear_client])
@pytest.mark.long
def test_the_same_run_twice_and_resumed(
    make: Callable[..., Classifier], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also over the call at which operations are recorded."""
    monkeypatch.setattr("pflight.engines.stacked.stack._OFTEN", 4)
    client = make(ElasticClient)
    fit = partial(run, client, small_data(cohort_size=4), engine="vectorized")
    whole = fit(callback=Reptile(), rounds=8)
    client_method = fit(callback=Reptile(), rounds=3)
    client_method.trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = fit(callback=Reptile(), rounds=8, ckpt_path=tmp_path / "half.ckpt")
    for other in (fit(callback=Reptile(), rounds=8), resumed):
        for left, right in zip(bits(whole), bits(other), strict=True):
            assert_same(left, right)


@pytest.mark.parametrize("counts", [[8] * 6, [5, 12, 7, 9, 3, 10]])
@pytest.mark.parametrize("make", [batchnorm_client, linear_client])
@pytest.mark.long
def test_what_is_called_often_is_recorded(
    counts: list[int], make: Callable[..., Classifier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pflight.engines.stacked.stack._OFTEN", 4)
    data = double_data(counts=counts, cohort_size=None)
    engine = both(make().double(), data=data, chunk=6, local_epochs=4).clients.attached_engine
    assert isinstance(engine, VectorizedEngine)
    records = engine._stacked._records.values()
    assert records
    assert all(isinstance(record, nn.Module) for record in records)  # and no plain function


def test_the_clients_module_is_left_alone() -> None:
    client = batchnorm_client(ProximalClient)
    before = copy.deepcopy(client.state_dict())
    run(client, small_data(), engine="vectorized", rounds=2)
    assert_same(before, dict(client.state_dict()))
    assert client._trainer is None


def test_memory_does_not_grow_with_clients() -> None:
    """What the engine holds between rounds is that of one chunk."""

    def held(clients: int) -> int:
        data = small_data(counts=[8] * clients)
        engine = run(
            linear_client(), data, engine="vectorized", clients_at_once=5
        ).clients.attached_engine
        return sum(tensor.nbytes for tensor in engine._trainer.workspace.held.values())

    assert held(10) == held(200)


class Leftovers(Callback):
    """Finds the tensors that a round leaves to Python's garbage collector."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def on_train_epoch_start(self, *_: Any) -> None:
        gc.collect()
        gc.disable()

    def on_train_epoch_end(self, *_: Any) -> None:
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        self.found += [thing for thing in gc.garbage if isinstance(thing, Tensor)]
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@ENGINES
@pytest.mark.parametrize(
    ("callback", "kind"),
    [(partial(FeSEM, 2), ProximalClient), (Reptile, ElasticClient), (FedSGD, Classifier)],
)
@pytest.mark.long
def test_a_chunk_is_freed_before_the_next(
    callback: Callable[[], ServerCallback], kind: type[Classifier], engine: str
) -> None:
    """It is large, and the collector counts objects, not bytes: it comes by after many chunks."""
    leftovers, no_metrics = Leftovers(), {"limit_val_batches": 0}
    client, data = linear_client(kind), small_data()
    run(client, data, callback(), 2, leftovers, trainer=no_metrics, engine=engine)
    assert leftovers.found == []


def test_updates_are_freed_before_the_next_chunk_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watchful(FedAvg):
        def broadcast(self, clients: Tensor) -> TensorDict:
            alive.append(sum(updates() is not None for updates in received))
            return super().broadcast(clients)

        def receive(self, updates: ClientUpdates) -> None:
            received.append(weakref.ref(updates))
            super().receive(updates)

    received: list[weakref.ref[ClientUpdates]] = []
    alive: list[int] = []
    monkeypatch.setattr("pflight.clients._CHUNK_BYTES", 0)
    run(linear_client(), small_data(), Watchful(), engine="vectorized", clients_at_once=2)
    assert alive[:3] == [0, 0, 0]
    assert len(received) == 3


# Evaluation


@pytest.mark.short("2-counts1", "1024-counts0")
@pytest.mark.parametrize("counts", [[6] * 6, [1, 9, 0, 4, 4, 2]])
@pytest.mark.parametrize("eval_batch_size", [2, 1024])
def test_evaluation_of_a_model_per_client(counts: list[int], eval_batch_size: int) -> None:
    train = [samples(count, client) for client, count in enumerate(COUNTS)]
    test = [samples(count, 50 + client) for client, count in enumerate(counts)]
    data = TensorClients(
        train, test=test, num_classes=CLASSES, batch_size=4, eval_batch_size=eval_batch_size
    )
    client = batchnorm_client()
    values = []
    for engine in ("sequential", "vectorized"):
        federation = run(client, data, Local(), engine=engine, clients_at_once=4)
        quiet_trainer().test(federation, datamodule=data, verbose=False)
        values.append(federation.client_metrics())
    torch.testing.assert_close(*values, equal_nan=True, rtol=1e-5, atol=1e-6)


# What networks and clients may do with their tensors


class Mapped(nn.Module):
    """A linear map whose gradient ``vmap`` leaves transposed, expanded or shared."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.w = nn.Parameter(torch.randn(CLASSES, FEATURES) / 3)
        self.other = nn.Parameter(torch.randn(CLASSES, FEATURES) / 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "transposed":
            return torch.einsum("bi,oi->bo", x, self.w)
        if self.kind == "expanded":
            return x @ self.other.t() + self.w.sum(1)
        return nn.functional.linear(x, self.w + self.other)


@pytest.mark.short(
    "FedAvg-sgd-*",
    "FedAvg-clipped-transposed",
    "FedAvg-adam-expanded",
    "FedSGD-sgd-expanded",
    "FedSGD-clipped-shared",
)
@pytest.mark.parametrize("kind", ["transposed", "expanded", "shared"])
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_clip_val": 0.1}, {"optimizer": partial(Adam, lr=0.01)}],
    ids=["sgd", "clipped", "adam"],
)
@pytest.mark.parametrize("server", [FedAvg, FedSGD])
def test_gradients_may_lie_anyhow(
    kind: str, options: dict[str, Any], server: Callable[..., Any]
) -> None:
    client = network_client(Mapped(kind), **options).double()
    both(client, server, data=double_data())


class ReplacesBuffer(Classifier):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_buffer("mean", torch.zeros(FEATURES))

    def loss(self, batch: Any) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * batch[0].mean(0)
        return super().loss(batch) + (self.network.weight @ self.mean).square().sum()


def test_replaced_buffer_is_kept_by_each_client() -> None:
    def states(scale: float) -> list[dict[str, Tensor]]:
        random = torch.Generator().manual_seed(3)
        x = torch.randn(2, 8, FEATURES, generator=random) * torch.tensor([scale, 1]).view(2, 1, 1)
        y = torch.randint(CLASSES, (2, 8), generator=random)
        data = TensorClients(list(zip(x, y, strict=True)), num_classes=CLASSES, batch_size=4)
        federation = run(linear_client(ReplacesBuffer), data, Local(), rounds=2)
        assert "replaces the buffer mean" in str(obstacle(federation))
        return [federation.client_state(client) for client in (0, 1)]

    (first, second), (changed, untouched) = states(1), states(5)
    assert first["mean"].norm() > 0
    assert not torch.equal(first["network.weight"], changed["network.weight"])
    assert_same(second, untouched)


class LeavesThingsBehind(Classifier):
    """Freezes its weight in the course of its training, and counts in its network."""

    def on_train_epoch_end(self) -> None:
        self.network.weight.requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        self.network.calls = getattr(self.network, "calls", 0) + 1
        return super().loss(batch) * self.network.calls


def test_clients_leave_nothing_behind() -> None:
    data = TensorClients([samples(8, 1)] * 2, num_classes=CLASSES, batch_size=8)
    fit = partial(run, linear_client(LeavesThingsBehind), data, Local(), local_epochs=2)
    federation = fit(engine="sequential")
    torch.testing.assert_close(federation.client_state(0), federation.client_state(1))


class ClampsItsWeights(Classifier):
    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.network.weight.clamp_(-0.1, 0.1)


class RestsItsBias(Classifier):
    def on_train_epoch_start(self) -> None:
        self.network.bias.requires_grad_(self.current_epoch > 0)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (ClampsItsWeights, "it has on_train_epoch_end of its own"),
        (RestsItsBias, "it has on_train_epoch_start of its own"),
    ],
)
def test_hooks_that_can_not_be_shared(
    kind: type[Classifier], reason: str, recwarn: pytest.WarningsRecorder
) -> None:
    fit = partial(run, linear_client(kind).double(), double_data(), rounds=2, local_epochs=2)
    stacked = fit(engine="vectorized")
    assert len(said_of(f"can't be stacked, {reason}", recwarn)) == 1
    assert_close(fit(engine="sequential"), stacked)


@pytest.mark.parametrize("others", [[], [nn.Dropout(0.5)]], ids=["stacked", "one by one"])
def test_evaluation_that_mixes_samples_is_not_filled_up(
    others: list[nn.Module], recwarn: pytest.WarningsRecorder
) -> None:
    norm = nn.BatchNorm1d(FEATURES, track_running_stats=False)
    client = network_client(nn.Sequential(norm, *others, nn.Linear(FEATURES, CLASSES))).double()
    counts = [2, 9, 3, 4, 4, 2]
    test = [samples(count, seed, dtype=torch.float64) for seed, count in enumerate(counts)]
    train = [samples(8, seed, dtype=torch.float64) for seed in range(6)]
    losses = []
    for engine in ("sequential", "vectorized"):
        federation = Federation(client, engine=engine)
        trainer = quiet_trainer(1, Local())
        data = TensorClients(train, test=test, num_classes=CLASSES, batch_size=4)
        trainer.fit(federation, datamodule=data)
        trainer.test(federation, datamodule=data, verbose=False)
        losses.append(federation.client_metrics()["loss"])
    torch.testing.assert_close(*losses)
    (said,) = said_of("engine='vectorized', but", recwarn)
    assert ("is evaluated one by one" in said) == (not others)


class Rigid(nn.Module):
    """Evaluates no more than eight samples, and has a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and len(x) > 8:
            raise ValueError("too many samples")
        return self.linear(x) + self.empty.sum()


def test_evaluation_that_fails_when_filled_up_is_not(recwarn: pytest.WarningsRecorder) -> None:
    data = [samples(8, seed) for seed in range(6)]
    client = network_client(Rigid())
    sizes = {"batch_size": 4, "eval_batch_size": 8}
    test = TensorClients(data, test=data, num_classes=CLASSES, **sizes)
    losses = []
    for engine in ("sequential", "vectorized"):
        federation = run(client, test, Local(), engine=engine)
        quiet_trainer().test(federation, datamodule=test, verbose=False)
        losses.append(federation.client_metrics()["loss"])
    assert obstacle(federation) is None
    torch.testing.assert_close(*losses)
    assert len(said_of("is evaluated one by one", recwarn)) == 1

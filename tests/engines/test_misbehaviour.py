"""Clients that misbehave fail by name, alike in both engines, and disturb no other."""

from __future__ import annotations

import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflight import Federation
from pflight.callbacks import IFCA, FedAvg, FedSGD, Local, PerFedAvg, ServerCallback
from pflight.datamodules import FederatedDataModule
from pflight.errors import ClientError, ConfigurationError
from pflight.local_client import LocalClient
from pflight.method import ClientMethod
from pflight.models import Classifier
from pflight.models.client_methods import Adapted
from pflight.states.state import StateLayout
from tests.runs import (
    CLASSES,
    ENGINES,
    FEATURES,
    assert_same,
    linear_client,
    network_client,
    owner,
    quiet_trainer,
    run,
    samples,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning",
    "ignore:engine='vectorized', but clients train one by one:UserWarning",
)

COUNTS = {"train": (5, 20, 7, 13, 3, 10), "val": (4,) * 6, "test": (6,) * 6}
BAD, BATCHES = 3, 4  # it alone has so many
Batch = tuple[Tensor, Tensor]


class OwnData(FederatedDataModule):
    """Data of one's own, of which one client hands out something else.

    Args:
        bad: Makes of that client's samples what it hands out.
        split: Where it does so.
        client: Which it is.
    """

    def __init__(
        self, bad: Callable[[Tensor, Tensor], Any], split: str = "train", client: int = BAD
    ) -> None:
        super().__init__(num_classes=CLASSES, batch_size=4)
        self.num_clients = 6
        self.bad, self.split, self.bad_client = bad, split, client
        self.pairs = {
            split: [samples(count, len(split) * 100 + i) for i, count in enumerate(counts)]
            for split, counts in COUNTS.items()
        }

    def num_samples(self, split: Any = "train") -> Tensor:
        return torch.tensor(COUNTS[split])

    def samples(self, client: int, split: Any) -> Batch:
        pair = self.pairs[split][client]
        bad = client == self.bad_client and split == self.split
        return self.bad(*pair) if bad else pair


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any) -> None:
        raise error

    return fail


def fitted(
    data: FederatedDataModule,
    engine: str,
    callback: Callable[[], ServerCallback] = FedAvg,
    client: Classifier | None = None,
    **options: Any,
) -> Federation:
    client = linear_client() if client is None else client
    return run(client, data, callback(), engine=engine, **options)


def values_of(federation: Federation, data: FederatedDataModule) -> dict[str, Tensor]:
    quiet_trainer().test(federation, datamodule=data, verbose=False)
    return federation.client_metrics()


def said(what: str, warned: pytest.WarningsRecorder) -> list[str]:
    """Return all that warnings say after something."""
    texts = [str(warning.message) for warning in warned]
    return [text.removeprefix(what) for text in texts if text.startswith(what)]


@pytest.fixture(scope="module")
def sound() -> dict[str, Federation]:
    """Federations in which no client misbehaves, by engine."""
    engines = "sequential", "vectorized"
    return {engine: fitted(OwnData(lambda *pair: pair), engine, Local) for engine in engines}


@pytest.fixture(scope="module")
def without() -> dict[str, Tensor]:
    """The server's model of the others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fitted(OwnData(raising(OSError())), "sequential").server_states()[0]


class SpeechlessError(Exception):
    def __str__(self) -> str:
        raise OSError("there is nothing to say")


SAMPLES = {
    "speechless": (raising(SpeechlessError()), "SpeechlessError"),
    "raises": (raising(OSError("its disk is gone")), "OSError: its disk is gone"),
    "exits": (raising(SystemExit(0)), "SystemExit: 0"),
    "fewer columns": (lambda x, y: (x[:, :1], y), r"features are float32 of shape \[1\]"),
    "more columns": (lambda x, y: (torch.cat([x, x], 1), y), r"features are .* of shape \[8\]"),
    "another type": (lambda x, y: (x.double(), y), "features are float64 of shape"),
    "fewer labels": (lambda x, y: (x, y[1:]), "as many labels as features"),
    "labels in a column": (lambda x, y: (x, y[:, None]), r"labels are int64 of shape \[1\]"),
    "labels of another type": (lambda x, y: (x, y.int()), r"labels are int32 of shape \[\]"),
    "labels out of range": (lambda x, y: (x, y + 2), "labels go from 2 to 4, but num_classes is 3"),
    "ignored labels": (lambda x, y: (x, y * 0 - 100), "labels go from -100 to -100"),
    "nothing": (lambda x, y: None, "a pair of tensors, features and labels, not NoneType"),
    "lists": (lambda x, y: (x.tolist(), y.tolist()), r"not \(list, list\)"),
    "arrays": (lambda x, y: (np.asarray(x), np.asarray(y)), r"not \(ndarray, ndarray\)"),
    "nested": (lambda x, y: ((x, x), y), r"not \(tuple, Tensor\)"),
    "NaN": (lambda x, y: (x * torch.nan, y), "NaN or infinite"),
}


@ENGINES
@pytest.mark.parametrize(("bad", "reason"), SAMPLES.values(), ids=SAMPLES)
def test_samples_to_train_on(
    bad: Callable[..., Any],
    reason: str,
    engine: str,
    without: dict[str, Tensor],
    recwarn: pytest.WarningsRecorder,
) -> None:
    federation = fitted(OwnData(bad), engine)
    (text,) = said("round 0: client 3 failed: ", recwarn)
    assert re.search(rf"{reason}.*; it is left out of this round$", text)
    assert federation.history[0].failed == [BAD]
    torch.testing.assert_close(federation.server_states()[0], without)


@ENGINES
@pytest.mark.parametrize(("bad", "reason"), SAMPLES.values(), ids=SAMPLES)
@pytest.mark.long
def test_samples_to_evaluate_on(
    bad: Callable[..., Any],
    reason: str,
    engine: str,
    sound: dict[str, Federation],
    recwarn: pytest.WarningsRecorder,
) -> None:
    federation, data = sound[engine], OwnData(bad, "test")
    expected = values_of(federation, OwnData(lambda *pair: pair))
    values = values_of(federation, data)
    (text,) = said("round 0: client 3 failed on its test samples: ", recwarn)
    assert re.search(rf"{reason}.*; it is left out of the test metrics$", text)
    assert values["num_samples"].tolist() == [6, 6, 6, 0, 6, 6]
    others = torch.arange(6) != BAD
    for name, value in values.items():
        torch.testing.assert_close(value[others], expected[name][others])
    for name in ("", "server/"):
        mean = federation.client_metrics("test", name)["acc"][others].mean()
        assert federation.trainer.callback_metrics[f"test/{name}macro_acc"] == pytest.approx(mean)
    (chunk,) = quiet_trainer().predict(federation, datamodule=data)
    assert chunk.clients.unique().tolist() == [0, 1, 2, 4, 5]
    assert len(said("round 0: client 3 failed to predict: ", recwarn)) == 1


@ENGINES
@pytest.mark.parametrize("callback", [FedAvg, FedSGD])
@pytest.mark.parametrize("count", [0, 8, 18])
def test_another_number_of_samples_than_counted(
    callback: Callable[[], ServerCallback],
    count: int,
    engine: str,
    recwarn: pytest.WarningsRecorder,
) -> None:
    data = OwnData(lambda x, y: (torch.cat([x, x])[:count], torch.cat([y, y])[:count]))
    federation = fitted(data, engine, callback)
    assert federation.history[0].failed == [BAD]
    (text,) = said("round 0: client 3 failed: ", recwarn)
    assert f"has {count} training samples, but num_samples() says 13" in text


@ENGINES
@pytest.mark.parametrize("client", [0, 1])  # the second is the largest
@pytest.mark.parametrize(
    "bad",
    [lambda x, y: (x[:, :1], y), lambda x, y: (x * torch.nan, y), raising(OSError())],
    ids=["shape", "nan", "raises"],
)
def test_a_client_that_others_might_be_measured_by(
    bad: Any, client: int, engine: str, recwarn: pytest.WarningsRecorder
) -> None:
    federation = fitted(OwnData(bad, client=client), engine)
    assert federation.history[0].failed == [client]
    assert not said("engine='vectorized', but", recwarn)


@pytest.mark.parametrize("engine", ["sequential", "vectorized", "auto"])
def test_samples_that_no_client_has(engine: str) -> None:
    class Nobody(OwnData):
        def samples(self, client: int, split: Any) -> Any:
            return None

    with pytest.raises(ConfigurationError, match="samples of client 0 can't be used: TypeError"):
        fitted(Nobody(tuple), engine)


@pytest.mark.parametrize("error", [OSError("its disk is gone"), SystemExit("its disk is gone")])
def test_samples_that_can_not_be_counted(error: BaseException) -> None:
    class Uncounted(OwnData):
        num_samples = FederatedDataModule.num_samples

    match = f"the val samples of client 3 can't be counted: {type(error).__name__}: its disk"
    with pytest.raises(ConfigurationError, match=match):
        fitted(Uncounted(raising(error), "val"), "sequential")


@ENGINES
def test_labels_of_more_than_one_number(engine: str) -> None:
    class Shares(Classifier):
        def loss(self, batch: Batch) -> Tensor:
            return F.mse_loss(self(batch[0]).softmax(1), batch[1])

    class Soft(OwnData):
        def samples(self, client: int, split: Any) -> Batch:
            x, y = super().samples(client, split)
            return x, F.one_hot(y, CLASSES).float()

        def num_samples(self, split: Any = "train") -> Tensor:
            return super().num_samples(split) * (split == "train")

    federation = fitted(Soft(lambda *pair: pair), engine, client=linear_client(Shares))
    expected = linear_client(Shares)
    assert not any(entry.failed for entry in federation.history)
    other = fitted(Soft(lambda *pair: pair), "sequential", client=expected)
    torch.testing.assert_close(federation.server_states(), other.server_states())


def test_augmented_samples_of_another_shape_are_not_stacked() -> None:
    class Cropped(OwnData):
        def augment(self, x: Tensor, client: int, round: int, epoch: int = 0) -> Tensor:
            return x[:, : FEATURES - 1]

    class Lenient(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight[:, : x.shape[1]], self.bias)

    def states(engine: str) -> dict[str, Tensor]:
        client = network_client(Lenient(FEATURES, CLASSES))
        return fitted(Cropped(lambda *pair: pair), engine, client=client).server_states()[0]

    with pytest.warns(UserWarning, match="can't be trained together, but one by one: ValueError"):
        stacked = states("vectorized")
    assert_same(stacked, states("sequential"))


# What a client module may do


def kind(method: str, does: Callable[[Classifier], Any], **more: Any) -> type[Classifier]:
    """Return a kind of client of which one, with four batches, does something in a method.

    What ``does`` returns, unless it is ``...``, is what the method returns.
    """
    default = getattr(Classifier, method)

    def own(self: Classifier, *args: Any, **options: Any) -> Any:
        result = ...
        if self.training and self.trainer.num_training_batches == BATCHES:
            result = does(self)
        return default(self, *args, **options) if result is ... else result

    return type("Odd", (Classifier,), {method: own, **more})


def with_method(method: str, does: Callable[[LocalClient], Any], **more: Any) -> type[Classifier]:
    """Return a kind of client whose half does something in a method for one of them."""
    default = getattr(ClientMethod, method)

    def own(self: ClientMethod, c: LocalClient, *args: Any) -> Any:
        odd = bool(c.num_samples == COUNTS["train"][BAD])
        return does(c) if odd else default(self, c, *args)

    client_method = type("OddHalf", (ClientMethod,), {method: own, **more})
    return type("Odd", (Classifier,), {"client_method": client_method()})


def parameters_of(client_method: ClientMethod, layout: StateLayout) -> tuple[str, ...]:
    return layout.parameters


def assign(client: Classifier, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(client, name, value)
    return ...


def set_weight(client: Classifier, value: Tensor) -> Any:
    client.network.weight.data = value
    return ...


def spoil(client: Classifier) -> Any:
    client.network.register_forward_hook(lambda module, args, output: 100 * output)
    client.network.extra = nn.Linear(2, 2)
    raise RuntimeError("it is done")


def delete_weight(client: Classifier) -> Any:
    del client.network.weight
    return ...


HOOKS = [
    "on_train_start",
    "on_train_epoch_start",
    "on_before_batch_transfer",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
    "configure_optimizers",
    "training_step",
    "loss",
    "forward",
]
KINDS = {
    **{hook: (kind(hook, raising(RuntimeError("no"))), "RuntimeError: no") for hook in HOOKS},
    "its client method": (
        with_method("after_training", raising(RuntimeError("no"))),
        "RuntimeError: no",
    ),
    "its client method's loss": (
        with_method("loss", raising(RuntimeError("no"))),
        "RuntimeError: no",
    ),
    "exits": (kind("loss", lambda _: sys.exit("done")), "SystemExit: done"),
    "exits at the end": (kind("on_train_end", lambda _: sys.exit()), "SystemExit$"),
    "a generator's end": (kind("on_train_end", raising(GeneratorExit())), "GeneratorExit"),
    "NaN": (kind("loss", lambda c: c.network.weight.sum() * torch.nan), "NaN or infinite"),
    "no loss": (kind("training_step", lambda _: None), "training_step returned no loss for any"),
    "a number": (kind("training_step", lambda _: 0.5), "training_step must return .* not float"),
    "a list": (kind("training_step", lambda _: []), "training_step must return .* not list"),
    "a dictionary": (kind("training_step", lambda _: {"x": 1}), "a dictionary with its 'loss'"),
    "many losses": (kind("loss", lambda c: c.network.bias), "only for scalar outputs"),
    "detached": (kind("loss", lambda c: torch.tensor(1.0)), "RuntimeError: "),
    "logs a vector": (
        kind("on_train_batch_end", lambda c: c.log("x", torch.ones(2))),
        "but the tensor must have a single element",
    ),
    "deletes": (kind("on_train_end", delete_weight), "replaced or deleted its network.weight"),
    "another network": (
        kind("on_train_start", lambda c: assign(c, network=nn.Linear(FEATURES, CLASSES))),
        "depends on none of its weights: it replaced them",
    ),
    "no network": (kind("on_train_end", lambda c: assign(c, network=None)), "deleted its netw"),
    "another shape": (
        kind("on_train_end", lambda c: set_weight(c, torch.ones(1, FEATURES))),
        "changed the shape, type or device of its network.weight",
    ),
    "another type": (
        kind("on_train_end", lambda c: c.double() and ...),
        "changed the shape, type or device of its network.weight",
    ),
    "leaves things": (kind("on_train_end", spoil), "it is done"),
    "remembers nothing": (with_method("remember", lambda _: {}, keeps_memory=True), "KeyError"),
    "remembers too little": (
        with_method(
            "remember",
            lambda c: {**c.weights, "network.bias": torch.zeros(1)},
            keeps_memory=True,
            remembered=parameters_of,
        ),
        "its network.bias is of shape",
    ),
    "remembers NaN": (
        with_method(
            "remember",
            lambda c: {name: w * torch.nan for name, w in c.weights.items()},
            keeps_memory=True,
            remembered=parameters_of,
        ),
        "NaN or infinite",
    ),
}


@pytest.mark.short(
    "*-sequential",
    "loss-*",
    "training_step-*",
    "its client method*",
    "remembers *",
    "another *",
    "many losses-*",
    "NaN-*",
    "no loss-*",
    "leaves things-*",
)
@ENGINES
@pytest.mark.parametrize(("odd", "reason"), KINDS.values(), ids=KINDS)
def test_what_a_client_does(
    odd: type[Classifier],
    reason: str,
    engine: str,
    sound: dict[str, Federation],
    recwarn: pytest.WarningsRecorder,
) -> None:
    """Those that train after it end as without it."""
    federation = fitted(OwnData(lambda *pair: pair), engine, Local, linear_client(odd))
    (text,) = said("round 0: client 3 failed: ", recwarn)
    assert re.search(reason, text.removesuffix("; it is left out of this round"))
    assert federation.history[0].failed == [BAD]
    for client in (0, 1, 2, 4, 5):
        torch.testing.assert_close(
            federation.client_state(client), sound["sequential"].client_state(client)
        )
    assert_same(federation.client_state(BAD), dict(linear_client().state_dict()))


@ENGINES
def test_an_optimizer_of_others_weights_stops_the_run(engine: str) -> None:
    """It is no failure of a client, but a mistake in the module."""
    foreign = kind("configure_optimizers", lambda _: torch.optim.SGD(nn.Linear(2, 2).parameters()))
    with pytest.raises(ConfigurationError, match="parameters that are not the module's own"):
        fitted(OwnData(lambda *pair: pair), engine, Local, linear_client(foreign))


@ENGINES
def test_a_network_that_changes_its_input_leaves_the_samples_as_they_are(engine: str) -> None:
    data = OwnData(lambda *pair: pair)
    before = {split: [x.clone() for x, _ in pairs] for split, pairs in data.pairs.items()}
    client = network_client(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(FEATURES, CLASSES)))
    for callback in (Local, FedSGD):
        values_of(fitted(data, engine, callback, client), data)
    for split, pairs in data.pairs.items():
        torch.testing.assert_close(before[split], [x for x, _ in pairs], rtol=0, atol=0)


@ENGINES
def test_a_model_that_lets_itself_train_is_judged_in_evaluation_mode(engine: str) -> None:
    class Switching(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            result = super().forward(x)
            self.train()
            return result

    layers = nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES)
    data = OwnData(lambda *pair: pair)
    values = [
        values_of(fitted(data, engine, Local, network_client(kind(*layers)), local_epochs=2), data)
        for kind in (nn.Sequential, Switching)
    ]
    torch.testing.assert_close(*values)


@ENGINES
@pytest.mark.parametrize("callback", [FedAvg, FedSGD])
def test_weights_that_explode_are_a_warning(
    callback: Callable[[], ServerCallback], engine: str, recwarn: pytest.WarningsRecorder
) -> None:
    data = OwnData(lambda x, y: (1e14 * x, y))
    federation = fitted(data, engine, callback)
    (text,) = said("round 0: client ", recwarn)
    assert re.match(r"3 exploded: its largest value has grown \d\.\de\+1\d times", text)
    assert federation.history[0].failed == []


# What is evaluated beside the model


class StuckHalf(ClientMethod):
    """Can't train a client without an anchor, as when it is fine-tuned."""

    def loss(self, c: LocalClient, batch: Any) -> Tensor:
        if c.anchor is None and bool(c.num_samples == COUNTS["train"][BAD]):
            raise RuntimeError("it is stuck")
        return super().loss(c, batch)


class StuckAdapted(StuckHalf, Adapted):
    pass


class Stuck(Classifier):
    client_method = StuckHalf()


def stuck_per_fedavg() -> PerFedAvg:
    callback = PerFedAvg()
    callback.client_method = StuckAdapted()
    return callback


class Secretive(Classifier):
    """Can't tell its loss where nobody trains."""

    def loss(self, batch: Batch) -> Tensor:
        if not torch.is_grad_enabled() and is_bad(batch[0]):
            raise RuntimeError("it is stuck")
        return super().loss(batch)


is_bad = owner(OwnData(lambda *pair: pair), BAD)


@ENGINES
@pytest.mark.parametrize(
    ("callback", "client", "options", "doing"),
    [
        (FedAvg, Stuck, {"finetune_epochs": 1}, "to be fine-tuned"),
        (stuck_per_fedavg, Classifier, {}, "to adapt"),
        (partial(IFCA, 2), Secretive, {}, "to tell its loss"),
    ],
)
def test_what_comes_before_evaluation(
    callback: Any,
    client: type[Classifier],
    options: dict[str, Any],
    doing: str,
    engine: str,
    recwarn: pytest.WarningsRecorder,
) -> None:
    """A client that fails at it is left out of the metrics of all models, or stops the run."""
    data = OwnData(lambda *pair: pair)
    federation = fitted(data, engine, callback, linear_client(client), **options)
    values = values_of(federation, data)
    texts = said(f"round 0: client 3 failed {doing}: ", recwarn)
    assert texts[-1] == "RuntimeError: it is stuck; it is left out of the test metrics"
    for model in ("", "server/"):
        counts = federation.client_metrics("test", model)["num_samples"]
        assert counts.tolist() == [6, 6, 6, 0, 6, 6]
    assert values["acc"].isnan().tolist() == [False, False, False, True, False, False]
    federation.clients.training = replace(federation.clients.training, on_client_error="raise")
    with pytest.raises(ClientError, match=f"round 0: client 3 failed {doing}: RuntimeError"):
        values_of(federation, data)


@ENGINES
def test_a_client_that_can_not_tell_its_loss_is_left_out_of_the_round(
    engine: str, recwarn: pytest.WarningsRecorder
) -> None:
    data = OwnData(lambda *pair: pair)
    callback = partial(IFCA, 2, group_rounds=0)
    federation = fitted(data, engine, callback, linear_client(Secretive))
    assert federation.history[0].failed == [BAD]
    (text,) = (text for text in said("round 0: client 3 ", recwarn) if "of this round" in text)
    assert text.startswith("failed to tell its loss: RuntimeError: it is stuck")


@ENGINES
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_failure_in_evaluation_may_stop_the_run(stage: str, engine: str) -> None:
    federation = Federation(linear_client(), engine=engine, on_client_error="raise")
    data = OwnData(raising(SystemExit(1)), "val" if stage == "validate" else "test")
    with pytest.raises(ClientError, match=r"client 3 failed .*: SystemExit: 1") as error:
        getattr(quiet_trainer(), stage)(federation, datamodule=data)
    assert isinstance(error.value.__cause__, SystemExit)


# Clients that never end


def sleep(client: Classifier) -> Any:
    time.sleep(600)


def persist(client: Classifier) -> Any:
    while True:
        try:
            time.sleep(600)
        except Exception:
            continue


def swallow(client: Classifier) -> None:
    with suppress(BaseException):
        time.sleep(600)


HANGS = [
    (hangs, method)
    for hangs in (sleep, persist)
    for method in ("loss", "on_train_end", "configure_optimizers")
]


@pytest.mark.parametrize(("hangs", "method"), [*HANGS, (swallow, "on_train_end")])
def test_a_client_that_hangs_is_left_out(
    hangs: Any, method: str, sound: dict[str, Federation], recwarn: pytest.WarningsRecorder
) -> None:
    client = linear_client(kind(method, hangs))
    data = OwnData(lambda *pair: pair)
    federation = fitted(data, "auto", Local, client, client_timeout=1.0)
    (text,) = said("round 0: client 3 failed: ", recwarn)
    assert text.startswith("ClientTimeout: took longer than client_timeout, 1 s")
    assert federation.history[0].failed == [BAD]
    for other in (0, 1, 2, 4, 5):
        torch.testing.assert_close(
            federation.client_state(other), sound["sequential"].client_state(other)
        )


@pytest.mark.parametrize("callback", [FedAvg, Local])
def test_a_client_whose_evaluation_hangs_is_left_out(
    callback: Callable[[], ServerCallback], recwarn: pytest.WarningsRecorder
) -> None:
    data = OwnData(lambda *_: time.sleep(600), "test")
    federation = fitted(data, "sequential", callback, client_timeout=0.1)
    assert values_of(federation, data)["num_samples"].tolist() == [6, 6, 6, 0, 6, 6]
    (text,) = said("round 0: client 3 failed on its test samples: ", recwarn)
    assert text.startswith("ClientTimeout: ")


def test_a_timer_that_runs_already_goes_on(recwarn: pytest.WarningsRecorder) -> None:
    rang = threading.Event()
    handler = signal.signal(signal.SIGALRM, lambda *_: rang.set())
    before = signal.setitimer(signal.ITIMER_REAL, 600)
    try:
        fitted(OwnData(lambda *_: time.sleep(600)), "sequential", client_timeout=0.5)
        left, _ = signal.getitimer(signal.ITIMER_REAL)
        assert 0 < left < 600
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        assert rang.wait(60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
        signal.signal(signal.SIGALRM, handler)


def test_a_time_limit_is_for_clients_one_by_one_in_the_main_thread() -> None:
    data = OwnData(lambda *pair: pair)
    with pytest.raises(ConfigurationError, match="client_timeout needs engine='sequential'"):
        fitted(data, "vectorized", client_timeout=1.0)
    errors: list[BaseException] = []

    def fit() -> None:
        try:
            fitted(data, "sequential", client_timeout=1.0)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=fit)
    thread.start()
    thread.join()
    (error,) = errors
    assert "client_timeout needs the main thread" in str(error)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), True])
def test_a_time_limit_that_is_no_time(seconds: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"client_timeout must be (over 0|a finite)"):
        Federation(linear_client(), client_timeout=seconds)


class Judge(L.LightningModule):
    """Is judged as it likes on the samples of client ``BAD``, whose first feature is 9."""

    def __init__(self, does: Callable[[Judge], Any]) -> None:
        super().__init__()
        self.net, self.does = nn.Linear(FEATURES, CLASSES), does

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        x, y = batch
        value = self.does(self) if (x[:, 0] == 9).all() else F.cross_entropy(self.net(x), y)
        if value is not None:
            self.log("val/loss", value)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def judged(does: Callable[[Judge], Any], client: int = BAD, rounds: int = 1) -> Federation:
    data = OwnData(lambda x, y: (torch.full_like(x, 9.0), y), "val", client)
    torch.manual_seed(0)
    return run(Judge(does), data, FedAvg(), rounds)  # type: ignore[arg-type]


def nothing(module: Judge) -> None:
    """Log nothing."""


def test_a_client_that_logs_nothing_is_not_judged() -> None:
    federation = judged(nothing)
    known = federation.client_metrics("val")["loss"].isfinite()
    assert known.nonzero().flatten().tolist() == [0, 1, 2, 4, 5]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_metric_that_is_no_number_is_said_once(
    value: float, recwarn: pytest.WarningsRecorder
) -> None:
    federation = judged(lambda module: torch.tensor(value), rounds=3)
    expected = judged(nothing, rounds=3)
    metrics = "val/macro_loss", "val/loss", "val/server/loss"
    for name in metrics:
        (own,), (other,) = (
            {x.metrics[name] for x in f.history[-1:]} for f in (federation, expected)
        )
        assert own == other
    told = said("round 0: val/", recwarn)
    rest = "is undefined, NaN or infinite, and left out of that metric; this is said once"
    assert told == [f"loss of client {BAD} {rest}"]
    assert not said("round 1: val/", recwarn)


@pytest.mark.parametrize("does", [lambda module: module.double(), lambda module: module.half()])
def test_a_client_that_changes_its_module_in_evaluation_is_named_itself(
    does: Callable[[Judge], Any], recwarn: pytest.WarningsRecorder
) -> None:
    def evaluated(module: Judge) -> Tensor:
        does(module)
        return torch.zeros(())

    federation = judged(evaluated)
    (told,) = set(said("round 0: client ", recwarn))
    assert told.startswith(f"{BAD} failed on its val samples: RuntimeError: it changed the shape")
    known = federation.client_metrics("val")["loss"].isfinite()
    assert known.nonzero().flatten().tolist() == [0, 1, 2, 4, 5]

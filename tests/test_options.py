"""Options: what makes no sense is refused at once, by the name of the class and of the option."""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from torch import nn

from pflight import Federation, callbacks, datamodules, models
from pflight.callbacks.methods.matching import BBPMAP
from pflight.datamodules import (
    Augmentation,
    Centralized,
    CIFARDataModule,
    ClassesPerClient,
    ClientData,
    ImageDataModule,
    Partition,
    TensorClients,
)
from pflight.errors import ConfigurationError
from pflight.models import Classifier
from pflight.optim import Yogi
from pflight.options import Interval, check_optimizer, check_range, checked, intervals
from pflight.states.layers import Layers
from tests.runs import linear_client, run, small_data

NONSENSE = [math.nan, math.inf, -math.inf, -1, 10**30, 10**400, None, "abc", [], {}, True, object()]
NEGATIVE = {"log_mean", "mu0", "bias_mu0"}  # may be
PAIR = torch.zeros(2, 2), torch.tensor([0, 1])
REQUIRED: dict[str, Any] = {
    "client": Classifier(nn.Linear(2, 2), 2),
    "data": TensorClients([PAIR, PAIR], num_classes=2),
    "hidden": [2],
    "in_features": 2,
    "network": nn.Linear(2, 2),
    "num_classes": 2,
    "num_clusters": 2,
    "params": [nn.Parameter(torch.zeros(2))],
    "partition": ClassesPerClient(2),
    "name": "star",
    "names": "a",
    "path": "partition.json",
    "private": Layers(last=1),
    "root": "data",
    "share": 0.5,
    "train": [PAIR, PAIR],
}


def kinds() -> Iterator[type]:
    """Yield every class that a configuration can name, and those that its options are made of."""
    yield from (Federation, Layers, BBPMAP, Yogi)
    public = (getattr(package, name) for package in PACKAGES for name in package.__all__)
    for kind in public:
        configured = isinstance(kind, type) and issubclass(kind, CONFIGURED)
        if configured and not inspect.isabstract(kind) and kind not in BASES:
            yield kind


PACKAGES = callbacks, models, datamodules
BASES = (Centralized, ClientData, CIFARDataModule, ImageDataModule)  # which nobody names
BASES += (models.CausalTransformer, models.LoRA)  # tests/models/test_text.py tries their options
CONFIGURED = L.Callback, nn.Module, L.LightningDataModule, Partition, Augmentation


def options_of(kind: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options that the command line knows of a class: annotations, and needed values."""
    parser = ArgumentParser()
    parser.add_class_arguments(kind)
    known = vars(parser.get_defaults()).keys()
    hints: dict[str, Any] = {}
    needed: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("pflight") and "__init__" in vars(base):
            hints |= typing.get_type_hints(base.__init__)
            for name, parameter in inspect.signature(base.__init__).parameters.items():
                needed.pop(name, None)
                fixed = parameter.default is not inspect.Parameter.empty and name != "private"
                if name in REQUIRED and not fixed:
                    needed[name] = REQUIRED[name]
    hints = {name: hint for name, hint in hints.items() if name in known - {"params"}}
    return hints, {name: value for name, value in needed.items() if name in known}


def may_be(value: Any, hint: Any) -> bool:
    """Say whether an annotation lets a value of ``NONSENSE`` pass."""
    hints = {typing.get_origin(part) or part for part in typing.get_args(hint) or (hint,)}
    hints.add(typing.get_origin(hint) or hint)
    if value is None or isinstance(value, bool | str | dict):
        return bool(hints & {type(value), typing.get_origin(typing.Mapping[str, str])})
    if isinstance(value, list):
        return any(isinstance(part, type) and isinstance([], part) for part in hints)
    if isinstance(value, int) and abs(value) < 10**300:
        return float in hints or (value == -1 and int in hints)
    return False


@pytest.mark.parametrize("kind", list(kinds()), ids=lambda kind: kind.__name__)
def test_nonsense_is_refused(kind: type) -> None:
    options, required = options_of(kind)
    kind(**required)
    for name, hint in options.items():
        for value in NONSENSE:
            try:
                kind(**{**required, name: value})
            except ConfigurationError as error:
                message = str(error)
                assert kind.__name__ in message
                assert name in message
                assert "\n" not in message
                assert len(message) < 200
            else:
                meant = may_be(value, hint) and (value != -1 or name in NEGATIVE)
                assert meant, f"{name}={value!r} was accepted"


@checked
class Server:
    """Options of many kinds."""

    def __init__(
        self,
        rounds: int,
        lr: float = 1.0,
        *,
        widths: tuple[int, int] = (1, 1),
        rule: Literal["mean", "median"] | Callable[[int], int] | None = None,
        names: Sequence[str] = (),
        **more: Any,
    ) -> None:
        self.given = rounds, lr, widths, rule, names, more


class OwnServer(Server):
    """Somebody's own, whose annotations are nobody else's affair."""

    def __init__(self, rounds: str) -> None:
        super().__init__(rounds=rounds)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ([2.0], {}, "Server: rounds must be a whole number, got 2.0"),
        ([2**32], {}, r"Server: rounds must be below 2\*\*32, got 4294967296"),
        ([1, "0.1"], {}, "Server: lr must be a finite number, got '0.1'"),
        ([1, np.float64("nan")], {}, "Server: lr must be a finite number, got "),
        ([1, 1e39], {}, r"Server: lr must be below 2\*\*128, got 1e\+39"),
        ([1], {"widths": [1, 2, 3]}, r"Server: widths must be a list of int, got \[1, 2, 3\]"),
        ([1], {"widths": [1, 2.5]}, r"Server: widths must be a list of int, got \[1, 2.5\]"),
        ([1], {"rule": "mode"}, "rule must be 'mean', 'median', a function or null, got 'mode'"),
        ([1], {"names": "ab"}, "Server: names must be a list of str, got 'ab'"),
        ([1], {"names": b"ab"}, "Server: names must be a list of str, got b'ab'"),
        (
            [1],
            {"widths": torch.tensor(1)},
            r"Server: widths must be a list of int, got tensor\(1\)",
        ),
        ([1], {"names": ["a" * 1000] * 1000 + [1]}, "Server: names must be a list of str, got"),
    ],
)
def test_arguments_are_what_the_annotations_say(
    args: list[Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message) as error:
        Server(*args, **options)
    assert len(str(error.value)) < 250


def test_what_fits_is_taken_as_it_is() -> None:
    names = (Path("a"), "b")
    options = {"widths": [1, np.int64(2)], "rule": abs, "names": names, "other": math.nan}
    server = Server(np.int32(3), 2, **options)  # type: ignore[arg-type]
    assert server.given == (3, 2, [1, 2], abs, names, {"other": options["other"]})
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'rounds'"):
        Server()  # type: ignore[call-arg]


def test_an_own_class_is_named_and_its_own_options_are_its_own() -> None:
    with pytest.raises(ConfigurationError, match="OwnServer: rounds must be a whole number"):
        OwnServer("three")


@pytest.mark.parametrize(
    ("interval", "value", "expected"),
    [
        ("[1, inf)", 0, "at least 1"),
        ("(0, inf)", 0, "over 0"),
        ("(0, inf)", math.inf, "over 0"),
        ("[0, 1)", 1.0, r"in \[0, 1\)"),
        ("(0, 1]", math.nan, r"in \(0, 1\]"),
        ("(0, 1]", "half", r"in \(0, 1\]"),
    ],
)
def test_ranges(interval: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=f"int: option must be {expected}, got"):
        check_range(0, interval, fine=None, option=value)
    check_range(0, "[0, 1]", low=0, high=1)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (partial(torch.optim.SGD, lr=0.1, momentum=1.5), r"momentum must be in \[0, 1\), got 1.5"),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=-0.5), "SGD: dampening must be"),
        (partial(torch.optim.SGD, lr=math.nan), "SGD: lr must be a finite number, got nan"),
        (partial(torch.optim.SGD, lr=torch.tensor(math.inf)), "SGD: lr must be a finite number"),
        (
            partial(torch.optim.SGD, lr=0.1, weight_decay=math.inf),
            "SGD: weight_decay must be",
        ),
        (partial(torch.optim.Adam, lr=0.1, eps=math.inf), "Adam: eps must be a finite number"),
        (partial(torch.optim.Adam, lr=0.1, eps=0.0), "Adam: eps must be over 0, got 0.0"),
        (partial(torch.optim.RMSprop, lr=0.1, alpha=math.inf), "RMSprop: alpha must be a finite"),
    ],
)
def test_optimizers(build: Callable[..., torch.optim.Optimizer], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_optimizer(build([nn.Parameter(torch.zeros(2))]))
    with pytest.raises(ConfigurationError, match=f"client's optimizer can't be built: .*{message}"):
        run(linear_client(optimizer=build), small_data())
    with pytest.raises(ConfigurationError, match=f"server's optimizer can't be built: .*{message}"):
        run(linear_client(), small_data(), server_optimizer=build)


def test_usual_optimizers_pass() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    for build in (torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad):
        check_optimizer(build(parameters))
    check_optimizer(torch.optim.SGD(parameters, lr=0.0, momentum=0.9, nesterov=True))


def test_layers_to_share_are_needed() -> None:
    with pytest.raises(ConfigurationError, match="SharedPart: give the layers"):
        callbacks.SharedPart()


@pytest.mark.parametrize("candidates", [(), (0, 2)])
def test_candidates(candidates: Any) -> None:
    with pytest.raises(ConfigurationError, match="FeSEM: candidates must be numbers of clusters"):
        callbacks.FeSEM("auto", candidates=candidates)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples_per_client": 10**9}, "10,000,000,000 or more samples of 10 clients take"),
        ({"num_features": 4 * 10**9}, "or more samples of 10 clients take"),
    ],
)
def test_data_that_no_memory_holds(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{message} .*, but this machine has"):
        datamodules.ClusteredSynthetic(num_clients=10, **options).setup()


@pytest.mark.parametrize(
    "options", [{"log_mean": 1e30}, {"num_classes": 10**9}, {"num_clients": 10**9}]
)
def test_clients_that_no_memory_holds(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"samples of .* clients take .* GiB"):
        datamodules.Synthetic(**options).setup()


def of_ranges() -> Iterator[tuple[type, str, Interval]]:
    """Yield each class, its options with a range in their annotation, and the range."""
    for kind in kinds():
        for name, hint in typing.get_type_hints(kind.__init__, include_extras=True).items():
            for interval in intervals(hint):
                yield kind, name, interval


RANGES = [pytest.param(*case, id=f"{case[0].__name__}.{case[1]}") for case in of_ranges()]


def test_ranges_are_found() -> None:
    assert len(RANGES) > 100


@pytest.mark.parametrize(("kind", "option", "interval"), RANGES)
def test_the_range_of_an_annotation_is_checked(kind: type, option: str, interval: Interval) -> None:
    start, end = (float(bound) for bound in interval.text[1:-1].split(", "))
    outside = [start - 1, *([start] if interval.text[0] == "(" else [])]
    if math.isfinite(end):
        outside += [end + 1, *([end] if interval.text[-1] == ")" else [])]
    whole = "int" in str(typing.get_type_hints(kind.__init__, include_extras=True)[option])
    for value in outside:
        wrong = int(value) if whole else value
        message = rf"{kind.__name__}: {option} must be (at least|over|in) .*, got {wrong}"
        with pytest.raises(ConfigurationError, match=message):
            kind(**{option: wrong})

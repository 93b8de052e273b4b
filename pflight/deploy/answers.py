"""What nodes answer: each answer is checked as a whole before anything of it is used."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import MetricRecord, RecordDict
from lightning import LightningModule
from torch import Tensor, nn

from pflight.data.loaders import SPLITS, Split
from pflight.history import Logs
from pflight.metrics.collection import ClientValues
from pflight.states.head import EXTRA, Head, named_head

from .messages import (
    LARGEST_WHOLE,
    MessageError,
    check_parts,
    count_of,
    entries_of,
    finite_number,
    nth,
    number_of,
    numbers_of,
    quoted,
    words_of,
)
from .node import ANEW, COUNTS, STATE

_SAMPLES = 2**40  # of a client, at most
_WIDTH = 2**24  # of a network's head, likewise
_NAMES, _LETTERS = 1_000, 200  # that a client may log, and of each of their names
_TAKEN = ("val/", "test/", "clients/", "communication/")  # begin names that the server itself logs


@dataclass(frozen=True)
class Description:
    """What a node says of its client before it takes part.

    Attributes:
        sizes: Its numbers of samples, by split.
        fingerprint: A number that changes with its samples.
        counted: Whether its answers are counted right or wrong, by class.
        head: Of its network, where a method needs it.
        anew: Whether its client begins anew.
    """

    sizes: dict[Split, int]
    fingerprint: int
    counted: bool
    head: Head | None
    anew: bool


def begins_anew(answer: RecordDict) -> bool:
    """Return whether a node says that its client begins anew, and take that out of its answer."""
    numbers = answer.get("numbers")
    return isinstance(numbers, MetricRecord) and numbers.pop(ANEW, 0) == 1


def check_answered(answer: RecordDict) -> None:
    """Raise if a node says that it has failed.

    Raises:
        MessageError: With the reason.
    """
    if failed := words_of(answer, "failed"):
        raise MessageError(failed)


def description_in(answer: RecordDict, module: LightningModule, counts: bool) -> Description:
    """Return what a node says of its client.

    Args:
        answer: The node's.
        module: The client module as the server has it.
        counts: Whether such a module's answers can be counted right or wrong.

    Raises:
        MessageError: Saying what is wrong with it.
    """
    sizes = {split: f"samples.{split}" for split in SPLITS}
    anew = begins_anew(answer)
    numbers = (*sizes.values(), "fingerprint", "counted", "head")
    check_parts(answer, numbers, ("head",))
    counted = bool(count_of(answer, "counted", most=1))
    if counted and not counts:
        raise MessageError("it counts right and wrong answers, which its module does not give")
    return Description(
        {split: count_of(answer, name, most=_SAMPLES) for split, name in sizes.items()},
        count_of(answer, "fingerprint", most=2**32 - 1),
        counted,
        _head_in(answer, module),
        anew,
    )


def _head_in(answer: RecordDict, module: LightningModule) -> Head | None:
    name, shape = words_of(answer, "head"), numbers_of(answer).get("head")
    if not (isinstance(shape, list) and [type(one) for one in shape] == [int, int]):
        raise MessageError("it says of its network's head what nobody can read")
    if not name and shape == [0, 0]:
        return None
    head = Head(name, *shape)
    if not _may_be_head(head, module):
        raise MessageError(
            f"it says that its network's head is {quoted(name)}, which makes {head.outputs} of "
            f"{head.width} numbers, and no such module can be the head here"
        )
    return head


def _may_be_head(head: Head, module: LightningModule) -> bool:
    """Return whether a head is the one that a module names, or a linear layer, of its sizes."""
    named, parts = named_head(module), dict(module.named_modules())
    part = parts.get(head.name)
    if part is None or named not in (None, head.name) or head.name.startswith(EXTRA):
        return False
    if not isinstance(part, nn.Linear):
        return named is not None and min(head[1:]) >= 0 and max(head[1:]) <= _WIDTH
    times = head.width // part.in_features  # it is applied to so many vectors of a sample
    sizes = times * part.in_features, times * part.out_features
    return times > 0 and head[1:] == sizes and max(sizes) <= _WIDTH


def update_in(
    answer: RecordDict, like: Mapping[str, Tensor], idle: bool
) -> tuple[dict[str, Tensor], Logs] | None:
    """Return the entries that a node sends of a client's model, and what its module has logged.

    Args:
        answer: The node's.
        like: What is asked for, as tensors of the same types and shapes.
        idle: Whether the client has nothing to train on, so that it may send nothing.

    Raises:
        MessageError: Saying what is wrong with it.
    """
    if not count_of(answer, "answered", most=1):
        check_parts(answer, ("answered",))
        if not idle:
            raise MessageError("it says that it has nothing to train on")
        return None
    check_parts(answer, ("answered", "logs."), groups=(STATE,))
    return entries_of(answer, STATE, like), _logs_in(answer)


def _logs_in(answer: RecordDict) -> Logs:
    logs: Logs = {}
    given = numbers_of(answer, "logs.")
    _check_names(given, _TAKEN)
    for name, pair in given.items():
        if not (isinstance(pair, list) and len(pair) == 2):
            raise MessageError(f"it logged {name} in a form that nobody can read")
        total, count = (finite_number(name, value) for value in pair)
        if not 0 < count <= LARGEST_WHOLE or not count.is_integer():
            raise MessageError(f"it logged {name} of {count:g} samples")
        logs[name] = (total, int(count))
    return logs


def losses_in(answer: RecordDict, num_models: int, num_samples: int) -> list[float]:
    """Return a client's mean losses; NaN where one is not finite, or of no samples.

    Args:
        answer: Its node's.
        num_models: At how many models.
        num_samples: Of how many samples.

    Raises:
        MessageError: Saying what is wrong with it.
    """
    names = [nth("loss", k) for k in range(num_models)]
    check_parts(answer, names)
    given = numbers_of(answer)
    if given and not num_samples:
        raise MessageError("it sent a loss, but has no such samples")
    return [number_of(answer, name) if name in given else math.nan for name in names]


def counts_in(
    answer: RecordDict, like: Mapping[str, Mapping[str, Tensor]], num_samples: int
) -> dict[str, dict[str, Tensor]]:
    """Return what a client's node has counted of its models.

    Args:
        answer: The node's.
        like: For each model, tensors of the same types and shapes.
        num_samples: Of how many samples.

    Raises:
        MessageError: Saying what is wrong with it.
    """
    groups = {model: f"{model}{COUNTS}" for model in like}
    check_parts(answer, groups={*groups.values()})
    found = {model: entries_of(answer, groups[model], own) for model, own in like.items()}
    for own in found.values():
        count, right, f1 = (own[name].item() for name in ("count", "right", "f1"))
        if count != num_samples:
            raise MessageError(f"it counted {count} of its {num_samples} samples")
        if not 0 <= right <= num_samples:
            raise MessageError(f"it counted {right} right answers of {num_samples}")
        if not 0 <= f1 <= 1:
            raise MessageError(f"its F1 is {f1:g}")
        finite_number("loss_sum", own["loss_sum"].item())
    return found


def values_in(
    answer: RecordDict, client: int, models: Collection[str], judges: bool
) -> dict[str, ClientValues]:
    """Return what a client's module has logged of its models.

    Args:
        answer: Its node's.
        client: The client.
        models: Which models.
        judges: Whether the module has a step of its own in which it can log.

    Raises:
        MessageError: Saying what is wrong with it.
    """
    starts = {model: f"{model}value." for model in models}
    ways = {model: (f"{model}higher", f"{model}lower") for model in models}
    check_parts(answer, starts.values(), [word for pair in ways.values() for word in pair])
    return {
        model: _values(client, numbers_of(answer, start), answer, ways[model], judges)
        for model, start in starts.items()
    }


def _values(
    client: int, given: Mapping[str, Any], answer: RecordDict, ways: tuple[str, str], judges: bool
) -> ClientValues:
    _check_names(given)
    if judges != bool(given):
        raise MessageError(
            "its module logged nothing to judge it by" if judges else "it logged what nobody can"
        )
    higher, lower = (words_of(answer, way, []) for way in ways)
    known = Counter([*higher, *lower])
    if not known.keys() <= given.keys() or len(known) < known.total():
        raise MessageError("it says twice, or of nothing that it logged, whether higher is better")
    values = ClientValues()
    values.clients += [client] * bool(given)
    for name, value in given.items():
        if type(value) not in (int, float):
            raise MessageError(f"its {name} is no number")
        values.values[name] = {
            client: finite_number(name, value) if math.isfinite(value) else value
        }
    values.higher_is_better = {**dict.fromkeys(higher, True), **dict.fromkeys(lower, False)}
    return values


def odd_ones(judged: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    """Return the clients that don't agree with most others on which values are better, and why.

    Args:
        judged: What each client's module has logged of its models, or its node has counted.
    """
    said = [
        (client, name, values.higher_is_better.get(name))
        for client, models in judged.items()
        for values in models.values()
        if isinstance(values, ClientValues)
        for name in values.values
    ]
    votes: dict[str, Counter[bool | None]] = {}
    for _, name, better in said:
        votes.setdefault(name, Counter())[better] += 1
    most = {name: counter.most_common(1)[0][0] for name, counter in votes.items()}
    return {
        client: f"it does not agree with most others on whether higher {name} is better"
        for client, name, better in said
        if better is not most[name]
    }


def _check_names(names: Collection[str], taken: Iterable[str] = ()) -> None:
    """Raise unless these are names that can be logged."""
    if len(names) > _NAMES:
        raise MessageError(f"it logged {len(names)} values, which are too many")
    for name in names:
        if not (0 < len(name) <= _LETTERS and name.isprintable() and name == name.strip()):
            raise MessageError(f"it logged {quoted(name)!r}, which is no name")
        if name == "num_samples" or name.startswith((*taken,)):
            raise MessageError(f"it logged {name}, a name that the server keeps for itself")

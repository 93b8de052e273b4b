"""The answers of nodes. Each answer is checked as a whole before any part of it is used."""

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
    list_of,
    nth,
    number_of,
    numbers_of,
    quoted,
    words_of,
)
from .node import ANEW, COUNTS, STATE

_SAMPLES = 2**40  # at most, for a client
_WIDTH = 2**24  # at most, for the head of a network
_NAMES, _LETTERS = 1_000, 200  # at most: the names that a client logs, the letters of each
_WAYS = "higher", "lower"  # lists of the logged values of which more is better, or less
_TAKEN = ("val/", "test/", "clients/", "communication/")  # prefixes of the server's own logs


@dataclass(frozen=True)
class Description:
    """The description of a client that its node sends before it takes part.

    Attributes:
        sizes: The client's number of samples, by split.
        fingerprint: A number that changes with the samples.
        counted: Whether predictions can be counted as right or wrong, by class.
        head: The head of the network, if the method needs it.
        anew: Whether the client begins anew.
    """

    sizes: dict[Split, int]
    fingerprint: int
    counted: bool
    head: Head | None
    anew: bool


def begins_anew(answer: RecordDict) -> bool:
    """Return whether the client begins anew, and remove this entry from the answer."""
    numbers = answer.get("numbers")
    return isinstance(numbers, MetricRecord) and numbers.pop(ANEW, 0) == 1


def check_answered(answer: RecordDict) -> None:
    """Raise if a node reports a failure.

    Raises:
        MessageError: If it does, with the reason.
    """
    if failed := words_of(answer, "failed"):
        raise MessageError(failed)


def description_in(answer: RecordDict, module: LightningModule, counts: bool) -> Description:
    """Return the description of a client in an answer.

    Args:
        answer: The answer of the node.
        module: The server's copy of the client module.
        counts: Whether the module's predictions can be counted as right or wrong.

    Raises:
        MessageError: If the answer is invalid, with the reason.
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
    """Return whether a head is the module's named head or a linear layer, with valid sizes."""
    named, parts = named_head(module), dict(module.named_modules())
    part = parts.get(head.name)
    if part is None or named not in (None, head.name) or head.name.startswith(EXTRA):
        return False
    if not isinstance(part, nn.Linear):
        return named is not None and min(head[1:]) >= 0 and max(head[1:]) <= _WIDTH
    times = head.width // part.in_features  # the layer is applied to this many vectors of a sample
    sizes = times * part.in_features, times * part.out_features
    return times > 0 and head[1:] == sizes and max(sizes) <= _WIDTH


def update_in(
    answer: RecordDict, like: Mapping[str, Tensor], idle: bool
) -> tuple[dict[str, Tensor], Logs] | None:
    """Return the returned entries of a client's model, and the logs of its module.

    Args:
        answer: The answer of the node.
        like: Tensors with the expected names, types and shapes.
        idle: Whether the client has no samples to train on. Then it may send nothing.

    Raises:
        MessageError: If the answer is invalid, with the reason.
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
    """Return a client's mean losses. A loss is NaN if it is not finite or without samples.

    Args:
        answer: The answer of the client's node.
        num_models: The number of models.
        num_samples: The number of samples.

    Raises:
        MessageError: If the answer is invalid, with the reason.
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
    """Return the counts of a client's models.

    Args:
        answer: The answer of the node.
        like: Tensors with the expected types and shapes, by model.
        num_samples: The number of samples.

    Raises:
        MessageError: If the answer is invalid, with the reason.
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
    """Return the logs of a client's models.

    Args:
        answer: The answer of the client's node.
        client: The client.
        models: The models.
        judges: Whether the module has its own evaluation step, which can log.

    Raises:
        MessageError: If the answer is invalid, with the reason.
    """
    ways = [f"{model}{way}" for model in models for way in _WAYS]
    check_parts(answer, [f"{model}value." for model in models], ways)
    return {model: _values(client, answer, model, judges) for model in models}


def _values(client: int, answer: RecordDict, model: str, judges: bool) -> ClientValues:
    given = numbers_of(answer, f"{model}value.")
    _check_names(given)
    if judges != bool(given):
        raise MessageError(
            "its module logged nothing to judge it by" if judges else "it logged what nobody can"
        )
    higher, lower = (list_of(answer, f"{model}{way}") for way in _WAYS)
    known = Counter([*higher, *lower])
    if not known.keys() <= given.keys() or len(known) < known.total():
        raise MessageError("it says twice, or of nothing that it logged, whether higher is better")
    values = ClientValues()
    values.clients += [client] * bool(given)
    for name, value in given.items():
        if type(value) not in (int, float):
            raise MessageError(f"its {name} is no number")
        finite = finite_number(name, value) if math.isfinite(value) else value
        values.values[name] = {client: finite}
    values.higher_is_better = {**dict.fromkeys(higher, True), **dict.fromkeys(lower, False)}
    return values


def odd_ones(judged: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    """Return the clients that disagree with the majority about the better values, and why.

    Args:
        judged: The logs or counts of each client, by model.
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
    """Raise unless these names can be logged."""
    if len(names) > _NAMES:
        raise MessageError(f"it logged {len(names)} values, which are too many")
    for name in names:
        if not (0 < len(name) <= _LETTERS and name.isprintable() and name == name.strip()):
            raise MessageError(f"it logged {quoted(name)!r}, which is no name")
        if name == "num_samples" or name.startswith((*taken,)):
            raise MessageError(f"it logged {name}, a name that the server keeps for itself")

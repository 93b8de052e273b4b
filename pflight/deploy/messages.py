"""Messages between the server and its nodes: tensors, plain numbers and words.

A message is a Flower ``RecordDict`` with numbers, words and groups of entries, such as a model's
state. A group is one block of raw bytes. Words give the names, types and shapes of its entries.
Nothing in a message is unpickled, parsed or run. Names, types, shapes and sizes are checked before
bytes become tensors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

Number = int | float | list[int] | list[float]
Words = str | list[str]
_RAW, _BYTES = "raw", "bytes"  # little-endian, as on all machines with PyTorch
_NUMBERS, _WORDS = "numbers", "words"
_ABOUT = "names", "kinds"  # words about each group
_LONGEST, _QUOTED = 2_000, 100  # characters of another machine's text, and of a quoted part
_LARGEST = 1e300  # so that sums of many such numbers are finite
LARGEST_WHOLE = 2**53
"""The largest integer in a message. Sums over clients then fit into 64 bits."""


class MessageError(ValueError):
    """A message that is invalid or does not answer the request."""


def packed(
    entries: Mapping[str, Mapping[str, Tensor]] | None = None,
    numbers: Mapping[str, Number] | None = None,
    words: Mapping[str, Words] | None = None,
    pool: dict[bytes, bytes] | None = None,
) -> RecordDict:
    """Return the content of a message.

    Args:
        entries: Tensors by the name of their group and their own name.
        numbers: Plain numbers.
        words: Plain words.
        pool: The bytes of tensors in other messages. Equal bytes share memory.
    """
    pool = {} if pool is None else pool
    records: dict[str, Any] = {_NUMBERS: MetricRecord(dict(numbers or {}))}
    said: dict[str, Any] = dict(words or {})
    for group, tensors in (entries or {}).items():
        ordered = _ordered(tensors)
        said[f"{group}.names"] = ordered
        said[f"{group}.kinds"] = [_kind(tensors[name]) for name in ordered]
        flat = [_flat(tensors[name]) for name in ordered if tensors[name].numel()]
        content = torch.cat(flat).numpy().tobytes() if flat else b""
        content = pool.setdefault(content, content)
        records[group] = ArrayRecord({_BYTES: Array("uint8", (len(content),), _RAW, content)})
    return RecordDict({**records, _WORDS: ConfigRecord(said)})


def nth(name: str, place: int) -> str:
    """Return the name of the group at a place, counted from 0.

    Example:
        >>> nth("sent", 0), nth("sent", 2)
        ('sent', 'sent.2')
    """
    return f"{name}.{place}" if place else name


def check_parts(
    content: RecordDict,
    numbers: Iterable[str] = (),
    words: Iterable[str] = (),
    groups: Collection[str] = (),
) -> None:
    """Raise if a message holds unknown parts.

    Args:
        content: The content of a message.
        numbers: Names of numbers. A name that ends with ``.`` is a prefix.
        words: Names of words.
        groups: Names of groups of entries.

    Raises:
        MessageError: If it holds others, with their names, or has no numbers or words at all.
    """
    kinds = {_NUMBERS: MetricRecord, _WORDS: ConfigRecord, **dict.fromkeys(groups, ArrayRecord)}
    for name in (_NUMBERS, _WORDS):
        if not isinstance(content.get(name), kinds[name]):
            raise MessageError(f"it sent no {name}")
    for name, record in content.items():
        if name not in kinds or not isinstance(record, kinds[name]):
            raise _unknown(name)
    about = [f"{group}.{word}" for group in groups if group in content for word in _ABOUT]
    for given, known in ((_NUMBERS, (*numbers,)), (_WORDS, (*words, *about))):
        begin = tuple(name for name in known if name.endswith("."))
        for name in content[given]:
            if name not in known and not name.startswith(begin):
                raise _unknown(name)


def entries_of(
    content: RecordDict, group: str, expected: Mapping[str, Tensor], finite: bool = True
) -> dict[str, Tensor]:
    """Return the tensors of a group. It must hold exactly the expected tensors.

    Args:
        content: The content of a message.
        group: The group's name.
        expected: A tensor of the same type and shape for each name. Values don't matter.
        finite: Whether to reject NaN, infinite values, and integers over
            :data:`LARGEST_WHOLE`.

    Raises:
        MessageError: If the group is invalid, with the reason.
    """
    kinds = _kinds_of(content, group)
    if missing := [name for name in expected if name not in kinds]:
        raise MessageError(f"it sent no {missing[0]}")
    if unknown := [name for name in kinds if name not in expected]:
        raise _unknown(unknown[0])
    for name, like in expected.items():
        if kinds[name] != _kind(like):
            raise MessageError(
                f"it sent {name} as {quoted(kinds[name])}, where {_kind(like)} is wanted"
            )
    held = _bytes_in(content, group)
    wanted = sum(tensor.nbytes for tensor in expected.values())
    if len(held) != wanted:
        raise MessageError(f"it sent {len(held)} bytes, where {wanted} are wanted")
    buffer, tensors, offset = bytearray(held), {}, 0
    for name in _ordered(expected):
        like = expected[name]
        if like.numel():
            part = torch.frombuffer(buffer, dtype=like.dtype, count=like.numel(), offset=offset)
            tensors[name] = part.view(like.shape)
        else:
            tensors[name] = torch.empty(like.shape, dtype=like.dtype)
        offset += like.nbytes
        _check_values(name, tensors[name], finite)
    return {name: tensors[name] for name in expected}


def group_of(
    content: RecordDict, group: str, known: Mapping[str, Tensor], prefix: str
) -> dict[str, Tensor]:
    """Return the tensors of a group. Each must have a known name; see :func:`entries_of`.

    Args:
        content: The content of a message.
        group: The group's name.
        known: As ``expected`` there, but some may be missing.
        prefix: The prefix of further names, for single numbers.
    """
    if group not in content:
        raise MessageError(f"there is no {group} in it")
    single = torch.zeros((), dtype=torch.double)
    wanted = {
        name: known.get(name, single)
        for name in _kinds_of(content, group)
        if name in known or name.startswith(prefix)
    }
    return entries_of(content, group, wanted, finite=False)


def number_of(content: RecordDict, name: str) -> float:
    """Return a finite number.

    Raises:
        MessageError: If there is no finite number of this name.
    """
    return finite_number(name, _given_number(content, name))


def count_of(content: RecordDict, name: str, least: int = 0, most: int = LARGEST_WHOLE) -> int:
    """Return an integer.

    Args:
        content: The content of a message.
        name: The number's name.
        least: The smallest allowed value.
        most: The largest allowed value.

    Raises:
        MessageError: If there is no integer of this name in this range.
    """
    value = _given_number(content, name)
    if type(value) is not int or not least <= value <= most:
        raise MessageError(
            f"its {name} is {quoted(str(value))}, and no whole number from {least} to {most}"
        )
    return value


def finite_number(name: str, value: Any) -> float:
    """Return the value of a name in a message if it is a finite number, fit for sums.

    Raises:
        MessageError: If it is no such number.
    """
    if type(value) not in (int, float) or not math.isfinite(value) or abs(value) > _LARGEST:
        raise MessageError(f"its {quoted(name)} is {quoted(str(value))}, which is no finite number")
    return float(value)


def numbers_of(content: RecordDict, start: str = "") -> dict[str, Any]:
    """Return the numbers with a prefix, with the prefix removed from their names."""
    given: Mapping[str, Any] = content.metric_records.get(_NUMBERS) or {}
    return {name[len(start) :]: value for name, value in given.items() if name.startswith(start)}


def words_of(content: RecordDict, name: str) -> str:
    """Return the words of a name as text on one line, which is empty if there are none.

    Raises:
        MessageError: If they are no text.
    """
    said = _said(content, name, "")
    if not isinstance(said, str):
        raise MessageError(f"what it sent as {name} is not text")
    return shown(said)


def list_of(content: RecordDict, name: str) -> list[str]:
    """Return a list of words, which is empty if there is none of this name.

    Raises:
        MessageError: If it is no list of words.
    """
    said = _said(content, name, [])
    if not isinstance(said, list) or not all(isinstance(word, str) for word in said):
        raise MessageError(f"what it sent as {name} is not a list of words")
    return list(said)


def _said(content: RecordDict, name: str, default: Words) -> Any:
    record: Mapping[str, Any] = content.config_records.get(_WORDS) or {}
    return record.get(name, default)


def tensor_bytes_of(content: RecordDict) -> int:
    """Return the size of a message's tensors in bytes, without the overhead around them."""
    groups = content.array_records.values()
    return sum(len(array.data) for group in groups for array in group.values())


def _ordered(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names in the order of their bytes: wide types first, so that all are aligned."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"


def _kinds_of(content: RecordDict, group: str) -> dict[str, str]:
    """Return the type and shape of each entry of a group, as text.

    Raises:
        MessageError: If some entries lack a type and shape, or a name occurs twice.
    """
    names, kinds = (list_of(content, f"{group}.{word}") for word in _ABOUT)
    if len(names) != len(kinds):
        raise MessageError("it sent entries without names")
    if len({*names}) < len(names):
        raise MessageError("it sent an entry twice")
    return dict(zip(names, kinds, strict=True))


def _given_number(content: RecordDict, name: str) -> Any:
    given = numbers_of(content)
    if name not in given:
        raise MessageError(f"it sent no number {name}")
    return given[name]


def _bytes_in(content: RecordDict, group: str) -> bytes:
    """Return the bytes of a group.

    Raises:
        MessageError: If the group holds anything else.
    """
    record: Mapping[str, Array] = content.array_records.get(group) or {}
    if unknown := [name for name in record if name != _BYTES]:
        raise _unknown(unknown[0])
    if not record:
        return b""
    array = record[_BYTES]
    if (array.stype, array.dtype, array.shape) != (_RAW, "uint8", (len(array.data),)):
        raise MessageError(f"it sent {group} as something else than raw bytes")
    return array.data


def _check_values(name: str, tensor: Tensor, finite: bool) -> None:
    """Raise if values are invalid for the type of a tensor, or not finite if ``finite`` is set."""
    if not tensor.numel():
        return
    if tensor.dtype is torch.bool:
        if tensor.view(torch.uint8).max() > 1:
            raise MessageError(f"its {name} has values that are neither true nor false")
    elif finite and (tensor.is_floating_point() or tensor.is_complex()):
        if not tensor.isfinite().all():
            raise MessageError(f"its {name} is NaN or infinite")
    elif finite and tensor.double().abs().max() > LARGEST_WHOLE:
        raise MessageError(f"its {name} has larger numbers than any machine may send")


def _unknown(name: str) -> MessageError:
    return MessageError(f"it sent {quoted(name)}, which nobody asked for")


def quoted(text: str) -> str:
    """Return a short name or value from another machine as :func:`shown` does."""
    line = shown(text)
    return line if len(line) <= _QUOTED else f"{line[:_QUOTED]}..."


def shown(text: str) -> str:
    """Return text from another machine as one line that is safe to print."""
    line = " ".join(text[:_LONGEST].split())
    return "".join(letter if letter.isprintable() else "?" for letter in line)

"""What a server and its nodes say to each other: tensors, plain numbers and words.

A message is one of Flower's ``RecordDict`` with groups of entries, such as a model's state, each as
one run of raw bytes with the entries' names, types and shapes in words; with numbers; and with
words. Nothing in it is unpickled, parsed or run, and no bytes become a tensor before names, types,
shapes and sizes are those that are expected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from torch import Tensor

Number = int | float | list[int] | list[float]
Words = str | list[str]
_RAW, _BYTES = (
    "raw",
    "bytes",
)  # bytes in the order of the machines that all of PyTorch's run on, little-endian
_NUMBERS, _WORDS = "numbers", "words"
_LONGEST = 2_000  # characters of what a node says, which is printed


class MessageError(ValueError):
    """A message that is not what was asked for."""


def packed(
    entries: Mapping[str, Mapping[str, Tensor]] | None = None,
    numbers: Mapping[str, Number] | None = None,
    words: Mapping[str, Words] | None = None,
) -> RecordDict:
    """Return the content of a message.

    Args:
        entries: Tensors by the name of their group and their own.
        numbers: Plain numbers.
        words: Plain words.
    """
    records: dict[str, Any] = {_NUMBERS: MetricRecord(dict(numbers or {}))}
    said: dict[str, Any] = dict(words or {})
    for group, tensors in (entries or {}).items():
        ordered = _ordered(tensors)
        said[f"{group}.names"] = ordered
        said[f"{group}.kinds"] = [_kind(tensors[name]) for name in ordered]
        flat = [_flat(tensors[name]) for name in ordered if tensors[name].numel()]
        content = torch.cat(flat).numpy().tobytes() if flat else b""
        records[group] = ArrayRecord({_BYTES: Array("uint8", (len(content),), _RAW, content)})
    return RecordDict({**records, _WORDS: ConfigRecord(said)})


def entries_of(
    content: RecordDict, group: str, expected: Mapping[str, Tensor], finite: bool = True
) -> dict[str, Tensor]:
    """Return the tensors of a group, which has all that are expected, and nothing else.

    Args:
        content: Of a message.
        group: The group's name.
        expected: A tensor of the same type and shape for each name; its values don't matter.
        finite: Whether there may be no NaN and nothing infinite.

    Raises:
        MessageError: Saying what is wrong with it.
    """
    kinds = _kinds_of(content, group)
    if missing := [name for name in expected if name not in kinds]:
        raise MessageError(f"it sent no {missing[0]}")
    if unknown := [name for name in kinds if name not in expected]:
        raise MessageError(f"it sent {_shown(unknown[0])}, which nobody asked for")
    for name, like in expected.items():
        if kinds[name] != _kind(like):
            raise MessageError(
                f"it sent {name} as {_shown(kinds[name])}, where {_kind(like)} is wanted"
            )
    record = content.array_records.get(group)
    array = None if record is None else record.get(_BYTES)
    held = b"" if array is None or array.stype != _RAW else array.data
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
        if finite and like.is_floating_point() and not tensors[name].isfinite().all():
            raise MessageError(f"its {name} is NaN or infinite")
    return {name: tensors[name] for name in expected}


def group_of(
    content: RecordDict, group: str, known: Mapping[str, Tensor], prefix: str
) -> dict[str, Tensor]:
    """Return the tensors of a group, each of which has a known name; see :func:`entries_of`.

    Args:
        content: Of a message.
        group: The group's name.
        known: As ``expected`` there, of which there need not be all.
        prefix: What further names may begin with, which are of single numbers.
    """
    single = torch.zeros((), dtype=torch.double)
    wanted = {
        name: known.get(name, single)
        for name in _kinds_of(content, group)
        if name in known or name.startswith(prefix)
    }
    return entries_of(content, group, wanted, finite=False)


def number_of(content: RecordDict, name: str) -> float:
    """Return a number.

    Raises:
        MessageError: If there is none of this name.
    """
    value = numbers_of(content).get(name)
    if not isinstance(value, int | float):
        raise MessageError(f"it sent no number {name}")
    return value


def numbers_of(content: RecordDict, start: str = "") -> dict[str, Any]:
    """Return the numbers whose names begin so, without that beginning."""
    given: Mapping[str, Any] = content.metric_records.get(_NUMBERS) or {}
    return {name[len(start) :]: value for name, value in given.items() if name.startswith(start)}


def words_of(content: RecordDict, name: str, default: Any = "") -> Any:
    """Return what was said under a name, on one line if it is text."""
    record: Mapping[str, Any] = content.config_records.get(_WORDS) or {}
    said = record.get(name, default)
    if isinstance(said, str):
        return _shown(said)
    if isinstance(said, Sequence) and all(isinstance(word, str) for word in said):
        return list(said)
    return default


def bytes_of(content: RecordDict) -> int:
    """Return how many bytes a message's content has as Flower sends it."""
    return sum(len(part.deflate()) for part in get_all_nested_objects(content).values())


def tensor_bytes_of(content: RecordDict) -> int:
    """Return how many of these are tensors; the others are around them."""
    groups = content.array_records.values()
    return sum(len(array.data) for group in groups for array in group.values())


def _ordered(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names in the order of their bytes: large numbers first, so that all lie even."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)


def _kind(tensor: Tensor) -> str:
    return f"{_name_of(tensor.dtype)} of shape {list(tensor.shape)}"


def _kinds_of(content: RecordDict, group: str) -> dict[str, str]:
    """Return what a group says of its entries.

    Raises:
        MessageError: If it says it of some entries alone, or of one twice.
    """
    names, kinds = (words_of(content, f"{group}.{word}", []) for word in ("names", "kinds"))
    if not (isinstance(names, list) and isinstance(kinds, list)) or len(names) != len(kinds):
        raise MessageError("it sent entries without names")
    if len({*names}) < len(names):
        raise MessageError("it sent an entry twice")
    return dict(zip(names, kinds, strict=True))


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shown(text: str) -> str:
    """Return words of another machine as one line that is safe to print."""
    line = " ".join(text.split())[:_LONGEST]
    return "".join(letter if letter.isprintable() else "?" for letter in line)

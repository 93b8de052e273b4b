"""Server state that a server callback declares: how it is saved, loaded and moved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class DeclaredState:
    """Saves, loads and moves a declared state of a server callback.

    Args:
        kind: The dataclass or named tuple of the value, or of the entries of a list. A checkpoint
            has its fields as a dictionary.
        on_cpu: Whether the state's tensors stay on the CPU.
    """

    kind: type | None = None
    on_cpu: bool = False

    def save(self, value: Any) -> Any:
        """Return a value as tensors and primitives, for a checkpoint.

        Raises:
            TypeError: If the value has a part of another type.
        """
        if self.kind is not None and isinstance(value, self.kind):
            return {name: self.save(getattr(value, name)) for name in names_of(self.kind)}
        if type(value) is dict:
            return {self.save(key): self.save(entry) for key, entry in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.save(entry) for entry in value)
        if not isinstance(value, Tensor) and type(value) not in _PLAIN:
            raise TypeError(type(value).__name__)
        return value

    def load(self, saved: Any) -> Any:
        """Return the value that :meth:`save` has saved as ``saved``."""
        if self.kind is None or saved is None:
            return saved
        if isinstance(saved, dict):
            return self.kind(**saved)
        return type(saved)(self.kind(**entry) for entry in saved)

    def move(self, value: Any, device: torch.device) -> Any:
        """Return a value with its tensors on the device, or on the CPU if they stay there."""
        place = torch.device("cpu") if self.on_cpu else device
        return _with_tensors(value, lambda tensor: tensor.to(place))


def names_of(kind: type) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass or named tuple."""
    return tuple(f.name for f in fields(kind)) if is_dataclass(kind) else kind._fields  # type: ignore[attr-defined]


def _with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a value with a function applied to each of its tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) is dict:
        return {key: _with_tensors(entry, change) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(entry, change) for entry in value)
    if is_dataclass(value) and not isinstance(value, type):
        of = {f.name: _with_tensors(getattr(value, f.name), change) for f in fields(value)}
        return replace(value, **of)
    if isinstance(value, tuple):
        return type(value)(*(_with_tensors(entry, change) for entry in value))
    return value

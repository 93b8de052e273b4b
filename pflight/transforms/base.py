"""The base class of transforms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pflight.modifiers import Modifier

Stage = Literal["clip", "noise", "compress"]
STAGES: tuple[Stage, ...] = ("clip", "noise", "compress")
"""The order in which transforms run, whatever the order in which they are given."""


class Draw:
    """Random numbers for the updates of some clients, the same in any chunk and on any rank.

    Args:
        generators: One for each client, in the order of the rows.
        like: The updates ``[C, d]``, for shape, dtype and device.
    """

    def __init__(self, generators: Sequence[torch.Generator], like: Tensor) -> None:
        self._generators = generators
        self._like = like

    def uniform(self) -> Tensor:
        """Return numbers ``[C, d]`` from [0, 1)."""
        return self._rows(torch.rand)

    def normal(self) -> Tensor:
        """Return numbers ``[C, d]`` of the standard normal distribution."""
        return self._rows(torch.randn)

    def _rows(self, draw: Callable[..., Tensor]) -> Tensor:
        size = self._like.shape[1]
        rows = [draw(size, generator=one, dtype=self._like.dtype) for one in self._generators]
        return torch.stack(rows).to(self._like.device)


class Transform(Modifier):
    """Changes what a client sends. It runs at the client, after its training.

    It gets the *update*: the trained model less the model that the server sent, all entries in one
    vector. The client itself keeps the model as it was trained. Parameters come first, in the order
    of the model. Transforms of the stage ``"clip"`` also get buffers of floating point behind them;
    those of other stages don't, since a variance must stay positive. Private and frozen entries and
    integers are never transformed, nor is what a method sends beside the model.

    Attributes:
        stage: ``"clip"``, ``"noise"`` or ``"compress"``. Transforms run in this order. At most one
            of each stage can be given.
        error_feedback: Whether a client remembers what compression left out of its update, and
            adds it to its next one.
    """

    kind = "transform"
    stage: ClassVar[Stage]
    error_feedback: bool = False

    def __call__(self, updates: Tensor, draw: Draw) -> Tensor:
        """Return the changed updates ``[C, d]``, in a new tensor.

        Each row must depend on this row alone.

        Args:
            updates: One row for each client ``[C, d]``.
            draw: Random numbers.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define __call__()")

    def nbytes(self, size: int, itemsize: int) -> int:
        """Return the bytes of a changed update as it travels; by default as it would without this.

        Args:
            size: Number of parameters d.
            itemsize: Bytes of each of them.
        """
        return size * itemsize

    def pack(self, update: Tensor) -> dict[str, Tensor] | None:
        """Return tensors that stand for a changed update ``[d]``, and take :meth:`nbytes`.

        By default it travels as it is. Then it returns ``None``.
        """
        return None

    def packed_like(self, size: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return tensors of the shapes and types that :meth:`pack` gives.

        Args:
            size: Number of parameters d.
            dtype: Of the parameters.
        """
        return {}

    def unpack(self, parts: Mapping[str, Tensor], size: int) -> Tensor:
        """Return the update ``[d]`` that :meth:`pack` was given.

        Args:
            parts: What it returned.
            size: Number of parameters d.

        Raises:
            ValueError: If no update can have been packed so.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define unpack()")

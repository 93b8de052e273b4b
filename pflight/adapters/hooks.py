"""Hooks that change what an adapter adds to its layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

Change = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Gets the layer's input, the same after dropout, and the output of factor B; returns another
output of B."""


class ChangedOutput:
    """Changes the output of an adapter's factor B, before its layer scales it.

    The hooks are copied with the layer, and ``change`` with them, if it is a method or a partial.

    Args:
        layer: The layer, of any kind but an embedding.
        adapter: Name of its adapter.
        change: Returns the new output.
    """

    def __init__(self, layer: Any, adapter: str, change: Change) -> None:
        self.change = change
        self._seen: list[Tensor] = []  # the layer's input, and the same after dropout
        layer.register_forward_pre_hook(self._before_layer, with_kwargs=True)
        layer.lora_A[adapter].register_forward_pre_hook(self._before_a)
        layer.lora_B[adapter].register_forward_hook(self._after_b)

    def _before_layer(self, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._seen[:] = [(*args, *named.values())[0]]

    def _before_a(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        self._seen.append(args[0])

    def _after_b(self, _: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        given, dropped = self._seen
        self._seen.clear()  # a copy of the module must not hold them
        return self.change(given.to(dropped.dtype), dropped, output)

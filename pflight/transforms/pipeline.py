"""The transforms of a method, one after the other."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.utils import expand_as_right
from torch import Tensor

from pflight.errors import ConfigurationError
from pflight.states.state import StateLayout, entries
from pflight.states.updates import ClientUpdates

from .base import STAGES, Draw, Transform

_PACKED = "transformed."
ERROR = "error"
"""The entry of a client's memory that holds what compression left out."""


def _changed(transform: Transform, updates: Tensor, draw: Draw) -> Tensor:
    """Return what a transform makes of a copy of updates ``[C, d]``.

    Raises:
        ConfigurationError: If that has another shape, or depends on the order of execution.
    """
    state = torch.get_rng_state()
    found = transform(updates.clone(), draw)
    if not torch.equal(state, torch.get_rng_state()):
        raise ConfigurationError(
            f"{type(transform).__name__} draws from PyTorch's generator, and so other numbers in "
            "each engine: take draw.uniform() or draw.normal()"
        )
    if not isinstance(found, Tensor) or found.shape != updates.shape:
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ConfigurationError(
            f"{type(transform).__name__} must return updates of the shape that it gets, "
            f"{tuple(updates.shape)}, got {shape}"
        )
    return found


class Pipeline:
    """What becomes of updates before they travel: clip, then noise, then compress.

    Args:
        transforms: At most one of each stage, in any order.
        layout: The layout of the clients' states.
        returns: Names of all that clients send back.
        gradients: Whether they send gradients, which are changed as they are, and no models.

    Attributes:
        parameters: Names of the parameters that are changed.
        buffers: Names of the buffers that are clipped with them.
        size: Number of parameters d.
        remembers: Whether clients remember what compression leaves out.
    """

    def __init__(
        self,
        transforms: Iterable[Transform],
        layout: StateLayout,
        returns: Collection[str],
        gradients: bool = False,
    ) -> None:
        self.transforms = sorted(transforms, key=lambda one: STAGES.index(one.stage))
        sent = {*returns} - {*layout.own, *layout.extra}
        sent = {name for name in sent if layout.template[name].is_floating_point()}
        self.parameters = [name for name in layout.shared_parameters if name in sent]
        self.buffers = [name for name in layout.averaged if name in sent and not gradients]
        self.gradients = gradients
        self.layout = layout
        self.size = sum(layout.template[name].numel() for name in self.parameters)
        self.remembers = any(one.error_feedback for one in self.transforms)

    def __bool__(self) -> bool:
        """Whether anything is changed."""
        return bool(self.transforms and self.parameters)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of the updates: that of the most exact parameter."""
        dtype = torch.float32
        for name in (*self.parameters, *self.buffers):
            dtype = torch.promote_types(dtype, self.layout.template[name].dtype)
        return dtype

    @property
    def slot(self) -> str:
        """Where a client remembers what is left out: a place for each set of parameters."""
        slot = "transforms.gradients" if self.gradients else "transforms"
        if self.parameters == [*self.layout.shared_parameters]:
            return slot
        return f"{slot}.{hashlib.sha256(' '.join(self.parameters).encode()).hexdigest()[:16]}"

    def empty_memory(self, count: int, device: torch.device) -> TensorDict:
        """Return what clients ``[C]`` remember at first: nothing was left out."""
        zeros = torch.zeros(1, self.size, dtype=self.dtype, device=device)
        return TensorDict({ERROR: zeros.expand(count, -1)}, batch_size=[count])

    @property
    def bytes_kept(self) -> int:
        """Bytes that each client remembers."""
        return self.size * self.dtype.itemsize * self.remembers

    @cached_property
    def bytes_saved(self) -> int:
        """Bytes by which a message is smaller than one with all parameters."""
        if not self:
            return 0
        dense = self.size * self.dtype.itemsize
        packed = min([dense, *map(self._nbytes, self._that_pack)])
        full = sum(self.layout.template[name].nbytes for name in self.parameters)
        return full - packed if packed < dense else 0

    def run(
        self,
        sent: Mapping[str, Tensor],
        updates: ClientUpdates,
        memory: TensorDict | None,
        random: Callable[[int], torch.Generator],
        check: bool = False,
    ) -> tuple[ClientUpdates, TensorDict | None]:
        """Return the updates as they travel, and what the clients remember of them ``[C]``.

        Where nothing changes, the tensors are the trained ones.

        Args:
            sent: What these clients were sent ``[C]``.
            updates: What they have trained.
            memory: What they remember ``[C]``, or ``None`` for nothing.
            random: Returns what draws random numbers for a client.
            check: Whether to :meth:`check` the first client's message.
        """
        if not self or not len(updates.clients):
            return updates, None
        states = updates.states
        before = self._joined(states, self.parameters + self.buffers, sent)
        w = before
        if memory is not None:
            w = before.clone()
            w[:, : self.size] += memory[ERROR].to(before)
        draw = Draw([random(client) for client in updates.clients.tolist()], w[:, : self.size])
        left = None
        for one in self.transforms:
            if one.stage == "clip":
                w = _changed(one, w, draw)
                continue
            short = w[:, : self.size]
            changed = _changed(one, short, draw)
            if one.error_feedback:
                left = short - changed
            w = torch.cat([changed, w[:, self.size :]], dim=1)
        equal = w == before
        # A sparse message is the difference; only a full one can hold the model as it was trained.
        same = equal.all(dim=1) & (self.bytes_saved == 0)
        as_trained = dict.fromkeys(self.parameters, same)
        as_trained |= dict.fromkeys(self.buffers, equal[:, self.size :].all(dim=1))
        message = dict(entries(states))
        for name, part in self._parts(w, self.parameters + self.buffers):
            here = states[name]
            moved = self._moved(sent, name, part, here)
            rows = expand_as_right(as_trained[name], here)
            message[name] = torch.where(rows, here, moved)
        memory = None
        if self.remembers and left is not None:
            memory = TensorDict({ERROR: left}, batch_size=[len(left)])
        how: dict[str, Any] = {"states": TensorDict(message, batch_size=states.batch_size)}
        if self.bytes_saved:
            if check:
                self.check(w[0, : self.size])
            how |= {"bytes_saved": self.bytes_saved, "changes": w[:, : self.size]}
        return replace(updates, **how), memory

    # On the wire

    def check(self, change: Tensor) -> None:
        """Raise if a changed update ``[d]`` does not come out of its message as it went in.

        Raises:
            ConfigurationError: Naming the transform.
        """
        one = self._packing
        parts = one.pack(change.cpu()) or {}
        size = sum(part.nbytes for part in parts.values())
        if size != self._nbytes(one):
            raise ConfigurationError(
                f"{type(one).__name__}: nbytes() says {self._nbytes(one)}, but what pack() returns "
                f"has {size} bytes"
            )
        if not torch.equal(one.unpack(parts, self.size).to(change.cpu()), change.cpu()):
            raise ConfigurationError(
                f"{type(one).__name__}: unpack() does not return the update that pack() was given"
            )

    def pack(self, state: Mapping[str, Tensor], change: Tensor) -> dict[str, Tensor]:
        """Return what a message holds in place of a client's state.

        Args:
            state: What it sends.
            change: Its changed update ``[d]``.
        """
        parts = self._packing.pack(change.cpu()) or {}
        kept = {name: value for name, value in state.items() if name not in self.parameters}
        return kept | {f"{_PACKED}{name}": part for name, part in parts.items()}

    def packed_like(self, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of the shapes and types that :meth:`pack` gives for such a state."""
        kept = {name: value for name, value in like.items() if name not in self.parameters}
        return kept | self._parts_like

    def unpack(self, parts: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the state that :meth:`pack` was given.

        Args:
            parts: What it returned.
            sent: What the client was sent.

        Raises:
            ValueError: If nothing can have been packed so.
        """
        state = {name: value for name, value in parts.items() if not name.startswith(_PACKED)}
        packed = {n.removeprefix(_PACKED): v for n, v in parts.items() if n not in state}
        change = self._packing.unpack(packed, self.size).unsqueeze(0)
        for name, part in self._parts(change, self.parameters):
            like = self.layout.template[name].cpu().unsqueeze(0)
            state[name] = self._moved(sent, name, part, like)[0]
        return state

    @property
    def _packing(self) -> Transform:
        """The transform that makes the smallest message."""
        return min(self._that_pack, key=self._nbytes)

    @property
    def _that_pack(self) -> list[Transform]:
        return [one for one in self.transforms if type(one).pack is not Transform.pack]

    def _nbytes(self, transform: Transform) -> int:
        return transform.nbytes(self.size, self.dtype.itemsize)

    @cached_property
    def _parts_like(self) -> dict[str, Tensor]:
        parts = self._packing.packed_like(self.size, self.dtype)
        return {f"{_PACKED}{name}": part for name, part in parts.items()}

    def _moved(self, sent: Mapping[str, Tensor], name: str, part: Tensor, like: Tensor) -> Tensor:
        change = part.view(-1, *like.shape[1:]).to(like)
        return change if self.gradients else sent[name].to(like) + change

    def _joined(
        self, states: TensorDict, names: Sequence[str], sent: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the updates ``[C, d]``: all entries of each client in one row."""
        parts = []
        for name in names:
            here = states[name]
            if not self.gradients:
                if name not in sent:
                    raise ConfigurationError(
                        f"{self.transforms[0].title} changes what clients send by what they were "
                        f"sent, but they were not sent {name}"
                    )
                here = here - sent[name].to(here)
            parts.append(here.flatten(1) if here.dim() > 1 else here.unsqueeze(1))
        return torch.cat([part.to(self.dtype) for part in parts], dim=1)

    def _parts(self, updates: Tensor, names: Sequence[str]) -> list[tuple[str, Tensor]]:
        """Return the named entries of updates ``[C, d]``."""
        sizes = [self.layout.template[name].numel() for name in names]
        return [*zip(names, updates.split(sizes, dim=1), strict=True)]

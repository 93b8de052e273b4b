"""Finds undeclared state of a server callback."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from pflight.clients import Clients
from pflight.errors import ConfigurationError
from pflight.server_callback import ServerCallback

_ELSEWHERE = {"clients", "server", "modules", "round"}  # saved elsewhere, or never saved


class CheckState(L.Callback):
    """Ends a run with an error if the server callback keeps undeclared state.

    Give it to a Trainer for a short run of your method, of three rounds or more. Before each round
    it deletes the attributes that earlier rounds have set. It keeps the ones that
    :meth:`~pflight.callbacks.ServerCallback.add_state` has declared. Results don't change.

    Raises:
        ConfigurationError: Naming the attribute. A later round uses it, or it was changed in place.

    Example:
        >>> trainer = L.Trainer(max_epochs=3, callbacks=[CheckState()], logger=False)
    """

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Note all attributes, and check each round."""
        callback: ServerCallback = pl_module.server_callback
        self._start = {**vars(callback)}
        self._prints = {name: fingerprint(value) for name, value in _others(callback).items()}
        self._forgotten: set[str] = set()
        run_round = callback.round

        def lacking(self_: Any, name: str) -> Any:
            if self_ is callback and name in self._forgotten:
                raise _undeclared(callback, name)  # hasattr() would hide an AttributeError
            raise AttributeError(
                f"{type(self_).__name__!r} object has no attribute {name!r}", name=name, obj=self_
            )

        def checked_round(cohort: Tensor) -> None:
            self._forget(callback)
            kind = type(callback)
            kind.__getattr__ = lacking  # type: ignore[attr-defined]
            try:
                run_round(cohort)
            finally:
                del kind.__getattr__  # type: ignore[attr-defined]

        vars(callback)["round"] = checked_round

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Raise if an attribute from before the first round has been changed in place."""
        callback: ServerCallback = pl_module.server_callback
        vars(callback).pop("round", None)
        for name, value in _others(callback).items():
            same = name in self._start and value is self._start[name]
            if same and fingerprint(value) != self._prints[name]:
                raise _undeclared(callback, name)

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Restore the callback."""
        vars(pl_module.callback or self).pop("round", None)

    def _forget(self, callback: ServerCallback) -> None:
        for name, value in _others(callback).items():
            if name not in self._start or value is not self._start[name]:
                if hasattr(type(callback), name):  # it would come back from the class
                    raise _undeclared(callback, name)
                delattr(callback, name)
                self._forgotten.add(name)


def _others(callback: ServerCallback) -> dict[str, Any]:
    """Return the attributes that are neither declared nor saved elsewhere."""
    known = {*callback._states, *callback.modules, *_ELSEWHERE}
    return {name: value for name, value in vars(callback).items() if name not in known}


def _undeclared(callback: ServerCallback, name: str) -> ConfigurationError:
    return ConfigurationError(
        f"{type(callback).__name__} keeps {name!r} from round to round and does not declare it, so "
        f"that a checkpoint lacks it: call self.add_state({name!r}, ...) in setup_server() or, if "
        "it lasts for one round, make it anew in on_round_start()"
    )


def fingerprint(value: Any, seen: frozenset[int] = frozenset()) -> Any:
    """Return a fingerprint of an attribute's value. Other values have other fingerprints."""
    if isinstance(value, Tensor):
        if value.is_meta:
            return tuple(value.shape)
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return tuple(value.shape), value.dtype, hashlib.sha256(flat.numpy().tobytes()).digest()
    if isinstance(value, str | bytes | int | float | complex | None):
        return repr(value)
    if id(value) in seen:
        return id(value)
    seen |= {id(value)}
    if isinstance(value, nn.Module):
        return fingerprint(dict(value.state_dict()), seen)
    if isinstance(value, Mapping):
        return [(fingerprint(k, seen), fingerprint(v, seen)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return [fingerprint(entry, seen) for entry in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(fingerprint(entry, seen)) for entry in value)
    if isinstance(value, Clients | L.Trainer | type) or not hasattr(value, "__dict__"):
        return id(value)
    return id(value), fingerprint(vars(value), seen)

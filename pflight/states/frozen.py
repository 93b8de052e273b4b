"""Frozen weights. Checkpoints identify them by digests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch import Tensor

from pflight.data.fingerprint import bytes_of
from pflight.errors import ConfigurationError

from .state import StateLayout


def digests_of(layout: StateLayout) -> dict[str, str]:
    """Return the BLAKE2b-128 digest of each frozen entry, by name."""
    return {name: _digest(name, layout.template[name]) for name in layout.frozen}


def _digest(name: str, tensor: Tensor) -> str:
    form = f"{name} {tensor.dtype} {[*tensor.shape]}".encode()
    digest = hashlib.blake2b(form, digest_size=16)
    digest.update(bytes_of(tensor))
    return digest.hexdigest()


def check_frozen(saved: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Raise unless a module has the frozen weights of a checkpoint's training.

    Args:
        saved: The digests in the checkpoint.
        here: The digests of the module.

    Raises:
        ConfigurationError: Naming an entry that differs.
    """
    if others := [name for name in saved if saved[name] != here.get(name)]:
        more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
        raise ConfigurationError(
            f"this run was trained on other frozen weights: {others[0]} differs{more}; checkpoints "
            "don't hold them, unless save_frozen=True"
        )

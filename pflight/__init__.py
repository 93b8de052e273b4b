"""Personalised federated learning as plain PyTorch Lightning."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .command.version import __version__

if TYPE_CHECKING:
    from . import callbacks, datamodules, engines, models, modifiers, transforms
    from .errors import ClientError, ConfigurationError
    from .federation import Federation
    from .runs.allocator import keep_freed_memory
    from .states.layers import Layers

__all__ = [
    "ClientError",
    "ConfigurationError",
    "Federation",
    "Layers",
    "__version__",
    "callbacks",
    "datamodules",
    "engines",
    "keep_freed_memory",
    "models",
    "modifiers",
    "transforms",
]

_HOMES = {
    "ClientError": "pflight.errors",
    "ConfigurationError": "pflight.errors",
    "Federation": "pflight.federation",
    "Layers": "pflight.states.layers",
    "keep_freed_memory": "pflight.runs.allocator",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used (PEP 562), to keep ``import pflight`` fast."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in __all__:
        return import_module(f"pflight.{name}")
    raise AttributeError(f"module 'pflight' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

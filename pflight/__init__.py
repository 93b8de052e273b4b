"""Personalised federated learning as plain PyTorch Lightning."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pflight import callbacks, datamodules, engines, models
    from pflight.errors import ClientError, ConfigurationError
    from pflight.federation import Federation
    from pflight.layers import Layers

__version__ = "0.1.0"

__all__ = [
    "ClientError",
    "ConfigurationError",
    "Federation",
    "Layers",
    "callbacks",
    "datamodules",
    "engines",
    "models",
]

_HOMES = {
    "ClientError": "pflight.errors",
    "ConfigurationError": "pflight.errors",
    "Federation": "pflight.federation",
    "Layers": "pflight.layers",
}


def __getattr__(name: str) -> Any:
    """Import on first use (PEP 562), so that ``import pflight`` costs next to nothing."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in __all__:
        return import_module(f"pflight.{name}")
    raise AttributeError(f"module 'pflight' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

"""How a cohort's local training runs."""

from pflight.local.setting import Setting
from pflight.updates import ClientFailure, ClientUpdates, Evaluation, Kept

from .base import Engine
from .choice import Choice, EngineName, build_engine
from .sequential import SequentialEngine
from .vectorized import VectorizedEngine

__all__ = [
    "Choice",
    "ClientFailure",
    "ClientUpdates",
    "Engine",
    "EngineName",
    "Evaluation",
    "Kept",
    "SequentialEngine",
    "Setting",
    "VectorizedEngine",
    "build_engine",
]

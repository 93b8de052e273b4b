"""How a cohort's local training runs."""

from .base import Engine, Setting
from .choice import Choice, EngineName, build_engine
from .sequential import SequentialEngine
from .updates import ClientFailure, ClientUpdates, Evaluation, Kept
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

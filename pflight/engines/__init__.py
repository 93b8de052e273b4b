"""How a cohort's local training runs."""

from .choice import Choice, EngineName, build_engine
from .sequential import SequentialEngine
from .updates import ClientFailure, ClientUpdates, Evaluation, Kept
from .vectorized import VectorizedEngine

__all__ = [
    "Choice",
    "ClientFailure",
    "ClientUpdates",
    "EngineName",
    "Evaluation",
    "Kept",
    "SequentialEngine",
    "VectorizedEngine",
    "build_engine",
]
